"""Choose how PyTorch's threads wait for each other, before PyTorch is imported.

Waiting threads of GNU's OpenMP spin, which is fastest on an idle machine. Beside another program
they take the processor from the very thread that they wait for. They should sleep soon then:
https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
"""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")  # Linux


def busy_processors() -> float:
    """Return how many of our processors others keep busy, over a tenth of a second."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}

    def ticks():  # since the machine started: (all, idle)
        lines = [line.split() for line in STAT.read_text().splitlines()]
        rows = [list(map(int, counts)) for name, *counts in lines if name in ours]
        return sum(map(sum, rows)), sum(row[3] + row[4] for row in rows)  # idle, waiting for a disk

    before = ticks()
    time.sleep(0.1)
    total, idle = (now - then for now, then in zip(ticks(), before, strict=True))
    return len(ours) * (total - idle) / max(1, total)


def limit_spinning():
    """Set GOMP_SPINCOUNT if others keep more than half a processor busy for three tenths of a
    second. A variable that you have set stays."""
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    one_thread = os.environ.get("OMP_NUM_THREADS") == "1"  # torchrun sets that
    if not chosen and not one_thread and os.access(STAT, os.R_OK):
        if all(busy_processors() > 0.5 for _ in range(3)):
            os.environ["GOMP_SPINCOUNT"] = "1000"


limit_spinning()
