"""Is my change better? Train both versions of the code, and say what is more than luck.

    python -m gptling.compare                              # the working tree and the last commit
    python -m gptling.compare docs/experiments/rope.patch  # patches, each and the working tree
    python -m gptling.compare --seeds 5 -- config/shakespeare_char_cpu.toml --max_iters=200

Presets and flags after -- are for train.py on all sides. A patch may add its own in a line
"# flags: ...", and flags for prepare.py in a line "# prepare: ...". Which side has the lower loss
after the same number of steps, and which after the same time? Each side is copied to
out/compare/NAME. After Ctrl-C, the same command continues after the last finished run.
"""

import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import tyro

from gptling.cli import CONFIG, load, run
from gptling.files import UserError, lock_directory, replace

ROOT = CONFIG.parent
OUT = ROOT / "out" / "compare"
STEPS = "import train as t; print(t.load(t.TrainConfig, '', presets=True)[0].max_iters or 500)"


@dataclass
class CompareConfig:
    patches: tyro.conf.Positional[tuple[str, ...]] = ()  # of the working tree, each a side
    seeds: int = 3  # runs per side, with --seed=1, 2, ...
    prepare: str = ""  # arguments of prepare.py for data of each side: "my.txt --tokenizer=bpe"


def execute(*command: str, stdin: bytes = b"", cwd: Path | None = None) -> bytes:
    """Run a program and return what it prints. If it fails, exit with its last lines."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(OUT)}  # or `git apply` does nothing
    process = subprocess.run(command, cwd=cwd, env=environment, input=stdin, capture_output=True)
    if process.returncode:
        sys.exit(f"{shlex.join(command)}:\n{process.stderr.decode('utf-8', 'replace')[-2000:]}")
    return process.stdout


@dataclass
class Side:
    """A version of the code, and what came out of its runs."""

    name: str
    files: dict[str, bytes]
    flags: list[str]  # for its train.py
    prepare: list[str]  # for its prepare.py
    patch: bytes = b""
    logs: tuple = field(default_factory=lambda: ([], []))  # for each question, seed by seed
    ratios: list[float] = field(default_factory=list)  # time of a step over the first side's

    @property
    def folder(self) -> Path:
        return OUT / self.name

    def run(self, script: str, *flags: str) -> bytes:
        """Run one of its scripts with flags and its own presets in config/."""
        words = [str(self.folder / word) if word in self.files else word for word in flags]
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
        return f"the times vary too much to say ({interval}); delete out/compare and try again"
    if size <= half:
        return f"no difference that {n} seeds can show ({interval})"
    verdict = "better" if mean < 0 else "worse"
    return f"{verdict} by {size:.4f} bits per byte ({size - half:.4f} to {size + half:.4f})"


def find_sides(config: CompareConfig, flags: list[str]) -> list[Side]:
    """Return the sides. The first is compared with each of the others."""
    prepare = shlex.split(config.prepare)
    names = execute("git", "ls-files", "-zco", "--exclude-standard", cwd=ROOT).decode().split("\0")
    files = {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}
    sides = [Side("working-tree", files, flags, prepare)]
    if not config.patches:
        with tarfile.open(fileobj=io.BytesIO(execute("git", "archive", "HEAD", cwd=ROOT))) as tar:
            last = {entry.name: tar.extractfile(entry).read() for entry in tar if entry.isfile()}
        if last == files:
            raise UserError("nothing has changed since the last commit: edit model.py or train.py")
        sides.insert(0, Side("last-commit", last, flags, prepare))
    for path in map(Path, config.patches):
        patch = path.read_bytes()
        own = dict(re.findall(r"^# (flags|prepare):(.*)$", patch.decode(errors="replace"), re.M))
        own_flags, own_prepare = (own.get(key, "").split() for key in ("flags", "prepare"))
        sides.append(Side(path.stem, files, flags + own_flags, prepare + own_prepare, patch))
    return sides


def make_folders(sides: list[Side]):
    """Write each side's files to its folder and prepare its data. If the same command has done so
    from the same files, all stays as it is, with the finished runs."""
    read = [Path(word) for side in sides for word in side.flags + side.prepare]
    times = [path.stat().st_mtime_ns for path in read if path.exists()]
    key, key_file = hashlib.sha256(repr((sides, times)).encode()).hexdigest(), OUT / "key"
    if key_file.exists() and key_file.read_text() == key:
        return
    key_file.unlink(missing_ok=True)
    for side in sides:
        shutil.rmtree(side.folder, ignore_errors=True)
        for name, content in side.files.items():
            (side.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (side.folder / name).write_bytes(content)
        if side.patch:
            execute("git", "apply", "-", cwd=side.folder, stdin=side.patch)
        if side.prepare:
            side.run("prepare.py", *side.prepare, f"--name=compare-{side.name}", "--overwrite")
    key_file.write_text(key)


def train(side: Side, seed: int, steps: int) -> list[dict]:
    """Train by the side's own train.py and return the log, which is kept in the side's folder."""
    finished, out_dir = side.folder / f"{steps}-steps-seed-{seed}.json", side.folder / "run"
    prepared = max((file.stat().st_mtime for file in Path("data").glob("*/meta.json")), default=0)
    if not finished.exists() or finished.stat().st_mtime < prepared:
        print(f"seed {seed}, {side.name}, {steps} steps: ", end="", flush=True)
        shutil.rmtree(out_dir, ignore_errors=True)
        flags = [*side.flags, f"--max_iters={steps}", f"--seed={seed}", "--eval_tokens=0"]
        flags += [f"--dataset=compare-{side.name}"] * bool(side.prepare)
        side.run("train.py", *flags, f"--out_dir={out_dir}", "--curves=False")
        lines = (out_dir / "log.jsonl").read_text("utf-8").splitlines()
        replace(finished, f"[{','.join(lines)}]".encode())
        print(f"{json.loads(lines[-1])['bits_per_byte']:.4f} bits per byte", flush=True)
    return json.loads(finished.read_text("utf-8"))


def step_time(log: list[dict]) -> float:
    """Return the mean time of a step in ms, after the first log line, which has the warm-up. It is
    no median, because a change may do more work in every k-th step."""
    steps, ms = zip(*((line["step"], line["ms"]) for line in log if "ms" in line), strict=True)
    weights = [step - last for last, step in pairwise(steps)]  # each time is of so many steps
    return statistics.fmean(ms[1:], weights) if weights else ms[0]


def spread(values: list[float], digits: int) -> str:
    """Format the mean, the lowest and the highest value."""
    mean, low, high = (f"{f(values):.{digits}f}" for f in (statistics.mean, min, max))
    return f"{mean} ({low} to {high})"


def draw_curves(file: Path, sides: tuple[Side, Side]):
    """Draw the losses of two sides over steps and over seconds, a line for each seed."""
    from matplotlib.figure import Figure  # without pyplot, which may want a display

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    for i, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        unit = ("step", "seconds")[i]
        for side, color in zip(sides, ("#0072B2", "#D55E00"), strict=True):
            for log in side.logs[i]:
                points = [(line[unit], line["bits_per_byte"]) for line in log if "val_loss" in line]
                axes.plot(*zip(*points, strict=True), "o-", color=color)
            axes.lines[-1].set_label(side.name)
        axes.set(xlabel=unit, ylabel="validation loss in bits per byte")
        axes.legend()
    figure.savefig(file)
    print(file)


def main():
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    config, _ = load(CompareConfig, __doc__, argv[:end])
    OUT.mkdir(parents=True, exist_ok=True)
    _lock = lock_directory(OUT)  # until this process ends
    first, *others = sides = find_sides(config, argv[end + 1 :])
    make_folders(sides)
    (first.folder / "steps.py").write_text(STEPS)
    n = int(first.run("steps.py", *first.flags))

    # Every other seed trains the sides in reversed order.
    turns = [(i, side) for i in range(config.seeds) for side in sides[:: -1 if i % 2 else 1]]
    for i, side in turns:
        side.logs[0].append(train(side, i + 1, n))
    for i, side in turns:  # each seed has its own ratio, so that the interval covers their spread
        side.ratios.append(step_time(side.logs[0][i]) / step_time(first.logs[0][i]))
        side.logs[1].append(train(side, i + 1, max(1, round(n / side.ratios[i]))))

    questions = f"after {n} steps", f"in the time of {n} steps"
    header = ["", "parameters", "time of a step", *(f"bits per byte {end}" for end in questions)]
    print(f"\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    losses = {}  # of each side by its name: for each question, seed by seed
    for side in sides:
        losses[side.name] = [[log[-1]["bits_per_byte"] for log in logs] for logs in side.logs]
        cells = [side.name, f"{side.logs[0][0][-1]['parameters']:,}", spread(side.ratios, 2)]
        print(f"| {' | '.join([*cells, *(spread(values, 3) for values in losses[side.name])])} |")
    print("\nMean difference over pairs with the same seed, 95 % interval (Student's t):\n")
    for side in others:
        for i, ratios in enumerate(([1.0], side.ratios)):
            pairs = zip(losses[first.name][i], losses[side.name][i], strict=True)
            verdict = judge([b - a for a, b in pairs], ratios)
            print(f"{side.name} against {first.name} {questions[i]}: {verdict}")
        if importlib.util.find_spec("matplotlib"):
            draw_curves(side.folder / "curves.png", (first, side))


if __name__ == "__main__":
    sys.argv[0] = "python -m gptling.compare"  # in messages
    run(main)
