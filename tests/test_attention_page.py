"""docs/attention.md is true: its blocks print what stands behind them, and model.py has every name
that the page points to."""

import contextlib
import importlib.util
import io
import re

import torch

import model
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", PAGE, re.M | re.S)


def test_blocks_print_what_stands_behind_them(tmp_path, monkeypatch):
    """In one namespace. Without matplotlib the others run: no block needs that of the picture."""
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    pictures, namespace = importlib.util.find_spec("matplotlib") is not None, {}
    with torch.enable_grad(), torch.random.fork_rng():  # both are as before at the end
        for number, (code, expected) in enumerate(BLOCKS, 1):
            if pictures or "matplotlib" not in code:
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(compile(code, f"docs/attention.md, block {number}", "exec"), namespace)
                assert output.getvalue() == expected
    torch.set_printoptions(profile="default")


def test_names_said_to_be_in_model_py_are_there():
    gpt = model.GPT(model.GPTConfig(block_size=4, vocab_size=5, n_layer=1, n_head=1, n_embd=2))
    examples = {"GPT": gpt, "MultiHeadAttention": gpt.h[0].attn}  # which have their layers too
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    for section in sections:
        (line,) = re.findall(r"^In model\.py: (.*)$", section, re.M)
        names = re.findall(r"`([^`]+)`", line)
        assert names, line
        for name in names:
            owner, _, attribute = name.partition(".")
            assert hasattr(model, owner), name
            assert not attribute or hasattr(examples.get(owner, getattr(model, owner)), attribute)
