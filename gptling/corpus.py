"""Documents out of files, folders, data sets of the hub, a download, and Python itself.

A text of many gigabytes takes little memory, for it comes in pieces.
"""

import codecs
import contextlib
import functools
import gzip
import hashlib
import importlib
import json
import re
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from gptling.cli import UserError, optional_package
from gptling.files import writing

RECORDS = (".jsonl", ".jsonl.gz", ".parquet")  # files with a document in each record
PIECE = 1 << 20  # bytes read at a time
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError)
LETTER_BEFORE_SPACE = re.compile(r"(?s).*[^\W\d_](?=\s)")
DOWNLOADS = {  # name: (address, sha256)
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}


@dataclass
class Stream:
    """Texts that are no file here."""

    name: str
    texts: Callable[[], Iterable[str]]

    def __str__(self):
        return self.name


@dataclass
class Document:
    """A text: its size in bytes of UTF-8, and its pieces, which give the tokens of the whole."""

    size: int  # of a plain-text file as the file system has it: nothing is read for it
    pieces: Iterable[str]  # to be read once


Source = Path | Stream


def find_sources(names: Sequence[str], downloads: Path) -> list[Source]:
    """What stands for `names` on the command line, in a fixed order: files, the files below
    folders, those of data sets of the hub, and named downloads, which are put into `downloads`.

    Raises UserError for a folder without text and for what cannot be fetched."""
    if not names:
        return [Stream("Python's language reference", lambda: embedded_corpus().values())]
    found: list[Source] = []
    for name in names:
        path = Path(name)
        if name.startswith("hf:"):
            found += _hub_files(name)
        elif name in DOWNLOADS and not path.exists():
            found.append(download(name, downloads))
        else:
            found += _files_below(path) if path.is_dir() else [path]
    return found


def signature(source: Source) -> list:
    """What tells that a source has changed. Raises OSError for a file that is missing."""
    if isinstance(source, Stream):
        return [source.name]
    return [str(source), source.stat().st_size, source.stat().st_mtime_ns]


def kind_of(file: Path) -> str:
    """How a file is read: the ending of a file of records, "" for plain text."""
    return next((ending for ending in RECORDS if file.name.lower().endswith(ending)), "")


def _files_below(folder):
    """Its files with text, without hidden ones and what prepare.py and train.py made here."""
    results = [*Path("data").glob("*/meta.json"), *Path("out").glob("*/log.jsonl")]
    made = {file.parent.resolve() for file in results}
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = [file for file in files if "/." not in f"/{file.relative_to(folder).as_posix()}"]
    files = [file for file in files if made.isdisjoint(file.resolve().parents)]
    with_text = [file for file in files if _looks_like_text(file)]
    if not with_text:
        raise UserError(f"{folder}: no text in this folder ({len(files)} files)")
    if left_out := sorted(set(files) - set(with_text)):
        print(f"{folder}: left out {len(left_out)} files without text, {left_out[0]} first")
    return with_text


def _looks_like_text(file):
    if kind_of(file) in (".jsonl.gz", ".parquet"):
        return True
    try:
        with file.open(encoding="utf-8-sig") as text:
            start = text.read(8192)
    except UnicodeDecodeError:
        return False
    return start != "" and "\0" not in start


def _hub_files(source):
    """Those of hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT; NAME may be a folder here too."""
    name, config, split, *more = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(more):
        raise UserError(f"{source}: give hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    datasets = optional_package("datasets", "datasets")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        rows = rows.select_columns("text")
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: {error}") from None
    n = rows.num_shards
    shards = [functools.partial(_texts_of_rows, rows.shard(n, i)) for i in range(n)]
    return [Stream(f"{source}, file {i} of {n}", texts) for i, texts in enumerate(shards, 1)]


def _texts_of_rows(rows):
    return (text for batch in rows.iter(100) for text in batch["text"])


def embedded_corpus() -> dict[str, str]:
    """Python's language reference, {topic: text}: about 370 kB of English that is always there.

    A topic that mostly repeats longer ones is left out: validation text must not be trained on."""
    topics = importlib.import_module("pydoc_data.topics").topics
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
        words = f"save it as {name}.txt and run: python prepare.py {name}.txt"
        raise UserError(f"{name}: cannot download {address} ({error}): {words}") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(f"{name}: what {address} gave has another sha256 than {expected}")
    file = directory / f"{name}.txt"
    with writing(file):
        file.write_bytes(content)
    return file


def read(
    sources: Sequence[Source], label: str = "", first: int = 0
) -> Iterator[tuple[int, Document]]:
    """(index of its source, document) for each document from `sources[first]` on, in order.

    With a label, a progress bar of that name is drawn on a terminal. Raises what documents does."""
    sizes = [source.stat().st_size if isinstance(source, Path) else 0 for source in sources]
    bar = dict(desc=label, initial=sum(sizes[:first]), total=sum(sizes) or None, leave=False)
    quiet = None if label else True  # None: where there is no terminal
    with tqdm(**bar, unit="B", unit_scale=True, disable=quiet) as progress:
        for i, source in enumerate(sources[first:], start=first):
            for document in documents(source, progress.update):
                yield i, document


def documents(source: Source, count_bytes: Callable = lambda n: None) -> Iterator[Document]:
    """The documents of a source: the "text" of each line of a .jsonl or .jsonl.gz file, of each
    row of a .parquet or hub file; any other file is one document.

    count_bytes is called with the numbers of bytes that are read. Raises UserError, as the pieces
    do, for what is not UTF-8 text, with the place, and where there is no text."""
    texts = _read(source, count_bytes)
    if isinstance(source, Path) and not kind_of(source):
        yield Document(source.stat().st_size, (text for text, _ in texts))
    else:
        for text, size in texts:
            yield Document(size, (text,))


def _read(source, count_bytes):
    """(text, its bytes) of each record of a source, or of each piece of its one document."""
    number, done, empty = 1, 0, True
    try:
        with source.open("rb") if isinstance(source, Path) else contextlib.nullcontext() as raw:
            for text in _texts(source, raw) if raw else source.texts():
                size = len((text or "").encode())
                position = raw.tell() if raw else done + size
                count_bytes(position - done)
                number, done = number + 1, position
                if size:
                    empty = False
                    yield text, size
    except (*UNREADABLE, RecursionError) as error:
        raise UserError(f'{source}: line {number}: no "text" can be read: {error!r:.300}') from None
    if empty:
        raise UserError(f"{source}: no text in it")


def _texts(file, raw):
    kind = kind_of(file)
    if kind == ".parquet":
        parquet = optional_package("pyarrow.parquet", "datasets")
        for batch in parquet.ParquetFile(raw).iter_batches(100, columns=["text"]):
            yield from batch.column("text").to_pylist()
    elif kind:
        for line in gzip.open(raw) if kind == ".jsonl.gz" else raw:
            yield json.loads(line.decode("utf-8-sig"))["text"] if line.strip() else None
    else:
        yield from _pieces(file, raw)


def _pieces(file, raw):
    """The text of an open file in pieces that can be encoded apart."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, chunk = "", b"-"
    while chunk:
        offset = raw.tell() - len(decoder.getstate()[0])  # of what is decoded now
        chunk = raw.read(PIECE)
        try:
            part = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            place = f"byte {offset + error.start} (0x{error.object[error.start]:02x})"
            raise UserError(
                f"{file}: not UTF-8 at {place}: save it as UTF-8, if it is a text"
            ) from None
        text += part.removeprefix("\ufeff") if offset == 0 else part  # the byte-order mark
        cut = safe_cut(text) if chunk else len(text)
        yield text[:cut]
        text = text[cut:]


def safe_cut(text: str) -> int:
    """The last place where the parts of a text give the tokens of the whole: before white space
    that follows a letter, where no tokenizer's pattern has a token in common. 0 if nowhere, but
    the end of a text that is too long to wait for such a place."""
    letter_before_space = LETTER_BEFORE_SPACE.match(text)
    if letter_before_space:
        return letter_before_space.end()
    return len(text) if len(text) > 16 * PIECE else 0
