"""What a run reports: its log, lines, loss.png, Weights & Biases."""

import contextlib
import io
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gptling.report import Report
from gptling.schedule import most_steps
from gptling.state import Progress
from gptling.tokenizers import load_tokenizer
from model import GPT, GPTConfig
from tests.conftest import one_process, read_log, small
from tests.scripts import TINY, output_of, run_here

ADAMW = [SimpleNamespace(param_groups=[{"lr": 1e-3}])]
MODEL = GPT(GPTConfig(8, 11, 1, 2, 4))


def write_metrics(out_dir, step, **metrics):
    (out_dir / f"checkpoint-{step}").mkdir()
    metrics = json.dumps({"step": step} | metrics)
    (out_dir / f"checkpoint-{step}/metrics.json").write_text(metrics)


def report_of(out_dir, model=MODEL, processes=None, step=0, data=None, **settings):
    config = small(out_dir=str(out_dir), curves=False, **settings)
    data = data or SimpleNamespace(val=torch.arange(11), tokenizer=SimpleNamespace(decode=str))
    progress = Progress(config.max_iters, step)
    return Report(config, data, model, progress, processes or one_process())


def test_a_run_prints_what_it_trains_and_its_evaluations(here):
    """Each with a text that continues the validation text, after its first eight tokens."""
    flags = ["--dataset=mine", *TINY, "--eval_interval=5", "--eval_tokens=160"]
    lines = output_of("train.py", *flags, cwd=here).split("\n")
    meta = json.loads((here / "data/mine/meta.json").read_text())
    train, n_val = (meta[split]["tokens"] for split in ("train", "val"))
    n = sum(p.numel() for p in GPT(GPTConfig(16, 26, 2, 2, 16, bias=False)).parameters())
    assert lines[:6] == [
        f"data:  {train:,} tokens to train on, 160 of {n_val - 1:,} to validate on",
        f"model: {n:,} parameters, 2 layers, 2 heads, width 16, context 16",
        f"run:   20 steps of 64 tokens ({20 * 64 / train:.1f} epochs)",
        "       saved in out/mine, cpu, float32",
        "       a blind guess: 3.258 nats per token, ln 26",
        "",
    ]
    evaluations = [entry for entry in read_log(here / "out/mine") if "val_loss" in entry]
    losses = [entry["val_loss"] for entry in evaluations]
    val = np.load(here / "data/mine/val.npy")[:8].tolist()
    words = load_tokenizer(here / "data/mine").decode(val).split()
    for i, entry in enumerate(evaluations):
        label = f"step {entry['step']:>2}/20 | "
        best = " (best)" * (losses[i] == min(losses[: i + 1]))
        line = f"{label}validation on {16000 / (n_val - 1):.2g} %: {losses[i]:.3f} nats per token"
        line += f", {entry['bits_per_byte']:.3f} bits per byte{best}"
        sample = lines[lines.index(line) + 1]
        assert sample.startswith(f"{label}sample: {' '.join(words)} | ")
    assert len(losses) == 4
    assert [line[:10] for line in lines if "tokens/s" in line] == ["step  1/20", "step 20/20"]


def test_a_resumed_run_continues_its_log_and_draws_it(finished):
    pytest.importorskip("matplotlib", reason="loss.png: pip install matplotlib")
    run = finished / "out" / "mine"
    shutil.rmtree(run / "checkpoint-20")  # as if it had been killed before
    resume = ["--out_dir=out/mine", "--resume", "--max_iters=30", "--curves"]
    assert run_here("train.py", *resume, cwd=finished).returncode == 0
    seconds = [entry["seconds"] for entry in read_log(run)]  # since the start, over both sessions
    assert len(seconds) == 2 + 4 and seconds == sorted(seconds) and 0 < seconds[0] < 60
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_weights_and_biases_gets_the_log(here, monkeypatch):
    given, run = [], SimpleNamespace(finish=lambda: given.append("end"))
    run.log = lambda entry, step: given.append((entry, step))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))
    run_here("train.py", "--dataset=mine", *TINY, "--wandb", cwd=here)
    assert given == [*((entry, entry["step"]) for entry in read_log(here / "out/mine")), "end"]


class BrokenPackage:
    __spec__ = "that of an installed package"

    def __getattr__(self, name):
        raise SystemError("built for another numpy\nand more")


@pytest.mark.parametrize("flag", ["--wandb", "--curves=True"])
def test_an_optional_package_that_fails_does_not_end_the_run(here, monkeypatch, flag):
    """A line says so, once. A package that is not installed is left out."""
    for name in ("wandb", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, BrokenPackage())
    flags = ["--dataset=mine", *TINY, "--max_iters=10", "--eval_interval=5", flag]
    output = run_here("train.py", *flags, cwd=here).stdout.decode()
    said = [line for line in output.splitlines() if "continues without" in line]
    assert len(said) == 1 and r": SystemError('built for another numpy\nand more')" in said[0]
    assert "\nDone in" in output


def test_lines_have_the_speed_since_the_last_report(tmp_path, capsys, monkeypatch):
    """Of five steps at first. A line is printed at the first step, then every ten seconds. A log
    entry is written every ten steps."""
    clock = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    sizes = {"batch_size": 4, "gradient_accumulation_steps": 2, "block_size": 16}
    report = report_of(tmp_path, step=95, max_iters=1007, **sizes)

    def lines_of(step, seconds):
        clock[0] += seconds
        report.progress.step = step
        if not report.due(step):
            return []
        report.training({"loss": 2.34567}, 1.25, ADAMW, seconds_left=0)
        lines = capsys.readouterr().out.splitlines()
        clock[0] += 100  # of an evaluation
        report.next_line += 100
        report.sample(0)
        capsys.readouterr()
        return lines

    start, end = "| loss 2.346     | lr 0.001     | norm 1.25      |", "64 tokens/s | 1,814 s left"
    assert lines_of(100, 10.0) == [f"step  100/1007 {start} 2000 ms |      {end}"]
    assert lines_of(105, 9.9) == lines_of(110, 0.05) == []
    assert lines_of(115, 5.0) == [f"step  115/1007 {start} 1000 ms |     128 tokens/s | 892 s left"]
    assert lines_of(120, 9.0) == []
    assert len(lines_of(130, 90.0)) == len(lines_of(140, 180.0)) == 1
    assert lines_of(150, 5.0) == [] and len(lines_of(160, 9.0 * 20)) == 1
    log = read_log(tmp_path)
    assert [entry["step"] for entry in log] == [100, 110, 120, 130, 140, 150, 160]
    assert log[0]["ms"] == 2000 and log[0]["tokens_per_s"] == 64


def test_a_terminal_has_a_bar_and_only_evaluations_above_it(tmp_path):
    reported = []
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    terminal.isatty = lambda: True
    with contextlib.redirect_stdout(terminal):
        report = report_of(tmp_path, max_iters=20, log_interval=5)
        for step in range(1, 11):
            report.bar.update()
            report.progress.step = step
            if report.due(step):
                report.training({"loss": 2.34567}, 1.25, ADAMW, seconds_left=0)
                reported.append(step)
        report.bar.refresh()
        metrics = {"step": 10, "val_loss": 2.5, "bits_per_byte": 1.5, "val_tokens": 10}
        report.progress.best = 2.5
        report.evaluation(metrics | {"is_cross_entropy": True})
    assert reported == [1, 5, 10], "as in a file, so that a GPU is not waited for"
    *bars, line, end = re.split("[\r\n]", terminal.buffer.getvalue().decode())
    assert any(bar.startswith("step 10/20 | loss 2.346 | ") and "left |█" in bar for bar in bars)
    assert line == "step 10/20 | validation 2.500 nats per token, 1.500 bits per byte (best)"
    assert end == "" and all("tokens/s" not in bar for bar in bars)


def test_a_plan_that_changes_by_a_tenth_is_printed_with_the_next_line(tmp_path, capsys):
    """Every ten seconds there is one. Each change is in the log."""
    report = report_of(tmp_path, max_iters=100, log_interval=1000)
    for steps, is_line_due in ((109, 1), (91, 1), (50, 0), (90, 1), (98, 1), (99, 1), (200, 0)):
        report.progress.max_iters = steps
        report.new_plan()
        report.progress.step += 1
        report.next_line = -math.inf if is_line_due else math.inf
        report.training({"loss": 2.0}, 1.0, ADAMW, seconds_left=0)
    assert re.findall(r"the plan is now (\d+)", capsys.readouterr().out) == ["90", "99"]
    assert [entry["max_iters"] for entry in read_log(tmp_path)] == [109, 91, 50, 90, 98, 99, 200]


MORE_TIME = "More time would help: COMMAND --minutes=5. The model keeps its size."
A_LITTLE = "More time would help a little, and more text would help more."
USED_UP = "More text would help now. So would another model that learns from this one: "
USED_UP += "COMMAND --minutes=3"
TAUGHT = "More text would help now. More time would not, because the model would overfit."


@pytest.mark.parametrize(
    "epochs, size, losses, help, teacher",
    [
        (0.5, "1,240", (2.1, 2.0), MORE_TIME, ""),
        (3.9, "0.0031", (2.0, 2.1), MORE_TIME, ""),
        (6.0, "2", (2.1, 2.0), A_LITTLE, ""),
        (6.0, "2", (2.0, 2.1), "The model has overfitted since step 10: more text would help.", ""),
        (6.0, "2", (2.0, 2.001), A_LITTLE, ""),
        (16, "0", (2.1, 2.0), USED_UP, ""),
        (32, "0", (2.1, 2.0), TAUGHT, "out/x"),
    ],
)
def test_the_end_says_what_is_next(epochs, size, losses, help, teacher, tmp_path, capsys):
    for step, loss in zip((10, 1200), losses, strict=True):
        write_metrics(tmp_path, step=step, val_loss=loss, bits_per_byte=1.23456, val_tokens=4)
    n_bytes = float(size.replace(",", "")) * 1e6
    data = SimpleNamespace(val=range(11), train_bytes=n_bytes, n_tokens=500 * 1200 / epochs)
    data.epochs = lambda config, step: epochs * step / 1200
    settings = {"batch_size": 5, "block_size": 100, "max_iters": 2000, "teacher": teacher}
    report = report_of(tmp_path, step=1200, data=data, **settings)
    report.progress.began = report.progress.seconds - 90
    report.progress.most = most_steps(report.config, data.n_tokens)
    report.close(stopped=False)
    done, *lines = capsys.readouterr().out.splitlines()[1:]
    best = f"checkpoint-{10 if losses[0] < losses[1] else 1200}"
    best = rf"1\.235 bits per byte over 4 of 10 tokens, saved in {tmp_path}/{best}"
    assert re.fullmatch(rf"Done in \d+ s\. Best: {best}", done)  # the seconds: see test_plan
    help = help.replace("COMMAND", f"python train.py --out_dir={tmp_path} --resume")
    seen = f"The model has seen {size} MB of text {epochs:.2g} times. {help}"
    assert lines == [seen, f"Next: python sample.py {tmp_path}"]
    report.close(stopped=True)
    command = f"python train.py --out_dir={tmp_path} --resume"
    assert capsys.readouterr().out == f"\nStopped at step 1200, and saved.\nNext: {command}\n"


def test_a_gpu_reports_its_share_of_the_peak_and_its_peak_memory(tmp_path, monkeypatch, capsys):
    """6 FLOPs per parameter and token, of the tokens that one of the processes trains on."""
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 16_840_000_000)
    processes = one_process()
    processes.world_size = 2
    model = torch.nn.Linear(10_000, 1000, bias=False)
    data = SimpleNamespace(val=range(11), train_bytes=200, epochs=lambda config, step: 1)
    report = report_of(tmp_path, model, processes, data=data, batch_size=1000, block_size=1000)
    report.gpu = "NVIDIA A100-SXM4-80GB"
    report.progress.step = 10
    report.training({"loss": 2.0}, 1.0, ADAMW, seconds_left=0)
    entry = read_log(tmp_path)[0]
    assert entry["mfu"] == pytest.approx(6 * 1e7 * entry["tokens_per_s"] / 2 / 312e12)
    write_metrics(tmp_path, step=10, bits_per_byte=1, val_tokens=10)
    report.close(stopped=False)
    assert "\nPeak memory of the GPU: 16.8 GB\n" in capsys.readouterr().out
