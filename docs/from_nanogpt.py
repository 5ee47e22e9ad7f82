"""nanoGPT's ckpt.pt to a Hugging Face directory, which sample.py and --init_from read:

    python docs/from_nanogpt.py ckpt.pt out/nanogpt                   # GPT-2's tokens
    python docs/from_nanogpt.py ckpt.pt out/nanogpt data/shakespeare  # those of a prepared text

nanoGPT has the exact GELU and gptling GPT-2's tanh form, so the logits differ a little.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from gptling.gpt2_format import save
from gptling.tokenizers import build_tokenizer, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig

file, target, *data = sys.argv[1:]
checkpoint = torch.load(file, map_location="cpu", weights_only=True)
weights = {n.removeprefix("_orig_mod."): t for n, t in checkpoint["model"].items()}
weights = {n.removeprefix("transformer."): t for n, t in weights.items()}
model = GPT(GPTConfig(**checkpoint["model_args"]))
model.load_state_dict({n: t for n, t in weights.items() if not n.endswith(".attn.bias")})
tokenizer = load_tokenizer(data[0]) if data else build_tokenizer("gpt2")
save(model, target, tokenizer_to_json(tokenizer))
