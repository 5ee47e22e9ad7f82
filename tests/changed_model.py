"""Another architecture, as somebody makes it of model.py: what works with GPT works with it too.

RMSNorm (https://arxiv.org/abs/1910.07467), grouped-query attention (https://arxiv.org/abs/2305.13245)
with rotary positions (https://arxiv.org/abs/2104.09864), SwiGLU (https://arxiv.org/abs/2002.05202)
and a head of its own."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, GPTConfig


def rotate(x, past):
    """Turn pairs of x (B, nh, T, hs) by angles that grow with the position."""
    T, half = x.size(2), x.size(3) // 2
    frequency = 100.0 ** -(torch.arange(half, device=x.device) / half)
    angle = (past + torch.arange(T, device=x.device))[:, None] * frequency  # (T, hs / 2)
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class GroupedQueryAttention(nn.Module):
    """Two heads of queries share one of keys and values."""

    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.block_size, self.head_size = config.block_size, C // config.n_head
        self.query = nn.Linear(C, C, bias=False)
        self.key_value = nn.Linear(C, C, bias=False)
        self.out = nn.Linear(C, C)

    def forward(self, x, *, padding_mask=None, cache=None):
        past = 0 if cache is None else cache.length
        q, k, v = self.project(x, past)
        if cache is not None:
            k, v = cache.append(k, v, self.block_size)
        mask = self.may_attend(x, past, padding_mask)
        y = self.attend(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def attention_weights(self, x, *, padding_mask=None):
        q, k, _ = self.project(x, 0)
        scores = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) / self.head_size**0.5
        mask = self.may_attend(x, 0, padding_mask)
        return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)

    def project(self, x, past):
        projections = self.query(x), *self.key_value(x).chunk(2, dim=-1)
        heads = [t.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t in projections]
        return rotate(heads[0], past), rotate(heads[1], past), heads[2]

    def may_attend(self, x, past, padding_mask):
        queries = torch.arange(past, past + x.size(1), device=x.device)[:, None]
        keys = torch.arange(past + x.size(1), device=x.device)
        mask = (keys <= queries)[None, None]
        if padding_mask is not None:
            mask = mask & padding_mask[:, None, None, :] | (keys == queries)
        return mask


class ChangedBlock(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.norm_1, self.norm_2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.mixer = GroupedQueryAttention(config)
        self.gate, self.up, self.down = (
            nn.Linear(C, 2 * C),
            nn.Linear(C, 2 * C),
            nn.Linear(2 * C, C),
        )

    def forward(self, x, padding_mask=None, cache=None):
        x = x + self.mixer(self.norm_1(x), padding_mask=padding_mask, cache=cache)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ChangedGPT(GPT):
    """As a new model.py; n_head has to be even."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.h = nn.ModuleList([ChangedBlock(config) for _ in range(config.n_layer)])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
