"""The loader of configurations."""

import re
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from config import UserError, load, read_preset
from prepare import PrepareConfig
from sample import SampleConfig
from tests.conftest import ROOT, output_of
from train import TrainConfig


@dataclass
class Example:
    width: int = 3  # how wide, in %
    rate: float = 0.5  # how fast
    name: str = "x"  # how called
    loud: bool = False  # whether loud
    mode: Literal["auto", True, False] = "auto"  # which
    stop: tuple[str, ...] = ()  # where to stop


def parse(*arguments, **options):
    return load(Example, "An example.", arguments, **options)


def test_defaults_then_presets_from_left_to_right_then_flags(tmp_path):
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text('width = 4\nrate = 1\nname = "a"\n')
    b.write_text('name = "b"\nloud = true\nmode = true\n')
    config, given = parse(str(a), str(b), "--width=9", "--rate", "1e-3")
    assert config == Example(9, 1e-3, "b", True, "True")
    assert given == {"width": 9, "rate": 1e-3}
    assert parse(str(b), str(a), "--name=c")[0].name == "c"
    assert parse()[0] == Example()
    assert parse(default_preset=a)[0].width == 4


def test_flags_have_the_types_of_their_fields():
    config, _ = parse("--loud", "--mode=false", "--stop=a", "--stop", "b", "--rate=2", "--name=7")
    assert (config.loud, config.mode, config.stop, config.rate) == (True, "False", ("a", "b"), 2.0)
    assert parse("--name", "x", "--loud", "--width=2")[0].loud
    assert config.name == "7" and type(config.rate) is float


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--widht=3"], "--widht: did you mean --width"),
        (["--width=3.5"], "'3.5' is not integer"),
        (["--width"], "--width"),
        (["--rate=fast"], "'fast' is not number"),
        (["--rate=nan"], "'nan' is not number"),
        (["--loud=maybe"], "'maybe' is not True|False"),
        (["--mode=9"], "'9' is not auto|True|False"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*arguments)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "content, message",
    [
        ("widht = 3", "unknown key widht: did you mean width?"),
        ("width = 3.5", "width = 3.5 is not integer"),
        ("width = true", "width = True is not integer"),
        ('rate = "fast"', "rate = 'fast' is not number"),
        ("rate = inf", "rate = inf is not number"),
        ("loud = 1", "loud = 1 is not True|False"),
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
    with pytest.raises(UserError, match=r"nix\.toml.*config/quickstart\.toml"):
        read_preset(Example, "config/nix.toml")


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


@pytest.mark.parametrize(
    "script, cls", [("prepare", PrepareConfig), ("train", TrainConfig), ("sample", SampleConfig)]
)
def test_help_shows_every_field_and_what_it_means(script, cls, tmp_path):
    text = " ".join(output_of(f"{script}.py", "--help", cwd=tmp_path, COLUMNS="200").split())
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    for field in fields(cls):
        assert f"--{field.name}" in text or f" {field.name.upper()}" in text
        comment = re.search(rf"^    {field.name}: .*?  # (.+)$", source, re.MULTILINE)[1]
        assert comment in text
