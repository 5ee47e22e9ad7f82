"""Documents to token files: their split for training and validation, and their encoding."""

import copy
import functools
import hashlib
import os
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from gptling.files import UserError
from gptling.sources import (
    CHUNK,
    MARKUP,
    UNREADABLE,
    UTF8,
    describe_unreadable,
    find_sources,
    is_json,
    read_pieces,
)
from gptling.tokenizers import END_OF_TEXT, encode

# The hash that chooses the validation text. With this salt a tenth of the quick start's text
# validates, which is as difficult as the whole.
start_hash = functools.partial(hashlib.blake2b, digest_size=8, salt=b"695")
GROUP = 1 << 18  # characters that a thread encodes at a time, at least
# Characters that UTF-16 has many of when its bytes are read as UTF-8: NULs between Latin letters,
# 4 before Cyrillic ones. White space, escape and separators of fields are no sign of it.
CONTROLS = bytes([0, *range(2, 9), 11, *range(14, 27)])
MAX_VALIDATION = 20_000_000  # bytes of validation text
TOKENS_PER_SHARD = 50_000_000


def show_reading(pieces: Iterable) -> Iterable:
    """The pieces, with a bar for those of a long text in a terminal."""
    return tqdm(pieces, "reading", unit=" pieces", leave=False, delay=1, disable=None)


def measure(pieces: Iterable[tuple[str, bool]], encoding: str, errors: str) -> tuple[array, int]:
    """Return a hash and a size in bytes for each document of a file, hash, size, hash, size, ...,
    and the number of characters that replace bad bytes. Raises ValueError for more than a
    thousandth of these, and for a binary file, which is text in many an encoding but UTF-8."""
    is_utf8 = encoding == UTF8
    signs = CONTROLS if is_utf8 else b"\0"
    n_bytes = 0
    n_binary = 0
    n_replaced = 0
    is_no_text = False
    found = array("Q")
    content = start_hash()
    size = 0
    for text, is_end in show_reading(pieces):
        raw = text.encode()
        n_bytes += len(raw)
        n_binary += len(raw) - len(raw.translate(None, signs))
        n_replaced += text.count("\ufffd") if errors == "replace" else 0
        content.update(raw)
        size += len(raw)
        if is_end:
            found.extend((int.from_bytes(content.digest()), size))
            content = start_hash()
            size = 0
        is_no_text = n_binary > (n_bytes / 8 if is_utf8 else 0) or n_replaced > n_bytes / 1000
        if is_no_text and n_bytes >= CHUNK:
            break
    if is_no_text:
        raise ValueError("a binary file, or too many bad bytes")
    return found, n_replaced


def validation_bytes(sizes: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """How many bytes at the end of each document are for validation, about a tenth of all. Of ten
    documents or more these are whole ones, chosen by their hashes: documents that are added later
    do not move the others to another split. Of a document with three tenths of the text or more it
    is the end, and of fewer than ten documents too."""
    total = sizes.sum()
    share = min(0.1, MAX_VALIDATION / total)
    held_out = (sizes * share).astype(np.int64)
    if len(sizes) < 10:
        return held_out
    order = hashes.argsort()
    short = order[sizes[order] < 3 * share * total]  # numbers of these documents
    before = sizes[short].cumsum() - sizes[short]  # bytes of those with a lower hash
    is_chosen = (hashes[short] < share * 2**64) | (before < share * total / 10)  # 1 % or more
    held_out[short] = np.where(is_chosen, sizes[short], 0)
    return held_out


def split_documents(pieces: Iterable, sizes: np.ndarray, n_train: np.ndarray):
    """Yield ("train" or "val", text) from the pieces of documents, of which the first n_train bytes
    are to train on. Size 0: left out. An empty text ends a document's part of a split. What a file
    has beyond the sizes has been added since these were measured, and is left out."""
    document = 0
    place = 0  # bytes of the document before this part
    ends = {}  # {split: ""} for those that have a part of the document
    for text, is_end in show_reading(pieces):
        if document == len(sizes):
            break
        raw = text.encode()[: sizes[document] - place]
        head = raw[: max(0, n_train[document] - place)].decode(errors="ignore")
        tail = raw[len(head.encode()) :].decode(errors="ignore")  # whole characters
        place += len(raw)
        for split, part in (("train", head), ("val", tail)):
            if part:
                ends[split] = ""
                yield split, part
        if is_end:
            yield from ends.items()
            document += 1
            place = 0
            ends = {}


class Corpus:
    """The documents of the named sources, equal ones once. `encoding` is for files that are not in
    UTF-8. Downloads are in the directory `downloads`, which must exist as long as the corpus is
    read. `refused` has a line for each file that is left out or a part of it, `n_lost` the bytes of
    those that may be text. Raises UserError if there is no text."""

    def __init__(self, names: Iterable[str], downloads: Path, field="text", encoding=""):
        self.field = field
        self.sources = []  # (file, (its encoding, what to do with errors), number of documents)
        self.refused = []
        self.n_lost = 0
        measured = array("Q")
        for name in names:
            for file in find_sources(name, field, downloads):
                label = name if file.parent == downloads else str(file)
                measured += self.add(file, label, encoding)
        self.refused.sort(key=lambda line: "binary" in line)  # these last
        hashes, sizes = np.array(measured, np.uint64).reshape(-1, 2).T
        sizes = sizes.astype(np.int64)
        with_text = np.flatnonzero(sizes)  # indices of documents
        _, first = np.unique(hashes[with_text], return_index=True)  # indices in with_text
        self.n_documents = len(first)
        self.n_repeated = len(with_text) - len(first)
        if not self.n_documents:
            raise UserError("; ".join(self.refused[:5]) or f"{' '.join(names)}: no text")
        kept = with_text[first]
        self.sizes = np.zeros_like(sizes)  # bytes of each document, 0 for one that is left out
        self.sizes[kept] = sizes[kept]
        self.n_train = np.zeros_like(sizes)  # bytes of each to train on
        self.n_train[kept] = sizes[kept] - validation_bytes(sizes[kept], hashes[kept])

    def add(self, file: Path, name: str, encoding: str) -> array:
        """Measure a file. Remember it as a source, and why it, or a part of it, is left out."""
        # A bad byte spoils one line of records, or one character of a text that has few of them.
        last = "surrogateescape" if is_json(file) else "strict"
        given = UTF8 if encoding.lower() in ("", "utf-8", "utf8") else encoding
        why = ""
        for way in dict.fromkeys([(UTF8, "strict"), (given, last), (UTF8, "replace")]):
            if "replace" in way and "binary" in why:
                break
            reasons = []
            try:
                measured, n_replaced = measure(read_pieces(file, self.field, reasons, *way), *way)
            except UNREADABLE as error:
                if "replace" not in way and "binary" not in why:  # no encoding makes it a text
                    why = describe_unreadable(error)
                continue
            if n_replaced:
                reasons = [f"{n_replaced:,} of its characters became \ufffd: {why}"]
            self.refused += [f"{name}: {reason}" for reason in reasons]
            self.sources.append((file, way, len(measured) // 2))
            return measured
        self.refused.append(f"{name}: {why}")
        if "binary" not in why and os.path.exists(file):
            self.n_lost += os.path.getsize(file)
        return array("Q")

    def notes(self) -> list[str]:
        """Return lines about documents and files that are left out, or have markup."""
        markup = [file for file, *_ in self.sources if MARKUP.search(file.name)]
        counts = {
            "files read as plain text, with their markup": len(markup),
            "repeated documents left out": self.n_repeated,
            "files not read completely": len(self.refused),
        }
        lines = [f"{note}: {n:,}" for note, n in counts.items() if n]
        return lines + [f"  {line}" for line in self.refused[:5]]

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield ("train" or "val", text). An empty text ends a document's part of a split, and
        becomes the end-of-text token."""
        first = 0
        for file, way, n in self.sources:
            pieces = read_pieces(file, self.field, [], *way)
            some = slice(first, first + n)
            yield from split_documents(pieces, self.sizes[some], self.n_train[some])
            first += n


def grouped(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """The texts in lists of GROUP characters or more."""
    group = []
    length = 0
    for split, text in texts:
        group.append((split, text))
        length += len(text) + 64  # a short text takes memory too
        if length >= GROUP:
            yield group
            group = []
            length = 0
    yield group


def encode_on_all_cores(tokenizer: tiktoken.Encoding, texts: Iterable[tuple[str, str]]):
    """Yield (split, ids) for each (split, text), in order, with a bounded amount of text in memory.
    Raises UserError if the tokens of "val" are not its text: bits per byte would be wrong."""
    local = threading.local()
    bytes_of = {id: token for token, id in tokenizer._mergeable_ranks.items()}

    def start_thread():
        local.tokenizer = copy.copy(tokenizer)  # threads that share one wait for each other

    def encode_group(group):  # tiktoken releases the interpreter's lock
        encoded = []
        for split, text in group:
            ids = encode(local.tokenizer, text)
            # A special token has no bytes in bits per byte.
            tokens = (bytes_of.get(id, b"") for id in ids.tolist())
            if split == "val" and b"".join(tokens) != text.encode():
                raise UserError(
                    f"the tokenizer changes the text near {text[:20]!r}: "
                    "bits per byte would be wrong, give another --tokenizer"
                )
            encoded.append((split, ids))
        return encoded

    threads = os.cpu_count()
    waiting = []
    with ThreadPoolExecutor(threads, initializer=start_thread) as pool:
        for group in grouped(texts):
            waiting.append(pool.submit(encode_group, group))
            if len(waiting) > 4 * threads:
                yield from waiting.pop(0).result()
        for future in waiting:
            yield from future.result()


def write_token_files(directory: Path, tokenizer: tiktoken.Encoding, encoded: Iterable[tuple]):
    """Write train-00000.npy, train-00001.npy, ... and val.npy, uint16 or uint32, from (split, ids).
    Empty ids end a document. Returns the tokens of each split, and the sha256 of the ids."""
    dtype = np.dtype(np.uint16 if tokenizer.n_vocab <= 1 << 16 else np.uint32)
    end = [tokenizer.eot_token] if END_OF_TEXT in tokenizer.special_tokens_set else []
    unsaved = {"train": bytearray(), "val": bytearray()}
    hashes = {"train": hashlib.sha256(), "val": hashlib.sha256()}
    n_tokens = Counter()
    shards = count()

    def save(name, split):
        np.save(directory / name, np.frombuffer(unsaved[split], dtype))
        unsaved[split] = bytearray()

    for split, ids in encoded:
        ids = np.array(ids if len(ids) else end, dtype)
        unsaved[split] += ids.tobytes()
        hashes[split].update(ids)
        n_tokens[split] += len(ids)
        if len(unsaved["train"]) >= TOKENS_PER_SHARD * dtype.itemsize:
            save(f"train-{next(shards):05}", "train")
    if unsaved["train"]:
        save(f"train-{next(shards):05}", "train")
    save("val", "val")
    hashes["train"].update(hashes["val"].digest())
    return n_tokens, hashes["train"].hexdigest()
