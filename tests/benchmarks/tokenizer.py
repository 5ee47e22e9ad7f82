"""How well models of different tokenizers predict the same text after the same time.

    python tests/benchmarks/tokenizer.py                       # the quick start's text, 60 s each
    python tests/benchmarks/tokenizer.py 300 shakespeare.txt   # longer, on a text of your own

The quick start's model and recipe throughout, so that only the vocabulary differs: a small one
leaves more steps in the time, a large one sees more text in each sequence. The median step of a
first run tells how many fit; the second has that many. Evaluations are outside the time. gpt2 needs
tiktoken's vocabulary.
"""

import json
import statistics
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
}


def steps_of(directory: Path, steps: int, seed: int) -> tuple[list[float], dict]:
    """Train for `steps` in `directory`; returns (seconds of each step, the last evaluation)."""
    command = [sys.executable, ROOT / "train.py", "--dataset=text"]
    command += [f"--out_dir=out/{steps}", f"--max_iters={steps}"]
    command += [f"--eval_interval={steps}", "--log_interval=1", f"--seed={seed}", "--curves=False"]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    lines = (directory / "out" / str(steps) / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    seconds = [entry["ms"] / 1000 for entry in entries if "ms" in entry]
    return seconds, [entry for entry in entries if "bits_per_byte" in entry][-1]


def worker(case: dict):
    """Prepare the text with one tokenizer and train on it; prints the figures as JSON."""
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        command = [sys.executable, ROOT / "prepare.py", *case["sources"], *case["flags"]]
        subprocess.run(
            [*command, "--name=text"], cwd=directory, check=True, stdout=subprocess.DEVNULL
        )
        meta = json.loads((directory / "data" / "text" / "meta.json").read_text())
        seconds, _ = steps_of(directory, 30, case["seed"])
        steps = max(31, round(case["seconds"] / statistics.median(seconds)))
        seconds, last = steps_of(directory, steps, case["seed"])
        config = json.loads(
            (directory / "out" / str(steps) / f"checkpoint-{steps}" / "config.json").read_text()
        )
    parameters = config["n_embd"] * (config["vocab_size"] + config["n_positions"])
    parameters += 12 * config["n_layer"] * config["n_embd"] ** 2
    bytes_per_token = meta["val"]["bytes"] / meta["val"]["tokens"]
    print(
        json.dumps({
            "bits": last["bits_per_byte"], "loss": last["val_loss"], "steps": steps,
            "seconds": sum(seconds), "parameters": parameters, "bytes": bytes_per_token,
        })
    )  # fmt: skip


def main(seconds: float, sources: list[str], seeds: int = 3):
    results = {}
    for seed in range(1, seeds + 1):
        cases = {
            name: dict(flags=flags, sources=sources, seconds=seconds, seed=seed)
            for name, flags in KINDS.items()
        }
        for name, found in in_turns(__file__, cases, 1).items():
            results.setdefault(name, []).extend(found)
    rows = []
    for name, found in results.items():
        columns = {key: [one[key] for one in found] for key in found[0]}
        million = f"{columns['parameters'][0] / 1e6:.1f} M"
        row = [spread(columns["bits"], 3), spread(columns["loss"], 3), spread(columns["bytes"], 2)]
        rows.append([name, *row, spread(columns["steps"]), spread(columns["seconds"]), million])
    header = ["", "bits per byte", "nats per token", "bytes per token", "steps", "s of steps"]
    what = ", ".join(Path(source).name for source in sources) or "Python's language reference"
    title = f"{what}, {seconds:g} s each; {seeds} seeds (median, low, high)"
    table(title, [*header, "parameters"], rows)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
        sys.exit()
    print(machine())
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    main(seconds, [str(Path(source).resolve()) for source in sys.argv[2:]])
