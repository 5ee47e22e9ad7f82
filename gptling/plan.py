"""Plan a training run for a given time: train.py --minutes.

The rules are fitted to the sweeps in docs/minutes.md. Parameters grow with the tokens as in
Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, batches as in Bergsma et al. 2025,
https://arxiv.org/abs/2505.13738."""

import bisect
import copy
import math
import statistics
import time

import torch

from gptling import threads
from gptling.cli import is_out_of_memory, progress_bar
from gptling.dataset import Dataset, tokens_per_step
from gptling.loss import objective_and_parts

# Layers and widths to choose from: the largest model that sees enough tokens in the time.
SHAPES = [(2, 64), (2, 96), (2, 128), (2, 192), (2, 256)]
SHAPES += [(3, 256), (4, 384), (6, 512), (12, 768), (16, 1024)]
TOKENS_PER_PARAMETER, ENOUGH_EPOCHS = 1.5, 4  # either is enough
MAX_EPOCHS, SHORT_TEXT_STEPS = 16, 600  # the larger of the two ends a run,
FINE_TUNING_EPOCHS, FINE_TUNING_STEPS = 6, 100  # or one of --init_from
# The largest model has so many parameters per token of the text, or so many.
PARAMETERS_PER_TOKEN, SHORT_TEXT_PARAMETERS = 25, 2_600_000
DROPOUT_MEMORISATION = 35  # see Planner.fields_for
EVALUATING_SHARE = 0.04  # of the time, but for a last evaluation of the whole split
MICRO_BATCH_TOKENS = 8192  # at most, so that the largest model fits a GPU of 24 GB
SAVING, SAVING_PER_PARAMETER = 0.4, 1e-7  # seconds of a checkpoint and its sample: the larger


def fill_in(config, values: dict):
    """Set the fields of train.py's configuration that are None to these values, and rates and the
    warm-up to what fits them. Wide models need lower rates, trained ones (init_from) a tenth."""
    given = {name: value for name, value in vars(config).items() if value is not None}
    vars(config).update(values | given)
    width, tenth = config.n_embd, 1 if config.init_from == "scratch" else 10
    rate = 0.01 * min(1, 192 / width)
    if config.optimizer == "adamw":
        rate = 0.001 * math.sqrt(256 / width)
    rates = {"learning_rate": rate / tenth, "warmup_iters": math.ceil(config.max_iters / 50)}
    rates["muon_lr"] = 0.05 * min(1, math.sqrt(128 / width)) / tenth
    rates["min_lr"] = (rates | given)["learning_rate"] / 100
    vars(config).update(rates | given)


def eval_part(fields: dict) -> int:
    """Return how many tokens an evaluation covers, 0 for all. If eval_tokens is None, evaluations
    have a share of the time. A token costs a third of its training, without a backward pass."""
    tokens = EVALUATING_SHARE * fields["eval_interval"] * 3 * tokens_per_step(fields)
    given = fields.get("eval_tokens")
    return max(fields["block_size"], int(tokens)) if given is None else given


def evaluation_time(fields: dict, step: float, tokens: float) -> float:
    """Return the seconds of an evaluation, by those of a step: a third, without a backward pass."""
    return step * tokens / tokens_per_step(fields) / 3


def saving_time(n_parameters: int) -> float:
    """Return the seconds of a checkpoint and its sample."""
    return max(SAVING, SAVING_PER_PARAMETER * n_parameters)


def most_steps(fields: dict, train_tokens: int) -> int:
    """Return after how many steps a run ends before it overfits."""
    epochs, steps = MAX_EPOCHS, SHORT_TEXT_STEPS
    if fields["init_from"] != "scratch":
        epochs, steps = FINE_TUNING_EPOCHS, FINE_TUNING_STEPS
    return max(steps, int(train_tokens * epochs / tokens_per_step(fields)))


class Planner:
    """The rules. They plan the fields of train.py's configuration that are None."""

    def __init__(self, config, data: Dataset, longest: float, set_up, processes):
        self.config, self.data, self.set_up, self.processes = config, data, set_up, processes
        self.fixed = {name: value for name, value in vars(config).items() if value is not None}
        self.train_tokens, self.val_tokens = data.n_tokens, len(data.val)
        self.vocab_size, self.longest = data.tokenizer.n_vocab, min(longest, data.longest)
        self.compiling = 0.0  # seconds
        self.overfits = self.busy = False  # with all of the time; if other programs compute now

    def plan(self) -> dict:
        """Return the fields that make the best of the time."""
        candidate, step = self.choose_model()
        tokens = self.schedule(candidate, step)["max_iters"] * tokens_per_step(candidate)
        fields = self.fields_for(candidate["n_layer"], candidate["n_embd"], tokens)
        if fields != candidate:
            its_step = self.time_step(fields)
            if its_step < math.inf:
                return fields | self.schedule(fields, its_step)
        return candidate | self.schedule(candidate, step)

    def choose_model(self) -> tuple[dict, float]:
        """Return the fields of the largest model that sees enough tokens, and a step's seconds."""
        candidates = [self.fields_for(*shape) for shape in SHAPES]
        models = {self.parameters(fields): fields for fields in candidates}
        most = max(SHORT_TEXT_PARAMETERS, PARAMETERS_PER_TOKEN * self.train_tokens)
        models = {n: fields for n, fields in models.items() if n <= most}
        n = min(models) if "n_embd" in self.fixed else list(models)[:3][-1]
        seconds, times = max(1.0, self.seconds_left()), {}  # of a token, of those measured
        while n not in times:
            times[n] = self.time_step(models[n]) / tokens_per_step(models[n])
            # It grows a little less than the parameters do.
            estimates = {m: times[n] * (m / n) ** 0.85 for m in models} | times
            enough = [m for m in models if seconds / estimates[m] >= self.enough_tokens(m)]
            n = max(enough, default=min(models))
        # A larger one that is hardly slower is better: bfloat16 pays from a width of 128 on.
        n = max(m for m in times if times[m] <= 1.2 * times[n])
        return models[n], times[n] * tokens_per_step(models[n])

    def fields_for(self, n_layer: int, n_embd: int, tokens: float = 0) -> dict:
        """Return the fields of a model that sees so many tokens, or enough (0)."""
        width = self.fixed.get("n_embd", n_embd)
        heads = range(max(1, width // (32 if width < 256 else 64)), 0, -1)  # of so many channels
        n_head = self.fixed.get("n_head", next(n for n in heads if width % n == 0))
        fields = {"n_layer": n_layer, "n_head": n_head, "n_embd": width} | self.fixed
        n = self.parameters(fields)
        tokens = tokens or self.enough_tokens(n)
        # Epochs times parameters per token of the text: how well it could be memorised.
        memorisation = tokens / self.train_tokens * n / self.train_tokens
        tokens = min(tokens, ENOUGH_EPOCHS * self.train_tokens)  # later epochs do not count
        block_size = 2 ** round(math.log2(max(64, tokens**0.6 / 72)))  # nearest power of two
        fields["block_size"] = min(1024, block_size, self.longest)
        fields["dropout"] = 0.1 if memorisation >= DROPOUT_MEMORISATION else 0.0
        decay = 0.1 if self.config.init_from != "scratch" else 0.1 + memorisation / 1600
        fields["weight_decay"] = round(min(0.8, decay), 2)
        fields |= {"batch_size": 1, "gradient_accumulation_steps": self.processes.world_size}
        fields |= self.fixed
        if "batch_size" not in self.fixed:
            sequences = max(1024, 9.3 * tokens**0.383) / tokens_per_step(fields)
            fields["batch_size"] = 2 ** max(0, round(math.log2(sequences)))
            while fields["batch_size"] > max(1, MICRO_BATCH_TOKENS // fields["block_size"]):
                fields["batch_size"] //= 2
                fields["gradient_accumulation_steps"] *= 2
        return fields | self.fixed

    def schedule(self, fields: dict, step: float) -> dict:
        """Return how many steps of `step` seconds fill the time with evaluations. eval_tokens is
        None if the last one covers the whole split, and those before a part (see eval_part)."""
        step = 1.05 * step  # with its data and the log
        seconds = max(step, self.seconds_left() - SAVING)
        n = max(3, min(10, int(self.seconds_left() // 60)))  # evaluations
        interval = self.fixed.get("eval_interval", seconds / step / n)
        part = min(eval_part({"eval_interval": interval} | fields) or math.inf, self.val_tokens)
        evaluation = evaluation_time(fields, step, part) + saving_time(self.parameters(fields))
        n = max(1, min(n, int(seconds / 2 / evaluation)))
        if "eval_interval" in self.fixed:
            n = max(1.0, seconds / (interval * step + evaluation))
        whole = evaluation_time(fields, step, self.val_tokens)
        if part < self.val_tokens and "eval_tokens" not in self.fixed and whole < seconds / 5:
            part = None
            seconds -= whole
        most = most_steps(fields, self.train_tokens)
        steps = max(1, int((seconds - n * evaluation) / step))
        self.overfits = steps >= most
        steps = min(steps, most)
        return {"max_iters": steps, "eval_interval": math.ceil(steps / n), "eval_tokens": part}

    def parameters(self, sizes: dict) -> int:
        """Return about how many parameters a GPT of these sizes has."""
        width = sizes["n_embd"]
        return 12 * sizes["n_layer"] * width**2 + width * self.vocab_size

    def enough_tokens(self, n_parameters: int) -> float:
        """Return how many tokens a model should see."""
        return min(TOKENS_PER_PARAMETER * n_parameters, ENOUGH_EPOCHS * self.train_tokens)

    def seconds_left(self) -> float:
        spent = time.perf_counter() - threads.STARTED
        spent = self.processes.all_reduce_max(round(1e6 * spent)) / 1e6
        return 60 * self.config.minutes - spent - self.compiling

    def time_step(self, fields: dict) -> float:
        """Return the mean seconds of a step with these fields, infinity without enough memory."""
        try:
            return self.measure_step(fields)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        torch.compiler.reset()  # or the next shape would be compiled for all shapes
        return math.inf

    def measure_step(self, fields: dict) -> float:
        """Return the mean seconds of at most 20 steps with these fields, after the first one."""
        candidate = copy.copy(self.config)
        fill_in(candidate, fields | {"max_iters": 1})
        batch = self.data.batch(candidate, 0, self.processes)
        _, parallel, compiled, autocast, _, optimizers = self.set_up(candidate, self.data)
        limit = min(1.5 * self.config.minutes, 3.75)  # seconds: four times are a tenth of all
        left = [self.seconds_left()]  # before each step. The first one allocates, and compiles
        worked = []  # seconds of this thread's processor, after each step
        name = f"measuring {candidate.n_layer} layers of {candidate.n_embd}"
        bar = progress_bar(21, desc=name, bar_format="{desc} |{bar}|")
        while len(left) < 3 or (len(left) <= 21 and left[1] - left[-1] <= limit):
            for idx, targets in batch:
                with autocast:
                    objective, _ = objective_and_parts(compiled(idx, targets))
                objective.backward()
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            objective.item()  # waits for a GPU
            left.append(self.seconds_left())
            worked.append(time.thread_time())
            bar.update()
        bar.close()
        if compiled is not parallel:
            self.compiling = left[0] - left[1]  # the run compiles once more
            torch.compiler.reset()  # see time_step
        seconds = left[1] - left[-1]
        share = (worked[-1] - worked[0]) / seconds  # a thread that waits for others has slept
        self.busy |= share < 0.75 and self.processes.device == "cpu"
        return seconds / (len(left) - 2)


def plan_run(config, longest: float, set_up, processes):
    """Fill in what is None in train.py's configuration for a run of config.minutes, and print it.
    longest: the longest sequence that --init_from allows; set_up: train.py's."""
    data = Dataset(config.dataset, config.block_size or 1, eval_tokens=1)
    planner = Planner(config, data, longest, set_up, processes)
    fill_in(config, planner.plan())
    start = f"plan for {config.minutes:g} min: "
    muon = f", muon_lr {config.muon_lr:.3g}" if config.optimizer == "muon" else ""
    print(
        f"{start}{config.n_layer} layers of {config.n_embd}, {config.max_iters:,} steps, "
        f"dropout {config.dropout:g}, weight_decay {config.weight_decay:.3g},\n"
        f"{' ' * len(start)}learning_rate {config.learning_rate:.3g}{muon}"
    )
    if planner.busy:
        print("The machine is busy with other programs: this plan is small.")
    if planner.overfits:
        print("It ends before it overfits: more text would help now, more time would not.")


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
        self.config, self.progress, self.processes = config, progress, processes
        self.before = progress.seconds  # of earlier sessions
        self.tokens, self.all_tokens = data.val_targets, len(data.val) - 1  # of evaluations
        self.n_parameters = sum(p.numel() for p in model.parameters())
        self.most = most_steps(vars(config), data.n_tokens)
        self.first_step = progress.step
        self.last_look = 0.0
        self.newest, self.means = [], []  # seconds of steps, and the means of about ten
        self.evaluation = None  # seconds of the last one, with its checkpoint

    def seconds(self) -> float:
        """Return the seconds since the command's start, and of earlier sessions."""
        return time.perf_counter() - threads.STARTED + self.before

    def step_time(self) -> float:
        """Return the seconds of a step. One interruption does not change the median."""
        return statistics.median(self.means[-5:] or self.newest or [0.0])

    def evaluation_time(self) -> float:
        """Return the seconds of an evaluation with its checkpoint."""
        expected = evaluation_time(vars(self.config), self.step_time(), self.tokens)
        return self.evaluation or expected + saving_time(self.n_parameters)

    def left(self, step: int, last: int) -> float:
        """Return the seconds from step `step` to the end of a run of `last` steps."""
        interval = self.config.eval_interval
        n_evaluations = math.ceil(last / interval) - step // interval
        seconds = (last - step) * self.step_time() + n_evaluations * self.evaluation_time()
        if self.config.eval_tokens is None:  # the last one covers the whole split
            seconds += evaluation_time(vars(self.config), self.step_time(), self.all_tokens)
        return seconds

    def look(self, step: int) -> bool:
        """Note when step `step` begins. Return whether max_iters has changed, by the first
        process's clock."""
        config, now = self.config, self.seconds()
        elapsed = now - self.last_look
        self.last_look = self.progress.seconds = now
        # The first one allocates, and compiles.
        news = step > self.first_step + 1 and self.note(step, elapsed)
        if not config.minutes:
            return False
        before = config.max_iters
        fitting = self.fitting_steps(step, 60 * config.minutes - now) if news else before
        config.max_iters = self.processes.all_reduce_max(fitting * self.processes.is_main)
        return config.max_iters != before

    def note(self, step: int, elapsed: float) -> bool:
        """Note the seconds of the step before `step`, or of that and its evaluation. Return whether
        step_time or evaluation_time is another now."""
        if step % self.config.eval_interval == 0 and self.means:
            self.evaluation = max(0.01, elapsed - self.step_time())
            return True
        self.newest.append(elapsed)
        at_least = 10 if self.processes.device == "cuda" else 1  # it is waited for every ten steps
        if len(self.newest) < at_least or sum(self.newest) < max(1.0, 1.8 * self.config.minutes):
            return False
        self.means.append(statistics.mean(self.newest))
        self.newest = []
        return True

    def fitting_steps(self, step: int, seconds_left: float) -> int:
        """Return max_iters, or another number if the run would miss its end by more than 1 % of all
        its time and 10 % of what is left."""
        last = self.config.max_iters
        too_late = self.left(step, last) + SAVING - seconds_left
        if abs(too_late) <= max(0.6 * self.config.minutes, 0.1 * seconds_left):
            return last
        longer = range(step + 1, max(self.most, last) + 1)
        fit = bisect.bisect(longer, seconds_left - SAVING, key=lambda n: self.left(step, n))
        return step + max(1, fit)
