"""docs/exercises.py: right answers are right, and each common mistake is named."""

import doctest
import importlib.util
import inspect
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import ROOT, run_script

pytestmark = pytest.mark.gpt2  # the checks ask model.py for right answers
PAGE = ROOT / "docs" / "exercises.py"


def merge_once(tokens, pair):
    merged = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] = "".join(pair)
        else:
            merged.append(token)
    return merged


def softmax(scores):
    exp = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return exp / exp.sum(dim=-1, keepdim=True)


def causal_mask(T):
    return torch.ones(T, T, dtype=torch.bool).tril()


def attention(q, k, v):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    mask = torch.ones(q.size(-2), q.size(-2)).tril().bool()
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1) @ v


def split_heads(x, n_head):
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def layer_norm(x):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()


def mlp_one_token(x, w_fc, w_proj):
    return w_proj @ F.gelu(w_fc @ x, approximate="tanh")


def cross_entropy(logits, targets):
    chosen = logits[torch.arange(len(targets)), targets]
    return (logits.logsumexp(dim=-1) - chosen).mean()


def bits_per_byte(loss, n_tokens, n_bytes):
    return loss / math.log(2) * n_tokens / n_bytes


def descent_step(w, loss, rate):
    loss(w).backward()
    return w - rate * w.grad


def top_k(logits, k):
    least = logits.topk(k).values[-1]
    return logits.masked_fill(logits < least, -math.inf).softmax(dim=-1)


def attend_with_cache(q, k, v, k_cache, v_cache):
    k_cache = torch.cat([k_cache, k], dim=2)
    v_cache = torch.cat([v_cache, v], dim=2)
    weights = (q @ k_cache.mT / math.sqrt(q.size(-1))).softmax(dim=-1)
    return weights @ v_cache, k_cache, v_cache


ANSWERS = [
    merge_once, softmax, causal_mask, attention, split_heads, layer_norm, mlp_one_token,
    cross_entropy, bits_per_byte, descent_step, top_k, attend_with_cache,
]  # fmt: skip


def exercises(path=PAGE):
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("exercises", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A copy of the file beside model.py, in which each `...` is replaced by an answer."""
    directory = tmp_path_factory.mktemp("answered")
    shutil.copy(ROOT / "model.py", directory)
    text = PAGE.read_text(encoding="utf-8")
    for answer in ANSWERS:
        body = inspect.getsource(answer).partition("\n")[2]
        unwritten = rf'(?s)(def {answer.__name__}\(.*?""".*?"""\n)    \.\.\.\n'
        text, n = re.subn(unwritten, lambda match, body=body: match[1] + body, text, count=1)
        assert n == 1
    (directory / "mine.py").write_text(text, encoding="utf-8")
    return directory / "mine.py"


def lines(verdict):
    return "".join(f"{answer.__name__}: {verdict}\n" for answer in ANSWERS)


def test_an_unwritten_file_is_to_do_from_any_directory(tmp_path):
    done = run_script(PAGE, cwd=tmp_path)
    assert (done.stdout.decode(), done.stderr, done.returncode) == (lines("to do"), b"", 0)


def test_right_answers_are_right_also_in_a_copy(answered):
    done = run_script(answered, cwd=answered.parent)
    assert (done.stdout.decode(), done.stderr) == (lines("right"), b"")


def test_examples_are_what_right_answers_give(answered):
    failed, n = doctest.testmod(exercises(answered))
    assert (failed, n) == (0, 13)


def merge_first(tokens, pair):
    for i in range(len(tokens) - 1):
        if tuple(tokens[i : i + 2]) == pair:
            return [*tokens[:i], "".join(pair), *tokens[i + 2 :]]
    return tokens


def merge_twice(tokens, pair):
    starts = [i for i in range(len(tokens) - 1) if tuple(tokens[i : i + 2]) == pair]
    used = {i + 1 for i in starts} - set(starts)
    return ["".join(pair) if i in starts else t for i, t in enumerate(tokens) if i not in used]


def merge_text(tokens, pair):
    text = "".join(tokens).replace("".join(pair), "|")
    return ["".join(pair) if c == "|" else c for c in text]


def weights(q, k, scale, mask=True):
    scores = scale * q @ k.mT
    hidden = torch.ones_like(scores).triu(1).bool()
    return scores.masked_fill(hidden & mask, -math.inf).softmax(dim=-1)


def scaled(scale):
    return lambda q, k, v: weights(q, k, scale(len(q), q.size(-1))) @ v


def unmasked(q, k):
    return weights(q, k, q.size(-1) ** -0.5, mask=False)


def centred(x):
    return x - x.mean(dim=-1, keepdim=True)


def nats(logits, targets):
    return -logits.softmax(dim=-1)[range(len(targets)), targets].log()


def descend(w, loss, rate):
    loss(w).backward()
    return w + rate * w.grad


def kept(logits, k):
    return logits >= logits.topk(k).values[-1]


def past_alone(q, k, v, *past):
    _, *caches = attend_with_cache(q, k, v, *past)
    return F.scaled_dot_product_attention(q, *past), *caches


def masked_query(*inputs):
    _, *caches = attend_with_cache(*inputs)
    return F.scaled_dot_product_attention(inputs[0], *caches, is_causal=True), *caches


MISTAKES = [
    (merge_once, merge_first, ": only the first pair"),
    (merge_once, merge_twice, ": the second a is in two tokens"),
    (merge_once, merge_text, ": t and h are not the token th"),
    (softmax, lambda s: s.exp() / s.exp().sum(dim=-1, keepdim=True), ": e^1000 is infinite"),
    (softmax, lambda s: s.exp() / s.exp().sum(dim=-1), ": sum with keepdim=True"),
    (softmax, lambda s: s.exp() / s.exp().sum(dim=0), ": the columns add up to 1"),
    (softmax, lambda s: s.exp() / s.exp().sum(), " at [0, 0]: 0."),
    (causal_mask, lambda T: torch.ones(T, T).tril(), ": torch.float32 instead of torch.bool"),
    (causal_mask, lambda T: torch.ones(T, T).triu(1).bool(), " at query 0: True means"),
    (causal_mask, lambda T: torch.ones(T, T).triu().bool(), " at query 0: it sees key 1. A row"),
    (causal_mask, lambda T: torch.ones(T, T).tril(-1).bool(), " at query 0: it does not see it"),
    (attention, lambda q, k, v: unmasked(q, k) @ v, " at query 0: it sees key 1"),
    (attention, lambda q, k, v: unmasked(q, k).tril() @ v, " at query 0: its weights add up to"),
    (attention, scaled(lambda nh, hs: 1), ": divide the scores by the root of hs"),
    (attention, scaled(lambda nh, hs: 1 / hs), ": divide by the root of hs, not by hs"),
    (attention, scaled(lambda nh, hs: (nh * hs) ** -0.5), ": divide by the root of hs, not of C"),
    (attention, lambda q, k, v: q @ k, ": RuntimeError: "),
    (split_heads, lambda x, n: x.view(len(x), n, x.size(1), -1), ": a bare view"),
    (split_heads, lambda x, n: x.unflatten(-1, (n, -1)), ": shape (1, 3, 2, 2) instead of (1, 2,"),
    (layer_norm, lambda x: centred(x) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), ": divide by C, "),
    (layer_norm, lambda x: F.layer_norm(x, x.shape), ": each token has its own mean"),
    (layer_norm, lambda x: F.layer_norm(x, x.shape[-1:], eps=0), ": 0 / 0"),
    (mlp_one_token, lambda x, w_fc, w_proj: w_proj @ w_fc @ x, ": GELU is missing"),
    (mlp_one_token, lambda x, w_fc, w_proj: w_proj @ (w_fc @ x).relu(), ": that is ReLU"),
    (mlp_one_token, lambda x, w_fc, w_proj: w_proj @ F.gelu(w_fc @ x), ": GPT-2 has GELU's tanh"),
    (cross_entropy, lambda *inputs: nats(*inputs).sum(), ": that is the sum, not the mean"),
    (cross_entropy, lambda *inputs: nats(*inputs).mean() / math.log(2), ": that is in bits"),
    (cross_entropy, lambda *inputs: nats(*inputs).mean(), ": that is ln 0"),
    (cross_entropy, lambda *inputs: -nats(*inputs).mean(), ": -"),
    (bits_per_byte, lambda loss, n, n_bytes: loss * n / n_bytes, ": that is nats per byte"),
    (bits_per_byte, lambda loss, n, n_bytes: loss / math.log(2), ": that is bits per token"),
    (bits_per_byte, lambda loss, n, n_bytes: loss / math.log(2) * n_bytes / n, ": a token is more"),
    (descent_step, descend, ": the loss grows"),
    (descent_step, lambda w, loss, rate: descent_step(w, loss, 1), ": multiply the gradient"),
    (top_k, lambda x, k: F.one_hot(x.argmax(), len(x)), ": that is the likeliest alone"),
    (top_k, lambda x, k: kept(x, k) * x.softmax(0), ": the k probabilities do not add up to 1"),
    (top_k, lambda x, k: (kept(x, k) * x).softmax(0), ": e^0 is 1"),
    (attend_with_cache, past_alone, ": the new token does not attend to itself"),
    (attend_with_cache, masked_query, ": it sees token 0 alone"),
    (attend_with_cache, lambda *inputs: attend_with_cache(*inputs)[0], ": one value instead of 3"),
    (
        attend_with_cache,
        lambda *inputs: (attend_with_cache(*inputs)[0], *inputs[3:]),
        ": shape (1,",
    ),
]


@pytest.mark.parametrize("exercise, mistake, expected", MISTAKES)
def test_a_common_mistake_is_named(exercise, mistake, expected):
    module = exercises()
    verdict = module.verdict(mistake, getattr(module, f"check_{exercise.__name__}"))
    assert verdict.startswith(f"wrong{expected}")
