"""The state of any optimizer in and out of checkpoints, and losses that are NaN or infinite."""

import math
from typing import Any

import torch

from gptling.cli import UserError
from gptling.muon import shard


def full_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str | int, dict]:
    """The state of each parameter, by the name it has in the model, in memory of the CPU; gathered
    where it is sharded: all processes must call it then."""

    def full(value):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.cpu() if isinstance(value, torch.Tensor) else value

    saved, places = optimizer.state_dict()["state"], places_of(optimizer, model)
    return {k: {n: full(v) for n, v in saved[i].items()} for k, i in places.items() if i in saved}


def places_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str | int, int]:
    """Where an optimizer has each of its parameters, by their names, so that whoever changes the
    groups or the order need not think of runs to be resumed."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {names.get(p, i): i for i, p in enumerate(parameters)}


def load_states(model, optimizers: list[torch.optim.Optimizer], scaler, state: dict[str, Any]):
    """Give a model's optimizers and GradScaler what a checkpoint has of them. Raises UserError."""
    if not state:
        return
    try:
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            load_state(optimizer, saved, model)
    except ValueError as error:
        raise UserError(
            f"training_state.pt does not fit: {error}; take another --out_dir"
        ) from None
    if scaler.is_enabled() and state["scaler"]:  # it is empty where the dtype was another
        scaler.load_state_dict(state["scaler"])


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str | int, dict], model):
    """Take what full_state gave, sharded as the parameters are; settings stay as they are. Raises
    ValueError for the state of other parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = places_of(optimizer, model)
    places |= {i: i for i in places.values()}  # as once saved
    if unknown := list(saved.keys() - places.keys()):
        raise ValueError(f"it has the state of {unknown[0]}, which the optimizer has not")
    saved = {places[key]: values for key, values in saved.items()}
    state = {i: {k: shard(v, parameters[i]) for k, v in saved[i].items()} for i in saved}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def check_finite(what: str, value: float, step: int, config: Any):
    if not math.isfinite(value):
        remedy = f"lower --learning_rate={config.learning_rate} or --grad_clip={config.grad_clip}"
        raise UserError(f"{what} is {value} at step {step}: {remedy}, or use --dtype=float32")
