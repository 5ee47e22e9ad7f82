"""The one table of mistakes: a row for each that people make often, whichever script it is. It ends
in one line that names the value and the remedy, and leaves nothing half-written. A wrong flag ends
in tyro's box of a few lines, and exit code 2."""

import ast
import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import edit_json, snapshot
from tests.scripts import ROOT, TEXT, TINY, run_here, run_script

FILES = {
    **dict.fromkeys(["a.txt", "data/notes/a.txt"], TEXT.encode()),
    **dict.fromkeys(["data/mixed/val.npy", "empty.txt", "no_model/README.md"], b""),
    "b.txt": TEXT[::-1].encode(),
    "new.txt": f"{TEXT}a bottle on üs all{TEXT}".encode(),
    "data/mixed/notes.md": b"of somebody",
    "short.txt": b"one letter.",
    "latin.txt": b"caf\xe9 au lait",
    "bad.jsonl": b'{"text": "a"}\n{"txt": "b"}\n',
    "cut.jsonl.gz": b"\x1f\x8b\x08\x00",
    "pictures/a.png": b"\x89PNG\0",
    "broken.toml": b"n_layer = = 3",
    "typo.toml": b"n_leyer = 3",
    "hub/config.json": b"{}",
    "logged/log.jsonl": b'{"loss": 1.5}\n',
    "titled/config.toml": b"title = 1\n",
    "file": b"a file, no folder",
}

SEVERAL = "train.py --resume --out_dir=out/several "  # a run with a model that has ended

# Each row: the command, what the answer contains, and the exit code unless it is 1. "in FOLDER:"
# stands before a command that runs there. TINY is replaced by the flags of a tiny model, NEW by
# these and a run that does not exist yet.
MISTAKES = [
    # ------------------------------------------------------------ text
    ("prepare.py missing.txt", "missing.txt", "no such file"),
    ("prepare.py empty.txt", "empty.txt"),
    ("prepare.py short.txt", "data/short", "more text"),
    ("prepare.py latin.txt", "latin.txt", "not UTF-8", "--encoding=cp1252", "gbk"),
    ("prepare.py latin.txt --encoding=gbx", "unknown encoding: gbx"),
    ("prepare.py nix*.txt --name=new", "nix*.txt", "no such file"),
    ("prepare.py a.txt --name=mixed --overwrite", "data/mixed/notes.md", "another --name"),
    ("prepare.py bad.jsonl", "bad.jsonl", "text", "--field can be one of ['txt']"),
    ("prepare.py cut.jsonl.gz", "cut.jsonl.gz"),
    ("prepare.py pictures", "pictures/a.png", "not UTF-8"),
    ("prepare.py https://example.org/a.txt", "https://example.org/a.txt", "refused"),
    ("prepare.py shakespeare", "input.txt: ", "by hand", "input.txt --name=shakespeare"),
    ("prepare.py a.txt --name=mine", "data/mine", "--overwrite"),
    ("prepare.py data/notes/a.txt --name=notes --overwrite", "data/notes", "another --name"),
    ("prepare.py a.txt --name=../up", "--name", "../up", 2),
    ("prepare.py / --overwrite", "--name", 2),
    ("prepare.py a.txt --tokenizer=bqe", "bqe", "bpe", "char", "byte", "gpt2"),
    ("prepare.py a.txt --tokenizer=out/nix", "out/nix", "or a directory"),
    ("prepare.py a.txt --tokenizer=p50k_edit", "p50k_edit", "https://", "TIKTOKEN_CACHE_DIR"),
    ("prepare.py new.txt --tokenizer=out/mine", "'ü'", "U+00FC"),
    ("prepare.py a.txt --tokenizer=bpe --vocab_size=256", "256", "257"),
    ("prepare.py a.txt --tokenizer=bpe --vocab_size=5000", "5000", "more text"),
    ("prepare.py a.txt --tokenizer=out/mine --vocab_size=5000", "5000", "give "),
    ("prepare.py a.txt --vocab_size=-5", "--vocab_size=-5", "at least 0", 2),
    ("prepare.py a.txt --tokenizer=char --vocab_size=500", "500", "bpe"),
    # ------------------------------------------------------------ flags and presets
    ("train.py --datset=shakespeare_char", "--datset", "--dataset", 2),
    ("train.py --n_layer=two", "--n_layer", "'two'", 2),
    ("train.py NEW --dataset=mine --n_embd=30 --n_head=4", "30", "4", "divisible"),
    ("train.py --max_iters=0", "--max_iters=0", "at least 1", 2),
    ("train.py --learning_rate=nan", "--learning_rate=nan", 2),
    ("train.py --dropout=20", "--dropout=20", "at most 1", 2),
    ("train.py --eval_only", "--eval_only", "--init_from", 2),
    ("train.py --eval_all", "--eval_all", "--eval_only", 2),
    ("train.py nix.toml", "nix.toml", "config/gpt2.toml"),
    ("train.py a.txt", "python prepare.py a.txt reads a text"),
    ("train.py --curves=maybe", "maybe", 2),
    ("train.py --curves maybe", "maybe", 2),
    ("train.py --curves=", "--curves", "'True', 'False'", 2),
    ("train.py out/mine", "--out_dir=out/mine --resume"),
    ("train.py broken.toml", "broken.toml", "line 1"),
    ("train.py typo.toml", "--n_leyer", "perhaps you meant: --n_layer", 2),
    ("train.py NEW --dataset=mine --learning_rate=1e-5", "--min_lr=0.001", "--learning_rate=1e-05"),
    ("train.py NEW --dataset=mine --min_lr=1", "--min_lr=1.0", "--learning_rate=0.01"),
    ("train.py --max_iters=5 config/gpt2.toml", "config/gpt2.toml", 2),
    # ------------------------------------------------------------ training
    ("train.py --dataset=nix", "data/nix", "prepare.py", "--name=nix", "--dataset from", "mine"),
    ("train.py --dataset=notes", "data/notes has no prepared text", "prepare.py"),
    ("train.py --dataset=shakespeare", "no prepared text: python prepare.py shakespeare, or"),
    ("sample.py out/mine Once", 'sample.py out/mine --prompt "Once"'),
    ("train.py NEW --dataset=mine --block_size=1000", "more text", "--block_size=1000"),
    ("train.py --out_dir=new --dataset=mine --minutes=-5", "--minutes=-5", 2),
    ("train.py NEW --dataset=mine --device=cuda", "cuda"),
    ("train.py NEW --dataset=mine --init_from=nix", "nix", "no checkpoint"),
    ("train.py NEW --dataset=bytes --init_from=out/mine", "tokenizer than data/bytes", "=out/mine"),
    ("train.py NEW --dataset=mine --teacher=nix", "nix", "no checkpoint"),
    ("train.py NEW --dataset=bytes --teacher=out/mine", "another tokenizer", "data/bytes"),
    ("train.py NEW --dataset=mine --teacher=out/mine --block_size=32", "=32:", "at most 16 tokens"),
    ("train.py NEW --dataset=mine --bpe_dropout=0.1", "0.1: ", "not a BPE", "give --bpe_dropout=0"),
    ("train.py TINY --dataset=mine --overwrite --teacher=out/mine", "out/mine", "--out_dir"),
    ("train.py TINY --dataset=mine", "out/mine", "--resume", "--overwrite", "--out_dir"),
    ("train.py TINY --dataset=mine --out_dir=file/run", "file"),
    ("train.py TINY --dataset=mine --out_dir=out", "out contains other runs", "--out_dir=out/NAME"),
    ("train.py TINY --dataset=mine --out_dir=out --overwrite", "out contains other", "=out/NAME"),
    ("train.py TINY --dataset=mine --out_dir=logged", "belongs to another program", "--out_dir"),
    ("train.py TINY --dataset=mine --out_dir=titled", "belongs to another program", "--out_dir"),
    ("train.py --resume --overwrite", "only one of", "--overwrite", 2),
    ("train.py --resume --out_dir=out/nix", "out/nix", "--out_dir"),
    ("train.py --resume --out_dir=out/mine", "its 20 steps", "--max_iters=40", "--minutes=5"),
    ("train.py out/mine/config.toml --resume --out_dir=out/mine", "its 20 steps", "--minutes=5"),
    ("train.py --minutes=0", "--minutes=0", "--max_iters"),
    ("train.py --max_iters=9 --minutes=0", "--minutes=0", "--max_iters"),
    # The run has ended, too, which is the lesser reason.
    ("train.py --resume --out_dir=out/mine --n_layer=3", "--n_layer=3", "has 2"),
    ("train.py --resume --out_dir=out/mine --dataset=other", "data/other", "--init_from=out/mine"),
    (SEVERAL + "--max_iters=30 --teacher=out/mine", "--teacher=out/mine/", "learns from its own"),
    # ------------------------------------------------------------ sampling
    ("sample.py nix", "nix", "no checkpoint"),
    ("sample.py mine", "mine", "no checkpoint", "runs here: out/mine"),
    ("sample.py hub", "hub", "no tokenizer.json", "AutoTokenizer"),
    ("sample.py Hello", "Hello", '--prompt "Hello"'),
    ("in no_model: sample.py", "out/", "train.py"),
    ("sample.py out/mine --prompt=\udcff", r"'\udcff'", "U+DCFF"),  # a byte that is not UTF-8
    ("sample.py out/mine --prompts=missing.txt", "missing.txt", "no such file"),
    ("sample.py out/mine --prompts=latin.txt", "latin.txt is not UTF-8", "0xe9"),
    ("sample.py out/mine --temperature=-1", "--temperature=-1", 2),
    ("sample.py out/mine --top_p=0", "top_p=0", 2),
    ("sample.py out/mine --min_p=2", "min_p=2", 2),
    ("sample.py out/mine --num_samples=0", "--num_samples=0", 2),
    ("sample.py out/mine --prompt=a --interactive", "--prompt", "--interactive", 2),
    ("sample.py out/mine --explain=a.html --interactive", "--explain", "--interactive", 2),
    ("sample.py out/mine --device=cuda", "cuda"),
    ("sample.py out/mine --device=xpu", "--device=xpu", "PyTorch finds none here"),
]


@pytest.fixture(scope="module")
def world(trained, tmp_path_factory):
    """A directory with everything that the rows name."""
    directory = tmp_path_factory.mktemp("world")
    shutil.copytree(trained, directory, dirs_exist_ok=True)
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    for words in ("a.txt --name=bytes --tokenizer=byte", "b.txt --name=other --tokenizer=out/mine"):
        assert run_here("prepare.py", *words.split(), cwd=directory).returncode == 0
    shutil.copytree(directory / "out/mine", directory / "out/several")
    shutil.copytree(directory / "out/mine/checkpoint-20", directory / "out/several/teacher-1")
    return directory


@pytest.fixture
def offline(monkeypatch):
    """No network, and no vocabulary from before."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # where nobody listens
    monkeypatch.setattr("urllib.request._opener", None)  # which knows older proxies
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row[0])
def test_a_mistake_is_one_line_that_names_it_and_leaves_nothing_behind(world, row, offline):
    place, _, command = row[0].removeprefix("in ").rpartition(": ")
    command = command.replace("NEW", "TINY --out_dir=new").replace("TINY", " ".join(TINY))
    script, *arguments = command.split()
    if "--device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has the GPU that must be missing")
    before = snapshot(world)
    process = run_here(script, *arguments, cwd=world / place)
    *words, code = row[1:] if isinstance(row[-1], int) else (*row[1:], 1)
    error = process.stderr.decode("utf-8")
    lines = [line for line in error.splitlines() if " parameters; " not in line]
    assert process.returncode == code, error
    if error.startswith("╭"):
        assert code == 2 and len(lines) <= 14
    else:
        assert len(lines) == 1 and ": error: " in lines[0], error
    error = re.sub(r"[─-╿\s]", "", error).lower()  # a box may break a line, and a word at a hyphen
    assert all(word.replace(" ", "").lower() in error for word in words), error
    assert snapshot(world) == before
    assert not process.stdout.strip() or "--resume" in arguments  # which says what changes


class Evil:
    """Makes a directory when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


SAMPLE, RESUME = "sample.py out/mine", "train.py --out_dir=out/mine --resume --max_iters=30"
TRAIN = f"train.py --dataset=mine {' '.join(TINY)} --out_dir=out/new"
INIT = f"{TRAIN} --init_from=out/mine"
META = {"val": {"tokens": 7}}
DAMAGED = [  # command, file, what becomes of it, what is said
    (SAMPLE, "config.json", {"n_head": 3}, "n_head=3"),
    (SAMPLE, "config.json", {"model_type": "llama"}, "'model_type': 'llama'"),
    (SAMPLE, "config.json", None, "checkpoint-20: no checkpoint there (a directory with a config"),
    (SAMPLE, "metrics.json", b'{"st', "): delete out/mine/checkpoint-20"),
    (RESUME, "config.json", b'{"n_head": 2, "n_em', "out/mine/checkpoint-20/config.json cannot be"),
    (RESUME, "tokenizer.json", b"", "out/mine/checkpoint-20/tokenizer.json: not a"),
    (RESUME, "metrics.json", b'{"st', "): delete out/mine/checkpoint-20"),
    (RESUME, "model.safetensors", None, "No such file or directory: out/mine/checkpoint-20/model."),
    (SAMPLE, "model.safetensors", b"short", "model.safetensors is damaged"),
    (SAMPLE, "model.safetensors", math.nan, "logits: other"),
    (RESUME, "training_state.pt", b"short", "training_state.pt cannot be read"),
    (RESUME, "training_state.pt", Evil(), "training_state.pt cannot be read"),
    (RESUME, "training_state.pt", 2, "has another format: begin with --init_from=out/mine"),
    (INIT, "config.json", {"n_head": 3}, "config.json: n_embd=16 is not divisible by n_head=3"),
    (TRAIN, "tokenizer.json", b'{"model": ', "tokenizer.json"),
    (TRAIN, "meta.json", META, "data/mine has 769 val tokens, not 7: prepare the text again"),
    (TRAIN, "val.npy", Evil(), "Python objects"),
    (TRAIN, "val.npy", b"", "val.npy: No data left in file: prepare the text again"),
    (TRAIN, "train-00000.npy", b"\x93NUMPY\1\0", "prepare the text again"),
]


@pytest.mark.parametrize("command, name, change, words", DAMAGED, ids=lambda value: str(value)[:20])
def test_a_damaged_file_is_named_and_runs_no_code(finished, command, name, change, words):
    shutil.rmtree(finished / "out/mine/checkpoint-10")
    file = finished / ("data/mine" if command == TRAIN else "out/mine/checkpoint-20") / name
    if change is None:
        file.unlink()
    elif isinstance(change, bytes):
        file.write_bytes(change)
    elif isinstance(change, dict):
        edit_json(file, **change)
    elif isinstance(change, float):
        weights = load_file(file)
        save_file(weights | {"ln_f.weight": torch.full((16,), change)}, file)
    elif file.suffix == ".npy":
        np.save(file, np.array([change] * 50), allow_pickle=True)
    else:
        torch.save({"format": change}, file)
    process = run_script(*command.split(), cwd=finished)
    error = process.stderr.decode()
    said = [line for line in error.splitlines() if line[:1] != " "]  # no code of a traceback
    assert process.returncode == 1 and words in " ".join(said), error
    assert command != SAMPLE or "Traceback" not in error
    assert not (finished / "ran").exists() and not (finished / "out/new").exists()


PACKAGE = sorted((ROOT / "gptling").glob("*.py"))


@pytest.mark.parametrize("file", [ROOT / "model.py", *PACKAGE], ids=lambda file: file.name)
def test_the_package_knows_no_script_and_the_model_nothing_of_ours(file):
    tree, scripts = ast.parse(file.read_text(encoding="utf-8")), {f.stem for f in ROOT.glob("*.py")}
    imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    imported += [n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    forbidden = {"gptling", *scripts} if file.stem == "model" else scripts
    assert not forbidden & {name.split(".")[0] for name in imported}
