"""The lessons in docs/ are true: their blocks print the text below them, and the names at the end
of each section exist."""

import contextlib
import importlib
import io
import os
import re
import sys

import pytest

import model
from tests.scripts import ROOT, start

PAGES = ["attention.md", "gpt.md", "learning.md"]
SLOW = {"gpt.md", "learning.md"}  # pages that train models


def read(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def run_blocks(page, directory):
    """Run the blocks of a page in order and in one namespace, as in a notebook, and compare what
    they print. For a process of its own: PyTorch has its defaults there."""
    os.chdir(directory)
    sys.stderr = open("errors", "w", buffering=1)
    namespace = {}
    for number, (code, expected) in enumerate(blocks_of(page), 1):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, f"docs/{page}, block {number}", "exec"), namespace)
        assert output.getvalue() == expected, f"block {number} printed\n{output.getvalue()}"


def blocks_of(page):
    pattern = r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?"
    return re.findall(pattern, read(page), re.MULTILINE | re.DOTALL)


RUNS = [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES]


@pytest.mark.parametrize("page", RUNS)
def test_blocks_print_the_text_below_them(page, tmp_path):
    assert blocks_of(page)
    child = start(run_blocks, page, tmp_path)
    child.join()
    assert child.exitcode == 0, (tmp_path / "errors").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_sections_end_with_names_that_exist(page):
    """A section with Python code ends with a line for each file that it explains, such as
    "In model.py: `GPT.wte`, `Block`." or "In gptling/muon.py: `orthogonalise`."""
    gpt = model.GPT(model.GPTConfig(block_size=4, vocab_size=5, n_layer=1, n_head=1, n_embd=2))
    examples = {type(module).__name__: module for module in gpt.modules()}  # they have attributes
    for section in re.split(r"^## ", read(page), flags=re.MULTILINE)[1:]:
        last_words = section.rpartition("```")[2]
        lines = re.findall(r"^In ([\w/]+)\.py: (.*)$", last_words, re.MULTILINE)
        assert lines or "```python" not in section, section
        for file, text in lines:
            names = re.findall(r"`([^`]+)`", text)
            assert names, text
            for name in names:
                owner, _, attribute = name.partition(".")
                value = getattr(importlib.import_module(file.replace("/", ".")), owner)
                assert not attribute or hasattr(examples.get(owner, value), attribute), name
