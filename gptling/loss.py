"""A loss that never holds all logits in float32, nor their gradient beside them."""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

EVALUATED = 2048  # rows of logits held at a time where no gradient is needed
CHUNK = {"cpu": 1 << 22}  # logits in float32 at a time: what its cache takes; elsewhere 512 MB


class FusedLoss(torch.autograd.Function):
    """The gradient of the logits is made as soon as the loss is, some rows at a time, and takes the
    logits' place (Hsu et al. 2024, https://arxiv.org/abs/2410.10989): memory holds (N, V) numbers
    once, in the dtype of products. One backward pass only."""

    @staticmethod
    def forward(ctx, x, weight, targets, token_losses, need_gradient):
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        low_x, low_weight = x.to(dtype), weight.to(dtype)
        logits = low_x @ low_weight.T  # (N, V)
        rows = max(1, CHUNK.get(device, 1 << 27) // len(weight))
        loss = 0.0
        for part, target in zip(logits.split(rows), targets.split(rows), strict=True):
            with torch.enable_grad():
                scores = part.to(torch.promote_types(dtype, torch.float32)).detach()  # (rows, V)
                scores.requires_grad_(need_gradient)
                total = token_losses(scores, target).sum()
            if need_gradient:
                part.copy_(torch.autograd.grad(total, scores)[0])
            loss += total.detach()
        if need_gradient:
            # float16 ends at 65,504, and a sum over N rows may not: GradScaler comes too late.
            ctx.divisor = 256 if dtype == torch.float16 else 1
            grad_weight = logits.T @ (low_x / ctx.divisor)
            ctx.save_for_backward((logits @ low_weight).to(x.dtype), grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x.mul_(gradient), grad_weight.mul_(gradient * ctx.divisor), None, None, None


def fused_loss(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, token_losses: Callable
) -> torch.Tensor:
    """The sum of token_losses(x weight^T, targets), for GPT.fused_loss: x (N, C) hidden states,
    weight (V, C), targets (N,); token_losses: of rows of logits and targets, a loss for each."""
    if torch.is_grad_enabled():
        return FusedLoss.apply(x, weight, targets, token_losses, True)
    losses = [
        FusedLoss.apply(some, weight, following, token_losses, False)
        for some, following in zip(x.split(EVALUATED), targets.split(EVALUATED), strict=True)
    ]
    return sum(losses)


def use_fused_loss(model: torch.nn.Module, compile: bool = False):
    """Let a model whose output layer is a matrix alone have its loss from fused_loss; compile:
    whether the model will be compiled."""
    if type(model.lm_head) is torch.nn.Linear and model.lm_head.bias is None:
        # It differentiates inside, which a graph cannot hold. This imports the compiler, in 0.9 s.
        model.fused_loss = torch.compiler.disable(fused_loss) if compile else fused_loss
