"""Fast decoding, for sampling only: a copy of a model whose layers and step are faster.

Layers are known by their type and by the name `attend`; others stay as they are. The first logits
of the copy are compared with those of model.py."""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling.cli import UserError
from gptling.devices import float32_attention, has_fast_matmul, use_float32_attention

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay; narrower models stay in the cache
COMPARED = 16  # tokens by which the fast model is compared with model.py


# ---------------------------------------------------------------------------- a faster copy


def speed_up(model: nn.Module, compile: bool = False) -> nn.Module:
    """A copy of the model for `generate` that is fast on the model's device and in its dtype. The
    two share the tensors that both need.

    |                            | linear layers         | attention           | step             |
    |----------------------------|-----------------------|---------------------|------------------|
    | CPU with fast matmuls      | OneDNNLinear, if wide | float32_attention,  | as it is         |
    | CPU without, in this dtype | RowLinear             | in bfloat16         | as it is         |
    | CPU, compile               | RowLinear             | attend_one_query    | compiled         |
    | CUDA                       | as they are           | as it is            | a CUDA graph     |
    | CUDA, compile              | RowLinear             | attend_one_query    | compiled, graph  |
    """
    parameter = next(model.parameters())
    device, dtype, wide = parameter.device.type, parameter.dtype, model.config.n_embd >= WIDE
    tensors = [*model.parameters(), *model.buffers()]
    fast = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if compile or (device == "cpu" and not has_fast_matmul(dtype)):
        replace_linears(fast, RowLinear)
    elif device == "cpu" and wide and torch.backends.mkldnn.is_available():
        replace_linears(fast, OneDNNLinear)
    if compile:
        use_float32_attention(fast, attend_one_query)
    elif device == "cpu" and dtype == torch.bfloat16 and use_float32_attention(fast):
        fast.cache_dtype = torch.float32  # instead of a cast of all keys at every token
    if device == "cuda":
        fast.next_logits = GraphedStep(fast, compile)
    elif compile:
        compile_steps(fast, by_block=device == "cpu" and wide)
    fast.next_logits = verified(fast, model)
    return fast


def verified(fast: nn.Module, plain: nn.Module) -> Callable:
    """fast.next_logits, whose first call compares its logits for the end of the prompt, the last
    token with a cache, with those of the plain model without a cache. If they differ, the fast
    model becomes the plain one, and standard error says what is wrong."""
    step, n = fast.next_logits, min(COMPARED, plain.config.block_size)
    # Rounding makes 1e-5 and 0.05 of the spread, another formula mostly more than all of it.
    tolerance = 1e-3 if next(plain.parameters()).dtype == torch.float32 else 0.2

    def first_call(idx, padding_mask=None, cache=None):
        tokens = idx[:, -n:]
        tokens = torch.cat([tokens, tokens[:, -1:].expand(-1, n - tokens.size(1))], dim=1)  # (B, n)
        # A batch with padding has a mask, and is compiled with one, but here it hides nothing.
        masks = [torch.ones_like(tokens[:, i:], dtype=torch.bool) for i in (1, 0)]
        masks = [None, None] if padding_mask is None else masks
        expected = plain.next_logits(tokens)

        def error_of(next_logits, cache):
            next_logits(tokens[:, :-1].contiguous(), masks[0], cache)
            logits = next_logits(tokens[:, -1:].contiguous(), masks[1], cache)
            return largest_error(logits, expected)

        fast.next_logits, wrong = step, ""
        try:
            if n > 1 and (error := error_of(step, fast.new_cache())) > tolerance:
                wrong = f"other logits, by {error:.2g} of their spread"
        except (RuntimeError, AttributeError) as failure:  # such as a weight that somebody reads
            wrong = f"an error: {str(failure).strip().partition(chr(10))[0]}"
        if wrong:
            cached = error_of(plain.next_logits, plain.new_cache()) > tolerance
            what = "model.py's KV cache gives" if cached else "slower decoding: the fast one gives"
            print(f"{what} {wrong}", file=sys.stderr)
            fast.__dict__, cache[:] = plain.__dict__, plain.new_cache()
        return fast.next_logits(idx, padding_mask, cache)

    return first_call


def largest_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two (B, V), as a share of the spread of the expected finite logits;
    infinite if those that are not finite differ."""
    finite = expected.isfinite()
    if not torch.equal(logits[~finite], expected[~finite]) or logits[finite].isnan().any():
        return float("inf")
    spread = expected[finite].std().clamp(min=1e-30)
    return ((logits - expected)[finite].abs().max() / spread).item()


# ---------------------------------------------------------------------------- layers


def replace_linears(model: nn.Module, layer: type[nn.Linear]):
    """Make each nn.Linear a `layer`. Subclasses, which may compute something else, stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = layer
            on_cpu = module.weight.device.type == "cpu"
            module.emulated = on_cpu and not has_fast_matmul(module.weight.dtype)
            if layer is OneDNNLinear:
                weight = module._parameters.pop("weight").detach()
                module.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)


def onednn_linear(x, weight, bias):
    """F.linear by oneDNN's operator on a CPU, if nothing is compiled: Inductor refuses it."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDNNLinear(nn.Linear):
    """A linear layer by oneDNN, with the weight in its own layout, made once: for a single row
    F.linear does not reach a CPU's memory speed."""

    def forward(self, x):
        return onednn_linear(x, self.packed, self.bias)


class RowLinear(nn.Linear):
    """A linear layer whose matmul with one row Inductor fuses, at the memory's speed. With more
    rows it is in float32 if the CPU would emulate the dtype."""

    def forward(self, x):
        if x.numel() > x.size(-1) or not torch.compiler.is_compiling():
            if not self.emulated:
                return onednn_linear(x, self.weight, self.bias)
            bias = None if self.bias is None else self.bias.float()
            return onednn_linear(x.float(), self.weight.float(), bias).to(x.dtype)
        # Inductor would compute x, a LayerNorm's output, again for each row of the weight:
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


# ---------------------------------------------------------------------------- steps


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
                mine.k[:, :, :past] = theirs.k[:, :, :past]  # what is behind is not initialised
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
        with compilation_reported(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):  # what only first calls do does not belong in the graph
                run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = run()
