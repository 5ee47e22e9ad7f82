"""The time of a run: how many steps and models fit into it, and what more time would bring."""

import bisect
import copy
import math
import shlex
import statistics

from gptling.schedule import (
    GOOD_EPOCHS,
    SAVING,
    TAUGHT,
    can_be_followed,
    evaluates_after,
    evaluation_time,
    evaluations,
    most_steps,
    saving_time,
)

MOST_TEACHERS = 3  # the largest number of teachers: docs/minutes.md
TEACHING = 1 / 3  # a teacher's share of a step: it has no backward pass
LEAST_TAUGHT = 0.5  # share of the first model's steps, from which on a taught one is better


class Clock:
    """Measures steps and evaluations. If the run has a time budget, its number of steps follows the
    speed of the machine: as many as fit, but none after which the run would overfit."""

    def __init__(self, config, data, n_parameters: int, progress, processes):
        self.config = config
        self.data = data
        self.progress = progress
        self.processes = processes
        self.saving = saving_time(n_parameters)
        progress.most = most_steps(config, data.n_tokens)
        self.first_step = progress.step
        self.last_look = 0.0  # seconds
        self.newest = []  # the seconds of each of the newest steps
        self.means = []  # mean seconds of about ten steps each
        self.evaluation = None  # seconds of the last evaluation with its checkpoint

    def step_time(self) -> float:
        """Return the seconds of a step, 0 before the second step. One interruption does not change
        the median."""
        return statistics.median(self.means[-5:] or self.newest or [0.0])

    def evaluations_left(self, step: int, max_iters: int) -> int:
        """Return how often a run of max_iters steps evaluates from step `step` on."""
        return max(1, evaluations(max_iters, self.config) - step // self.config.eval_interval)

    def seconds_left(self, step: int, max_iters: int) -> float:
        """Return the seconds from step `step` to the end of a run of max_iters steps, 0 while no
        step is measured."""
        step_time = self.step_time()
        if not step_time:
            return 0.0
        expected = evaluation_time(self.config, step_time, self.data.val_targets) + self.saving
        seconds = (max_iters - step) * step_time
        seconds += self.evaluations_left(step, max_iters) * (self.evaluation or expected)
        if self.config.eval_tokens == -1:  # the last evaluation covers the whole split
            seconds += evaluation_time(self.config, step_time, len(self.data.val) - 1)
        return seconds

    def note(self, step: int, elapsed: float) -> bool:
        """Note the seconds since the last call: a step's, perhaps with an evaluation. Before
        step_time is known, both count as a step. Return whether one of the times has changed."""
        if evaluates_after(step, self.progress.max_iters, self.config) and self.means:
            self.evaluation = max(0.01, elapsed - self.step_time())
            return True
        self.newest.append(elapsed)
        # Python is ahead of a GPU until a report waits for it.
        at_least = 10 if self.processes.device == "cuda" else 1
        enough = max(1.0, 0.03 * 60 * self.config.minutes)  # seconds
        if len(self.newest) < at_least or sum(self.newest) < enough:
            return False
        self.means.append(statistics.mean(self.newest))
        self.newest = []
        return True

    def fitting_steps(self, step: int) -> int:
        """Note that step `step` begins. Return the number of steps that fit into the time budget,
        by the first process's clock. Without a budget, or news of a time, it is max_iters."""
        now = self.progress.seconds
        elapsed = now - self.last_look
        self.last_look = now
        is_warm = step > self.first_step + 1  # the first step allocates, and compiles
        has_news = is_warm and self.note(step, elapsed)
        fitting = self.progress.max_iters
        if not self.config.minutes:
            return fitting
        if has_news:
            fitting = self.steps_within(60 * self.config.minutes - now, step)
        # The other processes have 0, so that the first one's is the largest.
        return self.processes.all_reduce_max(fitting * self.processes.is_main)

    def steps_within(self, seconds: float, step: int) -> int:
        """Return max_iters, or another number if the run, now at step `step`, would miss its end by
        more than 1 % of all its time and 10 % of these seconds. Before the first of several
        evaluations, whose time is not known yet, the number does not grow."""
        max_iters = self.progress.max_iters
        too_late = self.seconds_left(step, max_iters) + SAVING - seconds
        is_first = not self.evaluation and self.evaluations_left(step, max_iters) > 1
        if too_late < 0 and is_first:
            return max_iters
        if abs(too_late) <= max(0.01 * 60 * self.config.minutes, 0.1 * seconds):
            return max_iters
        possible = range(step + 1, max(self.progress.most, max_iters) + 1)
        fit = bisect.bisect(possible, seconds - SAVING, key=lambda n: self.seconds_left(step, n))
        return step + max(1, fit)


def next_model(config, progress, processes):
    """Return the configuration of the model that a run trains after this one, which has ended, or
    None. Once a model would overfit, time is better spent on another one: first on models that
    differ by their seeds, if a last model that learns from all of them has time after them, and
    then on that one, for at most TAUGHT times as many steps."""
    if not (can_be_followed(config) and config.minutes and progress.can_teach):
        return None
    if progress.step < max(progress.most, progress.max_iters):
        return None
    n = config.models_before + 1
    # The time left, as a multiple of this model's time. The first process's clock decides.
    now = progress.seconds
    left = (60 * config.minutes - now) / (now - progress.began)
    left = processes.all_reduce_max(processes.is_main * round(left, 3))
    following = copy.copy(config)
    following.models_before = n
    following.max_iters = progress.max_iters
    if n < MOST_TEACHERS and left >= 1 + (1 + TEACHING * (n + 1)):
        return following
    share = left / (1 + TEACHING * n)  # its steps, if a model without teachers has 1
    if share < LEAST_TAUGHT:
        return None
    following.max_iters = round(min(TAUGHT, share) * progress.max_iters)
    following.teacher = f"{config.out_dir}/teacher-*"  # see teacher_paths
    return following


def advice(config, data, progress, overfitted_since: int | None) -> str:
    """Return how often the text was seen by the last step, and whether more text or more time would
    help. overfitted_since: the step with the lowest validation loss, if the loss has risen clearly
    since then."""
    megabytes = float(f"{data.train_bytes / 1e6:.3g}")
    epochs = data.epochs(config, progress.step)
    command = f"python train.py --out_dir={shlex.quote(config.out_dir)} --resume"
    if overfitted_since and epochs >= GOOD_EPOCHS:
        hint = f"The model has overfitted since step {overfitted_since}: more text would help."
    elif progress.step >= progress.most:
        hint = "More text would help now. More time would not, because the model would overfit."
        if can_be_followed(config):
            minutes = math.ceil(1.5 * (progress.seconds - progress.began) / 60)
            hint = (
                "More text would help now. So would another model that learns from this one: "
                f"{command} --minutes={minutes}"
            )
    elif epochs < GOOD_EPOCHS:
        hint = f"More time would help: {command} --minutes=5. The model keeps its size."
    else:
        hint = "More time would help a little, and more text would help more."
    return f"The model has seen {megabytes:,g} MB of text {epochs:.2g} times. {hint}"
