"""Muon, the state of any optimizer in and out of checkpoints, and losses that are no numbers.

Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/
Zhang et al. 2026, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/
"""

import math
from typing import Any

import torch

from gptling.cli import UserError


class Muon(torch.optim.Muon):
    """torch.optim.Muon with equal matrices orthogonalised in one batch (else a small model's step
    takes half as long again), in float32 where a CPU has no bfloat16 (else 28 times as long), and
    three squares in one parameter, as of queries, keys and values, each by itself (else the same
    loss takes a few in a hundred steps more)."""

    def __init__(self, params, dtype: torch.dtype, **options):
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for rows, columns in sorted({p.shape for p in group["params"]}):
                matrices = [p for p in group["params"] if p.shape == (rows, columns)]
                updates = []
                for p in matrices:
                    if not self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                    first_moment = self.state[p]["momentum_buffer"]
                    first_moment.lerp_(p.grad, 1 - momentum)
                    updates.append(p.grad.lerp(first_moment, momentum))  # Nesterov's look ahead
                height = columns if rows == 3 * columns else rows
                updates = torch.stack(updates).to(self.dtype).view(-1, height, columns)
                updates = orthogonalise(updates, group).reshape(-1, rows, columns)
                scale = math.sqrt(max(1, height / columns))  # taller ones write more
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)


def orthogonalise(x: torch.Tensor, options: dict) -> torch.Tensor:
    """About U V^T of each x = U S V^T, (n, rows, columns), by Newton-Schulz's iteration: several
    steps of a long x in its Gram matrix (Zhang et al. 2026)."""
    a, b, c = options["ns_coefficients"]
    steps = options["ns_steps"]
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # the smaller product of the two
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=options["eps"])  # singular values <= 1
    # A step multiplies x by a polynomial of its Gram matrix, which is smaller than a long x. Its
    # rounding grows by a^2 = 12 a step: after three of bfloat16, or TF32, it is made anew.
    square, exact = x.size(1) == x.size(2), x.dtype == torch.float32 and x.device.type == "cpu"
    at_once = 1 if square else 5 if exact else 3
    for first in range(0, steps, at_once):
        gram, factor, product = x @ x.mT, None, None
        for step in range(min(at_once, steps - first)):
            gram = factor @ gram @ factor if step else gram
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal(dim1=1, dim2=2).add_(a)
            product = factor @ product if step else factor
        x = product @ x
    return x.mT if tall else x


def whole_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The state of each parameter, {index: {name: value}}, whatever an optimizer keeps there;
    gathered where it is sharded: all processes must call it then."""

    def whole(value):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.cpu() if isinstance(value, torch.Tensor) else value

    saved = optimizer.state_dict()["state"]
    return {i: {name: whole(value) for name, value in state.items()} for i, state in saved.items()}


def load_states(optimizers: list[torch.optim.Optimizer], scaler, state: dict[str, Any]):
    """Give optimizers and GradScaler what a checkpoint has of them. Raises UserError."""
    if not state:
        return
    try:
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            if state["progress"].overflows < state["progress"].step:  # it has had a step
                load_state(optimizer, saved)
    except ValueError as error:
        raise UserError(f"training_state.pt does not fit: {error}; use --overwrite") from None
    if scaler.is_enabled() and state["scaler"]:  # it is empty where the dtype was another
        scaler.load_state_dict(state["scaler"])


def load_state(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]):
    """Take what whole_state gave, sharded as the parameters are; settings stay as they are. Raises
    ValueError for the state of other parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not saved.keys() <= set(range(len(parameters))):
        raise ValueError(f"it has the state of {len(saved)} of {len(parameters)} parameters")

    def shard(value, like):
        if not hasattr(like, "device_mesh") or getattr(value, "shape", None) != like.shape:
            return value
        from torch.distributed.tensor import distribute_tensor  # slow to import

        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)

    state = {i: {k: shard(v, parameters[i]) for k, v in saved[i].items()} for i in saved}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def check_finite(what: str, value: float, step: int, config: Any):
    if not math.isfinite(value):
        remedy = f"lower --learning_rate={config.learning_rate} or --grad_clip={config.grad_clip}"
        raise UserError(f"{what} is {value} at step {step}: {remedy}, or use --dtype=float32")
