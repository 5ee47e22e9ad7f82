"""Every tokenizer: tiktoken, our tokenizer.json and Hugging Face's reading agree."""

import json
import random

import pytest
import rustbpe
import tiktoken
import tokenizers

from gptling import tokenizers as kinds
from gptling.cli import UserError
from gptling.corpus import embedded_corpus, encode_on_all_cores
from gptling.tokenizers import (
    BPE_PATTERN,
    END_OF_TEXT,
    GPT2_PATTERN,
    LETTER_TO_BYTE,
    build_tokenizer,
    bytes_per_token,
    encode,
    load_tokenizer,
    start_token,
    tokenizer_to_json,
)
from prepare import PrepareConfig, prepare

SAMPLES = (
    "The quick brown fox's 12345 jumps; it'll \t\r\n\n  over    the lazy dog!!\n"
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום عالم नमस्ते ไทย ǅ ﬃ é e\u0301 ½ ² "
    "🙂👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈 \u00a0\u2003\u2028\u3000 \x01\x7f <|endoftext>"
)
PATTERNS = {
    "gpt2": GPT2_PATTERN,
    # As tiktoken's, with possessive quantifiers: cl100k_base and o200k_base.
    "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}


def random_texts(n, alphabet, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(n)]


def unicode_alphabet(seed=0):
    """Characters of all planes, with many of those that split patterns treat differently."""
    rng = random.Random(seed)
    points = [rng.randrange(1, 0x110000) for _ in range(300)]
    others = [chr(point) for point in points if not 0xD800 <= point < 0xE000]  # no surrogates
    return list(SAMPLES) * 3 + list(" \n'") * 30 + others


def small_bpe(pattern):
    """A BPE that Hugging Face's trainer made of the samples, as a tiktoken.Encoding."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    regex = tokenizers.Regex(pattern.replace("}+", "}"))
    split = tokenizers.pre_tokenizers.Split(regex, "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([SAMPLES, *embedded_corpus().values()], trainer)
    ranks = {
        bytes(LETTER_TO_BYTE[letter] for letter in token): id
        for token, id in model.get_vocab().items()
    }
    special = {END_OF_TEXT: len(ranks)}
    return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def agree(tokenizer, directory, texts):
    """tiktoken, its copy through tokenizer.json and Hugging Face's reading of that file agree."""
    (directory / "tokenizer.json").write_text(tokenizer_to_json(tokenizer), encoding="utf-8")
    copy = load_tokenizer(directory)
    other = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert copy.n_vocab == tokenizer.n_vocab == other.get_vocab_size()
    for text in texts:
        ids = tokenizer.encode_ordinary(text)
        assert copy.encode_ordinary(text) == ids
        assert other.encode(text).ids == ids
        assert tokenizer.decode(ids) == copy.decode(ids) == other.decode(ids) == text


@pytest.mark.parametrize("end_of_text", [True, False])
def test_char_agrees_everywhere(tmp_path, end_of_text):
    alphabet = sorted(set(unicode_alphabet()))
    texts = random_texts(3000, alphabet)
    tokenizer = build_tokenizer("char", ["".join(alphabet), *texts], end_of_text=end_of_text)
    assert tokenizer.encode_ordinary("".join(alphabet)) == list(range(len(alphabet)))
    assert tokenizer.n_vocab == len(alphabet) + end_of_text
    agree(tokenizer, tmp_path, [SAMPLES, *texts])


def test_byte_agrees_everywhere(tmp_path):
    tokenizer = build_tokenizer("byte")
    texts = [SAMPLES, *random_texts(3000, unicode_alphabet())]
    assert tokenizer.encode_ordinary(SAMPLES) == list(SAMPLES.encode())
    agree(tokenizer, tmp_path, texts)


@pytest.mark.parametrize("name", PATTERNS)
def test_bpe_agrees_everywhere(tmp_path, name):
    agree(small_bpe(PATTERNS[name]), tmp_path, [SAMPLES, *random_texts(3000, unicode_alphabet())])


def test_a_bpe_of_ones_own_agrees_everywhere_and_with_its_trainer(tmp_path):
    """5,000 fuzzed strings, on a tokenizer that prepare.py trained."""
    texts = [SAMPLES, *embedded_corpus().values()]
    tokenizer = build_tokenizer("bpe", texts, 1000)
    assert tokenizer.n_vocab == 1000 and tokenizer.eot_token == 999
    assert build_tokenizer("bpe", texts).n_vocab == 4096
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), 999, pattern=BPE_PATTERN)
    fuzzed = random_texts(2500, unicode_alphabet()) + random_texts(2500, texts[1] + SAMPLES, seed=1)
    agree(tokenizer, tmp_path, fuzzed)
    for text in fuzzed:
        assert trainer.encode(text) == tokenizer.encode_ordinary(text)


@pytest.mark.slow
def test_gpt2_agrees_everywhere(tmp_path, gpt2_encoding):
    agree(gpt2_encoding, tmp_path, [SAMPLES, *random_texts(3000, unicode_alphabet())])
    assert start_token(load_tokenizer(tmp_path)) == 50256


def test_the_published_form_of_gpt2s_file_is_read(tmp_path, gpt2_encoding):
    """Hugging Face's own file has no pattern: ByteLevel stands for GPT-2's."""
    tokenizer = json.loads(tokenizer_to_json(gpt2_encoding))
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
    tokenizer["model"]["vocab"][END_OF_TEXT] = 50256
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    for text in [SAMPLES, *random_texts(1000, unicode_alphabet())]:
        assert tokenizer.encode_ordinary(text) == gpt2_encoding.encode_ordinary(text)


def test_tokens_in_any_order_are_written_so_that_hugging_face_merges_as_tiktoken():
    """A kind of tokenizer need not give its ids in the order of merges, as a trained BPE does."""
    for seed in range(150):
        rng = random.Random(seed)
        words = {
            "".join(rng.choices("abc", k=rng.randrange(2, 7))) for _ in range(rng.randrange(14))
        }
        tokens = [bytes([i]) for i in range(256)] + [word.encode() for word in sorted(words)]
        rng.shuffle(tokens)
        ranks = {token: i for i, token in enumerate(tokens)}
        special = {END_OF_TEXT: len(ranks)}
        tokenizer = tiktoken.Encoding(
            "any", pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        other = tokenizers.Tokenizer.from_str(tokenizer_to_json(tokenizer))
        for text in random_texts(60, "abcabcabc ", seed):
            assert other.encode(text).ids == tokenizer.encode_ordinary(text), (words, text)


def test_a_tokenizer_that_the_file_cannot_express_is_refused():
    ranks = {b"a": 0, b"b": 1, b"ab": 2, b" ": 3}
    tokenizer = tiktoken.Encoding(
        "mine", pat_str=r"\s|\S+", mergeable_ranks=ranks, special_tokens={}
    )
    with pytest.raises(UserError, match="lack bytes"):
        tokenizer_to_json(tokenizer)


def test_a_new_kind_of_tokenizer_is_one_entry_in_the_table(tmp_path, monkeypatch):
    def make_words(texts, vocab_size, end_of_text):
        words = sorted({word for text in texts for word in text.split(" ")})
        tokens = [bytes([i]) for i in range(256)]
        tokens += [word.encode() for word in words if len(word) > 1]
        ranks = {token: i for i, token in enumerate(tokens)}
        special = {END_OF_TEXT: len(ranks)} if end_of_text else {}
        return tiktoken.Encoding(
            "words", pat_str=r" |[^ ]+", mergeable_ranks=ranks, special_tokens=special
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(kinds.TOKENIZERS, "words", make_words)
    (tmp_path / "a.txt").write_text("to be or not to be that is the question " * 30)
    data = prepare(PrepareConfig(("a.txt",), "words"))
    tokenizer = load_tokenizer(data)
    assert tokenizer.n_vocab == 256 + len("to be or not that is the question".split())
    question = [tokenizer.encode_single_token(word) for word in ("question", " ", "to")]
    assert encode(tokenizer, "question to").tolist() == question
    other = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    assert other.encode("the questions to be").ids == tokenizer.encode("the questions to be")
    assert PrepareConfig(("a.txt",), "words", vocab_size=300).vocab_size == 300


def test_byte_does_not_read_the_texts():
    def texts():
        raise AssertionError("read")
        yield

    assert build_tokenizer("byte", texts(), end_of_text=False).n_vocab == 256


def test_an_unknown_kind_is_refused_with_what_there_is():
    with pytest.raises(UserError, match=r"bqe.*char, byte, bpe, .*gpt2"):
        build_tokenizer("bqe")


def test_a_bpe_is_trained_on_a_bounded_sample_of_all_the_text(monkeypatch):
    monkeypatch.setattr(kinds, "SAMPLE_PIECE", 1000)
    texts = [f"{i} green bottles\n" * 100 for i in range(300)]
    whole = "".join(texts)
    sample = kinds.draw_sample(texts, 50_000)
    assert 20_000 < sum(map(len, sample)) <= 50_000
    places = [whole.index(piece) / len(whole) for piece in sample]
    assert min(places) < 0.2 and max(places) > 0.8
    assert sample == kinds.draw_sample(iter(texts), 50_000)
    assert "".join(kinds.draw_sample(texts, len(whole))) == whole


def test_a_strangers_pattern_loses_no_text_in_threads(tmp_path):
    """tiktoken leaves out what no match covers: copies for threads have the pattern made safe."""
    tokenizer = json.loads(tokenizer_to_json(build_tokenizer("byte")))
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "a+"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    ((_, ids),) = encode_on_all_cores(tokenizer, [(0, "aa bb")])
    assert tokenizer.decode(ids.tolist()) == "aa bb"


def test_bytes_per_token_add_up_to_the_text():
    tokenizer = build_tokenizer("char", [SAMPLES])
    lengths = bytes_per_token(tokenizer)
    assert lengths[encode(tokenizer, SAMPLES)].sum() == len(SAMPLES.encode())
    assert lengths[tokenizer.eot_token] == 0


def test_special_text_is_plain_text():
    tokenizer = build_tokenizer("byte")
    assert encode(tokenizer, END_OF_TEXT).tolist() == list(END_OF_TEXT.encode())


def test_an_unknown_character_is_named_with_its_place():
    tokenizer = build_tokenizer("char", ["ab\n"], end_of_text=False)
    with pytest.raises(UserError, match=r"line 2, column 3.*'🙂' \(U\+1F642\)"):
        encode(tokenizer, "ab\nab🙂")


def test_empty_prompt_starts_from_end_of_text_or_a_newline():
    for alphabet, end_of_text, first in (("ab\n", True, 3), ("\tab\n", False, 1), ("ab", False, 0)):
        assert start_token(build_tokenizer("char", [alphabet], 0, end_of_text)) == first
    assert start_token(build_tokenizer("byte", end_of_text=False)) == ord("\n")


def test_merges_in_another_order_than_their_ids_are_refused(tmp_path):
    """tiktoken merges by id, Hugging Face by the list: texts would get other tokens."""
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257, b"de": 258}
    bpe = tiktoken.Encoding("bpe", pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens={})
    stored = json.loads(tokenizer_to_json(bpe))
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    load_tokenizer(tmp_path)
    merges = stored["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="order of the merges"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pre_tokenizer": {"type": "Whitespace"}}'])
def test_another_tokenizer_json_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
