"""One process, or several that torchrun has started: device, reductions, DDP (Li et al. 2020,
https://arxiv.org/abs/2006.15704) and FSDP (Zhao et al. 2023, https://arxiv.org/abs/2304.11277)."""

import os
import signal
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint

from gptling import devices
from gptling.files import UserError


class Processes:
    """The processes of this run, usually one."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK") or 0)
        self.world_size = int(os.environ.get("WORLD_SIZE") or 1)
        self.is_main = self.rank == 0  # the process that writes and prints for all
        self.signal = 0  # see catch_signals
        self.sharded = False  # whether FSDP shards the model: see wrap
        if not self.is_main:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
        if self.rank or self.world_size > 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # cli.launch's can wait for a collective
            # If torchrun starts all processes of a machine again, its store still has the keys of
            # those that died. Other machines do not know the number of restarts.
            try:
                store, rank, world_size = next(dist.rendezvous("env://"))
            except ValueError as error:  # "environment variable RANK expected, but not set"
                hint = "start with torchrun, or unset RANK and WORLD_SIZE"
                raise UserError(f"{error}: {hint}") from None
            if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            # Decisions travel between CPUs, so that no GPU waits for them.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    def use_device(self, device: str):
        """Choose the device, one GPU per process. Raises UserError."""
        self.device = devices.pick_device(device)
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    def compiles(self, config) -> bool:
        """Return whether to compile. auto: a long run on CUDA."""
        if config.compile != "auto":
            return config.compile
        is_long = config.minutes > 2 if config.minutes else config.max_iters > 1000
        return self.device == "cuda" and has_triton() and is_long

    def all_reduce_max(self, value: float = 0) -> float:
        """Return the largest `value` of all processes."""
        tensor = torch.tensor(value, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return type(value)(tensor)

    barrier = all_reduce_max  # whatever the value: it waits for all processes

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this process's device."""
        pinned = tensor.pin_memory() if self.device == "cuda" else tensor
        return pinned.to(self.device, non_blocking=True)

    def wrap(self, model: torch.nn.Module, config) -> torch.nn.Module:
        """Put the model on the device, with what --recompute and --fsdp ask for. Return the module
        to call in training, within `autocast`: its gradients are the mean over all processes.
        Raises UserError for FSDP in float16."""
        wide = config.n_embd >= 128  # bfloat16 makes a narrower model slower on a CPU
        self.dtype = devices.pick_dtype(config.dtype, self.device, wide, training=True)
        dtype = getattr(torch, self.dtype)  # matmuls compute in it
        self.autocast = torch.autocast(self.device, dtype, enabled=dtype != torch.float32)
        self.sharded = config.fsdp and self.world_size > 1
        if self.device == "cpu":
            devices.use_cpu_kernels(model)
            devices.tune_allocator(self.sharded)
        if config.recompute:
            recompute_activations(model)
        self.model_class = type(model)  # FSDP changes it
        self.wrapped = model
        if self.sharded:
            if dtype == torch.float16:
                raise UserError("--fsdp: float16's scale is not shared, use another --dtype")
            from torch.distributed.fsdp import fully_shard  # slow to import

            attributes = {name: vars(p) for name, p in model.named_parameters()}
            for module in dict.fromkeys([*model.h, model]):  # a shared block once
                fully_shard(module)  # moves it to the device too
            for name, p in model.named_parameters():  # new ones, and Muon reads p.matrices
                vars(p).update(attributes[name])
            return model
        model.to(self.device)
        if self.world_size > 1:
            torch._dynamo.config.optimize_ddp = False  # a compiled step is not cut at DDP's buckets
            # Without find_unused_parameters DDP regroups gradients after a session's first step,
            # and then sums in another order.
            options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
            self.wrapped = DistributedDataParallel(model, **options)
            self.wrapped.broadcast_buffers = False  # each process has its own
        return self.wrapped

    def sync_gradients(self, is_on: bool):
        """Let DDP average the gradients of the next backward pass over the processes, or not. FSDP
        always does."""
        self.wrapped.require_backward_grad_sync = is_on

    def check_weights(self, model: torch.nn.Module):
        """Raise UserError if the processes have different weights, or other buffers, as with random
        numbers in a step that each process draws for itself."""
        if self.world_size == 1 or self.sharded:
            return
        tensors = [*model.parameters(), *model.buffers()]
        finite = (tensor.detach().nan_to_num(0, 0, 0) for tensor in tensors)
        total = sum(tensor.sum(dtype=torch.float64) for tensor in finite).item()
        if self.all_reduce_max(total) != -self.all_reduce_max(-total):
            raise UserError(
                "the processes have different weights or buffers: do the same in all of them"
            )

    def full_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model with whole parameters, for the first process. All call it."""
        if not self.sharded:
            return model
        full_model = self.model_class(model.config) if self.is_main else model
        full = full_model.state_dict()
        for name, tensor in model.state_dict().items():  # one whole tensor at a time
            tensor = gathered(tensor)
            if self.is_main:
                full[name].copy_(tensor)
        return full_model

    def catch_signals(self):
        """Keep the number of a signal that asks for an end, such as Ctrl-C's, Slurm's USR1, or that
        of a closed terminal. A second one ends a single process at once."""
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has two of them
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._receive)

    def _receive(self, number, frame):
        self.signal = number
        if self.world_size == 1:  # torchrun passes on a Ctrl-C that came here already
            signal.signal(number, signal.SIG_DFL)


def recompute_activations(model: torch.nn.Module):
    """Keep only the input of each block, and recompute the rest in the backward pass (activation
    checkpointing: Chen et al. 2016, https://arxiv.org/abs/1604.06174)."""
    for block in dict.fromkeys(model.h):  # a shared one once
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether FSDP has sharded a tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that FSDP has sharded. Any other is returned itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor on the CPU, for the first process. The others, which take part
    and get an empty one, need memory for one tensor at a time."""
    tensor = whole(tensor)
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    return tensor.cpu() if is_main else tensor.new_empty(0)


def shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the device of `like`. If `like` has the same shape and is sharded, it is
    sharded in the same way."""
    tensor = tensor.to(like.device)
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(tensor, like.device_mesh, like.placements)
