"""Is my change better? Train both versions of the code, and say what is more than luck.

    python -m gptling.compare                              # the working tree and the last commit
    python -m gptling.compare docs/experiments/rope.patch  # patches, each and the working tree
    python -m gptling.compare --seeds 5 -- config/shakespeare_char_cpu.toml --max_iters=200

Presets and flags after -- are for train.py on all sides. A patch may add its own in a line
"# flags:", and flags for prepare.py in a line "# prepare:". Finished runs are kept."""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import tyro

from gptling.cli import Empty, launch, load_config
from gptling.files import UserError, lock_directory

OUT = Path("out/compare")
STEPS = """import train
from gptling.cli import load_config
print(load_config(train.TrainConfig, "", presets=True)[0].max_iters or 500)
"""
# Two-sided 95 % quantiles of Student's t (1908), for 1 to 9 degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# A version of the code in out/compare/NAME: git's hash of its files, and flags for its train.py.
Side = namedtuple("Side", "name tree flags")


@dataclass
class CompareConfig:
    patches: tyro.conf.Positional[Empty[tuple[str, ...]]] = ()  # of the working tree, each a side
    seeds: int = 3  # runs per side, with --seed=1, 2, ...
    prepare: Empty[str] = ""  # arguments of prepare.py for each side: "my.txt --tokenizer=bpe"


def execute(*command: str | Path) -> str:
    """Run a program and return the last line that it prints. If it fails, exit with its last lines.
    git works on an index in out/compare: yours stays as it is."""
    env = os.environ | {"GIT_INDEX_FILE": str(OUT / "index")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.run(command, **pipes, encoding="utf-8", env=env)
    lines = process.stdout.splitlines() or [""]
    if process.returncode:
        name = shlex.join(map(str, command))
        end = "\n".join(lines[-20:])
        sys.exit(f"{name}:\n{end}")
    return lines[-1].strip()


def make_side(name: str, flags: list[str], prepare: list[str]) -> Side:
    """Write the files in git's index to out/compare/NAME, and prepare the data of this side."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    execute("git", "checkout-index", "--all", f"--prefix={folder}/")
    (folder / "steps.py").write_text(STEPS)
    if prepare:
        data = f"compare-{name}"
        execute(sys.executable, folder / "prepare.py", *prepare, f"--name={data}", "--overwrite")
        flags = [*flags, f"--dataset={data}"]
    return Side(name, execute("git", "write-tree"), flags)


def make_sides(patches: tuple[str, ...], flags: list[str], prepare: list[str]) -> list[Side]:
    """Return the sides. The first is compared with each of the others."""
    execute("git", "read-tree", "HEAD")
    sides = [] if patches else [make_side("last-commit", flags, prepare)]
    execute("git", "add", "--update")
    execute("git", "add", "*.py", "*.toml")  # new code, but not your texts
    sides.append(make_side("working-tree", flags, prepare))
    if not patches and sides[0].tree == sides[1].tree:
        raise UserError("nothing has changed since the last commit: edit model.py or train.py")
    for patch in map(Path, patches):
        own = dict(re.findall(r"^# (flags|prepare):(.*)$", patch.read_text("utf-8"), re.M))
        own_flags = own.get("flags", "").split()
        own_prepare = own.get("prepare", "").split()
        execute("git", "apply", "--cached", patch)
        sides.append(make_side(patch.stem, flags + own_flags, prepare + own_prepare))
        execute("git", "apply", "--cached", "--reverse", patch)
    return sides


def train(side: Side, seed: int, steps: int) -> list[dict]:
    """Train by the side's own train.py and return the log. It is kept, and returned again if the
    code, the flags, the presets and all prepared data are the same."""
    flags = [*side.flags, f"--max_iters={steps}", f"--seed={seed}", "--eval_tokens=0"]
    files = [path for path in map(Path, flags) if path.is_file()]
    files += sorted(Path("data").glob("*/meta.json"))
    contents = [file.read_bytes() for file in files]
    key = repr((side.tree, flags, contents))
    digest = hashlib.sha256(key.encode()).hexdigest()
    finished = OUT / f"{digest}.jsonl"
    is_new = not finished.exists()
    if is_new:
        print(f"seed {seed}: {side.name}, {steps} steps")
        folder = OUT / side.name
        flags += [f"--out_dir={folder / 'run'}", "--overwrite", "--curves=False"]
        execute(sys.executable, folder / "train.py", *flags)
        shutil.copy(folder / "run" / "log.jsonl", finished)
    lines = finished.read_text("utf-8").splitlines()
    log = [json.loads(line) for line in lines]
    if is_new:
        end = log[-1]
        print(f"    {end['bits_per_byte']:.3f} bits per byte in {end['seconds']:.0f} s")
    return log


def train_all(sides: list[Side], steps: dict[str, list[int]]) -> dict[str, list]:
    """Train each side with each seed, and return {side: [log of seed 1, log of seed 2, ...]}.
    steps: {side: [500, 500, ...]}."""
    logs = {side.name: [] for side in sides}
    for i in range(len(steps[sides[0].name])):
        for side in sides[:: -1 if i % 2 else 1]:  # every other seed in reversed order
            log = train(side, i + 1, steps[side.name][i])
            logs[side.name].append(log)
    return logs


def step_time(log: list[dict]) -> float:
    """Return the mean time of a step in ms, after the first log line, which has the warm-up."""
    times = [line["ms"] for line in log if "ms" in line]
    return mean(times[1:] or times)


def steps_in_the_same_time(logs: dict[str, list], n_steps: int) -> dict[str, list[int]]:
    """Return how many steps each side has in the time of n_steps of the first one. Each seed has
    its own ratio of times, so that the interval covers their spread."""
    first, *_ = logs.values()
    steps = {}
    for name, runs in logs.items():
        pairs = zip(first, runs, strict=True)
        ratios = [step_time(base) / step_time(log) for base, log in pairs]
        steps[name] = [max(1, round(n_steps * ratio)) for ratio in ratios]
    return steps


def agree(steps: list[int]) -> bool:
    """Return whether the steps of all seeds in the same time agree to a tenth."""
    return max(steps) <= 1.1 * min(steps)


def judge(differences: list[float]) -> str:
    """Say what differences of losses show: the second side's minus the first's, seed by seed."""
    n = len(differences)
    difference = mean(differences)
    if n == 1:
        return f"{difference:+.4f} bits per byte with one seed, which cannot say if that is luck"
    freedom = min(n - 1, len(T_QUANTILES))  # of more seeds the interval is too wide
    standard_error = stdev(differences) / math.sqrt(n)
    half = T_QUANTILES[freedom - 1] * standard_error
    size = abs(difference)
    low = difference - half
    high = difference + half
    interval = f"{low:+.4f} to {high:+.4f} bits per byte"
    if size <= half:
        return f"no difference that {n} seeds can show ({interval}, negative is better)"
    verdict = "better" if difference < 0 else "worse"
    smallest = size - half
    largest = size + half
    return f"{verdict} by {size:.4f} bits per byte ({smallest:.4f} to {largest:.4f})"


def report(logs: dict[str, list], steps: dict[str, list[int]], question: str):
    """Print the mean loss of each side, and how each compares with the first one."""
    losses = {}
    for name, runs in logs.items():
        losses[name] = [log[-1]["bits_per_byte"] for log in runs]
        n_parameters = runs[0][-1]["parameters"]
        size = f"{n_parameters:,} parameters, {mean(steps[name]):.0f} steps"
        print(f"{name}: {size}, {mean(losses[name]):.3f} bits per byte")
    first, *others = losses
    for name in others:
        pairs = zip(losses[first], losses[name], strict=True)
        differences = [loss - before for before, loss in pairs]
        verdict = judge(differences)
        for side in (first, name):
            if not logs[side][0][-1].get("is_cross_entropy", True):  # older code omits True
                verdict = f"no answer: the loss of {side} is not the cross-entropy of its logits"
        print(f"{name} against {first} {question}: {verdict}")


def main():
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    flags = argv[end + 1 :]  # for train.py
    config, _ = load_config(CompareConfig, __doc__, argv[:end])
    OUT.mkdir(parents=True, exist_ok=True)
    _lock = lock_directory(OUT)  # until this process ends
    sides = make_sides(config.patches, flags, shlex.split(config.prepare))
    first = sides[0]
    script = OUT / first.name / "steps.py"
    n_steps = int(execute(sys.executable, script, *first.flags))

    runs_per_seed = 2 * len(sides) - 1  # for both questions
    print(f"At most {config.seeds * runs_per_seed} runs. After Ctrl-C the same command continues.")
    steps = {side.name: [n_steps] * config.seeds for side in sides}
    logs = train_all(sides, steps)
    report(logs, steps, f"after {n_steps} steps")

    steps = steps_in_the_same_time(logs, n_steps)
    question = f"in the time of {n_steps} steps"
    for side in sides:
        if not agree(steps[side.name]):
            verdict = f"the times of steps vary too much to say: delete {OUT} and try again"
            print(f"{side.name} against {first.name} {question}: {verdict}")
    sides = [side for side in sides if agree(steps[side.name])]
    if len(sides) > 1:
        logs = train_all(sides, steps)
        report(logs, steps, question)


if __name__ == "__main__":
    sys.argv[0] = "python -m gptling.compare"  # in messages
    launch(main)
