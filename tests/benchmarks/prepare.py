"""How fast text becomes token ids, and in how much memory.

    python tests/benchmarks/prepare.py              # 200 MB of text, three times
    python tests/benchmarks/prepare.py 1000 1       # 1 GB, once

The text is Python's language reference, repeated. "tiktoken" encodes text in memory in one thread.
prepare.py is the whole process, which reads the text, makes the tokenizer (char, bpe: of the text)
and writes the tokens. gpt2 needs tiktoken's vocabulary.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

from report import ROOT, compare, machine, peak_megabytes


def worker(case: dict):
    """Measure prepare.py as a user runs it, or tiktoken alone; prints the figures as JSON."""
    file, whole = Path(case["file"]), case["who"] == "prepare.py"
    if whole:
        command = [sys.executable, ROOT / "prepare.py", file, f"--tokenizer={case['tokenizer']}"]
        with tempfile.TemporaryDirectory() as directory:
            start = time.perf_counter()
            subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - start
    else:
        from gptling.tokenizers import build_tokenizer

        text = file.read_text(encoding="utf-8")
        tokenizer = build_tokenizer(case["tokenizer"], [text[:1_000_000]])
        start = time.perf_counter()
        for i in range(0, len(text), 1 << 20):
            tokenizer.encode_to_numpy(text[i : i + (1 << 20)], disallowed_special=())
        seconds = time.perf_counter() - start
    rate = file.stat().st_size / 1e6 / seconds
    print(json.dumps({"MB/s": rate, "s": seconds, "peak MB": peak_megabytes(children=whole)}))


def main(megabytes: int, repetitions: int):
    corpus = "\n".join(topics.values()) + "\n"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "text.txt"
        file.write_text(corpus * (megabytes * 1_000_000 // len(corpus)), encoding="utf-8")
        cases = {}
        for tokenizer, who in product(("char", "byte", "bpe", "gpt2"), ("tiktoken", "prepare.py")):
            cases[f"{tokenizer}, {who}"] = dict(file=str(file), tokenizer=tokenizer, who=who)
        columns = {name: (name, 1) for name in ("MB/s", "s", "peak MB")}
        compare(__file__, f"{megabytes} MB of text", cases, repetitions, columns)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
        sys.exit()
    print(machine())
    main(*map(int, sys.argv[1:] or ["200", "3"]))
