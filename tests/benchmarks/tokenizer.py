"""How well runs of the same time predict the same text with different tokenizers.

    python tests/benchmarks/tokenizer.py 1                 # minutes; the quick start's text
    python tests/benchmarks/tokenizer.py 5 shakespeare.txt

Each run is planned for its time (train.py --minutes) and has its own seed. gpt2 needs tiktoken's
vocabulary.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, in_turns, machine, spread, table

KINDS = {
    "char": ["--tokenizer=char"],
    "bpe, 1,024": ["--tokenizer=bpe", "--vocab_size=1024"],
    "bpe, 4,096": ["--tokenizer=bpe", "--vocab_size=4096"],
    "gpt2": ["--tokenizer=gpt2"],
    "auto": [],
}
DIGITS = {"bits_per_byte": 3, "bytes_per_token": 2, "step": 0, "parameters": 0}


def worker(case: dict):
    """Prepare the text with one tokenizer and train on it; prints the figures as JSON."""
    flags = ["--dataset=text", f"--minutes={case['minutes']}", f"--seed={random.randrange(1000)}"]
    with tempfile.TemporaryDirectory() as directory:
        for command in (
            [ROOT / "prepare.py", *case["prepare"], "--name=text"],
            [ROOT / "train.py", *flags, "--curves=False"],
        ):
            command = [sys.executable, *command]
            subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        val = json.loads(Path(directory, "data/text/meta.json").read_text())["val"]
        lines = Path(directory, "out/text/log.jsonl").read_text().splitlines()
    last = [entry for entry in map(json.loads, lines) if "bits_per_byte" in entry][-1]
    print(json.dumps(last | {"bytes_per_token": val["bytes"] / val["tokens"]}))


def main(minutes: float, sources: list[str]):
    cases = {name: {"minutes": minutes, "prepare": sources + KINDS[name]} for name in KINDS}
    rows = []
    for name, found in in_turns(__file__, cases, 3).items():
        rows.append([name, *(spread([one[key] for one in found], DIGITS[key]) for key in DIGITS)])
    table(f"{minutes:g} minutes; three runs (median, low, high)", ["", *DIGITS], rows)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
        sys.exit()
    print(machine())
    sources = [str(Path(source).resolve()) for source in sys.argv[2:]]
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, sources)
