"""What several test files use: the scripts as a user runs them, and a small trained run."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import run

ROOT = Path(__file__).parent.parent
TINY = (
    "--block_size=16 --n_layer=2 --n_head=2 --n_embd=16 --batch_size=4 --max_iters=20 "
    "--eval_interval=10 --learning_rate=1e-2 --min_lr=1e-3 --dtype=float32 --curves=False"
).split()
TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))


def run_script(script, *arguments, cwd, stdin="", **environment):
    """Run a script of the project; returns the finished process with its output as text."""
    return subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)],
        cwd=cwd,
        input=stdin if isinstance(stdin, bytes) else stdin.encode(),
        capture_output=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,  # the models are tiny
    )


def run_here(script, *arguments, cwd):
    """As run_script, in this process: seconds faster, for the packages are imported already."""
    main = importlib.import_module(script.removesuffix(".py")).main
    streams = [io.TextIOWrapper(io.BytesIO()) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(cwd):
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        patch.setattr(sys, "argv", [str(ROOT / script), *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            run(main)
        code = exit.value.code
        if isinstance(code, str):  # as the interpreter does
            print(code, file=sys.stderr)
            code = 1
        for stream in streams[1:]:
            stream.flush()
    _, stdout, stderr = (stream.buffer.getvalue() for stream in streams)
    return subprocess.CompletedProcess(script, code or 0, stdout, stderr)


def output_of(script, *arguments, cwd, stdin="", **environment):
    """Standard output of a script that must succeed."""
    process = run_script(script, *arguments, cwd=cwd, stdin=stdin, **environment)
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode("utf-8")


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A directory in which a tiny model was trained, with its data/mine and out/mine."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "mine.txt").write_text(TEXT, encoding="utf-8")
    output_of("prepare.py", "mine.txt", cwd=directory)
    output_of("train.py", "--dataset=mine", *TINY, cwd=directory)
    return directory


@pytest.fixture(scope="session")
def gpt2_encoding():
    """GPT-2's vocabulary, where tiktoken has it in TIKTOKEN_CACHE_DIR."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("GPT-2's vocabulary: set TIKTOKEN_CACHE_DIR to a folder that has it")
    import tiktoken

    return tiktoken.get_encoding("gpt2")
