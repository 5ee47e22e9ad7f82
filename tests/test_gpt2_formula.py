"""The formula of a GPT-2 against transformers. No test here is marked gpt2: tests with that mark
are skipped if the formula says that model.py is changed, so a wrong formula would skip them all."""

import pytest
import torch

from gptling.gpt2_format import gpt2_logits, gpt2_shapes, save, why_not_gpt2
from model import GPT, GPTConfig

transformers = pytest.importorskip(
    "transformers", reason="pip install -e '.[test]' brings transformers"
)
SIZES = {"vocab_size": 28, "n_layer": 3, "n_head": 2, "n_embd": 32}


@pytest.fixture
def theirs():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=16, **SIZES)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def test_the_formula_and_its_shapes_are_those_of_transformers(theirs):
    idx, config = torch.randint(28, (3, 11)), GPTConfig(block_size=16, **SIZES)
    tensors, logits = theirs.transformer.state_dict(), theirs(idx).logits
    assert {n: tuple(tensor.shape) for n, tensor in tensors.items()} == gpt2_shapes(config)
    ours = gpt2_logits(tensors, config, idx)
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)
    last = gpt2_logits(tensors, config, idx, last_only=True)
    torch.testing.assert_close(last, logits[:, -1:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_model_py_is_taken_for_a_gpt2_if_it_gives_transformers_logits(theirs, tmp_path):
    model, idx = GPT(GPTConfig(block_size=16, **SIZES)).eval(), torch.randint(28, (3, 16))
    parameters = dict(model.named_parameters())
    if parameters.keys() != dict(theirs.transformer.named_parameters()).keys():
        pytest.skip("model.py has other parameters than a GPT-2")
    for name, tensor in theirs.transformer.named_parameters():
        conv1d = tensor.dim() == 2 and name.startswith("h.")
        parameters[name].copy_(tensor.T if conv1d else tensor)
    if not torch.allclose(model(idx)[0], theirs(idx).logits, rtol=0, atol=1e-4):
        pytest.skip("model.py gives other logits than a GPT-2")
    assert why_not_gpt2(model) == why_not_gpt2(model, last_only=True) == "" == save(model, tmp_path)
