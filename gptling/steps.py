"""A step of decoding, one new token with a cache before it, compiled or as a CUDA graph."""

from collections.abc import Callable

import torch
import torch.nn as nn


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
