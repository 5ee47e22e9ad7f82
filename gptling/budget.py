"""What to train in a given time: the rules of train.py --minutes, which know of a model its sizes
and how long a step takes. They are fitted to the sweeps in docs/one_dial.md; that parameters and
tokens grow together is from Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556."""

import math
from typing import Any, NamedTuple

# Layers and widths to choose from: the largest model that sees enough tokens in the time.
SHAPES = [(2, 64), (2, 96), (2, 128), (2, 192), (3, 256), (4, 384), (6, 512), (12, 768), (16, 1024)]
ENOUGH_PER_PARAMETER, ENOUGH_EPOCHS = 1.5, 4  # either is enough
MAX_EPOCHS, MAX_STEPS = 12, 200  # the former at most, or the latter where that is more
MAX_PARAMETERS_PER_TOKEN = 25  # of the text, and these times the epochs:
DROPOUT_FROM, MAX_BY_HEART = 35, 200
EVALUATING_SHARE = 0.04  # of the time, at most
RESERVE, DROPOUT_TAKES = 1.07, 1.4  # times a step: with data and the log; with dropout, on a CPU
SAVING, SAVING_A_PARAMETER = 1.0, 1e-7  # seconds of a checkpoint and its sample: the larger


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


def parameters_per_token(sizes: dict[str, Any], text: Text) -> float:
    """For each token of the text."""
    return count_parameters(sizes, text) / text.tokens


def needed_memory(sizes: dict[str, Any], text: Text) -> float:
    """About how many bytes training takes: its state, and a micro-batch's activations."""
    tokens = sizes["batch_size"] * sizes["block_size"]
    activations = 20 * sizes["n_layer"] * sizes["n_embd"] + 3 * text.vocab_size
    return 20 * count_parameters(sizes, text) + 4 * tokens * activations


def power_of_two(x: float) -> int:
    return 1 << round(math.log2(x))  # the nearest one, by ratio


def sizes_of(n_layer: int, n_embd: int, kept: dict[str, Any]) -> dict[str, int]:
    """n_layer, n_head and n_embd, but for what is kept; heads of 32, of 64 from a width of 256."""
    width = kept.get("n_embd", n_embd)
    heads = range(max(1, width // (32 if width < 256 else 64)), 0, -1)
    n_head = kept.get("n_head", next(n for n in heads if width % n == 0))
    width = kept.get("n_embd", math.ceil(width / n_head) * n_head)
    return {"n_layer": kept.get("n_layer", n_layer), "n_head": n_head, "n_embd": width}


def enough_tokens(sizes: dict[str, Any], text: Text) -> float:
    """How many a model of these sizes should see."""
    return min(ENOUGH_PER_PARAMETER * count_parameters(sizes, text), ENOUGH_EPOCHS * text.tokens)


def most_tokens(sizes: dict[str, Any], text: Text) -> float:
    """How many it may see of a text that is short for the time."""
    return text.tokens * min(MAX_EPOCHS, MAX_BY_HEART / parameters_per_token(sizes, text))


def most_steps(fields: dict[str, Any], text: Text) -> int:
    return max(MAX_STEPS, int(most_tokens(fields, text) / tokens_per_step(fields)))


def fields_for(tokens: float, sizes, kept: dict[str, Any], text: Text, memory: float, world_size):
    """The sizes, and the dropout, sequences and batches that suit a run of so many tokens, in
    micro-batches that fit in the memory; but for what is kept."""
    by_heart = tokens / text.tokens * parameters_per_token(sizes, text)
    tokens = min(tokens, ENOUGH_EPOCHS * text.tokens)  # more often seen, they count no more
    fields = sizes | {
        "dropout": 0.1 if by_heart >= DROPOUT_FROM else 0.0,
        "block_size": min(1024, power_of_two(max(64, tokens**0.6 / 72)), text.longest),
        "gradient_accumulation_steps": world_size,
        "batch_size": 1,
    }
    fields |= {name: kept[name] for name in fields.keys() & kept.keys()}
    if "batch_size" not in kept:  # the exponent is from https://arxiv.org/abs/2505.13738
        multiple = world_size // math.gcd(world_size, fields["gradient_accumulation_steps"])
        sequences = max(1024, 9.3 * tokens**0.383) / tokens_per_step(fields)
        fields["batch_size"] = multiple * power_of_two(max(1, sequences / multiple))
    may_accumulate = not kept.keys() & {"batch_size", "gradient_accumulation_steps"}
    while needed_memory(fields, text) > memory:
        if may_accumulate and fields["batch_size"] % 2 == 0:
            fields["batch_size"] //= 2
            fields["gradient_accumulation_steps"] *= 2
        elif "block_size" not in kept and fields["block_size"] > 64:
            fields["block_size"] //= 2
        else:
            break
    return fields


def plan(kept: dict[str, Any], text: Text, seconds_left, seconds_per_step, memory, world_size=1):
    """The fields of train.py that make the best of the time, with those that are `kept` as they
    are. seconds_per_step(fields) measures a step, of three sizes at most, and once more of the
    chosen one if it will be trained otherwise; seconds_left() notices. memory: free bytes."""
    candidates = []  # from the smallest model to the largest
    shapes = [shape for shape in SHAPES if shape[1] <= kept.get("n_embd", math.inf)] or SHAPES[:1]
    for sizes in (sizes_of(*shape, kept) for shape in shapes):
        fields = fields_for(enough_tokens(sizes, text), sizes, kept, text, memory, world_size)
        fits = needed_memory(fields, text) <= memory
        fits = fits and parameters_per_token(sizes, text) <= MAX_PARAMETERS_PER_TOKEN
        if not candidates or (fits and fields not in candidates):
            candidates.append(fields)
    seconds, seconds_per_token = max(1.0, seconds_left()), {}  # the latter of candidates

    def tokens_seen(i):  # a token's time grows a little less than the parameters do
        near = min(seconds_per_token, key=lambda other: abs(other - i))
        ratio = count_parameters(candidates[near], text) / count_parameters(candidates[i], text)
        return seconds / seconds_per_token[near] * ratio**0.85

    best = 0 if "n_embd" in kept else min(2, len(candidates) - 1)  # where bfloat16 may begin
    while best not in seconds_per_token and len(seconds_per_token) < 3:
        step = seconds_per_step(candidates[best])
        seconds_per_token[best] = step / tokens_per_step(candidates[best])
        goals = (enough_tokens(candidate, text) for candidate in candidates)
        best = max((i for i, goal in enumerate(goals) if tokens_seen(i) >= goal), default=0)
    best = min(seconds_per_token, key=lambda i: abs(i - best))
    # A larger one that is hardly slower is better.
    best = max(i for i, s in seconds_per_token.items() if s <= 1.2 * seconds_per_token[best])
    fields = candidates[best]
    step = RESERVE * seconds_per_token[best] * tokens_per_step(fields)
    steps = schedule(fields, step, seconds_left() - SAVING, kept, text)["max_iters"]
    steps *= DROPOUT_TAKES if fields["dropout"] else 1  # as many as there would be without
    fields = fields_for(steps * tokens_per_step(fields), fields, kept, text, memory, world_size)
    if fields != candidates[best]:
        step = RESERVE * seconds_per_step(fields)
    return fields | schedule(fields, step, seconds_left() - SAVING, kept, text) | kept


def schedule(fields, step: float, seconds: float, kept: dict[str, Any], text: Text):
    """How many steps, of `step` seconds each, fill the time with their evaluations, and rates."""
    n_evaluations = max(3, min(10, int(seconds // 60)))
    most = max(1.0, seconds / step)  # steps
    interval = min(most, kept.get("eval_interval", most / n_evaluations))
    step_tokens = tokens_per_step(fields)
    affordable = max(fields["block_size"], int(EVALUATING_SHARE * interval * 3 * step_tokens))
    evaluated = min(kept.get("eval_tokens", affordable) or text.val_tokens, text.val_tokens)
    evaluation = evaluated / step_tokens * step / 3  # seconds: without a backward pass
    evaluation += max(SAVING, SAVING_A_PARAMETER * count_parameters(fields, text))
    n_evaluations = max(1, min(n_evaluations, int(seconds / 2 / evaluation)))  # half of it at most
    if "eval_interval" in kept:
        n_evaluations = max(1.0, most / (interval + evaluation / step))
    steps = min(max(1, int(most - n_evaluations * evaluation / step)), most_steps(fields, text))
    width = fields["n_embd"]
    rate, muon_lr = 0.01 * min(1, 192 / width), 0.05 * min(1, math.sqrt(128 / width))
    if kept.get("optimizer") == "adamw":  # which has the matrices, too
        rate = 0.001 * math.sqrt(256 / width)
    if kept.get("init_from", "scratch") != "scratch":
        rate, muon_lr = rate / 10, muon_lr / 10
    return {
        "max_iters": steps,
        "warmup_iters": math.ceil(steps / 50),
        "learning_rate": rate,
        "min_lr": kept.get("learning_rate", rate) / 100,
        "muon_lr": muon_lr,
        "eval_interval": math.ceil(steps / n_evaluations),
        "eval_tokens": evaluated if evaluated < text.val_tokens else 0,
    }
