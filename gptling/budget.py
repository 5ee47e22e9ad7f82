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
# Sizes to choose from: n_layer, n_embd, block_size, tokens per step.
SHAPES = [(2, 64, 64, 2048), (2, 96, 64, 2048), (2, 128, 64, 2048), (2, 192, 128, 2048)]
SHAPES += [(3, 256, 128, 4096), (4, 384, 256, 8192), (6, 512, 256, 16_384)]
SHAPES += [(12, 768, 512, 65_536), (16, 1024, 1024, 131_072)]
TOKENS_PER_PARAMETER, MIN_STEPS = 1.7, 300  # of a run; tokens by what they are worth
MEASURING_SHARE, MEASURING_SECONDS = 0.1, 15.0  # of the time, at most
EVALUATING_SHARE = 0.08  # of the time, at most
RESERVE, SAVING = 1.05, 1.0  # of a step's time, for data and the log; seconds of a checkpoint


class Text(NamedTuple):
    """What a plan knows of data/NAME: its tokens, and the longest sequence both splits have."""

    tokens: int
    val_tokens: int
    vocab_size: int
    longest: int


def effective_tokens(tokens: float, unique_tokens: int) -> float:
    """How many tokens seen once teach as much (https://arxiv.org/abs/2305.16264, eq. 5, R*_D)."""
    repeats = max(0.0, tokens / unique_tokens - 1)
    return min(tokens, unique_tokens) * (1 + 15.4 * (1 - math.exp(-repeats / 15.4)))


def tokens_per_step(fields: dict[str, Any]) -> int:
    return math.prod(fields[k] for k in ("batch_size", "block_size", "gradient_accumulation_steps"))


def count_parameters(sizes: dict[str, Any], text: Text) -> int:
    """About as many as a GPT of these sizes has."""
    width = sizes["n_embd"]
    return 12 * sizes["n_layer"] * width**2 + width * (text.vocab_size + sizes["block_size"])


def needed_memory(sizes: dict[str, Any], text: Text) -> float:
    """About how many bytes training takes: its state, and a micro-batch's activations."""
    tokens = sizes["batch_size"] * sizes["block_size"]
    activations = 20 * sizes["n_layer"] * sizes["n_embd"] + 3 * text.vocab_size
    return 20 * count_parameters(sizes, text) + 4 * tokens * activations


def sizes_of(layers, width, block_size, tokens, kept, text: Text, memory: float, world_size: int):
    """The sizes of a model and of its steps, in micro-batches that memory has room for."""
    width = kept.get("n_embd", width)
    heads = range(max(1, width // (32 if width < 256 else 64)), 0, -1)
    sizes = {"n_layer": layers, "n_embd": width, "block_size": min(block_size, text.longest)}
    sizes |= {"n_head": next(n for n in heads if width % n == 0)}
    sizes |= {"gradient_accumulation_steps": world_size}
    sizes |= {name: kept[name] for name in sizes.keys() & kept.keys()}
    sequences = tokens / sizes["block_size"] / sizes["gradient_accumulation_steps"]
    sizes |= {"batch_size": kept.get("batch_size", max(1, round(sequences)))}
    may_accumulate = not kept.keys() & {"batch_size", "gradient_accumulation_steps"}
    while may_accumulate and sizes["batch_size"] % 2 == 0 and needed_memory(sizes, text) > memory:
        sizes["batch_size"] //= 2
        sizes["gradient_accumulation_steps"] *= 2
    return sizes


def plan(kept: dict[str, Any], text: Text, seconds_left, seconds_per_step, memory, world_size=1):
    """The fields of train.py that make the best of seconds_left(), with those that are `kept` as
    they are. seconds_per_step(fields): asked for three sizes at most; memory: free bytes."""
    candidates = [sizes_of(*shape, kept, text, memory, world_size) for shape in SHAPES]
    candidates = [one for one in candidates if one["n_embd"] % one["n_head"] == 0]
    candidates = [one for one in candidates if needed_memory(one, text) < memory] or candidates[:1]
    parameters = [count_parameters(sizes, text) for sizes in candidates]
    seconds, measured, best = seconds_left(), {}, min(1, len(candidates) - 1)

    def sees_enough(i):  # a token's time grows as the parameters do
        near = min(measured, key=lambda other: abs(other - i))
        tokens = seconds / measured[near] * tokens_per_step(candidates[near])
        tokens *= parameters[near] / parameters[i]
        enough = effective_tokens(tokens, text.tokens) >= TOKENS_PER_PARAMETER * parameters[i]
        return enough and tokens >= MIN_STEPS * tokens_per_step(candidates[i])

    while best not in measured and len(measured) < 3:
        measured[best] = seconds_per_step(candidates[best])
        best = max(filter(sees_enough, range(len(candidates))), default=0)
    best = min(measured, key=lambda i: abs(i - best))
    sizes, step = candidates[best], RESERVE * measured[best]
    step_tokens = tokens_per_step(sizes)
    n_evaluations = max(3, min(10, int(seconds // 60)))
    left = max(step, seconds_left() - SAVING)
    interval = kept.get("eval_interval", left / step / n_evaluations)  # in steps
    affordable = max(sizes["block_size"], int(EVALUATING_SHARE * interval * 3 * step_tokens))
    eval_tokens = kept.get("eval_tokens", affordable if affordable < text.val_tokens else 0)
    evaluated = min(eval_tokens or text.val_tokens, text.val_tokens)
    evaluation = evaluated / step_tokens * step / 3 + SAVING  # seconds: without a backward pass
    steps = max(1, int(left / (step + evaluation / interval)))
    epochs = steps * step_tokens / text.tokens
    rate = kept.get("learning_rate", 1e-2 * min(1, 192 / sizes["n_embd"]))
    fields = {"learning_rate": rate, "min_lr": rate / 100, "warmup_iters": math.ceil(steps / 50)}
    fields |= {"muon_lr": 0.05 * min(1, math.sqrt(128 / sizes["n_embd"])), "max_iters": steps}
    fields |= {"dropout": 0.0 if epochs < 8 else 0.1 if epochs < 25 else 0.2}
    fields |= {"eval_interval": math.ceil(steps / n_evaluations), "eval_tokens": eval_tokens}
    return sizes | fields | kept


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
        seconds = min(MEASURING_SHARE * 60 * config.minutes, MEASURING_SECONDS) / 3
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
    step_tokens = tokens_per_step(fields)
    print(
        f"{config.dataset}: {meta['train']['bytes'] / 1e6:.1f} MB to train on, {text.tokens:,} "
        f"tokens ({meta['tokenizer']}, vocabulary of {text.vocab_size:,}). "
        f"{config.minutes:g} min here: {config.n_layer} layers of {config.n_embd}, sequences of "
        f"{config.block_size}, {step_tokens // config.block_size} at a time, "
        f"{config.max_iters:,} steps ({config.max_iters * step_tokens / text.tokens:.1f} epochs)"
    )
