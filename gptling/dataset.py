"""data/NAME as training reads it, in sequences of block_size tokens. The batch of a step is a pure
function of (seed, step), so a checkpoint has no state of a loader."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptling.files import UserError, read_json
from gptling.tokenizers import bytes_per_token, load_tokenizer


def open_tokens(file: Path) -> np.ndarray:
    """Map the token ids of a .npy file into memory. Raises UserError for a damaged one."""
    try:
        return np.load(file, mmap_mode="r")
    except ValueError as error:
        raise UserError(f"{file}: {error}; prepare it again") from None


class Dataset:
    """data/NAME. Validation uses all of val, or about eval_tokens of it: val_targets tokens are
    predicted, val_bytes bytes of text. Raises UserError if it is missing or too short."""

    def __init__(self, name: str, block_size: int, eval_tokens: int = 0):
        self.directory = directory = Path("data") / name
        if not (directory / "meta.json").is_file():
            found = sorted(file.parent.name for file in Path("data").glob("*/meta.json"))
            others = f", or choose --dataset from {', '.join(found[:9])}" if found else ""
            remedy = f"python prepare.py YOUR.txt --name={name}{others}"
            raise UserError(f"{directory} has no prepared text: {remedy}")
        self.fingerprint = read_json(directory / "meta.json")["sha256"]
        self.tokenizer = load_tokenizer(directory)
        self.tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
        self.train = [open_tokens(file) for file in sorted(directory.glob("train-*.npy"))]
        self.val = open_tokens(directory / "val.npy")
        self.block_size, self.n_tokens = block_size, sum(map(len, self.train))
        splits = {"train": max(map(len, self.train)), "val": len(self.val)}
        self.longest = min(splits.values()) - 1  # the longest sequence that both splits have
        for split, n in splits.items():
            if n <= block_size:
                few = f"the {split} split has {n} tokens, but block_size + 1 is {block_size + 1}"
                raise UserError(f"{directory}: {few}: prepare more text, or lower --block_size")
        self.val_starts = validation_starts(len(self.val), block_size, eval_tokens)
        targets = [self.val[start + 1 : start + 1 + block_size] for start in self.val_starts]
        self.val_targets = sum(map(len, targets))
        self.val_bytes = int(bytes_per_token(self.tokenizer)[np.concatenate(targets)].sum())

    def check_tokenizer(self, checkpoint: Path, vocab_size: int):
        """Raise UserError if a checkpoint, whose model has vocab_size tokens, has other tokens."""
        ours, theirs = self.tokenizer, load_tokenizer(checkpoint)
        same = ours._mergeable_ranks == theirs._mergeable_ranks
        special = ours._special_tokens.items() <= theirs._special_tokens.items()
        if not (same and special and ours.n_vocab <= vocab_size):
            remedy = f"prepare that text with --tokenizer={checkpoint}"
            raise UserError(f"{checkpoint} has another tokenizer than {self.directory}: {remedy}")

    def batches(self, config, steps: range, processes) -> Iterator:
        """(inputs, targets) on this process's device, for every micro-batch of these steps."""
        micro_steps = micro_batches(config, processes.world_size)[1]

        def load(step, micro_step):
            ranks = processes.rank, processes.world_size
            sequences = get_sequences(self.train, config, step, micro_step, *ranks)
            sequences = processes.to_device(sequences)  # whole: pinning a view would copy it first
            return sequences[:, :-1], sequences[:, 1:]  # the target of a token is the next one

        return prefetch(load, itertools.product(steps, range(micro_steps)))

    def validation_batches(self, batch_size: int, processes) -> Iterator:
        """(inputs, targets) of this process's share of the validation sequences. The last ones are
        filled up with targets of -100: every process has the same number, as FSDP needs."""
        T, n, world_size = self.block_size, len(self.val_starts), processes.world_size
        size = min(batch_size, math.ceil(n / world_size))
        for i in range(math.ceil(n / size / world_size)):
            first = (i * world_size + processes.rank) * size
            idx = torch.zeros(size, T, dtype=torch.int64)
            targets = torch.full((size, T), -100)
            for row, start in enumerate(self.val_starts[first : first + size]):
                ids = torch.from_numpy(self.val[start : start + T + 1].astype(np.int64))
                idx[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
            yield processes.to_device(idx), processes.to_device(targets)


def validation_starts(n_tokens: int, T: int, eval_tokens: int = 0) -> np.ndarray:
    """Where each validation sequence of T tokens begins, (n,) int64: all that the split has, or
    enough for eval_tokens, spread evenly, so that no part of a text is left out."""
    n_sequences = math.ceil((n_tokens - 1) / T)  # the last may be shorter
    n = min(n_sequences, math.ceil(eval_tokens / T)) if eval_tokens else n_sequences
    return np.arange(n, dtype=np.int64) * n_sequences // n * T


def micro_batches(config, world_size: int) -> tuple[int, int]:
    """The sequences in a micro-batch of one process, and its micro-batches in a step: together
    batch_size * gradient_accumulation_steps sequences, however many processes share them."""
    share, rest = divmod(config.batch_size * config.gradient_accumulation_steps, world_size)
    if rest:
        sequences = f"--batch_size={config.batch_size} times --gradient_accumulation_steps"
        raise UserError(f"{sequences} is not divisible by {world_size} processes")
    size = next(n for n in range(min(share, config.batch_size), 0, -1) if share % n == 0)
    return size, share // size


@functools.lru_cache(maxsize=2)
def sequence_order(n_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n_sequences)


def get_sequences(
    shards: Sequence[np.ndarray], config, step: int, micro_step=0, rank=0, world_size=1
) -> torch.Tensor:
    """The sequences of a micro-batch, (B, block_size + 1) int64: a pure function of the arguments.

    An epoch visits every sequence once, in an order drawn from (seed, epoch). Each begins with the
    last token of the one before. Each epoch draws where the first one of a shard begins. A step has
    the same sequences with any number of processes: micro-step m of rank r has micro-batch
    m * world_size + r."""
    T = config.block_size
    B, micro_steps = micro_batches(config, world_size)
    # One sequence less than would fit, so that the first may begin at any of T places.
    in_shard = np.array([max(len(shard) // T - 1, int(len(shard) > T)) for shard in shards])
    ends = in_shard.cumsum()  # sequences up to the end of each shard
    first = ((step * micro_steps + micro_step) * world_size + rank) * B  # since the run began
    sequences = np.empty((B, T + 1), dtype=np.int64)
    for row in range(B):
        epoch, i = divmod(first + row, int(ends[-1]))
        number = sequence_order(int(ends[-1]), config.seed, epoch)[i]
        n = int(np.searchsorted(ends, number, side="right"))  # its shard
        places = min(T, len(shards[n]) - in_shard[n] * T)  # where the first sequence may begin
        offset = np.random.default_rng((config.seed, epoch, n)).integers(places)
        start = offset + (number - (ends[n] - in_shard[n])) * T
        sequences[row] = shards[n][start : start + T + 1]
    return torch.from_numpy(sequences)


def prefetch(load, places) -> Iterator[Any]:
    """load(*place) for each of the places, in another thread while the one before is in use."""
    with ThreadPoolExecutor(1) as thread:
        futures = (thread.submit(load, *place) for place in places)
        for ready, _ in itertools.pairwise(itertools.chain(futures, [None])):
            yield ready.result()
