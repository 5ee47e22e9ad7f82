"""Several processes against one: the same weights, losses and checkpoints, and clean ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from gptling.dataset import micro_batches
from gptling.processes import Processes, StopSignals
from gptling.run import list_checkpoints, step_of
from tests.conftest import ROOT, TINY, run_script
from train import TrainConfig

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch is built without torch.distributed"
)
FLAGS = ["--dataset=mine", *TINY, "--optimizer=adamw", "--grad_clip=1", "--log_interval=1"]
TORCHRUN = ["--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
# train.py in float64: what is left are the orders in which numbers are added.
FLOAT64 = """
import sys, torch
sys.path.insert(0, {root!r})
torch.set_default_dtype(torch.float64)
import train
train.run(train.main)
"""
# The same of a changed model: one block for all layers, capped logits, and a term beside the loss.
CHANGED = FLOAT64.replace(
    "train.run(",
    """
class Changed(train.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.h = torch.nn.ModuleList([self.h[0]] * config.n_layer)
        self.head_2 = torch.nn.Linear(config.n_embd, config.vocab_size)

    def logits(self, x):
        return 5 * torch.tanh(self.lm_head(x) / 5)

    def forward(self, idx, targets=None, **options):
        logits, loss = super().forward(idx, targets, **options)
        if targets is None:
            return logits, loss
        x = self.head_2(self.wte(idx)).flatten(0, 1)
        return logits, loss, {{"from_one_token": self.losses(x, targets.flatten()).mean()}}

train.GPT = Changed
train.run(""",
)
# And of one whose logits are less their average so far.
CENTRED = FLOAT64.replace(
    "train.run(",
    """
class Centred(train.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("average", torch.zeros(config.n_embd))
        floor = torch.tensor([torch.finfo(torch.float32).min], dtype=torch.float32)
        self.register_buffer("floor", floor)

    def logits(self, x):
        logits = self.lm_head(x - self.average)
        if self.training:
            self.average.lerp_(x.detach().flatten(0, -2).mean(0), 0.1)
        return logits

train.GPT = Centred
train.run(""",
)
# train.py, in which the second process alone gets a signal in its first life.
MORTAL = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
rate = train.learning_rate
def learning_rate(step, config):
    dies = os.environ["RANK"] == os.environ.get("DIES", "1")
    if step == 12 and dies and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.Signals[os.environ["GETS"]])
    return rate(step, config)
train.learning_rate = learning_rate
train.run(train.main)
"""


@pytest.fixture
def here(trained, tmp_path):
    """A directory with data/mine and the scripts FLOAT64 and MORTAL."""
    shutil.copytree(trained / "data", tmp_path / "data")
    (tmp_path / "float64.py").write_text(FLOAT64.format(root=str(ROOT)))
    (tmp_path / "changed.py").write_text(CHANGED.format(root=str(ROOT)))
    (tmp_path / "centred.py").write_text(CENTRED.format(root=str(ROOT)))
    (tmp_path / "mortal.py").write_text(MORTAL.format(root=str(ROOT)))
    return tmp_path


def torchrun(script, *arguments, cwd, options=(), **environment):
    """Two processes of a script in the background, or as many as the options say."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *TORCHRUN, *options, script, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, code=0):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    return output


def weights(run, step=20):
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def losses(run):
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    names = ("loss", "val_loss", "from_one_token")
    return [[e[name] for e in log if name in e] for name in names]


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize(
    "batch, accumulation, processes, expected",
    [
        (8, 1, 1, (8, 1)),
        (8, 1, 2, (4, 1)),
        (4, 2, 2, (4, 1)),
        (4, 6, 3, (4, 2)),
        (4, 3, 2, (3, 2)),
        (5, 2, 2, (5, 1)),
    ],
)
def test_processes_share_a_step_in_micro_batches(batch, accumulation, processes, expected):
    config = TrainConfig(batch_size=batch, gradient_accumulation_steps=accumulation)
    assert micro_batches(config, processes) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_single_process_at_once(number, monkeypatch):
    """Of several none: torchrun passes on what they got already."""
    handlers = {}
    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    for processes in (1, 2):
        one = Processes()
        one.world_size = processes
        signals = StopSignals(one)
        handlers[number](number, None)
        assert signals.number == number
        assert (handlers[number] == signal.SIG_DFL) == (processes == 1)


def test_two_processes_give_the_weights_of_one(here):
    """The same micro-batches with the same dropout; the losses of the log are those of all."""
    flags = [*FLAGS, "--batch_size=2", "--gradient_accumulation_steps=2", "--dropout=0.3"]
    flags += ["--max_iters=3"]
    two = torchrun("float64.py", *flags, "--out_dir=out/two", cwd=here)
    process = run_script(here / "float64.py", *flags, "--out_dir=out/one", cwd=here)
    assert process.returncode == 0, process.stderr
    assert "2 processes" in finish(two)
    one, two = (weights(here / "out" / name, step=3) for name in ("one", "two"))
    assert largest_difference(one, two) < 1e-12
    for ours, others in zip(losses(here / "out/one"), losses(here / "out/two"), strict=True):
        assert ours == pytest.approx(others, abs=1e-12)
    entry = json.loads((here / "out/two/log.jsonl").read_text().splitlines()[0])
    tokens = entry["tokens_per_s"] * entry["ms"] / 1000  # of all processes
    assert tokens == pytest.approx(2 * 2 * 16, rel=1e-6)


@pytest.mark.slow
def test_two_processes_share_an_evaluation(trained):
    flags = ["--eval_only", "--init_from=out/mine", "--dataset=mine", "--batch_size=2"]
    process = run_script("train.py", *flags, cwd=trained)
    for more in ([], ["--fsdp"]):
        output = finish(torchrun(str(ROOT / "train.py"), *flags, *more, cwd=trained))
        assert process.stdout.decode() in output


@pytest.mark.slow
@pytest.mark.parametrize("script", ["float64.py", "changed.py"])
def test_one_process_accumulation_two_processes_and_shards_agree_in_float64(here, script):
    split = ["--batch_size=4", "--gradient_accumulation_steps=2"]
    two = [
        torchrun(script, *FLAGS, *split, f"--out_dir=out/{name}", *more, cwd=here)
        for name, more in (("ddp", []), ("fsdp", ["--fsdp", "--recompute"]))
    ]
    for name, more in (("one", ["--batch_size=8"]), ("accumulated", split)):
        process = run_script(here / script, *FLAGS, *more, f"--out_dir=out/{name}", cwd=here)
        assert process.returncode == 0, process.stderr
    for process in two:
        assert "2 processes" in finish(process)
    one = weights(here / "out" / "one")
    assert all(tensor.dtype == torch.float64 for tensor in one.values())
    for name in ("accumulated", "ddp", "fsdp"):
        assert largest_difference(one, weights(here / "out" / name)) < 1e-12, name
        for ours, others in zip(
            losses(here / "out" / "one"), losses(here / "out" / name), strict=True
        ):
            assert ours == pytest.approx(others, abs=1e-12)
    assert len(losses(here / "out" / "one")[2]) == (20 if script == "changed.py" else 0)


@pytest.mark.parametrize("more", [[], pytest.param(["--fsdp"], marks=pytest.mark.slow)])
def test_an_average_that_training_keeps_is_that_of_all_processes(here, more):
    """And so are the logits that use it; a constant stays."""
    split = ["--batch_size=4", "--gradient_accumulation_steps=2"]
    two = torchrun("centred.py", *FLAGS, *split, *more, "--out_dir=out/two", cwd=here)
    process = run_script(
        here / "centred.py", *FLAGS, "--batch_size=8", "--out_dir=out/one", cwd=here
    )
    assert process.returncode == 0, process.stderr
    finish(two)
    one, other = weights(here / "out" / "one"), weights(here / "out" / "two")
    assert one["transformer.average"].abs().max() > 0.01
    assert torch.equal(one["transformer.floor"], other["transformer.floor"])
    assert largest_difference(one, other) < 1e-12


@pytest.mark.slow
def test_a_run_moves_between_one_process_ddp_and_fsdp(trained, here):
    """In float32, with the checkpoints of each opened by the next."""
    process = run_script("train.py", *FLAGS, "--max_iters=40", "--out_dir=out/one", cwd=here)
    assert process.returncode == 0, process.stderr
    run = here / "out" / "moved"
    arguments = ["--out_dir=out/moved", "--keep_last=9"]
    for step, two, more in (
        (10, True, ["--fsdp=True"]),
        (20, False, ["--fsdp=False"]),
        (30, True, []),
        (40, True, ["--fsdp=True"]),
    ):
        # Each part trains to its end, of which what is beyond `step` is taken away.
        flags = [*arguments, *more, *([*FLAGS, "--max_iters=40"] if step == 10 else ["--resume"])]
        if two:
            finish(torchrun(ROOT / "train.py", *flags, cwd=here))
        else:
            process = run_script("train.py", *flags, cwd=here)
            assert process.returncode == 0, process.stderr
        for path in list_checkpoints(run):
            if step_of(path) > step and step < 40:
                shutil.rmtree(path)
    for ours, others in zip(losses(here / "out" / "one"), losses(run), strict=True):
        assert ours == pytest.approx(others, abs=1e-5)


@pytest.mark.slow
def test_three_processes_that_resume_equal_three_that_did_not_stop(here):
    """With two, the order of a sum does not show: a + b is b + a."""
    flags = [*FLAGS, "--batch_size=12", "--keep_last=9", "--dropout=0.1", "--out_dir=out/whole"]
    three = ["--nproc_per_node=3"]
    finish(torchrun(ROOT / "train.py", *flags, cwd=here, options=three))
    shutil.copytree(here / "out" / "whole", here / "out" / "parts")
    shutil.rmtree(here / "out" / "parts" / "checkpoint-20")
    resume = ["--resume", "--out_dir=out/parts"]
    assert "from step 10" in finish(torchrun(ROOT / "train.py", *resume, cwd=here, options=three))
    assert largest_difference(weights(here / "out/whole"), weights(here / "out/parts")) == 0
    assert losses(here / "out" / "whole") == losses(here / "out" / "parts")


@pytest.mark.slow
def test_torchrun_that_is_stopped_saves_and_goes_on(here):
    run = here / "out" / "run"
    arguments = [*FLAGS, "--max_iters=100000", "--eval_interval=100000", "--out_dir=out/run"]
    process = torchrun(ROOT / "train.py", *arguments, cwd=here)
    deadline = time.monotonic() + 100
    while not (run / "log.jsonl").exists() or "loss" not in (run / "log.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    stopped = re.search(r"stopped at step (\d+); next: torchrun .* --out_dir=out/run", output)
    assert stopped and output.count("stopped at step") == 1
    assert list_checkpoints(run)[-1].name == f"checkpoint-{stopped[1]}"
    process = run_script(
        "train.py", "--out_dir=out/run", "--resume", f"--max_iters={int(stopped[1]) + 5}", cwd=here
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_or_restarts_it(here):
    flags, options = [*FLAGS, "--eval_interval=5"], ["--max-restarts=1"]

    def mortal(name, signal, **more):
        return torchrun("mortal.py", *flags, f"--out_dir=out/{name}", cwd=here, GETS=signal, **more)

    whole = torchrun(ROOT / "train.py", *flags, "--out_dir=out/whole", cwd=here)
    restarted = mortal("restarted", "SIGKILL", options=options)
    finish(whole)
    assert "from step 10" in finish(restarted)
    assert largest_difference(weights(here / "out/whole"), weights(here / "out/restarted")) == 0
    started = time.monotonic()
    finish(mortal("dead", "SIGKILL"), code=1)
    assert time.monotonic() - started < 60  # 30 and the start of a busy machine
    assert list_checkpoints(here / "out" / "dead")[-1].name == "checkpoint-10"
    # A signal that only one of them gets stops all of them at the same step.
    assert finish(mortal("stopped", "SIGTERM"), code=1).count("stopped at step 13") == 1
    resume = ["--out_dir=out/stopped", "--resume=True"]
    assert "from step 13" in finish(torchrun(ROOT / "train.py", *resume, cwd=here))
    assert largest_difference(weights(here / "out/whole"), weights(here / "out/stopped")) == 0
    assert losses(here / "out" / "whole") == losses(here / "out" / "stopped")


@pytest.mark.slow
def test_a_restart_goes_on_only_with_what_its_own_launch_has_begun(trained, here):
    """Not with a run that lay there; in its place with --overwrite, of one process too."""
    shutil.copytree(trained / "out", here / "out")
    same = [flag for flag in FLAGS if "optimizer" not in flag]  # so that it could be resumed
    flags = [*same, "--eval_interval=5", "--learning_rate=5e-3", "--out_dir=out/mine"]
    restart = ["--max-restarts=1"]
    before = weights(here / "out" / "mine")
    process = torchrun(ROOT / "train.py", *flags, "--max_iters=30", cwd=here, options=restart)
    output = finish(process, code=1)
    assert "holds a run" in output and "from step" not in output
    assert largest_difference(before, weights(here / "out" / "mine")) == 0
    options = [*restart, "--nproc_per_node=1"]
    flags += ["--overwrite"]
    process = torchrun("mortal.py", *flags, cwd=here, options=options, GETS="SIGKILL", DIES="0")
    assert "from step 10" in finish(process)
    whole = run_script("train.py", *flags, "--out_dir=out/whole", cwd=here)
    assert whole.returncode == 0
    assert largest_difference(weights(here / "out/whole"), weights(here / "out/mine")) == 0


@pytest.mark.slow
def test_the_quick_start_runs_sharded_with_muon(here):
    """As one process does, but for rounding; its checkpoint goes on in one."""
    flags = ["--max_iters=6", "--eval_interval=3", "--dtype=float32", "--log_interval=1"]
    process = run_script("train.py", *flags, "--out_dir=out/one", cwd=here)
    assert process.returncode == 0, process.stderr
    finish(torchrun(ROOT / "train.py", *flags, "--fsdp", "--out_dir=out/two", cwd=here))
    for ours, others in zip(losses(here / "out/one"), losses(here / "out/two"), strict=True):
        assert ours == pytest.approx(others, abs=1e-3)
    assert largest_difference(weights(here / "out/one", 6), weights(here / "out/two", 6)) < 1e-3
    resume = ["--out_dir=out/two", "--resume", "--fsdp=False", "--max_iters=8"]
    assert run_script("train.py", *resume, cwd=here).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--batch_size=5"], ["--batch_size=5", "2 processes"]),
        (["--dataset=nix"], ["data/nix"]),
        (["--n_layer=two"], ["Error parsing --n_layer", "'two'"]),  # a box
    ],
)
def test_a_mistake_is_one_message_of_the_first_process(here, arguments, named):
    process = torchrun(ROOT / "train.py", *FLAGS, *arguments, cwd=here)
    output, _ = process.communicate(timeout=60)
    lines = [line for line in output.splitlines() if "error:" in line or "Error parsing" in line]
    assert process.returncode != 0 and len(lines) == 1, output
    assert all(word in lines[0] for word in named)
    assert 'train.py", line' not in output  # no traceback of ours
    assert not (here / "out").exists()


@pytest.mark.slow
def test_a_port_in_use_is_one_line(here):
    """Started by hand, without torchrun: the first process listens where another does already."""
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        process = run_script("train.py", *FLAGS, cwd=here, **environment, MASTER_PORT=str(port))
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1, error
    assert str(port) in error and "cannot join" in error
