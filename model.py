"""The whole GPT: attention, the Transformer block, the model, its generation and its checkpoints.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128))
    logits, loss = model(idx, targets)
    for token in model.generate(idx, max_new_tokens=100, top_k=40): ...

This file imports nothing else of the project and works when copied away alone.

Shapes: B batch, T queries (the tokens given), S keys (with those in the cache: S >= T),
C width (n_embd), nh heads, hs size of a head (C / nh), V vocabulary.

References:
- Vaswani et al. 2017, "Attention Is All You Need", https://arxiv.org/abs/1706.03762
- Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2): pre-LayerNorm,
  learned positions, residual initialisation scaled by depth; the sizes are those of its checkpoints
- Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", https://arxiv.org/abs/1606.08415
- Press and Wolf 2017, tied embeddings, https://arxiv.org/abs/1608.05859
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.autograd.function import once_differentiable

CHUNK = {"cpu": 1 << 22}  # logits in float32 at a time: what a CPU's cache takes, about
MAX_BLOCK = 1 << 14  # positions: the causal mask takes their square in bytes, 268 MB
MAX_JSON = 1 << 26  # bytes of a JSON file; a tokenizer.json has about 40 a token
END_OF_TEXT = "<|endoftext|>"
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes that weights come in
# GPT-2 was published with these as Conv1D, whose weight is the transpose of nn.Linear's.
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# GPTConfig's fields as config.json calls them; then what it may vary elsewhere, but not here.
FIELDS = {"block_size": "n_positions", "dropout": "resid_pdrop"}
FIELDS |= {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd", "bias")}
FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "n_inner": None,
}
HUB_NAMES = r"(openai-community/)?gpt2(-medium|-large|-xl)?|(distilbert/)?distilgpt2"


@dataclass
class GPTConfig:
    """The sizes of a model; the defaults are GPT-2's (124 M parameters)."""

    block_size: int = 1024  # the longest sequence, in tokens
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in the linear layers and LayerNorms; GPT-2 has them

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r:.50}: must be at least 1, a whole number")
        if self.block_size > MAX_BLOCK:
            raise ValueError(f"block_size={self.block_size}: must be at most {MAX_BLOCK:,}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")


def check_length(length: int, block_size: int):
    if length > block_size:
        raise ValueError(f"a sequence of {length} tokens is longer than block_size={block_size}")


def check_mask(padding_mask: torch.Tensor, B: int, S: int):
    if padding_mask.dtype != torch.bool:
        raise TypeError(f"padding_mask is {padding_mask.dtype}: must be bool, True = may attend")
    if padding_mask.shape != (B, S):
        raise ValueError(f"padding_mask is {tuple(padding_mask.shape)}: must be (B, S) = {(B, S)}")


class KVCache:
    """The keys and values of one attention layer for the positions seen so far.

    Memory for all `block_size` positions is taken once, so that a step copies its own keys only;
    in `dtype` where that is set, otherwise as k and v are (float32 on a CPU if they were bfloat16).
    A model of n_layer blocks takes a list of n_layer caches.
    """

    def __init__(self):
        self.k = self.v = self.dtype = None  # k, v (B, nh, block_size, hs)
        self.length = 0

    def append(self, k: torch.Tensor, v: torch.Tensor, block_size: int):
        """Store k and v (B, nh, T, hs); return all so far, two tensors (B, nh, S, hs) like them."""
        if self.k is None:
            B, nh, _, hs = k.shape
            self.k = k.new_empty(B, nh, block_size, hs, dtype=self.dtype)
            self.v = torch.empty_like(self.k)
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length].to(k.dtype), self.v[:, :, : self.length].to(v.dtype)


class MultiHeadAttention(nn.Module):
    """softmax(Q K^T / sqrt(hs)) V for n_head heads (Vaswani et al. 2017, section 3.2).

    Self-attention, or cross-attention where `context` is given; causal by default. Boolean masks
    say True = may attend. Dropout acts on the attention weights and on the output, in training.
    """

    attend = staticmethod(F.scaled_dot_product_attention)  # sample.py compiles another

    def __init__(
        self,
        d_in: int,
        d_out: int,
        block_size: int,
        n_head: int,
        *,
        causal: bool = True,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        proj_bias: bool = True,
    ):
        super().__init__()
        if d_out % n_head:
            raise ValueError(f"d_out={d_out} is not divisible by n_head={n_head}")
        self.block_size, self.n_head = block_size, n_head
        self.causal, self.dropout = causal, dropout
        self.c_attn = nn.Linear(d_in, 3 * d_out, bias=qkv_bias)  # rows: Q, then K, then V
        self.c_proj = nn.Linear(d_out, d_out, bias=proj_bias)
        mask = torch.ones(block_size, block_size, dtype=torch.bool)
        self.register_buffer("causal_mask", mask.tril() if causal else mask, persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        padding_mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """x (B, T, d_in) to (B, T, d_out), by the fused kernel.

        context (B, S, d_in): where keys and values come from; x itself if not given.
        padding_mask (B, S) bool: False hides a key. A query left without any key gets zeros.
        cache: keys and values of earlier calls, to which those of x are added; S counts both.
        Raises ValueError for a sequence longer than block_size, TypeError for a mask not bool.
        """
        q, k, v = self._project(x, context)
        dtype, long = q.dtype, cache is None and q.requires_grad and q.size(2) >= 256
        if dtype == torch.bfloat16 and q.device.type == "cpu" and not long:
            # The CPU's kernel is slow in it: 8 times for one query, 3 for the gradient of 64.
            q, k, v = q.float(), k.float(), v.float()
        past = 0
        if cache is not None:
            if context is not None:
                raise ValueError("a cache serves self-attention only: leave out cache or context")
            past = cache.length
            check_length(past + q.size(2), self.block_size)
            k, v = cache.append(k, v, self.block_size)
        options = {"dropout_p": self.dropout if self.training else 0.0}
        has_key = None
        if padding_mask is not None or (past > 0 and q.size(2) > 1):
            options["attn_mask"], has_key = self._mask(q, k, past, padding_mask)
        elif past == 0:  # is_causal aligns query 0 with key 0, right only without a past
            options["is_causal"] = self.causal  # the flash kernel
        # A single query after a past is the newest position and may attend to every key.
        if q.dtype != dtype:
            with torch.autocast("cpu", enabled=False):  # which would cast them back
                y = self.attend(q, k, v, **options).to(dtype)
        else:
            y = self.attend(q, k, v, **options)  # (B, nh, T, hs)
        if has_key is not None:
            y = y * has_key
        y = y.transpose(1, 2).flatten(2)  # (B, T, d_out): heads side by side
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def attention_weights(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """softmax(Q K^T / sqrt(hs)) written out, before dropout: (B, nh, T, S).

        Rows sum to 1; the row of a query without any key is 0. Arguments as for forward.
        """
        q, k, _ = self._project(x, context)
        mask, has_key = self._mask(q, k, 0, padding_mask)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, nh, T, S)
        return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) * has_key

    def _project(self, x, context):
        """q (B, nh, T, hs), k and v (B, nh, S, hs)."""
        check_length(x.size(1), self.block_size)
        if context is None:
            q, k, v = self.c_attn(x).chunk(3, dim=-1)  # each (B, T, d_out)
        else:
            check_length(context.size(1), self.block_size)
            d_out = self.c_proj.in_features
            weight, bias = self.c_attn.weight, self.c_attn.bias
            q_bias, kv_bias = (None, None) if bias is None else bias.split([d_out, 2 * d_out])
            q = F.linear(x, weight[:d_out], q_bias)
            k, v = F.linear(context, weight[d_out:], kv_bias).chunk(2, dim=-1)
        # Split the width into heads first, then swap: a bare view would mix positions and heads.
        return [t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v)]

    def _mask(self, q, k, past, padding_mask):
        """Which keys a query may attend to, and which queries have one: (B or 1, 1, T, S or 1).

        A query without any key is let loose on all of them, so that its softmax and gradient stay
        finite; the caller multiplies the outcome by has_key, 0 for such a query.
        """
        T, S = q.size(2), k.size(2)
        mask = self.causal_mask[None, None, past : past + T, :S]
        if padding_mask is None:
            return mask, torch.ones_like(mask[..., :1])  # key 0 is open to every query
        check_mask(padding_mask, q.size(0), S)
        mask = mask & padding_mask[:, None, None, :]  # a new tensor: the buffer stays as it is
        has_key = mask.any(dim=-1, keepdim=True)
        return mask | ~has_key, has_key


class MLP(nn.Module):
    """Two linear layers with GELU in between, in the tanh form that GPT-2 uses."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x):
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4 C)
        return F.dropout(self.c_proj(x), self.dropout, self.training)  # (B, T, C)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): pre-LayerNorm, as in GPT-2."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        C, bias = config.n_embd, config.bias
        self.ln_1 = nn.LayerNorm(C, bias=bias)
        options = {"dropout": config.dropout, "qkv_bias": bias, "proj_bias": bias}
        self.attn = MultiHeadAttention(C, C, config.block_size, config.n_head, **options)
        self.ln_2 = nn.LayerNorm(C, bias=bias)
        self.mlp = MLP(config)

    def forward(self, x, padding_mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), padding_mask=padding_mask, cache=cache)
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """Under autocast too: a sum over V exponentials needs the digits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class CrossEntropy(torch.autograd.Function):
    """The sum of -log softmax(x weight^T)[target], in nats, of all targets that are not -100.

    apply(x, weight, targets, need_gradient): x (N, C) hidden states, weight (V, C) of the output
    layer, targets (N,); need_gradient as torch.is_grad_enabled() has it outside. The gradient of
    the logits is softmax - one-hot, at hand as soon as the loss is, and takes their place (Hsu et
    al. 2024, https://arxiv.org/abs/2410.10989): memory holds (N, V) numbers once, in the dtype of
    products, and a few rows of them in float32. One backward pass only.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, need_gradient):
        device, dtype, loss = x.device.type, x.dtype, 0.0
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        low_x, low_weight = x.to(dtype), weight.to(dtype)
        logits = low_x @ low_weight.T  # (N, V)
        rows = max(1, CHUNK.get(device, 1 << 27) // len(weight))  # 512 MB of them on a GPU
        for part, target in zip(logits.split(rows), targets[:, None].split(rows), strict=True):
            counts = target != -100  # (rows, 1), as are target, own and sums
            target = target.masked_fill(~counts, 0)
            scores = at_least_float32(part)  # (rows, V)
            scores = scores - scores.amax(dim=1, keepdim=True)  # so that no exponential overflows
            own = scores.gather(1, target)
            sums = scores.exp_().sum(dim=1, keepdim=True)
            loss += (sums.log() - own).masked_fill(~counts, 0).sum()
            if need_gradient:
                scores *= counts / sums  # softmax
                part.copy_(scores.scatter_add_(1, target, -counts.to(scores.dtype)))
        if need_gradient:
            # float16 ends at 65,504, and a sum over N rows may not: GradScaler comes too late.
            ctx.divisor = 256 if dtype == torch.float16 else 1
            sum_of_rows = logits.T @ (low_x / ctx.divisor)
            ctx.save_for_backward((logits @ low_weight).to(x.dtype), sum_of_rows.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        of_x, of_weight = ctx.saved_tensors
        return of_x.mul_(gradient), of_weight.mul_(gradient * ctx.divisor), None, None


def next_token_probs(
    logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> torch.Tensor:
    """Logits (B, V) to the probabilities (B, V) that the next token is drawn from.

    temperature divides the logits, 0 is greedy. Then only these stay: the top_k likeliest (0: all);
    of what is left the fewest likeliest that reach top_p in sum (Holtzman et al. 2019,
    https://arxiv.org/abs/1904.09751); of those the ones with at least min_p of the likeliest's
    probability (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082). The likeliest always stays.
    """
    for name, value, allowed, rule in (
        ("temperature", temperature, 0 <= temperature < math.inf, "at least 0 (0 is greedy)"),
        ("top_k", top_k, top_k >= 0, "at least 0 (0 keeps all)"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("min_p", min_p, 0 <= min_p <= 1, "from 0 to 1"),
    ):
        if not allowed:
            raise ValueError(f"{name}={value}: must be {rule}")
    if temperature == 0:
        best = F.one_hot(logits.argmax(dim=-1), logits.size(-1))
        return best + 0 * logits.amax(dim=-1, keepdim=True)  # NaN where they are not numbers
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, 1e-30)  # at most 0
    if 0 < top_k < logits.size(-1):
        drop = logits < logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(drop, float("-inf"))
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        drop = probs.cumsum(dim=-1) - probs >= max(top_p, 1e-30)  # the likelier ones suffice
        logits = logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    if min_p > 0:
        logits = logits.masked_fill(logits < math.log(min_p), float("-inf"))  # the best has 0
    return logits.softmax(dim=-1)


def draw(probs: torch.Tensor, generator=None) -> torch.Tensor:
    """One token id a row, (B,) int64, of probabilities (B, V), by inverting their sums.

    generator: one for all rows, or a list with one a row. torch.multinomial would draw a random
    number for every token of the vocabulary. Raises ValueError for probabilities that are NaN."""
    device = probs.device
    probs = probs.cpu() if device.type == "mps" else probs  # which has no float64
    sums = probs.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    if isinstance(generator, Sequence):
        assert len(generator) == len(probs), f"{len(generator)} generators, {len(probs)} rows"
        u = torch.cat([torch.rand(1, 1, generator=g, device=device) for g in generator])
    else:
        u = torch.rand(len(probs), 1, generator=generator, device=device)  # (B, 1), below 1
    # The first sum above u times the last: never that of a token with probability 0.
    token = torch.searchsorted(sums, u.to(sums.device) * sums[:, -1:], right=True)[:, 0]
    if int(token.max()) == probs.size(-1):
        raise ValueError("the model's logits are not numbers")
    return token.to(device)


def newest_half(idx, mask, block_size):
    """Cut the rows that have outgrown the window, idx and mask (B, block_size + 1), to their newest
    half, and drop the columns that are padding in every row."""
    keep = max(1, block_size // 2)
    if mask is None:
        return idx[:, -keep:], None
    too_long = mask.sum(dim=1, keepdim=True) > block_size  # (B, 1)
    older = torch.arange(idx.size(1), device=idx.device) < idx.size(1) - keep  # (S,)
    mask = mask & ~(too_long & older)
    start = int(mask.any(dim=0).int().argmax())  # the first column with a token
    return idx[:, start:], mask[:, start:]


def checkpoint_directory(path: str | Path) -> Path:
    """`path`, a directory with a config.json, or where the hub's GPT-2 of that name was downloaded.

    Raises FileNotFoundError where there is no checkpoint."""
    path = Path(path)
    name = path.as_posix()
    if re.fullmatch(HUB_NAMES, name) and not path.exists():
        remedy = (
            "put config.json, model.safetensors and tokenizer.json of "
            f"https://huggingface.co/{name} into a directory {name}"
        )
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            missing = "to download it pip install huggingface_hub, or"
            raise FileNotFoundError(f"{name}: {missing} {remedy}") from None
        files = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
        files += ["tokenizer.json", "vocab.json", "merges.txt"]
        try:
            path = Path(snapshot_download(name, allow_patterns=files))
        except OSError as error:  # no network, or no such files
            reason = f"cannot be downloaded ({type(error).__name__})"
            raise FileNotFoundError(f"{name}: {reason}; {remedy}") from None
    if not os.path.isfile(path / "config.json"):  # False for a name that is too long, too
        raise FileNotFoundError(f"{path}: no checkpoint there (a directory with a config.json)")
    return path


def read_text(file: Path) -> str:
    """The text of a JSON file. Raises OSError, or ValueError for one that is too large."""
    if file.stat().st_size > MAX_JSON:
        raise ValueError(f"{file} has more than {MAX_JSON} bytes")
    return file.read_text(encoding="utf-8")


def read_config(file: Path) -> dict:
    """GPTConfig's fields from a config.json. Raises OSError, or ValueError for another's."""
    try:
        config = json.loads(read_text(file))
        for key, value in FIXED.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} is {config[key]!r:.50}, this model has {value!r} only")
        fields = {ours: config[hf] for ours, hf in FIELDS.items() if hf in config}
        GPTConfig(**fields)
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not of a GPT-2: {error}") from None
    return fields


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: model.safetensors, or those that its index names.

    Raises FileNotFoundError for one that is not there, ValueError for a damaged index."""
    index, names = path / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file() and not (path / names[0]).is_file():
        try:
            names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("a file outside the directory")
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{index} is damaged: {error!r:.200}") from None
    for name in names:
        if (path / name).is_file():
            continue
        if (path / "pytorch_model.bin").is_file():
            load = f"transformers.GPT2LMHeadModel.from_pretrained({str(path)!r})"
            raise FileNotFoundError(
                f"{path}: pytorch_model.bin is a pickle, which can run code, and is not opened; "
                f"where you trust it: {load}.save_pretrained({str(path)!r})"
            )
        raise FileNotFoundError(f"{path}: no {name} in it")
    return [path / name for name in names]


def open_weights(path: Path) -> dict:
    """{name: slice} of the tensors in a directory's safetensors: get_shape() gives the shape, [:]
    reads the numbers. Raises FileNotFoundError, or ValueError for a damaged file."""
    stored = {}
    for file in weight_files(path):
        try:
            tensors = safe_open(file, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:  # torch's, where it maps the file
            raise ValueError(f"{file} is damaged: {error}") from None
        for key in tensors.keys():
            name = key.removeprefix("transformer.")
            if name in stored:
                raise ValueError(f"{file}: {name:.50} is stored twice")
            if tensors.get_slice(key).get_dtype() in FLOATS:
                stored[name] = tensors.get_slice(key)
    return stored


def pick_device(device: str) -> str:
    """`auto` to cuda, mps or cpu. Raises ValueError for a device that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return next((name for name in there if there[name]), "cpu")
    if not there.get(device, True):
        raise ValueError(f"PyTorch finds no {device} here; leave it at auto")
    return device


def pick_dtype(dtype: str, device: str, wide: bool) -> str:
    """`auto` to the fastest dtype for matrix products, "float32", "bfloat16" or "float16".

    bfloat16 has float32's range; float16 has not, and trains with a GradScaler. On a CPU bfloat16
    pays where the processor has instructions for it, and the model is `wide`.
    """
    if dtype != "auto":
        return dtype
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if native else "float16"
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if device == "cpu" and native and wide else "float32"


class GPT(nn.Module):
    """GPT-2's architecture; parameters carry the names of the published checkpoints."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.init_masks()
        self.init_weights()

    def init_masks(self):
        """One causal mask for all layers, instead of block_size^2 bytes for each; and which ids may
        be drawn: not those that only pad the vocabulary (see restrict_to_tokens)."""
        T = self.config.block_size
        causal_mask = torch.ones(T, T, dtype=torch.bool).tril_()
        for block in self.h:
            block.attn.causal_mask = causal_mask
        drawable = torch.ones(self.config.vocab_size, dtype=torch.bool)
        self.register_buffer("drawable", drawable, persistent=False)

    def init_weights(self):
        """N(0, 0.02), biases 0, and the layers that write into the residual stream scaled by
        1 / sqrt(2 n_layer), so that its variance does not grow with depth (GPT-2, section 2.3).
        GPT-2's 0.02 is for a width of 768; at others linear layers keep its gain: 1 / sqrt(C)."""
        C, V = self.config.n_embd, self.config.vocab_size
        gain = math.sqrt(768 / C)
        # Logits start with variance C std^2, and half of that is the loss above ln(V): under 1.5 %.
        embedding_std = min(0.02, math.sqrt(0.03 * math.log(V) / C))
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=embedding_std)
            if isinstance(module, nn.Linear):
                depth = 2 * self.config.n_layer if name.endswith("c_proj") else 1
                nn.init.normal_(module.weight, mean=0.0, std=0.02 * gain / math.sqrt(depth))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def num_parameters(self) -> int:
        """How many parameters there are; the output layer is the embedding and counts once."""
        return sum(p.numel() for p in self.parameters())

    def hidden(self, idx, padding_mask=None, cache=None):
        """The final LayerNorm's output (B, T, C); arguments as for forward."""
        past = cache[0].length if cache else 0
        S = past + idx.size(1)
        check_length(S, self.config.block_size)
        if padding_mask is None:
            positions = torch.arange(past, S, device=idx.device)  # (T,)
        else:
            check_mask(padding_mask, idx.size(0), S)
            # A sequence's first real token has position 0, however much padding precedes it
            positions = (padding_mask.cumsum(dim=1) - 1).clamp(min=0)[:, past:]  # (B, T)
        x = self.wte(idx) + self.wpe(positions)  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.h):
            x = block(x, padding_mask, cache[i] if cache else None)
        return self.ln_f(x)

    def lm_head(self, x):
        """Logits (..., V) of hidden states (..., C): the output layer is the token embedding."""
        return F.linear(x, self.wte.weight)

    def forward(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        padding_mask: torch.Tensor | None = None,
        cache: list[KVCache] | None = None,
        need_logits: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logits (B, T, V) and, with targets, the mean cross-entropy in nats per token.

        idx (B, T) int64; targets (B, T), the token after each, -100 where none counts.
        padding_mask (B, S) bool, False for padding; cache: a KVCache for each block, within S.
        need_logits=False: with targets, None in the place of logits, for training and evaluation in
        less memory (see CrossEntropy); it takes the output layer's weight, not lm_head.
        Raises ValueError for more than block_size tokens, IndexError for an id of idx outside V.
        """
        x = self.hidden(idx, padding_mask, cache)
        if targets is not None and not need_logits:
            total = CrossEntropy.apply(
                x.flatten(0, 1), self.wte.weight, targets.flatten(), torch.is_grad_enabled()
            )
            return None, total / (targets != -100).sum()
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        rows = at_least_float32(logits.flatten(0, 1))
        return logits, F.cross_entropy(rows, targets.flatten(), ignore_index=-100)

    def next_logits(self, idx, padding_mask=None, cache=None):
        """Logits (B, V) in float32 for the token after each row; arguments as for forward."""
        return self.lm_head(self.hidden(idx, padding_mask, cache)[:, -1]).float()

    @torch.no_grad()
    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        padding_mask: torch.Tensor | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield the next token of every row, (B,) int64, max_new_tokens times. Call eval() before.

        idx (B, T), T >= 1, of which the newest block_size count; prompts of unequal length are
        padded on the left and padding_mask (B, T) is False there: each row gives what it gives
        alone. generator: one for all rows, or a list with one a row. Filters: see next_token_probs.

        A row of more than block_size tokens goes on from its newest block_size / 2, and the cache
        is built anew: once in block_size / 2 tokens instead of at every one.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 0")
        if idx.size(1) == 0:
            raise ValueError("idx has no tokens: start from end-of-text or a newline")
        block_size = self.config.block_size
        idx = idx[:, -block_size:]
        mask = None if padding_mask is None else padding_mask[:, -block_size:]
        padding = ~self.drawable  # ids without a token
        new, cache = idx, [KVCache() for _ in self.h]
        for _ in range(max_new_tokens):
            logits = self.next_logits(new, mask, cache).masked_fill(padding, float("-inf"))
            token = draw(next_token_probs(logits, temperature, top_k, top_p, min_p), generator)
            yield token
            new = token[:, None]
            idx = torch.cat([idx, new], dim=1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(new, dtype=torch.bool)], dim=1)
            if idx.size(1) > block_size:
                idx, mask = newest_half(idx, mask, block_size)
                new, cache = idx, [KVCache() for _ in self.h]

    def restrict_to_tokens(self, tokenizer_json: str):
        """Let generate draw only the ids that a tokenizer has, given its tokenizer.json as text.

        Raises ValueError where that is damaged, or has no id of the model's."""
        try:
            tokenizer = json.loads(tokenizer_json)
            ids = [*tokenizer["model"]["vocab"].values()]
            ids += [token["id"] for token in tokenizer["added_tokens"]]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"tokenizer.json is damaged: {error!r:.200}") from None
        ids = [i for i in ids if type(i) is int and 0 <= i < self.config.vocab_size]
        if not ids:
            raise ValueError("tokenizer.json has no token for the ids of the model")
        self.drawable.fill_(False)
        self.drawable[ids] = True

    def crop_block_size(self, block_size: int):
        """Forget the positions from block_size on, for training on with a shorter window.

        Raises ValueError for more positions than there are."""
        limit = self.config.block_size
        if not 1 <= block_size <= limit:
            raise ValueError(f"block_size={block_size}: the model has {limit} positions")
        self.config.block_size = self.wpe.num_embeddings = block_size
        self.wpe.weight = nn.Parameter(self.wpe.weight[:block_size].detach().clone())
        mask = self.h[0].attn.causal_mask[:block_size, :block_size].clone()
        for block in self.h:
            block.attn.block_size, block.attn.causal_mask = block_size, mask

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dropout: float | None = None) -> "GPT":
        """The model, in eval mode and float32, of a directory with config.json and
        model.safetensors, whole or in shards, as Hugging Face's GPT2LMHeadModel or save_pretrained
        writes them; or of the hub name of a GPT-2. dropout: for training on, in place of its own.
        Raises OSError, or ValueError for another architecture or a damaged file: sizes in
        config.json are those of the files before memory is taken, and no code is executed."""
        path = checkpoint_directory(path)
        fields, stored = read_config(path / "config.json"), open_weights(path)
        if dropout is not None:
            fields["dropout"] = dropout
        # Another program may have trained biases that this file's config.json says are not there.
        biases = (t for name, t in stored.items() if name.endswith(".bias"))
        biases = (t[:] for t in biases if len(t.get_shape()) == 1)
        fields["bias"] = fields.get("bias", True) or any(t.any() for t in biases)
        config = GPTConfig(**fields)

        def check(name, *shape):
            if name not in stored or stored[name].get_shape() != [*shape]:
                raise ValueError(f"{path}: {name} in the weights has not the size in config.json")

        # The files' bytes bound these, and these all others.
        check("wte.weight", config.vocab_size, config.n_embd)
        check("wpe.weight", config.block_size, config.n_embd)
        check("h.0.mlp.c_fc.weight", config.n_embd, 4 * config.n_embd)
        if config.n_layer > len(stored):
            raise ValueError(f"{path}: the weights have fewer than n_layer={config.n_layer} layers")
        with torch.device("meta"):
            model = cls(config)  # shapes without memory
        weights = {}
        for name, parameter in model.named_parameters():
            turned = name.endswith(CONV1D)
            check(name, *(reversed(parameter.shape) if turned else parameter.shape))
            tensor = stored[name][:].T if turned else stored[name][:]
            weights[name] = torch.empty(parameter.shape).copy_(tensor)
            if not math.isfinite(weights[name].sum()):
                raise ValueError(f"{path}: {name} in the weights has NaN or infinite numbers")
        model.load_state_dict(weights, assign=True)
        model.init_masks()
        if (path / "tokenizer.json").is_file():
            model.restrict_to_tokens(read_text(path / "tokenizer.json"))
        return model.eval()

    def save_pretrained(self, path: str | Path, tokenizer_json: str | None = None):
        """Write config.json and model.safetensors as Hugging Face's GPT2LMHeadModel has them, and
        tokenizer.json with tokenizer_config.json where the tokenizer's JSON text is given."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, parameter in self.named_parameters():
            tensor = parameter.detach().cpu()
            if not self.config.bias and not name.startswith(("wte", "wpe")):
                zeros = tensor.new_zeros(tensor.size(0))  # GPT-2 has biases: of zeros
                tensors[f"transformer.{name.removesuffix('weight')}bias"] = zeros
            tensor = tensor.T if name.endswith(CONV1D) else tensor
            tensors[f"transformer.{name}"] = tensor.contiguous()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

        added = json.loads(tokenizer_json)["added_tokens"] if tokenizer_json else []
        end_of_text = {token["content"]: token["id"] for token in added}.get(END_OF_TEXT)
        config = {"architectures": ["GPT2LMHeadModel"], **FIXED}
        config |= {hf: getattr(self.config, ours) for ours, hf in FIELDS.items()}
        config |= {"embd_pdrop": self.config.dropout, "attn_pdrop": self.config.dropout}
        config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        config |= {"dtype": str(self.wte.weight.dtype).removeprefix("torch.")}
        files = {"config.json": json.dumps(config, indent=2)}
        if tokenizer_json is not None:
            # Not GPT2Tokenizer, which would put GPT-2's split pattern in the place of ours.
            tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
            tokenizer_config |= {"model_max_length": self.config.block_size}
            if end_of_text is not None:
                names = ["bos_token", "eos_token", "unk_token"]
                tokenizer_config |= dict.fromkeys(names, END_OF_TEXT)
            files |= {"tokenizer_config.json": json.dumps(tokenizer_config, indent=2)}
            files |= {"tokenizer.json": tokenizer_json}
        for name, text in files.items():
            (path / name).write_text(text, encoding="utf-8")
