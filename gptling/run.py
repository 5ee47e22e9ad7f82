"""A run's directory, out/NAME: checkpoint-N/, each whole or not at all, log.jsonl, config.toml."""

import json
import math
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises; nothing here is unpickled
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open

from gptling.files import UserError, lock_directory, read_json, replace, sync, writing
from gptling.gpt2_format import save
from gptling.muon import shard

FORMAT = 3  # of training_state.pt
UNREADABLE = (OSError, EOFError, RuntimeError, LookupError, UnpicklingError, SafetensorError)
# Flags of one start, which a run does not keep.
START_FLAGS = {"resume", "auto_resume", "overwrite", "eval_only", "minutes"}
START_FLAGS |= {"allow_changed_data", "allow_changed_model"}


@dataclass
class Progress:
    """How far a run is: what changes with every step besides weights and optimizers."""

    step: int = 0  # steps done
    best: float = math.inf  # the lowest validation loss
    overflows: int = 0  # steps that float16 skipped
    loss_sum: float = 0.0  # of the training losses since the last evaluation
    loss_steps: int = 0  # the number of these losses
    seconds: float = 0.0  # of all sessions so far


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """Return the checkpoints in the directory of a run, oldest first; [] for any other path."""
    found = [file.parent for file in Path(run).glob("checkpoint-*/metrics.json")]
    return sorted((p for p in found if re.fullmatch(r"checkpoint-\d+", p.name)), key=step_of)


def read_metrics(checkpoint: Path) -> dict[str, Any]:
    """Return metrics.json, without "val_loss" if the run was stopped between evaluations."""
    return read_json(checkpoint / "metrics.json")


def best_checkpoint(run: str | Path) -> Path | None:
    """Return the checkpoint of a run with the lowest validation loss, the newest of equal ones."""
    newest_first = list_checkpoints(run)[::-1]
    losses = {path: read_metrics(path).get("val_loss", math.inf) for path in newest_first}
    return min(newest_first, key=losses.get, default=None)


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """Return what training_state.pt holds: plain values and tensors. Raises UserError if that or
    the weights cannot be read."""
    file = checkpoint / "training_state.pt"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        file = checkpoint / "model.safetensors"
        with safe_open(file, "pt"):  # compares its size with its header
            pass
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        hint = "delete that folder to go on from the one before"
        raise UserError(f"{file}: cannot be read: {reason}; {hint}") from None
    if state["format"] != FORMAT:
        found = f"{checkpoint}: format {state['format']}, not {FORMAT}"
        raise UserError(f"{found}; begin another run from it, with --init_from={checkpoint}")
    state["progress"] = Progress(**state["progress"])
    return state


def resumed_config(config: Any, saved: dict, given: dict, fixed: set[str]) -> Any:
    """Return a run's saved configuration with the flags that were given. Print changes and unknown
    settings. Raises UserError for a flag that would make it a different run."""
    names = [field.name for field in fields(config) if field.name not in START_FLAGS]
    for name in sorted(saved.keys() - set(names) - START_FLAGS):
        print(f"{name}: {saved[name]} in the run, unknown to this code")
    for name in fixed & given.keys():
        if given[name] != saved.get(name):
            found = f"--{name}={given[name]}: the run has {saved.get(name)}"
            raise UserError(f"{found}; leave the flag out, or give another --out_dir")
    settings = {name: saved[name] for name in names if name in saved} | given
    hints = get_type_hints(type(config))
    for name, value in settings.items():
        choices = get_args(hints[name])  # of a Literal
        if choices and value not in choices:
            raise UserError(f"{name} is {value!r} in the run: give --{name}, one of {choices}")
    resumed = type(config)(**settings | {"out_dir": config.out_dir})
    for name in names:
        before, now = saved.get(name, "not set"), getattr(resumed, name)
        if before != now and name != "out_dir":
            print(f"{name}: {before} -> {now}")
    return resumed


class RunDirectory:
    """out/NAME. One training at a time writes there: the first of its processes."""

    def __init__(self, path: Path, processes):
        self.path, self.processes, self.lock = path, processes, None
        self.last_reason = ""  # why its checkpoints are no GPT-2s

    def take_lock(self):
        """Keep other trainings out until this one ends. Raises UserError if one is running."""
        if self.processes.is_main and self.path.is_dir() and not self.lock:
            self.lock = lock_directory(self.path)

    def resume_or_begin(self, config: Any, given: dict, fixed: set[str]):
        """Return (configuration, checkpoint, training state) of the run to resume, or
        (config, None, {}) for a new run. Raises UserError."""
        self.take_lock()
        checkpoints = list_checkpoints(self.path)
        if not (config.resume or (config.auto_resume and checkpoints)):
            if checkpoints and not config.overwrite:
                ways = "--resume continues it, --overwrite replaces it, --out_dir keeps both"
                raise UserError(f"{self.path} holds a run: {ways}")
            return config, None, {}
        if not checkpoints:
            raise UserError(f"{self.path} has no checkpoint to resume: give another --out_dir")
        newest = checkpoints[-1]
        state = load_training_state(newest)
        config = resumed_config(config, state["config"], given, fixed)
        if state["progress"].step >= config.max_iters:
            raise UserError(f"{newest} has all its steps: raise --max_iters={config.max_iters}")
        return config, newest, state

    def start(self, config: Any, step: int):
        """Begin at step `step`, once all is ready: move an old run to NAME.old, remove what a
        killed session left after that step, and write config.toml. Raises UserError."""
        if not self.processes.is_main:
            return
        with writing(self.path / "config.toml"):
            self.path.mkdir(parents=True, exist_ok=True)
            self.take_lock()
            if step == 0 and list_checkpoints(self.path):
                old = self.path.with_name(f"{self.path.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                self.path.rename(old)  # with the lock in it
                self.lock.release()
                self.path.mkdir(exist_ok=True)
                self.lock = lock_directory(self.path)
                print(f"the run that was in {self.path} is now in {old}")
            for path in self.path.glob(".checkpoint-*"):  # half written, or half deleted
                shutil.rmtree(path)
            log = self.path / "log.jsonl"
            lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []  # whole ones
            kept = [line + b"\n" for line in lines if json.loads(line)["step"] <= step]
            replace(log, b"".join(kept))
            replace(self.path / "config.toml", as_preset(config).encode())
        print(f"checkpoints: {self.path / 'checkpoint-N'}")

    def save(self, metrics, model, full_model, optimizers, scaler, progress, config, data):
        """Write checkpoint-STEP whole or not at all, then delete all but the best and the last.
        All processes call it and the first one writes. Raises UserError."""
        if not (self.processes.is_main or self.processes.sharded):
            return
        state = {"format": FORMAT, "progress": asdict(progress), "config": asdict(config)}
        state |= {"data": data.fingerprint, "scaler": scaler.state_dict()}
        state["optimizers"] = [full_state(optimizer, model) for optimizer in optimizers]
        if not self.processes.is_main:
            return
        final = self.path / f"checkpoint-{metrics['step']}"
        temporary = self.path / f".{final.name}.writing"
        try:
            with writing(final):
                reason = save(full_model, temporary, data.tokenizer_json)
                with (temporary / "training_state.pt").open("wb") as file:
                    torch.save(state, file)
                (temporary / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
                for path in [*temporary.iterdir(), temporary]:
                    sync(path)  # all is on the disk before the rename makes it visible
                temporary.rename(final)
                sync(self.path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if reason and not self.last_reason:
            print(f"checkpoints are for this model.py alone (model_type gptling): {reason}")
        self.last_reason = reason
        best = best_checkpoint(self.path)
        for path in set(list_checkpoints(self.path)[: -config.keep_last]) - {best}:
            # Hidden first: a crash leaves no half of a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.deleting")))


def as_preset(config: Any) -> str:
    """Return a run's settings as TOML, whose strings and numbers are written like JSON's."""
    left_out = START_FLAGS | {"out_dir", "vocab_size"}
    kept = {k: v for k, v in asdict(config).items() if k not in left_out and v is not None}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in kept.items()]
    return "\n".join(["# A preset: the settings of this run at its last start.", *lines, ""])


def full_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, dict]:
    """Return {name of a parameter: its state}, unsharded, on the CPU. All processes call it."""

    def whole(value):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.cpu() if isinstance(value, torch.Tensor) else value

    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: {k: whole(v) for k, v in s.items()} for p, s in optimizer.state.items()}


def load_states(model, optimizers: list[torch.optim.Optimizer], scaler, state: dict[str, Any]):
    """Load the states of a resumed run's optimizers and GradScaler, sharded like the parameters.
    Settings stay as they are. A parameter without a saved state starts without one."""
    if not state:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        states, params = {}, (p for group in optimizer.param_groups for p in group["params"])
        for i, p in enumerate(params):
            if names[p] in saved:
                states[i] = {key: shard(value, p) for key, value in saved[names[p]].items()}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": states})
    if scaler.is_enabled() and state["scaler"]:  # empty if the dtype was another
        scaler.load_state_dict(state["scaler"])
