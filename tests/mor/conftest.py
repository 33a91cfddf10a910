"""A model of Mixture-of-Recursions that keeps different numbers of tokens in two sequences."""

import pytest


@pytest.fixture
def routed(tiny):
    """A model whose scores lie on both sides of 0 at every step: two sequences keep different numbers of tokens."""

    def make(method="mor", **fields):
        return tiny(method, **{"router_scale": 0.7, "seed": 4, "spread": 0.25} | fields)

    return make
