"""A run's directory, out/NAME: checkpoint-N/, each whole or not at all, log.jsonl, config.toml."""

import hashlib
import json
import math
import pickle
import re
import shutil
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gptling.files import UserError, lock_directory, new_directory, read_json, replace
from gptling.gpt2_format import save
from gptling.muon import shard, whole

FORMAT = 6  # of training_state.pt
# Fields of train.py's configuration that belong to one start and not to the run.
START_FLAGS = {"resume", "auto_resume", "overwrite", "eval_only", "out_dir"}
START_FLAGS |= {"allow_changed_model", "vocab_size"}  # which is the tokenizer's


@dataclass
class Progress:
    """How far a run is: what changes with every step besides weights and optimizers."""

    step: int = 0  # steps done
    best: float = math.inf  # the lowest validation loss
    seconds: float = 0.0  # of all sessions, up to this step


def list_checkpoints(run: str | Path) -> list[Path]:
    """Return the checkpoints in the directory of a run, oldest first, or [] for any other path."""
    checkpoints = {}
    for file in Path(run).glob("checkpoint-*/metrics.json"):
        step = file.parent.name.removeprefix("checkpoint-")
        if step.isdecimal():
            checkpoints[int(step)] = file.parent
    return [checkpoints[step] for step in sorted(checkpoints)]


def read_metrics(checkpoint: Path) -> dict[str, Any]:
    """Return the last evaluation of a checkpoint, and its step. Raises UserError."""
    return read_json(checkpoint / "metrics.json", f"delete {checkpoint}")


def best_checkpoint(run: str | Path) -> Path | None:
    """Return the checkpoint of a run with the lowest validation loss, the newest of equal ones. If
    the last evaluation covers the whole split, its comparable_loss counts: over the part that the
    evaluations before it cover."""

    def loss(checkpoint):
        metrics = read_metrics(checkpoint)
        return metrics.get("comparable_loss", metrics.get("val_loss", math.inf))

    return min(list_checkpoints(run)[::-1], key=loss, default=None)


def check_files(checkpoint: Path) -> Path:
    """Return a checkpoint of a run. Raises UserError for a file that was not copied whole."""
    read_metrics(checkpoint)
    for name in ("config.json", "tokenizer.json"):
        read_json(checkpoint / name, f"delete {checkpoint}")
    if not (checkpoint / "model.safetensors").is_file():
        raise UserError(f"{checkpoint} has no model.safetensors: delete {checkpoint}")
    return checkpoint


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """Return the plain values and tensors of training_state.pt. Raises UserError."""
    try:
        state = torch.load(checkpoint / "training_state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # of many classes
        hint = f"delete {checkpoint} to resume from the one before"
        raise UserError(f"training_state.pt cannot be read ({error!r:.60}): {hint}") from None
    if state["format"] != FORMAT:
        raise UserError(f"{checkpoint} is of another version: begin with --init_from={checkpoint}")
    state["progress"] = Progress(**state["progress"])
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
        remedy = "use numbers, strings, lists, dicts and tensors alone"
        raise UserError(f"no run could resume with a {culprit} in its state: {remedy}") from None


def check_optimizers(model, optimizers: list):
    """Print which parameters init_weights has not drawn. Raises UserError unless each trained
    parameter is in one optimizer."""
    counts = Counter()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts.update(group["params"])
    for name, p in model.named_parameters():
        if p.requires_grad and counts[p] != 1:
            remedy = "configure_optimizers has to give it to one"
            raise UserError(f"{name} is in {counts[p]} optimizers: {remedy}")
    if model.uninitialised:
        print(f"not drawn by init_weights: {', '.join(model.uninitialised)}")


def resumed_config(config: Any, saved: dict, given: dict, fixed: set[str]) -> Any:
    """Return a run's saved configuration, but with the flags that are given now, and defaults for
    fields that are new. Prints what changes. Raises UserError for a flag that would make it a
    different run."""
    settings = dict(vars(config))
    for name, value in (saved | given).items():
        before = saved.get(name, "not set")
        if name in START_FLAGS:
            continue
        if name not in settings:
            print(f"{name}: {value} in the run, unknown to this code")
            continue
        if value != before:
            if name in fixed:
                raise UserError(f"--{name}={value}: the run has {before}; give another --out_dir")
            print(f"{name}: {before} -> {value}")
        settings[name] = value
    return type(config)(**settings)


class RunDirectory:
    """out/NAME. One training at a time writes there: the first of its processes."""

    def __init__(self, path: Path, processes):
        self.path = path
        self.processes = processes
        self.lock = None

    def resume_or_begin(self, config: Any, given: dict, fixed: set[str]):
        """Return (configuration, checkpoint, training state) of the run to resume, or
        (config, None, {}) for a new run. Raises UserError."""
        if self.processes.is_main and self.path.is_dir():
            self.lock = lock_directory(self.path)
        checkpoints = list_checkpoints(self.path)
        if config.resume and not checkpoints:
            ways = "begin without --resume, or give another --out_dir"
            raise UserError(f"{self.path} has no checkpoint to resume: {ways}")
        if config.overwrite or not checkpoints:
            return config, None, {}
        if not (config.resume or config.auto_resume):
            ways = "--resume continues it, --overwrite replaces it, --out_dir keeps both"
            raise UserError(f"{self.path} holds a run: {ways}")
        state = load_training_state(check_files(checkpoints[-1]))
        config = resumed_config(config, state["config"], given, fixed)
        more_time = config.resume and "minutes" in given
        if state["progress"].step >= config.max_iters and not more_time:
            ways = f"--minutes=5 adds five minutes, --max_iters={2 * config.max_iters} sets an end"
            raise UserError(f"{self.path} has all its {config.max_iters} steps: {ways}")
        return config, checkpoints[-1], state

    def restore(
        self, config: Any, model, optimizers: list, stateful: dict, state: dict
    ) -> Progress:
        """Load the state of a resumed run's optimizers and of what is in `stateful`, and print
        which code is not the run's. What has another class or is new begins without a state.
        Return how far the run is. Raises UserError unless each trained parameter is in one
        optimizer."""
        check_optimizers(model, optimizers)
        self.remember_start(config, model, optimizers)
        if not state:
            return Progress()
        if changed := [k for k, value in self.code.items() if value != state["code"].get(k)]:
            print(f"changed since that checkpoint: {', '.join(changed)}")
        saved = state["code"]["optimizers"], state["optimizers"], state["settings"]
        for optimizer, name, its_state, settings in zip(optimizers, *saved, strict=False):
            if name == type(optimizer).__name__:
                load_state(optimizer, model, its_state)
                restore_settings(optimizer, *settings)
        for name, thing in stateful.items():
            now, before = thing.state_dict(), state["stateful"].get(name)
            if before:  # a GradScaler's is empty for another dtype
                thing.load_state_dict({k: like(value, now.get(k)) for k, value in before.items()})
        return state["progress"]

    def remember_start(self, config: Any, model, optimizers: list):
        """Keep train.py, model.py and the optimizers' settings before the first step, for the
        checkpoints to come."""
        modules = [sys.modules[type(settings).__module__] for settings in (config, model.config)]
        files = [Path(getattr(module, "__file__", "")) for module in modules]
        # A script that Python reads from a pipe, or exec() runs, has no file.
        self.sources = [(file.name, file.read_bytes()) for file in files if file.is_file()]
        self.code = {name: hashlib.sha256(text).hexdigest() for name, text in self.sources}
        self.code["optimizers"] = [type(optimizer).__name__ for optimizer in optimizers]
        self.settings = [optimizer.state_dict()["param_groups"] for optimizer in optimizers]

    def start(self, config: Any, step: int):
        """Begin at step `step`, once all is ready: move an old run to NAME.old, remove what a
        killed session left after that step, and write config.toml. Raises UserError."""
        if not self.processes.is_main:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = self.lock or lock_directory(self.path)
        if step == 0 and list_checkpoints(self.path):
            old = self.path.with_name(f"{self.path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            self.lock.release()  # Windows renames no directory with an open file
            self.path.rename(old)
            self.path.mkdir()
            self.lock = lock_directory(self.path)
            print(f"the run that was in {self.path} is now in {old}")
        for path in self.path.glob(".checkpoint-*/"):  # half written, or half deleted
            shutil.rmtree(path)
        self.truncate_log(step)
        self.write_settings(config)

    def truncate_log(self, step: int):
        """Keep the lines of log.jsonl up to a step. A killed session has left the others."""
        log = self.path / "log.jsonl"
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []  # whole ones
        try:
            kept = [line + b"\n" for line in lines if json.loads(line)["step"] <= step]
        except ValueError as error:
            raise UserError(f"{log} cannot be read ({error}): delete it") from None
        replace(log, b"".join(kept))

    def write_settings(self, config: Any):
        """Write config.toml."""
        text = "# A preset: the settings of this run.\n"
        for name, value in asdict(config).items():
            if name not in START_FLAGS and value is not None:  # TOML's strings are JSON's
                text += f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        replace(self.path / "config.toml", text.encode())

    def save(self, metrics, model, full_model, optimizers, stateful, progress, config, data):
        """Write checkpoint-STEP whole or not at all, then delete all but the best one and the last
        keep_last. All processes call it and the first one writes full_model, which has whole
        parameters."""
        if not (self.processes.is_main or self.processes.sharded):
            return
        state = {"format": FORMAT, "progress": asdict(progress), "config": asdict(config)}
        state |= {"data": data.fingerprint, "code": self.code}
        state["optimizers"] = [full_state(optimizer, model) for optimizer in optimizers]
        state["stateful"] = {k: unsharded(thing.state_dict()) for k, thing in stateful.items()}
        now = [optimizer.state_dict()["param_groups"] for optimizer in optimizers]
        state["settings"] = list(zip(self.settings, now, strict=True))  # at the start, and now
        if not self.processes.is_main:
            return
        with new_directory(self.path / f"checkpoint-{metrics['step']}") as new:
            why_not_gpt2 = save(full_model, new, data.tokenizer_json)
            save_training_state(state, new / "training_state.pt")
            (new / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
            for name, text in self.sources:  # another model.py does not load the checkpoint
                (new / name).write_bytes(text)
        self.write_settings(config)  # a plan may have changed
        checkpoints = list_checkpoints(self.path)
        if why_not_gpt2 and len(checkpoints) == 1:  # said once
            print(f"checkpoints are for this model.py alone (model_type gptling): {why_not_gpt2}")
        for path in set(checkpoints[: -config.keep_last]) - {best_checkpoint(self.path)}:
            # Hidden first: a crash leaves no half of a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.deleting")))


def unsharded(state: Any) -> Any:
    """The state with whole tensors, on the CPU. All processes call it."""
    return tree_map_only(torch.Tensor, lambda tensor: whole(tensor).cpu(), state)


def like(value: Any, now: Any) -> Any:
    """A saved value as the present one is: a tensor on its device, and sharded as that is."""
    tensors = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
    return shard(value, now) if tensors else value


def full_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, dict]:
    """Return {name of a parameter: its state}, unsharded, on the CPU. All processes call it."""
    parameters = model.named_parameters()
    return unsharded({name: optimizer.state[p] for name, p in parameters if p in optimizer.state})


def load_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: dict):
    """Load what full_state returned, in its dtypes: Optimizer.load_state_dict would cast it."""
    for name, parameter in model.named_parameters():
        if name in state:
            place = partial(shard, like=parameter)
            optimizer.state[parameter] = tree_map_only(torch.Tensor, place, state[name])


def restore_settings(optimizer: torch.optim.Optimizer, first: list[dict], last: list[dict]):
    """Set what training had changed, group by group. Momentum that was 0.9 at first and 0.95 at
    last is 0.95 again if it is 0.9 now. Any other value now is a flag's or the code's and stays."""
    for group, before, after in zip(optimizer.param_groups, first, last, strict=False):
        for name, value in after.items():
            if value != before.get(name) and group.get(name) == before.get(name):
                group[name] = value
