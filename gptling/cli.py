"""The command line: flags from the fields of a dataclass, presets, and errors of one line.

A field `top_k: int = 200  # help` is the flag `--top_k=200`, and `resume: bool` is `--resume`,
`--no-resume` or `--resume=True`. A preset is a flat TOML file: defaults < presets < flags."""

import gc
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tqdm import tqdm

from gptling.files import UserError as UserError  # re-exported

CONFIG = Path(__file__).parent.parent / "config"
PositiveInt = Annotated[int, "at least 1"]  # check_numbers tests these bounds
Share = Annotated[float, "at least 0 and at most 1"]
AtLeast1 = Annotated[float, "at least 1"]
AtLeastMinus1 = Annotated[int, "at least -1"]
T = TypeVar("T")
Fixed = Annotated[T, "fixed"]  # a flag that changes the value would make it a different run
Once = Annotated[T, "once"]  # a setting of one start: the run does not keep it
Hidden = tyro.conf.Suppress  # a field without a flag
Planned = Annotated[T | None, tyro.conf.arg(help_behavior_hint="(default: planned)")]
Empty = Annotated[T, tyro.conf.arg(help_behavior_hint="")]  # a flag without a default in --help


def mentions(error: Exception, pattern: str) -> bool:
    """Return whether an error's text matches, or that of the error which PyTorch's may hide."""
    return re.search(pattern, f"{error!r} {error.__context__!r}") is not None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of Python's or PyTorch's, on any device, is a lack of memory."""
    words = "MemoryError|out of memory|not enough memory|can't allocate memory|_ALLOC_FAILED"
    return mentions(error, words)


def describe(error: Exception) -> str:
    """Return one line for a mistake of the user's or a lack of memory or space, or "" for a bug."""
    if re.match("No module named '(datasets|pyarrow)", str(error)):
        return f"{error}: pip install -e '.[datasets]'"
    is_mistake = isinstance(error, UserError | ModuleNotFoundError | UnicodeError)
    if is_mistake or getattr(error, "filename", None):  # an OSError about a file
        return " ".join(str(error).split())
    if is_out_of_memory(error):
        return "out of memory: a smaller batch, sequence or model needs less"
    if mentions(error, r"No space left|quota exceeded|File too large|requested and \d+ written"):
        return f"the disk is full, or the file too large ({error}): saved files are intact"
    return ""


def drop_unread(stream: TextIOWrapper):
    """Let a stream drop what no one reads any more, as after `train.py | head`."""
    write = stream.write

    def write_or_drop(text: str) -> int:
        try:
            return write(text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return len(text)

    stream.write = write_or_drop


def launch(main: Callable[[], int | None], *, needs_reader: bool = False):
    """Run a script's main. A mistake ends it with one line and exit code 1, a bug as in Python. The
    script continues if no one reads its output any more, unless it needs a reader."""
    # A fast exit: the last collection need not look through all of PyTorch. Triton is imported
    # later, since its bindings would report frozen objects as leaks.
    gc.freeze()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # after cleaning up
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # a service may have none
        setattr(sys, name, stream)
        if isinstance(stream, TextIOWrapper):  # IDLE and notebooks have their own kind
            stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
            if not needs_reader:
                drop_unread(stream)
    try:
        code = main() or 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code or 0
    except BrokenPipeError:  # the reader of `sample.py | head` has had enough
        os._exit(1)  # a normal exit would flush the rest, and fail again
    except Exception as error:
        if not (message := describe(error)):
            raise
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
        code = 1
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        os._exit(code)  # gloo's threads can abort an exit through the interpreter
    sys.exit(code)


def progress_bar(total: int, **options) -> tqdm:
    """Return a bar on standard output. In a file, and under torchrun, it shows nothing."""
    tqdm.monitor_interval = 0  # its thread would wait for a lock that Ctrl-C leaves held
    hidden = "WORLD_SIZE" in os.environ or None  # None: hidden unless in a terminal
    return tqdm(
        total=total,
        leave=False,
        file=sys.stdout,
        dynamic_ncols=True,
        disable=hidden,
        delay=1e-9,  # the first update draws it
        **options,
    )


def load_config(cls: type, description: str, argv: list[str] | None = None, *, presets=False):
    """Return an instance of the dataclass `cls`, and {name: value} of the fields that presets and
    flags set, the last one first. presets: whether the words before the first flag are presets,
    whose settings become flags, so that tyro checks them too. Raises UserError."""
    words = list(sys.argv[1:] if argv is None else argv)
    hints = get_type_hints(cls)
    flags = []  # the settings of presets
    while presets and words and not words[0].startswith("-"):
        flags += [f"--{name}={value}" for name, value in read_preset(words.pop(0)).items()]
    fields = []
    args = []
    for word, following in pairwise([*flags, *words, ""]):
        field, arg = parse_flag(word, following, hints)
        fields.append(field)
        is_unknown = field and field not in hints  # tyro finds a similar name if the value is apart
        args += arg.split("=", 1) if is_unknown else [arg]
    config = tyro.cli(
        cls,
        args=args,
        description=(description or "").partition("References:")[0].strip(),
        use_underscores=True,
        config=(
            tyro.conf.PositionalMetavarFromFieldName,
            tyro.conf.DisallowNone,
            tyro.conf.FlagConversionOff,
        ),
    )
    return config, {name: getattr(config, name) for name in reversed(fields) if name in hints}


def read_preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset. The project's config/NAME.toml is found from any directory
    that has no config/NAME.toml of its own."""
    if not name.endswith(".toml"):
        raise UserError(
            f"{name} is not a preset: python prepare.py {name} reads a text, "
            f"--dataset={name} trains on prepared data, --out_dir={name} --resume continues a run"
        )
    file = Path(name)
    if not file.is_file():
        file = CONFIG.parent / name
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:  # TOMLDecodeError is a ValueError
        raise UserError(f"{name} is not a preset such as config/gpt2.toml ({error})") from None


def parse_flag(word: str, following: str, hints: dict[str, Any]) -> tuple[str, str]:
    """Return the field that a word sets, or "" if the word is no flag, and the word for tyro, whose
    booleans need a value: --no-curves becomes --curves=False. following: the next word, which may
    be that value."""
    name, equals, _ = word.partition("=")
    field = name[2:].replace("-", "_") if name.startswith("--") else ""
    positive = field.removeprefix("no_")
    has_value = equals or following in ("True", "False")
    if hints.get(positive) is bool and not has_value:
        return positive, f"--{positive}={field == positive}"
    return field, word


def marked_fields(cls: type, mark: str) -> set[str]:
    """Return the fields of a dataclass whose annotation has this mark: "fixed" or "once"."""
    hints = get_type_hints(cls, include_extras=True)
    return {name for name, hint in hints.items() if f"'{mark}'" in str(hint)}


def check_numbers(config: Any):
    """Raise ValueError for a number that is NaN, or outside the bounds that the field's annotation
    says, as PositiveInt does. Without them, a number is at least 0."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        bounds = re.search(r"at least (-?\d)( and at most (\d))?", f"{hint}, at least 0")
        highest = float(bounds[3] or "1e308")
        if isinstance(value, int | float) and not int(bounds[1]) <= value <= highest:
            raise ValueError(f"--{name}={value}: must be {bounds[0]}")
