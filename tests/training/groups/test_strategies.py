"""Groups are whole, never repeat a chunk, mix at most two documents unless they are short, and
depend on the seed alone.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from revela.training.groups.strategies import (
    document_groups,
    interleaved_groups,
    mixed_groups,
    ordered_groups,
    random_groups,
    rounds_of_queries,
    spread_groups,
)

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def corpus(sizes: list[int]) -> np.ndarray:
    """The document of each chunk."""
    return np.repeat(np.arange(len(sizes)), sizes)


@given(SIZES, st.sampled_from([2, 5, 16]), st.integers(0, 5))
def test_groups_are_whole_and_disjoint(sizes, size, seed):
    groups = list(document_groups(corpus(sizes), size, seed))
    assert all(len(g) == size for g in groups)
    used = Counter(i for g in groups for i in g)
    assert not used or max(used.values()) == 1
    assert len(groups) > 0 or sum(sizes) < 3 * size


@given(SIZES, st.integers(0, 5))
def test_more_than_two_documents_meet_only_if_they_are_short(sizes, seed):
    owners = corpus(sizes)
    for group in document_groups(owners, 16, seed):
        pieces = Counter(owners[i] for i in group)
        if len(pieces) > 2:
            long = [d for d, n in pieces.items() if n >= 8]
            assert len(long) <= 1
            # the others bring rests that no group of two had room for
            assert all(n < 8 for d, n in pieces.items() if d not in long)


@given(SIZES, st.integers(0, 5))
def test_a_document_gives_contiguous_chunks(sizes, seed):
    owners = corpus(sizes)
    for group in document_groups(owners, 16, seed):
        for document in {owners[i] for i in group}:
            if sizes[document] < 16:
                continue
            members = sorted(i for i in group if owners[i] == document)
            gaps = sum(b - a != 1 for a, b in pairwise(members))
            assert gaps <= 1  # the head and the tail of one document may fill a group together


@given(st.lists(st.integers(1, 7), min_size=4, max_size=60), st.integers(0, 5))
def test_vectors_change_who_meets_whom_and_lose_nothing(sizes, seed):
    owners = corpus(sizes)
    vectors = np.random.default_rng(seed).normal(size=(len(sizes), 3)).astype(np.float32)
    plain, similar = (
        list(document_groups(owners, 16, seed, vectors_ND=v)) for v in (None, vectors)
    )
    assert len(plain) == len(similar) == sum(sizes) // 16
    assert len({i for g in similar for i in g}) == 16 * len(similar)
    assert similar == list(document_groups(owners, 16, seed, vectors_ND=vectors))


def test_similar_short_documents_share_a_group():
    topics = np.repeat(np.arange(8), 32)
    rng = np.random.default_rng(0)
    vectors = (np.eye(8)[topics] + 0.05 * rng.normal(size=(256, 8))).astype(np.float32)
    owners = corpus([2] * 256)

    def of_one_topic(vectors_ND):
        groups = document_groups(owners, 16, 0, vectors_ND=vectors_ND)
        return np.mean(
            [Counter(topics[owners[i]] for i in g).most_common(1)[0][1] / 16 for g in groups]
        )

    assert of_one_topic(vectors) > 0.8 > 0.5 > of_one_topic(None)


@given(SIZES, st.sampled_from([2, 5, 16]), st.integers(0, 5))
def test_spread_groups_keep_siblings_apart(sizes, size, seed):
    owners = corpus(sizes)
    groups = list(spread_groups(owners, size, seed))
    assert all(len(g) == size for g in groups) and len(groups) == sum(sizes) // size
    used = Counter(i for g in groups for i in g)
    assert not used or max(used.values()) == 1
    assert groups == list(spread_groups(owners, size, seed))
    if len(set(sizes)) == 1 and len(sizes) % size == 0:  # rounds then end where groups do
        assert all(len({owners[i] for i in g}) == size for g in groups)


@given(st.integers(0, 200), st.sampled_from([2, 5, 16]), st.integers(0, 5))
def test_random_groups_leave_less_than_a_group(chunks, size, seed):
    groups = list(random_groups(chunks, size, seed))
    used = [i for g in groups for i in g]
    assert len(groups) == chunks // size and all(len(g) == size for g in groups)
    assert len(set(used)) == len(used) and set(used) <= set(range(chunks))
    assert groups == list(random_groups(chunks, size, seed))
    assert chunks < 50 or groups != list(random_groups(chunks, size, seed, epoch=1))


def test_interleaved_groups_take_a_chunk_of_each_document_in_turn():
    """Of documents with chunks 0 to 2, 3, and 4 and 5: the first of each, then the others."""

    def all_groups(passages):
        made = (interleaved_groups(corpus([3, 1, 2]), 3, passages, seed) for seed in range(60))
        return {tuple(sorted(group)) for groups in made for group in groups}

    assert {(0, 3, 4), (1, 2, 5)} < all_groups(3) and (0, 1, 2) not in all_groups(3)
    assert {(0, 1, 2), (3, 4, 5)} < all_groups(1) and (0, 3, 4) not in all_groups(1)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.sampled_from([2, 5, 16]),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_ordered_groups_are_runs_of_one_order(lengths, size, seed, epoch):
    ends = np.cumsum([0, *lengths])
    orders = [
        np.random.default_rng(seed).permutation(n) + first
        for n, first in zip(lengths, ends, strict=False)
    ]
    groups = list(ordered_groups(orders, size, seed, epoch))
    assert len(groups) == sum(n // size for n in lengths)
    used = [i for g in groups for i in g]
    assert len(set(used)) == len(used)
    for group in groups:
        mine = next(t for t in orders if group[0] in t).tolist()
        places = sorted(mine.index(i) for i in group)  # raises if one is of another order
        steps = [b - a for a, b in pairwise([*places, places[0] + len(mine)])]
        assert len(group) == size and sorted(steps)[:-1] == [1] * (
            size - 1
        )  # next to one another, around the end perhaps


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=80), st.integers(0, 3))
def test_a_round_has_a_query_once(numbers, epoch):
    query_of = np.array(numbers)
    order = np.random.default_rng(0).permutation(len(numbers))
    rounds = rounds_of_queries(order, query_of, 0, epoch)
    assert sorted(i for part in rounds for i in part) == list(range(len(numbers)))
    places = {int(chunk): place for place, chunk in enumerate(order)}
    counts = Counter(n for n in numbers if n >= 0)
    for turn, part in enumerate(rounds):
        asked = [numbers[i] for i in part if numbers[i] >= 0]
        assert sorted(asked) == sorted(n for n, count in counts.items() if count > turn)
        assert [places[int(i)] for i in part] == sorted(places[int(i)] for i in part)
        assert turn == 0 or len(asked) == len(part)


def test_each_epoch_draws_another_chunk_of_a_query():
    firsts = {tuple(rounds_of_queries(np.arange(9), np.arange(9) // 3, 0, e)[0]) for e in range(9)}
    assert len(firsts) > 3


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_mixed_groups_keep_their_proportions_until_one_corpus_is_spent(counts, weight, seed):
    parts = [[[i, n] for n in range(count)] for i, count in enumerate(counts)]
    weights = [weight, 1.0, 1.0, 1.0][: len(counts)]
    mixed = list(mixed_groups(parts, weights, seed))
    taken = [[g for g in mixed if g[0] == i] for i in range(len(counts))]
    assert all(
        mine == part[: len(mine)] for mine, part in zip(taken, parts, strict=True)
    )  # in their own order, none twice
    shares = [len(mine) / w for mine, w in zip(taken, weights, strict=True)]
    assert max(shares) - min(shares) <= 1
    assert any(len(mine) == len(part) for mine, part in zip(taken, parts, strict=True))
