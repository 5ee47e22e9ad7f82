"""What people do with runs from day to day: other data, other machines, presets, names, Ctrl-C."""

import json
import re
import shlex
import shutil
import sys
import tomllib
from dataclasses import asdict, fields

import pytest
import torch
from safetensors.torch import load_file

import sample
import train
from gptling.checkpoints import Progress, best_checkpoint, list_checkpoints, load_training_state
from gptling.cli import CONFIG, UserError, load
from gptling.tokenizers import build_tokenizer, load_tokenizer
from tests.conftest import TEXT, TINY, output_of, run_here, run_script
from train import TrainConfig


@pytest.fixture
def here(trained, tmp_path):
    """A directory with data/mine and the run out/mine."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def one_line(process, *words):
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    return error


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").split("\n")[:-1]]


# ---------------------------------------------------------------- other texts


def test_text_with_a_token_that_the_model_lacks_is_refused_with_the_way_out(tmp_path):
    """A model of 256 bytes, of one file; data of two files have end-of-text besides."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT)
    output_of("prepare.py", "a.txt", "--tokenizer=byte", cwd=tmp_path)
    output_of("prepare.py", "a.txt", "b.txt", "--tokenizer=byte", "--name=both", cwd=tmp_path)
    output_of("prepare.py", "b.txt", "--tokenizer=byte", cwd=tmp_path)
    output_of("train.py", "--dataset=a", *TINY, "--max_iters=2", cwd=tmp_path)
    for command in ("--eval_only --init_from=out/a", "--init_from=out/a --out_dir=out/new"):
        flags = [*TINY, "--max_iters=2", *command.split()]
        process = run_here("train.py", "--dataset=both", *flags, cwd=tmp_path)
        way_out = "prepare that text with --tokenizer=out/a/checkpoint-2"
        one_line(process, "another tokenizer", "data/both", way_out)
    padded = ["--vocab_multiple=300", "--out_dir=out/padded", "--max_iters=2"]  # has room for it
    output_of("train.py", "--dataset=b", *TINY, *padded, cwd=tmp_path)
    flags = ["--eval_only", "--init_from=out/padded", "--dataset=both"]
    one_line(run_here("train.py", *flags, cwd=tmp_path), "another tokenizer")
    more = ["--tokenizer=out/a/checkpoint-2", "--overwrite", "--name=both"]
    output_of("prepare.py", "a.txt", "b.txt", *more, cwd=tmp_path)
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
    one_line(process, "'ü'", "U+00FC", "out/mine", "a bottle on ü")
    assert not (here / "data/new").exists() and not (here / "data/.new.partial").exists()


def test_a_tokenizer_is_named_by_a_run_a_checkpoint_or_a_hub_name(here, gpt2_encoding, monkeypatch):
    monkeypatch.chdir(here)
    expected = load_tokenizer(here / "data/mine")._mergeable_ranks
    monkeypatch.setenv("HOME", str(here))
    for name in ("out/mine", "out/mine/checkpoint-20", "data/mine", "~/out/mine"):
        assert load_tokenizer(name)._mergeable_ranks == expected
        assert build_tokenizer(name, [TEXT])._mergeable_ranks == expected
    for name in ("gpt2", "openai-community/gpt2", "distilgpt2", "gpt2-xl"):
        assert build_tokenizer(name)._mergeable_ranks == gpt2_encoding._mergeable_ranks


def test_a_data_set_that_was_renamed_goes_on(here):
    (here / "data/mine").rename(here / "data/better name")
    resume = ["--out_dir=out/mine", "--resume", "--max_iters=22"]
    one_line(run_script("train.py", *resume, cwd=here), "data/mine is not there")
    output = output_of("train.py", *resume, "--dataset=better name", cwd=here)
    assert "dataset: better name from now on; it was mine" in output and "step 22/22" in output
    (here / "other.txt").write_text(TEXT[::-1])
    output_of("prepare.py", "other.txt", cwd=here)
    resume = ["--out_dir=out/mine", "--resume", "--max_iters=24", "--dataset=other"]
    process = run_here("train.py", *resume, cwd=here)
    one_line(process, "data/other is not what out/mine was trained on")


def test_a_mistyped_data_set_suggests_the_nearest(here):
    for name in ("mail", "shakespeare", "books", "news", "web"):
        shutil.copytree(here / "data/mine", here / "data" / name)
    error = one_line(run_here("train.py", "--dataset=shakespear", cwd=here), "=shakespeare")
    assert "books" not in error and "news" not in error


def test_directories_of_data_that_hold_none_are_told_apart(here):
    """An empty one is no hindrance; one with files is not taken for prepared data."""
    (here / "data/quickstart").mkdir()
    assert "step 2/2" in output_of("train.py", *TINY, "--max_iters=2", cwd=here)
    (here / "data/notes").mkdir()
    (here / "data/notes/a.txt").write_text("mine")
    process = run_here("train.py", "--dataset=notes", *TINY, cwd=here)
    one_line(process, "data/notes has no meta.json", "another --name")
    process = run_here("prepare.py", "mine.txt", "--name=notes", cwd=here)
    one_line(process, "data/notes is there", "--overwrite")
    process = run_here("prepare.py", "data/notes", "--overwrite", cwd=here)
    one_line(process, "data/notes/a.txt lies in data/notes", "another --name")
    assert (here / "data/notes/a.txt").read_text() == "mine"
    (here / "data/quickstart").rename(here / "away")
    (here / "data/notes").rename(here / "data/quickstart")
    process = run_here("train.py", *TINY, "--out_dir=out/other", cwd=here)
    one_line(process, "data/quickstart has no meta.json", "another --name")


@pytest.mark.parametrize("characters", [1, 10, 19])
def test_a_text_that_is_too_short_to_train_on_is_refused_by_prepare(characters, tmp_path):
    (tmp_path / "short.txt").write_text("abcdefghijklmnopqrst"[:characters])
    process = run_here("prepare.py", "short.txt", cwd=tmp_path)
    one_line(process, "data/short", f"{characters} characters are too few")
    assert not (tmp_path / "data/short").exists()


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


# ---------------------------------------------------------------- runs that go on


def test_what_cannot_change_is_refused(here):
    flags = ["--out_dir=out/mine", "--resume", "--vocab_multiple=128", "--max_iters=30"]
    one_line(run_script("train.py", *flags, cwd=here), "--vocab_multiple=128", "leave")
    padded = ["--vocab_multiple=128", "--out_dir=out/padded", "--max_iters=2", "--n_layer=1"]
    output_of("train.py", "--dataset=mine", *padded, cwd=here)
    before = (here / "out/padded/config.toml").read_text()
    for n in (3, 4):
        flags = ["--out_dir=out/padded", "--resume", "--vocab_multiple=128", f"--max_iters={n}"]
        output_of("train.py", *flags, cwd=here)
    after = (here / "out/padded/config.toml").read_text()
    assert after == before.replace("max_iters = 2", "max_iters = 4")


def test_a_model_with_biases_is_another(here):
    """The state of its optimizers would be that of other parameters, which ended in a crash."""
    resume = ["--out_dir=out/mine", "--resume", "--max_iters=22"]
    bias = tomllib.loads((here / "out/mine/config.toml").read_text())["bias"]
    one_line(run_script("train.py", *resume, f"--bias={not bias}", cwd=here), f"--bias={not bias}")


def test_what_others_have_put_into_a_run_is_no_hindrance(here):
    """A folder that is called like a checkpoint, and lines in the log."""
    run = here / "out/mine"
    (run / "checkpoint-22").mkdir()
    (run / "checkpoint-22" / "config.json").write_text("{}")
    (run / "damaged-checkpoint-22").mkdir()  # of an earlier time
    (run / "damaged-checkpoint-22" / "older").touch()
    shutil.copytree(run / "checkpoint-20", run / "checkpoint-best")
    with (run / "log.jsonl").open("a") as file:
        file.write('\n{"note": "mine"}\n[1]\n{"step": 20, "cut')
    output_of("train.py", "--out_dir=out/mine", "--resume", "--max_iters=22", cwd=here)
    assert (run / "damaged-checkpoint-22/config.json").exists()
    assert list_checkpoints(run)[-1].name == "checkpoint-22"
    assert [entry["step"] for entry in log_of(run)] == sorted(e["step"] for e in log_of(run))


def test_losses_over_other_tokens_are_not_compared(tmp_path):
    """A few tokens that happen to be easy are not the best of a run; of an old run without a number
    the losses are taken as they are."""
    progress = Progress(best=0.1, val_tokens=16)
    found = [progress.is_best(loss, 700) for loss in (2.0, 2.1, 1.9)]
    assert found == [True, False, True] and progress.best == 1.9
    assert not Progress(best=0.1).is_best(2.0, 700)
    for step, loss, tokens in ((10, 0.1, 16), (20, 2.0, 700), (30, 2.1, 700), (40, None, None)):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        metrics = {"step": step, "val_loss": loss, "val_tokens": tokens}
        if loss is None:
            metrics = {"step": step}
        (path / "metrics.json").write_text(json.dumps(metrics))
    assert best_checkpoint(tmp_path).name == "checkpoint-20"
    (tmp_path / "checkpoint-10/metrics.json").write_text('{"step": 10, "val_loss": 0.1}')
    assert best_checkpoint(tmp_path).name == "checkpoint-10"


def test_auto_is_chosen_anew_on_another_machine_and_said(here, monkeypatch, train_here):
    """What was given stays: another dtype, another device."""
    state = load_training_state(here / "out/mine/checkpoint-20")
    assert (state["config"]["device"], state["config"]["dtype"]) == ("auto", "float32")
    flags = ["--dataset=mine", *TINY, "--dtype=auto", "--out_dir=out/auto"]
    output_of("train.py", *flags, cwd=here)
    state = load_training_state(here / "out/auto/checkpoint-20")
    assert (state["config"]["device"], state["config"]["dtype"]) == ("auto", "auto")
    monkeypatch.setattr(train, "pick_dtype", lambda *a, **k: "bfloat16")
    asked = []
    monkeypatch.setattr("gptling.processes.pick_device", lambda d: asked.append(d) or "cpu")
    flags = ["--out_dir=out/auto", "--resume", "--curves=False"]
    process = run_here("train.py", *flags, "--max_iters=22", cwd=here)
    assert b"cpu, bfloat16, from step 20 (before that cpu, float32)\n" in process.stdout
    assert load_training_state(here / "out/auto/checkpoint-22")["config"]["dtype"] == "auto"
    run_here("train.py", *flags, "--max_iters=23", "--device=cpu", cwd=here)
    process = run_here("train.py", *flags, "--max_iters=24", cwd=here)
    assert asked == ["auto", "cpu", "cpu"]
    assert b"cpu, bfloat16, from step 23\n" in process.stdout


@pytest.mark.parametrize(
    "error", ["no wandb", "other tokenizer", "a loss that is not finite", "what it trains on"]
)
def test_the_old_run_stays_until_the_new_one_has_done_a_step(error, here, monkeypatch, train_here):
    """Whatever the start fails by."""
    run = here / "out/mine"
    before = {path: path.read_bytes() for path in run.rglob("*.*t*") if path.is_file()}
    flags = ["--dataset=mine", *TINY, "--overwrite"]
    if error == "no wandb":
        monkeypatch.setitem(sys.modules, "wandb", None)
        flags += ["--wandb"]
    elif error == "what it trains on":
        flags += ["--init_from=out/mine/checkpoint-20"]
    elif error == "other tokenizer":
        (here / "other.txt").write_text("something else, of other letters; " * 100)
        output_of("prepare.py", "other.txt", cwd=here)
        shutil.copytree(run, here / "out/start")
        flags += ["--init_from=out/start", "--dataset=other", "--out_dir=out/mine"]
    else:
        pytest.importorskip("tensorboard", reason="TensorBoard's files: pip install tensorboard")
        flags += ["--curves=True"]

        def nan(output):
            return output[1], {"loss": output[1] * torch.nan}

        monkeypatch.setattr(train, "objective_and_parts", nan)
    process = run_here("train.py", *flags, cwd=here)
    assert process.returncode == 1, process.stderr
    assert before == {path: path.read_bytes() for path in run.rglob("*.*t*") if path.is_file()}


def test_the_old_run_is_gone_once_the_new_one_has_done_a_step(here, monkeypatch, train_here):
    """With its log, before anything of the new one is written; a crash leaves no mixture."""

    def crash(*arguments):
        raise UserError("the machine crashed")

    monkeypatch.setattr(train, "evaluate", crash)
    flags = ["--dataset=mine", *TINY, "--overwrite", "--log_interval=1"]
    run_here("train.py", *flags, cwd=here)
    run = here / "out/mine"
    assert list_checkpoints(run) == [] and [e["step"] for e in log_of(run)] == list(range(1, 11))


# ---------------------------------------------------------------- which checkpoint


# ---------------------------------------------------------------- settings that can be read


def test_the_settings_of_a_run_are_a_preset_that_repeats_it(here):
    """As it lies, with another out_dir; names that are not ASCII too."""
    (here / "data/mine").rename(here / "data/grüße")
    flags = ["--dataset=grüße", *TINY, "--dropout=0.1", "--optimizer=muon", "--out_dir=out/a"]
    output_of("train.py", *flags, cwd=here)
    text = (here / "out/a/config.toml").read_text(encoding="utf-8")
    assert 'dataset = "grüße"' in text and "learning_rate = 0.01\n" in text
    output_of("train.py", "out/a/config.toml", "--out_dir=out/b", cwd=here)
    assert (here / "out/b/config.toml").read_text(encoding="utf-8") == text
    a, b = (load_file(here / f"out/{n}/checkpoint-20/model.safetensors") for n in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    once = {"resume", "overwrite", "eval_only", "allow_changed_data", "allow_changed_model"}
    once |= {"minutes"}
    expected = {field.name for field in fields(TrainConfig)} - once - {"out_dir", "vocab_size"}
    assert set(tomllib.loads(text)) == expected
    output_of("train.py", "--out_dir=out/b", "--resume", "--max_iters=22", cwd=here)
    assert tomllib.loads((here / "out/b/config.toml").read_text("utf-8"))["max_iters"] == 22


def test_the_log_has_seconds_since_the_start_and_text_as_it_is(tmp_path):
    """Over a resumed run's sessions too."""
    (tmp_path / "grüße.txt").write_text("äöü ß\u2028 " * 400, encoding="utf-8")
    output_of("prepare.py", "grüße.txt", cwd=tmp_path)
    flags = [*TINY, "--log_interval=1", "--curves=False"]
    output_of("train.py", "--dataset=grüße", *flags, cwd=tmp_path)
    run = tmp_path / "out/grüße"
    first = log_of(run)
    output_of("train.py", "--out_dir=out/grüße", "--resume", "--max_iters=25", cwd=tmp_path)
    seconds = [entry["seconds"] for entry in log_of(run)]
    assert len(seconds) > len(first) and seconds == sorted(seconds) and 0 < seconds[0] < 60
    assert "\\u" not in (run / "log.jsonl").read_text("utf-8")
    n = json.loads((tmp_path / "data/grüße/meta.json").read_text())["val"]["tokens"]
    assert {entry["val_tokens"] for entry in first if "val_loss" in entry} == {n - 1}


# ---------------------------------------------------------------- the command line


def test_what_a_preset_does_not_say_is_the_quick_starts(tmp_path):
    """As where there are flags alone."""
    (tmp_path / "mine.toml").write_text('dataset = "mine"\nmax_iters = 7\n')
    preset, *_ = load(TrainConfig, "", [str(tmp_path / "mine.toml")], presets=True)
    flags, *_ = load(TrainConfig, "", ["--dataset=mine", "--max_iters=7"], presets=True)
    assert asdict(preset) == asdict(flags) and preset.n_embd == 128


@pytest.mark.parametrize("preset", sorted(CONFIG.glob("*.toml")), ids=lambda path: path.name)
def test_presets_say_the_model_the_steps_and_the_rates(preset):
    """So that no recipe changes with the quick start."""
    ours = tomllib.loads(preset.read_text())
    needed = {"dataset", "block_size", "batch_size", "n_layer", "n_head", "n_embd", "bias"}
    needed |= {"optimizer", "learning_rate", "muon_lr", "muon_momentum", "schedule", "min_lr"}
    needed |= {"warmup_iters", "beta2", "max_iters", "eval_interval"}
    if ours.get("init_from"):
        needed -= {"n_layer", "n_head", "n_embd", "bias"}  # the model's own
    if ours.get("optimizer") == "adamw":
        needed -= {"muon_lr", "muon_momentum"}
    assert needed <= set(ours), needed - set(ours)


@pytest.mark.parametrize(
    "script, flag, named",
    [
        ("train.py", "--lr=1e-3", "--learning_rate"),
        ("train.py", "--lr", "--learning_rate"),
        ("train.py", "--steps=5", "--max_iters"),
        ("sample.py", "--start=To be", "--prompt"),
        ("train.py", "--max_iters=5 config/gpt2.toml", "presets stand before the flags"),
        ("train.py", "--resume config/gpt2.toml", "presets stand before the flags"),
    ],
)
def test_names_and_orders_of_other_programs_are_told_apart(script, flag, named, here):
    process = run_here(script, *flag.split(" "), cwd=here)
    error = process.stderr.decode()
    assert process.returncode == 2 and error.count("\n") == 1 and named in error


def test_a_file_may_end_in_toml_as_the_value_of_a_flag(here):
    process = run_here("train.py", "--out_dir", "a.toml", "--dataset", "nix.toml", cwd=here)
    one_line(process, "data/nix.toml is not there")


def test_errors_of_python_are_put_in_words(here):
    (here / "a.jsonl").write_text('{"txt": "b"}\n')
    tokenizer = here / "data/mine/tokenizer.json"
    tokenizer.write_text('{"model": {}}')
    for command, words in (
        ("prepare.py a.jsonl", "'text' is missing"),
        ("train.py --dataset=mine --out_dir=out/new", "'pre_tokenizer' is missing"),
    ):
        script, *arguments = command.split()
        error = one_line(run_here(script, *arguments, cwd=here), words)
        assert not re.search(r"Error\(|Traceback", error)


def test_ctrl_c_ends_a_text_and_not_the_conversation(trained, monkeypatch):
    """A second prompt is completed after it."""
    whole = sample.write_samples

    def interrupted(model, tokenizer, prompts, config):
        if prompts == ["12 green"]:
            model.new_cache = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # in its first call
        else:
            vars(model).pop("new_cache", None)
        return whole(model, tokenizer, prompts, config)

    monkeypatch.setattr(sample, "write_samples", interrupted)
    arguments = ["out/mine", "--interactive", "--max_new_tokens=3"]
    process = run_here("sample.py", *arguments, cwd=trained, stdin="12 green\n7 green\n\n")
    assert process.returncode == 0 and b"\n7 green" in b"\n" + process.stdout.split(b"12 green")[1]
