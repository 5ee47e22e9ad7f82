"""Every tokenizer: tiktoken, our tokenizer.json and Hugging Face's reading of it agree."""

import collections
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import regex
import requests
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gptling import tokenizers as kinds
from gptling.cli import UserError
from gptling.corpus import embedded_corpus
from gptling.tokenizers import (
    BPE_PATTERN,
    END_OF_TEXT,
    GPT2_PATTERN,
    build_tokenizer,
    bytes_per_token,
    encode,
    load_tokenizer,
    start_token,
    tokenizer_to_json,
)
from tests.conftest import ROOT

SAMPLES = (
    "The quick brown fox's 12345 jumps; it'll \t\r\n\n  over    the lazy dog!!\n"
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום عالم नमस्ते ไทย ǅ ﬃ é e\u0301 ½ ² 'ſ "
    "🙂👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈 \u00a0\u2003\u2028\u3000 \x01\x7f <|endoftext>"
)
TEXTS = [SAMPLES, *embedded_corpus().values()]
# cl100k_base's, with tiktoken's possessive quantifiers.
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
# Any text that is valid UTF-8, with many of the characters and words that patterns split at.
ANY_TEXT = st.lists(
    st.sampled_from([*SAMPLES, " ", "\n", "'ll", "the", "import", " statement"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
).map("".join)
fuzzed = settings(derandomize=True, deadline=None, database=None, max_examples=300)


def with_pattern(pattern):
    """A BPE with the merges of prepare.py's, for another pattern."""
    ranks, special = BPE._mergeable_ranks, BPE._special_tokens
    return tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


BPE = build_tokenizer("bpe", TEXTS, 1000)
TOKENIZERS = {
    "char": build_tokenizer("char", [SAMPLES]),
    "byte": build_tokenizer("byte"),
    "bpe": BPE,
    "gpt2's pattern": with_pattern(GPT2_PATTERN),
    "cl100k_base's pattern": with_pattern(CL100K_PATTERN),
}


def store(directory, content):
    (directory / "tokenizer.json").write_text(content, encoding="utf-8")
    return directory


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tiktoken_the_stored_file_and_hugging_face_agree(name, tmp_path):
    tokenizer = TOKENIZERS[name]
    copy = load_tokenizer(store(tmp_path, tokenizer_to_json(tokenizer)))
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert copy.n_vocab == tokenizer.n_vocab == other.get_vocab_size()
    assert copy.eot_token == tokenizer.eot_token == other.token_to_id(END_OF_TEXT)
    assert tokenizer_to_json(copy) == tokenizer_to_json(tokenizer)
    pieces = [piece for piece, _ in other.pre_tokenizer.pre_tokenize_str("1234567")]
    assert pieces == regex.findall(tokenizer._pat_str, "1234567")

    @fuzzed
    @given(ANY_TEXT)
    def agree(text):
        if name == "char":
            text = "".join(character for character in text if character in SAMPLES)
        ids = encode(tokenizer, text).tolist()
        assert copy.encode_ordinary(text) == other.encode(text).ids == ids
        assert tokenizer.decode(ids) == copy.decode(ids) == other.decode(ids) == text
        assert bytes_per_token(copy)[ids].sum() == len(text.encode())

    agree()


@pytest.mark.slow
def test_gpt2_agrees_everywhere(gpt2_encoding, tmp_path, monkeypatch):
    monkeypatch.setitem(TOKENIZERS, "gpt2", gpt2_encoding)
    test_tiktoken_the_stored_file_and_hugging_face_agree("gpt2", tmp_path)
    assert start_token(load_tokenizer(tmp_path)) == 50256


def test_the_published_form_of_gpt2s_file_is_read(tmp_path, gpt2_encoding):
    """Hugging Face's own file has no pattern: ByteLevel implies GPT-2's."""
    stored = json.loads(tokenizer_to_json(gpt2_encoding))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    stored |= {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": byte_level}
    stored["model"]["vocab"][END_OF_TEXT] = 50256
    stored["model"]["merges"] = [" ".join(merge) for merge in stored["model"]["merges"]]
    tokenizer = load_tokenizer(store(tmp_path, json.dumps(stored)))
    assert tokenizer.encode_ordinary(SAMPLES) == gpt2_encoding.encode_ordinary(SAMPLES)
    assert tokenizer.eot_token == 50256


def test_tokens_in_any_order_are_stored_so_that_hugging_face_merges_as_tiktoken():
    """A kind of tokenizer need not give its ids in the order of merges, as a trained BPE does."""
    for seed in range(150):
        rng = random.Random(seed)
        words = {
            "".join(rng.choices("abc", k=rng.randrange(2, 7))) for _ in range(rng.randrange(14))
        }
        tokens = [bytes([i]) for i in range(256)] + [word.encode() for word in sorted(words)]
        rng.shuffle(tokens)
        tokenizer = kinds._tokenizer("any", BPE_PATTERN, tokens, end_of_text=True)
        other = tokenizers.Tokenizer.from_str(tokenizer_to_json(tokenizer))
        for _ in range(60):
            text = "".join(rng.choices("abcabcabc ", k=rng.randrange(60)))
            assert other.encode(text).ids == tokenizer.encode_ordinary(text), (words, text)


def test_each_merge_of_a_bpe_is_the_most_frequent_pair():
    text = TEXTS[1][:20_000] + SAMPLES
    words = collections.Counter(
        tuple(bytes([byte]) for byte in word.encode()) for word in regex.findall(BPE_PATTERN, text)
    )
    ranks = build_tokenizer("bpe", [text], 400)._mergeable_ranks
    assert {bytes([i]) for i in range(256)} == set(sorted(ranks, key=ranks.get)[:256])
    for token in sorted(ranks, key=ranks.get)[256:]:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        (pair,) = [pair for pair in pairs if b"".join(pair) == token]
        assert pairs[pair] == max(pairs.values())
        merged = collections.Counter()
        for word, count in words.items():
            parts = []
            for part in word:
                whole = bool(parts) and (parts[-1], part) == pair
                parts[-whole:] = [parts[-1] + part] if whole else [*parts, part]
            merged[tuple(parts)] += count
        words = merged


def test_the_size_of_a_bpe_includes_bytes_and_end_of_text():
    assert (BPE.n_vocab, BPE.eot_token, BPE.name) == (1000, 999, "bpe")
    assert build_tokenizer("bpe", TEXTS, end_of_text=False).n_vocab == 4096
    assert build_tokenizer("bpe", ["abab abab"], 257).n_vocab == 257
    with pytest.raises(UserError, match="--vocab_size=261: give at most 260, or more text"):
        build_tokenizer("bpe", ["abab abab"], 261)  # ab, abab, " abab"


def test_a_bpe_is_the_same_in_every_process():
    code = "from gptling.corpus import embedded_corpus; from gptling.tokenizers import *; "
    code += "print(tokenizer_to_json(build_tokenizer('bpe', embedded_corpus().values(), 1000)))"
    digests = set()
    for threads in ("1", "4"):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        assert not out.stderr
        digests.add(hashlib.sha256(out.stdout).hexdigest())
    assert len(digests) == 1


def test_a_bpe_is_trained_on_a_bounded_sample_of_all_the_text(monkeypatch):
    monkeypatch.setattr(kinds, "SAMPLE_PIECE", 1000)
    texts = [f"{i} grüne bottles\n" * 100 for i in range(300)]
    whole = "".join(texts)
    sample, n_bytes = kinds.draw_sample(texts, 50_000)
    assert n_bytes == len(whole.encode()) and 20_000 < sum(map(len, sample)) <= 50_000
    places = [whole.index(piece) / len(whole) for piece in sample]
    assert min(places) < 0.2 and max(places) > 0.8 and 0.3 < sum(places) / len(places) < 0.7
    assert sample == kinds.draw_sample(iter(texts), 50_000)[0]
    assert "".join(kinds.draw_sample(texts, len(whole))[0]) == whole


@pytest.mark.parametrize(
    "n_bytes, characters, name, size",
    [
        (49_999, "ab", "char", 3),
        (50_000, "ab", "bpe", 512),
        (499_999, "ab", "bpe", 512),
        (10**6, "ab", "bpe", 2048),
        (20 * 10**6, "ab", "bpe", 4096),
        (10**9, "ab", "bpe", 16_384),
        (10**12, "ab", "bpe", 32_768),
        (60_000, "".join(map(chr, range(0x4E00, 0x4E00 + 1000))), "bpe", 2048),
    ],
)
def test_the_text_decides_what_its_tokens_are(monkeypatch, n_bytes, characters, name, size):
    def train(texts, vocab_size):
        return kinds._tokenizer("bpe", "a", [b"%d" % i for i in range(vocab_size - 1)], True)

    monkeypatch.setattr(kinds, "draw_sample", lambda texts, size: ([characters], n_bytes))
    monkeypatch.setattr(kinds, "_train_bpe", train)
    tokenizer = build_tokenizer("auto", [characters])
    assert (tokenizer.name, tokenizer.n_vocab) == (name, size)


def test_auto_takes_a_given_size_and_fewer_tokens_for_a_repetitive_text():
    assert build_tokenizer("auto", TEXTS, 300).n_vocab == 300
    tokenizer = build_tokenizer("auto", ["12 green bottles\n" * 5000])
    assert tokenizer.name == "bpe" and 257 < tokenizer.n_vocab < 300
    assert len(encode(tokenizer, "12 green bottles\n")) == 4  # 12, " green", ...


def test_char_has_the_characters_of_the_texts_in_unicode_order():
    tokenizer = build_tokenizer("char", ["🙂b", "aé\U0010ffff"])
    assert tokenizer.decode(range(5)) == "abé🙂\U0010ffff" and tokenizer.eot_token == 5
    assert build_tokenizer("char", ["ba"], end_of_text=False).n_vocab == 2


def test_byte_does_not_read_the_texts():
    def texts():
        raise AssertionError("read")
        yield

    tokenizer = build_tokenizer("byte", texts(), end_of_text=False)
    assert encode(tokenizer, SAMPLES).tolist() == list(SAMPLES.encode())


def test_bytes_per_token_are_those_of_each_token():
    assert bytes_per_token(build_tokenizer("char", ["aé你🙂"])).tolist() == [1, 2, 3, 4, 0]
    ranks = {b"a": 0, b"abc": 3}  # ids 1 and 2 are gaps
    gaps = tiktoken.Encoding("", pat_str=".", mergeable_ranks=ranks, special_tokens={"x": 5})
    assert bytes_per_token(gaps).tolist() == [1, 0, 0, 3, 0, 0]


def test_special_text_is_plain_text():
    ids = encode(build_tokenizer("byte"), END_OF_TEXT)
    assert ids.tolist() == list(END_OF_TEXT.encode()) and ids.dtype == np.uint32


def test_text_that_is_no_utf8_is_named():
    with pytest.raises(UserError, match="--prompt is not valid UTF-8"):
        encode(build_tokenizer("byte"), "a\udce9", "--prompt")


def test_an_empty_prompt_starts_from_end_of_text_or_a_newline():
    for alphabet, end_of_text, first in (("ab\n", True, 3), ("\tab\n", False, 1), ("ab", False, 0)):
        assert start_token(build_tokenizer("char", [alphabet], 0, end_of_text)) == first


def test_a_tokenizer_that_cannot_be_downloaded_is_one_line(monkeypatch):
    def offline(name):
        raise requests.ConnectionError("many words")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match=r"'gpt2'.*ConnectionError.*TIKTOKEN_CACHE_DIR"):
        build_tokenizer("gpt2")


def stranger():
    """The file of a BPE that Hugging Face's tokenizers trained, as GPT-2's: ByteLevel alone."""
    byte_level, trainers = tokenizers.pre_tokenizers.ByteLevel, tokenizers.trainers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    options = dict(vocab_size=500, initial_alphabet=byte_level.alphabet(), show_progress=False)
    special = [END_OF_TEXT, "<pad>"]  # they come first
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=special, **options))
    return tokenizer


def test_a_strangers_bpe_is_read_as_hugging_face_reads_it(tmp_path):
    other = stranger()
    tokenizer = load_tokenizer(store(tmp_path, other.to_str()))
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (500, 0)
    assert tokenizer.special_tokens_set == {END_OF_TEXT, "<pad>"}
    for text in TEXTS:
        assert tokenizer.encode_ordinary(text) == other.encode(text).ids
    template = json.dumps(STORED | {"post_processor": TEMPLATE})
    assert load_tokenizer(store(tmp_path, template)).encode_ordinary(SAMPLES) == (
        tokenizer.encode_ordinary(SAMPLES)
    )


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
TEMPLATE = {"type": "TemplateProcessing", "special_tokens": {}}  # transformers writes it
DIGITS = {"type": "Digits", "individual_digits": True}
STORED = json.loads(stranger().to_str())
MERGES, VOCAB = STORED["model"]["merges"], STORED["model"]["vocab"]
CHANGES = {
    "lower case": {"normalizer": {"type": "Lowercase"}},
    "start of text": {"post_processor": TEMPLATE | {"special_tokens": {"<s>": {"ids": [1]}}}},
    "prefix space": {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
    "no pattern": {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
    "whitespace": {"pre_tokenizer": {"type": "Whitespace"}},
    "digits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}},
    "digits alone": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS]}},
    "other merges": {"model": {"vocab": VOCAB, "merges": MERGES[::-1]}},
    "a byte less": {"model": {"vocab": {k: VOCAB[k] for k in VOCAB if k != "Ċ"}, "merges": MERGES}},
    "no byte": {"model": {"vocab": VOCAB | {"中": 1000}, "merges": MERGES}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_tiktoken_would_encode_otherwise_is_refused(tmp_path, change):
    stored = STORED | CHANGES[change]
    with pytest.raises(UserError, match=r"tokenizer\.json: not a byte-level BPE"):
        load_tokenizer(store(tmp_path, json.dumps(stored)))


@pytest.mark.parametrize("content", ["", "[]", "{}", tokenizer_to_json(BPE)[:-10]])
def test_a_damaged_tokenizer_json_is_named(tmp_path, content):
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(store(tmp_path, content))
