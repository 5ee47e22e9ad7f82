"""A long run of a tiny model: does its memory grow, do its steps get slower? (Linux)

    python tests/benchmarks/long.py [steps]

trains for 10,000 steps on the text that ships with Python, with an evaluation and a checkpoint at
every 500, and prints the memory and the time of a step along the way.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FLAGS = (
    "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=8 --eval_interval=500 "
    "--eval_tokens=5000 --log_interval=100 --curves=False"
).split()


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "out" / "quickstart" / "log.jsonl"
        command = [sys.executable, ROOT / "train.py", *FLAGS, f"--max_iters={steps}"]
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
        print("| step | resident memory, MB | ms a step, median of 10 |\n|---|---|---|")
        shown = 0
        while process.poll() is None:
            time.sleep(0.05)
            status = Path(f"/proc/{process.pid}/status").read_text()
            memory = re.search(r"VmRSS:\s+(\d+)", status)
            lines = log.read_text().splitlines() if log.exists() else []
            entries = [json.loads(line) for line in lines if line.endswith("}")]
            times = [(entry["step"], entry["ms"]) for entry in entries if "ms" in entry]
            if memory and times and times[-1][0] >= shown + steps // 10:
                shown = times[-1][0]
                median = sorted(ms for _, ms in times[-10:])[len(times[-10:]) // 2]
                print(f"| {shown:,} | {int(memory[1]) / 1024:.0f} | {median:.2f} |", flush=True)
        assert process.returncode == 0
        logged = [json.loads(line)["step"] for line in log.read_text().splitlines()]
        assert logged == sorted(logged) and logged.count(steps) == 2
        print(f"\n{len(logged)} lines in the log, in order")


if __name__ == "__main__":
    main()
