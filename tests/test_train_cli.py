"""Training from day to day: other texts, other machines, presets, and which checkpoint is used."""

import re
import shlex
import shutil

import pytest

import train
from gptling.run import load_training_state
from gptling.tokenizers import load_tokenizer
from tests.conftest import TEXT, TINY, one_line, output_of, run_here


@pytest.fixture
def here(trained, tmp_path):
    """A directory with data/mine and the run out/mine."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_text_with_a_token_that_the_model_lacks_is_refused_with_the_way_out(tmp_path):
    """A model of one file's 256 bytes. The data of two files have end-of-text besides."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT)
    both, one_step = ["a.txt", "b.txt", "--name=both"], [*TINY, "--max_iters=1"]
    output_of("prepare.py", "a.txt", "--tokenizer=byte", cwd=tmp_path)
    output_of("prepare.py", *both, "--tokenizer=byte", cwd=tmp_path)
    output_of("train.py", "--dataset=a", *one_step, cwd=tmp_path)
    padded = ["--vocab_multiple=300", "--out_dir=out/padded"]  # has room for one token more
    output_of("train.py", "--dataset=a", *one_step, *padded, cwd=tmp_path)
    way_out = "prepare that text with --tokenizer=out/a/checkpoint-1"
    for flags, words in (
        (["--init_from=out/a", "--eval_only"], way_out),
        (["--init_from=out/a", "--out_dir=out/new"], way_out),
        (["--init_from=out/padded", "--eval_only"], "data/both"),
    ):
        process = run_here("train.py", "--dataset=both", *one_step, *flags, cwd=tmp_path)
        one_line(process, "another tokenizer", words)
    output_of("prepare.py", *both, "--tokenizer=out/a/checkpoint-1", "--overwrite", cwd=tmp_path)
    flags = ["--eval_only", "--init_from=out/a", "--dataset=both"]
    assert "bits per byte" in output_of("train.py", *flags, cwd=tmp_path)


def test_other_text_is_prepared_with_the_characters_of_a_run(here):
    """Named by the run; the first character that it lacks is named."""
    (here / "other.txt").write_text(TEXT[::-1])
    output_of("prepare.py", "other.txt", "--tokenizer=out/mine", cwd=here)
    ours, theirs = load_tokenizer(here / "data/other"), load_tokenizer(here / "data/mine")
    assert ours._mergeable_ranks == theirs._mergeable_ranks
    flags = ["--dataset=other", "--init_from=out/mine", *TINY, "--max_iters=22"]
    assert "step 22/22" in output_of("train.py", *flags, cwd=here)
    (here / "new.txt").write_text(TEXT + "a bottle on üs all" + TEXT)
    process = run_here("prepare.py", "new.txt", "--tokenizer=out/mine", cwd=here)
    one_line(process, "'ü'", "U+00FC")
    assert not (here / "data/new").exists() and not (here / "data/.new.partial").exists()


@pytest.mark.parametrize("name, characters", [("märchen über Köln", 2000), ("a", 30), ("b", 400)])
def test_the_next_line_can_be_pasted(name, characters, tmp_path):
    """Its name in quotes where that is needed; sequences are as short as the text wants them."""
    (tmp_path / f"{name}.txt").write_text(TEXT[:characters], encoding="utf-8")
    output = output_of("prepare.py", f"{name}.txt", cwd=tmp_path)
    python, *command = shlex.split(re.search("next: (.*)", output)[1])
    assert python == "python" and f"--dataset={name}" in command
    size = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--minutes=0.01", "--curves=False"]
    output = output_of(*command, *size, cwd=tmp_path)
    python, *command = shlex.split(re.search("next: (.*)", output)[1])
    assert len(output_of(*command, "--max_new_tokens=5", cwd=tmp_path)) >= 5


def test_auto_is_chosen_again_on_another_machine(here, monkeypatch, train_here):
    """A dtype or a device that was given stays."""
    flags = ["--dataset=mine", *TINY, "--dtype=auto", "--out_dir=out/auto"]
    output_of("train.py", *flags, cwd=here)
    monkeypatch.setattr(train, "pick_dtype", lambda dtype, *a, **k: f"{dtype} bfloat16".split()[1])
    asked = []
    monkeypatch.setattr("gptling.processes.pick_device", lambda d: asked.append(d) or "cpu")
    monkeypatch.setattr("gptling.run.lock_directory", lambda directory: None)
    resume = ["--out_dir=out/auto", "--resume"]
    process = run_here("train.py", *resume, "--max_iters=22", cwd=here)
    assert b"cpu, bfloat16, from step 20\n" in process.stdout, process.stderr
    assert load_training_state(here / "out/auto/checkpoint-22")["config"]["dtype"] == "auto"
    run_here("train.py", *resume, "--max_iters=23", "--device=cpu", cwd=here)
    run_here("train.py", *resume, "--max_iters=24", cwd=here)
    assert asked == ["auto", "cpu", "cpu"]
