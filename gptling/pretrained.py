"""Models by name: a checkpoint, a run, or a GPT-2 of the hub."""

import os
import re
from pathlib import Path

from safetensors import SafetensorError

from gptling import gpt2_format
from gptling.files import UserError, read_json
from gptling.run import best_checkpoint, check_files, list_checkpoints, read_metrics

HUB_NAMES = r"(openai-community/)?gpt2(-medium|-large|-xl)?|(distilbert/)?distilgpt2"


def find_checkpoint(path: str | Path = "") -> Path:
    """The checkpoint that `path` names: a checkpoint, a run's best one, its last one if the run was
    stopped, or a GPT-2 of the hub. Without a path it is the newest run. Raises UserError."""
    runs = [run for run in Path("out").glob("*") if list_checkpoints(run)]
    runs.sort(key=os.path.getmtime)
    if not (path or runs):
        raise UserError("no run under out/: python train.py makes one, or name a checkpoint")
    path = Path(path or runs[-1]).expanduser()
    checkpoints = list_checkpoints(path)
    if checkpoints:
        stopped = "val_loss" not in read_metrics(checkpoints[-1])  # not after an evaluation
        return check_files(checkpoints[-1] if stopped else best_checkpoint(path))
    if (path / "config.json").is_file():
        return path
    if not re.fullmatch(HUB_NAMES, path.as_posix()):
        names = [*map(str, runs)]
        hint = f'runs: {names}. To continue a text: sample.py --prompt "{path}"'
        raise UserError(f"{path}: no checkpoint there (a directory with a config.json). {hint}")
    from huggingface_hub import snapshot_download  # tokenizers requires it

    files = ["config.json", "model.safetensors", "tokenizer.json"]
    try:
        return Path(snapshot_download(path.as_posix(), allow_patterns=files))
    except OSError as error:  # no network
        raise UserError(f"{path}: {error}") from None


def load_model(model_class: type, path: str | Path = "", allow_changed=False, **changes):
    """Load the model that find_checkpoint finds, as gpt2_format.load does. Raises UserError."""
    path = find_checkpoint(path)
    try:
        return gpt2_format.load(model_class, path, allow_changed, **changes)
    except SafetensorError as error:
        raise UserError(f"{path}/model.safetensors is damaged ({error}): delete {path}") from None
    except (OSError, ValueError) as error:
        source = path / "model.py"  # in the checkpoints of train.py
        hint = f" (the code that made it: {source})" if source.is_file() else ""
        raise UserError(f"{path}: {error}{hint}") from None


def build_model(model_class: type, config, data, source: Path | None):
    """A model to train with train.py's configuration: a new one, or that of a checkpoint, whose
    sizes the configuration has from take_sizes."""
    sizes = {name: getattr(config, name) for name in vars(model_class.config_class())}
    if source is None:
        n_tokens = data.tokenizer.n_vocab
        sizes["vocab_size"] = n_tokens + -n_tokens % config.vocab_multiple
        try:
            model = model_class(model_class.config_class(**sizes))
        except ValueError as error:  # sizes that do not go together
            raise UserError(str(error)) from None
    else:
        data.check_tokenizer(source, config.vocab_size)
        del sizes["block_size"]  # it keeps its own, and may be trained on shorter sequences
        model = load_model(model_class, source, config.allow_changed_model, **sizes)
    model.restrict_to_tokens(gpt2_format.token_ids(data.tokenizer_json))
    return model.train()


def take_sizes(config, given: dict, model_class: type, source: Path) -> int:
    """Copy a checkpoint's sizes that no flag gives to train.py's configuration. Returns its
    block_size. Raises UserError for a size that it cannot have."""
    stored = vars(gpt2_format.stored_config(model_class, read_json(source / "config.json")))
    for name in stored.keys() - given.keys() - {"block_size", "dropout"}:
        setattr(config, name, stored[name])
    if config.eval_only and config.block_size is None:
        config.block_size = stored["block_size"]
    for name in ("block_size", "n_layer", "n_head", "n_embd"):
        value = getattr(config, name) or 0
        is_shorter = name == "block_size" and value < stored[name]  # which is allowed
        if value != stored[name] and not is_shorter:
            raise UserError(f"--{name}={value}: {source} has {stored[name]}")
    return stored["block_size"]
