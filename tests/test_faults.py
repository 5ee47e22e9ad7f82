"""What serves the training may fail without it, what must agree is compared, and what is not the
run's stays as it is."""

import re

import pytest

from gptling.pretrained import find_checkpoint
from gptling.run import list_checkpoints
from tests.conftest import edit_json, read_log
from tests.edits import copy_edited
from tests.scripts import MINE, one_line, output_here, output_of, run_script
from tests.test_processes import finish, torchrun

RESUME = ["--out_dir=out/mine", "--resume"]
FORWARD = "        x = self.hidden(idx, padding_mask, cache)  # (B, T, C)\n"
GENERATE = '        require(idx.size(1) > 0, "idx has no tokens'
LOSSES = '        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")\n'
STEP = "        for optimizer in optimizers:\n            if not overflow:\n"
RAISE = "raise RuntimeError('in eval mode')\n"


@pytest.fixture
def copy_with(here):
    """A function that copies the project with changes. Returns train.py of the copy."""

    def copy(*changes):
        copy_edited(here, ["model.py", "train.py", "prepare.py", "gptling"], changes)
        return here / "train.py"

    return copy


# ---------------------------------------------------------------- save first
@pytest.mark.parametrize(
    "change, name",
    [
        ((FORWARD, f"        if targets is not None and not self.training:\n            {RAISE}"
          + FORWARD), "evaluate"),
        ((GENERATE, f"        {RAISE}{GENERATE}"), "write_sample"),
    ],
)  # fmt: skip
def test_an_evaluation_or_a_sample_that_fails_costs_a_line(change, name, here, copy_with):
    output = output_of(copy_with(change), *MINE, cwd=here)
    assert len(re.findall(rf"{name} failed at model.py:\d+: .*in eval mode", output)) == 2
    assert [path.name for path in list_checkpoints(here / "out/mine")] == [
        "checkpoint-10", "checkpoint-20"
    ]  # fmt: skip


def test_a_step_that_float16_skips_fifty_times_in_a_row_is_an_error(here, copy_with):
    nan = LOSSES.replace("return ", "return (0 * logits.sum()).sqrt() + ")
    script = copy_with((LOSSES, nan))
    process = run_script(script, *MINE, "--dtype=float16", "--max_iters=80", cwd=here)
    one_line(process, "no gradient was finite in 50 steps", "--dtype=float32")


# ---------------------------------------------------------------- what must agree is compared
def test_the_best_checkpoint_is_the_best_over_the_tokens_that_count_now(finished):
    metrics = finished / "out/mine/checkpoint-20/metrics.json"
    edit_json(metrics, val_loss=0.01, val_tokens=16)  # as if evaluated on a few easy tokens
    output = output_here("train.py", *RESUME, "--max_iters=40", cwd=finished)
    evaluated = [entry for entry in read_log(finished / "out/mine")[2:] if "val_loss" in entry]
    best = min(evaluated, key=lambda entry: entry["val_loss"])
    assert find_checkpoint(finished / "out/mine").name == f"checkpoint-{best['step']}"
    assert "(best)" in output


def test_settings_that_were_edited_in_the_runs_file_are_named(finished):
    file = finished / "out/mine/config.toml"
    file.write_text(file.read_text().replace("learning_rate = 0.01", "learning_rate = 0.5"))
    output = output_here("train.py", *RESUME, "--max_iters=22", cwd=finished)
    assert "config.toml was edited (learning_rate), which has no effect: give flags" in output


def test_a_run_that_has_ended_ends_a_chain_of_jobs_without_an_error(finished):
    output = output_of("train.py", *MINE, "--auto_resume", cwd=finished)
    assert "out/mine has finished its 20 steps" in output


def test_processes_whose_weights_part_are_an_error(here, copy_with):
    noise = "        for p in model.parameters():\n            p.grad += rank\n"
    script = copy_with((STEP, noise + STEP))
    output = finish(torchrun(script, *MINE, cwd=here), code=1)
    assert "the processes have different weights" in output


# ---------------------------------------------------------------- odd places
@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_a_part_of_torchruns_environment_is_one_line(name, here):
    process = run_script("train.py", *MINE, cwd=here, **{name: "2"})
    one_line(process, "MASTER_ADDR", "torchrun")
