"""Every tokenizer: tiktoken, our tokenizer.json and Hugging Face's reading of it agree."""

import json
import random
from pydoc_data.topics import topics

import numpy as np
import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gptling import tokenizers as kinds
from gptling.files import UserError
from gptling.tokenizers import build_tokenizer, encode, load_tokenizer, tokenizer_to_json

END_OF_TEXT = "<|endoftext|>"
SAMPLES = (
    "The quick brown fox's 12345 jumps; it'll \t\r\n\n  over    the lazy dog!!\n"
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום عالم नमस्ते ไทย ǅ ﬃ é e\u0301 ½ ² 'ſ "
    "🙂👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈 \u00a0\u2003\u2028\u3000 \x01\x7f <|endoftext>"
)
TEXTS = [SAMPLES, *topics.values()]
# cl100k_base's, with tiktoken's possessive quantifiers. Words have neither marks nor joiners.
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


def encoding(pattern, tokens, special=(END_OF_TEXT,)):
    special = {token: i for i, token in enumerate(special)}  # they come first
    ranks = {token: i for i, token in enumerate(tokens, len(special))}
    return tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


BPE = build_tokenizer("bpe", TEXTS, 1000)
TOKENS = sorted(BPE._mergeable_ranks, key=BPE._mergeable_ranks.get)
TOKENIZERS = {
    "char": build_tokenizer("char", [SAMPLES]),
    "byte": build_tokenizer("byte"),
    "bpe": BPE,
    "gpt2's pattern": encoding(kinds.GPT2_PATTERN, TOKENS),
    "cl100k_base's pattern": encoding(CL100K_PATTERN, TOKENS),
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
    assert copy._mergeable_ranks == tokenizer._mergeable_ranks
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
        assert kinds.bytes_per_token(copy)[ids].sum() == len(text.encode())

    agree()


@pytest.mark.slow
def test_gpt2_agrees_everywhere(gpt2_encoding, tmp_path, monkeypatch):
    monkeypatch.setitem(TOKENIZERS, "gpt2", gpt2_encoding)
    test_tiktoken_the_stored_file_and_hugging_face_agree("gpt2", tmp_path)
    assert kinds.start_token(load_tokenizer(tmp_path)) == 50256


def test_tokens_in_any_order_are_stored_so_that_hugging_face_merges_as_tiktoken():
    """A kind of tokenizer need not give its ids in the order of merges, as a trained BPE does."""
    rng = random.Random(0)
    for _ in range(100):
        words = {bytes(rng.choices(b"abc", k=rng.randrange(2, 7))) for _ in range(9)}
        tokens = [*(bytes([i]) for i in range(256)), *sorted(words)]
        rng.shuffle(tokens)
        tokenizer = encoding(kinds.BPE_PATTERN, tokens)
        other = tokenizers.Tokenizer.from_str(tokenizer_to_json(tokenizer))
        text = "".join(rng.choices("abcabcabc ", k=2000))
        assert other.encode(text).ids == tokenizer.encode_ordinary(text), words


# ---------------------------------------------------------------- kinds
@fuzzed
@given(ANY_TEXT)
def test_the_pattern_of_a_bpe_cuts_a_text_without_marks_as_gpt4s(text):
    text = SAMPLES + text + "."  # white space at the end is cut otherwise
    text = regex.sub(r"[\p{M}\u200c\u200d]", "", text)
    assert regex.findall(kinds.BPE_PATTERN, text) == regex.findall(CL100K_PATTERN, text)


@pytest.mark.parametrize("word", ["हिन्दी", "ที่", "தமிழ்", "می\u200cخواهم", "e\u0301te\u0301"])
def test_a_word_has_its_marks_and_is_a_token(word):
    assert regex.findall(kinds.BPE_PATTERN, f"a {word},") == ["a", f" {word}", ","]
    assert len(build_tokenizer("bpe", [f"a {word}, " * 99]).encode(f" {word}")) == 1


def test_each_kind_has_its_tokens_and_end_of_text():
    """A bpe the bytes too, char the characters in Unicode order, and byte UTF-8: special text is
    plain text."""
    assert (BPE.n_vocab, BPE.eot_token, BPE.name) == (1000, 999, "bpe")
    assert build_tokenizer("bpe", TEXTS, end_of_text=False).n_vocab == 4096
    assert build_tokenizer("bpe", ["abab abab"], 257).n_vocab == 257
    assert build_tokenizer("bpe", ["abab abab"]).n_vocab == 260  # ab, abab, " abab"
    char = build_tokenizer("char", ["🙂b", "aé\U0010ffff"])
    assert char.decode(range(5)) == "abé🙂\U0010ffff" and char.eot_token == 5
    assert kinds.bytes_per_token(char).tolist() == [1, 1, 2, 4, 4, 0]
    assert build_tokenizer("char", ["ba"], end_of_text=False).n_vocab == 2
    ids = encode(TOKENIZERS["byte"], SAMPLES + END_OF_TEXT)
    assert ids.tolist() == list((SAMPLES + END_OF_TEXT).encode()) and ids.dtype == np.uint32


def test_a_bpe_is_trained_on_a_bounded_sample_of_all_the_text(monkeypatch):
    monkeypatch.setattr(kinds, "SAMPLE_PIECE", 1000)
    texts = [f"{i} grüne bottles\n" * 100 for i in range(300)]
    whole = "".join(texts)
    assert "".join(kinds.draw_sample(texts)[0]) == whole
    monkeypatch.setattr(kinds, "BPE_SAMPLE", 50_000)
    sample, n_bytes = kinds.draw_sample(texts)
    assert n_bytes == len(whole.encode()) and 20_000 < sum(map(len, sample)) <= 50_000
    assert max(map(len, sample)) == 1000  # no longer words, on which training is slow
    places = [whole.index(piece) / len(whole) for piece in sample]
    assert min(places) < 0.2 and max(places) > 0.8 and 0.45 < sum(places) / len(places) < 0.55
    assert sample == kinds.draw_sample(iter(texts))[0]
    monkeypatch.setattr(kinds, "BPE_WORDS", 5_000)  # of different words: memory
    spaceless = [chr(i) * 1000 for i in range(1000, 1030)]
    assert len(kinds.draw_sample(spaceless)[0]) == 2


def test_auto_takes_a_given_size_or_one_that_suits_the_text():
    """More tokens for more text or characters, and fewer for a repetitive text."""
    sizes = {50_000: 512, 499_999: 512, 10**6: 2048, 10**9: 16_384, 10**12: 32_768}
    assert {n_bytes: kinds.choose_size(["ab"], n_bytes) for n_bytes in sizes} == sizes
    assert kinds.choose_size(["".join(map(chr, range(0x4E00, 0x4E00 + 1000)))], 60_000) == 2048
    assert build_tokenizer("auto", TEXTS, 300).n_vocab == 300
    tokenizer = build_tokenizer("auto", ["12 green bottles\n" * 5000])
    assert tokenizer.name == "bpe" and 257 < tokenizer.n_vocab < 300
    assert len(encode(tokenizer, "12 green bottles\n")) == 4  # 12, " green", ...


def test_a_character_without_a_token_is_an_exception_in_python(tmp_path):
    """In tiktoken it is a panic, which `except Exception` does not catch."""
    tokenizer = build_tokenizer("char", ["aß<|endoftext>"])
    for kind in (tokenizer, load_tokenizer(store(tmp_path, tokenizer_to_json(tokenizer)))):
        assert kind.encode(f"a{END_OF_TEXT}", allowed_special="all")[1] == kind.eot_token
        for method in (kind.encode, kind.encode_ordinary):
            with pytest.raises(UserError, match=r"the tokenizer has no 'ö' \(U\+00F6\)"):
                method("aöß")


@pytest.mark.parametrize("character", [" ", "\n", "a", "="])
def test_a_million_equal_characters_are_encoded(character):
    text = f"a{character * 1_000_000}a"
    for tokenizer in (BPE, TOKENIZERS["gpt2's pattern"]):
        assert tokenizer.decode(encode(tokenizer, text).tolist()) == text


def test_an_empty_prompt_starts_from_end_of_text_or_a_newline():
    for alphabet, end_of_text, first in (("ab\n", True, 3), ("\tab\n", False, 1), ("ab", False, 0)):
        assert kinds.start_token(build_tokenizer("char", [alphabet], 0, end_of_text)) == first


# ---------------------------------------------------------------- strangers' files
STRANGER = tokenizer_to_json(encoding(kinds.GPT2_PATTERN, TOKENS, [END_OF_TEXT, "<pad>"]))
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
SPLIT |= {"pattern": {"Regex": kinds.GPT2_PATTERN}}
PAD = {"SpecialToken": {"id": "<pad>", "type_id": 0}}
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 4096}, "direction": "Left", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "<pad>"}


def sequence(*parts, use_regex=False):
    parts = [*parts, BYTE_LEVEL | {"use_regex": use_regex}]
    return {"type": "Sequence", "pretokenizers": parts}


def plain(token, id):
    return token | {"special": False, "id": id, "content": f"<{id}>"}


def template(*parts):
    parts = [*parts, {"Sequence": {"id": "A", "type_id": 0}}]
    pad = {"<pad>": {"id": "<pad>", "ids": [1], "tokens": ["<pad>"]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": pad}


def changed(key, value):
    stored = json.loads(STRANGER)
    stored[key] = value(stored[key]) if callable(value) else value
    return json.dumps(stored)


READ = [  # what stands in a stranger's file, and is read
    ("model", lambda model: {key: model[key] for key in ("vocab", "merges")}),  # GPT-2's
    ("model", lambda model: model | {"merges": [" ".join(pair) for pair in model["merges"]]}),
    ("added_tokens", lambda tokens: [token | {"normalized": True} for token in tokens]),
    ("post_processor", BYTE_LEVEL | {"add_prefix_space": True}),  # GPT-2's: of offsets
    ("post_processor", template()),  # transformers writes it
    ("truncation", TRUNCATION),  # of a fine-tuning
    ("padding", PADDING),
    ("pre_tokenizer", BYTE_LEVEL),
    ("pre_tokenizer", sequence(SPLIT | {"behavior": "Removed", "invert": True})),
]
REFUSED = [  # what stands in a stranger's file, and is refused
    ("normalizer", {"type": "NFC"}),
    ("post_processor", template(PAD)),
    ("pre_tokenizer", None),
    ("pre_tokenizer", BYTE_LEVEL | {"add_prefix_space": True}),
    ("pre_tokenizer", sequence(SPLIT | {"pattern": {"Regex": r"\d"}})),
    ("pre_tokenizer", sequence(SPLIT | {"pattern": {"Regex": BPE._pat_str}}, use_regex=True)),
    ("model", lambda model: model | {"dropout": 0.5}),
    ("model", lambda model: model | {"merges": model["merges"][::-1]}),
    ("model", lambda model: model | {"vocab": {"a": 0}}),
    ("added_tokens", lambda tokens: [plain(tokens[0], i) for i in range(2000, 2500)]),
]


@pytest.mark.parametrize("key, value", READ)
def test_a_strangers_bpe_is_read_as_hugging_face_reads_it(tmp_path, key, value):
    tokenizer = load_tokenizer(store(tmp_path, changed(key, value)))
    assert (tokenizer.n_vocab, tokenizer._special_tokens) == (1001, {END_OF_TEXT: 0, "<pad>": 1})
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    other.no_truncation()
    other.no_padding()
    for text in TEXTS[:20]:
        assert tokenizer.encode_ordinary(text) == other.encode(text).ids


@pytest.mark.parametrize("key, value", REFUSED)
def test_what_tiktoken_does_not_do_is_refused(tmp_path, key, value):
    with pytest.raises(UserError, match=r"tokenizer\.json: .*tiktoken") as raised:
        load_tokenizer(store(tmp_path, changed(key, value)))
    assert len(str(raised.value)) < 400
