"""What a run saves and resumes besides its weights. A checkpoint has it as training_state.pt."""

import hashlib
import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gptling import startup
from gptling.cli import marked_fields
from gptling.evaluation import comparable
from gptling.files import UserError
from gptling.processes import gathered, shard


@dataclass
class Progress:
    """How far a run is."""

    max_iters: int  # steps of the whole run. With a time budget, as many as fit
    step: int = 0  # steps done
    best: float = math.inf  # the lowest validation loss over the same best_tokens
    best_tokens: int | None = None
    seconds_before: float = 0.0  # seconds of earlier sessions
    # A run of several models (see teachers.py): the steps of those before this one, and the
    # seconds after which this one began.
    steps_before: int = 0
    began: float = 0.0
    most: float = math.inf  # steps after which this one would overfit
    can_teach: bool = True  # see can_teach in teachers.py

    @property
    def seconds(self) -> float:
        """The seconds of all sessions, up to now."""
        return self.seconds_before + startup.seconds()

    def state_dict(self) -> dict[str, Any]:
        """Return what a run saves of it. The configuration has max_iters."""
        values = vars(self) | {"seconds": self.seconds}
        del values["seconds_before"], values["max_iters"]
        return values

    def load(self, saved: dict[str, Any]):
        """Continue from what state_dict returned."""
        done = dict(saved)
        vars(self).update(seconds_before=done.pop("seconds"), **done)

    def follow(self, before: "Progress"):
        """Begin after the model before, in the same run."""
        self.best = before.best
        self.best_tokens = before.best_tokens
        self.seconds_before = before.seconds_before
        self.steps_before = before.steps_before + before.step
        self.began = before.seconds

    def update_best(self, metrics: dict):
        """Note the loss of an evaluation, if there is one. One over other tokens begins a new
        comparison."""
        loss, tokens = comparable(metrics)
        if tokens not in (self.best_tokens, None):
            self.best = math.inf
            self.best_tokens = tokens
        self.best = min(self.best, loss)


class State:
    """The optimizers, the progress, and `things`: objects by their names with state_dict() and
    load_state_dict(), of plain values and tensors. sources: see read_sources. Make it before the
    first step. Raises UserError unless each trained parameter is in one optimizer."""

    def __init__(self, config: Any, model: torch.nn.Module, optimizers: list, sources, **things):
        counts = Counter()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                counts.update(group["params"])
        for name, p in model.named_parameters():
            if p.requires_grad and counts[p] != 1:
                raise UserError(
                    f"{name} is in {counts[p]} optimizers: "
                    "configure_optimizers has to give it to one"
                )
        self.config = config
        self.model = model
        self.optimizers = optimizers
        self.things = things
        self.progress = Progress(config.max_iters)
        self.sources = sources
        self.first_groups = self.groups()

    def groups(self) -> list[list[dict]]:
        """Return the groups of each optimizer, with numbers in place of the parameters."""
        return [optimizer.state_dict()["param_groups"] for optimizer in self.optimizers]

    def configuration(self) -> dict[str, Any]:
        """Return the settings that make this run, with the number of steps that fit now."""
        values = vars(self.config) | {"max_iters": self.progress.max_iters}
        once = marked_fields(type(self.config), "once")
        return {name: value for name, value in values.items() if name not in once}

    def code(self) -> dict[str, Any]:
        """Return the sha256 of each source, and the names of the optimizers' classes."""
        hashes = {name: hashlib.sha256(text).hexdigest() for name, text in self.sources.items()}
        return hashes | {"optimizers": [type(optimizer).__name__ for optimizer in self.optimizers]}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and whole tensors on the CPU, for the first process. All call it."""
        state = {
            "progress": self.progress.state_dict(),
            "config": self.configuration(),
            "code": self.code(),
            "optimizers": [named_state(optimizer, self.model) for optimizer in self.optimizers],
            "settings": list(zip(self.first_groups, self.groups(), strict=True)),
            "stateful": {name: thing.state_dict() for name, thing in self.things.items()},
        }
        return tree_map_only(torch.Tensor, gathered, state)

    def load_state_dict(self, saved: dict[str, Any]):
        """Continue from what state_dict returned, and print which code has changed. An optimizer of
        another class, or a new thing, begins without a state."""
        code = self.code()
        if changed := [name for name in code if code[name] != saved["code"].get(name)]:
            print(f"changed since that checkpoint: {', '.join(changed)}")
        self.progress.load(saved["progress"])
        before = saved["code"]["optimizers"], saved["optimizers"], saved["settings"]
        for optimizer, name, state, groups in zip(self.optimizers, *before, strict=False):
            if name == type(optimizer).__name__:
                restore_groups(optimizer, *groups)
                # In the dtypes of the state: Optimizer.load_state_dict would cast it.
                for key, parameter in self.model.named_parameters():
                    if key in state:
                        optimizer.state[parameter] = placed(state[key], parameter)
        for name, thing in self.things.items():
            state, now = saved["stateful"].get(name), thing.state_dict()
            if state:  # a GradScaler's is empty for another dtype
                thing.load_state_dict({k: placed(value, now.get(k)) for k, value in state.items()})


def read_sources(*classes: type) -> dict[str, bytes]:
    """Return the source files of classes by their names, and those of the package as one text. Read
    them before a long plan is made, or an edit in the meantime is taken for the code that runs."""
    files = [Path(getattr(sys.modules[cls.__module__], "__file__", "")) for cls in classes]
    # A script that Python reads from a pipe, or exec() runs, has no file.
    sources = {file.name: file.read_bytes() for file in files if file.is_file()}
    package = sorted(Path(__file__).parent.glob("*.py"))
    return sources | {"gptling/": b"".join(file.read_bytes() for file in package)}


def placed(state: Any, like: Any) -> Any:
    """Return a saved state with its tensors on the device of the tensor `like`, and sharded in the
    same way. If `like` is no tensor, the state is returned unchanged."""
    if not isinstance(like, torch.Tensor):
        return state
    return tree_map_only(torch.Tensor, partial(shard, like=like), state)


def named_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, dict]:
    """Return {name of a parameter: its state}."""
    parameters = model.named_parameters()
    return {name: optimizer.state[p] for name, p in parameters if p in optimizer.state}


def restore_groups(optimizer: torch.optim.Optimizer, first: list[dict], last: list[dict]):
    """Restore what a schedule had changed, group by group. A momentum that was 0.9 at first and
    0.95 at last is 0.95 again if the code or the flags still say 0.9. Otherwise theirs wins."""
    for group, before, after in zip(optimizer.param_groups, first, last, strict=False):
        for name, value in after.items():
            if value != before.get(name) and group.get(name) == before.get(name):
                group[name] = value
