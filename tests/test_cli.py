"""Flags, presets and the errors of both."""

import dataclasses
import re
import signal
from dataclasses import dataclass, fields
from typing import Literal

import pytest
import tyro

from gptling.cli import UserError, check_numbers, load, optional_package, read_preset, run
from prepare import PrepareConfig
from sample import SampleConfig
from tests.conftest import ROOT, output_of, run_script
from train import TrainConfig


@dataclass
class Example:
    width: int = 3  # how wide, in %
    line_width: float = 0.5  # how fat
    name: str = "x"  # how called
    loud: bool = False  # whether loud
    mode: Literal["auto", True, False] = "auto"  # which
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # where to stop

    def __post_init__(self):
        check_numbers(self)


def parse(*arguments, presets=False):
    return load(Example, "An example.", arguments, presets=presets)


def unboxed(error):
    """The words of a usage error: without tyro's box, and on one line."""
    return " ".join(re.sub("[─-╿]|-{9,}", " ", error).split())


@dataclass
class Derived:
    n_head: int = 12
    n_kv_head: int = 0  # 0 for n_head

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head


# ---------------------------------------------------------------------------- order


def test_a_value_that_is_derived_from_others_is_derived_at_last(tmp_path):
    (tmp_path / "small.toml").write_text("n_head = 8")
    assert load(Derived, "", ["--n_head=4"])[0] == Derived(4, 4)
    assert load(Derived, "", [str(tmp_path / "small.toml")], presets=True)[0] == Derived(8, 8)


@dataclass
class Various:
    windows: tuple[int, ...] = (8, 16)
    lengths: list[int] = dataclasses.field(default_factory=lambda: [1])
    cap: float | None = None


def test_a_field_may_be_a_list_or_nothing_in_presets_too(tmp_path):
    (tmp_path / "various.toml").write_text("windows = [4]\nlengths = [2, 3]\ncap = 1.5")
    assert load(Various, "", [], presets=True)[0] == Various()
    expected = Various((4,), [2, 3], 1.5)
    assert load(Various, "", [str(tmp_path / "various.toml")], presets=True)[0] == expected
    (tmp_path / "various.toml").write_text('cap = "much"')
    with pytest.raises(UserError, match="cap = 'much': expected"):
        load(Various, "", [str(tmp_path / "various.toml")], presets=True)


def test_what_is_derived_comes_with_the_value_before_but_for_flags(tmp_path):
    (tmp_path / "half.toml").write_text("n_kv_head = 4")
    assert load(Derived, "", ["--n_head=4"], presets=True)[3] == {"n_kv_head": 0}
    assert load(Derived, "", ["--n_kv_head=3"], presets=True)[3] == {}
    assert load(Derived, "", [str(tmp_path / "half.toml")], presets=True)[3] == {}


def test_defaults_then_presets_from_left_to_right_then_flags(tmp_path):
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text('width = 4\nline_width = 1\nname = "a"\n')
    b.write_text('name = "b"\nloud = true\nmode = true\n')
    flags = ["--width=9", "--line_width", "1e-3"]
    config, given, said, _ = parse(str(a), str(b), *flags, presets=True)
    assert config == Example(9, 1e-3, "b", True, True)
    assert given == {"width": 9, "line_width": 1e-3}
    assert said == {"width", "line_width", "name", "loud", "mode"}
    assert parse(str(a), str(b), presets=True)[2] == said, "of every preset"
    assert parse(str(b), str(a), "--name=c", presets=True)[0].name == "c"
    assert parse() == parse(presets=True) == (Example(), {}, set(), {})


def test_a_flag_mends_a_preset(tmp_path):
    (tmp_path / "a.toml").write_text("width = -4")
    preset = str(tmp_path / "a.toml")
    assert parse(preset, "--width=4", presets=True)[0].width == 4
    with pytest.raises(SystemExit):
        parse(preset, presets=True)


def test_a_preset_after_a_flag_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        parse("--loud", str(tmp_path / "a.toml"), presets=True)
    assert exit.value.code == 2 and "presets stand before the flags" in capsys.readouterr().err


# ---------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--width 4", {"width": 4}),
        ("--width=4", {"width": 4}),
        ("--line_width 2", {"line_width": 2.0}),
        ("--line-width=2", {"line_width": 2.0}),
        ("--line-width=2 --line_width=1e-3", {"line_width": 1e-3}),
        ("--name=7", {"name": "7"}),
        ("--name=--loud", {"name": "--loud"}),
        ("--name -", {"name": "-"}),
        ("--loud", {"loud": True}),
        ("--loud --width=4", {"loud": True, "width": 4}),
        ("--loud=True", {"loud": True}),
        ("--loud=false", {"loud": False}),
        ("--loud False", {"loud": False}),
        ("--loud true --width=4", {"loud": True, "width": 4}),
        ("--mode", {"mode": True}),
        ("--mode --loud", {"mode": True, "loud": True}),
        ("--mode=False", {"mode": False}),
        ("--mode=true", {"mode": True}),
        ("--mode auto", {"mode": "auto"}),
        ("--stop=a --stop b", {"stop": ("a", "b")}),
    ],
)
def test_flags_have_the_types_of_their_fields(arguments, expected):
    config, given, *_ = parse(*arguments.split())
    assert given == expected and config == Example(**expected)
    assert all(type(given[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--resume", {"resume": True}),
        ("--resume=True", {"resume": True}),
        ("--resume=False", {"resume": False}),
        ("--n_layer 3", {"n_layer": 3}),
        ("--n-layer=3", {"n_layer": 3}),
        ("--bias=False", {"bias": False}),
        ("--compile", {"compile": True}),
        ("--compile=False", {"compile": False}),
        ("--compile auto", {"compile": "auto"}),
    ],
)
def test_flags_of_train_py(arguments, expected):
    config, given, *_ = load(TrainConfig, "", arguments.split(), presets=True)
    assert given == expected
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_text_or_a_run_stands_before_or_after_the_flags():
    for words in (["a.txt", "b", "--name=c"], ["--name=c", "a.txt", "b"]):
        assert load(PrepareConfig, "", words)[0] == PrepareConfig(("a.txt", "b"), name="c")
    for words in (["gpt2", "--interactive"], ["--interactive", "gpt2"]):
        assert load(SampleConfig, "", words)[0] == SampleConfig("gpt2", interactive=True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--widht=3"], "--widht, 3 Perhaps you meant: --width INT"),
        (["--lime-width", "3"], "Perhaps you meant: --line_width FLOAT"),
        (["--width=3.5"], "--width: invalid literal for int() with base 10: '3.5'"),
        (["--width"], "Missing value for argument '--width'"),
        (["--line_width=fat"], "--line_width: could not convert string to float: 'fat'"),
        (["--line_width=nan"], "--line_width=nan: must be at least 0"),
        (["--line_width=inf"], "--line_width=inf: must be at least 0"),
        (["--width=-1"], "--width=-1: must be at least 0"),
        (["--loud=maybe"], "'maybe' for argument '--loud'. Expected one of ('True', 'False')"),
        (["--mode=9"], "'9' for argument '--mode'. Expected one of ('auto', 'True', 'False')"),
        (["word"], "Unrecognized options: word"),
    ],
)
def test_a_wrong_flag_is_a_box_of_a_few_lines_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*arguments)
    output, error = capsys.readouterr()
    assert exit.value.code == 2 and message in unboxed(error) and not output
    assert error.count("\n") <= 12 and "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--width=wide"], ["--widht=3"], ["--width=-1"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_one_speaks(rank, arguments, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as exit:
        parse(*arguments)
    assert exit.value.code == 2 and bool(capsys.readouterr().err) == (rank == 0)


# ---------------------------------------------------------------------------- presets


@pytest.mark.parametrize(
    "content, message",
    [
        ("widht = 3", "unknown key widht: did you mean width?"),
        ("width = 3.5", "width = 3.5: expected int"),
        ("width = true", "width = True: expected int"),
        ('line_width = "fat"', "line_width = 'fat': expected float"),
        ("line_width = inf", "line_width = inf: expected float"),
        ("line_width = nan", "line_width = nan: expected float"),
        ("loud = 1", "loud = 1: expected bool"),
        ("name = 1", "name = 1: expected str"),
        ("mode = 9", "mode = 9: expected auto or True or False"),
        ("width = = 1", "line 1"),
        ("[table]\nwidth = 1", "unknown key table"),
    ],
)
def test_a_wrong_preset_is_one_line_that_names_the_file(tmp_path, content, message):
    (tmp_path / "wrong.toml").write_text(content)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_preset(Example, tmp_path / "wrong.toml")
    assert "wrong.toml" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_preset_lists_those_there_are():
    with pytest.raises(UserError, match=r"nix\.toml.*config/gpt2\.toml"):
        read_preset(Example, "config/nix.toml")


def test_presets_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_preset(TrainConfig, "config/gpt2.toml")["dataset"] == "webtext"


@pytest.mark.parametrize("preset", sorted((ROOT / "config").glob("*.toml")), ids=lambda p: p.stem)
def test_every_preset_is_valid(preset):
    TrainConfig(**read_preset(TrainConfig, preset))


@pytest.mark.parametrize(
    "preset, parameters",
    [
        ("shakespeare_char", 10.7),
        ("shakespeare_char_cpu", 0.8),
        ("shakespeare_char_cpu_adamw", 0.8),
        ("gpt2", 124),
    ],
)
def test_presets_have_the_sizes_they_name(preset, parameters):
    c = TrainConfig(**read_preset(TrainConfig, ROOT / "config" / f"{preset}.toml"))
    n = 12 * c.n_layer * c.n_embd**2 + c.n_embd * (50257 if preset == "gpt2" else 65)
    assert n / 1e6 == pytest.approx(parameters, rel=0.02)


# ---------------------------------------------------------------------------- errors


def ending(error, capsys):
    """Exit code and standard error of a script that raises `error`."""

    def main():
        raise error

    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as exit:
            run(main)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return exit.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, named",
    [
        (UserError("data/x is not there"), 1, "error: data/x is not there\n"),
        (UserError("two\nlines, \x1b[31mred"), 1, "error: two lines, \\x1b[31mred\n"),
        (UserError("x" * 5000), 1, "x ... x"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 8 bytes"), 1, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), 1, "out of memory"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_script_ends_with_one_line(error, code, named, capsys):
    found, text = ending(error, capsys)
    assert found == code and named in text and text.count("\n") == (code == 1)
    assert text.replace("\n", "").isprintable() and len(text) < 1100


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), OSError("a bug")])
def test_a_bug_keeps_its_traceback(error, capsys):
    with pytest.raises(type(error), match="a bug"):
        ending(error, capsys)


def test_the_first_of_several_processes_has_time_to_speak(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert ending(UserError("mine"), capsys)[0] == 1 and not waited
    monkeypatch.setenv("RANK", "1")
    assert "mine" in ending(UserError("mine"), capsys)[1] and waited == [5]


def test_a_package_that_is_missing_is_named_with_the_remedy():
    assert optional_package("json", "nothing").loads("1") == 1
    with pytest.raises(UserError, match=r"No module named 'no_such'.*: pip install something$"):
        optional_package("no_such", "something")


# ---------------------------------------------------------------------------- help


@pytest.mark.parametrize(
    "script, cls", [("prepare", PrepareConfig), ("train", TrainConfig), ("sample", SampleConfig)]
)
def test_help_shows_what_a_script_does_and_every_field_with_its_comment(script, cls, capsys):
    source = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in (f"{script}.py", "model.py")
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setenv("COLUMNS", "200")
        load(cls, __import__(script).__doc__, ["--help"])
    text = unboxed(capsys.readouterr().out)
    assert exit.value.code == 0 and text.count(f"python {script}.py") >= 3
    for field in fields(cls):
        at = re.search(
            rf"^(?:    # (.+)\n)?    {field.name}: .*?(?:  # (.+))?$", source, re.MULTILINE
        )
        assert " ".join((at[2] or at[1]).split()) in text or field.name == "vocab_size"
        positional = field.name in ("sources", "run")
        hidden = field.name == "vocab_size" and cls is TrainConfig  # as the tokenizer says
        assert (f"--{field.name}" in text) != (positional or hidden)


def test_scripts_that_are_run_say_the_same(tmp_path):
    assert "--learning_rate" in output_of("train.py", "--help", cwd=tmp_path)
    process = run_script("train.py", "--learing_rate=1", cwd=tmp_path)
    error = process.stderr.decode("utf-8")
    assert process.returncode == 2 and "Perhaps you meant: --learning_rate" in unboxed(error)
    assert not process.stdout and "Traceback" not in error and not list(tmp_path.iterdir())
