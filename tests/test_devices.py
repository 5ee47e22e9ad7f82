"""The machine: devices and dtypes, kernels for a CPU, waiting threads, peaks."""

import math
import os
import runpy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from gptling import devices, startup
from gptling.cli import UserError
from model import GPT, GPTConfig
from tests.scripts import ROOT


@pytest.mark.parametrize("device, auto", [("cuda", "cuda"), ("mps", "cpu"), ("xpu", "cpu")])
def test_a_device_is_refused_if_missing_and_auto_is_one_that_has_been_run(
    device, auto, monkeypatch, capsys
):
    monkeypatch.setattr(f"torch.{device}.is_available", lambda: False)
    with pytest.raises(UserError, match=f"--device={device}"):
        devices.pick_device(device)
    monkeypatch.setattr(f"torch.{device}.is_available", lambda: True)
    assert devices.pick_device("auto") == auto
    assert capsys.readouterr().err == ""
    assert devices.pick_device(device) == device
    assert ("never been run" in capsys.readouterr().err) == (device != "cuda")
    assert devices.pick_device("cpu") == "cpu"


@pytest.mark.parametrize("native, fp16, amx", [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)])
def test_dtype_is_as_asked_and_auto_is_what_pays_on_the_machine(native, fp16, amx, monkeypatch):
    """Training without the AMX of a processor that multiplies float16 too is in float32."""
    machine = {
        "cpu.get_capabilities": lambda: {"avx512_fp16": fp16},
        "cpu._is_amx_tile_supported": lambda: bool(amx),
        "cpu._is_avx512_bf16_supported": lambda: bool(native),
        "cuda.is_bf16_supported": lambda including_emulation: native,
    }
    for name, answer in machine.items():
        monkeypatch.setattr(f"torch.{name}", answer, raising=False)
    assert devices.pick_dtype("float16", "cpu", wide=True) == "float16"
    assert devices.pick_dtype("auto", "cpu", wide=False) == "float32"
    assert devices.pick_dtype("auto", "mps", wide=True) == "float32"
    on_cpu = "bfloat16" if native else "float32"
    assert devices.pick_dtype("auto", "cpu", wide=True) == on_cpu
    assert devices.pick_dtype("auto", "cuda", wide=False) == ("bfloat16" if native else "float16")
    expected = on_cpu if amx or not fp16 else "float32"
    assert devices.pick_dtype("auto", "cpu", wide=True, training=True) == expected


MASK = torch.arange(45.0).view(5, 9) % 4


@pytest.mark.parametrize("mask", [None, MASK > 0, MASK.bfloat16()])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
def test_float32_attention_is_that_of_float64_but_for_one_rounding(mask, cache_dtype):
    torch.manual_seed(0)
    q = torch.randn(2, 2, 5, 8).bfloat16()
    k, v = (torch.randn(2, 2, 9, 8).bfloat16().to(cache_dtype) for _ in "kv")
    wide = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=wide)
    with torch.autocast("cpu", torch.bfloat16):
        y = devices.cpu_attention(q, k, v, attn_mask=mask)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("n_queries, n_heads", [(1, 3), (7, 3), (7, 1)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_training_is_pytorchs(dtype, is_causal, n_queries, n_heads):
    """With dropout in float32, whose places the seed draws. Its gradients too, also if the heads of
    queries share one of keys and values."""
    devices.replace_operators()
    shapes = [(2, 3, n_queries, 8), (2, n_heads, 7, 8), (2, n_heads, 7, 5)]  # v may be narrower
    dropout_p, results = 0.3 if dtype == torch.float32 else 0.0, []
    for attend in (devices.cpu_attention, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        inputs = [torch.randn(shape).to(dtype) for shape in shapes]
        exact = dtype if attend is devices.cpu_attention else torch.float32
        inputs = [x.to(exact).requires_grad_() for x in inputs]
        y = attend(*inputs, is_causal=is_causal, dropout_p=dropout_p)
        gradients = torch.autograd.grad(y.float().square().sum(), inputs)
        results.append([t.float() for t in (y, *gradients)])
    error = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(*results, **error)


def cross_entropy(logits, targets, label_smoothing=0.0, **options):
    """F.cross_entropy, written out."""
    log_probs = logits.log_softmax(-1)
    log_probs = torch.lerp(log_probs, log_probs.mean(-1, keepdim=True), label_smoothing)
    return F.nll_loss(log_probs, targets, **options)


OPTIONS = [{}, {"label_smoothing": 0.1}, {"ignore_index": 5}, {"weight": torch.arange(1.0, 12)}]


@pytest.mark.parametrize("options", [*OPTIONS, {"reduction": "mean"}], ids=str)
def test_fast_cross_entropy_is_pytorchs(options):
    """Its gradient too, as often as the graph is kept for it."""
    devices.replace_operators()
    torch.manual_seed(0)
    logits = (1000 + 300 * torch.randn(7, 11)).requires_grad_()  # most probabilities are 0
    targets = torch.arange(7)
    targets[3] = options.get("ignore_index", -100)
    options = {"reduction": "none"} | options
    upstream = torch.arange(1.0, 8)
    losses, expected = (f(logits, targets, **options) for f in (F.cross_entropy, cross_entropy))
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad((expected * upstream).sum(), logits)
    for keep in (True, True, False):
        (fast,) = torch.autograd.grad((losses * upstream).sum(), logits, retain_graph=keep)
        torch.testing.assert_close(fast, gradient)
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(F.cross_entropy(logits, targets, **options), losses)


def test_a_second_derivative_and_a_target_outside_the_vocabulary_are_errors():
    devices.replace_operators()
    logits = torch.randn(1, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([0]), reduction="none").sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, logits, create_graph=True)
    for target in (-1, 5):
        with pytest.raises(IndexError, match="out of bounds"):
            F.cross_entropy(logits, torch.tensor([target]), reduction="none")


SHARES = {"H200": 0.7523, "A100-SXM4-80GB": 2.3846, "L4": 6.1488, "L40S": 2.0552}
SHARES |= {"GeForce RTX 4090": 4.5036, "GeForce RTX 4090 Laptop GPU": None}  # another chip


@pytest.mark.parametrize("gpu, share", [*SHARES.items(), ("GeForce GTX 1060", None)])
def test_utilisation_is_6_flops_a_parameter_and_token_of_a_known_peak(gpu, share):
    utilisation = devices.flops_utilisation(1e6, 124_000_000, f"NVIDIA {gpu}")
    assert utilisation == pytest.approx(share, abs=1e-4)


def test_attention_with_a_kernel_of_its_own_keeps_it():
    model = GPT(GPTConfig(8, 11, 2, 2, 8))
    model.h[1].attn.attend = torch.add
    assert not devices.use_cpu_attention(model)
    assert model.h[0].attn.attend is devices.cpu_attention
    assert model.h[1].attn.attend is torch.add


def test_buffers_keep_their_digits_where_parameters_are_cast():
    model = GPT(GPTConfig(8, 11, 1, 2, 8))
    model.register_buffer("angles", torch.tensor([1 + 2j]))
    devices.cast_parameters(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.angles.dtype == torch.complex64


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_that_wait_sleep_soon_unless_the_user_says_when(given, monkeypatch):
    monkeypatch.setattr("os.environ", dict(given))
    runpy.run_path(startup.__file__)  # as an import does
    assert os.environ == {"GOMP_SPINCOUNT": "10000"} | given


@pytest.mark.parametrize("script", ["train", "sample"])
def test_how_threads_wait_is_chosen_before_pytorch_is_imported_without_its_compiler(script):
    """And there the time of a planned run begins, so that it has the seconds of this import."""
    said = "hasattr(sys.modules.get('gptling.startup'), 'STARTED')"
    code = f"import sys; sys.addaudithook(lambda _, what: what[:1] == ('torch',) and print({said}))"
    code += f"\nimport {script}; print('torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "True\nFalse\n", result.stderr


@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_dropout_draws_each_number_by_itself_and_from_the_seed(dropout, dtype):
    devices.replace_operators()
    x = torch.ones(1000, 401, dtype=dtype)[:, 1:]  # 400,000 numbers

    def drop(seed):
        torch.manual_seed(seed)
        return F.dropout(x, dropout)

    y = drop(1)
    assert torch.equal(y, drop(1)) and not torch.equal(y, drop(2))
    assert torch.equal(y.unique(), torch.tensor([0, 1 / (1 - dropout)], dtype=dtype))
    dropped = (y == 0).flatten().double()
    sigma = math.sqrt(dropout * (1 - dropout) / len(dropped))
    assert dropped.mean() == pytest.approx(dropout, abs=4 * sigma)
    for distance in (1, 2, 3, 4, 5, 400):
        both = (dropped[distance:] * dropped[:-distance]).mean()
        assert both == pytest.approx(dropout**2, abs=4 * dropout / math.sqrt(len(dropped)))
    q = torch.randn(1, 2, 50, 8)
    masked = F.scaled_dot_product_attention(q, q, torch.eye(50).expand(1, 2, 50, 50), None, dropout)
    assert (masked == 0).double().mean() == pytest.approx(dropout, abs=0.03)
    for p in (0.0, 1e-9, 1 - 1e-9, 1.0):  # all or nothing is exact
        assert (torch.empty(7, 100_000).bernoulli_(p) == round(p)).all()
