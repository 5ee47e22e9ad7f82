"""A model in and out of a Hugging Face GPT-2 directory. Works when copied away with model.py.

    save(model, "my-model")
    model = load(GPT, "my-model")

A model that computes what a GPT-2 computes is stored as transformers' GPT2LMHeadModel. Any other
has another model_type, so that no program takes it for a GPT-2, and 16 numbers of its logits.
Loading compares model.py's logits with these, or with those of the GPT-2 that is stored."""

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

# GPT-2 was published with these as Conv1D, whose weight is the transpose of nn.Linear's.
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # in files of others
# Our names in GPT-2's config.json, then the options in it that model.py computes.
HF_NAMES = {"block_size": "n_positions", "dropout": "resid_pdrop"}
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GPT2 |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
GPT2 |= {"add_cross_attention": False, "tie_word_embeddings": True}
END_OF_TEXT = "<|endoftext|>"


def gpt2_logits(tensors: dict[str, torch.Tensor], config, idx, last_only=False) -> torch.Tensor:
    """Logits (B, T or 1, V) of the GPT-2 with these published tensors (Radford et al. 2019). Raises
    ValueError if a GPT-2 of its sizes has other tensors."""
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


def published_tensors(model: nn.Module, all_biases=False) -> dict[str, torch.Tensor]:
    """The state dict in the published layout, with shared tensors once, under their first names.
    all_biases: with zeros for the biases that a GPT-2 has and the model lacks."""
    stored = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]  # which have shared ones once
    tensors = {n: (t.T if n.endswith(CONV1D) else t).detach() for n, t in named if n in stored}
    weights = {n: t for n, t in tensors.items() if re.match(r"(h\.|ln).*\.weight$", n)}
    zeros = {n[:-6] + "bias": t.new_zeros(t.size(-1)) for n, t in weights.items()}
    return zeros | tensors if all_biases else tensors


def means(logits: torch.Tensor) -> torch.Tensor:
    """Logits (V,) as 16 numbers, each the mean of every 16th of them."""
    logits = logits.clamp(min=-1e4).cpu()  # some models mask a token with -inf
    return torch.stack([logits[i % len(logits) :: 16].mean() for i in range(16)])


def same(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they differ by rounding only: by less than the two forms of GELU differ."""
    atol = 1e-4 * float(expected.nan_to_num(0, 0, 0).std(correction=0))
    return logits.shape == expected.shape and torch.allclose(logits, expected, 1e-5, atol)


@torch.no_grad()
def why_not_gpt2(model, tensors: dict, config, last_only=False) -> tuple[str, torch.Tensor]:
    """Why the model is not the GPT-2 with these published tensors, or "", and its logits (V,) after
    256 fixed ids, in eval mode and without TF32, so that devices differ by rounding only."""
    training, precision = model.training, torch.get_float32_matmul_precision()
    i = torch.arange(min(256, config.block_size), device=next(model.parameters()).device)
    idx = (31 * i * i + 7 * i + 3)[None] % config.vocab_size  # (1, T)
    torch.set_float32_matmul_precision("highest")
    with torch.autocast(idx.device.type, enabled=False):
        logits = model.eval()(idx, last_only=last_only)[0]
        try:
            gpt2 = same(logits, gpt2_logits(tensors, config, idx, last_only))
            reason = "" if gpt2 else "a GPT-2 with these weights has other logits"
        except ValueError as error:
            reason = str(error)
    torch.set_float32_matmul_precision(precision)
    model.train(training)
    return reason, logits[0, -1]


def token_ids(tokenizer_json: str) -> list[int]:
    """The ids that a tokenizer has, given its tokenizer.json as text."""
    tokenizer = json.loads(tokenizer_json)
    return [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]


def save(model: nn.Module, directory: str | Path, tokenizer_json: str | None = None) -> str:
    """Write a model in float32 to config.json and model.safetensors and, given its text,
    tokenizer.json. Returns why it is not a GPT-2, which config.json says too, or ""."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    tensors, metadata = published_tensors(model, all_biases=True), {"format": "pt"}
    config = GPT2 | {"architectures": ["GPT2LMHeadModel"]}
    reason, logits = why_not_gpt2(model, tensors, model.config)
    if reason:
        tensors, metadata = published_tensors(model), {"check": json.dumps(means(logits).tolist())}
        config = {"model_type": "gptling", "architectures": ["GPT"], "not_gpt2": reason}
    prefix = "transformer." if reason else ""  # a GPT-2's names were published without
    tensors = {prefix + n: tensor.cpu().contiguous() for n, tensor in tensors.items()}
    weights = Path(directory, "model.safetensors")
    save_file(tensors, weights, metadata)

    # What config.json does not say has transformers' default: 0.1, and 50256 for end-of-text.
    special = json.loads(tokenizer_json)["added_tokens"] if tokenizer_json else []
    end_of_text = {token["content"]: token["id"] for token in special}.get(END_OF_TEXT)
    sizes = {"dropout": 0.0} | asdict(model.config)
    config |= dict.fromkeys(("embd_pdrop", "attn_pdrop"), sizes["dropout"])
    config |= {HF_NAMES.get(name, name): value for name, value in sizes.items()}
    config["n_ctx"] = sizes["block_size"]  # its second name in GPT-2, which mlx-lm needs
    config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    Path(directory, "config.json").write_text(json.dumps(config, indent=2))
    weights.chmod(Path(directory, "config.json").stat().st_mode)  # the umask's, not save_file's
    if tokenizer_json:
        names = ("bos_token", "eos_token", "unk_token") if end_of_text is not None else ()
        values = dict.fromkeys(names, END_OF_TEXT) | {"model_max_length": sizes["block_size"]}
        values["tokenizer_class"] = "PreTrainedTokenizerFast"  # GPT2Tokenizer splits text as GPT-2
        Path(directory, "tokenizer_config.json").write_text(json.dumps(values, indent=2))
        Path(directory, "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    return reason


def stored_config(model_class: type, stored: dict):
    """The model's configuration, of an object in a config.json."""
    names = {f.name: HF_NAMES.get(f.name, f.name) for f in fields(model_class.config_class)}
    sizes = {ours: stored[theirs] for ours, theirs in names.items() if theirs in stored}
    return model_class.config_class(**sizes)


def load(model_class: type, directory: str | Path, allow_changed=False, **changes):
    """The model that `save` or GPT2LMHeadModel wrote to a directory, in eval mode and float32.
    changes: fields of its config to change, such as dropout=0.1. Prints the tensors that only the
    model or the file has. Raises ValueError for other shapes or options and, unless allow_changed,
    for other logits."""
    stored = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    is_gpt2, config = stored.get("model_type") != "gptling", stored_config(model_class, stored)
    if other := {key: v for key, v in stored.items() if is_gpt2 and v != GPT2.get(key, v)}:
        raise ValueError(f"config.json has {other}, which model.py does not compute")
    with safe_open(Path(directory, "model.safetensors"), "pt") as file:
        check = json.loads((file.metadata() or {}).get("check", "[]"))
        tensors = {n.removeprefix("transformer."): file.get_tensor(n) for n in file.keys()}
    if is_gpt2:
        tensors = {n: t.float() for n, t in tensors.items() if not n.endswith(MASKS)}
        head = tensors.pop("lm_head.weight", None)  # the same matrix
        if head is not None and not torch.equal(head, tensors.setdefault("wte.weight", head)):
            raise ValueError("lm_head.weight and wte.weight differ: model.py has one for both")
    model = model_class(replace(config, **changes))
    own = published_tensors(model).keys()
    state = {n: t.T if n.endswith(CONV1D) else t for n, t in tensors.items() if n in own}
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a line for each tensor
        raise ValueError(str(error).splitlines()[-1].strip()) from None

    differing = [n for n in own ^ tensors.keys() if n in own or tensors[n].any()]  # but zeros
    names = ", ".join(sorted({re.sub(r"\b\d+\b", "*", name) for name in differing}))
    reason, logits = why_not_gpt2(model, tensors, config, last_only=True)
    unchanged = not reason
    if not is_gpt2:  # without a check, if others have written the file, its tensors have to fit
        unchanged = same(means(logits), torch.tensor(check)) if check else not names
    said = f"tensors in only one: {names or 'none'}; logits: {'same' if unchanged else 'other'}"
    if not (unchanged or allow_changed):
        remedy = "train.py --allow_changed_model trains on from it"
        raise ValueError(f"model.py computes something else than that model ({said}): {remedy}")
    if allow_changed or names:
        print(f"{directory}: {said}")
    if (tokenizer := Path(directory, "tokenizer.json")).is_file():
        model.restrict_to_tokens(token_ids(tokenizer.read_text(encoding="utf-8")))
    return model.eval()
