"""Whoever edits model.py need not know of any other file: each experiment of edits.py is effective
in training, evaluation and sampling, and its checkpoints are taken for what they are."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from gptling import loss as loss_module
from gptling.decoding import speed_up
from gptling.gpt2_format import ChangedModelError, load, save
from gptling.loss import loss_and_terms, loss_in_pieces, use_loss_in_pieces
from gptling.processes import recompute_activations
from model import GPT
from tests import try_model
from tests.edits import EDITS, edited_module
from tests.test_model import generate
from train import TrainConfig, configure_optimizers

SIZES = {"block_size": 16, "vocab_size": 97, "n_layer": 2, "n_head": 2, "n_embd": 32}


@pytest.fixture(scope="module", params=EDITS)
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
    loss, terms = loss_and_terms(model(idx, targets))
    total = sum(terms.values(), start=loss)
    gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return {"loss": loss, **terms}, [0.0 if g is None else g for g in gradients]


def test_training_and_evaluation_are_those_of_the_plain_code(edit, monkeypatch, capsys):
    monkeypatch.setitem(loss_module.PIECE, "cpu", 97 * 5)
    monkeypatch.setattr(loss_module, "EVALUATED", 32)
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
        loss, terms = loss_and_terms(model(*batch()))
        sum(terms.values(), start=loss).backward()
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


@pytest.mark.parametrize("compile", [False, True])
def test_faster_layers_give_the_same_text(edit, compile, monkeypatch, capsys):
    compiler = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda f, **options: compiler(f, backend="eager", **options)
    )
    torch.compiler.reset()
    model = random_model(edit.module, n_embd=256, **edit.sizes)
    idx = torch.randint(97, (2, 8))
    expected = generate(model, idx, 30, temperature=0)
    assert torch.equal(generate(speed_up(model, compile), idx, 30, temperature=0), expected)
    assert "other logits" not in capsys.readouterr().err


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
