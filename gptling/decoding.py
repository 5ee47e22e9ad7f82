"""Fast decoding, for sampling only: a copy of a model whose layers and step are faster.

Layers are known by their type and by the name `attend`; others stay as they are. The first logits
of the copy are compared with those of model.py."""

import copy
import sys
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling.devices import float32_attention, has_fast_matmul, use_float32_attention
from gptling.steps import GraphedStep, compile_steps

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay; narrower models stay in the cache
COMPARED = 16  # tokens by which the fast model is compared with model.py


# ---------------------------------------------------------------------------- a faster copy


def speed_up(model: nn.Module, compile: bool = False) -> nn.Module:
    """A copy of the model for `generate` that is fast on the model's device and in its dtype. The
    two share the tensors that both need. On CUDA it writes one text, or batch, at a time.

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
            next_logits(tokens[:, :-1], masks[0], cache)
            # With strides of its own: for others torch.compile would compile again.
            last = tokens[:, -1:].clone(memory_format=torch.contiguous_format)
            return largest_error(next_logits(last, masks[1], cache), expected)

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
    if torch.compiler.is_compiling() or not (x.is_cpu and torch.backends.mkldnn.is_available()):
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
