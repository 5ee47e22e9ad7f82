"""Tokenizers: each is a tiktoken.Encoding, stored as Hugging Face's tokenizer.json.
Byte-pair encoding: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909"""

import json
import math
import random
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gptling.files import UserError

BYTES = [bytes([byte]) for byte in range(256)]
TOKENIZERS = ("auto", "char", "byte", "bpe")  # and tiktoken's
END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE = 50_000_000  # characters to train a BPE on, at most
SAMPLE_PIECE = 1 << 12  # characters that are drawn or left out together, the longest word of a BPE
BPE_WORDS = 5_000_000  # bytes of different words among these: each needs 120 bytes in training
AUTO_CHAR_BYTES = 50_000  # for fewer bytes, "auto" is "char": docs/experiments/planner
ANY_CHARACTER = r"[\s\S]"  # pattern of char and byte: Hugging Face's engine refuses (?s:.)
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# GPT-4's (tiktoken's cl100k_base), but words have marks, such as the vowel signs of Hindi, and the
# joiners of Persian. It is llama.cpp's k2-horizon.
BPE_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)"""
    r"""|[^\r\n\p{L}\p{M}\p{N}\u200C\u200D]?+[\p{L}\p{M}\u200C\u200D]+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
# ByteLevel writes each byte as a printable letter: the byte's own Latin-1 character if that is
# visible, otherwise the next one from 256 on. " é" is b" \xc3\xa9", which it writes as "ĠÃ©".
LETTERS = pre_tokenizers.ByteLevel.alphabet()
HIDDEN = [byte for byte in range(256) if chr(byte) not in LETTERS]
LETTER_TO_BYTE = dict(enumerate(HIDDEN, 256))  # a table of str.translate
BYTE_TO_LETTER = {byte: letter for letter, byte in LETTER_TO_BYTE.items()}
# What patterns, normalizers and merges treat differently: shows whether two tokenizers agree.
PROBE = "".join(map(chr, range(0x250))) + (
    "It doesn't jump (the end).\n\nIT'S 1234567\t\r\n    x == they're \n \n e\u0301 你好 🙂  "
)


class Characters(tiktoken.Encoding):
    """A tokenizer that lacks bytes. If a character has no token, tiktoken's methods end in a panic,
    which `except Exception` does not catch. These raise UserError."""

    def encode_to_numpy(self, text, *, allowed_special=(), disallowed_special=()):
        special = self.special_tokens_set if allowed_special == "all" else {*allowed_special}
        plain = text
        for token in special:
            plain = plain.replace(token, "")
        for c in sorted(set(plain)):
            if c.encode(errors="surrogatepass") not in self._mergeable_ranks:
                raise UserError(f"the tokenizer has no {c!r} (U+{ord(c):04X})")
        return super().encode_to_numpy(text, allowed_special=special, disallowed_special=())

    def encode(self, text, **options):
        return self.encode_to_numpy(text, **options).tolist()

    encode_ordinary = encode


def make_encoding(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]):
    """A tiktoken.Encoding, or Characters if it lacks bytes."""
    kind = tiktoken.Encoding if ranks.keys() >= {*BYTES} else Characters
    return kind(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def to_letters(token: bytes) -> str:
    """b" \xc3\xa9" to "ĠÃ©"."""
    return token.decode("latin-1").translate(BYTE_TO_LETTER)


def to_bytes(letters: str) -> bytes:
    """ "ĠÃ©" to b" \xc3\xa9"."""
    return letters.translate(LETTER_TO_BYTE).encode("latin-1")


def byte_level(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Cuts a text at the matches of a pattern, and writes its bytes as letters."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


def to_tiktoken(name: str, pattern: str, stored: Tokenizer) -> tiktoken.Encoding:
    """The tokens of a byte-level BPE, and its special tokens. Raises ValueError for other ones."""
    special = {}
    for id, token in stored.get_added_tokens_decoder().items():
        if not token.special:
            raise ValueError(f"the added token {token.content} is not special")
        special[token.content] = id
    vocab = stored.get_vocab(with_added_tokens=False)
    ranks = {to_bytes(letters): id for letters, id in vocab.items() if letters not in special}
    return make_encoding(name, pattern, ranks, special)


def draw_sample(texts: Iterable[str]) -> tuple[list[str], int]:
    """Return pieces of all texts, and the texts' size in bytes. BPE_SAMPLE and BPE_WORDS limit the
    pieces: in Chinese, which has no spaces, almost every sentence is a different word."""
    rng = random.Random(0)
    share = 1.0  # the part of the pieces that is drawn
    sample = []
    length = n_bytes = 0
    for text in texts:
        n_bytes += len(text.encode())
        for i in range(0, len(text), SAMPLE_PIECE):
            if rng.random() < share:
                piece = text[i : i + SAMPLE_PIECE]
                sample.append(piece)
                length += len(piece)
        while length > BPE_SAMPLE:
            share /= 2
            sample = [piece for piece in sample if rng.random() < 0.5]
            length = sum(map(len, sample))
    while len("".join({*chain.from_iterable(map(str.split, sample))}).encode()) > BPE_WORDS:
        sample = sample[::2]
    return sample, n_bytes


def characters_of(texts: Iterable[str]) -> list[bytes]:
    """The characters of the texts, each in UTF-8, in Unicode order."""
    occurs = np.zeros(0x110000, dtype=bool)  # one place for each code point
    for text in texts:
        occurs[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    return [chr(code).encode() for code in np.flatnonzero(occurs)]


def choose_size(sample: list[str], n_bytes: int) -> int:
    """Return the vocabulary size of a BPE for a text of n_bytes: 512 for 100 kB, 2048 for 1 MB. A
    character of several bytes needs a merge for each byte but one."""
    # The numbers are fitted: docs/experiments/planner.
    size = 20 * n_bytes ** (1 / 3) if n_bytes >= 500_000 else 512
    size += sum(len(character) - 1 for character in characters_of(sample))
    return 2 ** min(round(math.log2(size)), 15)


def train_bpe(sample: list[str], size: int) -> tiktoken.Encoding:
    """A byte-level BPE of `size` tokens with end-of-text, fewer for a repetitive text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = byte_level(BPE_PATTERN)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=LETTERS, show_progress=False
    )
    bpe.train_from_iterator(sample, trainer)
    bpe.add_special_tokens([END_OF_TEXT])
    return to_tiktoken("bpe", BPE_PATTERN, bpe)


def from_tokens(name: str, tokens: list[bytes], end_of_text: bool) -> tiktoken.Encoding:
    """A tokenizer with these tokens, which are characters or bytes."""
    ranks = {token: i for i, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(ranks)} if end_of_text else {}
    return make_encoding(name, ANY_CHARACTER, ranks, special)


def published_tokenizer(name: str) -> tiktoken.Encoding:
    """One of tiktoken's own. Raises UserError."""
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        if not hasattr(error, "request"):
            raise
        raise UserError(  # the download failed
            f"--tokenizer={name}: connect to the network once, "
            f"or set TIKTOKEN_CACHE_DIR to a folder that has {error.request.url}"
        ) from None
    except ValueError as error:
        raise UserError(
            f"--tokenizer={name}: give one of {TOKENIZERS}, gpt2 or a directory: {error}"
        ) from None


def check_size(tokenizer: tiktoken.Encoding, vocab_size: int) -> tiktoken.Encoding:
    """Return the tokenizer. Raises UserError if another size was asked for."""
    if vocab_size not in (0, tokenizer.n_vocab):
        raise UserError(
            f"--vocab_size={vocab_size}: give {tokenizer.n_vocab}, or more text for a bpe"
        )
    return tokenizer


def build_tokenizer(kind: str, texts: Iterable[str] = (), vocab_size=0, end_of_text=True):
    """Make one of TOKENIZERS from the texts, or get one of tiktoken's. "auto" is a BPE here, of a
    size that suits the texts. Raises UserError."""
    if kind in ("auto", "bpe"):
        sample, n_bytes = draw_sample(texts)
        suitable = choose_size(sample, n_bytes) if kind == "auto" else 4096
        tokenizer = train_bpe(sample, vocab_size or suitable)
    elif kind == "char":
        tokenizer = from_tokens(kind, characters_of(texts), end_of_text)
    elif kind == "byte":
        tokenizer = from_tokens(kind, BYTES, end_of_text)
    else:
        tokenizer = published_tokenizer(kind)
    return check_size(tokenizer, vocab_size)


def bytes_per_token(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """The number of bytes of each id, (n_vocab,). Special tokens and unused ids have 0."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, id in tokenizer._mergeable_ranks.items():
        lengths[id] = len(token)
    return lengths


def has_merges(tokenizer: tiktoken.Encoding) -> bool:
    """Whether a tokenizer is a BPE of all bytes: neither characters, nor bytes alone, nor a class
    of your own."""
    return type(tokenizer) is tiktoken.Encoding and tokenizer._pat_str != ANY_CHARACTER


def encode(tokenizer: tiktoken.Encoding, text: str, special=()) -> np.ndarray:
    """Token ids, (n,) uint32. special: the special tokens that are tokens in the text, any other is
    plain text. Raises UserError for a character that the tokenizer lacks."""
    try:
        return tokenizer.encode_to_numpy(text, allowed_special={*special}, disallowed_special=())
    except ValueError:  # the pattern's engine gives up on a million spaces in a row
        if len(text) < 100_000:
            raise
    middle = len(text) // 2
    halves = text[:middle], text[middle:]
    return np.concatenate([encode(tokenizer, half, special) for half in halves])


def start_token(tokenizer: tiktoken.Encoding) -> int:
    """The first id of a text without a prompt: end-of-text, else a newline, else token 0."""
    return tokenizer._special_tokens.get(END_OF_TEXT, tokenizer._mergeable_ranks.get(b"\n", 0))


def tokenizer_to_json(tokenizer: tiktoken.Encoding) -> str:
    """The text of a tokenizer.json for Hugging Face's tokenizers and for load_tokenizer."""
    ranks = tokenizer._mergeable_ranks
    special = tokenizer._special_tokens
    vocab = {to_letters(token): id for token, id in ranks.items()}
    # tiktoken merges any two tokens that together are a third one, the lowest id first. A piece of
    # text that is a token is that token: ignore_merges.
    merges = []
    for token in sorted(ranks, key=ranks.get):
        letters = to_letters(token)
        for i in range(1, len(token)):
            if token[:i] in ranks and token[i:] in ranks:
                merges.append((letters[:i], letters[i:]))
    stored = Tokenizer(models.BPE(vocab | special, merges, ignore_merges=True))
    # "{1,3}+" is possessive for tiktoken, and for Hugging Face's engine any number of repetitions.
    # "{1,3}" is the same as the first, since nothing in its branch of the pattern follows it.
    pattern = re.sub(r"(\{\d+,\d+\})\+", r"\1", tokenizer._pat_str)
    stored.pre_tokenizer = byte_level(pattern)
    stored.decoder = decoders.ByteLevel()
    stored.add_special_tokens([*special])
    return stored.to_str()


def load_tokenizer(directory: str | Path) -> tiktoken.Encoding:
    """Read the tokenizer.json in a directory: tokenizer_to_json's, or another byte-level BPE such
    as GPT-2's. Raises UserError if it is missing or if tiktoken would give other ids."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{directory}: no tokenizer.json: AutoTokenizer of transformers saves it")
    try:
        stored = Tokenizer.from_file(str(file))
        stored.no_truncation()  # a fine-tuning's would cut the probe
        stored.no_padding()
        parts = json.loads(stored.pre_tokenizer.__getstate__())
        first = parts.get("pretokenizers", [parts])[0]
        # GPT-2's published file has a ByteLevel alone, which implies the pattern.
        pattern = first["pattern"]["Regex"] if "pattern" in first else GPT2_PATTERN
        tokenizer = to_tiktoken("stored", pattern, stored)
    except Exception as error:  # tokenizers raises nothing more special
        raise UserError(f"{file}: not a byte-level BPE for tiktoken: {error!r}") from None
    probe = PROBE
    if isinstance(tokenizer, Characters):
        probe = "".join(c for c in PROBE if c.encode() in tokenizer._mergeable_ranks)
    if stored.encode(probe).ids != tokenizer.encode_ordinary(probe):
        raise UserError(f"{file}: tiktoken gives other ids: add_prefix_space or a normalizer?")
    return tokenizer


def save_tokenizer(tokenizer: tiktoken.Encoding, directory: Path) -> tiktoken.Encoding:
    """Write tokenizer.json. Return what load_tokenizer reads there. Raises UserError if that has
    another class."""
    (directory / "tokenizer.json").write_text(tokenizer_to_json(tokenizer), "utf-8")
    stored = load_tokenizer(directory)
    if type(stored) is not type(tokenizer):
        raise UserError(
            f"tokenizer.json of {tokenizer.name} is read as a plain {type(stored).__name__}: "
            "tokenizer_to_json and load_tokenizer have to know its class"
        )
    return stored
