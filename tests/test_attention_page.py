"""docs/attention.md is true: its blocks print what stands behind them, the numbers of the tutorials
are on the page, and model.py has every name that the page points to."""

import contextlib
import importlib.util
import io
import re

import pytest
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


def test_every_output_belongs_to_a_block():
    assert len(re.findall("^```text$", PAGE, re.M)) == sum(output != "" for _, output in BLOCKS)
    assert len(re.findall("^```python$", PAGE, re.M)) == len(BLOCKS)


# Tables of the tutorials, as the page prints them: a row for each channel, or for each query.
NUMBERS = {
    "no weights": """
        0.4421 0.4419 0.4431 0.4304 0.4671 0.4177
        0.5931 0.6515 0.6496 0.6298 0.5910 0.6503
        0.5790 0.5683 0.5671 0.5510 0.5266 0.5645""",
    "learned weights": """
        0.2996 0.3061 0.3058 0.2948 0.2927 0.2990
        0.8053 0.8210 0.8203 0.7939 0.7891 0.8040""",
    "linear layers": """
        -0.0739 -0.0748 -0.0749 -0.0760 -0.0763 -0.0754
        0.0713 0.0703 0.0702 0.0685 0.0679 0.0693""",
    "causal multi-head": """
        0.3190 0.2943 0.2856 0.2693 0.2639 0.2575
        0.4858 0.3897 0.3593 0.3873 0.3928 0.4028""",
    "causal mask": """
        1 0 0
        0.0067 0.9933 0
        0.0067 0.9930 0.0003""",
    "padding mask": """
        1 0 0
        0.0067 0.9933 0
        0.0067 0.9933 0""",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_tutorials_are_on_the_page(name):
    rows = [list(map(float, row.split())) for row in NUMBERS[name].split("\n")[1:]]
    page = re.findall(r"\[([^][]+)\]", "".join(output for _, output in BLOCKS))
    page = [[float(number) for number in row.split(",")] for row in page]
    assert rows in [page[i : i + len(rows)] for i in range(len(page))]


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
