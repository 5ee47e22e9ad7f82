"""A step of decoding, one new token with a cache before it, compiled or as a CUDA graph."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn as nn

from gptling.files import UserError


@contextmanager
def compilation_reported() -> Iterator[None]:
    """Print to standard error how long torch.compile took, if it compiled something. Raises
    UserError if it cannot, as without a C++ compiler."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.utils import counters  # both are slow to import

    start, graphs = time.perf_counter(), counters["stats"]["unique_graphs"]
    try:
        yield
    except TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--compile: {reason}; leave it out, or install a compiler") from None
    if counters["stats"]["unique_graphs"] > graphs:
        seconds = time.perf_counter() - start
        print(f"\n[compiled in {seconds:.0f} s]", file=sys.stderr, flush=True)


def one_token(x, *arguments) -> bool:
    """Whether these arguments are of one new token, with a cache of two or more before it: a length
    of 0 or 1 would be compiled for itself alone."""
    caches = (a[0] if isinstance(a, list) else a for a in arguments)
    past = max((getattr(cache, "length", 0) for cache in caches), default=0)
    return x.size(1) == 1 and past >= 2


class CompiledStep:
    """A function that is compiled for arguments that are `ready` for it, otherwise as it is."""

    def __init__(self, plain: Callable, ready: Callable[..., bool]):
        # One compilation for any length of the cache.
        torch.compiler.config.dynamic_sources = r"L\['cache'\](\[\d+\])?\.length"
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # blocks may differ in hooks
        self.plain, self.ready = plain, ready
        self.compiled = torch.compile(plain, fullgraph=True)

    def __call__(self, *arguments, **options):
        if not self.ready(*arguments, *options.values()):
            return self.plain(*arguments, **options)
        for argument in (*arguments, *options.values()):
            if isinstance(argument, torch.Tensor) and argument.dtype == torch.bool:
                torch._dynamo.maybe_mark_dynamic(argument, 1)  # padding_mask, as long as the cache
        with compilation_reported():
            return self.compiled(*arguments, **options)


def compile_steps(model: nn.Module, by_block: bool):
    """Compile what a new token needs on a CPU: one block, which all share, in a small part of the
    time; or all at once, for a narrow model, whose calls cost more than its matmuls."""
    if not by_block:
        model.next_logits = CompiledStep(model.next_logits, one_token)
        return
    torch._dynamo.config.recompile_limit = 8 + 2 * len(model.h)  # blocks may differ in numbers
    for block in dict.fromkeys(model.h):
        block.forward = CompiledStep(block.forward, one_token)
    output = CompiledStep(model.logits, lambda x: x.numel() == x.size(-1))
    model.logits = lambda x: output(x.clone(memory_format=torch.contiguous_format))


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

    def __init__(self, model: nn.Module, compile: bool):
        self.model, self.plain, self.compile = model, model.next_logits, compile
        self.logits = None  # (B, V): no graph yet

    def __call__(self, idx, padding_mask=None, cache=None):
        past = cache[0].length if cache else 0
        if past == 0 or idx.size(1) > 1:
            return self.plain(idx, padding_mask, cache)
        if self.logits is None or self.logits.size(0) != idx.size(0):
            self.capture(idx, cache)
        if cache[0].k is not self.static[0].k:  # a new sequence
            for mine, theirs in zip(self.static, cache, strict=True):
                mine.k[:, :, :past] = theirs.k[:, :, :past]  # the rest is not initialised
                mine.v[:, :, :past] = theirs.v[:, :, :past]
                theirs.k, theirs.v = mine.k, mine.v
            self.visible.zero_()
            self.visible[:, :past] = True if padding_mask is None else padding_mask[:, :past]
        self.idx.copy_(idx)
        self.slot.fill_(past)
        self.graph.replay()
        for layer in cache:
            layer.length += 1
        return self.logits

    def capture(self, idx, cache):
        B, block_size = idx.size(0), self.model.config.block_size
        self.idx, self.slot = idx.clone(), torch.zeros_like(idx[0])  # (B, 1), (1,)
        self.visible = torch.ones(B, block_size, dtype=torch.bool, device=idx.device)
        self.static = [StaticCache(layer, self.slot) for layer in cache]

        def step():
            self.visible.index_fill_(1, self.slot, True)
            return self.plain(self.idx, self.visible, self.static)

        run = torch.compile(step, fullgraph=True) if self.compile else step
        reported = compilation_reported() if self.compile else nullcontext()
        with reported, torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):  # what only first calls do does not belong in the graph
                run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = run()
