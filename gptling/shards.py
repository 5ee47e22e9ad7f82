"""Documents into token files: which text validates, encoding on all cores, growing .npy files."""

import collections
import hashlib
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gptling.corpus import Source, read
from gptling.files import writing
from gptling.tokenizer_json import copy_tokenizer

VALIDATION = 100_000_000  # bytes of text that validate, at most
TOKENS_PER_SHARD = 100_000_000
GROUP = 1 << 18  # characters that a thread encodes at a time
UNDER_WAY = 1 << 21  # characters for each thread that wait or are encoded, at most


def validation_size(seen: int) -> int:
    """How many of the first `seen` bytes of a corpus validate: a tenth; beyond 100 million a
    smaller and smaller share, spread over all of it (56 million of 10 billion)."""
    if seen <= VALIDATION:
        return seen // 10
    return min(VALIDATION, int(VALIDATION / 10 * (1 + math.log(seen / VALIDATION))))


def training_part(size: int, seen: int, held_out: int, first_sizes: Sequence[int]) -> int:
    """How many leading bytes of a document of `size` bytes train; what is left of it validates.

    seen: bytes of the documents before it, of which `held_out` validate.
    first_sizes: of the first ten documents of the corpus, of all of them where there are fewer.

    Whole documents validate, as many as validation_size allows. Where there are fewer than ten,
    and where one makes up more than three quarters of what is known so far, its last tenth does."""
    known = max(seen + size, sum(first_sizes))
    if len(first_sizes) < 10 or size > 3 * known // 4:
        last_tenth = size // max(10, known // VALIDATION)
        return size - min(last_tenth, max(0, VALIDATION - held_out))
    return 0 if held_out + size <= validation_size(seen + size) else size


# What is counted: documents, characters, and the bytes of text in each split.
NOTHING = {"documents": 0, "characters": 0, "train": 0, "val": 0}


@dataclass
class Place:
    """How far a corpus is read: so many pieces of a source."""

    source: int = 0
    pieces: int = 0
    before: dict[str, int] = field(default_factory=NOTHING.copy)  # in the sources before it
    count: dict[str, int] = field(default_factory=NOTHING.copy)


def split_documents(
    sources: Sequence[Source], first_sizes: Sequence[int], start: Place
) -> Iterator[tuple[Place, str, str]]:
    """(place behind it, "train" or "val", text) for the pieces of the corpus behind `start`, in
    order; an empty text where a document ends there. first_sizes: as for training_part."""
    source, pieces, before, count = start.source, 0, start.before, dict(start.before)
    for i, document in read(sources, "encode", first=source):
        if i != source:
            source, pieces, before = i, 0, dict(count)
        seen = count["train"] + count["val"]
        part = training_part(document.size, seen, count["val"], first_sizes)
        count["documents"] += 1
        for split, text in _split_pieces(document.pieces, part):
            pieces += 1
            count["characters"] += len(text)
            count[split] += len(text.encode())
            if (source, pieces) > (start.source, start.pieces):
                yield Place(source, pieces, before, dict(count)), split, text


def _split_pieces(pieces, part):
    """(split, text) of a document that trains up to the last whole character of its first `part`
    bytes; an empty text behind the last one of each split."""
    splits = {}  # those that have text of the document, in order
    for piece in pieces:
        raw = piece.encode()
        head = piece if len(raw) <= part else raw[: max(part, 0)].decode(errors="ignore")
        part -= len(raw)
        for split, text in (("train", head), ("val", piece[len(head) :])):
            if text:
                splits[split] = True
                yield split, text
    yield from ((split, "") for split in splits)


def encode_on_all_cores(
    encoding: tiktoken.Encoding, texts: Iterable[tuple[Any, str]]
) -> Iterator[tuple[Any, np.ndarray]]:
    """(key, ids (n,) uint32) for each (key, text), in order; a bounded amount of text is under way.

    Threads do, for tiktoken lets go of the interpreter while it encodes, and processes would have
    to be sent the text. Texts go in groups, for short ones would cost more to send than to encode.
    """
    local = threading.local()

    def work(group):
        if not hasattr(local, "encoding"):
            local.encoding = copy_tokenizer(encoding)
        ids = local.encoding.encode_to_numpy
        return [(key, ids(text, disallowed_special=())) for key, text in group]

    affinity = getattr(os, "sched_getaffinity", None)  # a container may have fewer than the machine
    threads = min(16, len(affinity(0)) if affinity else os.cpu_count() or 1)
    waiting, under_way = collections.deque(), 0  # (characters, future)
    group, length = [], 0
    pool = ThreadPoolExecutor(threads)
    try:
        for key, text in texts:
            group.append((key, text))
            length += len(text) + 64  # a short text takes memory too
            if length >= GROUP:
                waiting.append((length, pool.submit(work, group)))
                under_way += length
                group, length = [], 0
            while under_way > threads * UNDER_WAY:
                size, future = waiting.popleft()
                under_way -= size
                yield from future.result()
        waiting.append((length, pool.submit(work, group)))
        for _, future in waiting:
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class TokenFile:
    """A .npy file of token ids that grows: uint16, or uint32 for more than 65,536 tokens.

    length: of the ids that are kept of a file which is there. Raises UserError."""

    def __init__(self, path: Path, dtype: np.dtype, length: int = 0):
        self.path, self.dtype, self.length = path, dtype, length
        with writing(path):
            self.file = path.open("r+b" if length else "wb")
        self.save()

    def save(self):
        """Have the ids so far on the disk, behind a header that counts them."""
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.length,)}
        with writing(self.path):
            self.file.seek(0)
            np.lib.format.write_array_header_1_0(self.file, header)  # padded: it does not grow
            self.file.truncate(self.file.tell() + self.length * self.dtype.itemsize)
            self.file.seek(0, os.SEEK_END)
            self.file.flush()
            os.fsync(self.file.fileno())

    def write(self, ids: np.ndarray):
        with writing(self.path):
            self.file.write(ids.astype(self.dtype).tobytes())
        self.length += len(ids)

    def close(self) -> str:
        """Finish the file; returns its sha256."""
        self.save()
        self.file.close()
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class TokenShards:
    """The token files of a data directory: train-00000.npy, train-00001.npy, ... and val.npy.

    finished: [length, sha256] of the shards that are there already; val_length: of the ids that
    are kept of val.npy. Raises UserError."""

    def __init__(self, directory: Path, n_vocab: int, finished: Iterable = (), val_length: int = 0):
        self.directory, self.finished = directory, list(finished)
        self.dtype = np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)
        self.val = TokenFile(directory / "val.npy", self.dtype, val_length)
        self.shard: TokenFile | None = None

    def write(self, split: str, ids: np.ndarray):
        """Append ids (n,) to "train" or "val"."""
        if split == "train" and self.shard is None:
            path = self.directory / f"train-{len(self.finished):05}.npy"
            self.shard = TokenFile(path, self.dtype)
        (self.shard if split == "train" else self.val).write(ids)

    def is_full(self) -> bool:
        return self.shard is not None and self.shard.length >= TOKENS_PER_SHARD

    def finish_shard(self) -> dict[str, Any]:
        """Close the shard, so that both splits are on the disk as they are now; returns the
        arguments that go on from there."""
        self.val.save()
        self.finished.append([self.shard.length, self.shard.close()])
        self.shard = None
        return {"finished": self.finished, "val_length": self.val.length}

    def close(self) -> str:
        """Finish all files; returns a fingerprint of them, the sha256 of their sha256."""
        if self.shard or not self.finished:
            self.write("train", np.zeros(0, self.dtype))  # there is one shard at least
            self.finish_shard()
        digests = [digest for _, digest in self.finished] + [self.val.close()]
        return hashlib.sha256("".join(digests).encode()).hexdigest()
