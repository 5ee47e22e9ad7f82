"""The page of sample.py --explain: how likely each token was, and what it attended to."""

import base64
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gptling.files import UserError, replace


def visible(raw: bytes) -> str:
    """A token as a label: white space as symbols, unprintable characters as code points."""
    text = raw.decode("utf-8", "backslashreplace")
    symbols = {" ": "·", "\n": "↵", "\t": "→"}
    return "".join(symbols.get(c) or (c if c.isprintable() else f"U+{ord(c):04X}") for c in text)


class RecordAttention(TorchFunctionMode):
    """While active, keeps the weights (nh, T, S) of every call of PyTorch's attention for one text:
    what it gives for the identity matrix as values, without dropout. Rows sum to 1, or to 0."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.record(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def record(self, query, key, value, attn_mask=None, dropout_p=0.0, *more, **options):
        value = torch.eye(key.size(-2), dtype=key.dtype).expand(*key.shape[:-1], -1)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *more, **options)
        self.weights.append(y.nan_to_num().flatten(0, -3))


def logits_and_attention(model: torch.nn.Module, idx: torch.Tensor):
    """Return the logits (T, V) of one text idx (1, T), and the weights (n, nh, T, T) of the n calls
    of PyTorch's attention that the model makes. Raises UserError for what a page cannot show."""
    with RecordAttention() as attention:
        logits, _ = model(idx)
    weights, T = attention.weights, idx.size(1)
    squares = [shape[1:] for shape in {w.shape for w in weights}] == [(T, T)]
    if not squares or any(w.triu(1).any() for w in weights):
        what = f"F.scaled_dot_product_attention of all {T} tokens to themselves and earlier ones"
        raise UserError(f"--explain: model.py must call {what}, with equal numbers of heads")
    return logits[0], torch.stack(weights)


@torch.no_grad()
def explain(model: torch.nn.Module, tokenizer, ids: list[int], n_prompt: int) -> dict:
    """Return the data of the page: the first tokens of a text, whose first n_prompt are the prompt.
    attention: base64 of 65535 times the lower triangles of the weights in uint16."""
    shown = ids[: min(256, model.config.block_size)]
    idx, T = torch.tensor([shown]), len(shown)
    logits, weights = logits_and_attention(model, idx)
    logits = logits[:-1].masked_fill(~model.valid_tokens, float("-inf"))
    probs = logits.softmax(dim=-1)  # (T - 1, V)
    token_probs = probs.gather(1, idx[0, 1:, None])  # (T - 1, 1)
    top = probs.topk(min(10, int(model.valid_tokens.sum())))
    triangles = weights[:, :, *torch.tril_indices(T, T)]  # (n_layer, nh, T (T + 1) / 2)
    codes = (65535 * triangles).round().numpy().astype("<u2")
    decode = tokenizer.decode_single_token_bytes
    rows = zip(top.indices.tolist(), top.values.tolist(), shown[1:], strict=True)
    return {
        "call": "layer" if len(weights) == model.config.n_layer else "attention call",
        "n_layer": weights.size(0),
        "n_head": weights.size(1),
        "n_prompt": min(n_prompt, T),
        "omitted": len(ids) - T,
        "tokens": [visible(decode(token)) for token in shown],
        "probabilities": token_probs[:, 0].tolist(),
        "ranks": ((probs > token_probs).sum(dim=1) + 1).tolist(),
        "alternatives": [  # the ten likeliest: [label, probability, whether it is the token]
            [[visible(decode(i)), p, i == token] for i, p in zip(*likeliest, strict=True)]
            for *likeliest, token in rows
        ],
        "attention": base64.b64encode(codes.tobytes()).decode(),
    }


def write_page(path: Path, data: dict):
    """Write what explain returns as HTML, whole or not at all."""
    text = json.dumps(data).replace("<", "\\u003c")  # so that no token ends the script element
    template = Path(__file__).with_name("explain_template.html").read_text(encoding="utf-8")
    replace(path, template.replace("__DATA__</script>", f"{text}</script>").encode())
