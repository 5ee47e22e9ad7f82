"""A model in and out of a Hugging Face GPT-2 directory. Works when copied away with model.py.

    save(model, "my-model")
    model = load(GPT, "my-model")

A model that computes what a GPT-2 computes is stored as transformers' GPT2LMHeadModel. Any other
has another model_type, so that no program takes it for a GPT-2, and 16 numbers of its logits.
Loading compares model.py's logits with these, or with those of the GPT-2 that is stored.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from textwrap import shorten

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

# GPT-2 was published with these as Conv1D, whose weight is the transpose of nn.Linear's.
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS_AND_TIED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # in files of others
# Our names in GPT-2's config.json, then the options in it that model.py computes.
HF_NAMES = {"block_size": "n_positions", "dropout": "resid_pdrop"}
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GPT2 |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
GPT2 |= {"add_cross_attention": False, "tie_word_embeddings": True}
END_OF_TEXT = "<|endoftext|>"


def gpt2_logits(tensors: dict[str, torch.Tensor], config, idx, last_only=False) -> torch.Tensor:
    """Logits (B, T, V), or (B, 1, V) after the last of the ids, of the GPT-2 with these published
    tensors (Radford et al. 2019). Raises ValueError if a GPT-2 of its sizes has other tensors."""
    tensors, C = dict(tensors), config.n_embd

    def take(name, *shape):
        tensor = tensors.pop(name, None)
        if tensor is None or tensor.shape != shape:
            raise ValueError(f"{name} is not as in a GPT-2")
        return tensor

    def linear(x, name, width):
        return x @ take(f"{name}.weight", x.size(-1), width) + take(f"{name}.bias", width)

    def norm(x, name):
        return F.layer_norm(x, (C,), take(f"{name}.weight", C), take(f"{name}.bias", C))

    wte = take("wte.weight", config.vocab_size, C)
    x = wte[idx] + take("wpe.weight", config.block_size, C)[: idx.size(1)]  # (B, T, C)
    for h in [f"h.{i}" for i in range(config.n_layer)]:
        qkv = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn", 3 * C)
        q, k, v = qkv.unflatten(-1, (3, config.n_head, -1)).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{h}.attn.c_proj", C)
        y = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc", 4 * C), approximate="tanh")
        x = x + linear(y, f"{h}.mlp.c_proj", C)
    logits = norm(x[:, -1:] if last_only else x, "ln_f") @ wte.T
    if tensors:
        raise ValueError(f"a GPT-2 has no {min(tensors)}")
    return logits


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict in the published layout, with shared tensors once, under their first names."""
    stored = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]  # which have shared ones once
    return {n: (t.T if n.endswith(CONV1D) else t).detach() for n, t in named if n in stored}


def with_zero_biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """Published tensors, and zeros for the biases that a GPT-2 has and the model lacks."""
    tensors = published_tensors(model)
    weights = {n: t for n, t in tensors.items() if re.match(r"(h\.|ln).*\.weight$", n)}
    zeros = {n.removesuffix("weight") + "bias": t.new_zeros(t.size(-1)) for n, t in weights.items()}
    return zeros | tensors


@contextlib.contextmanager
def checking(model: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """The model in eval mode and float32, and 256 ids at most (1, T), the same at every call, to
    see what it computes. Without TF32, so that devices differ by rounding only."""
    parameter, precision = next(model.parameters()), torch.get_float32_matmul_precision()
    i = torch.arange(min(256, model.config.block_size), device=parameter.device)
    idx = (31 * i * i + 7 * i + 3)[None] % model.config.vocab_size
    training = model.training
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
        yield (copy.deepcopy(model).float() if parameter.itemsize < 4 else model).eval(), idx
    torch.set_float32_matmul_precision(precision)
    model.train(training)


def means(logits: torch.Tensor) -> torch.Tensor:
    """Logits (V,) as 16 numbers, each the mean of every 16th of them."""
    logits = logits.clamp(min=-1e4).cpu()  # some models mask a token with -inf
    return torch.stack([logits[i % len(logits) :: 16].mean() for i in range(16)])


def same(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they differ by rounding only: by less than the two forms of GELU differ."""
    atol = 1e-4 * float(expected.nan_to_num(0, 0, 0).std(correction=0))
    return logits.shape == expected.shape and torch.allclose(logits, expected, 1e-5, atol)


def why_not_gpt2(model: nn.Module) -> str:
    """Why the model computes something else than the GPT-2 with its weights, or ""."""
    with checking(model) as (model, idx):
        try:
            expected = gpt2_logits(with_zero_biases(model), model.config, idx)
        except ValueError as error:
            return str(error)
        gpt2 = same(model(idx)[0], expected)
    return "" if gpt2 else "a GPT-2 with these weights has other logits"


def save(model: nn.Module, directory: str | Path, tokenizer_json: str | None = None) -> str:
    """Write config.json and model.safetensors and, given a tokenizer's JSON text, tokenizer.json
    and tokenizer_config.json. Returns why it is not a GPT-2, which config.json says too, or ""."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if reason := why_not_gpt2(model):
        config = {"model_type": "gptling", "architectures": ["GPT"], "not_gpt2": reason}
        with checking(model) as (plain, idx):
            check = means(plain(idx, last_only=True)[0][0, -1])
        tensors, metadata = published_tensors(model), {"check": json.dumps(check.tolist())}
    else:
        config = GPT2 | {"architectures": ["GPT2LMHeadModel"]}
        tensors, metadata = with_zero_biases(model), {"format": "pt"}
    tensors = {f"transformer.{n}": tensor.cpu().contiguous() for n, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata)

    special = json.loads(tokenizer_json)["added_tokens"] if tokenizer_json else []
    end_of_text = {token["content"]: token["id"] for token in special}.get(END_OF_TEXT)
    sizes = asdict(model.config)
    dropped = ("embd_pdrop", "attn_pdrop", "resid_pdrop")  # which would be 0.1 without a value
    config |= dict.fromkeys(dropped, sizes.get("dropout", 0.0))
    config |= {HF_NAMES.get(name, name): value for name, value in sizes.items()}
    config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if tokenizer_json:
        # Not GPT2Tokenizer, which would replace our split pattern by GPT-2's.
        names = ("bos_token", "eos_token", "unk_token") if end_of_text is not None else ()
        values = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict.fromkeys(names, END_OF_TEXT)
        values |= {"model_max_length": model.config.block_size}
        (directory / "tokenizer_config.json").write_text(json.dumps(values, indent=2))
        (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    return reason


class SkipInit(TorchFunctionMode):
    """Skip initialisation: weights are loaded next, and 124 M random numbers need a second."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        tensor = (kwargs or {}).get("tensor")  # the name in torch.nn.init
        return tensor if isinstance(tensor, nn.Parameter) else func(*args, **kwargs or {})


def load(model_class: type, directory: str | Path, allow_changed=False, **changes):
    """The model that `save` or GPT2LMHeadModel wrote to a directory, in eval mode and float32.

    changes: fields of its config to change, such as dropout=0.1. Prints which tensors are new, as
    in a new model, and which stored ones are not used. Raises ValueError for options or shapes that
    do not fit and, unless allow_changed, for other logits."""
    directory = Path(directory)
    stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = model_class.config_class(**stored_sizes(model_class, stored))
    with safe_open(directory / "model.safetensors", "pt") as file:
        check = json.loads((file.metadata() or {}).get("check", "[]"))
        tensors = {n.removeprefix("transformer."): file.get_tensor(n) for n in file.keys()}
    is_gpt2 = stored.get("model_type") != "gptling"
    if is_gpt2:
        tensors = {n: t.float() for n, t in tensors.items() if not n.endswith(MASKS_AND_TIED)}
        if other := {key: v for key, v in stored.items() if v != GPT2.get(key, v)}:
            raise ValueError(f"config.json has {other}, which model.py does not compute")
    with SkipInit():
        model = model_class(replace(config, **changes))
    own = published_tensors(model).keys()
    if new := own - tensors.keys():
        model = model_class(replace(config, **changes))
    state = {n: t.T if n.endswith(CONV1D) else t for n, t in tensors.items() if n in own}
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a line for each tensor
        raise ValueError(str(error).splitlines()[1].strip()) from None
    # Biases of zeros, which with_zero_biases adds, do not count.
    unused = [n for n in tensors.keys() - own if not n.endswith(".bias") or tensors[n].any()]
    lines = []
    for kind, names in {"stored tensors are not used": unused, "tensors are new": new}.items():
        patterns = ", ".join(sorted({re.sub(r"\b\d+\b", "*", name) for name in names}))
        lines += [f"{len(names)} {kind}: {shorten(patterns, 200)}"] if names else []
    with checking(model) as (_, idx):
        logits = model(idx, last_only=True)[0][0, -1]
        if logits.isnan().any():
            raise ValueError("its logits contain NaN or infinity")
        if is_gpt2:
            unchanged = same(logits, gpt2_logits(tensors, config, idx, last_only=True)[0, -1])
        else:  # without a check, as of long ago, it is known by its tensors alone
            unchanged = same(means(logits), torch.tensor(check)) if check else not lines
    lines.append(f"the logits are {'' if unchanged else 'not '}those of the checkpoint")
    if not (unchanged or allow_changed):
        reason = f"model.py computes something else than the model there did: {'; '.join(lines)}"
        raise ValueError(f"{reason}. train.py --allow_changed_model trains on from it")
    if allow_changed or lines[1:]:
        print(*(f"{directory}: {line}" for line in lines), sep="\n")
    if (tokenizer := directory / "tokenizer.json").is_file():
        model.restrict_to_tokens(token_ids(tokenizer.read_text(encoding="utf-8")))
    return model.eval()


def stored_sizes(model_class: type, stored: dict) -> dict:
    """The fields of the model's configuration that a config.json has, by our names."""
    stored = {"bias": True} | stored  # GPT-2's own does not say so
    names = {f.name: HF_NAMES.get(f.name, f.name) for f in fields(model_class.config_class)}
    return {ours: stored[theirs] for ours, theirs in names.items() if theirs in stored}


def token_ids(tokenizer_json: str) -> list[int]:
    """The ids that a tokenizer has, given its tokenizer.json as text."""
    tokenizer = json.loads(tokenizer_json)
    special = [token["id"] for token in tokenizer["added_tokens"]]
    return [*tokenizer["model"]["vocab"].values(), *special]
