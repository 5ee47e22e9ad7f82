"""model.py and gpt2_format's formula against transformers. No test here is marked gpt2: tests with
that mark are skipped if model.py and the formula differ, so a fault in either would hide there."""

import pytest
import torch

from gptling.gpt2_format import gpt2_logits, save
from model import GPT, GPTConfig
from tests.conftest import randomised

transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")
SIZES = {"vocab_size": 28, "n_layer": 3, "n_head": 2, "n_embd": 32}


@pytest.fixture
def theirs():
    config = transformers.GPT2Config(n_positions=16, **SIZES)
    return randomised(transformers.GPT2LMHeadModel(config))


@torch.no_grad()
def test_the_formula_is_that_of_transformers(theirs):
    idx, config = torch.randint(28, (3, 11)), GPTConfig(block_size=16, **SIZES)
    tensors, logits = theirs.transformer.state_dict(), theirs(idx).logits[:, -1]
    before = torch.get_rng_state()
    ours = gpt2_logits(tensors, config, idx)
    assert torch.equal(torch.get_rng_state(), before), "a checkpoint changes what is drawn next"
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("old, new", [("ln_f.", "norm."), ("h.", "layers."), ("wpe.", "more.")])
def test_a_tensor_with_another_name_is_none_of_a_gpt2(theirs, old, new):
    """The check's own layers have other names, which transformers does not know."""
    tensors = theirs.transformer.state_dict()
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[name.replace(old, new)] = tensors.pop(name)
    idx, config = torch.zeros(1, 3, dtype=torch.int64), GPTConfig(block_size=16, **SIZES)
    with pytest.raises(ValueError, match="a GPT-2 differs in "):
        gpt2_logits(tensors, config, idx)


CHANGED = """model.py no longer computes a GPT-2. If you changed it on purpose, this is expected:
tests marked gpt2 are skipped then, and checkpoints say model_type gptling, so that no program takes
them for a GPT-2. If you did not, model.py has a bug that this test alone may report."""


@torch.no_grad()
def test_model_py_computes_a_gpt2_and_is_taken_for_one(theirs, tmp_path):
    model, idx = GPT(GPTConfig(block_size=16, **SIZES)).eval(), torch.randint(28, (3, 16))
    published = dict(theirs.transformer.named_parameters())
    assert published.keys() == dict(model.named_parameters()).keys(), CHANGED
    for name, tensor in published.items():
        if tensor.dim() == 2 and name.startswith("h."):
            published[name] = tensor.T  # Conv1D
    model.load_state_dict(published, strict=False)
    assert torch.allclose(model(idx)[0], theirs(idx).logits, rtol=0, atol=3e-5), CHANGED
    assert save(model, tmp_path) == ""
