"""The order: permutations, windows and mixtures."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from data.order import interleave, mixture_counts, permutation, random_words

weights_of_datasets = st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=8).map(
    lambda weights: np.array(weights) / math.fsum(weights)
)


def splitmix64(state):
    """One output of SplitMix64, in Python integers, from the published algorithm."""
    mask = 2**64 - 1
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(key=st.integers(0, 2**64 - 1), first=st.integers(0, 2**40), size=st.integers(0, 50))
def test_random_words_are_splitmix64(key, first, size):
    expected = [splitmix64((key + (first + i) * 0x9E3779B97F4A7C15) % 2**64) for i in range(size)]
    assert random_words(size, key, first).tolist() == expected


@given(key=st.integers(0, 2**64 - 1), size=st.integers(0, 300))
def test_permutation_is_the_sorting_order_of_random_words(key, size):
    words = [splitmix64((key + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(size)]
    assert permutation(size, key).tolist() == sorted(range(size), key=words.__getitem__)


@given(weights=weights_of_datasets, total=st.integers(0, 300))
@example(weights=np.array([0.7, 0.3]), total=400)  # at 45 both have a sample due at 45, but not after rounding
@example(weights=np.array([0.1, 0.2, 0.7]), total=400)
def test_mixture_follows_the_definition_and_stays_near_its_shares(weights, total):
    due = sorted(((j + 0.5) / weight, i) for i, weight in enumerate(weights.tolist()) for j in range(total))[:total]
    expected = [i for _, i in due]
    dataset, index = interleave(0, total, weights)
    assert dataset.tolist() == expected
    seen = np.zeros(len(weights), int)
    for n, i in enumerate(expected):
        assert index[n] == seen[i]
        seen[i] += 1
        assert mixture_counts(n + 1, weights).tolist() == seen.tolist()
        assert (np.abs(seen - (n + 1) * weights) <= 1 + len(weights) * weights / 2).all()


@given(
    weights=weights_of_datasets,
    start=st.integers(0, 10**15),
    cuts=st.lists(st.integers(0, 40), max_size=6).map(sorted),
)
def test_mixture_does_not_depend_on_the_ranges_asked_for(weights, start, cuts):
    whole = interleave(start, 40, weights)
    bounds = [0, *cuts, 40]
    parts = [interleave(start + a, b - a, weights) for a, b in pairwise(bounds)]
    for i in range(2):
        assert np.concatenate([part[i] for part in parts]).tolist() == whole[i].tolist()
