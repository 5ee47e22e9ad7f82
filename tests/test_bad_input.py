"""What a mistake gets: one line that names it, an exit code, and nothing half-written."""

import json
import shutil

import numpy as np
import pytest

from tests.conftest import TEXT, TINY, run_script


def refused(process, *named, code=1):
    """A script's output for a mistake is one line with these words."""
    error = process.stderr.decode("utf-8")
    assert process.returncode == code, error
    assert error.count("\n") == 1 and "Traceback" not in error, error
    for word in named:
        assert str(word) in error
    assert process.stdout == b""


FILES = {
    "empty.txt": b"",
    "bom.txt": b"\xef\xbb\xbf",
    "latin.txt": b"caf\xe9 au lait",
    "late.txt": b"x" * 3_000_000 + b"\xff" + b"y" * 100,
    "cut.txt": "naïve é".encode()[:-1],
    "utf16.txt": "hello".encode("utf-16"),
    "nul.txt": b"abc\0def",
    "bad.jsonl": b'{"text": "a"}\n{"txt": "b"}\n',
    "list.jsonl": b"[1, 2]\n",
    "nul.jsonl": b'{"text": "a\\u0000"}\n',
    "surrogate.jsonl": b'{"text": "a\\ud800"}\n',
    "none.jsonl": b"\n",
    "cut.jsonl.gz": b"\x1f\x8b\x08\x00",
    "text.jsonl.gz": b'{"text": "not compressed"}',
}


@pytest.mark.parametrize(
    "source, named",
    [
        ("empty.txt", ["empty.txt", "no text"]),
        ("bom.txt", ["bom.txt", "no text"]),
        ("latin.txt", ["latin.txt", "byte 3", "0xe9"]),
        ("late.txt", ["late.txt", "byte 3000000"]),
        ("cut.txt", ["cut.txt", "byte 7"]),
        ("utf16.txt", ["utf16.txt", "byte 0"]),
        ("nul.txt", ["nul.txt", "NUL", "byte 3"]),
        ("bad.jsonl", ["bad.jsonl", "line 2", '"text"']),
        ("list.jsonl", ["list.jsonl", "line 1"]),
        ("nul.jsonl", ["nul.jsonl", "line 1", "NUL"]),
        ("surrogate.jsonl", ["surrogate.jsonl", "line 1"]),
        ("none.jsonl", ["none.jsonl", "no text"]),
        ("cut.jsonl.gz", ["cut.jsonl.gz"]),
        ("text.jsonl.gz", ["text.jsonl.gz"]),
        ("missing.txt", ["missing.txt", "no such file"]),
        ("pictures", ["pictures", "no text in this folder"]),
    ],
)
def test_prepare_refuses_what_is_not_text(tmp_path, source, named):
    for name, content in FILES.items():
        if name == source:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG\0")
    refused(run_script("prepare.py", source, cwd=tmp_path), *named)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize(
    "arguments, named, code",
    [
        (["--tokenizer=gpt3"], ["gpt3", "char", "byte", "gpt2"], 1),
        (["--tokeniser=char"], ["--tokeniser", "--tokenizer"], 2),
        (["--name=../up"], ["../up"], 2),
    ],
)
def test_prepare_refuses_wrong_flags(tmp_path, arguments, named, code):
    (tmp_path / "a.txt").write_text(TEXT)
    refused(run_script("prepare.py", "a.txt", *arguments, cwd=tmp_path), *named, code=code)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize(
    "arguments, named, code",
    [
        (["--dataset=nix"], ["data/nix", "prepare.py"], 1),
        (["--dataset=../mine"], ["../mine"], 2),
        (["--learing_rate=1"], ["--learing_rate", "--learning_rate"], 2),
        (["--n_layer=two"], ["--n_layer", "'two'"], 2),
        (["--n_embd=30", "--n_head=4"], ["30", "4", "divisible"], 2),
        (["--max_iters=0"], ["--max_iters=0"], 2),
        (["--dropout=1.5"], ["--dropout=1.5"], 2),
        (["--batch_size=-1"], ["--batch_size=-1"], 2),
        (["nix.toml"], ["nix.toml"], 1),
        (["broken.toml"], ["broken.toml", "line 1"], 1),
        (["--dataset=mine", "--block_size=1000"], ["val", "769", "1001", "--block_size"], 1),
        (["--dataset=wrong"], ["wrong", "5000"], 1),
        (["--dataset=cut"], ["cut"], 1),
        (["--dataset=mine", "--resume=True", "--out_dir=out/nix"], ["out/nix"], 1),
        (["--dataset=mine", "--out_dir=file/run"], ["file/run"], 1),
        (["--dataset=mine", "--init_from=nix"], ["nix"], 1),
        (["--dataset=mine", "--device=cuda"], ["cuda"], 1),
    ],
)
def test_train_refuses_mistakes_before_it_writes(trained, tmp_path, arguments, named, code):
    import torch

    if "--device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has the GPU that must be missing")
    shutil.copytree(trained / "data", tmp_path / "data")
    for name in ("wrong", "cut"):
        shutil.copytree(trained / "data" / "mine", tmp_path / "data" / name)
    np.save(tmp_path / "data" / "wrong" / "val.npy", np.full(100, 5000, dtype=np.uint16))
    (tmp_path / "data" / "cut" / "val.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "broken.toml").write_text("n_layer = = 3")
    (tmp_path / "file").write_text("a file, not a folder")
    tiny = TINY if code == 1 and "--block_size=1000" not in arguments else []
    refused(run_script("train.py", *tiny, *arguments, cwd=tmp_path), *named, code=code)
    assert not (tmp_path / "out").exists()


def test_training_data_beyond_the_vocabulary_is_refused(trained, tmp_path):
    shutil.copytree(trained / "data", tmp_path / "data")
    ids = np.full(5000, 4000, dtype=np.uint16)
    np.save(tmp_path / "data" / "mine" / "train-00000.npy", ids)
    refused(run_script("train.py", "--dataset=mine", *TINY, cwd=tmp_path), "4000", "data/mine")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, named, code",
    [
        (["nix"], ["nix", "no checkpoint"], 1),
        (["."], ["no checkpoint"], 1),
        (["RUN", "--prompt=ü"], ["'ü'", "U+00FC"], 1),
        (["RUN", "--temperature=-1"], ["--temperature=-1"], 2),
        (["RUN", "--top_k=-5"], ["--top_k=-5"], 2),
        (["RUN", "--top_p=0"], ["--top_p=0"], 2),
        (["RUN", "--max_new_tokens=-2"], ["--max_new_tokens=-2"], 2),
        (["RUN", "--num_samples=0"], ["--num_samples=0"], 2),
        (["RUN", "--temprature=1"], ["--temprature", "--temperature"], 2),
        (["RUN", "--prompts=missing.txt"], ["missing.txt"], 1),
        (["RUN", "--prompt=a", "--interactive"], ["--prompt", "--interactive"], 2),
        ([], ["out/", "train.py"], 1),
    ],
)
def test_sample_refuses_mistakes(trained, tmp_path, arguments, named, code):
    arguments = [a if a != "RUN" else trained / "out" / "mine" for a in arguments]
    process = run_script("sample.py", *arguments, cwd=tmp_path)
    lines = process.stderr.decode().splitlines(keepends=True)
    process.stderr = "".join(line for line in lines if "parameters" not in line).encode()
    refused(process, *named, code=code)


def test_sample_refuses_a_damaged_checkpoint(trained, tmp_path):
    shutil.copytree(trained / "out" / "mine" / "checkpoint-20", tmp_path / "one")
    (tmp_path / "one" / "tokenizer.json").write_text(json.dumps({"model": "?"}))
    refused(run_script("sample.py", "one", cwd=tmp_path), "tokenizer.json")
    shutil.copytree(trained / "out" / "mine" / "checkpoint-20", tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").write_bytes(b"short")
    refused(run_script("sample.py", "two", cwd=tmp_path), "two")
    (tmp_path / "two" / "config.json").write_text("{}")
    refused(run_script("sample.py", "two", cwd=tmp_path), "two")
