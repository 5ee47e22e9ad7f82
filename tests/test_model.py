"""The GPT: its loss, its initialisation, and generation with a cache against generation without."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT, GPTConfig, next_token_probs, sample_token
from tests.try_model import generate, greedy_without_cache


def make_model(seed=0, sharp=1.0, **sizes):
    """A tiny model in eval mode; `sharp` widens its weights, so that its choices are clear."""
    torch.manual_seed(seed)
    config = dict(block_size=16, vocab_size=97, n_layer=2, n_head=2, n_embd=32) | sizes
    model = GPT(GPTConfig(**config)).eval()
    for parameter in model.parameters():
        parameter.data *= sharp if parameter.dim() > 1 else 1
    return model


@pytest.mark.parametrize(
    "V, n_layer, n_head, n_embd, T", [(97, 2, 2, 32, 16), (65, 4, 4, 128, 64), (30, 2, 8, 512, 32)]
)
def test_loss_at_initialisation_is_that_of_a_uniform_guess(V, n_layer, n_head, n_embd, T):
    """ln(V), and above it half of the logits' variance. Of 4,096 targets, for which 1,000 seeds
    stay below 0.3 % here; of 128 every fifth was beyond 2 %."""
    model = make_model(block_size=T, vocab_size=V, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    B = max(8, 4096 // T)
    with torch.no_grad():
        _, loss = model(torch.randint(V, (B, T)), torch.randint(V, (B, T)))
    assert loss.item() == pytest.approx(math.log(V), rel=0.02)


def test_loss_is_the_mean_cross_entropy_of_all_logits():
    model = make_model()
    idx, targets = torch.randint(97, (2, 4, 16))
    targets[0, :5] = -100
    logits, loss = model(idx, targets)
    assert logits.shape == (4, 16, 97)
    counts = targets >= 0
    log_probs = logits.double().log_softmax(dim=-1)[counts]
    chosen = log_probs[range(len(log_probs)), targets[counts]]
    assert loss.item() == pytest.approx(-chosen.mean().item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_floats_are_summed_in_float32(dtype):
    """Over 50,000 logits: their sum in bfloat16 would be off by a hundredth or more."""
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(4, 50_257)).to(dtype), torch.randint(50_257, (4,))
    ours = GPT.losses(None, logits, targets)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("chunks", [[1] * 16, [5, 11]])
def test_cached_logits_equal_those_of_the_whole_sequence(chunks, dtype, atol):
    model, idx = make_model().to(dtype), torch.randint(97, (2, 16))
    cache = model.new_cache()
    parts = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(idx)[0], rtol=1e-4, atol=atol)


@pytest.mark.gpt2
def test_dropout_acts_on_embeddings_attention_and_mlps_in_training_only():
    """A share of 0.5 of each: zeros, and twice what is left. One loop over modules changes it."""
    model, idx, seen = make_model(dropout=0.25), torch.randint(97, (8, 16)), {}
    dropping = [module for module in model.modules() if hasattr(module, "dropout")]
    assert all(module.dropout == 0.25 for module in dropping)
    for module in dropping:
        module.dropout = 0.5

    def keep(name):
        return lambda module, args, y=None: seen.update({name: args[0] if y is None else y})

    model.h[0].register_forward_pre_hook(keep("embeddings"))
    model.h[0].attn.register_forward_hook(keep("attention"))
    model.h[0].mlp.register_forward_hook(keep("mlp"))
    model.eval()(idx)
    quiet = dict(seen)
    torch.manual_seed(0)
    model.train()(idx)
    assert quiet.keys() == {"embeddings", "attention", "mlp"}
    for name, outcome in seen.items():
        assert not (quiet[name] == 0).any(), name
        assert 0.45 < (outcome == 0).float().mean() < 0.55, name
    kept = seen["embeddings"] != 0
    torch.testing.assert_close(seen["embeddings"][kept], 2 * quiet["embeddings"][kept])


def test_a_model_that_has_never_run_is_compiled_whole():
    torch.compiler.reset()  # what other tests have compiled counts towards a limit
    model, idx = make_model(), torch.randint(97, (2, 16))
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # a break would raise
    torch.testing.assert_close(compiled(idx)[0], model(idx)[0])


def test_a_model_can_be_made_in_inference_mode():
    with torch.inference_mode():
        assert make_model()(torch.zeros(1, 4, dtype=torch.long))[0].shape == (1, 4, 97)


# ---------------------------------------------------------------- generation
@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_greedy_with_cache_equals_greedy_without(block_size, length):
    model = make_model(sharp=8, block_size=block_size)
    tokens = torch.randint(97, (length,)).tolist()
    cached = generate(model, [tokens], 60, temperature=0)[0].tolist()
    assert cached == greedy_without_cache(model, tokens, 60)
    assert len(set(cached)) > 1 or block_size < 5  # it does not just repeat one token


def test_generate_is_lazy_and_seeded():
    model = make_model()
    stream = model.generate(torch.tensor([[1]]), 10**9)
    assert [next(stream).shape for _ in range(3)] == [(1,)] * 3
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    a, b, c = (generate(model, [[1]], 20, generator=each).tolist() for each in generators)
    assert a == b != c
    assert list(model.generate(torch.tensor([[1]]), 0)) == []


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    model = make_model()
    model.restrict_to_tokens([3, 5, 7, 97, 99])  # 97 is the first that the model lacks
    assert set(generate(model, [[3]], 200)[0].tolist()) == {3, 5, 7}


def test_initialisation_keeps_the_residual_stream_at_any_depth():
    """What the blocks add, in all: it would grow with the square root of their number."""
    added = {}
    for n_layer in (2, 32):
        model = make_model(n_layer=n_layer, n_embd=64, n_head=4)
        x = torch.randn(8, 16, 64)
        with torch.no_grad():
            y = x
            for block in model.h:
                y = block(y)
        added[n_layer] = (y - x).std().item()
    assert added[32] == pytest.approx(added[2], rel=0.4)


# ---------------------------------------------------------------- filters
@pytest.mark.parametrize("temperature", [0.01, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_filters_equal_those_of_transformers(temperature, top_k, top_p, min_p):
    from transformers import generation

    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 3
    probs = next_token_probs(logits, temperature, top_k, top_p, min_p)
    expected = generation.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = generation.TopKLogitsWarper(top_k)(None, expected)
    expected = generation.TopPLogitsWarper(top_p)(None, expected)
    expected = generation.MinPLogitsWarper(min_p)(None, expected)
    torch.testing.assert_close(probs, expected.softmax(dim=-1))
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(7))


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(
    st.lists(st.integers(-(2**99), 2**99).map(float) | st.just(-math.inf)),
    st.just(0.0) | st.floats(1e-30, 100),
    st.integers(1, 10**22),
    st.floats(1e-30, 1),
    st.floats(0, 1),
)
def test_filters_leave_probabilities_and_the_likeliest(logits, temperature, top_k, top_p, min_p):
    logits = torch.tensor([[0.0, *logits]])
    probs = next_token_probs(logits, temperature, top_k, top_p, min_p)[0]
    assert probs.sum().item() == pytest.approx(1, abs=1e-5) and probs.min() >= 0
    assert logits[0, probs.argmax()] == logits.max()


def test_greedy_is_the_likeliest_token_and_tiny_temperatures_approach_it():
    logits = torch.randn(7, 50) * 100
    greedy = next_token_probs(logits, temperature=0)
    assert torch.equal(greedy.argmax(dim=-1), logits.argmax(dim=-1))
    torch.testing.assert_close(next_token_probs(logits, temperature=1e-30), greedy)


def test_the_least_and_the_greatest_random_number_draw_tokens_that_are_possible(monkeypatch):
    for u, token in ((0.0, 1), (1 - 2**-24, 3)):
        monkeypatch.setattr(torch, "rand", lambda *size, u=u, **_: torch.full(size, u))
        assert sample_token(torch.tensor([[0.0, 0.3, 0.2, 0.4, 0.0]])).tolist() == [token]


def test_too_many_tokens_none_at_all_and_logits_that_are_no_numbers_are_errors():
    with pytest.raises(ValueError, match=r"17.*16"):
        make_model()(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match="newline"):
        list(make_model().generate(torch.zeros(1, 0, dtype=torch.int64), 1))
    with pytest.raises(ValueError, match="NaN or infinity"):
        sample_token(torch.full((2, 5), math.nan))


def test_draws_follow_the_probabilities():
    model = make_model(sharp=8)
    probs = next_token_probs(model(torch.tensor([[5]]))[0][:, -1].detach(), top_k=4)
    idx = torch.full((20_000, 1), 5)
    drawn = generate(model, idx, 1, top_k=4, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(drawn[:, 0], minlength=97) / len(idx)
    torch.testing.assert_close(share, probs[0], rtol=0, atol=0.015)
