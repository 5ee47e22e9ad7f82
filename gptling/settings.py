"""Where each setting of a training run gets its value:

- A new run: defaults < presets < flags. What is None then comes from a plan for --minutes, or from
  SMALL for --max_iters. In both cases fill_in in schedule.py adds rates and warm-up.
- --resume: the settings of the run < presets < flags.
- --init_from: the sizes of that model, and the rest as in a new run."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gptling import cli, devices, plan
from gptling.clock import next_model
from gptling.dataset import check_text
from gptling.files import UserError, read_json
from gptling.gpt2_format import stored_config
from gptling.pretrained import find_checkpoint, load_model
from gptling.run import (
    RunDirectory,
    list_checkpoints,
    list_models,
    list_teachers,
    load_training_state,
    read_metrics,
    read_settings,
)
from gptling.schedule import fill_in
from gptling.state import Progress, read_sources
from gptling.teachers import can_teach, find_teachers, fingerprints, teacher_paths

# What a run of --max_iters gets for settings without a value. fill_in derives its rates from these.
SMALL = {
    "block_size": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 128,
    "dropout": 0.0,
    "bpe_dropout": 0.0,
    "later_tokens": 0.0,
    "max_iters": 440,
    "batch_size": 32,
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.1,
    "eval_interval": 110,
    "eval_tokens": 0,
}


@dataclass
class Start:
    """Where a run starts from."""

    run: RunDirectory
    sources: dict[str, bytes]  # the code, as it was when the command started
    checkpoint: Path | None = None  # the weights: a resumed run's, init_from's, or None
    saved: dict[str, Any] | None = None  # a resumed run's state
    progress: Progress | None = None  # a resumed run's, the model's before, then this model's own
    following: Any = None  # the next model's configuration, once this model has ended

    def begin(self, state):
        """Load the state of a resumed run, and make the directory ready. Raises UserError. That a
        run has ended is checked last, since a flag that it cannot have is the better reason. With
        --auto_resume it ends with exit code 0."""
        if state.config.teacher:
            self.sources["teachers.json"] = fingerprints(state.config)
        has_ended = self.saved and not list_checkpoints(self.run.path)  # see keep_teacher
        if self.saved:
            state.load_state_dict(self.saved)
            self.saved = None  # frees its memory
        elif self.progress:
            state.progress.follow(self.progress)
        state.progress.can_teach = can_teach(state.model)
        end = state.config.max_iters
        if has_ended or state.progress.step >= end:
            finished = f"{self.run.path} has finished its {end} steps"
            if state.config.auto_resume:  # a chain of jobs goes on
                print(finished)
                sys.exit()
            raise UserError(
                f"{finished}: --minutes=5 adds five minutes, --max_iters={2 * end} sets a new end"
            )
        self.run.start(state)
        self.progress = state.progress


def settle(config_class: type, model_class: type, set_up: Callable, quickstart, processes):
    """Yield (configuration, start) once each setting has its value, which does not change after
    that. When that model has ended, there may be another pair: see next_model. set_up: train.py's,
    to measure steps for a plan; quickstart: writes data/quickstart. Raises UserError."""
    sources = read_sources(config_class, model_class)
    description = sys.modules[config_class.__module__].__doc__
    config, given = cli.load_config(config_class, description, presets=True)
    config.out_dir = Path(config.out_dir or f"out/{config.dataset}").expanduser().as_posix()
    if config.teacher:
        config.teacher = given["teacher"] = find_teachers(config)
    length_flag = next((flag for flag in given if flag in ("minutes", "max_iters")), "")
    if length_flag == "minutes" and not config.minutes:
        raise UserError("--minutes=0: give a time above 0, or --max_iters")
    start = Start(RunDirectory(Path(config.out_dir), processes), sources)
    find_run(config, start)
    if start.saved:
        resume(config, given, start)
    elif config.init_from != "scratch":
        start.checkpoint = find_checkpoint(config.init_from or "--init_from=")
    processes.use_device(config.device)
    devices.choose_algorithms(config.deterministic)

    longest = adopt_sizes(config, given, model_class, start.checkpoint)
    missing = config.dataset == "quickstart" and not Path("data/quickstart").exists()
    if missing and processes.is_main:
        quickstart()
    processes.barrier()
    if start.saved:  # a resumed run has its settings
        change_length(config, length_flag, start, processes)
    elif config.eval_only or (config.max_iters and length_flag != "minutes"):  # steps
        config.minutes = 0.0
        fill_in(config, SMALL | {"block_size": min(SMALL["block_size"], longest)})
    else:  # a time
        build = partial(set_up, checkpoint=start.checkpoint, processes=processes)
        plan.complete(config, longest, build, processes)
    check_schedule(config)
    yield from models(config, start, model_class)


def models(config, start: Start, model_class: type):
    """Yield (configuration, start) of a model, unless a resumed run has trained it, and of those
    that follow it in the same run. Raises UserError if these would have another text or code."""
    if start.following:
        load_model(model_class, start.checkpoint, config.allow_changed_model)
    else:
        yield config, start
    while config := start.following:
        path = start.run.path
        check_text(config, load_training_state(list_models(path)[-1]))
        start.run.keep_teacher()
        start = Start(start.run, start.sources, progress=start.progress)
        kind = "learns from those before it" if config.teacher else "has another seed"
        print(f"\nModel {config.models_before + 1} of this run {kind}.")
        print(f"The model before it is kept as {list_teachers(path)[-1]}.")
        yield config, start


def find_run(config, start: Start):
    """Lock the directory of the run. If these flags continue a run, load what it has saved. Raises
    UserError for a run that they cannot continue."""
    if config.eval_only:
        return
    run = start.run
    run.acquire()
    checkpoints = list_models(run.path)
    if config.resume and not checkpoints:
        raise UserError(
            f"{run.path} has no checkpoint to resume: "
            "begin without --resume, or give another --out_dir"
        )
    if checkpoints and not config.overwrite:
        if not (config.resume or config.auto_resume):
            raise UserError(
                f"{run.path} already has a run: "
                "--resume continues it, --overwrite replaces it, --out_dir keeps both"
            )
        start.checkpoint = checkpoints[-1]
        read_metrics(start.checkpoint)  # a damaged one would end the run at its end
        start.saved = load_training_state(start.checkpoint)
    step = start.saved["progress"]["step"] if start.saved else 0
    if run.processes.all_reduce_max(step) != step:
        raise UserError(
            f"another process resumes from a later step than {step}: "
            "--out_dir has to be one folder for all machines"
        )


def resume(config, given: dict, start: Start):
    """Give the configuration a resumed run's settings, see restore_settings, and load the run's
    progress."""
    path = start.run.path
    saved = start.saved["config"]
    edited = [k for k, value in read_settings(path).items() if saved.get(k) != value]
    if edited:
        print(
            f"{path}/config.toml was edited ({', '.join(edited)}), which has no effect: give flags"
        )
    restore_settings(config, saved, given)
    start.progress = Progress(config.max_iters)
    start.progress.load(start.saved["progress"])
    # Without a checkpoint the last teacher has ended, and the model after it has not begun.
    teachers = list_teachers(path)
    config.models_before = len(teachers) - (not list_checkpoints(path))
    if teachers and "teacher" in given:
        raise UserError(f"--teacher={given['teacher']}: {path} learns from its own models")


def restore_settings(config, saved: dict, given: dict):
    """Give the configuration the saved settings of a run, except for those with a flag. Prints what
    changes. Raises UserError for a flag that would make it a different run."""
    once = cli.marked_fields(type(config), "once")
    fixed = cli.marked_fields(type(config), "fixed")
    for name, value in (saved | given).items():
        before = saved.get(name, "not set")
        if name in once:
            continue
        if value != before:
            if name in fixed:
                raise UserError(f"--{name}={value}: the run has {before}: give another --out_dir")
            print(f"{name}: {before} -> {value}")
        if name in vars(config):
            setattr(config, name, value)
        else:
            print(f"{name}: {value} in the run is unknown to this code")


def stored_sizes(model_class: type, checkpoint: Path) -> dict[str, Any]:
    """Return the sizes of a checkpoint's model. Raises UserError if they do not go together."""
    file = checkpoint / "config.json"
    try:
        return vars(stored_config(model_class, read_json(file)))
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None


def adopt_sizes(config, given: dict, model_class: type, checkpoint: Path | None) -> float:
    """Give the configuration the sizes of the model in a checkpoint, if there is one, except for
    those with a flag. Return the longest sequence that this model and the teachers accept. Raises
    UserError for a size that they cannot have."""
    paths = filter(None, [*teacher_paths(config), checkpoint])
    sizes = {path: stored_sizes(model_class, path) for path in paths}
    longest = math.inf
    for path, stored in sizes.items():
        longest = min(longest, stored["block_size"])
        if (config.block_size or 0) > longest:
            raise UserError(
                f"--block_size={config.block_size}: {path} accepts at most {longest} tokens"
            )
    if not checkpoint:
        return longest
    own = sizes[checkpoint]
    for name in own.keys() - {"block_size", "dropout"}:
        if name not in given:
            setattr(config, name, own[name])
        elif name in ("n_layer", "n_head", "n_embd") and given[name] != own[name]:
            raise UserError(f"--{name}={given[name]}: {checkpoint} has {own[name]}")
    if config.eval_only and config.block_size is None:
        config.block_size = longest
    return longest


def change_length(config, flag: str, start: Start, processes):
    """Give a resumed run the new length that a flag asks for: --max_iters, a new total of steps, or
    --minutes, so many more at the mean speed so far. If the model would overfit with more steps,
    and the minutes are enough for another one, its steps stay, and start.following is that one."""
    fill_in(config, SMALL)  # fields that the run's code did not have
    progress = start.progress
    is_longer = flag == "minutes" and config.resume
    more = config.minutes
    seconds = progress.seconds_before  # all earlier sessions' time
    if flag == "max_iters":
        config.minutes = 0.0
    elif is_longer:
        config.minutes += seconds / 60
    start.following = next_model(config, progress, processes)
    if is_longer and not start.following:
        steps = max(1, round(60 * more * progress.step / (seconds - progress.began)))
        if progress.step < progress.most:  # then others may follow
            steps = min(steps, progress.most - progress.step)
        print(f"about {steps:,} more steps in {more:g} min")
        config.max_iters = progress.step + steps


def check_schedule(config):
    """Raise UserError for a final rate above the peak. Print that the warm-up is cut off."""
    if config.min_lr > config.learning_rate:
        raise UserError(
            f"--min_lr={config.min_lr} is above --learning_rate={config.learning_rate}: "
            "give a lower --min_lr"
        )
    if config.warmup_iters > config.max_iters:
        print(f"--warmup_iters={config.warmup_iters}: the run ends at step {config.max_iters}")
