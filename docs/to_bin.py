"""data/NAME to token files of llm.c and modded-nanogpt: python docs/to_bin.py data/fineweb

Writes train-00000.bin ... and val.bin into this directory, unless they exist. Their ids have 16
bits, so the tokenizer can have at most 65,536 tokens, as gpt2's. These projects put the end-of-text
token before a document, and prepare.py puts it after.
"""

import sys
from pathlib import Path

import numpy as np

for file in sorted(Path(sys.argv[1]).glob("*.npy")):
    ids = np.load(file, mmap_mode="r")
    if ids.dtype != np.uint16:
        sys.exit(f"{file}: more than 65,536 tokens: prepare the text with another --tokenizer")
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(ids)  # magic number, version
    with open(f"{file.stem}.bin", "xb") as f:
        f.write(header.tobytes())
        f.write(ids.astype("<u2").tobytes())
