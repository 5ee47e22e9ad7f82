"""prepare.py: from texts to data/NAME."""

import gzip
import hashlib
import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest

from gptling import corpus, shards
from gptling.cli import UserError
from gptling.corpus import documents, embedded_corpus, find_sources
from gptling.shards import (
    VALIDATION,
    TokenFile,
    TokenShards,
    encode_on_all_cores,
    training_part,
    validation_size,
)
from gptling.tokenizers import END_OF_TEXT, build_tokenizer, load_tokenizer
from prepare import PrepareConfig, prepare
from tests.conftest import output_of, run_here


def split_text(directory, split):
    files = sorted(directory.glob(f"{split}*.npy"))
    ids = np.concatenate([np.load(file) for file in files]).tolist()
    return load_tokenizer(directory).decode(ids)


def meta_of(directory):
    return json.loads((directory / "meta.json").read_text())


def run_prepare(*arguments, cwd):
    process = run_here("prepare.py", *arguments, cwd=cwd)
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode()


# ---------------------------------------------------------------- what is written


def test_embedded_corpus_needs_nothing(tmp_path):
    run_prepare(cwd=tmp_path)
    data = tmp_path / "data" / "quickstart"
    texts = embedded_corpus()
    text = split_text(data, "train") + split_text(data, "val")
    assert sorted(text.split(END_OF_TEXT)) == sorted([*texts.values(), ""])
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["quickstart"]
    assert meta_of(data)["documents"] == len(texts)
    assert (meta_of(data)["tokenizer"], meta_of(data)["vocab_size"]) == ("bpe", 512)
    assert meta_of(data)["characters"] == sum(map(len, texts.values()))


def test_a_tokenizer_knows_nothing_of_the_text_that_validates(tmp_path):
    """But for the characters: without them it could not be encoded."""
    rng = random.Random(0)
    train = " ".join("".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(4400))
    val = " quixotic Ωmega" * 200  # its pairs are twice as frequent
    (tmp_path / "a.txt").write_text(train + val, encoding="utf-8")
    run_prepare("a.txt", "--tokenizer=bpe", "--vocab_size=300", cwd=tmp_path)
    tokenizer = load_tokenizer(tmp_path / "data" / "a")
    assert len(tokenizer.encode(train)) < 0.9 * len(train)
    assert len(tokenizer.encode(" quixotic")) > 6
    run_prepare("a.txt", "--tokenizer=char", "--name=b", cwd=tmp_path)
    data = tmp_path / "data" / "b"
    assert "Ω" in split_text(data, "val") and "Ω" not in split_text(data, "train")


def test_embedded_validation_text_is_not_in_the_training_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = prepare(PrepareConfig())
    train = set(split_text(data, "train").split("\n"))
    val = [line for line in split_text(data, "val").split("\n") if len(line) > 40]
    assert len(val) > 100
    assert sum(line in train for line in val) < 0.1 * len(val)


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_text_survives_whatever_the_locale(tmp_path, tokenizer):
    text = "Zeile eins\r\nпривет 你好 🙂\n\n\ttab <|endoftext|>\r" * 20
    (tmp_path / "mine.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    arguments = ["mine.txt", "--tokenizer", tokenizer]
    output_of("prepare.py", *arguments, cwd=tmp_path, LC_ALL="C", LANG="C")
    data = tmp_path / "data" / "mine"
    train, val = split_text(data, "train"), split_text(data, "val")
    assert train + val == text
    assert len(val.encode()) == pytest.approx(len(text.encode()) / 10, abs=5)
    assert meta_of(data)["train"]["bytes"] == len(train.encode())
    assert meta_of(data)["val"]["bytes"] == len(val.encode())
    assert np.load(data / "val.npy").dtype == np.uint16


def test_tiny_shakespeare_is_split_where_it_always_was(tmp_path):
    file = os.environ.get("GPTLING_SHAKESPEARE")
    if not file:
        pytest.skip("tiny Shakespeare: set GPTLING_SHAKESPEARE to the file")
    run_prepare(file, "--name=shakespeare", "--tokenizer=char", cwd=tmp_path)
    meta = meta_of(tmp_path / "data" / "shakespeare")
    assert meta["train"] == {"tokens": 1_003_855, "bytes": 1_003_855, "shards": 1}
    assert meta["val"] == {"tokens": 111_539, "bytes": 111_539}
    assert meta["vocab_size"] == 65


def test_the_fingerprint_is_that_of_the_token_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 1000)
    monkeypatch.setattr(corpus, "BYTES_AT_ONCE", 500)
    (tmp_path / "a.txt").write_text("some words in a line\n" * 200)
    data = prepare(PrepareConfig(("a.txt",)))
    files = [*sorted(data.glob("train-*")), data / "val.npy"]
    assert len(files) == meta_of(data)["train"]["shards"] + 1 > 3
    digests = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    assert meta_of(data)["sha256"] == hashlib.sha256(digests.encode()).hexdigest()


def test_folders_and_jsonl_give_documents(tmp_path):
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / "b.md").write_text("second\n")
    (notes / "deep" / "c.txt").write_text("third\n")
    (notes / "a.txt").write_text("first\n")
    (notes / "picture.png").write_bytes(b"\x89PNG\0\0")
    (notes / ".hidden").write_text("hidden")
    (notes / ".git").mkdir()
    (notes / ".git" / "config").write_text("hidden")
    lines = "".join(json.dumps({"text": f"document {i} é", "id": i}) + "\n\n" for i in range(50))
    (tmp_path / "chat.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    arguments = ["notes", "chat.jsonl", "more.jsonl.gz", "--name", "all"]
    assert "picture.png" in run_prepare(*arguments, cwd=tmp_path)
    data = tmp_path / "data" / "all"
    texts = ["first\n", "second\n", "third\n"] + 2 * [f"document {i} é" for i in range(50)]
    train, val = (split_text(data, split).split(END_OF_TEXT)[:-1] for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts)
    assert 9 <= len(val) <= 11
    assert meta_of(data)["documents"] == 103


@pytest.mark.parametrize(
    "source, name",
    [("my.novel.v2.txt", "my.novel.v2"), (".txt", "txt"), ("B.JSONL", "B"), ("a b", "a b")],
)
def test_data_is_called_after_its_source(tmp_path, source, name):
    (tmp_path / source).write_text('{"text": "some words"}\n' * 20)
    run_prepare(source, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [name]
    assert ("{" in split_text(tmp_path / "data" / name, "train")) == (source != "B.JSONL")


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "a.txt").write_text("one " * 50)
    run_prepare("a.txt", cwd=tmp_path)
    (tmp_path / "a.txt").write_text("two " * 50)
    process = run_here("prepare.py", "a.txt", cwd=tmp_path)
    assert process.returncode == 1 and b"--overwrite=True" in process.stderr
    assert split_text(tmp_path / "data" / "a", "train").startswith("one")
    run_prepare("a.txt", "--overwrite", cwd=tmp_path)
    assert split_text(tmp_path / "data" / "a", "train").startswith("two")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


def test_a_download_is_checked_by_its_sha256(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "original").write_text("all the world's a stage\n" * 10)
    address = (tmp_path / "original").as_uri()
    digest = hashlib.sha256((tmp_path / "original").read_bytes()).hexdigest()
    monkeypatch.setitem(corpus.DOWNLOADS, "shakespeare", (address, "0" * 64))
    with pytest.raises(UserError, match="another sha256"):
        prepare(PrepareConfig(("shakespeare",)))
    assert list((tmp_path / "data").iterdir()) == []
    monkeypatch.setitem(corpus.DOWNLOADS, "shakespeare", (address, digest))
    data = prepare(PrepareConfig(("shakespeare",)))
    assert "all the world" in split_text(data, "train")
    monkeypatch.setitem(corpus.DOWNLOADS, "shakespeare", ("http://127.0.0.1:9/", digest))
    with pytest.raises(UserError, match=r"give shakespeare.txt instead"):
        prepare(PrepareConfig(("shakespeare",), name="again"))


def test_the_tokenizer_of_other_data_or_of_a_checkpoint_is_taken(tmp_path):
    (tmp_path / "a.txt").write_text("one of bytes, one of characters\n" * 50)
    (tmp_path / "b.txt").write_text("anders 你好\n" * 50, encoding="utf-8")
    run_prepare("a.txt", "--tokenizer=byte", cwd=tmp_path)
    run_prepare("b.txt", "--tokenizer=data/a", cwd=tmp_path)
    assert split_text(tmp_path / "data" / "b", "train").startswith("anders 你好")
    run_prepare("a.txt", "--name=char", cwd=tmp_path)
    arguments = ["b.txt", "--tokenizer=data/char", "--name=c"]
    process = run_here("prepare.py", *arguments, cwd=tmp_path)
    assert process.returncode == 1 and b"data/char" in process.stderr


@pytest.mark.slow
def test_a_bpe_is_the_same_for_the_same_text(tmp_path):
    text = "\n".join(embedded_corpus().values())
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    for name, threads in (("one", "1"), ("two", "4")):
        arguments = ["a.txt", "--tokenizer=bpe", "--vocab_size=2000", f"--name={name}"]
        output_of("prepare.py", *arguments, cwd=tmp_path, RAYON_NUM_THREADS=threads)
    one, two = (tmp_path / "data" / name for name in ("one", "two"))
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
    tokenizer = load_tokenizer(one)
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (2000, 1999)
    assert (split_text(one, "train") + split_text(one, "val")).replace(END_OF_TEXT, "") == text


# ---------------------------------------------------------------- the split


def parts_of(sizes):
    """How much of each document trains."""
    seen, held_out, parts = 0, 0, []
    for size in sizes:
        parts.append(training_part(size, seen, held_out, sizes[:10]))
        seen, held_out = seen + size, held_out + size - parts[-1]
    return parts


def test_of_a_few_documents_the_last_tenth_of_each_validates():
    assert parts_of([1_115_394]) == [1_003_855]
    assert parts_of([100, 50]) == [90, 45]
    assert parts_of([20 * 10**9]) == [20 * 10**9 - VALIDATION]
    sizes = [10**9] * 5  # a tenth of each would be 500 million
    held_out = [size - part for size, part in zip(sizes, parts_of(sizes), strict=True)]
    assert 0 < held_out[0] <= VALIDATION and sum(held_out) <= VALIDATION


def test_files_of_a_folder_are_read_in_one_order_whatever_the_file_system_says(
    tmp_path, monkeypatch
):
    for name in ("b/2.txt", "a.txt", "B.txt", "b/1.txt", "10.txt", "9.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a text")
    found, rglob = [], type(tmp_path).rglob
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(7)

        def listed(folder, pattern, order=order):
            files = sorted(rglob(folder, pattern))
            assert len(files) == 7
            return (files[i] for i in order)

        monkeypatch.setattr(type(tmp_path), "rglob", listed)
        found.append(find_sources([str(tmp_path)], tmp_path))
    assert all(sources == sorted(found[0]) for sources in found) and len(found[0]) == 6


def test_of_many_documents_a_tenth_validates_whole():
    parts = parts_of([10] * 100)
    assert parts.count(0) == 10 and set(parts) == {0, 10}
    assert parts_of([10**6] + [1] * 20)[0] == 900_000  # the others cannot make up a tenth
    assert parts_of([1] * 20 + [10**6])[20] == 900_000


def test_validation_text_is_bounded_and_spread_over_the_corpus():
    assert [validation_size(n) for n in (9, 1000, 10**8)] == [0, 100, 10**7]
    assert validation_size(45 * 10**9) < VALIDATION == validation_size(10**14)
    parts = parts_of([100_000] * 30_000)  # 3 GB
    val = [i for i, part in enumerate(parts) if part == 0]
    assert 40_000_000 < len(val) * 100_000 <= validation_size(3 * 10**9)
    assert val[-1] > 29_000
    giants = [1] * 10 + [20**n for n in range(5, 12)]
    assert sum(giants) - sum(parts_of(giants)) <= VALIDATION


# ---------------------------------------------------------------- pieces, threads, files


def test_pieces_give_the_tokens_of_the_whole_file(tmp_path, gpt2_encoding, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "".join(embedded_corpus().values()) + "end of it"
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8", newline="")
    monkeypatch.setattr(corpus, "BYTES_AT_ONCE", 5000)
    data = prepare(PrepareConfig(("corpus.txt",), "gpt2"))
    raw = text.encode()
    cut = len(raw) - len(raw) // 10
    for split, part in (("train", raw[:cut]), ("val", raw[cut:])):
        ids = np.concatenate([np.load(file) for file in sorted(data.glob(f"{split}*"))])
        assert ids.tolist() == [*gpt2_encoding.encode_ordinary(part.decode()), 50256]


def test_pieces_put_characters_together_that_the_chunks_cut(tmp_path, monkeypatch):
    text = "\ufeffé你🙂 añb\r\n" * 100
    (tmp_path / "a.txt").write_bytes(text.encode())
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(corpus, "BYTES_AT_ONCE", size)
        ((n_bytes, pieces),) = documents(tmp_path / "a.txt")
        assert n_bytes == len(text.encode())
        assert "".join(pieces) == text[1:]


def test_a_cut_inside_a_document_leaves_characters_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n in range(11, 50):
        text = "🙂" * n
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        data = prepare(PrepareConfig(("a.txt",), "byte", overwrite=True))
        assert split_text(data, "train") + split_text(data, "val") == text
        assert meta_of(data)["train"]["bytes"] % 4 == 0


def test_a_long_text_is_read_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BYTES_AT_ONCE", 1000)
    (tmp_path / "a.txt").write_text("some words in a line\n" * 10_000)
    read = []
    ((n_bytes, pieces),) = documents(tmp_path / "a.txt", read.append)
    assert read == [] and n_bytes == 210_000  # known before it is read
    next(pieces)
    assert sum(read) <= 1000


def test_a_text_without_a_word_is_read_bit_by_bit_too(tmp_path, monkeypatch):
    """Where no cut is a good one, as in Chinese without white space."""
    monkeypatch.setattr(corpus, "BYTES_AT_ONCE", 100)
    text = "0123456789" * 1000
    (tmp_path / "a.txt").write_text(text)
    ((_, pieces),) = documents(tmp_path / "a.txt")
    pieces = list(pieces)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 17 * 100


def test_texts_encoded_on_all_cores_keep_their_order_whatever_their_length(monkeypatch):
    monkeypatch.setattr(shards, "GROUP", 64)
    monkeypatch.setattr(shards, "UNDER_WAY", 128)
    tokenizer = build_tokenizer("char", ["ab\n"])
    texts = [("ab\n"[i % 3]) * (i * 37 % 500) for i in range(600)]
    encoded = list(encode_on_all_cores(tokenizer, enumerate(texts)))
    assert [key for key, _ in encoded] == list(range(600))
    assert [tokenizer.decode(ids.tolist()) for _, ids in encoded] == texts


@pytest.mark.parametrize("text", ["some text " * 10, ""], ids=["texts", "empty ones"])
def test_a_bounded_amount_of_text_is_under_way(monkeypatch, text):
    monkeypatch.setattr(shards, "GROUP", 100)
    monkeypatch.setattr(shards, "UNDER_WAY", 1000)
    taken = []

    def texts():
        for i in range(10_000):
            taken.append(i)
            yield i, text

    encoded = encode_on_all_cores(build_tokenizer("byte"), texts())
    ahead = [len(taken) - key for key, _ in encoded]
    assert max(ahead) < 16 * 1000 // (len(text) + 50) + 2  # of 16 threads at most


def test_an_error_among_texts_being_encoded_reaches_the_reader():
    def texts():
        yield "first", "a"
        raise UserError("not UTF-8")

    with pytest.raises(UserError, match="not UTF-8"):
        list(encode_on_all_cores(build_tokenizer("byte"), texts()))


def test_files_in_a_folder_are_recognised_wherever_a_character_is_cut(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "cut.txt").write_bytes("é".encode()[:1])
    for shift in range(4):
        for mark in (b"", b"\xef\xbb\xbf"):
            content = mark + b"x" * shift + "🙂".encode() * 4000
            (tmp_path / f"{shift}{len(mark)}.txt").write_bytes(content)
    assert len(find_sources([str(tmp_path)], tmp_path)) == 8


def test_a_token_file_is_on_the_disk_when_it_is_saved(tmp_path, monkeypatch):
    """progress.json counts on it."""
    file, there = TokenFile(tmp_path / "a.npy", np.dtype("uint16")), []
    file.write(np.arange(3))
    monkeypatch.setattr("os.fsync", lambda _: there.extend(np.load(tmp_path / "a.npy")))
    file.save()
    assert there == [0, 1, 2]


@pytest.mark.parametrize("n_vocab, dtype", [(65_536, np.uint16), (65_537, np.uint32)])
def test_token_files_are_npy_and_no_piece_straddles_two(tmp_path, monkeypatch, n_vocab, dtype):
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 1000)
    files = TokenShards(tmp_path, SimpleNamespace(n_vocab=n_vocab, special_tokens_set=set()))
    ids = np.random.default_rng(0).integers(0, n_vocab, 3500).astype(np.uint32)
    for piece in np.array_split(ids, 5):
        files.write("train", piece)
        files.write("val", piece[:3])
        if files.is_full():
            files.finish_shard()
    files.close()
    written = [np.load(file, mmap_mode="r") for file in sorted(tmp_path.glob("train-*.npy"))]
    assert [len(shard) for shard in written] == [1400, 1400, 700]
    assert {shard.dtype for shard in written} == {np.dtype(dtype)}
    assert np.array_equal(np.concatenate(written), ids)
    assert len(np.load(tmp_path / "val.npy")) == 15
