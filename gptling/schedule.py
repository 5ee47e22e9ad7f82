"""Arithmetic on a configuration that has all its values: the tokens of a step, when a run
evaluates, and when it ends. It knows nothing of plans, clocks and data."""

import math

from gptling.files import UserError

GOOD_EPOCHS = 4  # later ones teach less: Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264
# Sweeps are those of docs/experiments/planner. A run ends after so many epochs or after so many
# steps, whichever is later.
MAX_EPOCHS = 16  # sweep "minutes"
SHORT_TEXT_STEPS = 600  # sweep "repeated"
# The same with bpe_dropout, but 28 epochs if these are fewer steps: sweep "subwords", and
# "Learning from other models" there.
VARIED_STEPS = 1200
VARIED_EPOCHS = 28
FINE_TUNING_EPOCHS = 6  # the same for --init_from: commit b5d1829
FINE_TUNING_STEPS = 100
TAUGHT = 2  # a model with teachers gets so many times the steps
EVALUATING_SHARE = 0.04  # share of the time for evaluations, without one of the whole split
SAVING = 0.4  # seconds: a checkpoint with its sample at least, and a reserve at the end
SAVING_PER_PARAMETER = 1e-7  # seconds
MORE_MOMENTUM_STEPS = 900  # longer runs have Muon's momentum at 0.95: sweep "momentum"


def tokens_per_step(config) -> int:
    """Return the tokens in a step of all processes."""
    return config.batch_size * config.gradient_accumulation_steps * config.block_size


def micro_batches(config, world_size: int) -> tuple[int, int]:
    """Return the sequences in a micro-batch of one process, batch_size or fewer, and the number of
    its micro-batches in a step. All processes together have batch_size *
    gradient_accumulation_steps sequences. Raises UserError if these cannot be shared equally."""
    sequences = config.batch_size * config.gradient_accumulation_steps
    share, rest = divmod(sequences, world_size)
    if rest:
        raise UserError(
            f"batch_size * gradient_accumulation_steps = {sequences} is not a multiple of the "
            f"{world_size} processes: give another --batch_size"
        )
    size = min(share, config.batch_size)
    while share % size:  # the largest that divides the share
        size -= 1
    return size, share // size


def set_missing(config, **values):
    """Set those of these fields that are None."""
    for name, value in values.items():
        if getattr(config, name) is None:
            setattr(config, name, value)


def fill_in(config, values: dict):
    """Set the fields that are None to these values, and rates, warm-up and momentum to what fits
    them. Wide models need lower rates, trained ones (init_from) a tenth."""
    set_missing(config, **values)
    width = config.n_embd
    if config.optimizer == "adamw":
        adamw_rate = 0.001 * math.sqrt(256 / width)
    else:
        adamw_rate = 0.01 * min(1, 192 / width)  # only embeddings have it
    muon_rate = 0.05 * min(1, math.sqrt(128 / width))
    tenth = 1 if config.init_from == "scratch" else 10
    set_missing(config, learning_rate=adamw_rate / tenth, muon_lr=muon_rate / tenth)
    set_missing(
        config,
        min_lr=config.learning_rate / 100,
        warmup_iters=math.ceil(config.max_iters / 50),
        muon_momentum=0.95 if config.max_iters >= MORE_MOMENTUM_STEPS else 0.9,
    )


def eval_part(config) -> int:
    """Return how many tokens an evaluation covers, 0 for all. If eval_tokens is -1, the evaluations
    before the last one share EVALUATING_SHARE of the time. A token is evaluated in a third of the
    time in which it is trained on, because there is no backward pass."""
    if config.eval_tokens >= 0:
        return config.eval_tokens
    tokens = EVALUATING_SHARE * config.eval_interval * 3 * tokens_per_step(config)
    return max(config.block_size, int(tokens))


def evaluation_time(config, step: float, tokens: float) -> float:
    """Return the seconds to evaluate so many tokens, given those of a step: see eval_part."""
    return step * tokens / tokens_per_step(config) / 3


def saving_time(n_parameters: int) -> float:
    """Return the seconds of a checkpoint and its sample."""
    return max(SAVING, SAVING_PER_PARAMETER * n_parameters)


def evaluations(max_iters: int, config) -> int:
    """Return how often a run of max_iters steps evaluates: at multiples of eval_interval, except
    one that is less than half an interval before the end, and at the end."""
    return max(1, int(max_iters / config.eval_interval + 0.5))


def evaluates_after(step: int, max_iters: int, config) -> bool:
    """Return whether a run of max_iters steps evaluates after step `step`."""
    number, rest = divmod(step, config.eval_interval)
    is_due = rest == 0 and number < evaluations(max_iters, config)
    return is_due or step == max_iters


def can_be_followed(config) -> bool:
    """Return whether a run that has time trains another model after this one. A model with teachers
    is the last one, and --init_from trains only one."""
    return config.init_from == "scratch" and not config.teacher


def most_steps(config, n_tokens: int) -> int:
    """Return the number of steps beyond which a run on n_tokens would overfit."""
    epochs, steps = MAX_EPOCHS, SHORT_TEXT_STEPS
    steps_of_epoch = n_tokens / tokens_per_step(config)
    if config.bpe_dropout:
        steps = max(steps, min(VARIED_STEPS, int(VARIED_EPOCHS * steps_of_epoch)))
    if config.init_from != "scratch":
        epochs, steps = FINE_TUNING_EPOCHS, FINE_TUNING_STEPS
    if config.teacher:
        epochs, steps = TAUGHT * epochs, TAUGHT * steps
    return max(steps, int(epochs * steps_of_epoch))
