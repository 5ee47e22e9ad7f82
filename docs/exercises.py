"""Twelve functions to write, most of them in one to five lines. Work on a copy, and check it:

    cp docs/exercises.py mine.py
    python mine.py  # prints a line for each function: to do, right, or what is wrong

Replace each `...` by code that returns the answer. Do not call the library function that does it
all: write softmax without torch.softmax. The check below a function has its inputs, the right
answers by PyTorch or model.py, and the answers that common mistakes give. Shapes: B sentences,
T tokens, C numbers for each token, nh heads of hs = C / nh, V tokens in the vocabulary.
"""

import copy
import functools
import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import model

draw = functools.partial(torch.randn, dtype=torch.float64)


def merge_once(tokens, pair):
    """1. Join the two tokens of the pair wherever they are neighbours, from left to right.

    >>> merge_once(["b", "a", "n", "a", "n", "a"], ("a", "n"))
    ['b', 'an', 'an', 'a']
    """
    ...


def check_merge_once():
    for tokens, pair, right, hint, wrong in (
        ("b a n a n a", "a n", "b an an a", "only the first pair is joined", "b an a n a"),
        ("a a a b", "a a", "aa a b", "the second a is in two tokens", "aa aa b"),
        ("th e t h e", "th e", "the t h e", "t and h are not the token th", "the the"),
    ):
        inputs = tokens.split(), tuple(pair.split())
        yield {"inputs": inputs, "right": right.split(), hint: wrong.split()}


def softmax(scores):
    """2. Turn scores (T, S), up to 1,000, into positive weights (T, S). Each row adds up to 1.

    >>> softmax(tensor([[0.0, 1.0]]))
    tensor([[0.2689, 0.7311]])
    """
    ...


def check_softmax():
    for scores in (draw(3, 3), draw(5, 5), tensor([[1000.0, 0.0]])):
        yield {
            "inputs": (scores,),
            "right": scores.softmax(dim=-1),
            "the columns add up to 1, not the rows": scores.softmax(dim=0),
            "sum with keepdim=True": (scores - scores.logsumexp(dim=-1)).exp(),
            "e^1000 is infinite. Subtract the largest score first": tensor([[math.nan, 0]]),
        }


def causal_mask(T):
    """3. Return booleans (T, T): a row for each query, a column for each key, True = may attend.

    >>> causal_mask(2).tolist()
    [[True, False], [True, True]]
    """
    ...


def check_causal_mask():
    for T in (3, 1, 6):
        mask = model.MultiHeadAttention(1, 1, block_size=T, n_head=1).causal_mask
        yield {
            "inputs": (T,),
            "right": mask,
            "at query 0: True means that it may attend": ~mask,
            "at query 0: it sees key 1. A row is a query": mask.T,
            "at query 0: it does not see itself": mask.tril(-1),
        }


def attention(q, k, v):
    """4. Causal attention of each head: softmax(q k^T / sqrt(hs)) v, all of them (nh, T, hs).

    >>> attention(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), tensor([[[2.0], [4.0]]])).tolist()
    [[[2.0], [3.0]]]
    """
    ...


def check_attention():
    attend = F.scaled_dot_product_attention
    for nh, T, hs in ((2, 3, 4), (1, 5, 8), (4, 4, 2)):
        q, k, v = draw(3, nh, T, hs)
        causal = functools.partial(attend, q, k, v, is_causal=True)
        # The identity matrix as values gives the weights, here without a mask.
        weights = attend(q, k, torch.eye(T).double().expand(nh, T, T))
        late = weights.tril() @ v
        zeros = [attend(q[:, [t]], (torch.arange(T) <= t)[:, None] * k, v) for t in range(T)]
        yield {
            "inputs": (q, k, v),
            "right": causal(),
            "at query 0: it sees key 1": attend(q, k, v),
            "at query 0: it sees key 1. Its score must be -inf, not 0": torch.cat(zeros, dim=1),
            "at query 0: its weights add up to less than 1. Mask before the softmax": late,
            "divide the scores by the root of hs": causal(scale=1),
            "divide by the root of hs, not by hs": causal(scale=1 / hs),
            "divide by the root of hs, not of C = nh hs": causal(scale=(nh * hs) ** -0.5),
        }


def split_heads(x, n_head):
    """5. Turn x (B, T, C) into (B, nh, T, hs). Head 0 gets the first hs numbers of each token.

    >>> split_heads(tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]]), 2).tolist()
    [[[[1, 2], [5, 6]], [[3, 4], [7, 8]]]]
    """
    ...


def check_split_heads():
    for B, T, C, n_head in ((1, 3, 4, 2), (2, 5, 6, 3), (2, 4, 8, 4)):
        attn = model.MultiHeadAttention(C, C, T, n_head).double().requires_grad_(False)
        attn.c_attn.weight.copy_(torch.eye(C).repeat(3, 1))  # queries, keys and values are x
        x = draw(B, T, C)
        yield {
            "inputs": (x, n_head),
            "right": attn.project(x)[0],
            "a bare view gives the first tokens to head 0": x.view(B, n_head, T, -1),
        }


def layer_norm(x):
    """6. LayerNorm of each token of x (T, C), without weight and bias. Its epsilon is 1e-5.

    >>> layer_norm(tensor([[1.0, 3.0]]))
    tensor([[-1.0000,  1.0000]])
    """
    ...


def check_layer_norm():
    for x in (draw(3, 4), 100 + draw(2, 8), torch.ones(2, 3)):
        C = x.size(-1)
        share = (C - 1) / C
        yield {
            "inputs": (x,),
            "right": F.layer_norm(x, (C,)),
            "divide by C, not by C - 1": share**0.5 * F.layer_norm(x, (C,), eps=1e-5 * share),
            "each token has its own mean and variance": F.layer_norm(x, x.shape),
            "0 / 0. Add 1e-5 to the variance": math.nan * x,
        }


def mlp_one_token(x, w_fc, w_proj):
    """7. The MLP of one token x (C,), without biases. The weights are stored as in nn.Linear:
    w_fc (4 C, C), w_proj (C, 4 C). You may call F.gelu with approximate="tanh".

    >>> mlp_one_token(tensor([1.0]), torch.ones(4, 1), torch.ones(1, 4))
    tensor([3.3648])
    """
    ...


def check_mlp_one_token():
    for C in (8, 2, 1):
        config = model.GPTConfig(n_head=1, n_embd=C, bias=False)
        mlp = model.MLP(config).double().requires_grad_(False)
        x = 3 * draw(C)
        yield {
            "inputs": (x, mlp.c_fc.weight, mlp.c_proj.weight),
            "right": mlp(x),
            "GELU is missing": nn.Sequential(mlp.c_fc, mlp.c_proj)(x),
            "that is ReLU": nn.Sequential(mlp.c_fc, nn.ReLU(), mlp.c_proj)(x),
            "GPT-2 has GELU's tanh form": nn.Sequential(mlp.c_fc, nn.GELU(), mlp.c_proj)(x),
        }


def cross_entropy(logits, targets):
    """8. The mean of -ln softmax(logits)[target] over N positions. logits (N, V) are up to 1,000,
    targets (N,) are token ids.

    >>> cross_entropy(tensor([[0.0, 0.0]]), tensor([1]))
    tensor(0.6931)
    """
    ...


def check_cross_entropy():
    for logits in (draw(3, 5), draw(6, 2), tensor([[1000.0, 0.0]])):
        targets = torch.arange(1, len(logits) + 1) % logits.size(1)
        loss = F.cross_entropy(logits, targets)
        yield {
            "inputs": (logits, targets),
            "right": loss,
            "that is the sum, not the mean": len(logits) * loss,
            "that is in bits. Use the natural logarithm": loss / math.log(2),
            "that is ln 0. torch.logsumexp takes logits of any size": math.inf,
        }


def bits_per_byte(loss, n_tokens, n_bytes):
    """9. Convert the loss of a text from nats per token to bits per byte.

    >>> bits_per_byte(math.log(65536), n_tokens=5, n_bytes=10)
    8.0
    """
    ...


def check_bits_per_byte():
    for bits, n_tokens, n_bytes in ((12, 20, 60), (16, 5, 10), (1, 7, 7)):  # bits of each token
        yield {
            "inputs": (math.log(2**bits), n_tokens, n_bytes),
            "right": bits * n_tokens / n_bytes,
            "that is nats per byte. A bit is ln 2 nats": math.log(2**bits) * n_tokens / n_bytes,
            "that is bits per token": bits,
            "a token is more than a byte": bits * n_bytes / n_tokens,
        }


def descent_step(w, loss, rate):
    """10. Return the weights w after one step of gradient descent. loss(w) is a scalar tensor.

    >>> descent_step(tensor([3.0], requires_grad=True), lambda w: (w**2).sum(), 0.25).tolist()
    [1.5]
    """
    ...


def check_descent_step():
    losses = {0.1: lambda w: w @ w, 0.5: lambda w: w.exp().sum(), 2.0: lambda w: (w - 3).norm()}
    for rate, loss in losses.items():
        w = draw(3)
        moved = nn.Parameter(w.clone())
        loss(moved).backward()
        torch.optim.SGD([moved], lr=rate).step()
        yield {
            "inputs": (w.clone().requires_grad_(), loss, rate),
            "right": moved.detach(),
            "the loss grows. Go against the gradient": w + rate * moved.grad,
            "multiply the gradient by the rate": w - moved.grad,
        }


def top_k(logits, k):
    """11. Turn logits (V,) into probabilities (V,), which are 0 except for the k likeliest tokens.

    >>> top_k(tensor([2.0, 1.0, 2.0]), 2)
    tensor([0.5000, 0.0000, 0.5000])
    """
    ...


def check_top_k():
    for logits, k in ((draw(6), 3), (draw(20), 5), (draw(4), 4)):
        probs, likeliest = (model.next_token_probs(logits[None], top_k=n)[0] for n in (k, 1))
        kept = probs > 0
        yield {
            "inputs": (logits, k),
            "right": probs,
            "that is the likeliest alone": likeliest,
            "the k probabilities do not add up to 1": kept * logits.softmax(dim=0),
            "e^0 is 1. The other logits are -inf, not 0": (kept * logits).softmax(dim=0),
        }


def attend_with_cache(q, k, v, k_cache, v_cache):
    """12. Attention of the newest token to itself and to the S tokens before. q, k and v are
    (B, nh, 1, hs), the caches (B, nh, S, hs). Return y (B, nh, 1, hs) and the longer caches.

    >>> new, old = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    >>> attend_with_cache(new, new, new, old, old)[0].tolist()
    [[[[0.5]]]]
    """
    ...


def check_attend_with_cache():
    attend = F.scaled_dot_product_attention
    for B, nh, S, hs in ((1, 2, 3, 4), (2, 1, 1, 8), (1, 1, 0, 2)):
        q, k, v = draw(3, B, nh, 1, hs)
        past = draw(2, B, nh, S, hs)
        cache = model.KVCache()
        cache.append(*past, block_size=S + 1)
        now = cache.append(k, v, block_size=S + 1)
        yield {
            "inputs": (q, k, v, *past),
            "right": (attend(q, *now), *now),
            "the new token does not attend to itself": (attend(q, *past), *now),
            "it sees token 0 alone. It needs no mask": (attend(q, *now, is_causal=True), *now),
        }


def difference(answer, right) -> str:
    """Return how an answer differs from the right one, or "" if it does not."""
    if isinstance(right, tuple):
        if not isinstance(answer, tuple) or len(answer) != len(right):
            return f"not a tuple of {len(right)} values"
        return next(filter(None, map(difference, answer, right)), "")
    if isinstance(right, list):
        return "" if answer == right else f"{answer} instead of {right}"
    answer, right = torch.as_tensor(answer).detach(), torch.as_tensor(right)
    if answer.shape != right.shape:
        return f"shape {tuple(answer.shape)} instead of {tuple(right.shape)}"
    if (answer.dtype == torch.bool) != (right.dtype == torch.bool):
        return f"{answer.dtype} instead of {right.dtype}"
    close = torch.isclose(answer.double(), right.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    for place in (~close).nonzero().tolist():
        where = f"at {place}: " if place else ""
        return f"{where}{answer[*place]:.4f} instead of {right[*place]:.4f}"
    return ""


def verdict(function, check) -> str:
    """Compare a function's answers with the right ones, and then with those of mistakes."""
    torch.manual_seed(0)
    for expected in check():
        try:
            answer = function(*copy.deepcopy(expected.pop("inputs")))
            if answer is None:
                return "to do"
            found = [text for text, value in expected.items() if not difference(answer, value)]
            found.append(difference(answer, expected["right"]))
        except Exception as error:  # the reader's code can raise any
            found = f"{type(error).__name__}: {error}".splitlines()
        if found[0] != "right":
            return f"wrong {found[0]}" if found[0].startswith("at ") else f"wrong: {found[0]}"
    return "right"


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            exercise = name.removeprefix("check_")
            print(f"{exercise}: {verdict(globals()[exercise], check)}")
