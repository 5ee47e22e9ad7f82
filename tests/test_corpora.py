"""Large corpora: records, hub data sets, token files of others, and what was stopped."""

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gptling import corpus, shards
from gptling.cli import UserError
from gptling.files import lock_directory
from gptling.tokenizers import END_OF_TEXT, load_tokenizer
from prepare import PrepareConfig, prepare
from tests.conftest import ROOT, run_here

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


def decoded(data):
    """The documents of both splits."""
    ids = np.concatenate([np.load(file) for file in sorted(data.glob("*.npy"))])
    return sorted(load_tokenizer(data).decode(ids.tolist()).split(END_OF_TEXT)[:-1])


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_parquet_and_hub_datasets_give_what_their_text_gives(tmp_path, monkeypatch, tokenizer):
    pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.jsonl").write_text(jsonl(DOCUMENTS))
    write_parquet(tmp_path / "local" / "train-0.parquet", DOCUMENTS[:150])
    write_parquet(tmp_path / "local" / "train-1.parquet", [*DOCUMENTS[150:], "", None])
    sources = {"all.jsonl": "all", "local": "folder", f"hf:{tmp_path / 'local'}::train": ""}
    data = [
        prepare(PrepareConfig((source,), tokenizer, name=name)) for source, name in sources.items()
    ]
    assert data[2].name == "local"  # called after the data set
    assert content(data[0]) == content(data[1]) == content(data[2])
    assert json.loads((data[0] / "meta.json").read_text())["documents"] == 400
    assert decoded(data[0]) == sorted(DOCUMENTS)


def count_readings(monkeypatch):
    """A list that grows by the source of each reading of more than its first ten documents."""
    readings = []

    def documents(source, count_bytes, original=corpus.documents):
        for n, document in enumerate(original(source, count_bytes)):
            if n == 10:
                readings.append(str(source))
            yield document

    monkeypatch.setattr(corpus, "documents", documents)
    return readings


def test_the_text_is_read_once_unless_the_tokenizer_is_made_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(jsonl(DOCUMENTS))
    readings = count_readings(monkeypatch)
    prepare(PrepareConfig(("a.jsonl",), "byte"))
    assert readings == ["a.jsonl"]
    prepare(PrepareConfig(("a.jsonl",), "bpe", vocab_size=260, overwrite=True))
    assert readings == ["a.jsonl"] * 3
    prepare(
        PrepareConfig(("a.jsonl",), "char", overwrite=True)
    )  # of all the text, not that to train
    assert readings == ["a.jsonl"] * 6


@pytest.mark.parametrize(
    "source, named",
    [
        ("bad.parquet", ["bad.parquet", "Parquet"]),
        ("column.parquet", ["column.parquet", '"text"']),
        ("numbers.parquet", ["numbers.parquet", "line 1"]),
        ("hf:FOLDER/missing", ["missing"]),
        ("hf:FOLDER/rows::test", ["rows", "test"]),
        ("hf:FOLDER/other", ["other", "text"]),
        ("hf:a:b:c:d", ["hf:NAME:CONFIG:SPLIT"]),
        ("hf:", ["hf:NAME"]),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, source, named):
    pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but not really PAR1")
    write_parquet(tmp_path / "column.parquet", DOCUMENTS[:20], "content")
    write_parquet(tmp_path / "numbers.parquet", [1, 2])
    write_parquet(tmp_path / "rows" / "train.parquet", DOCUMENTS[:20])
    write_parquet(tmp_path / "other" / "train.parquet", DOCUMENTS[:20], "content")
    source = source.replace("FOLDER", str(tmp_path))
    process = run_here("prepare.py", source, "--name=x", cwd=tmp_path)
    error = process.stderr.decode()
    assert process.returncode == 1 and len(error.splitlines()) == 1
    for word in named:
        assert word in error
    assert list((tmp_path / "data").iterdir()) == []


# ---------------------------------------------------------------- what was stopped


def stop_behind(n, monkeypatch, error=KeyboardInterrupt):
    """Make the n-th finished shard the last one, as Ctrl-C would."""
    finish, finished = shards.TokenShards.finish_shard, []

    def finish_shard(self):
        if len(finished) == n:
            raise error
        finished.append(self)
        return finish(self)

    monkeypatch.setattr(shards.TokenShards, "finish_shard", finish_shard)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small shards and pieces, in a directory of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 20_000)
    monkeypatch.setattr(corpus, "BYTES_AT_ONCE", 1000)
    return tmp_path


def write_sources(directory, kind):
    """Three sources of a kind; what stands for them on the command line."""
    for i in range(3):
        documents = DOCUMENTS[i:] + DOCUMENTS
        if kind == "text":
            (directory / f"{i}.txt").write_text("".join(documents), encoding="utf-8")
        elif kind == "notes":  # many small files
            (directory / str(i)).mkdir()
            for j in range(100):
                (directory / str(i) / f"{j}.txt").write_text(documents[j] * 4, encoding="utf-8")
        elif kind == "jsonl.gz":
            (directory / f"{i}.jsonl.gz").write_bytes(gzip.compress(jsonl(documents).encode()))
        else:  # parquet, hf
            write_parquet(directory / "rows" / f"train-{i}.parquet", documents)
    if kind == "hf":
        pytest.importorskip("datasets", reason="hub datasets: pip install datasets")
        return (f"hf:{directory / 'rows'}",)
    return tuple(path.name for path in sorted(directory.iterdir()))


@pytest.mark.parametrize(
    "kind, tokenizer",
    [
        ("text", "char"),
        ("text", "byte"),
        ("notes", "byte"),
        ("jsonl.gz", "char"),
        ("parquet", "byte"),
        ("hf", "byte"),
    ],
)
def test_a_stopped_preparation_goes_on_to_the_same_bytes(
    small, monkeypatch, capsys, kind, tokenizer
):
    sources = write_sources(small, kind)
    whole = prepare(PrepareConfig(sources, tokenizer, name="whole"))
    n_shards = len(list(whole.glob("train-*")))
    assert n_shards > 4
    parts = PrepareConfig(sources, tokenizer, name="parts")
    for n in (1, 2, n_shards - 4):
        with monkeypatch.context() as m:
            stop_behind(n, m)
            with pytest.raises(KeyboardInterrupt):
                prepare(parts)
        assert "the same command goes on" in capsys.readouterr().out
    assert content(prepare(parts)) == content(whole)
    assert re.search("going on behind [0-9,]+ characters", capsys.readouterr().out)
    assert {path.name for path in (small / "data").iterdir()} == {"parts", "whole"}


@pytest.mark.parametrize("kind", ["jsonl.gz", "hf"])
def test_sources_that_are_done_are_not_read_again(small, monkeypatch, kind):
    sources = write_sources(small, kind)
    config = PrepareConfig(sources, "byte", name="parts")
    with monkeypatch.context() as m:
        stop_behind(len(list(prepare(config).glob("train-*"))) - 2, m)
        config.overwrite = True
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    readings = count_readings(monkeypatch)
    prepare(config)
    assert readings == [{"jsonl.gz": "2.jsonl.gz", "hf": f"{sources[0]}, file 3 of 3"}[kind]]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process otherwise")
@pytest.mark.parametrize("kind", ["text, char", "jsonl.gz, byte", "parquet, bpe"])
def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path, kind):
    kind, tokenizer = kind.split(", ")
    arguments = [*write_sources(tmp_path, kind), f"--tokenizer={tokenizer}"]
    if tokenizer == "bpe":
        arguments.append("--vocab_size=300")
    program = """if True:
        import os, sys, time
        sys.path.insert(0, os.environ["ROOT"])
        import prepare
        from gptling import cli, corpus, shards
        corpus.BYTES_AT_ONCE, shards.TOKENS_PER_SHARD = 1000, 20_000
        def slowly(self, ids, write=shards.TokenFile.write):
            write(self, ids)
            time.sleep(float(os.environ["SECONDS"]))
        shards.TokenFile.write = slowly
        cli.run(prepare.main)"""

    def start(name, seconds):
        command = [sys.executable, "-c", program, *arguments, f"--name={name}"]
        environment = os.environ | {"ROOT": str(ROOT), "SECONDS": str(seconds)}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)

    assert start("whole", 0).wait(60) == 0
    rng, progress = random.Random(kind), tmp_path / "data" / ".parts.partial" / "progress.json"
    for _ in range(2):
        before = progress.read_bytes() if progress.exists() else b""
        process = start("parts", 0.001)
        while not progress.exists() or progress.read_bytes() == before:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(rng.random() / 10)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    output = start("parts", 0).communicate(timeout=60)[0].decode()
    assert "going on behind" in output
    assert content(tmp_path / "data" / "parts") == content(tmp_path / "data" / "whole")
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"parts", "whole"}


def test_before_a_shard_is_finished_nothing_is_left_behind(small, monkeypatch):
    (small / "all.jsonl").write_text(jsonl(DOCUMENTS))
    stop_behind(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare(PrepareConfig(("all.jsonl",), "byte"))
    assert list((small / "data").iterdir()) == []


@pytest.mark.parametrize("change", ["text", "tokenizer", "vocab_size", "sources"])
def test_a_stopped_preparation_of_something_else_is_not_continued(
    small, monkeypatch, capsys, change
):
    (small / "all.jsonl").write_text(jsonl(DOCUMENTS))
    (small / "more.jsonl").write_text(jsonl(DOCUMENTS))
    config, expected = PrepareConfig(("all.jsonl",), "byte", name="x"), DOCUMENTS
    if change == "vocab_size":
        config.tokenizer, config.vocab_size = "bpe", 258
    with monkeypatch.context() as m:
        stop_behind(2, m)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    if change == "tokenizer":
        config.tokenizer = "char"
    elif change == "vocab_size":
        config.vocab_size = 280
    elif change == "sources":
        config.sources, expected = ("all.jsonl", "more.jsonl"), DOCUMENTS * 2
    else:
        expected = [text.swapcase() for text in DOCUMENTS]
        (small / "all.jsonl").write_text(jsonl(expected))
    capsys.readouterr()
    data = prepare(config)
    assert decoded(data) == sorted(expected)
    assert "going on" not in capsys.readouterr().out
    assert change != "vocab_size" or load_tokenizer(data).n_vocab == 280


def test_a_disk_that_fills_up_is_named_and_the_preparation_goes_on(small, monkeypatch, capsys):
    resource = pytest.importorskip("resource", reason="this system has no limit for files")
    (small / "all.jsonl").write_text(jsonl(DOCUMENTS))
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 5000)
    whole = prepare(PrepareConfig(("all.jsonl",), "byte", name="whole"))
    program = f"""if True:
        import resource, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        import prepare
        from gptling import cli, corpus, shards
        corpus.BYTES_AT_ONCE, shards.TOKENS_PER_SHARD = 1000, 5000
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, {resource.RLIM_INFINITY}))
        cli.run(prepare.main)"""
    command = [sys.executable, "-c", program, "all.jsonl", "--tokenizer=byte", "--name=full"]
    process = subprocess.run(command, cwd=small, capture_output=True, text=True)
    assert process.returncode == 1 and len(process.stderr.splitlines()) == 1
    for word in (".full.partial", "cannot be written", "too large"):
        assert word in process.stderr
    assert not (small / "data" / "full").exists() and "goes on from there" in process.stdout
    data = prepare(PrepareConfig(("all.jsonl",), "byte", name="full"))
    assert content(data) == content(whole)
    assert "going on behind" in capsys.readouterr().out


def test_two_preparations_of_one_name_do_not_meet(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    partial = tmp_path / "data" / ".a.partial"
    partial.mkdir(parents=True)
    lock = lock_directory(partial)
    process = run_here("prepare.py", "a.txt", cwd=tmp_path)
    assert process.returncode == 1
    assert b".a.partial: another process" in process.stderr
    lock.release()
    assert run_here("prepare.py", "a.txt", cwd=tmp_path).returncode == 0
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


# ---------------------------------------------------------------- token files of others


def write_bin(path, ids):
    """As llm.c's dev/data/data_common.py lays it out, in plain bytes."""
    header = [20240520, 1, len(ids)] + 253 * [0]
    raw = b"".join(number.to_bytes(4, "little", signed=True) for number in header)
    path.write_bytes(raw + b"".join(id.to_bytes(2, "little") for id in ids))


@pytest.mark.slow
def test_token_files_of_others_come_in_and_go_out_by_the_recipes(tmp_path, gpt2_encoding):
    texts = [f"{text} 🙂" for text in DOCUMENTS]
    ids = [id for text in texts for id in [50256, *gpt2_encoding.encode_ordinary(text)]]
    parts = [ids[:5000], ids[5000:-2001], ids[-2001:]]
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    for name, part in zip(names, parts, strict=True):
        write_bin(tmp_path / name, part)
    recipes = (ROOT / "docs" / "large_corpora.md").read_text(encoding="utf-8")
    come_in, go_out = re.findall(r"```python\n(.*?)```", recipes, re.DOTALL)
    for code in (come_in, go_out):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)

    data = tmp_path / "data" / "fineweb"
    for name, part in zip(("train-00000", "train-00001", "val"), parts, strict=True):
        written = np.load(data / f"{name}.npy")
        assert written.dtype == np.uint16 and written.tolist() == part
    meta = json.loads((data / "meta.json").read_text())
    assert meta["train"]["tokens"] + meta["val"]["tokens"] == len(ids)
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == len("".join(texts).encode())
    assert meta["train"]["shards"] == 2 and re.fullmatch("[0-9a-f]{64}", meta["sha256"])
    assert load_tokenizer(data).decode(parts[0]).startswith(END_OF_TEXT + texts[0])
    for name, original in zip(("train-00000", "train-00001", "val"), names, strict=True):
        there_and_back = (tmp_path / f"{name}.bin").read_bytes()
        assert there_and_back == (tmp_path / original).read_bytes()


def test_a_folder_with_a_token_file_is_read_without_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a text of two words more")
    write_bin(tmp_path / "notes" / "b.bin", [1, 2, 3])
    data = prepare(PrepareConfig(("notes",)))
    assert "left out 1 files without text, notes/b.bin" in capsys.readouterr().out
    assert json.loads((data / "meta.json").read_text())["documents"] == 1
    with pytest.raises(UserError, match=r"b.bin"):
        prepare(PrepareConfig(("notes/b.bin",)))
