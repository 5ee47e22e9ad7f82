"""data/NAME as training reads it, in sequences of block_size tokens. The batch of a step is a pure
function of (seed, step), so a checkpoint has no state of a loader."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, pairwise, product
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
            raise UserError(f"{directory} has no prepared text: {remedy}")
        self.fingerprint = read_json(directory / "meta.json")["sha256"]
        self.tokenizer = load_tokenizer(directory)
        self.tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
        shards = sorted(directory.glob("train-*.npy"))
        self.train = [np.load(file, mmap_mode="r") for file in shards]
        self.val = np.load(directory / "val.npy", mmap_mode="r")
        self.block_size, self.n_tokens = block_size, sum(map(len, self.train))
        n, split = min((max(map(len, self.train)), "train"), (len(self.val), "val"))
        self.longest = n - 1  # the longest sequence that both splits have
        if n <= block_size:
            few = f"the {split} split has {n} tokens, but block_size + 1 is {block_size + 1}"
            raise UserError(f"{directory}: {few}: prepare more text, or lower --block_size")
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
        ours, theirs = self.tokenizer, load_tokenizer(checkpoint)
        same = ours._mergeable_ranks == theirs._mergeable_ranks
        special = ours._special_tokens.items() <= theirs._special_tokens.items()
        if not (same and special and ours.n_vocab <= vocab_size):
            remedy = f"prepare that text with --tokenizer={checkpoint}"
            raise UserError(f"{checkpoint} has another tokenizer than {self.directory}: {remedy}")

    def batches(self, config, steps: range, processes) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (inputs, targets) on this process's device for every micro-batch of these steps.
        Another thread loads the next ones while you use these."""

        def load(step, micro_step):
            place = step, micro_step, processes.rank, processes.world_size
            sequences = processes.to_device(get_sequences(self.train, config, *place))
            return sequences[:, :-1], sequences[:, 1:].clone()  # which you may change

        micro_steps = range(micro_batches(config, processes.world_size)[1])
        with ThreadPoolExecutor(1) as thread:
            futures = (thread.submit(load, *both) for both in product(steps, micro_steps))
            for ready, _ in pairwise(chain(futures, [None])):
                yield ready.result()

    def validation_batches(self, batch_size: int, processes) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (inputs, targets) of this process's share of the validation sequences. The last
        ones end in targets of -100: every process has the same number, as FSDP needs."""
        T, n, world_size = self.block_size, len(self.val_starts), processes.world_size
        size = min(batch_size, math.ceil(n / world_size))
        for i in range(math.ceil(n / size / world_size)):
            first = (i * world_size + processes.rank) * size
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
        sequences = f"--batch_size={config.batch_size} times --gradient_accumulation_steps"
        raise UserError(f"{sequences} is not divisible by {world_size} processes")
    size = next(n for n in range(min(share, config.batch_size), 0, -1) if share % n == 0)
    return size, share // size


@lru_cache(maxsize=2)
def sequence_order(n_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n_sequences)


def get_sequences(
    shards: list[np.ndarray], config, step: int, micro_step=0, rank=0, world_size=1
) -> torch.Tensor:
    """The sequences of a micro-batch, (B, block_size + 1) int64. Each begins with the last token of
    the one before. An epoch visits all, in an order drawn from (seed, epoch), which also draw where
    the first one of a shard begins. Rank r's micro-batch m of a step is m * world_size + r."""
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
        places = min(T, len(shards[n]) - in_shard[n] * T)  # places of the first sequence
        offset = np.random.default_rng((config.seed, epoch, n)).integers(places)
        start = offset + (number - (ends[n] - in_shard[n])) * T
        sequences[row] = shards[n][start : start + T + 1]
    return torch.from_numpy(sequences)
