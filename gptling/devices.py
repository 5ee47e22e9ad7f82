"""What depends on the machine: the device, the dtype, a CPU's kernels, memory and peaks."""

import ctypes
import functools
import math
import os
import re
import sys
import warnings

import torch
import torch.nn.functional as F

from gptling.files import UserError


def pick_device(device: str) -> str:
    """`auto` to cuda or cpu. Raises UserError for a device that is missing."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not getattr(torch, device).is_available():
        raise UserError(f"--device={device}: PyTorch finds none here. Use --device=auto")
    if device in ("mps", "xpu"):
        print(f"--device={device}: gptling has never been run on it", file=sys.stderr)
    return device


def pick_dtype(dtype: str, device: str, wide: bool, training: bool = False) -> str:
    """`auto` to the fastest dtype. On a CPU, bfloat16 is faster for `wide` models only. Intel's
    processors of AMX's generations multiply at half of float32's speed if a virtual machine hides
    AMX: training is slower in bfloat16 there, while sampling still reads half the memory."""
    if dtype != "auto":
        return dtype
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.10 has none
    slow = training and capabilities.get("avx512_fp16")
    native = torch.cpu._is_avx512_bf16_supported() and not slow
    native = native or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if device == "cpu" and wide and native else "float32"


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast the parameters. Unlike nn.Module.to, leave buffers, such as angles, as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def cpu_attention(q, k, v, attn_mask=None, **options) -> torch.Tensor:
    """F.scaled_dot_product_attention, as it is fastest on a CPU. In training, PyTorch has no kernel
    with dropout, and a slow one for short sequences in bfloat16: matmuls take their place. Other
    calls in bfloat16 use float32's kernel, which is slower only in training on long sequences."""
    is_short = q.dtype == torch.bfloat16 and q.size(2) <= 256
    is_plain = (
        attn_mask is None
        and options.keys() <= {"dropout_p", "is_causal"}
        and q.shape[:2] == k.shape[:2] == v.shape[:2]  # nothing is broadcast
    )
    if is_plain and (options.get("dropout_p") or (q.requires_grad and is_short)):
        return attention_by_matmuls(q, k, v, **options)
    if q.dtype != torch.bfloat16 or (q.requires_grad and not is_short):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    with torch.autocast("cpu", enabled=False):  # autocast would make bfloat16 of them again
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask, **options)
    return y.to(q.dtype)


def attention_by_matmuls(q, k, v, is_causal=False, dropout_p=0.0) -> torch.Tensor:
    """F.scaled_dot_product_attention of the same arguments, as one matmul with the mask added, a
    softmax and another matmul. PyTorch's own, with dropout, also looks for queries without keys."""
    hidden = -math.inf if is_causal else 0.0
    mask = q.new_full((q.size(2), k.size(2)), hidden).triu_(1)  # (T, S)
    scale = 1 / math.sqrt(q.size(3))
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)  # (B nh, T, S)
    weights = F.dropout(scores.softmax(-1), dropout_p)
    return (weights @ v.flatten(0, 1)).unflatten(0, q.shape[:2])


def use_cpu_attention(model: torch.nn.Module) -> bool:
    """Let layers that name PyTorch's attention kernel `attend`, as MultiHeadAttention does, use
    cpu_attention. Your own kernel stays. Returns whether each block has one such layer."""
    attend = F.scaled_dot_product_attention
    layers = [m for m in model.modules() if getattr(m, "attend", None) is attend]
    for layer in layers:
        layer.attend = cpu_attention
    return len(layers) == len(set(model.h))


def bernoulli_(self, p=0.5, *, generator=None) -> torch.Tensor:
    """torch.Tensor.bernoulli_ by 16 random bits for each number: p is rounded to 1 / 65536.
    PyTorch's own kernel draws four times as many bits, and on one core."""
    threshold = round(65536 * p) - 32768
    if abs(threshold) == 32768:  # p is 0 or 1
        return self.fill_(round(p))
    words = torch.empty(math.ceil(self.numel() / 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int16)[: self.numel()]  # four of a word, -32768 to 32767
    return self.copy_((bits < threshold).view(self.shape))


class CrossEntropy(torch.autograd.Function):
    """F.cross_entropy(logits, targets, reduction="none"). The gradient, which is the probabilities
    less 1 at the target, is computed with the loss, in the memory of the probabilities."""

    @staticmethod
    def forward(ctx, logits, targets):
        probs = logits.softmax(-1)  # (N, V)
        # log_softmax would compute V exponentials of each row again for this gradient. The largest
        # logit and the largest probability belong to one token: -log of the target's probability
        # is the difference of their logits, less the log of that probability.
        differences = logits.amax(-1) + F.nll_loss(logits, targets, reduction="none")  # (N,)
        losses = (differences - probs.amax(-1).log()).masked_fill(targets == -100, 0)
        columns = targets.clamp(min=0)[:, None]  # -100 is ignored
        grad = probs.scatter_(1, columns, -1, reduce="add")
        ctx.save_for_backward(grad, targets)
        return losses

    @staticmethod
    def backward(ctx, grad_losses):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: leave out use_cpu_kernels in processes.py")
        grad, targets = ctx.saved_tensors
        factors = (grad_losses * (targets != -100))[:, None]
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph=True
        return (grad * factors if again else grad.mul_(factors)), None


@functools.cache
def replace_operators() -> torch.library.Library:
    """Replace PyTorch's operators for dropout and for cross-entropy on a CPU, as long as the result
    lives: it is cached. They mean the same, so that an edited model.py gets what it asks for. What
    CrossEntropy cannot compute, such as label smoothing, PyTorch's own operator does."""
    own = torch.library.get_kernel("aten::cross_entropy_loss", "AutogradCPU")

    def cross_entropy_loss(keys, logits, targets, *options):  # those that are not the defaults
        plain = options == (None, 0) and targets.shape == logits.shape[:1]  # not probabilities
        if plain and logits.requires_grad and type(logits) is torch.Tensor:  # not the compiler's
            return CrossEntropy.apply(logits, targets)
        return own.call_boxed(keys, logits, targets, *options)

    kernels = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of a replaced operator
        kernels.impl("bernoulli_.float", bernoulli_, "CPU")
        kernels.impl("cross_entropy_loss", cross_entropy_loss, "AutogradCPU", with_keyset=True)
    return kernels


def choose_algorithms(deterministic: bool):
    """Allow TF32. See https://docs.pytorch.org/docs/stable/notes/randomness.html for the rest."""
    torch.set_float32_matmul_precision("high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matmul
        torch.use_deterministic_algorithms(True)


def tune_allocator(sharded: bool):
    """Let glibc keep freed memory for the next step, because the system would give new pages of
    zeros. With FSDP, give it back instead: gathered layers are freed all the time, what a step
    keeps would lie between them, and no gap would be large enough for the next layer."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if sharded:
            libc.mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: blocks from 1 MB on are the system's own
        else:
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no block is the system's own
            libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


def use_cpu_kernels(model: torch.nn.Module):
    """Speed up training of a model on a CPU. What it computes stays the same."""
    use_cpu_attention(model)
    replace_operators()


# FLOP/s of dense matmuls in bfloat16 with sums in float32, by NVIDIA's data sheets and, for RTX
# cards, the appendices of its architecture whitepapers.
PEAKS = {
    r"B200": 2250e12,
    r"H200": 989e12,
    r"H100 80GB HBM3": 989e12,
    r"A100.*": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,
    r"GeForce RTX 5090": 209.5e12,
    r"GeForce RTX 4090": 165.2e12,
    r"GeForce RTX 3090": 71e12,
}


def flops_utilisation(tokens_per_second: float, n_parameters: int, gpu: str) -> float | None:
    """The share of the GPU's peak that 6 FLOPs a parameter and token are (Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361, without attention's), or None for a GPU that is not listed."""
    for name, peak in PEAKS.items():
        if re.fullmatch(f"(NVIDIA )?{name}", gpu):
            return 6 * n_parameters * tokens_per_second / peak
    return None
