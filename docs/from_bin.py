"""Token files of llm.c and modded-nanogpt to data/NAME:

    python docs/from_bin.py fineweb_train_*.bin fineweb_val_*.bin fineweb

Files with "val" in their name are the validation split. The tokens are GPT-2's.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from gptling.tokenizers import build_tokenizer, tokenizer_to_json

*names, name = sys.argv[1:]
tokenizer, data, fingerprint = build_tokenizer("gpt2"), Path("data") / name, hashlib.sha256()
data.mkdir(parents=True)
meta = {"format": 1, "tokenizer": "gpt2", "vocab_size": tokenizer.n_vocab}
for split in ("train", "val"):
    files = sorted(file for file in names if ("val" in Path(file).name) == (split == "val"))
    shards = [np.memmap(file, "<u2", "r", offset=1024) for file in files]  # after the header
    shards = [np.concatenate(shards)] if split == "val" else shards
    for i, ids in enumerate(shards):
        np.save(data / ("val.npy" if split == "val" else f"train-{i:05}.npy"), ids)
        fingerprint.update(ids)
    meta[split] = {"tokens": sum(map(len, shards))}
meta["sha256"] = fingerprint.hexdigest()
(data / "tokenizer.json").write_text(tokenizer_to_json(tokenizer), encoding="utf-8")
(data / "meta.json").write_text(json.dumps(meta, indent=2))
