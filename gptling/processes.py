"""One process or several that torchrun has started: rank, device, reductions,
DDP (Li et al. 2020, https://arxiv.org/abs/2006.15704) and
FSDP (Zhao et al. 2023, https://arxiv.org/abs/2304.11277)."""

import hashlib
import os
import signal
import sys
import time
import uuid
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gptling.cli import UserError
from gptling.devices import pick_device
from gptling.loss import kept_buffers, objective_and_parts


class Processes:
    """The processes of this run; in the usual case this one alone."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.is_main = self.rank == 0  # the one that writes and speaks for all
        self.sharded = False
        if not self.is_main:
            sys.stdout = open(os.devnull, "w")
        self.store = None  # torchrun's, which outlives a restart by --max-restarts
        if self.world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # while it waits for others
            self._join()
        # Whether an earlier start by this torchrun has done a step.
        self.restarted = self.store is not None and self.store.check(["gptling/trained"])

    def _join(self):
        from torch.distributed.rendezvous import rendezvous  # not every PyTorch has it

        # Decisions travel between CPUs also where gradients do not, so that no GPU waits for them.
        nccl = torch.cuda.is_available() and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        ranks = {"rank": self.rank, "world_size": self.world_size}
        try:
            self.store = next(rendezvous("env://"))[0]
            if self.world_size > 1:
                store = fresh_store(self.store, **ranks)
                dist.init_process_group(backend, store=store, **ranks)
        except (RuntimeError, ValueError) as error:  # a port in use, a machine that is not reached
            reason = str(error).partition("\n")[0]
            raise UserError(f"process {self.rank} cannot join: {reason}") from None

    def use_device(self, device: str) -> str:
        """Choose the device, a GPU for each process; returns cpu, cuda or mps. Raises UserError."""
        self.device, gpus = pick_device(device), torch.cuda.device_count()
        if self.world_size > 1 and self.device != "cpu" and self.local_rank >= gpus:
            raise UserError(f"there are {gpus} CUDA GPUs: lower --nproc_per_node, or --device=cpu")
        try:
            if self.device == "cuda":
                torch.cuda.set_device(self.local_rank)
        except RuntimeError as error:  # a GPU in use
            reason = str(error).partition("\n")[0]
            raise UserError(f"process {self.rank} has no GPU: {reason}") from None
        self.gpu = torch.cuda.get_device_name() if self.device == "cuda" else ""
        return self.device

    def mark_trained(self):
        """Tell later starts by the same torchrun that what lies in out_dir is theirs to resume."""
        if self.store is not None:
            self.store.set("gptling/trained", b"")

    def all_reduce_max(self, value: int) -> int:
        """The largest `value` of all processes."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def barrier(self):
        self.all_reduce_max(0)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this process's device, from any thread: each has its own current GPU."""
        if self.device != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(f"cuda:{self.local_rank}", non_blocking=True)

    def wrap(self, model: torch.nn.Module, fsdp: bool, autocast) -> torch.nn.Module:
        """What to call in the model's place: gradients are the mean of all processes. fsdp: shard
        parameters, gradients and so the optimizer's state, block by block (FSDP2)."""
        self.sharded = fsdp and self.world_size > 1
        stored, buffers = model.state_dict().keys(), model.named_buffers()
        self.averages = [n for n, b in buffers if n in stored and b.is_floating_point()]
        if self.sharded:
            if getattr(autocast, "fast_dtype", None) == torch.float16:
                raise UserError("--fsdp: float16's scale is not shared; use another --dtype")
            from torch.distributed.device_mesh import init_device_mesh  # slow to import
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device, (self.world_size,))
            attributes = {name: dict(vars(p)) for name, p in model.named_parameters()}
            for block in dict.fromkeys(model.h):  # a shared one once
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for name, p in model.named_parameters():  # new ones, and `matrices` means them too
                vars(p).update(attributes[name])
            return model
        model.to(self.device)
        if self.world_size == 1:
            return model
        if self.device == "cuda":  # where steps are compiled: not cut at DDP's buckets
            torch._dynamo.config.optimize_ddp = False
        # The other name that PyTorch 2.13 warns about is not there before it.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        parallel = DistributedDataParallel(model, **options)
        idx = self.to_device(torch.zeros(1, model.config.block_size, dtype=torch.int64))
        with kept_buffers(model):
            for _ in range(2):  # after the first gradient DDP orders its sums anew: not in mid-run
                with autocast:
                    objective, _ = objective_and_parts(parallel(idx, idx))
                objective.backward()
                model.zero_grad()
        return parallel

    def full_model(self, model: torch.nn.Module, model_class: type) -> torch.nn.Module | None:
        """The model with whole parameters, for the first process; all call it if it is sharded."""
        if not self.sharded:
            return model
        state = model.state_dict()  # sharded again, where a forward pass has left it gathered
        full = {k: t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in state.items()}
        if not self.is_main:
            return None
        copy = model_class(model.config)
        copy.load_state_dict(full)
        return copy

    def set_gradient_sync(self, parallel: torch.nn.Module, enabled: bool):
        """With DDP gradients travel once a step, with the last micro-batch."""
        if isinstance(parallel, DistributedDataParallel):
            parallel.require_backward_grad_sync = enabled

    @torch.no_grad()
    def average_buffers(self, model: torch.nn.Module):
        """What training keeps in stored floating-point buffers, such as a moving average, becomes
        the mean of all processes, as gradients do; a constant stays what it is."""
        for buffer in map(model.get_buffer, self.averages if self.world_size > 1 else []):
            buffer.copy_(self.sum(buffer.double()) / self.world_size)


def recompute_activations(model: torch.nn.Module, compile_blocks: bool):
    """Activation checkpointing (Chen et al. 2016, https://arxiv.org/abs/1604.06174): keep a block's
    input only, and recompute the rest in the backward pass. compile_blocks: each for itself,
    where FSDP's hooks around a block would leave it out of a compiled model."""
    for block in dict.fromkeys(model.h):  # a shared one once
        forward = torch.compile(block.forward) if compile_blocks else block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)


class StopSignals:
    """SIGINT and SIGTERM, asked for after each step. A second one ends a single process at once."""

    def __init__(self, processes: Processes):
        self.processes, self.number = processes, 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number, frame):
        self.number = number
        if self.processes.world_size == 1:  # torchrun passes on a Ctrl-C that came here already
            signal.signal(number, signal.SIG_DFL)

    def received(self) -> int:
        """The number of a signal that any of the processes has got; 0 for none."""
        return self.processes.all_reduce_max(self.number)


def fresh_store(store: "dist.Store", rank: int, world_size: int) -> "dist.Store":
    """A part of torchrun's store, which outlives a restart, that only the processes of this start
    know. Machines differ in how often they restarted. So each process says hello under a name of
    its own; the first one proposes all names it sees until everyone has accepted the same."""
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
