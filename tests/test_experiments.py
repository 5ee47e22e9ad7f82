"""Each patch in docs/experiments/ applies, trains, goes on, samples, and is what its file says."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from gptling.gpt2_format import load
from gptling.tokenizers import load_tokenizer
from model import GPT
from tests.conftest import ROOT, TEXT

pytestmark = pytest.mark.gpt2  # the patches are of the unchanged code
PATCHES = sorted((ROOT / "docs" / "experiments").glob("*.patch"))


def header(patch):
    """The patch's first lines: {"flags": ..., "prepare": ...}, and the text before these."""
    text = patch.read_text(encoding="utf-8").partition("diff --git")[0]
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    settings = dict(re.findall(r"^# (flags|prepare):(.*)$", text, re.MULTILINE))
    return settings, " ".join(line for line in lines if not re.match("(flags|prepare):", line))


def lines_of(patch, sign):
    diff = patch.read_text(encoding="utf-8").partition("diff --git")[2]
    return [line for line in diff.splitlines() if re.match(rf"\{sign}(?!\{sign}\{sign})", line)]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_is_one_idea_with_its_source_in_one_file(patch):
    settings, idea = header(patch)
    assert "flags" in settings and re.search(r"\d{4}.*https://arxiv.org/abs/\d+\.\d+\)", idea)
    assert len(re.findall("^diff --git", patch.read_text(), re.MULTILINE)) == 1
    assert len(lines_of(patch, "+")) <= 25
    git = ["git", "apply", "--check", str(patch)]
    checked = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_table_of_experiments_has_each_patch_with_its_lines():
    page = (ROOT / "docs" / "experiments" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.patch\) \| ([^|]*) \|", page, re.MULTILINE))
    expected = {p.stem: f"+{len(lines_of(p, '+'))} -{len(lines_of(p, '-'))}" for p in PATCHES}
    assert rows == expected
    measured = re.findall(r"^\| ([\w-]+) \| [\d,]+ \|", page, re.MULTILINE)  # with parameters
    assert measured == ["working-tree", *expected]


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patched_copy_keeps_what_a_gpt_promises(patch, tmp_path):
    """And its checkpoint opens as a GPT-2 in transformers, with our logits, or does not open."""
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    tracked = ["model.py", "train.py", "sample.py", "prepare.py", "gptling", "config", "tests"]
    for name in tracked:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    settings, _ = header(patch)
    flags = [*settings["flags"].split(), "--", *settings.get("prepare", "").split()]
    process = subprocess.run(
        [sys.executable, "-m", "tests.try_model", "work", *flags],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr

    checkpoint = tmp_path / "work" / "out" / "text" / "checkpoint-16"
    kind = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"]
    assert f"the checkpoint says model_type {kind}" in process.stdout
    if patch.stem in ("invsqrt", "lion", "smoothing", "words"):  # of training and tokens alone
        assert kind == "gpt2"
    if kind == "gptling":
        with pytest.raises(ValueError, match="gptling"):
            transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        with pytest.raises(ValueError):
            load(GPT, checkpoint)
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        tokens = load_tokenizer(checkpoint).encode(TEXT[:100])[:32]
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        assert tokenizer(TEXT[:100])["input_ids"][:32] == tokens
        with torch.no_grad():
            ours, _ = load(GPT, checkpoint)(torch.tensor([tokens]))
            expected = theirs(torch.tensor([tokens])).logits
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
