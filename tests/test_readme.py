"""What the README says is true: its lengths, its presets and flags, its Python."""

import re
import shlex
import subprocess
import sys

import pytest

from config import load
from prepare import PrepareConfig
from sample import SampleConfig
from tests.conftest import ROOT
from train import TrainConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"python (prepare|train|sample)\.py(.*)", "".join(b for _, b in BLOCKS))


def test_lengths_of_files_are_those_named():
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.MULTILINE)
    assert {"model.py", "prepare.py", "train.py", "sample.py", "config/__init__.py"} == {
        name for name, _ in rows
    }
    for name, lines in rows:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) == int(lines), name


@pytest.mark.parametrize("script, arguments", COMMANDS)
def test_commands_have_flags_and_presets_that_exist(script, arguments, monkeypatch):

    monkeypatch.chdir(ROOT)
    words = shlex.split(arguments.split("|")[0].split("&&")[0], comments=True)
    if script == "train":
        load(TrainConfig, "", words, default_preset=ROOT / "config" / "quickstart.toml")
    elif script == "sample":
        load(SampleConfig, "", words, positional="run")
    else:
        load(PrepareConfig, "", words, positional="sources")


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "python"])
def test_python_runs(code, trained):
    code = re.sub(r"out/quickstart/checkpoint-\d+", "out/mine/checkpoint-20", code)
    code = code.replace("The import statement", "12 green")
    code = code.replace("max_new_tokens=40", "max_new_tokens=8")  # transformers has no window rule
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=trained,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr.decode()
    assert process.stdout
