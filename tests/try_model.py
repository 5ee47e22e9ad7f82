"""Whether the code at hand, with a change of yours, keeps what a GPT promises. After each edit:

    python -m tests.try_model /tmp/try                         # a directory to work in
    python -m tests.try_model /tmp/try --n_kv_head=2           # with flags for train.py
    python -m tests.try_model /tmp/try -- --tokenizer=words    # and for prepare.py
    python -m tests.try_model --device=mps                     # only the losses, beside a CPU's

A tiny model is trained for 16 steps. A run that is stopped at steps 9 and 12 and resumed must end
with the same weights, and two processes must have the same losses. The validation loss must be the
cross-entropy of the logits. The model samples, and so does one of width 256 with faster layers. No
token may see a later one. Text drawn with the cache, past the window and beside other prompts must
be the text drawn without.
"""

import contextlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import prepare
import sample
import train
from gptling.gpt2_format import load
from model import GPT

ROOT = Path(__file__).parent.parent
FLAGS = (
    "--dataset=text --block_size=32 --n_layer=2 --n_head=4 --n_embd=32 --batch_size=2 "
    "--gradient_accumulation_steps=2 --dtype=float32 --warmup_iters=10 --max_iters=16 "
    "--eval_interval=6 --log_interval=1 --curves=False"
).split()
TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))


def script(module, *arguments, code=0) -> str:
    """Run a script's main in this process; returns what it wrote to standard error."""
    sys.argv = [f"{module.__name__}.py", *arguments]
    printed, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(error):
        returned = module.main() or 0
    print(printed.getvalue(), end="")
    assert returned == code, error.getvalue()
    assert "not the cross-entropy" not in printed.getvalue()
    return error.getvalue()


def check_training(flags: list[str], prepare_flags: list[str]) -> Path:
    """A run that is stopped and resumed ends with the same weights, and a run of two processes has
    the same losses. Returns the last checkpoint."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    script(prepare, "text.txt", "--overwrite", *prepare_flags)
    shutil.rmtree("out", ignore_errors=True)
    script(train, *flags)
    rate = train.learning_rate

    stops = {8, 11}  # step 12 ends with an evaluation

    def stop(step, max_iters, config):
        if step in stops:
            stops.remove(step)
            signal.raise_signal(signal.SIGTERM)
        return rate(step, max_iters, config)

    train.learning_rate = stop
    stopped = ("--out_dir=out/stopped", "--resume")
    script(train, *flags, stopped[0], code=128 + signal.SIGTERM)
    script(train, *stopped, code=128 + signal.SIGTERM)
    train.learning_rate = rate
    script(train, *stopped)
    newest = Path("out/text/checkpoint-16")
    for name in ("config.json", "model.safetensors", "metrics.json"):
        resumed = Path("out/stopped/checkpoint-16", name).read_bytes()
        assert resumed == (newest / name).read_bytes(), f"{name} differs after a resumed run"

    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node=2".split()]
    command = [*torchrun, ROOT / "train.py", *flags, "--device=cpu", "--out_dir=out/two"]
    subprocess.run(command, check=True)
    for one, other in zip(losses("out/text"), losses("out/two"), strict=True):
        assert abs(one - other) < 1e-3 * one, f"loss {one}, with two processes {other}"
    return newest


def compare_devices(flags: list[str]):
    """Print the losses on a CPU beside those of the --device in flags, to paste into a report."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    script(prepare, "text.txt", "--overwrite")
    for run, device in (("out/cpu", ["--device=cpu"]), ("out/other", flags)):
        script(train, *FLAGS, *device, f"--out_dir={run}", "--overwrite")
    print(f"\nPyTorch {torch.__version__}, {platform.platform()}\nstep  cpu      {' '.join(flags)}")
    pairs = zip(losses("out/cpu"), losses("out/other"), strict=True)
    for step, (cpu, other) in enumerate(pairs, start=1):
        print(f"{step:4}  {cpu:.5f}  {other:.5f}")


def losses(run: str) -> list[float]:
    log = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in log if "loss" in entry]


def check_sampling(flags: list[str]):
    """Sample from the tiny model, and from a wide one after three steps, with faster layers."""
    Path("prompts.txt").write_text("on\n99 green bottles hanging\n", encoding="utf-8")
    batch = ["--prompts=prompts.txt", "--num_samples=2"]
    for more in ([], batch, ["--explain=page.html"]):
        said = script(sample, "out/text", "--max_new_tokens=80", *more)
        assert "slower decoding" not in said, said
    script(train, *flags, "--n_embd=256", "--max_iters=3", "--out_dir=out/wide")
    said = script(sample, "out/wide", "--max_new_tokens=40")
    assert "slower decoding" not in said, said


def check_logits(model: GPT, idx: torch.Tensor):
    """A token sees no later one, and the cache, in chunks, changes nothing."""

    def check(actual, expected, promise):
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4), f"broken: {promise}"

    T, vocab_size, logits = idx.size(1), model.config.vocab_size, model(idx)[0]
    for n in range(1, T):
        later = torch.cat([idx[:, :n], (idx[:, n:] + 1) % vocab_size], dim=1)
        check(model(later)[0][:, :n], logits[:, :n], f"the first {n} tokens see no later one")
    cache = model.new_cache()
    parts = [model(part, cache=cache)[0] for part in idx.split([5, 1, T - 7, 1], dim=1)]
    check(torch.cat(parts, dim=1), logits, "a few tokens at a time give the logits of all at once")
    all_true = torch.ones(idx.shape, dtype=torch.bool)
    check(model(idx, padding_mask=all_true)[0], logits, "a mask that hides nothing changes nothing")
    check(model.next_logits(idx), logits[:, -1], "next_logits are the last ones of forward")


def generate(model: GPT, idx, n: int, **options) -> torch.Tensor:
    """Return the drawn tokens, (B, n)."""
    return torch.stack(list(model.generate(torch.as_tensor(idx), n, **options)), dim=1)


@torch.no_grad()
def greedy_without_cache(model: GPT, tokens: list[int], n: int) -> list[int]:
    """Return what generate draws at temperature 0, each token by a forward pass of its own."""
    block_size = model.config.block_size
    window, drawn = tokens[-block_size:], []
    for _ in range(n):
        if len(window) > block_size:
            window = window[-max(1, block_size // 2) :]
        drawn.append(model(torch.tensor([window]))[0][0, -1].argmax().item())
        window = [*window, drawn[-1]]
    return drawn


def padded(prompts: list[list[int]]):
    """Return the prompts as a batch with padding on the left, and its mask."""
    T = max(map(len, prompts))
    idx = torch.tensor([[0] * (T - len(p)) + p for p in prompts])
    mask = torch.tensor([[False] * (T - len(p)) + [True] * len(p) for p in prompts])
    return idx, mask


def check_generation(model: GPT):
    """Text with the cache, past the window and beside other prompts is the text without."""
    block_size, n = model.config.block_size, 5 * model.config.block_size // 2
    lengths = (3, block_size - 7, 1, block_size, 2 * block_size)
    prompts = [torch.randint(model.config.vocab_size, (length,)).tolist() for length in lengths]
    alone = [generate(model, [prompt], n, temperature=0)[0].tolist() for prompt in prompts]
    for i in (0, -1):
        expected = greedy_without_cache(model, prompts[i], n)
        assert alone[i] == expected, f"broken: the cache, after a prompt of {lengths[i]} tokens"
    idx, mask = padded(prompts[:-1])
    together = generate(model, idx, n, temperature=0, padding_mask=mask).tolist()
    assert together == alone[:-1], "broken: a prompt beside others gives the text it gives alone"


def main():
    if not sys.argv[1:]:
        sys.exit(__doc__)
    if sys.argv[1].startswith("--device"):
        with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
            return compare_devices(sys.argv[1:])
    directory, *flags = sys.argv[1:]
    at = flags.index("--") if "--" in flags else len(flags)
    Path(directory).mkdir(parents=True, exist_ok=True)
    os.chdir(directory)
    train_flags = [*FLAGS, *flags[:at]]
    checkpoint = check_training(train_flags, flags[at + 1 :])
    check_sampling(train_flags)
    model = load(GPT, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    model.restrict_to_tokens(range(model.config.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():  # so that its choices are clear
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (2, model.config.block_size))
    check_logits(model, idx)
    check_generation(model)
    print(f"\nall is as promised; the checkpoint says model_type {config['model_type']}")


if __name__ == "__main__":
    main()
