"""What several test files use: the scripts as a user runs them, and a small trained run."""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and tests run side by side
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a CPU computes is compared bit for bit; see test_gpu

import pytest

from gptling.cli import launch

ROOT = Path(__file__).parent.parent
TINY = (
    "--block_size=16 --n_layer=2 --n_head=2 --n_embd=16 --batch_size=4 --max_iters=20 "
    "--eval_interval=10 --learning_rate=1e-2 --min_lr=1e-3 --warmup_iters=2 --dtype=float32 "
    "--curves=False"
).split()
TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))


def pytest_collection_modifyitems(items):
    """Tests marked gpt2 presume model.py as it is published: of a changed one they are skipped."""
    marked = [item for item in items if item.get_closest_marker("gpt2")]
    if marked:
        import torch

        from gptling.gpt2_format import published_tensors, why_not_gpt2
        from model import GPT, GPTConfig

        model = GPT(GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        reason, _ = why_not_gpt2(model, published_tensors(model), model.config)
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"model.py is no GPT-2: {reason}"))


# A process that has imported PyTorch forks a child for each script: a start takes no seconds then.
# The first step of an optimizer imports the compiler.
OURS = {"gptling", "model", "prepare", "sample", "train"}
FORKS = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
FORKS.set_forkserver_preload(["tests.conftest", "sample", "train", "torch._dynamo"])


def run_in_child(arguments, cwd, files):
    """Run a script in a process of FORKS, with its standard streams in files."""
    os.chdir(cwd)
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
    if sys.path[0] != str(ROOT):  # another copy of the project has its own modules
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
    elif "gptling.startup" in sys.modules:
        sys.modules["gptling.startup"].STARTED = time.perf_counter()
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.fixture(autouse=True)
def handlers_of_signals():
    """A script that run_here has run leaves no handlers of signals behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def one_process():
    """The processes of a run in this one alone, on a CPU."""
    from gptling.processes import Processes  # pytest's first process runs no test

    processes = Processes()
    processes.use_device("cpu")
    return processes


def small(**settings):
    """train.py's configuration in a run of --max_iters, with nothing left to plan."""
    from gptling.schedule import fill_in
    from gptling.settings import SMALL
    from train import TrainConfig

    config = TrainConfig(**{"minutes": 0.0} | settings)
    fill_in(config, SMALL)
    return config


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
        child = FORKS.Process(target=run_in_child, args=(arguments, cwd, files))
        with contextlib.chdir(ROOT):  # where the first one imports
            child.start()
        child.join(120)
        output = (file.read_bytes() for file in files[1:])
        return subprocess.CompletedProcess(arguments, child.exitcode, *output)


def run_here(script, *arguments, cwd, stdin="", changes=()):
    """As run_script, in this process: seconds faster, for the packages are imported already.
    changes: see edited."""
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


def output_of(script, *arguments, cwd, stdin="", **environment):
    """Standard output of a script that must succeed."""
    process = run_script(script, *arguments, cwd=cwd, stdin=stdin, **environment)
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode("utf-8")


def peak_memory(*arguments, cwd):
    """Run Python with these arguments, without a limit of time. Return the memory of its largest
    process in bytes."""
    code = "import resource, subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])\n"
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.check_output(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment
    )
    return 1024 * int(output.split()[-1])


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A directory in which a tiny model was trained, with its data/mine and out/mine."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "mine.txt").write_text(TEXT, encoding="utf-8")
    output_of("prepare.py", "mine.txt", cwd=directory)
    output_of("train.py", "--dataset=mine", *TINY, cwd=directory)
    return directory


@pytest.fixture
def here(trained, tmp_path):
    """A directory with data/mine in which to train."""
    shutil.copytree(trained / "data", tmp_path / "data")
    return tmp_path


@pytest.fixture
def finished(trained, here):
    """The same with out/mine, a run of 20 steps with checkpoints at 10 and 20."""
    shutil.copytree(trained / "out", here / "out")
    return here


def weights(run, step=20):
    """The tensors of a run's checkpoint, by their names."""
    from safetensors.torch import load_file  # imports PyTorch

    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def read_log(run):
    """The entries of a run's log.jsonl."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def contents(directory):
    """The folders and files in a directory, without locks, which a start leaves."""
    paths = (path for path in directory.rglob("*") if path.name != ".lock")
    return {path.relative_to(directory): path.is_file() and path.read_bytes() for path in paths}


def write_times(directory):
    """When each of these files was written last: the same bytes again are seen, too."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {file: file.stat().st_mtime_ns for file in files}


def one_line(process, *words):
    """A process has failed with one line on standard error that has these words; returns it."""
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    return error


@pytest.fixture(scope="session")
def gpt2_encoding():
    """GPT-2's vocabulary, where tiktoken has it in TIKTOKEN_CACHE_DIR."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("GPT-2's vocabulary: set TIKTOKEN_CACHE_DIR to a folder that has it")
    import tiktoken

    return tiktoken.get_encoding("gpt2")
