"""The whole GPT: attention, blocks, sampling. It works when copied away alone.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128))
    logits, loss = model(idx, targets)
    for token in model.generate(idx, max_new_tokens=100, top_k=40): ...

Sizes: B sequences in a batch, T tokens in each (the queries), S keys (T, and those in the cache),
C numbers for a token (n_embd), nh heads, hs = C / nh, V tokens in the vocabulary, N = B T.

References:
- Vaswani et al. 2017, "Attention Is All You Need", https://arxiv.org/abs/1706.03762
- Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2): pre-LayerNorm,
  learned positions, residual initialisation scaled by depth, and the sizes of its checkpoints
- Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", https://arxiv.org/abs/1606.08415
- Press and Wolf 2017, tied embeddings, https://arxiv.org/abs/1608.05859
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


def require(condition: bool, message: str):
    if not condition:
        raise ValueError(message)


@dataclass
class GPTConfig:
    """The sizes of a model, by default GPT-2's (124 M parameters). All but vocab_size are flags."""

    block_size: int = 1024  # the longest sequence that the model sees at once, in tokens
    vocab_size: int = 50257
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads in each block
    n_embd: int = 768  # width
    dropout: float = 0.0  # share of activations set to 0 in training, 0.1 to 0.2 for little data
    bias: bool = True  # in linear layers and LayerNorms, as in GPT-2

    def __post_init__(self):
        divides = self.n_embd % self.n_head == 0
        require(divides, f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")


def hide_padding(mask, padding_mask):
    """Hide the keys where padding_mask (B, S) is False. Return the mask, and has_key (..., T, 1):
    whether a query may still attend to a key. If not, its softmax would be NaN, so the mask lets it
    attend to all keys, and the caller multiplies its result by has_key, which is 0."""
    hidden = False if mask.dtype == torch.bool else -math.inf
    if padding_mask is not None:
        mask = mask.masked_fill(~padding_mask[:, None, None, :], hidden)
    has_key = (mask != hidden).any(dim=-1, keepdim=True)
    return mask.masked_fill(~has_key, 1), has_key


def check_length(length: int, block_size: int):
    if length > block_size:  # require's message would make torch.compile compile each length
        raise ValueError(f"a sequence of {length} tokens is longer than block_size={block_size}")


class MultiHeadAttention(nn.Module):
    """softmax(Q K^T / sqrt(hs)) V for n_head heads (Vaswani et al. 2017, section 3.2).

    Self-attention, or cross-attention if `context` is given. Both are causal by default.
    Boolean masks say True = may attend. In training there is dropout of weights and output."""

    def __init__(
        self, d_in, d_out, block_size, n_head, *, causal=True, dropout=0.0, qkv_bias=False,
        proj_bias=True,
    ):  # fmt: skip
        super().__init__()
        require(d_out % n_head == 0, f"d_out={d_out} is not divisible by n_head={n_head}")
        self.block_size = block_size
        self.n_head = n_head
        self.causal = causal
        self.dropout = dropout
        self.c_attn = nn.Linear(d_in, 3 * d_out, bias=qkv_bias)  # rows: Q, then K, then V
        self.c_attn.weight.matrices = [d_out, d_out, d_out]  # Muon updates each alone
        # copy.deepcopy, AveragedModel and load_state_dict(assign=True) lose `matrices`.
        self.c_proj = nn.Linear(d_out, d_out, bias=proj_bias)
        mask = torch.ones(block_size, block_size, dtype=torch.bool)  # row: query, column: key
        self.register_buffer("causal_mask", mask.tril() if causal else mask, persistent=False)

    def forward(self, x, context=None, *, padding_mask=None, cache=None):
        """x (B, T, d_in) to (B, T, d_out). Raises ValueError for more than block_size tokens.

        context (B, S, d_in): where keys and values come from. x itself if not given.
        padding_mask (B, S) bool: False hides a key. A query without any key gets c_proj's bias.
        cache: earlier calls' keys and values, which come before x's in S. Not with context."""
        past = 0 if cache is None else cache.length  # number of earlier keys
        q, k, v = self.project(x, context, past)  # (B, nh, T, hs); a context's k, v (B, nh, S, hs)
        if cache is not None:
            k, v = cache.append(k, v, self.block_size)  # (B, nh, S, hs)
        options, has_key = self.mask_options(q, k, past, padding_mask)
        dropout_p = self.dropout if self.training else 0.0
        y = self.attend(q, k, v, **options, dropout_p=dropout_p)  # (B, nh, T, hs)
        if has_key is not None:
            y = y * has_key
        y = y.transpose(1, 2).flatten(2)  # (B, T, d_out): heads side by side
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def project(self, x, context=None, past=0):
        """Return q, k and v (B, nh, T, hs), or k and v (B, nh, S, hs) of a context. past: how many
        keys are earlier than x's."""
        check_length(past + x.size(1), self.block_size)
        q, k, v = self.c_attn(x).chunk(3, dim=-1)  # each (B, T, d_out)
        if context is not None:
            check_length(context.size(1), self.block_size)
            _, k, v = self.c_attn(context).chunk(3, dim=-1)  # each (B, S, d_out)
        # Split the width into heads first, then swap: a bare view would mix positions and heads.
        return [t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v)]

    def attention_weights(self, x, context=None, *, padding_mask=None):
        """Return softmax(Q K^T / sqrt(hs)), written out, before dropout: (B, nh, T, S). Rows sum to
        1, or to 0 for a query without any key. Arguments as for forward."""
        q, k, _ = self.project(x, context)
        causal = self.causal_mask[None, None, : q.size(2), : k.size(2)]
        mask, has_key = hide_padding(self.mask(causal, 0), padding_mask)
        scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, nh, T, S)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask
        return scores.softmax(dim=-1) * has_key

    # What follows serves other masks, and speed. Skip it at first.

    # The kernel. A faster one may take its place on a device.
    attend = staticmethod(F.scaled_dot_product_attention)

    def mask(self, mask, past):
        """Return which keys each query attends to: `mask` (1, 1, T, S), the rows of causal_mask for
        queries from position `past` on, True = may attend. For another mask return other booleans,
        or floats to add to the scores, -inf for a hidden key: (B or 1, nh or 1, T, S). Padding is
        hidden elsewhere. Here a position is a column, so that a prompt with two tokens of padding
        begins at 2. In wpe it begins at 0."""
        return mask

    def mask_options(self, q, k, past, padding_mask):
        """Return the kernel's arguments that hide keys, and has_key (see hide_padding) or None."""
        causal = self.causal_mask[None, None, past : past + q.size(2), : k.size(2)]  # (1, 1, T, S)
        mask = self.mask(causal, past)
        if mask is causal and padding_mask is None and self.has_plain_mask():
            if past == 0:
                return {"is_causal": self.causal}, None  # the kernel's own mask, which is faster
            if q.size(2) == 1:  # the newest token attends to all keys
                return {}, None
        mask, has_key = hide_padding(mask, padding_mask)
        return {"attn_mask": mask}, has_key

    def has_plain_mask(self) -> bool:
        """Return whether causal_mask is a triangle, or all True, as the kernel's own masks are. An
        edit of the buffer changes its _version, so that it is compared again."""
        mask = self.causal_mask
        version = None if mask.is_inference() else mask._version
        if getattr(mask, "checked_version", -1) != version:  # a new or edited buffer
            plain = torch.ones_like(mask)
            mask.is_plain = torch.equal(mask, plain.tril() if self.causal else plain)
            mask.checked_version = version
        return mask.is_plain

    # torch.compile calls has_plain_mask once and keeps the answer, because of this mark.
    # @torch.compiler.assume_constant_result sets it too, but imports the whole compiler.
    has_plain_mask._dynamo_marked_constant = True


class KVCache:
    """Keys and values of one attention layer so far. Memory is allocated once, for block_size, so
    that a step copies only its new keys. dtype: to store them in, by default the keys' own."""

    def __init__(self, dtype: torch.dtype | None = None):
        self.k = self.v = None  # (B, nh, block_size, hs); values may be wider than keys
        self.dtype = dtype
        self.length = 0

    def append(self, k: torch.Tensor, v: torch.Tensor, block_size: int):
        """Store k and v (B, nh, T, hs). Return all so far, two tensors (B, nh, S, hs)."""
        if self.k is None:
            self.k = k.new_empty(*k.shape[:2], block_size, k.size(3), dtype=self.dtype)
            self.v = v.new_empty(*v.shape[:2], block_size, v.size(3), dtype=self.dtype)
        start = self.length
        self.length += k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class MLP(nn.Module):
    """For each token alone: two linear layers, and between them GELU in GPT-2's tanh form."""

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


def next_token_probs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Logits (B, V) to the probabilities (B, V) that the next token is drawn from.
    temperature divides the logits. 0 keeps the likeliest alone. Then, in this order: keep the top_k
    likeliest (0: all), keep the fewest likeliest whose sum reaches top_p (Holtzman et al. 2019,
    https://arxiv.org/abs/1904.09751), drop what has less than min_p times the likeliest's
    probability (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082). The likeliest stays."""
    require(0 <= temperature < math.inf, f"temperature={temperature}: must be at least 0")
    require(0 < top_p <= 1, f"top_p={top_p}: must be above 0 and at most 1")
    require(0 <= min_p <= 1, f"min_p={min_p}: must be from 0 to 1")
    if temperature == 0:
        best = F.one_hot(logits.argmax(dim=-1), logits.size(-1))
        return best + 0 * logits.amax(dim=-1, keepdim=True)  # NaN stays NaN
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # 0 at most
    if 0 < top_k < logits.size(-1):
        logits[logits < logits.topk(top_k).values[:, -1:]] = -math.inf
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        drop = probs.cumsum(dim=-1) - probs >= top_p  # the tokens before reach top_p
        logits[drop.scatter(-1, order, drop)] = -math.inf
    if min_p > 0:
        logits[logits < math.log(min_p)] = -math.inf  # the best has 0
    return logits.softmax(dim=-1)


def sample_token(probs: torch.Tensor, generator=None) -> torch.Tensor:
    """Draw a token id for each row of probabilities (B, V): the first whose cumulative sum is above
    a random number. Return (B,) int64. torch.multinomial would draw V numbers for a row. generator:
    one for all rows, or a list with one for each. Raises ValueError for probabilities of NaN."""
    device = probs.device
    probs = probs.cpu() if device.type == "mps" else probs  # MPS has no float64
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    if isinstance(generator, Sequence):
        u = torch.cat([torch.rand(1, 1, generator=g, device=device) for g in generator])
    else:
        u = torch.rand(len(probs), 1, generator=generator, device=device)  # (B, 1), below 1
    # The first sum above u times the last one, so a token with probability 0 is never drawn.
    token = torch.searchsorted(cdf, u.to(cdf.device) * cdf[:, -1:], right=True)[:, 0]
    require(int(token.max()) < probs.size(-1), "the logits contain NaN or infinity")
    return token.to(device)


def slide_window(idx, padding_mask, block_size):
    """Return what generate continues from once idx has more than block_size columns. A row of more
    tokens keeps its newest block_size / 2. With block_size of them, the next token would make it
    too long again, and after each cut the cache is computed anew. A row of fewer tokens, after
    padding, keeps all. With a block_size of 4:

        . . a b c         a b c
        d e f g h    to   . g h
    """
    start = idx.size(1) - max(1, block_size // 2)
    if padding_mask is not None:
        full = padding_mask.sum(dim=1) > block_size
        padding_mask[full, :start] = False
        start = int(padding_mask.any(dim=0).int().argmax())  # the first column with a token
        padding_mask = padding_mask[:, start:]
    return idx[:, start:], padding_mask


class GPT(nn.Module):
    """GPT-2's architecture. Parameters have the names of the published checkpoints."""

    config_class = GPTConfig
    cache_dtype = None  # the dtype of cached keys and values, if it is not the model's

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.wte.weight  # tied: its own matrix never gets memory ("meta")
        valid_tokens = torch.ones(config.vocab_size, dtype=torch.bool)  # see restrict_to_tokens
        self.register_buffer("valid_tokens", valid_tokens, persistent=False)
        self.dropout = config.dropout  # see hidden
        self.uninitialised = self.init_weights()

    def init_weights(self) -> list[str]:
        """Draw weights from N(0, std), because equal rows would learn the same. Set biases to 0.
        GPT-2's std is 0.02, for a width of 768. Layers in blocks have 0.02 sqrt(768 / C), which
        turns a normed token into results with a standard deviation of 0.55 at any width. The two
        layers of each block that add to the residual stream have 1 / sqrt(2 n_layer) of it, so that
        the stream's variance does not grow with depth (GPT-2, section 2.3).
        Norms and the parameters whose names are returned stay as __init__ made them."""
        C = self.config.n_embd
        block_std = 0.02 * math.sqrt(768 / C)
        # Logits then have the variance C std^2, and the first loss is ln(V) plus half of it. This
        # limit keeps the half under 1.5 % of ln(V).
        token_std = min(0.02, math.sqrt(0.03 * math.log(self.config.vocab_size) / C))
        in_blocks = set(self.h.modules())
        known = set()
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                std = block_std if module in in_blocks else token_std
                if name.endswith("c_proj"):
                    std /= math.sqrt(2 * self.config.n_layer)
                if module.weight not in known:  # a known one is tied to an embedding
                    nn.init.normal_(module.weight, mean=0.0, std=std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding | nn.Linear | nn.LayerNorm | nn.RMSNorm):
                known.update(module.parameters(recurse=False))
        return [name for name, parameter in self.named_parameters() if parameter not in known]

    def hidden(self, idx, padding_mask=None, cache=None):
        """The final LayerNorm's output (B, T, C). Arguments as for forward."""
        past = cache[0].length if cache else 0
        S = past + idx.size(1)
        check_length(S, self.config.block_size)
        positions = torch.arange(past, S, device=idx.device)  # (T,)
        if padding_mask is not None:
            # A sequence's first real token has position 0, however much padding precedes it
            positions = (padding_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, past:]  # (B, T)
        x = self.wte(idx) + self.wpe(positions)  # (B, T, C)
        x = F.dropout(x, self.dropout, self.training)
        for i, block in enumerate(self.h):
            x = block(x, padding_mask, cache[i] if cache else None)
        return self.ln_f(x)

    def logits(self, x):
        """Hidden states (..., C) to logits (..., V). A change of the logits belongs here."""
        return self.lm_head(x)

    def losses(self, logits, targets):
        """-log softmax(logits)[target] in nats, (N,), of logits (N, V). 0 if a target is -100.
        With --teacher, targets may also be probabilities (N, V).
        Put a term that only training has under `if self.training:`. To mask targets, set them to
        -100 in train.py's loop, not here."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # sums over V
        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")

    def forward(self, idx, targets=None, *, padding_mask=None, cache=None, last_only=False):
        """Logits (B, T, V) and, with targets, the mean cross-entropy in nats per token.

        idx (B, T) int64; targets (B, T), the token after each, -100 where none counts.
        padding_mask (B, S) bool, False for padding; cache: a KVCache for each block, within S;
        last_only: logits (B, 1, V) of the last position.
        A changed model may return a third value with targets, {name: scalar}: terms that train.py
        logs and adds to the loss, each weighted like it. One that is detached is only logged.
        Raises ValueError for more than block_size tokens, IndexError for an id of idx outside V."""
        x = self.hidden(idx, padding_mask, cache)  # (B, T, C)
        logits = self.logits(x[:, -1:] if last_only else x)
        if targets is None:
            return logits, None
        losses = self.losses(logits.flatten(0, 1), targets.flatten())  # (N,)
        n_targets = (targets != -100).sum().clamp(min=1)
        return logits, losses.sum() / n_targets

    def next_logits(self, idx, padding_mask=None, cache=None):
        """Logits (B, V) in float32 for the token after each row: the next step of decoding, which
        computes only the tokens in idx and takes those before from the cache."""
        logits, _ = self(idx, padding_mask=padding_mask, cache=cache, last_only=True)
        return logits[:, -1].float()

    @torch.no_grad()
    def generate(
        self, idx, max_new_tokens, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
        padding_mask=None, generator=None,
    ) -> Iterator[torch.Tensor]:  # fmt: skip
        """Yield the next token of every row, (B,) int64, max_new_tokens times. Call eval() before.

        idx (B, T), T >= 1, of which the newest block_size count: see slide_window. Prompts of
        unequal length are padded on the left, where padding_mask (B, T) is False. Each row gets
        the text that it gets alone. generator: see sample_token. Filters: see next_token_probs."""
        require(idx.size(1) > 0, "idx has no tokens: start from end-of-text or a newline")
        block_size = self.config.block_size
        idx = idx[:, -block_size:]
        if padding_mask is not None:
            padding_mask = padding_mask[:, -block_size:]
        new, cache = idx, self.new_cache()
        for _ in range(max_new_tokens):
            logits = self.next_logits(new, padding_mask, cache)  # (B, V)
            logits = logits.masked_fill(~self.valid_tokens, -math.inf)
            probs = next_token_probs(logits, temperature, top_k, top_p, min_p)
            token = sample_token(probs, generator)
            yield token
            idx = torch.cat([idx, token[:, None]], dim=1)
            new = idx[:, -1:] if cache else idx
            if padding_mask is not None:
                padding_mask = F.pad(padding_mask, (0, 1), value=True)
            if idx.size(1) > block_size:
                idx, padding_mask = slide_window(idx, padding_mask, block_size)
                new, cache = idx, self.new_cache()

    def new_cache(self) -> list[KVCache]:
        """An empty cache for each block. Without one, [], each step computes all of idx again."""
        return [KVCache(self.cache_dtype) for _ in self.h]

    def restrict_to_tokens(self, ids: Iterable[int]):
        """Let generate draw only these ids, those of a tokenizer. The vocabulary may be padded."""
        self.valid_tokens.fill_(False)
        self.valid_tokens[[i for i in ids if i < self.config.vocab_size]] = True
