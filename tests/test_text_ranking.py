"""``revela eval``: models ranked on a text without labels, and what an evaluation says in a
sentence.
"""

from __future__ import annotations

import json
import re

import pytest

from conftest import make_rows
from revela.cli.eval import _advice, _verdict
from revela.evaluation.results import SystemScores
from revela.training import rank_models as choosing
from tests.collection_folder import write_lines


@pytest.fixture
def corpus(tmp_path):
    rows = ({**row, "title": f"all about {row['_id']}"} for row in make_rows(130))
    return write_lines(tmp_path / "corpus.jsonl", rows)


def test_eval_ranks_models_without_labels(succeeds, refused, corpus, tiny_lm_folder, tmp_path):
    table, fitted = f"table of words of {tiny_lm_folder}", f"{tiny_lm_folder}, fitted"
    scores_file = tmp_path / "scores.json"
    given = ("eval", tiny_lm_folder, "--text", corpus)
    said = succeeds(*given, "--json", scores_file)
    assert "comparing 2 retrievers by 39 held-out documents (title: 39 queries over 39" in said
    assert "to fit a language model: revela fit TEXT" in said
    assert re.search(r"^in short: .*\n(saved to .*\n)?\Z", said, re.MULTILINE)
    scores = json.loads(scores_file.read_text())["without labels"]
    assert set(scores) == {"BM25", *(n + b for n in (table, fitted) for b in ("", " + BM25"))}
    means = [found["means"]["ndcg@10"] for found in scores.values()]
    assert means == sorted(means, reverse=True)
    for found in scores.values():
        assert len(found["queries"]) == 39
        each = [score["ndcg@10"] for score in found["queries"].values()]
        assert found["means"]["title"] == pytest.approx(sum(each) / 39)
    best = next(iter(scores))
    assert set(scores[table]["p"]) == {best, "BM25"} - {table}
    write_lines(corpus, ({**row, "title": ""} for row in make_rows(130)))
    assert "the text gives 0 queries: give more, or judged" in refused(*given)


def test_models_are_judged_on_unseen_documents(succeeds, corpus, tiny_lm_folder, monkeypatch):
    checked, made_of = [], []
    tasks, encoder_of = choosing.tasks, choosing.encoder_of

    def tasks_of(documents, *how):
        checked.extend(document.id for document in documents)
        return tasks(documents, *how)

    def made(candidate, recipe, documents, held_out):
        made_of.append({document.id for document in documents})
        return encoder_of(candidate, recipe, documents, held_out)

    monkeypatch.setattr(choosing, "tasks", tasks_of)
    monkeypatch.setattr(choosing, "encoder_of", made)
    succeeds("eval", tiny_lm_folder, "--text", corpus)
    assert len(made_of) == 2 and len(checked) == 39
    for ids in made_of:
        assert len(ids) == 91 and ids.isdisjoint(checked)


RANKINGS = [
    (["a", "BM25"], [], "a is best on this text"),
    (["a", "b", "BM25"], ["b"], "a is best, and b may be as good: choose the cheapest"),
    (["a", "BM25"], ["BM25"], "no model finds measurably more on this text than words alone"),
    (["BM25", "a"], ["a"], "no model finds measurably more on this text than words alone"),
]


@pytest.mark.parametrize(("names", "near", "words"), RANKINGS)
def test_a_ranking_is_summed_up(names, near, words):
    assert words in _advice({name: SystemScores({}) for name in names}, near)


FOUND = [
    (
        {"BM25": (0.6, {}), "a": (0.7, {"BM25": 0.01})},
        r"^best on c: a, nDCG@10 0\.700 \(BM25 0\.600; p 0\.010\)$",
    ),
    (
        {"BM25": (0.6, {}), "a": (0.7, {"BM25": 0.4})},
        r"\(BM25 0\.600; p 0\.400, which may be chance\)$",
    ),
    ({"BM25": (0.6, {}), "a": (0.5, {"BM25": 0.4})}, "no system is better than BM25 alone"),
]


@pytest.mark.parametrize(("scores", "words"), FOUND)
def test_an_evaluation_begins_with_what_it_found(scores, words):
    found = {name: SystemScores({"ndcg@10": mean}, p=p) for name, (mean, p) in scores.items()}
    assert re.search(words, _verdict("c", found))
