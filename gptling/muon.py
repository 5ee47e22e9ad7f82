"""Muon: momentum, orthogonalised by Newton-Schulz's iteration.
Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/
Zhang et al. 2026, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/"""

import math

import torch


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
            lr, momentum = group["lr"], group["momentum"]
            batches = {}  # (rows, columns): [(weight, update)], parts of parameters
            gathered = []  # (sharded parameter, the whole of it)
            names = group.get("param_names", group["params"])
            for name, p in zip(names, group["params"], strict=True):
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                first_moment = self.state[p]["momentum_buffer"]
                first_moment.lerp_(p.grad, 1 - momentum)
                weight, update = p, p.grad.lerp(first_moment, momentum)  # Nesterov's
                if hasattr(p, "full_tensor"):
                    weight, update = p.full_tensor(), update.full_tensor()
                    gathered.append((p, weight))
                rows = getattr(p, "matrices", [p.size(-2)])
                if sum(rows) != p.size(-2):
                    raise ValueError(f"{name}: .matrices {rows} of {p.size(-2)} rows")
                rows = rows * weight[..., 0, 0].numel()
                parts = (t.view(-1, p.size(-1)).split(rows) for t in (weight, update))
                for part in zip(*parts, strict=True):
                    batches.setdefault(part[0].shape, []).append(part)
            for (rows, columns), parts in sorted(batches.items()):
                updates = torch.stack([update for _, update in parts]).to(self.dtype)
                exact = self.dtype == torch.float32 and updates.device.type == "cpu"
                scale = math.sqrt(max(1, rows / columns))  # taller ones write more
                for (weight, _), update in zip(parts, orthogonalise(updates, exact), strict=True):
                    weight.mul_(1 - lr * group["weight_decay"])
                    weight.add_(update, alpha=-lr * scale)
            for p, weight in gathered:
                p.copy_(shard(weight, p))


def orthogonalise(x: torch.Tensor, exact: bool = False, steps: int = 5) -> torch.Tensor:
    """About U V^T of each x = U S V^T, (n, rows, columns), by steps of Newton-Schulz's iteration,
    x = (a + b gram + c gram^2) x, with the Gram matrix x x^T. Several steps are done in that of a
    long x alone (Zhang et al. 2026). Each multiplies rounding errors by a^2 = 12, so it is computed
    again after three steps, of a short x after each. exact: matmuls are in full float32."""
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan et al. 2024
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # the smaller matmul of the two
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    rows, columns = x.shape[1:]
    at_once = 1 if rows == columns else 5 if exact else 1 if rows < 64 else 3
    for first in range(0, steps, at_once):
        gram, factor, product = x @ x.mT, None, None
        for _ in range(first, min(first + at_once, steps)):
            if factor is not None:
                gram = factor @ gram @ factor  # that of product x
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal(dim1=1, dim2=2).add_(a)
            product = factor if product is None else factor @ product
        x = product @ x
    return x.mT if tall else x


def shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor on the device of another one, and sharded as that is if it has its shape."""
    tensor = tensor.to(like.device)
    if not hasattr(like, "device_mesh") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(tensor, like.device_mesh, like.placements)
