"""Text to token ids, and the tokenizers.

    python prepare.py                            # the language reference that ships with Python
    python prepare.py shakespeare                # a named download, checked by its sha256
    python prepare.py my.txt notes/ chat.jsonl.gz --tokenizer bpe --vocab_size 4096 --name mine
    python prepare.py hf:HuggingFaceFW/fineweb-edu:sample-10BT:train --tokenizer gpt2
    python prepare.py fineweb_train_*.bin fineweb_val_*.bin --tokenizer gpt2 --name fineweb

writes data/NAME/: train-00000.npy ..., val.npy (token ids), tokenizer.json and meta.json. Documents
are separated by the end-of-text token. The text is read twice, to check it and to encode it, piece
by piece, so that memory stays bounded; once where documents are records (.jsonl, .parquet, hf:) and
the tokenizer is known before. The directory appears whole or not at all; what was stopped goes on
with the same command from data/.NAME.partial.

Every tokenizer is a tiktoken.Encoding and is stored as Hugging Face's tokenizer.json.

References:
- Sennrich et al. 2016, byte-pair encoding, https://arxiv.org/abs/1508.07909
- tiktoken, https://github.com/openai/tiktoken
- the format of tokenizer.json: https://huggingface.co/docs/tokenizers
"""

import array
import collections
import gzip
import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import sys
import threading
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import numpy as np
import tiktoken
from tqdm import tqdm

from config import UserError, load, read_json, run

END_OF_TEXT = "<|endoftext|>"
ANY_CHARACTER = r"[\s\S]"  # the pattern of char and byte; Hugging Face's engine refuses (?s:.)
# GPT-2's published tokenizer.json leaves its pattern out: ByteLevel with use_regex stands for it.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# GPT-4's (tiktoken's cl100k_base).
BPE_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
BPE_SAMPLE = 100_000_000  # characters that a BPE is trained on, at most
VALIDATION = 100_000_000  # characters that validate, at most
TOKENS_PER_SHARD = 100_000_000
SAVE_EVERY = 1 << 26  # characters between the points from which a stopped preparation goes on
RECORDS = (".jsonl", ".jsonl.gz", ".parquet", "hf:")  # files with a document in each record
MAX_JSON = 1 << 26  # bytes of a tokenizer.json, which has about 40 a token
MAX_PATTERN = 1 << 18  # characters of the pattern and the special tokens: they are compiled
# The header that numpy gives a one-dimensional .npy file of unsigned numbers.
NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00v\x00"
    rb"\{'descr': '(<u[24])', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n"
)
PIECE = 1 << 20  # bytes read at a time
SAFE_CUT = re.compile(r"(?s).*[^\W\d_](?=\s)")
DOWNLOADS = {  # name: (address, sha256)
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}


@dataclass
class PrepareConfig:
    sources: tuple[str, ...] = ()  # files, folders, hf:NAME:CONFIG:SPLIT; shakespeare; or nothing
    tokenizer: str = "char"  # char, byte, bpe, a name of tiktoken's such as gpt2, or a checkpoint
    vocab_size: int = 0  # tokens of --tokenizer bpe, end-of-text among them; 0 for 4096
    name: str = ""  # the directory under data/; otherwise called after the first source
    overwrite: bool = False  # replace data/NAME if it is there

    def __post_init__(self):
        plain = Path(self.name).name == self.name != ".." and self.name.isprintable()
        if not plain:
            raise UserError(f"--name {self.name!r}: give a plain name, for a directory under data/")
        if self.vocab_size and self.tokenizer != "bpe":
            raise UserError(
                f"--vocab_size={self.vocab_size} is for --tokenizer bpe, not {self.tokenizer}"
            )
        if self.vocab_size and not 257 <= self.vocab_size <= 1_000_000:
            raise UserError(
                f"--vocab_size={self.vocab_size}: from 257 (bytes and end-of-text) to 1,000,000"
            )


def _package(name, install):
    """An optional package, imported where it is used. Raises UserError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{error}: pip install {install}") from None


# ---------------------------------------------------------------------------- tokenizers


def build_tokenizer(kind: str, alphabet: Iterable[str], end_of_text: bool) -> tiktoken.Encoding:
    """The tokenizer called `kind`: "char" over `alphabet`, "byte", a tiktoken encoding, or that of
    a directory.

    end_of_text: whether char and byte reserve an id for it, behind all others.
    >>> build_tokenizer("char", "abc", end_of_text=True).encode_ordinary("cab")
    [2, 0, 1]
    """
    if kind in ("char", "byte"):
        if kind == "char":
            tokens = [character.encode() for character in sorted(alphabet)]
        else:
            tokens = [bytes([i]) for i in range(256)]
        ranks = {token: i for i, token in enumerate(tokens)}
        special = {END_OF_TEXT: len(ranks)} if end_of_text else {}
        return tiktoken.Encoding(
            kind, pat_str=ANY_CHARACTER, mergeable_ranks=ranks, special_tokens=special
        )
    if Path(kind, "tokenizer.json").is_file():
        encoding = load_tokenizer(kind)
        if not _has_all_bytes(encoding):
            raise UserError(f"tokenizer {kind!r} does not know every text: give one of bytes")
        return encoding
    if kind not in tiktoken.list_encoding_names():
        names = ", ".join(["char", "byte", "bpe", *sorted(tiktoken.list_encoding_names())])
        raise UserError(f"unknown tokenizer {kind!r}: there are {names}")
    try:
        return tiktoken.get_encoding(kind)
    except OSError as error:  # requests' errors are OSErrors
        raise UserError(
            f"tokenizer {kind!r}: no vocabulary ({type(error).__name__}); tiktoken downloads it "
            "once: connect, or set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from None


def _has_all_bytes(encoding):
    return all(bytes([byte]) in encoding._mergeable_ranks for byte in range(256))


def train_bpe(texts: Iterable[str], vocab_size: int) -> tiktoken.Encoding:
    """A byte-level BPE of `vocab_size` tokens, end-of-text the last of them, trained by rustbpe.

    The same texts give the same tokens. Raises UserError where they have too few pairs to merge."""
    trainer = _package("rustbpe", "rustbpe").Tokenizer()
    merges = vocab_size - 257
    log = logging.getLogger("rustbpe")
    with tqdm(desc="train bpe", total=merges, disable=not sys.stderr.isatty()) as progress:

        def show(record):  # "Progress: 1% (39/3839 merges) - ..."
            done = re.search(r"\((\d+)/", record.getMessage())
            progress.update(int(done[1]) - progress.n if done else 0)
            return False

        log.setLevel(logging.INFO)
        log.addFilter(show)
        try:  # a few texts at a time, for the trainer copies them
            trainer.train_from_iterator(
                iter(texts), vocab_size - 1, buffer_size=256, pattern=BPE_PATTERN
            )
        finally:
            log.removeFilter(show)
    ranks = dict(trainer.get_mergeable_ranks())
    if len(ranks) < vocab_size - 1:
        raise UserError(
            f"--vocab_size={vocab_size}: this text is used up at {len(ranks) + 1}; "
            "give that or less, or more text"
        )
    special = {END_OF_TEXT: len(ranks)}
    return tiktoken.Encoding(
        "bpe", pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def encode(encoding: tiktoken.Encoding, text: str, what: str = "the text") -> np.ndarray:
    """Token ids, (n,) uint32; special tokens in the text are plain text.

    Raises UserError for a character that the tokenizer lacks: tiktoken itself would abort.
    """

    def has(token):
        try:
            return encoding.encode_single_token(token) is not None
        except KeyError:
            return False

    for character in sorted(set(text)):
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise UserError(f"{what} is not valid UTF-8")
        raw = character.encode()
        if not (has(raw) or all(has(bytes([byte])) for byte in raw)):
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


def encode_on_all_cores(
    encoding: tiktoken.Encoding, texts: Iterable[tuple[Any, str | None]]
) -> Iterator[tuple[Any, np.ndarray | None]]:
    """(key, ids (n,) uint32) for each (key, text), in order, and None for None; a bounded amount of
    text is under way.

    Threads do, for tiktoken lets go of the interpreter while it encodes, and processes would have
    to be sent the text. Each has an Encoding of its own: one that another thread has used first is
    a quarter slower. Texts go in groups, for short ones would cost more to send than to encode.
    """
    mine = threading.local()

    def work(group):
        if not hasattr(mine, "encoding"):
            mine.encoding = tiktoken.Encoding(
                encoding.name,
                pat_str=encoding._pat_str,
                mergeable_ranks=encoding._mergeable_ranks,
                special_tokens=encoding._special_tokens,
            )
        ids = mine.encoding.encode_to_numpy
        return [
            (key, None if text is None else ids(text, disallowed_special=())) for key, text in group
        ]

    affinity = getattr(os, "sched_getaffinity", None)  # a container may have fewer than the machine
    threads = min(16, len(affinity(0)) if affinity else os.cpu_count() or 1)
    waiting, under_way = collections.deque(), 0  # (characters, future)
    group, length = [], 0
    pool = ThreadPoolExecutor(threads)
    try:
        for key, text in texts:
            group.append((key, text))
            length += len(text or "") + 64  # a short text takes memory too
            if length >= PIECE // 4:
                waiting.append((length, pool.submit(work, group)))
                under_way += length
                group, length = [], 0
            while under_way > 2 * threads * PIECE:
                size, future = waiting.popleft()
                under_way -= size
                yield from future.result()
        waiting.append((length, pool.submit(work, group)))
        for _, future in waiting:
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def start_token(encoding: tiktoken.Encoding) -> int:
    """What a text without a prompt starts from: end-of-text, or a newline, or the first token."""
    if END_OF_TEXT in encoding.special_tokens_set:
        return encoding.eot_token
    try:
        return encoding.encode_single_token(b"\n")
    except KeyError:
        return 0


def bytes_per_token(encoding: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of text each id stands for, (n_vocab,); 0 for special tokens and gaps."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def _byte_letters():
    """ByteLevel's printable letter for each byte, which GPT-2's vocabulary files are written in:
    the byte's own Latin-1 character if that is visible, otherwise the next one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


BYTE_TO_LETTER = _byte_letters()
LETTER_TO_BYTE = {letter: byte for byte, letter in BYTE_TO_LETTER.items()}


def tokenizer_to_json(encoding: tiktoken.Encoding) -> str:
    """The text of a tokenizer.json that Hugging Face's tokenizers and load_tokenizer read alike."""
    ranks = encoding._mergeable_ranks

    def letters(token):
        return token.decode("latin-1").translate(BYTE_TO_LETTER)

    merges = []
    if _has_all_bytes(encoding):  # not char: its tokens have no parts
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            if len(token) > 1:
                parts = _merge(ranks, token, rank)
                if len(parts) == 2:
                    merges.append([letters(part) for part in parts])
    # {1,3}+ is possessive for tiktoken and a repetition for Hugging Face's engine. Nothing follows
    # it in an alternative, so that without the + both mean the same.
    pattern = re.sub(r"(\{\d+,\d+\})\+", r"\1", encoding._pat_str)
    added = [
        {"id": id, "content": content, "special": True}
        | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        for content, id in sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}}
    split |= {"behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, byte_level | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as tiktoken: a piece that is a token is that token
            "vocab": {letters(token): rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False)


def _merge(ranks, token, limit):
    """The parts of `token` after all merges of a rank below `limit`: two for a token of a BPE."""
    parts = [bytes([byte]) for byte in token]
    while True:
        pairs = [ranks.get(a + b, limit) for a, b in itertools.pairwise(parts)]
        if not pairs or min(pairs) >= limit:
            return parts
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def load_tokenizer(path: str | Path) -> tiktoken.Encoding:
    """The tokenizer of a data or checkpoint directory; GPT-2's own tokenizer.json is read too, and
    its vocab.json with merges.txt where that is missing.

    Raises UserError where there is none, or one that is not a byte-level BPE or takes more memory
    than its size allows for."""
    file = Path(path) / "tokenizer.json"
    if not os.path.exists(file) and os.path.exists(file.with_name("vocab.json")):
        file = file.with_name("vocab.json")
    if not os.path.exists(file):
        raise UserError(f"{file}: not found; the tokenizer belongs there")
    tokenizer = read_json(file, MAX_JSON)
    if file.name == "vocab.json":
        tokenizer = _from_vocab(tokenizer, file.with_name("merges.txt"))
    try:
        pattern = _split_pattern(tokenizer["pre_tokenizer"])
        special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        vocab = tokenizer["model"]["vocab"]
        ranks = {
            bytes(LETTER_TO_BYTE[letter] for letter in token): id
            for token, id in vocab.items()
            if token not in special
        }
        merges = [m.split(" ") if type(m) is str else m for m in tokenizer["model"]["merges"]]
        order = [vocab[a + b] for a, b in merges]
        if order != sorted(order):
            raise ValueError("ids that are not in the order of the merges")
        ids = [*ranks.values(), *special.values()]
        limit = 2 * len(ids) + 1024  # tables have a row for each id, so that gaps take memory
        if len(set(ids)) < len(ids) or not all(type(id) is int and 0 <= id < limit for id in ids):
            raise ValueError(f"ids that are not unique, or not from 0 to {limit - 1}")
        if len(pattern) + sum(map(len, special)) > MAX_PATTERN:
            raise ValueError("its pattern and special tokens are too long")
        if pattern != ANY_CHARACTER and not all(bytes([byte]) in ranks for byte in range(256)):
            raise ValueError("it lacks bytes, which only a tokenizer of characters may")
        encoding = tiktoken.Encoding(
            Path(path).name,
            pat_str=_whole_pattern(pattern),
            mergeable_ranks=ranks,
            special_tokens=special,
        )
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{file}: not a byte-level BPE as prepare.py writes it ({error!r:.200})"
        ) from None
    encoding._pat_str = pattern
    return encoding


def _whole_pattern(pattern):
    """`pattern` such that each match begins where the last one ended (\\G) and is not empty, for
    tiktoken aborts at an empty one and leaves out what is between two. Raises ValueError."""
    if pattern in (ANY_CHARACTER, GPT2_PATTERN, BPE_PATTERN):
        return pattern
    tiktoken.Encoding("", pat_str=pattern, mergeable_ranks={b"a": 0}, special_tokens={})
    if r"\K" in pattern:  # moves the beginning of a match
        raise ValueError("its pattern has \\K")
    return rf"\G(?:{pattern})(?!\G)|[\s\S]"


def _from_vocab(vocab, merges_file):
    """What a tokenizer.json would hold instead of GPT-2's vocab.json and merges.txt."""
    try:
        lines = merges_file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"{merges_file}: not found; it belongs beside vocab.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{merges_file}: cannot be read: {error}") from None
    merges = [line for line in lines if line and not line.startswith("#version")]
    special = [{"content": END_OF_TEXT, "id": vocab[END_OF_TEXT]}] if END_OF_TEXT in vocab else []
    return {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "added_tokens": special,
        "model": {"vocab": vocab, "merges": merges},
    }


def _split_pattern(pre_tokenizer):
    if pre_tokenizer["type"] == "ByteLevel" and not pre_tokenizer["add_prefix_space"]:
        return GPT2_PATTERN
    split, byte_level = pre_tokenizer["pretokenizers"]
    if (split["type"], byte_level["type"], byte_level["use_regex"]) != (
        "Split",
        "ByteLevel",
        False,
    ):
        raise ValueError("its pre_tokenizer is another")
    return split["pattern"]["Regex"]


# ---------------------------------------------------------------------------- reading data/NAME


def read_meta(path: str | Path) -> dict[str, Any]:
    """The meta.json of a data directory. Raises UserError for one that prepare.py did not write."""
    file = Path(path) / "meta.json"
    meta = read_json(file)
    if meta.get("format") != 1:
        raise UserError(
            f"{file}: its format is {meta.get('format')!r:.50}, not 1; prepare it again"
        )
    if not re.fullmatch("[0-9a-f]{64}", str(meta.get("sha256"))):
        raise UserError(f"{file}: no sha256 in it; prepare it again")
    return meta


class TokenFile:
    """The token ids of a .npy file, uint16 or uint32; a slice (of step 1) is read when it is asked
    for, where a memory map would keep all it has shown.

    Raises UserError for another array or a damaged file. The header is matched, not evaluated."""

    def __init__(self, file: Path):
        self.file = file
        try:
            if not file.is_file():
                raise FileNotFoundError("no such file")
            with file.open("rb") as f:
                header = NPY_HEADER.fullmatch(f.read(128))
            if not header:
                raise ValueError("not a one-dimensional array of uint16 or uint32")
            self.dtype, self.length = np.dtype(header[1].decode()), int(header[2])
            if file.stat().st_size != 128 + self.length * self.dtype.itemsize:
                raise ValueError(f"its size is not that of the {self.length} ids in its header")
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read: {error}; prepare it again") from None

    def __len__(self):
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.length)
        offset = 128 + start * self.dtype.itemsize
        return np.fromfile(self.file, self.dtype, max(0, stop - start), offset=offset)


# ---------------------------------------------------------------------------- reading text


@dataclass
class HubFile:
    """A file of a data set of the hub: its rows are streamed."""

    name: str
    rows: Any  # a datasets.IterableDataset

    def __str__(self):
        return self.name


def _format(file):
    """What decides how a file is read: its name's ending, "hf:" on the hub, "" for plain text."""
    if isinstance(file, HubFile):
        return "hf:"
    name = file.name.lower() if file else ""
    return next((ending for ending in (*RECORDS, ".bin") if name.endswith(ending)), "")


def find_files(sources: Sequence[str]) -> list[Path | HubFile]:
    """The files among `sources` and below the folders among them, in a fixed order.

    Raises UserError for a file that is missing, and for a folder without text."""
    results = [*Path("data").glob("*/meta.json"), *Path("out").glob("*/log.jsonl")]
    made = {file.parent.resolve() for file in results}  # here, from other text: not read again
    files = []
    for name in sources:
        source = Path(name)
        if name.startswith("hf:"):
            files += _hub_files(name)
            continue
        if not source.exists():
            raise UserError(f"{source}: no such file or folder")
        if source.is_file():
            files.append(source)
            continue
        if not source.is_dir():
            raise UserError(f"{source}: not a file; it is read twice, so save it to one first")
        inside = [file for file in sorted(source.rglob("*")) if file.is_file()]
        inside = [file for file in inside if "/." not in f"/{file.relative_to(source).as_posix()}"]
        inside = [file for file in inside if made.isdisjoint(file.resolve().parents)]
        text = [file for file in inside if _looks_like_text(file)]
        if not text:
            raise UserError(f"{source}: no text in this folder ({len(inside)} files)")
        if len(text) < len(inside):
            first = next(file for file in inside if file not in set(text))
            print(f"{source}: left out {len(inside) - len(text)} files without text, {first} first")
        files += text
    return files


def _hub_files(source):
    """Those of hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT; NAME may be a folder here too."""
    name, config, split, *more = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(more):
        raise UserError(f"{source}: give hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    datasets = _package("datasets", "datasets")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        rows = rows.select_columns("text")
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: {error}") from None
    n = rows.num_shards
    return [HubFile(f"{source}, file {i + 1} of {n}", rows.shard(n, i)) for i in range(n)]


def _looks_like_text(file):
    if _format(file) in (".jsonl.gz", ".parquet"):
        return True
    try:
        with file.open("rb") as f:
            start = f.read(8192)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        return b"\0" not in start and start.decode("utf-8-sig") != ""
    except UnicodeDecodeError as error:
        cut = error.reason == "unexpected end of data" and len(start) == 8192
        return cut  # the last character, which goes on behind what was read


def read_pieces(file: Path | HubFile | None, progress: tqdm) -> Iterator[tuple[str, bool]]:
    """The text of a file as (piece, whether a document ends with it); `progress` counts bytes.

    Records are documents: the "text" of each line of a .jsonl or .jsonl.gz file, of each row of a
    .parquet or hub file. Any other file is one document; None is the embedded corpus. Raises
    UserError for what is not UTF-8 text, with the place.
    """
    try:
        if file is None:
            yield from ((text, True) for text in embedded_corpus().values())
            return
        if isinstance(file, HubFile):
            texts = (text for batch in file.rows.iter(100) for text in batch["text"])
            yield from _read_rows(file, texts, progress)
            return
        with file.open("rb") as raw:
            kind = _format(file)
            if kind == ".parquet":
                yield from _read_rows(file, _read_parquet(file, raw), progress)
            elif kind in RECORDS:
                lines = gzip.open(raw) if kind == ".jsonl.gz" else raw
                yield from _read_jsonl(file, lines, raw, progress)
            else:
                yield from _read_text(file, raw, progress)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _read_text(file, raw, progress):
    text, undecoded, offset = "", b"", 0  # offset: of `undecoded` in the file
    while True:
        chunk = raw.read(PIECE)
        progress.update(len(chunk))
        undecoded += chunk
        try:
            decoded = undecoded.decode("utf-8")
            rest = b""
        except UnicodeDecodeError as error:
            if not chunk or error.end < len(undecoded) or error.reason != "unexpected end of data":
                at = offset + error.start
                raise UserError(
                    f"{file}: not UTF-8 at byte {at} (0x{undecoded[error.start]:02x}): "
                    "save it as UTF-8, if it is a text"
                ) from None
            decoded, rest = undecoded[: error.start].decode("utf-8"), undecoded[error.start :]
        if "\0" in decoded:
            at = offset + len(decoded[: decoded.index("\0")].encode())
            raise UserError(f"{file}: a NUL byte at byte {at}; this is not a text file")
        if offset == 0:
            decoded = decoded.removeprefix("\ufeff")  # the byte-order mark
        offset += len(undecoded) - len(rest)
        text, undecoded = text + decoded, rest
        if not chunk:
            yield text, True
            return
        cut = _safe_cut(text)
        if cut:
            yield text[:cut], False
            text = text[cut:]


def _safe_cut(text):
    """The last place where the pieces can be encoded apart and give the same tokens: before white
    space that follows a letter, where no tokenizer's pattern has a token in common. 0 if nowhere.
    """
    letter_before_space = SAFE_CUT.match(text)
    if letter_before_space:
        return letter_before_space.end()
    return len(text) if len(text) > 16 * PIECE else 0


def _read_jsonl(file, lines, raw, progress):
    done = 0
    for number, line in enumerate(lines, start=1):
        position = raw.tell()
        progress.update(position - done)
        done = position
        if not line.strip():
            continue
        try:
            text = json.loads(line.decode("utf-8-sig"))["text"]
            text.encode()
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: line {number}: not UTF-8 at its byte {error.start}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f'{file}: line {number}: not a JSON object with a "text"') from None
        if "\0" in text:
            raise UserError(f"{file}: line {number}: a NUL character in its text")
        if text:
            yield text, True


def _read_parquet(file, raw):
    parquet = _package("pyarrow.parquet", "datasets")
    try:
        for batch in parquet.ParquetFile(raw).iter_batches(100, columns=["text"]):
            yield from batch.column("text").to_pylist()
    except (ValueError, KeyError) as error:  # ArrowInvalid is a ValueError
        raise UserError(f'{file}: not a Parquet file with a column "text": {error}') from None


def _read_rows(file, texts, progress):
    for number, text in enumerate(texts):
        if not isinstance(text, str | None):
            raise UserError(f'{file}: row {number}: its "text" is {text!r}')
        if text:
            progress.update(len(text))
            yield text, True


def embedded_corpus() -> dict[str, str]:
    """Python's language reference, {topic: text}: about 370 kB of English that is always there.

    A topic that mostly repeats longer ones is left out: validation text must not be trained on.
    Raises UserError where Python was installed without it."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError(
            "this Python comes without pydoc_data, the text of the quick start: "
            "give a text file: python prepare.py my.txt"
        ) from None
    seen, kept = set(), set()
    for topic in sorted(topics, key=lambda topic: -len(topics[topic])):
        lines = set(topics[topic].splitlines())
        if len(lines & seen) < len(lines) / 2:
            kept.add(topic)
        seen |= lines
    return {topic: topics[topic] for topic in sorted(kept)}


def download(name: str, directory: Path) -> Path:
    """Fetch a text of DOWNLOADS into `directory` and check its sha256. Raises UserError."""
    address, expected = DOWNLOADS[name]
    try:
        with urllib.request.urlopen(address, timeout=30) as response:
            content = response.read()
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"{name}: cannot download {address} ({reason}); fetch it with a browser, save it as "
            f"{name}.txt and run: python prepare.py {name}.txt"
        ) from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(f"{name}: what {address} gave has another sha256 than {expected}")
    file = directory / f"{name}.txt"
    file.write_bytes(content)
    return file


# ---------------------------------------------------------------------------- writing tokens


class TokenWriter:
    """Writes token ids into the .npy files `NAME.npy`, or `NAME-00000.npy`, ... with `sharded`.

    tokens, bytes: of the split so far, its ids and the bytes of text they stand for. Files that
    have so many tokens already are written on from there."""

    def __init__(
        self, directory: Path, name: str, dtype: np.dtype, sharded: bool, tokens=0, bytes=0
    ):
        self.directory, self.name, self.dtype, self.sharded = directory, name, dtype, sharded
        self.tokens, self.bytes = tokens, bytes
        self.shards = 1 + max(0, tokens - 1) // TOKENS_PER_SHARD if sharded else 1
        self._open(tokens - (self.shards - 1) * TOKENS_PER_SHARD)

    def _open(self, length=0):
        suffix = f"-{self.shards - 1:05}" if self.sharded else ""
        path = self.directory / f"{self.name}{suffix}.npy"
        self.file = path.open("r+b" if length else "wb")
        self.length = length
        self._write_header()
        self.file.truncate(self.file.tell() + length * self.dtype.itemsize)
        self.file.seek(0, os.SEEK_END)

    def _write_header(self):
        # numpy pads the header so that the length can be written over a shorter one at the end.
        self.file.seek(0)
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def write(self, ids: np.ndarray):
        self.tokens += len(ids)
        while len(ids):
            if self.sharded and self.length == TOKENS_PER_SHARD:
                self.close()
                self.shards += 1
                self._open()
            room = TOKENS_PER_SHARD - self.length if self.sharded else len(ids)
            self.file.write(ids[:room].astype(self.dtype).tobytes())
            self.length += len(ids[:room])
            ids = ids[room:]

    def sync(self):
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self):
        self._write_header()
        self.sync()
        self.file.close()


def validation_size(seen: int) -> int:
    """How many of the first `seen` characters of a corpus validate: a tenth; beyond 100 million
    a smaller and smaller share, spread over all of it (56 million of 10 billion)."""
    if seen <= VALIDATION:
        return seen // 10
    return min(VALIDATION, int(VALIDATION / 10 * (1 + math.log(seen / VALIDATION))))


def training_part(lengths: np.ndarray) -> np.ndarray:
    """How many leading characters of each document train; what is left of it validates.

    lengths (n,): the documents' characters. As many as validation_size says validate: whole
    documents, evenly spread, where there are at least ten and they make up half of it or more;
    otherwise the end of each: a tenth, or VALIDATION in all.
    """
    part, seen, held_out = lengths.copy(), 0, 0
    for i, length in enumerate(lengths.tolist()):
        seen += length
        if held_out + length <= validation_size(seen):
            held_out += length
            part[i] = 0
    if len(lengths) >= 10 and held_out >= validation_size(seen) // 2:
        return part
    return lengths - lengths // max(10, seen // VALIDATION)


def prepare(config: PrepareConfig) -> Path:
    """Write data/NAME/ as `config` says and return it. Raises UserError."""
    sources = list(config.sources)
    first = sources[0] if sources else "quickstart"
    first = Path(first.split(":")[1] if first.startswith("hf:") else first).resolve().name
    endings = r"(?i)\.(txt|md|text|jsonl|jsonl\.gz|parquet|bin)$"
    name = config.name or re.sub(endings, "", first.strip("."))
    target = Path("data") / name
    if os.path.exists(target) and not config.overwrite:  # False for a name that is too long
        raise UserError(
            f"{target} is there already: --overwrite=True replaces it, --name keeps both"
        )
    partial = target.with_name(f".{name}.partial")
    output, progress = partial / "data", partial / "progress.json"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = lock_directory(partial)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        for i, source in enumerate(sources):
            if source in DOWNLOADS and not Path(source).exists():
                sources[i] = str(download(source, partial))
        files = find_files(sources) if sources else [None]
        if any(_format(file) == ".bin" for file in files):
            found = _copy_token_files(config, files, output)
        else:
            found = _encode_files(config, files, output, progress)
        encoding, train, val, documents, characters, digests = found
        meta = {
            "format": 1,
            "tokenizer": config.tokenizer,
            "vocab_size": encoding.n_vocab,
            "documents": documents,
            "characters": characters,
            "train": {"tokens": train.tokens, "bytes": train.bytes, "shards": train.shards},
            "val": {"tokens": val.tokens, "bytes": val.bytes},
            "sha256": digests[0],  # of the texts in UTF-8, each followed by a zero byte
        }
        if len(digests) > 1:  # one for each file
            meta["sha256"] = hashlib.sha256("".join(digests).encode()).hexdigest()
        (output / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            target.rename(partial / "replaced")
        output.rename(target)
    except OSError as error:  # it names the file, where it is not for want of space
        raise UserError(f"{target}: cannot be made: {error}") from None
    finally:
        lock.release()
        if output.exists() and progress.exists():
            print(f"{partial} is kept: the same command goes on from there")
        else:
            shutil.rmtree(partial, ignore_errors=True)
    print(
        f"{target}: {documents:,} document{'s' * (documents != 1)}, {characters:,} characters; "
        f"tokenizer {config.tokenizer} with {encoding.n_vocab:,} tokens; "
        f"{train.tokens:,} tokens to train on, {val.tokens:,} to validate"
    )
    return target


def lock_directory(directory: Path) -> filelock.FileLock:
    """Keep other processes out of `directory` until release() of what is returned; the system takes
    the lock back when this process ends, however it does. Raises UserError where it is taken."""
    lock = filelock.FileLock(directory / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{directory}: another process is writing there; wait for it") from None
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {error.strerror}") from None
    return lock


def _read_all(files, label, digests=None):
    """(n, piece, whether a document ends, digest) for each n-th piece of each file behind those in
    `digests`, which takes the sha256 of each file's texts, each followed by a zero byte; without it
    nothing is hashed."""
    sizes = [file.stat().st_size if isinstance(file, Path) else 0 for file in files]
    first = len(digests or ())
    done, total = sum(sizes[:first]), sum(sizes)
    if any(_format(file) in ("hf:", ".parquet") for file in files):  # of more text than bytes
        done, total = 0, None
    bar = dict(desc=label, initial=done, total=total, unit="B", unit_scale=True)
    with tqdm(**bar, disable=files in ([], [None]) or not sys.stderr.isatty()) as progress:
        for file in files[first:]:
            digest, n = hashlib.sha256(), 0
            for piece, ends in read_pieces(file, progress):
                if piece or n:
                    n += 1
                    if digests is not None:
                        digest.update(piece.encode())
                        digest.update(b"\0" * ends)
                    yield n, piece, ends, digest
            if n == 0:
                raise UserError(f"{file}: no text in it")
            if digests is not None:
                digests.append(digest.hexdigest())


def _codes(text):
    return np.frombuffer(text.encode("utf-32-le"), "<u4")  # of its characters


def _check(files, tokenizer):
    """The first reading: (lengths of the documents, whether a code is there, for "char", texts for
    "bpe": all of it, or parts drawn by chance that make up BPE_SAMPLE at most)."""
    lengths, length, alphabet = array.array("q"), 0, np.zeros(sys.maxunicode + 1, dtype=bool)
    sample, sampled, share, rng = [], 0, 1.0, random.Random(0)
    for _, piece, ends, _ in _read_all(files, "check"):
        length += len(piece)
        if ends:
            lengths.append(length)
            length = 0
        if tokenizer == "char":
            alphabet[_codes(piece)] = True
        for i in range(0, len(piece) if tokenizer == "bpe" else 0, PIECE // 16):
            if rng.random() < share:
                sample.append(piece[i : i + PIECE // 16])
                sampled += len(sample[-1])
        while sampled > BPE_SAMPLE:
            share /= 2
            sample = [text for text in sample if rng.random() < 0.5]
            sampled = sum(map(len, sample))
    return np.array(lengths, dtype=np.int64), alphabet, sample


def _states(files):
    stats = [file.stat() if isinstance(file, Path) else None for file in files]
    pairs = zip(files, stats, strict=True)
    return [[str(file), stat and stat.st_size, stat and stat.st_mtime_ns] for file, stat in pairs]


def _encode_files(config, files, output, progress_file, once=True):
    """Encode `files` into `output`; returns (encoding, writers of train and val, documents,
    characters, digests of the files).

    once: read records only once, where that can be. Every SAVE_EVERY characters, what is written
    is synced and progress_file says how far the reading was: the next call goes on from there."""
    once = once and config.tokenizer not in ("char", "bpe")  # which are made from the text
    once = once and all(_format(file) in RECORDS for file in files)
    lengths, alphabet, sample = _check([] if once else files, config.tokenizer)
    cuts = training_part(lengths)

    same = [config.tokenizer, config.vocab_size, once, _states(files)]
    try:
        state = SimpleNamespace(**json.loads(progress_file.read_text(encoding="utf-8")))
        encoding = load_tokenizer(output) if state.same == same else None
    except (OSError, ValueError, TypeError, AttributeError, UserError):
        encoding = None
    if encoding:
        print(f"going on behind {state.characters:,} characters")
    else:
        progress_file.unlink(missing_ok=True)
        if config.tokenizer == "bpe":
            encoding = train_bpe(sample, config.vocab_size or 4096)
        else:
            several = once or len(lengths) > 1
            characters = map(chr, np.flatnonzero(alphabet))
            encoding = build_tokenizer(config.tokenizer, characters, end_of_text=several)
        _start(output, encoding)
        state = SimpleNamespace(same=same, digests=[], train=[0, 0], val=[0, 0])
        state.pieces, state.digest = 0, ""  # of the file that is being read
        state.documents = state.characters = state.held_out = 0
        state.position = 0  # in the document
    del sample
    has_end = END_OF_TEXT in encoding.special_tokens_set
    separator = np.array([encoding.eot_token] if has_end else [], dtype=np.uint32)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 1 << 16 else np.uint32)
    train = TokenWriter(output, "train", dtype, True, *state.train)
    val = TokenWriter(output, "val", dtype, False, *state.val)

    def parts():
        """(writer, text) in the order of the text; None where a document ends; (state, None) where
        the next call can go on."""
        skip, saved = state.pieces, state.characters
        for n, piece, ends, digest in _read_all(files, "encode", state.digests):
            if skip:  # what was encoded before
                if n == skip and digest.hexdigest() != state.digest:
                    return
                skip = 0 if n == skip else skip
                continue
            if once:
                length = len(piece)
                fits = state.held_out + length <= validation_size(state.characters + length)
                state.held_out += length * fits
                part = 0 if fits else length
            elif state.documents < len(lengths):
                part, length = cuts[state.documents], lengths[state.documents]
            else:
                return  # a file has grown since the first reading
            known = config.tokenizer != "char" or alphabet[_codes(piece)].all()
            if not known or (ends and state.position + len(piece) != length):
                return  # or changed
            cut = max(0, part - state.position)
            for writer, text in ((train, piece[:cut]), (val, piece[cut:])):
                if text:
                    writer.bytes += len(text if text.isascii() else text.encode())
                    yield writer, text
            state.position += len(piece)
            state.characters += len(piece)
            if ends:
                if part > 0:
                    yield train, None
                if part < length:
                    yield val, None
                state.documents, state.position = state.documents + 1, 0
            if state.characters - saved >= SAVE_EVERY:
                saved, state.pieces, state.digest = state.characters, n, digest.hexdigest()
                state.train, state.val = [0, train.bytes], [0, val.bytes]
                yield vars(state) | {"digests": [*state.digests]}, None
        if skip:
            state.digests.clear()  # there is less of the text than there was

    for key, ids in encode_on_all_cores(encoding, parts()):
        if isinstance(key, dict):
            for name, writer in (("train", train), ("val", val)):
                writer.sync()
                key[name][0] = writer.tokens
            new = progress_file.with_suffix(".new")
            new.write_text(json.dumps(key), encoding="utf-8")
            new.replace(progress_file)
        else:
            key.write(separator if ids is None else ids)
    train.close()
    val.close()
    changed = state.documents < len(lengths) or _states(files) != same[-1]
    if len(state.digests) < len(files) or changed:
        progress_file.unlink(missing_ok=True)
        raise UserError("a source changed while it was read: prepare it again")
    few = state.documents < 10 or state.held_out < validation_size(state.characters) // 2
    if once and few:  # as in training_part, which has to know their lengths
        return _encode_files(config, files, output, progress_file, once=False)
    return encoding, train, val, state.documents, state.characters, state.digests


def _start(output, encoding):
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    (output / "tokenizer.json").write_text(tokenizer_to_json(encoding), encoding="utf-8")


def _copy_token_files(config, files, output):
    """Turn token files of llm.c and modded-nanogpt into ours; returns what _encode_files does.

    256 int32 (magic, version, number of tokens), then the ids in uint16:
    https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py"""
    splits = ["val" if "val" in file.name.lower() else "train" for file in files]
    if any(_format(file) != ".bin" for file in files) or len(set(splits)) < 2:
        raise UserError(
            "token files (.bin) come with none of another kind; some have val in their names, "
            "to validate, the others train"
        )
    if config.tokenizer in ("char", "byte", "bpe"):
        raise UserError(f"{files[0]}: add --tokenizer gpt2, or whichever made these ids")
    for file in files:
        with file.open("rb") as f:
            header = np.frombuffer(f.read(1024).ljust(1024, b"\0"), "<i4")
        whole = file.stat().st_size == 1024 + 2 * int(header[2])
        if not whole or header[:2].tolist() != [20240520, 1]:
            raise UserError(f"{file}: not a whole token file (magic 20240520, version 1)")
    encoding = build_tokenizer(config.tokenizer, (), True)
    lengths = bytes_per_token(encoding)
    starts = np.zeros_like(lengths)  # characters that begin in a token
    for token, rank in encoding._mergeable_ranks.items():
        starts[rank] = sum(byte & 0xC0 != 0x80 for byte in token)
    _start(output, encoding)
    train = TokenWriter(output, "train", np.dtype(np.uint16), True)
    val = TokenWriter(output, "val", np.dtype(np.uint16), False)
    documents, characters, digests = 0, 0, []
    for file, split in zip(tqdm(files, disable=not sys.stderr.isatty()), splits, strict=True):
        writer, digest = train if split == "train" else val, hashlib.sha256()
        with file.open("rb") as f:
            f.seek(1024)
            while len(ids := np.frombuffer(f.read(PIECE), "<u2")):
                if ids.max() >= encoding.n_vocab:
                    raise UserError(
                        f"{file}: it has the id {ids.max()}, {config.tokenizer} has "
                        f"{encoding.n_vocab:,} tokens"
                    )
                digest.update(ids)
                writer.write(ids)
                writer.bytes += int(lengths[ids].sum())
                characters += int(starts[ids].sum())
                documents += int((ids == encoding.eot_token).sum())
        digests.append(digest.hexdigest())
    train.close()
    val.close()
    return encoding, train, val, documents, characters, digests


def main():
    config, _ = load(PrepareConfig, __doc__, positional="sources")
    target = prepare(config)
    flag = "" if target.name == "quickstart" else f" --dataset={target.name}"
    print(f"next: python train.py{flag}")


if __name__ == "__main__":
    run(main)
