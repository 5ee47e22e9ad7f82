"""A step's loss is the mean over its targets, and so is that of an evaluation."""

import math
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from gptling.dataset import Dataset
from gptling.loss import evaluate
from model import GPT, GPTConfig
from tests.conftest import TINY, one_process, read_log, run_here, weights


@pytest.fixture
def train_masked(here, train_here, monkeypatch):
    """A function that runs train.py with a mask of inputs; returns its log and its weights."""

    def train_masked(mask, *flags):
        def batch(*arguments, plain=Dataset.batch):
            return [(x, y.masked_fill(mask(x), -100)) for x, y in plain(*arguments)]

        flags = ["--dataset=mine", *TINY, "--log_interval=1", "--max_iters=4", *flags]
        with monkeypatch.context() as patch:
            patch.setattr(Dataset, "batch", batch)
            process = run_here("train.py", *flags, "--overwrite", cwd=here)
        assert process.returncode == 0, process.stderr.decode()
        return read_log(here / "out" / "mine"), weights(here / "out" / "mine", step=4)

    return train_masked


def test_a_step_is_the_mean_over_the_targets_of_all_micro_batches(train_masked):
    """Of which some have none. Two processes: see test_processes."""
    runs = []
    for n in (1, 2, 8):
        flags = [f"--batch_size={8 // n}", f"--gradient_accumulation_steps={n}"]
        log, _ = train_masked(lambda x: (x % 3 == 0) | (x[:, :1] % 2 == 0), *flags)
        runs.append([log[0]["norm"], *(entry["loss"] for entry in log[:3])])
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[2] == pytest.approx(runs[0], rel=1e-4)


def test_a_step_without_targets_has_a_loss_of_0_and_changes_nothing(train_masked):
    log, after = train_masked(lambda x: x == x, "--weight_decay=0")
    assert all(entry["loss"] == entry["norm"] == 0 for entry in log if "loss" in entry)
    _, before = train_masked(lambda x: x == x, "--learning_rate=0", "--min_lr=0")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_evaluation_is_the_mean_over_the_targets_that_count():
    model, (idx, targets) = make_model(), batch(B=140)
    targets[20:90] = -100
    with torch.no_grad():
        expected = model.eval()(idx, targets)[1].item()
    batches = list(zip(idx.split(70), targets.split(70), strict=True))
    sizes = {"val_targets": 96, "val_bytes": 192, "block_size": 16}
    data = types.SimpleNamespace(validation_batches=lambda *_: batches, **sizes)
    nats, bits, _ = evaluate(model, data, 70, one_process(), nullcontext()).values()
    assert nats == pytest.approx(expected, rel=1e-6)
    assert bits == pytest.approx(expected / math.log(2) / 2, rel=1e-6)


def make_model(sharp=3.0, **sizes):
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 97, "n_layer": 2, "n_head": 2, "n_embd": 32} | sizes
    model = GPT(GPTConfig(**sizes)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharp)  # logits far from uniform
    return model


def batch(B=4):
    idx, targets = torch.randint(97, (2, B, 16))
    targets[0, :7] = -100
    return idx, targets


def loss_and_gradients(model, idx, targets):
    _, loss = model(idx, targets)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_floats_are_summed_in_float32(dtype):
    """Over 50,000 logits: their sum in bfloat16 would be off by a hundredth or more."""
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(4, 50_257)).to(dtype), torch.randint(50_257, (4,))
    ours = GPT.losses(None, logits, targets)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)


def test_bfloat16_gradients_are_those_of_float32_but_for_rounding():
    model, (idx, targets) = make_model(sharp=1.0), batch()
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients.append(loss_and_gradients(model, idx, targets))
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == torch.float32
        assert (exact - rounded).norm() < 0.1 * exact.norm() + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_has_the_same_loss_and_gradients(dtype):
    model, (idx, targets) = make_model(n_layer=1), batch()
    results = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(idx, targets)[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
