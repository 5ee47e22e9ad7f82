"""Tokenizers: each is a tiktoken.Encoding, stored as Hugging Face's tokenizer.json.

    tokenizer = build_tokenizer("char", ["some text"])
    ids = encode(tokenizer, "text")                    # numpy array of uint32
    tokenizer.decode(list(ids))                        # "text"

A new kind of tokenizer is a function and an entry in TOKENIZERS.
References: https://github.com/openai/tiktoken, https://huggingface.co/docs/tokenizers, and
Sennrich et al. 2016, byte-pair encoding, https://arxiv.org/abs/1508.07909
"""

import functools
import json
import math
import random
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gptling.files import UserError

END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE = 50_000_000  # characters to train a BPE on, at most
SAMPLE_PIECE = 1 << 12  # characters that are drawn or left out together, the longest word of a BPE
LONG_RUN = re.compile(r"([^\W\d_]{2048}|\d{2048}|\s{2048}|(?:[^\w\s]|_){2048})")  # of one kind
ANY_CHARACTER = r"[\s\S]"  # the pattern of char and byte; Hugging Face's engine refuses (?s:.)
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
BPE_PATTERN = (  # GPT-4's (tiktoken's cl100k_base)
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
# ByteLevel writes each byte as a printable letter: the byte's own Latin-1 character if that is
# visible, otherwise the next one from 256 on.
LETTERS = pre_tokenizers.ByteLevel.alphabet()
HIDDEN = [byte for byte in range(256) if chr(byte) not in LETTERS]
BYTE_TO_LETTER = dict(zip(HIDDEN, range(256, 512), strict=False))  # for str.translate
LETTER_TO_BYTE = dict(enumerate(HIDDEN, 256))
# The settings of a tokenizer.json that change tokens, with the values that tiktoken follows.
OFF = (
    "truncation padding normalizer dropout byte_fallback fuse_unk continuing_subword_prefix "
    "end_of_word_suffix special_tokens single_word lstrip rstrip"
).split()
FOLLOWED = dict.fromkeys(OFF, (None, False, "", {})) | {
    "type": ("BPE", "Split", "ByteLevel", "TemplateProcessing"),
    "behavior": ("Isolated", "Removed"),  # of text between matches: there is none
    "special": (True,),
}
PROBE = "".join(map(chr, range(0x250)))  # text of which a pattern may leave out some


def make_char(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A token for each character of the texts, in Unicode order."""
    occurs = np.zeros(0x110000, dtype=bool)  # by code point
    for text in texts:
        occurs[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    tokens = [chr(code).encode() for code in np.flatnonzero(occurs)]
    return _tokenizer("char", ANY_CHARACTER, tokens, end_of_text)


def make_byte(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A token for each byte of UTF-8."""
    return _tokenizer("byte", ANY_CHARACTER, [bytes([i]) for i in range(256)], end_of_text)


def make_bpe(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A byte-level BPE with `vocab_size` tokens, always including end-of-text. 0: 4,096, or fewer
    if the texts have too few pairs to merge. Raises UserError if they have too few for a size."""
    bpe = _train_bpe(draw_sample(texts, BPE_SAMPLE)[0], vocab_size or 4096)
    if bpe.n_vocab < vocab_size:
        raise UserError(f"--vocab_size={vocab_size}: give at most {bpe.n_vocab}, or more text")
    return bpe


def make_auto(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """Characters for a short text, otherwise a BPE. Its size grows with the text and with the
    merges that the text's characters need. A repetitive text may yield fewer tokens."""
    if vocab_size:
        return make_bpe(texts, vocab_size, end_of_text)
    sample, n_bytes = draw_sample(texts, BPE_SAMPLE)
    characters = make_char(sample, 0, end_of_text)
    if n_bytes < 50_000:  # the numbers are fitted: docs/minutes.md
        return characters
    size = 20 * n_bytes ** (1 / 3) if n_bytes >= 500_000 else 512
    size += sum(len(character) - 1 for character in characters._mergeable_ranks)
    return _train_bpe(sample, min(1 << round(math.log2(size)), 1 << 15))


TOKENIZERS = {"auto": make_auto, "char": make_char, "byte": make_byte, "bpe": make_bpe}


def check_vocab_size(kind: str, vocab_size: int):
    """Raise ValueError for a size, other than 0, that this kind of tokenizer cannot have."""
    if vocab_size and (kind in ("char", "byte") or kind not in TOKENIZERS):
        raise ValueError(f"--vocab_size={vocab_size} is for --tokenizer bpe, not {kind}")
    if vocab_size and not 257 <= vocab_size <= 1_000_000:
        raise ValueError(f"--vocab_size={vocab_size}: from 257 (bytes, end-of-text) to 1,000,000")


def draw_sample(texts: Iterable[str], size: int) -> tuple[list[str], int]:
    """Return pieces of all texts, at most `size` characters, and the size in bytes of all texts."""
    sample, length, n_bytes, share, rng = [], 0, 0, 1.0, random.Random(0)
    for text in texts:
        n_bytes += len(text.encode())
        for i in range(0, len(text), SAMPLE_PIECE):
            if rng.random() < share:
                sample.append(text[i : i + SAMPLE_PIECE])
                length += len(sample[-1])
        while length > size:
            share /= 2
            sample = [piece for piece in sample if rng.random() < 0.5]
            length = sum(map(len, sample))
    return sample, n_bytes


def _pre_tokenizer(pattern):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _train_bpe(texts, vocab_size):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = _pre_tokenizer(BPE_PATTERN)
    options = dict(initial_alphabet=LETTERS, show_progress=False)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size - 1, **options))
    bpe.add_special_tokens([END_OF_TEXT])
    return _from_json(json.loads(bpe.to_str()), "bpe")


def _tokenizer(name, pattern, tokens, end_of_text):
    ranks = {token: i for i, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(ranks)} if end_of_text else {}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def build_tokenizer(
    kind: str, texts: Iterable[str] = (), vocab_size: int = 0, end_of_text: bool = True
) -> tiktoken.Encoding:
    """Make one of TOKENIZERS from the texts, or get one of tiktoken's. Raises UserError."""
    if kind in TOKENIZERS:
        return TOKENIZERS[kind](texts, vocab_size, end_of_text)
    names = [*TOKENIZERS, *sorted(tiktoken.list_encoding_names())]
    if kind not in names:
        raise UserError(f"unknown tokenizer {kind!r}: {', '.join(names)}, or a directory")
    try:
        return tiktoken.get_encoding(kind)
    except OSError as error:  # requests' errors are OSErrors
        hint = f"{type(error).__name__}; connect, or set TIKTOKEN_CACHE_DIR"
        raise UserError(f"tokenizer {kind!r} cannot be downloaded: {hint}") from None


@functools.cache
def has_all_bytes(tokenizer: tiktoken.Encoding) -> bool:
    """Whether a tokenizer can encode every text."""
    return all(bytes([byte]) in tokenizer._mergeable_ranks for byte in range(256))


def encode(tokenizer: tiktoken.Encoding, text: str, what: str = "the text") -> np.ndarray:
    """Token ids, (n,) uint32. Special tokens in the text are plain text. Raises UserError for a
    character that the tokenizer lacks, for which tiktoken would abort."""
    for character in () if has_all_bytes(tokenizer) else sorted(set(text)):
        if character.encode(errors="surrogatepass") not in tokenizer._mergeable_ranks:
            raise UserError(f"{what}: the tokenizer lacks {character!r} (U+{ord(character):04X})")
    # A run of 4,096 characters, which is too long for tiktoken's patterns, has one of these places.
    long = any(LONG_RUN.match(text, i) for i in range(0, len(text), 2048))
    parts = LONG_RUN.split(text) if long else [text]
    return np.concatenate([tokenizer.encode_to_numpy(p, disallowed_special=()) for p in parts])


def start_token(tokenizer: tiktoken.Encoding) -> int:
    """The first id of a text without a prompt: end-of-text, else a newline, else token 0."""
    return tokenizer._special_tokens.get(END_OF_TEXT, tokenizer._mergeable_ranks.get(b"\n", 0))


def bytes_per_token(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """The number of bytes of each id, (n_vocab,). Special tokens and unused ids have 0."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, rank in tokenizer._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def tokenizer_to_json(tokenizer: tiktoken.Encoding) -> str:
    """The text of a tokenizer.json for Hugging Face's tokenizers and for load_tokenizer."""
    ranks, special = tokenizer._mergeable_ranks, tokenizer._special_tokens
    letters = {token: token.decode("latin-1").translate(BYTE_TO_LETTER) for token in ranks}
    # tiktoken merges any two tokens that together are a third one, the lowest id first. A piece of
    # text that is a token is that token: ignore_merges.
    splits = ((t[:i], t[i:]) for t in sorted(ranks, key=ranks.get) for i in range(1, len(t)))
    merges = [(letters[a], letters[b]) for a, b in splits if a in ranks and b in ranks]
    vocab = {letters[token]: rank for token, rank in ranks.items()} | special
    stored = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    # Hugging Face's engine would repeat {1,3}+, which is possessive for tiktoken: nothing follows.
    stored.pre_tokenizer = _pre_tokenizer(re.sub(r"(\{\d+,\d+\})\+", r"\1", tokenizer._pat_str))
    stored.decoder = decoders.ByteLevel()
    stored.add_special_tokens([*special])
    return stored.to_str()


def load_tokenizer(directory: str | Path) -> tiktoken.Encoding:
    """Read the tokenizer.json in a directory: tokenizer_to_json's, or another byte-level BPE such
    as GPT-2's. Raises UserError if it is missing or if tiktoken would give other ids."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        hint = f"AutoTokenizer.from_pretrained(NAME).save_pretrained({str(directory)!r})"
        raise UserError(f"{directory}: no tokenizer.json, which transformers makes: {hint}")
    try:
        return _from_json(json.loads(file.read_text(encoding="utf-8")), name="stored")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: not a byte-level BPE as tiktoken reads it: {reason}") from None


def _from_json(stored, name):
    model, added, words = stored["model"], stored["added_tokens"], stored["pre_tokenizer"] or {}
    words = words.get("pretokenizers", [words])
    for part in (stored, model, stored.get("post_processor") or {}, *words, *added):
        for key, values in FOLLOWED.items():
            if part.get(key, values[0]) not in values:
                raise ValueError(f"{key} is {part[key]!s:.60} in {part!s:.60}")
    splits = [part for part in words if part.get("use_regex", True)]
    if len(splits) != 1 or words[-1].get("add_prefix_space", True):
        raise ValueError(f"pre_tokenizer is {words}")
    # GPT-2's published file has a ByteLevel alone, which implies the pattern.
    pattern = splits[0].get("pattern", {"Regex": GPT2_PATTERN})["Regex"]
    special = {token["content"]: token["id"] for token in added}
    letters = {token: id for token, id in model["vocab"].items() if token not in special}
    ranks = {token.translate(LETTER_TO_BYTE).encode("latin-1"): letters[token] for token in letters}
    order = [letters["".join(merge).replace(" ", "")] for merge in model["merges"]]
    if order != sorted(order):
        raise ValueError("ids that are not in the order of the merges")
    bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    if pattern != ANY_CHARACTER and not has_all_bytes(bpe):
        raise ValueError("bytes are missing, which only a character tokenizer may lack")
    if has_all_bytes(bpe) and bpe.decode(bpe.encode_ordinary(PROBE)) != PROBE:
        raise ValueError(f"text is left out by the pattern {pattern}")
    return bpe
