"""Whether the code at hand, with a change of yours, keeps what a GPT promises. After each edit:

    python -m tests.try_model /tmp/try                         # a directory to work in
    python -m tests.try_model /tmp/try --n_kv_head=2           # with flags for train.py
    python -m tests.try_model /tmp/try -- --tokenizer=words    # and for prepare.py

A tiny model is trained for 16 steps, goes on from the 12th to the same weights, and samples. Then
no token may see a later one, what --explain shows must be what is computed, and text that is drawn
with the cache, in chunks, past the window and beside other prompts must be what it is without.
test_experiments.py runs this for each patch of docs/experiments/.
"""

import os
import shutil
import sys
from pathlib import Path

import torch

import prepare
import sample
import train
from model import GPT, KVCache
from tests.test_model import generate, greedy_without_cache, padded

SIZES = "--block_size=32 --n_layer=2 --n_head=4 --n_embd=32 --batch_size=4 --dtype=float32"
STEPS = "--max_iters=16 --eval_interval=12 --curves=False"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TEXT = "".join(f"{n} green bottles hanging on the wall,\n" for n in range(200))


def script(module, *arguments):
    sys.argv = [f"{module.__name__}.py", *arguments]
    assert not module.main()


def check_scripts(train_flags: list[str], prepare_flags: list[str]) -> Path:
    """Train, resume and sample; returns the last checkpoint."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    script(prepare, "text.txt", "--overwrite", *prepare_flags)
    shutil.rmtree("uninterrupted", ignore_errors=True)
    flags = ["--dataset=text", *SIZES.split(), *STEPS.split(), *train_flags]
    script(train, *flags, "--overwrite")
    newest = Path("out/text/checkpoint-16")
    shutil.move(newest, "uninterrupted")
    script(train, "--out_dir=out/text", "--resume")
    for name in ("config.json", "model.safetensors"):
        same = (newest / name).read_bytes() == Path("uninterrupted", name).read_bytes()
        assert same, f"{name} is another after a resumed run"
    Path("prompts.txt").write_text("on\n99 green bottles hanging\n", encoding="utf-8")
    for more in ([], ["--prompts=prompts.txt", "--num_samples=2"], ["--explain=page.html"]):
        script(sample, "out/text", "--max_new_tokens=80", *more)
    return newest


@torch.no_grad()
def check_attention(model: GPT, idx: torch.Tensor):
    """attention_weights, which --explain shows, times V is what each layer computes."""
    x = model.wte(idx)
    for block in model.h:
        attn = block.attn
        _, _, v = attn.project(x)
        weights = attn.attention_weights(x)
        v = v.repeat_interleave(weights.size(1) // v.size(1), dim=1)  # (B, nh, S, hs)
        y = attn.c_proj((weights @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(attn(x), y, **CLOSE)
        all_true = torch.ones(idx.shape, dtype=torch.bool)
        torch.testing.assert_close(attn(x, padding_mask=all_true), y, **CLOSE)


@torch.no_grad()
def check_logits(model: GPT, idx: torch.Tensor):
    T = idx.size(1)
    logits, vocab_size = model(idx)[0], model.config.vocab_size
    later = torch.cat([idx[:, : T // 2], (idx[:, T // 2 :] + 1) % vocab_size], dim=1)
    early = slice(T // 2)
    torch.testing.assert_close(model(later)[0][:, early], logits[:, early], **CLOSE)
    cache, parts = [KVCache() for _ in model.h], []
    for part in idx.split([5, 1, T - 7, 1], dim=1):
        parts.append(model(part, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), logits, **CLOSE)


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
    model = GPT.from_pretrained(check_scripts(flags[:at], flags[at + 1 :]))
    model.drawable.fill_(True)
    with torch.no_grad():
        for parameter in model.parameters():  # so that its choices are clear
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (2, model.config.block_size))
    check_attention(model, idx)
    check_logits(model, idx)
    check_generation(model)
    print("\nall is as promised")


if __name__ == "__main__":
    main()
