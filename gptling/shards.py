"""Documents into token files: which text validates, encoding on all cores, growing .npy files."""

import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gptling.corpus import Source, read
from gptling.files import sha256
from gptling.tokenizers import END_OF_TEXT, build_tokenizer, has_all_bytes

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
    seen: bytes of the documents before it, of which `held_out` validate; first_sizes: of the first
    ten documents of the corpus. Whole documents validate, as validation_size allows; of less than
    ten, and of one with more than three quarters of what is known so far, the last tenth does."""
    known = max(seen + size, sum(first_sizes))
    if len(first_sizes) < 10 or size > 3 * known // 4:
        last_tenth = size // max(10, known // VALIDATION)
        return size - min(last_tenth, max(0, VALIDATION - held_out))
    return 0 if held_out + size <= validation_size(seen + size) else size


NO_TEXT = {"documents": 0, "characters": 0, "train": 0, "val": 0}  # the splits' in bytes


@dataclass
class CorpusPosition:
    """How far a corpus is read. source: the index of the one being read; pieces: how many of it are
    done; count: totals up to here; before: where that source began, for it is read again."""

    source: int = 0
    pieces: int = 0
    before: dict[str, int] = field(default_factory=NO_TEXT.copy)
    count: dict[str, int] = field(default_factory=NO_TEXT.copy)


def split_documents(
    sources: Sequence[Source], first_sizes: Sequence[int], start: CorpusPosition, label="encode"
) -> Iterator[tuple[CorpusPosition, str, str]]:
    """(position behind it, "train" or "val", text) for the pieces of the corpus behind `start`, in
    order; an empty text where a document ends there."""
    at = CorpusPosition(start.source, 0, start.before, dict(start.before))
    for source, (size, pieces) in read(sources, label, first=start.source):
        if source != at.source:
            at = CorpusPosition(source, 0, at.count, dict(at.count))
        seen = at.count["train"] + at.count["val"]
        part = training_part(size, seen, at.count["val"], first_sizes)
        at.count["documents"] += 1
        for split, text, n_bytes in _split_pieces(pieces, part):
            at.pieces += 1
            at.count["characters"] += len(text)
            at.count[split] += n_bytes
            if (at.source, at.pieces) > (start.source, start.pieces):
                yield replace(at, count=dict(at.count)), split, text


def _split_pieces(pieces, part):
    """(split, text, its bytes) of a document that trains up to the last whole character of its
    first `part` bytes; an empty text behind the last one of each split."""
    splits = {}  # those that have text of the document, in order
    for piece in pieces:
        raw = piece.encode()
        head = piece if len(raw) <= part else raw[: max(part, 0)].decode(errors="ignore")
        n_head = len(raw) if head == piece else len(head.encode())
        part -= len(raw)
        rest = "val", piece[len(head) :], len(raw) - n_head
        for split, text, n_bytes in (("train", head, n_head), rest):
            if text:
                splits[split] = True
                yield split, text, n_bytes
    yield from ((split, "", 0) for split in splits)


def learn_tokenizer(
    kind: str, vocab_size: int, sources: Sequence[Source], first_sizes: Sequence[int]
) -> tiktoken.Encoding:
    """The tokenizer called `kind`, which knows nothing of the text that validates, except that one
    of characters has all of them. Raises what build_tokenizer does."""

    def texts(*splits):
        pieces = split_documents(sources, first_sizes, CorpusPosition(), "tokenizer")
        return (text for _, split, text in pieces if split in splits)

    several = len(first_sizes) > 1
    tokenizer = build_tokenizer(kind, texts("train"), vocab_size, end_of_text=several)
    if has_all_bytes(tokenizer):
        return tokenizer
    kind = "char" if kind == "auto" else kind
    return build_tokenizer(kind, texts("train", "val"), end_of_text=several)


def encode_on_all_cores(
    tokenizer: tiktoken.Encoding, texts: Iterable[tuple[Any, str]]
) -> Iterator[tuple[Any, np.ndarray]]:
    """(key, ids (n,) uint32) for each (key, text), in order; a bounded amount of text is under way.
    By threads, for tiktoken lets go of the interpreter; in groups, for texts may be short."""
    local = threading.local()

    def work(group):
        if not hasattr(local, "encode"):  # a tokenizer that two threads use is a quarter slower
            local.encode = tiktoken.Encoding(
                tokenizer.name,
                pat_str=getattr(tokenizer, "engine_pattern", tokenizer._pat_str),
                mergeable_ranks=tokenizer._mergeable_ranks,
                special_tokens=tokenizer._special_tokens,  # without any tiktoken is a third slower
            ).encode_to_numpy
        return [(key, local.encode(text, disallowed_special=())) for key, text in group]

    affinity = getattr(os, "sched_getaffinity", None)  # a container may have fewer than the machine
    threads = min(16, len(affinity(0)) if affinity else os.cpu_count() or 1)
    waiting, group, length = deque(), [], 0
    with ThreadPoolExecutor(threads) as pool:
        for key, text in texts:
            group.append((key, text))
            length += len(text) + 64  # a short text takes memory too
            if length >= GROUP:
                waiting.append((length, pool.submit(work, group)))
                group, length = [], 0
                while sum(size for size, _ in waiting) > threads * UNDER_WAY:
                    yield from waiting.popleft()[1].result()
        waiting.append((length, pool.submit(work, group)))
        for _, future in waiting:
            yield from future.result()


class TokenFile:
    """A .npy file of token ids that grows; `length` ids of one that is there are kept."""

    def __init__(self, path: Path, dtype: np.dtype, length: int = 0):
        self.path, self.dtype, self.length = path, dtype, length
        self.file = path.open("r+b" if length else "wb")
        self.save()

    def save(self):
        """Have the ids so far on the disk, behind a header that counts them."""
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, header)  # padded: it does not grow
        self.file.truncate(self.file.tell() + self.length * self.dtype.itemsize)
        self.file.seek(0, os.SEEK_END)
        self.file.flush()
        os.fsync(self.file.fileno())

    def write(self, ids: np.ndarray):
        self.file.write(ids.astype(self.dtype).tobytes())
        self.length += len(ids)

    def close(self) -> str:
        """Finish the file; returns its sha256."""
        self.save()
        self.file.close()
        return sha256(self.path)


class TokenShards:
    """The token files of a data directory: train-00000.npy, train-00001.npy, ... and val.npy.
    finished: [length, sha256] of the shards that are there; val_length: of what is kept of val.npy.
    separator: what follows each document, end-of-text if the tokenizer has it."""

    def __init__(self, directory: Path, tokenizer, finished: Iterable = (), val_length: int = 0):
        self.directory, self.finished = directory, list(finished)
        self.dtype = np.dtype(np.uint16 if tokenizer.n_vocab <= 1 << 16 else np.uint32)
        has_end = END_OF_TEXT in tokenizer.special_tokens_set
        self.separator = np.array([tokenizer.eot_token] if has_end else [], dtype=self.dtype)
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
        """Have both splits on the disk as they are now; returns the arguments to go on from it."""
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
