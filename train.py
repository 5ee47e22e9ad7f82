"""Train a GPT.

    python train.py                                    # the quick start: config/quickstart.toml
    python train.py --dataset=mine                     # the same recipe on data/mine
    python train.py config/gpt2.toml --batch_size=8
    python train.py --out_dir=out/gpt2 --resume=True   # go on from its newest checkpoint
    torchrun --nproc_per_node=8 train.py config/gpt2.toml

writes out/NAME/: checkpoint-N/ (Hugging Face's GPT-2 format and training_state.pt), log.jsonl, and
where matplotlib and TensorBoard are installed loss.png and tensorboard/.

References:
- Loshchilov and Hutter 2019, AdamW, https://arxiv.org/abs/1711.05101; cosine decay,
  https://arxiv.org/abs/1608.03983
- Micikevicius et al. 2018, mixed precision, https://arxiv.org/abs/1710.03740
- Brown et al. 2020 (GPT-3), appendix B: the recipe of AdamW that the defaults follow
- Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/
- Hägele et al. 2024, warm-up, hold and decay, https://arxiv.org/abs/2405.18392
- Chen et al. 2016, activation checkpointing, https://arxiv.org/abs/1604.06174
- Li et al. 2020, DistributedDataParallel, https://arxiv.org/abs/2006.15704
- Zhao et al. 2023, fully sharded training, https://arxiv.org/abs/2304.11277
"""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises; nothing here is unpickled
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

from config import UserError, best_checkpoint, check, list_checkpoints, load, run, step_of
from model import GPT, GPTConfig, checkpoint_directory, pick_device, pick_dtype
from prepare import (
    PrepareConfig,
    TokenFile,
    bytes_per_token,
    load_tokenizer,
    lock_directory,
    prepare,
    read_meta,
    start_token,
)


@dataclass
class TrainConfig:
    dataset: str = "quickstart"  # a directory under data/, as prepare.py makes it
    out_dir: str = ""  # where checkpoints and the log go; otherwise out/DATASET
    resume: bool = False  # go on from the newest checkpoint in out_dir; flags win, not presets
    overwrite: bool = False  # delete the run that is in out_dir
    init_from: str = "scratch"  # scratch, a checkpoint directory, or the hub name of a GPT-2
    block_size: int = 1024  # window: how many tokens the model sees at once
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads in each block
    n_embd: int = 768  # width
    dropout: float = 0.0  # share of activations set to 0 in training; 0.1 to 0.2 for little data
    bias: bool = True  # in linear layers and LayerNorms; GPT-2 has them
    batch_size: int = 12  # windows in a micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches in an update, of all processes together
    max_iters: int = 2000  # updates
    optimizer: Literal["adamw", "muon"] = "adamw"  # of the blocks' matrices; the rest has AdamW
    learning_rate: float = 6e-4  # AdamW's highest, after warm-up
    muon_lr: float = 0.02  # Muon's highest; it rises and falls with the other
    muon_momentum: float = 0.95  # Muon: decay of the mean of gradients; short runs like it lower
    schedule: Literal["cosine", "linear"] = "cosine"  # how the learning rate falls
    hold: float = 0.0  # linear: the share of the run after warm-up before the fall begins
    min_lr: float = 6e-5  # where learning_rate ends
    warmup_iters: int = 100  # updates with a rising learning rate; at most a tenth of max_iters
    weight_decay: float = 0.1  # of matrices; biases and LayerNorms have none
    beta1: float = 0.9  # AdamW: decay of the mean of gradients
    beta2: float = 0.95  # AdamW: decay of the mean of their squares
    grad_clip: float = 1.0  # the gradient's norm is cut to this; 0 for never
    eval_interval: int = 500  # updates between evaluations, each with a checkpoint
    eval_tokens: int = 0  # validate on the first so many tokens; 0 for the whole split
    keep_last: int = 2  # checkpoints that stay besides the best
    log_interval: int = 10  # updates between log lines
    seed: int = 1337  # of initialisation, order of windows, dropout and samples
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products
    compile: Literal["auto", True, False] = "auto"  # torch.compile; auto: on CUDA
    recompute: bool = False  # compute activations again for the backward pass: less memory, slower
    vocab_multiple: int = 1  # round the vocabulary up to a multiple of this; 128 suits GPUs
    fsdp: bool = False  # shard the model over the processes, for one too large for a GPU
    allow_changed_data: bool = False  # resume although the dataset is not what it was
    curves: bool = True  # loss.png and TensorBoard's files, where these are installed
    wandb: bool = False  # send the curves to Weights & Biases

    def __post_init__(self):
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise UserError(f"--{name}={getattr(self, name)}: must be at least 1")
            if getattr(self, name) >= 1 << 31:
                raise UserError(f"--{name}={getattr(self, name)}: must be below 2**31")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise UserError(f"--{name}={getattr(self, name)}: must not be negative")
        for name in ("beta1", "beta2", "muon_momentum", "hold", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name}={getattr(self, name)}: must be at least 0 and below 1")
        if self.n_embd % self.n_head:
            raise UserError(f"--n_embd={self.n_embd} is not divisible by --n_head={self.n_head}")
        if self.seed >= 1 << 63:
            raise UserError(f"--seed={self.seed}: must be below 2**63")
        if Path(self.dataset).name != self.dataset or self.dataset in ("", ".."):
            raise UserError(f"--dataset={self.dataset}: give a name under data/, not a path")
        if self.min_lr > self.learning_rate and not self.resume:  # then the run's own min_lr counts
            raise UserError(
                f"--min_lr={self.min_lr} is above --learning_rate={self.learning_rate}: lower it"
            )
        if self.resume and self.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        if self.fsdp and self.optimizer == "muon" and not self.resume:
            raise UserError("--fsdp: Muon needs whole matrices, not shards; use --optimizer=adamw")
        self.out_dir = self.out_dir or f"out/{self.dataset}"


POSITIVE = (
    "block_size n_layer n_head n_embd batch_size gradient_accumulation_steps max_iters "
    "eval_interval keep_last log_interval vocab_multiple"
).split()
NOT_NEGATIVE = (
    "learning_rate muon_lr min_lr warmup_iters weight_decay grad_clip eval_tokens seed"
).split()
# Dense bfloat16 FLOP/s of the GPUs whose data sheet (NVIDIA's) was at hand, by part of the name.
PEAK_FLOPS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100": 312e12}
# What training_state.pt holds. recent: the sum of training losses since the last evaluation.
STATE = {"format": int, "step": int, "data": str, "config": dict, "optimizers": list}
STATE |= {"scaler": dict, "overflows": int, "best": float, "recent": float, "recent_steps": int}
# What makes a run another run: a resumed one keeps it.
FIXED = (
    "dataset init_from block_size n_layer n_head n_embd bias batch_size "
    "gradient_accumulation_steps optimizer vocab_multiple seed"
).split()


# ---------------------------------------------------------------------------- pure helpers


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """AdamW's learning rate in update `step`, counted from 0: a linear rise, then a cosine to
    min_lr, or a plateau and a line to it.

    Warm-up takes at most a tenth of the run; the last update has min_lr."""
    warmup = min(config.warmup_iters, config.max_iters // 10)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, config.max_iters - 1 - warmup))  # 0 to 1
    if config.schedule == "linear":
        left = min(1.0, (1 - progress) / (1 - config.hold))
    else:
        left = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + left * (config.learning_rate - config.min_lr)


@functools.lru_cache(maxsize=2)
def window_order(n_windows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. n_windows - 1: the order of one epoch."""
    return np.random.default_rng((seed, epoch)).permutation(n_windows)


def micro_batches(config: TrainConfig, world_size: int) -> tuple[int, int]:
    """The windows in a micro-batch of one process, and its micro-batches in an update.

    An update takes batch_size * gradient_accumulation_steps windows, however many processes share
    them; at most batch_size are in memory at once. Raises UserError where they cannot be shared."""
    windows = config.batch_size * config.gradient_accumulation_steps
    if windows % world_size:
        raise UserError(
            f"--batch_size={config.batch_size} times --gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps} is not divisible by {world_size} processes"
        )
    share = windows // world_size
    size = next(n for n in range(min(share, config.batch_size), 0, -1) if share % n == 0)
    return size, share // size


def get_batch(
    shards: Sequence[np.ndarray | TokenFile],
    config: TrainConfig,
    step: int,
    micro_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, (B, block_size) int64 each, B as micro_batches says: a pure function.

    An epoch visits every window once, in an order drawn from (seed, epoch). Windows do not overlap;
    where the first one starts is drawn anew in each epoch, so that contexts differ. Update `step`
    takes the same windows whatever the number of processes: micro-step m of rank r takes the
    micro-batch m * world_size + r.
    """
    T = config.block_size
    B, micro_steps = micro_batches(config, world_size)
    counts = np.array([max(len(shard) // T - 1, int(len(shard) > T)) for shard in shards])
    ends = counts.cumsum()  # windows in the shards up to each
    first = ((step * micro_steps + micro_step) * world_size + rank) * B
    windows = np.empty((B, T + 1), dtype=np.int64)
    for row in range(B):
        epoch, i = divmod(first + row, int(ends[-1]))
        window = window_order(int(ends[-1]), config.seed, epoch)[i]
        n = int(np.searchsorted(ends, window, side="right"))
        shard, index = shards[n], window - (ends[n] - counts[n])
        slack = min(T - 1, len(shard) - 1 - counts[n] * T)
        start = index * T + np.random.default_rng((config.seed, epoch, n)).integers(slack + 1)
        windows[row] = shard[start : start + T + 1]
    windows = torch.from_numpy(windows)
    return windows[:, :-1], windows[:, 1:]  # the target of a token is the next one


def check_ids(ids, vocab_size: int, where: str):
    """Raises UserError for a token id that the vocabulary does not have."""
    if int(ids.max()) >= vocab_size:
        raise UserError(
            f"{where}: token id {int(ids.max())} is beyond the vocabulary of {vocab_size}: its "
            "tokenizer.json belongs to other data; prepare it again"
        )


def ahead(load: Callable[[int, int], Any], steps: range, micro_steps: int) -> Iterator[Any]:
    """load(step, micro_step) for every micro-batch of these steps, each made in another thread
    while the one before is in use."""
    places = itertools.product(steps, range(micro_steps))
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(load, *next(places))
        for place in places:
            ready, following = following, thread.submit(load, *place)
            yield ready.result()
        yield following.result()


def check_finite(what: str, value: float, step: int, config: TrainConfig):
    """Raises UserError for a value that is not a number or infinite."""
    if not math.isfinite(value):
        raise UserError(
            f"{what} is {value} at step {step}: lower --learning_rate={config.learning_rate} or "
            f"--grad_clip={config.grad_clip}, or use --dtype=float32; the checkpoints are as before"
        )


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    tokens: np.ndarray | TokenFile,
    token_bytes: np.ndarray,
    config: TrainConfig,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[float, float]:
    """Loss over all of `tokens`, in nats per token and in bits per byte of text.

    Windows follow each other without overlap; the last one is filled up with targets that do not
    count. Process `rank` takes every world_size-th batch. token_bytes (V,): the bytes of text that
    each id stands for, 0 for end-of-text.
    """
    T, device = config.block_size, next(model.parameters()).device
    n, size = len(tokens) - 1, config.batch_size * T  # predictions, in all and in a batch
    totals = torch.zeros(2, dtype=torch.float64)  # nats, bytes
    was_training = model.training
    model.eval()
    for i in range(math.ceil(n / size / world_size)):  # equally many everywhere, as FSDP needs
        start = (i * world_size + rank) * size
        window = np.asarray(tokens[start : start + size + 1], dtype=np.int64)
        count = max(0, len(window) - 1)
        rows = max(1, math.ceil(count / T))
        idx, targets = torch.zeros(rows * T, dtype=torch.int64), torch.full((rows * T,), -100)
        idx[:count], targets[:count] = (torch.from_numpy(ids) for ids in (window[:-1], window[1:]))
        idx, targets = (ids.view(rows, T).to(device) for ids in (idx, targets))
        loss = model(idx, targets, need_logits=False)[1]
        if count:  # the loss is a mean over the targets given
            totals[0] += loss.cpu().double() * count
            totals[1] += int(token_bytes[window[1:]].sum())
    if world_size > 1:
        dist.all_reduce(totals)
    model.train(was_training)
    nats, n_bytes = totals.tolist()
    return nats / n, nats / (math.log(2) * max(1, n_bytes))


def sample_lines(model: GPT, encoding, config: TrainConfig, step: int) -> list[str]:
    """Two lines from the model, as a taste of where it is."""
    device = model.wte.weight.device
    generator = torch.Generator(device).manual_seed(config.seed + step)
    idx = torch.tensor([[start_token(encoding)]], device=device)
    model.eval()
    ids, text = [], ""
    for token in model.generate(idx, 160, temperature=0.8, top_k=200, generator=generator):
        ids.append(token.item())
        text = encoding.decode(ids)  # all of them: a character may take several tokens
        lines = [line for line in text.splitlines(keepends=True) if line.strip()]
        enough = len(lines) > 2 or (len(lines) == 2 and lines[1].endswith("\n"))
        if enough and not config.fsdp:  # there every process must take part in every token
            break
    model.train()
    return [line.rstrip()[:100] for line in text.splitlines() if line.strip()][:2]


class Muon(torch.optim.Muon):
    """torch.optim.Muon with equal matrices orthogonalised in one batch, in a dtype of choice.

    One by one and in bfloat16, as PyTorch has it, a step of a small model takes half as long again;
    where a CPU lacks bfloat16 products, 28 times as long as in float32.
    """

    def __init__(self, params, dtype: torch.dtype, **options):
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for shape in sorted({p.shape for p in group["params"]}):
                matrices = [p for p in group["params"] if p.shape == shape]
                updates = []
                for p in matrices:
                    if not self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                    mean = self.state[p]["momentum_buffer"]
                    mean.lerp_(p.grad, 1 - momentum)
                    updates.append(p.grad.lerp(mean, momentum))  # Nesterov's look ahead
                updates = orthogonalise(torch.stack(updates).to(self.dtype), group)
                scale = math.sqrt(max(1, shape[0] / shape[1]))  # taller ones write more
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)


def orthogonalise(x: torch.Tensor, options: dict) -> torch.Tensor:
    """U V^T of each x = U S V^T, (n, rows, columns), about: singular values end up near 1.

    Newton-Schulz's iteration with the quintic polynomial of Jordan et al. 2024."""
    a, b, c = options["ns_coefficients"]
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # the smaller product of the two
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=options["eps"])  # singular values <= 1
    for _ in range(options["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def configure_optimizers(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """[AdamW], or with "muon" [AdamW, Muon], which takes the matrices inside the blocks. Matrices
    decay, embeddings too; biases and LayerNorms do not."""
    hidden = {id(p) for p in model.h.parameters() if p.dim() == 2 and config.optimizer == "muon"}
    parameters = [p for p in model.parameters() if id(p) not in hidden]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    fused = parameters[0].device.type in ("cpu", "cuda")
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)
    if not hidden:
        return [adamw]
    matrices = [p for p in model.parameters() if id(p) in hidden]
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    options = {
        "lr": config.muon_lr,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
    }
    return [adamw, Muon(matrices, dtype, **options)]


def recompute_blocks(model: GPT):
    """Keep only the inputs of blocks for the backward pass and compute the rest again there."""
    for block in model.h:
        block.forward = functools.partial(recompute, block.forward, use_reentrant=False)


def keep_freed_memory():
    """Let glibc's malloc keep what is freed for the next step, large blocks too, which otherwise go
    back to the system and come again as pages of zeros. Without glibc nothing changes."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block is the system's own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


def flops_utilisation(tokens_per_second: float, n_parameters: int, gpu: str) -> float | None:
    """The share of the GPU's peak that 6 FLOPs per parameter and token come to (Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361, without attention's); None where the peak is not known."""
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)
    return peak and 6 * n_parameters * tokens_per_second / peak


# ---------------------------------------------------------------------------- processes


def fresh_store(store: "dist.Store", rank: int, world_size: int) -> "dist.Store":
    """A part of `store` that only the processes of this start know.

    torchrun's store outlives a restart and has the addresses of processes that are gone; how often
    it restarted differs between machines. So each process says hello under a name of its own, the
    first one proposes all names it sees until everyone has accepted the same proposal."""
    me = uuid.uuid4().hex
    store.set(f"hello/{rank}", me)
    while True:
        if rank == 0:
            names = b" ".join(store.get(f"hello/{r}") for r in range(world_size))
            store.set("proposal", names)
            others = [f"accepted/{r}" for r in range(1, world_size)]
            if store.check(others) and all(store.get(key) == names for key in others):
                store.set("agreed", names)
        elif me.encode() in (names := store.get("proposal")):
            store.set(f"accepted/{rank}", names)
        if store.check(["agreed"]) and me.encode() in (names := store.get("agreed")):
            return dist.PrefixStore(hashlib.sha256(names).hexdigest(), store)
        time.sleep(0.02)


def join_processes(device: str, rank: int, world_size: int):
    """Join the other processes that torchrun has started: gloo between CPUs, NCCL between GPUs.

    Raises UserError for a GPU that is not there, or an address that cannot be used."""
    from torch.distributed.rendezvous import rendezvous  # not every PyTorch has it

    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "mps":
        raise UserError(f"--device=mps: one GPU cannot serve {world_size} processes; use cpu")
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{local_rank + 1} processes or more on a machine with {torch.cuda.device_count()} "
            "GPUs: lower --nproc_per_node, or use --device=cpu"
        )
    try:
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        store = fresh_store(next(rendezvous("env://"))[0], rank, world_size)
        # Decisions travel between CPUs also where gradients do not, so that no GPU waits for them.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError) as error:  # a port or a GPU in use, a machine not reached
        reason = str(error).partition("\n")[0]
        raise UserError(f"process {rank} of {world_size} cannot join: {reason}") from None


def agree(value: int, world_size: int) -> int:
    """The largest `value` of all processes, in each of them."""
    if world_size == 1:
        return value
    value = torch.tensor(value)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def shard(model: GPT, device: str, world_size: int):
    """Shard parameters, gradients and so the optimizer's state over the processes, block by block:
    what one needs is gathered when it is used (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh  # slow to import
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device, (world_size,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "next_logits")  # generation goes in by another door


def gather(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """A tensor, whole, on the CPU of the first process; all must call it for a sharded one."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.cpu() if rank == 0 else None


def gather_model(model: GPT, rank: int) -> GPT | None:
    """A sharded model, whole, on the CPU of the first process; all must call it."""
    weights = {name: gather(tensor, rank) for name, tensor in model.state_dict().items()}
    if rank > 0:
        return None
    with torch.device("meta"):  # takes no memory
        copy = GPT(model.config)
    copy.load_state_dict(weights, assign=True)
    return copy


def load_optimizer(optimizer: torch.optim.Optimizer, stored: dict):
    """Take the stored state of each parameter, {index: {name: tensor}}, sharded as the parameter.

    The settings stay as they are. Raises ValueError where a tensor does not fit its parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    names = {"momentum_buffer"} if isinstance(optimizer, Muon) else adamw
    if stored.keys() != set(range(len(parameters))):
        raise ValueError(f"it has the state of {len(stored)} of {len(parameters)} parameters")
    state = {}
    for i, parameter in enumerate(parameters):
        state[i] = dict(stored[i])
        if state[i].keys() != names:
            raise ValueError(f"the state of parameter {i} is another optimizer's")
        for name, tensor in stored[i].items():
            shape = torch.Size() if name == "step" else parameter.shape
            if tensor.shape != shape or not tensor.is_floating_point():
                raise ValueError(f"the state of parameter {i} has not its shape")
            # Memory of its own, whatever strides a file gives it: the optimizer writes there.
            state[i][name] = tensor = torch.empty(shape, dtype=tensor.dtype).copy_(tensor)
            if hasattr(parameter, "device_mesh") and name != "step":
                from torch.distributed.tensor import distribute_tensor

                state[i][name] = distribute_tensor(
                    tensor.to(parameter.device), parameter.device_mesh, parameter.placements
                )
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# ---------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    out_dir: Path, model: GPT, tokenizer_json: str, state: dict, metrics: dict, keep_last: int
):
    """Write out_dir/checkpoint-STEP whole or not at all, then delete all but the best and the last.

    Everything is on the disk before the rename makes it visible. Raises UserError."""
    final = out_dir / f"checkpoint-{metrics['step']}"
    temporary = out_dir / f".{final.name}.writing"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary, tokenizer_json)
        with (temporary / "training_state.pt").open("wb") as file:  # its errors name their cause
            torch.save(state, file)
        (temporary / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
        sums = json.dumps({path.name: sha256(path) for path in sorted(temporary.iterdir())})
        (temporary / "checksums.json").write_text(sums, encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        if final.exists():
            delete(final)
        temporary.rename(final)
        _sync(out_dir)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{final}: cannot be written: {error}") from error
    checkpoints = list_checkpoints(out_dir)
    best = best_checkpoint(out_dir)
    for path in checkpoints[:-keep_last]:
        if path != best:
            with suppress(OSError):  # open in another program, on Windows: at the next one, then
                delete(path)


def delete(checkpoint: Path):
    """Take a checkpoint away at once, then delete its files."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.deleting")
    shutil.rmtree(hidden, ignore_errors=True)
    checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sync(path):
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle on a directory to flush
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


# What torch.load makes of a file that is missing, cut short, or something else.
DAMAGED = (OSError, RuntimeError, EOFError, UnpicklingError)
DAMAGED += (LookupError, ValueError, TypeError, AttributeError)


def load_training_state(checkpoint: Path) -> dict:
    """What training_state.pt holds: plain values and tensors.

    Raises UserError for a checkpoint of which a file is not as it was written, which neither
    torch.load nor safetensors would notice."""
    try:
        sums = json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))
        for name in ("config.json", "model.safetensors", "tokenizer.json", "training_state.pt"):
            if sums[name] != sha256(checkpoint / name):
                raise ValueError(f"{name} is not as it was written")
        file = checkpoint / "training_state.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        if any(type(state[key]) is not kind for key, kind in STATE.items()) or state["format"] != 1:
            raise ValueError("training_state.pt is of another version")
        fits = set(FIXED) <= state["config"].keys() and state["step"] == step_of(checkpoint)
        if not fits or not 0 <= state["recent_steps"] <= state["step"]:
            raise ValueError("training_state.pt belongs to another checkpoint")
        return state
    except DAMAGED as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{checkpoint} is damaged: {reason}") from None


def newest_state(out_dir: Path) -> tuple[Path, dict]:
    """The newest checkpoint that is whole, and its training state; damaged ones are named.

    Raises UserError where there is none."""
    for checkpoint in reversed(list_checkpoints(out_dir)):
        try:
            return checkpoint, load_training_state(checkpoint)
        except UserError as error:
            print(error, file=sys.stderr)
    way_out = "give the --out_dir of a run, or start anew with --overwrite=True"
    raise UserError(f"{out_dir}: no whole checkpoint to go on from; {way_out}")


def log_until(file: Path, step: int):
    """Drop what the log has after `step`, which will be done again, and what a crash cut off."""
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    temporary = file.with_name(".log.jsonl.writing")
    temporary.write_text("".join(kept), encoding="utf-8")
    _sync(temporary)
    temporary.replace(file)


# ---------------------------------------------------------------------------- curves


def open_boards(config: TrainConfig, out_dir: Path, first_step: int) -> list[Callable]:
    """What shows the log elsewhere, as functions that take an entry of it: TensorBoard where it is
    installed, Weights & Biases with --wandb, loss.png where matplotlib is installed.

    Raises UserError where --wandb is given without the package."""
    boards = []
    if config.curves and importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        # What a resumed run had written after first_step is hidden.
        writer = SummaryWriter(out_dir / "tensorboard", purge_step=first_step + 1)

        def tensorboard(entry):
            for name, value in entry.items():
                if name == "sample":
                    writer.add_text(name, value.replace("\n", "\n\n"), entry["step"])
                elif name != "step":
                    writer.add_scalar(name, value, entry["step"])
            writer.flush()

        boards.append(tensorboard)
    if config.curves and importlib.util.find_spec("matplotlib"):
        boards.append(lambda entry: "val_loss" in entry and draw_curves(out_dir))
    if config.wandb:
        if not importlib.util.find_spec("wandb"):
            raise UserError("--wandb=True: pip install wandb, or leave it out")
        import wandb

        settings = dataclasses.asdict(config)
        run = wandb.init(project="gptling", name=out_dir.name, dir=out_dir, config=settings)
        boards.append(lambda entry: run.log(entry, step=entry["step"]))
    return boards


def draw_curves(out_dir: Path):
    """Write out_dir/loss.png from log.jsonl: the losses over the steps, the best one marked."""
    from matplotlib.figure import Figure  # without pyplot no window is opened

    entries = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    train = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    val = [(entry["step"], entry["val_loss"]) for entry in entries if "val_loss" in entry]
    step, best = min(val, key=lambda point: point[1])
    title = f"{out_dir.name}: best {best:.4f} at step {step:,}"
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color="#9bb8d3", linewidth=1, label="training")
    axes.plot(*zip(*val, strict=True), color="#b5462f", marker="o", label="validation")
    axes.plot(step, best, "o", markersize=11, markerfacecolor="none", color="black")
    # The fall from ln(vocabulary) in the first steps would press the rest flat.
    later = [loss for _, loss in train[len(train) // 20 :] + val]
    margin = 0.08 * (max(later) - min(later))
    axes.set(xlabel="step", ylabel="loss in nats per token", title=title)
    axes.set_ylim(min(later) - margin - 1e-3, max(later) + margin)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = out_dir / ".loss.png.writing"
    figure.savefig(temporary, format="png")
    temporary.replace(out_dir / "loss.png")


def resumed_config(saved: dict, given: dict, out_dir: Path) -> TrainConfig:
    """The run's own configuration with the flags that were given. Raises UserError."""
    for name in FIXED:
        if name in given and given[name] != saved[name]:
            raise UserError(
                f"--{name}={given[name]}: the run in {out_dir} has {saved[name]}, which a resumed "
                "run keeps; leave the flag out, or start another run with another --out_dir"
            )
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    saved = {name: value for name, value in saved.items() if name in known}
    once = {"resume": False, "overwrite": False, "allow_changed_data": False}
    for name in sorted(given.keys() & saved.keys() - once.keys() - {"out_dir"}):
        if given[name] != saved[name]:
            print(f"{name}: {given[name]} from now on; it was {saved[name]}")
    saved |= once | given | {"out_dir": str(out_dir), "resume": False, "overwrite": False}
    return TrainConfig(**{k: check(TrainConfig, k, v, str(out_dir)) for k, v in saved.items()})


# ---------------------------------------------------------------------------- the script


def main():
    # ------------------------------------------------------------------------ configuration
    quickstart = Path(__file__).parent / "config" / "quickstart.toml"
    config, given = load(TrainConfig, __doc__, default_preset=quickstart)
    out_dir = Path(config.out_dir)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    held = lock_directory(out_dir) if rank == 0 and os.path.isdir(out_dir) else None

    # ------------------------------------------------------------------------ device
    try:
        device = pick_device(config.device)
    except ValueError as error:
        raise UserError(f"--device: {error}") from None
    if device == "cpu":
        keep_freed_memory()
    if world_size > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # while it waits for others, it can be ended
        join_processes(device, rank, world_size)
    # torchrun --max-restarts, which counts on each machine for itself
    if agree(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), world_size):
        config.resume = agree(len(list_checkpoints(out_dir)), world_size) > 0
        config.overwrite = True
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""

    # ------------------------------------------------------------------------ the run so far
    state = None
    if config.resume:
        if rank == 0:
            checkpoint, state = newest_state(out_dir)
        step = agree(state["step"] if state else 0, world_size)
        if rank > 0:
            checkpoint = out_dir / f"checkpoint-{step}"
            state = load_training_state(checkpoint)
        config = resumed_config(state["config"], given, out_dir)
        if state["step"] >= config.max_iters:
            raise UserError(
                f"{checkpoint} has all {state['step']} updates: give a higher --max_iters to go on"
            )
    elif not config.overwrite and list_checkpoints(out_dir):
        raise UserError(
            f"{out_dir} holds a run: --resume=True goes on with it, --overwrite=True deletes it, "
            "--out_dir=... leaves it alone"
        )
    micro_batch_size, micro_steps = micro_batches(config, world_size)
    sharded = config.fsdp and world_size > 1
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it; nothing on a CPU

    # ------------------------------------------------------------------------ data
    data = Path("data") / config.dataset
    if config.dataset == "quickstart" and not data.exists() and rank == 0:
        prepare(PrepareConfig())
    agree(0, world_size)  # the others wait for it
    if not (data / "meta.json").is_file():
        found = [f"--dataset={file.parent.name}" for file in Path("data").glob("*/meta.json")]
        raise UserError(
            f"{data} is not there: make it with python prepare.py YOUR.txt --name={config.dataset}"
            + "".join(f", or take {flag}" for flag in sorted(found))
        )
    fingerprint = read_meta(data)["sha256"]
    if state and state["data"] != fingerprint and not config.allow_changed_data:
        raise UserError(
            f"{data} is not what {out_dir} was trained on: prepare that again, or go on with "
            "--allow_changed_data=True"
        )
    encoding = load_tokenizer(data)
    tokenizer_json = (data / "tokenizer.json").read_text(encoding="utf-8")
    train = [TokenFile(file) for file in sorted(data.glob("train-*.npy"))]
    val = TokenFile(data / "val.npy")
    if not train:
        raise UserError(f"{data}: no train-00000.npy in it; prepare it again")
    for split, n in (("train", max(map(len, train))), ("val", len(val))):
        if n <= config.block_size:
            smaller = f", or set --block_size={n - 1} or less" if n > 1 else ""
            raise UserError(
                f"{data}: the {split} split has {n} tokens, fewer than block_size + 1 = "
                f"{config.block_size + 1}, a window and its targets: prepare more text{smaller}"
            )
    val = val[: config.eval_tokens + 1] if config.eval_tokens else val
    token_bytes = bytes_per_token(encoding)

    # ------------------------------------------------------------------------ model
    source = checkpoint if state else config.init_from
    try:
        if state:
            model = GPT.from_pretrained(checkpoint, dropout=config.dropout)
        elif config.init_from != "scratch":
            source = best_checkpoint(config.init_from) or config.init_from
            model = GPT.from_pretrained(source, dropout=config.dropout)
            model.crop_block_size(min(config.block_size, model.config.block_size))
        else:
            sizes = {f.name: getattr(config, f.name, 0) for f in dataclasses.fields(GPTConfig)}
            multiple = config.vocab_multiple
            vocab_size = math.ceil(encoding.n_vocab / multiple) * multiple
            model = GPT(GPTConfig(**sizes | {"vocab_size": vocab_size}))
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    if source != "scratch":
        its = load_tokenizer(checkpoint_directory(source))
        if its._mergeable_ranks != encoding._mergeable_ranks:
            raise UserError(f"{source} was trained with another tokenizer than that of {data}")
    model.restrict_to_tokens(tokenizer_json)
    for name in ("n_layer", "n_head", "n_embd", "bias"):
        if name in given and given[name] != getattr(model.config, name):
            raise UserError(f"--{name}={given[name]}: {config.init_from} has another; leave it out")
        setattr(config, name, getattr(model.config, name))
    if config.block_size > model.config.block_size:
        limit = model.config.block_size
        raise UserError(
            f"--block_size={config.block_size}: {config.init_from} has {limit} positions"
        )
    vocab_size = model.config.vocab_size
    if encoding.n_vocab > vocab_size:
        raise UserError(f"{config.init_from}: {vocab_size} tokens, {data} has {encoding.n_vocab}")
    for start in range(0, len(val), 1 << 20):
        check_ids(val[start : start + (1 << 20)], vocab_size, str(data / "val.npy"))
    # A block of width 64 took 1.45 times as long in bfloat16 as in float32, a step at 128 0.56.
    config.dtype = pick_dtype(config.dtype, device, wide=config.n_embd >= 128)
    autocast = nullcontext()
    if config.dtype != "float32":
        autocast = torch.autocast(device, getattr(torch, config.dtype))
    if config.recompute:
        recompute_blocks(model)
    n_parameters = model.num_parameters()
    if sharded and config.dtype == "float16":
        raise UserError("--fsdp: float16's scale is not shared between shards; use another --dtype")
    if sharded:
        shard(model.train(), device, world_size)
    else:
        model.to(device).train()
    parallel = model
    if world_size > 1 and not sharded:
        # The other name that PyTorch 2.13 warns about is not there before it.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        parallel = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        for _ in range(2):  # after the first gradient DDP orders its sums anew: not in mid-run
            idx = torch.zeros(1, config.block_size, dtype=torch.int64, device=device)
            with autocast:
                loss = parallel(idx, idx, need_logits=False)[1]
            loss.backward()
            model.zero_grad()
    to_compile = device == "cuda" if config.compile == "auto" else config.compile == "True"
    compiled = torch.compile(parallel) if to_compile else parallel

    # ------------------------------------------------------------------------ optimizer
    optimizers = configure_optimizers(model, config)
    scaler = torch.amp.GradScaler(device, enabled=config.dtype == "float16")
    first_step, best, overflows = 0, math.inf, 0
    # The sum of the training losses since the last evaluation, and of how many steps it is.
    recent, recent_steps = torch.zeros((), device=device), 0
    if state:
        try:
            for optimizer, its in zip(optimizers, state["optimizers"], strict=True):
                if state["overflows"] < state["step"]:  # otherwise it has had no step yet
                    load_optimizer(optimizer, its)
            if scaler.is_enabled() and state["scaler"]:  # it is empty where the dtype was another
                scaler.load_state_dict(state["scaler"])
            first_step, best, overflows = state["step"], state["best"], state["overflows"]
            recent += state["recent"]
            recent_steps = state["recent_steps"]
        except DAMAGED as error:
            raise UserError(f"{checkpoint}/training_state.pt does not fit: {error}") from None

    # ------------------------------------------------------------------------ output folder
    place = next(model.parameters()).device

    def load_batch(step, micro_step):
        x, y = get_batch(train, config, step, micro_step, rank, world_size)
        check_ids(torch.stack([x, y]), vocab_size, str(data))
        if device == "cuda":
            torch.cuda.set_device(place)  # this thread's, which would be the first GPU
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    batches = ahead(load_batch, range(first_step, config.max_iters), micro_steps)
    batches = itertools.chain([next(batches)], batches)  # bad data shows before anything is written
    log_path = out_dir / "log.jsonl" if rank == 0 else Path(os.devnull)
    try:
        if rank == 0:
            out_dir.mkdir(parents=True, exist_ok=True)
            held = held or lock_directory(out_dir)
            if not (state or config.overwrite) and list_checkpoints(out_dir):
                raise UserError(f"{out_dir}: another run has come to its end there meanwhile")
            for path in out_dir.glob(".checkpoint-*"):  # what a crash has left
                shutil.rmtree(path)
            for path in list_checkpoints(out_dir):
                if state is None:
                    delete(path)  # and nothing else that may lie in the folder
                elif step_of(path) > first_step:  # damaged: it would count as the newest
                    aside = path.with_name(f"damaged-{path.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
            if state and log_path.exists():
                log_until(log_path, first_step)
        log_file = log_path.open("a" if state else "w", encoding="utf-8")
        boards = open_boards(config, out_dir, first_step) if rank == 0 else []
    except OSError as error:
        raise UserError(f"{out_dir}: cannot be written: {error.strerror}") from None

    def log(**entry):
        try:
            log_file.write(json.dumps(entry) + "\n")
            log_file.flush()
            for board in boards:
                board(entry)
        except OSError as error:
            raise UserError(f"{log_path}: cannot be written: {error.strerror}") from None

    def save(metrics):
        """A checkpoint of now; every process gives its shards, the first one writes."""
        if rank > 0 and not sharded:
            return
        state = {"format": 1, "step": metrics["step"], "data": fingerprint}
        state |= {"config": dataclasses.asdict(config), "scaler": scaler.state_dict()}
        state |= {"best": best, "recent": recent.item(), "recent_steps": recent_steps}
        state |= {"overflows": overflows, "optimizers": []}
        for optimizer in optimizers:
            its = optimizer.state_dict()["state"]
            its = {i: {k: gather(v, rank) for k, v in own.items()} for i, own in its.items()}
            state["optimizers"].append(its)
        its = gather_model(model, rank) if sharded else model
        if rank == 0:
            save_checkpoint(out_dir, its, tokenizer_json, state, metrics, config.keep_last)

    tokens_per_step = micro_batch_size * config.block_size * micro_steps * world_size
    print(
        f"{n_parameters:,} parameters, {tokens_per_step:,} tokens a step, "
        f"{config.max_iters:,} steps on {sum(map(len, train)):,} tokens; {device}, {config.dtype}"
        + (f", {world_size} processes" if world_size > 1 else "")
        + (f", from step {first_step}" if state else ""),
        flush=True,
    )

    # ------------------------------------------------------------------------ loop
    stopped = []  # signals: the step is finished and saved before the program ends

    def stop(number, frame):
        stopped.append(number)
        if world_size == 1:  # torchrun passes on a Ctrl-C that has come here already
            signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    hide = rank > 0 or not sys.stderr.isatty()
    bar = tqdm(total=config.max_iters, initial=first_step, unit="step", disable=hide, leave=False)
    logged_at, logged_step = time.perf_counter(), first_step
    started, exit_code = time.perf_counter(), 0
    for step in range(first_step, config.max_iters):
        lr = learning_rate_at(step, config)
        rates = (lr, lr * config.muon_lr / (config.learning_rate or 1))  # they move together
        for optimizer, rate in zip(optimizers, rates, strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate
        step_loss = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            x, y = next(batches)
            # Dropout is a function of the micro-batch, wherever it is computed.
            torch.manual_seed(hash((config.seed, step, micro_step * world_size + rank)))
            if parallel is not model:  # DDP: gradients travel once, with the last micro-batch
                parallel.require_backward_grad_sync = micro_step == micro_steps - 1
            with autocast:
                loss = compiled(x, y, need_logits=False)[1]
            # Micro-batches have equally many targets: the mean of their means is the batch's mean.
            loss = loss / micro_steps
            step_loss += loss.detach()
            scaler.scale(loss).backward()
        if world_size > 1:
            dist.all_reduce(step_loss)
            step_loss /= world_size
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        norm = norm.full_tensor() if sharded else norm
        done = step + 1
        due = done % config.log_interval == 0 or done == config.max_iters
        if due or device == "cpu":  # elsewhere a look at each step would wait for the GPU
            check_finite("the loss", step_loss.item(), done, config)
            if not scaler.is_enabled():
                check_finite("the gradient's norm", norm.item(), done, config)
        # One decision for all: the scaler's own looks at each optimizer's gradients alone.
        usable = not scaler.is_enabled() or math.isfinite(norm)
        overflows += not usable
        for optimizer in optimizers:
            if usable:
                scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        recent += step_loss
        recent_steps += 1

        if due:
            loss = step_loss.item()
            seconds = (time.perf_counter() - logged_at) / (done - logged_step)
            speed, left = tokens_per_step / seconds, seconds * (config.max_iters - done)
            entry = {"step": done, "loss": loss, "lr": lr, "norm": norm.item()}
            if len(optimizers) > 1:
                entry["muon_lr"] = rates[1]
            entry |= {"ms": 1000 * seconds, "tokens_per_s": speed}
            pace = f"{speed:,.0f} tokens/s"
            mfu = flops_utilisation(speed / world_size, n_parameters, gpu)
            if mfu is not None:
                entry["mfu"] = mfu
                pace += f", MFU {100 * mfu:.0f} %"
            if scaler.is_enabled():
                entry["overflows"] = overflows
            log(**entry)
            bar.update(done - bar.n)
            bar.set_postfix_str(f"loss {loss:.3f}, {pace}")
            if hide and (done % (10 * config.log_interval) == 0 or done == config.max_iters):
                print(
                    f"step {done}/{config.max_iters}: loss {loss:.3f}, lr {lr:.2e}, "
                    f"norm {norm:.2f}, {1000 * seconds:.0f} ms, {pace}, {left:.0f} s left",
                    flush=True,
                )
            logged_at, logged_step = time.perf_counter(), done

        if done % config.eval_interval == 0 or done == config.max_iters:
            paused = time.perf_counter()
            with autocast:
                val_loss, bits = evaluate(compiled, val, token_bytes, config, rank, world_size)
            train_loss = recent.item() / recent_steps
            check_finite("a loss", train_loss + val_loss, done, config)  # before it is saved
            recent.zero_()
            recent_steps = 0
            metrics = {"step": done, "train_loss": train_loss, "val_loss": val_loss}
            metrics["bits_per_byte"] = bits
            mark = " (best)" if val_loss < best else ""
            best = min(best, val_loss)
            lines = []
            if rank == 0 or sharded:
                lines = sample_lines(model, encoding, config, done)
            log(**metrics, sample="\n".join(lines))
            tqdm.write(
                f"step {done}: training loss {train_loss:.4f}, validation loss {val_loss:.4f}, "
                f"{bits:.4f} bits per byte{mark}" + "".join(f"\n  | {line}" for line in lines)
            )
            sys.stdout.flush()
            save(metrics)
            logged_at += time.perf_counter() - paused  # evaluation is not the training's time

        signal_number = agree(stopped[0] if stopped else 0, world_size)
        if signal_number:
            if recent_steps:  # not saved just now
                if not scaler.is_enabled():
                    check_finite("the gradient's norm", norm.item(), done, config)
                check_finite("a loss", recent.item(), done, config)
                save({"step": done})
            exit_code = 128 + signal_number
            break
    bar.close()
    if exit_code:
        command = "python train.py" if world_size == 1 else "torchrun ... train.py"
        print(f"stopped at step {done}; next: {command} --out_dir={out_dir} --resume=True")
    else:
        print(f"{time.perf_counter() - started:.0f} s; next: python sample.py {out_dir}")
    if world_size > 1:
        if config.wandb and rank == 0:
            sys.modules["wandb"].finish()
        agree(0, world_size)  # torchrun ends the others, the writing one too, soon after the first
    return exit_code


if __name__ == "__main__":
    run(main)
