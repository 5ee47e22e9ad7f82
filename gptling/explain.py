"""The page of sample.py --explain: how likely each token was, and what it attended to.

Reference: nostalgebraist 2020, "interpreting GPT: the logit lens",
https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from gptling.files import UserError, write_whole

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

    def __torch_function__(self, func, types, args, kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.record(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def record(self, query, key, value, *more, **options):
        one_hot = torch.eye(key.size(-2), dtype=key.dtype)  # (S, S)
        value = one_hot.expand(*key.shape[:-1], -1)  # (1, nh, S, S)
        y = F.scaled_dot_product_attention(query, key, value, *more, **options)
        self.weights.append(y.flatten(0, -3))


def run_and_record(model: torch.nn.Module, idx: torch.Tensor):
    """Return the logits (T, V) of one text idx (1, T), the weights (n, nh, T, T) of the n calls of
    PyTorch's attention that the model makes, and the logit lens (n_layer + 1, T, V): the logits
    that x would have after the embeddings and after each block if ln_f came next. The last must be
    the model's own. An edited model.py may compute them otherwise: then the lens is []. Raises
    UserError for attention that a page cannot show."""
    layers = [*getattr(model, "h", []), getattr(model, "ln_f", None)]
    inputs = []  # x (1, T, C) before each of them

    def keep(layer, arguments):
        if layer in layers:
            inputs.append(arguments[0].clone())  # because a block may add to x in place

    with RecordAttention() as attention, register_module_forward_pre_hook(keep):
        logits, _ = model(idx)
    T = idx.size(1)
    shapes = {w.shape[1:] for w in attention.weights}
    if shapes != {(T, T)} or any(w.triu(1).any() for w in attention.weights):
        raise UserError(
            "--explain: model.py must call F.scaled_dot_product_attention "
            f"on all {T} tokens, with a causal mask"
        )
    weights = torch.stack(attention.weights)
    if len(layers) > 1 and [x.size(1) for x in inputs] == len(layers) * [T]:
        lens = model.logits(model.ln_f(torch.cat(inputs)))
        if torch.allclose(lens[-1:], logits, atol=1e-4):
            return logits[0], weights, lens
    return logits[0], weights, []


def predictions(model, decode: Callable, logits: torch.Tensor, tokens: list[int], n: int) -> list:
    """Return what logits (T, V) say of each token but the first: its probability, its rank, and the
    n likeliest in its place, [label, probability, whether it is the token]."""
    places = []
    logits = logits.masked_fill(~model.valid_tokens, -torch.inf)
    probs = logits[:-1].softmax(dim=-1)
    n = min(n, int(model.valid_tokens.sum()))
    for row, token in zip(probs, tokens[1:], strict=True):
        likeliest = row.topk(n).indices.tolist()
        entries = [[visible(decode(i)), row[i].item(), i == token] for i in likeliest]
        its_own = row[token].item()
        n_better = (row > its_own).sum().item()
        places.append([its_own, 1 + n_better, entries])
    return places


@torch.no_grad()
def explain(model: torch.nn.Module, tokenizer, ids: list[int], n_prompt: int) -> dict:
    """Return the data of the page: the first tokens of a text, whose first n_prompt are the prompt.
    places: the predictions for each token. lens: each layer's, with the likeliest token alone.
    attention: base64 of 65535 times the lower triangles of the weights in uint16."""
    shown = ids[: min(256, model.config.block_size)]
    T = len(shown)
    logits, weights, lens = run_and_record(model, torch.tensor([shown]))
    decode = tokenizer.decode_single_token_bytes
    triangles = weights[:, :, *torch.tril_indices(T, T)]  # (n_layer, nh, T (T + 1) / 2)
    codes = (65535 * triangles).round().numpy().astype("<u2")
    return {
        "call": "layer" if len(weights) == model.config.n_layer else "attention call",
        "n_layer": len(weights),
        "n_head": weights.size(1),
        "n_prompt": min(n_prompt, T),
        "omitted": len(ids) - T,
        "tokens": [visible(decode(token)) for token in shown],
        "places": predictions(model, decode, logits, shown, 10),
        "lens": [predictions(model, decode, x, shown, 1) for x in lens],
        "attention": base64.b64encode(codes).decode(),
    }


def write_page(path: Path, data: dict):
    """Write what explain returns as HTML, whole or not at all."""
    text = json.dumps(data).replace("<", "\\u003c")  # so that no token ends the script element
    template = Path(__file__).with_name("explain_template.html").read_text(encoding="utf-8")
    write_whole(path, template.replace("__DATA__", text).encode())
