"""--minutes: plans for simulated machines, the time of a step, and real planned runs."""

import dataclasses
import json
import math
import re
import time
import tomllib
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gptling import startup
from gptling.clock import Clock
from gptling.dataset import Dataset
from gptling.plan import Planner
from gptling.schedule import eval_part, evaluates_after, most_steps, tokens_per_step
from gptling.state import Progress
from tests.conftest import one_process, read_log, small
from tests.scripts import ROOT, output_here, output_of
from tests.test_processes import finish, torchrun
from train import TrainConfig, learning_rate


def corpus(tokens, vocab_size):
    val, tokenizer = range(tokens // 10), SimpleNamespace(n_vocab=vocab_size)
    return SimpleNamespace(n_tokens=tokens, val=val, tokenizer=tokenizer, longest=len(val) - 1)


NOTE, NOTES = corpus(10_000, 64), corpus(30_000, 64)
BOOK, BOOKS = corpus(400_000, 1024), corpus(40_000_000, 8192)


class Simulator(Planner):
    """A machine that needs 6 FLOPs for each parameter and token, 1.4 times as many with dropout.
    steps: instead, the seconds of 2,048 tokens by the width."""

    steps = None

    def __init__(self, data, minutes=5, flops=1e11, world_size=1, **fixed):
        processes = SimpleNamespace(world_size=world_size, device="cpu")
        super().__init__(TrainConfig(**fixed), data, math.inf, None, processes)
        self.left, self.flops, self.timed = 60 * minutes, flops, []
        self.can_vary = data.tokenizer.n_vocab > 100

    def plan(self):
        super().plan()
        return self.config

    def seconds_left(self):
        return self.left

    def seconds_of_step(self, config):
        if self.steps:
            return self.steps[config.n_embd] * tokens_per_step(config) / 2048
        step = 6 * self.parameters(config) * tokens_per_step(config) / self.flops
        return step * (1.4 if config.dropout else 1)

    def time_step(self, config):
        self.timed.append(config)
        self.left -= 5 * self.seconds_of_step(config)
        return self.seconds_of_step(config)


def tokens_seen(config):
    return config.max_iters * tokens_per_step(config)


FIELDS = "n_layer n_head n_embd dropout bpe_dropout muon_decay weight_decay block_size batch_size "
FIELDS += "gradient_accumulation_steps max_iters learning_rate muon_lr muon_momentum "
FIELDS += "eval_interval eval_tokens"
ADAMW = {"optimizer": "adamw", "n_embd": 512}
TRAINED = {"init_from": "gpt2", "batch_size": 300, "block_size": 100}
EVALUATED = {"eval_interval": 20, "eval_tokens": 100_000}
RATE = {"eval_tokens": 0, "learning_rate": 0.003}
PLANS = [
    (NOTE, 1, {}, "3 4 256 0.1 0 0.8 0.8 64 16 1 265 0.0075 0.035355 0.9 89 1000"),
    (NOTES, 1, {}, "2 4 256 0.1 0 0.8 0.8 64 16 1 390 0.0075 0.035355 0.9 130 3000"),
    (BOOK, 4, {}, "2 4 256 0 0 0.1 0.43 64 32 1 974 0.0075 0.035355 0.95 325 40000"),
    (BOOK, 8, {}, "3 4 256 0.1 0 0.1 0.41 64 32 1 938 0.0075 0.035355 0.95 134 -1"),
    (BOOK, 60, {}, "4 6 384 0.1 0.05 0.22 0.8 64 32 1 2586 0.005 0.028868 0.95 259 40000"),
    (BOOKS, 1, {}, "2 2 64 0 0 0.1 0.1 64 32 1 682 0.01 0.05 0.9 228 59486"),
    (BOOKS, 10, {}, "2 6 192 0 0 0.1 0.1 128 32 1 896 0.01 0.040825 0.9 100 51299"),
    (BOOKS, 100, {}, "3 4 256 0 0 0.1 0.1 256 16 1 4658 0.0075 0.035355 0.95 466 -1"),
    (BOOKS, 5000, {}, "6 8 512 0 0 0.1 0.1 1024 8 2 11964 0.00375 0.025 0.95 1197 -1"),
    (BOOKS, 5, {"n_embd": 300}, "2 4 300 0 0 0.1 0.1 64 32 1 465 0.0064 0.03266 0.9 117 30018"),
    (BOOKS, 5, ADAMW, "2 8 512 0 0 0.1 0.1 64 16 1 396 0.00070711 0.025 0.9 99 12874"),
    (BOOKS, 5, TRAINED, "2 4 128 0 0 0.1 0.1 100 300 1 100 0.001 0.005 0.9 25 94665"),
    (BOOKS, 5, EVALUATED, "2 4 128 0 0 0.1 0.1 64 32 1 835 0.01 0.05 0.9 20 100000"),
    (BOOKS, 5, RATE, "2 4 128 0 0 0.1 0.1 64 32 1 952 0.003 0.05 0.95 952 0"),
    (BOOKS, 5, {"world_size": 6}, "2 4 128 0 0 0.1 0.1 128 4 6 1015 0.01 0.05 0.95 254 98073"),
]


@pytest.mark.parametrize("data, minutes, options, numbers", PLANS)
def test_plans_are_those_that_were_stored(data, minutes, options, numbers):
    """They follow from the rules in docs/minutes.md on a machine of 1e11 FLOPs a second."""
    config = Simulator(data, minutes, **options).plan()
    plan = [getattr(config, name) for name in FIELDS.split()]
    numbers = [float(number) for number in numbers.split()]
    assert plan == pytest.approx(numbers, rel=1e-4)
    assert config.later_tokens == (0.5 if config.dropout else 0)
    assert config.warmup_iters == math.ceil(config.max_iters / 50)
    assert config.min_lr == pytest.approx(config.learning_rate / 100)


@pytest.mark.parametrize("data", [BOOK, BOOKS])
@pytest.mark.parametrize("of", ["minutes", "flops"])
def test_with_more_time_or_speed_the_model_is_never_smaller_and_sees_enough(data, of):
    start, sizes, seen = {"minutes": 2, "flops": 1e11}, [], []
    for n in range(16):
        planner = Simulator(data, **start | {of: start[of] * 1.7**n})
        config = planner.plan()
        sizes.append(planner.parameters(config))
        seen.append(tokens_seen(config))
        epochs = max(4, 1.5 * math.sqrt(sizes[-1] / data.n_tokens))
        assert n == 15 or seen[-1] > 0.75 * min(1.5 * sizes[-1], epochs * data.n_tokens)
        assert seen[-1] <= 16 * data.n_tokens
    assert sizes == sorted(sizes) and sizes[-1] > 3 * sizes[0]


TIMES = [(data, minutes, {}) for data in (BOOK, BOOKS) for minutes in (0.2, 1, 5, 20, 120)]
LARGE = {"n_layer": 12, "n_embd": 768, "n_head": 12, "flops": 1e13, "eval_tokens": 1024}
RARELY = {"eval_interval": 10**6, "eval_tokens": 2_000_000}
STEP = {"batch_size": 64, "block_size": 512, "gradient_accumulation_steps": 3}
TIMES += [(BOOKS, 5, options) for options in (EVALUATED, RARELY, LARGE, STEP)]
TIMES += [(BOOKS, 20, {"eval_tokens": 0})]


@pytest.mark.parametrize("data, minutes, options", TIMES)
def test_measuring_steps_evaluations_and_checkpoints_fit_into_the_time(data, minutes, options):
    planner = Simulator(data, minutes, **options)
    config = planner.plan()
    step = planner.seconds_of_step(config)
    n = math.ceil(config.max_iters / config.eval_interval)
    tokens = eval_part(config) or len(data.val)
    evaluating = tokens * step / tokens_per_step(config) / 3  # without a backward pass
    saving = max(0.4, planner.parameters(config) / 1e7)
    spent = 60 * minutes - planner.left + config.max_iters * step + n * (evaluating + saving)
    if config.eval_tokens == -1:  # the last one covers the whole split
        spent += len(data.val) * step / tokens_per_step(config) / 3
    most = 16 * data.n_tokens
    used_up = tokens_seen(config) > 0.99 * most
    assert spent < 60 * minutes
    assert spent > 0.85 * 60 * minutes - 6 or used_up
    if not options:
        assert n * evaluating < 0.05 * 60 * minutes and 3 <= n <= 10


STEPS = [(9000, 0, 600), (50_000, 0, 781), (9000, 0.1, 600)]
STEPS += [(25_000, 0.1, 683), (50_000, 0.1, 1200), (100_000, 0.1, 1562)]


@pytest.mark.parametrize("n_tokens, bpe_dropout, steps", STEPS)
def test_other_tokens_allow_28_epochs_of_a_short_text(n_tokens, bpe_dropout, steps):
    """But not beyond step 1,200. Otherwise it is 16 epochs, and 600 steps at least."""
    config = small(bpe_dropout=bpe_dropout, batch_size=16, block_size=64)
    assert most_steps(config, n_tokens) == steps


@pytest.mark.parametrize("minutes", [0.5, 5, 500])
@pytest.mark.parametrize("tokens", [300, 3000, 30_000])
def test_a_text_too_short_for_the_time_is_not_seen_for_ever(tokens, minutes):
    planner = Simulator(corpus(tokens, 64), minutes)
    config = planner.plan()
    assert tokens_seen(config) <= max(16 * tokens, 600 * tokens_per_step(config))
    assert planner.parameters(config) <= max(25 * tokens, 2_600_000)
    assert config.weight_decay > 0.5 or minutes == 0.5
    assert config.block_size == min(64, tokens // 10 - 1)


# A larger model that is hardly slower is better although it sees too little, as on a CPU where
# bfloat16 pays from a width of 128 on.
CHOICES = {0.098: 128, 0.105: 128, 0.107: 64}
CHOSEN = [(0.8, {64: 0.088, 96: 0.115, 128: step}, n) for step, n in CHOICES.items()]
# Its steps may be shorter than its size suggests: 1.36 times as long on two cores with AMX, where
# it has 1.9 times the parameters.
CHOSEN += [(minutes, {128: 0.055, 192: 0.075}, n) for minutes, n in ((0.97, 192), (0.75, 128))]


@pytest.mark.parametrize("minutes, steps, n_embd", CHOSEN)
def test_a_model_is_chosen_by_the_time_of_its_steps(minutes, steps, n_embd):
    planner = Simulator(corpus(2_147_393, 8192) if 64 in steps else corpus(317_865, 2048), minutes)
    planner.steps = steps
    assert planner.plan().n_embd == n_embd


@pytest.mark.parametrize(
    "data, fixed",
    [
        (BOOKS, dict(n_layer=7, n_embd=80, block_size=50, batch_size=3, dropout=0.3)),
        (BOOKS, dict(n_head=4, muon_lr=0.2, min_lr=0.01, gradient_accumulation_steps=5)),
        (BOOKS, dict(n_layer=3, n_head=5, n_embd=100, eval_interval=7, warmup_iters=3, seed=7)),
        (BOOKS, dict(muon_decay=0.3, muon_momentum=0.7, learning_rate=1e-4, eval_tokens=500)),
        (BOOKS, dict(weight_decay=0.3)),  # for both optimizers
        # Too short a text for a model of this size, as that of --init_from=gpt2 is.
        (corpus(10_000, 50_257), dict(n_embd=768)),
        (corpus(10_000, 50_257), dict(n_layer=12, n_embd=768)),
    ],
)
def test_what_is_given_stays_and_a_step_is_timed_with_it(data, fixed):
    planner = Simulator(data, 20, **fixed)
    config = planner.plan()
    assert fixed.items() <= vars(config).items()
    assert (config.muon_decay is None) == ("weight_decay" in fixed)
    for timed in planner.timed:
        assert fixed.items() <= vars(timed).items()
    assert config.max_iters > 10 and config.n_embd % config.n_head == 0


# ------------------------------------------------------------ the time of a step
class TimedPlanner(Planner):
    """A real one, of some minutes, that began at 60 s of `clock`. set_up is the test's."""

    clock = 100.0

    def now(self):
        return self.clock - 40


@pytest.fixture
def planner(trained, monkeypatch):
    monkeypatch.chdir(trained)
    config = TrainConfig(dataset="mine", minutes=10.0, gradient_accumulation_steps=3)
    processes = one_process()
    processes.wrapped, processes.autocast = torch.nn.Linear(1, 1), nullcontext()
    return TimedPlanner(config, Dataset("mine", 8, 1), math.inf, None, processes)


# Minutes, seconds of a fast micro-batch, their mean, steps, whether the first one compiles: many
# steps, a quarter of 15 seconds, 1.5 seconds, and after a first one that allocates or compiles.
MEASURED = [(10, 0.01, 0.016, 21, False), (10, 0.5, 0.75, 3, False), (2, 0.3, 0.45, 3, False)]
MEASURED += [(10, 1.5, 1.5, 2, False), (10, 6, 6, 2, True)]


@pytest.mark.parametrize("minutes, slow, mean, n, compiles", MEASURED)
def test_a_step_is_all_its_micro_batches_and_an_update(minutes, slow, mean, n, compiles, planner):
    steps = []

    class Model(torch.nn.Linear):
        def forward(self, idx, targets):
            planner.clock += slow if len(steps) % 5 < 2 else 2 * slow  # bursts of other work
            assert idx.shape == (5, 8) and 2 < targets.max() < planner.data.tokenizer.n_vocab
            return None, super().forward(torch.ones(1, 1)).sum()

    class Optimizer(torch.optim.SGD):
        def step(self):
            planner.clock += 0.02
            assert model.weight.grad.item() == 3  # of all micro-batches, and of no step before
            steps.append(planner.clock)

    def build(config, data):
        assert config.n_embd == 48 != planner.config.n_embd
        forward = torch.compile(model, backend="eager") if compiles else model
        return model, forward, [Optimizer(model.parameters())]

    model = Model(1, 1)
    planner.set_up, planner.config.minutes = build, minutes
    settings = {"n_embd": 48, "batch_size": 5, "block_size": 8, "compile": compiles}
    candidate = dataclasses.replace(planner.config, **settings)
    seconds = 3 * mean + 0.02
    compiling = seconds if compiles else 0
    assert planner.time_step(candidate) == pytest.approx(seconds) and len(steps) == n
    assert planner.compiling == pytest.approx(compiling)
    left = 60 * minutes - (planner.clock - 40) - compiling
    assert planner.seconds_left() == pytest.approx(left)


def test_time_is_the_slowest_processs(planner):
    planner.processes.all_reduce_max = lambda spent: spent + 7  # another process's
    assert Planner.now(planner) == pytest.approx(startup.seconds() + 7, abs=0.1)


def test_a_size_that_does_not_fit_into_memory_is_not_planned(planner):
    """Measuring it does not end the run. Any other error does."""

    def set_up(config, data):
        if config.n_embd > 128:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")
        raise RuntimeError("a bug")

    planner.set_up = set_up
    narrow = dataclasses.replace(planner.config, n_embd=64, batch_size=5, block_size=8)
    assert planner.time_step(dataclasses.replace(narrow, n_embd=256)) == math.inf
    with pytest.raises(RuntimeError, match="a bug"):
        planner.time_step(narrow)


@pytest.mark.parametrize("room", [64, 128, 256])
def test_the_largest_size_that_fits_is_planned(room):
    class SmallGPU(Simulator):
        def time_step(self, config):
            fits = config.n_embd <= room and tokens_per_step(config) <= 4096
            return super().time_step(config) if fits else math.inf

    config = SmallGPU(BOOKS, 100).plan()
    assert config.n_embd == room and tokens_per_step(config) <= 4096
    assert config.max_iters > 1000


# ------------------------------------------------------------ keeping to the time
class SimulatedProgress(Progress):
    seconds = property(lambda self: self.spent())


class SimulatedRun:
    """A planned run of 500 steps, which fill its time with five evaluations and one of the whole
    split, on a machine where all is slower(share of the time) times slower."""

    def __init__(self, slower, minutes=1, spent=0.0, **settings):
        self.slower, self.spent = slower, spent  # a share of the time
        sizes = {"batch_size": 1, "block_size": 64, "max_iters": 500, "eval_interval": 100}
        rates = {"learning_rate": 1.0, "min_lr": 0.01, "warmup_iters": 10, "eval_tokens": -1}
        self.config = small(**sizes | rates | {"minutes": minutes} | settings)
        data = SimpleNamespace(val_targets=64, val=range(3501), n_tokens=10_000)
        self.progress = SimulatedProgress(500)
        self.progress.spent = lambda: 60 * minutes * self.spent
        self.clock = Clock(self.config, data, 2, self.progress, one_process())

    def wait(self, share):
        self.spent += share * self.slower(self.spent)

    def run(self, last=math.inf):
        """Train to the end or to step `last`. Return the steps, and the changes of their number."""
        changes = step = 0
        while step < min(self.progress.max_iters, last):
            max_iters = self.clock.fitting_steps(step)
            changes += max_iters != self.progress.max_iters
            self.progress.max_iters = max_iters
            self.rate = learning_rate(step, max_iters, self.config)
            self.wait(0.85 / 500)
            step += 1
            if evaluates_after(step, max_iters, self.config):
                self.wait(0.015)
        self.wait(0.03)
        return step, changes


def then(times):
    return lambda share: 1 if share < 1 / 3 else times


EVALUATIONS = [(30, [10, 20, 30]), (34, [10, 20, 34]), (35, [10, 20, 30, 35]), (4, [4]), (10, [10])]
SPEEDS = {  # seconds are so many times as long; the steps that fit into the time, at most
    "as planned": (lambda share: 1, 530),
    "2.5 times slower after a third": (then(2.5), 310),
    "2.5 times faster after a third": (then(0.4), 1080),
    "5 times slower after a third": (then(5), 240),
    "2.5 times slower in the first third": (lambda share: 2.5 if share < 1 / 3 else 1, 430),
    "ever slower": (lambda share: 1 + share, 360),
    "one interruption": (lambda share: 40 if 0.5 < share < 0.5017 else 1, 490),
    "every fifth step is slow": (lambda share: 3 if int(share * 3_000) % 5 == 0 else 1, 450),
}


@pytest.mark.parametrize("minutes", [1, 20])
@pytest.mark.parametrize("name", SPEEDS)
def test_a_planned_run_keeps_to_its_time_on_a_machine_whose_speed_changes(name, minutes):
    """Within 5 %, with a decayed rate."""
    slower, most = SPEEDS[name]
    run = SimulatedRun(slower, minutes)
    steps, changes = run.run()
    assert 0.95 < run.spent < 1.05 and run.rate == pytest.approx(0.01)
    assert 0.9 * most < steps <= most and changes <= 12
    assert steps == run.progress.max_iters


@pytest.mark.parametrize("max_iters, evaluated", EVALUATIONS)
def test_evaluations_are_an_interval_apart_and_the_last_one_is_at_the_end(max_iters, evaluated):
    """No two are closer together than half an interval. The clock expects as many."""
    run = SimulatedRun(None, max_iters=max_iters, eval_interval=10, eval_tokens=0)
    steps = range(1, max_iters + 1)
    assert [step for step in steps if evaluates_after(step, max_iters, run.config)] == evaluated
    run.clock.newest, run.clock.evaluation = [1.0], 7.0
    for step in range(max_iters):
        evaluating = 7 * sum(other > step for other in evaluated)
        assert run.clock.seconds_left(step, max_iters) == max_iters - step + evaluating


@pytest.mark.parametrize("eval_interval, grows", [(100, False), (450, True)])
def test_a_plan_grows_once_the_time_of_an_evaluation_is_known(eval_interval, grows):
    """If there is one before the last."""
    run = SimulatedRun(lambda share: 0.5, eval_interval=eval_interval)
    run.run(last=90)
    assert (run.progress.max_iters > 500) == grows
    run.run(last=130)
    assert run.progress.max_iters > 500


def test_a_run_of_max_iters_keeps_its_steps_and_tells_the_seconds_left_with_evaluations():
    whole, half = SimulatedRun(then(2.5)), SimulatedRun(then(2.5))
    whole.config.minutes = half.config.minutes = 0.0
    assert whole.run() == (500, 0)
    half.run(last=300)
    end = 0.03 * 2.5  # the evaluation of the whole split, which half has too
    left = 60 * (whole.spent - half.spent + end)
    assert half.clock.seconds_left(300, 500) == pytest.approx(left, rel=0.03)


def test_a_run_ends_when_its_text_is_used_up_or_after_the_time_that_was_left_when_it_resumed():
    faster, resumed = SimulatedRun(then(0.4)), SimulatedRun(lambda share: 1, spent=0.6)
    faster.clock.progress.most = 600
    assert faster.run()[0] == 600
    assert 150 < resumed.run()[0] < 220 and 0.95 < resumed.spent < 1.05


# ------------------------------------------------------------ planned runs
FLAGS = ["--dataset=mine", "--curves=False", "--device=cpu"]
NARROW = ["--n_layer=1", "--n_embd=16"]  # which is quick to measure
OVER = "    minutes: float = 1.0", "    minutes: float = 0.002"  # at its start: a plan has one step


def test_a_plan_is_printed_stored_and_kept_to(here):
    start = time.monotonic()
    flags = [*FLAGS, "--minutes=0.06", "--n_layer=1", "--muon_lr=0.04"]
    output = output_of("train.py", *flags, cwd=here, OMP_NUM_THREADS="1")  # a process of its own
    took = int(re.search(r"^Done in (\d+) s\.", output, re.M)[1])
    assert 1 < took < 1.1 * (time.monotonic() - start)
    config = tomllib.loads((here / "out/mine/config.toml").read_text())
    assert (config["n_layer"], config["muon_lr"]) == (1, 0.04) and config["minutes"] == 0.06
    steps = config["max_iters"]
    plan = dict(re.findall(r"(\w+)=([^,\s]+)", output.partition("\ndata:")[0]))
    fields = {name for name, value in vars(TrainConfig()).items() if value is None}
    assert plan.keys() == fields - {"n_layer", "muon_lr"} - {"teacher_share"}  # given, and None
    for name in plan.keys() - {"max_iters"}:  # the machine's speed may have changed it
        value = config[name]
        assert plan[name] == (f"{value:.3g}" if isinstance(value, float) else str(value)), name
    assert (here / f"out/mine/checkpoint-{steps}").is_dir()
    assert f"step {steps}/{steps} | validation" in output


@pytest.mark.slow
def test_a_real_run_ends_on_time(tmp_path):
    """The bound is wide, because other programs use the machine as well."""
    output = output_of("train.py", "--minutes=0.7", "--curves=False", cwd=tmp_path)
    assert 36 <= int(re.search(r"^Done in (\d+) s\.", output, re.M)[1]) <= 50  # of 42


@pytest.mark.parametrize(
    "preset, words, planned, expected",
    [
        ("", [*NARROW, "--optimizer=adamw"], 0.002, {"n_layer": 1}),
        ("max_iters = 2\neval_interval = 2\n", [], None, {"n_embd": 128}),
        ("max_iters = 2\nbatch_size = 3\n", [*NARROW, "--minutes=0.003"], 0.003, {"batch_size": 3}),
        ("minutes = 0.003\n", ["--n_layer=1", "--n_head=6"], 0.003, {"n_head": 6}),
        ("max_iters = 2\n", ["--init_from=out/first"], None, {"learning_rate": 0.001}),
        ("", ["--init_from=out/first"], 0.002, {"n_layer": 2, "n_embd": 16, "block_size": 16}),
    ],
)
def test_a_run_is_planned_unless_a_flag_or_preset_says_its_steps(
    preset, words, planned, expected, trained, here
):
    (here / "out").mkdir()
    (here / "out/first").symlink_to(trained / "out/mine")
    (here / "mine.toml").write_text(preset)
    output = output_here("train.py", "mine.toml", *words, *FLAGS, cwd=here, changes=[OVER])
    assert output.count("plan for") == bool(planned)
    assert not planned or f"plan for {planned:g} min: " in output
    plan = output.partition("data:")[0]
    assert ("muon_lr" in plan) == bool(planned and "--optimizer=adamw" not in words)
    config = tomllib.loads((here / "out/mine/config.toml").read_text())
    assert {"max_iters": 1 if planned else 2}.items() | expected.items() <= config.items()


def test_an_edited_default_stays_and_the_quick_start_is_planned(trained, tmp_path):
    """The last evaluation of a plan covers the whole split."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/quickstart").symlink_to(trained / "data/mine")
    rate = "    muon_lr: Planned[float] = "
    changes = [OVER, (f"{rate}None", f"{rate}0.0006")]
    flags = [*NARROW, "--curves=False", "--device=cpu", "--batch_size=64"]
    output = output_here("train.py", *flags, cwd=tmp_path, changes=changes)
    plan = output.partition("data:")[0]
    assert "plan for 0.002 min: block_size" in plan and "muon_lr" not in plan
    config = tomllib.loads((tmp_path / "out/quickstart/config.toml").read_text())
    assert config["muon_lr"] == 0.0006
    entry = read_log(tmp_path / "out/quickstart")[-1]
    n = json.loads((trained / "data/mine/meta.json").read_text())["val"]["tokens"]
    assert entry["val_tokens"] == n - 1
    assert entry["comparable_loss"] != entry["val_loss"] and "(best)" in output


@pytest.mark.slow
def test_two_processes_have_one_plan(here):
    output = finish(torchrun(ROOT / "train.py", *FLAGS, "--minutes=0.3", cwd=here))
    assert output.count("plan for 0.3 min:") == 1
    config = tomllib.loads((here / "out/mine/config.toml").read_text())
    assert config["gradient_accumulation_steps"] == 2
    assert read_log(here / "out/mine")[-1]["step"] == config["max_iters"]
