"""Run directories: out/NAME with checkpoint-N, each whole or not at all, and log.jsonl."""

import json
import math
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises; nothing here is unpickled
from typing import Any

import torch

from gptling.cli import UserError, check
from gptling.files import lock_directory, read_json, replace_text, sha256, sync, writing
from gptling.optim import whole_state

# What torch.load makes of a file that is missing, cut short, or something else.
DAMAGED = (OSError, RuntimeError, EOFError, UnpicklingError)
DAMAGED += (LookupError, ValueError, TypeError, AttributeError)


@dataclass
class Progress:
    """How far a run is: what changes with every step besides weights and optimizers."""

    step: int = 0  # steps done
    best: float = math.inf  # the lowest validation loss
    overflows: int = 0  # steps that float16 skipped
    loss_sum: float = 0.0  # of the training losses since the last evaluation
    loss_steps: int = 0  # of how many steps


# ---------------------------------------------------------------------------- what is there


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints in the directory of a run, oldest first; none elsewhere."""
    files = Path(run).glob("checkpoint-*/metrics.json") if os.path.isdir(run) else []
    found = [file.parent for file in files if re.fullmatch(r"checkpoint-\d+", file.parent.name)]
    return sorted(found, key=step_of)


def read_loss(checkpoint: Path) -> float:
    """The validation loss of a checkpoint; infinite where a run was stopped between evaluations, or
    its metrics.json is damaged."""
    with suppress(UserError):
        loss = read_json(checkpoint / "metrics.json").get("val_loss")
        if isinstance(loss, int | float) and loss == loss:
            return loss
    return math.inf


def best_checkpoint(run: str | Path) -> Path | None:
    """The checkpoint of a run with the lowest validation loss, the newest of equal ones."""
    found = list_checkpoints(run)
    return min(found, key=lambda path: (read_loss(path), -step_of(path)), default=None)


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """What training_state.pt holds: plain values and tensors.

    Raises UserError for a checkpoint of which a file is not as it was written, which neither
    torch.load nor safetensors would notice."""
    try:
        sums = json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))
        for name in ("config.json", "model.safetensors", "tokenizer.json", "training_state.pt"):
            if sums[name] != sha256(checkpoint / name):
                raise ValueError(f"{name} is not as it was written")
        file = checkpoint / "training_state.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        if state["format"] == 1:  # as it was before November 2026
            old = {"loss_sum": state["recent"], "loss_steps": state["recent_steps"]}
            state["progress"] = old | {name: state[name] for name in ("step", "best", "overflows")}
        elif state["format"] != 2:
            raise ValueError("training_state.pt is of another version")
        state["progress"] = Progress(**state["progress"])
        if state["progress"].step != step_of(checkpoint):
            raise ValueError("training_state.pt belongs to another checkpoint")
        return {
            name: state[name] for name in ("progress", "data", "config", "optimizers", "scaler")
        }
    except DAMAGED as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{checkpoint} is damaged: {reason}") from None


def resumed_config(config_class: type, saved: dict, given: dict, fixed: set[str]) -> Any:
    """A run's own configuration with the flags that were given: explicit flags override the
    checkpoint and are printed. Raises UserError for a flag that would make it another run."""
    known = {field.name for field in fields(config_class)}
    saved = {name: value for name, value in saved.items() if name in known}
    once = {"resume": False, "overwrite": False, "allow_changed_data": False}
    for name in sorted(given.keys() & saved.keys() - once.keys() - {"out_dir"}):
        if given[name] != saved[name] and name in fixed:
            raise UserError(
                f"--{name}={given[name]}: the run has {saved[name]}, which a resumed run keeps; "
                "leave the flag out, or start another run with another --out_dir"
            )
        if given[name] != saved[name]:
            print(f"{name}: {given[name]} from now on; it was {saved[name]}")
    values = saved | once | given | {"resume": False}
    values = {name: check(config_class, name, value, "the run") for name, value in values.items()}
    return config_class(**values)


# ---------------------------------------------------------------------------- what is written


class RunDirectory:
    """out/NAME, which one training at a time writes into: the first of its processes."""

    def __init__(self, path: Path, processes):
        """Locks a directory that is there. Raises UserError where another training has it."""
        self.path, self.log_file, self.processes = path, path / "log.jsonl", processes
        self.lock = lock_directory(path) if processes.first and path.is_dir() else None

    def newest_state(self) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint that is whole, in all processes, and its training state; damaged
        ones are named. Raises UserError where there is none."""
        found = None
        for checkpoint in reversed(list_checkpoints(self.path)) if self.processes.first else ():
            try:
                found = checkpoint, load_training_state(checkpoint)
                break
            except UserError as error:
                print(error, file=sys.stderr)
        step = self.processes.all_reduce_max(step_of(found[0]) if found else 0)
        if step == 0:
            way_out = "give the --out_dir of a run, or start anew with --overwrite=True"
            raise UserError(f"{self.path}: no whole checkpoint to go on from; {way_out}")
        checkpoint = self.path / f"checkpoint-{step}"
        return found or (checkpoint, load_training_state(checkpoint))

    def refuse_another_run(self):
        """Raises UserError where a run is there already."""
        if list_checkpoints(self.path):
            raise UserError(
                f"{self.path} holds a run: --resume=True goes on with it, --overwrite=True deletes "
                "it, --out_dir=... leaves it alone"
            )

    def start(self, step: int, resumed: bool, overwrite: bool):
        """Make the directory ready for what follows `step`. Raises UserError."""
        if not self.processes.first:
            return
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = self.lock or lock_directory(self.path)
            if not resumed and not overwrite:
                self.refuse_another_run()  # one that has come to its end there meanwhile
            for path in self.path.glob(".checkpoint-*"):  # what a crash has left
                shutil.rmtree(path)
            for path in list_checkpoints(self.path):
                aside = path.with_name(f"damaged-{path.name}")
                if not resumed:
                    delete(path)  # and nothing else that may lie in the folder
                elif step_of(path) > step:  # damaged: it would count as the newest
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
            if resumed and self.log_file.exists():
                cut_log(self.log_file, step)
            elif not resumed:
                self.log_file.write_text("")

    def save(self, metrics, model, optimizers, scaler, progress: Progress, config, data):
        """Write checkpoint-STEP whole or not at all, then delete all but the best and the last.

        All processes of a sharded model call it, the first one writes, with the whole model.
        Everything is on the disk before the rename makes it visible. Raises UserError."""
        if not (self.processes.first or self.processes.sharded):
            return
        state = {"format": 2, "progress": asdict(progress), "config": asdict(config)}
        state |= {"data": data.fingerprint, "scaler": scaler.state_dict()}
        state["optimizers"] = [whole_state(optimizer) for optimizer in optimizers]
        if not self.processes.first:
            return
        final = self.path / f"checkpoint-{metrics['step']}"
        temporary = self.path / f".{final.name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with writing(final):
                model.save_pretrained(temporary, data.tokenizer_json)
                with (temporary / "training_state.pt").open("wb") as file:
                    torch.save(state, file)
                (temporary / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
                sums = json.dumps({path.name: sha256(path) for path in sorted(temporary.iterdir())})
                (temporary / "checksums.json").write_text(sums, encoding="utf-8")
                for path in [*temporary.iterdir(), temporary]:
                    sync(path)
                if final.exists():
                    delete(final)
                temporary.rename(final)
                sync(self.path)
        except UserError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        best = best_checkpoint(self.path)
        for path in set(list_checkpoints(self.path)[: -config.keep_last]) - {best}:
            with suppress(OSError):  # open in another program, on Windows: next time, then
                delete(path)


def delete(checkpoint: Path):
    """Take a checkpoint away at once, then delete its files."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.deleting")
    shutil.rmtree(hidden, ignore_errors=True)
    checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def cut_log(file: Path, step: int):
    """Drop what the log has after `step`, which will be done again, and what a crash cut off."""
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    replace_text(file, "".join(kept))
