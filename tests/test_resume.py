"""Nothing is lost: runs that are stopped, killed, damaged or locked, and what they resume to."""

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file

from gptling.checkpoints import (
    RunDirectory,
    best_checkpoint,
    cut_log,
    delete,
    list_checkpoints,
    load_training_state,
    read_metrics,
    resumed_config,
    step_of,
)
from gptling.cli import UserError
from gptling.files import lock_directory
from gptling.optim import full_state, load_state
from model import GPT, GPTConfig
from tests.conftest import ROOT, TINY, one_process, output_of, run_here, run_script
from tests.edits import edited_module
from train import FIXED, TrainConfig, configure_optimizers

# train.py, in which the second evaluation crashes.
CRASHES = """
import sys
sys.path.insert(0, {root!r})
import train
evaluate = train.evaluate
def crash(*arguments):
    if train.Path("out/parts/checkpoint-10").exists():
        raise RuntimeError("evaluation crashed")
    return evaluate(*arguments)
train.evaluate = crash
train.run(train.main)
"""
COMMON = ["--dataset=mine", *TINY, "--dropout=0.2", "--gradient_accumulation_steps=2"]


def numbers(run):
    """The log without its times."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in e.items() if k not in ("ms", "tokens_per_s", "seconds")} for e in lines
    ]


def assert_equal_runs(a, b, step):
    """Weights, optimizer state and logged numbers are the same, bit for bit."""
    assert numbers(a) == numbers(b)
    a, b = (run / f"checkpoint-{step}" for run in (a, b))
    weights = [load_file(path / "model.safetensors") for path in (a, b)]
    states = [load_training_state(path) for path in (a, b)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for its, others in zip(*(state["optimizers"] for state in states), strict=True):
        assert its.keys() == others.keys()
        for i in its:
            assert its[i].keys() == others[i].keys()
            assert all(torch.equal(its[i][name], others[i][name]) for name in its[i])
    progress = [replace(state["progress"], seconds=0.0) for state in states]
    assert progress[0] == progress[1] and states[0]["scaler"] == states[1]["scaler"]


@pytest.fixture
def here(trained, tmp_path):
    """A directory with data/mine in which to train."""
    shutil.copytree(trained / "data", tmp_path / "data")
    return tmp_path


@pytest.fixture
def finished(trained, here):
    """The same with out/mine, of 20 steps with checkpoints at 10 and 20."""
    shutil.copytree(trained / "out", here / "out")
    return here


def start(*arguments, cwd):
    """train.py in the background, from when it has logged something."""
    run = cwd / next(a for a in arguments if "--out_dir" in a).removeprefix("--out_dir=")
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not (run / "log.jsonl").exists() or "loss" not in (run / "log.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


# ---------------------------------------------------------------- stopped and killed


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts twenty trainings by fork")
def test_a_run_killed_twenty_times_equals_an_uninterrupted_one(here):
    flags = [*COMMON, "--max_iters=300", "--log_interval=5", "--optimizer=muon"]
    output_of("train.py", *flags, "--out_dir=out/whole", cwd=here)
    arguments = ["20", "out/parts", *flags, "--out_dir=out/parts"]
    kills, while_writing = map(int, output_of("tests/killer.py", *arguments, cwd=here).split())
    assert kills == 20 and while_writing > 0
    assert_equal_runs(here / "out" / "whole", here / "out" / "parts", 300)


@pytest.mark.parametrize(
    "number, optimizer, dtype",
    [
        ("SIGTERM", "muon", "float32"),
        pytest.param("SIGINT", "adamw", "float16", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(here, number, optimizer, dtype):
    steps = 150 if optimizer == "muon" else 400
    flags = [*COMMON, f"--max_iters={steps}", "--eval_interval=60", f"--optimizer={optimizer}"]
    flags += [f"--dtype={dtype}"]
    output_of("train.py", *flags, "--out_dir=out/whole", cwd=here)
    process = start(*flags, "--out_dir=out/parts", cwd=here)
    process.send_signal(getattr(signal, number))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + getattr(signal, number)
    assert b"next: python train.py --out_dir=out/parts --resume" in output
    stopped = list_checkpoints(here / "out" / "parts")[-1]
    assert 0 < step_of(stopped) < steps
    output_of("sample.py", stopped, "--max_new_tokens=5", cwd=here)
    output_of("train.py", "--out_dir=out/parts", "--resume=True", cwd=here)
    assert_equal_runs(here / "out" / "whole", here / "out" / "parts", steps)


def test_a_model_that_draws_from_python_and_numpy_goes_on_equally(here, train_here, monkeypatch):
    noise = "__import__('random').random() + __import__('numpy').random.rand()"
    hidden = "x = self.hidden(idx, padding_mask, cache)"
    module = edited_module((hidden, f"{hidden} * (1 + 0.1 * self.training * ({noise}))"))
    monkeypatch.setattr("train.GPT", module.GPT)
    flags = [*COMMON, "--max_iters=6", "--eval_interval=3", "--out_dir=out/whole"]
    process = run_here("train.py", *flags, cwd=here)
    assert process.returncode == 0 and b"chunked loss disabled" not in process.stdout, process
    shutil.copytree(here / "out" / "whole", here / "out" / "parts")
    shutil.rmtree(here / "out" / "parts" / "checkpoint-6")
    process = run_here("train.py", "--out_dir=out/parts", "--resume", cwd=here)
    assert process.returncode == 0, process.stderr
    assert_equal_runs(here / "out" / "whole", here / "out" / "parts", 6)


def test_evaluation_logging_and_checkpoints_change_no_weight(here):
    runs = []
    for name, often in (("rarely", 1000), ("often", 3)):
        output_of("train.py", *COMMON, f"--eval_interval={often}", f"--log_interval={often}",
                  f"--out_dir=out/{name}", "--keep_last=1", cwd=here)  # fmt: skip
        runs.append(load_file(here / "out" / name / "checkpoint-20" / "model.safetensors"))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="limits the size of files by setrlimit")
def test_a_crash_in_evaluation_and_then_a_full_disk_lose_nothing(here):
    """The disk: a limit on the size of files, which the weights pass, the optimizer's state not."""
    import resource

    def train(script, *arguments, **options):
        return subprocess.run(
            [sys.executable, script, *arguments],
            cwd=here,
            capture_output=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=120,
            **options,
        )

    flags, resume = [*COMMON, "--max_iters=30"], ["--out_dir=out/parts", "--resume=True"]
    output_of("train.py", *flags, "--out_dir=out/whole", "--keep_last=1", cwd=here)
    (here / "crashes.py").write_text(CRASHES.format(root=str(ROOT)))
    process = train("crashes.py", *flags, "--out_dir=out/parts")
    assert process.returncode == 1 and b"evaluation crashed" in process.stderr
    run = here / "out" / "parts"
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-10"]

    limit = (resource.RLIMIT_FSIZE, (35000, 35000))
    process = train(ROOT / "train.py", *resume, preexec_fn=lambda: resource.setrlimit(*limit))
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1
    assert "checkpoint-20: cannot be written" in error and "File too large" in error
    names = {"checkpoint-10", "log.jsonl", "config.toml", ".lock"}
    assert {path.name for path in run.iterdir()} == names

    output_of("train.py", *resume, cwd=here)
    assert_equal_runs(here / "out" / "whole", run, 30)


def test_a_loss_that_is_not_finite_leaves_the_checkpoints(finished):
    arguments = ["--out_dir=out/mine", "--resume=True", "--max_iters=60", "--learning_rate=1e30"]
    process = run_script("train.py", *arguments, "--grad_clip=0", cwd=finished)
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1
    assert "at step 22" in error and "--learning_rate=1e+30" in error
    output_of("train.py", "--out_dir=out/mine", "--resume=True", "--max_iters=30", cwd=finished)


# ---------------------------------------------------------------- what may change


def test_explicit_flags_override_the_checkpoint_and_are_printed(finished):
    arguments = ["--out_dir=out/mine", "--resume=True", "--max_iters=25", "--learning_rate=5e-3"]
    output = output_of("train.py", *arguments, cwd=finished)
    assert "max_iters: 25 from now on; it was 20" in output
    assert "learning_rate: 0.005 from now on; it was 0.01" in output
    state = load_training_state(finished / "out" / "mine" / "checkpoint-25")
    assert (state["config"]["learning_rate"], state["config"]["n_embd"]) == (5e-3, 16)


@pytest.mark.parametrize(
    "flag, value",
    [
        ("batch_size", 6),
        ("gradient_accumulation_steps", 2),
        ("optimizer", "adamw"),
        ("seed", 1),
        ("init_from", "out/other"),
    ],
)
def test_what_would_make_it_another_run_is_refused(flag, value):
    saved = asdict(TrainConfig())
    with pytest.raises(UserError, match=f"--{flag}={value}: the run has {saved[flag]}; leave"):
        resumed_config(TrainConfig(), saved, {flag: value}, FIXED)


def test_flags_of_one_start_are_not_those_of_the_next():
    """Data that were allowed to have changed once are not from then on."""
    allowed = {"allow_changed_data": True, "allow_changed_model": True}
    saved = asdict(TrainConfig()) | allowed | {"overwrite": True, "minutes": 2.0}
    assert resumed_config(TrainConfig(), saved, {}, FIXED) == TrainConfig()


def test_changed_data_is_refused_unless_allowed(finished):
    meta = finished / "data" / "mine" / "meta.json"
    meta.write_text(re.sub('"sha256": "..', '"sha256": "00', meta.read_text()))
    arguments = ["--out_dir=out/mine", "--resume=True", "--max_iters=30"]
    process = run_script("train.py", *arguments, cwd=finished)
    assert process.returncode == 1 and b"--allow_changed_data=True" in process.stderr
    assert process.stderr.count(b"\n") == 1
    output_of("train.py", *arguments, "--allow_changed_data", cwd=finished)


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "one bit flipped"])
@pytest.mark.parametrize(
    "name",
    ["training_state.pt", "model.safetensors", "config.json", "tokenizer.json", "checksums.json"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(finished, capsys, name, damage):
    run = finished / "out" / "mine"
    file = run / "checkpoint-20" / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "one bit flipped":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    else:
        file.write_bytes(content[: 0 if damage == "empty" else len(content) // 2])
    checkpoint, state = RunDirectory(run, one_process()).newest_state()
    assert checkpoint.name == "checkpoint-10" and state["progress"].step == 10
    error = capsys.readouterr().err
    assert "checkpoint-20 is damaged: " in error and error.count("\n") == 1


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(trained, finished):
    run = finished / "out" / "mine"
    (run / "checkpoint-20" / "model.safetensors").write_bytes(b"")
    (run / ".checkpoint-15.writing").mkdir()
    process = run_script("train.py", "--out_dir=out/mine", "--resume=True", cwd=finished)
    assert process.returncode == 0 and b"checkpoint-20 is damaged" in process.stderr
    assert_equal_runs(trained / "out" / "mine", run, 20)
    assert (run / "damaged-checkpoint-20").is_dir() and not list(run.glob(".checkpoint-*"))


def test_what_a_run_goes_on_from_stays_until_there_is_more(finished, monkeypatch):
    """A crash in the first step after it, or in the next save, finds it under its name."""
    run = RunDirectory(finished / "out" / "mine", one_process())
    run.start(20, overwrite=False)
    run.take_over(TrainConfig())
    run.lock.release()
    assert sorted(path.name for path in run.path.glob("*checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-20",
    ]
    assert run.newest_state()[0].name == "checkpoint-20"


def test_a_checkpoint_is_away_before_its_files_are_deleted(finished, monkeypatch):
    """A crash in between leaves no half of one that counts."""
    left, run = [], finished / "out" / "mine"
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: left.extend(list_checkpoints(run)))
    delete(run / "checkpoint-10")
    assert [path.name for path in left] == ["checkpoint-20"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"val_loss": null}', '{"val_loss": "low"}'])
def test_metrics_that_are_damaged_say_nothing(finished, content):
    run = finished / "out" / "mine"
    (run / "checkpoint-20" / "metrics.json").write_text(content)
    assert read_metrics(run / "checkpoint-20") == {}
    assert best_checkpoint(run).name == "checkpoint-10"


def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(finished):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {finished}/ran",))

    run = finished / "out" / "mine"
    shutil.rmtree(run / "checkpoint-10")
    file = run / "checkpoint-20" / "training_state.pt"
    for content in (pickle.dumps(Evil()), pickle.dumps({"format": 1, "step": Evil()})):
        file.write_bytes(content)
        pickle.loads(content)  # a proof that it would
        assert (finished / "ran").exists()
        (finished / "ran").unlink()
        torch.save({"format": 1, "step": Evil()}, file)
        sums = json.loads((run / "checkpoint-20" / "checksums.json").read_text())
        sums[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        (run / "checkpoint-20" / "checksums.json").write_text(json.dumps(sums))
        arguments = ["--out_dir=out/mine", "--resume=True", "--max_iters=30"]
        process = run_script("train.py", *arguments, cwd=finished)
        assert process.returncode == 1 and b"checkpoint-20 is damaged" in process.stderr
        assert b"Traceback" not in process.stderr and not (finished / "ran").exists()


class Signum(torch.optim.Optimizer):
    """An optimizer of somebody's own, whose state is no float tensor: Lion's kin."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["signs"] = state.get("signs", torch.zeros_like(p, dtype=torch.int8))
                state["signs"] += p.grad.sign().to(torch.int8)
                state["calls"] = state.get("calls", 0) + 1
                p.add_(state["signs"].sign(), alpha=-group["lr"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "another"])
def test_the_state_of_any_optimizer_goes_on_where_it_was(optimizer):
    idx = torch.arange(8)[None]
    models = []
    for stop in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(8, 11, 1, 2, 4))
        for step in range(4):
            if step == 0 or (stop and step == 2):
                if optimizer == "another":
                    fresh = [Signum(model.parameters(), {"lr": 1e-2})]
                else:
                    fresh = configure_optimizers(model, TrainConfig(optimizer=optimizer))
            if step == 0:
                optimizers = fresh
            if stop and step == 2:
                for old, new in zip(optimizers, fresh, strict=True):
                    load_state(new, full_state(old, model), model)
                optimizers = fresh
            model(idx, idx)[1].backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        models.append(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_other_parameters_is_refused():
    model = GPT(GPTConfig(8, 11, 1, 2, 4))
    model(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64))[1].backward()
    [adamw] = configure_optimizers(model, TrainConfig(optimizer="adamw"))
    adamw.step()
    for name in (99, "h.7.mlp.c_fc.weight"):
        with pytest.raises(ValueError, match=f"state of {name}, which"):
            load_state(adamw, full_state(adamw, model) | {name: {}}, model)


@pytest.mark.parametrize("by_position", [False, True])  # as before there were names
def test_states_go_by_names_whatever_the_groups_and_their_order(by_position):
    torch.manual_seed(0)
    model, idx = GPT(GPTConfig(8, 11, 1, 2, 4)), torch.arange(8)[None]
    model(idx, idx)[1].backward()
    [adamw] = configure_optimizers(model, TrainConfig(optimizer="adamw"))
    adamw.step()
    parameters = [p for group in adamw.param_groups for p in group["params"]]
    other = torch.optim.AdamW(parameters if by_position else parameters[::-1])
    saved = adamw.state_dict()["state"] if by_position else full_state(adamw, model)
    assert by_position or saved.keys() == {name for name, _ in model.named_parameters()}
    load_state(other, saved, model)
    for p in parameters:
        assert torch.equal(other.state[p]["exp_avg"], adamw.state[p]["exp_avg"])


def test_a_log_that_a_crash_cut_off_goes_on_whole(tmp_path):
    file = tmp_path / "log.jsonl"
    for cut in ('{"step": 2, "lo', '{"step": 2}'):  # the latter in front of its line break
        file.write_text('{"step": 1}\n{"step": 2, "loss": NaN}\n{"step": 3}\n' + cut)
        cut_log(file, 2)
        assert file.read_text() == '{"step": 1}\n{"step": 2, "loss": NaN}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


# ---------------------------------------------------------------- one writer


def test_two_trainings_in_one_folder_are_refused_and_a_crash_leaves_no_lock(here):
    flags = [*COMMON, "--max_iters=100000", "--out_dir=out/run"]
    process = start(*flags, cwd=here)
    try:
        for more in ([], ["--overwrite"], ["--resume"]):
            second = run_script("train.py", *flags, *more, cwd=here)
            assert second.returncode == 1 and b"another process" in second.stderr
            assert second.stderr.count(b"\n") == 1
    finally:
        process.kill()
        process.communicate()
    lock_directory(here / "out" / "run").release()


def test_a_run_that_another_training_has_ended_meanwhile_is_not_overwritten(finished):
    """It was not there when the flags were read."""
    run = RunDirectory(finished / "out" / "mine", one_process())
    with pytest.raises(UserError, match="holds a run"):
        run.start(0, overwrite=False)
    run.lock.release()


def test_a_lock_is_for_one(tmp_path):
    held = lock_directory(tmp_path)
    with pytest.raises(UserError, match="another process"):
        lock_directory(tmp_path)
    held.release()
    lock_directory(tmp_path).release()


def test_a_checkpoint_of_format_1_is_refused_in_one_line(finished):
    """As train.py wrote training_state.pt before November 2026."""
    run = finished / "out" / "mine"
    shutil.rmtree(run / "checkpoint-20")
    file = run / "checkpoint-10" / "training_state.pt"
    torch.save(torch.load(file, weights_only=True) | {"format": 1}, file)
    sums = json.loads((file.parent / "checksums.json").read_text())
    sums[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (file.parent / "checksums.json").write_text(json.dumps(sums))
    process = run_script("train.py", "--out_dir=out/mine", "--resume", cwd=finished)
    assert process.returncode == 1 and b"of format 1, not 2" in process.stderr
