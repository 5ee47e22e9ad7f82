"""python -m gptling.compare: what it calls better is, and what it cannot know it does not say."""

import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from gptling import compare
from gptling.cli import run
from gptling.compare import judge, t_quantile
from tests.conftest import ROOT, TEXT, TINY, run_script

WORDS = ["--", "--dataset=mine", *TINY, "--eval_interval=20"]
SOURCES = ["model.py", "train.py", "sample.py", "prepare.py", "config", "gptling", ".gitignore"]
EQUAL_STEPS = ["--equal=steps", "--seeds=2"]


def git(directory, *words):
    name = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    options = {"cwd": directory, "check": True, "capture_output": True, "text": True}
    return subprocess.run(["git", *name, *words], **options).stdout


@pytest.fixture
def project(trained, tmp_path):
    """A repository with the project in it, committed, and data/mine."""
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    shutil.copytree(trained / "data", tmp_path / "data")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message=start")
    return tmp_path


@pytest.fixture
def measured():
    """Whether the time of a step is measured: in tests that are about something else it is not."""
    return False


@pytest.fixture
def run_compare(project, monkeypatch, capsys, measured):
    """Runs it in this process, and its scripts by the tests' fork server; gives the exit code, what
    was printed, and (side, "train.py", flags...) of each training."""
    commands = []

    def execute(side, *command):
        commands.append((side.name, *command))
        process = run_script(side.folder / command[0], *command[1:], cwd=side.folder)
        return process.stderr.decode().strip() if process.returncode else ""

    def run_compare(*words):
        gc.collect()  # which unlocks the directory
        commands.clear()
        monkeypatch.setattr(sys, "argv", ["gptling/compare.py", *map(str, words)])
        with pytest.raises(SystemExit) as exit:
            run(compare.main)
        trainings = [command for command in commands if command[1] == "train.py"]
        return exit.value.code or 0, capsys.readouterr(), trainings

    monkeypatch.setattr(compare, "ROOT", project)
    monkeypatch.setattr(compare, "OUT", project / "out" / "compare")
    monkeypatch.setattr(compare, "TURNS", 2)
    if not measured:
        monkeypatch.setattr(compare, "measure_steps", lambda *_: None)
    monkeypatch.setattr(compare, "execute", execute)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.chdir(project)
    return run_compare


def edit(file, old, new):
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")


def make_patch(project, name, file, old, new):
    """A patch of the project, which itself stays as it is."""
    edit(project / file, old, new)
    diff = git(project, "diff", "--no-color")
    git(project, "checkout", "--quiet", ".")
    (project / f"{name}.patch").write_text(diff, encoding="utf-8")
    return f"{name}.patch"


def results(project):
    """The lines of results.tsv as dictionaries."""
    lines = (project / "out" / "compare" / "results.tsv").read_text(encoding="utf-8").splitlines()
    header, *rows = [line.split("\t") for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


# ------------------------------------------------------------------ the interval


@pytest.mark.parametrize(
    "df, t",  # the two-sided 95 % points in any table of Student's t
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_t_is_that_of_the_tables(df, t):
    assert t_quantile(df) == pytest.approx(t, abs=6e-4)


def test_the_interval_is_that_of_paired_differences():
    # mean -0.02, standard deviation 0.01, of 4: half a width of 3.1824 * 0.01 / 2
    d = 0.01 * (3 / 4) ** 0.5
    (mean, low, high), verdict, words = judge([-0.02 - d, -0.02 + d, -0.02 - d, -0.02 + d], "nats")
    assert (mean, low, high) == pytest.approx((-0.02, -0.035912, -0.004088), abs=1e-6)
    assert verdict == "better" and words == "better by 0.0200 nats (0.0041 to 0.0359)"
    assert judge([0.02 - d, 0.02 + d, 0.02 - d, 0.02 + d], "nats")[1:] == (
        "worse",
        "worse by 0.0200 nats (0.0041 to 0.0359)",
    )


def test_a_difference_within_the_interval_is_not_called_one():
    differences = [-0.03, 0.01, -0.01]  # mean -0.01, standard deviation 0.02
    (mean, low, high), verdict, words = judge(differences, "nats per byte")
    assert mean == pytest.approx(-0.01) and low == pytest.approx(-0.01 - 4.30265 * 0.02 / 3**0.5)
    assert verdict == "not shown" and low < 0 < high
    half = 2.77645 * 0.02 / 5**0.5
    assert words.startswith("no difference that 3 seeds can show (-0.0597 to +0.0397 nats per byte")
    assert words.endswith(f"; of 5 that vary as much it would be ±{half:.4f}")


def test_one_seed_and_equal_losses_have_words_of_their_own():
    (mean, low, high), verdict, words = judge([-0.3], "nats")
    assert verdict == "unknown" and "cannot say whether that is luck" in words
    assert mean == -0.3 and np.isnan([low, high]).all()
    assert judge([0.0, 0.0, 0.0], "nats")[:2] == ([0, 0, 0], "same")


def test_luck_alone_is_called_better_or_worse_in_one_of_twenty_comparisons():
    draws = np.random.default_rng(0).normal(size=(4000, 3)).tolist()
    verdicts = [judge(draw, "nats")[1] for draw in draws]
    wrong = 1 - statistics.mean(verdict == "not shown" for verdict in verdicts)
    assert 0.04 < wrong < 0.06
    assert 0.3 < verdicts.count("better") / (verdicts.count("worse") + 1) < 3


# ------------------------------------------------------------------ whole comparisons


@pytest.mark.parametrize("measured", [True])
def test_the_same_code_gives_a_difference_of_exactly_zero(project, run_compare):
    patch = make_patch(project, "comment", "model.py", "import math\n", "import math  # maths\n")
    before = git(project, "status", "--porcelain")
    code, printed, commands = run_compare(patch, *EQUAL_STEPS, *WORDS)
    assert code == 0
    sides = [(side, next(word for word in words if "--seed" in word)) for side, *words in commands]
    a, b = "working-tree", "comment"  # in turns; and then the short runs
    assert sides[:4] == [(a, "--seed=1"), (b, "--seed=1"), (b, "--seed=2"), (a, "--seed=2")]
    assert [side for side, _ in sides[4:]] == [b, a, a, b]
    (row,) = results(project)
    assert row["verdict"] == "same" and row["difference"] == row["low"] == row["high"] == "0.00000"
    assert row["question"] == "after 20 steps" and row["seeds"] == "2"
    assert "no difference at all" in printed.out
    assert git(project, "status", "--porcelain") == before
    table = [line.split(" | ") for line in printed.out.splitlines() if line.startswith("| ")]
    assert table[2][1] == table[3][1] == "6,896" and table[2][4:] == table[3][4:]


@pytest.mark.slow
@pytest.mark.parametrize("measured", [True])
def test_a_tenth_of_the_learning_rate_is_called_worse_in_both_questions(project, run_compare):
    edit(project / "train.py", 'group["lr"] = lr *', 'group["lr"] = 0.1 * lr *')
    (project / "README.md").write_text("not committed either")
    code, printed, _ = run_compare(*WORDS)
    assert code == 0
    steps, in_time = results(project)
    assert (steps["question"], in_time["question"]) == ("after 20 steps", "in the time of 20 steps")
    for row in (steps, in_time):
        assert (row["first"], row["second"], row["seeds"]) == ("last-commit", "working-tree", "3")
        assert row["verdict"] == "worse" and 0 < float(row["low"]) < float(row["difference"])
        assert row["commit"] == git(project, "rev-parse", "--short", "HEAD").strip()
        assert row["flags"] == " ".join(WORDS[1:])
    ratio = float(in_time["time"].split()[0])
    fewest, most = (round(20 / (ratio + rounding)) for rounding in (0.006, -0.006))
    assert steps["steps"] == "20" and fewest <= int(in_time["steps"]) <= most
    assert "working-tree against last-commit after 20 steps: worse by 0." in printed.out
    from PIL import Image  # matplotlib brings it

    with Image.open(project / "out" / "compare" / "working-tree" / "curves.png") as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 20)}
    assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colors


@pytest.mark.slow
def test_losses_are_those_of_train_py_over_the_whole_split(project, run_compare):
    patch = make_patch(project, "good", "model.py", "import math\n", "import math  # maths\n")
    edit(project / "train.py", "eval_tokens: int = 0 ", "eval_tokens: int = 16 ")
    code, printed, _ = run_compare(patch, *EQUAL_STEPS, *WORDS)
    assert code == 0
    bits = []
    for seed in (1, 2):
        flags = [*WORDS[1:], f"--seed={seed}", f"--out_dir=out/{seed}"]
        flags += ["--eval_tokens=0"]
        assert run_script("train.py", *flags, cwd=project).returncode == 0
        metrics = project / "out" / str(seed) / "checkpoint-20" / "metrics.json"
        bits.append(json.loads(metrics.read_text())["bits_per_byte"])
    expected = f"{statistics.mean(bits):.3f} ({min(bits):.3f} to {max(bits):.3f})"
    assert printed.out.count(expected) == 2
    for seed, one in enumerate(bits, 1):
        nats = one * np.log(2)
        assert printed.out.count(f"seed {seed}, working-tree, 20 steps: {nats:.4f} nats") == 1


@pytest.mark.slow
def test_nothing_is_trained_twice_and_what_training_does_not_read_is_no_change(
    project, run_compare, monkeypatch
):
    patch = make_patch(
        project, "faster", "train.py", "muon_lr: float = 0.05", "muon_lr: float = 0.06"
    )
    _, first, _ = run_compare(patch, *EQUAL_STEPS, *WORDS)
    edit(project / "gptling" / "compare.py", "import os\n", "import os  # is\n")
    (project / "README.md").write_text("new")
    _, second, commands = run_compare(patch, *EQUAL_STEPS, *WORDS)
    assert commands == [] and second.out.partition("\n\n| ")[2] == first.out.partition("\n\n| ")[2]
    assert len(results(project)) == 2
    _, _, commands = run_compare(patch, "--equal=steps", "--seeds=3", *WORDS)
    assert [word for words in commands for word in words if "--seed" in word] == ["--seed=3"] * 2
    assert len(results(project)) == 3
    edit(project / "model.py", "import math\n", "import math  # maths\n")
    _, _, commands = run_compare(patch, *EQUAL_STEPS, *WORDS)
    assert len(commands) == 4  # all of both sides
    (project / "mine.txt").write_text(TEXT[:4000], encoding="utf-8")
    run_script("prepare.py", "mine.txt", "--overwrite", cwd=project)
    _, _, commands = run_compare(patch, *EQUAL_STEPS, *WORDS)
    assert len(commands) == 4
    monkeypatch.setattr(compare, "version", lambda _: "another PyTorch")
    _, _, commands = run_compare(patch, *EQUAL_STEPS, *WORDS)
    assert len(commands) == 4
    _, _, commands = run_compare(patch, *EQUAL_STEPS, *WORDS, "--dropout=0.1")
    assert len(commands) == 4


@pytest.mark.slow
def test_sides_that_fail_end_with_their_last_lines_and_the_others_go_on(project, run_compare):
    good = make_patch(project, "good", "model.py", "import math\n", "import math  # maths\n")
    error = make_patch(
        project, "error", "model.py", "import math\n", "import math\nraise ValueError('mine')\n"
    )
    (project / "old.patch").write_text(
        (project / good).read_text().replace("-import math", "-import maths")
    )
    code, printed, _ = run_compare(error, "old.patch", good, *EQUAL_STEPS, *WORDS)
    assert code == 1
    assert [row["verdict"] for row in results(project)] == ["failed", "failed", "same"]
    assert [row["difference"] for row in results(project)] == ["nan", "nan", "0.00000"]
    assert "error against working-tree after 20 steps: error failed\n" in printed.out
    after = printed.out.partition("\nerror failed:\nTraceback")[2]
    assert "model.py" in after.partition("ValueError: mine\n")[0]
    assert "\nold failed:\nerror: patch failed: model.py" in printed.out
    assert "| error | " in printed.out and "| failed | failed |" in printed.out


def test_a_first_side_that_fails_ends_it_all_at_once(project, run_compare):
    edit(project / "model.py", "import math\n", "import math\nraise ValueError('mine')\n")
    git(project, "commit", "--quiet", "--all", "--message=error")
    edit(project / "model.py", "raise ValueError('mine')\n", "")
    code, printed, commands = run_compare(*EQUAL_STEPS, *WORDS)
    assert len(commands) == 1 and printed.out.endswith("\nseed 1, last-commit, 20 steps: failed\n")
    lines = code.splitlines()  # which the interpreter prints
    assert lines[0] == "last-commit failed:" and lines[-1] == "ValueError: mine"


@pytest.mark.slow
def test_a_run_that_diverges_is_named_and_is_no_number(project, run_compare):
    old = "    steps = config.max_iters - 1 "
    patch = make_patch(project, "high", "train.py", old, f"    return math.inf\n{old}")
    code, printed, _ = run_compare(patch, "--seeds=2", *WORDS)
    assert code == 0
    for row in results(project):
        assert (row["verdict"], row["difference"], row["low"]) == ("diverged", "nan", "nan")
    assert "after 20 steps: high diverged with seed 1, 2" in printed.out
    assert "| diverged with seed 1, 2 | diverged with seed 1, 2 |" in printed.out


def test_sides_with_other_tokens_are_compared_in_bits_per_byte_of_the_same_text(
    project, trained, run_compare
):
    patch = make_patch(
        project, "bytes", "prepare.py", 'tokenizer: str = "auto"', 'tokenizer: str = "byte"'
    )
    (project / "mine.txt").write_text("".join(f"{n} grüne Flaschen\n" for n in range(300)), "utf-8")
    code, printed, _ = run_compare(patch, "--prepare=mine.txt", *EQUAL_STEPS, *WORDS)
    assert code == 0
    (row,) = results(project)
    assert "bits per byte" in printed.out.partition("bytes against")[2]
    logs = [
        [json.loads(line) for line in file.read_text().splitlines()][-1]
        for file in (project / "out" / "compare" / "runs").glob("*-20-?.jsonl")
    ]
    assert len({log["val_tokens"] for log in logs}) == 2
    by_tokens = {}
    for log in logs:
        by_tokens.setdefault(log["val_tokens"], []).append(log["bits_per_byte"])
    chars, of_bytes = (statistics.mean(by_tokens[n]) for n in sorted(by_tokens))
    assert float(row["difference"]) == pytest.approx(of_bytes - chars, abs=1e-5)

    code, printed, _ = run_compare(patch, "--prepare=--tokenizer=byte", *EQUAL_STEPS, *WORDS)
    assert code == 1 and "give the text too, --prepare=YOUR.txt" in printed.err


@pytest.mark.slow
def test_losses_over_other_texts_are_not_compared(project, run_compare):
    patch = make_patch(
        project,
        "half",
        "gptling/dataset.py",
        'self.val = open_tokens(directory / "val.npy")',
        'self.val = open_tokens(directory / "val.npy")[:200]',
    )
    code, printed, _ = run_compare(patch, *EQUAL_STEPS, *WORDS)
    assert code == 0 and "the sides validate on texts of other lengths" in printed.out
    assert results(project)[0]["verdict"] == "incomparable"


def test_a_patch_brings_words_of_its_own_for_both_scripts(project, run_compare):
    text = "# An idea.\n# flags: --n_layer=3 --bias\n# prepare: --tokenizer=byte\n"
    patch = make_patch(project, "good", "model.py", "import math\n", "import math  # maths\n")
    (project / patch).write_text(text + (project / patch).read_text())
    compare.OUT.mkdir(parents=True)
    config = compare.CompareConfig((str(project / patch),), prepare="'my text.txt'")
    first, second = compare.find_sides(config, ["--n_layer=2"])
    assert (first.flags, first.prepare) == (["--n_layer=2"], ["my text.txt"])
    assert second.flags == ["--n_layer=2", "--n_layer=3", "--bias"]
    assert second.prepare == ["my text.txt", "--tokenizer=byte"]


def test_what_cannot_be_compared_is_said_in_one_line(project, run_compare, monkeypatch):
    def error_of(*words):
        code, printed, commands = run_compare(*words)
        assert code == 1 and commands == [] and printed.err.count("\n") == 1
        return printed.err

    assert "nothing that is trained has changed since the last commit" in error_of(*WORDS)
    patch = make_patch(project, "good", "model.py", "import math\n", "import math  # maths\n")
    (project / "other").mkdir()
    shutil.copy(project / patch, project / "other" / patch)
    assert "another side is called good too" in error_of(patch, f"other/{patch}")
    assert "none.patch: No such file" in error_of("none.patch")
    assert "data/none is not there: prepare it" in error_of(patch, "--", "--dataset=none")
    for steps in ("1e3", "0", "-5"):
        assert f"--max_iters={steps}: give a number" in error_of(
            patch, *WORDS, f"--max_iters={steps}"
        )
    for flag in ("--seed=3", "--out_dir=out/x", "--out-dir x", "--eval_tokens=10"):
        assert "gives it itself" in error_of(patch, *WORDS, *flag.split())
    shutil.copytree(project, project / "inner", ignore=shutil.ignore_patterns("out", ".git"))
    monkeypatch.setattr(compare, "ROOT", project / "inner")
    assert "is within another repository" in error_of(*WORDS)
    monkeypatch.setattr(compare, "ROOT", project)
    shutil.rmtree(project / ".git")
    assert "git init && git add -A && git commit" in error_of(*WORDS)
    monkeypatch.setenv("PATH", "")
    assert "git: No such file or directory: install it" in error_of(*WORDS)


def test_a_side_that_cannot_prepare_its_text_ends_it_before_anything_is_trained(
    project, run_compare
):
    (project / "mine.txt").write_text(TEXT, encoding="utf-8")
    patch = make_patch(
        project, "raises", "prepare.py", "import re\n", "import re\nraise OSError(7)\n"
    )
    code, _, commands = run_compare(patch, "--prepare=mine.txt", *EQUAL_STEPS, *WORDS)
    assert code.startswith("raises failed:\n") and code.endswith("\nOSError: 7")
    assert commands == []  # not even of the side that would work


def test_a_failing_script_shows_its_last_lines_in_the_order_it_wrote_them(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "OUT", tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    side = compare.Side("mine", "", [], [])
    side.folder.mkdir(parents=True)
    script = "import sys; print('a shape'); sys.stderr.write('an error\\n')"
    (side.folder / "train.py").write_text(f"{script}; sys.exit(3 * (sys.argv[1] == 'x'))")
    assert compare.execute(side, "train.py", "x") == "a shape\nan error\ntrain.py: exit code 3"
    assert compare.execute(side, "train.py", "y") == ""


def test_a_loss_that_is_no_number_counts_as_diverged():
    side = compare.Side("mine", "", [], [])
    ends = [{"bits_per_byte": 1.0}, {"bits_per_byte": float("nan")}, {"diverged": "at step 3"}]
    side.logs["after"] = [[end] for end in ends]
    assert side.why_no_losses("after") == "diverged with seed 2, 3"
    assert compare.answer(side, side, "after")[1:] == ("diverged", "mine diverged with seed 2, 3")


def test_a_preset_that_lies_elsewhere_is_found_by_both_sides(project, run_compare):
    patch = make_patch(project, "good", "model.py", "import math\n", "import math  # maths\n")
    (project / "out").mkdir()
    (project / "out" / "run.toml").write_text('dataset = "mine"\nn_layer = 1\n')
    flags = [word for word in WORDS[1:] if "dataset" not in word and "n_layer" not in word]
    code, printed, commands = run_compare(patch, *EQUAL_STEPS, "--", "out/run.toml", *flags)
    assert code == 0 and len(commands) == 4
    n_parameters = [line.split(" | ")[1] for line in printed.out.splitlines() if "good | " in line]
    assert n_parameters == ["3,792"]  # a block less: 12 * 16^2 + 2 * 16


def test_settings_are_those_of_the_last_preset_or_flag(tmp_path):
    code = '    dataset: str = "quickstart"  # a name\n    max_iters: PositiveInt = 500  # steps\n'
    (tmp_path / "train.py").write_text(f"class TrainConfig:\n{code}    # max_iters: int = 3\n")
    (tmp_path / "one.toml").write_text('dataset = "one"\n')

    def settings(*flags):
        names = ("dataset", "max_iters")
        return tuple(compare.read_setting(name, list(flags), tmp_path) for name in names)

    assert settings() == ("quickstart", "500")
    assert settings("one.toml", "--n_layer=2") == ("one", "500")
    assert settings("one.toml", "--dataset=War and Peace", "--max-iters=7", "--max_iters", "8") == (
        "War and Peace",
        "8",
    )


def test_as_many_steps_as_fit_into_the_time_are_counted_by_the_ratio_of_medians(monkeypatch):
    ms = {"first": [10, 20, 10, 10], "second": [25, 18, 25, 25]}
    calls = []

    def train(side, seed, steps, bar, *more, tag):
        calls.append(side.name)
        turn = calls.count(side.name) - 1
        warm = [{"ms": 1000.0}] * 10  # of 40: these do not count
        rest = [ms[side.name][turn]] * 16 + [500.0] * 14
        return [*warm, *({"ms": value} for value in rest), {"val_loss": 1}]

    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(compare, "TURNS", 4)
    first, second = (compare.Side(name, "", [], [], steps=500) for name in ("first", "second"))
    compare.measure_steps(first, second, None)
    assert second.time == "2.50 (1.30 to 2.50)" and second.steps == 200 and first.steps == 500
    assert calls == ["second", "first", "first", "second"] * 2


@pytest.mark.slow
def test_a_comparison_that_was_stopped_goes_on_and_ends_as_one_that_was_not(project):
    """Real processes, in a group of their own as a shell makes it."""
    patch = make_patch(project, "good", "model.py", "import math\n", "import math  # maths\n")
    fewer_turns = "from gptling import cli, compare; compare.TURNS = 2; cli.run(compare.main)"
    command = [sys.executable, "-c", fewer_turns, patch, "--seeds=1", "--equal=steps", *WORDS]
    command += ["--max_iters=300", "--eval_interval=300"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"cwd": project, "env": environment, "text": True, "start_new_session": True}
    out = project / "out" / "compare"

    kept = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
        until = time.monotonic() + 300
        while time.monotonic() < until:  # to the middle of a training behind a finished one
            new = set(out.glob("runs/*.jsonl")) - kept.keys()
            if new and list(out.glob("sides/*/out/*/log.jsonl")):
                break
            time.sleep(0.02)
        assert new and process.poll() is None
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert ("the same command goes on" in output) == (number == signal.SIGINT)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # no training is left behind
        kept = {file: file.stat().st_mtime_ns for file in out.glob("runs/*.jsonl")}
    assert 2 <= len(kept) < 2 + 2 * 2
    subprocess.run(command, capture_output=True, check=True, **options)
    assert all(file.stat().st_mtime_ns == then for file, then in kept.items())
    assert len(set(out.glob("runs/*.jsonl"))) == 2 + 2 * 2
    assert results(project)[0]["verdict"] == "same"
