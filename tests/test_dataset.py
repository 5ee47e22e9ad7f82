"""data/NAME as training reads it: sequences, validation, and what makes it another text."""

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gptling.dataset import Dataset, get_sequences, training_data
from gptling.evaluation import evaluate
from gptling.files import UserError
from gptling.tokenizers import build_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from tests.conftest import one_process, small

AB = build_tokenizer("char", ["ab"], end_of_text=False)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_data(name, train, val, tokenizer=AB):
    """data/NAME with these ids."""
    directory = Path("data") / name
    directory.mkdir(parents=True)
    for name, ids in (("train-00000", train), ("val", val)):
        np.save(directory / f"{name}.npy", np.asarray(ids, dtype=np.uint16))
    (directory / "tokenizer.json").write_text(tokenizer_to_json(tokenizer))
    (directory / "meta.json").write_text(json.dumps({"format": 1, "sha256": "0" * 64}))


# ---------------------------------------------------------------- batches
@pytest.mark.parametrize("lengths", [[1000], [17], [33], [500, 20, 5, 300], [170]])
def test_an_epoch_visits_every_sequence_once(lengths):
    ends = np.cumsum([0, *lengths])
    shards = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    config = small(block_size=16, batch_size=1)
    n = sum(max(length // 16 - 1, int(length > 16)) for length in lengths)
    sequences = torch.cat([get_sequences(shards, config, step)[0] for step in range(4 * n)])
    epochs = sequences[:, 0].view(4, n).tolist()
    for starts in epochs:
        tiling = sorted(starts)
        for shard in shards:
            inside = [start for start in tiling if shard[0] <= start <= shard[-1]]
            assert all(b - a == 16 for a, b in itertools.pairwise(inside))
        assert len(set(tiling)) == n
    if n > 10:
        orders = [np.argsort(starts).tolist() for starts in epochs]
        assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
        assert len({min(starts) % 16 for starts in epochs}) > 1  # other cuts in each epoch


def test_micro_batches_are_in_order_and_targets_are_the_next_tokens_and_a_copy(here):
    write_data("mine", np.arange(1000) % 251, [1] * 50)
    config = small(block_size=16, batch_size=5, gradient_accumulation_steps=3)
    data = Dataset("mine", block_size=16)
    for micro_step, (x, y) in enumerate(data.batch(config, 7, one_process())):
        assert x.shape == y.shape == (5, 16) and x.dtype == torch.int64
        assert torch.equal(y, (x + 1) % 251) and torch.equal(x[:, 1:], y[:, :-1])
        y[:, ::2] = -100
        assert torch.equal(x, get_sequences(data.train, config, 7)[micro_step, :, :-1])
    assert micro_step == 2


def test_a_batch_is_a_function_of_seed_and_step():
    shards, config = [np.arange(5000)], small(block_size=16, batch_size=8)
    later = get_sequences(shards, config, 1000)
    assert torch.equal(get_sequences(shards, config, 1000), later)
    other = get_sequences(shards, dataclasses.replace(config, seed=1), 1000)
    starts, others = later[0, :, 0], other[0, :, 0]
    assert not torch.equal(starts // 16, others // 16)  # another order
    assert starts[0] % 16 != others[0] % 16  # and other cuts


def test_a_step_has_the_same_sequences_however_it_is_cut():
    shards, whole = [np.arange(50_000)], small(block_size=16, batch_size=12)
    for n, processes, step in itertools.product((1, 3, 6, 12), (1, 2, 4), (0, 7, 300)):
        config = small(block_size=16, batch_size=12 // n, gradient_accumulation_steps=n)
        parts = [get_sequences(shards, config, step, rank, processes) for rank in range(processes)]
        in_order = torch.stack(parts, dim=1).flatten(0, 2)  # by micro-batch, rank and row
        assert torch.equal(in_order, get_sequences(shards, whole, step)[0])


def test_a_run_resumed_with_another_batch_size_continues_at_its_place_in_the_epoch(here):
    """Sequences come neither twice nor not at all."""
    ids = np.arange(5000) % 60000
    write_data("mine", ids, [1] * 99)
    sizes = {"dataset": "mine", "block_size": 16, "gradient_accumulation_steps": 1}
    whole = small(batch_size=60, **sizes)
    config = small(batch_size=6, **sizes)
    saved = {"data": Dataset("mine", 16).fingerprint, "progress": {"step": 4}}
    parts = [training_data(config).batch(config, step, one_process()) for step in range(4)]
    for step, batch_size in ((4, 12), (6, 3)):
        saved["config"] = {"batch_size": config.batch_size, "gradient_accumulation_steps": 1}
        config = small(batch_size=batch_size, **sizes)
        data = training_data(config, saved)
        parts += [data.batch(config, step, one_process()) for step in (step, step + 1)]
        saved |= {"offset": data.offset, "progress": {"step": 6}}
    seen = torch.cat([x for batch in parts for x, _ in batch])
    assert torch.equal(seen, training_data(whole).batch(whole, 0, one_process())[0][0][:54])
    assert data.epochs(config, 8) == (4 * 6 + 2 * 12 + 2 * 3) * 16 / 5000


# ---------------------------------------------------------------- validation
def test_a_split_has_one_token_more_than_a_sequence_at_least(here):
    for train, val in ((17, 17), (16, 17), (17, 16)):
        write_data(f"{train}-{val}", [1] * train, [1] * val)
    assert Dataset("17-17", 16).longest == 16
    for name in ("16-17", "17-16"):
        with pytest.raises(UserError, match=r"sequences of at most 15 tokens.* --block_size=16"):
            Dataset(name, 16)


def test_shards_are_in_the_order_of_their_names_whatever_the_file_system_says(here):
    write_data("mine", [1] * 50, [1] * 200)
    for n in (5, 2, 8, 1, 6, 3, 9, 4, 7):  # neither the oldest file is first nor the newest
        np.save(f"data/mine/train-{n:05}.npy", np.ones(50 + n, dtype=np.uint16))
    data = Dataset("mine", 16)
    assert [len(shard) for shard in data.train] == list(range(50, 60))
    assert data.n_tokens == sum(range(50, 60)) and data.longest == 58
    assert all(isinstance(shard, np.memmap) for shard in data.train), "opened unread"


@pytest.mark.parametrize("n_tokens", [18, 64, 65, 66, 200])
def test_processes_validate_on_each_token_of_the_split_once(here, n_tokens):
    write_data("mine", [1] * 50, np.arange(n_tokens), build_tokenizer("byte", end_of_text=False))
    data, processes = Dataset("mine", 16), one_process()
    assert data.val_targets == data.val_bytes == n_tokens - 1
    for world_size in (1, 2, 3):
        batches = []
        for rank in range(world_size):
            processes.rank, processes.world_size = rank, world_size
            batches.append(list(data.validation_batches(2, processes)))
        assert len(set(map(len, batches))) == 1  # as FSDP needs
        pairs = [(x[y != -100], y[y != -100]) for x, y in itertools.chain(*batches)]
        inputs, targets = map(torch.cat, zip(*pairs, strict=True))
        assert torch.equal(targets, inputs + 1)
        assert all(0 <= x.min() and x.max() < n_tokens for x, _ in itertools.chain(*batches))
        assert sorted(targets.tolist()) == list(range(1, n_tokens))


class Mean(GPT):
    def forward(self, idx, targets):
        logits, _ = super().forward(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_process_without_validation_sequences_adds_nothing(here):
    """Though a mean over no targets is NaN, as nanoGPT's forward returns it."""
    write_data("mine", [1] * 50, [1] * 17)
    processes = one_process()
    processes.rank, processes.world_size, processes.autocast = 1, 2, contextlib.nullcontext()
    processes.sum = torch.Tensor.clone  # of one process
    model = Mean(GPTConfig(16, 256, 1, 1, 4))
    assert evaluate(model, Dataset("mine", 16), 2, processes)["val_loss"] == 0


def test_data_suit_a_checkpoint_that_has_their_tokens(here):
    for name in ("ab", "ac", "ab."):  # the last one with end-of-text, which "ab" does not need
        tokenizer = build_tokenizer("char", [name[:2]], end_of_text=name == "ab.")
        write_data(name, [1] * 50, [1] * 50, tokenizer)
    Dataset("ab", 16).check_tokenizer(Path("data/ab."), 3)
    Dataset("ab.", 16).check_tokenizer(Path("data/ab."), 3)
    for ours, theirs in (("ab", "ac"), ("ab.", "ab.")):  # a model of 2 tokens has none for "."
        with pytest.raises(UserError, match=f"--tokenizer=data/{theirs}"):
            Dataset(ours, 16).check_tokenizer(Path("data") / theirs, 2)
