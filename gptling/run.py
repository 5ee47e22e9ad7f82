"""A run's directory, out/NAME: checkpoint-N/, each whole or not at all, log.jsonl, config.toml."""

import json
import math
import pickle
import re
import shutil
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gptling.evaluation import comparable
from gptling.files import (
    UserError,
    lock_directory,
    new_directory,
    read_json,
    try_again,
    write_whole,
)
from gptling.gpt2_format import save as save_model

FORMAT = 6  # the version of training_state.pt
OUTPUT = re.compile(r"config\.toml|log\.jsonl|loss\.png|checkpoint-\d+")  # a run's own files
HEADER = "# A preset: the settings of this run."  # the first line of config.toml


def list_checkpoints(run: str | Path) -> list[Path]:
    """Return the checkpoints in the directory of a run, oldest first, or [] for any other path."""
    checkpoints = {}
    for file in Path(run).glob("checkpoint-*/metrics.json"):
        step = file.parent.name.removeprefix("checkpoint-")
        if step.isdecimal():
            checkpoints[int(step)] = file.parent
    return [checkpoints[step] for step in sorted(checkpoints)]


def list_teachers(run: str | Path) -> list[Path]:
    """Return the models that a run of several has trained, first to last: see teachers.py."""
    return sorted(file.parent for file in Path(run).glob("teacher-*/metrics.json"))


def list_models(run: str | Path) -> list[Path]:
    """Return all models in the directory of a run, oldest first, or [] for any other path."""
    return list_teachers(run) + list_checkpoints(run)


def read_metrics(checkpoint: Path) -> dict[str, Any]:
    """Return the last evaluation of a checkpoint, and its step. Raises UserError."""
    return read_json(checkpoint / "metrics.json", f"delete {checkpoint}")


def best_of(checkpoints: list[Path]) -> Path | None:
    """Return the checkpoint with the lowest validation loss, the newest of equal ones. Losses over
    other tokens than the newest evaluation's do not count. checkpoints: oldest first."""
    losses = {path: comparable(read_metrics(path)) for path in checkpoints[::-1]}
    newest = next((tokens for loss, tokens in losses.values() if loss < math.inf), None)
    return min(losses, key=lambda path: (losses[path][1] != newest, losses[path][0]), default=None)


def delete_checkpoint(checkpoint: Path, other: Path):
    """Delete a checkpoint, unless you have put a file into it, which the other one lacks. If it
    stays, print why."""
    own = {file.name for file in other.iterdir()}
    if yours := [file for file in checkpoint.glob("[!.]*") if file.name not in own]:
        print(f"an old checkpoint was not deleted, because it has {yours[0]}")
        return
    try:  # hidden first, so that a crash leaves no half of a checkpoint
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.deleting")))
    except OSError as error:
        print(f"an old checkpoint could not be deleted: {error}")


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """Return the plain values and tensors of training_state.pt. Raises UserError."""
    try:
        state = torch.load(checkpoint / "training_state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch has many classes of them
        raise UserError(
            f"training_state.pt cannot be read ({error!r:.60}): "
            f"delete {checkpoint} to resume from the one before"
        ) from None
    if state["format"] != FORMAT:
        raise UserError(f"{checkpoint} has another format: begin with --init_from={checkpoint}")
    return state


def save_training_state(state: dict[str, Any], file: Path):
    """Write training_state.pt. Raises UserError if torch.load would refuse it."""
    with file.open("wb") as opened:
        torch.save(state, opened)
    try:
        torch.load(file, weights_only=True, mmap=True)  # mmap: without the tensors
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        culprit = named[1] if named else error
        raise UserError(
            f"no run could resume with a {culprit} in its state: "
            "use numbers, strings, lists, dicts and tensors alone"
        ) from None


def read_settings(run: Path) -> dict[str, Any]:
    """Return the settings in config.toml, {} if it is missing or cannot be read."""
    with suppress(OSError, ValueError):
        return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    return {}


class RunDirectory:
    """out/NAME. One training at a time writes there: the first of its processes."""

    def __init__(self, path: Path, processes):
        self.path = path
        self.processes = processes
        self.lock = None

    def acquire(self):
        """Lock the directory, if there is one. Raises UserError if another training has done it,
        or for a directory that belongs to another program or holds other runs."""
        if not (self.processes.is_main and self.path.is_dir()):
            return
        self.lock = lock_directory(self.path)
        if list_checkpoints(self.path):
            return
        settings = self.path / "config.toml"
        is_ours = settings.is_file() and settings.read_bytes().startswith(HEADER.encode())
        for file in self.path.iterdir():
            if list_checkpoints(file):
                raise UserError(f"{self.path} contains other runs: give --out_dir={self.path}/NAME")
            if OUTPUT.fullmatch(file.name) and not is_ours:
                raise UserError(f"{file} belongs to another program: give another --out_dir")

    def start(self, state):
        """Begin at the step of the state, once all is ready: move an old run to NAME.old, remove
        what a killed session left after that step, and write config.toml. Raises UserError."""
        if not self.processes.is_main:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = self.lock or lock_directory(self.path)
        done = state.progress.steps_before + state.progress.step  # all models' steps
        log = self.path / "log.jsonl"
        content = log.read_bytes() if log.exists() else b""
        models = list_models(self.path)
        if not done and models and not state.config.overwrite:  # since the plan was made
            raise UserError(f"{self.path} has another run by now: give another --out_dir")
        if not done and (models or b"val_loss" in content):
            self.move_old_run()
        for path in self.path.glob(".checkpoint-*/"):  # half written, or half deleted
            shutil.rmtree(path, ignore_errors=True)
        kept = []
        for line in content.splitlines():
            with suppress(ValueError, TypeError, KeyError):  # cut off by a power failure
                if json.loads(line)["step"] <= done:
                    kept.append(line + b"\n")
        if not done:  # later ones come with a checkpoint
            self.write_settings(state)
        write_whole(log, b"".join(kept))

    def move_old_run(self):
        """Move the run that is here to NAME.old, or NAME.old2 if there is one, and so on. Lock the
        new directory."""
        here = self.path.resolve() if self.path.is_symlink() else self.path  # a link stays
        old = here.with_name(f"{here.name}.old")
        n = 1
        while old.exists():
            n += 1
            old = here.with_name(f"{here.name}.old{n}")
        self.lock.release()  # Windows renames no directory with an open file
        try_again(here.rename, old)
        here.mkdir()
        self.lock = lock_directory(self.path)
        print(f"the run that was in {self.path} is now in {old}")

    def keep_teacher(self):
        """Keep the best checkpoint of the model that has ended as teacher-N, with the last one's
        state, and no other. If this is interrupted, the run resumes from it."""
        self.processes.barrier()  # the others may still read what is renamed here
        checkpoints = list_checkpoints(self.path)
        if self.processes.is_main and checkpoints:
            last = checkpoints[-1]
            was_stopped = "val_loss" not in read_metrics(last)  # a signal ends an evaluation
            best = last if was_stopped else best_of(checkpoints)
            # A resumed run continues from the last step's state, not from the best model's.
            copy = shutil.copy(last / "training_state.pt", best / ".training_state.pt")
            Path(copy).replace(best / "training_state.pt")
            n = len(list_teachers(self.path)) + 1
            for path in checkpoints:
                if path != best:
                    delete_checkpoint(path, best)
                    with suppress(OSError):  # if it stays, it is none of the next model's
                        path.rename(self.path / f"model-{n}-{path.name}")
            try_again(best.rename, self.path / f"teacher-{n}")
        self.processes.wrapped = None  # frees its memory
        self.processes.barrier()

    def write_settings(self, state):
        """Write config.toml. As a preset, it begins with the first of several models again."""
        text = f"{HEADER} Edits have no effect on --resume, which has flags.\n"
        last_models = set()  # settings of the last model alone
        if state.config.models_before:
            last_models = {"teacher"}
            if state.config.minutes:
                last_models.add("max_iters")
        for name, value in state.configuration().items():
            if value is not None and name not in last_models:  # TOML's strings are JSON's
                text += f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        write_whole(self.path / "config.toml", text.encode())

    def save(self, state, data, metrics: dict[str, Any]):
        """Write checkpoint-STEP whole or not at all, then delete all but the best one and the last
        keep_last. All processes call it: each gives its shards, the first one writes."""
        saved = state.state_dict() | {
            "format": FORMAT,
            "data": data.fingerprint,
            "offset": data.offset,
        }
        model = self.processes.full_model(state.model)
        if not self.processes.is_main:
            return
        with new_directory(self.path / f"checkpoint-{metrics['step']}") as new:
            save_training_state(saved, new / "training_state.pt")
            del saved  # its memory is needed for a copy of the weights
            why_not_gpt2 = save_model(model, new, data.tokenizer_json)
            (new / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
            for name, text in state.sources.items():  # the weights load into this model.py alone
                if not name.endswith("/"):  # the package
                    (new / name).write_bytes(text)
        self.write_settings(state)  # max_iters may have changed
        checkpoints = list_checkpoints(self.path)
        if why_not_gpt2 and len(checkpoints) == 1:  # printed once
            print(f"only this model.py can load checkpoints (model_type gptling): {why_not_gpt2}")
        try:
            best = {best_of(checkpoints), best_of(list_models(self.path))}  # the model's, the run's
        except UserError as error:  # one is damaged, which costs this run nothing
            print(f"no old checkpoint was deleted: {error}")
            return
        for path in set(checkpoints[: -state.config.keep_last]) - best:
            delete_checkpoint(path, checkpoints[-1])
