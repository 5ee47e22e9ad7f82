"""What to train in a given time: train.py --minutes.

Of a model it knows its sizes, and how long a step takes here, which is measured. The rules are
fitted to the sweeps in docs/one_dial.md; that parameters and tokens grow together is from Hoffmann
et al. 2022, https://arxiv.org/abs/2203.15556.
"""

import math
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gptling.cli import UserError
from gptling.dataset import Dataset, micro_batches, read_meta
from gptling.devices import free_memory
from gptling.loss import loss_and_terms
from gptling.processes import Processes

STARTED = time.perf_counter() - time.process_time()  # of this process, whose imports were work
# Layers and widths to choose from: the largest that sees so many tokens for each of its parameters,
# or all of the text so often, and has no more parameters for each token of the text.
SHAPES = [(2, 64), (2, 96), (2, 128), (2, 192), (3, 256), (4, 384), (6, 512), (12, 768), (16, 1024)]
TOKENS_PER_PARAMETER, EPOCHS, PARAMETERS_PER_TOKEN = 1.7, 6, 20
MOST_EPOCHS, FEWEST_STEPS = 32, 200  # of a run; where both bind it is shorter than the time
MEASURING_SHARE, MEASURING_SECONDS = 0.1, 15.0  # of the time, at most
EVALUATING_SHARE = 0.08  # of the time, at most
RESERVE, SAVING = 1.05, 1.0  # of a step's time, for data and the log; seconds of a checkpoint


class Text(NamedTuple):
    """What a plan knows of data/NAME: its tokens, and the longest sequence both splits have."""

    tokens: int
    val_tokens: int
    vocab_size: int
    longest: int


def tokens_per_step(fields: dict[str, Any]) -> int:
    return math.prod(fields[k] for k in ("batch_size", "block_size", "gradient_accumulation_steps"))


def count_parameters(sizes: dict[str, Any], text: Text) -> int:
    """About as many as a GPT of these sizes has."""
    return 12 * sizes["n_layer"] * sizes["n_embd"] ** 2 + sizes["n_embd"] * text.vocab_size


def needed_memory(sizes: dict[str, Any], text: Text) -> float:
    """About how many bytes training takes: its state, and a micro-batch's activations."""
    tokens = sizes["batch_size"] * sizes["block_size"]
    activations = 20 * sizes["n_layer"] * sizes["n_embd"] + 3 * text.vocab_size
    return 20 * count_parameters(sizes, text) + 4 * tokens * activations


def power_of_two(x: float) -> int:
    """The nearest one, by ratio."""
    return 1 << round(math.log2(x))


def sizes_of(n_layer: int, n_embd: int, kept: dict[str, Any]) -> dict[str, int]:
    """Of a model, those that are kept as they are: heads of 32, from a width of 256 on of 64."""
    width = kept.get("n_embd", n_embd)
    heads = range(max(1, width // (32 if width < 256 else 64)), 0, -1)
    n_head = kept.get("n_head", next(n for n in heads if width % n == 0))
    width = kept.get("n_embd", math.ceil(width / n_head) * n_head)
    return {"n_layer": kept.get("n_layer", n_layer), "n_head": n_head, "n_embd": width}


def batches_of(sizes, tokens: float, kept: dict[str, Any], text: Text, memory: float, world_size):
    """The sizes, and the sequences and batches for a run of so many tokens, in micro-batches that
    memory has room for."""
    block_size = min(1024, power_of_two(max(32, math.sqrt(tokens) / 18)), text.longest)
    fields = sizes | {"block_size": block_size, "gradient_accumulation_steps": world_size}
    fields |= {name: kept[name] for name in fields.keys() & kept.keys()}
    step_tokens = power_of_two(9.3 * max(1e5, tokens) ** 0.383)  # https://arxiv.org/abs/2505.13738
    sequences = step_tokens / fields["block_size"] / fields["gradient_accumulation_steps"]
    fields |= {"batch_size": kept.get("batch_size", max(1, round(sequences)))}
    may_accumulate = not kept.keys() & {"batch_size", "gradient_accumulation_steps"}
    while needed_memory(fields, text) > memory:
        if may_accumulate and fields["batch_size"] % 2 == 0:
            fields["batch_size"] //= 2
            fields["gradient_accumulation_steps"] *= 2
        elif "block_size" not in kept and fields["block_size"] > 32:
            fields["block_size"] //= 2
        else:
            break
    return fields


def plan(kept: dict[str, Any], text: Text, seconds_left, seconds_per_step, memory, world_size=1):
    """The fields of train.py that make the best of seconds_left(), with those that are `kept` as
    they are. seconds_per_step(fields): asked for three sizes, and once more for the chosen one as
    it will be trained; memory: free bytes."""
    candidates, goals = [], []  # fields, and the tokens that a run of them should see
    for shape in SHAPES:
        sizes = sizes_of(*shape, kept)
        n_parameters = count_parameters(sizes, text)
        goal = min(TOKENS_PER_PARAMETER * n_parameters, EPOCHS * text.tokens)
        fields = batches_of(sizes, goal, kept, text, memory, world_size)
        fields["dropout"] = kept.get("dropout", 0.1 if goal == EPOCHS * text.tokens else 0.0)
        fits = needed_memory(fields, text) < memory
        fits = fits and n_parameters <= PARAMETERS_PER_TOKEN * text.tokens
        if not candidates or (fits and fields not in candidates):
            candidates.append(fields)
            goals.append(goal)
    seconds, measured, best = seconds_left(), {}, min(1, len(candidates) - 1)

    def tokens_seen(i):  # a token's time grows as the parameters do
        near = min(measured, key=lambda other: abs(other - i))
        ratio = count_parameters(candidates[near], text) / count_parameters(candidates[i], text)
        return seconds / measured[near] * ratio

    while best not in measured and len(measured) < 3:
        fields = candidates[best]
        measured[best] = seconds_per_step(fields) / tokens_per_step(fields)
        enough = (i for i, goal in enumerate(goals) if tokens_seen(i) >= goal)
        best = max(enough, default=0)
    best = min(measured, key=lambda i: abs(i - best))
    tokens = min(tokens_seen(best), MOST_EPOCHS * text.tokens)
    epochs = tokens / text.tokens  # fewer with dropout, which takes time
    dropout = 0.2 if epochs >= 25 else 0.1 if epochs >= 12 else 0.0
    dropout = kept.get("dropout", max(dropout, candidates[best]["dropout"]))
    fields = batches_of(candidates[best], tokens, kept, text, memory, world_size)
    fields |= {"dropout": dropout}
    step = measured[best] * tokens_per_step(fields)
    step = RESERVE * (step if fields == candidates[best] else seconds_per_step(fields))
    return fields | schedule(fields, step, seconds_left() - SAVING, kept, text) | kept


def most_steps(fields: dict[str, Any], text: Text) -> int:
    """More would not help."""
    return max(FEWEST_STEPS, MOST_EPOCHS * text.tokens // tokens_per_step(fields))


def schedule(fields, step: float, seconds: float, kept: dict[str, Any], text: Text):
    """Steps of so many seconds each, evaluations and learning rates that fill these seconds."""
    n_evaluations = max(3, min(10, int(seconds // 60)))
    seconds = max(step, seconds)
    interval = kept.get("eval_interval", seconds / step / n_evaluations)  # in steps
    step_tokens = tokens_per_step(fields)
    affordable = max(fields["block_size"], int(EVALUATING_SHARE * interval * 3 * step_tokens))
    eval_tokens = kept.get("eval_tokens", affordable if affordable < text.val_tokens else 0)
    evaluated = min(eval_tokens or text.val_tokens, text.val_tokens)
    evaluation = evaluated / step_tokens * step / 3 + SAVING  # seconds: without a backward pass
    steps = max(1, int(seconds / (step + evaluation / interval)))
    steps = min(steps, most_steps(fields, text))
    width, trained = fields["n_embd"], kept.get("init_from", "scratch") != "scratch"
    rate = 0.01 * min(1, 192 / width)
    if kept.get("optimizer") == "adamw":  # which has the matrices, too
        rate = 0.001 * math.sqrt(256 / width)
    rate = kept.get("learning_rate", rate / 10 if trained else rate)
    muon_lr = 0.05 * min(1, math.sqrt(128 / width))
    planned = {"max_iters": steps, "warmup_iters": math.ceil(steps / 50)}
    planned |= {"learning_rate": rate, "min_lr": rate / 100}
    planned |= {"muon_lr": muon_lr / 10 if trained else muon_lr}
    return planned | {"eval_interval": math.ceil(steps / n_evaluations), "eval_tokens": eval_tokens}


def plan_run(config, given: dict[str, Any], kept: set[str], set_up, processes: Processes):
    """Set what is not `kept` of train.py's configuration for the best model in config.minutes from
    the start of the program, and print it. set_up: train.py's. Raises UserError."""
    if not config.minutes or "max_iters" in given:
        raise UserError(f"--minutes={config.minutes:g}: give either a time or --max_iters")
    # A preset's numbers of steps are those of its own time.
    kept = kept - ({"max_iters", "warmup_iters", "eval_interval"} - given.keys())
    block_size = config.block_size if "block_size" in kept else 1  # or an error
    data, meta = Dataset(config.dataset, block_size, 1), read_meta(f"data/{config.dataset}")
    text = Text(data.n_tokens, len(data.val), data.tokenizer.n_vocab, data.longest)

    def slowest(seconds):  # of the processes
        return processes.all_reduce_max(round(1e6 * seconds)) / 1e6

    def seconds_per_step(sizes):  # the median, on random tokens
        candidate = replace(config, **sizes)
        batch_size, micro_steps = micro_batches(candidate, processes.world_size)
        idx = torch.randint(text.vocab_size, (batch_size, candidate.block_size))
        idx, times = processes.to_device(idx), []
        _, parallel, compiled, autocast, _, optimizers = set_up(candidate, data)
        seconds = min(MEASURING_SHARE * 60 * config.minutes, MEASURING_SECONDS) / 4
        while len(times) < 2 or (len(times) < 10 and sum(times) < seconds):
            start = time.perf_counter()
            for _ in range(micro_steps):
                with autocast:
                    loss, terms = loss_and_terms(compiled(idx, idx))
                sum(terms.values(), start=loss).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loss.item()  # waits for a GPU
            times.append(slowest(time.perf_counter() - start))
        if compiled is not parallel:
            torch.compiler.reset()  # what is compiled for a second shape would be for any
        return statistics.median(times[1:])  # the first one allocates, and compiles

    def seconds_left():
        return 60 * config.minutes - slowest(time.perf_counter() - STARTED)

    values = {name: getattr(config, name) for name in kept}
    memory = -0.8 * processes.all_reduce_max(-free_memory(processes.device))
    fields = plan(values, text, seconds_left, seconds_per_step, memory, processes.world_size)
    vars(config).update(fields)
    seen = config.max_iters * tokens_per_step(fields)
    print(
        f"{config.dataset}: {meta['train']['bytes'] / 1e6:.1f} MB to train on, {text.tokens:,} "
        f"tokens ({meta['tokenizer']}, vocabulary of {text.vocab_size:,}). "
        f"{config.minutes:g} min here: {config.n_layer} layers of {config.n_embd}, sequences of "
        f"{config.block_size}, {seen // config.max_iters // config.block_size} at a time, "
        f"{config.max_iters:,} steps ({seen / text.tokens:.1f} epochs), dropout {config.dropout:g}"
        + "; more of a text so short would not help"
        * (fields["max_iters"] == most_steps(fields, text))
    )
