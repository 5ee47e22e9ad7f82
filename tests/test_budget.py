"""--minutes: the plan as a function of the text, the time and the machine; and the run it plans."""

import contextlib
import itertools
import json
import random
import re
import signal
import string
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from gptling.budget import (
    DROPOUT_FROM,
    MAX_EPOCHS,
    MAX_PARAMETERS_PER_TOKEN,
    MAX_STEPS,
    SHAPES,
    Text,
    count_parameters,
    enough_tokens,
    fields_for,
    most_tokens,
    needed_memory,
    parameters_per_token,
    plan,
    sizes_of,
    tokens_per_step,
)
from gptling.cli import UserError
from gptling.measure import seconds_of_step
from gptling.tokenizers import bpe_size, build_tokenizer
from tests.conftest import ROOT, run_here, run_script
from tests.edits import edited_module
from tests.test_processes import finish, torchrun
from train import TrainConfig, set_up

TEXT_OF_A_BOOK = Text(tokens=400_000, val_tokens=40_000, vocab_size=1024, longest=40_000 - 1)
MANY_BOOKS = Text(tokens=40_000_000, val_tokens=4_000_000, vocab_size=8192, longest=10**6)
FLOPS = 1e11  # a second, of two cores


class Machine:
    """Takes 6 FLOPs for a parameter and token, as train.py's steps do about, and so its time."""

    def __init__(self, text, minutes, flops=FLOPS):
        self.text, self.left, self.flops, self.measured = text, 60.0 * minutes, flops, []

    def time_a_step(self, fields):
        self.measured.append(fields)
        step = 6 * count_parameters(fields, self.text) * tokens_per_step(fields) / self.flops
        step *= 1.4 if fields["dropout"] else 1
        self.left -= 5 * step
        return step

    def plan(self, memory=1e11, world_size=1, **kept):
        return plan(kept, self.text, lambda: self.left, self.time_a_step, memory, world_size)


def tokens_seen(fields):
    return fields["max_iters"] * tokens_per_step(fields)


@pytest.mark.parametrize("text", [TEXT_OF_A_BOOK, MANY_BOOKS])
@pytest.mark.parametrize("of", ["minutes", "flops"])
def test_with_more_time_or_speed_the_model_is_never_smaller_and_sees_enough(text, of):
    start = {"minutes": 2, "flops": FLOPS}
    plans = [Machine(text, **start | {of: start[of] * 1.7**n}).plan() for n in range(16)]
    sizes = [count_parameters(fields, text) for fields in plans]
    assert sizes == sorted(sizes) and sizes[-1] > 3 * sizes[0]
    for size, fields, longer in zip(sizes, plans, plans[1:], strict=False):
        enough = enough_tokens(fields, text)
        assert tokens_seen(fields) > 0.75 * enough
        most = most_tokens(longer, text)
        assert tokens_seen(longer) <= most
        if size == count_parameters(longer, text) and fields["dropout"] == longer["dropout"]:
            assert tokens_seen(longer) > min(1.5 * tokens_seen(fields), 0.99 * most)


@pytest.mark.parametrize("minutes", [1, 3, 9, 27, 81])
def test_the_model_is_the_largest_that_sees_enough(minutes):
    """Found at once where a token's time grows as the parameters do."""
    machine = Machine(MANY_BOOKS, minutes, 1e12)
    fields = machine.plan()
    assert {one["n_embd"] for one in machine.measured} == {128, fields["n_embd"]}
    sizes = [sizes_of(*shape, {}) for shape in SHAPES]
    parameters_and_tokens = 60 * minutes * 1e12 / 6
    enough = [enough_tokens(s, MANY_BOOKS) * count_parameters(s, MANY_BOOKS) for s in sizes]
    largest = max(
        s["n_embd"] for s, e in zip(sizes, enough, strict=True) if parameters_and_tokens >= e
    )
    assert fields["n_embd"] == largest


@pytest.mark.parametrize("minutes", [0.5, 5, 50, 500])
@pytest.mark.parametrize("tokens", [300, 3000, 30_000])
def test_a_text_too_short_for_the_time_is_not_seen_for_ever(tokens, minutes):
    """36 epochs took a loss up by half (docs/one_dial.md); a few hundred steps it gets."""
    text = Text(tokens, val_tokens=tokens // 10, vocab_size=64, longest=tokens // 10 - 1)
    fields = Machine(text, minutes).plan()
    most = max(MAX_EPOCHS * tokens, MAX_STEPS * tokens_per_step(fields))
    assert tokens_seen(fields) <= most
    smallest = min(count_parameters(sizes_of(*shape, {}), text) for shape in SHAPES)
    assert count_parameters(fields, text) <= max(MAX_PARAMETERS_PER_TOKEN * tokens, smallest)


def test_longer_runs_have_longer_sequences_and_larger_batches():
    """Of 1.3 million tokens 64 x 32, as the sweeps have it, and not in proportion to the tokens."""
    books, sizes = MANY_BOOKS._replace(tokens=10**10), sizes_of(2, 96, {})
    plans = [fields_for(1.3e6 * 4**n, sizes, {}, books, 1e12, 1) for n in range(6)]
    assert (plans[0]["block_size"], plans[0]["batch_size"]) == (64, 32)
    for fields, longer in itertools.pairwise(plans):
        assert longer["block_size"] in (2 * fields["block_size"], 1024)
        assert 1 <= tokens_per_step(longer) / tokens_per_step(fields) <= 2
    assert tokens_per_step(plans[-1]) == 16 * tokens_per_step(plans[0])
    books = books._replace(tokens=10**6)  # seen more often than four times, they count no more
    often = [fields_for(n * 10**6, sizes, {}, books, 1e12, 1) for n in (6, 60)]
    assert often[0]["block_size"] == often[1]["block_size"] == 128


@pytest.mark.parametrize(
    "tokens, text, block_size",
    [
        (1.2e6, 159_089, 64),  # 1.898 bits per byte, with 128 1.920
        (1.5e6, 2_272_967, 64),  # 1.665, with 128 1.693
        (2.6e6, 2_272_967, 128),  # 1.478, with 64 1.481
        (5.4e6, 2_272_967, 128),  # 1.364, with 256 1.376
        (8.3e6, 2_272_967, 256),  # 1.291, with 128 1.321
        (9.8e6, 2_272_967, 256),  # 1.194, with 128 1.269
        (20e6, 159_089, 64),  # a text seen 126 times is no longer one for it
    ],
)
def test_sequences_have_the_length_that_was_better(tokens, text, block_size):
    """docs/one_dial.md"""
    text = Text(text, text // 10, 4096, longest=text // 10 - 1)
    assert fields_for(tokens, sizes_of(3, 256, {}), {}, text, 1e12, 1)["block_size"] == block_size


def test_a_machine_whose_speed_jumps_is_not_measured_for_ever():
    """As where half of the sizes have bfloat16, or another program runs now and then."""
    rng = random.Random(0)

    class MoodyMachine(Machine):
        def time_a_step(self, fields):
            return super().time_a_step(fields) * 10 ** rng.uniform(-1, 1)

    for _ in range(100):
        machine = MoodyMachine(MANY_BOOKS, 20)
        machine.plan()
        assert 1 <= len({count_parameters(one, MANY_BOOKS) for one in machine.measured}) <= 3
        assert len(machine.measured) <= 4  # the one it takes may be measured as it is trained


def test_a_larger_model_that_is_faster_is_taken_although_it_sees_too_little():
    """As on a CPU where bfloat16 pays from a width of 128 on."""

    class Machine128(Machine):
        def time_a_step(self, fields):
            return super().time_a_step(fields) * (0.5 if fields["n_embd"] >= 128 else 1)

    widths = [Machine128(MANY_BOOKS, 1.15**n).plan()["n_embd"] for n in range(20)]
    assert 96 not in widths and 128 in widths and widths == sorted(widths)
    widths = [Machine(MANY_BOOKS, 1.15**n).plan()["n_embd"] for n in range(20)]
    assert 96 in widths


def test_a_larger_model_that_is_hardly_slower_is_taken_although_it_sees_too_little():
    """With 8,192 tokens a step of 64 in float32 took 88 ms, of 128 in bfloat16 98, on two cores."""

    class TwoCores(Machine):
        def time_a_step(self, fields):
            step = {64: 0.088, 96: 0.115, 128: 0.098}[fields["n_embd"]]
            return step * tokens_per_step(fields) / 2048

    japanese = Text(tokens=2_147_393, val_tokens=246_451, vocab_size=8192, longest=10**5)
    assert TwoCores(japanese, 0.8).plan()["n_embd"] == 128


@pytest.mark.parametrize("minutes", [0.2, 1, 5, 20, 120])
@pytest.mark.parametrize("text", [TEXT_OF_A_BOOK, MANY_BOOKS])
def test_what_is_trained_was_measured_with_its_dropout_too(text, minutes):
    """Dropout makes a step half as long again on a CPU."""
    machine = Machine(text, minutes)
    fields = machine.plan()
    assert any(one.items() <= fields.items() for one in machine.measured)
    assert all("dropout" in one for one in machine.measured)


@pytest.mark.parametrize(
    "limit, compiles, seconds, n_steps",
    [
        (1000, False, 3 * 2 + 0.5, 20),
        (9, False, 3 * 2 + 0.5, 2),
        (2, False, 3 * 10 + 0.5, 1),
        (2, True, 3 * 2 + 0.5, 2),
    ],
    ids=["many", "the first one allocates", "it takes too long", "the first one compiles"],
)
def test_a_step_is_three_micro_batches_and_an_update(
    limit, compiles, seconds, n_steps, monkeypatch
):
    clock, steps = [0.0], []
    monkeypatch.setattr("gptling.measure.time.perf_counter", lambda: clock[0])

    class Model(torch.nn.Linear):
        def forward(self, idx, targets):  # 10 s at first and in a burst of other work, or 2 s
            clock[0] += 10 if not steps or 5 <= len(steps) < 17 else 2
            return None, super().forward(torch.ones(1, 1)).sum()

    class Optimizer(torch.optim.SGD):
        def step(self):
            clock[0] += 0.5
            steps.append(clock[0])

    model, idx = Model(1, 1), torch.zeros(1, 1)
    optimizers = [Optimizer(model.parameters())]
    compiled = (lambda idx, targets: model(idx, targets)) if compiles else model
    set_up = (model, model, compiled, contextlib.nullcontext(), "float32", optimizers)
    compiling = 10 if compiles else 0
    assert seconds_of_step(set_up, idx, 3, limit, lambda s: s) == (seconds, compiling)
    assert len(steps) == n_steps


@pytest.mark.parametrize(
    "tokens, vocab_size, layers, width, epochs, dropout",
    [
        (159_089, 512, 3, 128, 6, 0.0),  # 1.908 bits per byte, with dropout 2.006
        (159_089, 512, 2, 192, 8, 0.1),  # 1.898, without 1.947
        (159_089, 512, 4, 256, 8, 0.1),  # 1.839, without 1.945
        (317_847, 2048, 2, 192, 3.8, 0.0),
        (317_847, 2048, 3, 256, 9, 0.1),  # 2.110, without 2.277
        (2_273_252, 4096, 3, 256, 4.5, 0.0),
    ],
)
def test_dropout_is_where_it_was_better(tokens, vocab_size, layers, width, epochs, dropout):
    """docs/one_dial.md"""
    text = Text(tokens, tokens // 10, vocab_size, longest=tokens // 10 - 1)
    fields = fields_for(epochs * tokens, sizes_of(layers, width, {}), {}, text, 1e12, 1)
    assert fields["dropout"] == dropout


@pytest.mark.parametrize("minutes", [0.2, 0.3, 0.5, 1, 2, 5])
@pytest.mark.parametrize("tokens", [10_000, 25_000, 60_000, 150_000, 400_000])
def test_dropout_is_decided_by_the_tokens_that_are_trained(tokens, minutes):
    """Not by those for which there would be time without measuring and evaluating: of 12 seconds
    5 are left, and 1.3 epochs of 2 layers of 128 had 3.27 bits per byte with it, 3.04 without."""
    text = Text(tokens, tokens // 10, 512, longest=tokens // 10 - 1)
    fields = Machine(text, minutes, 3e10).plan()
    by_heart = tokens_seen(fields) / tokens * parameters_per_token(fields, text)
    longer = 1.4 if fields["dropout"] else 1  # a step, with it
    assert bool(fields["dropout"]) == (longer * by_heart >= DROPOUT_FROM)


def test_dropout_that_leaves_time_for_fewer_epochs_stays():
    """Where a run would know its text by heart without it, 47 for 35, and with it sees too little
    of it, 34; without dropout such a run had 2.28 bits per byte, with it 2.11."""
    shakespeare = Text(317_847, 39_699, 2048, longest=39_698)
    for flops in (3e10 * 1.07**n for n in range(30)):
        fields = Machine(shakespeare, 5, flops).plan()
        by_heart = tokens_seen(fields) / 317_847 * parameters_per_token(fields, shakespeare)
        assert fields["dropout"] or by_heart < DROPOUT_FROM


@pytest.mark.parametrize("minutes", [0.3, 5, 60])
def test_a_given_width_has_no_more_layers_than_its_shape(minutes):
    """In a minute 4 layers of 64 had 2.442 bits per byte, 2 of them 2.317."""
    for n_embd, n_layer in {32: 2, 64: 2, 100: 2, 192: 2, 300: 3, 512: 6}.items():
        machine = Machine(MANY_BOOKS, minutes)
        fields = machine.plan(n_embd=n_embd)
        assert 2 <= fields["n_layer"] <= n_layer
        assert machine.measured[0]["n_layer"] == 2  # the fastest one
    assert Machine(MANY_BOOKS, 10_000, 1e13).plan(n_embd=1024)["n_layer"] == 16


def test_a_larger_model_sees_a_short_text_less_often():
    """12 epochs of four layers of 384 were worse than 8 of them."""
    shakespeare = Text(317_847, 39_699, 2048, longest=39_698)
    for shape, epochs in {(4, 384): 8, (3, 256): 12, (2, 64): 12}.items():
        sizes = dict(zip(("n_layer", "n_embd"), shape, strict=True))
        fields = Machine(shakespeare, 10_000).plan(**sizes)
        assert tokens_seen(fields) / shakespeare.tokens == pytest.approx(epochs, rel=0.02)
    assert Machine(shakespeare, 10_000).plan()["n_embd"] == 384


@pytest.mark.parametrize("minutes", [0.2, 1, 5, 20, 120])
@pytest.mark.parametrize("text", [TEXT_OF_A_BOOK, MANY_BOOKS])
def test_measuring_steps_and_evaluations_fit_into_the_time(text, minutes):
    machine = Machine(text, minutes)
    fields = machine.plan()
    assert 1 <= len(machine.measured) <= 4
    step = machine.time_a_step(fields)
    n = -(-fields["max_iters"] // fields["eval_interval"])
    evaluated = min(fields["eval_tokens"] or text.val_tokens, text.val_tokens)
    evaluating = n * evaluated * step / tokens_per_step(fields) / 3
    assert evaluating < 0.05 * 60 * minutes
    training = fields["max_iters"] * step
    spent = 60 * minutes - machine.left - 5 * step  # by measuring
    assert training + evaluating + spent < 60 * minutes
    used_up = tokens_seen(fields) > 0.99 * most_tokens(fields, text)
    assert training + evaluating + spent > 0.75 * 60 * minutes - 8 or used_up


def test_a_text_that_repeats_gets_a_larger_model_rather_than_more_epochs():
    for minutes in (2, 4, 8, 16, 32):
        fields = Machine(TEXT_OF_A_BOOK, minutes).plan()
        assert tokens_seen(fields) < 20 * TEXT_OF_A_BOOK.tokens
    fresh = Machine(MANY_BOOKS._replace(vocab_size=TEXT_OF_A_BOOK.vocab_size), 32).plan()
    assert count_parameters(fields, TEXT_OF_A_BOOK) > count_parameters(fresh, TEXT_OF_A_BOOK)


def test_a_machine_that_is_too_slow_evaluates_one_sequence():
    fields = Machine(MANY_BOOKS, 0.2, flops=1e8).plan(block_size=512)
    assert fields["eval_tokens"] == 512 and fields["max_iters"] == 1
    fields = Machine(MANY_BOOKS, -1).plan()  # the time is over before it begins
    assert fields["max_iters"] == 1 and fields["n_embd"] == min(width for _, width in SHAPES)


def test_an_interval_longer_than_the_run_leaves_time_for_one_evaluation():
    machine = Machine(MANY_BOOKS, 5)
    fields = machine.plan(eval_interval=10**6, eval_tokens=2_000_000)
    step = machine.time_a_step(fields)
    evaluating = 2_000_000 * step / tokens_per_step(fields) / 3
    assert evaluating > 30
    assert fields["max_iters"] * step + evaluating < 300


def test_a_short_interval_leaves_time_for_many_evaluations():
    machine = Machine(MANY_BOOKS, 5)
    fields = machine.plan(eval_interval=20, eval_tokens=100_000)
    step = machine.time_a_step(fields)
    n = fields["max_iters"] / 20
    evaluating = n * (100_000 * step / tokens_per_step(fields) / 3 + 1)
    assert evaluating > 50
    assert 250 < fields["max_iters"] * step + evaluating < 300


def test_an_interval_longer_than_the_run_is_not_what_an_evaluation_may_take():
    machine = Machine(MANY_BOOKS, 5)
    fields = machine.plan(eval_interval=10**6)
    step = machine.time_a_step(fields)
    assert fields["eval_tokens"] and fields["eval_tokens"] * step / tokens_per_step(fields) / 3 < 30


@pytest.mark.parametrize("minutes", [5, 20, 60])
def test_evaluations_of_all_of_a_large_split_fit_into_the_time(minutes):
    machine = Machine(MANY_BOOKS, minutes)
    fields = machine.plan(eval_tokens=0)
    step = machine.time_a_step(fields)
    n = -(-fields["max_iters"] // fields["eval_interval"])
    evaluating = n * MANY_BOOKS.val_tokens * step / tokens_per_step(fields) / 3
    assert evaluating > 20 * n
    assert 0.8 * 60 * minutes < fields["max_iters"] * step + evaluating < 60 * minutes


def test_the_checkpoints_of_a_large_model_fit_into_the_time():
    """With 86 million parameters one took 9 s, its sample among them, and with 8 million 1."""
    machine = Machine(MANY_BOOKS, 5, flops=1e13)
    fields = machine.plan(n_layer=12, n_embd=768, n_head=12, eval_tokens=1024)
    step = machine.time_a_step(fields)
    n = -(-fields["max_iters"] // fields["eval_interval"])
    assert 250 < fields["max_iters"] * step + 9 * n < 300


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("accumulation", [None, 1, 3, 5])
def test_all_processes_have_equally_many_sequences(world_size, accumulation):
    kept = {"gradient_accumulation_steps": accumulation} if accumulation else {}
    fields = Machine(MANY_BOOKS, 5).plan(world_size=world_size, **kept)
    sequences = fields["batch_size"] * fields["gradient_accumulation_steps"]
    assert sequences % world_size == 0
    assert fields["gradient_accumulation_steps"] == (accumulation or world_size)


def test_what_is_given_stays_and_the_rest_is_planned_around_it():
    kept = dict(n_layer=7, n_embd=80, block_size=50, batch_size=3, learning_rate=1e-4, dropout=0.3)
    fields = Machine(MANY_BOOKS, 2).plan(**kept)
    assert {name: fields[name] for name in kept} == kept
    assert fields["n_head"] == 2 and fields["min_lr"] == pytest.approx(1e-6)
    assert fields["max_iters"] > 10
    small = Machine(MANY_BOOKS, 1).plan(n_layer=2, n_embd=64)
    assert small["max_iters"] > 250 and small["block_size"] <= 128
    deep, free = Machine(MANY_BOOKS, 60).plan(n_layer=16), Machine(MANY_BOOKS, 60).plan()
    assert deep["n_layer"] == 16 and deep["n_embd"] < free["n_embd"]
    assert Machine(MANY_BOOKS, 2).plan(n_embd=100)["n_head"] in (1, 2)  # divides it
    assert Machine(MANY_BOOKS, 2).plan(n_head=6)["n_embd"] % 6 == 0
    assert Machine(MANY_BOOKS, 2).plan(eval_tokens=500)["eval_tokens"] == 500


def test_adamw_and_a_model_that_is_trained_already_have_lower_rates():
    """By the sweeps: AdamW at 0.01 took a model of 128 from 2.22 to 2.75 bits per byte."""
    new, adamw, trained = (
        Machine(MANY_BOOKS, 1).plan(n_embd=256, **kept)
        for kept in ({}, {"optimizer": "adamw"}, {"init_from": "out/other"})
    )
    assert adamw["learning_rate"] == 0.001 and adamw["min_lr"] == pytest.approx(1e-5)
    for name in ("learning_rate", "muon_lr", "min_lr"):
        assert trained[name] == pytest.approx(new[name] / 10)
    kept = Machine(MANY_BOOKS, 1).plan(init_from="out/other", learning_rate=0.3, muon_lr=0.2)
    assert (kept["learning_rate"], kept["muon_lr"]) == (0.3, 0.2)


def test_a_sequence_is_no_longer_than_the_text():
    short = Text(tokens=300, val_tokens=30, vocab_size=40, longest=29)
    assert Machine(short, 1).plan()["block_size"] == 29


@pytest.mark.parametrize("memory", [2e8, 1e9, 1e10])
def test_a_plan_never_needs_more_memory_than_is_free(memory):
    machine = Machine(MANY_BOOKS, 10_000, flops=1e15)
    fields = machine.plan(memory)
    assert all(needed_memory(one, MANY_BOOKS) <= memory for one in [fields, *machine.measured])
    free = Machine(MANY_BOOKS, 10_000, flops=1e15).plan()
    assert needed_memory(free, MANY_BOOKS) > memory


def test_less_memory_than_a_step_needs_is_met_by_accumulating():
    fields = dict(n_embd=768, n_layer=12, block_size=512)
    much, little = (Machine(MANY_BOOKS, 10_000, 1e13).plan(n, **fields) for n in (1e12, 1e10))
    assert tokens_per_step(much) == tokens_per_step(little)
    assert little["gradient_accumulation_steps"] > 1 == much["gradient_accumulation_steps"]


def test_where_one_sequence_needs_too_much_memory_sequences_are_shorter():
    books, sizes = MANY_BOOKS._replace(tokens=10**10), sizes_of(6, 512, {})
    much = fields_for(1e9, sizes, {}, books, 1e12, 1)
    memory = needed_memory(much | {"block_size": 512, "batch_size": 1}, books)
    little = fields_for(1e9, sizes, {}, books, memory, 1)
    assert much["block_size"] == 1024 and (little["block_size"], little["batch_size"]) == (512, 1)


FLAGS = ["--dataset=mine", "--curves=False", "--device=cpu"]


def start_of(trained, tmp_path):
    (tmp_path / "data").symlink_to(trained / "data")
    return tmp_path


def train(*arguments, cwd):
    """As a process of its own, for the time counts from its start."""
    done = run_script("train.py", *FLAGS, *arguments, cwd=cwd, OMP_NUM_THREADS="1")
    return done.returncode, (done.stdout + done.stderr).decode()


def test_a_plan_is_printed_stored_and_kept_to(trained, tmp_path):
    here, start = start_of(trained, tmp_path), time.monotonic()
    code, output = train("--minutes=0.2", "--n_layer=1", "--muon_lr=0.04", cwd=here)
    assert code == 0, output
    took = int(re.search(r"^(\d+) s; next: python sample.py out/mine$", output, re.M)[1])
    assert 1 < took < 1.1 * (time.monotonic() - start)
    line = re.search(r"^mine: .*0\.2 min here: 1 layers of (\d+), .* ([\d,]+) steps", output, re.M)
    config = tomllib.loads((here / "out/mine/config.toml").read_text())
    assert (config["n_embd"], config["max_iters"]) == (int(line[1]), int(line[2].replace(",", "")))
    assert (config["n_layer"], config["muon_lr"]) == (1, 0.04) and "minutes" not in config
    assert (here / f"out/mine/checkpoint-{config['max_iters']}").is_dir()
    assert f"step {config['max_iters']}: training loss" in output
    assert ("a text so short is used up then" in output) == (config["max_iters"] == MAX_STEPS)


@pytest.mark.parametrize(
    "words, planned",
    [
        ([], True),
        (["--n_layer=1"], True),
        (["--n_layer=4", "--n_embd=384"], True),
        (["PRESET"], True),
        (["--max_iters=2", "--eval_interval=2"], False),
        (["TWO_STEPS"], False),
    ],
)
def test_a_run_of_which_nothing_says_how_long_is_planned_for_a_minute(
    words, planned, trained, tmp_path, train_here, monkeypatch
):
    """That minute is over here when it begins."""
    for module in ("measure", "report"):
        monkeypatch.setattr(f"gptling.{module}.STARTED", time.perf_counter() - 60)
    here = start_of(trained, tmp_path)
    presets = {"PRESET": "n_embd = 32\n", "TWO_STEPS": "max_iters = 2\neval_interval = 2\n"}
    for name, text in presets.items():
        (here / f"{name}.toml").write_text(text)
    words = [str(here / f"{word}.toml") if word in presets else word for word in words]
    process = run_here("train.py", *words, *FLAGS, cwd=here)
    assert process.returncode == 0, process.stderr
    assert (b"1 min here: " in process.stdout) == planned
    assert b"used up" not in process.stdout  # the time is
    assert (b"there is time for no more steps" in process.stdout) == planned
    steps = tomllib.loads((here / "out/mine/config.toml").read_text())["max_iters"]
    assert steps == (1 if planned else 2)
    took = int(re.search(rb"^(\d+) s; next: python sample.py out/mine$", process.stdout, re.M)[1])
    assert took >= 60  # of the program, not of its steps


def test_the_time_is_counted_from_the_programs_start():
    """What it has imported took processor time."""
    code = "import time, torch; now, spent = time.perf_counter(), time.process_time()\n"
    code += "from gptling.measure import STARTED; assert spent / 2 < now - STARTED"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_run_whose_preset_has_the_minutes_goes_on(trained, tmp_path, train_here, monkeypatch):
    """The preset beside --resume says again what the run was planned by."""
    monkeypatch.setattr("gptling.measure.STARTED", time.perf_counter() - 60)
    here = start_of(trained, tmp_path)
    (here / "mine.toml").write_text("minutes = 0.5\n")
    for words in ([], ["--resume", "--max_iters=2"]):
        process = run_here("train.py", "mine.toml", *FLAGS, *words, cwd=here)
        assert process.returncode == 0, process.stderr
    assert (here / "out/mine/checkpoint-2").is_dir()


@pytest.mark.parametrize("words, kept", [([], None), (["--block_size=8"], 8)])
def test_a_model_that_is_trained_already_keeps_its_sizes_but_for_how_long_sequences_are(
    words, kept, trained, tmp_path, train_here, monkeypatch
):
    """Its sequences are 16 tokens long at most."""
    asked = []

    def ask(*arguments):
        asked.extend(arguments)
        return plan(*arguments)

    monkeypatch.setattr("gptling.measure.plan", ask)
    words = [*words, f"--init_from={trained / 'out' / 'mine'}", "--minutes=0.01"]
    process = run_here("train.py", *words, *FLAGS, cwd=start_of(trained, tmp_path))
    assert process.returncode == 0, process.stderr
    fields, text = asked[:2]
    assert (fields["n_layer"], fields["n_embd"]) == (2, 16) and "dropout" not in fields
    assert (fields.get("block_size"), text.longest) == (kept, 16)
    config = tomllib.loads((tmp_path / "out/mine/config.toml").read_text())
    assert config["block_size"] == (kept or 16)


D_FF = [
    ("    bias: bool = True", "    d_ff: int = 0  # 4 n_embd if 0\n    bias: bool = True"),
    ("    def __post_init__(self):\n", "    def __post_init__(self):\n        set_d_ff(self)\n"),
    ("@dataclass\n", "def set_d_ff(c):\n    c.d_ff = c.d_ff or 4 * c.n_embd\n\n\n@dataclass\n"),
    ("4 * config.n_embd", "config.d_ff"),
]


@pytest.mark.gpt2
@pytest.mark.parametrize("words", [[], ["--d_ff=48"], ["--init_from=out/first"]])
def test_what_follows_from_planned_sizes_follows_from_those(
    words, trained, tmp_path, train_here, monkeypatch
):
    """Where nothing gives it: neither a flag nor the model to begin from."""
    module, built = edited_module(*D_FF), []

    @dataclass
    class Wider(TrainConfig):
        d_ff: int = 0

        def __post_init__(self):
            super().__post_init__()
            module.set_d_ff(self)

    def look(config, *more, **others):
        built.append((config.n_embd, config.d_ff))
        return set_up(config, *more, **others)

    monkeypatch.setattr("train.TrainConfig", Wider)
    monkeypatch.setattr("train.GPT", module.GPT)
    monkeypatch.setattr("train.GPTConfig", module.GPTConfig)
    monkeypatch.setattr("gptling.measure.STARTED", time.perf_counter() - 60)
    here = start_of(trained, tmp_path)
    first = ["--out_dir=out/first", "--max_iters=1", "--n_embd=16", "--d_ff=48"]
    assert run_here("train.py", *FLAGS, *first, cwd=here).returncode == 0
    monkeypatch.setattr("train.set_up", look)
    process = run_here("train.py", *words, *FLAGS, cwd=here)
    assert process.returncode == 0, process.stderr
    assert len(built) > 1 and built[-1][0] != 128  # measured, and not the quick start's
    assert all(d_ff == (48 if words else 4 * n_embd) for n_embd, d_ff in built)
    config = tomllib.loads((here / "out/mine/config.toml").read_text())
    assert (config["n_embd"], config["d_ff"]) == built[-1]


def test_planned_sizes_that_a_changed_model_refuses_are_one_line(
    trained, tmp_path, train_here, monkeypatch
):
    @dataclass
    class Choosy(TrainConfig):
        def __post_init__(self):
            super().__post_init__()
            if self.n_embd < 100:
                raise ValueError(f"n_embd={self.n_embd}: too narrow")

    monkeypatch.setattr("train.TrainConfig", Choosy)
    process = run_here("train.py", *FLAGS, cwd=start_of(trained, tmp_path))
    assert process.returncode == 1 and b"n_embd=64: too narrow; give" in process.stderr


def test_what_building_the_model_says_is_said_once(trained, tmp_path, train_here, monkeypatch):
    def talk(*arguments, **others):
        print("to say")
        print("to warn", file=sys.stderr)
        return set_up(*arguments, **others)

    monkeypatch.setattr("train.set_up", talk)
    monkeypatch.setattr("gptling.measure.STARTED", time.perf_counter() - 60)
    process = run_here("train.py", *FLAGS, cwd=start_of(trained, tmp_path))
    assert process.returncode == 0, process.stderr
    assert process.stdout.count(b"to say") == process.stderr.count(b"to warn") == 1


def test_what_compiling_takes_is_left_for_the_run_too(trained, tmp_path, train_here, monkeypatch):
    left = []

    def look(kept, text, seconds_left, seconds_per_step, *more):
        left.append(seconds_left())
        assert seconds_per_step({"batch_size": 1}) == 0.5
        left.append(seconds_left())
        raise UserError("seen")

    monkeypatch.setattr("gptling.measure.seconds_of_step", lambda *arguments: (0.5, 1000.0))
    monkeypatch.setattr("gptling.measure.plan", look)
    process = run_here("train.py", "--minutes=60", *FLAGS, cwd=start_of(trained, tmp_path))
    assert process.returncode == 1 and b"seen" in process.stderr
    assert 1000 < left[0] - left[1] < 1100


@pytest.mark.parametrize("minutes, seconds", [(0.2, 1.2), (1, 6), (60, 15)])
def test_measuring_takes_a_tenth_of_the_time_and_15_seconds_at_most(
    minutes, seconds, trained, tmp_path, train_here, monkeypatch
):
    """Three sizes, and once more the one that is taken."""
    limits = []

    def look(kept, text, seconds_left, seconds_per_step, memory, world_size):
        limits.append(memory)
        for _ in range(4):
            seconds_per_step({"batch_size": 1})
        raise UserError("seen")

    def measure(set_up, idx, micro_steps, limit, slowest):
        limits.append(limit)
        return 0.5, 0.0

    monkeypatch.setattr("gptling.measure.seconds_of_step", measure)
    monkeypatch.setattr("gptling.measure.plan", look)
    monkeypatch.setattr("gptling.measure.free_memory", lambda device: 1000)
    flags = [*FLAGS, f"--minutes={minutes}"]
    process = run_here("train.py", *flags, cwd=start_of(trained, tmp_path))
    assert process.returncode == 1 and b"seen" in process.stderr
    memory, *limits = limits
    assert memory == 800 and sum(limits) == pytest.approx(seconds)


def test_the_process_with_the_least_memory_decides(trained, tmp_path, train_here, monkeypatch):
    """Another one has 500 bytes."""

    def look(kept, text, seconds_left, seconds_per_step, memory, world_size):
        raise UserError(f"{memory} bytes")

    monkeypatch.setattr("gptling.processes.Processes.all_reduce_max", lambda _, n: max(n, -500))
    monkeypatch.setattr("gptling.measure.free_memory", lambda device: 1000)
    monkeypatch.setattr("gptling.measure.plan", look)
    process = run_here("train.py", *FLAGS, "--minutes=1", cwd=start_of(trained, tmp_path))
    assert b"400.0 bytes" in process.stderr


def test_the_line_of_a_plan_counts_all_micro_batches(trained, tmp_path, train_here, monkeypatch):
    def stop(config, *more, **others):
        raise UserError(f"dropout {config.dropout}")

    fields = {"n_layer": 1, "n_embd": 32, "block_size": 8, "batch_size": 5, "max_iters": 1000}
    fields |= {"gradient_accumulation_steps": 3, "dropout": 0.25}
    monkeypatch.setattr("gptling.measure.plan", lambda *_: fields)
    monkeypatch.setattr("train.set_up", stop)
    process = run_here("train.py", *FLAGS, "--minutes=1", cwd=start_of(trained, tmp_path))
    assert b"dropout 0.25" in process.stderr
    meta = json.loads((trained / "data/mine/meta.json").read_text())
    epochs = 1000 * 3 * 5 * 8 / meta["train"]["tokens"]
    says = f"sequences of 8, 15 at a time, 1,000 steps ({epochs:.1f} epochs), dropout 0.25"
    assert f"1 min here: 1 layers of 32, {says}" in process.stdout.decode()


def test_the_quick_start_is_as_the_defaults_say(trained, tmp_path, train_here, monkeypatch):
    """And not planned, though no flag says how long."""

    @dataclass
    class Edited(TrainConfig):
        n_embd: int = 36
        max_iters: int = 7
        learning_rate: float = 0.125

    def stop(config, *more, **others):
        raise UserError(f"{config.n_embd} {config.max_iters} {config.learning_rate}")

    monkeypatch.setattr("train.TrainConfig", Edited)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/quickstart").symlink_to(trained / "data/mine")
    monkeypatch.setattr("train.set_up", stop)
    process = run_here("train.py", cwd=tmp_path)
    assert process.stderr == b"train.py: error: 36 7 0.125\n" and not process.stdout


def test_a_planned_run_that_was_killed_goes_on_with_its_plan(trained, tmp_path):
    here = start_of(trained, tmp_path)
    # Checkpoints before the last one, however slow the machine is.
    flags = [*FLAGS, "--minutes=0.3", "--eval_interval=1"]
    command = [sys.executable, ROOT / "train.py", *flags, "--out_dir=out/killed"]
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 100
    while not list(here.glob("out/killed/checkpoint-*")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    config = tomllib.loads((here / "out/killed/config.toml").read_text())
    resumed = run_script("train.py", "--out_dir=out/killed", "--resume", cwd=here)
    assert resumed.returncode == 0, resumed.stderr
    again = run_script("train.py", "out/killed/config.toml", "--out_dir=out/again", cwd=here)
    assert again.returncode == 0, again.stderr
    name = f"checkpoint-{config['max_iters']}/model.safetensors"
    killed, whole = (load_file(here / "out" / run / name) for run in ("killed", "again"))
    assert killed.keys() == whole.keys() and all(killed[k].equal(whole[k]) for k in whole)


@pytest.mark.slow
def test_two_processes_have_one_plan(trained, tmp_path):
    here = start_of(trained, tmp_path)
    output = finish(torchrun(ROOT / "train.py", *FLAGS, "--minutes=0.3", cwd=here))
    assert output.count("min here:") == 1
    config = tomllib.loads((here / "out/mine/config.toml").read_text())
    assert config["gradient_accumulation_steps"] == 2
    log = (here / "out/mine/log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["step"] == config["max_iters"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--minutes=0", "--minutes=0: give either a time or --max_iters"),
        ("--minutes=-1", "--minutes=-1.0: must be at least 0"),
        ("--minutes=nan", "--minutes=nan: must be at least 0"),
        ("--minutes=inf", "--minutes=inf: must be at least 0 and below inf"),
        ("--minutes=1 --max_iters=100", "--minutes=1: give either a time or --max_iters"),
        ("--minutes=1 --resume", "--minutes plans a new run"),
        ("--minutes=1 --eval_only --init_from=gpt2", "--minutes plans a new run"),
        ("--minutes=1 --dataset=absent", "absent"),
    ],
)
def test_what_is_no_time_is_one_line(words, message, trained, tmp_path):
    done = run_script("train.py", *FLAGS, *words.split(), cwd=start_of(trained, tmp_path))
    errors = done.stderr.decode()
    assert done.returncode and errors.count("\n") <= 5 and "Traceback" not in errors
    assert any(message in line for line in errors.splitlines()), errors


def words(n_bytes):
    """Words as frequent as those of a language (Zipf's law), without line breaks to speak of."""
    rng = random.Random(0)
    them = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(5000)]
    weights = [1 / n for n in range(1, 5001)]
    return " ".join(rng.choices(them, weights, k=n_bytes // 6))[:n_bytes]


def chinese(n_characters):
    """Words of 2,000 different characters, three bytes each."""
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    rng = random.Random(0)
    them = ["".join(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(5000)]
    weights = [1 / n for n in range(1, 5001)]
    return "。".join(rng.choices(them, weights, k=n_characters // 3))


@pytest.mark.parametrize(
    "text, name, size",
    [
        (words(1000), "char", (20, 30)),
        (words(30_000), "char", (27, 30)),
        (words(49_999), "char", (27, 30)),
        (words(50_000), "bpe", (512, 512)),
        (words(100_000), "bpe", (512, 512)),
        (words(400_000), "bpe", (512, 512)),
        (words(10_000_000), "bpe", (4096, 4096)),
        ("x" * 10_000_000, "byte", (257, 257)),
        ("我们" * 100, "char", (2, 4)),
        (chinese(2_500_000), "bpe", (8192, 8192)),
        (" ".join(map(str, range(10**5, 3 * 10**5))), "bpe", (1024, 1024)),
    ],
    ids=[
        *("1 kB", "30 kB", "49,999 bytes", "50 kB", "100 kB", "400 kB", "10 MB"),
        *("one character", "no spaces"),
        *("many characters", "a thousand pieces"),
    ],
)
def test_the_text_decides_what_its_tokens_are(text, name, size):
    tokenizer = build_tokenizer("auto", [text])
    assert tokenizer.name == name and size[0] <= tokenizer.n_vocab <= size[1]
    assert tokenizer.decode(tokenizer.encode(text[:1000])) == text[:1000]


def test_a_bpe_of_a_text_of_any_size_has_32768_tokens_at_most():
    sizes = [bpe_size(n, 0) for n in (49_999, 50_000, 10**6, 20 * 10**6, 10**9, 10**10, 10**12)]
    assert sizes == [0, 512, 2048, 4096, 16_384, 32_768, 32_768]
    assert bpe_size(10**9, 60_000) == 32_768


def test_bytes_that_are_no_text_are_one_line_whatever_the_tokenizer(tmp_path):
    (tmp_path / "mine.txt").write_bytes(b"ab\xff\xfe" * 100_000)
    done = run_script("prepare.py", "mine.txt", "--tokenizer=auto", cwd=tmp_path)
    lines = done.stderr.decode().splitlines()
    assert done.returncode and len(lines) == 1 and "UTF-8" in lines[0]
