"""What only a CUDA GPU shows: training, resuming and sampling there. Skipped without one."""

import shutil
from functools import partial

import pytest

from tests.conftest import assert_equal, read_log, weights
from tests.scripts import MINE, output_of, run_script

pytestmark = pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no NVIDIA GPU")
on_gpu = partial(output_of, CUDA_VISIBLE_DEVICES="0")  # the first one


def losses(run):
    return [entry["val_loss"] for entry in read_log(run) if "val_loss" in entry]


@pytest.mark.parametrize("compile", [False, True])
def test_training_gives_the_losses_of_a_cpu(compile, trained):
    name = f"out/gpu-{compile}"
    flags = [*MINE, f"--out_dir={name}", f"--compile={compile}", "--device=cuda"]
    assert "cuda, float32" in on_gpu("train.py", *flags, cwd=trained)
    assert losses(trained / name) == pytest.approx(losses(trained / "out/mine"), rel=1e-3)


def test_deterministic_runs_are_equal_bit_for_bit(trained):
    flags = [*MINE, "--dtype=bfloat16", "--dropout=0.1", "--deterministic"]
    for name in ("one", "two"):
        on_gpu("train.py", *flags, f"--out_dir=out/{name}", "--device=cuda", cwd=trained)
    assert_equal(weights(trained / "out/one"), weights(trained / "out/two"))


@pytest.mark.parametrize("compile", [[], ["--compile"]])
def test_greedy_text_is_that_of_a_cpu(compile, trained):
    arguments = ["out/mine", "--prompt=12 green", "--temperature=0", "--max_new_tokens=60"]
    arguments += ["--dtype=float32"]
    expected = output_of("sample.py", *arguments, cwd=trained)
    process = run_script("sample.py", *arguments, *compile, cwd=trained, CUDA_VISIBLE_DEVICES="0")
    assert process.stdout.decode() == expected
    assert "cuda" in process.stderr.decode() and "slower decoding" not in process.stderr.decode()
