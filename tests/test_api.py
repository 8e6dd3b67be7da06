"""The library's public names: lazy, few, and the whole way from texts to hits in five lines."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import revela
from conftest import make_rows
from revela import Document, Hit, Index, LabelFreeEvaluator, Retriever, RevelaError

TEXTS = [row["text"] for row in make_rows(12)]


@pytest.fixture(scope="module")
def retriever(saved_retriever):
    return Retriever(saved_retriever, precision="fp32")


def test_public_names_are_few_and_there():
    assert len(revela.__all__) <= 14 and dir(revela) == sorted(revela.__all__)
    assert all(getattr(revela, name) is not None for name in revela.__all__)
    assert revela.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        revela.nothing  # noqa: B018


def test_import_brings_nothing_heavy():
    heavy = ("torch", "numpy", "transformers", "lancedb")
    found = f"[m for m in {heavy} if m in sys.modules]"
    code = f"import sys, revela; print(revela.__version__, {found})"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith(" []")


def test_vectors_have_length_one_and_prompts(retriever):
    queries, passages = retriever.encode_queries(TEXTS[:3]), retriever.encode_passages(TEXTS[:3])
    assert queries.shape == passages.shape == (3, 64) and queries.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(passages, axis=1), 1, atol=1e-5)
    assert np.abs(queries - passages).max() > 1e-3
    (prompted,) = retriever.encoder.model.encode(["passage: " + TEXTS[0]])
    np.testing.assert_allclose(passages[0], prompted, atol=1e-5)


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_texts_to_hits(retriever, tmp_path, mode):
    index = retriever.index(TEXTS, tmp_path / "index")
    hits = index.search(TEXTS[5], k=3, mode=mode)
    assert len(hits) == (1 if mode == "lexical" else 3)
    assert all(isinstance(hit, Hit) for hit in hits) and hits[0].id == "5"
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    opened = Retriever(retriever.folder, precision="fp32").open(tmp_path / "index")
    assert [h.id for h in opened.search(TEXTS[5], k=3, mode=mode)] == [h.id for h in hits]


def test_documents_keep_their_ids_titles_and_metadata(retriever, tmp_path):
    documents = [
        Document(f"note-{i}", text, title=f"Note {i}", metadata={"year": 2000 + i})
        for i, text in enumerate(TEXTS)
    ]
    index = retriever.index(documents, tmp_path / "index", metadata=["year"])
    (hit,) = index.search(TEXTS[2], k=1)
    assert (hit.id, hit.title, hit.metadata) == ("note-2", "Note 2", {"year": 2002})
    assert hit.text in TEXTS[2]
    late = index.search(TEXTS[2], k=20, where="year > 2009")
    assert {found.id for found in late} == {"note-10", "note-11"}


def test_mistakes_are_one_sentence(retriever, tmp_path):
    with pytest.raises(RevelaError, match="nothing to index"):
        retriever.index(["", "  "], tmp_path / "index")
    retriever.index(TEXTS[:2], tmp_path / "index")
    with pytest.raises(RevelaError, match="exists: choose another"):
        retriever.index(TEXTS, tmp_path / "index")
    with pytest.raises(RevelaError, match="is not an index"):
        retriever.open(tmp_path)


def lists_are_asked_for(retriever, index, tmp_path):
    """What takes a list of texts, documents or ids, and what it calls it."""
    return [
        (retriever.encode_queries, "texts"),
        (retriever.encode_passages, "texts"),
        (lambda given: retriever.index(given, tmp_path / "other"), "documents"),
        (index.add, "documents"),
        (index.delete, "ids"),
        (lambda given: list(index.search_many(given)), "queries"),
        (lambda given: revela.rerank("ocean", given, retriever.folder), "documents"),
        (lambda given: revela.fit(retriever.folder, given), "texts"),
        (lambda given: revela.evaluate(given, [tmp_path]), "models"),
        (LabelFreeEvaluator, "texts"),
    ]


def test_one_text_where_a_list_is_asked_for_is_one_sentence(retriever, tmp_path):
    index = retriever.index(TEXTS[:3], tmp_path / "index")
    one = Document("1", TEXTS[0])
    for ask, named in [
        *lists_are_asked_for(retriever, index, tmp_path),
        (lambda given: retriever.index(TEXTS, tmp_path / "other", metadata=given), "metadata"),
        (lambda given: revela.evaluate([retriever.folder], given), "on"),
    ]:
        for given in ("12", b"12", one):
            said = rf"^{named} must be a list \(got a {type(given).__name__}\): give a list"
            with pytest.raises(RevelaError, match=said):
                ask(given)
    assert len(Index.open(tmp_path / "index", retriever.folder).chunks("1")) > 0
    assert not (tmp_path / "other").exists()


def series(items):
    """A column of a data frame whose rows were shuffled."""
    return pd.Series(list(items), index=range(len(items))[::-1], dtype=object)


@pytest.mark.parametrize("kind", ["transformer", "graph", "table"])
@pytest.mark.parametrize("given", [series, iter, tuple, np.array])
def test_texts_are_read_in_the_order_in_which_they_are_given(request, kind, given):
    fixtures = {"transformer": "saved_retriever", "graph": "tiny_bert_folder"}
    folder = request.getfixturevalue(fixtures.get(kind, "static_folder"))
    retriever = Retriever(folder, precision="fp32")
    for encode in (
        retriever.encode_queries, retriever.encode_passages,
        retriever.encoder.encode_queries, retriever.encoder.encode_passages,
    ):  # fmt: skip
        np.testing.assert_array_equal(encode(given(TEXTS)), encode(TEXTS))


def test_columns_and_generators_are_taken_everywhere(retriever, tmp_path):
    for name, given in (("column", series), ("generator", iter)):
        index = retriever.index(given(TEXTS[:5]), tmp_path / name)
        assert [index.search(text, k=1)[0].id for text in TEXTS[:5]] == [*"01234"]
        found = index.search_many(given(TEXTS[:3]), k=1)
        assert [hits[0].id for hits in found] == [*"012"]
        index.add(given([Document("new", TEXTS[7]), Document("newer", TEXTS[8])]))
        assert index.delete(given(["new", "newer"])) > 0 and index.documents == 5
        ranked = revela.rerank(TEXTS[1], given(TEXTS[:3]), retriever.folder)
        assert ranked == revela.rerank(TEXTS[1], TEXTS[:3], retriever.folder)
        check = LabelFreeEvaluator(given([row["text"] for row in make_rows(40)]))
        assert check.about["documents"] == 40


@pytest.mark.parametrize("item", [None, float("nan"), 7, b"bytes", ["nested"], pd.NA])
def test_what_is_no_text_is_one_sentence(retriever, tmp_path, item):
    index = retriever.index(TEXTS[:3], tmp_path / "index")
    for ask, named in lists_are_asked_for(retriever, index, tmp_path):
        first = Document("a", "text") if ask == index.add else TEXTS[0]
        for given in ([first, item], series([first, item]), (each for each in (first, item))):
            with pytest.raises(RevelaError, match=rf"^{named}\[1\] is .*, not a string: give a"):
                ask(given)
    with pytest.raises(RevelaError, match=r"the query is .*, not a string"):
        index.search(item)
    with pytest.raises(RevelaError, match=r"text of document a is .*, not a string"):
        Document("a", item)
    with pytest.raises(RevelaError, match=r"id of document .* is .*, not a string"):
        Document(item, "a text")
    assert len(index) > 0 and not (tmp_path / "other").exists()


def test_what_has_no_order_or_is_a_table_is_one_sentence(retriever):
    for given in ({"a": "text"}, {"a", "b"}, pd.DataFrame({"a": ["text"]}), 7, None):
        with pytest.raises(RevelaError, match=rf"be a list \(got a {type(given).__name__}\)"):
            retriever.encode_passages(given)
