"""Flags, presets, and how a script ends."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Literal

import pytest
import tyro

from gptling.cli import CONFIG, UserError, launch, load_config
from gptling.compare import CompareConfig
from gptling.run import load_training_state
from prepare import PrepareConfig
from sample import SampleConfig
from tests.scripts import MINE, ROOT, one_line, output_of, run_here, run_script
from train import TrainConfig


@dataclass
class Example:
    width: int = 3  # how wide, in %
    line_width: float = 0.5  # how fat
    name: str = "x"  # how called
    loud: bool = False  # whether loud
    curves: bool = True  # whether drawn
    mode: Literal["auto", True, False] = "auto"  # which
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # where to stop


def parse(*arguments):
    return load_config(Example, "An example.", list(arguments), presets=True)


def test_defaults_then_presets_from_left_to_right_then_flags(tmp_path):
    a, b = str(tmp_path / "a.toml"), str(tmp_path / "b.toml")
    (tmp_path / "a.toml").write_text('\ufeffwidth = 4\nline_width = 1\nname = "a"\ncurves = true\n')
    (tmp_path / "b.toml").write_text('name = "b c=d"\nloud = true\nmode = true\ncurves = false\n')
    config, given = parse(a, b, "--width=9", "--line_width", "1e-3")
    assert config == Example(9, 1e-3, "b c=d", loud=True, curves=False, mode=True)
    said = dict(line_width=1e-3, width=9, curves=False, mode=True, loud=True, name="b c=d")
    assert list(given.items()) == list(said.items()), "the last word first"
    assert parse(b, a, "--name=c", "--no-loud")[0] == Example(4, 1.0, "c", mode=True)
    assert parse() == (Example(), {})


GIVEN = [("--width 4", {"width": 4}), ("--name=--loud", {"name": "--loud"})]
GIVEN += [("--line-width=2 --line_width=1e-3", {"line_width": 1e-3})]  # the last one
LOUD = ("--loud=True --curves=False", "--loud --no-curves", "--loud True --no_curves")
GIVEN += [(flags, {"loud": True, "curves": False}) for flags in LOUD]
GIVEN += [("--loud False --curves True", {"loud": False, "curves": True})]
GIVEN += [("--mode=False --name True --width 1", {"mode": False, "name": "True", "width": 1})]
GIVEN += [("--mode True --name a=b", {"mode": True, "name": "a=b"})]
GIVEN += [("--mode auto", {"mode": "auto"}), ("--stop=a --stop b", {"stop": ("a", "b")})]


@pytest.mark.parametrize("arguments, expected", GIVEN)
def test_flags_have_the_types_of_their_fields(arguments, expected):
    config, given = parse(*arguments.split())
    assert given == expected and config == Example(**expected)
    assert all(type(given[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize("preset", sorted(file.stem for file in CONFIG.glob("*.toml")))
def test_presets_are_found_anywhere_and_say_sizes_steps_and_rates(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    c, given = load_config(TrainConfig, "", [f"config/{preset}.toml"], presets=True)
    needed = "dataset block_size batch_size optimizer learning_rate schedule min_lr warmup_iters "
    needed += "beta2 max_iters eval_interval "  # so that no recipe changes with the quick start
    needed += "n_layer n_head n_embd bias " * (c.init_from == "scratch")  # otherwise the model's
    needed += "muon_lr muon_momentum" * (c.optimizer == "muon")
    assert set(needed.split()) <= given.keys()
    (tmp_path / "config").mkdir()
    (tmp_path / f"config/{preset}.toml").write_text("max_iters = 7")
    _, given = load_config(TrainConfig, "", [f"config/{preset}.toml"], presets=True)
    assert given == {"max_iters": 7}, "a file of the user's own comes first"


@pytest.mark.parametrize(
    "error, code, named",
    [
        (UserError("two\nlines"), 1, "train.py: error: two lines\n"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 8 bytes"), 1, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "out of memory"),
        (ModuleNotFoundError("No module named 'wandb'"), 1, ": error: No module named 'wandb'\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 1, "No such file: 'a.txt'\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device"), 1, "the disk is full"),
        (RuntimeError("a bug"), 0, ""),
        (OSError("a bug"), 0, ""),
    ],
)
def test_a_mistake_ends_in_a_line_a_bug_in_a_traceback(error, code, named, monkeypatch, capsys):
    def main():
        raise error

    monkeypatch.setattr("sys.argv", ["dir/train.py"])
    with pytest.raises(SystemExit if code else type(error)) as ended:
        launch(main)
    text = capsys.readouterr().err
    assert ended.value is error or ended.value.code == code
    assert named in text and text.count("\n") == (code == 1)


@pytest.mark.parametrize("needs_reader, code", [(True, 1), (False, 7)])
def test_a_reader_who_has_had_enough_ends_a_text_but_no_work(needs_reader, code):
    """In silence."""
    main = "lambda: print('ü' * 1_000_000) or print('more') or 7"
    command = f"from gptling.cli import launch; launch({main}, needs_reader={needs_reader})"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    with subprocess.Popen([sys.executable, "-c", command], cwd=ROOT, **streams) as process:
        assert process.stdout.read(2).decode() == "ü"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == code


@pytest.mark.slow
def test_train_py_may_come_through_a_pipe(here):
    command = [sys.executable, "-", *MINE]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    script = (ROOT / "train.py").read_bytes()
    subprocess.run(command, input=script, cwd=here, env=environment, check=True)
    checkpoint = here / "out/mine/checkpoint-20"
    assert (checkpoint / "model.py").is_file() and not (checkpoint / "train.py").exists()


@pytest.mark.parametrize(
    "file, cls, usage",
    [
        ("prepare.py", PrepareConfig, "prepare.py [-h] [OPTIONS] [SOURCES]"),
        ("train.py", TrainConfig, "train.py [-h] [OPTIONS]"),
        ("sample.py", SampleConfig, "sample.py [-h] [OPTIONS] [MODEL]"),
        ("gptling/compare.py", CompareConfig, "gptling/compare.py [-h] [PATCHES] "),
    ],
)
def test_help_says_what_a_script_and_each_field_do(file, cls, usage, monkeypatch, capsys):
    source = "".join((ROOT / name).read_text("utf-8") for name in (file, "model.py"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", [file])
    with pytest.raises(SystemExit) as exit:
        load_config(cls, sys.modules[cls.__module__].__doc__, ["--help"])
    text = " ".join(re.sub("[─-╿]|-{9,}", " ", capsys.readouterr().out).split())
    assert exit.value.code == 0 and text.startswith(f"usage: {usage}")
    assert text.count(f"python {file}") >= 3 or text.count("python -m gptling.compare") >= 3
    assert "None" not in text, "what is planned has no default"
    for field in fields(cls):
        line = rf"^(?:    # (.+)\n)?    {field.name}: .*?(?:  # (.+))?$"
        at = re.search(line, source, re.MULTILINE)
        hidden = cls is TrainConfig and field.name in ("vocab_size", "models_before")
        assert hidden or " ".join((at[2] or at[1]).split()) in text
        positional = f"[{field.name.upper()}]" in usage
        assert (f"--{field.name}" in text) != (hidden or positional)


@pytest.mark.parametrize("name, missing", [("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")])
def test_a_part_of_torchruns_environment_is_one_line(name, missing, here):
    process = run_script("train.py", *MINE, cwd=here, **{name: "2"})
    one_line(process, f"environment variable {missing} expected", "torchrun")


def test_auto_is_chosen_again_on_another_machine(here, monkeypatch):
    flags = [*MINE, "--dtype=auto", "--out_dir=out/auto"]
    output_of("train.py", *flags, cwd=here)
    other = lambda dtype, *a, **k: f"{dtype} bfloat16".split()[1]  # noqa: E731
    monkeypatch.setattr("gptling.devices.pick_dtype", other)
    resume = ["--out_dir=out/auto", "--resume", "--max_iters=22"]
    process = run_here("train.py", *resume, cwd=here)
    assert b"cpu, bfloat16, from step 20\n" in process.stdout, process.stderr
    config = load_training_state(here / "out/auto/checkpoint-22")["config"]
    assert config["dtype"] == config["device"] == "auto"
