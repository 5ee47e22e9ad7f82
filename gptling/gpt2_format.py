"""A model in and out of a Hugging Face GPT-2 directory. Works when copied away with model.py.

    save(model, "my-model")
    model = load(GPT, "my-model")

config.json and model.safetensors are those of transformers' GPT2LMHeadModel where the model
computes what a GPT-2 computes, which is tried at every save. Another architecture is stored in the
same files under another model_type, so that no other program takes it for a GPT-2. Some numbers of
its logits are stored too, and loading sees whether model.py still computes them.
"""

import contextlib
import copy
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

END_OF_TEXT = "<|endoftext|>"  # as in tokenizers.py: this file imports nothing of ours
# GPT-2 was published with these as Conv1D, whose weight is the transpose of nn.Linear's.
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Our names in GPT-2's config.json; then settings of it that model.py has fixed.
HF_NAMES = {"block_size": "n_positions", "dropout": "resid_pdrop"}
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GPT2 |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
GPT2 |= {"add_cross_attention": False, "tie_word_embeddings": True}
# Multiplications that it may take to see what a model computes: whole sequences of up to 150 M
# parameters at a save, 8 tokens of 124 M when loading, which takes a tenth longer for it.
AT_A_SAVE, AT_A_LOAD = 1.5e11, 1e9


class ChangedModelError(ValueError):
    """model.py computes something else than the model in a checkpoint did."""


# ---------------------------------------------------------------------------- what a GPT-2 is


def gpt2_shapes(config) -> dict[str, tuple[int, ...]]:
    """The tensors of a GPT-2 of these sizes as they were published, {name: shape}."""
    C = config.n_embd
    block = {"ln_1": (C,), "attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C)}
    block |= {"ln_2": (C,), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
    layers = {f"h.{i}.{n}": block[n] for i in range(config.n_layer) for n in block} | {"ln_f": (C,)}
    shapes = {"wte.weight": (config.vocab_size, C), "wpe.weight": (config.block_size, C)}
    shapes |= {f"{name}.weight": shape for name, shape in layers.items()}
    return shapes | {f"{name}.bias": shape[-1:] for name, shape in layers.items()}


def gpt2_logits(tensors: dict[str, torch.Tensor], config, idx: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) of the GPT-2 with these published tensors (Radford et al. 2019)."""

    def linear(x, name):
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def heads(x):
        return x.unflatten(-1, (config.n_head, -1)).transpose(1, 2)  # (B, nh, T, hs)

    x = tensors["wte.weight"][idx] + tensors["wpe.weight"][: idx.size(1)]  # (B, T, C)
    for h in [f"h.{i}" for i in range(config.n_layer)]:
        q, k, v = map(heads, linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{h}.attn.c_proj")
        y = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + linear(y, f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ tensors["wte.weight"].T


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What state_dict has in the published layout; a tensor that it has twice, as of a tied output
    layer or a shared block, once, under its first name."""
    tensors, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            tensors[name] = (tensor.T if name.endswith(CONV1D) else tensor).detach()
        seen.add(id(tensor))
    return tensors


def with_zero_biases(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published tensors, and zeros for the biases that a GPT-2 has besides."""
    shapes, like = gpt2_shapes(model.config), next(iter(tensors.values()))
    missing = [name for name in shapes if name.endswith(".bias") and name not in tensors]
    return tensors | {name: like.new_zeros(shapes[name]) for name in missing}


# ---------------------------------------------------------------------------- what a model computes


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[nn.Module]:
    """The model in eval mode and float32 without TF32: devices differ by rounding alone."""
    parameter, precision = next(model.parameters()), torch.get_float32_matmul_precision()
    training = model.training
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
            yield (copy.deepcopy(model).float() if parameter.itemsize < 4 else model).eval()
    finally:
        torch.set_float32_matmul_precision(precision)
        model.train(training)


def fixed_ids(model: nn.Module, n: int = 0, operations: float = AT_A_LOAD) -> torch.Tensor:
    """The same n ids (1, n) always, or as many of block_size as take that many multiplications."""
    size = sum(parameter.numel() for parameter in model.parameters())
    n = n or min(model.config.block_size, max(8, int(operations / size)))
    i = torch.arange(n, device=next(model.parameters()).device)
    return (31 * i * i + 7 * i + 3)[None] % model.config.vocab_size


def mean_logits(model: nn.Module, n: int = 0) -> torch.Tensor:
    """The logits behind fixed ids as 16 numbers, each the mean of every 16th of them."""
    with in_float32(model) as model:
        logits = model(fixed_ids(model, n), last_only=True)[0][0, -1]
    logits = logits.clamp(min=-1e4).cpu()  # some mask with -inf
    return torch.stack([logits[i % len(logits) :: 16].mean() for i in range(16)])


def same(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they differ by rounding alone, which makes 1e-5 of their spread; 1e-4 is allowed. The
    erf form of GELU in the place of the tanh form makes 3e-4 to 1e-3."""
    spread = expected.std(correction=0).nan_to_num(posinf=0.0)
    return torch.allclose(logits, expected, rtol=1e-5, atol=1e-4 * float(spread))


def why_not_gpt2(model: nn.Module, operations: float = AT_A_SAVE) -> tuple[str, int]:
    """Why a program that takes the model for a GPT-2 would compute something else, and how many
    tokens show it; ("", 0) if it would compute the same. Tried on block_size ids, or as many as
    take so many multiplications."""
    with in_float32(model) as model:
        shapes = gpt2_shapes(model.config)
        tensors = with_zero_biases(model, published_tensors(model))
        for name in tensors | shapes:
            if name not in tensors or tensors[name].shape != shapes.get(name):
                return f"{name} is not as in a GPT-2", 0
        idx = fixed_ids(model, operations=operations)
        logits, expected = model(idx)[0][0], gpt2_logits(tensors, model.config, idx)[0]  # (T, V)
    if same(logits, expected):
        return "", 0
    pairs, T = zip(logits, expected, strict=True), len(logits)
    n = next((n for n, pair in enumerate(pairs, start=1) if not same(*pair)), T)
    return f"a GPT-2 with these weights gives other logits, from token {n} of {T} on", n


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A hash that weights of another program, stored beside our config.json, do not have: of the
    sums over the bits of each row, which take a tenth of sha256's time over all of them."""
    integers, sha256 = (
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64},
        hashlib.sha256(),
    )
    for name, tensor in sorted(tensors.items()):
        integer = integers[tensor.itemsize]
        sums = tensor.view(integer).sum(-1, dtype=integer)  # modulo 2^bits: in any order the same
        sha256.update(f"{name} {tuple(tensor.shape)}".encode() + sums.numpy().tobytes())
    return sha256.hexdigest()[:16]


# ---------------------------------------------------------------------------- out, and in again


def save(model: nn.Module, directory: str | Path, tokenizer_json: str | None = None) -> str:
    """Write config.json and model.safetensors, and tokenizer.json with tokenizer_config.json where
    the tokenizer's JSON text is given. Returns why it is no GPT-2, which config.json says too."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors, (reason, differs_at) = published_tensors(model), why_not_gpt2(model)
    tensors = tensors if reason else with_zero_biases(model, tensors)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    # Enough tokens to tell a window of that many from another.
    n = min(model.config.block_size, max(fixed_ids(model).size(1), 2 * differs_at))
    logits = mean_logits(model, n)
    check = {"tokens": n, "logits": logits.tolist(), "weights": digest(tensors)}
    check = check if logits.isfinite().all() else None
    tensors = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    special = json.loads(tokenizer_json)["added_tokens"] if tokenizer_json else []
    end_of_text = {token["content"]: token["id"] for token in special}.get(END_OF_TEXT)
    sizes = asdict(model.config)
    config = GPT2 | {"architectures": ["GPT2LMHeadModel"]}
    if reason:
        config = {"model_type": "gptling", "architectures": ["GPT"], "not_gpt2": reason}
        config |= {"fields": list(sizes)}
    dropped = ("embd_pdrop", "attn_pdrop", "resid_pdrop")  # which without them would be 0.1
    config |= dict.fromkeys(dropped, sizes.get("dropout", 0.0))
    config |= {HF_NAMES.get(name, name): value for name, value in sizes.items()}
    config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "check": check}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if tokenizer_json is not None:
        # Not GPT2Tokenizer, which would put GPT-2's split pattern in the place of ours.
        names = ("bos_token", "eos_token", "unk_token") if end_of_text is not None else ()
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer_config |= {"model_max_length": model.config.block_size}
        tokenizer_config |= dict.fromkeys(names, END_OF_TEXT)
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
        (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    return reason


def load(model_class: type, directory: str | Path, tensors=None, allow_changed=False, **changes):
    """The model, in eval mode and float32, of a directory with config.json, model.safetensors and
    perhaps tokenizer.json, as `save` or Hugging Face's GPT2LMHeadModel write them.

    tensors: {name: tensor} in the place of model.safetensors. changes: fields of its config to
    change, such as dropout=0.1 for training on. Raises OSError; ValueError for sizes or shapes that
    do not fit, and for a tensor of a GPT-2 that is missing; its subclass ChangedModelError for
    another tensor that is missing or left over (masks that Hugging Face stores, a tied
    lm_head.weight and biases of zeros may be left over), and for other logits. With allow_changed
    no ChangedModelError: what is missing is as in a new model, and a line names it."""
    directory = Path(directory)
    stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "model.safetensors") if tensors is None else tensors
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    sizes = stored_sizes(model_class, stored)
    config = model_class.config_class(**sizes | changes)
    check_sizes(config, stored, tensors)  # before memory is taken for them
    try:
        with contextlib.nullcontext() if allow_changed else SkipInit():
            model = model_class(config)
        new, unused = model.load_state_dict(as_in_state_dict(model, tensors), strict=False)
        parts = [("it has no", new), ("model.py has no", unused)]
        difference = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        if difference and resized(sizes, changes):
            raise ValueError(difference)  # of a flag, not of another model.py
        if difference and not allow_changed:
            raise ChangedModelError(difference)
        if not allow_changed:
            check_logits(model, stored, tensors)
        elif difference:
            print(f"{directory}: {difference}")
    except RuntimeError as error:  # of load_state_dict, with all names; sizes beyond 2^63
        raise ValueError(" ".join(str(error).split())) from None
    if (directory / "tokenizer.json").is_file():
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        model.restrict_to_tokens(token_ids(text))
    return model.eval()


class SkipInit(TorchFunctionMode):
    """Leave parameters as they are: they are loaded next, and 124 M random numbers take 2 s."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        of_parameter = isinstance((kwargs or {}).get("tensor"), nn.Parameter)
        if of_parameter and getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs or {})


def stored_sizes(model_class: type, stored: dict) -> dict:
    """The fields of the model's configuration that a config.json has, by our names."""
    stored = {"bias": True} | stored  # GPT-2's own does not say so
    names = {f.name: HF_NAMES.get(f.name, f.name) for f in fields(model_class.config_class)}
    return {ours: stored[theirs] for ours, theirs in names.items() if theirs in stored}


def resized(sizes: dict, changes: dict) -> dict:
    """Those of the changes that are not as it is stored; dropout is never why loading fails."""
    return {n: v for n, v in changes.items() if n != "dropout" and sizes.get(n, v) != v}


def check_sizes(config, stored: dict, tensors: dict[str, torch.Tensor]):
    """Raises ValueError where config.json is of other tensors, or has fields that are not known."""
    if unknown := sorted(set(stored.get("fields", ())) - vars(config).keys()):
        raise ValueError(f"it has {', '.join(unknown)}, which {type(config).__name__} has not")
    if config.n_layer > max(1000, len(tensors)):  # shared blocks are stored once
        raise ValueError(f"n_layer={config.n_layer}: the weights have fewer layers")
    if "fields" in stored:  # an architecture of somebody's own, as `save` writes it
        return
    for key, value in GPT2.items():
        if stored.get(key, value) != value:
            raise ValueError(f"{key} is {stored[key]!r:.50}, in model.py {value!r}")
    for name, shape in gpt2_shapes(config).items():
        if name in tensors and tensors[name].shape != shape:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, in config.json {shape}")
        if name not in tensors and not name.endswith(".bias"):
            raise ValueError(f"{name} is missing")


def as_in_state_dict(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published tensors by the names and in the layout of the model's state_dict, without what may
    be left over. Raises ValueError for two that differ and are one in the model."""
    state, first_names = {}, {}
    names = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name in names and tensor.is_floating_point() != names[name].is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}, in model.py {names[name].dtype}")
        mask = name.endswith((".attn.bias", ".attn.masked_bias"))
        zeros = name.endswith(".bias") and not tensor.any()
        if name in names or not (mask or zeros):
            state[name] = tensor.T if name.endswith(CONV1D) else tensor
    for name, tensor in names.items():
        first = first_names.setdefault(id(tensor), name)
        if first != name and first in state:  # such as a tied lm_head.weight
            if name in state and not torch.equal(state[name], state[first]):
                raise ValueError(f"{name} is another than {first}, and in model.py they are one")
            state[name] = state[first]
    return state


def check_logits(model: nn.Module, stored: dict, tensors: dict[str, torch.Tensor]):
    """Raises ChangedModelError where the model gives other logits than that of the checkpoint did,
    or, if none are stored of these tensors, where only one of the two is a GPT-2."""
    check = stored.get("check")
    n = check["tokens"] if is_check(check, model.config.block_size) else 0
    if n and same(mean_logits(model, n), torch.tensor(check["logits"])):
        return
    reason, _ = why_not_gpt2(model, AT_A_LOAD)
    if reason and not mean_logits(model).isfinite().all():
        raise ValueError("its logits contain NaN or infinity")
    if n and check["weights"] == digest(tensors):
        raise ChangedModelError("it gives other logits than those in config.json")
    kind = stored.get("model_type", "gpt2")
    if (kind == "gpt2") == bool(reason):
        raise ChangedModelError(f"model_type is {kind!r:.50}, but {reason or 'it is a GPT-2'}")


def is_check(check, block_size: int) -> bool:
    """Whether this is what `save` writes, and no other program or hand has changed it."""
    check = check if isinstance(check, dict) else {}
    logits, tokens = check.get("logits"), check.get("tokens")
    numbers = isinstance(logits, list) and [type(x) is float and math.isfinite(x) for x in logits]
    length = type(tokens) is int and 0 < tokens <= block_size
    return numbers == [True] * 16 and length and "weights" in check


def token_ids(tokenizer_json: str) -> list[int]:
    """The ids that a tokenizer has, given its tokenizer.json as text."""
    tokenizer = json.loads(tokenizer_json)
    special = [token["id"] for token in tokenizer["added_tokens"]]
    return [*tokenizer["model"]["vocab"].values(), *special]
