"""Fast decoding, for sampling only: a copy of a model with faster layers and a faster step. It is
used if its first logits equal the model's. Also a text as it is drawn, in whole characters."""

import codecs
import copy
import sys
from functools import partial

import torch
import torch.nn as nn

from gptling.devices import use_cpu_attention
from gptling.gpt2_format import nearly_equal

WIDE = 256  # bfloat16 and oneDNN pay from this n_embd on: a narrower model stays in the cache


@torch.no_grad()
def speed_up(model: nn.Module, compile=False, rows=1) -> nn.Module:
    """Return a copy of the model for `generate` that is fast on its device and in its dtype. If the
    copy fails or gives other logits, return the model itself and print a line on standard error.
    The two share tensors, but the copy may not follow later updates of the model: make another one.
    rows: the number of rows in the coming batch. On CUDA the copy draws one batch at a time."""
    if message := check_cache(model):
        print(message, file=sys.stderr)
    try:
        fast = faster_copy(model, compile)
        if same_logits(fast, model, rows):
            return fast
        wrong = "other logits"
    except (RuntimeError, AttributeError, TypeError) as error:  # raised by a layer or the compiler
        wrong = f"an error: {str(error).strip().splitlines()[0]}"
    print(f"slower decoding: faster layers give {wrong}", file=sys.stderr)
    return model


def check_cache(model: nn.Module) -> str:
    """Let `generate` do without the KV cache if it changes the logits, as a layer does that looks
    back and does not use it. Return a message then, and otherwise ""."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 rounds more than is compared here
    try:
        if not model.new_cache() or same_logits(model, model, rows=1):
            return ""
    except (RuntimeError, AttributeError, TypeError):  # the layer accepts no cache
        pass
    finally:
        torch.set_float32_matmul_precision(precision)
    model.new_cache = list
    return "slower decoding: no KV cache, because a layer that looks back does not use it"


def faster_copy(model: nn.Module, compile: bool) -> nn.Module:
    weight = next(model.parameters())
    shared = [*model.parameters(), *model.buffers()]
    fast = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    if weight.is_cuda and fast.new_cache():
        fast.next_logits = GraphedStep(fast.next_logits, compile)
    is_wide = model.config.n_embd >= WIDE
    if weight.is_cpu and is_wide and torch.backends.mkldnn.is_available():
        if weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            use_onednn(fast)
    if weight.is_cpu and weight.dtype == torch.bfloat16 and use_cpu_attention(fast):
        fast.cache_dtype = torch.float32  # otherwise each token would cast all keys
    return fast


def same_logits(fast: nn.Module, model: nn.Module, rows: int) -> bool:
    """Return whether a step of many tokens and one of a single token give the model's logits."""
    weight = next(model.parameters())
    T = min(16, model.config.block_size)
    tokens = torch.arange(rows * T, device=weight.device).view(rows, T) % model.config.vocab_size
    expected = model.next_logits(tokens)  # (B, V)
    cache = fast.new_cache()
    for new in tokens.split(max(1, T - 1), dim=1) if cache else [tokens]:
        logits = fast.next_logits(new, None, cache)
    # Rounding makes smaller differences, another formula mostly larger ones.
    return nearly_equal(logits, expected, tolerance=1e-3 if weight.dtype == torch.float32 else 0.2)


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
    """A layer's keys and values in a CUDA graph. Its shapes are fixed: each step gets block_size
    columns, and a padding_mask hides the columns that are still empty. The new token's column is
    `slot`, a tensor, since the graph would keep the first value of a number. With a block_size of
    4, two tokens before and a new one:

        a b . .    slot 2    a b c .    visible: a b c, so c has position 2
    """

    def __init__(self, cache, slot: torch.Tensor):
        self.k = torch.zeros_like(cache.k)  # (B, nh, block_size, hs)
        self.v = torch.zeros_like(cache.v)
        self.slot = slot
        # The query's position, so that its row of causal_mask is the last one, which hides no key.
        self.length = cache.k.size(2) - 1

    def append(self, k, v, block_size):
        self.k[:, :, self.slot] = k
        self.v[:, :, self.slot] = v
        return self.k, self.v


class GraphedStep:
    """next_logits with a CUDA graph for steps of one token, which launches all kernels at once. The
    shapes in it stay the same while the cache grows. compile: fuse the kernels by torch.compile."""

    def __init__(self, plain, compile: bool):
        self.plain = plain
        self.compile = compile
        # The graph's input: idx (B, 1), slot (1,), visible (B, block_size), static, which is a
        # StaticCache for each layer. Its output: logits (B, V).
        self.idx = torch.empty(0)  # no graph yet
        self.cache = None  # the cache of the text being drawn, with the memory of `static`

    def __call__(self, idx, padding_mask, cache):
        past = cache[0].length
        if past == 0 or idx.size(1) > 1:
            return self.plain(idx, padding_mask, cache)
        if self.idx.shape != idx.shape:
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
            static.k[:, :, :past] = layer.k[:, :, :past]  # later columns are not initialised
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
        torch.cuda.synchronize()  # the new stream does not wait for earlier work
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):  # first calls do more than a graph should record
                run()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = run()  # (B, V)


class Sample:
    """A text as it is drawn. `unprinted` has whole characters up to a stop text. With the stop text
    "END", the letters "EN" are held until the next one decides. A stop text that was found stays
    held: it is found again, so that nothing follows it."""

    def __init__(self, prompt: str, ids: list[int], stop: tuple[str, ...] = ()):
        self.ids = list(ids)
        self.n_prompt = len(ids)
        self.unprinted = prompt
        self.held = ""  # the last characters, which may begin a stop text
        self.ended = False
        self.stop = stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int, tokenizer):
        """Add the next token, unless the text has ended. A special token ends it."""
        if self.ended:
            return
        self.ids.append(token)
        if token in tokenizer._special_tokens.values():
            self.feed(b"", final=True)
        else:
            self.feed(tokenizer.decode_single_token_bytes(token))

    def feed(self, raw: bytes, final: bool = False):
        """Add the next bytes. final: no more follow."""
        text = self.held + self.decoder.decode(raw, final)
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self.ended = final or bool(ends)
        longest = max(map(len, self.stop), default=1)
        safe = len(text) if final else max(0, len(text) - longest + 1)
        end = min(ends, default=safe)
        self.unprinted += text[:end]
        self.held = text[end:]


def print_in_order(samples: list[Sample]):
    """Print what is new of the samples, up to the first one that has not ended."""
    for sample in samples:
        print(sample.unprinted, end="", flush=True)
        sample.unprinted = ""
        if not sample.ended:
            break
