"""How long a step takes here, and the run planned by it: train.py --minutes."""

import copy
import io
import time
from contextlib import redirect_stderr, redirect_stdout

import torch

from gptling.budget import Text, most_steps, plan, tokens_per_step
from gptling.cli import UserError
from gptling.dataset import Dataset, micro_batches, read_meta
from gptling.devices import free_memory
from gptling.loss import objective_and_parts

MEASURING_SHARE, MEASURING_SECONDS = 0.1, 15.0  # of the time, at most
STARTED = time.perf_counter() - time.process_time()  # of the program: importing us took CPU time


def seconds_of_step(set_up: tuple, idx: torch.Tensor, micro_steps: int, limit: float, slowest):
    """The lower quartile of some steps, for about `limit` seconds: other work comes in bursts that
    last as long; and what compiling took. A step with many micro-batches is worked out from one of
    them. set_up: what the function of this name in train.py returns; idx: (B, T), a micro-batch;
    slowest: a number of seconds to the largest of all processes."""
    _, parallel, compiled, autocast, _, optimizers = set_up
    times, spent, compiling = [], 0.0, 0.0
    for n in range(20):
        start = time.perf_counter()
        with autocast:
            objective, _ = objective_and_parts(compiled(idx, idx))
        objective.backward()
        objective.item()  # waits for a GPU
        micro_batch = slowest(time.perf_counter() - start)
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        objective.item()  # once more, for what was queued since
        update = slowest(time.perf_counter() - start)
        times.append(micro_steps * micro_batch + update)
        if n == 0 and compiled is not parallel:
            compiling = micro_batch
            continue
        spent += micro_batch + update
        if spent > limit and (n > 0 or spent > 4 * limit):
            break
    if compiled is not parallel:
        torch.compiler.reset()  # what is compiled for a second shape would be for any
    # Not the first one, which allocates, and compiles, unless it takes too long by itself.
    return sorted(times)[len(times) // 4], compiling


def plan_run(config, given: dict, kept: set, longest: float, set_up, processes):
    """Set what is not `kept` of train.py's configuration for the best model in config.minutes from
    the start of the program, and print it. given, kept: as cli.load returns them; longest:
    the sequences that an init_from allows; set_up: train.py's. Raises UserError."""
    if not config.minutes or "max_iters" in given:
        raise UserError(f"--minutes={config.minutes:g}: give either a time or --max_iters")
    # A preset's numbers of steps are those of its own time.
    names = kept - ({"max_iters", "warmup_iters", "eval_interval"} - given.keys())
    block_size = config.block_size if "block_size" in names else 1  # or an error
    data, meta = Dataset(config.dataset, block_size, 1), read_meta(f"data/{config.dataset}")
    longest = min(longest, data.longest)
    text = Text(data.n_tokens, len(data.val), data.tokenizer.n_vocab, longest)

    def slowest(seconds):  # of the processes
        return processes.all_reduce_max(round(1e6 * seconds)) / 1e6

    def set_fields(candidate, fields):  # and what follows from them
        vars(candidate).update(fields)
        try:
            candidate.__post_init__()
        except ValueError as error:  # of a changed model
            raise UserError(f"planned sizes do not suit: {error}; give those by flags") from None

    compiling = 0.0

    def seconds_per_step(fields):  # on random tokens
        nonlocal compiling
        candidate = copy.copy(config)
        set_fields(candidate, fields)
        batch_size, micro_steps = micro_batches(candidate, processes.world_size)
        idx = torch.randint(text.vocab_size, (batch_size, candidate.block_size))
        limit = min(MEASURING_SHARE * 60 * config.minutes, MEASURING_SECONDS) / 4
        idx = processes.to_device(idx)
        # What that says, the run says again.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            built = set_up(candidate, data)
        step, compiling = seconds_of_step(built, idx, micro_steps, limit, slowest)
        return step

    def seconds_left():  # the run compiles, too
        return 60 * config.minutes - slowest(time.perf_counter() - STARTED) - compiling

    values = {name: getattr(config, name) for name in names}
    values |= {} if hasattr(config, "dropout") else {"dropout": 0.0}  # a model that has none
    memory = -0.8 * processes.all_reduce_max(-free_memory(processes.device))
    fields = plan(values, text, seconds_left, seconds_per_step, memory, processes.world_size)
    set_fields(config, fields)
    at_once = tokens_per_step(fields)
    seen = config.max_iters * at_once
    remark = "; a text so short is used up then" * (config.max_iters >= most_steps(fields, text))
    remark += "; there is time for no more steps" * (config.max_iters < 10)
    print(
        f"{config.dataset}: {meta['train']['bytes'] / 1e6:.2f} MB to train on, {text.tokens:,} "
        f"tokens ({meta['tokenizer']}, vocabulary of {text.vocab_size:,}). "
        f"{config.minutes:g} min here: {config.n_layer} layers of {config.n_embd}, sequences of "
        f"{config.block_size}, {at_once // config.block_size} at a time, "
        f"{config.max_iters:,} steps ({seen / text.tokens:.1f} epochs), dropout {config.dropout:g}"
        f"{remark}"
    )
