"""The page of sample.py --explain: how likely each token was, and what it attended to."""

import base64
import json
import sys
import tempfile
from pathlib import Path

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gptling.cli import UserError
from gptling.files import replace, writing

PAGE_WEIGHTS = 5_000_000  # of attention, 2 bytes each: deep models show fewer tokens


def visible(raw: bytes) -> str:
    """A token as a label: white space as symbols, what has no look by its number."""
    text = raw.decode("utf-8", "backslashreplace")
    symbols = {" ": "·", "\n": "↵", "\t": "→"}
    return "".join(symbols.get(c) or (c if c.isprintable() else f"U+{ord(c):04X}") for c in text)


class Attended(TorchFunctionMode):
    """The values v and the outcome y of each call of PyTorch's attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **kwargs or {})
        if func is F.scaled_dot_product_attention:
            self.calls.append((args[2], y))
        return y


def logits_and_attention(model: nn.Module, idx: torch.Tensor):
    """Logits (T, V) of one text idx (1, T), and the weights (n, nh, T, T) of each call of a layer
    that has a method attention_weights, n_layer calls in GPT. Raises UserError for a model without
    one, and where weights times values is not what PyTorch's attention gave in that layer."""
    weights, attended, T = [], Attended(), idx.size(1)  # weights: n times (1, nh, T, T)

    def keep_weights(layer, args, options):
        # Options that are None, as `cache` is here, need not be known to attention_weights.
        given = {name: value for name, value in options.items() if value is not None}
        try:
            weights.append(layer.attention_weights(*args, **given))
        except TypeError as error:  # an argument that forward alone has
            raise UserError(f"--explain: {error}") from None
        attended.calls.clear()

    def compare(layer, args, options, output):
        which = f"call {len(weights)} of a {type(layer).__name__}"
        if weights[-1].shape[-2:] != (T, T):
            raise UserError(f"--explain: {which} has weights of another shape than ({T}, {T})")
        if not attended.calls:
            words = "does not call PyTorch's attention: what its attention_weights say is shown"
            print(f"--explain: {which} {words}, unchecked", file=sys.stderr)
        for v, y in attended.calls:
            v = v.repeat_interleave(y.size(1) // v.size(1), dim=1)  # (1, nh, T, hs)
            if (weights[-1] @ v - y).abs().max() > 1e-3 * y.std():
                raise UserError(f"--explain: {which} is not what its attention_weights say")

    layers = dict.fromkeys(m for m in model.modules() if hasattr(m, "attention_weights"))
    hooks = [layer.register_forward_pre_hook(keep_weights, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(compare, with_kwargs=True) for layer in layers]
    try:
        with attended:
            logits, _ = model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    if not weights:
        raise UserError("--explain: no layer of this model has a method attention_weights")
    return logits[0], torch.cat(weights)


@torch.no_grad()
def explain(model: nn.Module, tokenizer: tiktoken.Encoding, ids: list[int], n_prompt: int) -> dict:
    """What the page shows of a text whose first n_prompt ids are the prompt, by one forward pass.

    Of each token but the first, given those before it (temperature 1, no filter): its probability
    and rank, and the ten likeliest in its place as [label, probability, whether it is the token];
    attention: base64 of 65535 times the lower triangles of attention_weights in uint16."""
    fit = int((2 * PAGE_WEIGHTS / model.config.n_layer / model.config.n_head) ** 0.5)
    room = min(256, model.config.block_size, fit)  # tokens on the page
    # From the beginning, so that each token has what it had when it was drawn; of a prompt that
    # takes more than half of the page, only its end where the text does not fit.
    start = max(0, min(n_prompt - room // 2, len(ids) - room))
    shown = ids[start : start + room]
    T = len(shown)
    idx = torch.tensor([shown], device=next(model.parameters()).device)
    logits, weights = logits_and_attention(model, idx)
    logits = logits[:-1].masked_fill(~model.valid_tokens, float("-inf"))
    probs = logits.softmax(dim=-1)  # (T - 1, V)
    token_probs = probs.gather(1, idx[0, 1:, None])  # (T - 1, 1)
    top = probs.topk(min(10, int(model.valid_tokens.sum())))
    triangles = weights[:, :, *torch.tril_indices(T, T)]  # (n_layer, nh, T (T + 1) / 2)
    codes = (65535 * triangles).round().cpu().numpy().astype("<u2")
    decode = tokenizer.decode_single_token_bytes
    rows = zip(top.indices.tolist(), top.values.tolist(), shown[1:], strict=True)
    return {
        "n_layer": weights.size(0),
        "n_head": weights.size(1),
        "n_prompt": n_prompt - start,
        "omitted": {"before": start, "after": len(ids) - start - T},
        "tokens": [visible(decode(token)) for token in shown],
        "probabilities": token_probs[:, 0].tolist(),
        "ranks": ((probs > token_probs).sum(dim=1) + 1).tolist(),
        "alternatives": [
            [[visible(decode(i)), p, i == token] for i, p in zip(*likeliest, strict=True)]
            for *likeliest, token in rows
        ],
        "attention": base64.b64encode(codes.tobytes()).decode(),
    }


def check_page(path: Path):
    """Raises UserError where a page cannot be written: before anything is computed for it."""
    with writing(path):
        if path.is_dir():
            raise UserError(f"{path}: it is a directory")
        tempfile.TemporaryFile(dir=path.parent).close()


def write_page(path: Path, data: dict):
    """Write what explain returns as HTML, whole or not at all. Raises UserError."""
    text = json.dumps(data)  # ASCII
    for character in "<>&":  # so that no token ends the script element or begins another
        text = text.replace(character, f"\\u{ord(character):04x}")
    template = Path(__file__).with_name("explain_template.html").read_text(encoding="utf-8")
    with writing(path):
        replace(path, template.replace("__DATA__</script>", f"{text}</script>").encode())
