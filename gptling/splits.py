"""Which text trains and which validates: one rule, which needs no second reading."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gptling.corpus import Document

VALIDATION = 100_000_000  # bytes of text that validate, at most


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


class Counts(NamedTuple):
    """What has been read: documents, characters, and bytes of the text in each split."""

    documents: int = 0
    characters: int = 0
    train: int = 0
    val: int = 0

    def plus(self, split: str, text: str) -> "Counts":
        """With one more text of a document."""
        train, val = (_size(text), 0) if split == "train" else (0, _size(text))
        characters = self.characters + len(text)
        return Counts(self.documents, characters, self.train + train, self.val + val)


class Place(NamedTuple):
    """How far the reading is: so many pieces of a source, which has the index `source`."""

    source: int = 0
    pieces: int = 0
    before: Counts = Counts()  # the source
    now: Counts = Counts()

    @classmethod
    def from_json(cls, values: list) -> "Place":
        source, pieces, before, now = values
        return cls(source, pieces, Counts(*before), Counts(*now))


class Piece(NamedTuple):
    """Text for a split, "train" or "val"; an empty one where a document ends there."""

    split: str
    text: str
    place: Place  # behind it


def split_documents(
    documents: Iterable[tuple[int, Document]], first_sizes: Sequence[int], start: Place
) -> Iterator[Piece]:
    """The pieces behind `start`, in order. documents: (index of its source, document) from the
    beginning of that source on; first_sizes: as for training_part."""
    place = Place(start.source, 0, start.before, start.before)
    for source, document in documents:
        if source != place.source:
            place = Place(source, 0, place.now, place.now)
        part = training_part(
            document.size, place.now.train + place.now.val, place.now.val, first_sizes
        )
        counts = place.now._replace(documents=place.now.documents + 1)
        for split, text in _split_document(document, part):
            counts = counts.plus(split, text)
            place = Place(source, place.pieces + 1, place.before, counts)
            if place[:2] > start[:2]:
                yield Piece(split, text, place)


def _split_document(document, part):
    """(split, text) for its pieces; an empty text behind the last one of each split."""
    rest = part  # bytes that train and are still to come
    splits = {}  # those that have text of the document, in order
    for piece in document.pieces:
        head = _leading(piece, rest)
        rest -= _size(piece)
        for split, text in (("train", head), ("val", piece[len(head) :])):
            if text:
                splits[split] = True
                yield split, text
    yield from ((split, "") for split in splits)


def _leading(text, size):
    """The whole characters among the first `size` bytes of a text."""
    if size <= 0:
        return ""
    return text if size >= 4 * len(text) else text.encode()[:size].decode(errors="ignore")


def _size(text):
    return len(text) if text.isascii() else len(text.encode())
