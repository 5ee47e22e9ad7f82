"""Checkpoints against Hugging Face's transformers, in both directions."""

import json

import pytest
import torch
from safetensors.torch import load_file

from model import GPT, GPTConfig
from prepare import build_tokenizer, load_tokenizer, tokenizer_to_json

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


@pytest.mark.parametrize("bias", [True, False])
def test_transformers_reads_our_directory(tmp_path, bias, tokenizer_json):
    model, idx = random_model(bias), torch.randint(28, (3, 16))
    model.save_pretrained(tmp_path, tokenizer_json)
    other, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    torch.testing.assert_close(other(idx).logits, model(idx)[0], rtol=0, atol=1e-5)
    again = GPT.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(idx)[0], model(idx)[0])


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
    model = GPT.from_pretrained(tmp_path)
    torch.testing.assert_close(model(idx)[0], other(idx).logits, rtol=0, atol=1e-5)


def test_our_names_are_those_of_the_published_checkpoints(tmp_path):
    random_model(True).save_pretrained(tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.GPT2LMHeadModel(config).state_dict()
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    assert all(ours[name].shape == theirs[name].shape for name in ours)


def test_auto_tokenizer_gives_our_ids_and_text(tmp_path, tokenizer_json):
    random_model(True).save_pretrained(tmp_path, tokenizer_json)
    auto, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    text = "a bé  中 🙂🙂 cab"
    assert auto(text)["input_ids"] == ours.encode_ordinary(text)
    assert auto.decode(ours.encode_ordinary(text)) == text
    assert auto.eos_token_id == ours.eot_token


def test_greedy_text_is_that_of_transformers(tmp_path, tokenizer_json):
    model = random_model(True)
    model.save_pretrained(tmp_path, tokenizer_json)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    idx = torch.tensor([[1, 2, 3]])
    theirs = other.generate(
        idx, do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0
    )
    ours = torch.cat(list(model.generate(idx, 12, temperature=0)))
    assert theirs[0, 3:].tolist() == ours.tolist()


@pytest.mark.parametrize(
    "key, value", [("activation_function", "relu"), ("n_inner", 7), ("model_type", "llama")]
)
def test_another_architecture_is_refused(tmp_path, key, value):
    random_model(True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=key):
        GPT.from_pretrained(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    random_model(True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_embd": 64}))
    with pytest.raises(ValueError, match=r"wte\.weight"):
        GPT.from_pretrained(tmp_path)


def test_biases_that_were_trained_elsewhere_are_not_lost(tmp_path):
    random_model(False).save_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    other.save_pretrained(tmp_path)
    idx = torch.randint(28, (3, 16))
    model = GPT.from_pretrained(tmp_path, dropout=0.25)
    torch.testing.assert_close(model(idx)[0], other(idx).logits, rtol=0, atol=1e-5)
    assert model.config.bias and model.config.dropout == model.h[0].attn.dropout == 0.25


def test_a_gpt2_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    """As huggingface_hub lays a download out; HF_HUB_CACHE is read when it is imported."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--gpt2" / "snapshots" / "abc"
    random_model(True).save_pretrained(snapshot)
    (tmp_path / "models--gpt2" / "refs").mkdir()
    (tmp_path / "models--gpt2" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    idx = torch.randint(28, (3, 16))
    torch.testing.assert_close(GPT.from_pretrained("gpt2")(idx)[0], random_model(True)(idx)[0])
    with pytest.raises(FileNotFoundError, match="gpt2-medium: cannot be downloaded"):
        GPT.from_pretrained("gpt2-medium")


def test_no_checkpoint_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        GPT.from_pretrained(tmp_path)
