"""Files that appear whole or not at all, also on a disk that is full."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from gptling.cli import UserError
from gptling.files import lock_directory, replace
from tests.conftest import ROOT, TEXT, TINY, run_here


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---------------------------------------------------------------------------- a crash


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    trained, tmp_path, monkeypatch, train_here
):
    """Otherwise it could exist and be empty after a power cut."""
    synced, renamed = set(), {}
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source, target):
        if os.path.basename(target).startswith("checkpoint-"):
            content = {entry.name: entry.inode() for entry in os.scandir(source)}
            renamed[target.name] = (content | {".": os.stat(source).st_ino}, synced.copy())
            synced.clear()  # the parent has to be synced after the rename
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    shutil.copytree(trained / "data", tmp_path / "data")
    assert run_here("train.py", "--dataset=mine", *TINY, cwd=tmp_path).returncode == 0
    assert renamed.keys() == {"checkpoint-10", "checkpoint-20"}
    for content, before in renamed.values():
        assert {"model.safetensors", "training_state.pt", "metrics.json"} < content.keys()
        assert set(content.values()) <= before
    assert (tmp_path / "out" / "mine").stat().st_ino in synced


def test_a_file_is_replaced_whole_once_it_is_on_the_disk(tmp_path, monkeypatch):
    path, synced = tmp_path / "meta.json", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(contents(tmp_path)))
    replace(path, b"first")
    replace(path, b"second")
    assert [set(found.values()) for found in synced] == [{b"first"}, {b"first", b"second"}]
    assert contents(tmp_path) == {"meta.json": b"second"}

    def stop(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        replace(path, b"third")
    assert contents(tmp_path) == {"meta.json": b"second"}


# ---------------------------------------------------------------------------- a disk that is full


@pytest.mark.parametrize(
    "script, flags, n_bytes",
    [
        ("prepare.py", ["mine.txt"], 2000),
        ("train.py", [*TINY, "--log_interval=1"], 1000),  # log.jsonl
        ("train.py", TINY, 10_000),  # model.safetensors
        ("train.py", TINY, 36_000),  # training_state.pt
        ("sample.py", ["out/mine", "--prompt=12", "--explain=page.html"], 5000),
    ],
)
def test_a_full_disk_is_one_line_and_nothing_is_there_in_part(
    trained, tmp_path, train_here, script, flags, n_bytes
):
    """No file can grow beyond n_bytes, as on a full disk."""
    resource = pytest.importorskip("resource", reason="Windows: no way to make a disk small")
    if script == "prepare.py":
        (tmp_path / "mine.txt").write_text(TEXT, encoding="utf-8")
    elif script == "train.py":
        shutil.copytree(trained / "data", tmp_path / "data")
        flags = ["--dataset=mine", *flags]
    else:
        shutil.copytree(trained / "out", tmp_path / "out")
        (tmp_path / "page.html").write_text("older")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        process = run_here(script, *flags, cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = process.stderr.decode()
    assert process.returncode == 1 and "Traceback" not in error
    assert f"{script}: error: the disk is full" in error.splitlines()[-1]
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]
    assert not (tmp_path / "data/mine.txt").exists()
    assert script != "sample.py" or (tmp_path / "page.html").read_text() == "older"


# ---------------------------------------------------------------------------- locks


def test_a_directory_is_locked_until_it_is_released_or_the_process_ends(tmp_path):
    lock = lock_directory(tmp_path)
    with pytest.raises(UserError, match="another process is writing there"):
        lock_directory(tmp_path)
    lock.release()
    code = "import gptling.files, pathlib, sys\nlock = gptling.files.lock_directory("
    code += "pathlib.Path(sys.argv[1]))\nprint('locked', flush=True)\nsys.stdin.read()"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, **streams) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="another process is writing there"):
            lock_directory(tmp_path)
        process.send_signal(signal.SIGKILL)
    lock_directory(tmp_path).release()
