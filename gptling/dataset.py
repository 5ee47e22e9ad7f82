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
        self.directory = directory = Path("data") / name
        if not (directory / "meta.json").is_file():
            others = sorted(file.parent.name for file in Path("data").glob("*/meta.json"))
            remedy = f"python prepare.py YOUR.txt --name={name}, or --dataset from {others}"
            if Path(name).exists():  # a text itself
                remedy = f"python prepare.py {name} prepares it, and prints the next command"
            raise UserError(f"{directory} has no prepared text: {remedy}")
        self.fingerprint = read_json(directory / "meta.json")["sha256"]
        self.tokenizer = load_tokenizer(directory)
        self.tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
        self.train = [np.load(f, mmap_mode="r") for f in sorted(directory.glob("train-*.npy"))]
        self.val = np.load(directory / "val.npy", mmap_mode="r")
        self.block_size, self.n_tokens = block_size, sum(map(len, self.train))
        self.longest = min(max(map(len, self.train)), len(self.val)) - 1  # sequence of both splits
        if self.longest < block_size:
            remedy = f"prepare more text, or lower --block_size={block_size}"
            raise UserError(f"{directory} has sequences of {self.longest} tokens at most: {remedy}")
        self.validate_on(eval_tokens)

    def validate_on(self, eval_tokens: int):
        """Choose the validation sequences: all of the split (0), or enough for eval_tokens, spread
        evenly. They have val_targets tokens to predict, which are val_bytes bytes of text."""
        T = self.block_size
        n_all = math.ceil((len(self.val) - 1) / T)  # the last may be shorter
        n = min(n_all, math.ceil(eval_tokens / T)) if eval_tokens else n_all
        self.val_starts = np.arange(n, dtype=np.int64) * n_all // n * T
        targets = [self.val[start + 1 : start + 1 + T] for start in self.val_starts]
        self.val_targets = sum(map(len, targets))
        self.val_bytes = int(bytes_per_token(self.tokenizer)[np.concatenate(targets)].sum())

    def check_tokenizer(self, checkpoint: Path, vocab_size: int):
        """Raise UserError if a checkpoint, whose model has vocab_size tokens, has other tokens."""
        ours, theirs = self.tokenizer._mergeable_ranks, load_tokenizer(checkpoint)._mergeable_ranks
        if ours != theirs or self.tokenizer.n_vocab > vocab_size:
            remedy = f"prepare that text with --tokenizer={checkpoint}"
            raise UserError(f"{checkpoint} has another tokenizer than {self.directory}: {remedy}")

    def batch(self, config, step: int, processes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (inputs, targets) on this process's device for each micro-batch of a step."""
        _, micro_steps = micro_batches(config, processes.world_size)
        places = [(step, m, processes.rank, processes.world_size) for m in range(micro_steps)]
        loaded = [processes.to_device(get_sequences(self.train, config, *p)) for p in places]
        return [(ids[:, :-1], ids[:, 1:].clone()) for ids in loaded]  # targets that you may change

    def validation_batches(self, batch_size: int, processes) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (inputs, targets) of this process's share of the validation sequences. The last
        ones end in targets of -100: every process has the same number, as FSDP needs."""
        T, n = self.block_size, len(self.val_starts)
        size = min(batch_size, math.ceil(n / processes.world_size))
        for i in range(0, n, size * processes.world_size):
            first = i + processes.rank * size
            sequences = torch.full((size, T + 1), -100)
            for row, start in enumerate(self.val_starts[first : first + size]):
                ids = self.val[start : start + T + 1].astype(np.int64)
                sequences[row, : len(ids)] = torch.from_numpy(ids)
            sequences = processes.to_device(sequences)
            yield sequences[:, :-1].clamp(min=0), sequences[:, 1:]


def tokens_per_step(fields: dict) -> int:
    """The tokens in a step of all processes, by these fields of train.py's configuration."""
    return math.prod(fields[k] for k in ("batch_size", "block_size", "gradient_accumulation_steps"))


def micro_batches(config, world_size: int) -> tuple[int, int]:
    """The sequences in a micro-batch of one process, and its micro-batches in a step: together
    batch_size * gradient_accumulation_steps sequences, however many processes share them."""
    share, rest = divmod(config.batch_size * config.gradient_accumulation_steps, world_size)
    if rest:
        raise UserError(f"batch_size * gradient_accumulation_steps is no multiple of {world_size}")
    size = next(n for n in range(min(share, config.batch_size), 0, -1) if share % n == 0)
    return size, share // size


@lru_cache(maxsize=2)
def draw_epoch(n_sequences: int, places: tuple, seed: int, epoch: int) -> tuple[np.ndarray, list]:
    """The order of the sequences, and which of its `places` the first one of each shard has."""
    firsts = [np.random.default_rng((seed, epoch, n)).integers(k) for n, k in enumerate(places)]
    return np.random.default_rng((seed, epoch)).permutation(n_sequences), firsts


def get_sequences(shards, config, step: int, micro_step=0, rank=0, world_size=1) -> torch.Tensor:
    """The sequences of a micro-batch, (B, block_size + 1) int64. Each begins with the last token of
    the one before. An epoch visits all. Micro-batch m of rank r is m * world_size + r of a step."""
    T = config.block_size
    B, micro_steps = micro_batches(config, world_size)
    # One sequence less than would fit, so that the first may begin at any of T places.
    in_shard = [max(len(shard) // T - 1, int(len(shard) > T)) for shard in shards]
    places = tuple(min(T, len(s) - n * T) for s, n in zip(shards, in_shard, strict=True))
    ends = np.cumsum(in_shard)  # sequences up to the end of each shard
    first = ((step * micro_steps + micro_step) * world_size + rank) * B  # since the run began
    sequences = np.empty((B, T + 1), dtype=np.int64)
    for row in range(B):
        epoch, i = divmod(first + row, int(ends[-1]))
        order, firsts = draw_epoch(int(ends[-1]), places, config.seed, epoch)
        n = int(np.searchsorted(ends, order[i], side="right"))  # its shard
        start = firsts[n] + (order[i] - ends[n] + in_shard[n]) * T
        sequences[row] = shards[n][start : start + T + 1]
    return torch.from_numpy(sequences)
