"""The command line: flags from dataclass fields by tyro, presets, and errors of one line.

A field `top_k: int = 200  # help` is the flag `--top_k 200` or `--top-k=200`. A preset is a flat
TOML file of the same keys, before the flags. Defaults < presets from left to right < flags.
"""

import dataclasses
import difflib
import gc
import importlib
import io
import itertools
import math
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

CONFIG = Path(__file__).parent.parent / "config"
# What a number of a configuration may be besides finite and not negative: at least 1, below 1.
PositiveInt = Annotated[int, "at least 1"]
Fraction = Annotated[float, "below 1"]
OTHER_NAMES = {"lr": "learning_rate", "steps": "max_iters", "start": "prompt"}  # of other programs


class UserError(Exception):
    """A mistake of the user's: its message is one line with the value and the way out."""


def in_words(error: Exception) -> str:
    """The message of one of Python's errors as a plain sentence."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return " ".join(str(error).split()) or type(error).__name__


def is_main() -> bool:
    """Whether this is the first process, which speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def optional_package(name: str, install: str) -> ModuleType:
    """A package that not everybody has, imported where it is used. Raises UserError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{error}: pip install {install}") from None


def run(main: Callable[[], int | None]):
    """Run a script's main; a user's mistake becomes one line on standard error and exit code 1."""
    gc.freeze()  # what is imported by now, PyTorch above all, is no garbage to be looked for
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # clean up first
    errors = {sys.stdin: "surrogateescape", sys.stdout: "replace", sys.stderr: "replace"}
    for stream, handling in errors.items():
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=handling)  # whatever the locale says
    try:
        _exit(main())
    except UserError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:  # PyTorch has RuntimeErrors for these
        words = "out of memory" if isinstance(error, MemoryError) else str(error)
        if re.search("out of memory|not enough memory|can't allocate memory", words):
            _fail("out of memory: a smaller batch, sequence or model takes less")
        if re.search("InvalidCxxCompiler|CppCompileError|C compiler|working triton", words):
            reason = words.strip().partition("\n")[0]
            _fail(f"--compile: {reason}; install a compiler, or give --compile=False")
        if "home directory" in words:  # of ~SOMEBODY
            _fail(f"{words} Give another path.")
        if re.search("Connection (closed|reset) by peer", words):
            _fail("another of the processes has ended; see what it wrote")
        raise
    except BrokenPipeError:  # `sample.py | head`: the reader has had enough
        os._exit(1)  # without a flush of what is left, which would fail again
    except OSError as error:  # of a file: the system's own words
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message, code=1):
    """One line on standard error, whatever control characters a file's name may hold."""
    text = " ".join(message.splitlines())
    text = text if len(text) < 1000 else f"{text[:500]} ... {text[-400:]}"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    _let_first_speak()
    print(f"{Path(sys.argv[0]).name}: error: {text}", file=sys.stderr, flush=True)
    _exit(code)


def _let_first_speak():
    """torchrun ends this process when the first one has, unless the mistake is here alone."""
    if not is_main():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)


def _exit(code):
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        os._exit(code or 0)  # gloo's threads can abort an exit through the interpreter
    gc.freeze()  # else a last collection looks through all that was imported since
    sys.exit(code)


def load(cls: type, description: str, argv: list[str] | None = None, *, presets: bool = False):
    """An instance of the dataclass `cls` from the command line, the flags given to it, and the
    names of what flags and presets say.

    presets: the words before the first flag are presets; otherwise `cls` has a positional field of
    its own. A usage error exits with code 2."""
    words = sys.argv[1:] if argv is None else argv  # UTF-8, whatever the locale says
    argv = [os.fsencode(word).decode("utf-8", "surrogateescape") for word in words]
    # Without __post_init__, which may derive a value from others, before all have their values.
    hints, default, said = get_type_hints(cls), object.__new__(cls), set()
    for field in dataclasses.fields(cls):
        made = field.default_factory is not dataclasses.MISSING
        setattr(default, field.name, field.default_factory() if made else field.default)
    if presets:
        n_presets = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
        for preset in argv[:n_presets]:
            # Its numbers are checked together with the flags, which may mend them.
            values = read_preset(cls, preset)
            vars(default).update(values)
            said |= values.keys()
        argv = argv[n_presets:]
        behind = [w for before, w in itertools.pairwise(argv) if is_preset(w, before, hints)]
        if behind:
            _fail(f"{behind[0]}: presets stand before the flags", code=2)
    names = [re.sub("=.*", "", word[2:]).replace("-", "_") for word in argv if word[:2] == "--"]
    for name in names:
        if name not in hints and (ours := OTHER_NAMES.get(name)) in hints:
            _fail(f"--{name} is --{ours} here", code=2)
    options = {
        "prog": Path(sys.argv[0]).name,
        "description": description.partition("References:")[0].strip(),
    }
    options |= {"use_underscores": True, "config": (tyro.conf.FlagConversionOff,)}
    try:
        with redirect_stderr(sys.stderr if is_main() else io.StringIO()):
            config = tyro.cli(cls, args=spell_out(argv, hints), default=default, **options)
    except SystemExit as exit:
        if exit.code:
            _let_first_speak()
        raise
    given = {name: getattr(config, name) for name in names if name in hints}
    return config, given, said | given.keys()


def is_preset(word: str, before: str, hints: dict[str, Any]) -> bool:
    """Whether a word among the flags is a preset, and not the value of the flag `before` it."""
    value = before[:2] == "--" and "=" not in before
    value = value and hints.get(before[2:].replace("-", "_")) is not bool
    return word.endswith(".toml") and word[:2] != "--" and not value


def spell_out(argv: list[str], hints: dict[str, Any]) -> list[str]:
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
            words += word.split("=", 1)
        elif "true" not in choices:
            words.append(word)
        else:
            if not equals:
                value = rest.pop(0) if rest and rest[0].lower() in choices else "true"
            words.append(f"{flag}={choices.get(value.lower(), value)}")
    return words


def check_numbers(config: Any):
    """Raises ValueError for a number among the fields of a dataclass that is negative or not
    finite, or not what PositiveInt and Fraction say."""
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
    """The settings in a TOML file, with the types of the fields of `cls`. Raises UserError."""
    path, hints = Path(path), get_type_hints(cls)
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
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise UserError(f"{path}: {error}") from None
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
            suggestion = f": did you mean {near[0]}?" if near else ""
            raise UserError(f"{path}: unknown key {name}{suggestion}")
        hint, choices = hints[name], get_args(hints[name])
        if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
            values[name] = float(value)
        elif get_origin(hint) in (list, tuple) and type(value) is list:
            values[name] = get_origin(hint)(value)
        elif hint is float or (value not in choices and type(value) not in (choices or [hint])):
            expected = " or ".join(map(str, choices)) or hint.__name__
            raise UserError(f"{path}: {name} = {value!r:.50}: expected {expected}")
    return values
