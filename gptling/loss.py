"""The loss of a model some rows at a time: memory never holds all logits in float32.

What a logit is, and what a token's loss, say `model.logits` and `model.losses` alone."""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

EVALUATED = 2048  # rows of logits held at a time where no gradient is needed
PIECE = {"cpu": 1 << 22}  # logits in float32 at a time: what its cache takes; elsewhere 512 MB


class SumInPieces(torch.autograd.Function):
    """The sum of losses(logits (N, V), targets (N,)). Its gradient is made as soon as it is, some
    rows at a time, and takes the logits' place (Hsu et al. 2024, https://arxiv.org/abs/2410.10989):
    memory holds (N, V) numbers once, in the dtype of matmuls. One backward pass only.

    in_place: whether the logits may be overwritten; parameters: those that `losses` uses."""

    @staticmethod
    def forward(ctx, logits, targets, losses, in_place, *parameters):
        gradient = logits.detach() if in_place else torch.empty_like(logits)
        # float16 has nothing below 6e-8, and no row's gradient is above 1.
        ctx.scale = 256 if logits.dtype == torch.float16 else 1
        ctx.gradients = [gradient, *map(torch.zeros_like, parameters)]
        total = 0.0
        for rows in pieces(logits):
            with torch.enable_grad():
                part = logits[rows].detach().requires_grad_()
                loss = row_losses(losses, part, targets[rows]).sum()
                of_part, *others = torch.autograd.grad(loss * ctx.scale, (part, *parameters))
            gradient[rows] = of_part
            for sum_, other in zip(ctx.gradients[1:], others, strict=True):
                sum_ += other
            total += loss.detach()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        # Before the sum over rows that a weight's gradient is, which could pass float16's 65,504.
        of_logits, *others = (g.mul_(gradient / ctx.scale) for g in ctx.gradients)
        del ctx.gradients
        return of_logits, None, None, None, *others


def pieces(logits: torch.Tensor) -> list[slice]:
    """The rows of logits (N, V) that fit into the memory for float32."""
    size = max(1, PIECE.get(logits.device.type, 1 << 27) // logits.size(1))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def row_losses(losses: Callable, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    of_rows = losses(logits, targets)
    assert of_rows.shape == targets.shape, "GPT.losses has to give a loss for each row"
    return of_rows


def loss_in_pieces(
    logits_of: Callable, losses: Callable, x: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The sum of losses(logits_of(x), targets), for GPT.loss_in_pieces: hidden states x (B, T, C),
    targets (B, T); logits_of gives (B, T, V), losses (N,) from (N, V) and (N,), row by row."""
    if not torch.is_grad_enabled():
        total, n = 0.0, max(1, EVALUATED // x.size(1))  # sequences
        for some, following in zip(x.split(n), targets.flatten(1).split(n), strict=True):
            logits, following = logits_of(some).flatten(0, 1), following.flatten()
            for rows in pieces(logits):
                total += row_losses(losses, logits[rows], following[rows]).sum()
        return total

    kept = set()  # the memory that the backward pass through logits_of will read

    def pack(tensor):
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = logits_of(x).flatten(0, 1)
    in_place = logits.untyped_storage().data_ptr() not in kept
    targets = targets.flatten()
    probe = logits[:1].detach().requires_grad_()
    parameters = leaves(losses(probe, targets[:1])) - {probe}
    return SumInPieces.apply(logits, targets, losses, in_place, *parameters)


def leaves(tensor: torch.Tensor) -> set[torch.Tensor]:
    """What a gradient of `tensor` would go to."""
    found, nodes = set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        found |= {node.variable} if hasattr(node, "variable") else set()
        nodes += [following for following, _ in node.next_functions if following]
    return found


def use_loss_in_pieces(model: torch.nn.Module, compile: bool = False):
    """Let a model have its loss from loss_in_pieces, if it is the same; compile: whether the model
    will be compiled."""
    device = next(model.parameters()).device
    idx = torch.arange(min(8, model.config.block_size), device=device)[None]
    idx = idx % model.config.vocab_size

    def loss():
        with torch.random.fork_rng():  # the same dropout
            torch.manual_seed(0)
            return model(idx, idx)[1].detach()

    plain = loss()
    model.loss_in_pieces = loss_in_pieces
    if not torch.allclose(loss(), plain, rtol=1e-4, equal_nan=True):
        print(
            "forward has another loss than logits() and losses(): it takes more memory", flush=True
        )
        model.loss_in_pieces = None
    elif compile:
        # It differentiates inside, which a graph cannot hold. This imports the compiler, in 0.9 s.
        model.loss_in_pieces = torch.compiler.disable(loss_in_pieces)


def loss_and_terms(output: tuple) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of what GPT.forward returns with targets: the loss, and what training adds to it."""
    _, loss, *terms = output
    return loss, terms[0] if terms else {}
