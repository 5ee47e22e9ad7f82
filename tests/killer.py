"""Train in a child process, kill it with SIGKILL at random moments, half of them while a checkpoint
is being written, and resume each time; then let the run come to its end.

    python tests/killer.py KILLS OUT_DIR [train.py's flags]

prints how many times it was killed, and how many times in the middle of a checkpoint. The children
are forks of this process, which has imported PyTorch already: twenty starts take seconds.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train
from gptling.cli import run
from gptling.run import list_checkpoints


def start(arguments):
    """Fork a training; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stdout = open(os.devnull, "w")
        sys.argv = ["train.py", *arguments]
        run(train.main)
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def writing(out_dir, since):
    """Whether there is a checkpoint that was begun after `since` and not finished."""
    for path in out_dir.glob(".checkpoint-*.writing"):
        try:
            return path.stat().st_mtime > since
        except FileNotFoundError:  # finished meanwhile
            pass
    return False


def main():
    kills, out_dir, flags = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    moments = random.Random(kills)
    resume = [f"--out_dir={out_dir}", "--resume=True"]
    while_writing = 0
    for kill in range(kills):
        since = time.time()
        child = start(resume if list_checkpoints(out_dir) else flags)
        while kill % 2 and not writing(out_dir, since):
            time.sleep(0.0005)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it was killed"
        time.sleep(moments.uniform(0, 0.01) if kill % 2 else moments.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the run ended before it was killed, with {status}"
        while_writing += writing(out_dir, since)
    _, status = os.waitpid(start(resume if list_checkpoints(out_dir) else flags), 0)
    print(kills, while_writing)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
