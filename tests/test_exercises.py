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

from tests.scripts import ROOT, run_script

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


def exercises(path=PAGE):
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("exercises", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def answered(tmp_path):
    """A copy of the file beside model.py, in which each `...` is replaced by an answer."""
    shutil.copy(ROOT / "model.py", tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    for answer in ANSWERS:
        body = inspect.getsource(answer).partition("\n")[2]
        unwritten = rf'(?s)(def {answer.__name__}\(.*?""".*?"""\n)    \.\.\.\n'
        text, n = re.subn(unwritten, lambda match, body=body: match[1] + body, text, count=1)
        assert n == 1
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    return tmp_path / "mine.py"


def test_an_unwritten_file_is_to_do_and_right_answers_in_a_copy_are_right(answered, tmp_path):
    """The examples of the file are what these answers give."""
    for script, cwd, verdict in ((PAGE, tmp_path.parent, "to do"), (answered, tmp_path, "right")):
        done = run_script(script, cwd=cwd)
        lines = "".join(f"{answer.__name__}: {verdict}\n" for answer in ANSWERS)
        assert (done.stdout.decode(), done.stderr, done.returncode) == (lines, b"", 0)
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


def scores(q, k):
    return q @ k.mT / math.sqrt(q.size(-1))


def scaled(scale):
    """Attention that multiplies by another scale."""
    return lambda q, k, v: attention(q * scale(*q.shape) * math.sqrt(q.size(-1)), k, v)


def centred(x):
    return x - x.mean(dim=-1, keepdim=True)


def nats(logits, targets):
    return -logits.softmax(dim=-1)[range(len(targets)), targets].log()


def kept(logits, k):
    return logits >= logits.topk(k).values[-1]


def past_alone(q, k, v, *past):
    _, *caches = attend_with_cache(q, k, v, *past)
    return F.scaled_dot_product_attention(q, *past), *caches


def masked_query(*inputs):
    _, *caches = attend_with_cache(*inputs)
    return F.scaled_dot_product_attention(inputs[0], *caches, is_causal=True), *caches


MISTAKES = [
    (merge_once, "only the first pair", merge_first),
    (merge_once, "the second a is in two tokens", merge_twice),
    (merge_once, "t and h are not the token th", merge_text),
    (softmax, "e^1000 is infinite", lambda s: s.exp() / s.exp().sum(dim=-1, keepdim=True)),
    (softmax, "sum with keepdim=True", lambda s: s.exp() / s.exp().sum(dim=-1)),
    (softmax, "the columns add up to 1", lambda s: s.exp() / s.exp().sum(dim=0)),
    (softmax, "at [0, 0]: 0.", lambda s: s.exp() / s.exp().sum()),
    (causal_mask, "torch.float32 instead of torch.bool", lambda T: torch.ones(T, T).tril()),
    (causal_mask, "at query 0: True means", lambda T: torch.ones(T, T).triu(1).bool()),
    (causal_mask, "at query 0: it sees key 1. A row", lambda T: torch.ones(T, T).triu().bool()),
    (causal_mask, "at query 0: it does not see itself", lambda T: torch.ones(T, T).tril(-1).bool()),
    (attention, "at query 0: it sees key 1", lambda q, k, v: softmax(scores(q, k)) @ v),
    (attention, "at query 0: it sees key 1. Its", lambda q, k, v: softmax(scores(q, k).tril()) @ v),
    (attention, "at query 0: its weights add up", lambda q, k, v: softmax(scores(q, k)).tril() @ v),
    (attention, "divide the scores by the root of hs", scaled(lambda nh, T, hs: 1)),
    (attention, "divide by the root of hs, not by hs", scaled(lambda nh, T, hs: 1 / hs)),
    (attention, "divide by the root of hs, not of C", scaled(lambda nh, T, hs: (nh * hs) ** -0.5)),
    (attention, "RuntimeError: ", lambda q, k, v: q @ k),
    (split_heads, "a bare view", lambda x, nh: x.view(len(x), nh, x.size(1), -1)),
    (split_heads, "shape (1, 3, 2, 2) instead of (1, 2,", lambda x, nh: x.unflatten(-1, (nh, -1))),
    (
        layer_norm,
        "divide by C, not",
        lambda x: centred(x) / (x.var(-1, keepdim=True) + 1e-5) ** 0.5,
    ),
    (layer_norm, "each token has its own mean", lambda x: F.layer_norm(x, x.shape)),
    (layer_norm, "0 / 0", lambda x: F.layer_norm(x, x.shape[-1:], eps=0)),
    (mlp_one_token, "GELU is missing", lambda x, fc, proj: proj @ fc @ x),
    (mlp_one_token, "that is ReLU", lambda x, fc, proj: proj @ (fc @ x).relu()),
    (mlp_one_token, "GPT-2 has GELU's tanh form", lambda x, fc, proj: proj @ F.gelu(fc @ x)),
    (cross_entropy, "that is the sum", lambda *inputs: nats(*inputs).sum()),
    (cross_entropy, "that is in bits", lambda *inputs: nats(*inputs).mean() / math.log(2)),
    (cross_entropy, "that is ln 0", lambda *inputs: nats(*inputs).mean()),
    (cross_entropy, "-", lambda *inputs: -nats(*inputs).mean()),
    (bits_per_byte, "that is nats per byte", lambda loss, tokens, n: loss * tokens / n),
    (bits_per_byte, "that is bits per token", lambda loss, *sizes: loss / math.log(2)),
    (bits_per_byte, "a token is more", lambda loss, *sizes: bits_per_byte(loss, *sizes[::-1])),
    (descent_step, "the loss grows", lambda w, loss, rate: descent_step(w, loss, -rate)),
    (descent_step, "multiply the gradient", lambda w, loss, rate: descent_step(w, loss, 1)),
    (top_k, "that is the likeliest alone", lambda x, k: F.one_hot(x.argmax(), len(x))),
    (top_k, "the k probabilities do not add up to 1", lambda x, k: kept(x, k) * x.softmax(dim=0)),
    (top_k, "e^0 is 1", lambda x, k: (kept(x, k) * x).softmax(dim=0)),
    (attend_with_cache, "the new token does not attend to itself", past_alone),
    (attend_with_cache, "it sees token 0 alone", masked_query),
    (attend_with_cache, "not a tuple of 3 values", lambda *inputs: attend_with_cache(*inputs)[0]),
    (attend_with_cache, "shape (1,", lambda *inputs: (attend_with_cache(*inputs)[0], *inputs[3:])),
]
ANSWERS = list(dict.fromkeys(row[0] for row in MISTAKES))  # in the order of the file


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
def test_common_mistakes_are_named(answer):
    """Each hint of the file for one of them."""
    module = exercises()
    check = getattr(module, f"check_{answer.__name__}")
    hints = set().union(*check()) - {"inputs", "right"}
    for _, expected, mistake in (row for row in MISTAKES if row[0] is answer):
        hint = re.sub("^wrong:? ", "", module.verdict(mistake, check))
        assert hint.startswith(expected)
        hints.discard(hint)
    assert not hints
