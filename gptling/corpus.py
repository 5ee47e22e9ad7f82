"""Documents out of files, folders, data sets of the hub, a download, and Python itself."""

import codecs
import contextlib
import gzip
import hashlib
import json
import re
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from gptling.cli import UserError, optional_package
from gptling.files import writing

RECORDS = (".jsonl", ".jsonl.gz", ".parquet")  # files with a document in each record
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError)
BYTES_AT_ONCE = 1 << 20  # of a text, however long it is
DOWNLOADS = {  # name: (address, sha256)
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}


class Stream(NamedTuple):
    """Texts that are no file here."""

    name: str
    texts: Iterable[str]

    def __str__(self):
        return self.name


Source = Path | Stream
# A text: its size in bytes of UTF-8, and its pieces, read once, which give the tokens of the whole.
Document = tuple[int, Iterable[str]]


def find_sources(names: Sequence[str], downloads: Path) -> list[Source]:
    """What stands for `names` on the command line, in a fixed order; `downloads`: the directory to
    download to. Raises UserError for a folder without text and for what cannot be fetched."""
    if not names:
        return [Stream("Python's language reference", embedded_corpus().values())]
    found = []
    for name in names:
        path = Path(name)
        if name.startswith("hf:"):
            found += _hub_files(name)
        elif name in DOWNLOADS and not path.exists():
            found.append(_download(name, downloads))
        else:
            found += _files_below(path) if path.is_dir() else [path]
    return found


def check_sources(sources: Sequence[Source], target: Path):
    """Raises UserError for a file in the directory that is to be replaced."""
    for source in sources:
        if isinstance(source, Path) and target.resolve() in source.resolve().parents:
            raise UserError(f"{source} lies in {target}, which is replaced: give another --name")


def source_id(source: Source) -> list:
    """What tells that a source has changed. Raises OSError for a file that is missing."""
    if isinstance(source, Stream):
        return [source.name]
    return [str(source), source.stat().st_size, source.stat().st_mtime_ns]


def kind_of(file: Path) -> str:
    """How a file is read: the ending of a file of records, "" for plain text."""
    return next((ending for ending in RECORDS if file.name.lower().endswith(ending)), "")


def _files_below(folder):
    """The files with text in a folder, without hidden ones and what our scripts made here."""
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
            return start != "" and "\0" not in start
    except UnicodeDecodeError:
        return False


def _hub_files(name):
    """The files of hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT; NAME may be a folder here."""
    repo, config, split, *more = [*name.removeprefix("hf:").split(":"), "", ""]
    if not repo or any(more):
        raise UserError(f"{name}: give hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    datasets = optional_package("datasets", "datasets")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(repo, config or None, split=split or "train", streaming=True)
        rows = rows.select_columns("text")
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {error}") from None
    n = rows.num_shards
    return [Stream(f"{name}, file {i + 1} of {n}", rows.shard(n, i)["text"]) for i in range(n)]


def embedded_corpus() -> dict[str, str]:
    """Python's language reference, {topic: text}, 370 kB of English, without topics that mostly
    repeat longer ones: validation text must not be trained on."""
    from pydoc_data.topics import topics

    seen, kept = set(), set()
    for topic in sorted(topics, key=lambda topic: -len(topics[topic])):
        lines = set(topics[topic].splitlines())
        if len(lines & seen) < len(lines) / 2:
            kept.add(topic)
        seen |= lines
    return {topic: topics[topic] for topic in sorted(kept)}


def _download(name, directory):
    """Fetch a text of DOWNLOADS and check its sha256."""
    address, expected = DOWNLOADS[name]
    file = directory / f"{name}.txt"
    try:
        with urllib.request.urlopen(address, timeout=30) as response:
            content = response.read()
    except OSError as error:
        words = f"save it as {file.name}, and give {file.name} instead of {name}"
        raise UserError(f"{name}: cannot download {address} ({error}): {words}") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(f"{name}: what {address} gave has another sha256 than {expected}")
    with writing(file):
        file.write_bytes(content)
    return file


def read(
    sources: Sequence[Source], label: str | None = None, first: int = 0
) -> Iterator[tuple[int, Document]]:
    """(index of its source, document) for each document from `sources[first]` on, in order, with a
    progress bar of this label on a terminal. Raises what documents does."""
    sizes = [source.stat().st_size if isinstance(source, Path) else 0 for source in sources]
    bar = dict(desc=label, initial=sum(sizes[:first]), total=sum(sizes) or None, leave=False)
    with tqdm(**bar, unit="B", unit_scale=True, disable=None) as progress:
        for i, source in enumerate(sources[first:], start=first):
            for document in documents(source, progress.update):
                yield i, document


def documents(source: Source, count_bytes: Callable = lambda n: None) -> Iterator[Document]:
    """The documents of a source: the "text" of each line of a .jsonl or .jsonl.gz file, of each
    row of a .parquet or hub file; any other file is one. Raises UserError, as the pieces do, for
    what is not UTF-8 text, and where there is none. count_bytes is told how many are read."""
    texts = _read(source, count_bytes)
    if isinstance(source, Path) and not kind_of(source):  # nothing is read for its size
        yield source.stat().st_size, (text for _, text in texts)
    else:
        yield from ((size, (text,)) for size, text in texts)


def _read(source, count_bytes):
    number, done, empty = 1, 0, True
    try:
        with source.open("rb") if isinstance(source, Path) else contextlib.nullcontext() as raw:
            for text in _texts(source, raw) if raw else source.texts:
                size = len((text or "").encode())
                position = raw.tell() if raw else done + size
                count_bytes(position - done)
                number, done = number + 1, position
                if size:
                    empty = False
                    yield size, text
    except (*UNREADABLE, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f'{source}: line {number}: no "text" can be read: {reason:.300}') from None
    if empty:
        raise UserError(f"{source}: no text in it")


def _texts(file, raw):
    kind = kind_of(file)
    if kind == ".parquet":
        parquet = optional_package("pyarrow.parquet", "datasets").ParquetFile(raw)
        for batch in parquet.iter_batches(100, columns=["text"]):
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
        chunk = raw.read(BYTES_AT_ONCE)
        try:
            part = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            place = f"{offset + error.start} (0x{error.object[error.start]:02x})"
            raise UserError(f"{file}: byte {place} is not UTF-8: save it as UTF-8") from None
        text += part.removeprefix("\ufeff") if offset == 0 else part  # the byte-order mark
        cut = safe_cut(text) if chunk else len(text)
        yield text[:cut]
        text = text[cut:]


def safe_cut(text: str) -> int:
    """The last place where the parts of a text give the tokens of the whole: before white space
    that follows a letter, where no tokenizer's pattern has a token in common. 0 if nowhere, but
    the end of a text that is too long to wait for such a place."""
    if letter_before_space := re.match(r"(?s).*[^\W\d_](?=\s)", text):
        return letter_before_space.end()
    return len(text) if len(text) > 16 * BYTES_AT_ONCE else 0
