"""Whether the code at hand, with a change of yours, keeps what a GPT promises. After each edit:

    python -m tests.try_model /tmp/try                         # a directory to work in
    python -m tests.try_model /tmp/try --n_kv_head=2           # with flags for train.py
    python -m tests.try_model /tmp/try -- --tokenizer=words    # and for prepare.py

A tiny model is trained for 16 steps. A run that is stopped at step 9, or resumed from the
evaluation at step 12, must end with the same weights, and two processes must have the same losses.
The model samples, and so does one of width 256, with faster layers and with --compile. Then no
token may see a later one. Text drawn with the cache, in chunks, past the window and beside other
prompts must be the text drawn without. The checkpoint's model_type must be right.
test_hacked_models.py runs the last checks for each patch of docs/experiments/, and all for some.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import prepare
import sample
import train
from gptling.gpt2_format import gpt2_logits, load
from model import GPT
from tests.test_model import generate, greedy_without_cache, padded

ROOT = Path(__file__).parent.parent
SIZES = "--block_size=32 --n_layer=2 --n_head=4 --n_embd=32 --batch_size=4 --dtype=float32"
STEPS = "--max_iters=16 --eval_interval=12 --log_interval=1 --curves=False"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))


def script(module, *arguments, code=0) -> str:
    """Run a script's main in this process; returns what it wrote to standard error."""
    sys.argv = [f"{module.__name__}.py", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as error:
        assert (module.main() or 0) == code
    return error.getvalue()


@contextlib.contextmanager
def promised(what: str):
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"broken promise: {what}. {error}") from None


def check_training(train_flags: list[str], prepare_flags: list[str]) -> Path:
    """A run that is stopped, or resumed from its evaluation, ends with the same weights, and a run
    of two processes has the same losses. Returns the last checkpoint."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    script(prepare, "text.txt", "--overwrite", *prepare_flags)
    shutil.rmtree("out", ignore_errors=True)
    flags = ["--dataset=text", *SIZES.split(), *STEPS.split(), *train_flags]
    script(train, *flags)

    rate = train.learning_rate

    def stop(step, config):
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(step, config)

    train.learning_rate = stop
    script(train, *flags, "--out_dir=out/stopped", code=128 + signal.SIGTERM)
    train.learning_rate = rate
    shutil.copytree("out/text/checkpoint-12", "out/evaluated/checkpoint-12")
    newest = Path("out/text/checkpoint-16")
    for run in ("out/stopped", "out/evaluated"):
        script(train, f"--out_dir={run}", "--resume")
        for name in ("config.json", "model.safetensors"):
            same = Path(run, "checkpoint-16", name).read_bytes() == (newest / name).read_bytes()
            assert same, f"{name} differs after a resumed run"

    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node=2".split()]
    command = [*torchrun, ROOT / "train.py", *flags, "--device=cpu", "--out_dir=out/two"]
    two = subprocess.run(command, capture_output=True, text=True)
    assert two.returncode == 0, two.stdout + two.stderr
    losses = zip(logged_losses("out/text"), logged_losses("out/two"), strict=True)
    for step, (one, other) in enumerate(losses):  # a term that is no mean over tokens may differ
        close = abs(one - other) < (1e-3 if step < 4 else 0.03) * one
        assert close, f"step {step + 1}: loss {one}, with two processes {other}"
    return newest


def logged_losses(run: str) -> list[float]:
    log = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in log if "loss" in entry]


def check_sampling(train_flags: list[str]):
    """Sample from the tiny model, and from a wide one after three steps, with faster layers."""
    Path("prompts.txt").write_text("on\n99 green bottles hanging\n", encoding="utf-8")
    for more in ([], ["--prompts=prompts.txt", "--num_samples=2"], ["--explain=page.html"]):
        said = script(sample, "out/text", "--max_new_tokens=80", *more)
        assert "other logits" not in said, said
    flags = ["--dataset=text", *SIZES.split(), *STEPS.split(), *train_flags]
    script(train, *flags, "--n_embd=256", "--max_iters=3", "--out_dir=out/wide")
    for more in ([], ["--prompts=prompts.txt"], ["--compile"]):
        said = script(sample, "out/wide", "--max_new_tokens=40", *more)
        assert "other logits" not in said, said
        assert more != ["--compile"] or "compiled in" in said


def check_name(model: GPT, checkpoint: Path) -> str:
    """A checkpoint of model_type gpt2 computes the formula of one, also for ids that were not tried
    when it was written. Returns its model_type, and why."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "gpt2":
        return f"model_type {config['model_type']}: {config['not_gpt2']}"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    idx = torch.randint(model.config.vocab_size, (3, model.config.block_size))
    expected = gpt2_logits(tensors, model.config, idx)
    with promised("a checkpoint of model_type gpt2 gives the logits of a GPT-2"):
        torch.testing.assert_close(model(idx)[0], expected, rtol=1e-3, atol=1e-3 * expected.std())
    return "model_type gpt2: other programs compute the same"


@torch.no_grad()
def check_logits(model: GPT, idx: torch.Tensor):
    T = idx.size(1)
    logits, vocab_size = model(idx)[0], model.config.vocab_size
    for n in range(1, T):
        later = torch.cat([idx[:, :n], (idx[:, n:] + 1) % vocab_size], dim=1)
        with promised(f"the first {n} tokens see no later one"):
            torch.testing.assert_close(model(later)[0][:, :n], logits[:, :n], **CLOSE)
    cache, parts = model.new_cache(), []
    for part in idx.split([5, 1, T - 7, 1], dim=1):
        parts.append(model(part, cache=cache)[0])
    with promised("with the cache, a few tokens at a time, logits are those without"):
        torch.testing.assert_close(torch.cat(parts, dim=1), logits, **CLOSE)
    with promised("a mask that hides nothing changes nothing"):
        all_true = torch.ones(idx.shape, dtype=torch.bool)
        torch.testing.assert_close(model(idx, padding_mask=all_true)[0], logits, **CLOSE)
    with promised("next_logits are the last ones of forward"):
        torch.testing.assert_close(model.next_logits(idx), logits[:, -1], **CLOSE)


def check_generation(model: GPT):
    block_size, vocab_size = model.config.block_size, model.config.vocab_size
    n = 5 * block_size // 2
    for length in (3, 2 * block_size):
        tokens = torch.randint(vocab_size, (length,)).tolist()
        cached = generate(model, [tokens], n, temperature=0)[0].tolist()
        assert cached == greedy_without_cache(model, tokens, n), f"a prompt of {length} tokens"
    lengths = (3, block_size - 7, 1, block_size)
    prompts = [torch.randint(vocab_size, (length,)).tolist() for length in lengths]
    idx, mask = padded(prompts)
    together = generate(model, idx, n, temperature=0, padding_mask=mask)
    for row, prompt in zip(together, prompts, strict=True):
        alone = generate(model, [prompt], n, temperature=0)[0]
        assert torch.equal(row, alone), f"a prompt of {len(prompt)} tokens beside others"


def main():
    if not sys.argv[1:]:
        sys.exit(__doc__)
    directory, *flags = sys.argv[1:]
    at = flags.index("--") if "--" in flags else len(flags)
    Path(directory).mkdir(parents=True, exist_ok=True)
    os.chdir(directory)
    checkpoint = check_training(flags[:at], flags[at + 1 :])
    check_sampling(flags[:at])
    model = load(GPT, checkpoint)
    name = check_name(model, checkpoint)
    model.restrict_to_tokens(range(model.config.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():  # so that its choices are clear
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (2, model.config.block_size))
    check_logits(model, idx)
    check_generation(model)
    print(f"\nall is as promised; the checkpoint says {name}")


if __name__ == "__main__":
    main()
