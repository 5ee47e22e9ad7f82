"""Choose how PyTorch's threads wait for each other, before PyTorch is imported. GNU's OpenMP lets
them spin. Beside another program they take the processor from the very thread that they wait for:
https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html"""

import os
import time
from pathlib import Path

load = Path("/proc/loadavg")  # Linux's
if load.exists() and not {"GOMP_SPINCOUNT", "OMP_NUM_THREADS"} & os.environ.keys():
    for _ in range(10):
        time.sleep(0.03)
        if load.read_text().split()[3].startswith("1/"):  # only this thread is running
            break
    else:  # others have computed for 0.3 seconds
        os.environ["GOMP_SPINCOUNT"] = "1000"
if "WORLD_SIZE" in os.environ:  # of torchrun: DDP warns of find_unused_parameters
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
