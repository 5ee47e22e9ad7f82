"""What README.md, docs/ and the scripts' own examples say is true: their commands have flags and
presets that exist, their Python runs, their links lead somewhere. The lessons in docs/ print the
text below their blocks, and the names at the end of each section exist."""

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

import model
from gptling.cli import load_config
from gptling.compare import CompareConfig
from prepare import PrepareConfig
from sample import SampleConfig
from tests.conftest import read_log
from tests.scripts import ROOT, TEXT, output_of, start
from train import TrainConfig

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SCRIPTS = {"prepare.py": PrepareConfig, "train.py": TrainConfig, "sample.py": SampleConfig}
SCRIPTS["gptling.compare"] = CompareConfig
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def blocks(page, language, after=""):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```{after}", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """The words of each command in a block of shell, also of those in a pipe or after &&."""
    for line in text.replace("\\\n", " ").splitlines():
        words = [*shlex.split(line, comments=True), "&&"]
        while words:
            end = next(i for i, word in enumerate(words) if word in ("&&", "|"))
            yield words[:end]
            words = words[end + 1 :]


BLOCKS = [(page.name, block) for page in PAGES for block in blocks(page, "sh")]
SHELL = [(name, words) for name, block in BLOCKS for words in commands(block)]
for script in ROOT.glob("*.py"):
    docstring = script.read_text(encoding="utf-8").split('"""')[1]
    lines = re.findall(r"^    (.*\b(?:python|torchrun) .*)$", docstring, re.MULTILINE)
    SHELL += [(script.name, words) for line in lines for words in commands(line)]
OURS = [(page, words) for page, words in SHELL if set(SCRIPTS) & set(words)]


@pytest.mark.parametrize(
    "page, words", OURS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_commands_have_flags_presets_and_patches_that_exist(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    script = next(word for word in words if word in SCRIPTS)
    words = [*words[words.index(script) + 1 :], "--"]
    end = words.index("--")  # of compare's own flags
    config, _ = load_config(SCRIPTS[script], "", words[:end], presets=script == "train.py")
    if script == "gptling.compare":
        assert all(list(ROOT.glob(str(patch))) for patch in config.patches)
        load_config(TrainConfig, "", words[end + 1 : -1], presets=True)


def test_what_commands_install_and_run_is_there():
    for page, words in SHELL:
        for extras in re.findall(r"^\.\[(.*)\]$", " ".join(words[-1:])):
            assert set(extras.split(",")) <= EXTRAS.keys(), page
        if words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), f"{page}: {words[1]}"


def test_every_package_that_is_imported_is_declared():
    declared = sum(EXTRAS.values(), PROJECT["dependencies"])
    names = {re.match(r"[\w-]+", line)[0] for line in declared}
    known = names | sys.stdlib_module_names | {"gptling", "model", "prepare", "train", "sample"}
    for file in [*ROOT.glob("*.py"), *ROOT.glob("gptling/*.py")]:
        imports = re.findall(r"^ *(?:import|from) (\w+)", file.read_text(encoding="utf-8"), re.M)
        assert set(imports) <= known, file


# What makes the commands of the README quick. "shakespeare" is a folder here.
QUICK = {
    "train.py": "--max_iters=4 --eval_interval=4 --eval_tokens=64 --n_layer=1 --curves=False",
    "sample.py": "--max_new_tokens=20",
    "gptling.compare": "--seeds=1 -- --max_iters=4 --n_layer=1",
}


@pytest.mark.slow
def test_the_blocks_of_the_readme_run_in_their_order_in_one_folder(tmp_path):
    """In a repository of its own. Lines that set up or test are left out: CI runs them."""
    listed = subprocess.check_output("git ls-files -co --exclude-standard".split(), cwd=ROOT)
    for name in filter(os.path.isfile, listed.decode().splitlines()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "my.txt").write_text(f"Once upon a time\n{TEXT}", encoding="utf-8")
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/input.txt").write_text(f"ROMEO:\nWherefore? Why? Up!\n{TEXT}")
    author = "-c user.name=Reader -c user.email=reader@example.com"
    for words in ("init -q", "add .", f"{author} commit -qm README"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", text, re.M | re.S):
        (tmp_path / "block.py").write_text(block, encoding="utf-8")
        set_up = r"^(#|git clone|cd|python -m venv|\. |pip) ?.*\n"
        block = re.sub(set_up, "", block, flags=re.M) if language == "sh" else "python block.py"
        for words in commands(block):
            script = next((word for word in words if word in QUICK), None)
            words = [sys.executable if word == "python" else word for word in words]
            words += QUICK[script].split() if script else []
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"


def test_two_finished_runs_are_drawn_together(trained, tmp_path):
    pytest.importorskip("matplotlib", reason="loss.png: pip install matplotlib")
    for name in "ab":
        shutil.copytree(trained / "out/mine", tmp_path / "out" / name)
    (tmp_path / "block.py").write_text(blocks(ROOT / "docs/comparing.md", "python")[0])
    output_of(tmp_path / "block.py", cwd=tmp_path)
    assert (tmp_path / "out/losses.png").stat().st_size > 1000


def test_the_line_after_a_checkpoint_is_replayed(finished):
    output_of("train.py", "--out_dir=out/mine", "--resume", "--max_iters=21", cwd=finished)
    last = read_log(finished / "out/mine")[-2]
    code = blocks(ROOT / "docs/comparing.md", "python")[1]
    code = re.sub(r"out/my/checkpoint-\d+\"\), \d+", 'out/mine/checkpoint-20"), 21', code)
    (finished / "block.py").write_text(code, encoding="utf-8")
    with contextlib.chdir(finished), contextlib.redirect_stdout(io.StringIO()):
        replayed = runpy.run_path("block.py")
    assert last["step"] == 21
    assert replayed["loss"].item() == pytest.approx(last["loss"], abs=1e-5)
    assert replayed["by_sequence"].mean().item() == pytest.approx(last["loss"], abs=1e-5)


def test_every_module_of_the_package_is_in_contributing():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/contributing.md").read_text(), re.MULTILINE)
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(names) == [f.stem for f in sorted(ROOT.glob("gptling/[a-z]*.py"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert os.path.exists(target), link
        if heading:  # GitHub's anchors
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8").lower(), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in headings], link


# ---------------------------------------------------------------- lessons
LESSONS = [ROOT / "docs" / name for name in ("attention.md", "gpt.md", "learning.md")]
TRAINING = [pytest.param(page, marks=pytest.mark.slow) for page in LESSONS[1:]]
PRINTED = r"\n(?:```text\n(.*?)^```\n)?"  # the text below a block


def run_blocks(page, directory):
    """Run the blocks of a page in order and in one namespace, as in a notebook, and compare what
    they print. For a process of its own: PyTorch has its defaults there."""
    os.chdir(directory)
    sys.stderr = open("errors", "w", buffering=1)
    namespace = {}
    for number, (code, expected) in enumerate(blocks(page, "python", PRINTED), 1):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
        assert output.getvalue() == expected, f"block {number} printed\n{output.getvalue()}"


@pytest.mark.parametrize("page", [LESSONS[0], *TRAINING], ids=lambda page: page.name)
def test_blocks_print_the_text_below_them(page, tmp_path):
    assert blocks(page, "python", PRINTED)
    child = start(run_blocks, page, tmp_path)
    child.join(120)
    assert child.exitcode == 0, (tmp_path / "errors").read_text()


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.name)
def test_sections_end_with_names_that_exist(page):
    """A section with Python code ends with a line for each file that it explains, such as
    "In model.py: `GPT.wte`, `Block`." or "In gptling/muon.py: `orthogonalise`."""
    gpt = model.GPT(model.GPTConfig(block_size=4, vocab_size=5, n_layer=1, n_head=1, n_embd=2))
    examples = {type(module).__name__: module for module in gpt.modules()}  # they have attributes
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
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
