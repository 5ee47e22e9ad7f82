"""Several processes against one: the same weights, losses and checkpoints, and clean ends."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from gptling.processes import Processes
from gptling.run import list_checkpoints, load_training_state
from tests.conftest import read_log, weights
from tests.edits import INIT, LOGITS, LOSS, copy_edited
from tests.scripts import MINE, ROOT, output_of, peak_memory, run_in_child, start
from tests.test_resume import assert_equal_runs
from tests.test_train import MASKED, MASKING, UNEVENLY

FLAGS = [*MINE, "--optimizer=adamw", "--grad_clip=1", "--log_interval=1"]
PROJECT = ["model.py", "train.py", "prepare.py", "gptling"]
TORCHRUN = ["--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
# train.py, which environment variables change. FLOAT64: only the orders of sums differ then.
# DIES: RANK STEP SIGNAL, which a process sends itself in its first life.
SCRIPT = """
import os, signal, sys
sys.path.append({root!r})
import torch, train

def in_float64(*arguments, load=train.load_teachers):
    torch.set_default_dtype(torch.float32)  # that of checkpoints
    teachers = [teacher.double() for teacher in load(*arguments)]
    torch.set_default_dtype(torch.float64)
    return teachers

if "FLOAT64" in os.environ:
    torch.set_default_dtype(torch.float64)
    train.load_teachers = in_float64

rank, last, name = os.environ.get("DIES", "9 9 SIGKILL").split()
rate = train.learning_rate
def learning_rate(step, max_iters, config):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and os.environ["RANK"] == rank and step == int(last):
        os.kill(os.getpid(), signal.Signals[name])
    return rate(step, max_iters, config)
train.learning_rate = learning_rate
train.cli.launch(train.main)
"""
# One block for all layers, capped logits, a term beside the loss, and a buffer that changes.
NEW = """        self.head_2 = nn.Linear(config.n_embd, config.vocab_size)
        self.register_buffer("batches", torch.zeros(()))
"""
TERM = """        self.batches = self.batches + self.training
        x = self.head_2(self.wte(idx)).flatten(0, 1)
        term = {"from_one_token": self.losses(x, targets.flatten()).mean()}
"""
CHANGED = ["shared", (LOGITS, "return 5 * torch.tanh(self.lm_head(x) / 5)")]
CHANGED += [(INIT, NEW + INIT), (LOSS, f"{TERM}{LOSS}, term")]


@pytest.fixture
def here(here):
    """A directory with data/mine and SCRIPT."""
    (here / "script.py").write_text(SCRIPT.format(root=str(ROOT)))
    return here


def torchrun(script, *arguments, cwd, options=(), **environment):
    """Two processes of a script in the background, or as many as the options say."""
    command = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN, *options, script]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *arguments], cwd=cwd, env=environment, **streams)


def train_in_fork(flags, here, environment):
    """Train in a fork of a process that has imported PyTorch, without torchrun: seconds faster."""
    os.environ |= environment
    run_in_child([here / "script.py", *flags], here, [os.devnull, here / "output", os.devnull])


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return str(server.getsockname()[1])


def finish(process, code=0):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    return output


def assert_close_losses(one, other, difference):
    """The losses of two runs are the same but for this difference."""
    for name in ("loss", "val_loss", "from_one_token", "teacher", "later"):
        ours, others = ([e[name] for e in read_log(run) if name in e] for run in (one, other))
        assert ours == pytest.approx(others, abs=difference)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_single_process_at_once(number):
    """It does not end several processes: torchrun passes on what they got already."""
    for world_size in (1, 2):
        processes = Processes()
        processes.world_size = world_size
        signal.signal(number, signal.SIG_DFL)  # a background job of a shell ignores SIGINT
        processes.catch_signals()
        signal.raise_signal(number)
        assert processes.signal == number
        assert (signal.getsignal(number) == signal.SIG_DFL) == (world_size == 1)


@pytest.mark.parametrize("changed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_give_the_weights_of_one_also_in_shards(trained, here, changed):
    """The same micro-batches with the same dropout; the losses of the log are those of all, also if
    they have other numbers of targets, with a teacher and later tokens. A changed model's too, also
    of one whole batch."""
    flags = [*FLAGS, "--batch_size=2", "--gradient_accumulation_steps=4"]
    runs = {"one": [], "two": [], "shards": ["--fsdp"]}
    if changed:
        steps, changes = 20, CHANGED
        runs["whole"] = ["--batch_size=8", "--gradient_accumulation_steps=1"]
        runs["shards"].append("--recompute")
    else:
        steps, changes = 3, [(MASKING, MASKED.format(UNEVENLY))]
        shutil.copytree(trained / "out/mine", here / "teacher")
        flags += ["--teacher=teacher", "--later_tokens=0.5", "--dropout=0.3", "--optimizer=muon"]
    copy_edited(here, PROJECT, changes)
    (here / "output").touch()
    processes = []
    for name, more in runs.items():
        given = [*flags, f"--max_iters={steps}", *more, f"--out_dir=out/{name}"]
        options = {"FLOAT64": "1"}
        if name in ("two", "shards"):
            options |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        for rank in range(int(options.get("WORLD_SIZE", 1))):
            options = options | {"RANK": str(rank)}
            processes.append(start(train_in_fork, given, here, options))
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert (here / "output").read_text().count("2 processes") == 2  # each run's first one prints
    one = here / "out/one"
    assert all(tensor.dtype == torch.float64 for tensor in weights(one, steps).values())
    batches = {"one": 4 * steps, "two": 2 * steps, "shards": 2 * steps, "whole": steps}
    for name in runs:
        other = here / "out" / name
        states = [load_training_state(run / f"checkpoint-{steps}") for run in (one, other)]
        torch.testing.assert_close(*(state["optimizers"] for state in states))
        tensors = [weights(run, steps) for run in (one, other)]
        if changed:  # a buffer, which is the first process's
            seen = [each.pop("batches") for each in tensors]
            assert seen == [batches["one"], batches[name]]
        torch.testing.assert_close(*tensors, rtol=0, atol=1e-12)
        assert_close_losses(one, other, 1e-12)
    assert sum("from_one_token" in entry for entry in read_log(one)) == changed * steps
    entry = read_log(here / "out/two")[0]
    tokens = entry["tokens_per_s"] * entry["ms"] / 1000  # of all processes
    assert tokens == pytest.approx(2 * 4 * 16, rel=1e-6)


@pytest.mark.parametrize("parts", ["p.grad for p in model.parameters()", "model.balance", ""])
def test_processes_whose_weights_part_are_an_error(here, parts):
    """Or their buffers, whose numbers may be infinite."""
    step = "        for optimizer in optimizers:\n            if not overflow:\n"
    noise = f"        for tensor in [{parts}]:\n            tensor += rank\n"
    balance = '        self.register_buffer("balance", torch.tensor([0, math.inf]), False)\n'
    copy_edited(here, PROJECT, [(step, noise + step), (INIT, balance + INIT)])
    output = finish(torchrun(here / "train.py", *MINE, cwd=here), code=1 if parts else 0)
    assert ("the processes have different weights" in output) == bool(parts)


@pytest.mark.slow
def test_a_run_moves_between_fsdp_one_process_and_ddp(here):
    """In float32, with the checkpoints of each opened by the next."""
    output_of("train.py", *FLAGS, "--max_iters=30", "--out_dir=out/one", cwd=here)
    run, flags = here / "out" / "moved", ["--out_dir=out/moved", "--keep_last=9"]
    # Each part trains to its end. The next one starts from an earlier checkpoint.
    finish(torchrun(ROOT / "train.py", *FLAGS, *flags, "--max_iters=30", "--fsdp", cwd=here))
    for name in ("checkpoint-20", "checkpoint-30"):
        shutil.rmtree(run / name)
    output_of("train.py", *flags, "--resume", "--fsdp=False", cwd=here)
    shutil.rmtree(run / "checkpoint-30")
    finish(torchrun(ROOT / "train.py", *flags, "--resume", cwd=here))
    assert_close_losses(here / "out" / "one", run, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--bias=True"], ["--fsdp"]])
def test_three_processes_that_resume_equal_three_that_did_not_stop(here, more):
    """With two, the order of a sum does not show: a + b is b + a."""
    flags = [*FLAGS, "--batch_size=12", "--gradient_accumulation_steps=2", "--keep_last=9", *more]
    flags += ["--dropout=0.1", "--out_dir=out/whole"]
    three = ["--nproc_per_node=3"]
    finish(torchrun(ROOT / "train.py", *flags, cwd=here, options=three))
    shutil.copytree(here / "out" / "whole", here / "out" / "parts")
    shutil.rmtree(here / "out" / "parts" / "checkpoint-20")
    resume = ["--resume", "--out_dir=out/parts"]
    assert "from step 10" in finish(torchrun(ROOT / "train.py", *resume, cwd=here, options=three))
    assert_equal_runs(here / "out/whole", here / "out/parts", 20)


@pytest.mark.slow
def test_torchrun_that_is_stopped_saves_a_checkpoint(here):
    run = here / "out" / "run"
    flags = [*FLAGS, "--max_iters=100000", "--eval_interval=100000", "--out_dir=out/run"]
    process = torchrun(ROOT / "train.py", *flags, cwd=here)
    while not (run / "log.jsonl").exists() or "loss" not in (run / "log.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    words = r"Stopped at step (\d+), and saved.\nNext: python .* --out_dir=out/run"
    stopped = re.search(words, output)
    assert stopped and output.count("Stopped at step") == 1
    assert list_checkpoints(run)[-1].name == f"checkpoint-{stopped[1]}"


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_or_restarts_it(here):
    """Also on two machines. A signal that only one gets stops all of them at the same step."""
    flags = [*FLAGS, "--eval_interval=5", "--auto_resume"]

    def two(name, dies, **more):
        return torchrun("script.py", *flags, f"--out_dir=out/{name}", cwd=here, DIES=dies, **more)

    node = ["--nnodes=2", "--nproc_per_node=1", f"--rdzv_endpoint=localhost:{free_port()}"]
    more = {"options": [*node, "--max-restarts=2"], "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    machines = [two("machines", "1 12 SIGKILL", **more) for _ in range(2)]
    assert "from step 10" in "".join(map(finish, machines))
    restarted = two("restarted", "1 12 SIGKILL", options=["--max-restarts=1"])
    finish(two("whole", "9 9 SIGKILL"))
    output = finish(restarted)
    assert output.count("from step 10") == 1 and "max_iters" not in output
    for name in ("machines", "restarted"):
        assert_equal_runs(here / "out/whole", here / f"out/{name}", 20)
    finish(two("dead", "1 12 SIGKILL"), code=1)
    assert list_checkpoints(here / "out/dead")[-1].name == "checkpoint-10"
    assert finish(two("stopped", "1 12 SIGTERM"), code=1).count("Stopped at step 13") == 1
    assert "from step 13" in finish(two("stopped", "9 9 SIGKILL"))
    assert_equal_runs(here / "out/whole", here / "out/stopped", 20)


@pytest.mark.slow
def test_a_shard_of_two_needs_less_than_0_7_of_the_memory(here):
    """Also of the first process, which gathers the model for a checkpoint."""
    flags = [ROOT / "train.py", "--dataset=mine", "--n_layer=12", "--n_head=8", "--n_embd=512"]
    flags += ["--block_size=16", "--batch_size=2", "--max_iters=2", "--dtype=float32"]
    one = peak_memory(*flags, "--out_dir=out/one", cwd=here)
    flags = ["-m", "torch.distributed.run", *TORCHRUN, *flags, "--fsdp"]
    assert peak_memory(*flags, "--out_dir=out/shards", cwd=here) < 0.7 * one
    assert list_checkpoints(here / "out/shards")[-1].name == "checkpoint-2"
