"""You can edit model.py without knowing any other file: each patch of docs/experiments/ and some
edits take effect in training, evaluation and sampling, and are stored as what they are."""

import functools
import gc
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from gptling.decoding import speed_up
from gptling.devices import replace_operators
from gptling.evaluation import loss_terms
from gptling.explain import run_and_record
from gptling.gpt2_format import load, save
from gptling.processes import recompute_activations
from gptling.run import load_training_state
from gptling.tokenizers import load_tokenizer
from model import GPT
from tests import try_model
from tests.conftest import assert_equal, read_log, small, weights
from tests.edits import INIT, LOGITS, LOSS, copy_edited, edited
from tests.scripts import MINE, ROOT, TEXT, TINY, run_here
from tests.test_devices import cross_entropy
from tests.test_explain import attention_of
from tests.try_model import generate, padded

pytestmark = pytest.mark.gpt2  # patches and edits are of the unchanged code
PATCHES = sorted((ROOT / "docs" / "experiments").glob("*.patch"))
SLOW = pytest.mark.slow
SIZES = {"block_size": 16, "vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 32}


@dataclass
class Hack:
    """Changes of the code, and how they differ from a change of what a GPT-2 computes."""

    changes: tuple
    gpt2: bool = False  # whether it still computes what a GPT-2 computes
    sizes: dict = field(default_factory=dict)  # fields of GPTConfig
    terms: tuple = ()  # what forward returns beside the loss


ATTENTION = "        x = x + self.attn(self.ln_1(x), padding_mask=padding_mask, cache=cache)\n"
MASK = "        return mask\n"
MLP = "        self.mlp = MLP(config)\n"
DISTANCE = "past + torch.arange(mask.size(-2))[:, None] - torch.arange(mask.size(-1))"
ALIBI = f"""        slopes = 2.0 ** (-8 * torch.arange(1, self.n_head + 1) / self.n_head)
        bias = -slopes[:, None, None] * ({DISTANCE})
        return bias.masked_fill(~mask, -math.inf)
"""
CROSS_ENTROPY = "        return F.cross_entropy("
Z = "        z = 0.01 * self.training * logits.logsumexp(-1) ** 2 * (targets != -100)\n"
Z_LOSS = (CROSS_ENTROPY, Z + CROSS_ENTROPY.replace("return", "return z +"))
AFTER_NEXT = """        y = self.head_2(x[:, :-1]).flatten(0, 1)
        after = self.losses(y, targets[:, 1:].flatten()).sum() / n_targets
"""
HEAD_2 = "self.head_2 = nn.Linear(config.n_embd, config.vocab_size, bias=False)"
GATE = (
    (MLP, f"{MLP}        self.gate = nn.Parameter(torch.ones(1))\n"),
    ("return x + self.mlp(self.ln_2(x))", "return x + self.gate * self.mlp(self.ln_2(x))"),
)
GELU = 'F.gelu(self.c_fc(x), approximate="tanh")'
ERF, RELU = (GELU, "F.gelu(self.c_fc(x))"), (GELU, "F.relu(self.c_fc(x))")
NAMES = [patch.stem for patch in PATCHES if patch.stem != "words"]
SIZED = {"gqa": {"n_kv_head": 1}, "softcap": {"logit_cap": 2.0}, "window": {"window": 5}}
SAME = ("smoothing", "lion", "invsqrt")
HACKS = {name: Hack((name,), name in SAME, SIZED.get(name, {})) for name in NAMES}
HACKS["moe"].terms = ("balance",)
HACKS |= {
    "z-loss": Hack((Z_LOSS,), gpt2=True),
    "erf form of GELU": Hack((ERF,)),
    "ALiBi": Hack(((MASK, ALIBI),)),
    "untied": Hack(
        ((', bias=False, device="meta")', ", bias=False)"),
         ("        self.lm_head.weight = self.wte.weight", "        # ")),
    ),
    "second head": Hack(
        ((INIT, f"        {HEAD_2}\n{INIT}"),
         (LOSS, f'{AFTER_NEXT}{LOSS}, {{"after_next": after}}')),
        terms=("after_next",),
    ),
    "gate": Hack(GATE),
    "stored buffer": Hack(
        ((INIT, f'        self.register_buffer("gain", torch.tensor(1.5))\n{INIT}'),
         (LOGITS, "return self.gain * self.lm_head(x)")),
    ),
}  # fmt: skip
QUICK = ("gqa", "moe", "softcap", "z-loss", "ALiBi", "gate", "stored buffer")  # CI runs all


def some(names, quick):
    """The names as parameters of a test, which is slow for all but the quick ones."""
    return [name if name in quick else pytest.param(name, marks=SLOW) for name in names]


# Whose additional parameters leave the logits as they are: that model loads without a flag.
SAME_LOGITS = {("gate", "unchanged"), ("second head", "unchanged"), ("second head", "ours")}
MODELS = some([n for n in HACKS if n not in ("lion", "invsqrt")], QUICK)  # not train.py's


def random_model(module, **sizes):
    """In eval mode, with weights that are large enough for a change to show."""
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(**SIZES | sizes)).eval()
    for name, parameter in model.named_parameters():
        std = 3 * parameter.size(-1) ** -0.5 if parameter.dim() > 1 else 0.3
        mean = 1.0 if name.endswith("weight") and parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=min(std, 0.3))
    return model


def hacked_model(name, **sizes):
    return random_model(edited(*HACKS[name].changes).model, **HACKS[name].sizes | sizes)


def batch():
    idx, targets = torch.randint(97, (2, 4, 16))
    targets[0, :3] = -100
    return idx, targets


def results(model, idx, targets):
    """The loss, the terms beside it, and the gradients of all parameters by their sum."""
    terms, parameters = loss_terms(model, model(idx, targets), targets), [*model.parameters()]
    return terms, torch.autograd.grad(sum(terms.values()), parameters, materialize_grads=True)


# ---------------------------------------------------------------------------- training
@pytest.mark.parametrize("name", MODELS)
def test_the_fast_cross_entropy_and_recomputed_blocks_change_no_loss_and_no_gradient(name):
    """Of any edit: the fast one takes the place of PyTorch's operator."""
    model, (idx, targets) = hacked_model(name).train(), batch()
    with mock.patch("torch.nn.functional.cross_entropy", cross_entropy):
        expected = results(model, idx, targets)
    replace_operators()
    plain, evaluated = results(model, idx, targets), model.eval()(idx, targets)[1]
    torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-6)
    assert set(plain[0]) == {"loss", *HACKS[name].terms}
    model.train()
    recompute_activations(model)
    torch.testing.assert_close(results(model, idx, targets), plain)
    torch.testing.assert_close(model.eval()(idx, targets)[1], evaluated)
    if name in ("z-loss", "smoothing"):  # of the training loss alone
        assert abs(plain[0]["loss"] - evaluated) > 1e-3
    else:
        torch.testing.assert_close(plain[0]["loss"], evaluated)


@pytest.mark.parametrize("name", MODELS)
def test_each_optimizer_moves_what_has_a_gradient_from_a_known_start(name):
    scripts, sizes = edited(*HACKS[name].changes), SIZES | {"n_embd": 64} | HACKS[name].sizes
    for optimizer in ("adamw", "muon"):
        torch.manual_seed(0)
        model, (idx, targets) = scripts.model.GPT(scripts.model.GPTConfig(**sizes)), batch()
        loss = model.eval()(idx, targets)[1].item()
        assert loss == pytest.approx(math.log(97), rel=0.05)
        before = [parameter.clone() for parameter in model.parameters()]
        sum(loss_terms(model, model.train()(idx, targets), targets).values()).backward()
        for each in scripts.train.configure_optimizers(model, small(optimizer=optimizer)):
            for group in each.param_groups:
                group["lr"] = 1e-2 * group.get("lr_scale", 1)
            each.step()
        for old, (parameter_name, new) in zip(before, model.named_parameters(), strict=True):
            if new.grad is not None and new.grad.any():
                assert not torch.equal(old, new), f"{optimizer} has left {parameter_name}"
            assert new.isfinite().all()


@torch.no_grad()
def test_a_mask_that_is_changed_after_loading_takes_effect(tmp_path):
    """By another function, in the buffer, and by another buffer."""
    save(random_model(sys.modules["model"], n_layer=1), tmp_path)
    model, idx = load(GPT, tmp_path), batch()[0]
    attn, wide = model.h[0].attn, model(idx)[0]
    attn.mask = lambda mask, past: mask.triu(past - 2)
    narrow = model(idx)[0]
    assert not torch.allclose(wide, narrow, atol=0.1)
    del attn.mask
    assert torch.equal(model(idx)[0], wide)
    attn.causal_mask.copy_(attn.causal_mask.triu(-2))
    assert torch.equal(model(idx)[0], narrow)
    attn.causal_mask = torch.ones_like(attn.causal_mask).tril()
    assert torch.equal(model(idx)[0], wide)


def test_norms_and_new_parameters_keep_what_they_were():
    new = "        self.ln_2.weight.data.fill_(0.5)\n"
    new += "        self.mix = nn.Parameter(torch.ones(2, 8))\n"
    module = edited((MLP, new + MLP)).model
    model = module.GPT(module.GPTConfig(**SIZES))
    assert all((block.ln_2.weight == 0.5).all() for block in model.h)
    assert model.uninitialised == [f"h.{i}.mix" for i in range(len(model.h))]


# ---------------------------------------------------------------------------- sampling
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_text_is_the_same_cached_batched_past_the_window_and_explained(name):
    model = hacked_model(name)
    idx = torch.randint(97, (2, 16))
    try_model.check_logits(model, idx)
    try_model.check_generation(model)
    logits, weights, _ = run_and_record(model, idx[:1])
    torch.testing.assert_close(logits, model(idx)[0][0], rtol=1e-4, atol=1e-4)
    expected = attention_of(model, idx[0].tolist())
    assert expected.shape == (2, 4, 16, 16) and (expected[0] - expected[1]).abs().max() > 0.01
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("name", MODELS)
def test_faster_layers_and_compiled_steps_give_the_same_text(name, compile, monkeypatch, capsys):
    """Past the window too."""
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    model, idx = hacked_model(name, n_embd=64 if compile else 256), torch.randint(97, (2, 8))
    expected = generate(model, idx, 14, temperature=0)
    assert torch.equal(generate(speed_up(model, compile), idx, 14, temperature=0), expected)
    assert "slower decoding" not in capsys.readouterr().err


@pytest.mark.parametrize("prompts", [[[5]], [[5], [6, 7, 8, 9, 10]]])
@pytest.mark.parametrize("n", [1, 4])
def test_what_looks_back_without_the_cache_is_drawn_without_it(n, prompts, capsys):
    """At the token n before. A line says so."""
    back = f"        x = (x + F.pad(x, (0, 0, {n}, 0))[:, : x.size(1)]) / 2\n"
    model = random_model(edited((ATTENTION, back + ATTENTION)).model)
    idx, mask = padded(prompts)
    n_new = SIZES["block_size"] - idx.size(1)
    drawn = generate(speed_up(model), idx, n_new, temperature=0, padding_mask=mask)
    said = capsys.readouterr().err
    assert "cache" in said and said.count("\n") == 1
    expected = try_model.greedy_without_cache(model, prompts[-1], n_new)
    assert drawn[-1].tolist() == expected  # the last has no padding, which the layer would see


HIDDEN_LOGIT = LOGITS, f"{LOGITS}.index_fill(-1, torch.tensor([3]), -math.inf)"
TWICE = "return logits[:, -1].float()", "return 2 * logits[:, -1].float()"
NORMED = "return F.linear(F.normalize(x, dim=-1), F.normalize(self.lm_head.weight, dim=-1))"
SAID = [(HIDDEN_LOGIT, ""), (TWICE, ""), ((LOGITS, NORMED), "slower decoding")]


@pytest.mark.parametrize("change, words", SAID)
def test_only_faster_layers_that_fail_are_left_out_and_said(change, words, capsys):
    """Not a hidden logit, nor another next step."""
    model, texts = random_model(edited(change).model, n_embd=256), []
    for each in (model, speed_up(model)):
        options = {"temperature": 0.5, "generator": torch.Generator().manual_seed(1)}
        texts.append(generate(each, torch.tensor([[5, 6, 7]]), 30, **options))
    said = capsys.readouterr().err
    assert torch.equal(*texts) and words in said and bool(words) == bool(said)


# ---------------------------------------------------------------------------- what is stored
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_stored_as_what_it_is(name, tmp_path):
    """And neither model.py loads what the other has made, unless both compute the same."""
    import transformers

    hack, theirs = HACKS[name], transformers.AutoModelForCausalLM
    model, idx = hacked_model(name), torch.randint(97, (3, 16))
    ours, unchanged = tmp_path / "ours", tmp_path / "unchanged"
    reason = save(model, ours)
    again = load(type(model), ours)
    assert again.config == model.config
    assert_equal(again(idx)[0], model(idx)[0])
    assert_equal(again.state_dict(), model.state_dict())
    save(random_model(sys.modules["model"]), unchanged)
    stored = json.loads((ours / "config.json").read_text())
    if hack.gpt2:
        assert stored["model_type"] == "gpt2" and not reason and stored["attn_pdrop"] == 0.0
        expected = theirs.from_pretrained(ours).eval()(idx).logits
        torch.testing.assert_close(model(idx)[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(load(GPT, ours)(idx)[0], model(idx)[0])
        load(type(model), unchanged)
        return
    assert stored["model_type"] == "gptling" and stored["not_gpt2"] == reason
    assert "GPT2LMHeadModel" not in stored["architectures"]
    with pytest.raises(ValueError, match="gptling"):
        theirs.from_pretrained(ours)
    for theirs, path, sizes in ((GPT, ours, {}), (type(model), unchanged, hack.sizes)):
        if (name, path.name) in SAME_LOGITS:
            load(theirs, path)
        else:
            with pytest.raises((ValueError, RuntimeError)):
                load(theirs, path, **sizes)


def test_a_change_that_the_first_weights_hide_shows_at_a_later_save(tmp_path):
    """Small logits are far from their cap."""
    model = hacked_model("softcap", logit_cap=15.0)
    for scale, kind in ((1e-3, "gpt2"), (1e3, "gptling")):
        model.wte.weight.data.mul_(scale)
        assert bool(save(model, tmp_path)) == (kind == "gptling")
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind


def test_shared_blocks_are_stored_once(tmp_path):
    save(hacked_model("shared"), tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[1] for name in names if name.startswith("h.")} == {"0"}


# ---------------------------------------------------------------------------- in a run
@pytest.fixture
def run(here):
    """A function that runs train.py or sample.py in this process, of the code with an edit. Returns
    its standard output, or with code=1 what it ends with."""

    def run(changes, script, *flags, code=0):
        process = run_here(f"{script}.py", *flags, cwd=here, changes=changes)
        assert process.returncode == code, process.stderr.decode()
        gc.collect()  # what an error keeps, such as the lock of the directory
        return (process.stderr if code else process.stdout).decode()

    return run


TRAIN = [*MINE, "--max_iters=6", "--eval_interval=4", "--log_interval=1"]
RESUME = ["--out_dir=out/mine", "--resume"]


def resumed_and_not(run, changes, tmp_path, *flags):
    """The outputs and last checkpoints of a run, and of one resumed after step 4: equal bytes."""
    said = run(changes, "train", *TRAIN, *flags)
    out = tmp_path / "out"
    shutil.copytree(out / "mine/checkpoint-4", out / "again/checkpoint-4")
    outputs = said, run(changes, "train", "--out_dir=out/again", "--resume")
    runs = [out / name / "checkpoint-6" for name in ("mine", "again")]
    for file in ("config.json", "model.safetensors", "metrics.json"):
        assert (runs[0] / file).read_bytes() == (runs[1] / file).read_bytes(), file
    return outputs, runs


RUNS = [name for name in HACKS if "erf" not in name]  # which is too near after 6 steps


@pytest.mark.parametrize("name", some(RUNS, ("gate", "z-loss")))
def test_a_run_resumes_bit_for_bit_and_samples(name, run, tmp_path):
    hack = HACKS[name]
    flags = [f"--{field}={value}" for field, value in hack.sizes.items()]
    flags += ["--optimizer=lion"] * (name == "lion")
    (said, _), (whole, _) = resumed_and_not(run, hack.changes, tmp_path, *flags)
    assert said.count("gptling") == (not hack.gpt2)  # why its checkpoints are not GPT-2s
    assert ("init_weights: h.0.gate, h.1.gate\n" in said) == (name == "gate")
    assert json.loads((whole / "config.json").read_text()).items() >= hack.sizes.items()

    sample = ["out/mine", "--prompt=12 gr", "--max_new_tokens=30"]
    text = run(hack.changes, "sample", *sample)
    assert text.startswith("12 gr") and len(text) > 30
    if hack.gpt2 or (name, "ours") in SAME_LOGITS:
        assert run((), "sample", *sample) == text
    else:
        assert "made it: out/mine/checkpoint-" in run((), "sample", *sample, code=1)


@pytest.mark.parametrize("name", ["second head", "moe"])
def test_a_term_of_the_loss_is_trained_on_and_logged_beside_the_loss(name, run, tmp_path):
    """Not in the loss, which is compared with the validation loss."""
    output = run(HACKS[name].changes, "train", *TRAIN, "--eval_interval=6")
    log = read_log(tmp_path / "out" / "mine")
    (term,), steps = HACKS[name].terms, [entry for entry in log if "loss" in entry]
    assert len(steps) == 6 and all(entry[term] > 0 for entry in steps)
    assert f"{term} {steps[-1][term]:.3f}" in output
    evaluation = next(entry for entry in log if "val_loss" in entry)
    assert term not in evaluation
    if name == "second head":
        assert steps[-1][term] < steps[0][term] - 0.05


LOSSES = '        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")'
NO_CROSS_ENTROPIES = [
    (LOSS, f"{LOSS} + 1e-3 * x.square().mean()"),
    # Some targets are left out, in any batch of an evaluation.
    (LOSSES, f"{LOSSES} * (torch.arange(len(targets)) < 8)"),
    (LOSSES, f"{LOSSES} * (targets != 3)"),
]


@pytest.mark.parametrize("change", NO_CROSS_ENTROPIES)
def test_a_validation_loss_that_is_no_cross_entropy_is_reported(change, run, tmp_path):
    """At each evaluation, in the log, and by --eval_only."""
    said = run((change,), "train", *TRAIN)
    warning = "not the cross-entropy of the logits: see GPT.losses"
    assert said.count(warning) == 2
    evaluated = [e for e in read_log(tmp_path / "out" / "mine") if "val_loss" in e]
    assert [e["is_cross_entropy"] for e in evaluated] == [False, False]
    flags = "--dataset=mine", "--eval_only", "--init_from=out/mine"
    assert warning in run((change,), "train", *flags)


LOOP = "        batch = data.batch(config, step, processes)"


def test_a_setting_that_the_schedule_changed_is_restored(run, tmp_path):
    """A flag that is given wins."""
    groups = "        for group in [g for each in optimizers for g in each.param_groups]:\n"
    decayed = LOOP, f'{groups}            group["weight_decay"] *= 0.5\n{LOOP}'
    _, runs = resumed_and_not(run, (decayed,), tmp_path, "--weight_decay=0.8")
    shutil.rmtree(runs[1])
    said = run((decayed,), "train", "--out_dir=out/again", "--resume", "--weight_decay=100")
    assert "weight_decay: 0.8 -> 100.0" in said
    state = load_training_state(runs[1])
    assert state["settings"][0][1][0]["weight_decay"] == 25


@pytest.mark.parametrize("change", [".extend(optimizers)", "[0].param_groups[1:] = []"])
def test_a_parameter_that_is_not_in_one_optimizer_is_an_error(change, run):
    check = "    state = State("
    said = run(((check, f"    optimizers{change}\n{check}"),), "train", *TRAIN, code=1)
    assert "optimizers" in said and "configure_optimizers has to give it to one" in said


def test_what_a_checkpoint_cannot_call_fails_before_the_first_step(run, here):
    """An hour of training would end at its first checkpoint."""
    nanogpt = (
        ("targets=None, *, padding_mask=None, cache=None, last_only=False):", "targets=None):"),
        ("self.hidden(idx, padding_mask, cache)", "self.hidden(idx)"),
        ("self.logits(x[:, -1:] if last_only else x)", "self.logits(x)"),
    )
    with pytest.raises(TypeError, match="last_only"):
        run(nanogpt, "train", *TRAIN)
    assert not (here / "out").exists()


@SLOW
def test_the_weight_of_a_term_may_change_and_what_is_computed_may_not(run, tmp_path):
    """A new field of GPTConfig is a flag at once. The unchanged code still loads the model."""
    old, new = HACKS["z-loss"].changes[0]
    weight = "    bias: bool = True", "    z_loss: float = 0.0\n    bias: bool = True"
    changes = ((old, new.replace("0.01", "self.config.z_loss")), weight)
    run((), "train", *TRAIN)
    said = run(changes, "train", *RESUME, "--max_iters=8", "--z_loss=0.1")
    assert re.search(r"z_loss: .*0\.1", said)
    assert "n_head" in run(changes, "train", *RESUME, "--max_iters=12", "--n_head=4", code=1)
    load(GPT, tmp_path / "out" / "mine" / "checkpoint-8")


def test_a_deliberate_change_resumes_from_weights_of_another_model(run, tmp_path):
    """The code of both is kept."""
    run((), "train", *TRAIN)
    error = run((RELU,), "train", *RESUME, "--max_iters=8", code=1)
    assert "does not match this checkpoint" in error and "--allow_changed_model" in error
    said = run((RELU,), "train", *RESUME, "--max_iters=8", "--allow_changed_model")
    assert "in only one: none; logits: other\nchanged since that checkpoint: model.py\n" in said
    run((RELU,), "sample", "out/mine", "--max_new_tokens=3")
    error = run((), "sample", "out/mine", code=1)
    assert "does not match this checkpoint" in error
    assert error.endswith("(the code that made it: out/mine/checkpoint-8/model.py)\n")
    for step, code in ((6, ()), (8, (RELU,))):  # each has its own
        for name in ("model", "train"):
            copy = tmp_path / f"out/mine/checkpoint-{step}/{name}.py"
            assert copy.read_text() == inspect.getsource(getattr(edited(*code), name))


def test_a_new_parameter_that_leaves_the_logits_as_they_are_needs_no_flag(run, tmp_path):
    """A resumed run trains it alone, and has no optimizer state for it yet."""
    run((), "train", *TRAIN)
    frozen = ("self.uninitialised =", "self.requires_grad_(False).h[0].gate.requires_grad_()\n"
              "        self.uninitialised =")  # fmt: skip
    said = run((*GATE, frozen), "train", *RESUME, "--max_iters=8")
    assert "in only one: h.*.gate; logits: same\n" in said
    run(GATE, "train", *TRAIN, "--init_from=out/mine/checkpoint-6", "--out_dir=out/new")
    runs = ((tmp_path / "out/mine", 6), (tmp_path / "out/mine", 8), (tmp_path / "out/new", 6))
    old, *new = (weights(*run) for run in runs)
    for tensors in new:
        assert 0 < (tensors["h.0.gate"] - 1).abs() < 0.5
    assert_equal({name: new[0][name] for name in old}, old)
    assert new[0]["h.1.gate"] == 1


# ---------------------------------------------------------------------------- docs/recipes.md
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
RECIPES = {}  # {heading: [(file, a text in it, what replaces that)]}
for heading, block in re.findall(r"^## (.*?)\n.*?^```diff\n(.*?)^```", PAGE, re.M | re.S):
    RECIPES[heading] = []
    for file, lines in re.findall(r"^@@ (\S+)\n(.*?)(?=^@@|\Z)", block, re.M | re.S):
        old, new = (re.sub(f"(?m)^[{s}].*\n|^.", "", lines) for s in ("+", "-"))
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1, (heading, old)
        RECIPES[heading].append((file, old, new))
TOKENIZER = "A tokenizer that tiktoken cannot hold"
LOGGED = {"An average of the weights": "average_loss"}
LOGGED["A value that changes in training, and a number in the log"] = "smooth"


@pytest.mark.parametrize("name", [name for name in RECIPES if name != TOKENIZER])
def test_a_recipe_has_an_effect_and_resumes_bit_for_bit(name, run, tmp_path):
    changes = [(old, new) for _, old, new in RECIPES[name]]
    said, runs = resumed_and_not(run, changes, tmp_path)
    out, states = tmp_path / "out", [load_training_state(checkpoint) for checkpoint in runs]
    assert "warning" not in "".join(said)
    assert_equal(*(state["stateful"] for state in states))
    if name == "An average of the weights":
        assert states[0]["stateful"]["average"]["n_averaged"] == 6
        entries = [entry for entry in read_log(out / "mine") if "average_loss" in entry]
        assert all(entry["average_loss"] != entry["val_loss"] for entry in entries)
    if name in LOGGED:
        assert sum(LOGGED[name] in entry for entry in read_log(out / "mine")) in (2, 6)
    else:
        run((), "train", *TRAIN, "--out_dir=out/plain")
        plain = (out / "plain/checkpoint-6/model.safetensors").read_bytes()
        assert plain != (runs[0] / "model.safetensors").read_bytes()
    if (out / "mine/average").exists():
        run((), "sample", "out/mine/average", "--max_new_tokens=3")


@SLOW
def test_the_recipe_of_a_tokenizer_gives_its_ids_here_and_in_transformers(tmp_path):
    copy_edited(tmp_path, ["model.py", "train.py", "sample.py", "prepare.py", "gptling"], ())
    for file, old, new in RECIPES[TOKENIZER]:
        text = (tmp_path / file).read_text(encoding="utf-8").replace(old, new)
        (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "mine.txt").write_text(TEXT)
    code = (
        "from transformers import AutoTokenizer; from prepare import load_tokenizer; "
        "ids = load_tokenizer('out/mine').encode_ordinary('12 green'); print(ids, "
        "ids == AutoTokenizer.from_pretrained('out/mine/checkpoint-2').encode('12 green'))"
    )
    for words in (
        "prepare.py mine.txt --tokenizer=longest --vocab_size=300",
        f"train.py --dataset=mine {' '.join(TINY)} --max_iters=2 --eval_interval=2",
        "sample.py out/mine --max_new_tokens=9",
    ):
        subprocess.run([sys.executable, *words.split()], cwd=tmp_path, check=True)
    checked = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert "True" in checked


# ---------------------------------------------------------------------------- docs/experiments
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_is_one_idea_with_its_source_in_one_file(patch):
    text = patch.read_text(encoding="utf-8")
    idea, _, diff = text.partition("diff --git")
    assert re.search(r"\d{4}[^)]* https://arxiv.org/abs/\d+\.\d+\)", idea) and "# flags:" in idea
    added, removed = (len(re.findall(rf"^\{s}(?!\{s}\{s})", diff, re.M)) for s in "+-")
    assert "diff --git" not in diff and added <= (30 if patch.stem == "modern" else 25)
    table = (ROOT / "docs" / "experiments" / "README.md").read_text(encoding="utf-8")
    assert f"| [{patch.stem}]({patch.name}) | +{added} -{removed} |" in table
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, check=True)


@SLOW
@pytest.mark.parametrize("name", ["gqa", "lion", "moe", "words"])
def test_a_patched_copy_keeps_what_a_gpt_promises(name, tmp_path):
    """In processes of its own: stopped by a signal, trained by two processes, compiled."""
    copied = ["model.py", "train.py", "sample.py", "prepare.py", "gptling", "config", "tests"]
    copy_edited(tmp_path, copied, (name,))
    patch = (ROOT / "docs" / "experiments" / f"{name}.patch").read_text(encoding="utf-8")
    settings = dict(re.findall(r"^# (flags|prepare):(.*)$", patch, re.MULTILINE))
    flags = [*settings["flags"].split(), "--", *settings.get("prepare", "").split()]
    (tmp_path / "pytest.py").write_text("raise ImportError('try_model needs no pytest')")
    command = [sys.executable, "-m", "tests.try_model", "work", *flags]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    kind = "gpt2" if name in ("lion", "words") else "gptling"
    assert f"the checkpoint says model_type {kind}" in process.stdout
    checkpoint = tmp_path / "work" / "out" / "text" / "checkpoint-16"
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(checkpoint)
    assert theirs(TEXT[:100])["input_ids"] == load_tokenizer(checkpoint).encode(TEXT[:100])
