"""``--model auto`` of ``revela index``, ``fit`` and ``train``: what it makes and refuses."""

from __future__ import annotations

import json
import re

import pytest

from conftest import make_rows
from revela import Index, RevelaError
from revela.cli.eval import _advice, _verdict
from revela.encoder.static_encoder import is_static
from revela.evaluation import choose_model as choosing
from revela.evaluation.choose_model import Candidate, Choice
from revela.evaluation.results import SystemScores
from revela.model_files import resolve
from tests.collection_folder import write_lines


@pytest.fixture
def doing(monkeypatch, doing):
    monkeypatch.setattr(choosing, "is_installed", lambda name: False)
    return doing


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = ({**row, "title": ""} for row in make_rows(130))
    write_lines(path, rows)
    return path


def test_an_index_by_what_was_made_of_the_best_language_model(
    succeeds, refused, corpus, tiny_lm_folder, tmp_path, monkeypatch
):
    out, beside = tmp_path / "index", tmp_path / "index-model"
    given = ("index", corpus, "--model", f"auto:{tiny_lm_folder}", "--out", out)
    said = succeeds(*given)
    lines = said.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("comparing 2 retrieve"))
    assert "sentence: 39 queries over 130 passages" in lines[start]
    assert lines[start + 1].endswith(" BM25 alone")
    assert f" table of words of {tiny_lm_folder} (without BM25 " in lines[start + 2]
    assert f" {tiny_lm_folder}, fitted (without BM25 " in lines[start + 4]
    assert lines[start + 5].startswith("no model adds to BM25 on this text")
    assert f" is saved in {beside}, where the index finds it" in said
    assert Index.open(out).model_folder == beside
    assert len(Index.open(out).search(make_rows(130)[7]["text"][:40])) > 0
    assert "is not an index" in refused(*given[:-1], tmp_path / "other", "--append")
    err = refused(*given, "--append")
    assert f"auto:{tiny_lm_folder} is for a new run of revela index, fit or train only" in err


def test_a_killed_index_goes_on_with_what_was_chosen(
    succeeds, refused, corpus, tiny_lm_folder, tmp_path, monkeypatch
):
    out = tmp_path / "index"
    given = ("index", corpus, "--model", f"auto:{tiny_lm_folder}", "--out", out)

    def killed(*_given, **_settings):
        raise RevelaError("killed")

    monkeypatch.setattr("revela.index.changes.Changes.put_by_commits", killed)
    err = refused(*given)
    assert err.endswith("revela: killed\n") and (out / "state.sqlite").is_file()
    monkeypatch.undo()
    monkeypatch.setattr(choosing, "choose_model", killed)
    said = succeeds(*given)
    assert "130 documents are new" in said


def test_an_embedder_is_taken_as_it_is(succeeds, corpus, saved_retriever, tmp_path):
    out = tmp_path / "index"
    said = succeeds("index", corpus, "--model", f"auto:{saved_retriever}", "--out", out)
    assert f"{saved_retriever} is the only candidate" in said
    assert Index.open(out).model_folder == saved_retriever
    assert not (tmp_path / "index-model").exists()


@pytest.mark.parametrize(
    ("flags", "kinds", "kind"),
    [
        ((), ("table", "fit"), "table"),
        (("--precision", "fp32"), ("table", "fit"), "fit"),
        (("--static",), ("table",), "table"),
        (("--layers", "2"), ("fit",), "fit"),
        (("--prune",), ("fit",), "fit"),
    ],
)
def test_fit_makes_the_form_that_was_chosen(
    succeeds, corpus, tiny_lm_folder, tmp_path, monkeypatch, flags, kinds, kind
):
    asked = []

    def choose(documents, names, **how):
        asked.append((len(documents), names, how["kinds"]))
        return Choice(Candidate(names[0], kind), "", {}, {})

    monkeypatch.setattr(choosing, "choose_model", choose)
    out = tmp_path / "out"
    model = ("--model", f"auto:{tiny_lm_folder}")
    succeeds("fit", corpus, *model, "--out", out, *flags)
    assert asked == [(124, [str(tiny_lm_folder)], kinds)]  # not the documents of the check
    assert is_static(out) == (kind == "table")
    assert f"{tiny_lm_folder.name} was fitted to text" in (out / "README.md").read_text()


def test_training_begins_with_what_was_chosen(
    succeeds, refused, corpus, tiny_lm_folder, tiny_bert_folder, tmp_path, monkeypatch
):
    def choose(documents, names, **how):
        assert how["kinds"] == ("embedder", "fit") and len(documents) == 124
        return Choice(Candidate(names[1], "embedder"), "", {}, {})

    monkeypatch.setattr(choosing, "choose_model", choose)
    out = tmp_path / "out"
    names = f"auto:{tiny_lm_folder},{tiny_bert_folder}"
    small = ("--objective", "crop", "--group-size", "4", "--check-every", "0", "--threads", "1")
    given = ("train", corpus, "--model", names, "--out", out, *small)
    succeeds(*given, "--max-steps", "1")
    assert json.loads((out / "run.json").read_text())["model"] == str(tiny_bert_folder)
    assert "its run is finished" in refused(
        *given, "--max-steps", "1", "--resume"
    )  # not begun with other settings


def test_what_cannot_be_chosen_is_refused_in_a_sentence(
    refused, corpus, tiny_lm_folder, saved_retriever, tmp_path
):
    out, lm = ("--out", tmp_path / "out"), f"auto:{tiny_lm_folder}"
    none = tmp_path / "none"
    for given, sentence in (
        (("index", none, "--model", "auto", *out), "there is no model to choose from: name some"),
        (("fit", none, "--model", "auto", *out), "there is no model to choose from: name some"),
        (("train", corpus, "--model", "auto", *out), "there is no model to choose from: name some"),
        (("fit", none, "--model", f"auto:{saved_retriever}", *out), "which needs no fit: leave it"),
        (("index", none, "--model", f"auto:{none}", *out), f"{none} is neither a folder nor a hub"),
        (("index", none, "--model", lm, *out, "--engine", "ray"), "--model auto reads the text in"),
        (("fit", none, "--model", "auto", *out, "--steps", "-1"), "--steps -1: give 0"),
        (("eval", "auto", "--on", none), "auto is for a new run of revela index, fit or train"),
    ):
        assert sentence in refused(*given)
    (tmp_path / "out-model").mkdir()
    err = refused("index", corpus, "--model", lm, *out)
    assert "out-model exists, where a fitted model would go: give it as" in err
    with pytest.raises(
        RevelaError, match="for a new run of revela index, fit or train only: name a model"
    ):
        resolve("auto:one,two")


def test_eval_ranks_models_on_a_text_without_labels(
    succeeds, refused, corpus, tiny_lm_folder, tmp_path
):
    table, fitted = f"table of words of {tiny_lm_folder}", f"{tiny_lm_folder}, fitted"
    scores_file = tmp_path / "scores.json"
    given = ("eval", tiny_lm_folder, "--text", corpus)
    said = succeeds(*given, "--json", scores_file)
    assert "comparing 2 retrievers by 39 held-out documents (sentence: 39 queries" in said
    assert "make a fitted one by revela fit TEXT" in said
    assert re.search(r"^in short: .*\n(saved to .*\n)?\Z", said, re.MULTILINE)
    scores = json.loads(scores_file.read_text())["without labels"]
    assert set(scores) == {"BM25", *(n + b for n in (table, fitted) for b in ("", " + BM25"))}
    means = [found["means"]["ndcg@10"] for found in scores.values()]
    assert means == sorted(means, reverse=True)
    for found in scores.values():
        assert len(found["queries"]) == 39
        each = [score["ndcg@10"] for score in found["queries"].values()]
        assert found["means"]["sentence"] == pytest.approx(sum(each) / 39)
    best = next(iter(scores))
    assert set(scores[fitted]["p"]) == {best, "BM25"}
    titled = [{**row, "title": f"all about {row['_id']}"} for row in make_rows(130)]
    write_lines(corpus, titled)
    said = succeeds(*given)
    assert "(title: 39 queries over 39 passages)" in said
    write_lines(corpus, titled[:20])
    assert "too few to compare models by: give more of it, or judged" in refused(*given)


@pytest.mark.parametrize(
    ("names", "near", "words"),
    [
        (["a", "BM25"], [], "a finds most on this text"),
        (["a", "b", "BM25"], ["b"], "a is first, and b may be as good: take the cheapest"),
        (["a", "BM25"], ["BM25"], "no model is known to find more than words alone"),
        (["BM25", "a"], ["a"], "no model is known to find more than words alone"),
    ],
)
def test_a_ranking_is_summed_up(names, near, words):
    assert words in _advice({name: SystemScores({}) for name in names}, near)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ({"BM25": (0.6, {}), "a": (0.7, {"BM25": 0.01})}, "a has the highest .* more than chance"),
        (
            {"BM25": (0.6, {}), "a": (0.7, {"BM25": 0.4})},
            "BM25 has 0.600: which may be chance",
        ),
        ({"BM25": (0.6, {}), "a": (0.5, {"BM25": 0.4})}, "no system finds more than words alone"),
        ({"a": (0.5, {})}, "on c a has the highest nDCG@10, 0.500$"),
    ],
)
def test_an_evaluation_begins_with_what_it_found(scores, words):
    found = {name: SystemScores({"ndcg@10": mean}, p=p) for name, (mean, p) in scores.items()}
    assert re.search(words, _verdict("c", found))
