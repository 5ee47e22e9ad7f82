"""Is my change better? Train both versions of the code, and say what is more than luck.

    python -m gptling.compare                              # the working tree and the last commit
    python -m gptling.compare docs/experiments/rope.patch  # patches, each and the working tree
    python -m gptling.compare --seeds 5 -- config/shakespeare_char_cpu.toml --max_iters=200

Presets and flags after -- are for train.py on all sides. A patch may add its own in a line
"# flags:", and flags for prepare.py in a line "# prepare:". Finished runs are kept. All answers are
in out/compare/verdicts.tsv: the date, the side, the base's commit, the seeds, the answer."""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict, namedtuple
from dataclasses import dataclass
from datetime import date
from glob import glob
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev

import tyro

from gptling.cli import Empty, PositiveInt, check_numbers, launch, load_config
from gptling.files import UserError, lock_directory, read_log, write_whole

OUT = Path("out/compare")
COUNT_STEPS = """import train
from gptling.cli import load_config
print(load_config(train.TrainConfig, "", presets=True)[0].max_iters or 500)
"""
# Two-sided 95 % quantiles of Student's t (1908), for 1 to 9 degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
GIT = ("git", "--work-tree=.")  # the project alone, which may be a folder of a repository
# A version of the code in out/compare/NAME: git's hash of its files, and flags for its train.py.
Side = namedtuple("Side", "name tree flags")


@dataclass
class CompareConfig:
    patches: tyro.conf.Positional[Empty[tuple[Path, ...]]] = ()  # patch files, each a side
    seeds: PositiveInt = 3  # random seeds per side. Two hardly ever show a difference
    first_seed: int = 1  # the first of these seeds, which follow each other
    prepare: Empty[str] = ""  # arguments of prepare.py for each side: "my.txt --tokenizer=bpe"

    def __post_init__(self):
        check_numbers(self)


class ProgramFailed(SystemExit):
    """A program's command and lines, which Python prints if nobody catches this."""


def execute(*command: str | Path) -> str:
    """Run a program and return the last line that it prints. Raises ProgramFailed with all
    of them. git works on an index in out/compare: yours stays unchanged."""
    env = os.environ | {"GIT_INDEX_FILE": str(OUT.resolve() / ".index")}
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", env=env
    )
    output = process.stdout.strip()
    if process.returncode:
        raise ProgramFailed(f"{shlex.join(map(str, command))}:\n{output}")
    return output.rpartition("\n")[2]


def make_side(name: str, flags: list[str], prepare: list[str]) -> Side:
    """Write the files in git's index to out/compare/NAME, and prepare the data of this side."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    execute(*GIT, "checkout-index", "--all", f"--prefix={folder}/")
    if prepare:
        data = f"compare-{name}"
        execute(sys.executable, folder / "prepare.py", *prepare, f"--name={data}", "--overwrite")
        flags = [*flags, f"--dataset={data}"]
    return Side(name, execute("git", "write-tree"), tuple(flags))


def make_sides(patches: tuple[Path, ...], flags: list[str], prepare: list[str]) -> list[Side]:
    """Return the sides. The first is compared with each of the others. Raises UserError for two
    patches of one name, since the name is a side's folder."""
    execute("git", "read-tree", "HEAD:./")
    sides = [] if patches else [make_side("last-commit", flags, prepare)]
    execute(*GIT, "add", "--update")
    execute(*GIT, "add", "*.py", "*.toml")  # new code, but not your texts
    sides.append(make_side("working-tree", flags, prepare))
    if not patches and sides[0].tree == sides[1].tree:
        raise UserError("nothing has changed since the last commit: edit model.py or train.py")
    for patch in patches:
        if patch.is_dir():
            raise UserError(f"{patch} is not a patch: to compare two runs, see docs/comparing.md")
        if patch.stem in [side.name for side in sides]:
            raise UserError(f"{patch}: another side has this name: rename the file")
        lines = re.findall(r"^# (flags|prepare):(.*)$", patch.read_text("utf-8"), re.M)
        own = defaultdict(str, lines)
        own_flags = flags + own["flags"].split()
        own_prepare = prepare + own["prepare"].split()
        execute(*GIT, "apply", "--cached", patch)
        sides.append(make_side(patch.stem, own_flags, own_prepare))
        execute(*GIT, "apply", "--cached", "--reverse", patch)
    return sides


def count_steps(side: Side) -> int:
    """Return --max_iters in the flags and presets of a side, or 500. Its own code reads them."""
    script = OUT / side.name / "count_steps.py"
    script.write_text(COUNT_STEPS)
    return int(execute(sys.executable, script, *side.flags))


def train(side: Side, seed: int, steps: int) -> dict:
    """Train by the side's own train.py. Return the last evaluation, with the time of a step in ms.
    The log is kept, and read again if the code, the flags, the presets, all prepared data and the
    machine are the same."""
    flags = [*side.flags, f"--max_iters={steps}", f"--seed={seed}", "--eval_tokens=0"]
    files = [*filter(os.path.isfile, flags), *glob("data/*/meta.json")]
    # A run after --init_from or --teacher: other weights have other losses.
    for path in re.findall(r"[^=,\n]+", "\n".join(flags)):
        files += glob(f"{path}/**/metrics.json", recursive=True)
    contents = [Path(file).read_bytes() for file in sorted(files)]
    machine = version("torch"), sys.version, platform.node(), os.cpu_count()
    chosen = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    key = repr((side.tree, flags, contents, machine, chosen)).encode()
    finished = OUT / f"{hashlib.sha256(key).hexdigest()}.jsonl"
    if not finished.exists():
        run = OUT / side.name / "run"
        log = run / "log.jsonl"
        print(f"seed {seed}: {side.name}, {steps} steps, logged in {log}")
        shutil.rmtree(run, ignore_errors=True)
        flags += [f"--out_dir={run}", "--curves=False"]
        execute(sys.executable, OUT / side.name / "train.py", *flags)
        last = read_log(log)[-1]
        if last.get("bits_per_byte") is None:
            raise UserError(f"{side.name}: its last evaluation failed, train it alone to see why")
        write_whole(finished, log.read_bytes())
        print(f"    {last['bits_per_byte']:.3f} bits per byte in {last['seconds']:.0f} s")
    entries = read_log(finished)
    return entries[-1] | {"side": side.name, "ms": step_time(entries)}


def step_time(log: list[dict]) -> float:
    """Return the mean time of a step in ms, after the first log line, which has the warm-up."""
    times = [line["ms"] for line in log if "ms" in line]
    return mean(times[1:] or times)


def judge(differences: list[float]) -> str:
    """Say what differences of losses show: the second side's minus the first's, seed by seed."""
    n = len(differences)
    difference = mean(differences)
    if n == 1:
        return f"{difference:+.4f} bits per byte with one seed, which cannot rule out luck"
    quantile = T_QUANTILES[min(n, 10) - 2]  # the last one is too high for more seeds
    half = quantile * stdev(differences) / n**0.5
    size = abs(difference)
    if size <= half:
        return (
            f"no difference shown by {n} seeds (mean {difference:+.4f}, "
            f"{difference - half:+.4f} to {difference + half:+.4f} bits per byte, "
            "negative is better)"
        )
    word = "better" if difference < 0 else "worse"
    return f"{word} by {size:.4f} bits per byte ({size - half:.4f} to {size + half:.4f}, {n} seeds)"


def verdict(runs: list[dict], first: list[dict]) -> str:
    """Say how a side's results compare with the first side's, which may have more seeds. A side
    that has failed has none."""
    if not runs:
        return "it failed"
    for run in (first[0], runs[0]):
        if not run["is_cross_entropy"]:
            return f"no answer: the loss of {run['side']} is not the cross-entropy of its logits"
    pairs = zip(runs, first, strict=False)
    return judge([run["bits_per_byte"] - base["bits_per_byte"] for run, base in pairs])


def may_win(runs: list[dict], first: list[dict]) -> bool:
    """Say whether a side can still be better: it has not failed, and it is not worse after these
    seeds, or its steps are faster. A look after each seed calls more sides worse by chance, but
    none better."""
    if not runs:
        return False
    is_faster = sum(run["ms"] for run in runs) < sum(run["ms"] for run in first)
    return is_faster or not verdict(runs, first).startswith("worse")


def answer(sides: list[Side], seeds: range, n_steps: int, same_time: bool) -> list[Side]:
    """Train each side with the seeds while it may win: n_steps, or in the first side's time for
    them. Print its mean loss, and how it compares with the first. Return those with all seeds."""
    question = f"in the time of {n_steps} steps" if same_time else f"after {n_steps} steps"
    first, *others = order = sides
    results = {side: [] for side in sides}
    for seed in seeds:
        for side in order:
            try:
                steps = n_steps
                if same_time:  # a ratio of each seed, so that the interval covers their spread
                    ms = train(side, seed, n_steps)["ms"]
                    steps = round(n_steps * train(first, seed, n_steps)["ms"] / ms)
                results[side].append(train(side, seed, steps))
            except (ProgramFailed, UserError) as error:  # one that diverges: judge the others
                if side is first:
                    raise
                print(f"{side.name}: {error}")
                results[side] = []
        # Reversed, so that no side is always first on a machine that slows down.
        order = [side for side in reversed(order) if may_win(results[side], results[first])]
        if order == [first]:
            break
    for side, runs in results.items():
        if not runs:
            continue
        steps = mean(run["step"] for run in runs)
        loss = mean(run["bits_per_byte"] for run in runs)
        print(
            f"{side.name}: {runs[0]['parameters']:,} parameters, {steps:.0f} steps, "
            f"{loss:.3f} bits per byte"
        )
    commit = execute("git", "rev-parse", "--short", "HEAD")
    for other in others:
        runs = results[other]
        line = f"{other.name} against {first.name} {question}: {verdict(runs, results[first])}"
        print(line)
        with (OUT / "verdicts.tsv").open("a", encoding="utf-8") as file:
            print(date.today(), other.name, commit, len(runs), line, sep="\t", file=file)
    return [side for side in sides if len(results[side]) == len(seeds)]


def main():
    words = iter(sys.argv[1:])
    own = list(takewhile(lambda word: word != "--", words))
    config, _ = load_config(CompareConfig, __doc__, own)
    flags = list(words)  # the words after --, for train.py
    OUT.mkdir(parents=True, exist_ok=True)
    _lock = lock_directory(OUT)  # the lock is held until this process ends
    sides = make_sides(config.patches, flags, shlex.split(config.prepare))
    n_steps = count_steps(sides[0])
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    n_runs = len(seeds) * (2 * len(sides) - 1)  # the first side's runs serve both questions
    minutes = n_runs * train(sides[0], seeds[0], n_steps)["seconds"] / 60
    print(f"At most {n_runs} runs, {minutes:.0f} min. After Ctrl-C the same command continues.")
    left = answer(sides, seeds, n_steps, same_time=False)
    if len(left) > 1:
        answer(left, seeds, n_steps, same_time=True)


if __name__ == "__main__":
    sys.argv[0] = "python -m gptling.compare"  # the name in messages
    launch(main)
