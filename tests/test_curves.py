"""What shows a run elsewhere: TensorBoard's files, loss.png, Weights & Biases."""

import json
import os
import shutil

import pytest

from gptling.report import Report, draw_curves
from gptling.run import Progress
from model import GPT, GPTConfig
from tests.conftest import TINY, one_process, output_of, run_script
from train import TrainConfig


@pytest.fixture
def here(trained, tmp_path):
    shutil.copytree(trained / "data", tmp_path / "data")
    return tmp_path


def test_tensorboard_and_a_picture_show_what_the_log_says(here):
    pytest.importorskip("tensorboard", reason="TensorBoard's files: pip install tensorboard")
    pytest.importorskip("matplotlib", reason="loss.png: pip install matplotlib")
    from PIL import Image  # matplotlib brings it
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ["--dataset=mine", *TINY, "--curves=True", "--optimizer=muon", "--log_interval=5"]
    output_of("train.py", *flags, cwd=here)
    output_of("train.py", "--out_dir=out/mine", "--resume", "--max_iters=30", cwd=here)
    run = here / "out" / "mine"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    names = "loss val_loss train_loss bits_per_byte val_tokens lr muon_lr norm tokens_per_s ms "
    names = (names + "seconds").split()
    assert set(events.Tags()["scalars"]) == set(names)
    for name in names:
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(entry["step"], entry[name]) for entry in log if name in entry]
        assert [step for step, _ in shown] == [step for step, _ in expected]
        assert [v for _, v in shown] == pytest.approx([v for _, v in expected], rel=1e-6)
    assert [event.step for event in events.Tensors("sample/text_summary")] == [10, 20, 30]
    titles = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.axes.Axes.set_title", lambda a, t: titles.append(t))
        losses = {1: 3.0, 2: 1.25, 3: 2.0}
        (here / "log.jsonl").write_text(
            "".join(f'{{"step": {s}, "loss": 3, "val_loss": {v}}}\n' for s, v in losses.items())
        )
        draw_curves(here)
    assert titles == [f"{here.name}: best 1.2500 at step 2"]
    with Image.open(run / "loss.png") as picture:
        assert picture.size == (960, 600) and len(picture.convert("RGB").getcolors(1 << 20)) > 50
    assert not list(run.glob(".loss.png*"))


@pytest.mark.slow
def test_weights_and_biases_takes_the_log_without_network(here):
    pytest.importorskip("wandb", reason="Weights & Biases: pip install wandb")
    flags = ["--dataset=mine", *TINY, "--wandb=True", "--max_iters=5"]
    output_of("train.py", *flags, cwd=here, WANDB_MODE="offline")
    (file,) = (here / "out" / "mine" / "wandb").glob("offline-run-*/*.wandb")
    assert b"val_loss" in file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["tensorboard", "matplotlib", "wandb"])
def test_what_is_not_installed_is_left_out_or_named(here, package):
    """Packages are hidden by a finder that says they are not there."""
    hide = (
        "import sys, importlib.util as u; found = u.find_spec; "
        f"u.find_spec = lambda name, *a: None if name == {package!r} else found(name, *a); "
        f"sys.modules[{package!r}] = None"
    )
    (here / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    flags = ["--dataset=mine", *TINY, "--max_iters=2", "--curves=True", "--wandb=False"]
    if package == "wandb":
        process = run_script("train.py", *flags, "--wandb=True", cwd=here, PYTHONPATH=path)
        error = process.stderr.decode()
        assert process.returncode == 1 and "pip install wandb" in error and error.count("\n") == 1
    else:
        output_of("train.py", *flags, cwd=here, PYTHONPATH=path)
        missing = {"tensorboard": "tensorboard", "matplotlib": "loss.png"}[package]
        assert not (here / "out" / "mine" / missing).exists()


def test_what_a_line_says_of_time_is_of_the_steps_since_the_last_one(tmp_path, capsys, monkeypatch):
    """Five at first, of a run that was stopped between two lines."""
    clock = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    sizes = {"batch_size": 4, "gradient_accumulation_steps": 2, "block_size": 16}
    config = TrainConfig(**sizes, max_iters=107, out_dir=str(tmp_path), curves=False)
    model = GPT(GPTConfig(8, 11, 1, 2, 4))
    report = Report(config, one_process(), Progress(step=95), model, 1000, "float32")
    for step in (100, 107):
        clock[0] += 10.0
        report.training(step, {"loss": 2.0}, {"lr": 1e-3, "norm": 1.0})
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["ms"] for entry in log] == pytest.approx([10_000 / 5, 10_000 / 7])
    assert [entry["tokens_per_s"] for entry in log] == pytest.approx([64, 128 * 0.7])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert lines[0].endswith("2000 ms, 64 tokens/s, 14 s left")
    assert lines[1].endswith("1429 ms, 90 tokens/s, 0 s left")
    for best in (True, False):
        report.evaluation(dict(step=1, train_loss=2.0, val_loss=1, bits_per_byte=1), ["a"], best)
        assert (" (best)\n" in capsys.readouterr().out) == best


def test_a_run_that_is_stopped_in_its_last_step_is_not_to_be_resumed(tmp_path, capsys):
    """train.py would refuse that."""
    config = TrainConfig(max_iters=20, out_dir=str(tmp_path), curves=False)
    model = GPT(GPTConfig(8, 11, 1, 2, 4))
    for step, words in ((19, "stopped at step 19; next: python train.py"), (20, "sample.py")):
        Report(config, one_process(), Progress(), model, 1, "float32").close(step, stopped=True)
        said = capsys.readouterr().out.splitlines()[-1]
        assert words in said and ("--resume" in said) == (step == 19)
