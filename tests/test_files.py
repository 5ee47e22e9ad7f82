"""Files that appear whole or not at all, also on a disk that is full."""

import errno
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from gptling.cli import UserError
from gptling.files import lock_directory, new_directory, write_whole
from tests.conftest import contents
from tests.scripts import TEXT, TINY, run_here, start


def test_a_directory_is_on_the_disk_before_it_has_its_name(here, monkeypatch):
    """Otherwise it could exist and be empty after a power cut."""
    synced, renamed = set(), {}
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source, target):
        if os.path.basename(target).startswith(("checkpoint-", "mine")):
            content = {entry.name: entry.inode() for entry in os.scandir(source)}
            renamed[target.name] = (content | {".": os.stat(source).st_ino}, synced.copy())
            synced.clear()  # the parent has to be synced after the rename
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    (here / "mine.txt").write_text(TEXT)
    assert run_here("prepare.py", "mine.txt", "--overwrite", cwd=here).returncode == 0
    assert (here / "data").stat().st_ino in synced
    assert run_here("train.py", "--dataset=mine", *TINY, cwd=here).returncode == 0
    assert (here / "out" / "mine").stat().st_ino in synced
    assert renamed.keys() == {"mine", "checkpoint-10", "checkpoint-20"}
    for content, before in renamed.values():
        assert set(content.values()) <= before
        assert {"val.npy", "training_state.pt"} & content.keys() and len(content) > 4


def test_a_file_is_replaced_whole_once_it_is_on_the_disk(tmp_path, monkeypatch):
    path, synced = tmp_path / "meta.json", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(contents(tmp_path)))
    write_whole(path, b"first")
    write_whole(path, b"second")
    assert [set(found.values()) for found in synced] == [{b"first"}, {b"first", b"second"}]
    assert contents(tmp_path) == {Path("meta.json"): b"second"}


def test_a_rename_that_is_denied_once_is_tried_again(tmp_path, monkeypatch):
    """As on Windows, where a virus scanner has the new files open."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "data").symlink_to("drive", target_is_directory=True)  # it stays a link
    denied = {"rename", "replace"}

    def deny(name, change):
        def denying(source, target):
            if name in denied:
                denied.remove(name)
                raise PermissionError(errno.EACCES, "denied", str(source))
            return change(source, target)

        monkeypatch.setattr(os, name, denying)

    deny("rename", os.rename)
    deny("replace", os.replace)
    with new_directory(tmp_path / "data") as new:
        write_whole(new / "a", b"whole")
    assert not denied and (tmp_path / "data").is_symlink()
    assert contents(tmp_path / "drive") == {Path("a"): b"whole"}


def test_a_drive_that_cannot_sync_directories_gets_whole_files(tmp_path, monkeypatch):
    """Files are synced, or that is an error."""
    kinds, fsync = {stat.S_ISDIR}, os.fsync

    def fail(descriptor):
        mode = os.fstat(descriptor).st_mode
        if any(is_kind(mode) for is_kind in kinds):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with new_directory(tmp_path / "new") as new:
        write_whole(new / "a", b"whole")
    assert contents(tmp_path / "new") == {Path("a"): b"whole"}
    kinds.add(stat.S_ISREG)
    with pytest.raises(OSError, match="Invalid argument"):
        write_whole(tmp_path / "a", b"")


@pytest.mark.parametrize(
    "command, n_bytes",
    [
        ("prepare.py mine.txt --name=new", 2000),
        ("train.py --out_dir=new --log_interval=1", 1000),  # log.jsonl
        ("train.py --out_dir=new", 10_000),  # model.safetensors
        ("train.py --out_dir=new", 36_000),  # training_state.pt
        ("sample.py out/mine --prompt=12 --explain=page.html", 5000),
    ],
)
def test_a_full_disk_is_one_line_and_no_file_is_there_in_part(trained, tmp_path, command, n_bytes):
    """No file can grow beyond n_bytes, as on a full disk."""
    resource = pytest.importorskip("resource", reason="Windows: no way to make a disk small")
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "page.html").write_text("older")
    script, *flags = command.split()
    flags += ["--dataset=mine", *TINY] * (script == "train.py")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        process = run_here(script, *flags, cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = process.stderr.decode().splitlines()[-1]
    assert process.returncode == 1 and error.startswith(f"{script}: error: the disk is full")
    assert not list(tmp_path.rglob(".checkpoint-*")) + list(tmp_path.glob("data/.*"))
    assert not (tmp_path / "data/new").exists()
    assert (tmp_path / "page.html").read_text() == "older"


def test_every_file_has_the_permissions_that_the_umask_gives(trained):
    """Others may read a model of a shared folder."""
    modes = {path: path.stat().st_mode for path in trained.rglob("*.*") if path.is_file()}
    assert set(modes.values()) == {modes[trained / "mine.txt"]}, modes


def lock_and_wait(directory):
    _lock = lock_directory(directory)
    (directory / "locked").touch()
    time.sleep(60)


def test_a_directory_is_locked_until_it_is_released_or_the_process_ends(tmp_path):
    child = start(lock_and_wait, tmp_path)
    while not (tmp_path / "locked").exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match="another process that is writing there"):
        lock_directory(tmp_path)
    child.kill()
    child.join()
    for _ in range(2):
        lock_directory(tmp_path).release()
