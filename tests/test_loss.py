"""A step's loss is the mean over its targets, in float32."""

import pytest
import torch
import torch.nn.functional as F

from gptling.dataset import Dataset
from model import GPT
from tests.conftest import TINY, read_log, run_here


def test_a_step_is_the_mean_over_the_targets_of_all_micro_batches(here, train_here, monkeypatch):
    """Of which some have none. Two processes: see test_processes."""

    def batch(*arguments, plain=Dataset.batch):
        batches = plain(*arguments)
        return [(x, y.masked_fill((x % 3 == 0) | (x[:, :1] % 2 == 0), -100)) for x, y in batches]

    monkeypatch.setattr(Dataset, "batch", batch)
    runs = []
    for n in (1, 2, 8):
        flags = ["--dataset=mine", *TINY, "--log_interval=1", "--max_iters=4", "--overwrite"]
        flags += [f"--batch_size={8 // n}", f"--gradient_accumulation_steps={n}"]
        process = run_here("train.py", *flags, cwd=here)
        assert process.returncode == 0, process.stderr.decode()
        log = read_log(here / "out" / "mine")
        runs.append([log[0]["norm"], *(entry["loss"] for entry in log[:3])])
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[2] == pytest.approx(runs[0], rel=1e-4)


def test_a_step_without_targets_has_a_loss_of_0(here, train_here, monkeypatch):
    def batch(*arguments, plain=Dataset.batch):
        return [(x, y.fill_(-100)) for x, y in plain(*arguments)]

    monkeypatch.setattr(Dataset, "batch", batch)
    process = run_here("train.py", "--dataset=mine", *TINY, "--max_iters=2", cwd=here)
    assert process.returncode == 0, process.stderr.decode()
    log = read_log(here / "out" / "mine")
    assert log[-2]["loss"] == log[-2]["norm"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_floats_are_summed_in_float32(dtype):
    """Over 50,000 logits: their sum in bfloat16 would be off by a hundredth or more."""
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(4, 50_257)).to(dtype), torch.randint(50_257, (4,))
    ours = GPT.losses(None, logits, targets)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)
