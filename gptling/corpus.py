"""Text to token files: documents of files, folders, the hub and Python itself, their split into
training and validation text, and encoding on all cores."""

import gzip
import hashlib
import json
import os
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tiktoken

from gptling.cli import optional_package
from gptling.files import UserError, sync, writing
from gptling.tokenizers import END_OF_TEXT, encode, has_all_bytes

SHAKESPEARE = "https://github.com/karpathy/char-rnn/raw/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CHUNK = 1 << 20  # characters of a text file that are read at once
GROUP = 1 << 18  # characters that a thread encodes at a time, at least
MAX_VALIDATION = 20_000_000  # bytes of validation text
TOKENS_PER_SHARD = 100_000_000
Source = Path | Iterable[str]  # a file, or texts


def embedded_corpus() -> dict[str, str]:
    """Python's language reference, {topic: text}, 370 kB of English, without topics that mostly
    repeat longer ones: validation text must not be trained on."""
    seen, kept = set(), set()
    for topic in sorted(topics, key=lambda topic: -len(topics[topic])):
        lines = set(topics[topic].splitlines())
        if len(lines & seen) < len(lines) / 2:
            kept.add(topic)
        seen |= lines
    return {topic: topics[topic] for topic in sorted(kept)}


def find_sources(name: str) -> list[Source]:
    """The files or texts that a name on the command line means. Raises UserError."""
    path = Path(name)
    if name.startswith("hf:"):
        repo, config, split = [*name.split(":")[1:], "", ""][:3]
        load_dataset = optional_package("datasets", "datasets").load_dataset
        rows = load_dataset(repo, config or None, split=split or "train", streaming=True)
        return [rows.select_columns("text")["text"]]
    if name == "shakespeare" and not path.exists():
        content = urllib.request.urlopen(SHAKESPEARE, timeout=30).read()
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            raise UserError(f"{SHAKESPEARE}: the sha256 is not {SHAKESPEARE_SHA256}")
        return [[content.decode()]]
    if not path.is_dir():
        return [path]
    if not (files := [file for file in sorted(path.rglob("*")) if _is_text(file, path)]):
        raise UserError(f"{path}: no text in this folder")
    return files


def _is_text(file, folder):  # and not hidden
    if not file.is_file() or "/." in f"/{file.relative_to(folder).as_posix()}":
        return False
    if file.name.lower().endswith((".jsonl.gz", ".parquet")):
        return True
    with file.open("rb") as raw:
        start = raw.read(8192)
    text = start.decode("utf-8-sig", errors="ignore")  # its last character may be cut
    return text != "" and "\0" not in text and len(start) - len(text.encode()) < 7


def read_documents(sources: Iterable[Source]) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield (size in bytes, text in pieces) of each document: each "text" in a file of records, or
    the whole of any other file. Raises UserError for a file or record without text."""
    for source in sources:
        if not isinstance(source, Path):
            yield from ((len(text.encode()), [text]) for text in source if text)
        elif source.name.lower().endswith((".jsonl", ".jsonl.gz", ".parquet")):
            number = 0
            try:
                for text in _records(source):
                    if text:
                        yield len(text.encode()), [text]
                    number += 1
            except (ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
                reason = f'no "text" can be read: {type(error).__name__}: {error}'
                raise UserError(f"{source}: line {number + 1}: {reason:.300}") from None
        elif size := source.stat().st_size:
            yield size, _pieces(source)


def _records(file):
    if file.name.lower().endswith(".parquet"):
        parquet = optional_package("pyarrow.parquet", "datasets")
        with file.open("rb") as raw:
            for batch in parquet.ParquetFile(raw).iter_batches(100, columns=["text"]):
                yield from batch.column("text").to_pylist()
    else:
        open_text = gzip.open if file.name.lower().endswith(".gz") else open
        with open_text(file, "rt", encoding="utf-8-sig", newline="\n") as lines:
            yield from (json.loads(line)["text"] if line.strip() else None for line in lines)


def _pieces(file):
    """A file's text in pieces with the same tokens as the whole file: each ends between a letter
    and white space, where no tokenizer's pattern has a token across."""
    text = ""
    try:
        with file.open(encoding="utf-8-sig", newline="") as f:
            while chunk := f.read(CHUNK):
                text += chunk
                cut = re.match(r"(?s).*[^\W\d_](?=\s)|.*", text).end()
                yield text[:cut]
                text = text[cut:]
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{file}: {byte} is not UTF-8: save the file as UTF-8") from None
    yield text


def validation_bytes(size: int, index: int, seen: int, held_out: int, n_first: int) -> int:
    """How many bytes at the end of a document are for validation. With fewer than ten documents
    (n_first) it is the last tenth of each. Otherwise it is every document that fits whole into a
    tenth of the text so far, and the end of every tenth document if few did. index, seen, held_out:
    the number of documents before this one, their bytes, and their bytes for validation."""
    if n_first < 10:
        return min(size // 10, MAX_VALIDATION // n_first)
    limit = min((seen + size) // 10, MAX_VALIDATION)
    if held_out + size <= limit:
        return size
    return limit - held_out if index % 10 == 9 and held_out < limit // 4 else 0


class Corpus:
    """The documents of the named sources. count: documents, characters, and bytes of "train" and
    "val" read so far. Raises UserError if there is no text."""

    def __init__(self, names: Iterable[str]):
        sources = [source for name in names for source in find_sources(name)]
        self.sources, self.count = sources or [embedded_corpus().values()], Counter()
        self.n_first = sum(1 for _ in islice(read_documents(self.sources), 10))
        if not self.n_first:
            raise UserError(f"{' '.join(names)}: no text in it")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield ("train" or "val", text). An empty text ends a document's part of a split."""
        self.count = counts = Counter()
        for index, (size, pieces) in enumerate(read_documents(self.sources)):
            before, seen = counts.copy(), counts["train"] + counts["val"]
            n_train = size - validation_bytes(size, index, seen, counts["val"], self.n_first)
            for piece in pieces:
                raw = piece.encode()
                head = raw[: max(0, n_train)].decode(errors="ignore")  # whole characters
                n_train -= len(raw)
                for split, text in (("train", head), ("val", piece[len(head) :])):
                    if text:
                        counts["characters"] += len(text)
                        counts[split] += len(text.encode())
                        yield split, text
            counts["documents"] += 1
            yield from ((split, "") for split in ("train", "val") if counts[split] > before[split])


def encode_on_all_cores(tokenizer: tiktoken.Encoding, texts: Iterable[tuple], check=True):
    """Yield (key, token ids) for each (key, text), in order, with a bounded amount of text in
    memory. It uses threads, as tiktoken releases the interpreter's lock. check: raise UserError for
    a character that the tokenizer lacks, for which tiktoken would abort."""
    local, check = threading.local(), check and not has_all_bytes(tokenizer)

    def start_thread():  # threads that share a tokenizer wait for each other
        local.tokenizer = tiktoken.Encoding(
            tokenizer.name,
            pat_str=tokenizer._pat_str,
            mergeable_ranks=tokenizer._mergeable_ranks,
            special_tokens=tokenizer._special_tokens,
        )

    def encode_group(group):
        if check:
            return [(key, encode(local.tokenizer, text)) for key, text in group]
        to_ids = local.tokenizer.encode_to_numpy
        return [(key, to_ids(text, disallowed_special=())) for key, text in group]

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting, group, length = [], [], 0
    with ThreadPoolExecutor(threads, initializer=start_thread) as pool:
        for key, text in texts:
            group.append((key, text))
            length += len(text) + 64  # a short text takes memory too
            if length >= GROUP:
                waiting.append(pool.submit(encode_group, group))
                group, length = [], 0
                if len(waiting) > 4 * threads:
                    yield from waiting.pop(0).result()
        waiting.append(pool.submit(encode_group, group))
        for future in waiting:
            yield from future.result()


def write_token_files(directory: Path, tokenizer: tiktoken.Encoding, encoded: Iterable[tuple]):
    """Write train-00000.npy, train-00001.npy, ... and val.npy, uint16 or uint32, from (split, ids)
    as encode_on_all_cores yields them. Empty ids end a document. Returns the number of tokens in
    each split, and a fingerprint: the sha256 of the ids."""
    dtype = np.dtype(np.uint16 if tokenizer.n_vocab <= 1 << 16 else np.uint32)
    separator = [tokenizer.eot_token] if END_OF_TEXT in tokenizer.special_tokens_set else []
    unsaved, n_tokens = {"train": bytearray(), "val": bytearray()}, Counter()
    fingerprint, shards = hashlib.sha256(), (f"train-{n:05}.npy" for n in count())

    def save(split, name):
        with writing(directory / name):
            np.save(directory / name, np.frombuffer(unsaved[split], dtype))
            sync(directory / name)
        unsaved[split] = bytearray()

    for split, ids in encoded:
        raw = np.array(ids if len(ids) else separator, dtype).tobytes()
        unsaved[split] += raw
        fingerprint.update(raw)
        n_tokens[split] += len(raw) // dtype.itemsize
        if len(unsaved["train"]) >= TOKENS_PER_SHARD * dtype.itemsize:
            save("train", next(shards))
    if unsaved["train"]:
        save("train", next(shards))
    save("val", "val.npy")
    return n_tokens, fingerprint.hexdigest()
