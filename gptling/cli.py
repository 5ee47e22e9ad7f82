"""The command line: flags from dataclass fields by tyro, presets, and errors of one line.

    @dataclass
    class SampleConfig:
        top_k: int = 200  # draw from the k likeliest tokens only; 0 for all

    config, given = load(SampleConfig, __doc__)

gives `--top_k 200`, `--top-k=200`, and the comment is its help. A preset is a flat TOML file of the
same keys, given before the flags. Defaults < presets from left to right < flags.
"""

import contextlib
import difflib
import importlib
import io
import math
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

CONFIG = Path(__file__).parent.parent / "config"
# What a number of a configuration may be besides finite and not negative: at least 1, below 1.
Count = Annotated[int, "at least 1"]
Share = Annotated[float, "below 1"]


class UserError(Exception):
    """A mistake of the user's: its message is one line with the value and the way out."""


def optional_package(name: str, install: str) -> ModuleType:
    """A package that not everybody has, imported where it is used. Raises UserError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{error}: pip install {install}") from None


def run(main: Callable[[], int | None]):
    """Run a script's main; a user's mistake becomes one line on standard error and exit code 1.

    SIGTERM ends it as Ctrl-C does, so that what is half-written is taken away."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    errors = {sys.stdin: "surrogateescape", sys.stdout: "replace", sys.stderr: "replace"}
    for stream, handling in errors.items():
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=handling)  # whatever the locale says
    try:
        _exit(main())
    except UserError as error:
        _fail(str(error), 1)
    except (MemoryError, RuntimeError) as error:  # PyTorch has RuntimeErrors for these
        words = "out of memory" if isinstance(error, MemoryError) else str(error)
        if re.search("out of memory|not enough memory|can't allocate memory", words):
            _fail("out of memory: a smaller batch, sequence or model takes less", 1)
        if re.search("Connection (closed|reset) by peer", words):
            _fail("another of the processes has ended; see what it wrote", 1)
        raise
    except BrokenPipeError:  # `sample.py | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # of a file: the system's own words
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message, code):
    """End with a line on standard error. Of several processes the first one speaks for all."""
    let_first_speak()
    print(f"{Path(sys.argv[0]).name}: error: {one_line(message)}", file=sys.stderr, flush=True)
    _exit(code)


def let_first_speak():
    """Give the first of several processes the time to say what is wrong: torchrun then ends this
    one meanwhile, unless the mistake is here alone."""
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)


def _exit(code):
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        os._exit(code or 0)  # gloo's threads can abort an exit through the interpreter
    sys.exit(code)


def one_line(message: str) -> str:
    """It without line breaks and control characters, which a file's name may hold."""
    text = " ".join(message.splitlines())
    text = text if len(text) < 1000 else f"{text[:500]} ... {text[-400:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def load(
    cls: type,
    description: str,
    argv: Sequence[str] | None = None,
    default_preset: Path | None = None,
) -> tuple[Any, dict[str, Any]]:
    """An instance of the dataclass `cls` from the command line, and the flags that were given.

    default_preset: the words before the first flag are presets, this one where there are none.
    Without it `cls` has a positional field of its own. A usage error exits with code 2."""
    words = sys.argv[1:] if argv is None else argv  # UTF-8, whatever the locale says
    argv = [os.fsencode(word).decode("utf-8", "surrogateescape") for word in words]
    hints, values = get_type_hints(cls), {}
    if default_preset:
        first = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
        presets, argv = argv[:first], argv[first:]
        for preset in presets or [default_preset]:
            values |= read_preset(cls, preset)
    names = [re.sub("=.*", "", word[2:]).replace("-", "_") for word in argv if word[:2] == "--"]
    default = cls()
    for name, value in values.items():  # checked together with the flags, which may mend them
        setattr(default, name, value)
    first = os.environ.get("RANK", "0") == "0"
    try:
        with contextlib.nullcontext() if first else contextlib.redirect_stderr(io.StringIO()):
            config = tyro.cli(
                cls,
                args=spell_out(argv, hints),
                prog=Path(sys.argv[0]).name,
                description=description.strip(),
                default=default,
                use_underscores=True,
                console_outputs=first,
                config=(tyro.conf.FlagConversionOff,),
            )
    except UserError as error:
        _fail(str(error), 2)
    except SystemExit as exit:
        if exit.code:
            let_first_speak()
        raise
    return config, {name: getattr(config, name) for name in names if name in hints}


def spell_out(argv: Sequence[str], hints: dict[str, Any]) -> list[str]:
    """The command line as tyro wants it: --resume is --resume=True, and true is True. An unknown
    flag stands apart from its value, so that tyro finds the one that it is like."""
    words, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        hint = hints.get(flag[2:].replace("-", "_")) if flag[:2] == "--" else str
        values = (True, False) if hint is bool else get_args(hint)
        choices = {str(choice).lower(): choice for choice in values}
        if hint is None:
            words += [flag, value] if equals else [flag]
        elif "true" not in choices:
            words.append(word)
        elif equals:
            words.append(f"{flag}={choices.get(value.lower(), value)}")
        else:
            following = rest.pop(0).lower() if rest and rest[0].lower() in choices else "true"
            words.append(f"{flag}={choices[following]}")
    return words


def check_numbers(config: Any):
    """Raises ValueError for a number among the fields of a dataclass that is negative or not
    finite, or not what Count and Share say."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value, rules = getattr(config, name), getattr(hint, "__metadata__", ())
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        lowest = 1 if "at least 1" in rules else 0
        highest = 1 if "below 1" in rules else math.inf if isinstance(value, float) else 2**63
        if not lowest <= value < highest:
            below = f" and below {highest}" if value >= highest else ""
            raise ValueError(f"--{name}={value}: must be at least {lowest}{below}")


def read_preset(cls: type, path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, checked against the fields of `cls`. Raises UserError."""
    path = Path(path)
    if path.suffix != ".toml":
        way_out = "a text goes through prepare.py first, a run through --out_dir and --resume"
        raise UserError(f"{path}: not a preset (a .toml file); {way_out}")
    try:
        if not path.exists() and (CONFIG.parent / path).exists():
            path = CONFIG.parent / path  # `config/gpt2.toml` from any directory
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        there = ", ".join(f"config/{file.name}" for file in sorted(CONFIG.glob("*.toml")))
        raise UserError(f"{path}: no such preset: there are {there}") from None
    except (OSError, ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise UserError(f"{path}: {error}") from None
    return {name: check(cls, name, value, str(path)) for name, value in values.items()}


def check(cls: type, name: str, value: Any, where: str) -> Any:
    """`value` as the type of the field `name`. Raises UserError, which names `where` it stood."""
    hints = get_type_hints(cls)
    if name not in hints:
        near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
        raise UserError(
            f"{where}: unknown key {name}" + "".join(f": did you mean {n}?" for n in near)
        )
    expected = hints[name]
    if get_origin(expected) is Literal:
        found = [choice for choice in get_args(expected) if str(choice) == str(value)]
        fits, value = bool(found), found[0] if found else value
    elif expected is float:
        fits = type(value) in (int, float) and abs(value) <= sys.float_info.max
        value = float(value) if fits else value
    else:
        fits = type(value) is expected
    if not fits:
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        words = names.get(expected) or " or ".join(map(str, get_args(expected)))
        raise UserError(f"{where}: {name} = {value!r:.50} is not {words}")
    return value
