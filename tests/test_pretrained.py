"""Checkpoints against Hugging Face's transformers, in both directions, and what is refused."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptling import cli
from gptling.cli import UserError
from gptling.gpt2_format import load, save
from gptling.pretrained import find_checkpoint, load_model, take_sizes
from gptling.tokenizers import build_tokenizer, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from tests.conftest import ROOT, TINY, output_of, run_script
from tests.edits import edited_source
from train import TrainConfig

transformers = pytest.importorskip(
    "transformers", reason="pip install -e '.[test]' brings transformers"
)


def random_model(bias):
    torch.manual_seed(0)
    config = GPTConfig(block_size=16, vocab_size=28, n_layer=2, n_head=2, n_embd=32, bias=bias)
    model = GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def tokenizer_json():
    alphabet = "abcdefghijklmnopqrstuvw é中🙂"
    return tokenizer_to_json(build_tokenizer("char", alphabet, end_of_text=True))


@pytest.mark.gpt2
@pytest.mark.parametrize("bias", [True, False])
def test_transformers_reads_our_directory(tmp_path, bias, tokenizer_json):
    model, idx = random_model(bias), torch.randint(28, (3, 16))
    save(model, tmp_path, tokenizer_json)
    other, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    torch.testing.assert_close(other(idx).logits, model(idx)[0], rtol=0, atol=1e-5)
    again = load(GPT, tmp_path)
    assert again.config == model.config
    assert torch.equal(again(idx)[0], model(idx)[0])


@pytest.mark.gpt2
@pytest.mark.parametrize("base_only", [False, True])  # keys with and without `transformer.`
@pytest.mark.parametrize("shards", [1, 3])
def test_we_read_a_directory_of_transformers(tmp_path, base_only, shards):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=28, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    other = transformers.GPT2LMHeadModel(config).eval()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    saved = other.transformer if base_only else other
    saved.save_pretrained(tmp_path, max_shard_size="10GB" if shards == 1 else "60KB")
    assert (len(list(tmp_path.glob("model*.safetensors"))) > 1) == (shards > 1)
    idx = torch.randint(28, (3, 16))
    model = load_model(GPT, tmp_path)
    torch.testing.assert_close(model(idx)[0], other(idx).logits, rtol=0, atol=1e-5)


@pytest.mark.gpt2
def test_our_names_are_those_of_the_published_checkpoints(tmp_path):
    save(random_model(True), tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.GPT2LMHeadModel(config).state_dict()
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    assert all(ours[name].shape == theirs[name].shape for name in ours)


def test_auto_tokenizer_gives_our_ids_and_text(tmp_path, tokenizer_json):
    save(random_model(True), tmp_path, tokenizer_json)
    auto, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    text = "a bé  中 🙂🙂 cab"
    assert auto(text)["input_ids"] == ours.encode_ordinary(text)
    assert auto.decode(ours.encode_ordinary(text)) == text
    assert auto.eos_token_id == ours.eot_token
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bos_token_id"] == config["eos_token_id"] == ours.eot_token


@pytest.mark.gpt2
def test_greedy_text_is_that_of_transformers(tmp_path, tokenizer_json):
    model = random_model(True)
    save(model, tmp_path, tokenizer_json)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    idx = torch.tensor([[1, 2, 3]])
    theirs = other.generate(
        idx, do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0
    )
    ours = torch.cat(list(model.generate(idx, 12, temperature=0)))
    assert theirs[0, 3:].tolist() == ours.tolist()


@pytest.mark.gpt2
def test_biases_that_were_trained_elsewhere_are_not_lost(tmp_path):
    save(random_model(False), tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"ln_f\.bias"):
        load_model(GPT, tmp_path)
    idx = torch.randint(28, (3, 16))
    model = load_model(GPT, tmp_path, bias=True, dropout=0.25)
    torch.testing.assert_close(model(idx)[0], other(idx).logits, rtol=0, atol=1e-5)
    assert model.config.bias and model.config.dropout == model.h[0].attn.dropout == 0.25


def test_a_model_is_loaded_in_eval_mode_and_draws_only_tokens_of_its_tokenizer(tmp_path):
    tokenizer = build_tokenizer("char", ["abcdefgh"], end_of_text=False)
    save(random_model(True), tmp_path, tokenizer_to_json(tokenizer))
    for model in (load(GPT, tmp_path), load_model(GPT, tmp_path)):
        assert not model.training and model.valid_tokens.tolist() == [True] * 8 + [False] * 20
        assert torch.equal(model.h[1].attn.causal_mask, torch.ones(16, 16).tril().bool())


def test_the_scripts_draw_no_random_numbers_for_what_they_load(tmp_path):
    model, idx = random_model(True), torch.randint(28, (3, 16))
    save(model, tmp_path)
    before = torch.get_rng_state()
    loaded = load_model(GPT, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(loaded(idx)[0], model(idx)[0])
    torch.nn.init.normal_(loaded.wte.weight)  # afterwards they are drawn again
    assert not torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------- names


def hub_cache(directory, name, monkeypatch):
    """A model in the cache of the hub, as huggingface_hub lays a download out."""
    from huggingface_hub import constants

    snapshot = directory / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
    save(random_model(True), snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    # HF_HUB_CACHE is read when huggingface_hub is imported.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.gpt2
def test_a_gpt2_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    hub_cache(tmp_path, "gpt2", monkeypatch)
    monkeypatch.chdir(tmp_path)
    idx = torch.randint(28, (3, 16))
    torch.testing.assert_close(load_model(GPT, "gpt2")(idx)[0], random_model(True)(idx)[0])
    remedy = "gpt2-medium: cannot be downloaded .*into a directory gpt2-medium"
    with pytest.raises(UserError, match=remedy):
        load_model(GPT, "gpt2-medium")
    save(random_model(True), "gpt2-medium")
    assert find_checkpoint("gpt2-medium").as_posix() == "gpt2-medium", "where the remedy puts it"


@pytest.mark.parametrize("name", ["openai-community/gpt2", "distilgpt2", "distilbert/distilgpt2"])
def test_other_names_of_gpt2s_are_known(tmp_path, monkeypatch, name):
    hub_cache(tmp_path, name, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(name).name == "abc"


def test_no_other_name_is_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gptling.pretrained.download", lambda name: pytest.fail(name))
    for name in ("llama", "someone/gpt2", "gpt2-xxl", "out/gpt2"):
        with pytest.raises(UserError, match="no checkpoint there"):
            find_checkpoint(name)


def test_without_a_checkpoint_an_error_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(GPT, tmp_path)
    with pytest.raises(UserError, match="no checkpoint there"):
        load_model(GPT, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_model(GPT, tmp_path)


# ---------------------------------------------------------------------------- shards, pickles


def gpt2_directory(path, vocab_size=100, **options):
    """A tiny GPT-2 as transformers writes it; returns its model."""
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=vocab_size, **sizes)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(path, **options)
    return model


@pytest.mark.gpt2
def test_only_the_shards_that_the_index_names_are_read(tmp_path):
    other = gpt2_directory(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    (tmp_path / "model-of-another.safetensors").write_bytes(b"damaged")
    idx = torch.randint(100, (2, 16))
    ours = load_model(GPT, tmp_path)(idx)[0]
    torch.testing.assert_close(ours, other(idx).logits, rtol=0, atol=1e-5)
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = sorted(set(index["weight_map"].values()))[-1]
    (tmp_path / file).unlink()
    with pytest.raises(UserError, match=file):
        load_model(GPT, tmp_path)
    for names in (
        {"wte.weight": "../elsewhere.safetensors"},
        {"wte.weight": 3},
        {"a": ""},
        [],
        None,
    ):
        index_file.write_text(json.dumps(index | {"weight_map": names}))
        with pytest.raises(UserError, match=r"index\.json"):
            load_model(GPT, tmp_path)


@pytest.mark.gpt2
def test_weights_in_one_file_come_before_older_shards(tmp_path):
    gpt2_directory(tmp_path, max_shard_size="20KB")
    other = gpt2_directory(tmp_path / "other")
    torch.nn.init.normal_(other.transformer.wte.weight)
    tensors = {f"transformer.{k}": v for k, v in other.transformer.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load_model(GPT, tmp_path).wte.weight
    assert torch.equal(ours, other.transformer.wte.weight)


@pytest.mark.gpt2
def test_a_pickle_is_not_opened_and_its_remedy_works(tmp_path):
    model = gpt2_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle, which can run code") as raised:
        load_model(GPT, tmp_path)
    path = str(tmp_path)
    remedy = f"GPT2LMHeadModel.from_pretrained({path!r}).save_pretrained({path!r})"
    assert str(raised.value).endswith(remedy) and "\n" not in str(raised.value)
    transformers.GPT2LMHeadModel.from_pretrained(path).save_pretrained(path)
    idx = torch.randint(100, (2, 16))
    ours = load_model(GPT, tmp_path)(idx)[0]
    torch.testing.assert_close(ours, model(idx).logits, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------- strictness


@pytest.mark.gpt2
@pytest.mark.parametrize(
    "changes, named",
    [
        ({"activation_function": "relu"}, "activation_function"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"n_embd": 64}, "wte.weight"),
        ({"n_positions": 32}, "wpe.weight"),
        ({"n_layer": 3}, "h.2."),
        ({"n_layer": 1}, "h.1."),
    ],
)
def test_a_config_that_the_weights_do_not_fit_is_refused(tmp_path, changes, named):
    save(random_model(True), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=named):
        load(GPT, tmp_path)
    with pytest.raises(UserError, match=named) as raised:
        load_model(GPT, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.gpt2
@pytest.mark.parametrize(
    "name, tensor",
    [
        ("transformer.wpe.weight", None),
        ("transformer.h.1.ln_2.bias", None),
        ("transformer.h.1.mlp.c_fc.weight", None),
        ("transformer.h.1.mlp.c_fc.weight", torch.zeros(128, 32)),
        ("transformer.ln_f.weight", torch.zeros(33)),
        ("transformer.ln_f.scale", torch.ones(32)),
        ("transformer.h.2.ln_1.weight", torch.ones(32)),
        ("transformer.h.2.ln_1.bias", torch.ones(32)),
        ("lm_head.bias", torch.ones(28)),
    ],
)
def test_a_tensor_that_is_missing_left_over_or_of_another_shape_is_named(tmp_path, name, tensor):
    save(random_model(True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: tensor}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=name.removeprefix("transformer.")):
        load(GPT, tmp_path)


@pytest.mark.gpt2
def test_masks_a_tied_head_and_biases_of_zeros_may_be_left_over(tmp_path):
    model, idx = random_model(False), torch.randint(28, (3, 16))
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    for i in range(2):
        tensors[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(GPT, tmp_path)(idx)[0], model(idx)[0])


# ---------------------------------------------------------------------------- a changed model.py


@pytest.mark.gpt2
@pytest.mark.slow
def test_a_changed_model_py_trains_resumes_and_samples(tmp_path):
    """A new field of GPTConfig is a flag at once, stored, and kept by a resumed run."""
    for file in ("prepare.py", "train.py", "sample.py"):
        shutil.copy(ROOT / file, tmp_path)
    for folder in ("gptling", "config"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    source = edited_source("a scale of the logits, as a field", "no positions", "RMSNorm")
    (tmp_path / "model.py").write_text(source, encoding="utf-8")
    (tmp_path / "mine.txt").write_text("".join(f"{n} green bottles\n" for n in range(500)))
    alone = {"cwd": tmp_path, "PYTHONPATH": ""}
    output_of(tmp_path / "prepare.py", "mine.txt", **alone)
    output = output_of(tmp_path / "train.py", "--dataset=mine", "--logit_scale=3.5", *TINY, **alone)
    assert output.count("checkpoints are for this model.py alone (model_type gptling): ") == 1
    resume = [tmp_path / "train.py", "--out_dir=out/mine", "--resume"]
    output_of(*resume, "--max_iters=30", **alone)
    stored = json.loads((tmp_path / "out/mine/checkpoint-30/config.json").read_text())
    assert stored["model_type"] == "gptling" and stored["logit_scale"] == 3.5
    process = run_script(*resume, "--max_iters=40", "--logit_scale=1.5", **alone)
    assert process.returncode == 1 and b"logit_scale=1.5, where it has 3.5" in process.stderr
    text = output_of(tmp_path / "sample.py", "--prompt=12 gr", **alone)
    assert text.startswith("12 gr") and len(text) > 100


# ---------------------------------------------------------------------------- alone

ALONE = """
import torch
from gpt2_format import load, save
from model import GPT, GPTConfig

torch.manual_seed(0)
model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
idx = torch.randint(11, (4, 9))
losses = []
for _ in range(3):
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[2] < losses[0]
model.eval()
tokens = [t.item() for t in model.generate(idx[:1, :3], 20, temperature=0)]
save(model, "saved")
again = load(GPT, "saved")
assert torch.equal(again(idx[:, :8])[0], model(idx[:, :8])[0])
assert [t.item() for t in again.generate(idx[:1, :3], 20, temperature=0)] == tokens
import sys
print(len(tokens), [name for name in sys.modules if name.startswith("gptling")])
"""


@pytest.mark.slow
def test_model_py_works_when_it_is_copied_away_alone(tmp_path):
    """With gpt2_format.py for checkpoints, which has no import of ours either."""
    shutil.copy(ROOT / "model.py", tmp_path)
    shutil.copy(ROOT / "gptling" / "gpt2_format.py", tmp_path)
    (tmp_path / "alone.py").write_text(ALONE)
    assert output_of(tmp_path / "alone.py", cwd=tmp_path, PYTHONPATH="") == "20 []\n"


# ---------------------------------------------------------------------------- the curve


@pytest.mark.gpt2
def test_the_loss_curve_of_gpt2s_architecture_is_as_committed(trained, tmp_path):
    """A change of initialisation, batches, schedule or optimizer shows here; if it is meant, the
    figures are made anew. Float32 and one thread, so that processors differ little."""
    shutil.copytree(trained / "data", tmp_path / "data")
    flags = ["--dataset=mine", *TINY, "--max_iters=50", "--log_interval=10", "--weight_decay=0.1"]
    flags += ["--warmup_iters=5", "--muon_lr=0.045"]
    expected = json.loads((ROOT / "tests" / "curves.json").read_text())
    for optimizer in ("adamw", "muon"):
        arguments = [*flags, f"--optimizer={optimizer}", f"--out_dir={optimizer}"]
        output_of("train.py", *arguments, cwd=tmp_path)
        log = (tmp_path / optimizer / "log.jsonl").read_text().splitlines()
        log = [json.loads(line) for line in log]
        losses = [entry["loss"] for entry in log if "loss" in entry] + [log[-1]["val_loss"]]
        assert losses == pytest.approx(expected[optimizer], abs=1e-4)


def test_training_takes_the_sizes_of_a_model_that_others_have_published(tmp_path):
    """GPT-2's config.json does not say that it has biases; the quick start has none."""
    theirs = {"model_type": "gpt2", "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 3}
    (tmp_path / "config.json").write_text(json.dumps(theirs | {"vocab_size": 77}))
    config, given, *_ = cli.load(TrainConfig, "", ["--dropout=0.2"], presets=True)
    assert take_sizes(config, given, GPT, tmp_path) == 32
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(GPTConfig)}
    assert GPTConfig(**sizes) == GPTConfig(32, 77, 3, 3, 48, dropout=0.2, bias=True)
