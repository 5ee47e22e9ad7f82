"""Changed versions of model.py as modules: patches of docs/experiments/ and edits of its text."""

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

from tests.conftest import ROOT

DIRECTORY = tempfile.TemporaryDirectory()  # of the changed files, until the tests end


def apply_patch(name: str, directory: Path):
    """Apply docs/experiments/NAME.patch to the copy of the project in a directory."""
    git = ["git", "apply", "-C1", ROOT / "docs" / "experiments" / f"{name}.patch"]
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.parent)}
    applied = subprocess.run(git, cwd=directory, env=alone, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr


def edited_source(*changes: str | tuple[str, str]) -> str:
    """model.py with these changes: names of patches, or pairs of a text in it and a new text."""
    source = (ROOT / "model.py").read_text(encoding="utf-8")
    for change in changes:
        if isinstance(change, str):
            with tempfile.TemporaryDirectory() as directory:
                file = Path(directory, "model.py")
                file.write_text(source, encoding="utf-8")
                apply_patch(change, Path(directory))
                source = file.read_text(encoding="utf-8")
        else:
            assert change[0] in source, f"model.py no longer has {change[0]}"
            source = source.replace(*change)
    return source


@functools.cache
def edited_module(*changes: str | tuple[str, str]) -> types.ModuleType:
    """The module of a changed model.py, with a file: torch.compile looks at its name."""
    name = f"edited_{len(sys.modules)}"
    file = Path(DIRECTORY.name, f"{name}.py")
    file.write_text(edited_source(*changes), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
