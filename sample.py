"""Text from a trained model, token by token.

    python sample.py                                             # the newest run under out/
    python sample.py out/my --prompt "Once upon a time" --temperature 0.7 --num_samples 3
    echo "To be" | python sample.py out/shakespeare_char --prompt -
    python sample.py gpt2 --interactive --compile
    python sample.py out/my --prompt "The" --explain page.html   # probabilities and attention

The text goes to standard output as it is drawn, everything else to standard error.
"""

import copy
import sys
import time
import tomllib
from contextlib import redirect_stdout
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
    run: tyro.conf.Positional[str] = ""  # a run, a checkpoint, or gpt2; default: the newest run
    prompt: str = ""  # text to continue; \n is a newline; - reads it from standard input
    prompts: str = ""  # file with one prompt per line, completed as one batch
    interactive: bool = False  # ask for one prompt after another
    num_samples: PositiveInt = 1  # samples per prompt
    max_new_tokens: int = 500  # tokens to generate; an end-of-text token stops earlier
    temperature: float = 0.8  # lower is more predictable; 0 is greedy decoding
    top_k: int = 200  # sample from the k most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the fewest tokens whose probabilities reach this sum; 1: all
    min_p: float = 0.0  # drop tokens less likely than this fraction of the most likely one
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # stop before this text; \n is a newline
    seed: int = 1337  # random seed; same seed and settings, same text
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto picks cuda, mps or cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of the weights
    compile: bool = False  # use torch.compile: slow to start, faster for long texts
    explain: str = ""  # write a web page with token probabilities and attention

    def __post_init__(self):
        check_numbers(self)
        self.prompt, *stop = (text.replace("\\n", "\n") for text in (self.prompt, *self.stop))
        self.stop = tuple(stop)
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


def read_prompts(config: SampleConfig, checkpoint: Path) -> list[str]:
    """Return the prompts of --prompt, --prompts or standard input. Without any it is "def" for a
    run on the quick start's text, which is Python's source. Raises UserError for an empty file."""
    if config.prompts:
        text = Path(config.prompts).read_text(encoding="utf-8-sig", errors="surrogateescape")
        if not text:
            raise UserError(f"--prompts {config.prompts}: no line in it")
        return text.removesuffix("\n").split("\n")
    if config.prompt == "-":  # bytes that are not UTF-8 are named when the prompt is encoded
        text = sys.stdin.buffer.read().decode("utf-8-sig", errors="surrogateescape")
        return [text.removesuffix("\n").removesuffix("\r")]  # echo's newline is not meant
    settings = checkpoint.parent / "config.toml"
    if not (config.prompt or config.interactive) and settings.is_file():
        if tomllib.loads(settings.read_text(encoding="utf-8"))["dataset"] == "quickstart":
            print("the quick start's text is Python's source: --prompt def", file=sys.stderr)
            return ["def"]
    return [config.prompt]


def make_samples(tokenizer, prompts: list[str], config: SampleConfig) -> list[Sample]:
    """Return num_samples texts for each prompt, of one token at least. Raises UserError for an
    unknown character."""
    samples = []
    for number, prompt in enumerate(prompts, start=1):
        what = f"{config.prompts}, prompt {number}" if config.prompts else "the prompt"
        ids = encode(tokenizer, prompt, what).tolist() or [start_token(tokenizer)]
        samples += [Sample(prompt, ids, config.stop) for _ in range(config.num_samples)]
    return samples


def pad_left(rows: list[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return idx (B, T) and padding_mask (B, T), True for a token; None for equal lengths."""
    T = max(map(len, rows))
    idx = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[False] * (T - len(row)) + [True] * len(row) for row in rows])
    return idx, None if mask.all() else mask.to(device)


# ---------------------------------------------------------------------------- generation


def write_samples(model: GPT, tokenizer, samples: list[Sample], config: SampleConfig):
    """Complete all samples as one batch and print them in order. The first appears token by token;
    the one after it continues from where it is when the first has ended. Sample i of a prompt is
    drawn with seed + i, whatever else is in the batch."""
    block_size, longest = model.config.block_size, max(sample.n_prompt for sample in samples)
    if longest > block_size:
        print(f"the model sees the last {block_size} of {longest} tokens", file=sys.stderr)
    print(file=sys.stderr)
    seeds = [config.seed + i % config.num_samples for i in range(len(samples))]
    generators = [torch.Generator(config.device).manual_seed(seed) for seed in seeds]
    idx, mask = pad_left([sample.ids for sample in samples], config.device)
    options = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    options |= {"padding_mask": mask, "generator": generators}
    waiting, start = list(samples), time.perf_counter()
    print_in_order(waiting)
    try:
        for tokens in model.generate(idx, config.max_new_tokens, **options):
            for sample, token in zip(samples, tokens.tolist(), strict=True):
                sample.add(token, tokenizer)
            print_in_order(waiting)
            if not waiting:
                break
    except ValueError as error:  # the logits contain NaN or infinity
        raise UserError(f"{error}: its weights are damaged, or too large for --dtype") from None
    for sample in samples:
        sample.feed(b"", final=True)
    print_in_order(waiting)
    n, seconds = sum(len(s.ids) - s.n_prompt for s in samples), time.perf_counter() - start
    print(f"\n{n:,} tokens in {seconds:.1f} s ({n / seconds:,.0f} tokens/s)", file=sys.stderr)


def converse(model: GPT, tokenizer, config: SampleConfig):
    """Complete one prompt after another from standard input, until an empty line."""
    print("a prompt, then Enter; Ctrl-C stops a text, an empty line quits", file=sys.stderr)
    print("> ", end="", file=sys.stderr, flush=True)
    while prompt := sys.stdin.readline().rstrip("\r\n"):
        try:
            write_samples(model, tokenizer, make_samples(tokenizer, [prompt], config), config)
        except UserError as error:  # ends this text, not the conversation
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print()
        config.seed += config.num_samples  # the same prompt gets another text
        print("> ", end="", file=sys.stderr, flush=True)


def main():
    config, *_ = load(SampleConfig, __doc__)
    config.device = pick_device(config.device)
    checkpoint = find_checkpoint(config.run)
    tokenizer = load_tokenizer(checkpoint)
    # An unknown character is reported before the model is loaded.
    samples = make_samples(tokenizer, read_prompts(config, checkpoint), config)
    with redirect_stdout(sys.stderr):  # which has the text alone
        model = load_model(GPT, checkpoint)
    original = copy.deepcopy(model) if config.explain else None  # in float32
    wide = model.config.n_embd >= WIDE
    dtype = pick_dtype(config.dtype, config.device, wide, only_stored=config.compile)
    cast_parameters(model, getattr(torch, dtype)).to(config.device)
    n = sum(parameter.numel() for parameter in model.parameters())
    print(f"{checkpoint}: {n:,} parameters; {config.device}, {dtype}", file=sys.stderr)
    with torch.inference_mode():  # a tenth faster than no_grad for a small model
        padded = len({sample.n_prompt for sample in samples}) > 1
        model = speed_up(model, config.compile, rows=len(samples), padded=padded)
        if config.interactive:
            return converse(model, tokenizer, config)
        write_samples(model, tokenizer, samples, config)
    if config.explain:
        data = explain(original, tokenizer, samples[0].ids, samples[0].n_prompt)
        write_page(Path(config.explain), {"model": str(checkpoint)} | data)
        print(f"{config.explain}: open it in a browser", file=sys.stderr)


if __name__ == "__main__":
    run(main)
