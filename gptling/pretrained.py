"""Models by name: a checkpoint, a run, or a GPT-2 of the hub."""

import os
import re
from pathlib import Path

from safetensors import SafetensorError

from gptling import gpt2_format
from gptling.files import UserError
from gptling.run import best_of, list_models, list_teachers, read_metrics

HUB_NAMES = r"(openai-community/)?gpt2(-medium|-large|-xl)?|(distilbert/)?distilgpt2"


def find_checkpoint(path: str | Path = "") -> Path:
    """Return the checkpoint that `path` names: a checkpoint, a GPT-2 of the hub, or a run's best
    one. If the run was stopped, it is the last one. Without a path it is the newest run's. Raises
    UserError."""
    runs = sorted(filter(list_models, Path("out").glob("*")), key=os.path.getmtime)
    if not (path or runs):
        raise UserError("no run under out/: python train.py makes one, or name a checkpoint")
    path = Path(path or runs[-1]).expanduser()
    models = list_models(path)
    if models:
        stopped = "val_loss" not in read_metrics(models[-1])  # saved between evaluations
        is_first = not list_teachers(path)
        return models[-1] if stopped and is_first else best_of(models)
    if (path / "config.json").is_file():
        return path
    if not re.fullmatch(HUB_NAMES, path.as_posix()):
        raise UserError(
            f"{path}: no checkpoint there (a directory with a config.json). "
            f"Runs here: {', '.join(map(str, runs)) or 'none'}. "
            f'To continue a text: sample.py --prompt "{path}"'
        )
    from huggingface_hub import snapshot_download  # slow to import

    files = ["config.json", "model.safetensors", "tokenizer.json"]
    try:
        return Path(snapshot_download(path.as_posix(), allow_patterns=files))
    except Exception as error:  # no network: the hub's packages have classes of their own
        raise UserError(f"{path}: {error}") from None


def load_model(model_class: type, path: str | Path = "", allow_changed=False, **changes):
    """Load the model that find_checkpoint finds, as gpt2_format.load does. Raises UserError."""
    path = find_checkpoint(path)
    try:
        return gpt2_format.load(model_class, path, allow_changed, **changes)
    except SafetensorError as error:
        raise UserError(f"{path}/model.safetensors is damaged ({error}): delete {path}") from None
    except (OSError, ValueError) as error:
        source = path / "model.py"  # train.py keeps it in checkpoints
        hint = f" (the code that made it: {source})" if source.is_file() else ""
        raise UserError(f"{path}: {error}{hint}") from None


def build_model(model_class: type, config, data, source: Path | None):
    """Return a model to train with train.py's configuration: a new one, or a checkpoint's if there
    is a source. The configuration has its sizes. Raises UserError for sizes that do not match."""
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
        del sizes["block_size"]  # a model keeps its own if sequences are shorter
        model = load_model(model_class, source, config.allow_changed_model, **sizes)
    model.restrict_to_tokens(gpt2_format.token_ids(data.tokenizer_json))
    return model.train()
