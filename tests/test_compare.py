"""python -m gptling.compare: a change that it calls better is better, by more than luck."""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gptling import compare
from gptling.cli import run
from gptling.compare import judge, step_time, t_quantile
from tests.conftest import ROOT, TINY, run_script

SOURCES = ["model.py", "train.py", "sample.py", "prepare.py", "config", "gptling", ".gitignore"]
FLAGS = ["--dataset=mine", *TINY]


def git(*words):
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def run_compare(trained, tmp_path, monkeypatch, capsys):
    """Compare in a repository with the project, committed, and data/mine. Its scripts run in the
    tests' fork server. Returns the exit code, the output, and (side, words) of each training.
    fake(side, seed, steps) replaces train.py: it gives the last loss, and the milliseconds of a
    step for each line of the log."""
    execute = compare.execute
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    shutil.copytree(trained / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for words in ("init --quiet", "add --all", "commit --quiet --message=start"):
        git(*words.split())

    def run_compare(*words, fake=None):
        def execute_here(*command, **options):
            if command[0] != sys.executable:
                return execute(*command, **options)
            script, words = Path(command[1]), command[2:]
            if script.name == "train.py":
                trainings.append((script.parent.name, list(words)))
            if script.name == "train.py" and fake:
                given = dict(word[2:].split("=") for word in words[-5:])
                steps = int(given["max_iters"])
                loss, *ms = fake(script.parent.name, int(given["seed"]), steps)
                log = [{"step": 10 + 10 * i, "ms": value} for i, value in enumerate(ms)]
                log += [{"step": steps, "seconds": 1, "val_loss": 1, "parameters": 7}]
                log[-1]["bits_per_byte"] = loss
                Path(given["out_dir"]).mkdir()
                Path(given["out_dir"], "log.jsonl").write_text("\n".join(map(json.dumps, log)))
                return ""
            process = run_script(script, *words, cwd=tmp_path)
            if process.returncode:
                sys.exit(process.stderr.decode())
            return process.stdout.decode()

        trainings = []
        gc.collect()  # which unlocks the directory
        monkeypatch.setattr(compare, "execute", execute_here)
        monkeypatch.setattr(sys, "argv", ["gptling/compare.py", *words])
        with pytest.raises(SystemExit) as exit:
            run(compare.main)
        return exit.value.code or 0, capsys.readouterr(), trainings

    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "OUT", tmp_path / "out" / "compare")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    return run_compare


def edit(file, old, new):
    text = Path(file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    Path(file).write_text(text.replace(old, new), encoding="utf-8")


def comment_patch(header=""):
    """A patch of a comment in model.py. The project itself stays unchanged."""
    edit("model.py", "import math\n", "import math  # maths\n")
    diff = git("diff", "--no-color")
    git("checkout", "--quiet", ".")
    Path("out").mkdir(exist_ok=True)
    Path("out/same.patch").write_text(header + diff, encoding="utf-8")
    return "out/same.patch"


# ------------------------------------------------------------------ the answer


@pytest.mark.parametrize("df", [*range(1, 12), 30, 120])
def test_t_leaves_two_and_a_half_percent_on_each_side(df):
    step = t_quantile(df) / 100_000
    x = step * (np.arange(100_000) + 0.5)
    log_norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    density = np.exp(log_norm - (df + 1) / 2 * np.log1p(x**2 / df))
    assert step * density.sum() == pytest.approx(0.475, abs=3e-5)


D = 0.01 * (3 / 4) ** 0.5  # mean -0.02, standard deviation 0.01, of 4: half is 3.1824 * 0.01 / 2
CLEAR = [-0.02 - D, -0.02 + D, -0.02 - D, -0.02 + D]
UNCLEAR = [-0.03, 0.01, -0.01]  # mean -0.01, deviation 0.02, of 3: half is 4.3027 * 0.02 / 3 ** 0.5


@pytest.mark.parametrize(
    "differences, ratios, words",
    [
        (CLEAR, [1.0], "better by 0.0200 bits per byte (0.0041 to 0.0359)"),
        ([-d for d in CLEAR], [1.0], "worse by 0.0200 bits per byte (0.0041 to 0.0359)"),
        (CLEAR, [0.76, 0.66, 1.14, 0.8], "the times vary too much to say (-0.0359 to -0.0041 "),
        (UNCLEAR, [1, 1.05, 1.09], "no difference that 3 seeds can show (-0.0597 to +0.0397 bits"),
        (UNCLEAR, [1, 1.05, 1.11], "the times vary too much to say (-0.0597 to +0.0397 bits per"),
        ([-0.3], [1.0], "-0.3000 bits per byte with one seed, which cannot say"),
        ([0.0, 0.0, 0.0], [1.0], "no difference at all"),
    ],
)
def test_a_difference_is_called_one_only_beyond_the_interval_of_pairs(differences, ratios, words):
    assert judge(differences, ratios).startswith(words)


def test_the_time_of_a_step_is_the_mean_over_all_steps_after_the_warm_up():
    """Not the median, by which work that is done in every tenth step would cost nothing."""
    times = {10: 900.0, **dict.fromkeys(range(20, 101, 10), 10.0), 110: 110.0, 115: 50.0}
    log = [{"step": step, "ms": ms} for step, ms in times.items()]
    log.insert(5, {"step": 50, "val_loss": 1.0})
    assert step_time(log) == pytest.approx((90 * 10 + 10 * 110 + 5 * 50) / 105)
    assert step_time(log[:1]) == 900.0


# ------------------------------------------------------------------ whole comparisons


def test_the_same_code_gives_a_difference_of_exactly_zero(run_compare, monkeypatch):
    monkeypatch.setattr(compare, "step_time", lambda log: 1.0)
    patch, before = comment_patch(), git("status", "--porcelain")
    again = shutil.copy(patch, "out/again.patch")  # which is not applied after the other one
    code, printed, trainings = run_compare(patch, again, "--seeds=1", "--", *FLAGS)
    assert code == 0 and [side for side, _ in trainings] == ["working-tree", "same", "again"]
    for question in ("after 20 steps", "in the time of 20 steps"):
        assert f"same against working-tree {question}: no difference at all" in printed.out
    assert git("status", "--porcelain") == before
    assert "# maths" in Path("out/compare/same/model.py").read_text(encoding="utf-8")


def test_a_patch_brings_flags_and_tokens_of_its_own(run_compare):
    patch = comment_patch("# flags: --n_layer=1\n# prepare: --tokenizer=byte\n")
    text = "".join(f"{n} grüne Flaschen\n" for n in range(300))
    Path("my text.txt").write_text(text, encoding="utf-8")
    words = [patch, "--prepare='my text.txt' --tokenizer=char", "--seeds=1", "--", *FLAGS]
    code, printed, _ = run_compare(*words)
    assert code == 0
    for side, tokenizer, n_layer in (("working-tree", "char", 2), ("same", "byte", 1)):
        log = Path(f"out/compare/{side}/20-steps-seed-1.jsonl").read_text().splitlines()
        meta = json.loads(Path(f"data/compare-{side}/meta.json").read_text())
        assert meta["tokenizer"] == tokenizer
        assert json.loads(log[-1])["val_tokens"] == meta["val"]["tokens"] - 1  # all of the split
        vectors = meta["vocab_size"] + 16 + n_layer * (12 * 16 + 2) + 1  # of 16 numbers each
        assert f"| {side} | {16 * vectors:,} | " in printed.out


def test_the_working_tree_is_compared_with_the_last_commit(run_compare):
    own = "config/shakespeare_char_cpu.toml"  # each side has its own; others are where they are
    edit(own, "dropout", "# changed\ndropout")
    Path("new.py").write_text("not committed\n")
    Path("out").mkdir()
    Path("out/my.toml").write_text("max_iters = 20\n")
    words = [own, "out/my.toml", "--dataset=mine", "--n_layer=1"]

    def fake(side, seed, steps):
        """Steps of the working tree take 1.25, 1.3 and 1.2 times as long, without the warm-up."""
        if side == "last-commit":
            return 2 + 0.1 * seed, 999, 10, 30
        return 2 + 0.1 * seed + (10 + seed) / steps, 5, 10, {1: 40, 2: 42, 3: 38}[seed]

    code, printed, trainings = run_compare("--", *words, fake=fake)
    assert code == 0
    assert (compare.OUT / "working-tree" / "new.py").read_text() == "not committed\n"
    assert not (compare.OUT / "last-commit" / "new.py").exists()

    # Every other seed in reversed order, and each seed with its own ratio of times.
    a, b = "last-commit", "working-tree"
    expected = [(a, 1, 20), (b, 1, 20), (b, 2, 20), (a, 2, 20), (a, 3, 20), (b, 3, 20)]
    expected += [(b, 1, 16), (b, 2, 15), (b, 3, 17)]
    for (side, found), (name, seed, steps) in zip(trainings, expected, strict=True):
        assert side == name and found[:4] == [str(compare.OUT / side / own), *words[1:]]
        assert ("# changed" in Path(found[0]).read_text()) == (side == "working-tree")
        flags = {f"--seed={seed}", f"--max_iters={steps}", "--eval_tokens=0", "--curves=False"}
        assert flags <= set(found[4:])
    assert "| 1.25 | 2.800 | 2.951 |" in printed.out and "| 1.00 | 2.200 | 2.200 |" in printed.out
    differences = [[11 / 20, 12 / 20, 13 / 20], [11 / 16, 12 / 15, 13 / 17]]
    for question, values in zip(("after", "in the time of"), differences, strict=True):
        assert f"{b} against {a} {question} 20 steps: {judge(values, [1.0])}\n" in printed.out
    assert "worse by 0.6000 bits per byte (0.4758 to 0.7242)" in printed.out


def test_an_interrupted_comparison_continues_after_its_last_finished_run(run_compare, monkeypatch):
    Path("my.toml").write_text("n_head = 1\nmax_iters = 20\n")
    command = [comment_patch(), "--seeds=2", "--", "my.toml", *FLAGS]

    def train(*words, interrupted=False):
        """Return the output and which sides were trained. Times and losses vary."""

        def fake(side, seed, steps):
            if interrupted and (seed, side) == (2, "same"):
                raise KeyboardInterrupt
            return 2 + (-1) ** seed * 0.1 * (side == "same"), 10 + 2 * seed * (side == "same")

        code, printed, trainings = run_compare(*command, *words, fake=fake)
        assert code == (130 if interrupted else 0)
        return printed.out, [side for side, _ in trainings]

    assert train(interrupted=True)[1] == ["working-tree", "same", "same"]
    output, sides = train()
    assert sides == ["same", "working-tree", "same", "same"]
    assert train()[1] == []
    assert "after 20 steps: no difference that 2 seeds can show" in output
    assert "in the time of 20 steps: the times vary too much to say" in output
    pytest.importorskip("matplotlib", reason="pip install -e '.[curves]'")
    assert Path("out/compare/curves.png").stat().st_size > 10_000

    # Everything that a run depends on makes new runs.
    monkeypatch.setattr(compare, "draw_curves", lambda *_: None)
    assert len(train("--n_layer=1")[1]) == len(train()[1]) == 6
    os.utime("my.toml", ns=(1, 1))
    assert len(train()[1]) == 6
    edit("train.py", '"""Train a GPT.', '"""Train a GPT!')
    assert len(train()[1]) == 6
    later = time.time() + 100
    os.utime("data/mine/meta.json", (later, later))
    assert len(train()[1]) >= 6


def test_what_cannot_be_compared_is_said_and_a_side_that_fails_shows_its_last_lines(run_compare):
    code, printed, _ = run_compare("--", *FLAGS)
    assert code == 1 and "nothing has changed since the last commit" in printed.err
    patch = comment_patch()
    text = Path(patch).read_text()
    Path(patch).write_text(text.replace("-import math", "-import maths"))
    assert "patch failed: model.py" in run_compare(patch, "--", *FLAGS)[0]
    Path(patch).write_text(text.replace("import math  #", "raise ValueError('mine')  #"))
    code, _, trainings = run_compare(patch, "--", *FLAGS)  # whose first side trains
    assert code.splitlines()[-1] == "ValueError: mine" and len(trainings) == 2
