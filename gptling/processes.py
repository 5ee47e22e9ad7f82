"""One process or several that torchrun has started: rank, device, reductions, DDP and FSDP.

References:
- Li et al. 2020, DistributedDataParallel, https://arxiv.org/abs/2006.15704
- Zhao et al. 2023, fully sharded training, https://arxiv.org/abs/2304.11277
"""

import hashlib
import os
import signal
import sys
import time
import uuid
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gptling.cli import UserError
from gptling.devices import pick_device


class Processes:
    """The processes of this run; in the usual case this one alone."""

    def __init__(self, device: str):
        """device: auto, cpu, cuda or mps. Raises UserError for one that cannot be used."""
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(device)
        self.gpu = torch.cuda.get_device_name() if self.device == "cuda" else ""
        self.sharded = False
        if self.rank > 0:
            sys.stdout = open(os.devnull, "w")  # the first process speaks for all
        if self.world_size > 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # while it waits for others
            self._join()

    def _join(self):
        """Join the others: gloo between CPUs, NCCL between GPUs."""
        from torch.distributed.rendezvous import rendezvous  # not every PyTorch has it

        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if self.device == "mps":
            raise UserError("--device=mps: not for several processes; use --device=cpu")
        if self.device == "cuda" and local_rank >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise UserError(f"there are {gpus} GPUs: lower --nproc_per_node, or --device=cpu")
        # Decisions travel between CPUs also where gradients do not, so that no GPU waits for them.
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        try:
            if self.device == "cuda":
                torch.cuda.set_device(local_rank)
            ranks = {"rank": self.rank, "world_size": self.world_size}
            store = fresh_store(next(rendezvous("env://"))[0], **ranks)
            dist.init_process_group(backend, store=store, **ranks)
        except (RuntimeError, ValueError) as error:  # a port or a GPU in use, a machine not reached
            reason = str(error).partition("\n")[0]
            raise UserError(f"process {self.rank} cannot join: {reason}") from None

    @property
    def first(self) -> bool:
        """Whether this is the process that reads, writes and speaks for all."""
        return self.rank == 0

    def restarted(self) -> bool:
        """Whether torchrun --max-restarts has started these processes again."""
        # It counts on each machine for itself.
        return self.all_reduce_max(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))) > 0

    def all_reduce_max(self, value: int) -> int:
        """The largest `value` of all processes, in each of them."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def barrier(self):
        """Wait until all processes have come here."""
        self.all_reduce_max(0)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, in each of them."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU on this process's device, from any thread."""
        if self.device != "cuda":
            return tensor.to(self.device)
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        return tensor.pin_memory().to(device, non_blocking=True)

    def wrap(self, model: torch.nn.Module, fsdp: bool, autocast) -> torch.nn.Module:
        """What to call in the model's place, on the device: with several processes its gradients
        are their mean. fsdp: shard parameters, gradients and so the optimizer's state over them,
        block by block; what one needs is gathered when it is used (FSDP2)."""
        self.sharded = fsdp and self.world_size > 1
        if self.sharded and getattr(autocast, "fast_dtype", None) == torch.float16:
            raise UserError("--fsdp: float16's scale is not shared; use another --dtype")
        if not self.sharded:
            model.to(self.device)
        if self.world_size == 1:
            return model
        if self.sharded:
            from torch.distributed.device_mesh import init_device_mesh  # slow to import
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            mesh = init_device_mesh(self.device, (self.world_size,))
            for block in model.h:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            register_fsdp_forward_method(model, "next_logits")  # generation's other door
            return model
        # The other name that PyTorch 2.13 warns about is not there before it.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        parallel = DistributedDataParallel(model, broadcast_buffers=False)
        for _ in range(2):  # after the first gradient DDP orders its sums anew: not in mid-run
            idx = self.to_device(torch.zeros(1, model.config.block_size, dtype=torch.int64))
            with autocast:
                loss = parallel(idx, idx)[1]
            loss.backward()
            model.zero_grad()
        return parallel

    def whole_model(self, model: torch.nn.Module, model_class: type) -> torch.nn.Module | None:
        """A model with whole parameters for the first process, None for the others; all must call
        it for a sharded one."""
        if not self.sharded:
            return model if self.first else None
        weights = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
        if not self.first:
            return None
        copy = model_class(model.config)
        for name, parameter in copy.named_parameters():
            parameter.data.copy_(weights[name])
        return copy

    def send_gradients(self, parallel: torch.nn.Module, now: bool):
        """With DDP gradients travel once a step, with the last micro-batch."""
        if isinstance(parallel, DistributedDataParallel):
            parallel.require_backward_grad_sync = now


class StopSignals:
    """SIGINT and SIGTERM as a number to ask for: the step is finished and saved before the program
    ends. A second one ends a single process at once."""

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
