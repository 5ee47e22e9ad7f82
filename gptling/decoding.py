"""Decoding at the speed of the memory: a copy of a model whose layers and step are faster.

For sampling only. Layers are known by their type and by the name `attend`; what is not understood
stays as it is. The first logits of the copy are compared with those of the model itself.
"""

import copy
import sys
import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling.cli import UserError
from gptling.devices import (
    float32_attention,
    has_fast_matmul,
    replace_attention,
    use_float32_attention,
)

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay; narrower models stay in the cache


def speed_up(model: nn.Module, compile: bool = False) -> nn.Module:
    """A copy of the model for `generate` that is fast on the device and in the dtype that it is in;
    they share what tensors both need. Its layers, where they are replaced:

    | device and dtype                       | without compile           | with compile           |
    |----------------------------------------|---------------------------|------------------------|
    | CPU, float32, or bfloat16 instructions | OneDNNLinear, if wide     | RowLinear, compiled by |
    | CPU without these, and float16         | RowLinear                 | block, if wide         |
    | CPU, bfloat16: attention               | float32_attention         | attend_one_query       |
    | another device                         |                           | compiled as a whole    |
    """
    parameter = next(model.parameters())
    on_cpu, dtype = parameter.device.type == "cpu", parameter.dtype
    wide = model.config.n_embd >= WIDE
    tensors = [*model.parameters(), *model.buffers()]
    fast = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if on_cpu and (compile or not has_fast_matmul(dtype)):
        replace_linears(fast, RowLinear)
    elif on_cpu and wide and torch.backends.mkldnn.is_available():
        replace_linears(fast, OneDNNLinear)
    if on_cpu and compile:
        replace_attention(fast, attend_one_query)
    elif on_cpu and dtype == torch.bfloat16 and use_float32_attention(fast):
        fast.cache_dtype = torch.float32  # instead of a cast of all keys at every token
    if compile:
        compile_steps(fast, by_block=on_cpu and wide)
    fast.next_logits = CheckedStep(fast, model, compile)
    return fast


class CheckedStep:
    """next_logits of the fast model. The first ones, of a prompt and of one token behind it, are
    compared with the plain model's; where they differ, the fast model becomes the plain one."""

    def __init__(self, fast: nn.Module, plain: nn.Module, compile: bool):
        self.fast, self.plain, self.step = fast, plain, fast.next_logits
        self.least_past = 2 if compile else 1  # of a token that is decoded as all that follow
        # Rounding makes 1e-5 and 0.05 of the spread, another formula mostly more than all of it.
        self.tolerance = 1e-3 if next(plain.parameters()).dtype == torch.float32 else 0.2
        self.calls, self.cache = 0, None  # the plain model's cache

    def __call__(self, idx, padding_mask=None, cache=None):
        past = cache[0].length
        self.cache = self.cache if past else self.plain.new_cache()
        logits = self.step(idx, padding_mask, cache)
        expected = self.plain.next_logits(idx, padding_mask, self.cache)
        self.calls += 1
        difference = (logits - expected).abs().max() / expected.std()
        if difference > self.tolerance:  # not where both are NaN
            print(
                f"the faster layers give other logits ({difference:.2g} of their spread): "
                "they are left out",
                file=sys.stderr,
            )
            cache[:] = self.cache
            self.fast.__dict__ = self.plain.__dict__
            return expected
        if (idx.size(1) == 1 and past >= self.least_past) or self.calls == 3:
            self.fast.next_logits, self.plain = self.step, None
        return logits


def replace_linears(model: nn.Module, layer: type[nn.Linear]):
    """Make each nn.Linear a `layer`, not what may compute something else. Hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = layer
            module.prepare()


def onednn_linear(x, weight, bias):
    """F.linear by oneDNN's operator, where that is there and nothing is compiled, for Inductor
    refuses it: in float32 many rows take a fifth to a quarter less time."""
    if torch.compiler.is_compiling() or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDNNLinear(nn.Linear):
    """A linear layer by oneDNN, with the weight in its own layout, made once: for a single row
    F.linear reaches a third to a half of a CPU's memory speed."""

    def prepare(self):
        weight = self._parameters.pop("weight").detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # 1 row; good for more

    def forward(self, x):
        return onednn_linear(x, self.packed, self.bias)


class RowLinear(nn.Linear):
    """A linear layer whose matmul with one row Inductor fuses, at the memory's speed; with more
    rows it is in float32 where it would be emulated."""

    def prepare(self):
        self.emulated = not has_fast_matmul(self.weight.dtype)

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
    all at once, for a narrow model, whose calls cost more than its matmuls, and on a GPU."""
    if not by_block:
        model.next_logits = Compiled(model.next_logits, one_token)
        return
    for block in dict.fromkeys(model.h):
        block.forward = Compiled(block.forward, one_token)
    model.logits = Compiled(model.logits, lambda x: x.numel() == x.size(-1))


def one_token(x, *arguments) -> bool:
    """Whether these arguments are of one new token, with a cache of two or more before it: a length
    of 0 or 1 is compiled for itself alone."""
    caches = (a[0] if isinstance(a, list) else a for a in arguments)
    past = max((getattr(cache, "length", 0) for cache in caches), default=0)
    return x.size(1) == 1 and past >= 2


class Compiled:
    """A function that is compiled where its arguments are `ready` for it, otherwise as it is."""

    def __init__(self, plain: Callable, ready: Callable[..., bool]):
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._dynamo.utils import counters  # both are slow to import

        self.errors, self.stats = (TorchDynamoException, FailOnRecompileLimitHit), counters["stats"]
        self.plain, self.ready = plain, ready
        # One compilation for any length of the cache.
        torch.compiler.config.dynamic_sources = r"L\['cache'\](\[\d+\])?\.length"
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # blocks may differ in hooks
        self.compiled = torch.compile(plain, fullgraph=True)

    def __call__(self, *arguments):
        if not self.ready(*arguments):
            return self.plain(*arguments)
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.dtype == torch.bool:
                torch._dynamo.maybe_mark_dynamic(argument, 1)  # padding_mask, as long as the cache
        start, graphs = time.perf_counter(), self.stats["unique_graphs"]
        try:
            y = self.compiled(*arguments)
        except self.errors as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--compile: {reason}; leave it out, or install a compiler") from None
        if self.stats["unique_graphs"] > graphs:
            print(f"[compiled in {time.perf_counter() - start:.0f} s]", file=sys.stderr, flush=True)
        return y
