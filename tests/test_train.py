"""train.py: its helpers against their definitions, and whole runs as a user makes them."""

import json
import math
import re
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import filelock
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gptling.dataset import Dataset
from gptling.evaluation import evaluate, loss_terms
from gptling.gpt2_format import load
from gptling.muon import Muon, orthogonalise
from gptling.run import list_checkpoints
from gptling.tokenizers import build_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from tests.conftest import assert_equal, edit_json, one_process, read_log, small, snapshot, weights
from tests.scripts import MINE, TINY, one_line, output_here, output_of, run_here
from tests.test_dataset import AB, write_data
from train import TrainConfig, configure_optimizers, learning_rate, set_up

STILL = ["--learning_rate=0", "--min_lr=0"]  # the weights stay as they are
MASKING = "# To mask targets, make them -100 here, before they are counted.\n"  # in train.py
UNEVENLY = "(x % 3 == 0) | (x[:, :1] % 2 == 0)"
MASKED = "batch = [(x, y.masked_fill({}, -100)) for x, y in batch]\n"


def train(*flags, cwd, changes=()):
    """Run train.py in this process, perhaps changed. Return the entries of its log with a loss."""
    output_here("train.py", *MINE, *flags, cwd=cwd, changes=changes)
    return [entry for entry in read_log(cwd / "out" / "mine") if "loss" in entry]


def after_backward(code):
    """A change of train.py: a line of code after each backward pass."""
    line = "* weight).backward()\n"
    return line, f"{line}            {code}\n"


def set_up_tiny(**settings):
    """train.py's model, the module it calls in training, and its optimizers, for two letters."""
    data = SimpleNamespace(tokenizer=AB, tokenizer_json=tokenizer_to_json(AB))
    config = small(block_size=16, n_layer=2, n_head=2, n_embd=16, **settings)
    return set_up(config, data, None, one_process())


def one_sequence(here):
    """Leave one training sequence. Return flags with which only dropout makes losses differ."""
    shard = here / "data/mine/train-00000.npy"
    np.save(shard, np.load(shard)[:17])
    edit_json(here / "data/mine/meta.json", train={"tokens": 17})
    return [*STILL, "--batch_size=1", "--log_interval=1", "--overwrite"]


@torch.no_grad()
def summed_loss(model, sequences):
    """The cross-entropy of all tokens but the first of each sequence, in nats."""
    logits = [model(sequence[None, :-1])[0][0] for sequence in sequences]
    pairs = zip(logits, sequences, strict=True)
    return sum(F.cross_entropy(x, ids[1:], reduction="sum").item() for x, ids in pairs)


# ---------------------------------------------------------------- schedule, optimizer, evaluation
@pytest.mark.parametrize("schedule", get_args(get_type_hints(TrainConfig)["schedule"]))
@pytest.mark.parametrize("max_iters", [1, 2, 9, 10, 50, 2000])
def test_every_schedule_rises_then_falls_to_min_lr(max_iters, schedule):
    warmup, rates = max_iters // 10, {"learning_rate": 1e-3, "min_lr": 1e-4}
    config = small(max_iters=max_iters, warmup_iters=warmup, schedule=schedule, **rates)
    rates = [learning_rate(step, max_iters, config) for step in range(max_iters)]
    assert rates[:warmup] == pytest.approx([1e-3 * (i + 1) / warmup for i in range(warmup)])
    assert all(a >= b for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert 0 < min(rates) and max(rates) <= 1e-3
    if max_iters > 1:
        assert max(rates) == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-4)


@pytest.mark.parametrize("hold", ["cosine", 0.0, 0.5, 0.9, 1.0])
def test_rates_fall_by_a_cosine_or_hold_then_fall_in_a_line(hold):
    schedule = {"schedule": "cosine"} if hold == "cosine" else {"schedule": "linear", "hold": hold}
    config = small(learning_rate=1e-2, min_lr=1e-3, max_iters=1001, warmup_iters=1, **schedule)
    rates, x = [learning_rate(step, 1001, config) for step in range(1001)], np.linspace(0, 1, 1000)
    left = (1 + np.cos(np.pi * x)) / 2 if hold == "cosine" else np.interp(x, [hold, 1], [1, 0])
    assert rates == pytest.approx([1e-2, *(1e-3 + 9e-3 * left[:-1]), 1e-3])


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_muon_is_that_of_pytorch(weight_decay):
    """With every matrix by itself: those that a parameter says it is made of, and of a stack."""
    torch.manual_seed(0)
    shapes = [(24, 8), (8, 8), (32, 8), (8, 32), (24, 8), (12, 8), (3, 8, 16)]
    matrices = {0: [8, 8, 8], 5: [8, 4]}  # rows; the other 24 x 8 is one matrix
    start = [torch.randn(shape) for shape in shapes]
    ours, theirs = [torch.nn.Parameter(m.clone()) for m in start], []
    for i, m in enumerate(start):
        parts = m.flatten(0, -2).split(matrices.get(i, m.size(-2)))
        theirs.append([torch.nn.Parameter(part.clone()) for part in parts])
        if i in matrices:
            ours[i].matrices = matrices[i]
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": weight_decay}
    batched = Muon(ours, torch.bfloat16, **options)
    oracle = torch.optim.Muon([part for parts in theirs for part in parts], **options)
    for _ in range(5):
        for a, parts in zip(ours, theirs, strict=True):
            for part in parts:
                part.grad = 1e-3 * torch.randn(part.shape)
            a.grad = torch.cat([part.grad for part in parts]).view(a.shape)
        batched.step()
        oracle.step()
    for a, parts, before in zip(ours, theirs, start, strict=True):
        expected = torch.cat([part.detach() for part in parts]).view(a.shape)
        torch.testing.assert_close(a - before, expected - before, rtol=0.02, atol=0.015)
        moments = torch.cat([oracle.state[part]["momentum_buffer"] for part in parts])
        assert torch.equal(batched.state[a]["momentum_buffer"], moments.view(a.shape))


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


SHAPES = [(1, 128, 50), (2, 128, 500), (3, 7, 500), (4, 16, 500), (8, 128, 300), (16, 64, 200)]
SHAPES += [(20, 64, 200), (48, 64, 50), (63, 256, 50), (64, 65, 50), (64, 512, 20), (512, 128, 10)]


@pytest.mark.parametrize("rounding", ["bfloat16", "float32", "TF32"])
@pytest.mark.parametrize("rows, columns, n", [*SHAPES, (256, 256, 5)])
def test_no_update_has_a_singular_value_above_1_3(rows, columns, n, rounding):
    torch.manual_seed(0)
    x = draw_matrices(n, rows, columns)
    dtype = torch.bfloat16 if rounding == "bfloat16" else torch.float32
    with RoundToTF32() if rounding == "TF32" else nullcontext():
        y = orthogonalise(x.to(dtype), exact=rounding == "float32").float()
    assert torch.linalg.matrix_norm(y, 2).max() <= 1.3


@pytest.mark.parametrize("optimizer, muon_decay", [("adamw", 0.29), ("muon", None), ("muon", 0.0)])
def test_settings_reach_the_optimizers_and_only_matrices_decay(optimizer, muon_decay):
    """No value is an optimizer's default. weight_decay is Muon's too, unless it has its own."""
    given = dict(weight_decay=0.37, beta1=0.81, beta2=0.83, muon_momentum=0.71, muon_lr=0.5)
    config = small(optimizer=optimizer, learning_rate=0.25, muon_decay=muon_decay, **given)
    model = GPT(GPTConfig(8, 11, 1, 2, 4))
    groups = [g for each in configure_optimizers(model, config) for g in each.param_groups]
    assert all(group["betas"] == (0.81, 0.83) for group in groups if "betas" in group)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    muon = [group for group in groups if "momentum" in group]
    expected = {id(p): 0.37 * (p.dim() >= 2) for p in model.parameters()}
    if muon_decay == 0:
        expected |= {id(p): 0.0 for group in muon for p in group["params"]}
    assert decay == expected
    assert [(g["momentum"], g["lr_scale"]) for g in muon] == [(0.71, 2)] * (optimizer == "muon")


def test_what_has_no_gradient_is_left_as_it_is():
    """A frozen parameter, or an expert that got no token; and its state begins when one comes."""
    for optimizer in ("adamw", "muon"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(8, 11, 2, 2, 4))
        model.h[0].mlp.c_fc.weight.requires_grad_(False)
        model.h[0].mlp.c_fc.bias.requires_grad_(False)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        optimizers = configure_optimizers(model, small(optimizer=optimizer))
        model(*torch.randint(11, (2, 2, 8)))[1].backward()
        model.h[1].attn.c_proj.weight.grad = None
        for each in optimizers:
            each.step()
        still = {"h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias", "h.1.attn.c_proj.weight"}
        same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
        assert same == still


def test_muon_lets_a_matrix_whose_gradient_is_zero_decay_alone():
    matrix = torch.nn.Parameter(torch.ones(4, 8))
    matrix.grad = torch.zeros(4, 8)
    Muon([matrix], torch.float32, lr=0.1, weight_decay=0.5).step()
    assert torch.equal(matrix, torch.full((4, 8), 0.95))


def test_muon_takes_the_matrices_inside_the_blocks_but_no_embeddings():
    """Neither a block's own, nor those that a block shares with the output layer, nor a parameter
    with a dimension of 1."""
    model = GPT(GPTConfig(8, 11, 2, 2, 4))
    model.h[0].values = torch.nn.Embedding(11, 4)
    model.h[1].exit = model.lm_head
    model.h[1].experts = torch.nn.Parameter(torch.ones(3, 4, 4))  # a stack of matrices
    model.h[1].slopes = torch.nn.Parameter(torch.ones(2, 1, 1))
    names = {id(p): name for name, p in model.named_parameters()}
    rest, taken = (
        {names[id(p)] for group in each.param_groups for p in group["params"]}
        for each in configure_optimizers(model, small(optimizer="muon"))
    )
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert taken == {f"h.{i}.{part}.weight" for i in (0, 1) for part in parts} | {"h.1.experts"}
    assert rest == set(names.values()) - taken


@pytest.mark.parametrize("n_tokens", [18, 100, 161])
@pytest.mark.parametrize("eval_tokens", [0, 16, 40, 1000])
def test_evaluation_covers_the_whole_split_or_evenly_spread_sequences(
    n_tokens, eval_tokens, tmp_path, monkeypatch
):
    """Each token once, or of four sequences of the split's seven the first, the third, ...; with
    the dropout off, against the mean over single sequences and their bytes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tokenizer = build_tokenizer("char", ["abcdäöü🙂xyz"], end_of_text=False)
    model = GPT(GPTConfig(16, 11, 2, 2, 8, dropout=0.5)).train()
    ids = np.random.default_rng(0).integers(0, 11, n_tokens)
    write_data(tmp_path / "data" / "mine", [1] * 50, ids, tokenizer)
    data = Dataset("mine", 16, eval_tokens)
    processes = one_process()
    processes.autocast = nullcontext()
    metrics = evaluate(model, data, 3, processes)
    assert model.training and metrics["is_cross_entropy"] is True
    in_all = math.ceil((n_tokens - 1) / 16)
    n = min(in_all, math.ceil(eval_tokens / 16)) or in_all
    starts = [16 * (i * in_all // n) for i in range(n)]
    sequences = [torch.from_numpy(ids[start : start + 17]) for start in starts]
    total = summed_loss(model.eval(), sequences)
    targets = torch.cat([sequence[1:] for sequence in sequences]).tolist()
    n_bytes = len(tokenizer.decode(targets).encode())
    assert metrics["val_tokens"] == len(targets) and (n < in_all or len(targets) == n_tokens - 1)
    assert metrics["val_loss"] == pytest.approx(total / len(targets), abs=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, abs=1e-5)


# ---------------------------------------------------------------- whole runs
def test_a_run_makes_exactly_max_iters_steps_and_checkpoints(trained):
    run = trained / "out" / "mine"
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-10", "checkpoint-20"]
    files = "config.json metrics.json model.py model.safetensors tokenizer.json "
    files += "tokenizer_config.json train.py training_state.pt"
    assert sorted(path.name for path in (run / "checkpoint-20").iterdir()) == files.split()
    state = torch.load(run / "checkpoint-20" / "training_state.pt", weights_only=True)
    assert state["progress"]["step"] == 20
    assert all(entry["step"] == 20 for entry in state["optimizers"][0].values())
    log = read_log(run)
    assert [entry["step"] for entry in log if "val_loss" in entry] == [10, 20]
    assert log[-1]["val_loss"] < math.log(30)
    assert {"loss", "lr", "norm", "ms", "tokens_per_s"} <= set(log[0])


def test_a_grad_clip_of_0_is_none(here):
    flags = ["--max_iters=3", "--log_interval=1", "--overwrite"]
    none, huge = (train(*flags, f"--grad_clip={clip}", cwd=here) for clip in (0, 1e9))
    assert [(e["loss"], e["norm"]) for e in none] == [(e["loss"], e["norm"]) for e in huge]


def test_both_learning_rates_of_the_log_are_those_of_the_schedule(here):
    log = train("--optimizer=muon", "--muon_lr=0.04", "--log_interval=1", cwd=here)
    state = torch.load(here / "out/mine/checkpoint-20/training_state.pt", weights_only=True)
    config = small(**state["config"])
    for entry in log:
        assert entry["lr"] == pytest.approx(learning_rate(entry["step"] - 1, 20, config))
        assert entry["muon_lr"] == pytest.approx(4 * entry["lr"])


def test_the_same_logits_predict_later_tokens(here):
    """As the formula says in float64, without targets that do not count, also if no later token is
    in the sequence. In a run the weights fall to 0 at two thirds of it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=1, n_head=2, n_embd=16)).double()
    for T in (16, 2, 1):
        idx, targets = torch.randint(65, (2, 3, T))
        targets[0, :3] = -100
        logits, loss = map(torch.Tensor.detach, model(idx, targets))
        expected, n_targets = torch.zeros(()).double(), (targets != -100).sum()
        for ahead, b, t in product((1, 2), range(3), range(T)):
            target = targets[b, t + ahead] if t + ahead < T else -100
            if target != -100:
                expected -= 0.4 / ahead * logits[b, t].log_softmax(-1)[target] / n_targets
        terms = loss_terms(model, (logits, loss), targets, later=0.4)
        assert terms.keys() == {"loss", "later"} and terms["loss"] is loss
        torch.testing.assert_close(terms["later"], expected)
    log = train("--max_iters=6", "--log_interval=1", "--later_tokens=0.5", cwd=here)
    later = [entry["later"] / entry["loss"] for entry in log if "later" in entry]
    # A new model predicts all tokens alike. Of 16 targets 15 and 14 have such a token.
    weights = [(1 - step / 4) * (0.5 * 15 + 0.25 * 14) / 16 for step in range(4)]
    assert later == pytest.approx(weights, rel=0.05)


def test_a_step_is_the_mean_over_the_targets_of_all_micro_batches(here):
    """Some have no targets, and without any the loss is 0. Two processes: see test_processes."""
    change = MASKING, MASKED.format(UNEVENLY)
    runs = []
    for n in (1, 2, 8):
        flags = [f"--batch_size={8 // n}", f"--gradient_accumulation_steps={n}", "--max_iters=4"]
        flags += ["--log_interval=1", "--overwrite", "--later_tokens=0.5"]
        log = train(*flags, cwd=here, changes=[change])
        runs.append([log[0]["norm"], log[0]["later"], *(entry["loss"] for entry in log[:3])])
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[2] == pytest.approx(runs[0], rel=1e-4)
    log = train(*flags, cwd=here, changes=[(MASKING, MASKED.format("y == y"))])
    assert log[-1]["loss"] == log[-1]["norm"] == 0


def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_before_a_checkpoint(here):
    process = run_here("train.py", *MINE, "--optimizer=adamw", "--learning_rate=1e30", cwd=here)
    one_line(process, "the loss or its gradient is nan at step 2: lower --learning_rate=1e+30")
    change = after_backward("model.wte.weight.grad[0] = math.inf")
    process = run_here("train.py", *MINE, cwd=here, changes=[change])
    one_line(process, "the loss or its gradient is inf at step 1")
    assert list_checkpoints(here / "out" / "mine") == []
    flags = ["--dtype=float16", "--max_iters=80"]  # float16 skips such steps, but not for ever
    process = run_here("train.py", *MINE, *flags, cwd=here, changes=[change])
    one_line(process, "the loss or its gradient is inf at step 5", "--dtype=float32")


FORWARD = "        x = self.hidden(idx, padding_mask, cache)  # (B, T, C)\n"
GENERATE = '        require(idx.size(1) > 0, "idx has no tokens'
RAISE = "raise RuntimeError('in eval mode')\n"
EVALUATING = f"        if targets is not None and not self.training:\n            {RAISE}"
FAILS = [("evaluate", FORWARD, EVALUATING), ("write_sample", GENERATE, f"        {RAISE}")]


@pytest.mark.parametrize("name, line, before", FAILS)
def test_an_evaluation_or_a_sample_that_fails_costs_a_line(name, line, before, here):
    output = output_here("train.py", *MINE, cwd=here, changes=[(line, before + line)])
    assert len(re.findall(rf"{name} failed at model.py:\d+: .*in eval mode", output)) == 2
    names = [path.name for path in list_checkpoints(here / "out/mine")]
    assert names == ["checkpoint-10", "checkpoint-20"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_trains_to_about_the_same_loss(trained, here, dtype):
    output_of("train.py", *MINE, f"--dtype={dtype}", cwd=here)
    ours, float32 = (read_log(run / "out" / "mine")[-1] for run in (here, trained))
    assert ours["val_loss"] == pytest.approx(float32["val_loss"], abs=0.1)
    stored = weights(here / "out" / "mine")
    assert all(tensor.dtype == torch.float32 for tensor in stored.values())


def test_a_step_after_an_overflow_has_its_own_gradients_alone(here):
    """An infinite gradient of one step is not added to the next one's."""
    change = after_backward("if step == 0: model.wte.weight.grad[0] = math.inf")
    flags = ["--dtype=float16", "--optimizer=adamw", "--max_iters=3", "--log_interval=1", *STILL]
    first, *others = (entry["norm"] for entry in train(*flags, cwd=here, changes=[change]))
    assert first is None and all(0 < norm < math.inf for norm in others)


@pytest.mark.parametrize("one", [0, 1])
def test_an_overflow_in_one_optimizer_alone_skips_both(trained, here, one):
    """So the run ends with the weights of the checkpoint that it starts from."""
    change = after_backward(f"optimizers[{one}].param_groups[0]['params'][0].grad[0] = math.inf")
    start = trained / "out" / "mine" / "checkpoint-20"
    flags = ["--dtype=float16", "--optimizer=muon", "--max_iters=1", f"--init_from={start}"]
    assert train(*flags, cwd=here, changes=[change])[0]["norm"] is None  # infinite
    assert_equal(weights(trained / "out" / "mine"), weights(here / "out" / "mine", 1))


def test_a_seed_decides_initialisation_dropout_and_samples(trained, here):
    """Two seeds have no weight, loss of a step or sample in common."""
    flags = [*one_sequence(here), "--dropout=0.5", f"--init_from={trained}/out/mine"]
    results = []
    for seed in (1, 5):
        output = output_here("train.py", *MINE, *flags, f"--seed={seed}", cwd=here)
        losses = [entry["loss"] for entry in read_log(here / "out/mine") if "loss" in entry]
        samples = re.findall("sample: .*", output)
        initial = set_up_tiny(seed=seed)[0].wte.weight[0, :1].tolist()
        results.append({*losses, *samples, *initial})
    assert not results[0] & results[1]
    assert len(results[0]) == len(results[1]) == 20 + 2 + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_muon_computes_in_bfloat16_where_matmuls_do(dtype):
    muon = set_up_tiny(dtype=dtype)[2][1]
    assert muon.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def test_every_step_and_micro_batch_drops_other_places(here):
    flags = [*one_sequence(here), "--max_iters=8"]
    none, dropout, parts = (
        [entry["loss"] for entry in train(*flags, *more, cwd=here)]
        for more in ([], ["--dropout=0.5"], ["--dropout=0.5", "--gradient_accumulation_steps=2"])
    )
    assert len(set(none)) == 1 and len(set(dropout)) == 8
    assert set(parts).isdisjoint(dropout)  # a mean of two that differ


def test_deterministic_algorithms_are_on_until_the_end(here):
    """Also after the sample of the first evaluation, which is drawn without them."""
    change = after_backward("assert torch.are_deterministic_algorithms_enabled()")
    assert train("--deterministic", cwd=here, changes=[change])[-1]["step"] == 20
    torch.use_deterministic_algorithms(False)


def test_activations_are_recomputed_only_if_asked_and_change_no_gradient():
    passes, gradients = [], []
    for recompute in (False, True):
        model, forward, _ = set_up_tiny(recompute=recompute, dropout=0.5)
        model.h[1].attn.register_forward_hook(lambda *_, on=recompute: passes.append(on))
        forward(torch.arange(16)[None] % 2, torch.arange(16)[None] // 8)[1].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert passes == [False, True, True]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_compiling_changes_no_result(here):
    for compile in (False, True):
        flags = [*MINE, "--max_iters=4", "--n_layer=1", f"--compile={compile}"]
        options = {"cwd": here, "TORCHINDUCTOR_CACHE_DIR": str(here)}
        output_of("train.py", *flags, f"--out_dir={compile}", **options)
    assert list(here.glob("**/*.so"))  # it was compiled
    runs = weights(here / "False", 4), weights(here / "True", 4)
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------- --eval_only, the quick start
def test_eval_only_gives_the_figures_of_the_log_and_writes_nothing(trained):
    """While another process trains in the folder, too."""
    run, before = trained / "out" / "mine", snapshot(trained)
    flags = ["--eval_only", "--init_from=out/mine", "--dataset=mine", "--batch_size=4"]  # TINY's
    with filelock.FileLock(run / ".lock"):
        output = output_of("train.py", *flags, cwd=trained)
    best = min((e for e in read_log(run) if "val_loss" in e), key=lambda e: e["val_loss"])
    assert f"{best['val_loss']:.4f} nats per token" in output
    assert f"perplexity {math.exp(best['val_loss']):.4f}" in output
    assert f"{best['bits_per_byte']:.4f} bits per byte" in output
    assert f"checkpoint-{best['step']}, over" in output
    assert snapshot(trained) == before


def test_eval_all_gives_the_loss_over_both_splits(trained):
    flags = ["--eval_only", "--init_from=out/mine", "--dataset=mine", "--block_size=8"]
    output = output_of("train.py", *flags, "--eval_all", cwd=trained)
    paths = (trained / f"data/mine/{name}.npy" for name in ("train-00000", "val"))
    ids = torch.from_numpy(np.concatenate([np.load(path) for path in paths]).astype(int))
    model = load(GPT, trained / re.search("out/mine/checkpoint-[0-9]+", output)[0])
    n = len(ids) - 1
    total = summed_loss(model, [ids[start : start + 9] for start in range(0, n, 8)])
    assert float(output.split()[0]) == pytest.approx(total / n, abs=2e-4)
    assert f"over {n:,} tokens of {Path('data/mine')}\n" in output


def test_quick_start_prepares_its_corpus(tmp_path, monkeypatch):
    """A package of Python's library stands for all of it."""
    monkeypatch.setattr("sysconfig.get_path", lambda _: json.__path__[0])
    output = output_here("train.py", *TINY, "--max_iters=2", cwd=tmp_path)
    assert "data/quickstart" in output.replace("\\", "/")
    assert (tmp_path / "out" / "quickstart" / "checkpoint-2").is_dir()
    assert len(output_of("sample.py", "--max_new_tokens=20", cwd=tmp_path)) > 5
