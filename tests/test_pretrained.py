"""Checkpoints against Hugging Face's transformers, in both directions, and what is refused."""

import dataclasses
import json
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptling import cli
from gptling.cli import UserError
from gptling.gpt2_format import load, save
from gptling.pretrained import build_model, find_checkpoint, load_model
from gptling.settings import adopt_sizes
from gptling.tokenizers import build_tokenizer, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from tests.conftest import edit_json, randomised, read_log, small
from tests.scripts import MINE, ROOT, output_of
from train import TrainConfig

transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")
pytestmark = pytest.mark.gpt2  # model.py as it is published
Auto = transformers.AutoModelForCausalLM
TOKENIZER = tokenizer_to_json(build_tokenizer("char", "abcdefghijklmnopqrstuvw é中🙂"))
IDX = torch.randint(28, (3, 16), generator=torch.Generator().manual_seed(1))


def random_model(bias=True, model_class=GPT, **sizes):
    sizes = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32} | sizes
    return randomised(model_class(model_class.config_class(vocab_size=28, bias=bias, **sizes)))


def assert_close(model, other):
    """A model gives the logits of transformers' model."""
    torch.testing.assert_close(model(IDX)[0], other(IDX).logits, rtol=0, atol=1e-5)


def edit(directory, changes):
    """Change config.json, or tensors, which have a dot in their names: None drops one."""
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name: tensor for name, tensor in changes.items() if "." in name}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    changes = {name: value for name, value in changes.items() if "." not in name}
    edit_json(directory / "config.json", **changes)


# ---------------------------------------------------------------------------- with transformers
@pytest.mark.parametrize("bias, dropout", [(True, 0.2), (False, 0.0)])
def test_transformers_reads_our_model_and_tokenizer(tmp_path, bias, dropout):
    model = random_model(bias, dropout=dropout)
    assert save(model, tmp_path, TOKENIZER) == ""
    other, loading = Auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert_close(model, other)
    theirs = other.config  # in which dropout would be 0.1 if config.json did not say so
    assert {theirs.embd_pdrop, theirs.attn_pdrop, theirs.resid_pdrop} == {dropout}
    again = load(GPT, tmp_path)
    assert again.config == model.config and torch.equal(again(IDX)[0], model(IDX)[0])

    auto, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    text = "a bé  中 🙂🙂 cab"
    assert auto(text)["input_ids"] == ours.encode_ordinary(text)
    assert auto.decode(ours.encode_ordinary(text)) == text
    end_of_text = [theirs.bos_token_id, theirs.eos_token_id, auto.eos_token_id]
    assert end_of_text == [ours.eot_token] * 3 and auto.model_max_length == 16


@pytest.mark.parametrize("dtype, base_only", [(torch.float32, False), (torch.bfloat16, True)])
def test_we_read_a_directory_of_transformers(tmp_path, dtype, base_only):
    """Whose tensors have names with and without `transformer.`."""
    config = transformers.GPT2Config(vocab_size=28, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    other = randomised(transformers.GPT2LMHeadModel(config)).to(dtype)
    (other.transformer if base_only else other).save_pretrained(tmp_path)
    if base_only:
        edit_json(tmp_path / "config.json", model_type=None)  # old ones have none
    assert_close(load_model(GPT, tmp_path), other.float())


def test_biases_that_were_trained_elsewhere_are_not_lost(tmp_path):
    save(random_model(bias=False), tmp_path)
    other = randomised(Auto.from_pretrained(tmp_path))
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"ln_f\.bias"):
        load_model(GPT, tmp_path)
    model = load_model(GPT, tmp_path, bias=True, dropout=0.25)
    assert_close(model, other)
    assert model.config.bias and model.config.dropout == model.h[0].attn.dropout == 0.25


def test_masks_a_tied_head_and_biases_of_zeros_may_be_left_over(tmp_path, capsys):
    model = random_model(bias=False)
    save(model, tmp_path)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.1.attn.masked_bias": torch.ones(())}
    for matrices in ({}, {"wte.weight": None}):  # some programs store the output layer's alone
        edit(tmp_path, masks | {"lm_head.weight": model.wte.weight.clone()} | matrices)
        assert torch.equal(load(GPT, tmp_path)(IDX)[0], model(IDX)[0])
    assert not capsys.readouterr().out


def test_a_model_is_loaded_in_eval_mode_and_draws_only_tokens_of_its_tokenizer(tmp_path):
    tokenizer = build_tokenizer("char", ["abcdefgh"], end_of_text=False)
    save(random_model(), tmp_path, tokenizer_to_json(tokenizer))
    model = load_model(GPT, tmp_path)
    assert not model.training and model.valid_tokens.tolist() == [True] * 8 + [False] * 20


# ---------------------------------------------------------------------------- names
def test_a_gpt2_of_the_hub_alone_is_downloaded_or_where_you_put_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="gpt2-medium: Cannot find"):
        load_model(GPT, "gpt2-medium")
    save(random_model(), "gpt2-medium")
    assert find_checkpoint("gpt2-medium").as_posix() == "gpt2-medium"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **more: f"{more}/{name}")
    for n in ("gpt2", "openai-community/gpt2-xl", "distilbert/distilgpt2"):
        assert all(s in str(find_checkpoint(n)) for s in (n, "config.", "model.", "tokenizer."))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: pytest.fail(name))
    for name in ("llama", "someone/gpt2", "gpt2-xxl", "out/gpt2"):
        with pytest.raises(UserError, match=f"{name}: no checkpoint there"):
            find_checkpoint(name)


def test_a_run_means_its_best_or_where_it_was_stopped(tmp_path, monkeypatch):
    """Without a name it is the newest run."""
    monkeypatch.chdir(tmp_path)
    runs = {"a": {10: 1.5, 20: 2.0}, "b": {10: 2.0, 20: 1.5, 25: None}}
    runs |= {"c": {10: 1.5, 15: None, 20: 2.0}, "d": {9: 1.5, 10: 1.5}}
    for run, losses in runs.items():
        for step, loss in losses.items():
            checkpoint = tmp_path / f"out/{run}/checkpoint-{step}"
            checkpoint.mkdir(parents=True)
            metrics = {} if loss is None else {"val_loss": loss}
            (checkpoint / "metrics.json").write_text(json.dumps(metrics))
            for name in ("config.json", "tokenizer.json", "model.safetensors"):
                (checkpoint / name).write_text("{}")
    for run, chosen in {"a": 10, "b": 25, "c": 10, "d": 10}.items():
        assert find_checkpoint(f"out/{run}").as_posix() == f"out/{run}/checkpoint-{chosen}"
        os.utime(f"out/{run}", (2e9 + ord(run),) * 2)
        assert find_checkpoint("").parent.name == run


# ---------------------------------------------------------------------------- what does not fit
MISFITS = [  # changes of config.json or of a tensor, and what is said
    ({"activation_function": "relu"}, "activation_function"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ({"n_positions": 32}, "wpe.weight"),
    ({"n_layer": 3}, "attn.c_proj.bias"),
    ({"n_layer": 1}, "attn.c_proj.bias"),
    ({"h.1.ln_2.bias": None}, r"in only one: h\.\*\.ln_2\.bias; logits: other"),
    ({"lm_head.bias": torch.ones(28)}, "lm_head.bias"),
    ({"lm_head.weight": torch.ones(28, 32)}, "lm_head.weight differs from wte.weight"),
]


@pytest.mark.parametrize("changes, named", MISFITS, ids=[next(iter(c)) for c, _ in MISFITS])
def test_an_option_or_tensor_that_does_not_fit_is_named(tmp_path, changes, named):
    save(random_model(), tmp_path)
    edit(tmp_path, changes)
    with pytest.raises(UserError, match=named) as raised:
        load_model(GPT, tmp_path)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------------- a changed model.py
def capped(cap):
    class Capped(GPT):
        def logits(self, x):
            return cap * torch.tanh(super().logits(x) / cap)

    return Capped


class Hiding(GPT):
    def logits(self, x):
        return super().logits(x).index_fill(-1, torch.tensor([27]), -math.inf)


class Windowed(GPT):
    """Each query sees the 255 newest keys, which only the last of 256 tokens shows."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.h:
            block.attn.causal_mask &= ~torch.ones_like(block.attn.causal_mask).tril(-255)


CHANGED = [capped(2.0), capped(2.001), Hiding, Windowed]  # no name or shape tells two apart


@pytest.mark.parametrize("changed", CHANGED)
def test_a_model_with_the_tensors_of_a_gpt2_is_taken_for_what_it_computes(changed, tmp_path):
    model = random_model(model_class=changed, block_size=300)
    assert save(model, tmp_path) == "a GPT-2 with these weights has other logits"
    assert torch.equal(load(changed, tmp_path)(IDX)[0], model(IDX)[0])
    for other in {GPT, *CHANGED} - {changed}:
        with pytest.raises(ValueError):
            load(other, tmp_path)
    save(random_model(block_size=300), tmp_path)
    with pytest.raises(ValueError):
        load(changed, tmp_path)
    load(changed, tmp_path, allow_changed=True)


def test_a_save_computes_in_float32_and_leaves_the_model_as_it_was(tmp_path):
    """Of a model in training mode, with TF32 allowed."""
    model = random_model(dropout=0.5).train()
    torch.set_float32_matmul_precision("medium")
    assert save(model, tmp_path) == ""
    assert torch.get_float32_matmul_precision() == "medium" and model.training
    torch.set_float32_matmul_precision("highest")


# ---------------------------------------------------------------------------- a model to train
def test_training_takes_the_sizes_of_a_model_that_others_have_published(tmp_path):
    """GPT-2's config.json does not say that it has biases; the quick start has none."""
    theirs = {"n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 3, "vocab_size": 77}
    (tmp_path / "config.json").write_text(json.dumps(theirs | {"resid_pdrop": 0.5}))
    flags = ["--dropout=0.2", "--block_size=32"]
    config, given = cli.load_config(TrainConfig, "", flags, presets=True)
    assert adopt_sizes(config, given, GPT, tmp_path) == 32
    expected = dataclasses.asdict(GPTConfig(32, 77, 3, 3, 48, dropout=0.2, bias=True))
    assert expected.items() <= vars(config).items()
    for block_size, eval_only, longest in ((8, True, 8), (None, False, None), (None, True, 32)):
        config = TrainConfig(block_size=block_size, eval_only=eval_only, init_from="any")
        adopt_sizes(config, {}, GPT, tmp_path)
        assert config.block_size == longest and config.dropout is None, "its dropout is no size"
    refused = (("block_size", 33, 32), ("n_layer", 2, 3), ("n_embd", 96, 48), ("n_head", 4, 3))
    for name, value, stored in refused:
        with pytest.raises(UserError, match=f"--{name}={value}: .* (has|accepts at most) {stored}"):
            adopt_sizes(TrainConfig(**{name: value}), {name: value}, GPT, tmp_path)


@pytest.mark.parametrize("multiple, vocab_size", [(8, 32), (27, 27)])
def test_a_new_model_has_the_tokenizers_vocabulary_rounded_up(multiple, vocab_size, tmp_path):
    tokenizer = build_tokenizer("char", "abcdefghijklmnopqrstuvwxyz", end_of_text=True)
    data = SimpleNamespace(tokenizer=tokenizer, tokenizer_json=tokenizer_to_json(tokenizer))
    data.check_tokenizer = lambda *_: None
    config = small(vocab_multiple=multiple, n_embd=16)
    model = build_model(GPT, config, data, None)
    assert model.training and model.wte.weight.shape == (vocab_size, 16)
    assert model.valid_tokens.tolist() == [True] * 27 + [False] * (vocab_size - 27)
    save(model, tmp_path)  # without a tokenizer, by which loading would know its tokens
    config.dropout, config.vocab_size = 0.1, vocab_size
    again = build_model(GPT, config, data, tmp_path)
    assert again.training and again.h[0].mlp.dropout == 0.1
    assert torch.equal(again.valid_tokens, model.valid_tokens)


@pytest.mark.slow
def test_model_py_works_when_it_is_copied_away_alone(tmp_path):
    """With gpt2_format.py for checkpoints, which has no import of ours either."""
    shutil.copy(ROOT / "model.py", tmp_path)
    shutil.copy(ROOT / "gptling" / "gpt2_format.py", tmp_path)
    (tmp_path / "alone.py").write_text(ALONE)
    one, other = output_of(tmp_path / "alone.py", cwd=tmp_path, PYTHONPATH="").splitlines()
    assert one == other and one.count(",") == 19


ALONE = """
import sys, torch
from gpt2_format import load, save
from model import GPT, GPTConfig
model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=16))
idx = torch.randint(11, (4, 9))
model(idx[:, :-1], idx[:, 1:])[1].backward()
save(model.eval(), "saved")
for each in (model, load(GPT, "saved")):
    print([token.item() for token in each.generate(idx[:1, :3], 20, temperature=0)])
assert not [name for name in sys.modules if name.startswith("gptling")]
"""


def test_the_loss_curve_of_gpt2s_architecture_is_as_committed(here):
    """A change of initialisation, batches, schedule or optimizer shows here; if it is meant, the
    figures are made anew. Float32 and one thread, so that processors differ little."""
    flags = [*MINE, "--max_iters=50", "--log_interval=10", "--eval_interval=50"]
    flags += ["--warmup_iters=5", "--muon_lr=0.045"]
    expected = json.loads((ROOT / "tests" / "curves.json").read_text())
    for optimizer in ("adamw", "muon"):
        names = [f"--optimizer={optimizer}", f"--out_dir={optimizer}"]
        output_of("train.py", *flags, *names, cwd=here)
        log = read_log(here / optimizer)
        losses = [entry["loss"] for entry in log if "loss" in entry] + [log[-1]["val_loss"]]
        assert losses == pytest.approx(expected[optimizer], abs=1e-4)
