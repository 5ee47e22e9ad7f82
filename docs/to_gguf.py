"""For llama.cpp, Ollama, LM Studio: python docs/to_gguf.py out/mine/checkpoint-500 mine.gguf"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

END = "<|endoftext|>"
# llama.cpp has split patterns of its own: what tells that ours is one of them, and its name there.
SPLITS = {r"\p{Lu}": "gpt-4o", r"\p{N}{1,3}": "llama-bpe", r" ?\p{N}+": "gpt-2", r"[\s\S]": "gpt-2"}
source = Path(sys.argv[1])
config = json.loads((source / "config.json").read_bytes())
if config["model_type"] != "gpt2":
    sys.exit(f"{source}: its architecture is {config['model_type']}, which is not GPT-2's")
tokenizer = json.loads((source / "tokenizer.json").read_bytes())
weights = load_file(source / "model.safetensors")
vocab = tokenizer["model"]["vocab"]
merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
if not merges:  # char puts a character together byte by byte; byte needs none, llama.cpp needs one
    merges = [f"{t[:i]} {t[i]}" for t in vocab for i in range(1, len(t))] or [f"{END} {END}"]
pattern = tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
split = next((name for part, name in SPLITS.items() if part in pattern), None)
if split is None:
    sys.exit(f"{source}: llama.cpp has no pattern like {pattern}")
names = {id: token for token, id in vocab.items()}
names |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
wte = weights["transformer.wte.weight"][: max(names) + 1]  # without what pads the vocabulary
if END not in names.values():  # llama.cpp would end at token 11
    names[len(wte)] = END
    wte = np.vstack([wte, wte.mean(axis=0)])  # its logit is the mean: never the highest
tokens = [names.get(id, f"[unused {id}]") for id in range(len(wte))]
writer, end = gguf.GGUFWriter(sys.argv[2], "gpt2"), tokens.index(END)
fields = dict(
    block_count=config["n_layer"], context_length=config["n_positions"],
    embedding_length=config["n_embd"], feed_forward_length=4 * config["n_embd"],
    head_count=config["n_head"], layer_norm_eps=1e-5, tokenizer_model="gpt2", tokenizer_pre=split,
    token_types=[1 if token in vocab else 3 for token in tokens],  # normal, control
    token_list=tokens, token_merges=merges, bos_token_id=end, eos_token_id=end, add_bos_token=False,
)  # fmt: skip
for name in fields:
    getattr(writer, f"add_{name}")(fields[name])
their = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config["n_layer"])
for name, tensor in (weights | {"transformer.wte.weight": wte}).items():
    tensor = tensor.T if ".h." in name and tensor.ndim == 2 else tensor  # GPT-2's are transposed
    writer.add_tensor(their.get_name(name, (".weight", ".bias")), tensor)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
