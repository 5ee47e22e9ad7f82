"""Changed versions of the scripts: patches of docs/experiments/ and edits of model.py."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

from tests.scripts import ROOT

# Lines of model.py that several tests replace.
INIT = "        self.uninitialised ="
LOGITS = "return self.lm_head(x)"
LOSS = "        return logits, losses.sum() / n_targets"

DIRECTORY = tempfile.TemporaryDirectory()  # of the changed scripts, until the tests end


def copy_edited(directory: Path, names: list[str], changes: tuple):
    """Copy files and folders of the project to a directory and change them. A change is the name of
    a patch, or a pair: a text in model.py, or in train.py, and what replaces it."""
    for name in names:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, directory / name)
    for change in changes:
        if isinstance(change, str):
            git = ["git", "apply", "-C1", ROOT / "docs" / "experiments" / f"{change}.patch"]
            environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.parent)}
            subprocess.run(git, cwd=directory, env=environment, check=True)
            continue
        files = [directory / name for name in ("model.py", "train.py")]
        file = next((f for f in files if change[0] in f.read_text(encoding="utf-8")), None)
        assert file, f"no script has {change[0]!r} any more"
        file.write_text(file.read_text(encoding="utf-8").replace(*change), encoding="utf-8")


@functools.cache
def edited(*changes: str | tuple[str, str]) -> types.SimpleNamespace:
    """The modules model, train and sample of the project with these changes."""
    directory, modules = Path(tempfile.mkdtemp(dir=DIRECTORY.name)), {}
    names = ["model", "train", "sample"]
    copy_edited(directory, [f"{name}.py" for name in names], changes)
    for name in names:
        full_name = f"{directory.name}_{name}"
        spec = importlib.util.spec_from_file_location(full_name, directory / f"{name}.py")
        module = modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        with mock.patch.dict(sys.modules, modules):  # `from model import GPT` finds the edited one
            spec.loader.exec_module(module)
    return types.SimpleNamespace(**modules)
