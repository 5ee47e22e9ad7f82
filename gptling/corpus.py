"""Text to token files: the documents of files, folders, the hub and Python itself, their split into
training and validation text, and encoding on all cores."""

import gzip
import hashlib
import json
import os
import re
import sysconfig
import threading
import urllib.request
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, groupby
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tiktoken

from gptling.files import UserError
from gptling.tokenizers import END_OF_TEXT, encode

SHAKESPEARE = "https://github.com/karpathy/char-rnn/raw/master/data/tinyshakespeare/input.txt"
CHUNK = 1 << 20  # characters of a text file that are read at once
GROUP = 1 << 18  # characters that a thread encodes at a time, at least
MAX_VALIDATION = 20_000_000  # bytes of validation text
TOKENS_PER_SHARD = 50_000_000
# Parts of Python's library that are tests, tables or generated, or that not every Python has.
NO_EXAMPLES = re.compile(
    r"\b(tests?|\w+-packages|encodings|pydoc_data|_sysconfig\w+|locale|entities|stringprep|this"
    r"|idlelib|tkinter|turtledemo|distutils|lib2to3)\b"
)
NOT_TEXT = tuple(".zip .tar .tgz .7z .rar .xz .bz2 .zst .pdf .doc .docx .odt .rtf .epub".split())
NOT_TEXT += (".tar.gz", ".csv", ".tsv", ".xlsx", ".json")
Source = Path | Iterable[dict]  # a file, or records


def quick_start(field: str) -> list[Source]:
    """The source of Python's standard library, or its language reference if there is none."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.rglob("*.py"))
    chosen = [f for f in files if not NO_EXAMPLES.search(f.relative_to(library).as_posix())]
    return chosen or [[{field: text} for text in topics.values()]]


def find_sources(name: str, field: str) -> list[Source]:
    """The files or records that a name on the command line means. Raises UserError."""
    path = Path(name)
    if name.startswith("hf:"):
        from datasets import load_dataset  # not everybody has it

        repo, config, split = [*name.split(":")[1:], "", ""][:3]
        rows = load_dataset(repo, config or None, split=split or "train", streaming=True)
        return [rows.select_columns(field)]
    if name == "shakespeare" and not path.exists():
        return [[{field: urllib.request.urlopen(SHAKESPEARE, timeout=30).read().decode()}]]
    return [*files_in(path, set())] if path.is_dir() else [path]


def files_in(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files in a folder and its folders, by name, also those that links lead to, but no
    hidden ones. A folder in `seen` is not read again."""
    seen.add(folder.resolve())
    for path in sorted(path for path in folder.iterdir() if path.name[0] != "."):
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() not in seen:
            yield from files_in(path, seen)


def read_documents(source: Source, field: str) -> Iterator[Iterator[str]]:
    """Yield each document of a source, in pieces with the same tokens as the whole. A document is a
    file, the `field` of a record, or what a mark ends in them. Raises UserError for a record
    without text, ValueError for what is not text, and EOFError or BadGzipFile."""
    return (document for text, document in groupby(_read(source, field), bool) if text)


def _read(source, field):  # pieces: an empty one ends a document
    name = source.name.lower() if isinstance(source, Path) else ""
    if name.endswith(NOT_TEXT):
        raise ValueError("unpack it, or save it as .txt, .jsonl or .parquet")
    if not name:
        yield from _records(source, field, "hf:")
    elif name.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile

        batches = ParquetFile(source).iter_batches(100)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from _records(rows, field, source)
    else:  # text mode reads "\n" for every end of a line
        opened = gzip.open if name.endswith(".gz") else open
        with opened(source, "rt", encoding="utf-8-sig") as file:
            if name.endswith((".jsonl", ".jsonl.gz")):
                yield from _records(file, field, source)
            else:
                yield from _pieces(iter(lambda: file.read(CHUNK), ""))


def _records(records, field, name):  # dictionaries, or lines of JSON
    for number, record in enumerate(records, 1):
        try:
            if isinstance(record, str):
                record = json.loads(record) if record.strip() else {field: ""}
            text = (record[field] or "").replace("\r\n", "\n").replace("\r", "\n")
        except (ValueError, LookupError, TypeError, AttributeError):
            found = ", ".join(record) if isinstance(record, dict) else record
            reason = f'no text in "{field}": --field can be another one of: {found!s:.200}'
            raise UserError(f"{name}: line {number}: {reason}") from None
        # JSON can have half of a pair of surrogates, which becomes U+FFFD.
        yield from _pieces([text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")])


def _pieces(chunks):
    text, mark = "", re.escape(END_OF_TEXT) + r"\n*+"
    for chunk in chain(chunks, [""]):
        more = r"(?!\Z)" if chunk else ""  # the next chunk may begin with more newlines
        *ended, text = re.split(mark + more, text + chunk)
        for document in ended:
            yield from (document, "")
        if len(text) >= CHUNK:  # between a letter and white space no tokenizer has a token across
            cut = re.match(r"(?s).*[^\W\d_](?=\s)|.+(?=<)|.*", text).end()
            yield text[:cut]
            text = text[cut:]
    yield from (text, "")


def validation_bytes(sizes: np.ndarray) -> np.ndarray:
    """How many bytes at the end of each document are for validation, about a tenth of all. With ten
    documents or more, these are whole ones, evenly spread, or if documents are too long for that,
    the end of the longest."""
    n, total, held_out = len(sizes), sizes.sum(), np.zeros_like(sizes)
    if n < 10:
        return np.minimum(sizes // 10, MAX_VALIDATION // n)
    goal, limit = (min(total * percent // 100, MAX_VALIDATION) for percent in (10, 15))
    chosen = 0
    for i in np.argsort(-np.arange(1, n + 1) % (total // goal), kind="stable"):  # every tenth first
        if chosen < goal and chosen + sizes[i] <= limit:
            held_out[i] = sizes[i]
            chosen += sizes[i]
    if chosen < goal // 2:
        held_out[sizes.argmax()] = goal - chosen
    return held_out


def measure(document: Iterable[str]) -> tuple[int, int, int]:
    """The hash of a document, its size in bytes, and how many U+FFFD it has."""
    key, size, n_replaced = 0, 0, 0
    for text in document:
        key = hash((key, text))
        size += len(text.encode())
        n_replaced += text.count("\ufffd")
    return key, size, n_replaced


class Corpus:
    """The documents of the named sources, equal ones once. notes: what was left out or replaced.
    count: characters, and bytes of "train" and "val", that texts() has given. Raises UserError if
    there is no text."""

    def __init__(self, names: Iterable[str], field: str = "text"):
        self.field, self.sources, self.count = field, [], Counter()
        measured, refused = array("q"), []
        for sources in [find_sources(name, field) for name in names] or [quick_start(field)]:
            for source in sources:
                n = len(measured)
                try:
                    for document in read_documents(source, field):
                        measured.extend(measure(document))
                    self.sources.append(source)
                except (ValueError, EOFError, gzip.BadGzipFile) as error:
                    if len(sources) == 1:
                        raise UserError(f"{source} is not text in UTF-8: {error}") from None
                    del measured[n:]
                    refused.append(source.name)
        hashes, sizes, n_replaced = np.array(measured).reshape(-1, 3).T
        first = np.sort(np.unique(hashes, return_index=True)[1])
        notes = {
            f"files left out as not text ({', '.join(refused[:5])})": len(refused),
            "repeated documents left out": len(sizes) - len(first),
            "characters replaced by U+FFFD": n_replaced.sum(),
        }
        self.notes = [f"{what}: {n:,}" for what, n in notes.items() if n]
        self.n_documents = len(first)
        if not self.n_documents:
            raise UserError("; ".join([f"{' '.join(names)}: no text in it", *self.notes]))
        self.n_train = np.full(len(sizes), -1)  # bytes of each to train on; -1: left out
        self.n_train[first] = sizes[first] - validation_bytes(sizes[first])

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield ("train" or "val", text). An empty text ends a document's part of a split."""
        self.count = Counter()
        read = (read_documents(source, self.field) for source in self.sources)
        for n_train, document in zip(self.n_train, chain.from_iterable(read), strict=True):
            ends, rest = {}, n_train  # rest: bytes to train on from here
            for text in document if n_train >= 0 else ():
                raw = text.encode()
                head = raw[: max(0, rest)].decode(errors="ignore")  # whole characters
                rest -= len(raw)
                for split, part in (("train", head), ("val", text[len(head) :])):
                    if part:
                        self.count["characters"] += len(part)
                        self.count[split] += len(part.encode())
                        ends[split] = ""
                        yield split, part
            yield from ends.items()


def encode_on_all_cores(tokenizer: tiktoken.Encoding, texts: Iterable[tuple]):
    """Yield (key, token ids) for each (key, text), in order, with a bounded amount of text in
    memory. tiktoken releases the interpreter's lock. Raises UserError as encode does."""
    local = threading.local()

    def start_thread():  # threads that share a tokenizer wait for each other
        ranks, special = tokenizer._mergeable_ranks, tokenizer._special_tokens
        options = dict(pat_str=tokenizer._pat_str, mergeable_ranks=ranks, special_tokens=special)
        local.tokenizer = tiktoken.Encoding(tokenizer.name, **options)

    def encode_group(group):
        return [(key, encode(local.tokenizer, text)) for key, text in group]

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
        for future in [*waiting, pool.submit(encode_group, group)]:
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
        np.save(directory / name, np.frombuffer(unsaved[split], dtype))
        unsaved[split] = bytearray()

    for split, ids in encoded:
        ids = np.array(ids if len(ids) else separator, dtype)
        unsaved[split] += ids.tobytes()
        n_tokens[split] += len(ids)
        fingerprint.update(ids)
        if len(unsaved["train"]) >= TOKENS_PER_SHARD * dtype.itemsize:
            save("train", next(shards))
    if unsaved["train"]:
        save("train", next(shards))
    save("val", "val.npy")
    return n_tokens, fingerprint.hexdigest()
