"""Train in a child process, kill it with SIGKILL at random moments, half of them while a checkpoint
is being written, and resume each time; then let the run come to its end.

    python tests/killer.py KILLS OUT_DIR [train.py's flags]

prints how many times it was killed, and how many times in the middle of a checkpoint. The children
are forks of this process, which has imported PyTorch already: twenty starts take seconds.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train
from gptling.cli import launch
from gptling.run import list_checkpoints


def start(out_dir, flags):
    """Fork a training, which resumes if it can; returns its process id."""
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        resume = [f"--out_dir={out_dir}", "--resume=True"]
        sys.argv = ["train.py", *(resume if list_checkpoints(out_dir) else flags)]
        launch(train.main)  # which exits
    return child


def main():
    kills, out_dir, flags = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    moments, while_writing = random.Random(kills), 0
    for kill in range(kills):
        child = start(out_dir, flags)
        while kill % 2 and not any(out_dir.glob(".checkpoint-*/new")):
            time.sleep(0.0005)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it was killed"
        time.sleep(moments.uniform(0, 0.01) if kill % 2 else moments.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the run ended before it was killed, with {status}"
        for path in out_dir.glob(".checkpoint-*/new"):
            while_writing += 1
            shutil.rmtree(path.parent)  # as the next start does, later
    _, status = os.waitpid(start(out_dir, flags), 0)
    print(kills, while_writing)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
