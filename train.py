"""Train a GPT. Most runs need no more than these flags:

    --dataset=mine     train on data/mine, which prepare.py writes. Default: Python's library
    --minutes=10       set a time budget. Or --max_iters=500: set a number of steps
    --out_dir=out/mine write checkpoints and the log there. Default: out/DATASET
    --resume           continue the run in out_dir
    --init_from=gpt2   start from a run, a checkpoint, or a GPT-2 on the hub

    python train.py                                    # the quick start: one minute
    python train.py --dataset=mine --minutes=10        # trains on data/mine for ten minutes
    python train.py config/gpt2.toml --batch_size=8 --gradient_accumulation_steps=60
    torchrun --nproc_per_node=8 train.py config/gpt2.toml

This writes to out/NAME/: checkpoint-N/ (Hugging Face's GPT-2 format), log.jsonl, config.toml and,
if matplotlib is installed, loss.png.

References:
- Loshchilov and Hutter 2019, AdamW, https://arxiv.org/abs/1711.05101
- Micikevicius et al. 2018, mixed precision, https://arxiv.org/abs/1710.03740
- Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/
- Hägele et al. 2024, warm-up, stable, decay, https://arxiv.org/abs/2405.18392
"""

import math
from dataclasses import dataclass
from typing import Literal

import gptling.startup  # noqa: F401, has to come before PyTorch  # isort: skip
import torch

from gptling import cli, evaluation
from gptling.cli import Planned, PositiveInt, Share
from gptling.clock import Clock, next_model
from gptling.dataset import training_data
from gptling.muon import Muon
from gptling.pretrained import build_model
from gptling.processes import Processes, whole
from gptling.report import Report
from gptling.schedule import evaluates_after
from gptling.settings import settle
from gptling.state import State
from gptling.teachers import load_teachers, with_teachers
from model import GPT, GPTConfig
from prepare import prepare


@dataclass
class TrainConfig(GPTConfig):
    """All settings, with those of GPTConfig. Each field is a flag, and its comment is the help.
    None in a Planned field: gptling/settings.py sets it. --resume refuses a flag that changes a
    Fixed field. A Once field is for one start, and not saved with the run."""

    # model
    block_size: cli.Fixed[Planned[PositiveInt]] = None  # context length in tokens
    n_layer: Planned[PositiveInt] = None  # number of transformer blocks
    n_head: Planned[PositiveInt] = None  # attention heads per block
    n_embd: Planned[PositiveInt] = None  # width of the model, divisible by n_head
    dropout: Planned[Share] = None  # share of activations set to 0 in training
    bpe_dropout: Planned[Share] = None  # share of BPE merges to skip, which splits words at random
    # weight of the loss for the two tokens after the next one. It is 0 after two thirds of the run
    later_tokens: Planned[float] = None
    bias: cli.Fixed[bool] = False  # use biases in linear layers and LayerNorms, as GPT-2 does
    vocab_size: cli.Once[cli.Hidden[int]] = 1  # the number of tokens in the tokenizer
    models_before: cli.Once[cli.Hidden[int]] = 0  # models that this run has trained before
    vocab_multiple: cli.Fixed[PositiveInt] = 1  # pad vocab_size to a multiple. 128 suits GPUs
    # data
    dataset: str = "quickstart"  # directory under data/ that prepare.py has written
    teacher: str = ""  # runs or checkpoints to learn from besides the text, separated by commas
    # weight of the n teachers in the loss. Default: n / (n + 1)
    teacher_share: cli.Empty[Share | None] = None
    teacher_temperature: cli.AtLeast1 = 1.0  # divides logits. Above 1, unlikely tokens count more
    # run
    minutes: float = 1.0  # time budget. Settings without a value are planned. Or give --max_iters
    max_iters: Planned[PositiveInt] = None  # number of training steps, instead of --minutes
    out_dir: cli.Once[cli.Empty[str]] = ""  # folder of the run. Default: out/DATASET
    resume: cli.Once[bool] = False  # continue the run in out_dir. Flags override its settings
    auto_resume: cli.Once[bool] = False  # resume if out_dir has a checkpoint, otherwise start
    overwrite: cli.Once[bool] = False  # move the run in out_dir to OUT_DIR.old, and start
    # model to start from: scratch (a new one), a run, a checkpoint, or a GPT-2 on the hub
    init_from: cli.Fixed[str] = "scratch"
    allow_changed_model: cli.Once[bool] = False  # continue although model.py differs now
    seed: cli.Fixed[int] = 1337  # random seed: initialisation, data order, dropout, samples
    # optimizer
    batch_size: Planned[PositiveInt] = None  # sequences per micro-batch
    gradient_accumulation_steps: Planned[PositiveInt] = None  # micro-batches per step, in total
    # optimizer for the matrices in the blocks. AdamW updates the other parameters
    optimizer: cli.Fixed[Literal["adamw", "muon"]] = "muon"
    learning_rate: Planned[float] = None  # AdamW's peak learning rate. At 0 Muon stops, too
    muon_lr: Planned[float] = None  # Muon's peak learning rate, in Keller Jordan's convention
    muon_momentum: Planned[Share] = None  # Muon's momentum. Lower values suit shorter runs
    weight_decay: Planned[float] = None  # weight decay of matrices. Other parameters have none
    muon_decay: Planned[float] = None  # Muon's weight decay, if it is not weight_decay
    beta1: Share = 0.9  # AdamW: decay rate of the moving average of gradients
    beta2: Share = 0.99  # AdamW: decay rate of the moving average of squared gradients
    grad_clip: float = 1.0  # clip the gradient norm to this. 0 disables clipping
    # schedule
    schedule: Literal["cosine", "linear"] = "linear"  # how the learning rate decays
    warmup_iters: Planned[int] = None  # steps of linear warm-up
    hold: Share = 0.0  # linear: share of the steps after warm-up before the decay starts
    min_lr: Planned[float] = None  # final learning rate
    # evaluation
    eval_only: cli.Once[bool] = False  # evaluate init_from on all validation text and stop
    eval_all: cli.Once[bool] = False  # --eval_only on the training split, too: on all of the text
    # steps between evaluations with a checkpoint. The last step always has one
    eval_interval: Planned[PositiveInt] = None
    # number of tokens for an evaluation, evenly spread. 0: all. -1: few, but all at the end
    eval_tokens: Planned[cli.AtLeastMinus1] = None
    keep_last: PositiveInt = 2  # number of recent checkpoints to keep, besides the best one
    log_interval: PositiveInt = 10  # steps between entries of log.jsonl
    curves: bool = True  # write loss.png, if matplotlib is installed
    wandb: bool = False  # log to Weights & Biases
    # machine
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"  # auto picks cuda or cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of matmuls
    compile: Literal["auto", True, False] = "auto"  # use torch.compile. auto: long runs on CUDA
    recompute: bool = False  # recompute activations in the backward pass, to save memory
    deterministic: bool = False  # reproduce results on a GPU, or compiled, at some cost
    fsdp: bool = False  # shard a model too large for one GPU over all processes

    def __post_init__(self):  # GPTConfig checks the sizes once they are known
        cli.check_numbers(self)
        if self.resume + self.auto_resume + self.overwrite + self.eval_only > 1:
            raise ValueError("only one of --resume, --auto_resume, --overwrite and --eval_only")
        if self.eval_only and self.init_from == "scratch":
            raise ValueError("--eval_only needs a model: --init_from=out/NAME or --init_from=gpt2")
        if self.eval_all and not self.eval_only:
            raise ValueError("--eval_all needs --eval_only")

    @property
    def model_seed(self) -> int:
        """The seed of this model. A long run trains several, which differ by it."""
        return self.seed + self.models_before


def learning_rate(step: int, max_iters: int, config: TrainConfig) -> float:
    """AdamW's learning rate in step `step` of max_iters, counted from 0: a linear rise, then a
    cosine to min_lr, or a plateau and a line to it. The last step has min_lr."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    steps = max_iters - 1 - config.warmup_iters
    progress = (step - config.warmup_iters) / max(1, steps)  # 0 to 1
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": min(1.0, (1 - progress) / max(1e-9, 1 - config.hold)),
    }
    return config.min_lr + left[config.schedule] * (config.learning_rate - config.min_lr)


def configure_optimizers(model: GPT, config: TrainConfig, dtype: str = "float32") -> list:
    """Return [AdamW], or with "muon" [AdamW, Muon]. Muon updates the matrices inside the blocks.
    AdamW updates the rest: embeddings, norms, biases. Only matrices decay. A group's learning rate
    is lr_scale times learning_rate(). Muon multiplies in float32 unless dtype is bfloat16."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = {p for p in model.h.parameters() if p.dim() in (2, 3) and min(p.shape[-2:]) > 1}
    matrices -= embeddings
    muon = matrices if config.optimizer == "muon" else set()
    rest = [p for p in model.parameters() if p not in muon]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)]
    if muon:
        named = [(name, p) for name, p in model.named_parameters() if p in muon]
        decay = config.weight_decay if config.muon_decay is None else config.muon_decay
        group = {"params": named, "weight_decay": decay}
        group["lr_scale"] = config.muon_lr / (config.learning_rate or 1)
        muon_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        optimizers.append(Muon([group], muon_dtype, momentum=config.muon_momentum))
    return optimizers


def set_up(config: TrainConfig, data, checkpoint, processes: Processes) -> tuple:
    """Return the model, what training calls in its place (over all processes, perhaps compiled,
    with teachers), and the optimizers. checkpoint: the model to start from, None for a new one."""
    torch.manual_seed(config.model_seed)
    model = build_model(GPT, config, data, checkpoint)
    forward = processes.wrap(model, config)
    if processes.compiles(config):
        forward = torch.compile(forward)
    teachers = load_teachers(GPT, config, data, processes)
    forward = with_teachers(forward, model, teachers, config)
    return model, forward, configure_optimizers(model, config, processes.dtype)


def train(config: TrainConfig, start, processes: Processes) -> int:
    """Train a model. Return the exit code."""
    # ------------------------------------------------------------ data, model
    device, rank, world_size = processes.device, processes.rank, processes.world_size
    data = training_data(config, start.saved)
    model, forward, optimizers = set_up(config, data, start.checkpoint, processes)
    validation = data, config.batch_size, processes  # evaluate's arguments
    if config.eval_only:
        evaluation.print_loss(start.checkpoint, model, *validation)
        return 0

    # ------------------------------------------------------------ state
    # float16 rounds small gradients to 0, so the scaler multiplies the loss by a large number.
    scaler = torch.amp.GradScaler(device, enabled=processes.dtype == "float16")
    # A run saves and resumes its state. To add an object with state_dict() and load_state_dict(),
    # pass it by a name: average=average.
    state = State(config, model, optimizers, start.sources, scaler=scaler)
    progress = state.progress
    start.begin(state)
    report = Report(config, data, model, progress, processes)
    clock = Clock(config, data, report.n_parameters, progress, processes)
    report.header()
    processes.catch_signals()

    # ------------------------------------------------------------ loop
    stopped = 0  # the number of the signal that a process received
    while progress.step < progress.max_iters:
        step = progress.step
        # With --minutes this follows the machine's speed. config.max_iters is the first plan.
        max_iters = clock.fitting_steps(step)
        if max_iters != progress.max_iters:
            progress.max_iters = max_iters
            report.new_plan()
        lr = learning_rate(step, max_iters, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1)
        later = config.later_tokens * max(0.0, 1 - 1.5 * step / max_iters)

        torch.manual_seed(hash((config.model_seed, step, rank, 0)))  # if you mask at random
        batch = data.batch(config, step, processes)
        # To mask targets, make them -100 here, before they are counted.
        n_targets = processes.sum(sum((y != -100).sum() for _, y in batch))  # all processes' sum
        losses = {}  # the step's mean of the loss, and of each term that a changed model adds
        for micro_step, (x, y) in enumerate(batch):
            # Dropout depends on the micro-batch, not on the process that computes it.
            torch.manual_seed(hash((config.model_seed, step, micro_step * world_size + rank)))
            # Gradients travel between processes once a step, with the last micro-batch.
            processes.sync_gradients(micro_step == len(batch) - 1)
            with processes.autocast:
                terms = evaluation.loss_terms(model, forward(x, y), y, later)
            # A term is a mean over this micro-batch. Multiplied by the micro-batch's share of all
            # targets, these add up to the step's mean. DDP divides by world_size: multiply by it.
            weight = (y != -100).sum() * world_size / n_targets.clamp(min=1)
            scaler.scale(sum(terms.values()) * weight).backward()
            for name, value in terms.items():
                losses[name] = losses.get(name, 0) + value.detach() * weight
        losses = {name: processes.sum(value) / world_size for name, value in losses.items()}
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        norm = whole(norm)

        done = step + 1
        evaluate_now = evaluates_after(done, max_iters, config)
        report_now = evaluate_now or report.due(done)
        stopped = processes.all_reduce_max(processes.signal)
        if device == "cpu" or report_now or stopped:
            evaluation.check_finite(losses["loss"], norm, scaler, done, config)  # waits for a GPU
        # If float16 overflows, no optimizer steps. The scaler would judge each one separately.
        overflow = scaler.is_enabled() and not math.isfinite(norm)
        for optimizer in optimizers:
            if not overflow:
                scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        progress.step = done
        report.bar.update()

        if report_now:
            report.training(losses, norm, optimizers, clock.seconds_left(done, max_iters))
        if evaluate_now:
            processes.check_weights(model)
            metrics = {"step": done} | report.attempt(evaluation.evaluate, model, *validation)
            if done == max_iters and config.eval_tokens == -1 and "val_loss" in metrics:
                metrics |= report.attempt(evaluation.evaluate_whole, metrics, model, *validation)
            progress.update_best(metrics)
            report.evaluation(metrics)
            start.run.save(state, data, metrics)
            report.sample(config.seed + done)
        if stopped:
            if not evaluate_now:
                start.run.save(state, data, {"step": done})
            break

    # ------------------------------------------------------------ end
    stopped = stopped or processes.all_reduce_max(processes.signal)  # the last evaluation's
    start.following = next_model(config, progress, processes)
    report.close(progress.step < progress.max_iters, start.following is not None)
    processes.barrier()  # if one ends with a signal's code, torchrun kills those that still write
    return 128 + stopped if stopped else 0


def main() -> int:
    """Train a model with each of the settings that settle yields: several if the time is long."""
    processes = Processes()
    for config, start in settle(TrainConfig, GPT, set_up, prepare, processes):
        code = train(config, start, processes)
        if code:
            return code
    return 0


if __name__ == "__main__":
    cli.launch(main)
