"""prepare.py: from texts to data/NAME."""

import gzip
import json

import numpy as np
import pytest

import prepare
from config import UserError
from prepare import (
    PrepareConfig,
    TokenWriter,
    build_tokenizer,
    encode_on_all_cores,
    load_tokenizer,
    read_pieces,
    training_part,
)
from tests.conftest import output_of, run_script


def split_text(directory, split):
    files = sorted(directory.glob(f"{split}*.npy"))
    ids = np.concatenate([np.load(file) for file in files]).tolist()
    return load_tokenizer(directory).decode(ids)


def test_embedded_corpus_needs_nothing(tmp_path):
    output_of("prepare.py", cwd=tmp_path)
    data = tmp_path / "data" / "quickstart"
    corpus = prepare.embedded_corpus()
    text = split_text(data, "train") + split_text(data, "val")
    assert sorted(text.split(prepare.END_OF_TEXT)) == sorted([*corpus.values(), ""])
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["quickstart"]


def test_embedded_validation_text_is_not_in_the_training_text():
    corpus = prepare.embedded_corpus()
    part = training_part(np.array([len(text) for text in corpus.values()]))
    texts = list(zip(corpus.values(), part, strict=True))
    train = {line for text, n in texts if n for line in text.split("\n")}
    val = [line for text, n in texts if not n for line in text.split("\n") if len(line) > 40]
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
    assert len(val) == len(text) // 10
    meta = json.loads((data / "meta.json").read_text())
    assert meta["train"]["bytes"] == len(train.encode())
    assert meta["val"]["bytes"] == len(val.encode())
    assert np.load(data / "val.npy").dtype == np.uint16


def test_folders_and_jsonl_give_documents(tmp_path):
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / "b.md").write_text("second\n")
    (notes / "deep" / "c.txt").write_text("third\n")
    (notes / "a.txt").write_text("first\n")
    (notes / "picture.png").write_bytes(b"\x89PNG\0\0")
    (notes / ".hidden").write_text("hidden")
    lines = "".join(json.dumps({"text": f"document {i} é", "id": i}) + "\n\n" for i in range(50))
    (tmp_path / "chat.jsonl").write_text(lines)
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    arguments = ["notes", "chat.jsonl", "more.jsonl.gz", "--name", "all"]
    output = output_of("prepare.py", *arguments, cwd=tmp_path)
    assert "picture.png" in output
    data = tmp_path / "data" / "all"
    documents = ["first\n", "second\n", "third\n"] + 2 * [f"document {i} é" for i in range(50)]
    train, val = (split_text(data, split).split("<|endoftext|>")[:-1] for split in ("train", "val"))
    assert sorted(train + val) == sorted(documents)
    assert len(val) == 10
    assert json.loads((data / "meta.json").read_text())["documents"] == 103


def test_pieces_give_the_tokens_of_the_whole_file(tmp_path, gpt2_encoding, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = "".join(prepare.embedded_corpus().values()) + "end of it"
    (tmp_path / "corpus.txt").write_text(corpus, encoding="utf-8", newline="")
    monkeypatch.setattr(prepare, "PIECE", 5000)
    data = prepare.prepare(PrepareConfig(sources=("corpus.txt",), tokenizer="gpt2"))
    cut = len(corpus) - len(corpus) // 10
    for split, text in (("train", corpus[:cut]), ("val", corpus[cut:])):
        ids = np.concatenate([np.load(file) for file in sorted(data.glob(f"{split}*"))])
        assert ids.tolist() == [*gpt2_encoding.encode_ordinary(text), 50256]


def test_texts_encoded_on_all_cores_keep_their_order_whatever_their_length(monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 64)
    encoding = build_tokenizer("char", "ab\n", end_of_text=False)
    texts = [("ab\n"[i % 3]) * (i * 37 % 500) if i % 5 else None for i in range(600)]
    encoded = list(encode_on_all_cores(encoding, enumerate(texts)))
    assert [key for key, _ in encoded] == list(range(600))
    for text, (_, ids) in zip(texts, encoded, strict=True):
        assert ids is None if text is None else encoding.decode(list(ids)) == text


def test_an_error_among_texts_being_encoded_reaches_the_reader():
    def texts():
        yield "first", "a"
        raise UserError("not UTF-8")

    with pytest.raises(UserError, match="not UTF-8"):
        list(encode_on_all_cores(build_tokenizer("byte", [], False), texts()))


def test_pieces_put_characters_together_that_the_chunks_cut(tmp_path, monkeypatch):
    text = "\ufeffé你🙂 añb\r\n" * 100
    (tmp_path / "a.txt").write_bytes(text.encode())
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(prepare, "PIECE", size)
        pieces = list(read_pieces(tmp_path / "a.txt", prepare.tqdm(disable=True)))
        assert "".join(piece for piece, _ in pieces) == text[1:]
        assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build = prepare.build_tokenizer
    line = '{"text": "aremo"}\n'
    for name, text in (
        ("a.txt", 30 * line + "more"),
        ("a.txt", 30 * line + "ü"),
        ("a.txt", 29 * line),
        ("a.txt", 30 * line.replace("a", "e")),
        ("a.jsonl", 31 * line),
        ("a.jsonl", 29 * line),
        ("a.jsonl", 29 * line + line.replace("a", "")),
    ):
        (tmp_path / name).write_text(30 * line)

        def change(*arguments, name=name, text=text, **options):
            (tmp_path / name).write_text(text, encoding="utf-8")
            return build(*arguments, **options)

        monkeypatch.setattr(prepare, "build_tokenizer", change)
        with pytest.raises(UserError, match="changed while"):
            prepare.prepare(PrepareConfig(sources=(name,)))
        assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    "source, name",
    [("my.novel.v2.txt", "my.novel.v2"), (".txt", "txt"), ("B.JSONL", "B"), ("a b", "a b")],
)
def test_data_is_called_after_its_source(tmp_path, source, name):
    (tmp_path / source).write_text('{"text": "some words"}\n' * 20)
    output_of("prepare.py", source, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [name]
    assert ("{" in split_text(tmp_path / "data" / name, "train")) == (source != "B.JSONL")


def test_files_in_a_folder_are_recognised_wherever_a_character_is_cut(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf")
    for shift in range(4):
        for mark in (b"", b"\xef\xbb\xbf"):
            content = mark + b"x" * shift + "🙂".encode() * 4000
            (tmp_path / f"{shift}{len(mark)}.txt").write_bytes(content)
    assert len(prepare.find_files([str(tmp_path)])) == 8


def test_token_files_are_npy_whatever_their_length(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "TOKENS_PER_SHARD", 1000)
    writer = TokenWriter(tmp_path, "train", np.dtype(np.uint32), sharded=True)
    ids = np.random.default_rng(0).integers(0, 100_000, 3500).astype(np.uint32)
    for part in np.array_split(ids, 7):
        writer.write(part)
    writer.close()
    shards = [np.load(file, mmap_mode="r") for file in sorted(tmp_path.glob("*.npy"))]
    assert [len(shard) for shard in shards] == [1000, 1000, 1000, 500]
    assert np.array_equal(np.concatenate(shards), ids)


def test_training_part_holds_a_tenth_out():
    assert training_part(np.array([1_115_394])).tolist() == [1_003_855]
    assert training_part(np.array([100, 50])).tolist() == [90, 45]
    part = training_part(np.full(100, 10))
    assert (part == 0).sum() == 10 and set(part.tolist()) == {0, 10}
    giants = np.array([10**6] + [1] * 20)  # whole documents cannot make up a tenth
    assert training_part(giants)[0] == 900_000


def test_a_download_is_checked_by_its_sha256(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "original").write_text("all the world's a stage\n" * 10)
    address = (tmp_path / "original").as_uri()
    monkeypatch.setitem(prepare.DOWNLOADS, "shakespeare", (address, "0" * 64))
    with pytest.raises(UserError, match="another sha256"):
        prepare.prepare(PrepareConfig(sources=("shakespeare",)))
    assert list((tmp_path / "data").iterdir()) == []
    digest = prepare.hashlib.sha256((tmp_path / "original").read_bytes()).hexdigest()
    monkeypatch.setitem(prepare.DOWNLOADS, "shakespeare", (address, digest))
    data = prepare.prepare(PrepareConfig(sources=("shakespeare",)))
    assert "all the world" in split_text(data, "train")
    monkeypatch.setitem(prepare.DOWNLOADS, "shakespeare", ("http://127.0.0.1:9/", digest))
    with pytest.raises(UserError, match=r"python prepare.py shakespeare.txt"):
        prepare.prepare(PrepareConfig(sources=("shakespeare",), name="again"))


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "a.txt").write_text("one " * 50)
    output_of("prepare.py", "a.txt", cwd=tmp_path)
    (tmp_path / "a.txt").write_text("two " * 50)
    process = run_script("prepare.py", "a.txt", cwd=tmp_path)
    assert process.returncode == 1 and b"--overwrite=True" in process.stderr
    assert split_text(tmp_path / "data" / "a", "train").startswith("one")
    output_of("prepare.py", "a.txt", "--overwrite", cwd=tmp_path)
    assert split_text(tmp_path / "data" / "a", "train").startswith("two")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


def test_a_bpe_is_the_same_for_the_same_text(tmp_path):
    pytest.importorskip("rustbpe", reason="a BPE of one's own: pip install rustbpe")
    texts = list(prepare.embedded_corpus().values())
    (tmp_path / "a.txt").write_text("\n".join(texts), encoding="utf-8")
    arguments = ["a.txt", "--tokenizer=bpe", "--vocab_size=2000"]
    for name, threads in (("one", "1"), ("two", "4")):
        output_of(
            "prepare.py", *arguments, f"--name={name}", cwd=tmp_path, RAYON_NUM_THREADS=threads
        )
    one, two = (tmp_path / "data" / name for name in ("one", "two"))
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
    encoding = load_tokenizer(one)
    assert (encoding.n_vocab, encoding.eot_token) == (2000, 1999)
    text = split_text(one, "train") + split_text(one, "val")
    assert text.replace(prepare.END_OF_TEXT, "") == "\n".join(texts)


def test_a_bpe_is_trained_on_a_bounded_sample_of_all_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BPE_SAMPLE", 50_000)
    monkeypatch.setattr(prepare, "PIECE", 16_000)
    text = "".join(f"{i} green bottles\n" for i in range(30_000))
    (tmp_path / "a.txt").write_text(text)
    sample = prepare._check([tmp_path / "a.txt"], "bpe")[2]
    assert 20_000 < sum(map(len, sample)) <= 50_000
    places = [text.index(part) / len(text) for part in sample]
    assert min(places) < 0.2 and max(places) > 0.8
    assert sample == prepare._check([tmp_path / "a.txt"], "bpe")[2]
    monkeypatch.setattr(prepare, "BPE_SAMPLE", len(text))
    assert "".join(prepare._check([tmp_path / "a.txt"], "bpe")[2]) == text


def test_the_tokenizer_of_other_data_or_of_a_checkpoint_is_taken(tmp_path):
    texts = list(prepare.embedded_corpus().values())
    (tmp_path / "a.txt").write_text("\n".join(texts), encoding="utf-8")
    output_of("prepare.py", "a.txt", "--tokenizer=byte", cwd=tmp_path)
    (tmp_path / "b.txt").write_text("anders 你好\n" * 50, encoding="utf-8")
    output_of("prepare.py", "b.txt", "--tokenizer=data/a", cwd=tmp_path)
    assert split_text(tmp_path / "data" / "b", "train").startswith("anders 你好")
    output_of("prepare.py", "a.txt", "--name=char", cwd=tmp_path)
    process = run_script("prepare.py", "b.txt", "--tokenizer=data/char", "--name=c", cwd=tmp_path)
    assert process.returncode == 1 and b"data/char" in process.stderr
