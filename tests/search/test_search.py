"""Dense and lexical search, fusion and metrics against definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.search.dense import top_k
from revela.search.fusion import reciprocal_rank_fusion
from revela.search.lexical import BM25
from revela.search.metrics import mean_scores, per_query


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10))
def test_top_k_is_a_full_sort_cut_off(count, k, seed):
    rng = np.random.default_rng(seed)
    queries, passages = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(count, 4)).astype(np.float32)
    indices, scores = top_k(queries, passages, k)
    full = queries @ passages.T
    want = np.argsort(-full, axis=1, kind="stable")[:, : min(k, count)]
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_allclose(scores, np.take_along_axis(full, want, 1))


def test_fusion_by_hand():
    fused = reciprocal_rank_fusion([[5, 7], [7, 9]], k=60)
    assert list(fused) == [7, 5, 9]
    assert fused[7] == pytest.approx(1 / 62 + 1 / 61) and fused[5] == pytest.approx(1 / 61) and fused[9] == pytest.approx(1 / 62)


def test_bm25_finds_words_and_survives_nothing():
    index = BM25(["the cat sat", "a dog ran", "the the the"])
    indices, scores = index.top_k(["cat", "unseen", ""], 3)
    assert indices[0][0] == 0 and scores[0][0] > 0 and scores[1].max() == 0 and scores[2].max() == 0
    assert BM25(["the", "a"]).top_k(["cat"], 5)[0].shape == (1, 2)


def test_metrics_by_hand():
    qrels = {"q": {"a": 1, "b": 1}, "unanswered": {"a": 1}}
    run = {"q": {"x": 3.0, "a": 2.0, "y": 1.0}}
    scores = per_query(qrels, run)
    assert scores["q"]["mrr@10"] == 0.5
    assert scores["q"]["recall@100"] == 0.5
    assert scores["q"]["map"] == pytest.approx(0.25)
    assert scores["q"]["ndcg@10"] == pytest.approx((1 / np.log2(3)) / (1 + 1 / np.log2(3)))
    assert mean_scores(qrels, run)["mrr@10"] == 0.25
