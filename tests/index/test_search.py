"""Dense and lexical search, fusion and metrics against definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.errors import RevelaError
from revela.evaluation.metrics import mean_scores, per_query
from revela.index.bm25 import BM25
from revela.index.exact import top_k
from revela.index.fusion import check_weight, fuse_scores, reciprocal_rank_fusion
from revela.types import evenly_spaced


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10), st.sampled_from([1, 90, 2**26]))
def test_top_k_is_a_full_sort_cut_off(count, k, seed, scores_at_a_time):
    rng = np.random.default_rng(seed)
    queries, passages = (rng.normal(size=(n, 4)).astype(np.float32) for n in (3, count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("revela.index.exact.SCORES", scores_at_a_time)
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
    fused = reciprocal_rank_fusion([[5, 7], [7, 9]], k=60)
    assert list(fused) == [7, 5, 9]
    assert list(fused.values()) == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62])


def test_fusion_of_scores_by_hand():
    cosines, shares = {"a": 0.8, "b": 0.6, "c": 0.1}, {"b": 0.5, "c": 0.25}
    # Gaps: .5 - .25 of .5; above the mean of .5, the nearest is .3, and their mean 0.
    weight = 0.5 * 3.0 * 0.5 / 1
    fused = fuse_scores(cosines, shares, odds=3.0)
    assert list(fused) == ["b", "a", "c"]
    assert fused == {
        d: pytest.approx((cosines[d] + weight * shares.get(d, 0)) / (1 + weight)) for d in fused
    }
    assert fuse_scores(cosines, shares, odds=3.0, weight=0.25) == {
        d: pytest.approx(0.25 * cosines[d] + 0.75 * shares.get(d, 0)) for d in ("b", "a", "c")
    }


def test_words_weigh_as_they_are_sure_and_as_they_know_the_corpus():
    cosines = {i: 0.9 - i / 50 for i in range(40)}

    def first(gap, odds=1.0):
        words = {30: 0.5} | {row: 0.5 - gap - row / 1e4 for row in range(31, 40)}
        return fuse_scores(cosines, words, odds)[30]

    nearest = cosines[30]
    assert nearest < first(0) < first(0.1) < first(0.4) < 0.5, "its share is above its cosine"
    assert first(0) < nearest + 0.005
    assert first(0.1, odds=0.01) < first(0.1) < first(0.1, odds=100)
    assert fuse_scores(cosines, {}) == cosines
    alike = dict.fromkeys(range(20), 0.5)  # vectors that tell nothing apart: least gap
    weight = 0.5 * (0.9 - 0.1) / 0.9 / 0.01
    assert fuse_scores(alike, {1: 0.9, 2: 0.1})[3] == pytest.approx(0.5 / (1 + weight), rel=0.02)


@pytest.mark.parametrize("holders", [1, 5, 10, 30, 200])
def test_words_count_where_all_that_hold_them_tie(holders):
    """A directory: thirty people of one department, found by its name."""
    cosines = {i: 0.4 + 0.3 * i / 300 for i in range(300)}  # the others are nearer
    words = dict.fromkeys(range(holders), 0.45) | {299 - i: 0.02 for i in range(90)}
    fused = list(fuse_scores(cosines, words, odds=4.0))
    assert set(fused[:holders]) == set(range(holders))
    twice = dict.fromkeys(range(min(5, holders)), 0.45) | {299: 0.4, 298: 0.35}
    assert next(iter(fuse_scores(cosines, twice))) == min(5, holders) - 1, (
        "and the nearest is first"
    )


@pytest.mark.parametrize("weight", [-0.1, 1.01, float("nan")])
def test_a_weight_that_is_no_share_is_one_sentence(weight):
    with pytest.raises(RevelaError, match="give the vectors' share"):
        check_weight(weight)


def test_a_sample_is_even():
    assert (
        len(evenly_spaced(5000)) == 1000
        and evenly_spaced(3).tolist() == [0, 1, 2]
        and len(evenly_spaced(0)) == 0
    )
    assert evenly_spaced(100, 5).tolist() == [0, 24, 49, 74, 99]


def test_best_bm25_score_is_what_a_text_of_nothing_else_comes_near_to():
    texts = ["heat flow", "flow of a gas", "a wing"]
    index = BM25([*texts, "heat gas " * 10_000])
    best = index.max_scores(["heat gas", "heat heat", "unseen", "the", ""])
    reached = index.top_k(["heat gas"], 1)[1][0, 0]
    # Of four texts two hold each word; idf = log(1 + 2.5 / 2.5), k1 + 1 = 2.2; a word that none
    # holds: log(1 + 4.5 / .5).
    np.testing.assert_allclose(
        best, [2 * 2.2 * np.log(2), 2 * 2.2 * np.log(2), 2.2 * np.log(10), 0, 0], rtol=1e-6
    )
    assert 0.99 * best[0] < reached < best[0]


def test_bm25_finds_words_and_survives_nothing():
    index = BM25(["the cat sat", "a dog ran", "the the the"])
    indices, scores = index.top_k(["cat", "unseen", ""], 3)
    assert indices[0][0] == 0 and scores[0][0] > 0 and scores[1].max() == 0 and scores[2].max() == 0
    assert BM25(["the", "a"]).top_k(["cat"], 5)[0].shape == (1, 2)


def test_bm25_knows_inflections_and_words_of_one_letter():
    index = BM25(["she banks her savings", "plot x against time", "plot y against time"])
    assert index.top_k(["banking"], 1)[0][0, 0] == 0
    assert [int(best[0]) for best in index.top_k(["plot of x", "plot of y"], 1)[0]] == [1, 2]


def test_metrics_by_hand():
    qrels = {"q": {"a": 1, "b": 1}, "unanswered": {"a": 1}}
    run = {"q": {"x": 3.0, "a": 2.0, "y": 1.0}}
    scores = per_query(qrels, run)
    assert scores["q"]["mrr@10"] == 0.5
    assert scores["q"]["recall@100"] == 0.5
    assert scores["q"]["map"] == pytest.approx(0.25)
    assert scores["q"]["ndcg@10"] == pytest.approx((1 / np.log2(3)) / (1 + 1 / np.log2(3)))
    assert mean_scores(qrels, run)["mrr@10"] == 0.25
