"""What a training shows: log.jsonl, lines or a progress bar, loss.png, TensorBoard, W&B."""

import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gptling.cli import UserError
from gptling.devices import flops_utilisation
from gptling.files import writing
from gptling.processes import Processes
from gptling.tokenizers import start_token


class Report:
    """The report of a run, from `step` on; of several processes the first one reports."""

    def __init__(self, config, processes: Processes, step: int, tokens_per_step, n_parameters):
        self.config, self.processes, self.out_dir = config, processes, Path(config.out_dir)
        self.tokens_per_step, self.n_parameters = tokens_per_step, n_parameters
        self.first_step = self.step = step
        self.plain = not sys.stderr.isatty()  # lines instead of a bar
        self.started = self.last_time = time.perf_counter()
        self.boards = open_boards(config, self.out_dir, step) if processes.first else []
        options = {"total": config.max_iters, "initial": step, "unit": "step", "leave": False}
        self.bar = tqdm(**options, disable=self.plain or not processes.first)

    def start(self, n_tokens: int):
        """What is trained, and on what."""
        several = f", {self.processes.world_size} processes" * (self.processes.world_size > 1)
        resumed = f", from step {self.step}" * (self.step > 0)
        print(
            f"{self.n_parameters:,} parameters, {self.tokens_per_step:,} tokens a step, "
            f"{self.config.max_iters:,} steps on {n_tokens:,} tokens; "
            f"{self.processes.device}, {self.config.dtype}{several}{resumed}",
            flush=True,
        )

    def log(self, **entry):
        """A line of log.jsonl, which the boards show too. Raises UserError for a full disk."""
        if not self.processes.first:
            return
        log_file = self.out_dir / "log.jsonl"
        with writing(log_file):
            with log_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        for board in self.boards:
            board(entry)

    def training(self, step: int, numbers: dict[str, float]):
        """The numbers of a step, with the speed since the last call."""
        seconds = (time.perf_counter() - self.last_time) / (step - self.step)
        self.last_time, self.step = time.perf_counter(), step
        speed, steps_left = self.tokens_per_step / seconds, self.config.max_iters - step
        numbers |= {"ms": 1000 * seconds, "tokens_per_s": speed}
        pace = f"{speed:,.0f} tokens/s"
        one_gpu = speed / self.processes.world_size
        mfu = flops_utilisation(one_gpu, self.n_parameters, self.processes.gpu)
        if mfu is not None:
            numbers["mfu"] = mfu
            pace += f", MFU {100 * mfu:.0f} %"
        self.log(step=step, **numbers)
        self.bar.update(step - self.bar.n)
        self.bar.set_postfix_str(f"loss {numbers['loss']:.3f}, {pace}")
        if self.plain and (step % (10 * self.config.log_interval) == 0 or steps_left == 0):
            print(
                f"step {step}/{self.config.max_iters}: loss {numbers['loss']:.3f}, "
                f"lr {numbers['lr']:.2e}, norm {numbers['norm']:.2f}, {1000 * seconds:.0f} ms, "
                f"{pace}, {seconds * steps_left:.0f} s left",
                flush=True,
            )

    def evaluation(self, metrics: dict[str, float], sample: list[str], best: bool):
        """The losses of an evaluation, and a taste of the model."""
        self.log(**metrics, sample="\n".join(sample))
        tqdm.write(
            f"step {metrics['step']}: training loss {metrics['train_loss']:.4f}, "
            f"validation loss {metrics['val_loss']:.4f}, "
            f"{metrics['bits_per_byte']:.4f} bits per byte{' (best)' * best}"
            + "".join(f"\n  | {line}" for line in sample)
        )
        sys.stdout.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside does not count as the training's time."""
        start = time.perf_counter()
        yield
        self.last_time += time.perf_counter() - start

    def close(self, step: int, stopped: bool):
        """Say what comes next."""
        self.bar.close()
        if stopped:
            command = "python" if self.processes.world_size == 1 else "torchrun ..."
            resume = f"{command} train.py --out_dir={self.config.out_dir} --resume=True"
            print(f"stopped at step {step}; next: {resume}")
        else:
            seconds = time.perf_counter() - self.started
            print(f"{seconds:.0f} s; next: python sample.py {self.config.out_dir}")
        if self.config.wandb and self.processes.first:
            sys.modules["wandb"].finish()


def sample_lines(model, tokenizer, seed: int, processes: Processes) -> list[str]:
    """Two lines from the model, as a taste of where it is."""
    if not (processes.first or processes.sharded):  # shards need all processes
        return []
    device = model.drawable.device
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.tensor([[start_token(tokenizer)]], device=device)
    model.eval()
    tokens = model.generate(idx, 160, temperature=0.8, top_k=200, generator=generator)
    text = tokenizer.decode([token.item() for token in tokens])
    model.train()
    return [line.rstrip()[:100] for line in text.splitlines() if line.strip()][:2]


def open_boards(config: Any, out_dir: Path, step: int) -> list[Callable]:
    """What shows the log elsewhere, as functions that take an entry of it: TensorBoard where it is
    installed, Weights & Biases with --wandb, loss.png where matplotlib is installed.

    Raises UserError where --wandb is given without the package."""
    boards = []
    if config.curves and importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        # What a resumed run had written after `step` is hidden.
        directory = out_dir / "tensorboard"
        with writing(directory):
            writer = SummaryWriter(directory, purge_step=step + 1)

        def tensorboard(entry):
            with writing(directory):
                for name, value in entry.items():
                    if name == "sample":
                        writer.add_text(name, value.replace("\n", "\n\n"), entry["step"])
                    elif name != "step":
                        writer.add_scalar(name, value, entry["step"])
                writer.flush()

        boards.append(tensorboard)
    if config.curves and importlib.util.find_spec("matplotlib"):
        boards.append(lambda entry: "val_loss" in entry and draw_curves(out_dir))
    if config.wandb:
        if not importlib.util.find_spec("wandb"):
            raise UserError("--wandb=True: pip install wandb, or leave it out")
        import wandb

        settings = dataclasses.asdict(config)
        run = wandb.init(project="gptling", name=out_dir.name, dir=out_dir, config=settings)
        boards.append(lambda entry: run.log(entry, step=entry["step"]))
    return boards


def draw_curves(out_dir: Path):
    """Write out_dir/loss.png from log.jsonl: the losses over the steps, the best one marked."""
    from matplotlib.figure import Figure  # without pyplot no window is opened

    entries = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    train = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    val = [(entry["step"], entry["val_loss"]) for entry in entries if "val_loss" in entry]
    step, best = min(val, key=lambda point: point[1])
    title = f"{out_dir.name}: best {best:.4f} at step {step:,}"
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color="#9bb8d3", linewidth=1, label="training")
    axes.plot(*zip(*val, strict=True), color="#b5462f", marker="o", label="validation")
    axes.plot(step, best, "o", markersize=11, markerfacecolor="none", color="black")
    # The fall from ln(vocabulary) in the first steps would press the rest flat.
    later = [loss for _, loss in train[len(train) // 20 :] + val]
    margin = 0.08 * (max(later) - min(later))
    axes.set(xlabel="step", ylabel="loss in nats per token", title=title)
    axes.set_ylim(min(later) - margin - 1e-3, max(later) + margin)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = out_dir / ".loss.png.writing"
    try:
        with writing(out_dir / "loss.png"):
            figure.savefig(temporary, format="png")
            temporary.replace(out_dir / "loss.png")
    finally:
        temporary.unlink(missing_ok=True)
