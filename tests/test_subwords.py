"""Subword regularisation: the same text in other tokens, on each pass over it."""

import random

import numpy as np
import pytest

from gptling import subwords
from gptling.files import UserError
from gptling.subwords import find_words, split_word, vary_tokens
from gptling.tokenizers import build_tokenizer
from tests.conftest import assert_equal, read_log, weights
from tests.scripts import MINE, output_of

WORDS = "the cat sat on the mat, and 12 other cats résumed 你好 the catalogue. "
TEXT = "\n".join(WORDS + f"{n} bottles hang there" for n in range(300))


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("bpe", [TEXT], 320)


def tokens_of(tokenizer, text=TEXT):
    return [np.array(tokenizer.encode_ordinary(text), dtype=np.uint16)]


def test_without_dropout_the_tokens_are_those_of_the_tokenizer(tokenizer):
    """tiktoken is the oracle of the merges and of their order."""
    words = find_words(TEXT, tokenizer)
    assert "".join(words) == TEXT
    for word in set(words):
        assert split_word(word, tokenizer, 0.0, random) == tokenizer.encode_ordinary(word)
    shards = tokens_of(tokenizer)
    for varied in vary_tokens(shards, tokenizer, 0.0, seed=0):
        assert np.array_equal(varied, shards[0]) and varied.dtype == np.uint16


def test_each_pass_has_the_same_text_in_other_tokens(tokenizer):
    end = [tokenizer.eot_token]
    texts = [TEXT[:5000] + ".", " ".join("=" * n for n in (3, 64, 65, 9000)) + " ", TEXT[5000:]]
    shards = []
    for text in texts:
        shards += [*tokens_of(tokenizer, text), np.array(end, dtype=np.uint16)]
    ids = np.concatenate(shards)
    passes = vary_tokens(shards, tokenizer, 0.1, seed=1)
    for varied in passes:
        assert tokenizer.decode_bytes(varied.tolist()) == tokenizer.decode_bytes(ids.tolist())
        assert 1.01 < len(varied) / len(ids) < 1.4 and (varied == end[0]).sum() == 3
    assert len({varied.tobytes() for varied in passes}) == len(passes) == 16
    again = vary_tokens(shards, tokenizer, 0.1, seed=1)
    assert all(map(np.array_equal, passes, again))
    assert not np.array_equal(passes[0], vary_tokens(shards, tokenizer, 0.1, seed=2)[0])


def test_a_large_text_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(subwords, "MOST_TOKENS", 1000)
    with pytest.raises(UserError, match=r"--bpe_dropout=0.1: .* tokens, .* give --bpe_dropout=0"):
        vary_tokens(tokens_of(tokenizer), tokenizer, 0.1, seed=0)


def test_a_run_with_other_tokens_resumes_bit_for_bit(tmp_path):
    """Its validation text has the usual ones."""
    (tmp_path / "mine.txt").write_text(TEXT[:6000])
    output_of("prepare.py", "mine.txt", "--tokenizer=bpe", "--vocab_size=320", cwd=tmp_path)
    flags = [*MINE, "--max_iters=6", "--eval_interval=3", "--log_interval=1"]
    flags += ["--bpe_dropout=0.1"]
    for name, more in (("one", []), ("two", ["--keep_last=9"])):
        output_of("train.py", *flags, f"--out_dir=out/{name}", *more, cwd=tmp_path)
    (tmp_path / "out/two/checkpoint-6").rename(tmp_path / "moved")
    output_of("train.py", "--out_dir=out/two", "--resume", cwd=tmp_path)
    assert_equal(weights(tmp_path / "out/one", 6), weights(tmp_path / "out/two", 6))
    usual = ["--bpe_dropout=0", "--max_iters=1", "--out_dir=out/usual"]
    output_of("train.py", *flags, *usual, cwd=tmp_path)
    varied, usual = (read_log(tmp_path / "out" / name) for name in ("one", "usual"))
    assert varied[0]["loss"] != usual[0]["loss"]
    assert varied[-1]["val_tokens"] == usual[-1]["val_tokens"]
