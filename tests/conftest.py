"""What several test files use: a small trained run, its files, and models."""

import json
import os
import shutil
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and tests run side by side
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a CPU computes is compared bit for bit; see test_gpu

import pytest

from tests.scripts import MINE, TEXT, output_of


def pytest_collection_modifyitems(items):
    """Tests marked gpt2 presume model.py as it is published: of a changed one they are skipped."""
    marked = [item for item in items if item.get_closest_marker("gpt2")]
    if marked:
        from gptling.gpt2_format import published_tensors, why_not_gpt2
        from model import GPT, GPTConfig

        model = randomised(GPT(GPTConfig(16, vocab_size=50, n_layer=2, n_head=2, n_embd=32)))
        reason, _ = why_not_gpt2(model, published_tensors(model), model.config)
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"model.py is no GPT-2: {reason}"))


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


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A directory in which a tiny model was trained, with its data/mine and out/mine."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "mine.txt").write_text(TEXT, encoding="utf-8")
    output_of("prepare.py", "mine.txt", cwd=directory)
    output_of("train.py", *MINE, cwd=directory)
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


def randomised(model, std=0.3):
    """A model in eval mode, with weights that are large enough for a change or an error to show."""
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def assert_equal(a, b):
    """Tensors, or nested ones, have the same bits and dtypes."""
    import torch

    torch.testing.assert_close(a, b, rtol=0, atol=0)


def edit_json(file, **changes):
    """Replace values of a JSON file: None drops one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: values[name] for name in values if values[name] is not None}))


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


def snapshot(directory):
    """The contents, and when each file was written last: the same bytes again are seen, too."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return contents(directory), {file: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="session")
def gpt2_encoding():
    """GPT-2's vocabulary, where tiktoken has it in TIKTOKEN_CACHE_DIR."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("GPT-2's vocabulary: set TIKTOKEN_CACHE_DIR to a folder that has it")
    import tiktoken

    return tiktoken.get_encoding("gpt2")
