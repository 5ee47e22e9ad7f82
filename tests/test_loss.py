"""A step's loss is the mean over its targets; in pieces it is that of GPT.logits and GPT.losses."""

import math
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from gptling.dataset import Dataset
from gptling.loss import evaluate, loss_in_pieces, use_loss_in_pieces
from model import GPT
from tests.conftest import TINY, one_process, read_log, run_here, weights
from tests.edits import INIT, LOGITS, LOSS, edited_module

pytestmark = pytest.mark.gpt2  # edits are of the unchanged code


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
    model.loss_in_pieces = loss_in_pieces  # which cuts the 70 * 16 rows of a batch
    batches = list(zip(idx.split(70), targets.split(70), strict=True))
    sizes = {"val_targets": 96, "val_bytes": 192}
    data = types.SimpleNamespace(validation_batches=lambda *_: batches, **sizes)
    nats, bits, _ = evaluate(model, data, 70, one_process(), nullcontext()).values()
    assert nats == pytest.approx(expected, rel=1e-6)
    assert bits == pytest.approx(expected / math.log(2) / 2, rel=1e-6)


FLOAT32 = "        logits = logits.to(torch.promote"
SCALAR = "        self.t = nn.Parameter(torch.tensor([2.0]))\n"
OTHERWISE = {
    "forward of all logits": (
        (LOSS, f"        if logits is not None:\n            losses = losses / 2\n{LOSS}"),
    ),
    "parameter in losses": (
        (INIT, SCALAR + INIT), (FLOAT32, f"        logits = logits / self.t\n{FLOAT32}")
    ),
    "rows that depend on others": (
        (FLOAT32, f"        logits = logits - logits.mean(0)\n{FLOAT32}"),
    ),
    "logits that autograd keeps": ((LOGITS, "return torch.tanh(self.lm_head(x))"),),
    "term of the logits": (
        (LOGITS, "self.aside = self.lm_head(x)\n        return self.aside"),
        (LOSS, f'{LOSS}, {{"z": self.aside.logsumexp(-1).square().mean()}}'),
    ),
}  # fmt: skip


def make_model(*changes, sharp=3.0, **sizes):
    module = edited_module(*changes)
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 97, "n_layer": 2, "n_head": 2, "n_embd": 32} | sizes
    model = module.GPT(module.GPTConfig(**sizes)).train()
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


def test_the_gradient_is_in_the_place_of_the_logits(monkeypatch):
    """It needs no memory of its own. No target is masked here, so that no row's gradient is 0."""
    model, (idx, targets) = make_model(), torch.randint(97, (2, 4, 16))
    expected = model(idx)[0].softmax(-1) - F.one_hot(targets, 97)  # of a row's loss
    seen, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda x: seen.append(logits(x)) or seen[-1])
    model.loss_in_pieces = loss_in_pieces
    loss = model(idx, targets)[1]
    torch.testing.assert_close(seen[0], expected)
    loss.backward()
    torch.testing.assert_close(seen[0], expected / 64)


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
    model.loss_in_pieces = loss_in_pieces
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients.append(loss_and_gradients(model, idx, targets))
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == torch.float32
        assert (exact - rounded).norm() < 0.1 * exact.norm() + 1e-6


@pytest.mark.parametrize("n, scale, ids", [(20_000, 1024.0, 3), (64, 8192.0, 4)])
def test_float16_loses_neither_large_sums_nor_small_probabilities(n, scale, ids):
    """The sum over 20,000 rows of up to 8 * 2/3 passes 65,504, their mean does not; of 64 rows a
    probability of 1e-8 is not lost, which is below what float16 can hold."""
    x, weight = torch.full((1, n, 2), 8.0), torch.zeros(4, 2)
    weight[3] = -17.25 / 16
    weight.requires_grad_()
    targets = torch.zeros(1, n, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        loss = loss_in_pieces(lambda x: x @ weight.T, make_model().losses, x, targets).sum() / n
    (loss * scale).backward()  # as GradScaler does
    probs = torch.tensor([1.0, 1.0, 1.0, math.exp(-17.25)]) / 3
    expected = 8 * (probs - torch.tensor([1.0, 0, 0, 0]))[:, None].expand(4, 2)
    torch.testing.assert_close(weight.grad[:ids] / scale, expected[:ids], rtol=0.05, atol=0)


def test_rows_may_weigh_differently_in_a_loss():
    """What forward() makes of the losses is its own: one weighs a tenth of another."""
    model, (idx, targets) = make_model(), batch()
    row_weights = torch.linspace(0.1, 1.0, 64)
    x, results = model.hidden(idx).detach(), []
    plain = model.losses(model.logits(x).flatten(0, 1), targets.flatten())
    for losses in (plain, loss_in_pieces(model.logits, model.losses, x, targets)):
        results.append(torch.autograd.grad((row_weights * losses).sum(), model.lm_head.weight))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["as it is", *OTHERWISE])
def test_a_loss_that_pieces_would_not_give_stays_as_it_is_and_that_is_said(name, capsys):
    model = make_model(*OTHERWISE.get(name, ()), dropout=0.2)
    model.wpe.weight.requires_grad_(False)
    model.unused = torch.nn.Parameter(torch.ones(1))
    use_loss_in_pieces(model)
    assert (model.loss_in_pieces is None) == (name in OTHERWISE)
    assert capsys.readouterr().out.count("chunked loss disabled") == (name in OTHERWISE)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_has_the_same_loss_and_gradients(dtype, pieces):
    model, (idx, targets) = make_model(n_layer=1), batch()
    if pieces:  # out of the graph
        use_loss_in_pieces(model, rows=1)
    results = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(idx, targets)[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
