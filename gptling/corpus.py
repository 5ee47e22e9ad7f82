"""Documents out of sources.

    for _, document in read(find_sources(["notes/", "chat.jsonl.gz"], Path("data")), "count"):
        for piece in document.pieces:
            ...

A text of many gigabytes takes little memory, for it comes in pieces.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from gptling.cli import UserError, optional_package
from gptling.sources import HubFile, Source, embedded_corpus, kind_of

PIECE = 1 << 20  # bytes read at a time
LETTER_BEFORE_SPACE = re.compile(r"(?s).*[^\W\d_](?=\s)")


@dataclass
class Document:
    """A text: its size in bytes of UTF-8, and its pieces, which give the tokens of the whole."""

    size: int  # of a plain-text file as the file system has it: nothing is read for it
    pieces: Iterable[str]  # to be read once


def read(
    sources: Sequence[Source], label: str = "", first: int = 0
) -> Iterator[tuple[int, Document]]:
    """(index of its source, document) for each document from `sources[first]` on, in order.

    With a label, a progress bar of that name is drawn on a terminal. Raises UserError for what is
    not UTF-8 text, with the place; so do the pieces of a document."""
    sizes = [source.stat().st_size if isinstance(source, Path) else 0 for source in sources]
    known = all(isinstance(source, Path) and kind_of(source) != ".parquet" for source in sources)
    done, total = (sum(sizes[:first]), sum(sizes)) if known else (0, None)  # bytes on the disk
    bar = dict(desc=label, initial=done, total=total, unit="B", unit_scale=True)
    quiet = None if label and sources != [None] else True  # None: where there is no terminal
    with tqdm(**bar, disable=quiet) as progress:
        for i, source in enumerate(sources[first:], start=first):
            for document in documents(source, progress.update):
                yield i, document


def documents(source: Source, count_bytes: Callable = lambda n: None) -> Iterator[Document]:
    """The documents of a source: the "text" of each line of a .jsonl or .jsonl.gz file, of each
    row of a .parquet or hub file; any other file is one document.

    count_bytes is called with the numbers of bytes that are read. Raises UserError, also where
    there is no text."""
    if source is None:
        texts = embedded_corpus().values()
    elif isinstance(source, HubFile):
        rows = (text for batch in source.rows.iter(100) for text in batch["text"])
        texts = _check_rows(rows, source, count_bytes)
    elif kind_of(source) == ".parquet":
        texts = _check_rows(_read_parquet(source), source, count_bytes)
    elif kind_of(source):
        texts = _read_jsonl(source, count_bytes)
    else:
        pieces = _cut(_read_text(source, count_bytes))
        yield Document(source.stat().st_size, _check_reading(pieces, source))
        return
    for text in _check_reading(filter(None, texts), source):
        yield Document(len(text.encode()), (text,))


def _check_reading(items, source):
    """What is read of a source. Raises UserError where that fails, and where it is nothing."""
    empty = True
    try:
        for item in items:
            empty = False
            yield item
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{source}: cannot be read: {error}") from None
    if empty:
        raise UserError(f"{source}: no text in it")


# ---------------------------------------------------------------------------- formats


def _read_text(file, count_bytes):
    """The text of a file, in the parts that are read at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open("rb") as raw:
        while True:
            offset = raw.tell() - len(decoder.getstate()[0])  # of what is decoded now
            chunk = raw.read(PIECE)
            count_bytes(len(chunk))
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file}: not UTF-8 at byte {offset + error.start} "
                    f"(0x{error.object[error.start]:02x}): save it as UTF-8, if it is a text"
                ) from None
            if "\0" in text:
                at = offset + len(text[: text.index("\0")].encode())
                raise UserError(f"{file}: a NUL byte at byte {at}; this is not a text file")
            yield text.removeprefix("\ufeff") if offset == 0 else text  # the byte-order mark
            if not chunk:
                return


def _cut(parts):
    """The text of `parts` in pieces that can be encoded apart."""
    text = ""
    for part in parts:
        text += part
        if cut := safe_cut(text):
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def safe_cut(text: str) -> int:
    """The last place where the parts of a text give the tokens of the whole: before white space
    that follows a letter, where no tokenizer's pattern has a token in common. 0 if nowhere, but
    the end of a text that is too long to wait for such a place."""
    letter_before_space = LETTER_BEFORE_SPACE.match(text)
    if letter_before_space:
        return letter_before_space.end()
    return len(text) if len(text) > 16 * PIECE else 0


def _read_jsonl(file, count_bytes):
    done = 0
    with file.open("rb") as raw:
        lines = gzip.open(raw) if kind_of(file) == ".jsonl.gz" else raw
        for number, line in enumerate(lines, start=1):
            count_bytes(raw.tell() - done)
            done = raw.tell()
            if line.strip():
                yield _text_of_line(line, f"{file}: line {number}")


def _text_of_line(line, where):
    try:
        text = json.loads(line.decode("utf-8-sig"))["text"]
        text.encode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at its byte {error.start}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f'{where}: not a JSON object with a "text"') from None
    if "\0" in text:
        raise UserError(f"{where}: a NUL character in its text")
    return text


def _read_parquet(file):
    parquet = optional_package("pyarrow.parquet", "datasets")
    with file.open("rb") as raw:
        try:
            for batch in parquet.ParquetFile(raw).iter_batches(100, columns=["text"]):
                yield from batch.column("text").to_pylist()
        except (ValueError, KeyError) as error:  # ArrowInvalid is a ValueError
            reason = f'not a Parquet file with a column "text": {error}'
            raise UserError(f"{file}: {reason}") from None


def _check_rows(texts, source, count_bytes):
    for number, text in enumerate(texts):
        if not isinstance(text, str | None):
            raise UserError(f'{source}: row {number}: its "text" is {text!r}')
        count_bytes(len(text or ""))
        yield text
