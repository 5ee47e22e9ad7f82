"""The report of a training: log.jsonl, lines, loss.png, Weights & Biases."""

import json
import math
import shlex
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gptling import startup
from gptling.cli import progress_bar
from gptling.clock import advice
from gptling.decoding import check_cache
from gptling.devices import flops_utilisation
from gptling.evaluation import comparable, eval_mode
from gptling.files import read_log
from gptling.run import best_of, list_models, read_metrics
from gptling.schedule import tokens_per_step


def draw_curves(out_dir: Path):
    """Write out_dir/loss.png from log.jsonl: the losses over the steps."""
    from matplotlib.figure import Figure  # without pyplot no window is opened

    entries = read_log(out_dir / "log.jsonl")
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        axes.plot(*zip(*points, strict=True), label=label)
    top = 1.1 * points[0][1]  # the first validation loss cuts the start off
    axes.set(title=out_dir.name, xlabel="step", ylabel="loss in nats per token", ylim=(None, top))
    axes.legend()
    figure.savefig(out_dir / "loss.png")


class Report:
    """The log, the lines and the curves of a run. The first of several processes writes them."""

    def __init__(self, config, data, model, progress, processes):
        self.config = config
        self.data = data
        self.model = model
        self.progress = progress
        self.processes = processes
        self.step = progress.step  # the step of the last report
        self.printed_steps = progress.max_iters  # the plan that was printed last
        self.all_targets = len(data.val) - 1  # tokens to validate on, in the whole split
        self.n_parameters = sum(p.numel() for p in model.parameters())
        self.gpu = torch.cuda.get_device_name() if processes.device == "cuda" else ""
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()  # measuring for a plan may have needed more
        self.last_time = time.perf_counter()
        self.next_line = -math.inf
        self.shows = True  # until loss.png or Weights & Biases fails
        self.wandb_run = None
        if config.wandb:
            import wandb  # noqa: F401, so that a missing package ends the run before it begins
        form = "step {n}/{total} | {desc} |{bar}|"
        self.bar = progress_bar(progress.max_iters, initial=self.step, bar_format=form)

    def header(self):
        """Print what is trained, on what, and for how long."""
        config, data, max_iters = self.config, self.data, self.progress.max_iters
        tokens = tokens_per_step(config)
        epochs = data.epochs(config, max_iters)
        machine = f"{self.processes.device}, {self.processes.dtype}"
        if self.processes.world_size > 1:
            machine += f", {self.processes.world_size} processes"
        if self.step:
            machine += f", from step {self.step}"
        if self.model.uninitialised:
            print(f"not set by init_weights: {', '.join(self.model.uninitialised)}")
        print(
            f"data:  {data.n_tokens:,} tokens to train on, "
            f"{data.val_targets:,} of {self.all_targets:,} to validate on"
        )
        print(
            f"model: {self.n_parameters:,} parameters, {config.n_layer} layers, "
            f"{config.n_head} heads, width {config.n_embd}, context {config.block_size}"
        )
        print(f"run:   {max_iters:,} steps of {tokens:,} tokens ({epochs:.1f} epochs)")
        print(f"       saved in {config.out_dir}, {machine}")
        if config.init_from == "scratch":
            n_vocab = data.tokenizer.n_vocab
            print(f"       a blind guess: {math.log(n_vocab):.3f} nats per token, ln {n_vocab:,}")
        print()

    def say(self, *columns: str):
        """Print a line that begins with the number of steps done."""
        self.bar.clear()  # the next step draws it again
        last = str(self.progress.max_iters)
        print(f"step {self.progress.step:{len(last)}}/{last}", *columns, sep=" | ")

    def log(self, **entry):
        """Write a line of log.jsonl, and show it elsewhere. An optional package that fails, in
        whatever way, does not end the run."""
        if not self.processes.is_main:
            return
        entry["step"] += self.progress.steps_before
        entry["seconds"] = round(self.progress.seconds, 3)
        try:
            # JSON has no infinity and no NaN, which the norm of a float16 step may be: null.
            finite = json.loads(json.dumps(entry), parse_constant=lambda name: None)
            with (Path(self.config.out_dir) / "log.jsonl").open("a") as file:
                file.write(json.dumps(finite) + "\n")
            if self.shows:
                self.show(entry)
        except Exception as error:
            self.shows = False
            self.say(f"the run continues without curves: {error!r:.99}")

    def attempt(self, function, *arguments) -> dict:
        """Return what a function returns. If it fails, print a line and return {}: what has been
        trained is worth more than an evaluation or a sample of it."""
        try:
            return function(*arguments) or {}
        except Exception as error:
            alone = function == self.write_sample and not self.processes.sharded
            if self.processes.world_size > 1 and not alone:  # the others would wait for this one
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.say(
                f"{function.__name__} failed at {Path(place.filename).name}:{place.lineno}: "
                f"{error!r:.99}"
            )
            return {}

    def show(self, entry: dict):
        """Show an entry of the log in loss.png and Weights & Biases."""
        out_dir = Path(self.config.out_dir)
        if self.config.curves and find_spec("matplotlib") and "val_loss" in entry:
            draw_curves(out_dir)
        if self.config.wandb:
            import wandb

            if not self.wandb_run:
                self.wandb_run = wandb.init(
                    project="gptling", name=out_dir.name, dir=out_dir, config=vars(self.config)
                )
            self.wandb_run.log(entry, step=entry["step"])

    def due(self, step: int) -> bool:
        """Whether to report a step that is not evaluated: in the log, or in a line."""
        return step % self.config.log_interval == 0 or time.perf_counter() >= self.next_line

    def training(self, losses: dict, norm: torch.Tensor, optimizers: list, seconds_left: float):
        """Report the losses, norm and rates of a step, and the speed since the last report.
        seconds_left: to the end of the run, or 0 if they are not known yet."""
        step, max_iters = self.progress.step, self.progress.max_iters
        now = time.perf_counter()
        seconds = (now - self.last_time) / (step - self.step)  # one step's
        self.last_time = now
        self.step = step
        last = step == max_iters
        speed = tokens_per_step(self.config) / seconds
        numbers = {name: float(loss) for name, loss in losses.items()}
        for optimizer in optimizers:
            name = "lr" if optimizer is optimizers[0] else f"{type(optimizer).__name__.lower()}_lr"
            numbers[name] = optimizer.param_groups[0]["lr"]
        numbers["norm"] = float(norm)
        if mfu := flops_utilisation(speed / self.processes.world_size, self.n_parameters, self.gpu):
            numbers["mfu"] = mfu
        columns = [f"{name} {number:<9.4g}" for name, number in numbers.items()]
        if last or step % self.config.log_interval == 0:
            self.log(step=step, **numbers, ms=1000 * seconds, tokens_per_s=speed)
        left = seconds_left or seconds * (max_iters - step)
        time_left = self.bar.format_interval(left)
        self.bar.set_description_str(f"{columns[0].rstrip()} | {time_left} left", refresh=False)
        if last or now >= self.next_line:
            if not last and abs(max_iters - self.printed_steps) >= 0.1 * self.printed_steps:
                self.say(f"the plan is now {max_iters:,} steps")
                self.printed_steps = max_iters
            if self.bar.disable:
                speeds = f"{1000 * seconds:4.0f} ms", f"{speed:7,.0f} tokens/s"
                self.say(*columns, *speeds, f"{left:,.0f} s left")
            self.next_line = now + 10

    def new_plan(self):
        """Log that max_iters has changed. `training` prints a change of a tenth or more."""
        self.log(step=self.progress.step, max_iters=self.progress.max_iters)
        self.bar.total = self.progress.max_iters

    def evaluation(self, metrics: dict[str, Any]):
        """Report an evaluation, unless it has failed."""
        if "val_loss" not in metrics:
            return
        self.log(**metrics, parameters=self.n_parameters)
        line = "validation"
        share = metrics["val_tokens"] / self.all_targets
        if share < 1:
            line += f" on {100 * share:.2g} %:"
        line += (
            f" {metrics['val_loss']:.3f} nats per token, "
            f"{metrics['bits_per_byte']:.3f} bits per byte"
        )
        if comparable(metrics)[0] == self.progress.best < math.inf:
            line += " (best)"
        if not metrics["is_cross_entropy"]:
            line += ", but not the cross-entropy of the logits: see GPT.losses"
        self.say(line)

    def sample(self, seed: int):
        """Print the validation text's first tokens, a bar, and the model's text, in one line."""
        torch.use_deterministic_algorithms(False)  # a GPU has none for cumulative sums
        self.attempt(self.write_sample, seed)
        torch.use_deterministic_algorithms(self.config.deterministic)
        self.last_time = time.perf_counter()  # an evaluation's time is not the training's

    def write_sample(self, seed: int):
        model = self.model
        decode = self.data.tokenizer.decode
        prompt = self.data.val[:8].tolist()
        idx = torch.tensor([prompt], device=model.valid_tokens.device)
        generator = torch.Generator(idx.device).manual_seed(seed)
        with eval_mode(model):
            if message := check_cache(model):
                self.say(message)
            tokens = model.generate(idx, 80, temperature=0.8, top_k=200, generator=generator)
            drawn = [token.item() for token in tokens]
        words = f"{decode(prompt)} | {decode(drawn)}".split()
        self.say(f"sample: {' '.join(words):.90}")

    def close(self, stopped: bool, is_followed: bool = False):
        """Print the best loss, how often the text was seen, and the next command. is_followed:
        whether the run trains another model."""
        self.bar.close()
        if self.wandb_run:
            self.attempt(self.wandb_run.finish)
        out_dir = shlex.quote(self.config.out_dir)
        resume = f"Next: python train.py --out_dir={out_dir} --resume"
        if stopped:
            print(f"\nStopped at step {self.progress.step}, and saved.\n{resume}")
            return
        if not self.processes.is_main:
            return
        models = list_models(self.config.out_dir)
        best = best_of(models)
        metrics = read_metrics(best)
        loss = f"{metrics.get('bits_per_byte', math.nan):.3f} bits per byte"
        tokens = metrics.get("val_tokens", 0)
        if tokens < self.all_targets:
            loss += f" over {tokens:,} of {self.all_targets:,} tokens"
        if is_followed:
            print(f"\nModel {self.config.models_before + 1} has ended. Best so far: {loss}")
            if self.processes.signal:  # it came in the last evaluation
                print(resume)
            return
        print(f"\nDone in {startup.seconds():.0f} s. Best: {loss}, saved in {best}")
        newest = comparable(read_metrics(models[-1]))[0]
        has_risen = 1.005 * comparable(metrics)[0] < newest < math.inf
        is_own = "checkpoint" in best.name  # not an earlier model of this run
        overfitted_since = metrics["step"] if has_risen and is_own else None
        print(advice(self.config, self.data, self.progress, overfitted_since))
        if self.gpu:
            print(f"Peak memory of the GPU: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        print(f"Next: python sample.py {out_dir}")
