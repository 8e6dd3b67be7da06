"""Alignment, uniformity, anisotropy and effective rank, each against a plain loop; and where the
pairs come from.
"""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest

from conftest import MadeUpEncoder
from revela.errors import RevelaError
from revela.evaluation.collection import Collection
from revela.training.probes import geometry as g
from revela.types import Document


def unit(shape, seed=0):
    vectors = np.random.default_rng(seed).normal(size=shape) + 0.5
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


X, Y = unit((25, 6)), unit((25, 6), 1)
PAIRS = [(i, j) for i in range(25) for j in range(i)]


def test_uniformity_is_a_loop_over_pairs():
    loop = math.log(sum(math.exp(-2 * sum((X[i] - X[j]) ** 2)) for i, j in PAIRS) / len(PAIRS))
    assert g.uniformity(X) == pytest.approx(loop, abs=1e-5)
    assert g.uniformity(np.tile(X[:1], (9, 1))) == pytest.approx(0, abs=1e-5)


def test_alignment_and_anisotropy_are_loops_over_pairs():
    loop = sum(sum((a - b) ** 2) for a, b in zip(X, Y, strict=True)) / 25
    assert g.alignment(X, Y) == pytest.approx(loop)
    loop = sum(float(X[i] @ X[j]) for i, j in PAIRS) / len(PAIRS)
    assert g.anisotropy(X) == pytest.approx(loop, abs=1e-6)


def test_effective_rank_counts_directions():
    shares = np.linalg.svd(X)[1] / np.linalg.svd(X)[1].sum()
    assert g.effective_rank(X) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert g.effective_rank(np.eye(6)) == pytest.approx(6)
    assert g.effective_rank(np.tile(X[:1], (9, 1))) == pytest.approx(1, abs=1e-4)


class Table(MadeUpEncoder):
    def encode_queries(self, texts, progress=False):
        return X[: len(texts)]

    def encode_passages(self, texts, progress=False):
        return Y[: len(texts)]


def test_geometry_measures_queries_against_passages_and_passages_alone():
    found = g.geometry([("q", "p")] * 20, Table())
    even, *alone = (measure(Y[:20]) for measure in (g.uniformity, g.anisotropy, g.effective_rank))
    both = g.uniformity(np.concatenate([X[:20], Y[:20]]))
    expected = g.Geometry(g.alignment(X[:20], Y[:20]), even, both, *alone, 20, 6)
    assert astuple(found) == pytest.approx(astuple(expected), rel=1e-5)
    assert both != pytest.approx(even, abs=1e-3)


def test_pairs_of_a_collection_are_best_judged_and_name_a_passage_once():
    qrels = {"q0": {"d0": 1, "d1": 2}, "q1": {"d1": 1}, "q2": {"d2": 1}}
    collection = Collection(
        "c", ["d0", "d1", "d2"], ["zero", "one", "two"], ["q0", "q1", "q2"], ["a", "b", "c"], qrels
    )
    assert sorted(g.pairs_of_collection(collection, 9, 0)) == [("b", "one"), ("c", "two")]
    alone = Collection("c", ["d0"], ["zero"], ["q0"], ["a"], {"q0": {"d0": 1}})
    with pytest.raises(RevelaError, match="c has 1 judged passages: geometry needs at least two"):
        g.pairs_of_collection(alone, 9, 0)


def test_pairs_of_text_are_halves_of_chunks():
    documents = [Document(str(i), " ".join(f"w{i}-{n}" for n in range(100))) for i in range(6)]
    documents.append(Document("short", "a b c"))
    pairs, again, other = (g.pairs_of_text(documents, 4, seed) for seed in (0, 0, 1))
    assert len(pairs) == 4 and pairs == again != other
    assert {f"{query} {rest}" for query, rest in pairs} <= {d.text for d in documents}
    assert all(len(query.split()) == 50 for query, _ in pairs)
    chinese = ["".join(chr(0x4E00 + i * 300 + n) for n in range(200)) for i in range(3)]
    pairs = g.pairs_of_text([Document(text[0], text) for text in chinese], 3, 0)
    assert {query + rest for query, rest in pairs} == set(chinese)
    with pytest.raises(RevelaError, match="1 of 2 documents have 40 words: geometry needs"):
        g.pairs_of_text(documents[-2:], 4, 0)
