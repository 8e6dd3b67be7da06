"""Late interaction against a naive loop over whole signs; in the index, with tokens that are kept
and with tokens that are made.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from revela.evaluation.collection import Collection
from revela.evaluation.evaluate import store_of
from revela.ranking.bm25 import BM25, term_weights
from revela.ranking.fusion import Owner, length_factor
from revela.ranking.late_interaction import (
    TOKENS_WEIGHT,
    late_interaction,
    match_by_tokens,
    packed_signs,
    rerank_by_tokens,
    token_weights,
)
from revela.text.analyzer import Analyzer
from revela.types import Document
from tests.searching.letters import Letters, build, documents, extend, reopen

DOCS = documents(40)


def naive(query_TW, weight_T, passages):
    """m of each passage, one product at a time."""
    scores = []
    for tokens_JW in passages:
        total = 0.0
        for query_W, weight in zip(query_TW, weight_T, strict=True):
            products = [
                sum(a * (1 if b > 0 else -1) for a, b in zip(query_W, token_W, strict=True))
                for token_W in tokens_JW
            ]
            total += weight * max(products) / math.sqrt(len(query_W))
        scores.append(total / sum(weight_T))
    return scores


@pytest.mark.parametrize("width", [8, 13, 384])
def test_late_interaction_is_the_loop(width):
    rng = np.random.default_rng(width)
    query_TW, weight_T = rng.normal(size=(4, width)).astype(np.float32), rng.random(4)
    passages = [rng.normal(size=(n, width)).astype(np.float32) for n in (1, 3, 20)]
    packed = [packed_signs(tokens) for tokens in passages]
    assert [len(p) for p in packed] == [n * -(-width // 8) for n in (1, 3, 20)]
    np.testing.assert_allclose(
        late_interaction(query_TW, weight_T, packed), naive(query_TW, weight_T, passages), rtol=1e-5
    )
    assert late_interaction(query_TW, weight_T, [b""]) == [0] and late_interaction(
        query_TW, np.zeros(4), packed
    ).tolist() == [0, 0, 0]


def test_an_evaluation_by_tokens_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr("revela.terminal.SHOWN_AFTER", 0)
    texts = [document.text for document in DOCS]
    collection = Collection("c", [d.id for d in DOCS], texts, ["q"], ["abab"], {"q": {"d0": 1}})
    for progress in (False, True):
        store_of(collection, Letters(), by_tokens=True, progress=progress)
        assert ("encoding passages:" in capsys.readouterr().err) == progress


def test_a_token_weighs_as_its_word():
    known = {"heat": 2.0, "flow": 3.0}
    weights = term_weights(
        "Heat, flows?", Analyzer("en"), lambda terms: np.array([known[term] for term in terms])
    )
    spans = [(0, 4), (4, 5), (6, 8), (8, 11), (11, 12)]  # Heat , flo ws ?
    assert token_weights(spans, weights).tolist() == [2, 0, 3, 3, 0]


def test_scores_are_added_and_those_that_were_not_read_again_count_as_unmet():
    (query,) = Letters().query_tokens(["abab cdcd"])
    packed = [packed_signs(Letters._tokens(text)) for text in ("abab", "cdcd abab")]
    matched = late_interaction(query.tokens, np.ones(2), packed)
    found = dict(zip("ab", match_by_tokens(query, packed, [(0, 9, 1.0)]), strict=True))
    again = rerank_by_tokens({"a": 0.5, "b": 0.4, "c": 0.3}, found)
    assert matched[1] > matched[0] and list(again.values()) == sorted(again.values())[::-1]
    wanted = [0.5 + TOKENS_WEIGHT * matched[0], 0.4 + TOKENS_WEIGHT * matched[1], 0.3]
    assert [again[name] for name in "abc"] == pytest.approx([score / 1.75 for score in wanted])


@pytest.mark.parametrize("mode", ["dense", "hybrid"])
def test_an_index_gives_the_same_whether_it_keeps_tokens_or_makes_them(tmp_path, mode):
    kept, plain = build(tmp_path / "kept", DOCS, keep_tokens=True), build(tmp_path / "plain", DOCS)
    bm25 = BM25([row["passage"] for row in plain.table.lance.search().limit(10**6).to_list()])
    for query in ("abba abab", DOCS[3].text.split(".")[0] + " gggg"):
        without = {hit.id: hit for hit in plain.search(query, 40, mode, explain=True)}
        hits, made = (
            index.search(query, 10, mode, rerank="late-interaction")
            for index in (kept, reopen(tmp_path / "plain"))
        )
        scores = [hit.score for hit in hits]
        assert hits == made and scores == sorted(scores, reverse=True)
        texts = [f"{hit.title} {hit.text}" if hit.title else hit.text for hit in hits]
        weights = term_weights(query, bm25.terms, bm25.idf)
        ((_, query_TW, spans),) = Letters().query_tokens([query])
        signs = [Letters._tokens(text) for text in texts]
        matched = naive(query_TW, token_weights(spans, weights), signs)
        rule = plain.calibration.rule
        assert rule == kept.calibration.rule and (rule.weight < 1) and rule.chance > 0
        c, chance = TOKENS_WEIGHT * rule.weight, 0.0
        sizes = Counter(row["id"] for row in plain.table.lance.to_arrow().to_pylist())
        factors = {name: length_factor(Owner(name, size)) for name, size in sizes.items()}
        if mode == "dense":
            c, chance, factors = TOKENS_WEIGHT, rule.chance, dict.fromkeys(factors, 1.0)
        found = [max(0.0, m - rule.tokens) / (1 - rule.tokens) for m in matched]
        before = [without[hit.id].score for hit in hits]
        if mode == "hybrid":  # before it is lowered by length
            parts = [without[hit.id].explanation for hit in hits]
            before = [p.weight * p.vectors + (1 - p.weight) * (p.words or 0) for p in parts]
        wanted = [
            (max(0.0, own - chance) / (1 - chance) + c * n) / (1 + c) * factors[hit.id]
            for hit, own, n in zip(hits, before, found, strict=True)
        ]
        np.testing.assert_allclose(scores, wanted, rtol=1e-5)


class WithTokens(Letters):
    """Whose queries are to be encoded with their tokens, and not once more."""

    def query_tokens(self, queries):
        self.seen += queries
        return Letters().query_tokens(queries)

    def encode_queries(self, texts, progress=False):
        raise AssertionError


def test_a_query_is_encoded_once(tmp_path):
    index = build(tmp_path / "index", DOCS, keep_tokens=True)
    wanted = [hit.id for hit in index.search("abba abab", 10, rerank="late-interaction")]
    index._encoder = WithTokens()
    (known,) = Letters().query_tokens(["abba abab"])
    for given, seen in ((None, ["abba abab"]), (known, [])):
        index._encoder.seen.clear()
        hits = index.search("abba abab", 10, rerank="late-interaction", encoded=given)
        assert [hit.id for hit in hits] == wanted and index._encoder.seen == seen


def test_tokens_come_and_go_with_their_documents(tmp_path):
    made = build(tmp_path / "index", DOCS[:10], keep_tokens=True)
    extend(made, [Document("d3", "hhhh gggg."), Document("new", "hgha.")])
    rows = made.table.lance.search().limit(100).to_list()
    assert ("d3", 1) not in {(row["id"], row["chunk"]) for row in rows}
    assert all(row["tokens"] == packed_signs(Letters._tokens(row["passage"])) for row in rows)
