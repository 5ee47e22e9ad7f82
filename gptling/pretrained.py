"""Models and runs by name: the hub's GPT-2s, weights in shards, and what is refused."""

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gptling.checkpoints import best_checkpoint, list_checkpoints
from gptling.cli import UserError
from gptling.files import read_json

HUB_NAMES = r"(openai-community/)?gpt2(-medium|-large|-xl)?|(distilbert/)?distilgpt2"
MAX_JSON = 1 << 26  # bytes of an index or a config.json
INVALID = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of what JSON says


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, a run's with the lowest validation loss, or a GPT-2
    of the hub; without a path that of the newest run under out/. Raises UserError."""
    runs = sorted(run for run in Path("out").glob("*") if list_checkpoints(run))
    if not path:
        if not runs:
            raise UserError("no run under out/: python train.py makes one, or name a checkpoint")
        path = max(runs, key=os.path.getmtime)
    path = best_checkpoint(path) or Path(path)
    if re.fullmatch(HUB_NAMES, path.as_posix()) and not path.exists():
        return download(path.as_posix())
    if os.path.isfile(path):
        raise UserError(f"{path}: a file; name a run or a checkpoint directory")
    if not os.path.isfile(path / "config.json"):  # False for a name that is too long, too
        names = ", ".join(run.as_posix() for run in runs[:9])
        there = f"runs here: {names}" if names else "python train.py makes one"
        raise UserError(f"{path}: no checkpoint there (a directory with a config.json); {there}")
    return path


def download(name: str) -> Path:
    """Where the hub's model of that name lies after its download. Raises UserError."""
    remedy = (
        "put config.json, model.safetensors and tokenizer.json of "
        f"https://huggingface.co/{name} into a directory {name}"
    )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{name}: to download it pip install huggingface_hub, or {remedy}"
        ) from None
    files = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
    files += ["tokenizer.json", "vocab.json", "merges.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except OSError as error:  # no network, or no such files
        reason = f"cannot be downloaded ({type(error).__name__})"
        raise UserError(f"{name}: {reason}; {remedy}") from None


def load_model(model_class: type, path: str | Path, **changes) -> torch.nn.Module:
    """model_class.from_pretrained for any checkpoint that find_checkpoint finds, with its weights
    in one file or in shards; no pickle is opened. changes: fields of its config to change.

    Raises UserError, in one line, for what is missing, damaged or another architecture."""
    path, tensors = find_checkpoint(path), {}
    stored = read_json(path / "config.json", MAX_JSON)
    for file in weight_files(path):
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
    try:
        model = model_class.from_tensors(stored, tensors, **changes)
    except INVALID as error:
        raise UserError(f"{path}: config.json and weights make no model: {error}") from None
    tokenizer = path / "tokenizer.json"
    try:
        if tokenizer.is_file():
            model.restrict_to_tokens(tokenizer.read_text(encoding="utf-8"))
    except (OSError, *INVALID) as error:
        raise UserError(f"{tokenizer}: cannot be read: {error}") from None
    return model.eval()


def weight_files(path: Path) -> list[Path]:
    """model.safetensors, or the shards that an index names. Raises UserError where neither is."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if not index.is_file():
        raise UserError(f"{path}: {pickle_remedy(path)}")
    names = read_json(index, MAX_JSON).get("weight_map")
    names = set(names.values()) if isinstance(names, dict) else {""}
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise UserError(f"{index}: its weight_map names something else than files beside it")
    return sorted(path / name for name in names)


def pickle_remedy(path: Path) -> str:
    """What to do about a directory without model.safetensors."""
    if not (path / "pytorch_model.bin").is_file():
        return "no model.safetensors in it"
    load = f"transformers.GPT2LMHeadModel.from_pretrained({str(path)!r})"
    return (
        "pytorch_model.bin is a pickle, which can run code, and is not opened; "
        f"where you trust it: {load}.save_pretrained({str(path)!r})"
    )
