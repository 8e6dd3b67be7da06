"""An index owns its context: it is drawn once, and what comes later reads it too."""

from __future__ import annotations

import shutil
from contextlib import suppress

import numpy as np
import pytest

from conftest import SLOTS, make_rows
from revela import Document, Retriever, RevelaError
from revela.encoder.load import load_encoder
from revela.index.contexts import Context
from revela.index.index import Index
from revela.index.manifest import CONTEXT
from revela.index.state import read_info
from revela.settings import Indexing

DOCS = [Document(r["_id"], r["text"], r["title"]) for r in make_rows(48, sentences=3)]
FEW = Indexing(chunk_words=12)


@pytest.fixture(scope="module")
def retriever(contextual):
    return Retriever(contextual, precision="fp32")


def vectors_of(index):
    rows = index.table.lance.search().select(["passage", "vector"]).limit(10**6).to_list()
    rows = {row["passage"]: row["vector"] for row in rows}
    return np.array([rows[passage] for passage in sorted(rows)])


def test_what_comes_later_reads_the_same_context(retriever, contextual, tmp_path):
    index = retriever.index(DOCS[:24], tmp_path / "index", chunk_words=12)
    about = index.info.context
    assert about["kind"] == "corpus" and about["documents"] == SLOTS
    assert read_info(index.folder).context == about
    again = Index.open(tmp_path / "index", precision="fp32")  # loads its own encoder
    again.add(DOCS[24:])
    rows, encoder = Context("corpus", tuple(drawn(retriever))), load_encoder(contextual, "fp32")
    fresh = Index.create(
        tmp_path / "fresh", contextual, settings=FEW, context=rows, encoder=encoder
    )
    fresh.add(DOCS)
    assert fresh.info.context["digest"] == about["digest"]
    np.testing.assert_allclose(vectors_of(again), vectors_of(fresh), atol=1e-6)
    saved = Index.create(tmp_path / "saved", contextual, settings=FEW, encoder=encoder)
    saved.add(DOCS)
    assert saved.info.context["kind"] == "saved"
    assert np.abs(vectors_of(saved) - vectors_of(fresh)).max() > 1e-3
    query = DOCS[30].text[:40]
    hits = [i.search(query, 3, "dense") for i in (again, fresh, saved)]
    assert [h.score for h in hits[0]] == pytest.approx([h.score for h in hits[1]], abs=1e-6)
    assert hits[0][0].score != pytest.approx(hits[2][0].score, abs=1e-5)
    tokens = [i.search(query, 3, "dense", rerank="tokens") for i in (again, fresh)]
    assert [h.id for h in tokens[0]] == [h.id for h in tokens[1]]


def drawn(retriever):
    from revela.index.contexts import draw_documents

    return draw_documents(DOCS[:24], retriever.encoder.slots, 0, 12)


def test_a_killed_build_goes_on_with_the_same_rows(contextual, tmp_path, monkeypatch):
    monkeypatch.setattr("revela.index.ingest.BATCH", 600)
    monkeypatch.setattr("revela.index.ingest.BATCH_DOCUMENTS", 4)

    encoder = load_encoder(contextual, "fp32")

    def create(texts=DOCS[:SLOTS], kind="corpus", seed=0):
        context = Context(kind, tuple(d.text for d in texts), seed)
        place = tmp_path / "index"
        return Index.create(place, contextual, settings=FEW, context=context, encoder=encoder)

    begun = create()
    rows = (tmp_path / "index" / CONTEXT).read_bytes()
    with suppress(InterruptedError), begun.changes() as changes:
        next(changes.put_by_commits(DOCS))
        raise InterruptedError
    assert 0 < len(begun) < len(DOCS)
    for other in (dict(seed=1), dict(kind="none"), dict(kind="saved"), dict(kind="texts")):
        with pytest.raises(RevelaError, match="begun with another model or other settings"):
            create(**other)
    resumed = create(DOCS[9:])  # the corpus has changed meanwhile: what is stored is read
    assert (tmp_path / "index" / CONTEXT).read_bytes() == rows
    resumed.add(DOCS)
    texts = [d.text for d in DOCS[:SLOTS]]
    fresh = Index.create(
        tmp_path / "fresh", contextual, settings=FEW, context=texts, encoder=encoder
    )
    fresh.add(DOCS)
    np.testing.assert_allclose(vectors_of(resumed), vectors_of(fresh), atol=1e-6)


def test_a_kill_before_the_first_commit_leaves_a_free_folder(contextual, tmp_path):
    (tmp_path / CONTEXT).write_bytes(b"cut")
    (tmp_path / f".{CONTEXT}-x").mkdir()
    index = Index.create(
        tmp_path, contextual, context="none", encoder=load_encoder(contextual, "fp32")
    )
    assert index.info.context["kind"] == "none" and index.encoder.encode_queries(["a"]).any()


def test_a_deleted_context_document_changes_nothing(retriever, tmp_path):
    texts = DOCS[:SLOTS]
    index = retriever.index(texts, tmp_path / "index")  # as many as slots: all are its context
    before = index.encoder.encode_queries(["ocean1"])
    rows = (index.folder / CONTEXT).read_bytes()
    kept = index.search("ocean1", 4, "dense")[0]
    index.delete([d.id for d in texts if d.id != kept.id])
    again = retriever.open(index.folder)
    assert (index.folder / CONTEXT).read_bytes() == rows
    np.testing.assert_array_equal(again.encoder.encode_queries(["ocean1"]), before)
    assert again.search("ocean1", 4, "dense")[0].score == pytest.approx(kept.score, abs=1e-6)


def test_two_indices_of_one_retriever_do_not_disturb_each_other(retriever, tmp_path):
    one = retriever.index(DOCS[:24], tmp_path / "one")
    two = retriever.index(DOCS[24:], tmp_path / "two", context="none")
    alone = [i.encoder.encode_queries(["engine3"]) for i in (one, two)]
    assert np.abs(alone[0] - alone[1]).max() > 1e-3
    saved = load_encoder(retriever.folder, "fp32").encode_queries(["engine3"])
    for index, wanted in ((one, alone[0]), (two, alone[1]), (one, alone[0])):
        np.testing.assert_array_equal(index.encoder.encode_queries(["engine3"]), wanted)
        np.testing.assert_array_equal(retriever.encode_queries(["engine3"]), saved)


def test_fewer_documents_than_slots_leave_the_rest_null(retriever, tmp_path):
    index = retriever.index(DOCS[:1], tmp_path / "one")
    assert index.info.context["documents"] == 1
    first = retriever.encoder.context_encoder
    np.testing.assert_array_equal(index.context[1:], first.null_JD.numpy()[1:])
    assert np.abs(index.context[0] - first.null_JD.numpy()[0]).max() > 0.01


def test_only_an_index_with_a_context_keeps_one(retriever, saved_retriever, tmp_path):
    retriever.index(DOCS, tmp_path / "new")
    plain = Retriever(saved_retriever).index(DOCS, tmp_path / "old")
    new, old = (read_info(tmp_path / name) for name in ("new", "old"))
    assert new.context and old.context is None is plain.info.context
    assert not (tmp_path / "old" / CONTEXT).exists()


def test_a_damaged_context_is_one_sentence(retriever, tmp_path):
    index = retriever.index(DOCS, tmp_path / "index")
    other = retriever.index(DOCS, tmp_path / "other", context="none")
    shutil.copy(other.folder / CONTEXT, index.folder / CONTEXT)
    with pytest.raises(RevelaError, match=r"index is damaged \(context.safetensors: not the one"):
        retriever.open(index.folder).search("ocean", mode="dense")
    (index.folder / CONTEXT).write_bytes(b"cut")
    with pytest.raises(RevelaError, match=r"is damaged \(context.safetensors: SafetensorError"):
        retriever.open(index.folder).search("ocean", mode="dense")


def test_a_model_without_its_first_stage_is_one_sentence(contextual, tmp_path):
    shutil.copytree(contextual, tmp_path / "cut", ignore=shutil.ignore_patterns("context"))
    with pytest.raises(RevelaError, match="has slots for a context, but no first stage"):
        Index.create(tmp_path / "index", tmp_path / "cut", context=["a text"])
    with pytest.raises(RevelaError, match="give a sample"):
        Index.create(tmp_path / "other", contextual, context="corpus")
