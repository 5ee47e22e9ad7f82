"""Every tokenizer: tiktoken, our tokenizer.json and Hugging Face's reading agree."""

import json
import random

import pytest
import tiktoken
import tokenizers

import prepare
from config import UserError
from prepare import build_tokenizer, encode, load_tokenizer, start_token, tokenizer_to_json

SAMPLES = (
    "The quick brown fox's 12345 jumps; it'll \t\r\n\n  over    the lazy dog!!\n"
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום عالم नमस्ते ไทย ǅ ﬃ é e\u0301 ½ ² "
    "🙂👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈 \u00a0\u2003\u2028\u3000 \x01\x7f <|endoftext>"
)
PATTERNS = {
    "gpt2": prepare.GPT2_PATTERN,
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
    model.train_from_iterator([SAMPLES, *prepare.embedded_corpus().values()], trainer)
    ranks = {
        bytes(prepare.LETTER_TO_BYTE[letter] for letter in token): id
        for token, id in model.get_vocab().items()
    }
    special = {prepare.END_OF_TEXT: len(ranks)}
    return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def agree(encoding, directory, texts):
    """tiktoken, its copy through tokenizer.json and Hugging Face's reading of that file agree."""
    (directory / "tokenizer.json").write_text(tokenizer_to_json(encoding), encoding="utf-8")
    copy = load_tokenizer(directory)
    other = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert copy.n_vocab == encoding.n_vocab == other.get_vocab_size()
    for text in texts:
        ids = encoding.encode_ordinary(text)
        assert copy.encode_ordinary(text) == ids
        assert other.encode(text).ids == ids
        assert encoding.decode(ids) == copy.decode(ids) == other.decode(ids) == text


@pytest.mark.parametrize("end_of_text", [True, False])
def test_char_agrees_everywhere(tmp_path, end_of_text):
    alphabet = sorted(set(unicode_alphabet()))
    encoding = build_tokenizer("char", alphabet, end_of_text)
    assert encoding.encode_ordinary("".join(alphabet)) == list(range(len(alphabet)))
    agree(encoding, tmp_path, [SAMPLES, *random_texts(3000, alphabet)])


def test_byte_agrees_everywhere(tmp_path):
    encoding = build_tokenizer("byte", [], end_of_text=True)
    texts = [SAMPLES, *random_texts(3000, unicode_alphabet())]
    assert encoding.encode_ordinary(SAMPLES) == list(SAMPLES.encode())
    agree(encoding, tmp_path, texts)


@pytest.mark.parametrize("name", PATTERNS)
def test_bpe_agrees_everywhere(tmp_path, name):
    agree(small_bpe(PATTERNS[name]), tmp_path, [SAMPLES, *random_texts(3000, unicode_alphabet())])


def test_a_bpe_of_ones_own_agrees_everywhere_and_with_its_trainer(tmp_path):
    """5,000 fuzzed strings, on a tokenizer that prepare.py trained."""
    rustbpe = pytest.importorskip("rustbpe", reason="a BPE of one's own: pip install rustbpe")
    texts = [SAMPLES, *prepare.embedded_corpus().values()]
    encoding = prepare.train_bpe(texts, 1000)
    assert encoding.n_vocab == 1000 and encoding.eot_token == 999
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), 999, pattern=prepare.BPE_PATTERN)
    fuzzed = random_texts(2500, unicode_alphabet()) + random_texts(2500, texts[1] + SAMPLES, seed=1)
    agree(encoding, tmp_path, fuzzed)
    for text in fuzzed:
        assert trainer.encode(text) == encoding.encode_ordinary(text)


def test_gpt2_agrees_everywhere(tmp_path, gpt2_encoding):
    agree(gpt2_encoding, tmp_path, [SAMPLES, *random_texts(3000, unicode_alphabet())])
    assert start_token(load_tokenizer(tmp_path)) == 50256


def test_the_published_form_of_gpt2s_file_is_read(tmp_path, gpt2_encoding):
    """Hugging Face's own file has no pattern: ByteLevel stands for GPT-2's."""
    tokenizer = json.loads(tokenizer_to_json(gpt2_encoding))
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
    tokenizer["model"]["vocab"][prepare.END_OF_TEXT] = 50256
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    encoding = load_tokenizer(tmp_path)
    for text in [SAMPLES, *random_texts(1000, unicode_alphabet())]:
        assert encoding.encode_ordinary(text) == gpt2_encoding.encode_ordinary(text)


def test_special_text_is_plain_text():
    encoding = build_tokenizer("byte", [], end_of_text=True)
    assert encode(encoding, prepare.END_OF_TEXT).tolist() == list(prepare.END_OF_TEXT.encode())


def test_an_unknown_character_is_named_with_its_place():
    encoding = build_tokenizer("char", "ab\n", end_of_text=False)
    with pytest.raises(UserError, match=r"line 2, column 3.*'🙂' \(U\+1F642\)"):
        encode(encoding, "ab\nab🙂")


def test_empty_prompt_starts_from_end_of_text_or_a_newline():
    assert start_token(build_tokenizer("char", "ab\n", end_of_text=True)) == 3
    assert start_token(build_tokenizer("char", "ab\n", end_of_text=False)) == 0
    assert start_token(build_tokenizer("char", "ab", end_of_text=False)) == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pre_tokenizer": {"type": "Whitespace"}}'])
def test_another_tokenizer_json_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
