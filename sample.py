"""Text from a trained model, token by token.

    python sample.py                                             # the newest run under out/
    python sample.py out/quickstart --prompt "The import statement" --temperature 0.8 --top_k 200
    echo "To be" | python sample.py out/shakespeare_char --prompt -
    python sample.py gpt2 --interactive --compile
    python sample.py out/mine --prompt "The" --explain page.html  # probabilities and attention

The text goes to standard output as it is drawn, everything else to standard error.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gptling.threads  # noqa: F401, has to come before PyTorch  # isort: skip
import torch
import tyro

from gptling.cli import PositiveInt, UserError, check_numbers, load, run
from gptling.decoding import WIDE, speed_up
from gptling.devices import cast_parameters, pick_device, pick_dtype
from gptling.explain import explain, write_page
from gptling.pretrained import find_checkpoint, load_model
from gptling.streaming import Sample, print_in_order
from gptling.tokenizers import encode, load_tokenizer, start_token
from model import GPT


@dataclass
class SampleConfig:
    run: tyro.conf.Positional[str] = ""  # a run, a checkpoint or gpt2; otherwise the newest run
    prompt: str = ""  # how the text begins; - reads it from standard input
    prompts: str = ""  # a file with a prompt on each line, all decoded as one batch
    interactive: bool = False  # complete one prompt after another, typed line by line
    num_samples: PositiveInt = 1  # texts for each prompt
    max_new_tokens: int = 500  # how many tokens to draw; end-of-text ends it before
    temperature: float = 0.8  # below 1 the likely gets likelier; 0 always takes the likeliest token
    top_k: int = 200  # draw from the k likeliest tokens only; 0 for all
    top_p: float = 1.0  # draw from the fewest tokens with this probability in sum; 1 for all
    min_p: float = 0.0  # leave out tokens below this share of the likeliest one's probability
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # end before this text; \n is a newline
    seed: int = 1337  # the same seed and settings give the same text
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the weights
    compile: bool = False  # torch.compile; pays for long texts, and says what it took
    explain: str = ""  # write a page.html with the probabilities and the attention of each token

    def __post_init__(self):
        check_numbers(self)
        self.stop = tuple(text.replace("\\n", "\n") for text in self.stop)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p={self.top_p}: must be above 0 and at most 1")
        if self.min_p > 1:
            raise ValueError(f"--min_p={self.min_p}: must be at most 1")
        if "" in self.stop:
            raise ValueError("--stop '': give a text that is not empty")
        if bool(self.prompt) + bool(self.prompts) + self.interactive > 1:
            raise ValueError("--prompt, --prompts and --interactive: give only one of them")
        if self.explain and (self.prompts or self.interactive or self.num_samples > 1):
            raise ValueError("--explain: not with --prompts, --interactive or --num_samples")
        if self.explain and Path(self.explain).suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--explain {self.explain}: give a name that ends in .html")


# ---------------------------------------------------------------------------- prompts


def read_prompts(config: SampleConfig) -> list[str]:
    """The prompts of --prompt, --prompts or standard input. Raises UserError for no text."""
    if config.prompt == "-":  # bytes that are not UTF-8 are named when the prompt is encoded
        text = sys.stdin.buffer.read().decode("utf-8-sig", errors="surrogateescape")
        return [text.removesuffix("\n").removesuffix("\r")]  # echo's newline is not meant
    if not config.prompts:
        return [config.prompt]
    try:
        text = Path(config.prompts).read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"--prompts {config.prompts}: cannot be read: {error}") from None
    if not text:
        raise UserError(f"--prompts {config.prompts}: no line in it")
    return text.removesuffix("\n").split("\n")


def encode_prompts(tokenizer, prompts: list[str], config: SampleConfig) -> list[list[int]]:
    """The token ids of each prompt, one at least. Raises UserError for an unknown character."""
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        what = f"{config.prompts}, prompt {number}" if config.prompts else "the prompt"
        rows.append(encode(tokenizer, prompt, what).tolist() or [start_token(tokenizer)])
    return rows


def pad_left(rows: list[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts as idx (B, T) and padding_mask (B, T), True for a token; None if all are as long."""
    T = max(map(len, rows))
    idx = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[False] * (T - len(row)) + [True] * len(row) for row in rows])
    return idx, None if mask.all() else mask.to(device)


# ---------------------------------------------------------------------------- generation


@torch.inference_mode()  # a tenth faster than no_grad for a small model
def write_samples(model: GPT, tokenizer, prompts: list[str], config: SampleConfig) -> list[Sample]:
    """Complete every prompt num_samples times, as one batch; print the texts in order, return them.

    The first text appears token by token; the others go on from where they are when the one before
    has ended. Sample i of a prompt is drawn with seed + i, whatever stands beside it in the batch.
    """
    block_size, vocab_size = model.config.block_size, model.config.vocab_size
    samples, generators = [], []
    for prompt, ids in zip(prompts, encode_prompts(tokenizer, prompts, config), strict=True):
        if max(ids) >= vocab_size:
            raise UserError(f"the prompt has token {max(ids)}, but the model only {vocab_size}")
        if len(ids) > block_size:
            print(f"the model sees the last {block_size} of {len(ids)} tokens", file=sys.stderr)
        for i in range(config.num_samples):
            samples.append(Sample(prompt, ids, config.stop))
            generators.append(torch.Generator(config.device).manual_seed(config.seed + i))
    current = print_in_order(samples, 0)
    idx, mask = pad_left([sample.ids for sample in samples], config.device)
    options = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    options |= {"padding_mask": mask, "generator": generators}
    try:
        for tokens in model.generate(idx, config.max_new_tokens, **options):
            for sample, token in zip(samples, tokens.tolist(), strict=True):
                sample.add(token, tokenizer)
            current = print_in_order(samples, current)
            if all(sample.ended for sample in samples):
                break
    except ValueError as error:  # the logits contain NaN or infinity
        raise UserError(f"{error}: its weights are damaged, or too large for --dtype") from None
    for sample in samples:
        sample.feed(b"", final=True)
    print_in_order(samples, current)
    print(flush=True)
    return samples


def main():
    config, *_ = load(SampleConfig, __doc__)
    config.device = pick_device(config.device)
    prompts = [] if config.interactive else read_prompts(config)
    checkpoint = find_checkpoint(config.run)
    tokenizer = load_tokenizer(checkpoint)
    encode_prompts(tokenizer, prompts, config)  # what it lacks is told before the model is loaded
    model = load_model(GPT, checkpoint)
    original = copy.deepcopy(model) if config.explain else None  # in float32
    wide = model.config.n_embd >= WIDE
    dtype = pick_dtype(config.dtype, config.device, wide, only_stored=config.compile)
    cast_parameters(model, getattr(torch, dtype)).to(config.device)
    n = sum(parameter.numel() for parameter in model.parameters())
    print(f"{checkpoint}: {n:,} parameters; {config.device}, {dtype}", file=sys.stderr)
    model = speed_up(model, config.compile)  # which lets go of this one after its first steps
    if not config.interactive:
        first, *_ = write_samples(model, tokenizer, prompts, config)
        if config.explain:
            data = explain(original, tokenizer, first.ids, first.n_prompt)
            write_page(Path(config.explain), {"model": str(checkpoint)} | data)
            print(f"{config.explain}: open it in a browser", file=sys.stderr)
        return
    print("a prompt, then Enter; Ctrl-C stops a text, an empty line quits", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        prompt = sys.stdin.readline().removeprefix("\ufeff").rstrip("\r\n")
        if not prompt:
            return
        try:
            write_samples(model, tokenizer, [prompt], config)
        except (UserError, KeyboardInterrupt) as error:  # ends this text, not the conversation
            print(error, file=sys.stderr if str(error) else sys.stdout)


if __name__ == "__main__":
    run(main)
