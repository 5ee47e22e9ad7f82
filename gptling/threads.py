"""Choose how PyTorch's threads wait for each other, before PyTorch is imported.

Waiting threads of GNU's OpenMP spin, which is fastest on an idle machine. Beside another program
they take the processor from the very thread that they wait for. They should sleep soon then:
https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
"""

import os
import time
from pathlib import Path

LOAD = Path("/proc/loadavg")  # Linux


def limit_spinning():
    """Set GOMP_SPINCOUNT, unless you have set it, if others compute for 0.3 seconds."""
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    one_thread = os.environ.get("OMP_NUM_THREADS") == "1"  # torchrun sets that
    if chosen or one_thread or not os.access(LOAD, os.R_OK):
        return
    for _ in range(10):
        time.sleep(0.03)
        n_running = int(LOAD.read_text().split()[3].partition("/")[0])
        if n_running < 2:  # this thread alone
            return
    os.environ["GOMP_SPINCOUNT"] = "1000"


limit_spinning()
if "WORLD_SIZE" in os.environ:  # of torchrun: DDP warns of find_unused_parameters
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
