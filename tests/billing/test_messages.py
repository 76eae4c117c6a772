"""The basis of an estimate, in words."""

from __future__ import annotations

import pytest

from billing import messages


@pytest.mark.parametrize(
    ("basis", "words", "label"),
    [
        ({"source": "history", "runs": 1}, "Based on 1 earlier run of", "High estimate"),
        ({"source": "history", "runs": 7}, "Based on 7 earlier runs of", "90% of runs cost less than"),
        ({"source": "history", "runs": 7, "measured_nodes": [1]}, "Scaled", "High estimate"),
        ({"source": "probe", "runs": 7}, "Based on 7 free estimates", "High estimate"),
        ({"source": "customer", "runs": 0}, "Assumes the longest time that you set", "High estimate"),
        ({"source": "reference", "runs": 0}, "No run of this script has been measured yet", "High estimate"),
    ],
)
def test_the_basis_of_an_estimate_is_named(basis, words, label):
    """A share of runs is claimed only where enough were measured."""
    assert words in messages.basis_sentence(basis)
    assert messages.p90_label(basis) == label
