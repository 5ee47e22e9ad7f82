"""Texts into token files: encoding on all cores, and .npy files that are written bit by bit."""

import collections
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gptling.files import sync, writing
from gptling.tokenizer_json import copy_tokenizer

TOKENS_PER_SHARD = 100_000_000
GROUP = 1 << 18  # characters that a thread encodes at a time
UNDER_WAY = 1 << 21  # characters for each thread that wait or are encoded, at most


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
            self._write_header()
            self.file.truncate(self.file.tell() + length * dtype.itemsize)
            self.file.seek(0, os.SEEK_END)

    def _write_header(self):
        # numpy pads the header so that the length can be written over a shorter one at the end.
        self.file.seek(0)
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def write(self, ids: np.ndarray):
        with writing(self.path):
            self.file.write(ids.astype(self.dtype).tobytes())
        self.length += len(ids)

    def sync(self):
        """Have the ids so far on the disk."""
        with writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> str:
        """Finish the file; returns its sha256."""
        with writing(self.path):
            self._write_header()
            self.file.close()
            sync(self.path)
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()


class TokenShards:
    """The token files of a data directory: train-00000.npy, train-00001.npy, ... and val.npy.

    finished: (length, sha256) of the shards that are there. val_length: of the ids that are kept of
    val.npy. Both are what state() gave when a shard was finished."""

    def __init__(
        self,
        directory: Path,
        n_vocab: int,
        finished: Iterable[tuple[int, str]] = (),
        val_length: int = 0,
    ):
        self.directory, self.finished = directory, [tuple(shard) for shard in finished]
        self.dtype = np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)
        self.val = TokenFile(directory / "val.npy", self.dtype, val_length)
        self.shard: TokenFile | None = None

    def write(self, split: str, ids: np.ndarray):
        """Append ids (n,) to "train" or "val"."""
        if split == "val":
            self.val.write(ids)
            return
        if self.shard is None:
            path = self.directory / f"train-{len(self.finished):05}.npy"
            self.shard = TokenFile(path, self.dtype)
        self.shard.write(ids)

    def is_full(self) -> bool:
        return self.shard is not None and self.shard.length >= TOKENS_PER_SHARD

    def finish_shard(self):
        """Close the shard, so that both splits are on the disk as they are now."""
        self.val.sync()
        self.finished.append((self.shard.length, self.shard.close()))
        self.shard = None

    def state(self) -> dict[str, Any]:
        return {"finished": self.finished, "val_length": self.val.length}

    def close(self) -> str:
        """Finish all files; returns a fingerprint of them, the sha256 of their sha256."""
        if self.shard or not self.finished:
            self.write("train", np.zeros(0, self.dtype))  # there is one shard at least
            self.finish_shard()
        digests = [digest for _, digest in self.finished] + [self.val.close()]
        return hashlib.sha256("".join(digests).encode()).hexdigest()
