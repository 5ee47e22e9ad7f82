"""Is my change better? Train both versions of the code, and say what is more than luck.

    python -m gptling.compare                              # the working tree and the last commit
    python -m gptling.compare docs/experiments/rope.patch  # patches, each and the working tree
    python -m gptling.compare --seeds 5 -- config/shakespeare_char_cpu.toml --max_iters=200

Presets and flags after -- are for train.py on all sides. A patch may add its own in a line
"# flags:", and flags for prepare.py in a line "# prepare:". Finished runs are kept."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from glob import glob
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev

import tyro

from gptling.cli import Empty, launch, load_config
from gptling.files import UserError, lock_directory

OUT = Path("out/compare")
COUNT_STEPS = """import train
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
    output = process.stdout.strip()
    if process.returncode:
        end = "\n".join(output.splitlines()[-20:])
        sys.exit(f"{shlex.join(map(str, command))}:\n{end}")
    return output.rpartition("\n")[2]


def make_side(name: str, flags: list[str], prepare: list[str]) -> Side:
    """Write the files in git's index to out/compare/NAME, and prepare the data of this side."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    execute("git", "checkout-index", "--all", f"--prefix={folder}/")
    if prepare:
        data = f"compare-{name}"
        execute(sys.executable, folder / "prepare.py", *prepare, f"--name={data}", "--overwrite")
        flags = [*flags, f"--dataset={data}"]
    return Side(name, execute("git", "write-tree"), tuple(flags))


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


def count_steps(side: Side) -> int:
    """Return --max_iters in the flags and presets of a side, or 500. Its own code reads them."""
    script = OUT / side.name / "count_steps.py"
    script.write_text(COUNT_STEPS)
    return int(execute(sys.executable, script, *side.flags))


def read_log(file: Path) -> list[dict]:
    """Return the entries of a log.jsonl."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def train(side: Side, seed: int, steps: int) -> list[dict]:
    """Train by the side's own train.py and return the log. It is kept, and returned again if the
    code, the flags, the presets and all prepared data are the same."""
    flags = [*side.flags, f"--max_iters={steps}", f"--seed={seed}", "--eval_tokens=0"]
    files = [*filter(os.path.isfile, flags), *sorted(glob("data/*/meta.json"))]
    contents = [Path(file).read_bytes() for file in files]
    key = repr((side.tree, flags, contents))
    digest = hashlib.sha256(key.encode()).hexdigest()
    finished = OUT / f"{digest}.jsonl"
    if not finished.exists():
        print(f"seed {seed}: {side.name}, {steps} steps")
        folder = OUT / side.name
        flags += [f"--out_dir={folder / 'run'}", "--overwrite", "--curves=False"]
        execute(sys.executable, folder / "train.py", *flags)
        shutil.copy(folder / "run" / "log.jsonl", finished)
        end = read_log(finished)[-1]
        print(f"    {end['bits_per_byte']:.3f} bits per byte in {end['seconds']:.0f} s")
    return read_log(finished)


def step_time(log: list[dict]) -> float:
    """Return the mean time of a step in ms, after the first log line, which has the warm-up."""
    times = [line["ms"] for line in log if "ms" in line]
    return mean(times[1:] or times)


def steps_in_the_same_time(logs: list, first: list, n_steps: int) -> list[int]:
    """Return how many steps a side has in the time of n_steps of the first side, seed by seed: each
    seed has its own ratio of times, so that the interval covers their spread."""
    pairs = zip(logs, first, strict=True)
    ratios = [step_time(base) / step_time(log) for log, base in pairs]
    return [round(n_steps * ratio) for ratio in ratios]


def judge(differences: list[float]) -> str:
    """Say what differences of losses show: the second side's minus the first's, seed by seed."""
    n = len(differences)
    difference = mean(differences)
    if n == 1:
        return f"{difference:+.4f} bits per byte with one seed, which cannot say if that is luck"
    quantile = T_QUANTILES[: n - 1][-1]  # for more than ten seeds the interval is too wide
    half = quantile * stdev(differences) / n**0.5
    size = abs(difference)
    if size <= half:
        interval = f"{difference - half:+.4f} to {difference + half:+.4f} bits per byte"
        return f"no difference that {n} seeds can show ({interval}, negative is better)"
    verdict = "better" if difference < 0 else "worse"
    return f"{verdict} by {size:.4f} bits per byte ({size - half:.4f} to {size + half:.4f})"


def answer(question: str, steps: dict[Side, list[int]]) -> dict[Side, list]:
    """Train each side with seed 1, 2, ... for its numbers of steps. Print its mean loss, and how it
    compares with the first side. Return {side: [log of seed 1, log of seed 2, ...]}."""
    first, *others = sides = list(steps)
    logs = {side: [] for side in sides}
    for i in range(len(steps[first])):
        for side in sides[:: -1 if i % 2 else 1]:  # every other seed in reversed order
            logs[side].append(train(side, i + 1, steps[side][i]))
    losses = {}
    for side, runs in logs.items():
        losses[side] = [log[-1]["bits_per_byte"] for log in runs]
        size = f"{runs[0][-1]['parameters']:,} parameters, {mean(steps[side]):.0f} steps"
        print(f"{side.name}: {size}, {mean(losses[side]):.3f} bits per byte")
    for other in others:
        pairs = zip(losses[first], losses[other], strict=True)
        verdict = judge([loss - before for before, loss in pairs])
        for side in (first, other):
            if not logs[side][0][-1]["is_cross_entropy"]:
                wrong = f"the loss of {side.name} is not the cross-entropy of its logits"
                verdict = f"no answer: {wrong}"
        print(f"{other.name} against {first.name} {question}: {verdict}")
    return logs


def main():
    words = iter(sys.argv[1:])
    own = list(takewhile(lambda word: word != "--", words))
    config, _ = load_config(CompareConfig, __doc__, own)
    flags = list(words)  # the words after --, for train.py
    OUT.mkdir(parents=True, exist_ok=True)
    _lock = lock_directory(OUT)  # until this process ends
    sides = make_sides(config.patches, flags, shlex.split(config.prepare))
    first = sides[0]
    n_steps = count_steps(first)
    runs_per_seed = 2 * len(sides) - 1  # for both questions
    print(f"At most {config.seeds * runs_per_seed} runs. After Ctrl-C the same command continues.")
    logs = answer(f"after {n_steps} steps", dict.fromkeys(sides, [n_steps] * config.seeds))

    question = f"in the time of {n_steps} steps"
    steps = {}
    for side in sides:
        numbers = steps_in_the_same_time(logs[side], logs[first], n_steps)
        if max(numbers) <= 1.1 * min(numbers):
            steps[side] = numbers
        else:
            verdict = f"the times of steps vary too much to say: delete {OUT} and try again"
            print(f"{side.name} against {first.name} {question}: {verdict}")
    if len(steps) > 1:
        answer(question, steps)


if __name__ == "__main__":
    sys.argv[0] = "python -m gptling.compare"  # in messages
    launch(main)
