"""Tours against loops that say what they mean: like beside like, nothing lost, nothing twice, the
same for the same seed.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from revela.training.groups import similarity as cluster
from revela.training.groups.similarity import concatenate_sides, greedy_path, order_by_similarity
from revela.training.settings import Groups


def points(count: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 9))
def test_greedy_path_goes_to_the_nearest_that_is_left(count, width, seed):
    places = points(count, width, seed).astype(np.float64)
    start = seed % count
    here, left, naive = start, set(range(count)) - {start}, [start]
    while left:
        here = min(
            left,
            key=lambda i: (
                sum((a - b) ** 2 for a, b in zip(places[i], places[here], strict=True)),
                i,
            ),
        )
        left.remove(here)
        naive.append(here)
    assert greedy_path(places, start) == naive


def test_of_equals_the_first_comes_first():
    assert greedy_path(np.zeros((4, 2), dtype=np.float32), 2) == [2, 0, 1, 3]


@limits(max_examples=25)
@given(st.integers(0, 90), st.sampled_from([1, 3, 8]), st.integers(0, 3), st.booleans())
def test_every_chunk_once_whatever_the_vectors(count, size, seed, alike):
    vectors = np.zeros((count, 4), dtype=np.float32) if alike else points(count, 4, seed)
    settings = Groups(cluster_size=size)
    order = order_by_similarity(vectors, None, settings, seed)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == order_by_similarity(vectors, None, settings, seed).tolist()


@pytest.mark.parametrize("branch", [4, 256])  # several levels, or one
@pytest.mark.parametrize("sample", [50, 65536])  # k-means sees some of the vectors, or all
def test_like_stands_beside_like(monkeypatch, branch, sample):
    monkeypatch.setattr(cluster, "BRANCH", branch)
    monkeypatch.setattr(cluster, "SAMPLE", sample)
    kinds = np.random.default_rng(0).permutation(np.repeat(np.arange(24), 16))
    vectors = points(24, 12, 1)[kinds] + 0.05 * points(len(kinds), 12, 2)

    def same_neighbour(order):
        return np.mean(kinds[order][1:] == kinds[order][:-1])

    assert (
        same_neighbour(order_by_similarity(vectors, None, Groups(cluster_size=16), 0))
        > 0.85
        > 0.2
        > same_neighbour(np.arange(len(kinds)))
    )


@pytest.mark.parametrize("packing", ["path", "random"])
def test_a_path_goes_from_each_cluster_to_the_next_and_a_random_order_does_not(packing):
    kinds = np.repeat(np.arange(24), 16)
    vectors = (kinds + 0.01 * points(len(kinds), 1, 0)[:, 0])[:, None].astype(np.float32)
    settings = Groups(cluster_size=16, packing=packing)
    passed = kinds[order_by_similarity(vectors, None, settings, 0)]
    steps = np.abs(np.diff(passed))
    assert np.count_nonzero(steps) < 40  # clusters stay whole
    assert (steps.sum() > 80) == (packing == "random")


def test_more_steps_and_more_starts_of_k_means_give_closer_clusters():
    vectors = points(400, 6, 0)

    def squares(steps, starts):
        rng, members = np.random.default_rng(0), np.arange(400)
        settings = Groups(kmeans_steps=steps, kmeans_starts=starts)
        labels = cluster._labels(vectors, None, members, 20, rng, settings)
        parts = [vectors[labels == k] for k in range(20)]
        return sum(((part - part.mean(axis=0)) ** 2).sum() for part in parts if len(part))

    assert squares(1, 1) > 1.01 * squares(10, 1) > 1.01 * squares(10, 5)


def test_a_cluster_of_one_and_a_large_one_both_find_their_place():
    vectors = np.concatenate([np.zeros((40, 2)), [[9.0, 0.0]], [[9.1, 0.0]]]).astype(np.float32)
    order = order_by_similarity(vectors, None, Groups(cluster_size=8), 0).tolist()
    assert sorted(order) == list(range(42)) and abs(order.index(40) - order.index(41)) == 1


def test_pairs_that_answer_each_other_the_other_way_round_are_near():
    """q1 is about what d2 is about, and d1 about what q2 is: [q1; d1] is far from [q2; d2], and
    right at [d2; q2].
    """
    a, b = np.eye(2, dtype=np.float32)
    own, swapped = concatenate_sides(np.stack([a, b]), np.stack([b, a]))
    assert (
        np.allclose(np.linalg.norm(own, axis=1), 1)
        and np.allclose(own[0], swapped[1])
        and np.allclose(own[0] @ own[1], 0)
    )
    kinds = np.arange(40) % 2
    queries, passages = (
        np.stack([a, b])[kinds] + 0.01 * points(40, 2, 0),
        np.stack([b, a])[kinds] + 0.01 * points(40, 2, 1),
    )
    own, swapped = concatenate_sides(queries, passages)
    order = order_by_similarity(own, swapped, Groups(cluster_size=10), 0)
    assert sorted(order.tolist()) == list(range(40))


def test_random_numbers_of_others_are_left_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    order_by_similarity(points(60, 4, 0), None, Groups(cluster_size=5), 0)
    assert (
        torch.equal(torch.rand(3), expected[0])
        and (np.random.rand(3) == expected[1]).all()
        and random.random() == expected[2]
    )
