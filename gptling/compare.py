"""Is my change better? Trains both versions of the code, and says what is more than luck.

    python -m gptling.compare                              # the working tree and the last commit
    python -m gptling.compare docs/experiments/rope.patch  # patches, each and the working tree
    python -m gptling.compare --seeds 5 -- config/shakespeare_char_cpu.toml --max_iters=200

After -- come presets and flags for train.py, of all sides; a patch may have its own ("# flags:",
and "# prepare:" for prepare.py). Each side is copied to out/compare/sides/ and trained by its own
train.py there, a run at a time, and validated on the whole split. Which has the lower loss after as
many steps, and which in as much time, as short runs in turns measure it? Writes
out/compare/NAME/curves.png and a line for each question in out/compare/results.tsv; finished runs
stay in out/compare/runs/.

References: Student 1908, https://doi.org/10.1093/biomet/6.1.1, of paired differences;
Okabe and Ito 2008, colours for the colour-blind too, https://jfly.uni-koeln.de/color/
"""

import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tqdm import tqdm

from gptling.cli import CONFIG, PositiveInt, UserError, check_numbers, load, run
from gptling.files import lock_directory, replace

ROOT = CONFIG.parent
OUT = ROOT / "out" / "compare"
UNTRAINED = ["docs", "tests", "*.md", "*.patch", "gptling/compare.py"]  # training reads none
TURNS, SHORT = 6, 40  # short runs of each side that measure the time of a step, and their steps
OWN_FLAGS = re.compile("--(seed|out.dir|eval.tokens|log.interval)\\b")


@dataclass
class CompareConfig:
    # patches of the working tree; without any, that is compared with the last commit
    patches: tyro.conf.Positional[tuple[str, ...]] = ()
    seeds: PositiveInt = 3  # pairs of runs, with --seed=1, 2, ...
    equal: Literal["steps", "time", "both"] = "both"  # what all sides get as much of
    prepare: str = ""  # words for prepare.py ("my.txt --tokenizer=bpe"); else data/NAME as it lies

    def __post_init__(self):
        check_numbers(self)


@dataclass
class Side:
    """A version of the code, in a folder of its own, and what came out of it."""

    name: str
    tree: str  # git's name of its files
    flags: list[str]  # for its train.py
    prepare: list[str]  # for its prepare.py
    key: str = ""  # hash of files, flags, data, PyTorch and machine
    steps: int = 0  # of a run
    quartiles: list[float] = field(default_factory=lambda: [1.0] * 3)  # of the time of a step
    logs: dict = field(default_factory=lambda: defaultdict(list))  # of each question, by seed
    failed: str = ""  # the last lines that it wrote

    @property
    def folder(self) -> Path:
        return OUT / "sides" / self.name

    @property
    def time(self) -> str:
        """Of a step, over the first side's: median and quartiles of the turns."""
        return "{1:.2f} ({0:.2f} to {2:.2f})".format(*self.quartiles)

    def losses(self, question: str, unit: str) -> list[float]:
        """The last loss of each run, in "nats per byte" or "bits per byte"."""
        scale = math.log(2) if unit == "nats per byte" else 1
        return [scale * log[-1]["bits_per_byte"] for log in self.logs[question]]

    def why_no_losses(self, question: str) -> str:
        ends = [log[-1] for log in self.logs[question]]
        if any("failed" in end for end in ends):
            return "failed"
        bits = enumerate((end.get("bits_per_byte", math.nan) for end in ends), 1)
        diverged = [str(seed) for seed, loss in bits if not math.isfinite(loss)]
        return f"diverged with seed {', '.join(diverged)}" if diverged else ""


# ------------------------------------------------------------------ what is more than luck


def t_quantile(df: int) -> float:
    """The two-sided 95 % quantile of Student's t with `df` degrees of freedom. With
    t = sqrt(df) tan(a), the density of a is as cos(a)^(df - 1)."""
    a, step = np.linspace(0, math.pi / 2, 10_000, endpoint=False, retstep=True)
    below = np.cumsum(np.cos(a + step / 2) ** (df - 1))
    return math.sqrt(df) * math.tan(np.interp(0.95 * below[-1], below, a + step))


def judge(differences: list[float], unit: str) -> tuple[list[float], str, str]:
    """([mean, lowest, highest], verdict, sentence) of the second side's losses less the first's,
    seed by seed: the mean's 95 % interval, by Student's t of paired differences."""
    n, mean = len(differences), statistics.mean(differences)
    if not any(differences):
        return [0.0] * 3, "same", "no difference at all: equal losses, seed by seed"
    if n == 1:
        sentence = f"{mean:+.4f} {unit} with one seed, which cannot say whether that is luck"
        return [mean, math.nan, math.nan], "unknown", sentence
    deviation, more = statistics.stdev(differences), 2 * n - 1
    half, half_of_more = (t_quantile(m - 1) * deviation / math.sqrt(m) for m in (n, more))
    low, high = mean - half, mean + half
    if low <= 0 <= high:
        sentence = f"no difference that {n} seeds can show ({low:+.4f} to {high:+.4f} {unit}, minus"
        sentence += f" is better); of {more} that vary as much it would be ±{half_of_more:.4f}"
        return [mean, low, high], "not shown", sentence
    verdict, (least, most) = "better" if mean < 0 else "worse", sorted((abs(low), abs(high)))
    sentence = f"{verdict} by {abs(mean):.4f} {unit} ({least:.4f} to {most:.4f})"
    return [mean, low, high], verdict, sentence


def answer(first: Side, second: Side, question: str) -> tuple[list[float], str, str]:
    """What judge says, or why there is nothing to judge."""
    for side in (first, second):
        if reason := side.why_no_losses(question):
            return [math.nan] * 3, reason.split()[0], f"{side.name} {reason}"
    ends = [side.logs[question][0][-1] for side in (first, second)]
    n_bytes = [end["val_tokens"] * end["val_loss"] / end["bits_per_byte"] for end in ends]
    if abs(n_bytes[0] - n_bytes[1]) > 100:  # tokenizers leave out a first token each
        return [math.nan] * 3, "incomparable", "the sides validate on texts of other lengths"
    same_tokens = ends[0]["val_tokens"] == ends[1]["val_tokens"]
    unit = "nats per byte" if same_tokens else "bits per byte"
    before, after = first.losses(question, unit), second.losses(question, unit)
    return judge([b - a for a, b in zip(before, after, strict=True)], unit)


# ------------------------------------------------------------------ sides


def git(*words: str, **environment: str) -> str:
    """What git says, with an index of our own. Raises UserError with what it complains of."""
    environment = os.environ | {"GIT_INDEX_FILE": str(OUT / ".index")} | environment
    options = {"cwd": ROOT, "env": environment, "encoding": "utf-8", "errors": "replace"}
    try:
        process = subprocess.run(["git", *words], capture_output=True, **options)
    except OSError as error:
        raise UserError(f"git: {error.strerror}: install it") from None
    if process.returncode:
        raise UserError(process.stderr.strip())
    return process.stdout.strip()


def trained_files(tree: str, patch: str = "") -> str:
    """git's name of those files of a tree, with a patch, that training reads."""
    git("read-tree", tree)
    if patch:
        git("apply", "--cached", str(Path(patch).resolve()))
    git("rm", "-r", "-f", "--cached", "--quiet", "--ignore-unmatch", "--", *UNTRAINED)
    return git("write-tree")


def absolute(word: str) -> str:
    """A file's name as it is right from any directory; but each side has its own config/."""
    path = Path(word).resolve()
    return str(path) if path.exists() and CONFIG.name not in Path(word).parts else word


def find_sides(config: CompareConfig, flags: list[str]) -> list[Side]:
    """The first is compared with each of the others. Raises UserError where nothing is to be."""
    prepare = [absolute(word) for word in shlex.split(config.prepare)]
    try:
        last = git("rev-parse", "--verify", "HEAD^{tree}")
    except UserError as error:
        way_out = "there must be a commit to compare with: git init && git add -A && git commit"
        raise UserError(f"{error}; {way_out}") from None
    if git("rev-parse", "--show-prefix"):
        raise UserError(f"{ROOT} is within another repository: give it one of its own")
    git("read-tree", last)
    git("add", "--all")
    now = git("write-tree")
    sides = [Side("working-tree", trained_files(now), flags, prepare)]
    if not config.patches:
        sides.insert(0, Side("last-commit", trained_files(last), flags, prepare))
        if sides[0].tree == sides[1].tree:
            way_out = "edit model.py or train.py, or name a patch"
            raise UserError(f"nothing that is trained has changed since the last commit: {way_out}")
    for patch in config.patches:
        name, text = Path(patch).stem, Path(patch).read_text(encoding="utf-8", errors="replace")
        if name in [side.name for side in sides]:
            raise UserError(f"{patch}: another side is called {name} too: rename the file")
        header = dict(re.findall(r"^# (flags|prepare):(.*)$", text, re.MULTILINE))
        more, preparing = (header.get(key, "").split() for key in ("flags", "prepare"))
        sides.append(Side(name, "", flags + more, prepare + preparing))
        try:
            sides[-1].tree = trained_files(now, patch)
        except UserError as error:
            sides[-1].failed = str(error)
    for flag in [flag for side in sides for flag in side.flags]:
        if OWN_FLAGS.match(flag):
            raise UserError(f"{flag}: python -m gptling.compare gives it itself")
    return sides


def read_setting(name: str, flags: list[str], folder: Path) -> str:
    """What a train.py's defaults, and presets and flags for it, say of a field; the last counts."""
    files = [folder / word for word in ["train.py", *flags] if word.endswith((".py", ".toml"))]
    texts = [file.read_text(encoding="utf-8-sig") for file in files if file.is_file()]
    said = rf'^(?: +{name}: \w+|(?:--)?{name.replace("_", "[-_]")})[\s="]+([^"#\n]+)'
    return re.findall(said, "\n".join([*texts, *flags]), re.MULTILINE)[-1].strip()


def make_folder(side: Side, dataset: str):
    """Copy the side's files, and have it prepare its data or link those that are there."""
    shutil.rmtree(side.folder, ignore_errors=True)
    git("read-tree", side.tree)
    git("checkout-index", "--all", f"--prefix={side.folder.as_posix()}/")
    data, source = side.folder / "data" / dataset, ROOT / "data" / dataset
    if dataset != "quickstart" and side.prepare and all(word[0] == "-" for word in side.prepare):
        raise UserError(f"{side.name} prepares its data: give the text too, --prepare=YOUR.txt")
    if side.prepare or dataset == "quickstart":
        side.failed = execute(side, "prepare.py", *side.prepare, f"--name={dataset}")
        if side.failed:
            return
    elif (source / "meta.json").is_file():
        data.parent.mkdir()
        try:
            data.symlink_to(source, target_is_directory=True)
        except OSError:  # Windows lets not everybody
            shutil.copytree(source, data)
    else:
        raise UserError(f"{source} is not there: prepare it, or give --prepare=YOUR.txt")
    presets = [Path(word).read_bytes() for word in side.flags if Path(word).is_file()]
    machine = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")]
    machine += [version("torch"), platform.node()]
    content = [side.tree, side.flags, presets, (data / "meta.json").read_bytes(), machine]
    side.key = hashlib.sha256(repr(content).encode()).hexdigest()[:12]


# ------------------------------------------------------------------ trainings


def execute(side: Side, *command: str) -> str:
    """Run a script of the side's; returns its last lines if it fails."""
    options = {"stdin": subprocess.DEVNULL, "encoding": "utf-8", "errors": "replace"}
    options |= {"cwd": side.folder, "env": os.environ | {"PYTHONUNBUFFERED": "1"}}  # in their order
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.run([sys.executable, *command], **options, **output)
    if process.returncode == 128 + signal.SIGINT:  # a shell has its background jobs ignore it
        raise KeyboardInterrupt
    code = f"{command[0]}: exit code {process.returncode}"
    return "\n".join([*process.stdout.splitlines()[-15:], code]) if process.returncode else ""


def train(side: Side, seed: int, steps: int, bar: tqdm, *more: str, tag: str = "") -> list[dict]:
    """The log of a run of the side's own train.py, from out/compare/runs/ where it is finished; of
    one that diverged or failed a single line, which says so."""
    name = f"{side.key}-{steps}-{seed}{tag}"
    record, out_dir = OUT / "runs" / f"{name}.jsonl", side.folder / "out" / name
    bar.set_description_str(f"{side.name}, seed {seed}")
    trained = not (record.exists() or side.failed)
    if not trained:
        bar.total -= steps
    else:
        flags = [*side.flags, f"--max_iters={steps}", f"--seed={seed}", "--eval_tokens=0", *more]
        options = [f"--out_dir=out/{name}", "--overwrite", "--curves=False"]
        lines = execute(side, "train.py", *flags, *options)
        if not lines:
            replace(record, (out_dir / "log.jsonl").read_bytes())
        elif re.search(r" is -?(nan|inf) at step \d+", lines):
            replace(record, json.dumps({"diverged": lines}).encode())
        else:
            side.failed = lines
        shutil.rmtree(out_dir, ignore_errors=True)
        bar.update(steps)
    lines = [] if side.failed else record.read_text(encoding="utf-8").splitlines()
    log = [json.loads(line) for line in lines] or [{"failed": side.failed}]
    if trained and not tag:
        bits = log[-1].get("bits_per_byte")
        end = f"{math.log(2) * bits:.4f} nats per byte" if bits else next(iter(log[-1]))
        bar.write(f"seed {seed}, {side.name}, {steps} steps: {end}")
    return log


def end_if_nothing_is_left(sides: list[Side]):
    """End the program with the last lines of the sides that failed, unless a pair is left."""
    if sides[0].failed or all(side.failed for side in sides[1:]):
        sys.exit("\n".join(f"{side.name} failed:\n{side.failed}" for side in sides if side.failed))


def train_all(sides: list[Side], question: str, seeds: int, bar: tqdm):
    """Add to side.logs the runs of all sides, in an order that is reversed from seed to seed."""
    for seed in range(1, seeds + 1):
        for side in sides if seed % 2 else sides[::-1]:
            side.logs[question].append(train(side, seed, side.steps, bar))
            end_if_nothing_is_left(sides)


def measure_steps(first: Side, second: Side, bar: tqdm):
    """Set second.quartiles, of its time for a step over the first's, by short runs in turns, and
    second.steps to as many as take the first one's time by the median."""
    ratios, n = [], min(first.steps, SHORT)
    options = [f"--eval_interval={n}", "--eval_tokens=1", "--log_interval=1"]
    for turn in range(TURNS):
        medians, tag = {}, f"-turn{turn}-{first.key}-{second.key}"
        for side in (first, second) if turn % 2 else (second, first):
            log = train(side, 1, n, bar, *options, tag=tag)
            ms = [entry["ms"] for entry in log if "ms" in entry]
            medians[side.name] = statistics.median(ms[len(ms) // 4 :] or [math.nan])  # warm
        ratios.append(medians[second.name] / medians[first.name])
    second.quartiles = _, ratio, _ = statistics.quantiles(ratios, n=4)
    if ratio > 0:  # not NaN, where one failed or diverged
        second.steps = max(1, round(first.steps / ratio))


# ------------------------------------------------------------------ the answer


def draw_curves(file: Path, sides: tuple[Side, Side], questions: list[str]):
    """The losses of two sides over steps and over seconds: the mean of the seeds in their band."""
    from matplotlib.figure import Figure  # without pyplot no window is opened

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    over = ("step", questions[0]), ("seconds", questions[-1])
    for axes, (unit, question) in zip(panels, over, strict=True):
        for side, color, marker in zip(sides, ("#0072B2", "#D55E00"), "os", strict=True):
            seeds = [[line for line in log if "val_loss" in line] for log in side.logs[question]]
            x = np.mean([[line[unit] for line in seed] for seed in seeds], axis=0)
            loss = [[line["bits_per_byte"] * math.log(2) for line in seed] for seed in seeds]
            axes.fill_between(x, np.min(loss, 0), np.max(loss, 0), color=color, alpha=0.25, lw=0)
            axes.plot(x, np.mean(loss, 0), color=color, marker=marker, label=side.name)
        axes.set(xlabel=unit, title=question)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("validation loss in nats per byte")
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file)


def print_table(sides: list[Side], questions: list[str]):
    """A line for each side, in Markdown: losses are the mean of the seeds, lowest and highest."""
    header = ["", "parameters", "time of a step (quartiles)", "steps in that time"]
    header += [f"{unit} {question}" for question in questions for unit in ("nats per byte", "bits")]
    print(f"\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for side in sides:
        row = [side.name, "", side.time, f"{side.steps:,}"]
        for question in questions:
            if reason := side.why_no_losses(question):
                row += [reason, reason]
                continue
            row[1] = f"{side.logs[question][0][-1].get('parameters', math.nan):,}"
            for unit in ("nats per byte", "bits per byte"):
                loss = side.losses(question, unit)
                row.append(f"{statistics.mean(loss):.3f} ({min(loss):.3f} to {max(loss):.3f})")
        print(f"| {' | '.join(row)} |")
    print("\nMean difference of the pairs with a seed each; 95 % interval by Student's t:\n")


def main():
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    config, *_ = load(CompareConfig, __doc__, argv[:end])
    flags = [absolute(word) if word.endswith(".toml") else word for word in argv[end + 1 :]]
    (OUT / "runs").mkdir(parents=True, exist_ok=True)
    lock = lock_directory(OUT)
    sides = find_sides(config, flags)
    first, *others = sides
    dataset = read_setting("dataset", flags, ROOT)
    for side in sides:
        if not side.failed:
            make_folder(side, dataset)
    end_if_nothing_is_left(sides)
    if dataset != "quickstart" and not config.prepare:
        print(f"all sides train on data/{dataset} as it lies; --prepare=TEXT has each prepare it")
    n = read_setting("max_iters", flags, first.folder)
    if not n.isdecimal() or n == "0":
        raise UserError(f"--max_iters={n}: give a number of steps")
    n = int(n)
    after, in_time = f"after {n} steps", f"in the time of {n} steps"
    questions = {"steps": [after], "time": [in_time], "both": [after, in_time]}[config.equal]

    # ------------------------------------------------ runs
    total = len(questions) * config.seeds * len(sides) * n + len(others) * 2 * TURNS * min(n, SHORT)
    form = "{desc}: {percentage:.0f} %|{bar}| {elapsed}, {remaining} left"
    hidden = not sys.stderr.isatty()
    try:
        with tqdm(total=total, bar_format=form, smoothing=0, leave=False, disable=hidden) as bar:
            for side in sides:
                side.steps = n
            if after in questions:
                train_all(sides, after, config.seeds, bar)
            for side in others:
                if not side.failed:
                    measure_steps(first, side, bar)
            if in_time in questions:
                train_all(sides, in_time, config.seeds, bar)
    except KeyboardInterrupt:
        print("stopped: the same command goes on behind the last finished run")
        raise

    # ------------------------------------------------ answers
    file, commit = OUT / "results.tsv", git("rev-parse", "--short", "HEAD")
    header = "date first second commit files question steps time difference low high seeds verdict"
    results = file.read_text("utf-8") if file.exists() else f"{header} flags\n".replace(" ", "\t")
    sentences = []
    for side in others:
        for question in questions:
            numbers, verdict, sentence = answer(first, side, question)
            steps = side.steps if question == in_time else n
            own = f" ({steps:,} of its own, each {side.time} times as long)" * (question == in_time)
            sentences.append(f"{side.name} against {first.name} {question}{own}: {sentence}")
            row = [time.strftime("%Y-%m-%d %H:%M"), first.name, side.name, commit, side.tree[:12]]
            row += [question, steps, side.time]
            row += [*(f"{number:.5f}" for number in numbers), config.seeds, verdict]
            results += "\t".join(map(str, [*row, shlex.join(side.prepare + side.flags)])) + "\n"
    replace(file, results.encode())
    print_table(sides, questions)
    print("\n".join(sentences))
    for side in others:
        picture = OUT / side.name / "curves.png"
        picture.unlink(missing_ok=True)
        whole = not any(one.why_no_losses(q) for one in (first, side) for q in questions)
        if whole and importlib.util.find_spec("matplotlib"):
            draw_curves(picture, (first, side), questions)
            print(picture)
        if side.failed:
            print(f"\n{side.name} failed:\n{side.failed}")
    lock.release()
    return int(any(side.failed for side in sides))


if __name__ == "__main__":
    run(main)
