"""Decoding at the speed of the memory: layers and a step that take the places of a model's own.

For sampling only: the weights of replaced layers are let go. Layers are known by their type and by
the name `attend`; what is not understood stays as it is.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling.cli import UserError
from gptling.devices import (
    float32_attention,
    has_products,
    replace_attention,
    use_float32_attention,
)

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay; narrower models stay in the cache


def speed_up(model: nn.Module, compile: bool = False):
    """Let `model.generate` be fast on the device and in the dtype that the model is in; its logits
    change by rounding alone."""
    weight = next(model.parameters())
    on_cpu, dtype = weight.device.type == "cpu", weight.dtype
    if on_cpu and dtype == torch.bfloat16 and use_float32_attention(model) and not compile:
        model.cache_dtype = torch.float32  # instead of a cast of all keys at every token
    wide = model.config.n_embd >= WIDE
    if on_cpu and (compile or not has_products(dtype)):
        replace_linears(model, RowLinear)
    elif on_cpu and wide and torch.backends.mkldnn.is_available():
        replace_linears(model, OneDNNLinear)
    if on_cpu and compile:
        replace_attention(model, attend_one_query)
    if compile:  # PyTorch never asks which of the blocks that share a compilation has hooks
        compile_steps(model, by_block=on_cpu and wide and not any(map(has_hooks, model.modules())))


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def replace_linears(model: nn.Module, layer: Callable[[nn.Linear], nn.Module]):
    """Put layer(linear) in the place of each nn.Linear, not of what may compute something else."""
    modules = model.named_modules(remove_duplicate=False)
    plain = [name for name, m in modules if type(m) is nn.Linear and not has_hooks(m)]
    for name in plain:  # one by one, so that memory holds few of them twice
        model.set_submodule(name, layer(model.get_submodule(name)))


def onednn_linear(x, weight, bias):
    """F.linear by oneDNN's operator, where that is there and nothing is compiled, for Inductor
    refuses it: in float32 many rows take a fifth to a quarter less time."""
    if torch.compiler.is_compiling() or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDNNLinear(nn.Module):
    """A linear layer by oneDNN, with the weight in its own layout, made once: for a single row
    F.linear reaches a third to a half of a CPU's memory speed."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # 1 row; good for more
        self.bias = linear.bias

    def forward(self, x):
        return onednn_linear(x, self.packed, self.bias)


class RowLinear(nn.Module):
    """A linear layer whose product with a single row Inductor fuses, at the memory's speed; that of
    more rows is in float32 where it would be emulated."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.emulated = not has_products(linear.weight.dtype)

    def forward(self, x):
        if x.numel() > x.size(-1) or not torch.compiler.is_compiling():
            if not self.emulated:
                return onednn_linear(x, self.weight, self.bias)
            bias = None if self.bias is None else self.bias.float()
            return onednn_linear(x.float(), self.weight.float(), bias).to(x.dtype)
        # Inductor would work out x, a LayerNorm's output, anew for each row of the weight:
        x = x.as_strided(x.size(), x.stride())  # this makes it keep x
        y = (self.weight * x).sum(-1).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def attend_one_query(q, k, v, attn_mask=None, **options):
    """float32_attention; for one query in a compiled step written out, which Inductor fuses."""
    bool_mask = attn_mask is None or (attn_mask.dtype == torch.bool and attn_mask.dim() == 4)
    plain = bool_mask and not any(options.values()) and q.shape[:2] == k.shape[:2]
    if q.size(2) > 1 or not plain or not torch.compiler.is_compiling():
        return float32_attention(q, k, v, attn_mask, **options)
    # (B, nh, S): with a size of 1 kept at its end Inductor 2.13 reads wrong places.
    scores = (q.float() * k).sum(-1) / q.size(-1) ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask[:, :, 0], float("-inf"))
    y = (scores.softmax(-1).unsqueeze(-1) * v).sum(2, keepdim=True)  # (B, nh, 1, hs)
    return y.to(q.dtype)


def compile_steps(model: nn.Module, by_block: bool):
    """Compile what a new token takes: one block, which all share, in a small part of the time; or
    all at once, for a narrow model, whose calls cost more than its products, and on a GPU."""

    def one_token(x, padding_mask=None, cache=None):
        layer = cache[0] if isinstance(cache, list) else cache
        # A length of 0 or 1 is compiled for itself alone.
        return x.size(1) == 1 and layer is not None and layer.length >= 2

    if not by_block:
        options = {"guard_filter_fn": without_new_methods}
        model.next_logits = Compiled(model.next_logits, one_token, options)
        return
    for block in model.h:
        block.forward = Compiled(block.forward, one_token)
    if type(model.lm_head) is RowLinear:
        model.lm_head.forward = Compiled(model.lm_head.forward, lambda x: len(x) == 1)


def without_new_methods(guards: Sequence) -> list[bool]:
    """Which of the things that a compilation relies on are asked about at every call: not whether
    modules have got other methods since, which takes a 20th of a small model's step."""
    return [guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT" for guard in guards]


class Compiled:
    """A function that is compiled where its arguments are `ready` for it, otherwise as it is."""

    def __init__(self, plain: Callable, ready: Callable[..., bool], options: dict | None = None):
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._dynamo.utils import counters  # both are slow to import

        self.errors, self.stats = (TorchDynamoException, FailOnRecompileLimitHit), counters["stats"]
        self.plain, self.ready = plain, ready
        # One compilation for any length of the cache.
        torch.compiler.config.dynamic_sources = r"L\['cache'\](\[\d+\])?\.length"
        self.compiled = torch.compile(plain, fullgraph=True, options=options)

    def __call__(self, *arguments):
        if not self.ready(*arguments):
            return self.plain(*arguments)
        if len(arguments) > 1 and arguments[1] is not None:  # padding_mask, as long as the cache
            torch._dynamo.maybe_mark_dynamic(arguments[1], 1)
        start, graphs = time.perf_counter(), self.stats["unique_graphs"]
        try:
            y = self.compiled(*arguments)
        except self.errors as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--compile: {reason}; leave it out, or install a compiler") from None
        if self.stats["unique_graphs"] > graphs:
            print(f"[compiled in {time.perf_counter() - start:.0f} s]", file=sys.stderr, flush=True)
        return y
