"""The lessons in docs/ are true: their blocks print the text below them, and the names at the end
of each section exist."""

import contextlib
import importlib
import io
import re

import pytest
import torch

import model
from tests.conftest import ROOT

PAGES = ["attention.md", "gpt.md", "learning.md"]
SLOW = {"gpt.md", "learning.md"}  # pages that train models


def read(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.fixture
def fresh_torch(tmp_path, monkeypatch):
    """An empty working directory and PyTorch's defaults. Both are restored after the test."""
    monkeypatch.chdir(tmp_path)
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    with torch.enable_grad(), torch.random.fork_rng():
        yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_printoptions(profile="default")


RUNS = [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES]


@pytest.mark.parametrize("page", RUNS)
def test_blocks_print_the_text_below_them(page, fresh_torch):
    """The blocks run in order and in one namespace, as in a notebook."""
    blocks = re.findall(
        r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", read(page), re.MULTILINE | re.DOTALL
    )
    assert blocks
    namespace = {}
    for number, (code, expected) in enumerate(blocks, 1):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, f"docs/{page}, block {number}", "exec"), namespace)
        assert output.getvalue() == expected, f"block {number}"


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
