"""Plan a training run for a given time: train.py --minutes.

Rules are fitted to the sweeps in docs/experiments/planner. Parameters grow with the tokens as in
Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, batches as in Bergsma et al. 2025,
https://arxiv.org/abs/2505.13738, the weight decay as in Wang and Aitchison 2024,
https://arxiv.org/abs/2405.13698."""

import bisect
import copy
import math
import statistics
import textwrap
import time

import torch

from gptling import threads
from gptling.cli import is_out_of_memory, progress_bar
from gptling.dataset import Dataset, tokens_per_step
from gptling.loss import objective_and_parts
from gptling.tokenizers import has_merges

# Layers and widths to choose from: the largest model that sees enough tokens in the time.
SHAPES = [(2, 64), (2, 96), (2, 128), (2, 192), (2, 256)]
SHAPES += [(3, 256), (4, 384), (6, 512), (12, 768), (16, 1024)]
GOOD_EPOCHS = 4  # later ones teach less: Muennighoff et al. 2023, arXiv 2305.16264
# A run ends after so many epochs or steps: the later of the two.
MAX_EPOCHS = 16
SHORT_TEXT_STEPS = 600
VARIED_STEPS = 1200  # with bpe_dropout
FINE_TUNING_EPOCHS = 6  # of --init_from
FINE_TUNING_STEPS = 100
# The largest model has so many parameters per token of the text, or so many: the larger of the two.
PARAMETERS_PER_TOKEN = 25
SHORT_TEXT_PARAMETERS = 2_600_000
# See Planner.regularisation.
DROPOUT_MEMORISATION = 35
BPE_DROPOUT_MEMORISATION = 100
BPE_DROPOUT_EPOCHS = 8
MORE_MOMENTUM_STEPS = 900  # from here on Muon's momentum is 0.95
EVALUATING_SHARE = 0.04  # of the time, but for a last evaluation of the whole split
MICRO_BATCH_TOKENS = 8192  # at most, so that the largest model fits a GPU of 24 GB
SAVING = 0.4  # seconds of a checkpoint and its sample, at least, and a reserve at the end
SAVING_PER_PARAMETER = 1e-7


def set_missing(config, **values):
    """Set those of these fields of train.py's configuration that are None."""
    for name, value in values.items():
        if getattr(config, name) is None:
            setattr(config, name, value)


def fill_in(config, values: dict):
    """Set the fields of train.py's configuration that are None to these values, and rates, warm-up
    and momentum to what fits them. Wide models need lower rates, trained ones (init_from) a tenth.
    """
    set_missing(config, **values)
    width = config.n_embd
    if config.optimizer == "adamw":
        adamw_rate = 0.001 * math.sqrt(256 / width)
    else:
        adamw_rate = 0.01 * min(1, 192 / width)  # of the embeddings
    muon_rate = 0.05 * min(1, math.sqrt(128 / width))
    tenth = 1 if config.init_from == "scratch" else 10
    set_missing(config, learning_rate=adamw_rate / tenth, muon_lr=muon_rate / tenth)
    set_missing(config, min_lr=config.learning_rate / 100)
    set_missing(config, warmup_iters=math.ceil(config.max_iters / 50))
    set_missing(config, muon_momentum=0.95 if config.max_iters >= MORE_MOMENTUM_STEPS else 0.9)


def eval_part(config) -> int:
    """Return how many tokens an evaluation covers, 0 for all. If eval_tokens is -1, those before
    the last one have a share of the time. Training one token takes as long as evaluating three,
    without a backward pass."""
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


def evaluations(steps: int, config) -> int:
    """Return how often a run of so many steps evaluates: at multiples of eval_interval, except one
    that is less than half an interval before the end, and at the end."""
    return max(1, int(steps / config.eval_interval + 0.5))


def evaluates_after(step: int, config) -> bool:
    """Return whether a run of max_iters steps evaluates after step `step`."""
    number, rest = divmod(step, config.eval_interval)
    is_due = rest == 0 and number < evaluations(config.max_iters, config)
    return is_due or step == config.max_iters


def most_steps(config, train_tokens: int) -> int:
    """Return after how many steps a run ends before it overfits."""
    epochs, steps = MAX_EPOCHS, SHORT_TEXT_STEPS
    if config.bpe_dropout:
        steps = VARIED_STEPS
    if config.init_from != "scratch":
        epochs, steps = FINE_TUNING_EPOCHS, FINE_TUNING_STEPS
    return max(steps, int(train_tokens * epochs / tokens_per_step(config)))


def nearest_power_of_two(number: float) -> int:
    """Return 1, 2, 4, ...: 64 for 70, and 1 for 0.3."""
    return 2 ** max(0, round(math.log2(number)))


class Planner:
    """The rules. They plan the fields of train.py's configuration that are None."""

    def __init__(self, config, data: Dataset, longest: float, set_up, processes):
        self.config = config
        self.data = data
        self.set_up = set_up
        self.processes = processes
        self.train_tokens = data.n_tokens
        self.val_tokens = len(data.val)
        self.vocab_size = data.tokenizer.n_vocab
        self.longest = min(longest, data.longest)
        self.can_vary = has_merges(data.tokenizer) and config.init_from == "scratch"  # the tokens
        self.compiling = 0.0  # seconds
        self.busy = False  # whether other programs compute now

    def plan(self):
        """Set the fields that are None to what makes the best of the time. Raises MemoryError."""
        candidate, step = self.choose_model()
        if step == math.inf:
            raise MemoryError

        def in_time(config):
            tokens = self.schedule(config, step)["max_iters"] * tokens_per_step(config)
            return self.configuration(config.n_layer, config.n_embd, tokens)

        planned = in_time(candidate)
        if planned.bpe_dropout:  # then more steps are allowed (most_steps), with other batches
            planned = in_time(planned)
        if planned != candidate:
            its_step = self.time_step(planned)
            if its_step == math.inf:
                planned = candidate
            else:
                step = its_step
        fill_in(self.config, vars(planned) | self.schedule(planned, step))
        set_missing(self.config, **self.decays())

    def choose_model(self) -> tuple:
        """Return the configuration of the largest model that sees enough tokens, and a step's
        seconds. Models are measured until the best estimate is a measured one."""
        candidates = self.list_candidates()
        sizes = [self.parameters(candidate) for candidate in candidates]
        seconds = max(1.0, self.seconds_left())
        measured = {}  # seconds of a token, by a candidate's index
        n_fitting = len(candidates)  # that fit into the memory, as far as measured
        base = 0  # the last measured one that fits: estimates are relative to it
        i = 0 if self.config.n_embd else min(2, len(candidates) - 1)
        while i not in measured:
            measured[i] = self.time_step(candidates[i]) / tokens_per_step(candidates[i])
            if measured[i] == math.inf:
                n_fitting = i
            else:
                base = i
            best = 0
            for j, size in enumerate(sizes[:n_fitting]):
                # Low on purpose: no model is left out before it is measured.
                ratio = size / sizes[base]
                estimate = measured.get(base, math.inf) * min(ratio, ratio**0.6)
                if seconds / measured.get(j, estimate) >= self.enough_tokens(size):
                    best = j
            i = best
        # A larger one that is hardly slower than the best is better: bfloat16 pays from a width of
        # 128 on.
        i = max(j for j in measured if measured[j] <= 1.2 * measured[i])
        return candidates[i], measured[i] * tokens_per_step(candidates[i])

    def list_candidates(self) -> list:
        """Return the configurations to choose from, by size: the smallest, and all others that are
        not too large for the text."""
        most = max(SHORT_TEXT_PARAMETERS, PARAMETERS_PER_TOKEN * self.train_tokens)
        candidates = []
        for n_layer, n_embd in SHAPES:
            candidate = self.configuration(n_layer, n_embd)
            fits = self.parameters(candidate) <= most or not candidates
            if fits and candidate not in candidates:  # equal ones if sizes are given
                candidates.append(candidate)
        return candidates

    def configuration(self, n_layer: int, n_embd: int, tokens: float = 0):
        """Return the configuration of a model that sees so many tokens, or enough (0)."""
        config = copy.copy(self.config)
        set_missing(config, n_layer=n_layer, n_embd=n_embd)
        tokens = tokens or self.enough_tokens(self.parameters(config))
        useful = min(tokens, GOOD_EPOCHS * self.train_tokens)  # later epochs teach less
        block_size = nearest_power_of_two(max(64, useful**0.6 / 72))
        set_missing(config, block_size=min(1024, block_size, self.longest))
        width = config.n_embd
        heads = range(max(1, width // (32 if width < 256 else 64)), 0, -1)  # of so many channels
        set_missing(config, n_head=next(n for n in heads if width % n == 0))
        if config.batch_size is None:
            self.set_batch(config, max(1024, 9.3 * useful**0.383))
        set_missing(config, gradient_accumulation_steps=self.processes.world_size)
        set_missing(config, **self.regularisation(config, tokens))
        return config

    def regularisation(self, config, tokens: float) -> dict:
        """Return what keeps a model that sees so many tokens from memorising the text. How well it
        could is `memorisation`: epochs times parameters per token of the text."""
        epochs = tokens / self.train_tokens
        memorisation = epochs * self.parameters(config) / self.train_tokens
        bpe_dropout = 0.0
        if self.can_vary and epochs >= BPE_DROPOUT_EPOCHS:
            if memorisation >= BPE_DROPOUT_MEMORISATION:
                bpe_dropout = 0.05
            if memorisation >= 10 * BPE_DROPOUT_MEMORISATION:
                bpe_dropout = 0.1
        return {
            "dropout": 0.1 if memorisation >= DROPOUT_MEMORISATION else 0.0,
            "bpe_dropout": bpe_dropout,
        }

    def set_batch(self, config, tokens: float):
        """Set batch_size for steps of about so many tokens, and accumulate if it is too large:
        8 sequences of 2048 tokens for 16,384 become micro-batches of 4, two for each process."""
        micro_steps = config.gradient_accumulation_steps or self.processes.world_size
        batch_size = nearest_power_of_two(tokens / config.block_size / micro_steps)
        most = max(1, MICRO_BATCH_TOKENS // config.block_size)
        while batch_size > most:
            batch_size //= 2
            micro_steps *= 2
        set_missing(config, batch_size=batch_size, gradient_accumulation_steps=micro_steps)

    def schedule(self, config, step: float) -> dict:
        """Return how many steps of `step` seconds fill the time with evaluations. eval_tokens is
        -1 if the last one covers the whole split, and those before a part (see eval_part)."""
        step_seconds = 1.05 * step  # with its data and the log
        seconds = max(step_seconds, self.seconds_left() - SAVING)
        n_evaluations = max(3, min(10, int(self.seconds_left() // 60)))  # one a minute
        trial = copy.copy(config)
        set_missing(trial, eval_interval=seconds / step_seconds / n_evaluations, eval_tokens=-1)
        part = min(eval_part(trial) or math.inf, self.val_tokens)  # tokens of an evaluation
        eval_seconds = evaluation_time(config, step_seconds, part)
        eval_seconds += saving_time(self.parameters(config))
        if config.eval_interval:
            interval_seconds = config.eval_interval * step_seconds + eval_seconds
            n_evaluations = max(1.0, seconds / interval_seconds)
        else:  # in half of the time at most
            n_evaluations = max(1, min(n_evaluations, int(seconds / 2 / eval_seconds)))
        eval_tokens = part
        whole_seconds = evaluation_time(config, step_seconds, self.val_tokens)
        is_part = trial.eval_tokens == -1 and part < self.val_tokens
        if is_part and whole_seconds < seconds / 5:
            eval_tokens = -1
            seconds -= whole_seconds
        fitting = max(1, int((seconds - n_evaluations * eval_seconds) / step_seconds))
        most = most_steps(config, self.train_tokens)
        max_iters = min(fitting, most)
        interval = math.ceil(max_iters / n_evaluations)
        return {"max_iters": max_iters, "eval_interval": interval, "eval_tokens": eval_tokens}

    def decays(self) -> dict:
        """Return AdamW's and Muon's weight decay: 1 / (rate * steps in which matrices forget), from
        0.1 to 0.8. They forget within 0.8 epochs, or 8 / epochs if the run has fewer than ten. With
        init_from both are 0.1."""
        config = self.config
        if config.weight_decay is not None:
            return {}
        if config.init_from != "scratch":
            return {"weight_decay": 0.1, "muon_decay": 0.1}
        steps_of_epoch = self.train_tokens / tokens_per_step(config)
        epochs = config.max_iters / steps_of_epoch
        steps = max(0.8, 8 / epochs) * steps_of_epoch

        def decay(rate):
            return round(min(max(1 / max(1, steps * rate), 0.1), 0.8), 2)

        return {"weight_decay": decay(config.learning_rate), "muon_decay": decay(config.muon_lr)}

    def parameters(self, config) -> int:
        """Return about how many parameters a GPT of this configuration has."""
        width = config.n_embd
        return 12 * config.n_layer * width**2 + width * self.vocab_size

    def enough_tokens(self, n_parameters: int) -> float:
        """Return how many tokens a model should see: 1.5 per parameter. If the text is short, four
        epochs, or more for a large model: 1.5 sqrt(24) = 7.3 for 24 parameters per token of it."""
        epochs = max(GOOD_EPOCHS, 1.5 * math.sqrt(n_parameters / self.train_tokens))
        return min(1.5 * n_parameters, epochs * self.train_tokens)

    def seconds_left(self) -> float:
        """Return the seconds of config.minutes that are left, by the slowest process's clock."""
        spent = time.perf_counter() - threads.STARTED
        spent = self.processes.all_reduce_max(round(1e6 * spent)) / 1e6
        return 60 * self.config.minutes - spent - self.compiling

    def time_step(self, config) -> float:
        """Return the mean seconds of a step, infinity without enough memory."""
        try:
            return self.measure_step(config)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        torch.compiler.reset()  # or the next shape would be compiled for all shapes
        return math.inf

    def measure_step(self, config) -> float:
        """Return the mean seconds of at most 20 steps of a configuration, after the first one."""
        candidate = copy.copy(config)
        fill_in(candidate, {"max_iters": 1, "weight_decay": 0.1})  # they change no step's time
        batch = self.data.batch(candidate, 0, self.processes)
        _, parallel, compiled, autocast, _, optimizers = self.set_up(candidate, self.data)
        # Seconds per model, so that four models use a tenth of the time.
        limit = min(0.025 * 60 * self.config.minutes, 3.75)
        # Minus the seconds left, at the start and after each step. The first step allocates, and
        # compiles.
        times = [-self.seconds_left()]
        worked = []  # seconds of this thread's processor, after each step
        name = f"measuring {candidate.n_layer} layers of {candidate.n_embd}"
        bar = progress_bar(21, desc=name, bar_format="{desc} |{bar}|")
        while len(times) < 3 or (len(times) <= 21 and times[-1] - times[1] <= limit):
            for idx, targets in batch:
                with autocast:
                    objective, _ = objective_and_parts(compiled(idx, targets))
                objective.backward()
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            objective.item()  # waits for a GPU
            times.append(-self.seconds_left())
            worked.append(time.thread_time())
            bar.update()
        bar.close()
        if compiled is not parallel:
            self.compiling = times[1] - times[0]  # the run compiles once more
            torch.compiler.reset()  # see time_step
        seconds = times[-1] - times[1]
        share = (worked[-1] - worked[0]) / seconds  # low if other programs have the processor
        self.busy |= share < 0.75 and self.processes.device == "cpu"
        return seconds / (len(times) - 2)


def complete(config, last: str, resumed, small: dict, longest: float, set_up, processes):
    """Set the fields of train.py's configuration that are None: by a plan for a run of --minutes,
    to the values of `small` for one of --max_iters. A resumed run has its values already.

    last: the last flag of these two, or ""; resumed: the progress of a run that has all its
    settings, or None; longest: the longest sequence that --init_from allows; set_up: the try_out
    of train.py.
    """
    is_planned = last == "minutes" or config.max_iters is None
    if config.resume and last == "minutes":  # so many more
        extend(config, resumed)
    elif not resumed and is_planned and not config.eval_only:  # a new run
        config.max_iters = None
        plan_run(config, longest, set_up, processes)
    elif not resumed or last == "max_iters":  # a run whose steps set its length, from now on
        config.minutes = 0.0
        fill_in(config, small | {"block_size": min(small["block_size"], longest)})


def plan_run(config, longest: float, set_up, processes):
    """Plan the fields that are None for a run of config.minutes, and print the plan."""
    data = Dataset(config.dataset, config.block_size or 1, eval_tokens=1)  # neither matters here
    planner = Planner(config, data, longest, set_up, processes)
    planned = [name for name, value in vars(config).items() if value is None]
    if config.optimizer != "muon":
        planned = [name for name in planned if not name.startswith("muon")]
    planner.plan()
    plan = []
    for name in planned:
        value = getattr(config, name)
        if value is not None:
            plan.append(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}")
    text = f"plan for {config.minutes:g} min: {', '.join(plan)}"
    print(textwrap.fill(text, 100, subsequent_indent="    "))
    if planner.busy:
        print("The machine is busy with other programs: this plan is small.")


def extend(config, progress):
    """--resume --minutes=5: plan five more minutes, at the run's mean speed so far."""
    steps = max(1, round(60 * config.minutes * progress.step / progress.seconds))
    print(f"plan for {config.minutes:g} more min: about {steps:,} more steps")
    config.minutes += progress.seconds / 60
    config.max_iters = progress.step + steps


class Clock:
    """The seconds of a run, of all its sessions. If it has a time budget, max_iters follows the
    speed of the machine: as many steps as fit, but none after which the run would overfit."""

    def __init__(self, config, data: Dataset, model, progress, processes):
        self.config = config
        self.progress = progress
        self.processes = processes
        self.before = progress.seconds  # of earlier sessions
        self.eval_tokens = data.val_targets
        self.all_tokens = len(data.val) - 1  # of the last evaluation, if it covers the whole split
        self.n_parameters = sum(p.numel() for p in model.parameters())
        self.most = most_steps(config, data.n_tokens)
        self.good_epochs = GOOD_EPOCHS
        self.first_step = progress.step
        self.last_look = 0.0
        self.newest = []  # seconds of steps
        self.means = []  # of about ten steps each
        self.evaluation = None  # seconds of the last one, with its checkpoint

    def seconds(self) -> float:
        """Return the seconds since the command's start, and of earlier sessions."""
        return time.perf_counter() - threads.STARTED + self.before

    def step_time(self) -> float:
        """Return the seconds of a step. One interruption does not change the median."""
        return statistics.median(self.means[-5:] or self.newest or [0.0])

    def evaluation_time(self) -> float:
        """Return the seconds of an evaluation with its checkpoint."""
        expected = evaluation_time(self.config, self.step_time(), self.eval_tokens)
        return self.evaluation or expected + saving_time(self.n_parameters)

    def evaluations_left(self, step: int, last: int) -> int:
        """Return how often a run of `last` steps evaluates from step `step` on."""
        return max(1, evaluations(last, self.config) - step // self.config.eval_interval)

    def left(self, step: int, last: int) -> float:
        """Return the seconds from step `step` to the end of a run of `last` steps."""
        n_evaluations = self.evaluations_left(step, last)
        seconds = (last - step) * self.step_time() + n_evaluations * self.evaluation_time()
        if self.config.eval_tokens == -1:  # the last one covers the whole split
            seconds += evaluation_time(self.config, self.step_time(), self.all_tokens)
        return seconds

    def look(self, step: int) -> bool:
        """Note when step `step` begins. Return whether max_iters has changed, by the first
        process's clock."""
        now = self.seconds()
        elapsed = now - self.last_look
        self.last_look = self.progress.seconds = now
        is_warm = step > self.first_step + 1  # the first one allocates, and compiles
        has_news = is_warm and self.note(step, elapsed)
        if not self.config.minutes:
            return False
        before = self.config.max_iters
        fitting = before
        if has_news:
            fitting = self.fitting_steps(step, 60 * self.config.minutes - now)
        proposed = fitting if self.processes.is_main else 0  # the first process's is the largest
        self.config.max_iters = self.processes.all_reduce_max(proposed)
        return self.config.max_iters != before

    def note(self, step: int, elapsed: float) -> bool:
        """Note the seconds of the step before `step`, or of that and its evaluation, which counts
        as a step if no step_time is known yet. Return whether one of the two times has changed."""
        if evaluates_after(step, self.config) and self.means:
            self.evaluation = max(0.01, elapsed - self.step_time())
            return True
        self.newest.append(elapsed)
        at_least = 10 if self.processes.device == "cuda" else 1  # reports wait for a GPU
        enough = max(1.0, 0.03 * 60 * self.config.minutes)  # seconds
        if len(self.newest) < at_least or sum(self.newest) < enough:
            return False
        self.means.append(statistics.mean(self.newest))
        self.newest = []
        return True

    def fitting_steps(self, step: int, seconds_left: float) -> int:
        """Return max_iters, or another number if the run would miss its end by more than 1 % of all
        its time and 10 % of what is left. Before the first of several evaluations, whose time is
        not known yet, it does not grow."""
        last = self.config.max_iters
        too_late = self.left(step, last) + SAVING - seconds_left
        is_first = not self.evaluation and self.evaluations_left(step, last) > 1
        if too_late < 0 and is_first:
            return last
        if abs(too_late) <= max(0.01 * 60 * self.config.minutes, 0.1 * seconds_left):
            return last
        longer = range(step + 1, max(self.most, last) + 1)
        fit = bisect.bisect(longer, seconds_left - SAVING, key=lambda n: self.left(step, n))
        return step + max(1, fit)
