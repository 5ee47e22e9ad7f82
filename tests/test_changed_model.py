"""Whoever edits model.py need not know of any other file: each experiment of edits.py is effective
in training, evaluation and sampling, and its checkpoints are taken for what they are."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from gptling import loss as loss_module
from gptling.cli import UserError
from gptling.decoding import speed_up
from gptling.explain import logits_and_attention
from gptling.gpt2_format import ChangedModelError, load, save, why_not_gpt2
from gptling.loss import loss_in_pieces, objective_and_parts, use_loss_in_pieces
from gptling.pretrained import load_model
from gptling.processes import recompute_activations
from model import GPT, GPTConfig
from tests import try_model
from tests.conftest import ROOT, TINY, output_of, run_here, run_script
from tests.edits import EDITS, Edit, edited_module
from tests.test_model import generate
from train import TrainConfig, configure_optimizers

pytestmark = pytest.mark.gpt2  # the edits are of the unchanged model.py
SIZES = {"block_size": 16, "vocab_size": 97, "n_layer": 2, "n_head": 2, "n_embd": 32}


QUICK = (
    "soft-capping",
    "z-loss",
    "GELU in its erf form",
    "ALiBi",
    "rotary positions",
    "RMSNorm",
    "an untied output layer",
    "shared blocks",
    "a mixture of experts",
    "values of the first layer mixed into the others",
    "a second head for the token after next",
)
PARAMS = [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in EDITS]


@pytest.fixture(scope="module", params=PARAMS)
def edit(request):
    """An edit, with its name and the module that it makes of model.py."""
    yield SimpleNamespace(
        name=request.param, module=edited_module(request.param), **vars(EDITS[request.param])
    )


def random_model(module, **sizes):
    """In eval mode, with weights that are large enough for a change to show."""
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(**SIZES | sizes)).eval()
    for name, parameter in model.named_parameters():
        std = 3 * parameter.size(-1) ** -0.5 if parameter.dim() > 1 else 0.3
        mean = 1.0 if name.endswith("weight") and parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=min(std, 0.3))
    return model


def batch():
    idx, targets = torch.randint(97, (2, 4, 16))
    targets[0, :3] = -100
    return idx, targets


def results(model, idx, targets):
    """The loss, the terms beside it, and the gradients of all parameters."""
    objective, parts = objective_and_parts(model(idx, targets))
    torch.testing.assert_close(objective, sum(parts.values()))
    gradients = torch.autograd.grad(objective, list(model.parameters()), allow_unused=True)
    return parts, [0.0 if g is None else g for g in gradients]


def test_training_and_evaluation_are_those_of_the_plain_code(edit, monkeypatch, capsys):
    monkeypatch.setitem(loss_module.LOGITS_AT_ONCE, "cpu", 97 * 5)
    monkeypatch.setattr(loss_module, "ROWS_WITHOUT_GRADIENT", 32)
    model, (idx, targets) = random_model(edit.module, **edit.sizes), batch()
    plain, evaluated = results(model.train(), idx, targets), model.eval()(idx, targets)[1]
    assert set(plain[0]) == {"loss", *edit.terms}
    use_loss_in_pieces(model.train())
    assert model.loss_in_pieces is loss_in_pieces and not capsys.readouterr().out
    torch.testing.assert_close(results(model, idx, targets), plain)
    recompute_activations(model, compile_blocks=False)
    torch.testing.assert_close(results(model, idx, targets), plain)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(idx, targets)[1], evaluated)
    if edit.name == "z-loss":
        assert plain[0]["loss"] > evaluated + 0.1
    else:
        torch.testing.assert_close(plain[0]["loss"], evaluated)


def test_a_step_of_every_optimizer_moves_what_has_a_gradient(edit):
    for optimizer in ("adamw", "muon"):
        torch.manual_seed(0)
        model = edit.module.GPT(edit.module.GPTConfig(**SIZES | edit.sizes))
        before = [parameter.clone() for parameter in model.parameters()]
        assert all(parameter.isfinite().all() for parameter in before)
        objective_and_parts(model(*batch()))[0].backward()
        for each in configure_optimizers(model, TrainConfig(optimizer=optimizer)):
            for group in each.param_groups:
                group["lr"] = 1e-2 * group.get("lr_scale", 1)
            each.step()
        for old, (name, new) in zip(before, model.named_parameters(), strict=True):
            if new.grad is not None and new.grad.any():
                assert not torch.equal(old, new), f"{optimizer} has left {name}"
            assert new.isfinite().all()


def test_initialisation_is_of_known_size_or_named(edit):
    torch.manual_seed(0)
    model = edit.module.GPT(edit.module.GPTConfig(**SIZES | {"n_embd": 64} | edit.sizes))
    assert len(model.untouched) == edit.untouched
    _, loss = model.eval()(*batch())[:2]
    assert loss.item() == pytest.approx(torch.tensor(97.0).log().item(), rel=0.05) or (
        edit.name in ("masked logits", "norms without weights") or "scale" in edit.name
        or "buffer" in edit.name
    )  # fmt: skip


@torch.no_grad()
def test_text_is_the_same_cached_batched_and_past_the_window(edit):
    model = random_model(edit.module, **edit.sizes)
    idx = torch.randint(97, (2, 16))
    try_model.check_logits(model, idx)
    try_model.check_generation(model)
    if edit.name != "norms without weights":  # explained in float32, whatever the values
        try_model.check_attention(model, idx)


@pytest.mark.parametrize("name", PARAMS)
def test_faster_layers_give_the_same_text(name, capsys, compile=False):
    """Past the window too."""
    model = random_model(edited_module(name), n_embd=256, **EDITS[name].sizes)
    idx = torch.randint(97, (2, 8))
    expected = generate(model, idx, 14, temperature=0)
    assert torch.equal(generate(speed_up(model, compile), idx, 14, temperature=0), expected)
    assert "other logits" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "shared blocks")) for n in EDITS]
)
def test_compiled_steps_give_the_same_text(name, monkeypatch, capsys):
    compiler = torch.compile
    monkeypatch.setattr("torch.compile", lambda f, **more: compiler(f, backend="eager", **more))
    torch.compiler.reset()
    test_faster_layers_give_the_same_text(name, capsys, compile=True)


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_is_taken_for_what_it_is(edit, bias, tmp_path):
    import transformers

    model, idx = random_model(edit.module, bias=bias, **edit.sizes), torch.randint(97, (3, 16))
    save(model, tmp_path)
    again = load(edit.module.GPT, tmp_path)
    assert again.config == model.config
    torch.testing.assert_close(again(idx)[0], model(idx)[0], rtol=0, atol=0)
    weights, same = model.state_dict(), again.state_dict()
    assert weights.keys() == same.keys() and all(torch.equal(weights[k], same[k]) for k in same)

    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["model_type"] == "gpt2") == edit.gpt2
    theirs = transformers.AutoModelForCausalLM
    if edit.gpt2:
        expected = theirs.from_pretrained(tmp_path).eval()(idx).logits
        torch.testing.assert_close(model(idx)[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(load(GPT, tmp_path)(idx)[0], model(idx)[0])
        return
    assert stored["not_gpt2"] and "GPT2LMHeadModel" not in stored["architectures"]
    with pytest.raises(ValueError, match="gptling"):
        theirs.from_pretrained(tmp_path)
    with pytest.raises(ValueError):
        load(GPT, tmp_path)  # the unchanged code


@pytest.mark.parametrize("numbers", [True, False])
def test_a_checkpoint_of_the_unchanged_code_is_refused_by_another_model(edit, numbers, tmp_path):
    """With the logits that are stored since November 2026, and without them, as from the hub."""
    unchanged = random_model(sys.modules["model"])
    save(unchanged, tmp_path)
    if not numbers:
        config = json.loads((tmp_path / "config.json").read_text())
        del config["check"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    if edit.gpt2:
        load(edit.module.GPT, tmp_path)
        return
    with pytest.raises(ValueError) as raised:
        load(edit.module.GPT, tmp_path)
    if isinstance(raised.value, ChangedModelError):  # the tensors fit: it is a deliberate change
        load(edit.module.GPT, tmp_path, allow_changed=True)


# ---------------------------------------------------------------------------- what is stored


def test_a_checkpoint_carries_16_numbers_that_its_model_gives(tmp_path):
    """Every logit counts in one of them; other programs pass over them."""
    model = random_model(sys.modules["model"])
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    check, idx = config["check"], torch.arange(config["check"]["tokens"])
    idx = (31 * idx * idx + 7 * idx + 3) % 97
    with torch.no_grad():
        logits = model(idx[None])[0][0, -1].double()
    expected = [logits[i::16].mean().item() for i in range(16)]
    assert check["logits"] == pytest.approx(expected, abs=1e-5) and check["tokens"] == 16


@pytest.mark.parametrize(
    "name, index",
    [
        ("wte.weight", 50),
        ("wte.weight", (3, 31)),
        ("h.1.mlp.c_fc.weight", (3, 5)),
        ("ln_f.bias", 7),
    ],
)
@pytest.mark.parametrize("value", [2.5, math.nan])
def test_weights_that_another_program_has_changed_anywhere_are_no_other_model(
    tmp_path, name, index, value
):
    """The numbers beside them are of others, unless they are no numbers."""
    save(random_model(sys.modules["model"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"transformer.{name}"][index] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if value == 2.5:
        changed = load(GPT, tmp_path).state_dict()[name]
        assert (changed.T if "c_fc" in name else changed)[index].max() == 2.5
    else:
        with pytest.raises(ValueError, match="its logits contain NaN or infinity"):
            load(GPT, tmp_path)


@pytest.mark.parametrize(
    "check",
    [5, "x", [], {}, {"logits": None}, {"logits": ["a"] * 16}, {"logits": [0] * 16},
     {"logits": [1.0] * 15}, {"logits": [10**400] * 16}, {"tokens": 1.5}, {"tokens": "32"},
     {"tokens": 17}, {"tokens": 0}, {"tokens": True}],
)  # fmt: skip
def test_numbers_that_are_not_as_they_were_written_are_passed_over(tmp_path, check):
    model = random_model(sys.modules["model"])
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["check"] = config["check"] | check if check and isinstance(check, dict) else check
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_model(GPT, tmp_path).wte.weight, model.wte.weight)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path, dtype):
    save(random_model(sys.modules["model"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"is {dtype}, in model.py torch.float32"):
        load_model(GPT, tmp_path)


@pytest.mark.parametrize("change", [{"n_head": 4}, {"check": "off by a thousandth"}])
def test_other_numbers_are_refused_in_one_line_unless_that_is_meant(tmp_path, change):
    save(random_model(sys.modules["model"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "check" in change:
        spread = torch.tensor(config["check"]["logits"]).std().item()
        config["check"]["logits"][7] += 1e-3 * spread
        change = {}
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ChangedModelError):
        load(GPT, tmp_path)
    with pytest.raises(UserError, match="--allow_changed_model=True") as raised:
        load_model(GPT, tmp_path)
    assert "\n" not in str(raised.value)
    assert load_model(GPT, tmp_path, allow_changed=True).config.n_head == change.get("n_head", 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_are_of_the_weights_as_they_are_stored(tmp_path, dtype):
    """And of a model in training mode, with TF32 allowed and inside autocast."""
    model = random_model(sys.modules["model"], dropout=0.5).to(dtype).train()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", torch.bfloat16):
        save(model, tmp_path)
    assert torch.get_float32_matmul_precision() == "medium" and model.training
    torch.set_float32_matmul_precision(precision)
    assert next(model.parameters()).dtype == dtype
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"
    load(GPT, tmp_path)


def test_a_change_that_the_first_weights_hide_shows_at_a_later_save(tmp_path):
    """Small logits are far from their cap."""
    torch.manual_seed(0)
    model = edited_module("soft-capping").GPT(GPTConfig(**SIZES))
    with torch.no_grad():
        model.wte.weight.mul_(1e-3)
    assert not save(model, tmp_path)
    with torch.no_grad():
        model.wte.weight.mul_(1e3)
    assert "gives other logits" in save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gptling"


def test_a_change_far_back_in_the_window_shows(tmp_path):
    """In the 1,024 positions of a small model, all of which are tried."""
    model = random_model(sys.modules["model"], block_size=1024)
    for block in model.h:
        block.attn.causal_mask = torch.ones(1024, 1024).tril().triu(-1000).bool()
    assert "other logits, from token" in why_not_gpt2(model)[0]


def test_models_with_the_same_tensors_are_told_apart(tmp_path):
    alibi, rotary = edited_module("ALiBi"), edited_module("rotary positions")
    save(random_model(rotary), tmp_path)
    with pytest.raises(ChangedModelError):
        load(alibi.GPT, tmp_path)


def test_a_token_that_is_masked_with_minus_infinity_leaves_numbers_to_compare(tmp_path):
    class Masked(GPT):
        def logits(self, x):
            return super().logits(x).index_fill(-1, torch.tensor([96]), -math.inf)

    masked = SimpleNamespace(GPT=Masked, GPTConfig=GPTConfig)
    save(random_model(masked), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["check"]
    load(Masked, tmp_path)
    with pytest.raises(ChangedModelError):
        load(GPT, tmp_path)


def test_shared_blocks_are_stored_once_and_no_other_blocks_are_taken_for_them(tmp_path):
    shared = edited_module("shared blocks")
    save(random_model(shared), tmp_path / "shared")
    names = load_file(tmp_path / "shared" / "model.safetensors")
    assert {name.split(".")[2] for name in names if ".h." in name} == {"0"}
    save(random_model(sys.modules["model"]), tmp_path / "unshared")
    with pytest.raises(ValueError, match=r"h\.1\.ln_1\.weight is another than h\.0\.ln_1\.weight"):
        load(shared.GPT, tmp_path / "unshared")
    weights = logits_and_attention(random_model(shared), torch.randint(97, (1, 12)))[1]
    assert weights.shape == (2, 2, 12, 12) and not torch.equal(weights[0], weights[1])


def test_a_field_that_model_py_lacks_is_named(tmp_path):
    """Both are "gptling": another change than the one that made the checkpoint."""
    one, other = edited_module("a scale of the logits, as a field"), edited_module("a wider MLP")
    save(one.GPT(one.GPTConfig(**SIZES)), tmp_path)
    with pytest.raises(ValueError, match="it has logit_scale, which GPTConfig has not"):
        load(other.GPT, tmp_path)


def test_attention_weights_that_are_not_what_is_computed_are_refused():
    class Sharper(GPT):
        """Its scores are scaled otherwise, and attention_weights does not know."""

        def __init__(self, config):
            super().__init__(config)
            for block in self.h:
                block.attn.attend = lambda q, k, v, **o: F.scaled_dot_product_attention(
                    q, k, v, scale=1.5 / math.sqrt(q.size(-1)), **o
                )

    model = random_model(SimpleNamespace(GPT=Sharper, GPTConfig=GPTConfig))
    with pytest.raises(UserError, match=r"--explain: .* not what its attention_weights say"):
        logits_and_attention(model, torch.randint(97, (1, 12)))


def test_a_shared_block_is_recomputed_once_for_each_time_that_it_runs():
    shared = edited_module("shared blocks")
    model, calls = random_model(shared).train(), []
    model.h[0].ln_1.register_forward_hook(lambda *_: calls.append(1))
    recompute_activations(model, compile_blocks=False)
    model(*batch())[1].backward()
    assert len(calls) == 2 * model.config.n_layer


# ---------------------------------------------------------------------------- in a run


@pytest.fixture
def train_changed(trained, tmp_path, monkeypatch, train_here):
    """train.py in this process, with the model that an edit makes; returns its log."""
    shutil.copytree(trained / "data", tmp_path / "data")

    def run(name, *flags):
        monkeypatch.setattr("train.GPT", edited_module(name).GPT)
        flags = ["--dataset=mine", *TINY, "--log_interval=1", "--max_iters=6", *flags]
        process = run_here("train.py", *flags, cwd=tmp_path)
        assert process.returncode == 0, process.stderr.decode()
        log = (tmp_path / "out" / "mine" / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in log], process.stdout.decode()

    return run


@pytest.mark.parametrize("name", ["a second head for the token after next", "a mixture of experts"])
def test_a_term_of_the_loss_is_trained_on_and_stands_beside_the_loss(train_changed, name):
    """Not in it, which is compared with the validation loss; shown and logged by its name."""
    log, output = train_changed(name)
    term = EDITS[name].terms[0]
    first = [entry for entry in log if "loss" in entry]
    assert len(first) == 6 and all(entry[term] > 0 for entry in first)
    assert f"loss {first[-1]['loss']:.3f}, {term} {first[-1][term]:.3f}, lr" in output
    evaluation = next(entry for entry in log if "val_loss" in entry)
    assert term not in evaluation and evaluation["train_loss"] == pytest.approx(
        sum(entry["loss"] for entry in first) / 6
    )
    halves, _ = train_changed(
        name, "--overwrite", "--gradient_accumulation_steps=2", "--batch_size=2"
    )
    halves = [entry for entry in halves if "loss" in entry]
    assert halves[0]["loss"] == pytest.approx(first[0]["loss"], abs=1e-5)
    if "head" in name:
        for one, other in zip(first, halves, strict=True):
            assert other[term] == pytest.approx(one[term], abs=2e-3)
        assert first[-1][term] < first[0][term] - 0.05


def test_a_parameter_that_init_weights_passes_over_is_named(train_changed):
    assert "h.0.mlp.w_in, h.1.mlp.w_in" in train_changed("a mixture of experts")[1]
    assert "init_weights" not in train_changed("RMSNorm", "--overwrite")[1]


def test_a_mask_that_changes_in_a_run_ends_it_before_a_checkpoint(
    trained, tmp_path, monkeypatch, train_here
):
    shutil.copytree(trained / "data", tmp_path / "data")

    class Narrowing(GPT):
        def forward(self, idx, targets=None, **options):
            output = super().forward(idx, targets, **options)
            for block in self.h:
                block.attn.causal_mask[-1, 0] = False
            return output

    monkeypatch.setattr("train.GPT", Narrowing)
    process = run_here("train.py", "--dataset=mine", *TINY, "--max_iters=3", cwd=tmp_path)
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1 and "has changed" in error
    assert not list((tmp_path / "out" / "mine").glob("*checkpoint*"))


@pytest.mark.slow
def test_what_makes_a_compiled_training_run_uncompiled_is_said(train_changed, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr("torch.compile", lambda f, **more: compiler(f, backend="eager", **more))
    said = "--compile: a part of the model runs uncompiled: "
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert said not in train_changed("RMSNorm", "--compile", "--recompute")[1]
    keeping = [("x = F.gelu(", "self.kept = x.detach().norm()\n        x = F.gelu(")]
    monkeypatch.setitem(EDITS, "keeps a number", Edit(keeping))
    output = train_changed("keeps a number", "--overwrite", "--compile", "--recompute")[1]
    assert output.count(said) >= 1 and "side effect" in output
    torch.compiler.reset()


def edited_copy(directory, file, *changes):
    """The project with an edit of a script."""
    for name in ("model.py", "train.py", "sample.py", "prepare.py"):
        shutil.copy(ROOT / name, directory)
    for name in ("gptling", "config"):
        shutil.copytree(ROOT / name, directory / name)
    edit_file(directory / file, *changes)


def edit_file(file, *changes):
    text = file.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "changes, flag, named",
    [
        (
            [("    beta1: Fraction", "    ema: float = 0.99  # of weights\n    beta1: Fraction")],
            "--ema=0.9",
            "ema=0.9",
        ),
        (
            [
                ('Literal["cosine", "linear"]', 'Literal["cosine", "linear", "restarts"]'),
                (
                    '        "linear": min',
                    '        "restarts": 0.5 * (1 + math.cos(math.pi * (3 * progress % 1))),\n'
                    '        "linear": min',
                ),
            ],
            "--schedule=restarts",
            "schedule='restarts'",
        ),
    ],
    ids=["ema", "restarts"],
)
def test_what_a_run_has_and_this_code_does_not_know_is_refused(
    trained, tmp_path, changes, flag, named
):
    """And what the run has not is printed with its value."""
    shutil.copytree(trained / "data", tmp_path / "data")
    edited_copy(tmp_path, "train.py", *changes)
    output_of(tmp_path / "train.py", "--dataset=mine", *TINY, flag, cwd=tmp_path)
    resume = ["--out_dir=out/mine", "--resume", "--max_iters=22"]
    process = run_script("train.py", *resume, cwd=tmp_path)
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1, error
    assert f"the run has {named}, which this code does not know" in error
    said = output_of("train.py", *resume, "--allow_changed_model", cwd=tmp_path)
    if "ema" not in named:
        assert "schedule: linear from now on; it was restarts" in said
        return
    shutil.copytree(trained / "out", tmp_path / "other")
    resume = [tmp_path / "train.py", "--out_dir=other/mine", "--resume", "--max_iters=22"]
    assert "ema: 0.9 from now on; it was not there" in output_of(*resume, flag, cwd=tmp_path)


def test_the_weight_of_a_term_may_change_and_what_is_computed_may_not(trained, tmp_path):
    """A field of GPTConfig, at once a flag: z-loss is new to the run, then gets another weight; the
    model stays a GPT-2, and is one to the unchanged code."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (old, new), *_ = EDITS["z-loss"].changes
    edited_copy(
        tmp_path,
        "model.py",
        (old, new.replace("0.01", "self.config.z_loss").replace("losses(", "losses(")),
        ("    bias: bool = True", "    z_loss: float = 0.0  # its weight\n    bias: bool = True"),
    )
    resume = [tmp_path / "train.py", "--out_dir=out/mine", "--resume"]
    said = output_of(*resume, "--max_iters=30", "--z_loss=1e-3", cwd=tmp_path)
    assert "z_loss: 0.001 from now on; it was not there" in said
    said = output_of(*resume, "--max_iters=32", "--z_loss=0.1", cwd=tmp_path)
    assert "z_loss: 0.1 from now on; it was 0.001" in said
    process = run_script(*resume, "--max_iters=40", "--n_head=4", cwd=tmp_path)
    assert process.returncode == 1 and b"--n_head=4: the run has 2" in process.stderr
    config = json.loads((tmp_path / "out/mine/checkpoint-32/config.json").read_text())
    assert config["model_type"] == "gpt2" and config["z_loss"] == 0.1
    load(GPT, tmp_path / "out/mine/checkpoint-32")


def test_a_deliberate_change_goes_on_from_weights_of_another_model(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    edited_copy(tmp_path, "model.py", *EDITS["ReLU"].changes)
    resume = ["--out_dir=out/mine", "--resume", "--max_iters=22"]
    process = run_script(tmp_path / "train.py", *resume, cwd=tmp_path)
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1, error
    assert "computes something else" in error and "--allow_changed_model=True" in error
    output_of(tmp_path / "train.py", *resume, "--allow_changed_model", cwd=tmp_path)
    output_of(tmp_path / "sample.py", "out/mine/checkpoint-22", cwd=tmp_path)
    process = run_script("sample.py", "out/mine/checkpoint-22", cwd=tmp_path)
    assert process.returncode == 1 and b"computes something else" in process.stderr


INIT = "self.gate = nn.init.normal_(nn.Parameter(torch.zeros(1)), mean=1, std=0)"
GATE = [  # a parameter that no checkpoint has, and that changes nothing at first
    ("        self.mlp = MLP(config)", f"        self.mlp = MLP(config)\n        {INIT}"),
    ("x + self.mlp(self.ln_2(x))", "x + self.gate * self.mlp(self.ln_2(x))"),
]


def test_what_a_checkpoint_lacks_is_made_as_in_a_new_model_where_that_is_meant(tmp_path, capsys):
    """And what only the checkpoint has is left out; a line names both."""
    save(random_model(sys.modules["model"]), tmp_path)
    for changes, line in [
        (GATE, "it has no h.0.gate, h.1.gate"),
        (EDITS["rotary positions"].changes, "model.py has no wpe.weight"),
    ]:
        model_class = edited_module(*changes).GPT
        with pytest.raises(UserError, match=f": {line}; .*--allow_changed_model=True"):
            load_model(model_class, tmp_path)
        model = load_model(model_class, tmp_path, allow_changed=True)
        assert capsys.readouterr().out == f"{tmp_path}: {line}\n"
        stored = load(GPT, tmp_path)
        assert torch.equal(model.h[1].mlp.c_fc.weight, stored.h[1].mlp.c_fc.weight)
        if changes is GATE:
            idx, _ = batch()
            assert torch.equal(model(idx)[0], stored(idx)[0])


def test_a_size_that_a_flag_changes_is_no_change_of_the_model(tmp_path):
    """Also where a changed model.py is allowed: layers of the checkpoint would be thrown away."""
    save(random_model(sys.modules["model"]), tmp_path)
    for allow_changed in (False, True):
        with pytest.raises(UserError, match="n_layer=1, where it has 2: ") as raised:
            load_model(GPT, tmp_path, allow_changed=allow_changed, n_layer=1)
        assert "allow_changed_model" not in str(raised.value)


def test_a_run_goes_on_with_a_new_parameter(trained, tmp_path):
    """Which has no optimizer state yet; also a new run that begins with its weights."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    edited_copy(tmp_path, "model.py", *GATE)
    allowed = [tmp_path / "train.py", "--allow_changed_model=True"]
    said = output_of(*allowed, "--out_dir=out/mine", "--resume", "--max_iters=22", cwd=tmp_path)
    assert "it has no h.0.gate" in said
    new = ["--init_from=out/mine/checkpoint-20", "--out_dir=out/new"]
    output_of(*allowed, *new, "--dataset=mine", *TINY, cwd=tmp_path)
    for checkpoint in ("mine/checkpoint-22", "new/checkpoint-20"):
        tensors = load_file(tmp_path / "out" / checkpoint / "model.safetensors")
        assert 0 < (tensors["transformer.h.0.gate"] - 1).abs() < 0.5
    output_of(
        tmp_path / "train.py", "--out_dir=out/mine", "--resume", "--max_iters=24", cwd=tmp_path
    )


@pytest.mark.slow
def test_a_model_without_dropout_is_planned_goes_on_and_writes(trained, tmp_path):
    """Of a text that is seen so often that another would have some."""
    shutil.copytree(trained / "data", tmp_path / "data")
    edited_copy(tmp_path, "model.py", *EDITS["no dropout"].changes)
    measured = "return sorted(times)[len(times) // 4]"
    edit_file(tmp_path / "gptling/plan.py", (measured, "return 1e-3"))  # on any machine
    train = [tmp_path / "train.py", "--dataset=mine"]
    said = output_of(*train, "--minutes=1", cwd=tmp_path)
    assert " 200 steps " in said and "epochs), dropout 0, learning_rate" in said
    output_of(*train, "--resume", "--max_iters=202", cwd=tmp_path)
    output_of(tmp_path / "sample.py", "out/mine", "--max_new_tokens=3", cwd=tmp_path)
    load(GPT, tmp_path / "out" / "mine" / "checkpoint-202")
    config = json.loads((tmp_path / "out/mine/checkpoint-202/config.json").read_text())
    assert {config[f"{place}_pdrop"] for place in ("embd", "attn", "resid")} == {0.0}
