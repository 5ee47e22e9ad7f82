"""Files that appear whole or not at all, and errors that name what a disk has left."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from safetensors import SafetensorError

from gptling.cli import UserError


def is_plain_name(name: str) -> bool:
    """Whether a directory of this name is one, in the directory that it is made in."""
    return Path(name).name == name and name.strip(".") != "" and name.isprintable()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while `path` is written into a UserError that names the path, and the
    reason; of a full disk also how much is left on it."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise  # not torch.save's: a bug
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        there = next(p for p in [path, *path.absolute().parents] if os.path.exists(p))
        megabytes = shutil.disk_usage(there).free / 1e6
        # torch.save and numpy have errors of their own for a full disk, which do not say so.
        hidden = getattr(error, "errno", None) is None and megabytes < 1
        if hidden or "No space left" in reason or "not enough space" in reason:
            reason = f"the disk is full: {megabytes:,.1f} MB are left on it"
        raise UserError(f"{path}: cannot be written: {reason}") from error


def sync(path: Path):
    """Have the system write a file or a directory to the disk now."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle on a directory to flush
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def replace(path: Path, content: bytes):
    """Write a file, which takes the place of an older one once it is whole on the disk."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(file: Path, limit: int = 1 << 20) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises UserError."""
    try:
        if not file.is_file():  # a pipe would be waited for
            raise FileNotFoundError("no such file")
        if file.stat().st_size > limit:
            raise ValueError(f"it has more than {limit} bytes")
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    return values


def lock_directory(directory: Path) -> filelock.FileLock:
    """Keep other processes out of `directory` until release() of what is returned; the system takes
    the lock back when this process ends, however it does. Raises UserError where it is taken."""
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
