"""The report of a training: log.jsonl, lines or a bar, loss.png, TensorBoard, Weights & Biases."""

import dataclasses
import importlib.util
import io
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from gptling.cli import optional_package
from gptling.devices import flops_utilisation
from gptling.files import replace, writing
from gptling.tokenizers import start_token


class Report:
    """The report of a run that continues from `progress`. The first of several processes writes it.
    model: counted; n_tokens: of the training split; dtype: of matmuls."""

    def __init__(self, config, processes, progress, model, n_tokens: int, dtype: str):
        self.config, self.processes, self.out_dir = config, processes, Path(config.out_dir)
        self.step = step = progress.step
        self.n_parameters = sum(p.numel() for p in model.parameters())
        sequences_per_step = config.batch_size * config.gradient_accumulation_steps
        self.tokens_per_step = sequences_per_step * config.block_size
        self.last_time = time.perf_counter()
        self.run_start = self.last_time - progress.seconds
        self.loggers = open_loggers(config, self.out_dir, step) if processes.is_main else []
        several = f", {processes.world_size} processes" * (processes.world_size > 1)
        resumed = f", from step {step}" * (step > 0)
        size = f"{self.n_parameters:,} parameters, {self.tokens_per_step:,} tokens a step"
        length = f"{config.max_iters:,} steps on {n_tokens:,} tokens"
        print(f"{size}, {length}; {processes.device}, {dtype}{several}{resumed}", flush=True)
        self.gpu = torch.cuda.get_device_name() if processes.device == "cuda" else ""
        self.plain = not sys.stderr.isatty()  # lines instead of a bar
        bar = {"total": config.max_iters, "initial": step, "unit": "step", "leave": False}
        self.bar = tqdm(**bar, disable=self.plain or not processes.is_main)

    def seconds(self) -> float:
        """Seconds of the run so far, of earlier sessions up to their last checkpoint."""
        return time.perf_counter() - self.run_start

    def log(self, **entry):
        """Write a line of log.jsonl, and show it elsewhere. Raises UserError for a full disk."""
        if not self.processes.is_main:
            return
        entry["seconds"] = round(self.seconds(), 3)
        log_file = self.out_dir / "log.jsonl"
        with writing(log_file), log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        for logger in self.loggers:
            logger(entry)

    def training(self, step: int, losses: dict[str, float], numbers: dict[str, float]):
        """Report the losses and other numbers of a step, with the speed since the last call."""
        seconds = (time.perf_counter() - self.last_time) / (step - self.step)
        self.last_time, self.step = time.perf_counter(), step
        speed, steps_left = self.tokens_per_step / seconds, self.config.max_iters - step
        numbers |= {"ms": 1000 * seconds, "tokens_per_s": speed}
        pace, one_gpu = f"{speed:,.0f} tokens/s", speed / self.processes.world_size
        if mfu := flops_utilisation(one_gpu, self.n_parameters, self.gpu):
            numbers["mfu"] = mfu
            pace += f", MFU {100 * mfu:.0f} %"
        self.log(step=step, **losses | numbers)
        named = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        self.bar.update(step - self.bar.n)
        self.bar.set_postfix_str(f"{named}, {pace}")
        if self.plain and (step % (10 * self.config.log_interval) == 0 or steps_left == 0):
            state = f"lr {numbers['lr']:.2e}, norm {numbers['norm']:.2f}"
            time_left = f"{1000 * seconds:.0f} ms, {pace}, {seconds * steps_left:.0f} s left"
            line = f"step {step}/{self.config.max_iters}: {named}, {state}, {time_left}"
            print(line, flush=True)

    def evaluation(self, metrics: dict[str, float], best: bool):
        """Report the losses of an evaluation."""
        self.log(**metrics, parameters=self.n_parameters)
        tqdm.write(
            f"step {metrics['step']}: training loss {metrics['train_loss']:.4f}, "
            f"validation loss {metrics['val_loss']:.4f}, "
            f"{metrics['bits_per_byte']:.4f} bits per byte{' (best)' * best}"
        )
        sys.stdout.flush()

    def sample(self, step: int, lines: list[str]):
        """Show some lines of the model's text, which the log does not keep."""
        for logger in self.loggers:
            logger({"step": step, "sample": "\n".join(lines)})
        tqdm.write("\n".join(f"  | {line}" for line in lines))
        sys.stdout.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as the training's."""
        start = time.perf_counter()
        yield
        self.last_time += time.perf_counter() - start

    def close(self, step: int, stopped: bool, seconds: float):
        """Print the next command, and the `seconds` since the program's start."""
        self.bar.close()
        out_dir = shlex.quote(self.config.out_dir)
        if stopped and step < self.config.max_iters:
            command = "python" if self.processes.world_size == 1 else "torchrun ..."
            print(f"stopped at step {step}; next: {command} train.py --out_dir={out_dir} --resume")
        else:
            print(f"{seconds:.0f} s; next: python sample.py {out_dir}")
        if self.config.wandb and self.processes.is_main:
            sys.modules["wandb"].finish()


def print_evaluation(name, data, nats: float, bits_per_byte: float):
    """Print the result of --eval_only: of the model `name`, its loss in nats per token."""
    perplexity = float(np.exp(nats))  # inf beyond float64
    print(
        f"{nats:.4f} nats per token, perplexity {perplexity:,.4f}, {bits_per_byte:.4f} bits per "
        f"byte: {name}, over {data.val_targets:,} tokens of {data.directory / 'val.npy'}"
    )


def sample_lines(model, tokenizer, seed: int, processes) -> list[str]:
    """Return two lines of text from the model."""
    if not (processes.is_main or processes.sharded):  # shards need all processes
        return []
    device = model.valid_tokens.device
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.tensor([[start_token(tokenizer)]], device=device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # a GPU has none for cumulative sums
    model.eval()
    tokens = model.generate(idx, 160, temperature=0.8, top_k=200, generator=generator)
    text = tokenizer.decode([token.item() for token in tokens])
    model.train()
    torch.use_deterministic_algorithms(deterministic)
    return [line.rstrip()[:100] for line in text.splitlines() if line.strip()][:2]


def open_loggers(config, out_dir: Path, step: int) -> list[Callable]:
    """Return functions that show an entry of the log elsewhere. step: the run's, at its start."""
    loggers = []
    if config.wandb:
        options = {"project": "gptling", "config": dataclasses.asdict(config)}
        run = optional_package("wandb", "wandb").init(name=out_dir.name, dir=out_dir, **options)
        loggers.append(lambda entry: run.log(entry, step=entry["step"]))
    if config.curves and importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier session wrote after `step` is hidden.
        writer = SummaryWriter(out_dir / "tensorboard", purge_step=step + 1)

        def tensorboard(entry):
            for name, value in entry.items():
                if name == "sample":
                    writer.add_text(name, value.replace("\n", "\n\n"), entry["step"])
                elif name not in ("step", "parameters"):
                    writer.add_scalar(name, value, entry["step"])
            writer.flush()

        loggers.append(tensorboard)
    if config.curves and importlib.util.find_spec("matplotlib"):
        loggers.append(lambda entry: "val_loss" in entry and draw_curves(out_dir))
    return loggers


def draw_curves(out_dir: Path):
    """Write out_dir/loss.png from log.jsonl: the losses over the steps, the best one marked."""
    from matplotlib.figure import Figure  # without pyplot no window is opened

    with (out_dir / "log.jsonl").open(encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    train = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    val = [(entry["step"], entry["val_loss"]) for entry in entries if "val_loss" in entry]
    best, step = min((loss, step) for step, loss in val)
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color="#9bb8d3", linewidth=1, label="training")
    axes.plot(*zip(*val, strict=True), color="#b5462f", marker="o", label="validation")
    axes.plot(step, best, "o", markersize=11, markerfacecolor="none", color="black")
    axes.set_title(f"{out_dir.name}: best {best:.4f} at step {step:,}")
    axes.set(xlabel="step", ylabel="loss in nats per token")
    axes.set_ylim(top=1.1 * val[0][1])  # the fall from ln(vocabulary) would press the rest flat
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    replace(out_dir / "loss.png", picture.getvalue())
