"""Models and runs by name: the hub's GPT-2s, weights in shards, and what is refused."""

import math
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from gptling import gpt2_format
from gptling.cli import UserError, in_words, is_main, optional_package
from gptling.files import read_json
from gptling.run import best_checkpoint, list_checkpoints, read_metrics

HUB_NAMES = r"(openai-community/)?gpt2(-medium|-large|-xl)?|(distilbert/)?distilgpt2"


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or a GPT-2 of the hub, or of a run the one with the
    lowest validation loss, but the newest where the run was stopped after its last evaluation;
    without a path that of the newest run under out/. Raises UserError."""
    runs = sorted(run for run in Path("out").glob("*") if list_checkpoints(run))
    if not path:
        if not runs:
            raise UserError("no run under out/: python train.py makes one, or name a checkpoint")
        path = max(runs, key=os.path.getmtime)
    path = Path(path).expanduser()
    path = choose_checkpoint(path) or path
    if re.fullmatch(HUB_NAMES, path.as_posix()) and not path.exists():
        return download(path.as_posix())
    if not (path / "config.json").is_file():
        names = ", ".join(run.as_posix() for run in runs[:9])
        there = f"runs here: {names}" if names else "python train.py makes one"
        raise UserError(f"{path}: no checkpoint there (a directory with a config.json); {there}")
    return path


def choose_checkpoint(run: Path) -> Path | None:
    """The checkpoint that the name of a run means, None for no run; a line on standard error says
    which, where there are others to take."""
    best, newest = best_checkpoint(run), next(reversed(list_checkpoints(run)), None)
    if best == newest:
        return best
    taken, reason = best, f"has the lowest validation loss; the newest is {newest}"
    if (metrics := read_metrics(newest)) and "val_loss" not in metrics:
        taken, reason = newest, f"is where the run stopped; {best} has the lowest validation loss"
    if is_main():
        print(f"{taken} {reason}", file=sys.stderr)
    return taken


def download(name: str) -> Path:
    """Where the hub's model of that name lies after its download. Raises UserError."""
    files = "config.json, model.safetensors and tokenizer.json"
    remedy = f"put {files} of https://huggingface.co/{name} into a directory {name}"
    hub = optional_package("huggingface_hub", f"huggingface_hub, or {remedy}")
    files = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
    files += ["tokenizer.json", "vocab.json", "merges.txt"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=files))
    except OSError as error:  # no network, or no such files
        kind = type(error).__name__
        raise UserError(f"{name}: cannot be downloaded ({kind}); {remedy}") from None


def load_model(model_class: type, path: str | Path = "", allow_changed=False, **changes):
    """The model that find_checkpoint finds, also with weights in shards; no pickle is opened. More
    in gpt2_format.load. Raises UserError for what is missing, damaged or another model's."""
    path, tensors = find_checkpoint(path), {}
    read_json(path / "config.json")  # names the file, and bounds it
    for file in weight_files(path):
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read: {error}{other_checkpoints(path)}") from None
    try:
        return gpt2_format.load(model_class, path, tensors, allow_changed, **changes)
    except (
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = f"config.json, weights or tokenizer cannot be loaded: {in_words(error)}"
        if isinstance(error, gpt2_format.ChangedModelError):
            words = "model.py computes something else than the model there did"
            way_out = f"train.py --init_from={path} --allow_changed_model=True trains on from it"
            reason = f"{words}: {error}; {way_out}"
        stored = gpt2_format.stored_sizes(model_class, read_json(path / "config.json"))
        for name, value in gpt2_format.resized(stored, changes).items():
            reason = f"{name}={value}, where it has {stored[name]}: {reason}"
        raise UserError(f"{path}: {reason}") from None


def build_model(model_class: type, config: Any, data, source: Path | None):
    """A new model to train, or a checkpoint's, of which train.py's configuration may change what
    leaves its logits as they are, such as dropout or the weight of a term of the loss."""
    names = [field.name for field in fields(model_class.config_class)]
    check_names(model_class)
    sizes = {name: getattr(config, name) for name in names}
    if source is None:
        multiple = config.vocab_multiple
        sizes["vocab_size"] = math.ceil(data.tokenizer.n_vocab / multiple) * multiple
        model = model_class(model_class.config_class(**sizes))
        if model.untouched:
            print(f"not drawn by init_weights, as they were made: {', '.join(model.untouched)}")
    else:
        data.check_tokenizer(source, config.vocab_size)
        del sizes["block_size"]
        model = load_model(model_class, source, config.allow_changed_model, **sizes)
    model.restrict_to_tokens(gpt2_format.token_ids(data.tokenizer_json))
    return model.train()


def check_names(model_class: type):
    """Raises UserError where a size has another name than flags and files give it."""
    config_class = model_class.config_class
    for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
        if name not in config_class.__dataclass_fields__:
            what = f"{config_class.__name__} has no {name}"
            raise UserError(f"model.py: {what}; keep that name: flags and config.json use it")


def take_sizes(config: Any, given: dict, model_class: type, source: Path) -> int:
    """Give train.py's configuration the sizes of the model in a checkpoint, but for what flags say
    of them. Returns the longest sequence that the model allows; they may be shorter. Raises
    UserError for longer ones."""
    check_names(model_class)
    stored = gpt2_format.stored_sizes(model_class, read_json(source / "config.json"))
    if stored["vocab_size"] % config.vocab_multiple:
        if "vocab_multiple" in given:
            has = f"{source} has a vocabulary of {stored['vocab_size']}"
            raise UserError(f"--vocab_multiple={config.vocab_multiple}: {has}; leave the flag out")
        config.vocab_multiple = 1  # a preset's gives way, as its sizes do
    longest = stored["block_size"]
    if "block_size" not in given:
        config.block_size = longest if config.eval_only else min(config.block_size, longest)
    if config.block_size > longest:
        raise UserError(f"--block_size={config.block_size}: {source} has {longest}")
    for name in stored.keys() - given.keys() - {"block_size", "dropout"}:
        setattr(config, name, stored[name])
    return longest


def other_checkpoints(path: Path) -> str:
    """Where a run has others than this one, the end of a sentence that names them."""
    others = [other.as_posix() for other in list_checkpoints(path.parent) if other != path]
    return f"; the run has others: {', '.join(others)}" if others else ""


def weight_files(path: Path) -> list[Path]:
    """model.safetensors, or the shards that an index names. Raises UserError where neither is."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if (path / "pytorch_model.bin").is_file() and not index.is_file():
        pickle = "pytorch_model.bin is a pickle, which can run code, and is not opened"
        load = f"transformers.GPT2LMHeadModel.from_pretrained({str(path)!r})"
        raise UserError(f"{pickle}; if you trust it: {load}.save_pretrained({str(path)!r})")
    if not index.is_file():
        raise UserError(f"{path}: no model.safetensors in it{other_checkpoints(path)}")
    names = read_json(index).get("weight_map")
    names = set(names.values()) if isinstance(names, dict) else {""}
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise UserError(f"{index}: its weight_map names something else than files beside it")
    return sorted(path / name for name in names)
