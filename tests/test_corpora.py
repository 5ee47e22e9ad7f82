"""Large corpora: records, hub datasets, token files of others, and what was stopped."""

import functools
import gzip
import json
import os
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import prepare
from config import UserError
from prepare import PrepareConfig
from tests.conftest import ROOT, output_of, run_script
from tests.test_bad_input import refused

RNG = random.Random(0)
WORDS = "the a of and to in is that language model reads some text 12 345 été 你好".split()
DOCUMENTS = [" ".join(RNG.choices(WORDS, k=RNG.randrange(1, 90))) + ".\n" for _ in range(400)]


def jsonl(documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


def write_parquet(path, documents, column="text"):
    reason = "Parquet files: pip install datasets"
    pyarrow = pytest.importorskip("pyarrow", reason=reason)
    parquet = pytest.importorskip("pyarrow.parquet", reason=reason)
    path.parent.mkdir(exist_ok=True)
    table = pyarrow.table({"id": list(range(len(documents))), column: documents})
    parquet.write_table(table, path, row_group_size=50)


def content(data):
    """The bytes of every file of a data directory."""
    return {file.name: file.read_bytes() for file in sorted(data.iterdir())}


def tokens(data):
    return {name: raw for name, raw in content(data).items() if name.endswith(".npy")}


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_parquet_and_hub_datasets_give_what_their_text_gives(tmp_path, monkeypatch, tokenizer):
    pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.jsonl").write_text(jsonl(DOCUMENTS))
    write_parquet(tmp_path / "local" / "train-0.parquet", DOCUMENTS[:150])
    write_parquet(tmp_path / "local" / "train-1.parquet", [*DOCUMENTS[150:], "", None])
    sources = {"all.jsonl": "all", "local": "folder", f"hf:{tmp_path / 'local'}::train": ""}
    data = [
        prepare.prepare(PrepareConfig(sources=(source,), tokenizer=tokenizer, name=name))
        for source, name in sources.items()
    ]
    assert data[2].name == "local"  # called after the data set
    assert tokens(data[0]) == tokens(data[1]) == tokens(data[2])
    metas = [json.loads((path / "meta.json").read_text()) for path in data]
    assert metas[0]["documents"] == 400
    assert metas[1] == metas[2] == metas[0] | {"sha256": metas[1]["sha256"]}


def test_records_are_read_once_and_split_as_if_read_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readings = []

    def read_pieces(file, progress, original=prepare.read_pieces):
        readings.append(file.name)
        return original(file, progress)

    def write(name, **options):
        return prepare.prepare(PrepareConfig(sources=(name,), tokenizer="byte", **options))

    monkeypatch.setattr(prepare, "read_pieces", read_pieces)
    (tmp_path / "many.jsonl").write_text(jsonl(DOCUMENTS))
    (tmp_path / "few.jsonl").write_text(jsonl(DOCUMENTS[:3]))
    many = tokens(write("many.jsonl"))
    assert readings == ["many.jsonl"]
    few = write("few.jsonl")  # the ends of its documents validate, so that their lengths matter
    assert readings[1:] == ["few.jsonl"] * 3
    assert json.loads((few / "meta.json").read_text())["val"]["bytes"] > 0
    twice = functools.partial(prepare._encode_files, once=False)
    monkeypatch.setattr(prepare, "_encode_files", twice)
    assert tokens(write("many.jsonl", overwrite=True)) == many
    assert readings[4:] == ["many.jsonl"] * 2


def test_validation_is_a_tenth_and_bounded():
    assert [prepare.validation_size(n) for n in (9, 1000, 10**8)] == [0, 100, 10**7]
    assert prepare.validation_size(45 * 10**9) < 10**8 == prepare.validation_size(10**14)
    lengths = np.full(30_000, 100_000)  # 3 billion characters
    part = prepare.training_part(lengths)
    val = np.flatnonzero(part == 0)
    assert 40_000_000 < len(val) * 100_000 <= prepare.validation_size(lengths.sum().item())
    assert val[-1] > 29_000  # spread over all of it
    giant = np.array([20 * 10**9])
    assert (giant - prepare.training_part(giant)).item() == 10**8


@pytest.mark.parametrize("kind", ["text, char", "jsonl.gz, byte", "parquet, bpe"])
def test_preparation_that_is_killed_goes_on_to_the_same_bytes(tmp_path, kind):
    sources, tokenizer = [], kind.split(", ")[1]
    if tokenizer == "bpe":
        pytest.importorskip("rustbpe", reason="a BPE of one's own: pip install rustbpe")
    if kind.startswith("text"):
        sources = ["all.txt", "more.txt"]
        (tmp_path / "all.txt").write_text("".join(DOCUMENTS) * 3, encoding="utf-8")
        (tmp_path / "more.txt").write_text("".join(DOCUMENTS), encoding="utf-8")
    elif kind.startswith("jsonl"):
        for i in range(3):
            sources.append(f"{i}.jsonl.gz")
            lines = jsonl(DOCUMENTS[i:] + DOCUMENTS)
            (tmp_path / sources[-1]).write_bytes(gzip.compress(lines.encode()))
    else:
        for i in range(3):
            write_parquet(tmp_path / "rows" / f"train-{i}.parquet", DOCUMENTS[i:] + DOCUMENTS)
        sources = ["rows"]
    program = """
import os, sys, time
sys.path.insert(0, os.environ["ROOT"])
import config, prepare
prepare.PIECE, prepare.SAVE_EVERY, prepare.TOKENS_PER_SHARD = 1 << 10, 20_000, 30_000
def slowly(self, sync=prepare.TokenWriter.sync):
    sync(self)
    time.sleep(float(os.environ["SECONDS"]))
prepare.TokenWriter.sync = slowly
config.run(prepare.main)"""
    arguments = [*sources, f"--tokenizer={tokenizer}"]
    arguments += ["--vocab_size=300"] if tokenizer == "bpe" else []

    def start(name, seconds):
        command = [sys.executable, "-c", program, *arguments, f"--name={name}"]
        environment = os.environ | {"ROOT": str(ROOT), "SECONDS": str(seconds)}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)

    assert start("whole", 0).wait(60) == 0
    rng, stopped = random.Random(kind), 0
    progress = tmp_path / "data" / ".parts.partial" / "progress.json"
    for _ in range(2):
        process = start("parts", 0.05)
        before = progress.read_bytes() if progress.exists() else b""
        while process.poll() is None and (not progress.exists() or progress.read_bytes() == before):
            time.sleep(0.01)
        time.sleep(rng.random() / 10)
        process.kill()
        stopped += process.wait() != 0
        process.stdout.close()
    assert stopped and progress.exists() and not (tmp_path / "data" / "parts").exists()
    process = start("parts", 0)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0 and "going on behind" in output
    assert content(tmp_path / "data" / "parts") == content(tmp_path / "data" / "whole")
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"parts", "whole"}


def stopped_at(n, monkeypatch):
    """Make the n-th save end with Ctrl-C."""
    calls, sync = [], prepare.TokenWriter.sync

    def interrupted(self):
        sync(self)
        calls.append(self)
        if len(calls) == n:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare.TokenWriter, "sync", interrupted)


def test_a_hub_dataset_goes_on_in_the_file_where_it_stopped(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write_parquet(tmp_path / "rows" / f"train-{i}.parquet", DOCUMENTS[i:])
    source = f"hf:{tmp_path / 'rows'}"
    whole = prepare.prepare(PrepareConfig(sources=(source,), tokenizer="byte", name="whole"))
    monkeypatch.setattr(prepare, "SAVE_EVERY", 20_000)
    config = PrepareConfig(sources=(source,), tokenizer="byte", name="parts")
    for n in (5, 13):
        with monkeypatch.context() as m:
            stopped_at(n, m)
            with pytest.raises(KeyboardInterrupt):
                prepare.prepare(config)
    read = []

    def read_pieces(file, progress, original=prepare.read_pieces):
        read.append(file.name)
        return original(file, progress)

    monkeypatch.setattr(prepare, "read_pieces", read_pieces)
    assert content(prepare.prepare(config)) == content(whole)
    assert read == [f"{source}, file 3 of 3"]


@pytest.mark.parametrize("change", ["text", "tokenizer", "hub text"])
def test_a_stopped_preparation_of_something_else_is_not_continued(
    tmp_path, monkeypatch, capsys, change
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "SAVE_EVERY", 5000)
    source = "all.jsonl"
    if change == "hub text":
        pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
        (tmp_path / "local").mkdir()
        source = "local/train.jsonl"
    (tmp_path / source).write_text(jsonl(DOCUMENTS))
    config = PrepareConfig(
        sources=(f"hf:{tmp_path / 'local'}" if change == "hub text" else source,),
        tokenizer="byte",
        name="all",
    )
    with monkeypatch.context() as m:
        stopped_at(8, m)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(config)
    assert "the same command goes on" in capsys.readouterr().out
    if change == "tokenizer":
        config.tokenizer = "char"
    else:
        (tmp_path / source).write_text(jsonl([text.upper() for text in DOCUMENTS]))
    if change == "hub text":  # whose size and time are not known
        with pytest.raises(UserError, match="changed"):
            prepare.prepare(config)
        assert list((tmp_path / "data").iterdir()) == []
    data = prepare.prepare(config)
    text = "".join(
        prepare.load_tokenizer(data).decode(np.load(file).tolist())
        for file in sorted(data.glob("*.npy"))
    )
    expected = DOCUMENTS if change == "tokenizer" else [text.upper() for text in DOCUMENTS]
    assert sorted(text.split(prepare.END_OF_TEXT)) == sorted([*expected, ""])


def test_two_preparations_of_one_name_do_not_meet(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    partial = tmp_path / "data" / ".a.partial"
    partial.mkdir(parents=True)
    with prepare.lock_directory(partial):
        process = run_script("prepare.py", "a.txt", cwd=tmp_path)
        refused(process, ".a.partial", "another process")
    output_of("prepare.py", "a.txt", cwd=tmp_path)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


@pytest.mark.parametrize(
    "source, named",
    [
        ("bad.parquet", ["bad.parquet", "Parquet"]),
        ("column.parquet", ["column.parquet", '"text"']),
        ("numbers.parquet", ["numbers.parquet", "row 0"]),
        ("hf:FOLDER/missing", ["missing"]),
        ("hf:FOLDER/rows::test", ["rows", "test"]),
        ("hf:FOLDER/other", ["other", "text"]),
        ("hf:a:b:c:d", ["hf:NAME:CONFIG:SPLIT"]),
        ("hf:", ["hf:NAME"]),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, monkeypatch, source, named):
    pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but not really PAR1")
    write_parquet(tmp_path / "column.parquet", DOCUMENTS[:20], "content")
    write_parquet(tmp_path / "numbers.parquet", [1, 2])
    write_parquet(tmp_path / "rows" / "train.parquet", DOCUMENTS[:20])
    write_parquet(tmp_path / "other" / "train.parquet", DOCUMENTS[:20], "content")
    source = source.replace("FOLDER", str(tmp_path))
    with pytest.raises(UserError) as error:
        prepare.prepare(PrepareConfig(sources=(source,), name="x"))
    for word in named:
        assert word in str(error.value)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_missing_dataset_is_one_line(tmp_path):
    pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
    process = run_script("prepare.py", f"hf:{tmp_path / 'missing'}", cwd=tmp_path)
    refused(process, "missing")


def write_bin(path, ids, magic=20240520, version=1, count=None):
    """As llm.c's dev/data/data_common.py lays it out, in plain bytes."""
    header = [magic, version, len(ids) if count is None else count] + 253 * [0]
    raw = b"".join(number.to_bytes(4, "little", signed=True) for number in header)
    path.write_bytes(raw + b"".join(id.to_bytes(2, "little") for id in ids))


def test_token_files_of_others_come_in_and_go_out_unchanged(tmp_path, gpt2_encoding):
    texts = [f"{text} 🙂" for text in DOCUMENTS]
    ids = [id for text in texts for id in [50256, *gpt2_encoding.encode_ordinary(text)]]
    thirds = [ids[:5000], ids[5000:-2001], ids[-2001:]]
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    for name, part in zip(names, thirds, strict=True):
        write_bin(tmp_path / name, part)
    output_of("prepare.py", *names, "--tokenizer=gpt2", "--name=fineweb", cwd=tmp_path)
    data = tmp_path / "data" / "fineweb"
    assert np.load(data / "train-00000.npy").tolist() == thirds[0] + thirds[1]
    assert np.load(data / "val.npy").tolist() == thirds[2]
    meta = json.loads((data / "meta.json").read_text())
    assert meta["documents"] == 400 and meta["characters"] == len("".join(texts))
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == len("".join(texts).encode())
    assert re.fullmatch("[0-9a-f]{64}", meta["sha256"])

    recipe = (ROOT / "docs" / "large_corpora.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", recipe, re.DOTALL)[1]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    write_bin(tmp_path / "expected.bin", thirds[0] + thirds[1])
    assert (tmp_path / "train-00000.bin").read_bytes() == (tmp_path / "expected.bin").read_bytes()
    assert (tmp_path / "val.bin").read_bytes() == (tmp_path / names[2]).read_bytes()


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["a_train.bin", "a_val.bin"], ["--tokenizer gpt2"]),
        (["a_train.bin", "--tokenizer=gpt2"], ["val in their names"]),
        (["a_train.bin", "a_val.bin", "a.txt", "--tokenizer=gpt2"], ["another kind"]),
        (["magic.bin", "a_val.bin", "--tokenizer=gpt2"], ["magic.bin", "20240520"]),
        (["version.bin", "a_val.bin", "--tokenizer=gpt2"], ["version.bin"]),
        (["cut.bin", "a_val.bin", "--tokenizer=gpt2"], ["cut.bin", "whole"]),
        (["empty.bin", "a_val.bin", "--tokenizer=gpt2"], ["empty.bin"]),
        (["ids.bin", "a_val.bin", "--tokenizer=gpt2"], ["ids.bin", "60000", "50,257"]),
    ],
)
def test_token_files_that_are_none_are_refused(tmp_path, gpt2_encoding, arguments, named):
    write_bin(tmp_path / "a_train.bin", [1, 2, 3])
    write_bin(tmp_path / "a_val.bin", [1, 2, 3])
    write_bin(tmp_path / "magic.bin", [1, 2, 3], magic=20240521)
    write_bin(tmp_path / "version.bin", [1, 2, 3], version=2)
    write_bin(tmp_path / "cut.bin", [1, 2, 3], count=4)
    write_bin(tmp_path / "ids.bin", [1, 60000, 3])
    (tmp_path / "empty.bin").write_bytes(b"123")
    (tmp_path / "a.txt").write_text("text")
    refused(run_script("prepare.py", *arguments, "--name=x", cwd=tmp_path), *named)
    assert list((tmp_path / "data").iterdir()) == []
