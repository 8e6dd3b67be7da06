"""Dense, lexical and fused search against definitions; the index folder is whole or not there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.errors import RevelaError
from revela.search.dense import top_k
from revela.search.fusion import reciprocal_rank_fusion
from revela.search.lexical import BM25
from revela.search.metrics import mean_scores, per_query
from revela.search.store import Index
from revela.types import Hit


class Letters:
    """An encoder by letter counts."""

    def encode_passages(self, texts, progress=False):
        counts = np.array([[t.count(c) for c in "abcdefgh"] for t in texts], dtype=np.float32) + 1e-3
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    encode_queries = encode_passages


PASSAGES = [Hit(str(i), 0.0, f"title {i}", text) for i, text in enumerate(["aaa bbb", "ccc ddd", "eee fff", "aaa ccc", "ggg hhh"])]


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


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_index_survives_the_disk(tmp_path, mode):
    index = Index.build(PASSAGES, Letters(), "model", "0123")
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert again.fingerprint == "0123" and again.model == "model"
    hits = again.search("ccc", Letters(), k=2, mode=mode)
    assert hits == index.search("ccc", Letters(), k=2, mode=mode)
    assert {h.text for h in hits} == {"ccc ddd", "aaa ccc"}
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_hybrid_is_the_fusion_of_both(tmp_path):
    index = Index.build(PASSAGES, Letters(), "model", "0123")
    dense = [int(h.id) for h in index.search("aaa", Letters(), k=5, mode="dense")]
    lexical = [int(h.id) for h in index.search("aaa", None, k=5, mode="lexical")]
    fused = reciprocal_rank_fusion([dense, lexical])
    assert [int(h.id) for h in index.search("aaa", Letters(), k=5)] == list(fused)
    assert [h.score for h in index.search("aaa", Letters(), k=5)] == list(fused.values())


def test_bad_folders_and_queries_are_one_sentence(tmp_path):
    with pytest.raises(RevelaError, match="is not an index"):
        Index.load(tmp_path)
    index = Index.build(PASSAGES, Letters(), "model", "0123")
    with pytest.raises(RevelaError, match="exists: choose another"):
        index.save(tmp_path)
    index.save(tmp_path / "index")
    with pytest.raises(RevelaError, match="query is empty"):
        index.search("  ", Letters())
    (tmp_path / "index" / "vectors.npy").write_bytes(b"broken")
    with pytest.raises(RevelaError, match="damaged"):
        Index.load(tmp_path / "index")
