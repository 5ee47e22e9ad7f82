"""--teacher: the objective, its place in a run, and that a run of several models loses nothing."""

import shutil
from functools import partial

import pytest
import torch

from gptling.teachers import ROWS_AT_ONCE, with_teachers
from model import GPT, GPTConfig
from tests.conftest import TINY, one_line, read_log, run_here, small, weights
from tests.test_resume import after_step, assert_equal_runs

FLAGS = [*TINY, "--dataset=mine", "--dropout=0.2", "--seed=5"]
train = partial(run_here, "train.py")


class Capped(GPT):
    def logits(self, x):
        return 5 * torch.tanh(super().logits(x) / 5)

    def losses(self, logits, targets):
        return 2 * super().losses(logits, targets)


@pytest.mark.parametrize("model_class", [GPT, Capped])
def test_the_objective_mixes_the_text_and_the_mean_probabilities_of_the_teachers(model_class):
    """As the formula says in float64, for more rows than are in memory together, without targets
    that do not count, and through an edit of GPT.logits and GPT.losses."""
    torch.manual_seed(0)
    shapes = [(2, 16), (1, 32), (1, 16)]
    models = [
        model_class(GPTConfig(block_size=32, vocab_size=50, n_layer=n, n_head=2, n_embd=C))
        for n, C in shapes
    ]
    for p in (p for model in models for p in model.parameters()):
        torch.nn.init.normal_(p, std=0.3)
    model, *teachers = (model.double() for model in models)
    B = ROWS_AT_ONCE // 32 + 3
    idx, targets = torch.randint(50, (2, B, 32))
    targets[targets % 3 == 0] = -100
    share, T = 0.7, 1.5
    config = small(teacher="a,b", teacher_share=share, teacher_temperature=T)
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
    """The teacher is the checkpoint that was the best one when the run began. Another one in its
    place is named."""
    flags = ["--teacher=out/mine", *FLAGS, "--recompute", "--gradient_accumulation_steps=2"]
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
    assert not weights(finished / "out/plain")["wte.weight"].equal(
        weights(finished / "out/whole")["wte.weight"]
    )
    best = next(finished.glob("out/mine/checkpoint-20"))
    shutil.copy(finished / "out/plain/checkpoint-20/model.safetensors", best)
    process = train("--resume", "--max_iters=25", "--out_dir=out/parts", cwd=finished)
    assert b"changed since that checkpoint: teachers.json" in process.stdout


def test_a_teacher_may_have_another_size_and_the_plan_keeps_to_its_context(finished):
    flags = [*FLAGS, "--teacher=out/mine", "--n_layer=1", "--n_embd=32"]
    assert train(*flags, "--out_dir=out/b", cwd=finished).returncode == 0
    minutes = ["--minutes=0.02", "--dataset=mine", "--teacher=out/mine,out/b", "--out_dir=out/c"]
    process = train(*minutes, cwd=finished)
    assert process.returncode == 0 and b"block_size=16" in process.stdout
    assert b"teacher_share=0.667" in process.stdout
    process = train(*minutes[1:], *TINY, "--block_size=32", "--out_dir=out/d", cwd=finished)
    one_line(process, "--block_size=32", "at most 16 tokens")
