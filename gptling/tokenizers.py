"""Tokenizers: each is a tiktoken.Encoding, stored as Hugging Face's tokenizer.json.

    tokenizer = build_tokenizer("char", ["some text"])
    ids = encode(tokenizer, "text")                    # numpy array of uint32
    tokenizer.decode(list(ids))                        # "text"

A new kind of tokenizer is a function and an entry in TOKENIZERS.
References: https://github.com/openai/tiktoken, https://huggingface.co/docs/tokenizers, and
Sennrich et al. 2016, byte-pair encoding, https://arxiv.org/abs/1508.07909
"""

import contextlib
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import rustbpe
import tiktoken

from gptling.cli import UserError
from gptling.files import read_json

END_OF_TEXT = "<|endoftext|>"
SAMPLE_PIECE = 1 << 16  # characters that are drawn or left out together
BPE_SAMPLE = 100_000_000  # characters that a BPE is made from, at most
ANY_CHARACTER = r"[\s\S]"  # the pattern of char and byte; Hugging Face's engine refuses (?s:.)
# GPT-2's published tokenizer.json leaves its pattern out: ByteLevel with use_regex stands for it.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# GPT-4's (tiktoken's cl100k_base).
BPE_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
# ByteLevel's printable letter for each byte, which vocabularies are written in: the byte's own
# Latin-1 character if that is visible, otherwise the next one from 256 on.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_TO_LETTER = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(HIDDEN)}
LETTER_TO_BYTE = {letter: byte for byte, letter in BYTE_TO_LETTER.items()}


def make_char(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A token for each character of the texts, in the order of Unicode."""
    occurs = np.zeros(sys.maxunicode + 1, dtype=bool)
    for text in texts:
        occurs[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    tokens = [chr(code).encode() for code in np.flatnonzero(occurs)]
    return _tokenizer("char", ANY_CHARACTER, tokens, end_of_text)


def make_byte(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A token for each byte of UTF-8."""
    return _tokenizer("byte", ANY_CHARACTER, [bytes([i]) for i in range(256)], end_of_text)


def make_bpe(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A byte-level BPE of `vocab_size` tokens (0: 4,096), end-of-text always among them. Raises
    UserError where the texts have too few pairs to merge."""
    trainer = rustbpe.Tokenizer()
    vocab_size = vocab_size or 4096
    sample = iter(draw_sample(texts, BPE_SAMPLE))
    # A few texts at a time, for the trainer copies them.
    trainer.train_from_iterator(sample, vocab_size - 1, buffer_size=256, pattern=BPE_PATTERN)
    ranks = dict(trainer.get_mergeable_ranks())
    if len(ranks) < vocab_size - 1:
        used_up = f"this text is used up at {len(ranks) + 1}"
        raise UserError(f"--vocab_size={vocab_size}: {used_up}: give that or less, or more text")
    return _tokenizer("bpe", BPE_PATTERN, sorted(ranks, key=ranks.get), end_of_text=True)


def bpe_size(n_bytes: int, n_merges: int) -> int:
    """How many tokens a BPE of a text of so many bytes has, 0 where characters are better.
    n_merges: what its characters take, one for each byte after their first, which come on top."""
    if n_bytes < 50_000:  # fitted to the sweeps in docs/one_dial.md
        return 0
    size = 20 * n_bytes ** (1 / 3) if n_bytes >= 500_000 else 512
    return min(1 << round(math.log2(size + n_merges)), 1 << 15)


def make_auto(texts: Iterable[str], vocab_size: int, end_of_text: bool) -> tiktoken.Encoding:
    """A BPE, of a size that the texts' length and characters decide (0); characters where they are
    short, and bytes where they repeat themselves too much for a BPE."""
    if vocab_size:
        return make_bpe(texts, vocab_size, end_of_text)
    n_bytes = 0

    def counted():
        nonlocal n_bytes
        for text in texts:
            n_bytes += len(text.encode())
            yield text

    sample = draw_sample(counted(), BPE_SAMPLE)
    characters = make_char(sample, 0, end_of_text)
    n_merges = sum(len(token) - 1 for token in characters._mergeable_ranks)
    if not (size := bpe_size(n_bytes, n_merges)):
        return characters
    while size >= 512:
        with contextlib.suppress(UserError):  # used up before
            return make_bpe(sample, size, end_of_text)
        size //= 2
    return make_byte(texts, 0, end_of_text)


TOKENIZERS = {"auto": make_auto, "char": make_char, "byte": make_byte, "bpe": make_bpe}


def check_vocab_size(kind: str, vocab_size: int):
    """Raises ValueError for a size, other than 0, that this kind of tokenizer cannot have."""
    if vocab_size and (kind in ("char", "byte") or kind not in TOKENIZERS):
        raise ValueError(f"--vocab_size={vocab_size} is for --tokenizer bpe, not {kind}")
    if vocab_size and not 257 <= vocab_size <= 1_000_000:
        raise ValueError(f"--vocab_size={vocab_size}: from 257 (bytes, end-of-text) to 1,000,000")


def _tokenizer(name, pattern, tokens, end_of_text):
    ranks = {token: i for i, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(ranks)} if end_of_text else {}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def draw_sample(texts: Iterable[str], size: int) -> list[str]:
    """All of the texts, or pieces from everywhere in them, of `size` characters at most."""
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
    tiktoken's, or what load_tokenizer finds, if it has all characters of the texts. Raises
    UserError."""
    if kind in TOKENIZERS:
        return TOKENIZERS[kind](texts, vocab_size, end_of_text)
    path = Path(kind).expanduser()
    if any((path / name).is_file() for name in ("tokenizer.json", "vocab.json")) or is_run(path):
        tokenizer = load_tokenizer(kind)
        for text in () if has_all_bytes(tokenizer) else texts:
            if (character := unknown_character(tokenizer, text)) is not None:
                i = text.index(character)
                around = text[max(0, i - 20) : i + 20]
                what = f"{character!r} (U+{ord(character):04X}), in {around!r}"
                way_out = "leave it out, or take another tokenizer for a new model"
                raise UserError(f"the tokenizer of {kind} does not have {what}: {way_out}")
        return tokenizer
    from gptling.pretrained import HUB_NAMES  # slow to import

    kind = "gpt2" if re.fullmatch(HUB_NAMES, kind) else kind  # they all have the same
    names = [*TOKENIZERS, *sorted(tiktoken.list_encoding_names())]
    if kind not in names:
        there = f"{', '.join(names)}, and the directory of a run, a checkpoint or prepared data"
        raise UserError(f"unknown tokenizer {kind!r}: there are {there}")
    try:
        return tiktoken.get_encoding(kind)
    except OSError as error:  # requests' errors are OSErrors
        words = f"cannot be downloaded ({type(error).__name__}): connect, or set TIKTOKEN_CACHE_DIR"
        raise UserError(f"tokenizer {kind!r} {words}") from None


def has_all_bytes(tokenizer: tiktoken.Encoding) -> bool:
    """Whether a tokenizer can encode every text."""
    return all(bytes([byte]) in tokenizer._mergeable_ranks for byte in range(256))


def encode(tokenizer: tiktoken.Encoding, text: str, what: str = "the text") -> np.ndarray:
    """Token ids, (n,) uint32; special tokens in the text are plain text. Raises UserError for a
    character that the tokenizer lacks: tiktoken itself would abort."""
    if (character := unknown_character(tokenizer, text)) is not None:
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise UserError(f"{what} is not valid UTF-8")
        before = text[: text.index(character)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        what += f", line {line}, column {column}: the tokenizer does not know the character"
        raise UserError(f"{what} {character!r} (U+{ord(character):04X})")
    try:
        return tokenizer.encode_to_numpy(text, disallowed_special=())
    except ValueError as error:  # a pattern that goes back and forth too often
        raise UserError(f"{what}: the tokenizer gives up: {error}") from None


def unknown_character(tokenizer: tiktoken.Encoding, text: str) -> str | None:
    """The first character, in the order of Unicode, that is no text or that the tokenizer lacks."""
    ranks = tokenizer._mergeable_ranks
    for character in sorted(set(text)):
        raw = character.encode(errors="surrogatepass")
        if 0xD800 <= ord(character) <= 0xDFFF:
            return character
        if raw not in ranks and not all(bytes([byte]) in ranks for byte in raw):
            return character
    return None


def start_token(tokenizer: tiktoken.Encoding) -> int:
    """What a text without a prompt starts from: end-of-text, or a newline, or the first token."""
    if END_OF_TEXT in tokenizer.special_tokens_set:
        return tokenizer.eot_token
    return tokenizer._mergeable_ranks.get(b"\n", 0)


def bytes_per_token(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of text each id stands for, (n_vocab,); 0 for special tokens and gaps."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, rank in tokenizer._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def tokenizer_to_json(tokenizer: tiktoken.Encoding) -> str:
    """The text of a tokenizer.json that Hugging Face's tokenizers and load_tokenizer read alike.
    Raises UserError for a tokenizer that cannot be expressed there."""
    if tokenizer._pat_str != ANY_CHARACTER and not has_all_bytes(tokenizer):
        raise UserError(f"tokenizer {tokenizer.name!r}: only one of characters may lack bytes")
    ranks = tokenizer._mergeable_ranks
    letters = {token: token.decode("latin-1").translate(BYTE_TO_LETTER) for token in ranks}
    parts = (_last_parts(ranks, token) for token in sorted(ranks, key=ranks.get))
    pairs = ([letters.get(part) for part in last] for last in parts if len(last) == 2)
    # {1,3}+ is possessive for tiktoken and a repetition for Hugging Face's engine. Nothing follows
    # it in an alternative, so that without the + both mean the same.
    regex = re.sub(r"(\{\d+,\d+\})\+", r"\1", tokenizer._pat_str)
    split = dict(type="Split", pattern={"Regex": regex}, behavior="Isolated", invert=False)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    plain = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
    special = sorted(tokenizer._special_tokens.items(), key=lambda item: item[1])
    content = {
        "added_tokens": [{"id": id, "content": content} | plain for content, id in special],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # as in tiktoken: a piece of text that is a token is that token
            "vocab": {letters[token]: rank for token, rank in ranks.items()},
            "merges": [pair for pair in pairs if None not in pair],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def _last_parts(ranks, token):
    """The parts of `token` when all other merges are done, lowest rank first: where they are two,
    theirs is the one merge by which tiktoken ever arrives at the token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        lowest = min(pairs)
        if lowest == math.inf:
            break
        i = pairs.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def is_run(path: Path) -> bool:  # as list_checkpoints says, without its import of PyTorch
    return any(path.glob("checkpoint-*/metrics.json"))


def load_tokenizer(path: str | Path) -> tiktoken.Encoding:
    """The tokenizer of a data or checkpoint directory, a run, or a GPT-2 of the hub; GPT-2's own
    tokenizer.json is read too, and its vocab.json with merges.txt where that is missing. Raises
    UserError where there is none, or one that is not a byte-level BPE or takes more memory than its
    size allows for."""
    path = Path(path).expanduser()
    if not path.is_dir() or is_run(path):
        from gptling.pretrained import find_checkpoint  # slow to import

        path = find_checkpoint(path)
    file = path / "tokenizer.json"
    published = not file.exists() and file.with_name("vocab.json").exists()
    file = file.with_name("vocab.json") if published else file
    stored = read_json(file)
    try:
        if published:
            lines = file.with_name("merges.txt").read_text(encoding="utf-8").split("\n")
            merges = [line for line in lines if line and not line.startswith("#version")]
            special = {token: id for token, id in stored.items() if token == END_OF_TEXT}
            return _checked_tokenizer(GPT2_PATTERN, special, stored, merges)
        pattern, model = _split_pattern(stored["pre_tokenizer"]), stored["model"]
        special = {token["content"]: token["id"] for token in stored["added_tokens"]}
        return _checked_tokenizer(pattern, special, model["vocab"], model["merges"])
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: not a byte-level BPE like prepare.py's: {reason:.300}") from None


def _split_pattern(pre_tokenizer):
    if pre_tokenizer["type"] == "ByteLevel" and not pre_tokenizer["add_prefix_space"]:
        return GPT2_PATTERN
    split, byte_level = pre_tokenizer["pretokenizers"]
    if split["type"] != "Split" or byte_level["type"] != "ByteLevel" or byte_level["use_regex"]:
        raise ValueError("its pre_tokenizer is another")
    return split["pattern"]["Regex"]


def _checked_tokenizer(pattern, special, vocab, merges):
    ranks = {
        bytes(LETTER_TO_BYTE[letter] for letter in token): id
        for token, id in vocab.items()
        if token not in special
    }
    merges = [merge.split(" ") if type(merge) is str else merge for merge in merges]
    order = [vocab[a + b] for a, b in merges]
    if order != sorted(order):
        raise ValueError("ids that are not in the order of the merges")
    ids = [*ranks.values(), *special.values()]
    limit = 2 * len(ids) + 1024  # tables have a row for each id, so that gaps take memory
    if len(set(ids)) < len(ids) or not all(type(id) is int and 0 <= id < limit for id in ids):
        raise ValueError(f"ids that are not unique, or not from 0 to {limit - 1}")
    if len(pattern) + sum(map(len, special)) > 1 << 18:  # they are compiled
        raise ValueError("its pattern and special tokens are too long")
    safe = pattern
    if pattern not in (ANY_CHARACTER, GPT2_PATTERN, BPE_PATTERN):
        # Each match must begin where the last one ended (\G) and not be empty: tiktoken aborts at
        # an empty one, and leaves out what is between two. \K moves the beginning of a match.
        tiktoken.Encoding("", pat_str=pattern, mergeable_ranks={b"a": 0}, special_tokens={})
        if r"\K" in pattern:
            raise ValueError("its pattern has \\K")
        safe = rf"\G(?:{pattern})(?!\G)|[\s\S]"
    tokenizer = tiktoken.Encoding("", pat_str=safe, mergeable_ranks=ranks, special_tokens=special)
    tokenizer._pat_str, tokenizer.engine_pattern = pattern, safe
    if pattern in (ANY_CHARACTER, BPE_PATTERN):
        tokenizer.name = (
            "bpe" if pattern == BPE_PATTERN else "byte" if has_all_bytes(tokenizer) else "char"
        )
    if pattern != ANY_CHARACTER and not has_all_bytes(tokenizer):
        raise ValueError("it lacks bytes, which only a tokenizer of characters may")
    return tokenizer
