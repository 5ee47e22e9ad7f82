"""The loss of a model some rows at a time: memory never holds all logits in float32.

What a logit is, and what a token's loss, say `model.logits` and `model.losses` alone."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gptling.files import UserError

ROWS_WITHOUT_GRADIENT = 2048  # rows of logits held at a time where no gradient is needed
# Logits in float32 at a time: 16 MB stay in a CPU's cache; 512 MB elsewhere.
LOGITS_AT_ONCE = {"cpu": 1 << 22}


class LossesInPieces(torch.autograd.Function):
    """losses(logits (N, V), targets (N,)). Their gradient is made as soon as they are, some rows at
    a time, and takes the logits' place (Hsu et al. 2024, https://arxiv.org/abs/2410.10989):
    memory holds (N, V) numbers once, in the dtype of matmuls. One backward pass only.
    in_place: whether the logits may be overwritten."""

    @staticmethod
    def forward(ctx, logits, targets, losses, rows, in_place):
        ctx.gradient = logits.detach() if in_place else torch.empty_like(logits)
        # float16 has nothing below 6e-8, and no row's gradient is above 1.
        ctx.scale = 256 if logits.dtype == torch.float16 else 1
        rows_losses = []
        parts = (tensor.split(rows) for tensor in (logits, targets, ctx.gradient))
        for part, target, gradient in zip(*parts, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                loss = losses(part, target)
                gradient[:] = torch.autograd.grad(loss.sum() * ctx.scale, part)[0]
            rows_losses.append(loss.detach())
        return torch.cat(rows_losses)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        # Before the sum over rows that a weight's gradient is, which could pass float16's 65,504.
        weights = gradient[:, None] / ctx.scale  # (N, 1): of each row in the loss
        if weights.is_cpu and torch.equal(weights, weights[:1].expand_as(weights)):
            weights = weights[0, 0]  # as in a mean: 40 times as fast for logits in bfloat16
        grad_logits = ctx.gradient.mul_(weights)
        del ctx.gradient
        return grad_logits, None, None, None, None


def loss_in_pieces(
    to_logits: Callable, losses: Callable, x: torch.Tensor, targets: torch.Tensor, rows: int = 0
) -> torch.Tensor:
    """losses(to_logits(x), targets), (B T,), for GPT.loss_in_pieces: hidden states x (B, T, C),
    targets (B, T); to_logits gives (B, T, V), losses (N,) from `rows` of (N, V) and (N,). A
    compiler fuses the whole of it, and gets it whole."""
    if torch.compiler.is_compiling():
        return losses(to_logits(x).flatten(0, 1), targets.flatten())

    def rows_of(logits):
        return rows or max(1, LOGITS_AT_ONCE.get(logits.device.type, 1 << 27) // logits.size(1))

    if not torch.is_grad_enabled():
        rows_losses, n = [], max(1, ROWS_WITHOUT_GRADIENT // x.size(1))  # sequences
        for part_x, part_targets in zip(x.split(n), targets.split(n), strict=True):
            logits, flat_targets = to_logits(part_x).flatten(0, 1), part_targets.flatten()
            parts = (tensor.split(rows_of(logits)) for tensor in (logits, flat_targets))
            rows_losses += [losses(*part) for part in zip(*parts, strict=True)]
        return torch.cat(rows_losses)

    kept = set()  # the memory that the backward pass through to_logits will read

    def pack(tensor):
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = to_logits(x).flatten(0, 1)
    in_place = logits.untyped_storage().data_ptr() not in kept
    return LossesInPieces.apply(logits, targets.flatten(), losses, rows_of(logits), in_place)


def use_loss_in_pieces(model: torch.nn.Module, rows: int = 0):
    """Let a model have its loss from loss_in_pieces, if that gives the same loss and gradients.
    rows: of logits in a micro-batch of a model that will be compiled, which holds them all at once
    if a GPU has room for four times as much in float32. 0 if it will not be compiled."""
    idx = torch.arange(min(8, model.config.block_size), device=next(model.parameters()).device)
    idx = idx[None] % model.config.vocab_size

    def loss_and_norms(pieces):  # of the gradients; of a copy, whose buffers may change
        trial = copy.deepcopy(model)
        trial.loss_in_pieces = pieces
        torch.manual_seed(0)  # the same dropout
        loss, _ = objective_and_parts(trial(idx, idx))
        parameters = [p for p in trial.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.stack([loss.detach(), *(g.norm() for g in gradients if g is not None)])

    with torch.random.fork_rng([]):
        trial = copy.deepcopy(model)
        trial.losses = lambda logits, targets: logits.new_zeros(len(targets))
        rest = trial(idx, idx)[1]  # what forward adds to the losses
        plain = loss_and_norms(None)
        try:
            pieces = loss_and_norms(partial(loss_in_pieces, rows=3))
        except (AttributeError, TypeError):  # forward needs the logits, which are None
            pieces = plain[:0]
    same = len(pieces) == len(plain) and torch.allclose(pieces, plain, rtol=1e-3, atol=1e-7)
    if not same or rest != 0 or rest.requires_grad:
        print("chunked loss disabled: forward() computes a different loss; it uses more memory")
        return
    # Out of the compiled graph pieces differentiate inside. That imports the compiler, in a second.
    free = torch.cuda.mem_get_info()[0] if rows and torch.cuda.is_available() else 0
    in_graph = not rows or 16 * rows * model.config.vocab_size < free
    model.loss_in_pieces = loss_in_pieces if in_graph else torch.compiler.disable(loss_in_pieces)


def objective_and_parts(output: tuple) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of what GPT.forward returns with targets: what training minimizes, and the parts whose
    sum it is: "loss", and what a changed model adds to it. Raises UserError for another third value
    than {name: scalar}."""
    _, loss, *terms = output
    terms = terms[0] if terms else {}
    named = isinstance(terms, dict) and "loss" not in terms
    if not named or not all(isinstance(t, torch.Tensor) and t.dim() == 0 for t in terms.values()):
        third = "forward() in model.py returns a third value"
        raise UserError(f"{third}, {terms!r:.50}: give {{name: scalar tensor}}, no name being loss")
    return sum(terms.values(), start=loss), {"loss": loss} | terms


def check_finite(what: str, value: float, step: int, config: Any):
    """Raise UserError if a loss or a norm is NaN or infinite."""
    if not math.isfinite(value):
        remedy = f"lower --learning_rate={config.learning_rate} or --grad_clip={config.grad_clip}"
        raise UserError(f"{what} is {value} at step {step}: {remedy}, or use --dtype=float32")
