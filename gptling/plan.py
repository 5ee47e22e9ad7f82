"""Plan a training run for a given time: train.py --minutes.

Rules are fitted to the sweeps in docs/experiments/planner, and named after them here. Parameters
grow with the tokens as in Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, batches as in
Bergsma et al. 2025, https://arxiv.org/abs/2505.13738, the weight decay as in Wang and Aitchison
2024, https://arxiv.org/abs/2405.13698."""

import copy
import math
import textwrap

import torch

from gptling import startup
from gptling.cli import is_out_of_memory, progress_bar
from gptling.clock import LEAST_TAUGHT, TEACHING
from gptling.dataset import Dataset
from gptling.evaluation import loss_terms
from gptling.schedule import (
    GOOD_EPOCHS,
    SAVING,
    can_be_followed,
    eval_part,
    evaluation_time,
    fill_in,
    most_steps,
    saving_time,
    set_missing,
    tokens_per_step,
)
from gptling.subwords import MOST_TOKENS
from gptling.tokenizers import has_merges

# Layers and widths to choose from: the largest model that sees enough tokens in the time. Sweeps
# "sizes" and "tokens".
SHAPES = [(2, 64), (2, 96), (2, 128), (2, 192), (2, 256)]
SHAPES += [(3, 256), (4, 384), (6, 512), (12, 768), (16, 1024)]
TOKENS_PER_PARAMETER = 1.5  # tokens that a model should see
# The largest model has so many parameters per token of the text, or so many, whichever is more.
PARAMETERS_PER_TOKEN = 25  # sweeps "repeated" and "minutes"
SHORT_TEXT_PARAMETERS = 2_600_000  # sweep "repeated"
# See Planner.regularisation. Sweeps "repeated" and "subwords".
DROPOUT_MEMORISATION = 35
BPE_DROPOUT_MEMORISATION = 100
BPE_DROPOUT_EPOCHS = 8
FORGETTING_EPOCHS = 0.8  # see Planner.decays. Sweep "decay"
MICRO_BATCH_TOKENS = 8192  # no more, so that the largest model fits a GPU of 24 GB


def nearest_power_of_two(number: float) -> int:
    """Return 1, 2, 4, ...: 64 for 70, and 1 for 0.3."""
    return 2 ** max(0, round(math.log2(number)))


class Planner:
    """The rules. They plan the fields of train.py's configuration that are None."""

    def __init__(self, config, data: Dataset, longest: float, set_up, processes):
        """longest: the longest sequence that loaded models allow; set_up: train.py's."""
        self.config = config
        self.data = data
        self.set_up = set_up
        self.processes = processes
        self.train_tokens = data.n_tokens
        self.val_tokens = len(data.val)
        self.longest = min(longest, data.longest)
        # Whether the text may have other tokens in each pass, by bpe_dropout.
        self.can_vary = (
            has_merges(data.tokenizer)
            and data.n_tokens <= MOST_TOKENS
            and config.init_from == "scratch"
        )
        self.compiling = 0.0  # seconds that the run will need for it once more

    def plan(self) -> float:
        """Set the fields that are None to what makes the best of the time. Return the seconds of
        the planned steps. Raises MemoryError."""
        chosen, step = self.choose_model()
        if step == math.inf:
            raise MemoryError

        planned = chosen
        for _ in range(2):
            tokens = self.schedule(planned, step)["max_iters"] * tokens_per_step(planned)
            planned = self.configuration(planned.n_layer, planned.n_embd, tokens)
            if not planned.bpe_dropout:
                break  # with it, more steps are allowed (most_steps), and other batches fit them
        if planned != chosen:
            its_step = self.time_step(planned)
            if its_step < math.inf:
                chosen = planned
                step = its_step
        fill_in(self.config, vars(chosen) | self.schedule(chosen, step))
        set_missing(self.config, **self.decays())
        return step * self.config.max_iters

    def choose_model(self) -> tuple:
        """Return the configuration of the largest model that fits into the memory and sees enough
        tokens, and a step's seconds. Models are measured until the best estimate is a measured one.
        An estimate is low on purpose, so that no model is left out before it is measured."""
        candidates = self.list_candidates()
        sizes = [self.parameters(candidate) for candidate in candidates]
        seconds = max(1.0, self.seconds_left())
        times = {}  # the seconds of a token, by the candidate's place. Infinity without memory
        base_size = 1  # the last model that was measured
        base_time = math.inf
        place = 0 if self.config.n_embd else min(2, len(candidates) - 1)
        while place not in times:
            candidate = candidates[place]
            times[place] = self.time_step(candidate) / tokens_per_step(candidate)
            if times[place] < math.inf:
                base_size = sizes[place]
                base_time = times[place]
            else:
                del sizes[place:]  # larger models do not fit either
            place = 0
            for i, size in enumerate(sizes):
                ratio = size / base_size
                estimate = base_time * min(ratio, ratio**0.6)
                if seconds / times.get(i, estimate) >= self.enough_tokens(size):
                    place = i
        # A larger model that is hardly slower than the best is better: bfloat16 pays from a width
        # of 128 on.
        place = max(i for i in times if times[i] <= 1.2 * times[place])
        return candidates[place], times[place] * tokens_per_step(candidates[place])

    def list_candidates(self) -> list:
        """Return the configurations to choose from, by size: the smallest, and all others that are
        not too large for the text."""
        most = max(SHORT_TEXT_PARAMETERS, PARAMETERS_PER_TOKEN * self.train_tokens)
        candidates = []
        for shape in SHAPES:
            candidate = self.configuration(*shape)
            fits = self.parameters(candidate) <= most or not candidates
            if fits and candidate not in candidates:  # equal ones if sizes are given
                candidates.append(candidate)
        return candidates

    def configuration(self, n_layer: int, n_embd: int, tokens: float = 0):
        """Return the configuration of a model that sees so many tokens, or enough (0)."""
        config = copy.copy(self.config)
        n_head = config.n_head or 1  # given heads have to divide the width
        set_missing(config, n_layer=n_layer, n_embd=max(n_head, n_embd - n_embd % n_head))
        tokens = tokens or self.enough_tokens(self.parameters(config))
        useful = min(tokens, GOOD_EPOCHS * self.train_tokens)  # later epochs teach less
        block_size = nearest_power_of_two(max(64, useful**0.6 / 72))
        set_missing(config, block_size=min(1024, block_size, self.longest))
        width = config.n_embd
        head_size = 32 if width < 256 else 64
        heads = range(max(1, width // head_size), 0, -1)
        set_missing(config, n_head=next(n for n in heads if width % n == 0))
        micro_steps = config.gradient_accumulation_steps or self.processes.world_size
        if config.batch_size is None:
            # A batch that is too large is accumulated: 8 sequences of 2048 tokens for 16,384 become
            # micro-batches of 4, two for each process.
            sequences = max(1024, 9.3 * useful**0.383) / config.block_size
            config.batch_size = nearest_power_of_two(sequences / micro_steps)
            while config.batch_size > max(1, MICRO_BATCH_TOKENS // config.block_size):
                config.batch_size //= 2
                micro_steps *= 2
        set_missing(config, gradient_accumulation_steps=micro_steps)
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
        memorises = memorisation >= DROPOUT_MEMORISATION
        return {
            "dropout": 0.1 if memorises else 0.0,
            "bpe_dropout": bpe_dropout,
            "later_tokens": 0.5 if memorises else 0.0,
        }

    def schedule(self, config, step: float) -> dict:
        """Return how many steps of `step` seconds fill the time with evaluations, the steps between
        these, and eval_tokens: -1 if the last evaluation covers the whole split, and those before
        it a part (see eval_part)."""
        step *= 1.05  # drawing its data and logging included
        seconds = max(step, self.seconds_left() - SAVING)
        wished = max(3, min(10, int(self.seconds_left() // 60)))  # one evaluation a minute
        trial = copy.copy(config)
        set_missing(trial, eval_interval=seconds / step / wished, eval_tokens=-1)
        part = min(eval_part(trial) or math.inf, self.val_tokens)  # tokens of an evaluation
        evaluating = evaluation_time(config, step, part) + saving_time(self.parameters(config))
        if config.eval_interval:
            n_evaluations = max(1.0, seconds / (config.eval_interval * step + evaluating))
        else:  # evaluations have half of the time at most
            n_evaluations = max(1, min(wished, int(seconds / 2 / evaluating)))
        whole = evaluation_time(config, step, self.val_tokens)
        ends_whole = trial.eval_tokens == -1 and part < self.val_tokens and whole < seconds / 5
        if ends_whole:
            seconds -= whole
        fitting = max(1, int((seconds - n_evaluations * evaluating) / step))
        max_iters = min(fitting, most_steps(config, self.train_tokens))
        return {
            "max_iters": max_iters,
            "eval_interval": math.ceil(max_iters / n_evaluations),
            "eval_tokens": -1 if ends_whole else part,
        }

    def decays(self) -> dict:
        """Return AdamW's and Muon's weight decay: 1 / (rate * steps), from 0.1 to 0.8, so that an
        update has decayed to 1 / e after so many steps. These are 0.8 epochs, or 8 / epochs if the
        run has fewer than ten. With init_from both decays are 0.1."""
        config = self.config
        if config.weight_decay is not None:
            return {}
        if config.init_from != "scratch":
            return {"weight_decay": 0.1, "muon_decay": 0.1}
        steps_of_epoch = self.train_tokens / tokens_per_step(config)
        epochs = config.max_iters / steps_of_epoch
        steps = FORGETTING_EPOCHS * steps_of_epoch * max(1, 10 / epochs)

        def decay(rate):
            return round(1 / min(max(steps * rate, 1.25), 10), 2)

        return {"weight_decay": decay(config.learning_rate), "muon_decay": decay(config.muon_lr)}

    def parameters(self, config) -> int:
        """Return about how many parameters a GPT of this configuration has."""
        width = config.n_embd
        return 12 * config.n_layer * width**2 + width * self.data.tokenizer.n_vocab

    def enough_tokens(self, n_parameters: int) -> float:
        """Return how many tokens a model should see: 1.5 per parameter. If the text is short, four
        epochs, or more for a large model: 1.5 sqrt(24) = 7.3 for 24 parameters per token of it."""
        epochs = max(GOOD_EPOCHS, 1.5 * math.sqrt(n_parameters / self.train_tokens))
        return min(TOKENS_PER_PARAMETER * n_parameters, epochs * self.train_tokens)

    def now(self) -> float:
        """Return the seconds since the command started, by the slowest process's clock."""
        return self.processes.all_reduce_max(startup.seconds())

    def seconds_left(self) -> float:
        """Return the seconds of config.minutes that are left."""
        return 60 * self.config.minutes - self.now() - self.compiling

    def time_step(self, config) -> float:
        """Return the mean seconds of a step, infinity without enough memory."""
        try:
            return self.measure_step(config)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return math.inf
        finally:
            torch.compiler.reset()  # otherwise the next shape would be compiled for all shapes

    def measure_step(self, config) -> float:
        """Return the mean seconds of at most 20 steps of a configuration, after the first one."""
        candidate = copy.copy(config)
        fill_in(candidate, {"max_iters": 1, "weight_decay": 0.1})  # they change no step's time
        batch = self.data.batch(candidate, 0, self.processes)
        model, forward, optimizers = self.set_up(candidate, self.data)
        # Seconds per model, so that four models use a twentieth of the time.
        limit = min(0.0125 * 60 * self.config.minutes, 3.75)
        times = [self.now()]  # the first step, which allocates and compiles, begins here
        name = f"measuring {candidate.n_layer} layers of {candidate.n_embd}"
        bar = progress_bar(21, desc=name, bar_format="{desc} |{bar}|")
        for _ in range(21):
            for i, (idx, targets) in enumerate(batch, 1):
                self.processes.sync_gradients(i == len(batch))
                with self.processes.autocast:
                    output = forward(idx, targets)
                    terms = loss_terms(model, output, targets, candidate.later_tokens)
                objective = sum(terms.values())
                objective.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            objective.item()  # waits for a GPU
            times.append(self.now())
            bar.update()
            if times[-1] - times[1] > limit:
                break
        bar.close()
        if self.processes.compiles(candidate):
            self.compiling = times[1] - times[0]  # the run compiles once more
        return (times[-1] - times[1]) / (len(times) - 2)


def complete(config, longest: float, set_up, processes):
    """Plan the fields that are None, and max_iters, for a run of config.minutes. Print the plan."""
    config.max_iters = None
    data = Dataset(config.dataset, config.block_size or 1, eval_tokens=1)  # neither matters here
    planner = Planner(config, data, longest, set_up, processes)
    before = dict(vars(config))
    seconds = planner.plan()
    plan = []
    for name, value in vars(config).items():
        is_used = config.optimizer == "muon" or not name.startswith("muon")
        if value != before[name] and is_used:
            form = ".3g" if isinstance(value, float) else ""
            plan.append(f"{name}={value:{form}}")
    text = f"plan for {config.minutes:g} min: {', '.join(plan)}"
    print(textwrap.fill(text, 100, subsequent_indent="    "))
    with_another = seconds * (1 + LEAST_TAUGHT * (1 + TEACHING))  # see next_model
    if can_be_followed(config) and with_another < planner.seconds_left():
        print(
            f"    one model needs {seconds / 60:.2g} min: "
            "if time is left, others follow, and the last learns from them"
        )
