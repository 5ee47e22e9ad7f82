"""Is my change better? Train both versions of the code, and say what is more than luck.

    python -m gptling.compare                              # the working tree and the last commit
    python -m gptling.compare docs/experiments/rope.patch  # patches, each and the working tree
    python -m gptling.compare --seeds 5 -- config/shakespeare_char_cpu.toml --max_iters=200

Presets and flags after -- are for train.py on all sides. A patch may add its own in a line
"# flags: ...", and flags for prepare.py in a line "# prepare: ...". Each side is copied to
out/compare/NAME. After Ctrl-C, the same command continues after the last finished run.
"""

import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import tyro

from gptling.cli import CONFIG, Empty, load, run
from gptling.files import UserError, lock_directory

ROOT = CONFIG.parent
OUT = ROOT / "out" / "compare"
STEPS = "import train as t; print(t.load(t.TrainConfig, '', presets=True)[0].max_iters or 500)"


@dataclass
class CompareConfig:
    patches: tyro.conf.Positional[Empty[tuple[str, ...]]] = ()  # of the working tree, each a side
    seeds: int = 3  # runs per side, with --seed=1, 2, ...
    prepare: Empty[str] = ""  # arguments of prepare.py for each side: "my.txt --tokenizer=bpe"


def execute(*command: str, cwd: Path | None = None) -> str:
    """Run a program and return what it prints. If it fails, exit with its last lines."""
    environment = os.environ | {"GIT_INDEX_FILE": str(OUT / "index")}  # yours stays as it is
    process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True)
    if process.returncode:
        sys.exit(f"{shlex.join(command)}:\n{process.stderr.decode('utf-8', 'replace')[-2000:]}")
    return process.stdout.decode("utf-8", "replace").strip()


@dataclass
class Side:
    """A version of the code, and what came out of its runs."""

    name: str
    tree: str  # its files, as git names them
    flags: list[str]  # for its train.py
    prepare: list[str]  # for its prepare.py
    logs: tuple = field(default_factory=lambda: ([], []))  # for each question, seed by seed
    ratios: list[float] = field(default_factory=list)  # time of a step over the first side's

    @property
    def folder(self) -> Path:
        return OUT / self.name

    def losses(self, question: int) -> list[float]:
        return [log[-1]["bits_per_byte"] for log in self.logs[question]]

    def run(self, script: str, *flags: str) -> str:
        """Run one of its scripts with flags and its own presets in config/."""
        own = {word: str(self.folder / word) for word in flags if (self.folder / word).is_file()}
        words = [own.get(word, word) for word in flags]
        return execute(sys.executable, str(self.folder / script), *words)


def t_quantile(df: int) -> float:
    """Return the two-sided 95 % quantile of Student's t (1908) with `df` degrees of freedom."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    # Beyond the table, the series in 1 / df: Abramowitz and Stegun 1964, 26.7.5.
    return table[df - 1] if df <= len(table) else 1.96 + (2.372 + (2.822 + 2.556 / df) / df) / df


def judge(differences: list[float], ratios: list[float]) -> str:
    """Say what differences of losses show: the second side's minus the first's, seed by seed.
    ratios: how many times as long the second side's steps took. They must agree to a tenth."""
    n, mean = len(differences), statistics.mean(differences)
    if not any(differences):
        return "no difference at all: equal losses, seed by seed"
    if n == 1:
        return f"{mean:+.4f} bits per byte with one seed, which cannot say whether that is luck"
    half, size = t_quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n), abs(mean)
    interval = f"{mean - half:+.4f} to {mean + half:+.4f} bits per byte, negative is better"
    if max(ratios) > 1.1 * min(ratios):
        return f"the times vary too much to say ({interval}): delete out/compare and try again"
    if size <= half:
        return f"no difference that {n} seeds can show ({interval})"
    verdict = "better" if mean < 0 else "worse"
    return f"{verdict} by {size:.4f} bits per byte ({size - half:.4f} to {size + half:.4f})"


def find_sides(config: CompareConfig, flags: list[str]) -> list[Side]:
    """Return the sides. The first is compared with each of the others."""
    prepare = shlex.split(config.prepare)
    execute("git", "add", "--all", cwd=ROOT)
    tree = execute("git", "write-tree", cwd=ROOT)
    sides = [Side("working-tree", tree, flags, prepare)]
    if not config.patches:
        last = execute("git", "rev-parse", "HEAD^{tree}", cwd=ROOT)
        sides.insert(0, Side("last-commit", last, flags, prepare))
        if last == tree:
            raise UserError("nothing has changed since the last commit: edit model.py or train.py")
    for path in map(Path, config.patches):
        execute("git", "read-tree", tree, cwd=ROOT)
        execute("git", "apply", "--cached", str(path.resolve()), cwd=ROOT)
        patched = execute("git", "write-tree", cwd=ROOT)
        own = dict(re.findall(r"^# (flags|prepare):(.*)$", path.read_text("utf-8"), re.M))
        own_flags, own_prepare = (own.get(key, "").split() for key in ("flags", "prepare"))
        sides.append(Side(path.stem, patched, flags + own_flags, prepare + own_prepare))
    return sides


def make_folder(side: Side):
    """Write a side's files to its folder and prepare its data. If that is done, and no preset or
    text has changed since, the folder stays as it is, with the finished runs."""
    read = [path for path in map(Path, side.flags + side.prepare) if path.exists()]
    key, done = repr((side, [path.stat().st_mtime for path in read])), side.folder / "key"
    if done.exists() and done.read_text("utf-8") == key:
        return
    shutil.rmtree(side.folder, ignore_errors=True)
    execute("git", "archive", f"--output={side.folder}.zip", side.tree, cwd=ROOT)
    shutil.unpack_archive(f"{side.folder}.zip", side.folder)
    (side.folder / "steps.py").write_text(STEPS)
    if side.prepare:
        side.run("prepare.py", *side.prepare, f"--name=compare-{side.name}", "--overwrite")
    done.write_text(key, "utf-8")


def train(side: Side, seed: int, steps: int) -> list[dict]:
    """Train by the side's own train.py and return the log, which is kept in the side's folder."""
    finished, out_dir = side.folder / f"{steps}-steps-seed-{seed}.jsonl", side.folder / "run"
    prepared = max((file.stat().st_mtime for file in Path("data").glob("*/meta.json")), default=0)
    if not finished.exists() or finished.stat().st_mtime < prepared:
        print(f"seed {seed}: {side.name}, {steps} steps", flush=True)
        shutil.rmtree(out_dir, ignore_errors=True)
        flags = [*side.flags, f"--max_iters={steps}", f"--seed={seed}", "--eval_tokens=0"]
        flags += [f"--dataset=compare-{side.name}"] * bool(side.prepare)
        side.run("train.py", *flags, f"--out_dir={out_dir}", "--curves=False")
        (out_dir / "log.jsonl").replace(finished)
    return [json.loads(line) for line in finished.read_text("utf-8").splitlines()]


def step_time(log: list[dict]) -> float:
    """Return the mean time of a step in ms, after the first log line, which has the warm-up. It is
    no median, because a change may do more work in every k-th step."""
    steps, ms = zip(*((line["step"], line["ms"]) for line in log if "ms" in line), strict=True)
    weights = [step - last for last, step in pairwise(steps)]  # each time is of so many steps
    return statistics.fmean(ms[1:], weights) if weights else ms[0]


def draw_curves(sides: list[Side]):
    """Draw the losses of the sides over steps and over seconds, a line for each seed."""
    from matplotlib.figure import Figure  # without pyplot, which may want a display

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    for i, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        unit = ("step", "seconds")[i]
        for number, side in enumerate(sides):
            for log in side.logs[i]:
                points = [(line[unit], line["bits_per_byte"]) for line in log if "val_loss" in line]
                axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}")
            axes.lines[-1].set_label(side.name)
        axes.set(xlabel=unit, ylabel="validation loss in bits per byte")
        axes.legend()
    figure.savefig(OUT / "curves.png")


def main():
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    config, _ = load(CompareConfig, __doc__, argv[:end])
    OUT.mkdir(parents=True, exist_ok=True)
    _lock = lock_directory(OUT)  # until this process ends
    first, *others = sides = find_sides(config, argv[end + 1 :])
    for side in sides:
        make_folder(side)
    n = int(first.run("steps.py", *first.flags))

    # Every other seed trains the sides in reversed order.
    turns = [(i, side) for i in range(config.seeds) for side in sides[:: -1 if i % 2 else 1]]
    for i, side in turns:
        side.logs[0].append(train(side, i + 1, n))
    for i, side in turns:  # each seed has its own ratio, so that the interval covers their spread
        side.ratios.append(step_time(side.logs[0][i]) / step_time(first.logs[0][i]))
        side.logs[1].append(train(side, i + 1, max(1, round(n / side.ratios[i]))))

    questions = f"after {n} steps", f"in the time of {n} steps"
    columns = "parameters | time of a step | bits per byte " + " | bits per byte ".join(questions)
    print(f"\n| | {columns} |\n|{' --- |' * 5}")
    for side in sides:
        cells = f"{side.logs[0][0][-1]['parameters']:,} | {statistics.mean(side.ratios):.2f}"
        losses = " | ".join(f"{statistics.mean(side.losses(i)):.3f}" for i in (0, 1))
        print(f"| {side.name} | {cells} | {losses} |")
    print("\nMean difference over pairs with the same seed, 95 % interval (Student's t):\n")
    for side in others:
        for i, ratios in enumerate(([1.0], side.ratios)):
            pairs = zip(first.losses(i), side.losses(i), strict=True)
            verdict = judge([b - a for a, b in pairs], ratios)
            print(f"{side.name} against {first.name} {questions[i]}: {verdict}")
    if find_spec("matplotlib"):
        draw_curves(sides)


if __name__ == "__main__":
    sys.argv[0] = "python -m gptling.compare"  # in messages
    run(main)
