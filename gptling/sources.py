"""Files, folders, URLs and hub data sets to pieces of documents."""

import glob
import gzip
import json
import os
import re
import shutil
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from urllib.request import urlopen

from tqdm import tqdm

from gptling.files import UserError
from gptling.tokenizers import END_OF_TEXT

QUICKSTART = "python:quickstart"
SHAKESPEARE = "https://github.com/karpathy/char-rnn/raw/master/data/tinyshakespeare/input.txt"
BY_HAND = ". Download it by hand, then: python prepare.py input.txt --name=shakespeare"
ENCODINGS = "such as --encoding=cp1252 (Western Europe), gbk, koi8-r or utf-16 (PowerShell)"
UTF8 = "utf-8-sig"  # also with a mark at the beginning
UNREADABLE = (OSError, ValueError, TypeError, EOFError, LookupError, zlib.error)
# A folder with two such files is prepared data, a checkpoint or a run.
OUTPUTS = [{"meta.json", "val.npy"}, {"metrics.json", "config.json"}, {"log.jsonl", "config.toml"}]
# The endings of files whose markup is trained on, too.
MARKUP = re.compile(r"\.(csv|tsv|json|html?|xml)(\.gz)?$", re.IGNORECASE)
CHUNK = 1 << 20  # characters of a text file that are read at once
# Parts of Python's library that are tests, tables or generated, or that not every Python has.
NO_EXAMPLE = re.compile(
    r"\b(tests?|\w+-packages|encodings|pydoc_data|_sysconfig\w+|locale|entities"
    r"|stringprep|this|idlelib|tkinter|turtledemo|distutils|lib2to3)\b"
)

# What separates documents, with the newlines after it: "one<|endoftext|>\n\ntwo" is "one", "two".
MARK = re.compile(re.escape(END_OF_TEXT) + r"\n*+")
# A mark, but not at the end of what is read so far, where more newlines may follow.
MARK_INSIDE = re.compile(MARK.pattern + r"(?!\Z)")
# What comes before a cut, as much as possible: up to a letter before white space, since no token
# has white space after a letter ("so many" of "so many words"), or else up to a "<", which may
# begin a mark, or else all.
CUT = re.compile(r"(?s).*[^\W\d_](?=\s)|.+(?=<)|.*")


def name_after(source: str) -> str:
    """Return the name of a data directory: its source's, without the ending, or its folder's."""
    source = re.sub(r"^(?:hf|python):([^:]*).*|^(https?://[^?#]*).*", r"\1\2", source)
    if not Path(source).exists():
        source = re.sub(r"[^/\\]*[*?[].*", "", source)  # notes/*.txt: notes
    endings = rf"(?i)(\.(txt|md|text|jsonl|parquet))?(\.gz)?$|{MARKUP.pattern}"
    return re.sub(endings, "", Path(source).resolve().name.strip("."))


def download(url: str, directory: Path) -> Path:
    """Write what is at a URL into a new file in the directory, with the ending of the URL."""
    name = re.sub(r"^[^?#]*/|[?#].*", "", url)
    with (
        urlopen(url, timeout=30) as response,
        NamedTemporaryFile(dir=directory, suffix=name, delete=False) as file,
        tqdm.wrapattr(response, "read", response.length, disable=None) as body,
    ):
        shutil.copyfileobj(body, file)
    if response.length:  # bytes that are missing
        raise OSError("the connection was closed before the end")
    return Path(file.name)


def text_of(record: dict | str, field: str) -> str:
    """Return the text of a record or of its line of JSON, which may be blank. Bad bytes in the line
    are surrogates. Raises ValueError or TypeError."""
    if isinstance(record, str):
        line = record.encode(errors="surrogateescape").decode().strip()
        record = json.loads(line) if line else {field: ""}
    fields = record if isinstance(record, dict) else {}
    if field not in fields:
        others = [name for name, value in fields.items() if isinstance(value, str)]
        hint = f"--field can be one of {others!s:.200}" if others else "no other field is a text"
        raise ValueError(f'no "{field}": {hint}')
    text = fields[field] or ""
    if not isinstance(text, str):
        raise ValueError(f'"{field}" is not a string: {text!s:.50}')
    text = re.sub("\r\n?", "\n", text).encode("utf-16", "surrogatepass")
    return text.decode("utf-16", "replace")  # JSON can have half of a pair, which becomes U+FFFD


def write_records(records: Iterable[dict], field: str, directory: Path) -> Path:
    """Write the texts of records, which are read once, into a new .jsonl in the directory."""
    options = {"suffix": ".jsonl", "delete": False, "encoding": "utf-8"}
    with NamedTemporaryFile("w", dir=directory, **options) as file:
        for record in tqdm(records, "downloading", unit=" records", leave=False, disable=None):
            line = json.dumps({field: text_of(record, field)}, ensure_ascii=False)
            print(line, file=file)
    return Path(file.name)


def find_files(path: Path, seen: set[str]) -> Iterator[Path]:
    """The files in a folder in the order of their names, also where links lead, each once: `seen`
    has their real paths. Hidden files and what gptling has written are left out."""
    real = os.path.realpath(path)
    if real in seen:
        return
    seen.add(real)
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):  # reading it says why
        yield path
        return
    inside = sorted(path.iterdir())
    names = {file.name for file in inside}
    is_output = any(own <= names for own in OUTPUTS)
    for file in inside:
        is_text = os.path.isfile(file) and not is_output
        if file.name[0] != "." and (os.path.isdir(file) or is_text):
            yield from find_files(file, seen)


def find_sources(name: str, field: str, downloads: Path) -> list[Path]:
    """The files that a name means. QUICKSTART is Python's library. What is not a file is written
    into the directory `downloads`. Raises UserError."""
    if name == QUICKSTART:
        library = Path(sysconfig.get_path("stdlib"))
        files = sorted(library.rglob("*.py"))
        return [f for f in files if not NO_EXAMPLE.search(str(f.relative_to(library)))]
    hint = ". Give hf:NAME:CONFIG:SPLIT" if name.startswith("hf:") else ""
    if name == "shakespeare" and not os.path.exists(name):
        name = SHAKESPEARE
        hint = BY_HAND
    try:
        if name.startswith("hf:"):
            from datasets import load_dataset  # not everybody has it

            _, repo, config, split = f"{name}::".split(":")[:4]
            records = load_dataset(repo, config or None, split=split or "train", streaming=True)
            return [write_records(records, field, downloads)]
        if name.startswith(("http://", "https://")):
            return [download(name, downloads)]
    except ImportError:
        raise
    except Exception as error:  # the hub's packages raise those of others, such as httpx
        raise UserError(f"{name}: {error}{hint}") from None
    # Windows' shells leave it to the program what *.txt means.
    paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    if not any(os.path.isfile(path) or os.path.isdir(path) for path in paths):
        raise UserError(f"{name}: no such file or folder")  # nor a pipe, which is read once
    seen = set()
    return [*chain.from_iterable(find_files(Path(path), seen) for path in paths)]


def is_json(source: Path) -> bool:
    """Return whether a file has a record in each line."""
    return source.name.lower().endswith((".jsonl", ".jsonl.gz"))


def read_pieces(
    source: Path, field: str, refused: list, encoding=UTF8, errors="strict"
) -> Iterator[tuple[str, bool]]:
    """Yield the text of a file as (piece, whether its document ends). Pieces end between tokens if
    possible. A record without a text is left out, and one line about all of these is added to
    `refused`. errors: as for open().

    "one<|endoftext|>two" is ("one", True), ("two", True), if it is short. A long document is in
    pieces that are False, before the last one.
    """
    name = source.name.lower()
    if name.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(source)
        columns = [field] if field in file.schema_arrow.names else None  # None: all
        batches = file.iter_batches(100, columns=columns)
        records = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from _records(records, field, refused)
        return
    opened = gzip.open if name.endswith(".gz") else open
    # Text mode reads "\n" for every end of a line.
    with opened(source, "rt", encoding=encoding, errors=errors) as file:
        if is_json(source):
            yield from _records(file, field, refused)
        else:
            yield from _pieces(iter(lambda: file.read(CHUNK), ""))


def _records(records, field, refused):
    errors = 0
    for number, record in enumerate(records, 1):
        try:
            text = text_of(record, field)
        except (ValueError, TypeError, RecursionError) as error:
            errors += 1
            if errors == 1:  # JSON calls every line 1
                first = f"line {number}: {error}".replace(": line 1 ", ": ")
            continue
        yield from _pieces([text])
    if errors:
        refused.append(f"{errors:,} of {number:,} lines, the first is {first}")


def _pieces(chunks):
    """Cut a text between tokens: the chunks "so many wo", "rds" become "so many", " words", since
    " words" may be one token, which a cut between "wo" and "rds" would split."""
    text = ""
    for chunk in chain(chunks, [""]):
        mark = MARK_INSIDE if chunk else MARK
        *documents, text = mark.split(text + chunk)
        for document in documents:
            yield document, True
        if len(text) >= CHUNK:
            cut = CUT.match(text).end()
            yield text[:cut], False
            text = text[cut:]
    yield text, True


def describe_unreadable(error: Exception) -> str:
    """Return why a file cannot be read, with the remedy if there is one."""
    if not isinstance(error, UnicodeDecodeError):
        return f"{type(error).__name__}: {error}"
    if error.encoding != "utf-8":
        return "neither UTF-8 nor in the given encoding"
    is_utf16 = error.object.startswith((b"\xff\xfe", b"\xfe\xff"))
    if error.object.startswith(b"%PDF") or (b"\0" in error.object and not is_utf16):
        return "not UTF-8, but a binary file: save its text as a .txt file"
    return f"not UTF-8: give its encoding, {ENCODINGS}"
