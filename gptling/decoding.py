"""Fast decoding, for sampling only: a copy of a model with faster layers and a faster step, used if
its first logits are those of model.py. And text as its tokens are drawn: whole characters."""

import codecs
import copy
import sys
from functools import partial

import torch
import torch.nn as nn

from gptling.devices import use_fast_attention
from gptling.gpt2_format import same

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay: narrower models stay in the cache


@torch.no_grad()
def speed_up(model: nn.Module, compile=False, rows=1) -> nn.Module:
    """Return a copy of the model for `generate` that is fast on its device and in its dtype. If the
    copy fails or gives other logits: the model itself, with a line on standard error. They share
    tensors, but the copy need not follow later updates of the model: make another one. rows: of the
    batch to come. On CUDA the copy writes one batch at a time."""
    try:
        fast = faster_copy(model, compile)
        if same_logits(fast, model, rows):
            return fast
        wrong = "other logits"
    except (RuntimeError, AttributeError, TypeError) as error:  # a layer's own, or the compiler's
        wrong = f"an error: {str(error).strip().splitlines()[0]}"
    print(f"slower decoding: faster layers, or the KV cache, give {wrong}", file=sys.stderr)
    return model


def faster_copy(model: nn.Module, compile: bool) -> nn.Module:
    weight = next(model.parameters())
    if compile and not weight.is_cuda:
        print("--compile has no effect on a CPU: it is for CUDA", file=sys.stderr)
    shared = [*model.parameters(), *model.buffers()]
    fast = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    if weight.is_cuda:
        fast.next_logits = GraphedStep(fast.next_logits, compile)
    wide = model.config.n_embd >= WIDE
    if weight.is_cpu and wide and torch.backends.mkldnn.is_available():
        use_onednn(fast)
    if weight.is_cpu and weight.dtype == torch.bfloat16 and use_fast_attention(fast):
        fast.cache_dtype = torch.float32  # instead of a cast of all keys at every token
    return fast


def same_logits(fast: nn.Module, model: nn.Module, rows: int) -> bool:
    """Whether a step of many tokens and one of a single token give the model's logits."""
    weight = next(model.parameters())
    T = min(16, model.config.block_size)
    tokens = torch.arange(rows * T, device=weight.device).view(rows, T) % model.config.vocab_size
    expected = model.next_logits(tokens)  # (B, V)
    cache = fast.new_cache()
    for new in tokens.split(max(1, T - 1), dim=1):
        logits = fast.next_logits(new, None, cache)
    # Rounding makes less, another formula mostly more.
    return same(logits, expected, tolerance=1e-3 if weight.dtype == torch.float32 else 0.2)


def use_onednn(model: nn.Module):
    """Compute each nn.Linear by oneDNN, with the weight in its own layout, made once: for a single
    row F.linear does not reach a CPU's memory speed. Subclasses may compute something else."""
    linear = partial(torch.ops.mkldnn._linear_pointwise, attr="none", scalars=[], algorithm="")
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module._parameters.pop("weight").detach()
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
            module.forward = partial(linear, W=packed, B=module.bias)


class StaticCache:
    """Keys and values of a layer in a CUDA graph, whose shapes are fixed: each step sees all
    block_size columns. New ones are stored in column `slot`, a tensor. The padding_mask hides the
    columns that are still empty. With a block_size of 4, two tokens before and one new:

        a b . .    slot 2    a b c .    visible: a b c, so c has position 2
    """

    def __init__(self, cache, slot: torch.Tensor):
        self.k = torch.zeros_like(cache.k)  # (B, nh, block_size, hs)
        self.v = torch.zeros_like(cache.v)
        self.slot = slot
        self.length = cache.k.size(2) - 1  # as if full: the query's row of causal_mask is the last

    def append(self, k, v, block_size):
        self.k[:, :, self.slot] = k
        self.v[:, :, self.slot] = v
        return self.k, self.v


class GraphedStep:
    """next_logits, of which a step of one token is a CUDA graph, with one launch for all kernels:
    the shapes stay the same while the cache grows. compile: fuse the kernels by torch.compile."""

    def __init__(self, plain, compile: bool):
        self.plain = plain
        self.compile = compile
        # The graph's input, once there is a graph: idx (B, 1), slot (1,), visible (B, block_size),
        # static, a StaticCache for each layer. Its output: logits (B, V).
        self.idx = None
        self.cache = None  # of the text being drawn, whose memory is that of `static`

    def __call__(self, idx, padding_mask=None, cache=None):
        past = cache[0].length if cache else 0
        if past == 0 or idx.size(1) > 1:
            return self.plain(idx, padding_mask, cache)
        if self.idx is None or self.idx.shape != idx.shape:
            self.capture(idx, cache)
        if cache is not self.cache:
            self.begin_text(past, padding_mask, cache)
        self.idx.copy_(idx)
        self.slot.fill_(past)
        self.graph.replay()
        for layer in cache:
            layer.length += 1
        return self.logits

    def begin_text(self, past, padding_mask, cache):
        """Copy a cache into the graph's memory, which the cache uses from then on."""
        for static, layer in zip(self.static, cache, strict=True):
            static.k[:, :, :past] = layer.k[:, :, :past]  # the rest is not initialised
            static.v[:, :, :past] = layer.v[:, :, :past]
            layer.k = static.k
            layer.v = static.v
        self.visible.zero_()
        self.visible[:, :past] = True if padding_mask is None else padding_mask[:, :past]
        self.cache = cache

    def capture(self, idx, cache):
        """Record a step of B rows, as many as idx (B, 1) has."""
        self.idx = idx.clone()
        self.slot = torch.zeros_like(idx[0])
        self.static = [StaticCache(layer, self.slot) for layer in cache]
        block_size = self.static[0].k.size(2)
        self.visible = torch.ones(len(idx), block_size, dtype=torch.bool, device=idx.device)

        def step():
            self.visible.index_fill_(1, self.slot, True)
            return self.plain(self.idx, self.visible, self.static)

        run = torch.compile(step, fullgraph=True) if self.compile else step
        torch.cuda.synchronize()  # the other stream waits for nothing
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):  # what only first calls do does not belong in the graph
                run()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = run()  # (B, V)


class Sample:
    """A text as it is drawn. `unprinted` has whole characters, and nothing from a stop text on: of
    the stop text "END" the letters "EN" are held until the next one decides."""

    def __init__(self, prompt: str, ids: list[int], stop: tuple[str, ...] = ()):
        self.ids = list(ids)
        self.n_prompt = len(ids)
        self.unprinted = prompt
        self.held = ""  # the last characters, with which a stop text may begin
        self.ended = False
        self.stop = stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int, tokenizer):
        """Add the next token. A special token ends the text."""
        if not self.ended:
            self.ids.append(token)
            if token in tokenizer._special_tokens.values():
                self.feed(b"", final=True)
            else:
                self.feed(tokenizer.decode_single_token_bytes(token))

    def feed(self, raw: bytes, final: bool = False):
        """Add the next bytes, all that there are if `final`. Nothing follows the end."""
        if self.ended:
            return
        text = self.held + self.decoder.decode(raw, final)
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self.ended = final or bool(ends)
        longest = max(map(len, self.stop), default=1)
        safe = len(text) if final else max(0, len(text) - longest + 1)
        end = min(ends, default=safe)
        self.unprinted += text[:end]
        self.held = text[end:]


def print_in_order(waiting: list[Sample]):
    """Print what is new of the first sample. If it has ended, take it and print the one after."""
    while waiting:
        print(waiting[0].unprinted, end="", flush=True)
        waiting[0].unprinted = ""
        if not waiting[0].ended:
            return
        del waiting[0]
        print("\n---" if waiting else "", flush=True)
