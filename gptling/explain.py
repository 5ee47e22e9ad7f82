"""The page of sample.py --explain: how likely each token was, and what it attended to."""

import base64
import json
import math
from pathlib import Path

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gptling.files import UserError, replace, writing

MAX_WEIGHTS = 5_000_000  # of attention on a page, 2 bytes each: deep models show fewer tokens


def visible(raw: bytes) -> str:
    """A token as a label: white space as symbols, unprintable characters as code points."""
    text = raw.decode("utf-8", "backslashreplace")
    symbols = {" ": "·", "\n": "↵", "\t": "→"}
    return "".join(symbols.get(c) or (c if c.isprintable() else f"U+{ord(c):04X}") for c in text)


def attention_weights(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> torch.Tensor:
    """softmax(Q K^T * scale + mask), (B, nh, T, S), of a call of F.scaled_dot_product_attention
    with these arguments, before dropout. Rows sum to 1, or to 0 for a query without any key."""
    key = key.repeat_interleave(query.size(-3) // key.size(-3), dim=-3)  # one key head a query head
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()  # (T, S)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1).nan_to_num()


class RecordAttention(TorchFunctionMode):
    """While active, keeps the weights of every call of PyTorch's attention."""

    def __init__(self):
        super().__init__()
        self.weights = []  # one (B, nh, T, S) a call

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.weights.append(attention_weights(*args, **kwargs or {}))
        return func(*args, **kwargs or {})


def logits_and_attention(model: nn.Module, idx: torch.Tensor):
    """Logits (T, V) of one text idx (1, T), and the weights (n, nh, T, T) of the n calls of
    PyTorch's attention that the model makes for it. Raises UserError if there are none to show."""
    with RecordAttention() as attention:
        logits, _ = model(idx)
    T = idx.size(1)
    shapes = {tuple(weights.shape[1:]) for weights in attention.weights}  # {(nh, T, T)}
    if not shapes:
        raise UserError("--explain: no attention seen: no call of F.scaled_dot_product_attention")
    if len(shapes) > 1 or shapes.pop()[1:] != (T, T):
        raise UserError(f"--explain: attention is not between all {T} tokens, or n_head differs")
    return logits[0], torch.cat(attention.weights)


@torch.no_grad()
def explain(model: nn.Module, tokenizer: tiktoken.Encoding, ids: list[int], n_prompt: int) -> dict:
    """The data of the page, by one forward pass. The first n_prompt ids are the prompt.

    Of each token but the first, given those before it (temperature 1, no filter): its probability
    and rank, and the ten likeliest in its place as [label, probability, whether it is the token].
    attention: base64 of 65535 times the lower triangles of the weights in uint16."""
    max_tokens = int((2 * MAX_WEIGHTS / model.config.n_layer / model.config.n_head) ** 0.5)
    max_tokens = min(256, model.config.block_size, max_tokens)
    # From the beginning, so that each token has the context that it was drawn with. If the text
    # does not fit, a prompt of more than half of the page loses its beginning.
    start = max(0, min(n_prompt - max_tokens // 2, len(ids) - max_tokens))
    shown = ids[start : start + max_tokens]
    T = len(shown)
    idx = torch.tensor([shown], device=next(model.parameters()).device)
    logits, weights = logits_and_attention(model, idx)
    probs = logits[:-1].masked_fill(~model.valid_tokens, -math.inf).softmax(dim=-1)  # (T - 1, V)
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


def write_page(path: Path, data: dict):
    """Write what explain returns as HTML, whole or not at all. Raises UserError."""
    text = json.dumps(data)  # ASCII
    for character in "<>&":  # so that no token ends the script element or begins another
        text = text.replace(character, f"\\u{ord(character):04x}")
    template = Path(__file__).with_name("explain_template.html").read_text(encoding="utf-8")
    with writing(path):
        replace(path, template.replace("__DATA__</script>", f"{text}</script>").encode())
