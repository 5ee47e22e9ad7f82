"""Train a GPT. Most runs need no more than these flags:

    --dataset=mine     the text: data/mine, made by prepare.py. Default: Python's standard library
    --minutes=10       time budget. Or --max_iters=500: a number of steps
    --out_dir=out/mine directory of checkpoints and the log
    --resume           continue the run in out_dir
    --init_from=gpt2   start from a run, a checkpoint, or a GPT-2 of the hub

    python train.py                                    # the quick start: one minute
    python train.py --dataset=mine --minutes=10        # the best model of data/mine in ten minutes
    python train.py config/gpt2.toml --batch_size=8 --gradient_accumulation_steps=60
    torchrun --nproc_per_node=8 train.py config/gpt2.toml

writes out/NAME/: checkpoint-N/ (Hugging Face's GPT-2 format), log.jsonl, config.toml, loss.png

References:
- Loshchilov and Hutter 2019, AdamW, https://arxiv.org/abs/1711.05101
- Micikevicius et al. 2018, mixed precision, https://arxiv.org/abs/1710.03740
- Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/
- Hägele et al. 2024, warm-up, stable, decay, https://arxiv.org/abs/2405.18392
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gptling.threads  # noqa: F401, has to come before PyTorch  # isort: skip
import torch
from tyro.conf import Suppress

import prepare
from gptling import cli, devices, loss, plan, pretrained
from gptling.cli import AtLeastMinus1, Empty, Planned, PositiveInt, Share, UserError
from gptling.dataset import Dataset
from gptling.muon import Muon
from gptling.processes import Processes, recompute_activations
from gptling.report import Report
from gptling.run import RunDirectory
from model import GPT, GPTConfig


@dataclass
class TrainConfig(GPTConfig):  # and its fields. None is planned: set a value, and it stays
    # model
    block_size: Planned[PositiveInt] = None  # context length: tokens per training sequence
    n_layer: Planned[PositiveInt] = None  # number of transformer blocks
    n_head: Planned[PositiveInt] = None  # attention heads per block
    n_embd: Planned[PositiveInt] = None  # width of the model, divisible by n_head
    dropout: Planned[Share] = None  # share of activations set to 0 in training
    bpe_dropout: Planned[Share] = None  # share of BPE merges left out: words are split at random
    bias: bool = False  # use biases in linear layers and LayerNorms, as GPT-2 does
    vocab_size: Suppress[int] = 1  # the tokenizer's
    vocab_multiple: PositiveInt = 1  # round the vocabulary size up to a multiple. 128 suits GPUs
    # data
    dataset: str = "quickstart"  # name of a directory under data/, made by prepare.py
    # run
    minutes: float = 1.0  # time budget: what you do not set is planned for it. Or give --max_iters
    max_iters: Planned[PositiveInt] = None  # number of training steps. It replaces --minutes
    out_dir: Empty[str] = ""  # where to write checkpoints and the log: out/DATASET if empty
    resume: bool = False  # continue from out_dir's newest checkpoint. Flags override its settings
    auto_resume: bool = False  # resume if out_dir has a checkpoint, otherwise begin
    overwrite: bool = False  # move the run in out_dir to OUT_DIR.old, and begin
    init_from: str = "scratch"  # start from: scratch, a run, a checkpoint, or a GPT-2 on the hub
    allow_changed_model: bool = False  # continue although model.py computes something else now
    seed: int = 1337  # random seed: initialisation, data order, dropout, samples
    # optimizer
    batch_size: Planned[PositiveInt] = None  # sequences per micro-batch
    gradient_accumulation_steps: Planned[PositiveInt] = None  # micro-batches per step, in total
    optimizer: Literal["adamw", "muon"] = "muon"  # for matrices in the blocks. AdamW for the rest
    learning_rate: Planned[float] = None  # AdamW's peak learning rate
    muon_lr: Planned[float] = None  # Muon's peak rate in Keller Jordan's convention. Same schedule
    muon_momentum: Planned[Share] = None  # Muon's momentum. Shorter runs prefer a lower value
    weight_decay: Planned[float] = None  # for matrices. Biases and LayerNorms do not decay
    muon_decay: Planned[float] = None  # Muon's weight decay. If it is not set, weight_decay's
    beta1: Share = 0.9  # AdamW: decay rate of the moving average of gradients
    beta2: Share = 0.99  # AdamW: decay rate of the moving average of squared gradients
    grad_clip: float = 1.0  # clip the gradient norm to this. 0 disables clipping
    # schedule
    schedule: Literal["cosine", "linear"] = "linear"  # how the learning rate decays
    warmup_iters: Planned[int] = None  # steps of linear warm-up
    hold: Share = 0.0  # linear: fraction of the steps after warm-up before the decay starts
    min_lr: Planned[float] = None  # final learning rate
    # evaluation
    eval_only: bool = False  # only evaluate init_from on the whole validation split
    # evaluate and save a checkpoint every so many steps, but not shortly before the last one
    eval_interval: Planned[PositiveInt] = None
    # validate on about this many tokens, evenly spread. 0: on all. -1: on few, at the end all
    eval_tokens: Planned[AtLeastMinus1] = None
    keep_last: PositiveInt = 2  # recent checkpoints to keep, besides the best one
    log_interval: PositiveInt = 10  # steps between lines of log.jsonl
    curves: bool = True  # write loss.png, if matplotlib is installed
    wandb: bool = False  # log to Weights & Biases
    # machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto picks cuda or cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of matmuls
    compile: Literal["auto", True, False] = "auto"  # use torch.compile. auto: long runs on CUDA
    recompute: bool = False  # save memory: recompute activations in the backward pass
    deterministic: bool = False  # reproducible results on a GPU or compiled, at some cost
    fsdp: bool = False  # shard the model over all processes, if it does not fit on one GPU

    def __post_init__(self):  # GPTConfig checks the sizes once they are known
        cli.check_numbers(self)
        if self.resume + self.auto_resume + self.overwrite + self.eval_only > 1:
            raise ValueError("only one of --resume, --auto_resume, --overwrite and --eval_only")
        if self.eval_only and self.init_from == "scratch":
            raise ValueError("--eval_only: say of what, --init_from=out/NAME or --init_from=gpt2")


# A flag that changes one of these would make it a different run: resuming refuses it.
FIXED = {"init_from", "optimizer", "seed", "vocab_multiple", "block_size", "bias"}

# The values of planned fields in a run of --max_iters. Rates follow from the width, and Muon's
# momentum from the steps.
SMALL = {"block_size": 64, "n_layer": 3, "n_head": 4, "n_embd": 128, "dropout": 0.0}
SMALL |= {"batch_size": 32, "gradient_accumulation_steps": 1, "weight_decay": 0.1}
SMALL |= {"bpe_dropout": 0.0, "max_iters": 440, "eval_interval": 110, "eval_tokens": 0}


def learning_rate(step: int, config: TrainConfig) -> float:
    """AdamW's learning rate in step `step`, counted from 0: a linear rise, then a cosine to min_lr,
    or a plateau and a line to it. The last step has min_lr."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    steps = config.max_iters - 1 - config.warmup_iters
    progress = (step - config.warmup_iters) / max(1, steps)  # 0 to 1
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": min(1.0, (1 - progress) / max(1e-9, 1 - config.hold)),
    }
    return config.min_lr + left[config.schedule] * (config.learning_rate - config.min_lr)


def configure_optimizers(model: GPT, config: TrainConfig, dtype: str = "float32") -> list:
    """Return [AdamW], or with "muon" [AdamW, Muon]. Muon updates the matrices inside the blocks,
    and stacks of them. AdamW updates the rest, embeddings too. Only matrices decay. lr_scale: times
    learning_rate; dtype: of matmuls, Muon's if it is bfloat16."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = {p for p in model.h.parameters() if p.dim() in (2, 3)} - embeddings
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


def set_up(config: TrainConfig, data: Dataset, source: Path | None, processes: Processes):
    """Return (model, it over all processes, that compiled, autocast, dtype, optimizers)."""
    torch.manual_seed(config.seed)
    device = processes.device
    model = pretrained.build_model(GPT, config, data, source)
    dtype = devices.pick_dtype(config.dtype, device, wide=config.n_embd >= 128, training=True)
    autocast = torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")
    long = config.minutes > 2 if config.minutes else config.max_iters > 1000
    auto = device == "cuda" and devices.has_triton() and long
    compile = auto if config.compile == "auto" else config.compile
    if device == "cpu":
        devices.use_cpu_kernels(model)
    if config.recompute:
        recompute_activations(model)
    parallel = processes.wrap(model, config.fsdp, dtype)  # gradients: the mean of all processes
    compiled = torch.compile(parallel) if compile else parallel
    return model, parallel, compiled, autocast, dtype, configure_optimizers(model, config, dtype)


def main():
    # ------------------------------------------------------------ configuration
    processes = Processes()
    config, given = cli.load(TrainConfig, __doc__, presets=True)
    config.out_dir = Path(config.out_dir or f"out/{config.dataset}").expanduser().as_posix()
    last = next((name for name in given if name in ("minutes", "max_iters")), "")  # said last
    if last == "minutes" and not config.minutes:
        raise UserError("--minutes=0: give a time above 0, or --max_iters")
    run_directory = RunDirectory(Path(config.out_dir), processes)
    source, state = None, {}  # the checkpoint to start from; what else a resumed run needs
    if not config.eval_only:  # what is given overrides the settings of a resumed run
        config, source, state = run_directory.resume_or_begin(config, given, FIXED)
    device = processes.use_device(config.device)
    devices.choose_algorithms(config.deterministic)

    # ------------------------------------------------------------ source and plan
    if source is None and config.init_from != "scratch":
        source = pretrained.find_checkpoint(config.init_from)
    longest = pretrained.take_sizes(config, given, GPT, source) if source else math.inf  # sequence
    missing = config.dataset == "quickstart" and not Path("data/quickstart").exists()
    if missing and processes.is_main:
        prepare.prepare(prepare.PrepareConfig())
    processes.barrier()

    def try_out(candidate, data):  # to measure its steps
        return set_up(candidate, data, source, processes)

    plan.complete(config, last, state.get("progress"), SMALL, longest, try_out, processes)
    if config.min_lr > config.learning_rate:
        rates = f"--min_lr={config.min_lr} is above --learning_rate={config.learning_rate}"
        raise UserError(f"{rates}: give a lower --min_lr")
    if config.warmup_iters > config.max_iters:
        print(f"--warmup_iters={config.warmup_iters}: the run ends first, at {config.max_iters}")

    # ------------------------------------------------------------ data and model
    data = Dataset(config.dataset, config.block_size, plan.eval_part(config))
    if state and state["data"] != data.fingerprint:
        remedy = f"prepare it again, or begin another run with --init_from={config.out_dir}"
        raise UserError(f"{data.directory} is not what {config.out_dir} was trained on: {remedy}")
    data.vary_tokens(config.bpe_dropout, config.seed)
    model, parallel, compiled, autocast, dtype, optimizers = set_up(config, data, source, processes)
    if config.eval_only:
        metrics = loss.evaluate(parallel, data, config.batch_size, processes, autocast)
        return loss.print_evaluation(source, data, metrics)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    # What changes while training, besides weights and optimizers. It is saved, and resumed: objects
    # with state_dict() and load_state_dict(), of plain values and tensors.
    stateful = {"scaler": scaler}
    progress = run_directory.restore(config, model, optimizers, stateful, state)
    group = optimizers[0].param_groups[0]
    then = group["lr"] / group.get("lr_scale", 1)
    now = learning_rate(progress.step - 1, config)
    if state and not math.isclose(then, now):
        print(f"the learning rate jumps from {then:.3g} to {now:.3g} at step {progress.step}")
    run_directory.start(config, progress.step)
    clock = plan.Clock(config, data, model, progress, processes)
    report = Report(config, processes, progress, clock)
    report.header(data, dtype)

    def save(metrics):  # called by all processes: each gives its shards, the first one writes
        full_model = processes.full_model(model, GPT)
        run_directory.save(metrics, model, full_model, optimizers, stateful, progress, config, data)

    processes.catch_signals()
    rank, world_size = processes.rank, processes.world_size

    # ------------------------------------------------------------ loop
    while progress.step < config.max_iters:
        step = progress.step
        if clock.look(step):  # of a run with a time budget: max_iters fits the machine's speed
            report.new_plan()
        lr = learning_rate(step, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1)

        batch = data.batch(config, step, processes)
        # To mask targets, make them -100 here, before they are counted.
        n_targets = processes.sum(sum((y != -100).sum() for _, y in batch))  # in all processes
        losses = {}  # of the step: "loss", and what a changed model adds to it
        for micro_step, (x, y) in enumerate(batch):
            # Dropout is a function of the micro-batch, wherever it is computed.
            torch.manual_seed(hash((config.seed, step, micro_step * world_size + rank)))
            # DDP's switch: gradients travel once a step, with the last micro-batch.
            parallel.require_backward_grad_sync = micro_step == len(batch) - 1
            with autocast:
                objective, parts = loss.objective_and_parts(compiled(x, y))
            # A mean over the micro-batch's targets becomes part of one over all of the step's.
            # Gradients are averaged over processes, so their number is a factor.
            weight = (y != -100).sum() * world_size / n_targets.clamp(min=1)
            scaler.scale(objective * weight).backward()
            for name, value in parts.items():
                losses[name] = losses.get(name, 0) + value.detach() * weight
        losses = {name: processes.sum(value) / world_size for name, value in losses.items()}
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        norm = norm.full_tensor() if processes.sharded else norm

        done = step + 1
        evaluate_now = plan.evaluates_after(done, config)
        report_now = evaluate_now or report.due(done)
        stopped = processes.all_reduce_max(processes.signal)
        if device == "cpu" or report_now or stopped:
            # float16 skips a step of which the gradient is not finite. .item() waits for a GPU.
            both = losses["loss"] + (0 if scaler.is_enabled() else norm)
            loss.check_finite(both.item(), done, config)
        # One decision for all: the scaler's own looks at each optimizer's gradients alone.
        overflow = scaler.is_enabled() and not math.isfinite(norm)
        for optimizer in optimizers:
            if not overflow:
                scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        progress.step = done
        report.bar.update()

        if report_now:
            report.training(done, losses, norm, optimizers)
        if evaluate_now:
            validation = parallel, data, config.batch_size, processes, autocast
            metrics = {"step": done} | loss.evaluate(*validation)
            comparable = metrics["val_loss"]  # over the same tokens each time
            if done == config.max_iters and config.eval_tokens == -1:
                data.validate_on(0)
                metrics |= loss.evaluate(*validation) | {"comparable_loss": comparable}
            progress.best = min(progress.best, comparable)
            report.evaluation(metrics, best=comparable == progress.best)
            save(metrics)  # before a changed model's generate can fail
            report.sample(model, data, config.seed + done)
        if stopped:
            if not evaluate_now:
                save({"step": done})
            break

    # ------------------------------------------------------------ end
    report.close(data, stopped=progress.step < config.max_iters)
    processes.barrier()  # torchrun ends the others, the writing one too, soon after the first
    return 128 + stopped if stopped else 0


if __name__ == "__main__":
    cli.run(main)
