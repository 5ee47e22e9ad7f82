"""Plan a training run for a given time: train.py --minutes.

The rules are fitted to the sweeps in docs/minutes.md. Parameters grow with the tokens as in
Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, batches as in Bergsma et al. 2025,
https://arxiv.org/abs/2505.13738.
"""

import copy
import math
import time
from contextlib import redirect_stdout

import torch

from gptling.dataset import Dataset, micro_batches, tokens_per_step
from gptling.loss import objective_and_parts

STARTED = time.perf_counter() - time.process_time()  # of the program: its imports took CPU time
# Layers and widths to choose from: the largest model that sees enough tokens in the time.
SHAPES = [(2, 64), (2, 96), (2, 128), (2, 192), (2, 256)]
SHAPES += [(3, 256), (4, 384), (6, 512), (12, 768), (16, 1024)]
TOKENS_PER_PARAMETER, ENOUGH_EPOCHS = 1.5, 4  # either is enough
MAX_EPOCHS, SHORT_TEXT_STEPS = 12, 200  # the larger of the two ends a run
MAX_PARAMETERS_PER_TOKEN = 25  # of the text. Times the epochs, they are its memorisation:
DROPOUT_MEMORISATION, MAX_MEMORISATION = 35, 200
EVALUATING_SHARE, LAST_EVALUATION = 0.04, 0.2  # of the time, at most: parts; the whole split
MEASURING_SHARE, MEASURING_SECONDS = 0.1, 15.0  # of the time; the smaller of the two
RESERVE = 1.05  # times a step: for data and the log
SAVING, SAVING_PER_PARAMETER = 0.4, 1e-7  # seconds of a checkpoint and its sample: the larger


def fill_in(config, values: dict):
    """Set those fields of train.py's configuration that are None: to these values, and the rates
    and the warm-up to what fits them. Wide models need lower rates, and a model that is trained
    already (init_from) a tenth. AdamW has lower ones if it trains the matrices, too."""
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


class Planner:
    """The rules. They plan the fields of train.py's configuration that are None."""

    def __init__(self, config, data: Dataset, longest: float, set_up, processes):
        self.config, self.data, self.set_up, self.processes = config, data, set_up, processes
        self.fixed = {name: value for name, value in vars(config).items() if value is not None}
        self.train_tokens, self.val_tokens = data.n_tokens, len(data.val)
        self.vocab_size, self.longest = data.tokenizer.n_vocab, min(longest, data.longest)
        self.compiling, self.memory = 0.0, math.inf  # seconds, bytes
        if processes.device == "cuda":
            self.memory = -0.8 * processes.all_reduce_max(-torch.cuda.mem_get_info()[0])

    def plan(self) -> dict:
        """Return the fields that make the best of the time. At most four settings are timed."""
        candidate, step = self.choose_model()
        steps = self.schedule(candidate, step)["max_iters"]
        fields = self.fields_for(candidate, steps * tokens_per_step(candidate))
        if fields != candidate:
            step = self.time_step(fields)
        return fields | self.schedule(fields, step)

    def choose_model(self) -> tuple[dict, float]:
        """Return the fields of the largest model that sees enough tokens, and a step's seconds."""
        widest = max(self.fixed.get("n_embd", math.inf), SHAPES[0][1])
        sizes = [self.sizes(*shape) for shape in SHAPES if shape[1] <= widest]
        sizes = [s for i, s in enumerate(sizes) if s not in sizes[:i]]
        models = [self.fields_for(s, self.enough_tokens(s)) for s in sizes]
        most = MAX_PARAMETERS_PER_TOKEN * self.train_tokens
        models[1:] = [m for m in models[1:] if self.fits(m) and self.parameters(m) <= most]
        seconds = max(1.0, self.seconds_left())
        per_token = {}  # seconds for a token, of the models that are measured

        def nearest(i):
            return min(per_token, key=lambda j: abs(j - i))

        def sees_enough(i):  # a token's time grows a little less than the parameters do
            ratio = self.parameters(models[nearest(i)]) / self.parameters(models[i])
            return seconds / per_token[nearest(i)] * ratio**0.85 >= self.enough_tokens(models[i])

        best = 0 if "n_embd" in self.fixed else min(2, len(models) - 1)  # 2: bfloat16 may pay
        while best not in per_token and len(per_token) < 3:
            step = self.time_step(models[best])
            per_token[best] = step / tokens_per_step(models[best])
            best = max(filter(sees_enough, range(len(models))), default=0)
        # A larger one that is hardly slower is better.
        best = max(i for i in per_token if per_token[i] <= 1.2 * per_token[nearest(best)])
        return models[best], per_token[best] * tokens_per_step(models[best])

    def sizes(self, n_layer: int, n_embd: int) -> dict[str, int]:
        """Return the sizes of a shape. Heads have 32 channels, or 64 from a width of 256."""
        width = self.fixed.get("n_embd", n_embd)
        heads = range(max(1, width // (32 if width < 256 else 64)), 0, -1)
        n_head = self.fixed.get("n_head", next(n for n in heads if width % n == 0))
        width = self.fixed.get("n_embd", math.ceil(width / n_head) * n_head)
        return {"n_layer": self.fixed.get("n_layer", n_layer), "n_head": n_head, "n_embd": width}

    def fields_for(self, sizes: dict, tokens: float) -> dict:
        """Return the sizes with the dropout, sequences and batches for a run of so many tokens."""
        memorisation = tokens / self.train_tokens * self.parameters(sizes) / self.train_tokens
        tokens = min(tokens, ENOUGH_EPOCHS * self.train_tokens)  # later epochs do not count
        block_size = 2 ** round(math.log2(max(64, tokens**0.6 / 72)))  # nearest power of two
        fields = sizes | {
            "dropout": 0.1 if memorisation >= DROPOUT_MEMORISATION else 0.0,
            "block_size": min(1024, block_size, self.longest),
            "gradient_accumulation_steps": self.processes.world_size,
            "batch_size": 1,
        }
        fields |= self.fixed
        if "batch_size" not in self.fixed:
            sequences = max(1024, 9.3 * tokens**0.383) / tokens_per_step(fields)
            fields["batch_size"] = 2 ** max(0, round(math.log2(sequences)))
        may_accumulate = not self.fixed.keys() & {"batch_size", "gradient_accumulation_steps"}
        while may_accumulate and fields["batch_size"] > 1 and not self.fits(fields):
            fields["batch_size"] //= 2
            fields["gradient_accumulation_steps"] *= 2
        return fields

    def schedule(self, fields: dict, step: float) -> dict:
        """Return how many steps of `step` seconds fill the time with evaluations. eval_tokens is
        None if the last one covers the whole split, and those before a part (see eval_part)."""
        seconds, step = self.seconds_left() - SAVING, RESERVE * step
        at_once = tokens_per_step(fields)
        most = max(1.0, seconds / step)  # steps
        n = max(3, min(10, int(seconds // 60)))  # evaluations
        interval = min(most, self.fixed.get("eval_interval", most / n))
        part = eval_part({"eval_interval": interval} | fields) or self.val_tokens
        # In steps. A token costs a third of its training.
        evaluation = min(part, self.val_tokens) / at_once / 3
        evaluation += max(SAVING, SAVING_PER_PARAMETER * self.parameters(fields)) / step
        n = max(1, min(n, int(most / 2 / evaluation)))
        if "eval_interval" in self.fixed:
            n = max(1.0, most / (interval + evaluation))
        last = self.val_tokens / at_once / 3
        eval_tokens = part if part < self.val_tokens else 0
        if eval_tokens and "eval_tokens" not in self.fixed and last < LAST_EVALUATION * most:
            eval_tokens, most = None, most - last
        steps = min(max(1, int(most - n * evaluation)), self.max_steps(fields))
        interval = math.ceil(steps / n)
        return {"max_iters": steps, "eval_interval": interval, "eval_tokens": eval_tokens}

    def parameters(self, sizes: dict) -> int:
        """Return about how many parameters a GPT of these sizes has."""
        width = sizes["n_embd"]
        return 12 * sizes["n_layer"] * width**2 + width * self.vocab_size

    def enough_tokens(self, sizes: dict) -> float:
        """Return how many tokens a model should see."""
        return min(TOKENS_PER_PARAMETER * self.parameters(sizes), ENOUGH_EPOCHS * self.train_tokens)

    def max_steps(self, fields: dict) -> int:
        """Return after how many steps a model begins to overfit a text that is short for it."""
        epochs = min(MAX_EPOCHS, MAX_MEMORISATION * self.train_tokens / self.parameters(fields))
        return max(SHORT_TEXT_STEPS, int(self.train_tokens * epochs / tokens_per_step(fields)))

    def fits(self, fields: dict) -> bool:
        """Return whether memory has room for the training state and a micro-batch's activations."""
        tokens = fields["batch_size"] * fields["block_size"]
        activations = 20 * fields["n_layer"] * fields["n_embd"] + 3 * self.vocab_size
        return 20 * self.parameters(fields) + 4 * tokens * activations <= self.memory

    def seconds_since(self, start: float) -> float:
        return self.processes.all_reduce_max(round(1e6 * (time.perf_counter() - start))) / 1e6

    def seconds_left(self) -> float:
        return 60 * self.config.minutes - self.seconds_since(STARTED) - self.compiling

    def time_step(self, fields: dict) -> float:
        """Return the mean seconds of a step on random tokens: of 20 at most, after the first."""
        candidate = copy.copy(self.config)
        fill_in(candidate, fields | {"max_iters": 1})
        batch_size, micro_steps = micro_batches(candidate, self.processes.world_size)
        idx = torch.randint(self.vocab_size, (batch_size, candidate.block_size))
        idx = self.processes.to_device(idx)
        with redirect_stdout(None):  # the run says it
            _, parallel, compiled, autocast, _, optimizers = self.set_up(candidate, self.data)
        limit = min(MEASURING_SHARE * 60 * self.config.minutes, MEASURING_SECONDS) / 4
        times = []  # the first step allocates, and compiles
        while len(times) < 2 or (len(times) <= 20 and sum(times[1:]) <= limit):
            start = time.perf_counter()
            for _ in range(micro_steps):
                with autocast:
                    objective, _ = objective_and_parts(compiled(idx, idx))
                objective.backward()
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            objective.item()  # waits for a GPU
            times.append(self.seconds_since(start))
        if compiled is not parallel:
            self.compiling = times[0]  # the run compiles once more
            torch.compiler.reset()  # or the next shape would be compiled for all shapes
        return sum(times[1:]) / len(times[1:])


def plan_run(config, longest: float, set_up, processes):
    """Plan a run of config.minutes from the program's start: fill in what is None in train.py's
    configuration, and print the plan. longest: the longest sequence that --init_from allows;
    set_up: train.py's."""
    data = Dataset(config.dataset, config.block_size or 1, eval_tokens=1)
    planner = Planner(config, data, longest, set_up, processes)
    fill_in(config, planner.plan())
    muon = f", muon_lr {config.muon_lr:.3g}" if config.optimizer == "muon" else ""
    ends = ". It ends before it overfits" * (config.max_iters >= planner.max_steps(vars(config)))
    print(
        f"plan for {config.minutes:g} min: {config.n_layer} layers of {config.n_embd}, "
        f"{config.max_iters:,} steps, dropout {config.dropout:g}, "
        f"learning_rate {config.learning_rate:.3g}{muon}{ends}"
    )
