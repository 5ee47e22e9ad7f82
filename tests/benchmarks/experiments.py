"""What each patch of docs/experiments/ does to the quick start: time of a step, loss.

    python tests/benchmarks/experiments.py               # all, about 40 minutes on two cores
    python tests/benchmarks/experiments.py rope lion     # these only

For the step times, unchanged and patched code take turns of ten steps. Then every seed trains the
quick start's recipe with as many steps as it has, and, where a step takes another time, once more
with as many as fit into the unchanged code's time. The loss is in nats per byte of text, which
compares across tokenizers.
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


def worker(flags: list[str]):
    """In a copy: ten steps for each line that comes in; prints their time in seconds."""
    sys.path.insert(0, "")
    import itertools
    import time

    import torch

    import train as script
    from gptling.cli import load

    preset = script.CONFIG / "quickstart.toml"
    config, _ = load(script.TrainConfig, "", ["--max_iters=1000", *flags], preset)
    processes = script.Processes("cpu")
    data = script.Dataset(config.dataset, config.block_size)
    model = script.build_model(config, {}, data, None)
    config.dtype = script.pick_dtype("auto", "cpu", wide=True)
    dtype = getattr(torch, config.dtype)
    script.use_loss_in_pieces(model)
    script.keep_freed_memory()
    script.use_float32_attention(model)
    optimizers = script.configure_optimizers(model, config)
    batches = data.batches(config, range(1000), processes)
    for _ in sys.stdin:
        start = time.perf_counter()
        for x, y in itertools.islice(batches, 10):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                _, loss = model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        print(time.perf_counter() - start, flush=True)


def step_ratios(unchanged: tuple, patched: tuple, turns: int) -> list[float]:
    """The patched code's time for ten steps over the unchanged code's, turn by turn."""
    workers = []
    for copy, flags in (unchanged, patched):
        command = [sys.executable, __file__, "--worker", *flags]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, cwd=copy, stdin=pipe, stdout=pipe, text=True))
    ratios = []
    for _ in range(turns + 1):
        seconds = []
        for process in workers:
            process.stdin.write("go\n")
            process.stdin.flush()
            seconds.append(float(process.stdout.readline()))
        ratios.append(seconds[1] / seconds[0])
    for process in workers:
        process.communicate()
    return ratios[1:]  # the first turn warms up


def train(copy: Path, flags: list[str], steps: int, seed: int = 1) -> dict:
    """A run of so many steps: {"loss": nats per byte, "parameters"}."""
    command = [sys.executable, "train.py", f"--max_iters={steps}", f"--eval_interval={steps}"]
    command += ["--overwrite", "--curves=False", f"--seed={seed}", *flags]
    output = subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True).stdout
    log = (copy / "out" / "quickstart" / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in log]
    return {
        "loss": entries[-1]["bits_per_byte"] * math.log(2),
        "parameters": int(output.split(" parameters")[0].replace(",", "").split()[-1]),
    }


def main(names: list[str]):
    with tempfile.TemporaryDirectory() as path:
        copies = {name: make_copy(Path(path), name) for name in ["unchanged", *names]}
        ratios = {}
        for name in names:
            ratios[name] = step_ratios(copies["unchanged"], copies[name], turns=20)
            print(f"{name}: {spread(ratios[name], 2)}", file=sys.stderr)
        rows, equal_steps, equal_time = [], {}, {}
        for seed in SEEDS:
            for name in copies:
                run = train(*copies[name], STEPS, seed)
                equal_steps.setdefault(name, []).append(run)
                ratio = statistics.median(ratios.get(name, [1.0]))
                if abs(ratio - 1) > 0.03:
                    run = train(*copies[name], round(STEPS / ratio), seed)
                equal_time.setdefault(name, []).append(run)
                losses = f"{equal_steps[name][-1]['loss']:.4f}, {run['loss']:.4f}"
                print(f"seed {seed}, {name}: {losses}", file=sys.stderr)
    for name in copies:
        losses = [[run["loss"] for run in runs[name]] for runs in (equal_steps, equal_time)]
        means = [f"{statistics.mean(one):.3f} ({min(one):.3f} to {max(one):.3f})" for one in losses]
        quartiles = statistics.quantiles(ratios.get(name, [1.0, 1.0]), n=4)
        ratio = "{1:.2f} ({0:.2f} to {2:.2f})".format(*quartiles)
        rows.append([name, f"{equal_steps[name][0]['parameters']:,}", ratio, *means])
    header = ["", "parameters", "step time (quartiles)", f"{STEPS} steps", "in equal time"]
    title = f"Quick start, {len(SEEDS)} seeds: nats per byte (mean, low, high); time as a ratio"
    table(title, header, rows)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(sys.argv[2:])
        sys.exit()
    print(machine())
    main(sys.argv[1:] or sorted(patch.stem for patch in PATCHES.glob("*.patch")))
