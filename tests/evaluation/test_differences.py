"""Systems beside one another: whose p belongs to whom, and which queries are shown."""

from __future__ import annotations

import json

import numpy as np
import pytest

from revela.evaluation.beir import Collection, Outcome
from revela.evaluation.results import Scores
from revela.evaluation.significance import greatest_gains, margin, p_values, standings

IDS = [f"q{i}" for i in range(6)]
COLLECTION = Collection(
    "c",
    ["d0", "d1"],
    ["text zero", "text one"],
    IDS,
    [f"query {i}" for i in range(6)],
    {q: {"d0": 1} for q in IDS},
)


def outcome(values, first="d0") -> Outcome:
    scores = {
        q: {"ndcg@10": v, "recall@100": 1.0, "mrr@10": v, "map": v}
        for q, v in zip(IDS, values, strict=True)
    }
    return Outcome(scores, dict.fromkeys(IDS, first))


A, B, C = (
    np.array([1, 1, 0.6, 0.5, 0, 1]),
    np.array([0.5, 1, 0.2, 0.6, 0, 0]),
    np.array([0, 0, 0, 0, 0, 0.1]),
)
FOUND = {"B": outcome(B, "d1"), "A": outcome(A), "C": outcome(C)}


def test_each_system_is_tested_against_each_reference():
    rows = standings(FOUND, ["B", "A"])
    assert list(rows) == ["B", "A", "C"]
    assert rows["A"].p == {"B": p_values((A - B)[:, None])[0]} and rows["B"].p == {
        "A": rows["A"].p["B"]
    }
    assert rows["C"].p == {"B": p_values((C - B)[:, None])[0], "A": p_values((C - A)[:, None])[0]}
    assert rows["A"].means["ndcg@10"] == pytest.approx(A.mean()) and rows["A"].margin == margin(A)
    assert standings({"A": outcome(A)}, ["A"])["A"].p == {}


def test_gains_are_the_greatest_first_and_only_gains():
    gains = greatest_gains(COLLECTION, FOUND["A"], FOUND["B"], 5)
    assert [gain.query for gain in gains] == ["query 5", "query 0", "query 2"]
    assert gains[0].scores == (1.0, 0.0)
    assert gains[0].first == (("text zero", True), ("text one", False))
    assert len(greatest_gains(COLLECTION, FOUND["A"], FOUND["B"], 1)) == 1
    assert greatest_gains(COLLECTION, FOUND["C"], FOUND["A"], 3) == []


def test_json_holds_every_query():
    rows = standings(FOUND, ["B"])
    scores = Scores({"c": rows})
    written = json.loads(json.dumps(scores.to_json()))["c"]
    assert written["A"]["queries"]["q2"]["ndcg@10"] == 0.6 and written["A"]["p"].keys() == {"B"}
    low, high = written["A"]["interval"]
    assert (low + high) / 2 == pytest.approx(written["A"]["ndcg@10"])
    again = Scores.from_json({"c": written}).collections["c"]["A"]
    assert again.means == rows["A"].means and again.p == rows["A"].p
    assert again.margin == pytest.approx(rows["A"].margin) and again.queries == rows["A"].queries
