"""Dense and lexical search and fusion against definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.ranking.bm25 import BM25
from revela.ranking.exact import top_k
from revela.ranking.fusion import (
    MOST_ALIKE,
    FusionRule,
    above_chance,
    chance_of,
    fuse_scores,
    reciprocal_rank_fusion,
)
from tests.searching.letters import max_bm25


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10), st.sampled_from([1, 90, 2**26]))
def test_top_k_is_a_full_sort_cut_off(count, k, seed, scores_at_a_time):
    rng = np.random.default_rng(seed)
    queries, passages = (rng.normal(size=(n, 4)).astype(np.float32) for n in (3, count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("revela.ranking.exact.SCORES", scores_at_a_time)
        indices, scores = top_k(queries, passages, k)
    full = queries @ passages.T
    want = np.argsort(-full, axis=1, kind="stable")[:, : min(k, count)]
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_allclose(scores, np.take_along_axis(full, want, 1), rtol=1e-5, atol=1e-6)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 3), st.integers(0, 10))
def test_of_passages_that_tie_the_first_are_nearest(count, k, values, seed):
    rng = np.random.default_rng(seed)
    queries = np.ones((2, 1), np.float32)
    passages = rng.integers(values, size=(count, 1)).astype(np.float32)
    indices, scores = top_k(queries, passages, k)
    want = np.argsort(-passages[:, 0], kind="stable")[:k]
    np.testing.assert_array_equal(indices, [want, want])
    np.testing.assert_array_equal(scores[0], passages[want, 0])


def test_fusion_by_hand():
    fused = reciprocal_rank_fusion([[5, 7], [7, 9]])
    assert list(fused) == [7, 5, 9]
    assert list(fused.values()) == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62])


def test_fusion_of_scores_by_hand():
    cosines, shares = {"a": 0.8, "b": 0.6, "c": 0.1}, {"b": 0.5, "c": 0.2}
    similarities = {"a": 0.75, "b": 0.5, "c": 0}
    w = 0.75 * 4
    rule = FusionRule(squared_ratio=4, chance=0.2)
    fused = fuse_scores(cosines, shares, rule)
    assert list(fused) == ["b", "a", "c"]
    assert fused == {
        d: pytest.approx((similarities[d] + w * shares.get(d, 0)) / (1 + w)) for d in fused
    }
    assert fuse_scores(cosines, shares, rule, weight=0.25) == {
        d: pytest.approx(0.25 * similarities[d] + 0.75 * shares.get(d, 0)) for d in ("b", "a", "c")
    }
    plain = FusionRule()
    assert fuse_scores({}, {}, plain) == {}
    assert fuse_scores({"a": 0.5}, {}, plain) == {"a": pytest.approx(2 / 7)}


@pytest.mark.parametrize(("stretch", "seed"), [(0.2, 0), (0.6, 1), (0.999, 2)])
def test_scores_do_not_change_where_all_cosines_are_stretched_and_shifted(stretch, seed):
    """A number that all vectors share: cosines of 0 to 1 become cosines of .8 to 1."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(40, 8)) + 0.4
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    shared = np.full((40, 1), (1 - stretch) ** 0.5)
    narrow = np.hstack([vectors * stretch**0.5, shared])
    query, shares = 7, {int(row): float(rng.random()) for row in rng.choice(40, 9)}

    def fused(vectors):
        cosines = dict(enumerate((vectors @ vectors[query]).tolist()))
        return fuse_scores(cosines, shares, FusionRule(2.0, chance_of(vectors)))

    before, after = fused(vectors), fused(narrow)
    assert list(after) == list(before) and after == pytest.approx(before, abs=1e-5)
    assert min(before.values()) >= 0 and max(before.values()) <= 1


def test_chance_is_the_mean_cosine_of_two_passages():
    vectors = np.random.default_rng(0).normal(size=(20, 5)) + 0.5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    naive = [vectors[i] @ vectors[j] for i in range(20) for j in range(20) if i != j]
    assert chance_of(vectors.astype(np.float32)) == pytest.approx(np.mean(naive), abs=1e-6)
    assert chance_of(vectors[:1]) == chance_of(vectors[:0]) == 0
    assert chance_of(np.array([[1.0, 0.0], [-1.0, 0.0]])) == 0, "no passage is less than unlike"
    assert chance_of(np.array([[1.0, 0.0]] * 3)) == MOST_ALIKE
    assert above_chance([1.0, 0.9], MOST_ALIKE).tolist() == pytest.approx([1, 0])


@pytest.mark.parametrize("holders", [1, 5, 10, 30, 200])
def test_words_count_where_all_that_hold_them_tie(holders):
    """A directory: thirty people of one department, found by its name."""
    cosines = {i: 0.4 + 0.3 * i / 300 for i in range(300)}  # the others are nearer
    words = dict.fromkeys(range(holders), 0.45) | {299 - i: 0.02 for i in range(90)}
    fused = list(fuse_scores(cosines, words, FusionRule(squared_ratio=4.0)))
    assert set(fused[:holders]) == set(range(holders))
    twice = dict.fromkeys(range(min(5, holders)), 0.45) | {299: 0.03, 298: 0.02}
    first = next(iter(fuse_scores(cosines, twice, FusionRule(squared_ratio=2.0))))
    assert first == min(5, holders) - 1, "and the nearest is first"


def test_best_bm25_score_is_what_a_text_of_nothing_else_comes_near_to():
    texts = ["heat flow", "flow of a gas", "a wing"]
    index = BM25([*texts, "heat gas " * 10_000], "en")
    best = [max_bm25(index, query) for query in ("heat gas", "heat heat", "unseen", "the", "")]
    reached = index.top_k(["heat gas"], 1)[1][0, 0]
    # Of four texts two hold each word; idf = log(1 + 2.5 / 2.5), k1 + 1 = 2.2; a word that none
    # holds: log(1 + 4.5 / .5).
    heat = 2.2 * np.log(2)
    np.testing.assert_allclose(best, [2 * heat, heat, 2.2 * np.log(10), 0, 0], rtol=1e-6)
    assert 0.99 * best[0] < reached < best[0]


def test_bm25_finds_words_and_survives_nothing():
    index = BM25(["the cat sat", "a dog ran", "the the the"])
    indices, scores = index.top_k(["cat", "unseen", ""], 3)
    assert indices[0][0] == 0 and scores[0][0] > 0 and scores[1].max() == 0 and scores[2].max() == 0
    assert [list(ranking) for ranking in index.rankings(["cat", "unseen", ""], 3)] == [[0], [], []]
    assert BM25(["the", "a"]).top_k(["cat"], 5)[0].shape == (1, 2)


def test_bm25_knows_inflections_and_words_of_one_letter():
    index = BM25(["she banks her savings", "plot x against time", "plot y against time"])
    assert index.top_k(["banking"], 1)[0][0, 0] == 0
    assert [int(best[0]) for best in index.top_k(["plot of x", "plot of y"], 1)[0]] == [1, 2]
