"""What the benchmarks share: measurements in processes of their own, in turns, and their table."""

import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not installed


def machine() -> str:
    """The processor, its cores, and the versions that a figure belongs to."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    found = cpuinfo.exists() and re.search("model name.*: (.*)", cpuinfo.read_text())
    name = found[1] if found else platform.processor() or platform.machine()
    name += f" ({torch.backends.cpu.get_cpu_capability()})"
    if torch.cuda.is_available():
        name += f", {torch.cuda.get_device_name()}"
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    return f"{os.cpu_count()} cores of {name}, {platform.system()}, {versions}"


def dtypes() -> list[str]:
    """Those in which this machine computes matmuls; emulated bfloat16 takes 400 times as long."""
    import torch

    from gptling.devices import pick_dtype

    native = torch.cuda.is_available() or pick_dtype("auto", "cpu", wide=True) == "bfloat16"
    return ["float32", "bfloat16"] if native else ["float32"]


def main(worker: Callable[[dict], None], parts: dict[str, Callable[[int], None]]):
    """Measure one case in this process, or the parts that the command line names, or all."""
    if "--worker" in sys.argv:
        return worker(json.loads(sys.argv[-1]))
    print(machine())
    repetitions = next((int(word) for word in sys.argv[1:] if word.isdigit()), 3)
    for name in [word for word in sys.argv[1:] if not word.isdigit()] or parts:
        parts[name](repetitions)


def in_turns(script: str, cases: dict[str, dict], repetitions: int) -> dict[str, list[dict]]:
    """Run `script --worker CASE` for every case, in turns; what each printed as JSON, by name.

    A case that cannot run here (a peer that is not installed) is left out and said so."""
    results = {name: [] for name in cases}
    for turn in range(repetitions):
        for name, case in cases.items():
            command = [sys.executable, script, "--worker", json.dumps(case)]
            process = subprocess.run(command, capture_output=True, text=True)
            if process.returncode == 0:
                results[name].append(json.loads(process.stdout.splitlines()[-1]))
            elif turn == 0:
                reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"left out: {name}: {reason}", file=sys.stderr)
            print(f"turn {turn + 1}, {name}", file=sys.stderr)
    return {name: found for name, found in results.items() if found}


def peak_megabytes(children: bool = False) -> float:
    """The most memory that this process, or one it has waited for, has held. On Linux
    getrusage begins at what the process that started it held, but /proc does not."""
    status = Path("/proc/self/status")
    if not children and status.exists():
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) * 1024 / 1e6
    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(who).ru_maxrss * unit / 1e6


def spread(values: list[float], digits: int = 0) -> str:
    """The median, and the lowest and the highest."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def table(title: str, header: list[str], rows: list[list[str]]):
    """Print a Markdown table."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}\n")
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")
    sys.stdout.flush()


def compare(script: str, title: str, cases: dict[str, dict], repetitions: int, columns: dict):
    """Measure cases in turns and print a table of what `columns` say by a header: the name of a
    figure, and its digits. "against" the first case it is a ratio."""
    results = in_turns(script, cases, repetitions)
    rows, base = [], results.get(next(iter(cases)), [])
    for name, found in results.items():
        rows.append([name])
        for header, (key, digits) in columns.items():
            values = [result[key] for result in found]
            if header.startswith("against"):
                values = [a / b[key] for a, b in zip(values, base, strict=False)]
            rows[-1].append(spread(values, digits) if values else "")
    table(f"{title}; {repetitions} repetitions (median, low, high)", ["", *columns], rows)


def gpt2_of_transformers(config):
    """A new one of these sizes, without dropout and without an end of text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {name: getattr(config, name) for name in "vocab_size n_layer n_head n_embd".split()}
    sizes |= {"n_positions": config.block_size, "bos_token_id": 0, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
