"""A model in and out of a Hugging Face GPT-2 directory. Works when copied away with model.py.

    save(model, "my-model")
    model = load(GPT, "my-model")

A model that computes what a GPT-2 computes is stored as transformers' GPT2LMHeadModel. Any other
is stored with another model_type, so that no program takes it for a GPT-2, and with its logits
after fixed ids. Loading compares model.py's logits with the stored ones, or with a GPT-2's."""

import json
import re
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

# GPT-2 was published with these as Conv1D, whose weight is the transpose of nn.Linear's.
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
REDUNDANT = (".attn.bias", ".attn.masked_bias")  # masks, in other programs' files
# The names in config.json of model.py's sizes. transformers has its own defaults for missing ones.
HF_NAMES = {
    "block_size": ("n_positions", "n_ctx"),
    "dropout": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
}
GPT2 = {  # options in config.json that model.py computes
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
ENCODER_NAMES = {  # parts of a name in nn.TransformerEncoder, and GPT-2's
    r"^layers\.": "h.",
    r"\.norm1\.": ".ln_1.",
    r"\.self_attn\.in_proj_": ".attn.c_attn.",
    r"\.self_attn\.out_proj\.": ".attn.c_proj.",
    r"\.norm2\.": ".ln_2.",
    r"\.linear1\.": ".mlp.c_fc.",
    r"\.linear2\.": ".mlp.c_proj.",
    r"^norm\.": "ln_f.",
}
END_OF_TEXT = "<|endoftext|>"
Tensors = dict[str, torch.Tensor]  # a state dict
CHECK = "check.logits"  # the stored logits of a model that is no GPT-2


def swap_conv1d(tensors: Tensors) -> Tensors:
    """Return the tensors with Conv1D's transposed: in model.py's layout, or back in GPT-2's."""
    return {n: t.T if n.endswith(CONV1D) else t for n, t in tensors.items()}


def load_tensors(module: nn.Module, tensors: Tensors, assign=False):
    """Load the tensors that a module has too. Raises ValueError for another shape."""
    try:
        module.load_state_dict(tensors, strict=False, assign=assign)
    except RuntimeError as error:  # its message has a line for each tensor
        raise ValueError(str(error).splitlines()[-1].strip()) from None


def gpt2_logits(tensors: Tensors, config, idx) -> torch.Tensor:
    """Return the logits (B, V) after idx (B, T) of the GPT-2 with these published tensors (Radford
    et al. 2019). PyTorch's own layers compute them, as an answer that does not depend on model.py.
    Raises ValueError if a GPT-2 of these sizes has other tensors."""
    C = config.n_embd
    T = idx.size(1)
    gelu = partial(F.gelu, approximate="tanh")
    options = {"dropout": 0.0, "activation": gelu, "batch_first": True, "norm_first": True}
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced
        block = nn.TransformerEncoderLayer(C, config.n_head, 4 * C, **options)
        norm = nn.LayerNorm(C)
        gpt2 = nn.TransformerEncoder(block, config.n_layer, norm, enable_nested_tensor=False)
        # nn.Embedding would draw its weights, for which PyTorch imports its compiler.
        gpt2.wte = nn.Linear(C, config.vocab_size, bias=False)
        gpt2.wpe = nn.Linear(C, config.block_size, bias=False)
    names = {}  # GPT-2's names, each with PyTorch's
    for pytorchs in gpt2.state_dict():
        name = pytorchs
        for pattern, replacement in ENCODER_NAMES.items():
            name = re.sub(pattern, replacement, name)
        names[name] = pytorchs
    differing = names.keys() ^ tensors.keys()
    if differing:
        raise ValueError(f"a GPT-2 differs in {min(differing)}")
    state = {names[name]: tensor for name, tensor in swap_conv1d(tensors).items()}
    load_tensors(gpt2, state, assign=True)
    mask = nn.Transformer.generate_square_subsequent_mask(T, device=idx.device)
    x = gpt2.wte.weight[idx] + gpt2.wpe.weight[:T]  # (B, T, C)
    return gpt2.wte(gpt2(x, mask)[:, -1])


def distinct_tensors(model: nn.Module) -> Tensors:
    """Return the state dict with shared tensors once, under their first names."""
    state = model.state_dict()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: state[name] for name, _ in named if name in state}


def published_tensors(model: nn.Module) -> Tensors:
    """Return the distinct tensors in the published layout, with zeros for the biases that a GPT-2
    has and the model lacks."""
    tensors = distinct_tensors(model)
    for name, weight in [*tensors.items()]:
        if layer := re.fullmatch(r"((h|ln).*\.)weight", name):
            tensors.setdefault(f"{layer[1]}bias", weight.new_zeros(weight.shape[:1]))
    return swap_conv1d(tensors)


def nearly_equal(logits: torch.Tensor, expected: torch.Tensor, tolerance=1e-4) -> bool:
    """Return whether logits differ by rounding only: by less than a share, `tolerance`, of the
    spread of the finite ones. The two forms of GELU differ by more than 1e-4."""
    if logits.shape != expected.shape:
        return False
    spread = expected.nan_to_num(0, 0, 0).std(correction=0).item()
    return torch.allclose(logits, expected, rtol=1e-5, atol=tolerance * spread)


@torch.no_grad()
def why_not_gpt2(model, tensors: Tensors, config) -> tuple[str, torch.Tensor]:
    """Return why the model is not the GPT-2 with these published tensors, or "", and its logits
    (V,) after 256 fixed ids. They are computed in eval mode and without TF32, so that devices
    differ by rounding only."""
    training = model.training
    precision = torch.get_float32_matmul_precision()
    i = torch.arange(min(256, config.block_size), device=next(model.parameters()).device)
    idx = (31 * i * i + 7 * i + 3)[None] % config.vocab_size  # (1, T)
    model.eval()
    torch.set_float32_matmul_precision("highest")
    logits = model(idx, last_only=True)[0][0, -1]  # (V,)
    try:
        is_gpt2 = nearly_equal(logits, gpt2_logits(tensors, config, idx)[0])
        reason = "" if is_gpt2 else "a GPT-2 with these weights has other logits"
    except ValueError as error:
        reason = str(error)
    torch.set_float32_matmul_precision(precision)
    model.train(training)
    return reason, logits


def token_ids(tokenizer_json: str) -> list[int]:
    """Return the ids that a tokenizer has, given its tokenizer.json as text."""
    return list(Tokenizer.from_str(tokenizer_json).get_vocab().values())


def save(model: nn.Module, directory: str | Path, tokenizer_json: str | None = None) -> str:
    """Write a model in float32 to config.json and model.safetensors and, given its text,
    tokenizer.json. Return why the model is not a GPT-2, as config.json says too, or ""."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = published_tensors(model)
    reason, logits = why_not_gpt2(model, tensors, model.config)
    config = GPT2 | {"architectures": ["GPT2LMHeadModel"]}
    if reason:
        config = {"model_type": "gptling", "architectures": ["GPT"], "not_gpt2": reason}
        tensors[CHECK] = logits
    for name, value in asdict(model.config).items():
        config |= dict.fromkeys(HF_NAMES.get(name, [name]), value)
    end_of_text = None
    if tokenizer_json:
        end_of_text = Tokenizer.from_str(tokenizer_json).token_to_id(END_OF_TEXT)
        # GPT2Tokenizer, transformers' own choice, would split every text as GPT-2 does.
        options = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.block_size,
        }
        if end_of_text is not None:
            options |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        (directory / "tokenizer_config.json").write_text(json.dumps(options, indent=2))
        (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}

    config_file = directory / "config.json"
    config_file.write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    weights = directory / "model.safetensors"
    save_file(tensors, weights, {"format": "pt"})
    weights.chmod(config_file.stat().st_mode)  # save_file lets only its user read the file
    return reason


def stored_config(model_class: type, stored: dict):
    """Return the model's configuration from the object in a config.json."""
    sizes = {}
    for field in fields(model_class.config_class):
        name, *_ = HF_NAMES.get(field.name, [field.name])
        if name in stored:
            sizes[field.name] = stored[name]
    return model_class.config_class(**sizes)


def differing_names(model: nn.Module, tensors: Tensors) -> str:
    """Return the names of tensors that only the model or the file has, with * for each number.
    Zeros in the file do not count: they are biases that a model without them lacks."""
    own = distinct_tensors(model).keys()
    differing = [n for n in own ^ tensors.keys() if n in own or tensors[n].any()]
    return ", ".join(sorted({re.sub(r"\b\d+\b", "*", name) for name in differing}))


def tie_output_layer(tensors: Tensors):
    """Let the embeddings be the output layer too, or the other way about if only that is stored.
    Raises ValueError for two different matrices, of which model.py would compute one."""
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not torch.equal(tensors.setdefault("wte.weight", head), head):
        raise ValueError("lm_head.weight differs from wte.weight, which model.py has tied")


def load(model_class: type, directory: str | Path, allow_changed=False, **changes):
    """Return the model that `save` or GPT2LMHeadModel wrote to a directory, in eval mode and
    float32. changes: fields of its config to change, such as dropout=0.1. Prints the tensors that
    only the model or the file has. Raises ValueError for other shapes or options and, unless
    allow_changed, for other logits."""
    directory = Path(directory)
    stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "model.safetensors")
    check = tensors.pop(CHECK, None)
    if stored.get("model_type") != "gptling":
        other = {key: value for key, value in stored.items() if value != GPT2.get(key, value)}
        if other:
            raise ValueError(f"config.json has {other}, which model.py does not compute")
        tensors = {
            name.removeprefix("transformer."): tensor.float()
            for name, tensor in tensors.items()
            if not name.endswith(REDUNDANT)
        }
        tie_output_layer(tensors)
    config = stored_config(model_class, stored)
    model = model_class(replace(config, **changes))
    load_tensors(model, swap_conv1d(tensors))
    differing = differing_names(model, tensors)
    reason, logits = why_not_gpt2(model, tensors, config)
    unchanged = (reason == "") if check is None else nearly_equal(logits, check)
    said = f"tensors in only one: {differing or 'none'}; logits: {'same' if unchanged else 'other'}"
    if not unchanged and not allow_changed:
        raise ValueError(
            f"model.py does not match this checkpoint ({said}): "
            "undo your edit or flag, or continue training with train.py --allow_changed_model"
        )
    if differing or allow_changed:
        print(f"{directory}: {said}")

    tokenizer = directory / "tokenizer.json"
    if tokenizer.is_file():
        model.restrict_to_tokens(token_ids(tokenizer.read_text(encoding="utf-8")))
    return model.eval()
