"""--teacher: the objective, its place in a run, and that a run of several models loses nothing."""

import re
import shutil
import tomllib

import pytest
import torch
from safetensors.torch import load_file

from gptling import startup
from gptling.clock import next_model
from gptling.evaluation import ROWS_AT_ONCE
from gptling.pretrained import find_checkpoint
from gptling.run import RunDirectory, list_models, load_training_state, read_metrics
from gptling.state import Progress
from gptling.teachers import can_teach, with_teachers
from model import GPT, GPTConfig
from tests.conftest import one_process, randomised, read_log, small, weights
from tests.edits import copy_edited
from tests.scripts import MINE, TINY, one_line, output_of, run_script
from tests.test_resume import after_step, assert_equal_runs, saver, train

FLAGS = [*MINE, "--dropout=0.2", "--seed=5"]


class Capped(GPT):
    def logits(self, x):
        return 5 * torch.tanh(super().logits(x) / 5)

    def losses(self, logits, targets):
        return 2 * super().losses(logits, targets)


@pytest.mark.parametrize("model_class, share", [(GPT, None), (Capped, 0.7)])
def test_the_objective_mixes_the_text_and_the_teachers_mean_probabilities(model_class, share):
    """As the formula says in float64, for more rows than are in memory together, without targets
    that do not count, and through an edit of GPT.logits and GPT.losses."""
    shapes = [(2, 16), (1, 32), (1, 16)]
    configs = [GPTConfig(32, vocab_size=50, n_layer=n, n_head=2, n_embd=C) for n, C in shapes]
    model, *teachers = (randomised(model_class(config)).double() for config in configs)
    B = ROWS_AT_ONCE // 32 + 3
    idx, targets = torch.randint(50, (2, B, 32))
    targets[targets % 3 == 0] = -100
    T = 1.5
    config = small(teacher="a,b", teacher_share=share, teacher_temperature=T)
    share = share or 2 / 3  # by default the text counts as one teacher
    forward = with_teachers(model, model, teachers, config)
    _, loss, terms = forward(idx, targets)
    objective = loss + sum(terms.values())

    logits = model(idx)[0]
    probs = sum((teacher(idx)[0] / T).softmax(-1) for teacher in teachers) / 2
    soft = -(probs * (logits / T).log_softmax(-1)).sum(-1)
    hard = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    factor = 2 if model_class is Capped else 1
    expected = factor * ((1 - share) * hard + share * T**2 * soft)[targets != -100].mean()
    torch.testing.assert_close(objective, expected)
    ours = torch.autograd.grad(objective, model.parameters())
    torch.testing.assert_close(ours, torch.autograd.grad(expected, model.parameters()))


def test_a_run_with_a_teacher_resumes_bit_for_bit_and_validates_on_the_text_alone(finished):
    """The teacher is the best checkpoint when the run begins. Another one in its place is named."""
    flags = ["--teacher=out/mine", *FLAGS, "--recompute", "--later_tokens=0.5"]
    flags += ["--gradient_accumulation_steps=2"]
    assert train(*flags, "--out_dir=out/whole", cwd=finished).returncode == 0
    change = after_step("if done == 13: processes.signal = 2")
    flags += ["--out_dir=out/parts"]
    assert train(*flags, cwd=finished, changes=[change]).returncode == 130
    process = train("--resume", "--teacher=out/mine", "--out_dir=out/parts", cwd=finished)
    assert b"teacher" not in process.stdout.partition(b"step")[0]  # it is the same one
    assert_equal_runs(finished / "out/whole", finished / "out/parts", 20)
    entries = read_log(finished / "out/whole")
    assert all(entry["is_cross_entropy"] for entry in entries if "val_loss" in entry)
    assert any(entry.get("teacher") for entry in entries)

    assert train(*FLAGS, "--out_dir=out/plain", cwd=finished).returncode == 0
    plain, taught = (weights(finished / "out" / name)["wte.weight"] for name in ("plain", "whole"))
    assert not torch.equal(plain, taught)
    file = "checkpoint-20/model.safetensors"
    shutil.copy(finished / "out/plain" / file, finished / "out/mine" / file)
    process = train("--resume", "--max_iters=25", "--out_dir=out/parts", cwd=finished)
    assert b"changed since that checkpoint: teachers.json" in process.stdout


def test_a_teacher_may_have_another_size_and_the_plan_keeps_to_its_context(finished):
    flags = [*FLAGS, "--teacher=out/mine", "--n_layer=1", "--n_embd=32"]
    assert train(*flags, "--out_dir=out/b", cwd=finished).returncode == 0
    minutes = ["--minutes=0.02", "--dataset=mine", "--teacher=out/mine,out/b", "--out_dir=out/c"]
    process = train(*minutes, cwd=finished)
    assert process.returncode == 0 and b"block_size=16" in process.stdout


# ---------------------------------------------------------------- a run of several models
# Minutes, seconds so far, models before this one, the next one. A run of --max_iters has 0 minutes.
NEXT = [(0, 600, 0, None), (16, 600, 0, None), (17, 600, 0, "taught by 1")]
NEXT += [(36, 600, 0, "taught by 1"), (37, 600, 0, "another"), (37, 1200, 1, "taught by 2")]
NEXT += [(50, 1200, 1, "another"), (999, 1800, 2, "taught by 3")]


@pytest.mark.parametrize("minutes, seconds, before, expected", NEXT)
def test_time_that_one_model_cannot_use_is_for_another(minutes, seconds, before, expected):
    """A model of ten minutes that has ended. A teacher adds a third to the time of a step."""
    config = small(minutes=minutes, models_before=before, max_iters=300, out_dir="out/x")
    progress = Progress(300, step=300, seconds_before=seconds - startup.seconds())
    progress.began = seconds - 600
    progress.most = 300
    following = next_model(config, progress, one_process())
    assert (following is None) == (expected is None)
    if following:
        n = following.models_before if following.teacher else 0
        assert following.models_before == before + 1
        assert expected == (f"taught by {n}" if n else "another")
        left = (60 * minutes - seconds) / 600
        steps = 300 * min(2, left / (1 + n / 3)) if n else 300
        assert following.max_iters == pytest.approx(steps, rel=0.01)
        assert next_model(following, progress, one_process()) is None or not n
    progress.most = 301  # it has ended by --max_iters
    assert next_model(config, progress, one_process()) is None


@pytest.mark.parametrize("evaluated, kept", [(True, 5), (False, 10)])
def test_the_best_of_a_model_is_kept_as_a_teacher_that_has_ended(evaluated, kept, tmp_path):
    """Also if a kill comes before the next model's first checkpoint. The last one is kept if the
    run was stopped in its evaluation. One with your file is no checkpoint of the next model."""
    save = saver(tmp_path)
    for step, metrics in ((5, {"val_loss": 1.0}), (10, {"val_loss": 2.0} if evaluated else {})):
        save({"step": step} | metrics)
        (tmp_path / f"checkpoint-{step}/{step}.gguf").touch()
    RunDirectory(tmp_path, one_process()).keep_teacher()
    assert (tmp_path / f"model-1-checkpoint-{15 - kept}/{15 - kept}.gguf").exists()
    (teacher,) = list_models(tmp_path)
    assert teacher.name == "teacher-1" and read_metrics(teacher)["step"] == kept
    assert load_training_state(teacher)["progress"]["step"] == 10


class TakesIds(GPT):
    def losses(self, logits, ids):
        return -logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


class Soft(GPT):
    def forward(self, *inputs, **options):
        logits, loss = super().forward(*inputs, **options)
        return torch.tanh(logits), loss


class Pair(GPT):
    def hidden(self, *inputs):
        return super().hidden(*inputs), 0.1

    def forward(self, idx, last_only=False):
        return self.logits(self.hidden(idx)[0]), None


@pytest.mark.parametrize("model_class", [GPT, TakesIds, Soft, Pair])
def test_a_model_whose_edits_teachers_do_not_know_has_no_second_model(model_class):
    """Without dropout, whose logits would differ."""
    model = model_class(GPTConfig(8, 11, 1, 2, 4, dropout=0.5))
    assert can_teach(model) == (model_class is GPT) and model.training


def test_the_text_is_compared_before_another_model_begins(finished):
    """A model that has ended is followed by another one for the same text."""
    file = finished / "out/mine/checkpoint-20/training_state.pt"
    saved = load_training_state(file.parent)
    saved["progress"]["most"] = 20
    torch.save(saved, file)
    (finished / "mine.txt").write_text("another text\n" * 200)
    output_of("prepare.py", "mine.txt", "--overwrite", cwd=finished)
    resume = ["--resume", "--minutes=9", "--out_dir=out/mine"]
    one_line(train(*resume, cwd=finished), "data/mine is not out/mine's training text")


@pytest.mark.slow
def test_a_run_of_several_models_loses_nothing_when_it_is_killed(here):
    """In its second model before and after the first checkpoint, and in the last one."""
    script = here / "train.py"
    copy_edited(here, ["gptling", "model.py", "prepare.py", "train.py"], ())
    schedule = here / "gptling/schedule.py"
    constants = re.sub("MAX_EPOCHS = 16", "MAX_EPOCHS = 0", schedule.read_text())
    schedule.write_text(constants.replace("SHORT_TEXT_STEPS = 600", "SHORT_TEXT_STEPS = 12"))
    die = "import os; os.environ.get('DIES') == f'{config.models_before} {done}' and os._exit(9)"
    line, changed = after_step(die)
    script.write_text(script.read_text().replace(line, changed))
    sizes = [flag for flag in TINY if "max_iters" not in flag and "eval_interval" not in flag]
    flags = ["--dataset=mine", *sizes, "--minutes=1", "--eval_interval=5", "--log_interval=1"]

    whole = output_of(script, *flags, "--out_dir=out/whole", cwd=here)
    assert whole.count("has another seed") == 2 and "learns from those before it" in whole
    flags += ["--out_dir=out/parts", "--auto_resume"]
    for place in ("1 3", "1 9", "3 7"):
        process = run_script(script, *flags, cwd=here, DIES=place)
        assert process.returncode == 9, process.stderr.decode()
        assert b"was edited" not in process.stdout
    runs = here / "out/whole", here / "out/parts"
    losses = {path: read_metrics(path)["val_loss"] for path in list_models(runs[1])}
    assert find_checkpoint(runs[1]) == min(losses, key=losses.get)
    output_of(script, *flags, cwd=here)
    assert_equal_runs(*runs, 24)
    preset = tomllib.loads((runs[1] / "config.toml").read_text())  # of the first model
    assert preset.keys().isdisjoint({"teacher", "teacher_share", "max_iters"})
    assert [entry["step"] for entry in read_log(runs[0])][-1] == 12 + 12 + 12 + 24
    for n in (1, 2, 3):
        name = f"teacher-{n}/model.safetensors"
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes()
    models = [load_file(run / "model.safetensors") for run in list_models(runs[0])]
    assert len({model["wte.weight"].sum().item() for model in models}) == len(models)
    assert b"has finished its 24 steps" in run_script(script, *flags, cwd=here).stdout
