"""Configuration: the fields of a dataclass are the flags, with their types, defaults and help.

    @dataclass
    class SampleConfig:
        top_k: int = 200  # draw from the k likeliest tokens only; 0 for all

    config, given = load(SampleConfig, __doc__)

gives `--top_k 200` and `--top_k=200`, and the comment is its line in `--help`. A preset is a flat
TOML file of the same keys. Defaults < presets from left to right < flags. Nothing is executed.
"""

import argparse
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints


class UserError(Exception):
    """A mistake of the user's: its message is one line with the value and the way out."""


def run(main: Callable[[], int | None]):
    """Run a script's main; a user's mistake becomes one line on standard error and exit code 1.

    SIGTERM ends it as Ctrl-C does, so that what is half-written is taken away."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    errors = ("surrogateescape", "replace", "replace")
    for stream, handling in zip((sys.stdin, sys.stdout, sys.stderr), errors, strict=True):
        if stream is not None:
            stream.reconfigure(encoding="utf-8", errors=handling)  # whatever the locale says
    sys.stdin = sys.stdin or open(os.devnull)  # None where the caller has closed it
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    try:
        _exit(main())
    except UserError as error:
        _fail(str(error), 1)
    except (MemoryError, RuntimeError) as error:  # PyTorch has RuntimeErrors for these
        words = "out of memory" if isinstance(error, MemoryError) else str(error)
        if re.search("out of memory|not enough memory|can't allocate memory", words):
            _fail("out of memory: a smaller batch, window or model takes less", 1)
        if re.search("Connection (closed|reset) by peer", words):
            _fail("another of the processes has ended; see what it wrote", 1)
        raise
    except BrokenPipeError:  # `sample.py | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message, code):
    """End with a line on standard error. Of several processes the first one speaks for all."""
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)  # torchrun ends this process meanwhile, unless the mistake is here alone
    print(f"{Path(sys.argv[0]).name}: error: {one_line(message)}", file=sys.stderr, flush=True)
    _exit(code)


def _exit(code):
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        os._exit(code or 0)  # gloo's threads can abort an exit through the interpreter
    sys.exit(code)


def one_line(error: Exception | str) -> str:
    """Its message in one line without control characters, which a file's name may hold."""
    text = " ".join(str(error).splitlines())
    text = text if len(text) < 1000 else f"{text[:500]} ... {text[-400:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def load(
    cls: type,
    description: str,
    argv: Sequence[str] | None = None,
    positional: str | None = None,
    default_preset: Path | None = None,
) -> tuple[Any, dict[str, Any]]:
    """An instance of the dataclass `cls` and the flags that were given, from the command line.

    positional: the field that takes the arguments without a flag; without it they are presets,
    and `default_preset` is read where none is named. A usage error exits with code 2.
    """
    types = get_type_hints(cls)
    parser = _Parser(
        description=description.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # so that what was given can be told from defaults
        allow_abbrev=False,
    )
    helps = _comments(cls)
    for field in dataclasses.fields(cls):
        default = None if field.default is dataclasses.MISSING else field.default
        text = helps[field.name].replace("%", "%%")
        if default not in (None, "", ()):
            text += f" (default: {default})"
        options: dict[str, Any] = {"help": text, "type": _converter(types[field.name])}
        many = get_origin(types[field.name]) is tuple
        if field.name == positional:
            options["nargs"] = "*" if many else "?"
            if not many:
                options["default"] = argparse.SUPPRESS
            parser.add_argument(field.name, metavar=field.name.upper(), **options)
            continue
        if many:
            options["action"] = "append"
        parser.add_argument(f"--{field.name}", metavar=_type_name(types[field.name]), **options)
    if positional is None:
        text = "files of settings, which stand in for the defaults below"
        if default_preset:
            text += f"; config/{default_preset.name} where none is given"
        parser.add_argument("presets", nargs="*", metavar="PRESET.toml", help=text)

    try:  # the bytes that were typed, as UTF-8 whatever the locale made of them
        argv = [
            os.fsencode(text).decode("utf-8") for text in (sys.argv[1:] if argv is None else argv)
        ]
    except UnicodeDecodeError as error:
        parser.error(f"an argument is not UTF-8: {error.object!r}")
    for i, text in enumerate(argv):  # a switch leaves the next word alone: --resume preset.toml
        following = argv[i + 1].lower() if i + 1 < len(argv) else ""
        switch = text.startswith("--") and types.get(text[2:]) is bool
        if switch and following not in ("true", "false"):
            argv[i] = f"{text}=True"
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        parser.error(f"unknown argument {flag}{_nearest(flag.lstrip('-'), types, '--')}")
    given = vars(namespace)
    values = {}
    presets = given.pop("presets", [])
    for preset in presets or ([default_preset] if default_preset else []):
        values |= read_preset(cls, preset)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    try:
        return cls(**(values | given)), given
    except UserError as error:
        parser.error(str(error))


def read_preset(cls: type, path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, checked against the fields of `cls`. Raises UserError."""
    path = Path(path)
    if path.suffix != ".toml":
        way_out = "a text goes through prepare.py first, a run through --out_dir and --resume"
        raise UserError(f"{path}: not a preset (a .toml file); {way_out}")
    try:
        if not path.exists() and (Path(__file__).parent.parent / path).exists():
            path = Path(__file__).parent.parent / path  # `config/gpt2.toml` from any directory
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such preset{_presets()}") from None
    except (OSError, ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    return {name: check(cls, name, value, str(path)) for name, value in values.items()}


def read_json(file: Path, limit: int = 1 << 20) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises UserError."""
    try:
        if not file.is_file():  # a pipe would be waited for
            raise FileNotFoundError("no such file")
        if file.stat().st_size > limit:
            raise ValueError(f"it has more than {limit} bytes")
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    return values


def read_loss(checkpoint: Path) -> float:
    """The validation loss of a checkpoint; infinite where a run was stopped between evaluations, or
    its metrics.json is damaged."""
    try:
        loss = read_json(checkpoint / "metrics.json").get("val_loss")
    except UserError:
        return math.inf
    return float(loss) if _is_number(loss) else math.inf


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints in the directory of a run, oldest first; none elsewhere."""
    files = Path(run).glob("checkpoint-*/metrics.json") if os.path.isdir(run) else []
    found = [file.parent for file in files if re.fullmatch(r"checkpoint-\d+", file.parent.name)]
    return sorted(found, key=step_of)


def best_checkpoint(run: str | Path) -> Path | None:
    """The checkpoint of a run with the lowest validation loss, the newest of equal ones."""
    found = list_checkpoints(run)
    return min(found, key=lambda path: (read_loss(path), -step_of(path)), default=None)


def check(cls: type, name: str, value: Any, where: str) -> Any:
    """`value` as the type of the field `name`. Raises UserError, which names `where` it stood."""
    types = get_type_hints(cls)
    if name not in types:
        raise UserError(f"{where}: unknown key {name}{_nearest(name, types)}")
    expected = types[name]
    if get_origin(expected) is Literal:
        fits = str(value) in map(str, get_args(expected))
        if fits:
            return str(value)
    elif expected is float:
        fits = _is_number(value)
        value = float(value) if fits else value
    else:
        fits = type(value) is expected
    if not fits:
        raise UserError(f"{where}: {name} = {value!r} is not {_type_name(expected)}")
    return value


def _is_number(value):
    """Whether it has a finite float: not for NaN, True and 10**400."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, without the usage text: that is what --help is for."""
        hint = "; see --help"
        if "expected one argument" in message:
            hint = ", such as --FLAG=VALUE, the form that a value with a leading - needs"
        _fail(f"{message}{hint}", 2)


def _comments(cls):
    """The comment behind each field in the source of `cls`: {field: comment}."""
    lines = inspect.getsource(cls).splitlines()
    found = (re.match(r"\s+(\w+):.*?\s# (.+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def _converter(expected):
    """A function from a flag's text to its value, as argparse wants it."""
    if get_origin(expected) is tuple:
        expected = get_args(expected)[0]

    def convert(text):
        try:
            if expected is bool:
                return {"true": True, "false": False}[text.lower()]
            if get_origin(expected) is Literal:
                return {str(choice).lower(): str(choice) for choice in get_args(expected)}[
                    text.lower()
                ]
            value = expected(text)
            if expected is float and not math.isfinite(value):
                raise ValueError
            return value
        except (KeyError, ValueError):
            message = f"{text!r} is not {_type_name(expected)}"
            raise argparse.ArgumentTypeError(message) from None

    return convert


def _type_name(expected):
    if get_origin(expected) is tuple:
        expected = get_args(expected)[0]
    if get_origin(expected) is Literal:
        return "|".join(str(choice) for choice in get_args(expected))
    names = {bool: "True|False", int: "integer", float: "number", str: "text"}
    return names[expected]


def _nearest(name, names, prefix=""):
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f": did you mean {prefix}{matches[0]}?" if matches else ""


def _presets():
    return ": there are " + ", ".join(
        f"config/{path.name}" for path in sorted(Path(__file__).parent.glob("*.toml"))
    )
