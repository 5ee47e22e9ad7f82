"""Decoding at the speed of the memory: a copy of a model whose layers and step are faster.

For sampling only. Layers are known by their type and by the name `attend`; what is not understood
stays as it is. The first logits of the copy are compared with those of the model itself.
"""

import copy
import itertools
import math
import sys
import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling.cli import UserError
from gptling.devices import float32_attention, has_fast_matmul, use_float32_attention

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay; narrower models stay in the cache
COMPARED = 16  # tokens, by which the faster layers and the cache are compared with model.py


def speed_up(model: nn.Module, compile: bool = False) -> nn.Module:
    """A copy of the model for `generate` that is fast on the device and in the dtype that it is in;
    they share what tensors both need. What is replaced, and what is compiled:

    |                            | linear layers         | attention           | compiled         |
    |----------------------------|-----------------------|---------------------|------------------|
    | CPU with fast matmuls      | OneDNNLinear, if wide | float32_attention,  |                  |
    | CPU without, in this dtype | RowLinear             | in bfloat16         |                  |
    | CPU, compile               | RowLinear             | attend_one_query    | blocks, if wide, |
    | another device, compile    |                       |                     | or a whole step  |
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
        use_float32_attention(fast, attend_one_query)
    elif on_cpu and dtype == torch.bfloat16 and use_float32_attention(fast):
        fast.cache_dtype = torch.float32  # instead of a cast of all keys at every token
    if compile:
        compile_steps(fast, by_block=on_cpu and wide)
    fast.next_logits = compared(fast, model)
    return fast


def compared(fast: nn.Module, plain: nn.Module) -> Callable:
    """fast.next_logits, whose first call looks whether its logits for the end of the prompt are
    those of the plain model without a cache. Where they are not the fast model becomes the plain
    one, and standard error says what is wrong: the faster layers, or the cache."""
    step = fast.next_logits
    # Rounding makes 1e-5 and 0.05 of the spread, another formula mostly more than all of it.
    dtype = next(plain.parameters()).dtype
    tolerance = 1e-3 if dtype == torch.float32 else 0.2

    def first_call(idx, padding_mask=None, cache=None):
        more = max(2, COMPARED - idx.size(1))  # a layer may look at tokens some way back
        tokens = torch.cat([idx, idx[:, -1:].expand(-1, more)], dim=1)
        mask = None if padding_mask is None else F.pad(padding_mask, (0, more), value=True)
        n = min(COMPARED, plain.config.block_size)
        end = plain, tokens[:, -n:], None if mask is None else mask[:, -n:]
        try:
            error, what = largest_error(step, fast.new_cache(), *end), "the faster layers"
        except (RuntimeError, AttributeError) as failure:  # such as a weight that somebody reads
            error, what = math.inf, f"the faster layers ({failure})"
        fast.next_logits = step
        if error > tolerance:
            try:
                with_cache = largest_error(plain.next_logits, plain.new_cache(), *end)
            except RuntimeError as failure:
                if dtype == torch.float32:
                    raise
                what = f"model.py does not compute in {dtype}: {failure}"
                raise UserError(f"{what}; give --dtype=float32") from None
            if with_cache > tolerance:  # a layer that looks at earlier tokens has to keep them
                error, what = with_cache, "tokens one by one, with model.py's cache,"
            print(f"{what} give other logits, by {error:.2g} of their spread", file=sys.stderr)
            fast.__dict__, cache[:] = plain.__dict__, plain.new_cache()
        return fast.next_logits(idx, padding_mask, cache)

    return first_call


def largest_error(next_logits: Callable, cache, plain: nn.Module, tokens, mask) -> float:
    """Of what next_logits gives with a cache, for all of the tokens (B, n) but one, then for that;
    as a share of the spread of the plain model's finite logits without a cache; other logits have
    to be the same."""
    n, errors = tokens.size(1), [0.0]
    for start, end in itertools.pairwise(sorted({0, n - 1, n})):
        so_far = None if mask is None else with_own_strides(mask[:, :end])
        logits = next_logits(with_own_strides(tokens[:, start:end]), so_far, cache)
        wanted = plain.next_logits(tokens[:, :end], so_far)
        finite = wanted.isfinite()
        off = torch.where(finite, logits - wanted, 0.0).abs().nan_to_num(nan=math.inf).max()
        same = logits[~finite].nan_to_num().equal(wanted[~finite].nan_to_num())
        spread = wanted[finite].std().clamp(min=1e-30) if finite.any() else 1.0
        errors.append((off / spread).item() if same else math.inf)
    return max(errors)


def with_own_strides(x: torch.Tensor) -> torch.Tensor:
    """Not with those of what it was cut out of, for which torch.compile would compile again."""
    return x.clone(memory_format=torch.contiguous_format)


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
    torch._dynamo.config.recompile_limit = 8 + 2 * len(model.h)  # blocks may differ in numbers
    for block in dict.fromkeys(model.h):
        block.forward = Compiled(block.forward, one_token)
    output = Compiled(model.logits, lambda x: x.numel() == x.size(-1))
    model.logits = lambda x: output(with_own_strides(x))


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

    def __call__(self, *arguments, **options):
        if not self.ready(*arguments, *options.values()):
            return self.plain(*arguments, **options)
        for argument in (*arguments, *options.values()):
            if isinstance(argument, torch.Tensor) and argument.dtype == torch.bool:
                torch._dynamo.maybe_mark_dynamic(argument, 1)  # padding_mask, as long as the cache
        start, graphs = time.perf_counter(), self.stats["unique_graphs"]
        try:
            y = self.compiled(*arguments, **options)
        except self.errors as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--compile: {reason}; leave it out, or install a compiler") from None
        if self.stats["unique_graphs"] > graphs:
            seconds = time.perf_counter() - start
            print(f"\n[compiled in {seconds:.0f} s]", file=sys.stderr, flush=True)
        return y
