"""How fast training is: time to a loss; tokens per second and memory.

    python tests/benchmarks/train.py                # both, about 25 minutes on two cores
    python tests/benchmarks/train.py loss           # the preset against the classic recipe
    python tests/benchmarks/train.py speed 2        # two repetitions instead of three

`loss` needs data/shakespeare (python prepare.py shakespeare --tokenizer=char). The rows of
transformers need pip install -e '.[bench]'.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, compare, dtypes, gpt2_of_transformers, main, peak_megabytes, spread, table

SIZES = {  # GPTConfig's fields, and the sequences of a step
    "0.8 M": (dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False), 24),
    "10.7 M": (dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False), 8),
    "124 M": (dict(vocab_size=50304), 2),  # padded as config/gpt2.toml says
}


def time_to_loss(repetitions: int):
    """Whole processes of both recipes, a seed a turn. The classic one evaluates as much as nanoGPT
    does, every 250 steps on 30,720 tokens; the losses here are those of --eval_only, afterwards."""
    classic = ["shakespeare_char_cpu_adamw", "--dtype=float32", "--eval_tokens=30720"]
    runs = {"classic: AdamW, float32": classic, "Muon, dtype=auto": ["shakespeare_char_cpu"]}
    results = {name: [] for name in runs}
    train = [sys.executable, ROOT / "train.py"]
    with tempfile.TemporaryDirectory() as out:
        for seed in range(1, repetitions + 1):
            for name, (preset, *flags) in runs.items():
                where = Path(out) / f"{preset}-{seed}"
                command = [*train, ROOT / "config" / f"{preset}.toml", *flags]
                command += [f"--seed={seed}", f"--out_dir={where}", "--curves=False"]
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seconds = time.perf_counter() - start
                command = [*train, "--eval_only", f"--init_from={where}", "--dataset=shakespeare"]
                command += [flag for flag in flags if "dtype" in flag]
                text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                loss = float(re.search(r"([\d.]+) nats", text)[1])
                results[name].append((loss, seconds))
                print(f"seed {seed}, {name}: {loss:.4f}, {seconds:.1f} s", file=sys.stderr)
    rows = []
    for name, found in results.items():
        losses, seconds = map(list, zip(*found, strict=True))
        rows.append([name, spread(losses, 4), spread(seconds, 1)])
    ratios = [a[1] / b[1] for a, b in zip(*results.values(), strict=True)]
    rows.append(["ratio", "", spread(ratios, 1)])
    header = ["0.8 M, tiny Shakespeare", "validation loss", "whole process, s"]
    table(f"Time to loss, {repetitions} seeds (median, low, high)", header, rows)


def worker(case: dict):
    """Some steps of one kind; prints the median milliseconds and the peak memory as JSON."""
    import torch

    from gptling.devices import tune_allocator, use_cpu_kernels
    from gptling.processes import recompute_activations
    from gptling.schedule import fill_in
    from gptling.settings import SMALL
    from model import GPT, GPTConfig
    from train import TrainConfig, configure_optimizers

    tune_allocator(sharded=False)
    fields, batch_size = SIZES[case["size"]]
    config = GPTConfig(**fields)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if case["who"] == "transformers":
        model = gpt2_of_transformers(config).to(device).train()
        optimizers = [torch.optim.AdamW(model.parameters(), fused=True)]
    else:
        model = GPT(config).train().to(device)
        if device == "cpu":
            use_cpu_kernels(model)
        if case.get("recompute"):
            recompute_activations(model)
        optimizer = case.get("optimizer", "adamw")
        train_config = TrainConfig(optimizer=optimizer, dtype=case["dtype"], learning_rate=0.01)
        fill_in(train_config, SMALL)
        optimizers = configure_optimizers(model, train_config, case["dtype"])
    compiled = torch.compile(model) if device == "cuda" else model

    def step():
        idx = torch.randint(config.vocab_size, (batch_size, config.block_size + 1), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=case["dtype"] == "bfloat16"):
            if case["who"] == "transformers":
                loss = compiled(input_ids=idx[:, :-1], labels=idx[:, :-1]).loss
            else:
                loss = compiled(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss.item()

    times = []
    while len(times) < 5 or (sum(times[2:]) < 10 and len(times) < 102):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[2:])  # the first two warm up
    tokens = batch_size * config.block_size
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else peak_megabytes()
    print(json.dumps({"ms": 1000 * seconds, "tokens": tokens / seconds, "mb": peak}))


def speed(repetitions: int):
    for size in SIZES:
        cases = {
            f"{who}, {dtype}": dict(who=who, size=size, dtype=dtype)
            for dtype in dtypes()
            for who in ("gptling", "transformers")
        }
        fastest = dtypes()[-1]
        ours = dict(who="gptling", size=size, dtype=fastest)
        cases[f"gptling, Muon, {fastest}"] = ours | dict(optimizer="muon")
        if size == "124 M":
            cases[f"gptling, {fastest}, --recompute"] = ours | dict(recompute=True)
        columns = {"ms a step": ("ms", 0), "tokens/s": ("tokens", 0)}
        columns |= {"against gptling, float32": ("tokens", 2), "peak MB": ("mb", 0)}
        fields, batch_size = SIZES[size]
        title = f"{size} parameters, {batch_size} x {fields.get('block_size', 1024)} tokens a step"
        compare(__file__, title, cases, repetitions, columns)


if __name__ == "__main__":
    main(worker, {"loss": time_to_loss, "speed": speed})
