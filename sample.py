"""Text from a trained model, token by token.

    python sample.py                                             # the newest run under out/
    python sample.py out/my --prompt "Once upon a time" --temperature 0.7 --num_samples 3
    echo "To be" | python sample.py out/shakespeare_char --prompt -
    python sample.py gpt2 --interactive
    python sample.py out/my --prompt "The" --explain page.html   # probabilities and attention

The text goes to standard output as it is drawn, everything else to standard error.
"""

import copy
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gptling.startup  # noqa: F401, has to come before PyTorch  # isort: skip
import torch
import tyro
from torch.nn.utils.rnn import pad_sequence

from gptling.cli import Empty, PositiveInt, UserError, check_numbers, launch, load_config
from gptling.decoding import WIDE, Sample, print_in_order, speed_up
from gptling.devices import cast_parameters, pick_device, pick_dtype
from gptling.explain import explain, write_page
from gptling.pretrained import find_checkpoint, load_model
from gptling.run import read_settings
from gptling.tokenizers import encode, load_tokenizer, start_token
from model import GPT, next_token_probs


@dataclass
class SampleConfig:
    model: tyro.conf.Positional[Empty[str]] = ""  # run, checkpoint or gpt2. Default: the newest run
    prompt: Empty[str] = ""  # text to continue. \n is a newline. - reads standard input
    prompts: Empty[str] = ""  # file with a prompt per line, continued as one batch
    interactive: bool = False  # ask for one prompt after another
    num_samples: PositiveInt = 1  # samples per prompt
    max_new_tokens: int = 500  # tokens to generate. An end-of-text token ends a text earlier
    temperature: float = 0.8  # lower values are more predictable. 0: greedy decoding
    top_k: int = 200  # sample from the k most likely tokens. 0: from all
    top_p: float = 1.0  # sample from the fewest tokens whose probabilities reach this sum. 1: all
    min_p: float = 0.0  # drop tokens less likely than this fraction of the most likely one
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # stop before this text. \n is a newline
    seed: int = 1337  # random seed. The same seed and settings give the same text
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"  # auto picks cuda or cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of the weights
    compile: bool = False  # use torch.compile on CUDA: slower to start, faster for long texts
    explain: Empty[str] = ""  # write a web page with token probabilities and attention

    def __post_init__(self):
        check_numbers(self)
        self.prompt = self.prompt.replace("\\n", "\n")
        self.stop = tuple(text.replace("\\n", "\n") for text in self.stop)
        next_token_probs(torch.zeros(1, 1), **self.filters())  # checks the values
        ways = [self.prompts, self.interactive, self.prompt or self.explain]
        if sum(map(bool, ways)) > 1:
            raise ValueError(
                "--prompts and --interactive: give one of them, without --prompt or --explain"
            )

    def filters(self) -> dict[str, float]:
        """Return the options of next_token_probs."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


# ---------------------------------------------------------------------------- prompts


def read_prompts(config: SampleConfig, checkpoint: Path) -> list[str]:
    """Return the prompts of --prompt, --prompts or standard input. Without any it is "def" for a
    run on the quick start's text, which is Python's source."""
    # The newline of `echo`, or the last one of a file, is not part of a prompt.
    try:
        if config.prompts:
            return Path(config.prompts).read_text("utf-8-sig").removesuffix("\n").split("\n")
        if config.prompt == "-":
            sys.stdin.reconfigure(encoding="utf-8-sig")
            return [sys.stdin.read().removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise UserError(f"{config.prompts or 'the prompt'} is not UTF-8: {error}") from None
    is_quickstart = read_settings(checkpoint.parent).get("dataset") == "quickstart"
    if is_quickstart and not (config.prompt or config.interactive):
        print("the quick start's text is Python, hence --prompt def", file=sys.stderr)
        return ["def"]
    return [config.prompt]


def make_samples(tokenizer, prompts: list[str], config: SampleConfig) -> list[Sample]:
    """Return num_samples texts for each prompt, of one token at least. A special token's name, such
    as <|endoftext|>, is that token. Raises UserError for an unknown character."""
    samples = []
    for prompt in prompts:
        ids = encode(tokenizer, prompt, tokenizer.special_tokens_set).tolist()
        ids = ids or [start_token(tokenizer)]  # end-of-text, if there is no prompt
        samples += [Sample(prompt, ids, config.stop) for _ in range(config.num_samples)]
    return samples


# ---------------------------------------------------------------------------- generation


def write_samples(model: GPT, tokenizer, samples: list[Sample], config: SampleConfig):
    """Complete all samples as one batch and print them in order. The first appears token by token.
    When it has ended, the one after it continues from there. Sample i of a prompt is drawn with
    seed + i, whatever else is in the batch."""
    prompts = [torch.tensor(sample.ids, device=config.device) for sample in samples]
    idx = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")  # (B, T)
    T = idx.size(1)
    if T > model.config.block_size:
        print(f"the model sees the last {model.config.block_size} of {T} tokens", file=sys.stderr)
    print(file=sys.stderr)
    mask = idx >= 0  # (B, T)
    seeds = [config.seed + i % config.num_samples for i in range(len(samples))]
    options = config.filters()
    options["padding_mask"] = None if mask.all() else mask
    options["generator"] = [torch.Generator(config.device).manual_seed(seed) for seed in seeds]

    for sample in samples[1:]:
        sample.unprinted = f"\n---\n{sample.unprinted}"
    start = time.perf_counter()
    print_in_order(samples)
    for tokens in model.generate(idx.clamp(min=0), config.max_new_tokens, **options):
        for sample, token in zip(samples, tokens.tolist(), strict=True):
            sample.add(token, tokenizer)
        print_in_order(samples)
        if all(sample.ended for sample in samples):
            break
    for sample in samples:
        sample.feed(b"", final=True)
    print_in_order(samples)
    print(flush=True)
    seconds = time.perf_counter() - start
    n = sum(len(sample.ids) - sample.n_prompt for sample in samples)
    print(f"\n{n:,} tokens in {seconds:.1f} s ({n / seconds:,.0f} tokens/s)", file=sys.stderr)


def converse(model: GPT, tokenizer, config: SampleConfig):
    """Complete one prompt after another from standard input, until an empty line."""
    print(
        "Type a prompt, then Enter. Ctrl-C ends a text, or quits here. So does an empty line.",
        file=sys.stderr,
    )
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        if not (prompt := sys.stdin.readline().rstrip("\r\n")):
            return
        try:
            write_samples(model, tokenizer, make_samples(tokenizer, [prompt], config), config)
        except UserError as error:  # a mistake ends one text, not the conversation
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print()
        config.seed += config.num_samples  # the same prompt gets another text


def main():
    words = sys.argv[1:3]
    if len(words) == 2 and not any(word.startswith("-") for word in words):
        raise UserError(f'a prompt needs its flag: sample.py {words[0]} --prompt "{words[1]}"')
    config, _ = load_config(SampleConfig, __doc__)
    config.device = pick_device(config.device)
    with redirect_stdout(sys.stderr):  # standard output has the text alone
        checkpoint = find_checkpoint(config.model)
        tokenizer = load_tokenizer(checkpoint)
        # An unknown character is reported before the model is loaded.
        samples = make_samples(tokenizer, read_prompts(config, checkpoint), config)
        model = load_model(GPT, checkpoint)
    original = copy.deepcopy(model) if config.explain else None  # a page is computed in float32
    dtype = pick_dtype(config.dtype, config.device, wide=model.config.n_embd >= WIDE)
    cast_parameters(model, getattr(torch, dtype)).to(config.device)
    n = sum(parameter.numel() for parameter in model.parameters())
    print(f"{checkpoint}: {n:,} parameters; {config.device}, {dtype}", file=sys.stderr)
    with torch.inference_mode():
        model = speed_up(model, config.compile, rows=len(samples))
        if config.interactive:
            return converse(model, tokenizer, config)
        write_samples(model, tokenizer, samples, config)
    if config.explain:
        data = explain(original, tokenizer, samples[0].ids, samples[0].n_prompt)
        write_page(Path(config.explain), {"model": str(checkpoint)} | data)
        print(f"{config.explain}: open it in a browser", file=sys.stderr)


if __name__ == "__main__":
    launch(main, needs_reader=True)
