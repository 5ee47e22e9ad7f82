"""Files that appear whole or not at all, also on a disk that is full."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gptling import run as checkpoints
from gptling.cli import UserError
from gptling.explain import write_page
from gptling.files import lock_directory, read_json, replace, writing
from gptling.report import draw_curves
from gptling.run import Progress, RunDirectory
from gptling.shards import TokenShards
from gptling.tokenizers import build_tokenizer
from model import GPT, GPTConfig
from tests.conftest import TEXT, TINY, one_process, output_of, run_script
from train import TrainConfig

# ---------------------------------------------------------------------------- a crash


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise it could be there and be empty."""
    events, rename = [], Path.rename
    monkeypatch.setattr(checkpoints, "sync", lambda path: events.append(path.name))

    def recorded(self, target):
        events.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", recorded)
    data = SimpleNamespace(fingerprint="", tokenizer_json='{"added_tokens": []}')
    scaler, model = torch.amp.GradScaler("cpu", enabled=False), GPT(GPTConfig(16, 9, 1, 1, 8))
    run = RunDirectory(tmp_path, one_process())
    run.save({"step": 3}, model, model, [], scaler, Progress(step=3), TrainConfig(), data)
    at = events.index("renamed")
    files = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert len(files) == 6 and files | {".checkpoint-3.writing"} == set(events[:at])
    assert events[at:] == ["renamed", tmp_path.name]


# ---------------------------------------------------------------------------- a disk that is full


@pytest.fixture
def disk(tmp_path):
    """A directory on a disk of its own, of 2 MB, where this machine lets us have one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", directory]
    if shutil.which("mount"):
        subprocess.run(mount, capture_output=True)
    yield directory
    if directory.is_mount():
        subprocess.run(["umount", "--lazy", directory], check=True)


@contextlib.contextmanager
def only(left, disk):
    """Inside, the disk has only `left` bytes left; without a disk of our own no file may be longer,
    which has another error, but of the same calls."""
    if disk.is_mount():
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - left))
        try:
            yield
        finally:
            ballast.unlink()
    else:
        resource = pytest.importorskip("resource", reason="Windows: no way to make a disk small")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(left // 2, 4096), limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def says_full(disk, path, error):
    """Whether an error is one line that names the path, and how full the disk is."""
    full = r"the disk is full: 0\.\d MB are left on it" if disk.is_mount() else r".+"
    return re.search(rf"{re.escape(path)}: cannot be written: {full}$", error.strip()) is not None


def run_on(disk, script, *arguments):
    """A script that inherits the limits of `only`."""
    environment = {} if disk.is_mount() else {"PYTHONUNBUFFERED": "1"}
    return run_script(script, *arguments, cwd=disk, **environment)


def write_zip(path):
    with path.open("wb") as file:
        torch.save({"a": torch.zeros(500_000)}, file)


def write_log(path):
    with path.open("a", encoding="utf-8") as file:
        file.write("{}\n" * 500_000)


def write_shards(path):
    shards = TokenShards(path.parent, build_tokenizer("byte"))
    for split in ("val", "train"):
        shards.write(split, np.zeros(500_000, dtype=np.uint16))
    shards.close()


def write_picture(path):
    pytest.importorskip("matplotlib", reason="pip install -e '.[curves]' brings matplotlib")
    log = [{"step": 1, "loss": 3.0}, {"step": 1, "val_loss": 3.0}]
    (path.parent / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    draw_curves(path.parent)


WRITERS = {  # name of the file: what writes it
    "training_state.pt": write_zip,
    "model.safetensors": lambda path: save_file({"a": torch.zeros(500_000)}, path),
    "array.npy": lambda path: np.save(path, np.zeros(200_000)),
    "log.jsonl": write_log,
    "train-00000.npy": write_shards,
    "val.npy": write_shards,
    "loss.png": write_picture,
    "page.html": lambda path: write_page(path, {"tokens": ["a"] * 200_000}),
    "tokenizer.json": lambda path: replace(path, b"x" * 1_000_000),
}
WHOLE = ("model.safetensors", "loss.png", "page.html", "tokenizer.json")  # or not there


@pytest.mark.parametrize("name", WRITERS)
def test_whoever_writes_names_the_full_disk_and_what_is_left_on_it(disk, name):
    path = disk / name
    path.write_bytes(b"older")
    # A page of memory for what is written before, where both splits of token files are.
    with only({"loss.png": 12_288, "train-00000.npy": 1_048_576}.get(name, 204_800), disk):
        with pytest.raises(UserError) as raised, writing(path):
            WRITERS[name](path)
        assert "\n" not in str(raised.value)
    if disk.is_mount() or name != "train-00000.npy":
        assert says_full(disk, str(path), str(raised.value)), str(raised.value)
    if name in WHOLE:
        assert path.read_bytes() == b"older"
        assert not [p.name for p in disk.iterdir() if p.name.startswith(f".{name}")]


def test_what_is_no_full_disk_has_its_own_reason(tmp_path):
    with pytest.raises(UserError, match=r"x: cannot be written: Permission denied$"):
        with writing(tmp_path / "x"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with pytest.raises(UserError, match=r"no/x: cannot be written: No such file or directory$"):
        with writing(tmp_path / "no" / "x"):
            (tmp_path / "no" / "x").write_text("")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), UserError("mine")])
def test_a_bug_while_writing_stays_what_it_is(tmp_path, error):
    with pytest.raises(type(error), match=f"^{error}$"), writing(tmp_path / "x"):
        raise error


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


CURVES = pytest.param("True", marks=pytest.mark.slow)


@pytest.mark.parametrize("curves", ["False", CURVES])
@pytest.mark.parametrize(
    "kilobytes", [0, 60, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 36, 100, 160))]
)
def test_a_training_on_a_full_disk_goes_on_once_there_is_space(disk, trained, kilobytes, curves):
    shutil.copytree(trained / "data", disk / "data")
    arguments = ["--dataset=mine", *TINY, f"--curves={curves}"]
    with only(1024 * kilobytes, disk):
        process = run_on(disk, "train.py", *arguments)
        if not disk.is_mount() and process.returncode == 0:
            pytest.skip("without a small disk every file fits")
    error, run = process.stderr.decode(), disk / "out" / "mine"
    if curves == "True":  # a thread of TensorBoard's may have something to say too, at any time
        error = "".join(re.findall(r"^train\.py: error: .*\n", error, flags=re.M))
    assert process.returncode == 1 and error.count("\n") == 1
    path = re.search(r"out/mine/[\w./-]+", error)[0]
    assert says_full(disk, path, error), error
    checkpoints = sorted(p.name for p in run.glob("*checkpoint*"))
    assert checkpoints in ([], ["checkpoint-10"])
    assert not list(run.glob("*.writing"))
    if checkpoints:
        arguments = ["--out_dir=out/mine", "--resume"]
    output_of("train.py", *arguments, *["--overwrite"] * (not checkpoints), cwd=disk)
    weights = [load_file(d / "out/mine/checkpoint-20/model.safetensors") for d in (disk, trained)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize("kilobytes", [0, 4, 12, 20])
def test_a_preparation_on_a_full_disk_is_done_once_there_is_space(disk, tmp_path, kilobytes):
    text = tmp_path / "mine.txt"
    text.write_text(TEXT * 4, encoding="utf-8")
    with only(1024 * kilobytes, disk):
        process = run_on(disk, "prepare.py", text)
    error = process.stderr.decode()
    path = re.search(r"data/\.mine\.partial/[\w./-]+", error)[0]
    assert process.returncode == 1 and error.count("\n") == 1 and says_full(disk, path, error)
    assert not process.stdout and not list((disk / "data").iterdir())
    output_of("prepare.py", text, cwd=disk)
    output_of("prepare.py", text, cwd=tmp_path)
    assert contents(disk / "data" / "mine") == contents(tmp_path / "data" / "mine")


def test_a_page_of_explain_on_a_full_disk_leaves_the_older_one(disk, trained):
    (disk / "page.html").write_text("older")
    run = trained / "out" / "mine"
    with only(4096, disk):
        process = run_on(disk, "sample.py", run, "--prompt=12", "--explain=page.html")
    assert process.returncode == 1
    assert says_full(disk, "page.html", process.stderr.decode().splitlines()[-1])
    assert {p.name: p.read_text() for p in disk.iterdir()} == {"page.html": "older"}


# ---------------------------------------------------------------------------- text, locks


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "meta.json"
    replace(path, b"first")
    replace(path, b"second")
    assert contents(tmp_path) == {"meta.json": b"second"}

    def stop(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        replace(path, b"third")
    assert contents(tmp_path) == {"meta.json": b"second"}


@pytest.mark.parametrize(
    "content, named",
    [(b"[]", "not a JSON object"), (b'{"a": ', "cannot be read"), (b"\xff", "utf-8"),
     (b"[" * 100_000, "recursion"), (b"{}" + b" " * 200, "more than 100 bytes")],
)  # fmt: skip
def test_json_that_is_something_else_is_named_with_its_file(tmp_path, content, named):
    (tmp_path / "a.json").write_bytes(content)
    limit = 100 if len(content) < 1000 else 1 << 20
    with pytest.raises(UserError, match=rf"a\.json: cannot be read: .*{named}|{named}"):
        read_json(tmp_path / "a.json", limit)
    (tmp_path / "a.json").write_text('{"a": "ü"}', encoding="utf-8")
    assert read_json(tmp_path / "a.json", limit) == {"a": "ü"}


def test_a_directory_is_locked_until_it_is_released_or_the_process_ends(tmp_path):
    lock = lock_directory(tmp_path)
    with pytest.raises(UserError, match="another process is writing there"):
        lock_directory(tmp_path)
    lock.release()
    code = "import sys, gptling.files, pathlib\n"
    code += "lock = gptling.files.lock_directory(pathlib.Path(sys.argv[1]))\n"
    code += "print('locked', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert process.stdout.readline() == b"locked\n"
    with pytest.raises(UserError, match="another process is writing there"):
        lock_directory(tmp_path)
    process.kill()
    process.wait()
    lock_directory(tmp_path).release()
