"""Contexts as a user meets them: a retriever with slots is given another corpus by revela fit
--context, and is then a model like any other.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from conftest import SLOTS, live, make_rows
from revela.encoders.load import load_encoder
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.metrics import mean_scores
from revela.text.load import read_corpus
from revela.training.on_files import judge_on
from revela.training.retriever.context import continue_context, draw_documents
from revela.training.settings import Context
from revela.types import Document
from tests.collection_folder import write_collection, write_lines

TEXTS = ["ocean1 ocean2", "engine3", "how is the market02"]


@pytest.fixture
def corpora(tmp_path):
    """Two corpora of more documents than there are slots."""
    return [
        write_lines(tmp_path / f"{name}.jsonl", make_rows(2 * SLOTS, sentences=40, seed=seed))
        for name, seed in (("one", 1), ("other", 2))
    ]


def test_a_context_is_put_into_a_stock_folder(contextual, corpora, tmp_path, succeeds, monkeypatch):
    """Our encoder and stock sentence-transformers read it, and so do index, search and eval."""
    shutil.copytree(contextual, tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("# A card")
    vectors = []
    for corpus in corpora:
        out = tmp_path / corpus.stem
        fit = ("fit", "--model", tmp_path / "model", "--context", corpus, "--out", out)
        assert f"{SLOTS} chunks of {corpus} saved in the slots of {out}: next" in succeeds(*fit)
        about = json.loads((out / "context" / "context.json").read_text())
        assert about["drawn from"] == f"{SLOTS} chunks of {corpus.name}" and about["seed"] == 0
        assert (out / "README.md").read_text() == "# A card"
        drawn = draw_documents(read_corpus([corpus])[0], SLOTS, 0, 120)
        before, encoder = live(contextual), load_encoder(out, "fp32")
        passages = encoder.encode_passages(TEXTS)
        by_hand = before.in_context(drawn).encode_passages(TEXTS)
        np.testing.assert_allclose(passages, by_hand, atol=1e-6)
        stock = SentenceTransformer(str(out), device="cpu")
        np.testing.assert_allclose(stock.encode_document(TEXTS), passages, atol=1e-5)
        queries = encoder.encode_queries(TEXTS)
        np.testing.assert_allclose(stock.encode_query(TEXTS), queries, atol=1e-5)
        vectors.append(passages)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
    succeeds("index", corpora[0], "--model", tmp_path / "one", "--out", tmp_path / "index")
    title = make_rows(1, sentences=40, seed=1)[0]["title"]
    assert "1." in succeeds("search", tmp_path / "index", title, "--mode", "dense", "-k", 1)


@pytest.mark.parametrize("first", [0, 3])
def test_the_first_documents_alone_are_baked(contextual, corpora, tmp_path, succeeds, first):
    out = tmp_path / "out"
    fit = ("fit", "--model", contextual, "--context", corpora[0], "--out", out)
    assert f"{first} chunks of {corpora[0]}" in succeeds(*fit, "--context-first", first)
    drawn = draw_documents(read_corpus(corpora[:1])[0], SLOTS, 0, 120)[:first]
    stock = SentenceTransformer(str(out), device="cpu")
    by_hand = live(contextual).in_context(drawn).encode_passages(TEXTS)
    np.testing.assert_allclose(stock.encode_document(TEXTS), by_hand, atol=1e-5)


def test_not_all_can_have_a_context(contextual, saved_retriever, corpora, tmp_path, refused):
    out = ("--out", tmp_path / "out")
    baked = ("--model", contextual, "--context", corpora[0], *out)
    shutil.copytree(contextual, tmp_path / "cut", ignore=shutil.ignore_patterns("context"))
    for arguments, sentence in (
        (("--model", contextual, *out), "fit reads one corpus: give either CORPUS or --context"),
        ((corpora[0], *baked), "fit reads one corpus: give either CORPUS or --context"),
        (("--model", saved_retriever, *baked[2:]), "has no folder context/: give a re"),
        (("--model", tmp_path / "cut", *baked[2:]), "has no folder context/: give a re"),
        ((corpora[0], "--context-first", 1, *baked[:2], *out), "needs --context and must be 0"),
        ((*baked, "--context-first", -1), "--context and must be 0 or more (got -1)"),
        ((*baked, "--layers", 2), "--layers has no effect with --context"),
        ((*baked, "--static"), "--static has no effect with --context"),
        ((*baked, "--language", "de"), "--language has no effect with --context"),
    ):
        assert sentence in refused("fit", *arguments)
    few = ("--group-size", 2, "--chunk-words", 20, "--max-steps", 1, "--method", "contrastive-crop")
    err = refused("train", corpora[0], "--model", contextual, *out, *few)
    assert f"{contextual} has {SLOTS} slots, which --context 0 with 1 vectors per document" in err
    constant = ("--context", SLOTS, "--context-from", "constant")
    err = refused("train", corpora[0], "--model", contextual, *out, *few, *constant)
    assert f"{contextual} was trained with --context-from batch or corpus: give the same" in err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert "out exists: choose another --out" in refused("fit", *baked)


def test_a_second_phase_reads_as_many_tokens_as_it_is_told(contextual):
    settings = Context(context=SLOTS, context_tokens=7)
    first = continue_context(settings, live(contextual).model, contextual)
    assert first.model.max_seq_length == 7


def test_a_judge_reads_in_the_context_of_each_collection(contextual, tmp_path):
    rows = make_rows(30, sentences=3)
    queries = {f"q{i}": rows[i]["text"].split(". ")[1] for i in range(20)}
    judgements = {(f"q{i}", f"d{(i + 5) % 30}"): 1 for i in range(20)}
    folder = write_collection(tmp_path / "one", rows, queries, judgements)
    encoder = live(contextual)
    judged = judge_on([folder], tmp_path)(encoder, 0)
    collection = load_collection(folder)
    documents = [Document(str(i), text) for i, text in enumerate(collection.documents)]
    reader = encoder.in_context(draw_documents(documents, SLOTS, 0, 120))
    wanted, other = (mean_scores(outcomes(collection, {"m": e})["m"]) for e in (reader, encoder))
    assert judged == {"one": pytest.approx(wanted["ndcg@10"])} and wanted != other
    start = json.loads((tmp_path / "start-scores.json").read_text())["one"]["start"]
    assert start["means"] == pytest.approx(wanted) and len(start["queries"]) == 20


@pytest.mark.parametrize("kind", ["saved_retriever", "contextual"])
def test_probe_says_how_many_documents_are_read(kind, request, tmp_path, succeeds):
    corpus = write_lines(tmp_path / "corpus.jsonl", make_rows(8, sentences=20))
    model, json_file = request.getfixturevalue(kind), tmp_path / "probe.json"
    limits = ("--max-tokens", 64, "--documents", 4, "--precision", "fp32", "--json", json_file)
    succeeds("probe", model, corpus, *limits)
    found = json.loads(json_file.read_text())
    assert found["context"] == (SLOTS if kind == "contextual" else 0)
    assert found["tokens"] == 48  # slots are not part of the 64
