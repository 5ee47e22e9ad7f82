"""prepare.py: from texts to data/NAME."""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptling import corpus, sources, tokenizers
from gptling.cli import UserError
from gptling.sources import QUICKSTART, name_after
from gptling.tokenizers import END_OF_TEXT, build_tokenizer, encode, load_tokenizer
from prepare import PrepareConfig, prepare
from prepare import load_tokenizer as load_tokenizer_by_name
from tests.scripts import ROOT, TEXT, one_line, output_of, peak_memory, run_here

DOCUMENTS = [f"<b>{i}</b>, été 你好 🙂\n" + "as in others\n" * (i % 7 * 10) for i in range(60)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, small pieces, and two shards for every 2,000 tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "CHUNK", 500)
    monkeypatch.setattr(corpus, "GROUP", 700)
    monkeypatch.setattr(corpus, "TOKENS_PER_SHARD", 1000)
    return tmp_path


def prepare_text(text, **settings):
    """data/a of a file with this text."""
    Path("a.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return prepare(PrepareConfig(("a.txt",), **settings))


def ids_of(data, split=""):
    return np.concatenate([np.load(file) for file in sorted(data.glob(f"{split}*.npy"))])


def text_of(data, split=""):
    return load_tokenizer(data).decode(ids_of(data, split).tolist())


def meta_of(data):
    return json.loads((data / "meta.json").read_text())


# ---------------------------------------------------------------- documents
def write_sources(kind):
    """DOCUMENTS, one of them twice, as sources of one kind. Returns their names."""
    ends = cycle(["\n", "\r\n", "\r"])  # of lines
    texts = [text.replace("\n", end) for text, end in zip(DOCUMENTS, ends, strict=False)]
    if kind == "folder":
        for folder in ("notes/a", "notes/.git", "notes/data", "notes/out", "linked"):
            Path(folder).mkdir(parents=True)
        for i, text in enumerate(texts):
            name = f"notes/a/{i:02}" if i < 20 else f"linked/{i}" if i < 40 else f"notes/c{i}.md"
            Path(name + {50: ".csv", 51: ".HTML"}.get(i, "")).write_bytes(text.encode())
        Path("notes/b").symlink_to(Path("linked").resolve())
        Path("notes/again.md").symlink_to("a/00")  # a file that is read already
        Path("notes/copy.md").write_bytes(Path("notes/a/00").read_bytes())
        Path("notes/loop").symlink_to(Path("notes").resolve())
        for name in ("data/val.npy", "data/meta.json", "out/config.toml", "out/log.jsonl"):
            Path("notes", name).write_text("not to be read")
        for name in ("notes/.hidden", "notes/.git/config", "notes/a.zip"):
            Path(name).write_bytes(b"hidden\xff")
        Path("notes/latin.txt").write_bytes(b"cafe<|endoftext|>" * 9000 + b"\xe9" * 9000)
        Path("notes/torn.gz").write_bytes(gzip.compress(b"a text")[:10] + b"\xff" * 20)
        return ("notes",)
    lines = [json.dumps({"text": text, "id": 1}) for text in [*texts, "", texts[0]]]
    if kind == "jsonl":
        content = "\ufeff" + "\r\n".join([" ", *lines])
        Path("Chat.JSONL.GZ").write_bytes(gzip.compress(content.encode()))
        return ("Chat.JSONL.GZ",)
    if kind == "marked":
        Path("a.jsonl").write_text(json.dumps({"text": END_OF_TEXT.join(texts[:30])}))
        content = (END_OF_TEXT + "\r\n\n").join([*texts[30:], texts[0], ""])
        Path("b.txt.gz").write_bytes(gzip.compress(content.encode()))
        return ("a.jsonl", "b.txt.gz")
    pytest.importorskip("datasets", reason="Parquet files: pip install datasets")
    import pyarrow
    from pyarrow import parquet

    Path("rows").mkdir()
    for i, some in enumerate((texts[:25], [*texts[25:], "", None, texts[0]])):
        parquet.write_table(pyarrow.table({"text": some}), f"rows/train-{i}.parquet")
    return (f"hf:{Path('rows').resolve()}::train" if kind == "hub" else "rows",)


@pytest.mark.parametrize("kind", ["folder", "jsonl", "marked", "parquet", "hub"])
def test_every_kind_of_source_gives_its_documents_once(here, kind, capsys):
    """Those of a folder in the order of their names, whatever the file system says."""
    data = prepare(PrepareConfig(write_sources(kind), tokenizer="byte"))
    lines = capsys.readouterr().out.split("\n")
    notes = "\n".join(lines[4:])
    assert lines[1].startswith("  documents: 60, ")
    markup = "  files read as plain text, with their markup: 2\n" * (kind == "folder")
    assert notes.startswith(f"{markup}  repeated documents left out: 1\n")
    assert kind != "folder" or ("completely: 3\n" in notes and "latin.txt: not UTF-8" in notes)
    train, val = (text_of(data, split).split(END_OF_TEXT) for split in ("train", "val"))
    for texts in (train, val):
        assert texts.pop() == ""  # each document ends
        assert texts == [text for text in DOCUMENTS if text in texts]
    assert sorted(train + val) == sorted(DOCUMENTS)
    meta = meta_of(data)
    assert (meta["documents"], meta["bytes"]) == (60, len("".join(DOCUMENTS).encode()))


BAD_RECORDS = {
    b"{": "Expecting property name",
    b'{"text": "a"} {': "Extra data: column 15",
    b'{"id": 1, "body": "a"}': "no \"text\": --field can be one of ['body']",
    b'{"messages": [{"role": "user"}]}': 'no "text": no other field is a text',
    b'{"text": 5}': '"text" is not a string: 5',
    b'{"text": ' + b"[" * 10_000: "maximum recursion depth",
    b'["text"]': 'no "text": no other field is a text',
    b'{"text": "caf\xe9"}': "can't decode byte 0xe9",
    b'{"text": "\xed\xa0\xbd"}': "can't decode byte 0xed",
}


@pytest.mark.parametrize("record", BAD_RECORDS, ids=lambda record: str(record)[:20])
def test_a_bad_record_is_counted_with_its_line_and_the_others_are_read(here, capsys, record):
    """Blank lines are neither."""
    good = [json.dumps({"text": text}).encode() for text in DOCUMENTS]
    raw = b"\r\n".join([good[0], b" ", record, *good[1:], record])
    Path("a.jsonl").write_bytes(b"\xef\xbb\xbf" + raw)
    data = prepare(PrepareConfig(("a.jsonl",), tokenizer="byte"))
    assert sorted(text_of(data).split(END_OF_TEXT)) == sorted([*DOCUMENTS, ""])
    said = capsys.readouterr().out
    assert "repeated" not in said and "  files not read completely: 1\n" in said
    line = "    a.jsonl: 2 of 63 lines, the first is line 3: "
    assert line in said and BAD_RECORDS[record] in said


def test_the_quick_start_is_the_source_of_pythons_library(here):
    library = sysconfig.get_path("stdlib")
    files = [file.relative_to(library) for file in sources.find_sources(QUICKSTART, "text", here)]
    assert Path("json/decoder.py") in files and files == sorted(files)
    left_out = {"test", "tests", "site-packages", "encodings", "idlelib"}
    left_out |= {"pydoc_data", "entities.py", "stringprep.py"}  # generated, and tables
    assert not left_out & {*Path(*files).parts}
    assert not any(file.name.startswith("_sysconfigdata") for file in files)


@pytest.mark.parametrize("encoding", ["cp1252", "gbk", "koi8-r", "utf-16"])
def test_a_text_that_is_not_utf8_is_read_in_the_encoding_that_you_give(here, encoding):
    """Guesses make nonsense. Files in UTF-8 are read as such, and binary ones left out."""
    text = {"gbk": "你好 ", "koi8-r": "привет "}.get(encoding, "“café” ") * 100
    (here / "old").mkdir()
    for name, tool in (("a.txt", bytes), ("b.txt.gz", gzip.compress)):
        (here / "old" / name).write_bytes(tool(f"{text}{name}".encode(encoding)))
    one_line(run_here("prepare.py", "old", cwd=here), "old/a.txt: not UTF-8", "--encoding=cp1252")
    (here / "old/new.txt").write_text(text, "utf-8")
    (here / "old/picture.png").write_bytes(b"\x89PNG\0")
    (here / "old/book.pdf").write_bytes(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n \0")
    process = run_here("prepare.py", "old", f"--encoding={encoding}", cwd=here)
    assert b"not read completely: 2\n" in process.stdout and b"warning" not in process.stderr
    assert process.stdout.count(b"but a binary file: save") == 2  # no encoding makes it a text
    (here / "old/gbk.txt").write_bytes(b"\x81 " * 99)
    if encoding == "cp1252":  # which has no 0x81
        process = run_here("prepare.py", "old", "--encoding=cp1252", "--overwrite", cwd=here)
        assert b"gbk.txt: neither UTF-8 nor in the given encoding" in process.stdout
    assert text_of(here / "data/old").count(text[1]) == 300


def test_what_is_utf8_by_chance_or_but_for_a_byte(here, capsys):
    """UTF-16 without its mark, records in your encoding, and a character in a thousand or fewer."""
    text = "привет, мир " * 100
    assert text_of(prepare_text(text.encode("utf-16-le"), encoding="utf-16-le")) == text
    record = json.dumps({"text": "café \5" * 99}, ensure_ascii=False)
    Path("b.jsonl").write_bytes(record.encode("cp1252"))
    assert text_of(prepare(PrepareConfig(("b.jsonl",), encoding="cp1252"))) == "café \5" * 99
    data = prepare_text(b"\xff" + text.encode(), name="c")
    assert text_of(data, "train").startswith("\ufffdпривет, мир")
    assert "a.txt: 1 of its characters became \ufffd: not UTF-8" in capsys.readouterr().out


def test_a_part_that_cannot_be_read_costs_its_part(here, monkeypatch, capsys):
    """The share of the bytes is said first, and a text before binary files."""
    for i in range(30):
        (here / "notes" / str(i)).parent.mkdir(exist_ok=True)
        (here / "notes" / str(i)).write_bytes(DOCUMENTS[i].encode() if i % 2 else b"\0\xff" * 3000)
    (here / "notes" / "latin").write_bytes(b"a\xff" * 45_000)
    opened = open

    def refuse(file, *arguments, **options):
        if str(file).endswith("29"):
            raise OSError(errno.EIO, "Input/output error")
        return opened(file, *arguments, **options)

    monkeypatch.setattr("builtins.open", refuse)
    data = prepare(PrepareConfig(("notes",), tokenizer="byte"))
    said = capsys.readouterr()
    assert meta_of(data)["documents"] == 14
    assert re.fullmatch(r"prepare.py: warning: 9\d% of the bytes could not be read\n", said.err)
    lines = said.out.splitlines()
    assert lines[4].endswith(": 17") and "notes/29: OSError: " in lines[5]
    assert "notes/latin: not UTF-8: give its encoding" in lines[6] and "binary" in lines[7]


def test_a_file_that_grows_while_it_is_read_has_its_first_text(here):
    """Otherwise its new documents would be in the places of other files' documents."""
    for name in "ab":
        (here / name).write_text(END_OF_TEXT.join(f"{name}{text}" for text in DOCUMENTS))
    grown = corpus.Corpus(["a", "b"], here)
    before = [*grown.texts()]
    with open(here / "a", "a") as file:
        file.write(f"more{END_OF_TEXT}and more")
    assert [*grown.texts()] == before


# ---------------------------------------------------------------- downloads
class Handler(BaseHTTPRequestHandler):
    """Serves a text with its path at every path: none if it is "missing", half of it if "torn"."""

    def do_GET(self):
        self.server.paths.append(self.path)
        if "missing" in self.path:
            return self.send_error(404)
        body = f"{TEXT}{self.path}".encode()
        body = gzip.compress(body) if ".GZ" in self.path else body
        self.send_response(200)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if "torn" in self.path else body)

    def log_message(self, *arguments):
        """Keep quiet."""


@pytest.fixture
def server(monkeypatch):
    """A web server of this machine. paths: what it was asked for."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.paths, server.url = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()


def test_texts_with_one_name_are_downloaded_once_each_and_read_by_their_ending(
    here, server, monkeypatch
):
    paths = ["/b/a.Txt.GZ?download=1&from=c/d.e", "/c/a.txt"]
    data = prepare(PrepareConfig((f"{server.url}{paths[0]}#top", f"{server.url}{paths[1]}")))
    assert data == Path("data/a") and server.paths == paths
    assert paths[0] in text_of(data) and paths[1] in text_of(data)
    assert meta_of(data)["bytes"] == len(TEXT.join(["", *paths]))
    assert [*here.iterdir(), *(here / "data").iterdir()] == [here / "data", here / data]
    monkeypatch.setattr(sources, "SHAKESPEARE", f"{server.url}/input.txt")
    data = prepare(PrepareConfig(("shakespeare",)))
    assert data == Path("data/shakespeare") and text_of(data) == TEXT + "/input.txt"


@pytest.mark.parametrize("name, reason", [("missing.txt", "404"), ("torn.txt", "closed")])
def test_a_failed_download_is_one_line_and_leaves_nothing(here, server, name, reason):
    url = f"{server.url}/{name}"
    (here / "a.txt").write_text(TEXT)
    one_line(run_here("prepare.py", "a.txt", url, cwd=here), url, reason)
    assert not [*(here / "data").iterdir()]


@pytest.mark.parametrize("source", ["rows.parquet", "hf:rows"])
def test_a_missing_package_is_named_with_its_installation(here, monkeypatch, source):
    (here / "rows.parquet").write_bytes(b"")
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    one_line(run_here("prepare.py", source, cwd=here), "pip install -e '.[datasets]'")


def stream(monkeypatch, field, texts, breaks=False):
    """Let the hub have these texts, which can be read once. `breaks`: the connection does then."""

    def load_dataset(name, config, split, streaming):
        assert (name, config, split, streaming) == ("user/rows", None, "train", True)
        yield from ({"id": 1, field: text} for text in texts)
        if breaks:
            raise Exception("Server\nDisconnected")  # as httpx: no OSError

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_a_stream_is_read_once(here, monkeypatch):
    """The field that you name, also with half a character."""
    stream(monkeypatch, "body", [*DOCUMENTS, "half \ud83d\r\n\ud83d\ude42", None, ""])
    data = prepare(PrepareConfig(("hf:user/rows",), field="body", tokenizer="byte"))
    assert not list((here / "data").glob(".*"))
    assert sorted(text_of(data).split(END_OF_TEXT)) == sorted([*DOCUMENTS, "half \ufffd\n🙂", ""])


def test_a_stream_that_cannot_be_used_is_one_line_and_leaves_nothing(here, monkeypatch):
    """The library has tried again before."""
    reasons = {("text", "a"): "Server Disconnected", ("text", 5): "string"}
    reasons |= {("body", "a"): "--field can be one of ['body']"}
    for (field, text), reason in reasons.items():
        stream(monkeypatch, field, [text], breaks=True)
        one_line(run_here("prepare.py", "hf:user/rows", cwd=here), "hf:user/rows: ", reason)
        assert not [*(here / "data").iterdir()]


@pytest.mark.parametrize("source, word", [(":x", "default"), ("::nix", "train"), ("/nix", "find")])
def test_a_wrong_part_of_a_hub_data_set_is_one_line(here, source, word):
    pytest.importorskip("datasets", reason="Data sets of the hub: pip install datasets")
    (here / "rows").mkdir()
    (here / "rows" / "a.txt").write_text(TEXT)
    source = f"hf:{here / 'rows'}{source}"
    for name, words in ((source, word), ("hf:", "hf:NAME:CONFIG:SPLIT")):
        one_line(run_here("prepare.py", name, "--name=x", cwd=here), name, words)


# ---------------------------------------------------------------- text that comes back
# The same examples in every run.
same = settings(derandomize=True, deadline=None, database=None, max_examples=40)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # no surrogates: UTF-8 has none


@same
@example("\ufeffa\r\n\u2028\x85🙂e\u0301<|endoftext>\r\r", b"", "char")
@given(ANY_TEXT, st.binary(max_size=4), st.sampled_from(["char", "byte"]))
def test_any_text_comes_back_with_its_newlines_and_other_bytes_are_refused(text, more, tokenizer):
    raw = text.encode() + more + b"~" * max(20, len(text.encode()))  # enough to validate on
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        try:
            text = re.sub("\r\n?", "\n", raw.decode().removeprefix("\ufeff"))
        except UnicodeDecodeError:
            with pytest.raises(UserError, match=r"a\.txt: not UTF-8"):
                prepare_text(raw, tokenizer=tokenizer)
        else:
            data = prepare_text(raw, tokenizer=tokenizer)
            assert text_of(data) == text
            assert ids_of(data).tolist() == encode(load_tokenizer(data), text).tolist()
            for split in ("train", "val"):
                assert meta_of(data)[split]["tokens"] == len(ids_of(data, split))


def read_all(source):
    documents = [""]
    for text, is_end in sources.read_pieces(source, "text", []):
        documents[-1] += text
        documents += [""] * is_end
    return [text for text in documents if text]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_pieces_give_the_tokens_of_the_whole_file(here, monkeypatch, size):
    monkeypatch.setattr(sources, "CHUNK", size)
    text = "".join(topics.values())[: 50 * size + 2000] + "\n é  🙂\n\n end of it"
    (here / "a.txt").write_text(text, encoding="utf-8")
    assert read_all(here / "a.txt") == [text]
    if size > 3:  # with a place to cut in each piece
        data = prepare_text(text, tokenizer="bpe", vocab_size=300)
        raw, tokenizer = text.encode(), load_tokenizer(data)
        for split, part in (("train", raw[: -(len(raw) // 10)]), ("val", raw[-(len(raw) // 10) :])):
            expected = [*tokenizer.encode_ordinary(part.decode()), tokenizer.eot_token]
            assert ids_of(data, split).tolist() == expected


@pytest.mark.parametrize("text", ["no-space=" * 30, "some words " * 30, "=" * 99])
def test_marks_are_found_wherever_a_text_is_cut(here, monkeypatch, text):
    documents = [text[:n] for n in range(1, 90, 4)]
    (here / "a.txt").write_text((END_OF_TEXT + "\n\n").join([*documents, ""]))
    for size in range(40, 60):
        monkeypatch.setattr(sources, "CHUNK", size)
        assert read_all(here / "a.txt") == documents


def test_a_long_text_is_read_bit_by_bit(here):
    (here / "a.txt").write_bytes(b"some words in a line\n" * 100_000 + b"\xff")
    pieces = sources.read_pieces(here / "a.txt", "text", [])
    assert len(next(pieces)[0]) <= 500  # without reading on to the bad end
    with pytest.raises(UnicodeDecodeError, match="0xff"):
        list(pieces)


# ---------------------------------------------------------------- the split
def hashes_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def test_the_end_of_a_few_documents_or_of_a_long_one_validates():
    ends = [([1_115_394], [111_539]), ([10**12] * 5, [4_000_000] * 5), ([10**6] * 9, [10**5] * 9)]
    for sizes, expected in [*ends, ([10] * 20 + [10**6], [0] * 20 + [100_000])]:
        held_out = corpus.validation_bytes(np.array(sizes), hashes_of(len(sizes)))
        assert held_out[np.array(expected) > 0].tolist() == [n for n in expected if n]


@settings(same, max_examples=200)
@given(st.lists(st.integers(1, 100) | st.integers(1, 10**9), min_size=10, max_size=60))
def test_about_a_tenth_of_the_text_validates_in_whole_documents(sizes):
    held_out, total = corpus.validation_bytes(np.array(sizes), hashes_of(len(sizes))), sum(sizes)
    goal = min(total / 10, corpus.MAX_VALIDATION)
    assert sum(held_out) >= goal / 10 - len(sizes)
    assert all(n in (0, size) or size >= 3 * goal for n, size in zip(held_out, sizes, strict=True))


@pytest.mark.parametrize("n, share", [(300, 0.1), (3_000_000, 0.02)])
def test_added_documents_move_no_document_from_training_to_validation(n, share):
    sizes, hashes = np.random.default_rng(1).integers(200, 500, n), hashes_of(n)
    held_out = corpus.validation_bytes(sizes, hashes)
    assert held_out.sum() == pytest.approx(share * sizes.sum(), rel=0.3)
    for first in (100, 200, n - 3):
        before = corpus.validation_bytes(sizes[:first], hashes[:first])
        assert (before > 0)[held_out[:first] > 0].all()


def test_documents_added_before_all_others_keep_the_validation_text(here):
    """Also a long one, which is recognised by its content wherever it is repeated."""
    long = "a long document\n" * 500  # in several pieces
    texts = [*(f"{i} {text}" for i in range(3) for text in DOCUMENTS), long]
    old = text_of(prepare_text(END_OF_TEXT.join(texts), tokenizer="byte"), "val")
    more = END_OF_TEXT.join([f"x{text}" for text in DOCUMENTS[:20]] + [long, *texts])
    data = prepare_text(more, tokenizer="byte", name="more")
    new = text_of(data, "val").split(END_OF_TEXT)
    assert [text for text in new if not text.startswith("x")] == old.split(END_OF_TEXT)
    assert meta_of(data)["documents"] == len(texts) + 20


@pytest.mark.parametrize("n", range(11, 15))
def test_a_split_inside_a_document_leaves_characters_whole(here, n):
    data = prepare_text("🙂" * n, tokenizer="byte")
    assert text_of(data, "train") + text_of(data, "val") == "🙂" * n
    assert len(text_of(data, "train").encode()) == 4 * ((4 * n - 4 * n // 10) // 4)


# ---------------------------------------------------------------- tokenizers
def test_a_tokenizer_knows_nothing_of_the_validation_text(here):
    """The exception is a character tokenizer, which could not encode it."""
    rng = random.Random(0)
    train = " ".join("".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(4400))
    val = " quixotic Ωmega" * 200  # its pairs are twice as frequent
    tokenizer = load_tokenizer(prepare_text(train + val, tokenizer="bpe", vocab_size=300))
    assert len(tokenizer.encode(train)) < 0.9 * len(train)
    assert len(tokenizer.encode(" quixotic")) > 6
    data = prepare_text(train + val, tokenizer="char", name="b")
    assert "Ω" in text_of(data, "val") and "Ω" not in text_of(data, "train")
    for n, kind in ((13_888, "char"), (13_889, "bpe")):  # 50,000 bytes to train on
        data = prepare_text("a b " * n, name=kind)
        assert meta_of(data)["tokenizer"] == kind


def test_a_tokenizer_is_that_of_data_a_run_or_a_checkpoint(trained, here):
    expected = load_tokenizer(trained / "data/mine")._mergeable_ranks
    for name in ("data/mine", "out/mine", "out/mine/checkpoint-20"):
        assert load_tokenizer_by_name(trained / name)._mergeable_ranks == expected
        data = prepare_text(TEXT[::-1], tokenizer=str(trained / name), overwrite=True)
        assert load_tokenizer(data)._mergeable_ranks == expected
        assert text_of(data) == TEXT[::-1]


def changed_bpe(change):
    """A bpe of a class whose encode_to_numpy is `change` of the unchanged method and the text."""

    class Changed(tiktoken.Encoding):
        def encode_to_numpy(self, text, **options):
            return np.array(change(super().encode_to_numpy, text), dtype=np.uint32)

    bpe = build_tokenizer("bpe", DOCUMENTS, 300)
    ranks, special = bpe._mergeable_ranks, bpe._special_tokens
    return Changed("mine", pat_str=bpe._pat_str, mergeable_ranks=ranks, special_tokens=special)


LOSSY = {
    "upper case": changed_bpe(lambda encode, text: encode(text.upper())),
    "unknown words": changed_bpe(lambda encode, text: np.minimum(encode(text), 256)),
    "no white space": changed_bpe(lambda encode, text: encode("".join(text.split()))),
}


@pytest.mark.parametrize("tokenizer", LOSSY.values(), ids=LOSSY)
def test_a_tokenizer_that_changes_the_text_is_one_line(here, monkeypatch, tokenizer):
    """Bits per byte would be those of another text."""
    for name in ("build_tokenizer", "load_tokenizer"):
        monkeypatch.setattr(tokenizers, name, lambda *_: tokenizer)
    words = r"tokenizer changes the text near '.*: bits .*, give another --tokenizer"
    with pytest.raises(UserError, match=words):
        prepare_text("".join(DOCUMENTS))


def test_a_tokenizer_of_another_class_has_to_be_stored(here, monkeypatch):
    by_character = changed_bpe(lambda encode, text: [id for c in text for id in encode(c)])
    monkeypatch.setattr(tokenizers, "build_tokenizer", lambda *_: by_character)
    with pytest.raises(UserError, match=r"tokenizer\.json of mine is read as a plain Encoding"):
        prepare_text(TEXT)
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda *_: by_character)
    assert len(ids_of(prepare_text(TEXT))) == len(TEXT) + 2  # end-of-text


# ---------------------------------------------------------------- threads and token files
def test_texts_encoded_on_all_cores_keep_their_order(monkeypatch):
    """With a bounded number of them under way, and an error among them is raised."""
    monkeypatch.setattr(corpus, "GROUP", 1000)
    tokenizer, taken = build_tokenizer("char", ["ab\n"]), []
    texts = [("ab\n"[i % 3]) * (i * 37 % 500) for i in range(20_000)]

    def given_texts():
        for i, text in enumerate(texts):
            taken.append(i)
            yield i, text
        raise UserError("not UTF-8")

    encoded = corpus.encode_on_all_cores(tokenizer, given_texts())
    for i, text in enumerate(texts[:15_000]):
        key, ids = next(encoded)
        assert key == i and tokenizer.decode(ids.tolist()) == text
        assert len(taken) - i < (4 * os.cpu_count() + 3) * 1000 / 64
    with pytest.raises(UserError, match="not UTF-8"):
        list(encoded)


@pytest.mark.parametrize("n_vocab, dtype", [(65_536, np.uint16), (65_537, np.uint32)])
@pytest.mark.parametrize("size", [1000, 1400])  # a file is full within a text, or at its end
def test_no_text_straddles_two_token_files(here, monkeypatch, n_vocab, dtype, size):
    monkeypatch.setattr(corpus, "TOKENS_PER_SHARD", size)
    ids = np.random.default_rng(0).integers(0, n_vocab, 3500).astype(np.uint32)
    ids[0] = n_vocab - 1
    encoded = [("train", piece) for piece in np.array_split(ids, 5)] + [("val", ids[:3])]
    tokenizer = SimpleNamespace(n_vocab=n_vocab, special_tokens_set=set())
    n_tokens, fingerprint = corpus.write_token_files(here, tokenizer, encoded)
    assert n_tokens == {"train": 3500, "val": 3}
    written = [np.load(file) for file in sorted(here.glob("train-*.npy"))]
    assert [len(shard) for shard in written] == [1400, 1400, 700]
    assert {shard.dtype for shard in written} == {np.dtype(dtype)}
    assert np.array_equal(ids_of(here), [*ids, *ids[:3]])
    val = hashlib.sha256(ids[:3].astype(dtype)).digest()
    assert fingerprint == hashlib.sha256(ids.astype(dtype).tobytes() + val).hexdigest()
    encoded[-2:] = [("train", np.concatenate([encoded[-2][1], ids[:3]])), ("val", ids[:0])]
    _, other = corpus.write_token_files(here, tokenizer, encoded)
    assert other != fingerprint  # the same tokens, split otherwise


# ---------------------------------------------------------------- whole or not at all
def test_an_existing_directory_is_replaced_by_a_whole_one(here):
    prepare_text("one " * 500)
    with pytest.raises(UserError, match="UTF-8"):
        prepare_text(b"two \xff" * 500, overwrite=True)
    assert text_of(here / "data/a", "train").startswith("one")
    prepare_text("two " * 500, overwrite=True)
    assert text_of(here / "data/a", "train").startswith("two")
    assert [path.name for path in (here / "data").iterdir()] == ["a"]


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without a signal")
def test_a_stopped_preparation_leaves_nothing(tmp_path):
    (tmp_path / "large.txt").write_text("some words in a line\n" * 3_000_000)
    code = "from gptling import cli, corpus; import prepare; corpus.TOKENS_PER_SHARD = 1"
    arguments = [f"{code}; cli.launch(prepare.main)", "large.txt", "--tokenizer=byte"]
    command = [sys.executable, "-c", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, env=environment)
    while not list(tmp_path.glob("data/.large.*/new/train-00000.npy")):
        assert process.poll() is None
        time.sleep(0.01)
    (left,) = tmp_path.glob("data/.large.*")
    (tmp_path / "a.txt").write_text(TEXT)
    said = output_of("prepare.py", "a.txt", "--name=large", cwd=tmp_path)
    assert f"{left.name} " in said  # as that of a process that was killed
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == 128 + signal.SIGTERM
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["large"]


def test_data_is_called_after_its_source(here):
    Path("notes").mkdir()
    Path("notes/a[1].txt").write_text(TEXT)
    assert prepare(PrepareConfig(("notes/*.txt",))) == Path("data/notes")  # in Windows' shells
    assert name_after("notes/a[1].txt") == "a[1]" and name_after("*.md") == here.name
    names = {"my.novel.v2.txt": "my.novel.v2", ".txt": "txt", "a/B.JSONL.gz": "B", "a b/": "a b"}
    names |= {"notes.csv": "notes", "page.HTML": "page", "b.json.gz": "b", "a.csv.md": "a.csv"}
    names |= {"hf:user/rows:config:train": "rows", "https://h.org/a/b.c.txt.gz?d=/e.txt": "b.c"}
    for source, name in names.items():
        assert name_after(source) == name


@pytest.mark.slow
def test_a_long_text_needs_less_memory_than_it_has_bytes(tmp_path):
    """It is read in parts, and written in shards."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=k % 8 + 2)) for k in range(20000)]
    part = " ".join(draw.choices(words, k=200_000)) + ".\n"
    with (tmp_path / "long.txt").open("w") as file:
        while file.tell() < 4e8:
            file.write(f"{file.tell()} {part}")
    assert peak_memory(ROOT / "prepare.py", "long.txt", cwd=tmp_path) < 4e8
    assert meta_of(tmp_path / "data/long")["bytes"] > 4e8


# ---------------------------------------------------------------- token files of others
@pytest.mark.slow
def test_token_files_of_llm_c_come_in_and_go_out_by_the_scripts(tmp_path, gpt2_encoding):
    ids = [id for text in DOCUMENTS for id in [50256, *gpt2_encoding.encode_ordinary(text)]]
    parts = [ids[:1000], ids[1000:-501], ids[-501:]]
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    for name, part in zip(names, parts, strict=True):  # as llm.c's dev/data/data_common.py does
        header = np.array([20240520, 1, len(part), *253 * [0]], "<i4")
        (tmp_path / name).write_bytes(header.tobytes() + np.array(part, "<u2").tobytes())
    output_of("docs/from_bin.py", *names, "fineweb", cwd=tmp_path)
    output_of("docs/to_bin.py", "data/fineweb", cwd=tmp_path)
    data = tmp_path / "data/fineweb"
    ours = ("train-00000", "train-00001", "val")
    for name, part, original in zip(ours, parts, names, strict=True):
        written = np.load(data / f"{name}.npy")
        assert written.dtype == np.uint16 and written.tolist() == part
        assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / original).read_bytes()
    meta = meta_of(data)
    assert meta["train"]["tokens"] + meta["val"]["tokens"] == len(ids)
    assert re.fullmatch("[0-9a-f]{64}", meta["sha256"])
    assert load_tokenizer(data).decode(parts[0]).startswith(END_OF_TEXT + DOCUMENTS[0])
