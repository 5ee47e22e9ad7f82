"""Muon: momentum, orthogonalised by Newton-Schulz's iteration.
Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/
Zhang et al. 2026, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/"""

import math

import torch
from torch import Tensor

from gptling.processes import is_sharded, shard, whole


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon, which orthogonalises equal matrices in one batch, in `dtype`. A parameter
    of three dimensions is a stack of matrices. One with an attribute `matrices`, a list of numbers
    of rows, is so many matrices on top of each other, as queries, keys and values are."""

    def __init__(self, params, dtype: torch.dtype, lr=0.02, momentum=0.95, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            # FSDP's are whole one after the other, so that no process needs memory for all.
            together = [[p] for p in params] if any(map(is_sharded, params)) else [params]
            for some in together:
                self.update(some, group)

    def update(self, params: list[Tensor], group: dict):
        """Update parameters, with all their matrices of one shape in one batch."""
        wholes = {}  # {parameter: itself, or gathered from all processes if it is sharded}
        by_shape = {}  # {shape: [(weight, update), ...]} of all matrices, as views of the whole
        for p in params:
            weight = whole(p)
            update = whole(self.update_momentum(p, group["momentum"]))
            wholes[p] = weight
            rows = getattr(p, "matrices", [p.size(-2)])
            parts = zip(weight.split(rows, -2), update.split(rows, -2), strict=True)
            for matrix, its_update in parts:
                by_shape.setdefault(matrix.shape, []).append((matrix, its_update))
        for pairs in by_shape.values():
            self.apply(pairs, group)
        for p, weight in wholes.items():
            if weight is not p:
                p.copy_(shard(weight, p))

    def update_momentum(self, p: Tensor, momentum: float) -> Tensor:
        """Add a gradient to its moving average. Return the update, Nesterov's: the average as it
        would be after the same gradient once more, (1 - momentum) grad + momentum new average."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average = state["momentum_buffer"]
        average.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(average, momentum)

    def apply(self, pairs: list[tuple[Tensor, Tensor]], group: dict):
        """Orthogonalise the updates of weights of one shape, and add them."""
        updates = torch.stack([update for _, update in pairs])  # (n, rows, columns), or of stacks
        rows, columns = updates.shape[-2:]
        matrices = updates.view(-1, rows, columns).to(self.dtype)
        exact = self.dtype == torch.float32 and updates.device.type == "cpu"
        updates = orthogonalise(matrices, exact).view(updates.shape)
        scale = math.sqrt(max(1, rows / columns))  # taller ones write more
        for (weight, _), update in zip(pairs, updates, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(x: Tensor, exact: bool = False) -> Tensor:
    """About U V^T of each x = U S V^T, (n, rows, columns), by 5 steps of Newton-Schulz's iteration:
    x becomes factor x, where factor = a + b gram + c gram^2, and gram = x x^T, (rows, rows).

    If x is long, multiplying it is expensive. Then the factors of several steps are multiplied
    first, and the Gram matrix follows without x: gram becomes factor gram factor (Zhang et al.
    2026). Each such step multiplies rounding errors by a^2 = 12, so that three are the limit in
    bfloat16, and one for few rows. exact: matmuls are in full float32, which allows all five."""
    rows, columns = x.shape[1:]
    if rows > columns:  # the smaller matmul of the two
        return orthogonalise(x.mT, exact).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    at_once = 5 if exact else 3
    if rows == columns or (rows < 64 and not exact):
        at_once = 1
    for first in range(0, 5, at_once):
        gram = x @ x.mT
        factor = product = newton_schulz_factor(gram)
        for _ in range(first + 1, min(first + at_once, 5)):
            gram = factor @ gram @ factor
            factor = newton_schulz_factor(gram)
            product = factor @ product
        x = product @ x
    return x


def newton_schulz_factor(gram: Tensor) -> Tensor:
    """Return a + b gram + c gram^2, (n, rows, rows), with the numbers of Jordan et al. 2024."""
    factor = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
    factor.diagonal(dim1=1, dim2=2).add_(3.4445)
    return factor
