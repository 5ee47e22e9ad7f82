"""data/NAME as training reads it, in sequences of block_size tokens. The batch of a step is a pure
function of (seed, step), so a checkpoint has no state of a loader."""

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from gptling.files import UserError, read_json
from gptling.tokenizers import bytes_per_token, load_tokenizer


class Dataset:
    """data/NAME. Raises UserError if it is missing or too short."""

    def __init__(self, name: str, block_size: int, eval_tokens: int = 0):
        directory = Path("data") / name
        if not (directory / "meta.json").is_file():
            prepared = sorted(file.parent.name for file in Path("data").glob("*/meta.json"))
            remedy = f"python prepare.py YOUR.txt --name={name}, or --dataset from {prepared}"
            if Path(name).exists():  # a text itself
                remedy = f"python prepare.py {name} prepares it, and prints the next command"
            raise UserError(f"{directory} has no prepared text: {remedy}")
        self.directory = directory
        self.fingerprint = read_json(directory / "meta.json")["sha256"]
        self.tokenizer = load_tokenizer(directory)
        self.tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
        shards = sorted(directory.glob("train-*.npy"))
        self.train = [np.load(shard, mmap_mode="r") for shard in shards]
        self.val = np.load(directory / "val.npy", mmap_mode="r")
        lengths = [len(shard) for shard in self.train]
        self.n_tokens = sum(lengths)
        self.longest = min(max(lengths), len(self.val)) - 1  # sequence of both splits
        if self.longest < block_size:
            remedy = f"prepare more text, or lower --block_size={block_size}"
            raise UserError(f"{directory} has sequences of {self.longest} tokens at most: {remedy}")
        self.block_size = block_size
        self.validate_on(eval_tokens)

    def validate_on(self, eval_tokens: int):
        """Choose the validation sequences: all of the split (0), or enough for eval_tokens, spread
        evenly. They have val_targets tokens to predict, which are val_bytes bytes of text."""
        T = self.block_size
        n_all = math.ceil((len(self.val) - 1) / T)  # the last may be shorter
        n = min(n_all, math.ceil(eval_tokens / T)) or n_all
        self.val_starts = np.arange(n) * n_all // n * T
        targets = [self.val[start + 1 : start + 1 + T] for start in self.val_starts]
        targets = np.concatenate(targets)
        self.val_targets = len(targets)
        self.val_bytes = int(bytes_per_token(self.tokenizer)[targets].sum())

    def check_tokenizer(self, checkpoint: Path, vocab_size: int):
        """Raise UserError if a checkpoint, whose model has vocab_size tokens, has other tokens."""
        ours = self.tokenizer
        theirs = load_tokenizer(checkpoint)
        is_same = ours._mergeable_ranks == theirs._mergeable_ranks
        if not is_same or ours.n_vocab > vocab_size:
            remedy = f"prepare that text with --tokenizer={checkpoint}"
            raise UserError(f"{checkpoint} has another tokenizer than {self.directory}: {remedy}")

    def batch(self, config, step: int, processes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (inputs, targets) on this process's device for each micro-batch of a step."""
        rank, world_size = processes.rank, processes.world_size
        batches = []
        for micro_step in range(micro_batches(config, world_size)[1]):
            ids = get_sequences(self.train, config, step, micro_step, rank, world_size)
            ids = processes.to_device(ids)
            targets = ids[:, 1:].clone()  # that you may change
            batches.append((ids[:, :-1], targets))
        return batches

    def validation_batches(self, batch_size: int, processes) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (inputs, targets) of this process's share of the validation sequences. The last
        ones end in targets of -100: every process has the same number, as FSDP needs."""
        T = self.block_size
        starts = self.val_starts
        size = min(batch_size, math.ceil(len(starts) / processes.world_size))
        for i in range(0, len(starts), size * processes.world_size):
            first = i + processes.rank * size
            sequences = torch.full((size, T + 1), -100)
            for row, start in enumerate(starts[first : first + size]):
                ids = self.val[start : start + T + 1].astype(np.int64)
                sequences[row, : len(ids)] = torch.from_numpy(ids)
            sequences = processes.to_device(sequences)
            inputs = sequences[:, :-1].clamp(min=0)
            yield inputs, sequences[:, 1:]


def tokens_per_step(fields: dict) -> int:
    """The tokens in a step of all processes, by these fields of train.py's configuration."""
    sequences = fields["batch_size"] * fields["gradient_accumulation_steps"]
    return sequences * fields["block_size"]


def micro_batches(config, world_size: int) -> tuple[int, int]:
    """The sequences in a micro-batch of one process, and its micro-batches in a step: together
    batch_size * gradient_accumulation_steps sequences, however many processes share them."""
    share, rest = divmod(config.batch_size * config.gradient_accumulation_steps, world_size)
    if rest:
        raise UserError(f"batch_size * gradient_accumulation_steps is no multiple of {world_size}")
    size = min(share, config.batch_size)
    while share % size:
        size -= 1
    return size, share // size


@lru_cache(maxsize=3)
def draw_epoch(lengths: tuple[int, ...], T: int, seed: int, epoch: int) -> np.ndarray:
    """The sequences of an epoch in their order: the shard of each and its place there, (n, 2).

    Two shards of ten tokens and T = 3 give [[1, 4], [0, 2], [0, 5], [1, 1]], for example. In a
    shard, sequences are T tokens apart. The place of the first one is random in each epoch.
    """
    places = []
    for shard, length in enumerate(lengths):
        # One sequence less than would fit, so that the first may begin at any of T places.
        n = max(length // T - 1, int(length > T))
        rng = np.random.default_rng((seed, epoch, shard))
        first = rng.integers(min(T, length - n * T))
        starts = first + T * np.arange(n)
        places.append(np.stack([np.full(n, shard), starts], axis=1))
    rng = np.random.default_rng((seed, epoch))
    return rng.permutation(np.concatenate(places))


def get_sequences(shards, config, step: int, micro_step=0, rank=0, world_size=1) -> torch.Tensor:
    """The sequences of a micro-batch, (B, block_size + 1) int64. Each begins with the last token of
    the one before. An epoch visits all. Micro-batch m of rank r is m * world_size + r of a step."""
    T = config.block_size
    B, micro_steps = micro_batches(config, world_size)
    micro_batch = (step * micro_steps + micro_step) * world_size + rank  # since the run began
    lengths = tuple(map(len, shards))
    n = len(draw_epoch(lengths, T, config.seed, 0))  # as many as in every epoch
    sequences = np.empty((B, T + 1), dtype=np.int64)
    for row in range(B):
        epoch, i = divmod(micro_batch * B + row, n)
        shard, start = draw_epoch(lengths, T, config.seed, epoch)[i]
        sequences[row] = shards[shard][start : start + T + 1]
    return torch.from_numpy(sequences)
