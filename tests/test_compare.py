"""python -m gptling.compare: a change that it calls better is better, by more than luck."""

import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from gptling import compare
from gptling.cli import launch
from gptling.compare import T_QUANTILES, judge, step_time
from tests.conftest import read_log
from tests.edits import LOSS, copy_edited
from tests.scripts import ROOT, TINY, output_of

SOURCES = ["model.py", "train.py", "sample.py", "prepare.py", "config", "gptling", ".gitignore"]
FLAGS = ["--dataset=mine", *TINY, "--max_iters=10"]


def git(words):
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *words.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def run_compare(here, monkeypatch, capsys):
    """Compare in a repository with the project, committed, and data/mine. Its scripts run in the
    tests' fork server. Returns the exit code, the output, and (side, words) of each training.
    fake(side, seed, steps) replaces train.py: it gives the last loss, and the milliseconds of a
    step for each line of the log."""
    execute = compare.execute
    copy_edited(here, SOURCES, ())
    monkeypatch.chdir(here)
    for words in ("init --quiet", "add --all", "commit --quiet --message=start"):
        git(words)

    def run_compare(*words, fake=None):
        def execute_here(*command):
            if command[0] != sys.executable:
                return execute(*command)
            script, words = here / command[1], command[2:]
            if script.name == "train.py":
                trainings.append((script.parent.name, list(words)))
            if script.name != "train.py" or not fake:
                return output_of(script, *words, cwd=here)
            given = dict(word[2:].split("=") for word in words if "=" in word)
            steps, out_dir = int(given["max_iters"]), Path(given["out_dir"])
            loss, *ms = fake(script.parent.name, int(given["seed"]), steps)
            log = [{"step": 10 + 10 * i, "ms": value} for i, value in enumerate(ms)]
            end = {"step": steps, "val_loss": 1, "parameters": 7, "bits_per_byte": loss}
            log.append(end | {"is_cross_entropy": True, "seconds": 600})
            out_dir.mkdir(exist_ok=True)
            (out_dir / "log.jsonl").write_text("\n".join(map(json.dumps, log)))

        trainings = []
        gc.collect()  # which unlocks the directory
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
            patch.setattr(compare, "execute", execute_here)
            patch.setattr(sys, "argv", ["gptling/compare.py", *words])
            launch(compare.main)
        return exit.value.code or 0, capsys.readouterr(), trainings

    return run_compare


def edit(file, old, new):
    text = Path(file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    Path(file).write_text(text.replace(old, new), encoding="utf-8")


def comment_patch(header=""):
    """A patch of a comment in model.py. The project itself stays unchanged."""
    edit("model.py", "import math\n", "import math  # maths\n")
    edit(".gitignore", ".venv/", ".venv")  # no code, but a file of git's
    diff = git("diff --no-color")
    git("checkout --quiet .")
    Path("out").mkdir(exist_ok=True)
    Path("out/same.patch").write_text(header + diff, encoding="utf-8")
    return "out/same.patch"


@pytest.mark.parametrize("df, quantile", [*enumerate(T_QUANTILES, start=1)])
def test_t_leaves_two_and_a_half_percent_on_each_side(df, quantile):
    step = quantile / 100_000
    x = step * (np.arange(100_000) + 0.5)
    log_norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    density = np.exp(log_norm - (df + 1) / 2 * np.log1p(x**2 / df))
    assert step * density.sum() == pytest.approx(0.475, abs=3e-5)


D = 0.01 * (3 / 4) ** 0.5  # mean -0.02, standard deviation 0.01, of 4: half is 3.1824 * 0.01 / 2
CLEAR = [-0.02 - D, -0.02 + D, -0.02 - D, -0.02 + D]
UNCLEAR = [-0.03, 0.01, -0.01]  # mean -0.01, deviation 0.02, of 3: half is 4.3027 * 0.02 / 3 ** 0.5


def test_a_difference_is_called_one_only_beyond_the_interval_of_pairs():
    for differences, words in (
        (CLEAR, "better by 0.0200 bits per byte (0.0041 to 0.0359, 4 seeds)"),
        ([-d for d in CLEAR], "worse by 0.0200 bits per byte (0.0041 to 0.0359, 4 seeds)"),
        (UNCLEAR, "no difference shown by 3 seeds (mean -0.0100, -0.0597 to +0.0397 bits"),
        ([-0.3], "-0.3000 bits per byte with one seed, which cannot rule out"),
        ([0.0, 0.0], "no difference shown by 2 seeds (mean +0.0000, +0.0000 to +0.0000 bits"),
        (12 * [-0.1, 0.0], "better by 0.0500 bits per byte (0.0264 to 0.0736, 24 seeds)"),
    ):
        assert judge(differences).startswith(words)


def test_the_time_of_a_step_is_the_mean_over_all_steps_after_the_warm_up():
    """Not the median, by which work that is done in every tenth step would cost nothing."""
    log = [{"step": 10 * i, "ms": ms} for i, ms in enumerate([900.0, *[10.0] * 9, 110.0], start=1)]
    log.insert(5, {"step": 50, "val_loss": 1.0})
    assert step_time(log) == pytest.approx((9 * 10 + 110) / 10)
    assert step_time(log[:1]) == 900.0


def test_the_same_code_gives_a_difference_of_exactly_zero(run_compare, monkeypatch):
    monkeypatch.setattr(compare, "step_time", lambda log: 1.0)
    patch, before = comment_patch(), git("status --porcelain")
    again = shutil.copy(patch, "out/again.patch")  # not applied after the other one; the same runs
    code, printed, trainings = run_compare(patch, again, "--seeds=1", "--", *FLAGS)
    assert code == 0 and [side for side, _ in trainings] == ["working-tree", "same"]
    for question in ("after 10 steps", "in the time of 10 steps"):
        assert f"same against working-tree {question}: +0.0000 bits per byte" in printed.out
    assert git("status --porcelain") == before
    assert "# maths" in Path("out/compare/same/model.py").read_text(encoding="utf-8")


def test_a_patch_brings_flags_and_tokens_of_its_own(run_compare):
    patch = comment_patch("# flags: --n_layer=1\n# prepare: --tokenizer=byte\n")
    text = "".join(f"{n} grüne Flaschen\n" for n in range(300))
    Path("my text.txt").write_text(text, encoding="utf-8")
    words = [patch, "--prepare='my text.txt' --tokenizer=char", "--seeds=1", "--", *FLAGS]
    printed = run_compare(*words)[1]
    for side, tokenizer, n_layer in (("working-tree", "char", 2), ("same", "byte", 1)):
        log = read_log(Path(f"out/compare/{side}/run"))
        meta = json.loads(Path(f"data/compare-{side}/meta.json").read_text())
        assert (meta["tokenizer"], meta["bytes"]) == (tokenizer, len(text.encode()))
        assert log[-1]["val_tokens"] == meta["val"]["tokens"] - 1  # all of the split
        vectors = meta["vocab_size"] + 16 + n_layer * (12 * 16 + 2) + 1  # of 16 numbers each
        assert f"{side}: {16 * vectors:,} parameters, 10 steps, " in printed.out


def test_patches_apply_in_a_clone_that_asks_for_windows_line_ends(tmp_path, monkeypatch):
    copy_edited(tmp_path, [".gitattributes", "model.py", "docs/experiments"], ())
    patch = Path("docs/experiments/rope.patch")
    monkeypatch.chdir(tmp_path)
    for words in ("init --quiet", "config core.autocrlf true", "add --all"):
        git(words)
    for file in (Path("model.py"), patch):
        file.unlink()  # to be written as a clone writes it
    for words in ("checkout -- .", f"apply --cached {patch}", f"apply {patch}"):
        git(words)


def test_the_working_tree_is_compared_with_the_last_commit(run_compare):
    own = "config/shakespeare_char_cpu.toml"  # each side has its own; others are where they are
    edit(own, "n_layer = 4", "n_layer = 3")
    Path("new.py").write_text("not committed\n")
    Path("out").mkdir()
    Path("out/my.toml").write_text("max_iters = 200\n")
    words = [own, "out/my.toml", "--dataset=mine", "--n_head=1"]

    def fake(side, seed, steps):
        """Steps of the working tree take 1.25, 1.3 and 1.2 times as long, without the warm-up."""
        if side == "last-commit":
            return 2 + 0.1 * seed, 999, 10, 30
        return 2 + 0.1 * seed + (seed - 5) ** 2 / steps, 5, 10, {6: 40, 7: 42, 8: 38}[seed]

    code, printed, trainings = run_compare("--first_seed=6", "--", *words, fake=fake)
    assert code == 0 and not Path("out/compare/last-commit/new.py").exists()
    assert Path("out/compare/working-tree/new.py").read_text() == "not committed\n"
    for side, n_layer in (("working-tree", 3), ("last-commit", 4)):
        assert f"n_layer = {n_layer}" in Path("out/compare", side, own).read_text()

    # Every other seed in reversed order, and each seed with its own ratio of times.
    a, b = "last-commit", "working-tree"
    expected = [(a, 6, 200), (b, 6, 200), (b, 7, 200), (a, 7, 200), (a, 8, 200), (b, 8, 200)]
    expected += [(b, 6, 160), (b, 7, 154), (b, 8, 167)]
    for (side, found), (name, seed, steps) in zip(trainings, expected, strict=True):
        assert side == name and found[:4] == words
        flags = {f"--seed={seed}", f"--max_iters={steps}", "--eval_tokens=0", "--curves=False"}
        assert flags <= set(found[4:])
    for line in (f"{a}: 7 parameters, 200 steps, 2.700", f"{b}: 7 parameters, 160 steps, 2.729"):
        assert f"{line} bits per byte\n" in printed.out
    started = r"^(seed.* steps), logged in out.compare.*\n(?:At most.*\n)?"
    said = re.findall(rf"{started}    (.*) bits per byte in 600 s$", printed.out, re.M)
    for (line, loss), (name, seed, steps) in zip(said, expected, strict=True):
        assert line == f"seed {seed}: {name}, {steps} steps"
        assert loss == f"{fake(name, seed, steps)[0]:.3f}"
    assert "At most 9 runs, 90 min. After Ctrl-C the same command continues.\n" in printed.out
    differences = [[1 / 200, 4 / 200, 9 / 200], [1 / 160, 4 / 154, 9 / 167]]
    answers = [
        f"{b} against {a} {question} 200 steps: {judge(values)}"
        for question, values in zip(("after", "in the time of"), differences, strict=True)
    ]
    assert all(f"{answer}\n" in printed.out for answer in answers)
    verdicts = Path("out/compare/verdicts.tsv").read_text(encoding="utf-8").splitlines()
    row = [date.today().isoformat(), b, git("rev-parse --short HEAD").strip(), "3"]
    assert [line.split("\t") for line in verdicts] == [[*row, answer] for answer in answers]


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
    assert "after 10 steps: no difference shown by 2 seeds" in output
    pytest.importorskip("matplotlib", reason="pip install -e '.[curves]'")

    # Everything that a run depends on makes new runs.
    assert len(train("--n_layer=1")[1]) == 6
    Path("my.toml").write_text("n_head = 2\nmax_iters = 20\n")
    assert len(train()[1]) == 6
    edit("train.py", '"""Train a GPT.', '"""Train a GPT!')
    assert len(train()[1]) == 6
    edit("data/mine/meta.json", '"format": 1', '"format": 2')
    assert len(train()[1]) == 6
    metrics = Path("out/base/checkpoint-1/metrics.json")
    metrics.parent.mkdir(parents=True)
    for step in ("1", "2"):
        metrics.write_text(step)
        assert len(train("--teacher", "out/base")[1]) == 6


def test_a_side_that_fails_or_cannot_win_is_not_trained_with_the_other_seeds(run_compare):
    """Unless its steps are faster: it may be better in the same time. The others go on."""
    patches = [comment_patch()]
    for name in ("bad", "fast", "index"):  # .index is git's in that folder
        patches.append(f"out/{name}.patch")
        header = f"# flags: --log_interval={len(name)}\n"  # else the other one's runs are its own
        Path(patches[-1]).write_text(header + Path(patches[0]).read_text())

    def fake(side, seed, steps):
        if side == "bad":
            raise compare.ProgramFailed("the loss is nan")
        worse = 0.05 if steps == 100 else -0.05
        worse *= side != "working-tree"
        return 2 + worse + 0.001 * (seed == 2), *[0.1 if side == "fast" else 1.0] * 2

    words = (*patches, "--seeds=4", "--", *FLAGS, "--max_iters=100")
    code, printed, trainings = run_compare(*words, fake=fake)
    assert code == 0 and printed.out.count("the loss is nan") == 1
    counts = Counter(side for side, _ in trainings)
    assert counts == {"working-tree": 4, "fast": 8, "same": 2, "index": 2, "bad": 1}
    assert "bad against working-tree after 100 steps: it failed\n" in printed.out
    for side, n in (("same", 2), ("index", 2), ("fast", 4)):
        line = f"{side} against working-tree after 100 steps: worse by 0.0500 bits per byte"
        assert re.search(rf"{line} .*, {n} seeds\)", printed.out)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups")
def test_ctrl_c_ends_the_running_program_too_and_prints_no_traceback(tmp_path):
    child = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    started = tmp_path / "started"
    main = f"lambda: compare.execute(sys.executable, '-c', {child!r}, {str(started)!r})"
    code = "import signal, sys; from gptling import cli, compare\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job may ignore it
    code += f"cli.launch({main})"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, **streams, cwd=ROOT, start_new_session=True) as process:
        while not started.exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"" and process.wait(30) == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_what_cannot_be_compared_is_said_and_a_side_that_fails_shows_its_lines(run_compare):
    Path("my.txt").write_text("not code")
    code, printed, _ = run_compare("--", *FLAGS)
    assert code == 1 and "nothing has changed since the last commit" in printed.err
    assert "out is not a patch: to compare two runs, see" in run_compare("out", "--", *FLAGS)[1].err
    patch = Path(comment_patch())
    twice = run_compare(str(patch), str(patch), "--", *FLAGS)
    assert twice[0] == 1 and "another side has this name" in twice[1].err
    code, printed, _ = run_compare(str(patch), "--", *FLAGS, fake=lambda *_: (None, 1.0))
    assert code == 1 and "its last evaluation failed" in printed.err
    assert not list(compare.OUT.glob("*.jsonl")), "that run is kept"
    patch.write_text(patch.read_text().replace("-import math", "-import maths"))
    assert "patch failed: model.py" in run_compare(str(patch), "--", *FLAGS)[0]
    with pytest.raises(compare.ProgramFailed, match="ValueError: mine"):
        compare.execute(sys.executable, "-c", "raise ValueError('mine')")


def test_there_is_no_answer_if_a_side_has_another_loss(run_compare):
    """It is half as high for the same probabilities."""
    edit("model.py", LOSS, f"{LOSS} * 0.5")
    code, printed, _ = run_compare("--seeds=1", "--", *FLAGS)
    answer = "no answer: the loss of working-tree is not the cross-entropy of its logits"
    assert code == 0 and printed.out.count(answer) == 2 and "better" not in printed.out
