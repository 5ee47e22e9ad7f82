"""MultiHeadAttention against the written-out formula and torch.nn.MultiheadAttention."""

import itertools
import math

import pytest
import torch
import torch.nn as nn

from model import MultiHeadAttention


def formula(attn, x, context=None, padding_mask=None):
    """Attention head by head and query by query in float64; a query without keys gets zeros."""
    context = x if context is None else context
    B, T, S, nh = x.size(0), x.size(1), context.size(1), attn.n_head
    d_out = attn.c_proj.in_features
    hs = d_out // nh
    weight = attn.c_attn.weight.double()
    bias = torch.zeros(3 * d_out) if attn.c_attn.bias is None else attn.c_attn.bias
    q = x.double() @ weight[:d_out].T + bias[:d_out]
    k = context.double() @ weight[d_out : 2 * d_out].T + bias[d_out : 2 * d_out]
    v = context.double() @ weight[2 * d_out :].T + bias[2 * d_out :]
    y = torch.zeros(B, T, d_out, dtype=torch.float64)
    weights = torch.zeros(B, nh, T, S, dtype=torch.float64)
    for b, head, t in itertools.product(range(B), range(nh), range(T)):
        part = slice(head * hs, (head + 1) * hs)
        keys = [s for s in range(S) if s <= t or not attn.causal]
        if padding_mask is not None:
            keys = [s for s in keys if padding_mask[b, s]]
        if keys:
            scores = torch.stack([q[b, t, part] @ k[b, s, part] for s in keys])
            share = torch.softmax(scores / math.sqrt(hs), dim=0)
            weights[b, head, t, keys] = share
            y[b, t, part] = share @ v[b, keys, part]
    return y @ attn.c_proj.weight.double().T + attn.c_proj.bias.double(), weights


def example(S, padding, width=6, T=7, B=3):
    torch.manual_seed(1)
    x = torch.randn(B, T, width)
    context = None if S is None else torch.randn(B, S, width)
    mask = torch.rand(B, S or T) > 0.4
    mask[0, :3] = False  # padding on the left
    mask[1] = False  # nothing but padding
    return x, context, mask if padding else None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [None, 5, 9])  # context length
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("n_head, qkv_bias", [(1, False), (2, True), (4, False)])
def test_every_system_equals_the_formula_in_float64(causal, S, padding, n_head, qkv_bias):
    x, context, mask = example(S, padding)
    attn = MultiHeadAttention(6, 8, 9, n_head, causal=causal, qkv_bias=qkv_bias)
    y, weights = formula(attn, x, context, mask)
    torch.testing.assert_close(attn(x, context, padding_mask=mask).double(), y, rtol=0, atol=1e-6)
    ours = attn.attention_weights(x, context, padding_mask=mask).double()
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [None, 9])
def test_equals_torch_multihead_attention(causal, S):
    x, context, mask = example(S, True, width=8)
    mask[:, 0] = True  # torch.nn.MultiheadAttention gives NaN to a query without a key
    attn = MultiHeadAttention(8, 8, 9, 4, causal=causal, qkv_bias=True)
    other = nn.MultiheadAttention(8, 4, batch_first=True)
    other.in_proj_weight.data, other.in_proj_bias.data = attn.c_attn.weight, attn.c_attn.bias
    other.out_proj.weight.data, other.out_proj.bias.data = attn.c_proj.weight, attn.c_proj.bias
    y = x if context is None else context
    hidden = torch.ones(x.size(1), y.size(1), dtype=torch.bool).triu(1) if causal else None
    masks = {"attn_mask": hidden, "key_padding_mask": ~mask}
    expected, weights = other(x, y, y, **masks, average_attn_weights=False)
    torch.testing.assert_close(attn(x, context, padding_mask=mask), expected, rtol=0, atol=1e-6)
    ours = attn.attention_weights(x, context, padding_mask=mask)
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- dropout
def test_dropout_acts_on_weights_and_output_in_training_only():
    """All keys have the same weight and values are one-hot, so that the output shows the weights,
    each of them in two channels."""
    attn = MultiHeadAttention(64, 128, 64, 1, causal=False, dropout=0.5, proj_bias=False)
    attn.c_attn.weight.data.zero_()
    attn.c_attn.weight.data[256:] = torch.cat([torch.eye(64), torch.eye(64)])
    attn.c_proj.weight.data = torch.eye(128)
    x = torch.eye(64).expand(8, 64, 64)
    torch.manual_seed(0)
    y = attn(x) * 64  # each weight: 0, or doubled by both dropouts
    assert set(y.unique().tolist()) == {0.0, 4.0}
    one, other = (y > 0).unflatten(-1, (2, 64)).unbind(-2)
    assert one.float().mean() == pytest.approx(0.5**2, abs=0.01)
    assert (one & other).float().mean() == pytest.approx(0.5**3, abs=0.01)  # a weight is common
    torch.testing.assert_close(attn.eval()(x) * 64, torch.ones(8, 64, 128))


# ---------------------------------------------------------------- masks
def test_mask_is_a_buffer_outside_the_state_dict():
    attn = MultiHeadAttention(6, 8, 5, 2)
    assert dict(attn.named_buffers())["causal_mask"].dtype == torch.bool
    assert torch.equal(attn.causal_mask, torch.ones(5, 5, dtype=torch.bool).tril())
    assert set(attn.state_dict()) == {"c_attn.weight", "c_proj.weight", "c_proj.bias"}
