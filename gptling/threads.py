"""Choose how PyTorch's threads wait for each other, before PyTorch is imported. GNU's OpenMP lets
them spin. Beside another program they take the processor from the very thread that they wait for:
https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html"""

import os
import time
from pathlib import Path

LOAD = Path("/proc/loadavg")  # Linux


def limit_spinning():
    """Set GOMP_SPINCOUNT, if others compute for 0.3 seconds and you have set nothing yourself."""
    if {"GOMP_SPINCOUNT", "OMP_NUM_THREADS"} & os.environ.keys() or not LOAD.exists():
        return
    for _ in range(10):
        time.sleep(0.03)
        if LOAD.read_text().split()[3].startswith("1/"):  # only this thread is running
            return
    os.environ["GOMP_SPINCOUNT"] = "1000"


limit_spinning()
if "WORLD_SIZE" in os.environ:  # of torchrun: DDP warns of find_unused_parameters
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
