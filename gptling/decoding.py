"""Fast decoding, for sampling only: a copy of a model whose layers and step are faster.

Layers are known by their type and by the name `attend`; others stay as they are. The copy is used
only if its first logits are those of model.py."""

import copy
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling.devices import float32_attention, has_fast_matmul, use_float32_attention
from gptling.files import UserError
from gptling.steps import GraphedStep, compile_steps

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay; narrower models stay in the cache
COMPARED = 16  # tokens by which the fast model is compared with model.py


@torch.no_grad()
def speed_up(model: nn.Module, compile=False, rows=1, padded=False) -> nn.Module:
    """Return a copy of the model for `generate` that is fast on its device and in its dtype, or the
    model itself, with a line on standard error, if the copy gives other logits. They share tensors.
    rows, padded: of the batch to come, for which the copy is compiled. On CUDA the copy writes one
    batch at a time. Raises UserError if the model cannot be compiled."""
    start, weight = time.perf_counter(), next(model.parameters())
    n = rows * min(COMPARED, model.config.block_size)
    tokens = torch.arange(n, device=weight.device).view(rows, -1) % model.config.vocab_size
    expected = model.next_logits(tokens)
    # Rounding alone, by the spread of the finite logits. Another formula mostly makes more.
    spread = expected.nan_to_num(0.0, 0.0, 0.0).std(correction=0).item()
    atol = spread * (1e-3 if weight.dtype == torch.float32 else 0.2)

    def is_close(decoder: nn.Module) -> bool:
        logits = cached_logits(decoder, tokens, padded)
        return torch.allclose(logits, expected, rtol=0.0, atol=atol, equal_nan=True)

    fast = faster_copy(model, compile)
    try:
        wrong = "" if is_close(fast) else "other logits"
    except (RuntimeError, AttributeError, TypeError) as error:  # a hacked layer reads its weight
        wrong = f"an error: {str(error).strip().splitlines()[0]}"
        if compile:
            remedy = "leave it out, or install a compiler"
            raise UserError(f"--compile gives {wrong}; {remedy}") from None
    if wrong:
        what = "slower decoding: the fast one" if is_close(model) else "model.py's KV cache"
        print(f"{what} gives {wrong}", file=sys.stderr)
    elif compile:
        print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return model if wrong else fast


def faster_copy(model: nn.Module, compile: bool) -> nn.Module:
    weight, wide = next(model.parameters()), model.config.n_embd >= WIDE
    on_cpu, shared = weight.is_cpu, [*model.parameters(), *model.buffers()]
    emulated = on_cpu and not has_fast_matmul(weight.dtype)
    fast = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    if compile or emulated:
        replace_linears(fast, RowLinear, emulated)
    elif on_cpu and wide and torch.backends.mkldnn.is_available():
        replace_linears(fast, OneDNNLinear)
    if compile:
        use_float32_attention(fast, attend_one_query)
    elif on_cpu and weight.dtype == torch.bfloat16 and use_float32_attention(fast):
        fast.cache_dtype = torch.float32  # instead of a cast of all keys at every token
    if weight.is_cuda:
        fast.next_logits = GraphedStep(fast.next_logits, compile)
    elif compile:
        compile_steps(fast, by_block=on_cpu and wide)
    return fast


def cached_logits(model: nn.Module, tokens: torch.Tensor, padded: bool) -> torch.Tensor:
    """Logits (B, V) after tokens (B, n), of which the last is a step of its own, with a cache."""
    cache, end = model.new_cache(), 0
    for new in tokens.split(max(1, tokens.size(1) - 1), dim=1):
        end += new.size(1)
        # A padded batch has a mask, and is compiled with one. Here it hides nothing.
        mask = torch.ones_like(tokens[:, :end], dtype=torch.bool) if padded else None
        # With strides like those of generate's tokens, or torch.compile would compile again.
        new = new.clone(memory_format=torch.contiguous_format)
        logits = model.next_logits(new, mask, cache)
    return logits


def replace_linears(model: nn.Module, layer: type[nn.Linear], emulated=False):
    """Make each nn.Linear a `layer`. Subclasses, which may compute something else, stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__, module.emulated = layer, emulated
            if layer is OneDNNLinear:
                weight = module._parameters.pop("weight").detach()
                module.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)


class OneDNNLinear(nn.Linear):
    """A linear layer by oneDNN, with the weight in its own layout, made once: for a single row
    F.linear does not reach a CPU's memory speed."""

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class RowLinear(nn.Linear):
    """A linear layer whose matmul with one row Inductor fuses, at the memory's speed. With more
    rows it is in float32 if the CPU would emulate the dtype."""

    def forward(self, x):
        if x.numel() > x.size(-1) or not torch.compiler.is_compiling():
            if not self.emulated:
                return F.linear(x, self.weight, self.bias)
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        # Inductor would compute x, a LayerNorm's output, again for each row of the weight:
        x = x.as_strided(x.size(), x.stride())  # this makes it keep x
        y = (self.weight * x).sum(-1).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def attend_one_query(q, k, v, attn_mask=None, **options):
    """float32_attention; for one query in a compiled step written out, which Inductor fuses."""
    plain = not any(options.values()) and (attn_mask is None or attn_mask.dtype == torch.bool)
    if q.size(2) > 1 or not plain or not torch.compiler.is_compiling():
        return float32_attention(q, k, v, attn_mask, **options)
    # (B, nh, S): with a size of 1 kept at its end Inductor 2.13 reads wrong places.
    scores = (q.float() * k).sum(-1) / q.size(-1) ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask.squeeze(-2), float("-inf"))
    y = (scores.softmax(-1).unsqueeze(-1) * v).sum(2, keepdim=True)  # (B, nh, 1, hs)
    return y.to(q.dtype)
