"""The scripts as a user runs them, each in a process of its own or in this one."""

import contextlib
import functools
import importlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest

from gptling.cli import launch

ROOT = Path(__file__).parent.parent
TINY = (
    "--block_size=16 --n_layer=2 --n_head=2 --n_embd=16 --batch_size=4 --max_iters=20 "
    "--eval_interval=10 --learning_rate=1e-2 --min_lr=1e-3 --warmup_iters=2 --dtype=float32 "
    "--curves=False"
).split()
MINE = ["--dataset=mine", *TINY]
TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))

# A process that has imported PyTorch forks a child for each script: a start takes no seconds then.
# The first step of an optimizer imports the compiler.
OURS = {"gptling", "model", "prepare", "sample", "train"}
FORKS = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
FORKS.set_forkserver_preload(["tests.scripts", "sample", "train", "torch._dynamo"])


def start(function, *arguments):
    """Call a function in a process of FORKS. Return the process."""
    child = FORKS.Process(target=function, args=arguments, daemon=True)
    with contextlib.chdir(ROOT):  # where the first one imports
        child.start()
    return child


def run_in_child(arguments, cwd, files):
    """Run a script in this process, with its standard streams in files."""
    os.chdir(cwd)
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    arguments = [str(ROOT / arguments[0]), *arguments[1:]]
    sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
    if sys.path[0] != str(ROOT):  # another copy of the project has its own modules
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
    elif "gptling.startup" in sys.modules:
        sys.modules["gptling.startup"].STARTED = time.perf_counter()
    runpy.run_path(arguments[0], run_name="__main__")


def run_script(script, *arguments, cwd, stdin="", **environment):
    """Run a script of the project; returns the finished process with its output in bytes."""
    arguments = [str(ROOT / script), *map(str, arguments)]
    stdin = stdin if isinstance(stdin, bytes) else stdin.encode()
    if environment or not hasattr(os, "fork"):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            input=stdin,
            capture_output=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,  # the models are tiny
        )
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / name for name in ("in", "out", "err")]
        for file, content in zip(files, (stdin, b"", b""), strict=True):
            file.write_bytes(content)
        child = start(run_in_child, arguments, cwd, files)
        child.join(120)
        output = (file.read_bytes() for file in files[1:])
        return subprocess.CompletedProcess(arguments, child.exitcode, *output)


def run_here(script, *arguments, cwd, stdin="", changes=()):
    """As run_script, in this process, which has imported the packages. changes: edited's."""
    from tests.edits import edited  # which imports this module

    name = script.removesuffix(".py")
    module = getattr(edited(*changes), name) if changes else importlib.import_module(name)
    argv = [str(ROOT / script), *map(str, arguments)]
    streams = [io.TextIOWrapper(io.BytesIO(content)) for content in (stdin.encode(), b"", b"")]
    replaced = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True), argv=argv)
    with mock.patch.multiple(sys, **replaced), contextlib.chdir(cwd):
        with pytest.raises(SystemExit) as exit:
            launch(module.main)
    for stream in streams[1:]:
        stream.flush()
    stdout, stderr = (stream.buffer.getvalue() for stream in streams[1:])
    return subprocess.CompletedProcess(script, exit.value.code or 0, stdout, stderr)


def output_of(script, *arguments, run=run_script, **options):
    """Standard output of a script that must succeed."""
    process = run(script, *arguments, **options)
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode("utf-8")


output_here = functools.partial(output_of, run=run_here)  # in this process


def peak_memory(*arguments, cwd):
    """Run Python with these arguments, without a limit of time. Return the memory of its largest
    process in bytes."""
    code = "import resource, subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])\n"
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    command = [sys.executable, "-c", code, *arguments]
    output = subprocess.check_output(command, cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return 1024 * int(output.split()[-1])


def one_line(process, *words):
    """A process has failed with one line on standard error that has these words; returns it."""
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    return error
