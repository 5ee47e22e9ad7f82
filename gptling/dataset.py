"""data/NAME as training reads it, in sequences of block_size tokens. The batch of a step is a pure
function of (seed, step), so a checkpoint has no state of a loader."""

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from gptling.files import UserError, read_json
from gptling.schedule import eval_part, micro_batches, tokens_per_step
from gptling.subwords import vary_tokens
from gptling.tokenizers import bytes_per_token, has_merges, load_tokenizer


def load_tokens(file: Path) -> np.ndarray:
    """Return the ids in a token file, which stay on disk. Raises UserError for a damaged one."""
    try:
        return np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{file}: {error}: prepare the text again with --overwrite") from None


class Dataset:
    """data/NAME. eval_all: validate on all of the text. Raises UserError if it is missing or
    too short."""

    def __init__(self, name: str, block_size: int, eval_tokens: int = 0, eval_all=False):
        directory = Path("data") / name
        if not (directory / "meta.json").is_file():
            files = sorted(Path("data").glob("*/meta.json"))
            prepared = [file.parent.name for file in files]
            command = "shakespeare" if name == "shakespeare" else f"YOUR.txt --name={name}"
            raise UserError(
                f"{directory} has no prepared text: "
                f"python prepare.py {command}, or --dataset from {prepared}"
            )
        self.directory = directory
        meta = read_json(directory / "meta.json", "prepare the text again with --overwrite")
        self.fingerprint = meta["sha256"]
        self.tokenizer = load_tokenizer(directory)
        self.tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
        self.train = [load_tokens(shard) for shard in sorted(directory.glob("train-*.npy"))]
        self.val = load_tokens(directory / "val.npy")
        lengths = [*map(len, self.train)]
        self.n_tokens = sum(lengths)
        found = {"train": self.n_tokens, "val": len(self.val)}
        for split, n in found.items():
            stored = meta.get(split, {"tokens": n})["tokens"]  # older data have none
            if n != stored:
                raise UserError(
                    f"{directory} has {n:,} {split} tokens, not {stored:,}: "
                    "prepare the text again with --overwrite"
                )
        if eval_all:
            self.val = np.concatenate([*self.train, self.val])
        # The tokens of the longest sequence that both splits have. One more is its last target.
        self.longest = min(max(lengths), len(self.val)) - 1
        if self.longest < block_size:
            raise UserError(
                f"{directory} has sequences of at most {self.longest} tokens: "
                f"prepare more text, or lower --block_size={block_size}"
            )
        self.block_size = block_size
        self.offset = 0  # see get_sequences
        self.validate_on(eval_tokens)
        self.train_bytes = self.n_tokens * self.val_bytes / self.val_targets  # about so many

    def validate_on(self, eval_tokens: int):
        """Choose the validation sequences: all of the split (0), or enough for eval_tokens, spread
        evenly. They have val_targets tokens to predict, which are val_bytes bytes of text."""
        T = self.block_size
        targets = self.val[1:]
        n_all = math.ceil(len(targets) / T)  # the last may be shorter
        wanted = math.ceil(eval_tokens / T)
        n = min(n_all, wanted) or n_all
        chosen = np.arange(n) * n_all // n  # numbers from 0 to n_all - 1
        self.val_starts = chosen * T
        parts = [targets[start : start + T] for start in self.val_starts]
        ids = np.concatenate(parts)
        self.val_targets = len(ids)
        self.val_bytes = int(bytes_per_token(self.tokenizer)[ids].sum())

    def vary_tokens(self, dropout: float, seed: int):
        """Train on copies of the text, each with other tokens, unless dropout is 0. Raises
        UserError if the tokenizer has no others."""
        if not dropout:
            return
        if not has_merges(self.tokenizer):
            raise UserError(
                f"--bpe_dropout={dropout}: the tokenizer is not a BPE, "
                "so a text has only one split: give --bpe_dropout=0"
            )
        self.train = vary_tokens(self.train, self.tokenizer, dropout, seed)
        self.n_tokens = sum(map(len, self.train)) // len(self.train)  # one copy's

    def epochs(self, config, steps: int) -> float:
        """Return how often a run has seen the text after so many steps. Those before a resume may
        have had other batches."""
        tokens = steps * tokens_per_step(config) + self.offset * self.block_size
        return tokens / self.n_tokens

    def check_tokenizer(self, checkpoint: Path, vocab_size: int):
        """Raise UserError if a checkpoint, whose model has vocab_size tokens, has other tokens."""
        theirs = load_tokenizer(checkpoint)
        has_same_tokens = self.tokenizer._mergeable_ranks == theirs._mergeable_ranks
        if self.tokenizer.n_vocab > vocab_size or not has_same_tokens:
            raise UserError(
                f"{checkpoint} has another tokenizer than {self.directory}: "
                f"give its --dataset, or prepare another text with --tokenizer={checkpoint}"
            )

    def batch(self, config, step: int, processes) -> list[tuple]:
        """Return (inputs, targets) on this process's device for each micro-batch of a step."""
        place = processes.rank, processes.world_size
        sequences = get_sequences(self.train, config, step, *place, offset=self.offset)
        batch = processes.to_device(sequences)  # (micro_steps, B, T + 1)
        return [(ids[:, :-1], ids[:, 1:].clone()) for ids in batch]  # you may change targets

    def validation_batches(self, batch_size: int, processes) -> Iterator[tuple]:
        """Yield (inputs, targets) of this process's share of the validation sequences. A shorter
        sequence ends in targets of -100, and a process without a sequence has one of these alone:
        all have the same number of batches, as FSDP needs."""
        length = self.block_size + 1
        stride = batch_size * processes.world_size
        for i in range(0, len(self.val_starts), stride):
            starts = self.val_starts[i : i + stride]
            starts = starts[processes.rank :: processes.world_size]
            rows = max(1, len(starts))
            sequences = np.full((rows, length), -100, dtype=np.int64)
            for row, start in enumerate(starts):
                ids = self.val[start : start + length]
                sequences[row, : len(ids)] = ids
            ids = processes.to_device(torch.from_numpy(sequences))
            yield ids[:, :-1].clamp(min=0), ids[:, 1:]


def check_text(config, saved: dict):
    """Raise UserError unless data/NAME is the text of a run's saved state."""
    directory = Path("data") / config.dataset
    if saved["data"] != read_json(directory / "meta.json")["sha256"]:
        raise UserError(
            f"{directory} is not {config.out_dir}'s training text: "
            f"prepare it again, or begin another run with --init_from={config.out_dir}"
        )


def training_data(config, saved: dict | None = None) -> Dataset:
    """Return the data set of a configuration as its run reads it. saved: the state of the run to
    resume, whose place in the epoch stays, also with another batch size. Raises UserError unless
    the data set is the one that run has."""
    data = Dataset(config.dataset, config.block_size, eval_part(config), config.eval_all)
    if saved:
        check_text(config, saved)
        old = saved["config"]
        before = old["batch_size"] * old["gradient_accumulation_steps"]
        now = config.batch_size * config.gradient_accumulation_steps
        data.offset = saved.get("offset", 0) + saved["progress"]["step"] * (before - now)
    data.vary_tokens(config.bpe_dropout, config.model_seed)
    return data


def count_sequences(lengths: np.ndarray, T: int) -> np.ndarray:
    """The sequences of each shard in an epoch. T tokens are left over, so that the first one may
    begin at any of T places. A shard of T + 1 to 2 T tokens has one, a shorter one has none."""
    return np.maximum(lengths // T - 1, lengths > T)


@lru_cache(maxsize=2)
def draw_epoch(lengths: tuple[int, ...], T: int, seed: int, epoch: int) -> tuple:
    """Draw the first sequence of each shard, and the order of an epoch. Return (order, firsts): the
    numbers of the sequences in their order, and where the first one of each shard begins.

    Two shards of ten tokens and T = 3 have two sequences each, numbers 0 and 1, 2 and 3. With
    firsts [2, 1] these begin at 2 and 5, and at 1 and 4: sequences are T tokens apart. With
    bpe_dropout each shard is a copy of the text, and an epoch visits all copies."""
    counts = count_sequences(np.array(lengths), T)
    n_firsts = np.minimum(T, lengths - counts * T)
    firsts = []
    for shard, n in enumerate(n_firsts):
        rng = np.random.default_rng((seed, epoch, shard))
        firsts.append(rng.integers(n))
    rng = np.random.default_rng((seed, epoch))
    order = np.arange(counts.sum(), dtype=np.uint32)
    rng.shuffle(order)
    return order, firsts


def get_sequences(shards, config, step: int, rank=0, world_size=1, offset=0) -> torch.Tensor:
    """Return the sequences of a process in a step, (micro_steps, B, block_size + 1) int64: each an
    input and its target, one token later. Micro-batch m of rank r is m * world_size + r of the
    step. offset: 160 if a run has had 10 steps of 32 sequences, and has steps of 16 since then."""
    T = config.block_size
    B, micro_steps = micro_batches(config, world_size)
    lengths = tuple(map(len, shards))
    counts = count_sequences(np.array(lengths), T)  # one for each shard
    ends = counts.cumsum()
    n = int(ends[-1])  # the sequences of each epoch
    sequences = np.empty((micro_steps, B, T + 1), dtype=np.int64)
    for m, row in np.ndindex(micro_steps, B):
        micro_batches_before = (step * micro_steps + m) * world_size + rank  # since the run began
        epoch, i = divmod(offset + micro_batches_before * B + row, n)
        order, firsts = draw_epoch(lengths, T, config.model_seed, epoch)
        number = int(order[i])
        shard = np.searchsorted(ends, number, side="right")
        before = ends[shard] - counts[shard]  # sequences of the shards before
        start = firsts[shard] + T * (number - before)
        sequences[m, row] = shards[shard][start : start + T + 1]
    return torch.from_numpy(sequences)
