"""Files that appear whole or not at all, the lock of a directory, and mistakes of the user's."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from safetensors import SafetensorError


class UserError(Exception):
    """A mistake of the user's. Its message is one line with the value and the remedy."""


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a directory, and no path that leads elsewhere."""
    return Path(name).name == name and name not in ("", "..")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError, with the space that is left, if writing `path` fails, as on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        there = next(parent for parent in path.absolute().parents if parent.exists())
        megabytes = shutil.disk_usage(there).free / 1e6
        named = isinstance(error, OSError) and error.filename is not None  # of open, not of write
        if named or (isinstance(error, RuntimeError) and megabytes >= 1):  # torch.save has those
            raise
        reason = "the disk is full" if megabytes < 1 else error
        left = f"{megabytes:,.1f} MB are left on the disk"
        raise UserError(f"{path}: cannot be written: {reason}; {left}") from error


def sync(path: Path):
    """Have the system write a file or a directory to the disk now."""
    if os.name == "nt":
        return  # Windows lets nobody open a directory
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def replace(path: Path, content: bytes):
    """Write a file, which replaces an older one once it is whole on the disk."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if the file holds something else."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: cannot be read as JSON: {error}") from None


def lock_directory(directory: Path) -> filelock.FileLock:
    """Keep other processes out of a directory until release() of the lock, or until this process
    ends, however it does. Raises UserError if another process has the lock."""
    lock = filelock.FileLock(directory / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{directory}: another process is writing there; wait for it") from None
    return lock


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A locked directory to write into. If nothing goes wrong it becomes `target`, and replaces
    what is there; otherwise nothing is left of it."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(partial)
    new, old = partial / "new", partial / "old"
    try:
        for directory in (new, old):  # of a process that was killed
            shutil.rmtree(directory, ignore_errors=True)
        new.mkdir()
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)
    finally:
        lock.release()
        shutil.rmtree(partial, ignore_errors=True)
