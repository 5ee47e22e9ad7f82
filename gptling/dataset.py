"""data/NAME as training reads it, in sequences of block_size tokens. The batch of a step is a pure
function of (seed, step), so a checkpoint has no state of a loader."""

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from gptling.files import UserError, read_json
from gptling.schedule import eval_part, micro_batches
from gptling.subwords import vary_tokens
from gptling.tokenizers import bytes_per_token, has_merges, load_tokenizer


class Dataset:
    """data/NAME. Raises UserError if it is missing or too short."""

    def __init__(self, name: str, block_size: int, eval_tokens: int = 0):
        directory = Path("data") / name
        if not (directory / "meta.json").is_file():
            files = sorted(Path("data").glob("*/meta.json"))
            prepared = [file.parent.name for file in files]
            remedy = f"python prepare.py YOUR.txt --name={name}, or --dataset from {prepared}"
            raise UserError(f"{directory} has no prepared text: {remedy}")
        self.directory = directory
        meta = read_json(directory / "meta.json", "prepare the text again with --overwrite")
        self.fingerprint = meta["sha256"]
        self.tokenizer = load_tokenizer(directory)
        self.tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
        shards = sorted(directory.glob("train-*.npy"))
        self.train = [np.load(shard, mmap_mode="r") for shard in shards]
        self.val = np.load(directory / "val.npy", mmap_mode="r")
        lengths = [*map(len, self.train)]
        self.n_tokens = sum(lengths)
        stored = [meta.get(split, {}).get("tokens") for split in ("train", "val")]
        if stored not in ([None, None], [self.n_tokens, len(self.val)]):
            counts = f"{self.n_tokens:,} and {len(self.val):,} tokens, not {stored}"
            raise UserError(f"{directory} has {counts}: prepare the text again with --overwrite")
        n_shared = min(max(lengths), len(self.val))
        self.longest = n_shared - 1  # sequence that both splits have
        if self.longest < block_size:
            remedy = f"prepare more text, or lower --block_size={block_size}"
            raise UserError(f"{directory} has sequences of {self.longest} tokens at most: {remedy}")
        self.block_size = block_size
        self.validate_on(eval_tokens)

    def validate_on(self, eval_tokens: int):
        """Choose the validation sequences: all of the split (0), or enough for eval_tokens, spread
        evenly. They have val_targets tokens to predict, which are val_bytes bytes of text."""
        T = self.block_size
        targets = self.val[1:]
        n_all = math.ceil(len(targets) / T)  # the last may be shorter
        wanted = math.ceil(eval_tokens / T)
        n = min(n_all, wanted) or n_all
        chosen = np.arange(n) * n_all // n  # of sequences 0 to n_all - 1
        self.val_starts = chosen * T
        parts = [targets[start : start + T] for start in self.val_starts]
        ids = np.concatenate(parts)
        sizes = bytes_per_token(self.tokenizer)[ids]
        self.val_targets = len(ids)
        self.val_bytes = int(sizes.sum())

    def vary_tokens(self, dropout: float, seed: int):
        """Train on copies of the text, each with other tokens, unless dropout is 0. Raises
        UserError if the tokenizer has no others."""
        if not dropout:
            return
        if not has_merges(self.tokenizer):
            reason = "the tokenizer is no BPE, and each text has one split"
            raise UserError(f"--bpe_dropout={dropout}: {reason}: give --bpe_dropout=0")
        self.train = vary_tokens(self.train, self.tokenizer, dropout, seed)
        self.n_tokens = sum(map(len, self.train)) // len(self.train)  # of a copy

    def check_tokenizer(self, checkpoint: Path, vocab_size: int):
        """Raise UserError if a checkpoint, whose model has vocab_size tokens, has other tokens."""
        ours = self.tokenizer
        theirs = load_tokenizer(checkpoint)
        has_same_tokens = ours._mergeable_ranks == theirs._mergeable_ranks
        if ours.n_vocab > vocab_size or not has_same_tokens:
            remedy = f"give its --dataset, or prepare another text with --tokenizer={checkpoint}"
            raise UserError(f"{checkpoint} has another tokenizer than {self.directory}: {remedy}")

    def batch(self, config, step: int, processes) -> list[tuple]:
        """Return (inputs, targets) on this process's device for each micro-batch of a step."""
        sequences = get_sequences(self.train, config, step, processes.rank, processes.world_size)
        batches = []
        for ids in sequences:
            ids = processes.to_device(ids)  # (B, T + 1)
            inputs = ids[:, :-1]
            targets = ids[:, 1:].clone()  # that you may change
            batches.append((inputs, targets))
        return batches

    def validation_batches(self, batch_size: int, processes) -> Iterator[tuple]:
        """Yield (inputs, targets) of this process's share of the validation sequences. A shorter
        sequence ends in targets of -100, and a process without a sequence has one of these alone:
        all have the same number of batches, as FSDP needs."""
        length = self.block_size + 1
        stride = batch_size * processes.world_size
        for i in range(0, len(self.val_starts), stride):
            starts = self.val_starts[i : i + stride][processes.rank :: processes.world_size]
            sequences = np.full((max(1, len(starts)), length), -100, dtype=np.int64)
            for row, start in enumerate(starts):
                ids = self.val[start : start + length]
                sequences[row, : len(ids)] = ids
            sequences = torch.from_numpy(sequences)
            sequences = processes.to_device(sequences)
            inputs = sequences[:, :-1]
            targets = sequences[:, 1:]
            yield inputs.clamp(min=0), targets


def training_data(config, fingerprint: str | None = None) -> Dataset:
    """Return the data set of a configuration as its run reads it. Raises UserError unless it has
    this fingerprint, that of the run to resume."""
    data = Dataset(config.dataset, config.block_size, eval_part(config))
    if fingerprint not in (None, data.fingerprint):
        remedy = f"prepare it again, or begin another run with --init_from={config.out_dir}"
        raise UserError(f"{data.directory} is not what {config.out_dir} was trained on: {remedy}")
    data.vary_tokens(config.bpe_dropout, config.seed)
    return data


@lru_cache(maxsize=2)
def draw_epoch(lengths: tuple[int, ...], T: int, seed: int, epoch: int) -> np.ndarray:
    """The sequences of an epoch in their order: the shard of each and its place there, (n, 2).

    Two shards of ten tokens and T = 3 give [[1, 4], [0, 2], [0, 5], [1, 1]], for example. In a
    shard, sequences are T tokens apart. The place of the first one is random in each epoch.
    With bpe_dropout each shard is a copy of the text, and an epoch visits all copies.
    """
    places = []
    for shard, length in enumerate(lengths):
        # T tokens are left over, so that the first sequence may begin at any of T places. A shard
        # of T + 1 to 2 T tokens has one sequence, a shorter one has none.
        n = max(length // T - 1, int(length > T))
        n_firsts = min(T, length - n * T)
        rng = np.random.default_rng((seed, epoch, shard))
        first = rng.integers(n_firsts)
        starts = first + T * np.arange(n)
        shards = np.full(n, shard)
        pairs = np.stack([shards, starts], axis=1)
        places.append(pairs)
    places = np.concatenate(places)
    rng = np.random.default_rng((seed, epoch))
    return rng.permutation(places)


def get_sequences(shards, config, step: int, rank=0, world_size=1) -> torch.Tensor:
    """The sequences of a process in a step, (micro_steps, B, block_size + 1) int64: each an input
    and its target, one token later. Micro-batch m of rank r is m * world_size + r of the step."""
    T = config.block_size
    B, micro_steps = micro_batches(config, world_size)
    lengths = tuple(map(len, shards))
    first_epoch = draw_epoch(lengths, T, config.seed, 0)
    n = len(first_epoch)  # as in every epoch
    sequences = np.empty((micro_steps, B, T + 1), dtype=np.int64)
    for m, row in np.ndindex(micro_steps, B):
        micro_batches_before = (step * micro_steps + m) * world_size + rank  # since the run began
        epoch, i = divmod(micro_batches_before * B + row, n)
        order = draw_epoch(lengths, T, config.seed, epoch)
        shard, start = order[i]
        end = start + T + 1
        sequences[m, row] = shards[shard][start:end]
    return torch.from_numpy(sequences)
