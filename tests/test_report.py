"""What a run reports: its log, lines, TensorBoard's files, loss.png, Weights & Biases."""

import importlib.util
import json

import pytest
import torch

from gptling.report import Report, draw_curves
from gptling.run import Progress
from model import GPT, GPTConfig
from tests.conftest import TINY, one_process, output_of, run_here
from train import TrainConfig


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


@pytest.mark.parametrize("package", ["tensorboard", "matplotlib"])
def test_what_is_not_installed_is_left_out(here, package, monkeypatch, train_here):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == package else found(name, *a)
    )
    flags = ["--dataset=mine", *TINY, "--max_iters=2", "--curves=True"]
    process = run_here("train.py", *flags, cwd=here)
    assert process.returncode == 0, process.stderr
    for name, file in {"tensorboard": "tensorboard", "matplotlib": "loss.png"}.items():
        shown = name != package and found(name) is not None
        assert (here / "out" / "mine" / file).exists() == shown


def test_the_log_has_seconds_since_the_start(tmp_path):
    """Over the sessions of a resumed run."""
    (tmp_path / "grüße.txt").write_text("äöü ß\u2028 " * 400, encoding="utf-8")
    output_of("prepare.py", "grüße.txt", cwd=tmp_path)
    flags = ["--dataset=grüße", *TINY, "--log_interval=1"]
    output_of("train.py", *flags, cwd=tmp_path)
    run = tmp_path / "out/grüße"
    output_of("train.py", "--out_dir=out/grüße", "--resume", "--max_iters=25", cwd=tmp_path)
    text = (run / "log.jsonl").read_text("utf-8")
    log = [json.loads(line) for line in text.split("\n")[:-1]]
    seconds = [entry["seconds"] for entry in log]
    assert len(seconds) == 25 + 3 and seconds == sorted(seconds) and 0 < seconds[0] < 60
    n = json.loads((tmp_path / "data/grüße/meta.json").read_text())["val"]["tokens"]
    assert {entry["val_tokens"] for entry in log if "val_loss" in entry} == {n - 1}


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
        report.evaluation(dict(step=1, train_loss=2.0, val_loss=1, bits_per_byte=1), best)
        assert (" (best)\n" in capsys.readouterr().out) == best


def test_the_last_line_can_be_pasted(tmp_path, capsys):
    """A run that is stopped in its last step is not to be resumed: train.py would refuse that."""
    out_dir = tmp_path / "my run"
    config = TrainConfig(max_iters=20, out_dir=str(out_dir), curves=False)
    model = GPT(GPTConfig(8, 11, 1, 2, 4))
    for step, stopped, words in (
        (19, True, f"stopped at step 19; next: python train.py --out_dir='{out_dir}' --resume"),
        (20, True, f"7 s; next: python sample.py '{out_dir}'"),
        (20, False, f"7 s; next: python sample.py '{out_dir}'"),
    ):
        report = Report(config, one_process(), Progress(), model, 1, "float32")
        report.close(step, stopped, seconds=7.2)
        assert capsys.readouterr().out.splitlines()[-1] == words


def test_utilisation_is_that_of_one_gpu(tmp_path, capsys, monkeypatch):
    """6 FLOPs per parameter and token, of the tokens that one of the processes trains on."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    processes = one_process()
    processes.device, processes.world_size = "cuda", 2
    config = TrainConfig(batch_size=1000, block_size=1000, out_dir=str(tmp_path), curves=False)
    model = torch.nn.Linear(10_000, 1000, bias=False)
    report = Report(config, processes, Progress(), model, 1, "bfloat16")
    clock[0] = 10.0
    report.training(10, {"loss": 2.0}, {"lr": 1e-3, "norm": 1.0})  # a million tokens a second
    log = json.loads((tmp_path / "log.jsonl").read_text())
    assert log["mfu"] == pytest.approx(6 * 1e7 * 5e5 / 312e12)
