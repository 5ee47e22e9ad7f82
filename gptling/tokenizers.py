"""Tokenizers: each is a tiktoken.Encoding, stored as Hugging Face's tokenizer.json.

    encoding = build_tokenizer("char", ["some text"])
    ids = encode(encoding, "text")                    # numpy array of uint32
    encoding.decode(list(ids))                        # "text"

A new kind of tokenizer is a function and an entry in TOKENIZERS.

References:
- Sennrich et al. 2016, byte-pair encoding, https://arxiv.org/abs/1508.07909
- tiktoken, https://github.com/openai/tiktoken
"""

import random
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

from gptling.cli import UserError, optional_package
from gptling.tokenizer_json import ANY_CHARACTER, BPE_PATTERN, END_OF_TEXT, has_all_bytes
from gptling.tokenizer_json import load_tokenizer as load_tokenizer
from gptling.tokenizer_json import tokenizer_to_json as tokenizer_to_json

BPE_SAMPLE = 100_000_000  # characters that a BPE is trained on, at most
SAMPLE_PIECE = 1 << 16  # characters that are drawn or left out together


def make_char(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A token for each character of the texts, in the order of Unicode.

    >>> make_char(["abc"], 0, end_of_text=True).encode_ordinary("cab")
    [2, 0, 1]
    """
    occurs = np.zeros(sys.maxunicode + 1, dtype=bool)
    for text in texts:
        occurs[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    tokens = [chr(code).encode() for code in np.flatnonzero(occurs)]
    return _encoding("char", ANY_CHARACTER, tokens, end_of_text)


def make_byte(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A token for each byte of UTF-8."""
    return _encoding("byte", ANY_CHARACTER, [bytes([i]) for i in range(256)], end_of_text)


def make_bpe(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A byte-level BPE of `vocab_size` tokens (0: 4,096), end-of-text always among them, trained
    by rustbpe on BPE_SAMPLE characters of the texts at most: the same texts give the same tokens.

    Raises UserError where they have too few pairs to merge."""
    trainer = optional_package("rustbpe", "rustbpe").Tokenizer()
    vocab_size = vocab_size or 4096
    sample = iter(draw_sample(texts, BPE_SAMPLE))
    # A few texts at a time, for the trainer copies them.
    trainer.train_from_iterator(sample, vocab_size - 1, buffer_size=256, pattern=BPE_PATTERN)
    ranks = dict(trainer.get_mergeable_ranks())
    tokens = sorted(ranks, key=ranks.get)
    if len(tokens) < vocab_size - 1:
        used_up = f"this text is used up at {len(tokens) + 1}"
        raise UserError(f"--vocab_size={vocab_size}: {used_up}: give that or less, or more text")
    return _encoding("bpe", BPE_PATTERN, tokens, end_of_text=True)


TOKENIZERS = {"char": make_char, "byte": make_byte, "bpe": make_bpe}
FIXED_SIZE = ("char", "byte")  # those of them that have no vocab_size to choose


def check_vocab_size(kind: str, vocab_size: int):
    """Raises ValueError for a size, other than 0, that this kind of tokenizer cannot have."""
    if vocab_size and (kind in FIXED_SIZE or kind not in TOKENIZERS):
        raise ValueError(f"--vocab_size={vocab_size} is for --tokenizer bpe, not {kind}")
    if vocab_size and not 257 <= vocab_size <= 1_000_000:
        raise ValueError(f"--vocab_size={vocab_size}: from 257 (bytes, end-of-text) to 1,000,000")


def _encoding(name, pattern, tokens, end_of_text):
    """tokens: in the order of their ids."""
    ranks = {token: i for i, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(ranks)} if end_of_text else {}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def draw_sample(texts: Iterable[str], size: int) -> list[str]:
    """All of the texts, or pieces from everywhere in them that have `size` characters at most: the
    same ones for the same texts."""
    sample, length, share, rng = [], 0, 1.0, random.Random(0)
    for text in texts:
        for i in range(0, len(text), SAMPLE_PIECE):
            if rng.random() < share:
                sample.append(text[i : i + SAMPLE_PIECE])
                length += len(sample[-1])
        while length > size:
            share /= 2
            sample = [piece for piece in sample if rng.random() < 0.5]
            length = sum(map(len, sample))
    return sample


def build_tokenizer(
    kind: str, texts: Iterable[str] = (), vocab_size: int = 0, end_of_text: bool = True
) -> tiktoken.Encoding:
    """The tokenizer called `kind`: one of TOKENIZERS, which may be made from the texts, one of
    tiktoken's, or that of a data or checkpoint directory. Raises UserError.

    end_of_text: whether char and byte reserve an id for it, behind all others."""
    if kind in TOKENIZERS:
        return TOKENIZERS[kind](texts, vocab_size, end_of_text)
    if Path(kind, "tokenizer.json").is_file():
        encoding = load_tokenizer(kind)
        if not has_all_bytes(encoding):
            raise UserError(f"tokenizer {kind!r} does not know every text: give one of bytes")
        return encoding
    names = sorted(tiktoken.list_encoding_names())
    if kind not in names:
        raise UserError(f"unknown tokenizer {kind!r}: there are {', '.join([*TOKENIZERS, *names])}")
    try:
        return tiktoken.get_encoding(kind)
    except OSError as error:  # requests' errors are OSErrors
        raise UserError(
            f"tokenizer {kind!r}: no vocabulary ({type(error).__name__}); tiktoken downloads it "
            "once: connect, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from None


def encode(encoding: tiktoken.Encoding, text: str, what: str = "the text") -> np.ndarray:
    """Token ids, (n,) uint32; special tokens in the text are plain text.

    Raises UserError for a character that the tokenizer lacks: tiktoken itself would abort."""
    ranks = encoding._mergeable_ranks
    for character in sorted(set(text)):
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise UserError(f"{what} is not valid UTF-8")
        raw = character.encode()
        if raw not in ranks and not all(bytes([byte]) in ranks for byte in raw):
            before = text[: text.index(character)]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            raise UserError(
                f"{what}, line {line}, column {column}: the tokenizer does not know the character "
                f"{character!r} (U+{ord(character):04X}); it was not in the training text"
            )
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError as error:  # a pattern that goes back and forth too often
        raise UserError(f"{what}: the tokenizer gives up: {error}") from None


def start_token(encoding: tiktoken.Encoding) -> int:
    """What a text without a prompt starts from: end-of-text, or a newline, or the first token."""
    if END_OF_TEXT in encoding.special_tokens_set:
        return encoding.eot_token
    return encoding._mergeable_ranks.get(b"\n", 0)


def bytes_per_token(encoding: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of text each id stands for, (n_vocab,); 0 for special tokens and gaps."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths
