"""Fast decoding, for sampling only: a copy of a model whose layers and step are faster.

Layers are known by their type and by the name `attend`. Others stay as they are. The copy is used
only if its first logits are those of model.py."""

import copy
import sys
import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling.devices import float32_attention, has_fast_matmul, use_float32_attention
from gptling.files import UserError

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay: narrower models stay in the cache
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
    """float32_attention. For one query in a compiled step it is written out, to be fused."""
    plain = not any(options.values()) and (attn_mask is None or attn_mask.dtype == torch.bool)
    if q.size(2) > 1 or not plain or not torch.compiler.is_compiling():
        return float32_attention(q, k, v, attn_mask, **options)
    # (B, nh, S): with a size of 1 kept at its end Inductor 2.13 reads wrong places.
    scores = (q.float() * k).sum(-1) / q.size(-1) ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask.squeeze(-2), float("-inf"))
    y = (scores.softmax(-1).unsqueeze(-1) * v).sum(2, keepdim=True)  # (B, nh, 1, hs)
    return y.to(q.dtype)


def compile_steps(model: nn.Module, by_block: bool):
    """Compile what a new token needs on a CPU: one block, which all share, in a small part of the
    time; or all at once, for a narrow model, whose calls cost more than its matmuls."""
    # One compilation for any length of the cache, and of the padding_mask.
    torch.compiler.config.dynamic_sources = r"L\['cache'\](\[\d+\])?\.length,L\['padding_mask'\]"
    if by_block:
        torch._dynamo.config.recompile_limit = 8 + 2 * len(model.h)  # blocks may differ in numbers
        for block in set(model.h):
            block.forward = torch.compile(block.forward, fullgraph=True)
        model.logits = torch.compile(model.logits, fullgraph=True)
        step = model.next_logits
    else:
        step = torch.compile(model.next_logits, fullgraph=True)

    def next_logits(idx, padding_mask=None, cache=None):
        # A length of 0 or 1 would be compiled for itself alone.
        if idx.size(1) == 1 and cache and cache[0].length >= 2:
            return step(idx, padding_mask, cache)
        with torch.compiler.set_stance("force_eager"):
            return step(idx, padding_mask, cache)

    model.next_logits = next_logits


class StaticCache:
    """Keys and values of one layer in a CUDA graph: `slot`, a tensor, says where the new ones go,
    and all of the buffer is returned. `length` makes the query the last of a full window: what it
    sees says the padding_mask, False where nothing is stored yet."""

    def __init__(self, cache, slot: torch.Tensor):
        self.k, self.v, self.slot = torch.zeros_like(cache.k), torch.zeros_like(cache.v), slot
        self.length = self.k.size(2) - 1

    def append(self, k, v, block_size):
        self.k[:, :, self.slot], self.v[:, :, self.slot] = k, v
        return self.k, self.v


class GraphedStep:
    """next_logits, of which a step of one token is a CUDA graph, with one launch for all kernels:
    the shapes stay the same while the cache grows. compile: fuse the kernels by torch.compile."""

    def __init__(self, plain: Callable, compile: bool):
        self.plain, self.compile = plain, compile
        self.logits = self.cache = None  # (B, V): no graph yet; the cache of the text

    def __call__(self, idx, padding_mask=None, cache=None):
        past = cache[0].length if cache else 0
        if past == 0 or idx.size(1) > 1:
            return self.plain(idx, padding_mask, cache)
        if self.logits is None or self.logits.size(0) != idx.size(0):
            self.capture(idx, cache)
        if cache is not self.cache:  # a new text, whose cache is this one's from now on
            if cache[0].k is self.static[0].k:
                raise RuntimeError("the text was interrupted by another one of the same model")
            for mine, theirs in zip(self.static, cache, strict=True):
                mine.k[:, :, :past] = theirs.k[:, :, :past]  # the rest is not initialised
                mine.v[:, :, :past] = theirs.v[:, :, :past]
                theirs.k, theirs.v = mine.k, mine.v
            self.visible.zero_()
            self.visible[:, :past] = True if padding_mask is None else padding_mask[:, :past]
            self.cache = cache
        self.idx.copy_(idx)
        self.slot.fill_(past)
        self.graph.replay()
        for layer in cache:
            layer.length += 1
        return self.logits

    def capture(self, idx, cache):
        """Record a step of B rows, as many as idx (B, 1) has."""
        self.idx, self.slot = idx.clone(), torch.zeros_like(idx[0])  # (B, 1), (1,)
        self.static = [StaticCache(layer, self.slot) for layer in cache]
        size = len(idx), self.static[0].k.size(2)  # (B, block_size)
        self.visible = torch.ones(size, dtype=torch.bool, device=idx.device)

        def step():
            self.visible.index_fill_(1, self.slot, True)
            return self.plain(self.idx, self.visible, self.static)

        run = torch.compile(step, fullgraph=True) if self.compile else step
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):  # what only first calls do does not belong in the graph
                run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = run()
