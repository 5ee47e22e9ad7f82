"""Temperature, top-k, top-p and min-p for any logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import next_token_probs

LOGITS = st.lists(
    st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
    | st.sampled_from([0.0, 1.0, -math.inf]),
    min_size=1,
    max_size=30,
).filter(lambda logits: max(logits) > -math.inf)


def survivors(logits, **filters):
    probs = next_token_probs(torch.tensor([logits]), **filters)[0]
    assert probs.sum().item() == pytest.approx(1, abs=1e-5) and probs.min() >= 0
    assert probs[logits.index(max(logits))] > 0, "the likeliest always stays"
    return set(probs.nonzero()[:, 0].tolist())


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(
    LOGITS,
    st.just(0.0) | st.floats(1e-40, 1e6),
    st.tuples(st.integers(1, 40), st.integers(1, 10**22)),
    st.tuples(st.floats(1e-300, 1), st.floats(1e-300, 1)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_filters_leave_probabilities_and_are_monotone(logits, temperature, k, p, min_p):
    survivors(logits, temperature=temperature, top_k=k[0], top_p=p[0], min_p=min_p[0])
    low, high = ({"top_k": limit, "temperature": temperature} for limit in sorted(k))
    assert survivors(logits, **low) <= survivors(logits, **high)
    low, high = ({"top_p": limit, "temperature": temperature} for limit in sorted(p))
    assert survivors(logits, **low) <= survivors(logits, **high)
    high, low = ({"min_p": limit, "temperature": temperature} for limit in sorted(min_p))
    assert survivors(logits, **low) <= survivors(logits, **high)
