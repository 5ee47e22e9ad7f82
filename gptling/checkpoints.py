"""Run directories: out/NAME with checkpoint-N, each whole or not at all, and log.jsonl."""

import copy
import json
import math
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises; nothing here is unpickled
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from gptling.cli import UserError
from gptling.files import lock_directory, read_json, replace, sha256, sync, writing
from gptling.gpt2_format import save
from gptling.optim import full_state

# Flags of one start, which a run does not keep.
ONCE = {"resume", "overwrite", "eval_only", "minutes"}
ONCE |= {"allow_changed_data", "allow_changed_model"}


@dataclass
class Progress:
    """How far a run is: what changes with every step besides weights and optimizers."""

    step: int = 0  # steps done
    best: float = math.inf  # the lowest validation loss
    overflows: int = 0  # steps that float16 skipped
    loss_sum: float = 0.0  # of the training losses since the last evaluation
    loss_steps: int = 0  # of how many steps
    seconds: float = 0.0  # of all sessions so far
    computed_in: str = ""  # the device and the dtype of matmuls of the last one
    val_tokens: int = 0  # over how many tokens `best` is

    def is_best(self, loss: float, tokens: int) -> bool:
        """Whether a validation loss is the lowest so far, of those over as many tokens."""
        before = self.best if self.val_tokens in (0, tokens) else math.inf
        self.best, self.val_tokens = min(before, loss), tokens
        return self.best == loss


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints in the directory of a run, oldest first; none elsewhere."""
    found = [file.parent for file in Path(run).glob("checkpoint-*/metrics.json")]
    return sorted((p for p in found if re.fullmatch(r"checkpoint-\d+", p.name)), key=step_of)


def read_metrics(checkpoint: Path) -> dict[str, Any]:
    """What metrics.json holds; without "val_loss" where the run was stopped between evaluations,
    and nothing where it is damaged."""
    with suppress(UserError, LookupError, TypeError, ValueError):
        metrics = read_json(checkpoint / "metrics.json")
        if "val_loss" in metrics:
            metrics["val_loss"] = float(metrics["val_loss"])
        return metrics
    return {}


def best_checkpoint(run: str | Path) -> Path | None:
    """The checkpoint of a run with the lowest validation loss, the newest of equal ones. Of losses
    over other tokens, since --eval_tokens was changed, those of the newest evaluation count."""
    newest_first = list_checkpoints(run)[::-1]
    metrics = {checkpoint: read_metrics(checkpoint) for checkpoint in newest_first}
    evaluated = [checkpoint for checkpoint in newest_first if "val_loss" in metrics[checkpoint]]
    newest = metrics[evaluated[0]].get("val_tokens") if evaluated else None
    same = [c for c in evaluated if metrics[c].get("val_tokens") in (None, newest)]
    return min(
        same or newest_first, key=lambda c: metrics[c].get("val_loss", math.inf), default=None
    )


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """What training_state.pt holds: plain values and tensors. Raises UserError for a checkpoint of
    which a file is not as it was written, which torch.load and safetensors might not notice."""
    try:
        sums = json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))
        for name in ("config.json", "model.safetensors", "tokenizer.json", "training_state.pt"):
            if sums[name] != sha256(checkpoint / name):
                raise ValueError(f"{name} is not as it was written")
        file = checkpoint / "training_state.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        if state["format"] != 2:
            raise ValueError(f"its training state is of format {state['format']}, not 2")
        state["progress"] = Progress(**state["progress"])
        return state
    except (OSError, ValueError, LookupError, TypeError, UnpicklingError) as error:
        raise UserError(f"{checkpoint} is damaged: {type(error).__name__}: {error}") from None


def resumed_config(config: Any, saved: dict, given: dict, fixed: set[str]) -> Any:
    """A run's own configuration with the flags that were given: explicit flags override the
    checkpoint and are printed, as is what the run did not have. Raises UserError for a flag that
    would make it another run; for what this code does not know, unless config.allow_changed_model.
    """
    hints, unknown = get_type_hints(type(config)), {}
    for name, value in saved.items():
        choices = get_args(hints[name]) if get_origin(hints.get(name)) is Literal else [value]
        if name not in hints or value not in choices:
            unknown[name] = value
    if unknown and not config.allow_changed_model:
        what = ", ".join(f"{name}={value!r:.50}" for name, value in sorted(unknown.items()))
        ways = "use the code that made it, or leave it out with --allow_changed_model=True"
        raise UserError(f"the run has {what}, which this code does not know: {ways}")
    known = {name: value for name, value in saved.items() if name not in unknown.keys() | ONCE}
    try:
        resumed = type(config)(**known | given | {"resume": False})
    except ValueError as error:
        raise UserError(f"the resumed run: {error}") from None
    for name in sorted(hints.keys() - ONCE - {"out_dir"}):
        value, before = getattr(resumed, name), saved.get(name, "not there")
        if value != before and name in fixed:
            way_out = "leave the flag out, or start another run with another --out_dir"
            raise UserError(f"--{name}={value}: the run has {before}; {way_out}")
        if value != before:
            print(f"{name}: {value} from now on; it was {before}")
    return resumed


class RunDirectory:
    """out/NAME, which one training at a time writes into: the first of its processes."""

    def __init__(self, path: Path, processes):
        self.path, self.processes, self.lock = path, processes, None
        self.last_reason = ""  # why its checkpoints are no GPT-2s
        self.begun, self.first_step = False, 0

    def take_lock(self):
        """Keep other trainings out until this one ends. Raises UserError where one is there."""
        if self.processes.is_main and self.path.is_dir() and not self.lock:
            self.lock = lock_directory(self.path)

    def resume_or_begin(self, config: Any, given: dict, fixed: set[str]):
        """(configuration, checkpoint, training state) of the run to go on with, as config.resume or
        a restart by torchrun say; (config, None, {}) for a new one, where there is no other in the
        directory or config.overwrite. Raises UserError."""
        self.take_lock()
        if self.processes.restarted:
            config.resume = self.processes.all_reduce_max(len(list_checkpoints(self.path))) > 0
            config.overwrite = not config.resume
        if not config.resume:
            if not config.overwrite:
                self.refuse_another_run()
            elif Path(config.init_from).absolute().is_relative_to(self.path.absolute()):
                way_out = "give another --out_dir, or another --init_from"
                raise UserError(f"--overwrite deletes {config.init_from}: {way_out}")
            return config, None, {}
        checkpoint, state = self.newest_state()
        given = given | {"out_dir": config.out_dir}
        config = resumed_config(config, state["config"], given, fixed)
        if state["progress"].step >= config.max_iters:
            raise UserError(f"{checkpoint} has all its steps: give a higher --max_iters")
        return config, checkpoint, state

    def newest_state(self) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint that is whole, in all processes, and its training state; damaged
        ones are named. Raises UserError where there is none."""
        found = None
        for checkpoint in reversed(list_checkpoints(self.path)) if self.processes.is_main else ():
            try:
                found = checkpoint, load_training_state(checkpoint)
                break
            except UserError as error:
                print(error, file=sys.stderr)
        step = self.processes.all_reduce_max(step_of(found[0]) if found else 0)
        if step == 0:
            way_out = "give the --out_dir of a run, or start anew without --resume"
            raise UserError(f"{self.path}: no whole checkpoint to go on from; {way_out}")
        newest = self.path / f"checkpoint-{step}"
        return found or (newest, load_training_state(newest))

    def refuse_another_run(self):
        if list_checkpoints(self.path):
            ways = "--resume=True goes on with it, --overwrite=True deletes it"
            raise UserError(f"{self.path} holds a run: {ways}, --out_dir=... leaves it alone")

    def start(self, step: int, overwrite: bool):
        """Make the directory, and let no other training write there; take_over does the rest."""
        self.first_step = step
        if not self.processes.is_main:
            return
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.take_lock()
            if step == 0 and not overwrite:
                self.refuse_another_run()  # one that has come to its end there meanwhile

    def take_over(self, config: Any):
        """Called after each step, and effective after the first of this session: delete what an
        older run has beyond the step that this one began at, and write config.toml."""
        begun, self.begun, step = self.begun, True, self.first_step
        if begun or not self.processes.is_main:
            return
        with writing(self.path):
            for path in self.path.glob(".checkpoint-*"):  # what a crash has left
                shutil.rmtree(path)
            for path in list_checkpoints(self.path):
                if step == 0:
                    delete(path)  # and nothing else that may lie in the folder
                elif step_of(path) > step:  # damaged: it would count as the newest
                    set_aside(path)
            if step == 0:
                (self.path / "loss.png").unlink(missing_ok=True)
            cut_log(self.path / "log.jsonl", step)
        with writing(self.path / "config.toml"):
            replace(self.path / "config.toml", as_preset(config).encode())
        self.processes.mark_trained()

    def print_new_reason(self, why_not_gpt2: str):
        if why_not_gpt2 and not self.last_reason:
            print(f"checkpoints are for this model.py alone (model_type gptling): {why_not_gpt2}")
        self.last_reason = why_not_gpt2

    def save(self, metrics, model, full_model, optimizers, scaler, progress, config, data):
        """Write checkpoint-STEP whole or not at all, then delete all but the best and the last.
        All processes of a sharded model call it, the first one writes. Raises UserError."""
        if not (self.processes.is_main or self.processes.sharded):
            return
        state = {"format": 2, "progress": asdict(progress), "config": asdict(config)}
        state |= {"data": data.fingerprint, "scaler": scaler.state_dict()}
        state["optimizers"] = [full_state(optimizer, model) for optimizer in optimizers]
        if not self.processes.is_main:
            return
        check_masks(full_model)
        final = self.path / f"checkpoint-{metrics['step']}"
        temporary = self.path / f".{final.name}.writing"
        try:
            with writing(final):
                self.print_new_reason(save(full_model, temporary, data.tokenizer_json))
                with (temporary / "training_state.pt").open("wb") as file:
                    torch.save(state, file)
                (temporary / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
                sums = json.dumps({path.name: sha256(path) for path in sorted(temporary.iterdir())})
                (temporary / "checksums.json").write_text(sums, encoding="utf-8")
                for path in [*temporary.iterdir(), temporary]:
                    sync(path)  # all is on the disk before the rename makes it visible
                if final.exists():  # without metrics.json
                    set_aside(final)
                temporary.rename(final)
                sync(self.path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        best = best_checkpoint(self.path)
        for path in set(list_checkpoints(self.path)[: -config.keep_last]) - {best}:
            with suppress(OSError):  # open in another program, on Windows: next time, then
                delete(path)


def as_preset(config: Any) -> str:
    """The settings of a run as a TOML file, whose strings and numbers are written as JSON's are."""
    left_out = ONCE | {"out_dir", "vocab_size"}
    kept = {k: v for k, v in asdict(config).items() if k not in left_out and v is not None}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in kept.items()]
    return "\n".join(["# A preset: what this run was trained with, at its last start.", *lines, ""])


def check_masks(model: torch.nn.Module):
    """Raises UserError where attention still takes the kernel's own mask, and mask() is another."""
    for layer in [module for module in model.modules() if getattr(module, "plain_mask", None)]:
        now = copy.copy(layer)
        now.plain_mask = {}
        if layer.has_plain_mask() and not now.has_plain_mask():
            words = "mask() in model.py has changed during training, and attention did not see it"
            raise UserError(f"{words}: let has_plain_mask() return False")


def set_aside(checkpoint: Path):
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def delete(checkpoint: Path):
    """Take a checkpoint away at once, then delete its files."""
    hidden = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.deleting"))
    shutil.rmtree(hidden, ignore_errors=True)


def cut_log(file: Path, step: int):
    """Drop what the log has after `step`, which will be done again, and what a crash cut off."""

    def belongs(line):
        with suppress(ValueError, LookupError, TypeError):  # a line of another program's
            return line.endswith(b"\n") and json.loads(line)["step"] <= step

    lines = file.read_bytes().splitlines(keepends=True) if step and file.exists() else []
    replace(file, b"".join(filter(belongs, lines)))
