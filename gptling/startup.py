"""When the command started, and how PyTorch's threads wait for each other. Imported before PyTorch.
GNU's OpenMP lets them spin. Beside another program they take the processor from the very thread
that they wait for: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html"""

import os
import time

STARTED = time.perf_counter()
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # turns, then they sleep. 300,000 by default


def seconds() -> float:
    """Return the seconds since the command started."""
    return time.perf_counter() - STARTED
