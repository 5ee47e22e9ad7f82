"""How fast text becomes token ids, and in how much memory.

    python tests/benchmarks/prepare.py              # 200 MB of text
    python tests/benchmarks/prepare.py 1000 1       # 1 GB, once

The text is Python's language reference, repeated. One thread is tiktoken's encode_to_numpy on text
in memory, all cores are our threads of it, prepare.py is the whole process, which reads the text
(for char twice) and writes tokens. gpt2 needs tiktoken's vocabulary.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, in_turns, machine, peak_megabytes, spread, table


def worker(case: dict):
    """prepare.py as a user runs it, or tiktoken on pieces in memory: in one thread, or in ours."""
    from gptling.corpus import embedded_corpus, encode_on_all_cores
    from gptling.tokenizers import build_tokenizer

    text = Path(case["file"])
    megabytes = text.stat().st_size / 1e6
    if case["who"] != "prepare.py":
        corpus = "\n".join(embedded_corpus().values())
        encoding = build_tokenizer(case["tokenizer"], [corpus], end_of_text=False)
        pieces = [corpus] * int(megabytes * 1e6 / len(corpus.encode()))
        start = time.perf_counter()
        if case["who"] == "all cores":
            for _ in encode_on_all_cores(encoding, enumerate(pieces)):
                pass
        else:
            for piece in pieces:
                encoding.encode_to_numpy(piece, disallowed_special=())
        seconds, peak = time.perf_counter() - start, peak_megabytes()
    else:
        with tempfile.TemporaryDirectory() as directory:
            command = [
                sys.executable,
                ROOT / "prepare.py",
                text,
                f"--tokenizer={case['tokenizer']}",
            ]
            start = time.perf_counter()
            subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - start
        peak = peak_megabytes(children=True)
    print(json.dumps({"rate": megabytes / seconds, "seconds": seconds, "mb": peak}))


def main(megabytes: int, repetitions: int):
    from gptling.corpus import embedded_corpus

    corpus = "\n".join(embedded_corpus().values()) + "\n"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "text.txt"
        with file.open("w", encoding="utf-8") as f:
            for _ in range(megabytes * 1_000_000 // len(corpus.encode())):
                f.write(corpus)
        cases = {}
        for tokenizer in ("char", "byte", "gpt2"):
            for who in ("one thread", "all cores", "prepare.py"):
                cases[f"{tokenizer}, {who}"] = dict(file=str(file), tokenizer=tokenizer, who=who)
        results = in_turns(__file__, cases, repetitions)
    rows = []
    for name, found in results.items():
        tokenizer, who = name.split(", ")
        share = ""
        if who != "one thread":
            one = results[f"{tokenizer}, one thread"]
            cores = os.cpu_count()
            pairs = zip(found, one, strict=True)
            share = spread([a["rate"] / b["rate"] / cores for a, b in pairs], 2)
        rates, peaks = spread([a["rate"] for a in found], 1), spread([a["mb"] for a in found])
        rows.append([name, rates, share, spread([a["seconds"] for a in found], 1), peaks])
    header = ["", "MB/s", "share of one thread, per core", "s", "peak MB"]
    table(f"{megabytes} MB of text; {repetitions} repetitions (median, low, high)", header, rows)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
        sys.exit()
    print(machine())
    megabytes, repetitions = map(int, [*sys.argv[1:], *["200", "3"][len(sys.argv) - 1 :]])
    main(megabytes, repetitions)
