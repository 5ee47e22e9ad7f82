"""What each patch of docs/experiments/ does to the quick start: time of a step, loss.

    python tests/benchmarks/experiments.py               # all, about two hours on two cores
    python tests/benchmarks/experiments.py rope lion     # these only

For the step times, unchanged and patched code take turns of 60 steps. Then every seed trains the
quick start's recipe with as many steps as it has, and, where a step takes another time, once more
with as many as fit into the unchanged code's time: always by the copy's own train.py. The loss is
in nats per byte of text, which compares across tokenizers.
"""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from report import ROOT, machine, spread, table

PATCHES = ROOT / "docs" / "experiments"
SOURCES = ["model.py", "train.py", "sample.py", "prepare.py", "gptling", "config"]
STEPS = tomllib.loads((ROOT / "config" / "quickstart.toml").read_text())["max_iters"]
SEEDS = (1, 2, 3)


def make_copy(directory: Path, name: str) -> tuple[Path, list[str]]:
    """The project with a patch, its data prepared, and the patch's flags for train.py."""
    copy, settings = directory / name, {}
    copy.mkdir()
    for source in SOURCES:
        copy_it = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy_it(ROOT / source, copy / source)
    if name != "unchanged":
        patch = PATCHES / f"{name}.patch"
        subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
        subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
        settings = dict(re.findall(r"^# (flags|prepare):(.*)$", patch.read_text(), re.MULTILINE))
    command = [sys.executable, "prepare.py", *settings.get("prepare", "").split()]
    subprocess.run([*command, "--name=quickstart"], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    return copy, settings.get("flags", "").split()


def train(copy: Path, flags: list[str], steps: int, *more: str) -> tuple[list[dict], str]:
    """The log of a run of the copy's own train.py with so many steps, and how many parameters."""
    command = [sys.executable, "train.py", f"--max_iters={steps}", f"--eval_interval={steps}"]
    command += ["--overwrite", "--curves=False", *more, *flags]
    output = subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True).stdout
    log = (copy / "out" / "quickstart" / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in log], re.search(r"([\d,]+) parameters, ", output)[1]


def step_ratios(unchanged: tuple, patched: tuple, turns: int) -> list[float]:
    """The patched code's time for a step over the unchanged code's, turn by turn."""
    ratios = []
    for turn in range(turns):
        ms = {}
        for side in (unchanged, patched) if turn % 2 else (patched, unchanged):
            log, _ = train(*side, 60, "--log_interval=1", "--eval_tokens=2000")
            times = [entry["ms"] for entry in log if "ms" in entry]
            ms[side is patched] = statistics.median(times[10:])  # the first ones warm up
        ratios.append(ms[True] / ms[False])
    return ratios


def main(names: list[str]):
    with tempfile.TemporaryDirectory() as path:
        copies = {name: make_copy(Path(path), name) for name in ["unchanged", *names]}
        ratios, equal_steps, equal_time, sizes = {"unchanged": [1.0, 1.0]}, {}, {}, {}
        for name in names:
            ratios[name] = step_ratios(copies["unchanged"], copies[name], turns=8)
            print(f"{name}: {spread(ratios[name], 2)}", file=sys.stderr)

        def nats_per_byte(name, steps, seed):
            log, sizes[name] = train(*copies[name], steps, f"--seed={seed}")
            return log[-1]["bits_per_byte"] * math.log(2)

        for seed in SEEDS:
            for name in copies:
                loss = nats_per_byte(name, STEPS, seed)
                equal_steps.setdefault(name, []).append(loss)
                ratio = statistics.median(ratios[name])
                if abs(ratio - 1) > 0.03:
                    loss = nats_per_byte(name, round(STEPS / ratio), seed)
                equal_time.setdefault(name, []).append(loss)
                losses = f"{equal_steps[name][-1]:.4f}, {loss:.4f}"
                print(f"seed {seed}, {name}: {losses}", file=sys.stderr)
    rows = []
    for name in copies:
        losses = equal_steps[name], equal_time[name]
        means = [f"{statistics.mean(one):.3f} ({min(one):.3f} to {max(one):.3f})" for one in losses]
        quartiles = statistics.quantiles(ratios[name], n=4)
        ratio = "{1:.2f} ({0:.2f} to {2:.2f})".format(*quartiles)
        rows.append([name, sizes[name], ratio, *means])
    header = ["", "parameters", "step time (quartiles)", f"{STEPS} steps", "in equal time"]
    title = f"Quick start, {len(SEEDS)} seeds: nats per byte (mean, low, high); time as a ratio"
    table(title, header, rows)


if __name__ == "__main__":
    print(machine())
    main(sys.argv[1:] or sorted(patch.stem for patch in PATCHES.glob("*.patch")))
