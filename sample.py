"""Text from a trained model, token by token.

    python sample.py                                             # the newest run under out/
    python sample.py out/quickstart --prompt "The import statement" --temperature 0.8 --top_k 200
    echo "To be" | python sample.py out/shakespeare_char --prompt -
    python sample.py out/mine --prompts questions.txt --stop "\\n"
    python sample.py gpt2 --interactive --compile
    python sample.py out/mine --prompt "The" --explain page.html  # probabilities and attention

The text goes to standard output as it is drawn, everything else to standard error.
"""

import base64
import codecs
import copy
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from config import UserError, best_checkpoint, list_checkpoints, load, run
from model import GPT, HUB_NAMES, checkpoint_directory, pick_device, pick_dtype
from prepare import encode, load_tokenizer, start_token

WIDE = 256  # n_embd from which bfloat16 and oneDNN pay; narrower models stay in the cache
PAGE_TOKENS = 256  # on a page of --explain at most
PAGE_WEIGHTS = 5_000_000  # of attention, 2 bytes each: deep models show fewer tokens
TEMPLATE = Path(__file__).parent / "docs" / "explain_template.html"
SYMBOLS = {" ": "·", "\n": "↵", "\t": "→"}


@dataclass
class SampleConfig:
    run: str = ""  # a run (its best checkpoint), a checkpoint, or gpt2; otherwise the newest run
    prompt: str = ""  # how the text begins; - reads it from standard input
    prompts: str = ""  # a file with a prompt on each line, all decoded as one batch
    interactive: bool = False  # complete one prompt after another, typed line by line
    num_samples: int = 1  # texts for each prompt
    max_new_tokens: int = 500  # how many tokens to draw; end-of-text ends it before
    temperature: float = 0.8  # below 1 the likely gets likelier; 0 always takes the likeliest token
    top_k: int = 200  # draw from the k likeliest tokens only; 0 for all
    top_p: float = 1.0  # draw from the fewest tokens with this probability in sum; 1 for all
    min_p: float = 0.0  # leave out tokens below this share of the likeliest one's probability
    stop: tuple[str, ...] = ()  # end before this text; may be given several times; \n is a newline
    seed: int = 1337  # the same seed and settings give the same text
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the weights
    compile: bool = False  # torch.compile; pays for long texts, and says what it took
    explain: str = ""  # write a page.html with the probabilities and the attention of each token

    def __post_init__(self):
        for name, allowed, rule in (
            ("temperature", self.temperature >= 0, "must not be negative (0 is greedy)"),
            ("top_k", self.top_k >= 0, "must not be negative (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "must be from 0 to 1"),
            ("max_new_tokens", self.max_new_tokens >= 0, "must not be negative"),
            ("num_samples", 1 <= self.num_samples <= 10_000, "must be from 1 to 10,000"),
            ("seed", 0 <= self.seed < 1 << 63, "must be from 0 to 2**63 - 1"),
        ):
            if not allowed:
                raise UserError(f"--{name}={getattr(self, name)}: {rule}")
        if bool(self.prompt) + bool(self.prompts) + self.interactive > 1:
            raise UserError("--prompt, --prompts and --interactive exclude each other: give one")
        if self.explain and (self.prompts or self.interactive or self.num_samples > 1):
            others = "--prompts, --interactive or --num_samples"
            raise UserError(f"--explain {self.explain}: for one text, so not with {others}")
        if self.explain and Path(self.explain).suffix.lower() not in (".html", ".htm"):
            raise UserError(f"--explain {self.explain}: give a name that ends in .html")
        self.stop = tuple(text.replace("\\n", "\n") for text in self.stop)
        if "" in self.stop:
            raise UserError("--stop '': give a text that is not empty")


# ---------------------------------------------------------------------------- pure helpers


def find_runs() -> list[Path]:
    """The directories under out/ with a checkpoint in them."""
    return sorted(run for run in Path("out").glob("*") if list_checkpoints(run))


def find_checkpoint(path: str) -> Path:
    """The checkpoint that `path` means: itself, or a run's with the lowest validation loss; without
    a path, that of the newest run under out/. Raises UserError where there is none."""
    if not path:
        runs = find_runs()
        if not runs:
            raise UserError("no run under out/: python train.py makes one, or name a checkpoint")
        path = max(runs, key=os.path.getmtime)
    for _ in range(10):  # a training may add and delete checkpoints while they are looked for
        best = best_checkpoint(path)
        if best:
            return best
    path = Path(path)
    if os.path.isfile(path):
        raise UserError(f"{path}: a file; name a run or a checkpoint directory")
    try:
        return checkpoint_directory(path)
    except FileNotFoundError as error:
        message = str(error).splitlines()[0]
        if not re.fullmatch(HUB_NAMES, path.as_posix()):
            names = ", ".join(run.as_posix() for run in find_runs()[:9])
            message += f"; runs here: {names}" if names else "; python train.py makes one"
        raise UserError(message) from None


def open_checkpoint(config: SampleConfig, prompts: list[str]):
    """The checkpoint that config.run means, its tokenizer and its model: (path, encoding, model).

    Raises UserError; for a character of the prompts before the model is read. A training that goes
    on may delete the checkpoint before it is open: then the next one is taken."""
    while True:
        checkpoint = find_checkpoint(config.run)
        try:
            encoding = load_tokenizer(checkpoint)
            list(encode_prompts(encoding, prompts, config))
            return checkpoint, encoding, GPT.from_pretrained(checkpoint)
        except (UserError, OSError, ValueError) as error:
            if checkpoint.exists():
                raise UserError(str(error)) from None


class TextStream:
    """Tokens in, text out: only whole UTF-8 characters, and nothing from a stop text on.

    >>> stream = TextStream(stop=["END"])
    >>> stream.feed(b"caf\\xc3"), stream.feed(b"\\xa9 E"), stream.feed(b"ND!"), stream.stopped
    ('caf', 'é ', '', True)
    """

    def __init__(self, stop=()):
        self.stop, self.stopped = stop, False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # text that a stop text may begin with

    def feed(self, raw: bytes, final: bool = False) -> str:
        """The text that is certain after these bytes; with `final`, all that is left."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(raw, final)
        ends = [text.find(stop) for stop in self.stop if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = 0
        if not final:
            prefixes = (stop[:n] for stop in self.stop for n in range(1, len(stop)))
            held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def pad_left(rows: list[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts as idx (B, T) and padding_mask (B, T), True for a token; None if all are as long."""
    T = max(map(len, rows))
    idx = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=device)
    if all(len(row) == T for row in rows):
        return idx, None
    mask = torch.tensor([[False] * (T - len(row)) + [True] * len(row) for row in rows])
    return idx, mask.to(device)


def read_prompts(config: SampleConfig) -> list[str]:
    """The prompts of --prompt, --prompts or standard input. Raises UserError for no text."""
    if config.prompts:
        try:
            text = Path(config.prompts).read_text(encoding="utf-8-sig")
            lines = text.removesuffix("\n").split("\n") if text else []
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompts {config.prompts}: cannot be read: {error}") from None
        if not lines:
            raise UserError(f"--prompts {config.prompts}: no line in it")
        return lines
    if config.prompt != "-":
        return [config.prompt]
    try:
        prompt = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 at byte {error.start}") from None
    return [prompt.removesuffix("\n").removesuffix("\r")]  # echo's newline is not meant


def encode_prompts(encoding, prompts: list[str], config: SampleConfig) -> Iterator[list[int]]:
    """The token ids of each prompt, one at least. Raises UserError for an unknown character."""
    for number, prompt in enumerate(prompts, start=1):
        what = f"{config.prompts}, prompt {number}" if config.prompts else "the prompt"
        yield encode(encoding, prompt, what).tolist() or [start_token(encoding)]


# ---------------------------------------------------------------------------- speed


def replace_products(model: GPT, product):
    """Let product(weight, bias), a function of x, stand for each linear layer and the lm_head."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = product(module.weight, module.bias)
    model.lm_head = product(model.wte.weight, None)


def use_onednn(model: GPT):
    """Let oneDNN multiply by the weights, in its own layout, made once; nothing where it cannot.

    For a single row F.linear reaches a third to a half of the memory's speed on a CPU: in float32
    for its BLAS, in bfloat16 for the new layout that it makes at every product. The linear layers'
    own weights are let go.
    """
    if not torch.backends.mkldnn.is_available():
        return
    onednn = torch.ops.mkldnn
    if model.wte.weight.dtype == torch.bfloat16 and not onednn._is_mkldnn_bf16_supported():
        return

    def product(weight, bias):
        packed = onednn._reorder_linear_weight(weight.detach(), 1)  # for 1 row; good for more
        return lambda x: onednn._linear_pointwise(x, packed, bias, "none", [], "")

    replace_products(model, product)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = None


def compile_decoding(model: GPT):
    """Compile the step that makes one token a row from the cache; a prompt runs as it is.

    Raises UserError at the first step where the machine has no compiler."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # slow to import
    from torch._dynamo.utils import counters

    def product(weight, bias):
        def forward(x):
            if x.numel() > x.size(-1) or not torch.compiler.is_compiling():
                return F.linear(x, weight, bias)
            # Inductor would work out x, a LayerNorm's output, anew for each row of the weight:
            x = x.as_strided(x.size(), x.stride())  # this makes it keep x
            y = (weight * x).sum(-1).view(*x.shape[:-1], -1)  # fused, at the memory's speed
            return y if bias is None else y + bias

        return forward

    def attend(q, k, v, attn_mask=None, **options):
        if q.size(2) > 1 or not torch.compiler.is_compiling():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
        # (B, nh, S): with a size of 1 kept at its end Inductor 2.13 reads wrong places.
        scores = (q * k).sum(-1) / q.size(-1) ** 0.5
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask[:, :, 0], float("-inf"))
        return (scores.softmax(-1).unsqueeze(-1) * v).sum(2, keepdim=True)  # (B, nh, 1, hs)

    if model.wte.weight.device.type == "cpu":
        replace_products(model, product)
        for block in model.h:
            block.attn.attend = attend
    plain = model.next_logits
    torch.compiler.config.dynamic_sources = r"L\['cache'\]\[\d+\]\.length"  # compiled for any
    # No module changes from here on, and asking each whether it has takes a 20th of a step.
    options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    step = torch.compile(plain, fullgraph=True, options=options)

    def next_logits(idx, padding_mask=None, cache=None):
        if cache[0].length == 0:
            for layer in cache:
                layer.dtype = model.wte.weight.dtype  # half the memory to read, where it is half
        if idx.size(1) > 1 or cache[0].length < 2:  # 0 and 1 are never taken as any length
            return plain(idx, padding_mask, cache)
        if padding_mask is not None:
            torch._dynamo.maybe_mark_dynamic(padding_mask, 1)
        start, graphs = time.perf_counter(), counters["stats"]["unique_graphs"]
        try:
            logits = step(idx, padding_mask, cache)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--compile: {reason}; leave it out, or install a compiler") from None
        if counters["stats"]["unique_graphs"] > graphs:
            seconds = time.perf_counter() - start
            print(f"[compiled in {seconds:.0f} s]", file=sys.stderr, flush=True)
        return logits

    model.next_logits = next_logits


# ---------------------------------------------------------------------------- generation


def one_line_errors(tokens: Iterator[torch.Tensor], n_rows: int) -> Iterator[torch.Tensor]:
    """`tokens`, with UserError for weights that give no numbers and for memory that ends."""
    try:
        yield from tokens
    except ValueError as error:
        raise UserError(f"{error}: its weights are damaged, or too large for --dtype") from None
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors
        if "memory" not in str(error):
            raise
        raise UserError(f"out of memory for {n_rows} texts at once: lower --num_samples") from None


@torch.inference_mode()  # a tenth faster than no_grad for a small model
def write_texts(model: GPT, encoding, prompts: list[str], config: SampleConfig):
    """Complete every prompt num_samples times, as one batch, and print the texts in order.

    The first text appears token by token; the others go on from where they are when the one before
    has ended. Sample i of a prompt is drawn with seed + i, whatever stands beside it in the batch.
    Returns the token ids of each row: of its prompt, and those drawn.
    """
    rows, texts, generators = [], [], []
    for prompt, ids in zip(prompts, encode_prompts(encoding, prompts, config), strict=True):
        if max(ids) >= model.config.vocab_size:
            raise UserError(
                f"the prompt has token {max(ids)}: the model has fewer than its tokenizer"
            )
        if len(ids) > model.config.block_size:
            print(
                f"the prompt has {len(ids)} tokens, the model sees {model.config.block_size}: "
                "its beginning is cut off",
                file=sys.stderr,
            )
        for i in range(config.num_samples):
            rows.append(ids)
            texts.append(prompt)  # what of this row is not printed yet
            generators.append(torch.Generator(config.device).manual_seed(config.seed + i))
    drawn = [[] for _ in rows]
    streams = [TextStream(config.stop) for _ in rows]
    finished = [False] * len(rows)
    end_of_text = encoding._special_tokens.values()
    current = 0

    def print_ready():
        nonlocal current
        while current < len(rows):
            sys.stdout.write(texts[current])
            texts[current] = ""
            if not finished[current]:
                break
            sys.stdout.write("\n" if current == len(rows) - 1 else "\n---\n")
            current += 1
        sys.stdout.flush()

    print_ready()
    idx, mask = pad_left(rows, config.device)
    tokens = model.generate(
        idx,
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        padding_mask=mask,
        generator=generators,
    )
    for token in one_line_errors(tokens, len(rows)):
        for row, id in enumerate(token.tolist()):
            if finished[row]:
                continue
            drawn[row].append(id)
            ended = id in end_of_text
            raw = b"" if ended else encoding.decode_single_token_bytes(id)
            texts[row] += streams[row].feed(raw, final=ended)
            finished[row] = ended or streams[row].stopped
        print_ready()
        if all(finished):
            break
    for row, stream in enumerate(streams):
        if not finished[row]:
            texts[row] += stream.feed(b"", final=True)
            finished[row] = True
    print_ready()
    return rows, drawn


# ---------------------------------------------------------------------------- explanation


def visible(raw: bytes) -> str:
    """A token as a label: white space as symbols, what has no look by its number.

    >>> visible(b" caf\\xc3\\xa9\\n"), visible(b"\\xe2\\x80"), visible(b"\\0")
    ('·café↵', '\\\\xe2\\\\x80', 'U+0000')
    """
    text = raw.decode("utf-8", "backslashreplace")
    return "".join(SYMBOLS.get(c) or (c if c.isprintable() else f"U+{ord(c):04X}") for c in text)


@torch.no_grad()
def explain(model: GPT, encoding, ids: list[int], n_prompt: int) -> dict:
    """What the page shows of a text whose first n_prompt ids are the prompt, by one forward pass.

    Of T tokens: probabilities and ranks (T - 1,) of each but the first, given those before it
    (temperature 1, no filter); alternatives, the ten likeliest in its place as [label, probability,
    whether it is the token itself]; attention, base64 of 65535 times the lower triangles of
    attention_weights in uint16 (n_layer, n_head, T (T + 1) / 2).
    """
    n_layer, n_head = model.config.n_layer, model.config.n_head
    fit = int((2 * PAGE_WEIGHTS / n_layer / n_head) ** 0.5)
    room = min(PAGE_TOKENS, model.config.block_size, fit)
    # From the beginning, so that each token has what it had when it was drawn; of a prompt that
    # takes more than half of the page, only its end where the text does not fit.
    start = max(0, min(n_prompt - room // 2, len(ids) - room))
    shown = ids[start : start + room]
    T = len(shown)
    weights = []  # n_layer times (1, nh, T, T)
    hooks = [
        block.attn.register_forward_pre_hook(
            lambda attn, args: weights.append(attn.attention_weights(*args))
        )
        for block in model.h
    ]
    idx = torch.tensor([shown], device=model.wte.weight.device)
    logits, _ = model(idx)
    for hook in hooks:
        hook.remove()

    logits = logits[0, :-1].masked_fill(~model.drawable, float("-inf"))
    probs = logits.softmax(dim=-1)  # (T - 1, V)
    own = probs.gather(1, idx[0, 1:, None])  # (T - 1, 1)
    top = probs.topk(min(10, int(model.drawable.sum())))
    triangle = torch.cat(weights)[:, :, *torch.tril_indices(T, T)]  # (n_layer, nh, T (T + 1) / 2)
    codes = (65535 * triangle).round().cpu().numpy().astype("<u2")

    def label(id):
        return visible(encoding.decode_single_token_bytes(id))

    return {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_prompt": n_prompt - start,
        "omitted": {"before": start, "after": len(ids) - start - T},
        "tokens": [label(id) for id in shown],
        "probabilities": own[:, 0].tolist(),
        "ranks": ((probs > own).sum(dim=1) + 1).tolist(),
        "alternatives": [
            [[label(id), p, id == itself] for id, p in zip(row, values, strict=True)]
            for row, values, itself in zip(
                top.indices.tolist(), top.values.tolist(), shown[1:], strict=True
            )
        ],
        "attention": base64.b64encode(codes.tobytes()).decode(),
    }


def check_page(path: Path):
    """Raises UserError where a page cannot be written: before anything is computed for it."""
    if path.is_dir():
        raise UserError(f"--explain {path}: a directory; give the name of a page")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"--explain {path}: cannot be written: {error.strerror}") from None


def write_page(path: Path, data: dict):
    """Write what explain returns as HTML, whole or not at all; an older page gives way.

    Raises UserError where it cannot be written."""
    text = json.dumps(data)  # ASCII
    for character in "<>&":  # so that no token ends the script element or begins another
        text = text.replace(character, f"\\u{ord(character):04x}")
    html = TEMPLATE.read_text(encoding="utf-8").replace("__DATA__</script>", f"{text}</script>")
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"--explain {path}: cannot be written: {error.strerror}") from None


def main():
    config, _ = load(SampleConfig, __doc__, positional="run")
    try:
        config.device = pick_device(config.device)
    except ValueError as error:
        raise UserError(f"--device: {error}") from None
    if config.explain:
        check_page(Path(config.explain))
    prompts = [] if config.interactive else read_prompts(config)
    checkpoint, encoding, model = open_checkpoint(config, prompts)
    wide = model.config.n_embd >= WIDE
    original = copy.deepcopy(model) if config.explain else None  # in float32, its layers untouched
    dtype = pick_dtype(config.dtype, config.device, wide)
    model.to(config.device, getattr(torch, dtype))
    size = f"{model.num_parameters():,} parameters"
    print(f"{checkpoint}: {size}; {config.device}, {dtype}", file=sys.stderr)
    if config.compile:
        compile_decoding(model)
    elif config.device == "cpu" and wide and dtype != "float16":
        use_onednn(model)
    if not config.interactive:
        rows, drawn = write_texts(model, encoding, prompts, config)
        if config.explain:
            data = explain(original, encoding, rows[0] + drawn[0], len(rows[0]))
            write_page(Path(config.explain), {"model": str(checkpoint)} | data)
            print(f"{config.explain}: open it in a browser", file=sys.stderr)
        return None
    print("a prompt, then Enter; an empty line ends", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        prompt = sys.stdin.readline().removeprefix("\ufeff").rstrip("\r\n")
        if not prompt:
            return None
        try:
            write_texts(model, encoding, [prompt], config)
        except UserError as error:  # a typo does not end the conversation
            print(error, file=sys.stderr)


if __name__ == "__main__":
    run(main)
