"""Faults put into the code on purpose, those of faults.txt, one at a time: does a test notice?

    python -m tests.faults                   # all; a minute for each that no test notices
    python -m tests.faults loss.py optim.py  # those in these files
    python -m tests.faults --slow            # with the slow tests too

Each fault is put into a copy of the project, and the tests of its file run until one fails; as many
at a time as there are cores. Faults that none noticed are printed at the end. Not for CI: to be run
after the code or its tests changed.
"""

import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = {  # of a file: those that guard its promises, the likeliest first
    "model.py": "attention model sample traps loss changed_model",
    "train.py": "train budget daily_use loss resume cli changed_model processes",
    "sample.py": "sample daily_use explain cli bad_input",
    "prepare.py": "prepare budget daily_use corpora resume bad_input",
    "loss.py": "loss traps changed_model train",
    "gpt2_format.py": "pretrained changed_model traps ecosystem",
    "decoding.py": "sample devices traps",
    "explain.py": "explain attention_page traps changed_model",
    "compare.py": "compare",
    "checkpoints.py": "files daily_use resume traps changed_model hostile train",
    "pretrained.py": "pretrained daily_use sample hostile train",
    "optim.py": "train resume",
    "processes.py": "processes traps train changed_model",
    "report.py": "curves daily_use train cli processes",
    "cli.py": "cli daily_use bad_input",
    "dataset.py": "train daily_use prepare processes hostile bad_input",
    "shards.py": "prepare corpora",
    "corpus.py": "corpora prepare bad_input daily_use",
    "tokenizers.py": "tokenizers budget daily_use prepare ecosystem hostile bad_input",
    "streaming.py": "sample",
    "files.py": "files daily_use hostile",
    "devices.py": "devices sample train model",
    "budget.py": "budget",
    "measure.py": "budget",
}


def read_faults() -> list[tuple[Path, str, str]]:
    """(file, what stands there once, what is put in its place) of each block of faults.txt: the
    file's name, then lines with - and lines with +."""
    faults = []
    for block in Path(__file__).with_suffix(".txt").read_text().strip().split("\n\n"):
        name, *lines = block.split("\n")
        old, new = ("\n".join(s[1:] for s in lines if s[0] == sign) for sign in "-+")
        file = Path(name) if (ROOT / name).exists() else Path("gptling", name)
        assert (ROOT / file).read_text().count(old) == 1, f"{file} has not once: {old}"
        faults.append((file, old, new))
    return faults


def noticed_by(copies: queue.Queue, fault: tuple[Path, str, str], options: list[str]) -> str:
    """The first test in one of the copies that fails with this fault; "" if none does."""
    (file, old, new), copy = fault, copies.get()
    right = (copy / file).read_text(encoding="utf-8")
    (copy / file).write_text(right.replace(old, new), encoding="utf-8")
    tests = [f"tests/test_{name}.py" for name in TESTS[file.name].split()]
    options = ["-n", "0", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *options]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired:
        return "it runs for ever"
    finally:
        (copy / file).write_text(right, encoding="utf-8")
        copies.put(copy)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return " ".join(failed[0].split()[:2]) if failed else "?" * (done.returncode not in (0, 5))


def main():
    options = ["-m", "slow or not slow"] if "--slow" in sys.argv else []
    names, survivors = {word for word in sys.argv[1:] if word[0] != "-"}, []
    faults = [fault for fault in read_faults() if not names or fault[0].name in names]
    copies, n = queue.Queue(), os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(n) as threads:
        for i in range(n):
            ignored = shutil.ignore_patterns("data", "out", ".git", "__pycache__")
            copies.put(shutil.copytree(ROOT, Path(directory, f"gptling-{i}"), ignore=ignored))
        found = threads.map(lambda fault: noticed_by(copies, fault, options), faults)
        for number, (fault, test) in enumerate(zip(faults, found, strict=True), start=1):
            print(f"{number}/{len(faults)} {fault[0]}: {fault[2].strip()!r:.70}: {test or 'NONE'}")
            survivors += [] if test else [fault]
    for file, old, new in survivors:
        print(f"\n{file}: no test noticed\n- {old}\n+ {new}")
    return len(survivors) > 0


if __name__ == "__main__":
    sys.exit(main())
