"""Nothing is lost: runs that are stopped, killed, overwritten, locked, and what they resume to."""

import gc
import math
import os
import random
import re
import shutil
import signal
import time
import tomllib
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch

from gptling.cli import UserError
from gptling.run import RunDirectory, best_of, list_checkpoints, load_training_state
from gptling.settings import restore_settings
from gptling.state import State, named_state, read_sources
from model import GPT, GPTConfig
from tests.conftest import assert_equal, contents, one_process, read_log, small, weights
from tests.edits import copy_edited
from tests.scripts import MINE, one_line, output_here, output_of, run_here, run_in_child, start
from tests.test_train import MASKED, MASKING
from train import TrainConfig, configure_optimizers

DATA = SimpleNamespace(tokenizer_json=None, fingerprint="", offset=0)
COMMON = [*MINE, "--dropout=0.2", "--gradient_accumulation_steps=2"]
RESUME = ["--out_dir=out/mine", "--resume"]


def assert_equal_runs(a, b, step):
    """Weights, optimizer state, progress and logged numbers are the same, bit for bit."""
    times = {"ms", "tokens_per_s", "seconds"}
    logs = [[{k: e[k] for k in e.keys() - times} for e in read_log(run)] for run in (a, b)]
    assert logs[0] == logs[1]
    assert_equal(weights(a, step), weights(b, step))
    states = [load_training_state(run / f"checkpoint-{step}") for run in (a, b)]
    assert states[0]["optimizers"][0]
    assert_equal(*(state["optimizers"] for state in states))
    progress = [state["progress"] | {"seconds": 0.0, "began": 0.0} for state in states]
    assert progress[0] == progress[1] and states[0]["stateful"] == states[1]["stateful"]


def train(*arguments, cwd, changes=()):
    """Run train.py in this process, perhaps changed. It gives its lock back."""
    process = run_here("train.py", *arguments, cwd=cwd, changes=changes)
    gc.collect()
    return process


def after_step(code):
    """A change of train.py: a line of code after each step."""
    line = "        progress.step = done\n"
    return line, f"{line}        {code}\n"


# ---------------------------------------------------------------- stopped and killed
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts twenty trainings by fork")
def test_a_run_killed_twenty_times_equals_an_uninterrupted_one(here):
    """At random moments, half of them while a checkpoint is being written."""
    flags = [*COMMON, "--max_iters=900", "--log_interval=5", "--optimizer=muon"]
    output_of("train.py", *flags, "--out_dir=out/whole", cwd=here)
    arguments = ["train.py", *flags, "--out_dir=out/parts", "--auto_resume"]
    run, moments, while_writing = here / "out/parts", random.Random(20), 0
    for kill in range(20):
        child = start(run_in_child, arguments, here, [os.devnull] * 3)
        while kill % 2 and not any(run.glob(".checkpoint-*/new")):
            time.sleep(0.0005)
            assert child.is_alive(), "the run ended before it was killed"
        time.sleep(moments.uniform(0, 0.01) if kill % 2 else moments.uniform(0.05, 0.6))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, "the run ended before it was killed"
        for path in run.glob(".checkpoint-*/new"):
            while_writing += 1
            shutil.rmtree(path.parent)  # as the next start does, later
    output_of(*arguments, cwd=here)
    assert while_writing > 0
    assert_equal_runs(here / "out" / "whole", run, 900)


@pytest.mark.parametrize("optimizer, dtype", [("muon", "float32"), ("adamw", "float16")])
def test_a_run_that_stops_between_evaluations_equals_an_uninterrupted_one(here, optimizer, dtype):
    """With targets that train.py masks at random. The vocabulary's size may be said again."""
    size = "--vocab_multiple=128"
    flags = [*COMMON, f"--optimizer={optimizer}", f"--dtype={dtype}", size]
    mask = MASKING, MASKED.format("torch.rand(y.shape) < 0.2")
    assert train(*flags, "--out_dir=out/whole", cwd=here, changes=[mask]).returncode == 0
    stop = after_step("if done == 12: import signal; signal.raise_signal(signal.SIGTERM)")
    process = train(*flags, cwd=here, changes=[mask, stop])
    assert process.returncode == 128 + signal.SIGTERM
    stopped = b"Stopped at step 13, and saved.\nNext: python train.py --out_dir=out/mine --r"
    assert stopped in process.stdout
    assert b"from step 13" in train(*RESUME, size, cwd=here, changes=[mask]).stdout
    assert_equal_runs(here / "out/whole", here / "out/mine", 20)
    assert len(weights(here / "out/mine")["wte.weight"]) == 128


def test_auto_resume_begins_without_a_checkpoint_and_continues_with_one(trained, finished):
    """What a crash has left after the newest checkpoint is done again, and nothing is planned. If
    the run has ended, that is no error."""
    run = finished / "out" / "mine"
    (run / "checkpoint-20/metrics.json").unlink()
    (run / "checkpoint-30").write_text("a file")
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-best")
    (run / ".checkpoint-19.writing").mkdir()
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 20, "lo')
    flags = [*MINE, "--auto_resume"]
    assert "from step 10" in output_of("train.py", *flags, "--minutes=1", cwd=finished)
    assert_equal_runs(trained / "out" / "mine", run, 20)
    assert not list(run.glob(".checkpoint-*"))
    assert "has finished its 20 steps" in output_of("train.py", *flags, cwd=finished)
    output = output_of("train.py", *flags, "--out_dir=out/new", cwd=finished)
    assert "from step" not in output and "saved in out/new," in output
    assert_equal_runs(trained / "out" / "mine", finished / "out" / "new", 20)


def test_evaluation_logging_and_checkpoints_change_no_weight(here):
    for name, often in (("rarely", 1000), ("often", 3)):
        flags = [f"--eval_interval={often}", f"--log_interval={often}", f"--out_dir=out/{name}"]
        output_of("train.py", *COMMON, *flags, "--keep_last=1", cwd=here)
    assert_equal(weights(here / "out/rarely", 20), weights(here / "out/often", 20))


# ---------------------------------------------------------------- a checkpoint, whole or not at all
def saver(directory):
    """A function that saves a tiny model there, with its metrics."""
    model, run = GPT(GPTConfig(8, 11, 1, 2, 4)), RunDirectory(directory, one_process())
    state = State(small(keep_last=1), model, configure_optimizers(model, small()), {})

    def save(metrics):
        state.progress.step = metrics["step"]
        run.save(state, DATA, metrics)

    return save


def test_the_best_and_the_last_checkpoint_stay(tmp_path, monkeypatch):
    """The newest of equal ones over the tokens that count now, and one with a file of yours.
    Another is hidden before its files go."""

    def rmtree(path, plain=shutil.rmtree, **options):
        assert os.path.basename(path).startswith(".")
        plain(path, **options)

    monkeypatch.setattr("shutil.rmtree", rmtree)
    save = saver(tmp_path)
    save({"step": 2, "val_loss": 0.01, "val_tokens": 16})  # a few easy ones
    for step, loss in ((5, 3.0), (10, 1.0), (15, 1.0)):
        save({"step": step, "val_loss": loss, "val_tokens": 160})
        if step == 5:
            (tmp_path / "checkpoint-5/mine.gguf").touch()
    save({"step": 20, "val_loss": 0.5, "comparable_loss": 2.0, "comparable_tokens": 160})
    save({"step": 25})
    save({"step": 30, "val_loss": math.nan, "val_tokens": 160})
    assert [path.name[11:] for path in list_checkpoints(tmp_path)] == ["5", "15", "30"]
    assert best_of(list_checkpoints(tmp_path)).name == "checkpoint-15"


# ---------------------------------------------------------------- what may change
def test_explicit_flags_override_the_run_and_are_printed(finished):
    """A data set that was renamed too, but not one with other contents, nor an edited setting."""
    settings = finished / "out/mine/config.toml"
    settings.write_text(settings.read_text().replace("learning_rate = 0.01", "learning_rate = 0.5"))
    (finished / "data/mine").rename(finished / "data/better name")
    meta = finished / "data/better name/meta.json"
    text = meta.read_text()
    meta.write_text(re.sub('"sha256": "..', '"sha256": "00', text))
    flags = [*RESUME, "--max_iters=25", "--learning_rate=5e-3", "--dataset=better name"]
    flags += ["--warmup_iters=30", "--batch_size=2", "--gradient_accumulation_steps=2"]
    process = train(*flags, cwd=finished)
    assert process.returncode == 1 and b"is not out/mine's training text" in process.stderr
    meta.write_text(text)
    output = output_here("train.py", *flags, cwd=finished)
    assert "config.toml was edited (learning_rate), which has no effect: give flags" in output
    assert "max_iters: 20 -> 25" in output and "learning_rate: 0.01 -> 0.005" in output
    assert "batch_size: 4 -> 2" in output and "gradient_accumulation_steps: 1 -> 2" in output
    assert "dataset: mine -> better name" in output and "n_embd" not in output
    assert "--warmup_iters=30: the run ends at step 25" in output
    config = tomllib.loads(settings.read_text("utf-8"))
    assert (config["max_iters"], config["learning_rate"], config["n_embd"]) == (25, 5e-3, 16)
    assert read_log(finished / "out/mine")[-1]["step"] == 25


def test_what_makes_a_run_is_fixed_what_is_unknown_is_printed_and_flags_of_one_start_end(capsys):
    saved = asdict(small())
    for flag in "bias block_size seed vocab_multiple optimizer init_from".split():
        with pytest.raises(UserError, match=f"--{flag}=other: the run has {saved[flag]}: give"):
            restore_settings(small(), saved, {flag: "other"})
    once = {"allow_changed_model": True, "overwrite": True}
    saved = asdict(small(minutes=2.0)) | once | {"ema": 0.9}
    del saved["keep_last"]  # a setting that the run does not have yet
    config = small(resume=True, allow_changed_model=True)
    expected = replace(config, minutes=2.0)
    restore_settings(config, saved, {})
    assert config == expected and not hasattr(config, "ema")
    assert capsys.readouterr().out == "ema: 0.9 in the run is unknown to this code\n"


def test_the_settings_of_a_run_are_a_preset_that_repeats_it(here):
    """With another out_dir; names that are not ASCII too."""
    (here / "data/mine").rename(here / "data/grüße")
    flags = [*MINE, "--dataset=grüße", "--dropout=0.1", "--optimizer=muon", "--out_dir=out/a"]
    output_of("train.py", *flags, cwd=here)
    text = (here / "out/a/config.toml").read_text(encoding="utf-8")
    output_of("train.py", "out/a/config.toml", "--out_dir=out/b", cwd=here)
    assert (here / "out/b/config.toml").read_text(encoding="utf-8") == text
    assert_equal(weights(here / "out/a", 20), weights(here / "out/b", 20))
    once = {"resume", "auto_resume", "overwrite", "eval_only", "eval_all"}
    once |= {"allow_changed_model", "out_dir", "vocab_size", "models_before"}
    once |= {"muon_decay", "teacher_share"}  # which are None
    assert set(tomllib.loads(text)) == {field.name for field in fields(TrainConfig)} - once


def test_resume_with_minutes_trains_so_many_more_and_changes_no_setting_after_settle(finished):
    """At the speed so far. The new plan is in config.toml, also when slower steps change it."""
    run, begin, end = finished / "out/mine", "    device, rank, world_size =", "    report.close("
    saved = load_training_state(run / "checkpoint-20")
    saved["progress"]["seconds"] = 1.0
    torch.save(saved, run / "checkpoint-20/training_state.pt")
    changes = [(begin, f"    settled = dict(vars(config))\n{begin}")]
    changes += [(end, f"    assert vars(config) == settled\n{end}")]
    changes += [after_step("import time; time.sleep(0.2)")]
    copy_edited(finished, ["gptling", "model.py", "prepare.py", "train.py"], changes)
    flags = ["--dataset=mine", "--resume", "--minutes=0.02"]
    output = output_of(finished / "train.py", *flags, cwd=finished)
    assert "about 24 more steps in 0.02 min" in output and ", from step 20" in output
    config, log = tomllib.loads((run / "config.toml").read_text()), read_log(run)
    assert config["minutes"] == pytest.approx(0.02 + 1 / 60)
    assert 20 < config["max_iters"] == log[-1]["step"] < 44
    assert any(entry.get("max_iters") == config["max_iters"] for entry in log)
    assert log[-1]["seconds"] > 1


# ---------------------------------------------------------------- one writer, and the old run
def test_a_second_training_in_one_folder_is_refused(finished):
    """Whatever it wants there, while the first one trains, which has moved an old run away."""
    flags = [*MINE, "--max_iters=1000000"]
    arguments = ["train.py", *flags, "--overwrite"]
    first = start(run_in_child, arguments, finished, [os.devnull] * 3)
    while not (finished / "out/mine.old").exists() or not list_checkpoints(finished / "out/mine"):
        assert first.is_alive()
        time.sleep(0.02)
    for more in ([], ["--overwrite"], ["--resume"], ["--auto_resume"]):
        one_line(train(*flags, *more, cwd=finished), "another process")
    first.terminate()


def test_an_old_run_is_moved_as_it_is_once_the_new_one_is_ready(finished, monkeypatch):
    """Whatever the start fails by before that. A second one has another name."""
    run, flags = finished / "out/mine", [*MINE, "--overwrite", "--max_iters=3"]
    before = contents(run)
    for error in (["--init_from=nix"], ["--dataset=nix", "--out_dir=out/mine"]):
        assert train(*flags, *error, cwd=finished).returncode == 1
        assert contents(run) == before and not (finished / "out/mine.old").exists()
    process = train(*flags, cwd=finished)
    assert b"the run that was in out/mine is now in out/mine.old" in process.stdout
    assert contents(finished / "out/mine.old") == before
    new = contents(run)
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-3"]
    assert [entry["step"] for entry in read_log(run)] == [3, 3]
    assert train(*flags, "--seed=2", cwd=finished).returncode == 0
    assert contents(finished / "out/mine.old") == before
    assert contents(finished / "out/mine.old2") == new
    shutil.rmtree(run / "checkpoint-3")  # to free the disk: the log stays
    assert b"is now in out/mine.old3" in train(*MINE, "--max_iters=1", cwd=finished).stdout


# ---------------------------------------------------------------- the state of optimizers
class Optimizer(torch.optim.Optimizer):
    """Its steps depend on states of all kinds and on a number of its groups."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "warm": 1.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["warm"] *= 0.9
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["exact"] = state.get("exact", 0) + p.grad.double() / 3
                state["factors"] = [state.get("factors", [0])[0] + p.grad.bfloat16()]
                size = group["warm"] * group["lr"] * state["n"]
                p -= size * (state["exact"].float() + state["factors"][0])


def test_the_state_of_any_optimizer_continues_as_it_was(tmp_path):
    """By names, whatever the groups and their order; stored, and each number in its dtype."""
    idx, ends = torch.arange(8)[None], []
    for stop in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(8, 11, 1, 2, 4))
        params, run = list(model.parameters()), RunDirectory(tmp_path / "run", one_process())
        optimizer = Optimizer([{"params": params[:3]}, {"params": params[3:]}])
        state = State(small(), model, [optimizer], {})
        for step in range(4):
            if stop and step == 2:
                run.path.mkdir()
                run.save(state, DATA, {"step": 2})
                optimizer = Optimizer(params[::-1])
                saved = load_training_state(run.path / "checkpoint-2")
                State(small(), model, [optimizer], {}).load_state_dict(saved)
            model(idx, idx)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([model.state_dict(), named_state(optimizer, model)])
    assert_equal(*ends)


@pytest.mark.parametrize("value", ["numpy.float64(0.5)", "collections.deque([1])"])
def test_a_state_that_cannot_be_resumed_ends_the_run_at_its_first_checkpoint(here, value):
    name = value.partition(".")[0]
    code = f"import {name}; optimizers[1].state[model.h[0].attn.c_attn.weight]['seen']"
    change = after_step(f"{code} = [1, {{'last': {value}}}]")
    process = train(*MINE, cwd=here, changes=[change])
    one_line(process, name, "use numbers, strings, lists, dicts and tensors")
    assert not list((here / "out/mine").glob("*checkpoint*"))


def test_changed_code_is_named_and_another_optimizer_starts_without_a_state(finished, capsys):
    saved = load_training_state(finished / "out/mine/checkpoint-20")
    model = GPT(GPTConfig(16, 26, 2, 2, 16))
    sources = read_sources(TrainConfig, GPT)
    same = configure_optimizers(model, small(weight_decay=0.3))
    State(small(), model, same, sources).load_state_dict(saved)
    assert capsys.readouterr().out == "" and all(optimizer.state for optimizer in same)
    assert [g["weight_decay"] for o in same for g in o.param_groups] == [0.3, 0.0, 0.3]
    saved["code"] |= {"train.py": "another", "model.py": "another", "gptling/": "another"}
    other = Optimizer(model.parameters())
    State(small(), model, [other], sources).load_state_dict(saved)
    changed = "changed since that checkpoint: train.py, model.py, gptling/, optimizers\n"
    assert capsys.readouterr().out == changed and not other.state


@pytest.mark.slow
def test_a_compiled_run_is_reproducible_on_several_threads_if_deterministic(here):
    """Compiled threads add an embedding's gradients in the order in which they come otherwise."""
    flags = [*MINE, "--n_embd=64", "--block_size=64", "--batch_size=32"]
    flags += ["--compile=True", "--deterministic"]
    for out_dir in ("--out_dir=out/one", "--out_dir=out/two"):
        output_of("train.py", *flags, out_dir, cwd=here, OMP_NUM_THREADS="2")
    assert_equal(weights(here / "out/one"), weights(here / "out/two"))
