"""Where text comes from: files, folders, data sets of the hub, downloads, and Python itself."""

import codecs
import hashlib
import importlib
import os
import stat
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptling.cli import UserError, optional_package
from gptling.files import writing

RECORDS = (".jsonl", ".jsonl.gz", ".parquet")  # files with a document in each record
DOWNLOADS = {  # name: (address, sha256)
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}


@dataclass
class HubFile:
    """A file of a data set of the hub: its rows are streamed."""

    name: str
    rows: Any  # a datasets.IterableDataset

    def __str__(self):
        return self.name


Source = Path | HubFile | None  # None: the text that ships with Python


def kind_of(file: Path) -> str:
    """How a file is read: the ending of a file of records, "" for plain text."""
    return next((ending for ending in RECORDS if file.name.lower().endswith(ending)), "")


def find_sources(sources: Sequence[str], downloads: Path) -> list[Source]:
    """What stands for `sources` on the command line, in a fixed order: files, the files below
    folders, those of data sets of the hub, and named downloads, which are put into `downloads`.

    Raises UserError for a file that is missing, and for a folder without text."""
    found: list[Source] = []
    for name in sources:
        path = Path(name)
        if name.startswith("hf:"):
            found += _hub_files(name)
        elif name in DOWNLOADS and not path.exists():
            found.append(download(name, downloads))
        elif os.path.isdir(path):
            found += _files_below(path)
        else:
            found.append(_checked_file(path))
    return found if sources else [None]


def signatures(sources: Sequence[Source]) -> list[list]:
    """[name, size, time of the last change] of each source; a hub file has a name only."""
    result = []
    for source in sources:
        status = source.stat() if isinstance(source, Path) else None
        result.append([str(source), status and status.st_size, status and status.st_mtime_ns])
    return result


def _checked_file(path):
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: neither a file nor a folder: save what it gives to a file")
    return path


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
        with file.open("rb") as raw:
            start = raw.read(8192)
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        text = decoder.decode(start, final=len(start) < 8192)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return text != "" and "\0" not in text


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
    return [HubFile(f"{source}, file {i + 1} of {n}", rows.shard(n, i)) for i in range(n)]


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
    with writing(file):
        file.write_bytes(content)
    return file
