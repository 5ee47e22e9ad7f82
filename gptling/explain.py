"""The page of sample.py --explain: how likely each token was, and what it attended to."""

import base64
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gptling.files import UserError, replace

SYMBOLS = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})


def visible(raw: bytes) -> str:
    """A token as a label, b" cat" as "·cat": symbols for white space, code points for unprintable
    characters."""
    text = raw.decode("utf-8", "backslashreplace").translate(SYMBOLS)
    return "".join(c if c.isprintable() else f"U+{ord(c):04X}" for c in text)


class RecordAttention(TorchFunctionMode):
    """While active, keeps the weights (nh, T, S) of every call of PyTorch's attention for one text:
    what it gives for the identity matrix as values. Rows sum to 1, or to 0."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.record(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def record(self, query, key, value, *more, **options):
        one_hot = torch.eye(key.size(-2), dtype=key.dtype)  # (S, S)
        value = one_hot.expand(*key.shape[:-1], -1)  # (1, nh, S, S)
        y = F.scaled_dot_product_attention(query, key, value, *more, **options)
        self.weights.append(y.nan_to_num().flatten(0, -3))


def logits_and_attention(model: torch.nn.Module, idx: torch.Tensor):
    """Return the logits (T, V) of one text idx (1, T), and the weights (n, nh, T, T) of the n calls
    of PyTorch's attention that the model makes. Raises UserError for what a page cannot show."""
    with RecordAttention() as attention:
        logits, _ = model(idx)
    T = idx.size(1)
    shapes = {w.shape[1:] for w in attention.weights}
    if shapes != {(T, T)} or any(w.triu(1).any() for w in attention.weights):
        what = f"F.scaled_dot_product_attention of all {T} tokens to themselves and earlier ones"
        raise UserError(f"--explain: model.py must call {what}")
    return logits[0], torch.stack(attention.weights)


@torch.no_grad()
def explain(model: torch.nn.Module, tokenizer, ids: list[int], n_prompt: int) -> dict:
    """Return the data of the page: the first tokens of a text, whose first n_prompt are the prompt.
    alternatives: for each token the ten likeliest, [label, probability, whether it is the token].
    attention: base64 of 65535 times the lower triangles of the weights in uint16."""

    def label(token: int) -> str:
        return visible(tokenizer.decode_single_token_bytes(token))

    shown = ids[: min(256, model.config.block_size)]
    T = len(shown)
    idx = torch.tensor([shown])
    logits, weights = logits_and_attention(model, idx)
    logits = logits.masked_fill(~model.valid_tokens, float("-inf"))
    probs = logits[:-1].softmax(dim=-1)  # (T - 1, V)
    token_probs = probs.gather(1, idx[0, 1:, None])  # (T - 1, 1)
    ranks = 1 + (probs > token_probs).sum(dim=1)
    n = min(10, int(model.valid_tokens.sum()))
    alternatives = []
    for row, token in zip(probs, shown[1:], strict=True):
        likeliest = row.topk(n).indices.tolist()
        entries = [[label(i), row[i].item(), i == token] for i in likeliest]
        alternatives.append(entries)
    triangles = weights[:, :, *torch.tril_indices(T, T)]  # (n_layer, nh, T (T + 1) / 2)
    codes = (65535 * triangles).round()
    attention = codes.numpy().astype("<u2").tobytes()
    return {
        "call": "layer" if len(weights) == model.config.n_layer else "attention call",
        "n_layer": weights.size(0),
        "n_head": weights.size(1),
        "n_prompt": min(n_prompt, T),
        "omitted": len(ids) - T,
        "tokens": [label(token) for token in shown],
        "probabilities": token_probs[:, 0].tolist(),
        "ranks": ranks.tolist(),
        "alternatives": alternatives,
        "attention": base64.b64encode(attention).decode(),
    }


def write_page(path: Path, data: dict):
    """Write what explain returns as HTML, whole or not at all."""
    text = json.dumps(data).replace("<", "\\u003c")  # so that no token ends the script element
    template = Path(__file__).with_name("explain_template.html").read_text(encoding="utf-8")
    replace(path, template.replace("__DATA__</script>", f"{text}</script>").encode())
