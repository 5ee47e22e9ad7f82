"""Muon's orthogonalised updates stay within their bounds."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gptling.muon import orthogonalise


class RoundToTF32(TorchFunctionMode):
    """Round what goes into a matmul to TF32's 10 bits of mantissa, as a GPU does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.baddbmm):
            bits = [a.view(torch.int32) + 0x1000 & ~0x1FFF for a in args]
            args = [b.view(torch.float32) for b in bits]
        return function(*args, **(kwargs or {}))


def draw_matrices(n, rows, columns):
    """(n, rows, columns), of rank 1 to full and of condition 1 to 1e6."""
    r = min(rows, columns)
    u, v = (torch.linalg.qr(torch.randn(n, size, r))[0] for size in (rows, columns))
    rank = torch.randint(1, r + 1, (n, 1))
    rank[: n // 4] = 1 + (rank[: n // 4] - 1) // 8
    i, condition = torch.arange(r), 10 ** (6 * torch.rand(n, 1))
    s = torch.where(i < rank, condition ** (-i / (rank - 1).clamp(min=1)), 0.0)  # (n, r)
    return (u * s[:, None]) @ v.mT


@pytest.mark.parametrize("rounding", ["bfloat16", "float32", "TF32"])
@pytest.mark.parametrize(
    ("rows", "columns", "n"),
    [(1, 128, 50), (2, 128, 500), (3, 7, 500), (4, 16, 500), (8, 128, 300), (16, 64, 200),
     (20, 64, 200), (48, 64, 50), (63, 256, 50), (64, 65, 50), (64, 512, 20), (512, 128, 10),
     (256, 256, 5)],
)  # fmt: skip
def test_no_update_has_a_singular_value_above_1_3(rows, columns, n, rounding):
    torch.manual_seed(0)
    x = draw_matrices(n, rows, columns)
    if rounding == "TF32":
        with RoundToTF32():
            y = orthogonalise(x)
    elif rounding == "float32":
        y = orthogonalise(x, exact=True)
    else:
        y = orthogonalise(x.bfloat16()).float()
    assert torch.linalg.matrix_norm(y, 2).max() <= 1.3
