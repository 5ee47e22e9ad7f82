"""Train a GPT.

    python train.py                                    # the quick start: config/quickstart.toml
    python train.py --dataset=mine                     # the same recipe on data/mine
    python train.py config/gpt2.toml --batch_size=8
    python train.py config/gpt2.toml --resume=True     # go on from its newest checkpoint

writes out/NAME/: checkpoint-N/ (Hugging Face's GPT-2 format and training_state.pt) and log.jsonl.

References:
- Loshchilov and Hutter 2019, AdamW, https://arxiv.org/abs/1711.05101; cosine decay,
  https://arxiv.org/abs/1608.03983
- Micikevicius et al. 2018, mixed precision, https://arxiv.org/abs/1710.03740
- Brown et al. 2020 (GPT-3), appendix B: the recipe of AdamW that the defaults follow
- Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/
- Hägele et al. 2024, warm-up, hold and decay, https://arxiv.org/abs/2405.18392
- Chen et al. 2016, activation checkpointing, https://arxiv.org/abs/1604.06174
"""

import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises; nothing here is unpickled
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

from config import UserError, check, load, read_loss, run
from model import GPT, GPTConfig, checkpoint_directory, pick_device, pick_dtype
from prepare import PrepareConfig, bytes_per_token, load_tokenizer, prepare, start_token


@dataclass
class TrainConfig:
    dataset: str = "quickstart"  # a directory under data/, as prepare.py makes it
    out_dir: str = ""  # where checkpoints and the log go; otherwise out/DATASET
    resume: bool = False  # go on from the newest checkpoint in out_dir, with its configuration
    overwrite: bool = False  # delete the run that is in out_dir
    init_from: str = "scratch"  # scratch, a checkpoint directory, or the hub name of a GPT-2
    block_size: int = 1024  # window: how many tokens the model sees at once
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads in each block
    n_embd: int = 768  # width
    dropout: float = 0.0  # share of activations set to 0 in training; 0.1 to 0.2 for little data
    bias: bool = True  # in linear layers and LayerNorms; GPT-2 has them
    batch_size: int = 12  # windows in a micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches in an update, over all processes
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

    def __post_init__(self):
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise UserError(f"--{name}={getattr(self, name)}: must be at least 1")
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


def get_batch(
    shards: list[np.ndarray],
    config: TrainConfig,
    step: int,
    micro_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, (batch_size, block_size) int64 each: a pure function of its arguments.

    An epoch visits every window once, in an order drawn from (seed, epoch). Windows do not overlap;
    where the first one starts is drawn anew in each epoch, so that contexts differ. Update `step`
    takes the same windows whatever the number of processes: micro-step m of rank r takes the
    micro-batch m * world_size + r.
    """
    T = config.block_size
    counts = np.array([max(len(shard) // T - 1, int(len(shard) > T)) for shard in shards])
    ends = counts.cumsum()  # windows in the shards up to each
    micro_batch = step * config.gradient_accumulation_steps + micro_step * world_size + rank
    windows = np.empty((config.batch_size, T + 1), dtype=np.int64)
    for row in range(config.batch_size):
        epoch, i = divmod(micro_batch * config.batch_size + row, int(ends[-1]))
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


def ahead(load: Callable[[int, int], Any], first: int, config: TrainConfig) -> Iterator[Any]:
    """load(step, micro_step) for every micro-batch from step `first` on, each made in another
    thread while the one before is in use."""
    steps, micro_steps = range(first, config.max_iters), range(config.gradient_accumulation_steps)
    places = ((step, micro_step) for step in steps for micro_step in micro_steps)
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(load, *next(places))
        for place in places:
            ready, following = following, thread.submit(load, *place)
            yield ready.result()
        yield following.result()


def check_finite(loss: float, step: int, config: TrainConfig):
    """Raises UserError for a loss that is not a number or infinite."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step}: lower --learning_rate={config.learning_rate} or "
            f"--grad_clip={config.grad_clip}, or use --dtype=float32"
        )


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, tokens: np.ndarray, token_bytes: np.ndarray, config: TrainConfig
) -> tuple[float, float]:
    """Loss over all of `tokens`, in nats per token and in bits per byte of text.

    Windows follow each other without overlap; the last one is filled up with targets that do not
    count. token_bytes (V,): the bytes of text that each id stands for, 0 for end-of-text.
    """
    T, device = config.block_size, next(model.parameters()).device
    n = len(tokens) - 1  # predictions
    n_windows = math.ceil(n / T)
    idx = np.zeros(n_windows * T, dtype=np.int64)
    targets = np.full(n_windows * T, -100, dtype=np.int64)
    idx[:n], targets[:n] = tokens[:-1], tokens[1:]
    total = torch.zeros((), dtype=torch.float64)
    was_training = model.training
    model.eval()
    batches = (torch.from_numpy(a).view(-1, T).split(config.batch_size) for a in (idx, targets))
    for x, y in zip(*batches, strict=True):
        loss = model(x.to(device), y.to(device), need_logits=not config.recompute)[1]
        total += loss.cpu().double() * (y >= 0).sum()  # the loss is a mean over the targets given
    model.train(was_training)
    nats = total.item() / n
    return nats, nats * n / (math.log(2) * max(1, int(token_bytes[tokens[1:]].sum())))


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
        if len(lines) > 2 or (len(lines) == 2 and lines[1].endswith("\n")):
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


def flops_utilisation(tokens_per_second: float, n_parameters: int, gpu: str) -> float | None:
    """The share of the GPU's peak that 6 FLOPs per parameter and token come to (Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361, without attention's); None where the peak is not known."""
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)
    return peak and 6 * n_parameters * tokens_per_second / peak


# ---------------------------------------------------------------------------- checkpoints


def list_checkpoints(out_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in out_dir.glob("checkpoint-*") if (path / "metrics.json").is_file()]
    found = [path for path in found if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


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
        torch.save(state, temporary / "training_state.pt")
        (temporary / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(out_dir)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{final}: cannot be written: {error}") from error
    checkpoints = list_checkpoints(out_dir)
    best = min(checkpoints, key=read_loss)
    for path in checkpoints[:-keep_last]:
        if path != best:
            shutil.rmtree(path)


def _sync(path):
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle on a directory to flush
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


# What torch.load makes of a file that is missing, cut short, or something else.
DAMAGED = (OSError, RuntimeError, EOFError, UnpicklingError, LookupError, ValueError, TypeError)


def load_training_state(out_dir: Path) -> tuple[Path, dict]:
    """The newest checkpoint and its training state. Raises UserError where there is none."""
    checkpoints = list_checkpoints(out_dir)
    if not checkpoints:
        raise UserError(f"{out_dir}: no checkpoint to resume; start anew with --overwrite=True")
    file = checkpoints[-1] / "training_state.pt"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not {"step", "config", "optimizers", "scaler"} <= set(state):
            raise ValueError("not a training state of this version")
        return checkpoints[-1], state
    except DAMAGED as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{file}: cannot be read ({reason}); move {checkpoints[-1]} away to resume from "
            "the checkpoint before"
        ) from None


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
    saved |= given | {"out_dir": str(out_dir), "resume": False, "overwrite": False}
    return TrainConfig(**{k: check(TrainConfig, k, v, str(out_dir)) for k, v in saved.items()})


# ---------------------------------------------------------------------------- the script


def main():
    # ------------------------------------------------------------------------ configuration
    quickstart = Path(__file__).parent / "config" / "quickstart.toml"
    config, given = load(TrainConfig, __doc__, default_preset=quickstart)
    out_dir = Path(config.out_dir)
    state = None
    if config.resume:
        checkpoint, state = load_training_state(out_dir)
        config = resumed_config(state["config"], given, out_dir)
    elif not config.overwrite and list_checkpoints(out_dir):
        raise UserError(
            f"{out_dir} holds a run: --resume=True goes on with it, --overwrite=True deletes it, "
            "--out_dir=... leaves it alone"
        )

    # ------------------------------------------------------------------------ device
    try:
        device = pick_device(config.device)
    except ValueError as error:
        raise UserError(f"--device: {error}") from None
    # Large blocks of memory in huge pages: a step spends less time in page faults. For Linux.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it; nothing on a CPU

    # ------------------------------------------------------------------------ data
    data = Path("data") / config.dataset
    if config.dataset == "quickstart" and not data.exists():
        prepare(PrepareConfig())
    if not (data / "meta.json").is_file():
        raise UserError(
            f"{data} is not there: make it with python prepare.py YOUR.txt --name={config.dataset}"
        )
    encoding = load_tokenizer(data)
    tokenizer_json = (data / "tokenizer.json").read_text(encoding="utf-8")
    try:
        train = [np.load(file, mmap_mode="r") for file in sorted(data.glob("train-*.npy"))]
        val = np.load(data / "val.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{data}: cannot be read: {error}; prepare it again") from None
    if not train or any(ids.ndim != 1 or ids.dtype.kind != "u" for ids in [*train, val]):
        raise UserError(
            f"{data}: token files are not one-dimensional and unsigned; prepare it again"
        )
    for split, n in (("train", max(map(len, train))), ("val", len(val))):
        if n <= config.block_size:
            smaller = f", or set --block_size={n - 1} or less" if n > 1 else ""
            raise UserError(
                f"{data}: the {split} split has {n} tokens, fewer than block_size + 1 = "
                f"{config.block_size + 1}, a window and its targets: prepare more text{smaller}"
            )
    val = np.asarray(val[: config.eval_tokens + 1] if config.eval_tokens else val)
    token_bytes = bytes_per_token(encoding)

    # ------------------------------------------------------------------------ model
    try:
        if state:
            model = GPT.from_pretrained(checkpoint, dropout=config.dropout)
        elif config.init_from != "scratch":
            model = GPT.from_pretrained(config.init_from, dropout=config.dropout)
        else:
            sizes = {f.name: getattr(config, f.name, 0) for f in dataclasses.fields(GPTConfig)}
            multiple = config.vocab_multiple
            vocab_size = math.ceil(encoding.n_vocab / multiple) * multiple
            model = GPT(GPTConfig(**sizes | {"vocab_size": vocab_size}))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from None
    source = checkpoint if state else config.init_from
    if source != "scratch" and (checkpoint_directory(source) / "tokenizer.json").exists():
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
    check_ids(val, vocab_size, str(data / "val.npy"))
    model.to(device).train()
    # A block of width 64 took 1.45 times as long in bfloat16 as in float32, a step at 128 0.56.
    config.dtype = pick_dtype(config.dtype, device, wide=config.n_embd >= 128)
    autocast = nullcontext()
    if config.dtype != "float32":
        # Without the cache each chunk of the loss gives its gradient to float32, not to a shared
        # copy of the weights in 16 bits.
        cache = not config.recompute
        autocast = torch.autocast(device, getattr(torch, config.dtype), cache_enabled=cache)
    if config.recompute:
        recompute_blocks(model)
    if config.compile == "auto":
        config.compile = str(device == "cuda")
    compiled = torch.compile(model) if config.compile == "True" else model

    # ------------------------------------------------------------------------ optimizer
    optimizers = configure_optimizers(model, config)
    scaler = torch.amp.GradScaler(device, enabled=config.dtype == "float16")
    first_step, best = 0, math.inf
    if state:
        for optimizer, its in zip(optimizers, state["optimizers"], strict=True):
            groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            optimizer.load_state_dict(its)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)  # this configuration's, where a flag has changed them
        if scaler.is_enabled() and state["scaler"]:  # it is empty where the dtype was another
            scaler.load_state_dict(state["scaler"])
        first_step = state["step"]
        best = min(read_loss(path) for path in list_checkpoints(out_dir))
        if first_step >= config.max_iters:
            raise UserError(
                f"{checkpoint} has all {first_step} updates: give a higher --max_iters to go on"
            )

    # ------------------------------------------------------------------------ output folder
    def load_batch(step, micro_step):
        x, y = get_batch(train, config, step, micro_step)
        check_ids(torch.stack([x, y]), vocab_size, str(data))
        if device == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    load_batch(first_step, 0)  # bad data shows before anything is written
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in list_checkpoints(out_dir) if config.overwrite else []:
            shutil.rmtree(path)  # and nothing else that may lie in the folder
        kept = []
        if state and (out_dir / "log.jsonl").exists():  # what came after the checkpoint is redone
            lines = (out_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
            whole = [line for line in lines if line.endswith("}")]  # a crash may have cut the last
            kept = [line for line in whole if json.loads(line).get("step", 0) <= first_step]
        log_file = (out_dir / "log.jsonl").open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out_dir}: cannot be written: {error.strerror}") from None
    log_file.writelines(f"{line}\n" for line in kept)

    def log(**entry):
        log_file.write(json.dumps(entry) + "\n")
        log_file.flush()

    tokens_per_step = config.batch_size * config.block_size * config.gradient_accumulation_steps
    print(
        f"{model.num_parameters():,} parameters, {tokens_per_step:,} tokens a step, "
        f"{config.max_iters:,} steps on {sum(map(len, train)):,} tokens; {device}, {config.dtype}"
        + (f", from step {first_step}" if state else ""),
        flush=True,
    )

    # ------------------------------------------------------------------------ loop
    stopped = []  # signals: the step is finished and saved before the program ends

    def stop(number, frame):
        stopped.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    hide = not sys.stderr.isatty()
    bar = tqdm(total=config.max_iters, initial=first_step, unit="step", disable=hide, leave=False)
    train_losses, logged_at, logged_step = [], time.perf_counter(), first_step
    started = time.perf_counter()
    batches = ahead(load_batch, first_step, config)
    for step in range(first_step, config.max_iters):
        lr = learning_rate_at(step, config)
        rates = (lr, lr * config.muon_lr / (config.learning_rate or 1))  # they move together
        for optimizer, rate in zip(optimizers, rates, strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate
        step_loss = torch.zeros((), device=device)
        for micro_step in range(config.gradient_accumulation_steps):
            x, y = next(batches)
            torch.manual_seed(hash((config.seed, step, micro_step)))  # dropout, of this step alone
            with autocast:
                loss = compiled(x, y, need_logits=not config.recompute)[1]
            # Micro-batches have equally many targets: the mean of their means is the batch's mean.
            loss = loss / config.gradient_accumulation_steps
            step_loss += loss.detach()
            scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        # One decision for all: the scaler's own looks at each optimizer's gradients alone.
        usable = not scaler.is_enabled() or math.isfinite(norm)
        for optimizer in optimizers:
            if usable:
                scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        train_losses.append(step_loss)
        done = step + 1
        last = done == config.max_iters or bool(stopped)

        if done % config.log_interval == 0 or last:
            loss = step_loss.item()
            check_finite(loss, done, config)
            seconds = (time.perf_counter() - logged_at) / (done - logged_step)
            speed, left = tokens_per_step / seconds, seconds * (config.max_iters - done)
            entry = {"step": done, "loss": loss, "lr": lr, "norm": norm.item()}
            entry |= {"ms": 1000 * seconds, "tokens_per_s": speed}
            pace = f"{speed:,.0f} tokens/s"
            mfu = flops_utilisation(speed, model.num_parameters(), gpu)
            if mfu is not None:
                entry["mfu"] = mfu
                pace += f", MFU {100 * mfu:.0f} %"
            log(**entry)
            bar.update(done - bar.n)
            bar.set_postfix_str(f"loss {loss:.3f}, {pace}")
            if hide and (done % (10 * config.log_interval) == 0 or last):
                print(
                    f"step {done}/{config.max_iters}: loss {loss:.3f}, lr {lr:.2e}, "
                    f"norm {norm:.2f}, {1000 * seconds:.0f} ms, {pace}, {left:.0f} s left",
                    flush=True,
                )
            logged_at, logged_step = time.perf_counter(), done

        if done % config.eval_interval == 0 or last:
            paused = time.perf_counter()
            with autocast:
                val_loss, bits = evaluate(compiled, val, token_bytes, config)
            check_finite(val_loss, done, config)  # before a checkpoint is written
            train_loss = torch.stack(train_losses).mean().item()
            train_losses = []
            metrics = {"step": done, "train_loss": train_loss, "val_loss": val_loss}
            metrics["bits_per_byte"] = bits
            log(**metrics)
            mark = " (best)" if val_loss < best else ""
            best = min(best, val_loss)
            lines = sample_lines(model, encoding, config, done)
            tqdm.write(
                f"step {done}: training loss {train_loss:.4f}, validation loss {val_loss:.4f}, "
                f"{bits:.4f} bits per byte{mark}" + "".join(f"\n  | {line}" for line in lines)
            )
            sys.stdout.flush()
            state = {"step": done, "config": dataclasses.asdict(config)}
            state |= {"optimizers": [its.state_dict() for its in optimizers]}
            state |= {"scaler": scaler.state_dict()}
            save_checkpoint(out_dir, model, tokenizer_json, state, metrics, config.keep_last)
            logged_at += time.perf_counter() - paused  # evaluation is not the training's time

        if stopped:
            bar.close()
            print(f"stopped at step {done}; go on with: --out_dir={out_dir} --resume=True")
            return 128 + stopped[0]
    bar.close()
    print(f"{time.perf_counter() - started:.0f} s; next: python sample.py {out_dir}")


if __name__ == "__main__":
    run(main)
