"""The loss of a model some rows at a time: memory never holds all logits in float32.

What a logit is, and what a token's loss, say `model.logits` and `model.losses` alone."""

import copy
import math
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from gptling.files import UserError

ROWS_WITHOUT_GRADIENT = 1024  # rows of logits held at a time if no gradient is needed
# Logits in float32 at a time: 16 MB stay in a CPU's cache, 512 MB elsewhere.
LOGITS_AT_ONCE = {"cpu": 1 << 22}


class LossesInPieces(torch.autograd.Function):
    """losses(logits (N, V), targets (N,)), `rows` at a time. Each part's gradient is computed with
    it and overwrites the logits (Hsu et al. 2024, https://arxiv.org/abs/2410.10989): memory holds
    (N, V) numbers once, in the dtype of matmuls. One backward pass only."""

    @staticmethod
    def forward(ctx, logits, targets, losses, rows):
        rows = rows or max(1, LOGITS_AT_ONCE.get(logits.device.type, 1 << 27) // logits.size(1))
        # float16 has nothing below 6e-8, and no row's gradient is above 1.
        ctx.scale = 256 if logits.dtype == torch.float16 else 1
        ctx.gradient = logits.detach()  # autograd raises an error if it has kept the logits
        parts = []
        for part, target in zip(ctx.gradient.split(rows), targets.split(rows), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                loss = losses(leaf, target)
                part.copy_(torch.autograd.grad(loss.sum() * ctx.scale, leaf)[0])
            parts.append(loss.detach())
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        # One number for all rows, as of a mean, is faster. Either comes before the sum over rows
        # that a weight's gradient is, which could pass float16's 65,504.
        weights = gradient[0] if gradient.stride() == (0,) else gradient[:, None]
        grad_logits = ctx.gradient.mul_(weights / ctx.scale)
        del ctx.gradient
        return grad_logits, None, None, None


def loss_in_pieces(to_logits, losses, x: torch.Tensor, targets: torch.Tensor, rows: int = 0):
    """losses(to_logits(x), targets), (B T,), for GPT.loss_in_pieces: hidden states x (B, T, C),
    targets (B, T); to_logits gives (B, T, V), losses (N,) from `rows` of (N, V) and (N,)."""
    if torch.compiler.is_compiling():  # a compiler fuses the whole of it
        return losses(to_logits(x).flatten(0, 1), targets.flatten())
    if torch.is_grad_enabled():
        logits = to_logits(x).flatten(0, 1)
        return LossesInPieces.apply(logits, targets.flatten(), losses, rows)
    n = max(1, ROWS_WITHOUT_GRADIENT // x.size(1))  # sequences
    parts = zip(x.split(n), targets.split(n), strict=True)
    return torch.cat([losses(to_logits(x).flatten(0, 1), y.flatten()) for x, y in parts])


def use_loss_in_pieces(model: torch.nn.Module, rows: int = 0):
    """Let a model have its loss from loss_in_pieces, if that gives the same loss and gradients.
    rows: of logits in a micro-batch of a model that will be compiled, which holds them all at once
    if a GPU has room for four times as much in float32. 0 if it will not be compiled."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    idx = torch.arange(min(8, model.config.block_size), device=parameters[0].device)
    idx = idx[None] % model.config.vocab_size

    def loss_and_norms(pieces):  # of the gradients
        # A copy with the same parameters, because a forward pass may change buffers.
        trial = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        trial.loss_in_pieces = pieces
        torch.manual_seed(0)  # the same dropout
        loss, _ = objective_and_parts(trial(idx, idx))
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        return torch.stack([loss.detach(), *(g.norm() for g in gradients)])

    with torch.random.fork_rng([]):
        plain = loss_and_norms(None)
        try:
            pieces = loss_and_norms(partial(loss_in_pieces, rows=3))
        except (AttributeError, TypeError, RuntimeError):  # forward or autograd needs the logits
            pieces = math.nan * plain
    if not torch.allclose(pieces, plain, rtol=1e-3, atol=1e-7):
        print("chunked loss disabled, memory grows: forward() has another loss or gradient")
        return
    # Out of the compiled graph pieces differentiate inside. That imports the compiler, in a second.
    free = torch.cuda.mem_get_info()[0] if rows and torch.cuda.is_available() else 0
    in_graph = not rows or 16 * rows * model.config.vocab_size < free
    model.loss_in_pieces = loss_in_pieces if in_graph else torch.compiler.disable(loss_in_pieces)


def objective_and_parts(output: tuple) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of what GPT.forward returns with targets: what training minimises, and the parts whose
    sum it is: "loss", and what a changed model adds to it, a dict of scalars."""
    _, loss, *terms = output
    added = terms[0] if terms else {}
    return sum(added.values(), start=loss), {"loss": loss} | added


def check_finite(value: float, step: int, config):
    """Raise UserError if a loss plus its gradient's norm is NaN or infinite."""
    if not math.isfinite(value):
        remedy = f"lower --learning_rate={config.learning_rate} or --grad_clip={config.grad_clip}"
        what = f"the loss or its gradient is {value} at step {step}"
        raise UserError(f"{what}: {remedy}, or use --dtype=float32")
