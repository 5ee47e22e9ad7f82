"""What a mistake gets: one line that names it, an exit code, and nothing half-written. A wrong flag
gets tyro's box of a few lines, and exit code 2."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import TEXT, TINY, run_here, run_script
from tests.test_cli import unboxed

FILES = {
    "empty.txt": b"",
    "bom.txt": b"\xef\xbb\xbf",
    "latin.txt": b"caf\xe9 au lait",
    "late.txt": b"x" * 3_000_000 + b"\xff" + b"y" * 100,
    "cut.txt": "naïve é".encode()[:-1],
    "utf16.txt": "hello".encode("utf-16"),
    "bad.jsonl": b'{"text": "a"}\n{"txt": "b"}\n',
    "list.jsonl": b"[1, 2]\n",
    "surrogate.jsonl": b'{"text": "a\\ud800"}\n',
    "deep.jsonl": b"[" * 100_000,
    "none.jsonl": b"\n",
    "cut.jsonl.gz": b"\x1f\x8b\x08\x00",
    "text.jsonl.gz": b'{"text": "not compressed"}',
    "a.txt": TEXT.encode(),
    "pictures/a.png": b"\x89PNG\0",
    "made/data/one/meta.json": b"{}",
    "made/data/one/val.txt": b"made from other text",
    "made/out/one/log.jsonl": b'{"text": "a log"}',
    "broken.toml": b"n_layer = = 3",
    "huge.toml": b"dropout = 1" + 400 * b"0",
    "deep.toml": b"n_layer = " + 100_000 * b"[",
    "file": b"a file, not a folder",
    "empty.d/nothing.md": b"",
}
LONG = "n" * 300  # no file system takes such a name

# Each row: the command, words of the answer, and the exit code where it is not 1.
MISTAKES = [
    # text
    ("prepare.py empty.txt", "empty.txt", "no text"),
    ("prepare.py bom.txt", "bom.txt", "no text"),
    ("prepare.py latin.txt", "latin.txt", "byte 3", "0xe9"),
    ("prepare.py late.txt", "late.txt", "byte 3000000"),
    ("prepare.py cut.txt", "cut.txt", "byte 7"),
    ("prepare.py utf16.txt", "utf16.txt", "byte 0", "UTF-8"),
    ("prepare.py bad.jsonl", "bad.jsonl", "line 2", '"text"'),
    ("prepare.py list.jsonl", "list.jsonl", "line 1"),
    ("prepare.py surrogate.jsonl", "surrogate.jsonl", "line 1"),
    ("prepare.py deep.jsonl", "deep.jsonl", "line 1"),
    ("prepare.py none.jsonl", "none.jsonl", "no text"),
    ("prepare.py cut.jsonl.gz", "cut.jsonl.gz"),
    ("prepare.py text.jsonl.gz", "text.jsonl.gz"),
    ("prepare.py missing.txt", "missing.txt", "no such file"),
    ("prepare.py missing\x1b[31m\n.txt", r"missing\x1b[31m", "--name", 2),
    ("prepare.py missing\x1b[31m\n.txt --name=a", r"missing\x1b[31m", "no such file"),
    ("prepare.py pictures", "pictures", "no text in this folder"),
    ("made: prepare.py .", "no text in this folder"),
    (f"prepare.py {LONG}", LONG, "too long"),
    (f"prepare.py {LONG} --name=short", LONG, "too long"),
    (f"prepare.py a.txt --name={LONG}", LONG, "too long"),
    ("prepare.py a.txt --name=../up", "../up", 2),
    ("prepare.py / --overwrite", "--name ''", 2),
    ("prepare.py a.txt --name=a\x1bb", r"a\x1bb", 2),
    ("prepare.py a.txt --name=mine", "data/mine", "--overwrite"),
    ("prepare.py a.txt --tokenizer=gpt3", "gpt3", "char", "byte", "gpt2"),
    ("prepare.py a.txt --tokeniser=char", "--tokeniser", "--tokenizer", 2),
    ("prepare.py a.txt --tokenizer=bpe --vocab_size=256", "256", "257", 2),
    ("prepare.py a.txt --tokenizer=bpe --vocab_size=-5", "-5", "257", 2),
    (f"prepare.py a.txt --tokenizer=bpe --vocab_size={10**12}", str(10**12), "1,000,000", 2),
    ("prepare.py a.txt --tokenizer=bpe --vocab_size=5000", "5000", "used up at", "more text"),
    ("prepare.py a.txt --tokenizer=char --vocab_size=500", "500", "--tokenizer bpe", "char", 2),
    ("prepare.py a.txt --tokenizer=gpt2 --vocab_size=500", "--tokenizer bpe", "gpt2", 2),
    ("prepare.py a.txt --tokenizer=bqe", "bqe", "bpe"),
    # training
    ("train.py --dataset=nix", "data/nix", "prepare.py", "--dataset=mine"),
    ("train.py --dataset=../mine", "../mine", 2),
    ("train.py --dataset=a\x1bb", r"a\x1bb", 2),
    ("train.py --learing_rate=1", "--learing_rate", "--learning_rate", 2),
    ("train.py --n_layer=two", "--n_layer", "'two'", 2),
    ("train.py --n_embd=30 --n_head=4", "30", "4", "divisible", 2),
    ("train.py --max_iters=0", "--max_iters=0", 2),
    ("train.py --dropout=1.5", "dropout=1.5", 2),
    ("train.py --batch_size=-1", "--batch_size=-1", 2),
    ("train.py --hold=1", "--hold=1", "below 1", 2),
    ("train.py --beta2=1.5", "--beta2=1.5", "below 1", 2),
    ("train.py nix.toml", "nix.toml"),
    (f"train.py {LONG}.toml", LONG, "too long"),
    ("train.py a.txt", "a.txt", "prepare.py"),
    ("train.py out/mine", "out/mine", "--resume"),
    ("train.py broken.toml", "broken.toml", "line 1"),
    ("train.py huge.toml", "huge.toml", "dropout"),
    ("train.py deep.toml", "deep.toml"),
    (
        "train.py --out_dir=new --dataset=mine --block_size=1000",
        "val",
        "769",
        "1001",
        "--block_size",
    ),
    ("train.py TINY --out_dir=new --dataset=wrong", "wrong", "5000"),
    ("train.py TINY --out_dir=new --dataset=edge", "data/edge", "beyond"),
    ("train.py TINY --out_dir=new --dataset=torn", "torn"),
    ("train.py TINY --out_dir=new --dataset=beyond", "4000", "data/beyond"),
    ("train.py TINY --dataset=mine --resume=True --out_dir=out/nix", "out/nix", "--out_dir"),
    ("train.py TINY --dataset=mine --out_dir=file/run", "file/run"),
    ("train.py TINY --out_dir=new --dataset=mine --init_from=nix", "nix"),
    ("train.py TINY --out_dir=new --dataset=mine --device=cuda", "cuda"),
    ("train.py TINY --out_dir=new --dataset=mine --min_lr=1", "--min_lr=1.0", "--learning_rate="),
    # sampling
    ("sample.py nix", "nix", "no checkpoint", "out/mine"),
    ("sample.py .", "no checkpoint"),
    ("sample.py file", "file", "no checkpoint"),
    ("empty.d: sample.py", "out/", "train.py"),
    (f"sample.py {LONG}", LONG, "too long"),
    ("sample.py out/mine --prompt=ü", "'ü'", "U+00FC"),
    ("sample.py out/mine --prompts=missing.txt", "missing.txt"),
    ("sample.py out/mine --prompts=latin.txt", "latin.txt"),
    ("sample.py out/mine --prompts=empty.txt", "empty.txt", "no line"),
    (f"sample.py out/mine --prompts={LONG}", LONG, "too long"),
    ("sample.py out/mine --temperature=-1", "--temperature=-1", 2),
    ("sample.py out/mine --top_k=-5", "--top_k=-5", 2),
    ("sample.py out/mine --top_p=0", "--top_p=0", 2),
    ("sample.py out/mine --min_p=2", "--min_p=2", 2),
    ("sample.py out/mine --seed=-1", "--seed=-1", 2),
    ("sample.py out/mine --max_new_tokens=-2", "--max_new_tokens=-2", 2),
    ("sample.py out/mine --num_samples=0", "--num_samples=0", 2),
    (f"sample.py out/mine --num_samples={10**22}", str(10**22), 2),
    ("sample.py out/mine --temprature=1", "--temprature", "--temperature", 2),
    ("sample.py out/mine --stop=", "--stop", 2),
    ("sample.py out/mine --prompt=a --interactive", "--prompt", "--interactive", 2),
    ("sample.py out/mine --device=cuda", "cuda"),
]

# A checkpoint with one thing changed: {its name: (file, changes or content, words of the answer)}.
# The changes are of config.json, of tokenizer.json's dictionaries, or of the tensors.
DAMAGED = {
    "config_cut": ("config.json", '{"n_layer": ', "config.json"),
    "config_list": ("config.json", "[]", "config.json"),
    "config_deep": ("config.json", "[" * 100_000, "config.json"),
    "config_not_utf8": ("config.json", b"\xff\xfe", "config.json"),
    "config_long_number": ("config.json", '{"n_layer": 1' + 5000 * "0" + "}", "config.json"),
    "positions": ("config.json", {"n_positions": 10**9}, "1000000000"),
    "vocabulary": ("config.json", {"vocab_size": 10**12}, "wte.weight"),
    "width": ("config.json", {"n_embd": 10**18, "n_head": 1}, "1000000000000000000"),
    "layers": ("config.json", {"n_layer": 10**9}, "n_layer=1000000000"),
    "more_layers": ("config.json", {"n_layer": 3}, "h.2."),
    "float_layers": ("config.json", {"n_layer": 2.0}, "n_layer=2.0"),
    "text_heads": ("config.json", {"n_head": "2"}, "n_head='2'"),
    "list_width": ("config.json", {"n_embd": [16]}, "n_embd=[16]"),
    "true_layers": ("config.json", {"n_layer": True}, "n_layer=True"),
    "no_vocabulary": ("config.json", {"vocab_size": None}, "vocab_size=None"),
    "nan_positions": ("config.json", {"n_positions": float("nan")}, "nan"),
    "infinite_dropout": ("config.json", {"resid_pdrop": float("inf")}, "dropout=inf"),
    "text_dropout": ("config.json", {"resid_pdrop": "0.1"}, "config.json"),
    "no_heads": ("config.json", {"n_head": 0}, "n_head=0"),
    "another_model": ("config.json", {"model_type": "llama"}, "llama"),
    "tokenizer_gone": ("tokenizer.json", None, "tokenizer.json", "no such file"),
    "tokenizer_cut": ("tokenizer.json", '{"model": "?', "tokenizer.json"),
    "tokenizer_other": ("tokenizer.json", '{"model": "?"}', "tokenizer.json"),
    "tokenizer_deep": ("tokenizer.json", '{"a":' * 100_000, "tokenizer.json"),
    "tokenizer_of_100_MB": ("tokenizer.json", b" " * 100_000_000, "tokenizer.json", "bytes"),
    "id_of_32_bits": ("tokenizer.json", {"a": 2**32 - 1}, "tokenizer.json", "ids"),
    "id_of_100_bits": ("tokenizer.json", {"a": 2**100}, "tokenizer.json", "ids"),
    "negative_id": ("tokenizer.json", {"a": -1}, "tokenizer.json", "ids"),
    "float_id": ("tokenizer.json", {"a": 0.5}, "tokenizer.json", "ids"),
    "text_id": ("tokenizer.json", {"a": "0"}, "tokenizer.json", "ids"),
    "true_id": ("tokenizer.json", {"a": True}, "tokenizer.json", "ids"),
    "id_twice": ("tokenizer.json", {"a": 7}, "tokenizer.json", "ids"),
    "no_byte_letter": ("tokenizer.json", {"中": 1}, "tokenizer.json"),
    "long_special": ("tokenizer.json", {"content": "x" * 1_000_000}, "tokenizer.json", "too long"),
    "number_special": ("tokenizer.json", {"content": 3}, "tokenizer.json"),
    "open_pattern": ("tokenizer.json", {"Regex": "(("}, "tokenizer.json"),
    "large_pattern": ("tokenizer.json", {"Regex": "((a{999}){999}){999}"}, "tokenizer.json"),
    "long_pattern": ("tokenizer.json", {"Regex": "a|" * 1_000_000}, "tokenizer.json", "too long"),
    "list_pattern": ("tokenizer.json", {"Regex": ["a"]}, "tokenizer.json"),
    "pattern_of_bpe": ("tokenizer.json", {"Regex": r"\s+|\S+"}, "tokenizer.json", "bytes"),
    "weights_gone": ("model.safetensors", None, "weights_gone", "model.safetensors"),
    "weights_short": ("model.safetensors", b"short", "model.safetensors"),
    "weights_header": ("model.safetensors", b"\xff" * 64, "model.safetensors"),
    "weights_shape": ("model.safetensors", {"wte.weight": torch.ones(4, 4)}, "wte.weight"),
    "weights_left_over": ("model.safetensors", {"wtf.weight": torch.ones(4, 4)}, "wtf.weight"),
    "weights_missing": ("model.safetensors", {"wte.weight": None}, "wte.weight"),
    "weights_nan": (
        "model.safetensors",
        {"wte.weight": torch.tensor(torch.nan)},
        "NaN or infinity",
    ),
    "weights_infinite": (
        "model.safetensors",
        {"wte.weight": torch.tensor(torch.inf)},
        "NaN or infinity",
    ),
}
MISTAKES += [(f"sample.py damaged/{name}", *words) for name, (_, _, *words) in DAMAGED.items()]


def damage(checkpoint, file, change):
    file = checkpoint / file
    if change is None:
        file.unlink()
    elif isinstance(change, str | bytes):
        file.write_bytes(change.encode() if isinstance(change, str) else change)
    elif file.name == "model.safetensors":
        tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
        for name, tensor in change.items():
            if tensor is not None and tensor.dim() == 0:  # a value for all of its elements
                tensor = tensor.expand_as(tensors[name]).contiguous()
            tensors[name] = tensor
        save_file({k: v for k, v in tensors.items() if v is not None}, file)
    elif file.name == "config.json":
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    else:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        tokenizer["added_tokens"] = [{"content": "<|endoftext|>", "id": 40} | change]
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] |= change
        if not {"content", "Regex"} & set(change):
            tokenizer["model"]["vocab"] |= change
        file.write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.fixture(scope="module")
def world(trained, tmp_path_factory):
    """A directory with everything that the rows name."""
    directory = tmp_path_factory.mktemp("world")
    shutil.copytree(trained, directory, dirs_exist_ok=True)
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    for name in ("wrong", "torn", "beyond", "edge"):
        shutil.copytree(directory / "data" / "mine", directory / "data" / name)
    np.save(directory / "data" / "wrong" / "val.npy", np.full(100, 5000, dtype=np.uint16))
    n_vocab = json.loads((directory / "data" / "mine" / "meta.json").read_text())["vocab_size"]
    edge = np.full(100, n_vocab, dtype=np.uint16)  # the first id that it does not have
    np.save(directory / "data" / "edge" / "val.npy", edge)
    ids = np.full(5000, 4000, dtype=np.uint16)
    np.save(directory / "data" / "beyond" / "train-00000.npy", ids)
    (directory / "data" / "torn" / "val.npy").write_bytes(b"\x93NUMPY")
    for name, (file, change, *_) in DAMAGED.items():
        copy = directory / "damaged" / name
        shutil.copytree(trained / "out" / "mine" / "checkpoint-20", copy)
        damage(copy, file, change)
    return directory


def contents(directory):
    """When each file was written last, and which folders there are."""
    found = {}
    for folder, _, names in os.walk(directory):  # three times as fast as rglob
        found[folder] = None
        found |= {path: os.stat(path).st_mtime_ns for path in (f"{folder}/{n}" for n in names)}
    return found


def refused(process, *named):
    """A script's output for a mistake is one line with these words, or tyro's box with them."""
    *named, code = named if isinstance(named[-1], int) else (*named, 1)
    error = process.stderr.decode("utf-8")
    lines = [line for line in error.splitlines(keepends=True) if " parameters; " not in line]
    assert process.returncode == code, error
    assert "Traceback" not in error and error.replace("\n", "").isprintable(), error
    if error.startswith("╭"):
        assert code == 2 and len(lines) <= 12 and len(error) < 3000
    else:
        assert len(lines) == 1 and lines[0].endswith("\n") and len(lines[0]) < 1500, error
    for word in named:
        assert word.replace(" ", "").lower() in unboxed(error).replace(" ", "").lower()


ROWS = [
    pytest.param(row, marks=[pytest.mark.gpt2] * ("damaged/" in row[0])) for row in MISTAKES
]  # of a GPT-2 is more known, and said


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ascii(row[0])[1:-1][:60])
def test_a_mistake_is_one_line_that_names_it_and_leaves_nothing_behind(world, row):
    command, *named = row
    place, _, command = command.rpartition(": ")
    script, *arguments = command.split(" ")
    if "--device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has the GPU that must be missing")
    if LONG in command and os.name == "nt":
        pytest.skip("Windows has other words for a long name")
    if "TINY" in arguments:
        arguments = [*TINY, *(a for a in arguments if a != "TINY")]
    before = contents(world)
    process = run_here(script, *arguments, cwd=world / place)
    assert contents(world) == before
    refused(process, *named)
    assert process.stdout in (b"", b"\n")


@pytest.mark.parametrize(
    "command, named",
    [
        ("prepare.py latin.txt", "latin.txt"),
        ("train.py --n_layer=two", "'two'"),
        ("sample.py damaged/layers", "n_layer=1000000000"),
    ],
)
def test_a_script_that_is_run_says_the_same(world, command, named):
    script, argument = command.split()
    process = run_script(script, argument, cwd=world)
    here = run_here(script, argument, cwd=world)
    assert process.stderr.splitlines() == here.stderr.splitlines()
    assert process.returncode == here.returncode != 0 and named in process.stderr.decode()


@pytest.mark.parametrize(
    "package, arguments", [("datasets", ["hf:someone/something"]), ("pyarrow", ["a.parquet"])]
)
def test_a_missing_package_is_named(tmp_path, package, arguments):
    (tmp_path / "a.txt").write_text("a few words " * 20)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / f"{package}.py").write_text("raise ImportError")
    hidden = {"PYTHONPATH": str(tmp_path / "hidden")}
    process = run_script("prepare.py", *arguments, cwd=tmp_path, **hidden)
    refused(process, f"pip install {'datasets' if package == 'pyarrow' else package}")
