"""Files that appear whole or not at all, the lock of a directory, and mistakes of the user's."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import filelock


class UserError(Exception):
    """A mistake of the user's. Its message is one line with the value and the remedy."""


def sync(path: Path):
    """Have the system write a file to the disk now, or a directory if its drive can do that."""
    if os.name == "nt":
        return  # Windows lets nobody open a directory
    ignored = [OSError] if path.is_dir() else []  # an error for a file counts
    with contextlib.suppress(*ignored):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def try_again(rename: Callable, target: Path):
    """Rename, again for six seconds if it is denied: Windows' virus scanners open what is new."""
    for seconds in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        with contextlib.suppress(PermissionError):
            return rename(target)
        time.sleep(seconds)
    return rename(target)


def write_whole(path: Path, content: bytes):
    """Write a file, which replaces an older one once it is whole on the disk."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_bytes(content)
    sync(temporary)
    try_again(temporary.replace, path)


def read_json(file: Path, remedy: str = "") -> dict:
    """Return the JSON object in a file. Raises UserError, which ends with the remedy."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = f": {remedy}" if remedy else ""
        raise UserError(f"{file} cannot be read ({error}){hint}") from None


def read_log(file: Path) -> list[dict]:
    """Return the entries of a log.jsonl."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def lock_directory(directory: Path) -> filelock.FileLock:
    """Keep other processes out of a directory until release() of the lock, or until this process
    ends or is killed. Raises UserError if another process has the lock."""
    lock = filelock.FileLock(directory / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{directory}: wait for another process that is writing there") from None
    return lock


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give a directory to write into, which replaces `target` once its files are on the disk. The
    folder around it is for temporary files, and is deleted at the end. An error leaves nothing. If
    `target` is a link, it stays one, and the directory that it leads to is replaced."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        yield new
        for path in [*new.iterdir(), new]:
            sync(path)
        old = Path(temporary, "old")
        if target.exists():
            try_again(target.rename, old)
        try:
            try_again(new.rename, target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
    sync(target.parent)
