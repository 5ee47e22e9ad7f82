"""The loss in pieces is that of GPT.logits and GPT.losses, whatever these two do."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from gptling import loss as loss_module
from gptling.loss import loss_in_pieces, use_loss_in_pieces
from model import GPT, GPTConfig


class SoftCapped(GPT):
    """What autograd keeps of it is the tanh, not what is returned."""

    def logits(self, x):
        return 2.0 * torch.tanh(super().logits(x) / 2.0)


class TanhLast(GPT):
    """What is returned is what autograd keeps: nothing may be written over it."""

    def logits(self, x):
        return torch.tanh(super().logits(x))


class Masked(GPT):
    def logits(self, x):
        return super().logits(x).index_fill(-1, torch.tensor([3, 5]), -10.0)


class OtherHead(GPT):
    """Untied, with a bias, and of two layers."""

    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        self.lm_head = nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, config.vocab_size))


class ZLoss(GPT):
    """In training only (Chowdhery et al. 2022)."""

    def losses(self, logits, targets):
        z = logits.float().logsumexp(-1) * (targets != -100)
        return super().losses(logits, targets) + 0.1 * z.square() * self.training


class Smoothed(GPT):
    def losses(self, logits, targets):
        options = {"ignore_index": -100, "reduction": "none", "label_smoothing": 0.1}
        return F.cross_entropy(logits.float(), targets, **options)


KINDS = [GPT, SoftCapped, TanhLast, Masked, OtherHead, ZLoss, Smoothed]


def make_model(kind=GPT, sharp=3.0, **sizes):
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 97, "n_layer": 2, "n_head": 2, "n_embd": 32} | sizes
    model = kind(GPTConfig(**sizes)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharp)  # logits far from uniform
    return model


def batch(T=16, B=4):
    idx, targets = torch.randint(97, (2, B, T))
    targets[0, :7] = -100
    return idx, targets


def loss_and_gradients(model, idx, targets):
    _, loss = model(idx, targets)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setitem(loss_module.LOGITS_AT_ONCE, "cpu", 97 * 5)  # 5 rows at a time
    monkeypatch.setattr(loss_module, "ROWS_WITHOUT_GRADIENT", 32)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_in_pieces_is_that_of_the_plain_code_with_the_same_gradients(kind):
    model, (idx, targets) = make_model(kind), batch()
    results = []
    for model.loss_in_pieces in (None, loss_in_pieces):
        logits, _ = model(idx, targets)
        assert (logits is None) == (model.loss_in_pieces is not None)
        results.append(loss_and_gradients(model, idx, targets))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_without_a_gradient_too_and_over_more_rows_than_are_held_at_a_time(kind):
    model, (idx, targets) = make_model(kind).eval(), batch(B=7)
    plain = model(idx, targets)[1]
    model.loss_in_pieces = loss_in_pieces
    torch.testing.assert_close(model(idx, targets)[1], plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_floats_are_summed_in_float32(dtype):
    """Over 50,000 logits: their sum in bfloat16 would be off by a hundredth or more."""
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(4, 50_257)).to(dtype), torch.randint(50_257, (4,))
    ours = GPT.losses(None, logits, targets)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)


def test_what_stands_behind_self_training_is_in_the_training_loss_alone():
    model, (idx, targets) = make_model(ZLoss), batch()
    with torch.no_grad():
        plain = GPT.losses(model, model(idx)[0].flatten(0, 1), targets.flatten()).sum()
        plain = plain / (targets != -100).sum()
    for model.loss_in_pieces in (None, loss_in_pieces):
        assert model.train()(idx, targets)[1] > plain + 0.1
        assert model.eval()(idx, targets)[1].item() == pytest.approx(plain.item(), abs=1e-5)


@pytest.mark.parametrize("kind", [GPT, SoftCapped, TanhLast])
@pytest.mark.parametrize("T, pieces", [(16, None), (64, None), (64, loss_in_pieces), (256, None)])
def test_bfloat16_gradients_are_those_of_float32_but_for_rounding(kind, T, pieces):
    model, (idx, targets) = make_model(kind, sharp=1.0, block_size=T), batch(T, B=2)
    model.loss_in_pieces = pieces
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


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_rows_may_weigh_differently_in_a_loss(dtype, tolerance):
    """What forward() makes of the losses is its own: one weighs a tenth of another."""
    x, targets = torch.randn(2, 16, 8), torch.randint(97, (2, 16))
    weight = torch.randn(97, 8, requires_grad=True)
    weights = torch.linspace(0.1, 1.0, 32)
    plain, pieces = (
        torch.autograd.grad((weights * losses).sum(), weight)[0]
        for losses in (
            F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten(), reduction="none"),
            loss_in_pieces(
                lambda x: x.to(dtype) @ weight.T.to(dtype), make_model().losses, x, targets
            ),
        )
    )
    assert (plain - pieces).norm() < tolerance * plain.norm()


def test_memory_that_autograd_has_kept_is_not_written_to(monkeypatch):
    """And that of a plain output layer is: the gradient takes no memory of its own."""
    asked = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t: asked.append(t.shape) or empty_like(t))
    for kind, times in ((GPT, 0), (SoftCapped, 0), (Masked, 0), (TanhLast, 1)):
        model = make_model(kind)
        model.loss_in_pieces = loss_in_pieces
        asked.clear()
        loss_and_gradients(model, *batch())
        assert asked == [(64, 97)] * times, kind


class InForward(GPT):
    """Its loss is of other logits than those of logits()."""

    def forward(self, idx, targets=None, **options):
        logits, loss = super().forward(idx, targets, **options)
        if logits is not None and targets is not None:
            loss = self.losses(0.5 * logits.flatten(0, 1), targets.flatten()).mean()
        return logits, loss


class LearnedTemperature(GPT):
    """A parameter that losses() uses, whose gradient pieces would not give."""

    def __init__(self, config):
        super().__init__(config)
        self.temperature = nn.Parameter(torch.tensor([2.0]))

    def losses(self, logits, targets):
        return super().losses(logits / self.temperature, targets)


class OverRows(GPT):
    """A row's loss depends on the other rows."""

    def losses(self, logits, targets):
        return super().losses(logits - logits.mean(0), targets)


class TermOfLogits(GPT):
    """A third value made of logits that logits() put aside, whose memory the gradient takes."""

    def logits(self, x):
        self.aside = super().logits(x)
        return self.aside

    def forward(self, idx, targets=None, **options):
        logits, loss = super().forward(idx, targets, **options)
        return logits, loss, {"z_loss": self.aside.float().logsumexp(-1).square().mean()}


@pytest.mark.parametrize("kind", [*KINDS, InForward, LearnedTemperature, OverRows, TermOfLogits])
def test_a_loss_that_pieces_would_not_give_stays_as_it_is_and_that_is_said(kind, capsys):
    model = make_model(kind, dropout=0.2)
    model.wpe.weight.requires_grad_(False)
    before = torch.get_rng_state()
    use_loss_in_pieces(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.loss_in_pieces is None) == (kind not in KINDS)
    assert capsys.readouterr().out.count("chunked loss disabled") == (kind not in KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GPT, SoftCapped, TanhLast])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_has_the_same_loss_and_gradients(kind, dtype, pieces):
    model, (idx, targets) = make_model(kind, n_layer=1), batch()
    if pieces:  # out of the graph
        use_loss_in_pieces(model, rows=1)
    results = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(idx, targets)[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)
