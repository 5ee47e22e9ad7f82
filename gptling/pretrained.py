"""Models by name: a checkpoint, a run, or a GPT-2 of the hub."""

import os
import re
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError

from gptling import gpt2_format
from gptling.files import UserError, read_json
from gptling.run import best_checkpoint, list_checkpoints, read_metrics

HUB_NAMES = r"(openai-community/)?gpt2(-medium|-large|-xl)?|(distilbert/)?distilgpt2"
FILES = ["config.json", "model.safetensors", "tokenizer.json"]


def find_checkpoint(path: str | Path = "") -> Path:
    """The checkpoint that `path` names: a checkpoint, a run, or a GPT-2 of the hub. Without a path
    it is the newest run under out/. A run means its checkpoint with the lowest validation loss, or
    its newest one if it was stopped after its last evaluation. Raises UserError."""
    runs = sorted(filter(list_checkpoints, Path("out").glob("*")), key=os.path.getmtime)
    if not (path or runs):
        raise UserError("no run under out/: python train.py makes one, or name a checkpoint")
    path = Path(path or runs[-1]).expanduser()
    if checkpoints := list_checkpoints(path):
        stopped = "val_loss" not in read_metrics(checkpoints[-1])
        return checkpoints[-1] if stopped else best_checkpoint(path)
    if (path / "config.json").is_file():
        return path
    if re.fullmatch(HUB_NAMES, path.as_posix()):
        return download(path.as_posix())
    names = ", ".join(run.as_posix() for run in runs[-9:]) or "none"
    raise UserError(f"{path}: no checkpoint there (a directory with a config.json). Runs: {names}")


def download(name: str) -> Path:
    """The directory of the hub's model of that name, downloaded if need be. Raises UserError."""
    from huggingface_hub import snapshot_download  # tokenizers requires it

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except OSError as error:  # no network, or no such files
        hint = f"put {', '.join(FILES)} of https://huggingface.co/{name} into a directory {name}"
        raise UserError(f"{name}: cannot be downloaded ({type(error).__name__}); {hint}") from None


def load_model(model_class: type, path: str | Path = "", allow_changed=False, **changes):
    """Load the model that find_checkpoint finds, as gpt2_format.load does. Raises UserError."""
    path = find_checkpoint(path)
    stored = gpt2_format.stored_sizes(model_class, read_json(path / "config.json"))
    if not (path / "model.safetensors").is_file():
        remedy = f"GPT2LMHeadModel.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        raise UserError(f"{path}: no model.safetensors, which transformers makes: {remedy}")
    try:
        return gpt2_format.load(model_class, path, allow_changed, **changes)
    except SafetensorError as error:
        hint = "delete the folder to use the checkpoint before it"
        raise UserError(f"{path}/model.safetensors is damaged ({error}): {hint}") from None
    except ValueError as error:
        for name, value in changes.items():
            if name != "dropout" and stored.get(name, value) != value:
                raise UserError(f"--{name}={value}: {path} has {stored[name]}") from None
        raise UserError(f"{path}: {error}") from None


def build_model(model_class: type, config, data, source: Path | None):
    """A model to train: a new one, or a checkpoint's. train.py's configuration may change what does
    not change a checkpoint's logits, such as dropout or the weight of a term of the loss."""
    sizes = {field.name: getattr(config, field.name) for field in fields(model_class.config_class)}
    if source is None:
        n_tokens, multiple = data.tokenizer.n_vocab, config.vocab_multiple
        sizes["vocab_size"] = n_tokens + -n_tokens % multiple
        try:
            model = model_class(model_class.config_class(**sizes))
        except ValueError as error:  # sizes that do not go together
            raise UserError(str(error)) from None
    else:
        data.check_tokenizer(source, config.vocab_size)
        del sizes["block_size"]
        model = load_model(model_class, source, config.allow_changed_model, **sizes)
    model.restrict_to_tokens(gpt2_format.token_ids(data.tokenizer_json))
    return model.train()


def print_uninitialised(model: torch.nn.Module, optimizers: list):
    """Print which parameters init_weights does not draw, and which optimizer updates each."""
    trained_by, named = {}, dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            who = f"{type(optimizer).__name__}, weight decay {group.get('weight_decay', 0):g}"
            trained_by |= dict.fromkeys(group["params"], who)
    found = {re.sub(r"\.\d+\.", ".*.", name): named[name] for name in model.uninitialised}
    if found:
        who = [f"{name} ({trained_by.get(p, 'no optimizer')})" for name, p in found.items()]
        print("not drawn by init_weights:", ", ".join(who))


def take_sizes(config, given: dict, model_class: type, source: Path) -> int:
    """Copy the sizes of a checkpoint's model to train.py's configuration, except for those that
    flags give. Returns the model's block_size. Raises UserError for a longer --block_size."""
    stored = gpt2_format.stored_sizes(model_class, read_json(source / "config.json"))
    longest = stored["block_size"]
    if config.eval_only and config.block_size is None:
        config.block_size = longest
    if (config.block_size or 0) > longest:
        raise UserError(f"--block_size={config.block_size}: {source} has {longest}")
    for name in stored.keys() - given.keys() - {"block_size", "dropout"}:
        setattr(config, name, stored[name])
    return longest
