"""The index folder against numpy and bm25s; what changes it; what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from letters import Letters, build, documents, extend, oracle, rows_of, wanted_rows

from revela.errors import RevelaError
from revela.index import store
from revela.index.bm25 import BM25
from revela.index.encode_corpus import add_documents, metadata_columns
from revela.index.fusion import Geometry, reciprocal_rank_fusion
from revela.index.manifest import INFO, Info, writing
from revela.index.statistics import FILE
from revela.index.store import Index
from revela.settings import Indexing
from revela.types import Document, Hit

DOCS = documents(40)
QUERIES = ["abba abab", "gggg hhhh gaga", "ccdd", "efef fefe eeee ffff"]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "index"
    build(folder, DOCS, metadata=["year"])
    return Index.load(folder)


def passage(hit: Hit) -> str:
    return f"{hit.title} {hit.text}" if hit.title else hit.text


@pytest.mark.parametrize("query", QUERIES)
def test_dense_search_is_the_exact_scan(index, query):
    hits, wanted = index.search(query, Letters(), 10, "dense"), oracle(DOCS, query, "dense", 10)
    np.testing.assert_allclose(
        [hit.score for hit in hits], [score for *_, score in wanted], atol=1e-6
    )
    for hit, (name, text, _) in zip(hits, wanted, strict=True):
        assert (hit.id, passage(hit)) == (name, text) or sum(
            abs(hit.score - score) < 1e-6 for *_, score in wanted
        ) > 1


def test_lexical_search_finds_the_words_and_nothing_else(index):
    word = DOCS[7].text.split(".")[0]
    hits = index.search(word, None, 40, "lexical")
    assert {h.id for h in hits} == {d.id for d in DOCS if word in d.text.replace(".", "").split()}
    assert all(word in passage(h) for h in hits) and [h.score for h in hits] == sorted(
        (h.score for h in hits), reverse=True
    )
    assert index.search("title", None, 40, "lexical") and not index.search(
        "unseen", None, 40, "lexical"
    )
    assert not index.search("the", None, 40, "lexical")


@pytest.mark.parametrize("query", [*QUERIES, "unseen words only"])
def test_hybrid_search_is_the_sum_of_both_scores(index, query):
    query = f"{query} {DOCS[3].text.split('.')[0]}" if query in QUERIES else query
    hits, wanted = index.search(query, Letters(), 10), oracle(DOCS, query, "hybrid", 10)
    np.testing.assert_allclose(
        [hit.score for hit in hits], [score for *_, score in wanted], atol=1e-5
    )
    assert all(0 <= hit.score <= 1 for hit in hits)


@pytest.mark.parametrize("query", QUERIES)
def test_fusion_by_rank_is_that_of_both_lists_of_documents(index, query):
    query = f"{query} {DOCS[3].text.split('.')[0]}"
    lists = [
        [h.id for h in index.search(query, Letters(), 200, mode)] for mode in ("dense", "lexical")
    ]
    fused = reciprocal_rank_fusion(lists)
    hits = index.search(query, Letters(), 10, fusion="rank")
    assert [h.score for h in hits] == list(fused.values())[:10] and {
        h.id: h.score for h in hits
    }.items() <= fused.items()


def test_statistics_stay_true_when_documents_come_and_go(tmp_path):
    build(tmp_path / "index", DOCS[:20])
    reader = Index.load(tmp_path / "index")
    changed = [Document("d3", "hhhh."), Document("d5", DOCS[5].text + " gggg.", DOCS[5].title)]
    extend(Index.load(tmp_path / "index"), [*changed, *DOCS[20:30]])
    made = Index.load(tmp_path / "index")
    made.delete(["d7", "d9"])
    made.finish()
    now = [
        text
        for *_, text in wanted_rows(
            [*changed, *(d for d in DOCS[:30] if d.id not in ("d3", "d5", "d7", "d9"))]
        )
    ]
    queries = [
        DOCS[3].text.split(".")[0] + " abba",
        "gggg hhhh",
        "unseen abba",
        "title title",
        "the",
        DOCS[7].text,
    ]
    for index in (made, reader, Index.load(tmp_path / "index")):
        index.search(
            "abba", Letters(), 1
        )  # which is when a reader looks whether another process has added to it
        assert index._statistics.chunks == len(now)
        np.testing.assert_allclose(
            [index._statistics.best(q) for q in queries], BM25(now).best(queries), rtol=1e-6
        )
        geometry = Geometry.of(Letters().encode_passages(now))
        np.testing.assert_allclose(index._statistics.geometry.mean, geometry.mean, atol=1e-6)
        assert index._statistics.geometry.spread == pytest.approx(geometry.spread, abs=1e-6)


def test_words_are_counted_again_where_their_table_is_gone_or_late(tmp_path):
    """As after a kill between a commit and ``finish``."""
    build(tmp_path / "index", DOCS[:20])
    kept = (tmp_path / "index" / FILE).read_bytes()
    wanted = [score for *_, score in oracle(DOCS[:25], "abba gggg", "hybrid", 5)]
    for lost in (None, kept):
        begun = Index.load(tmp_path / "index")
        list(add_documents(begun, DOCS[20:23], Letters()))
        (tmp_path / "index" / FILE).unlink() if lost is None else (
            tmp_path / "index" / FILE
        ).write_bytes(lost)
        extend(Index.load(tmp_path / "index"), DOCS[20:25])
        hits = Index.load(tmp_path / "index").search("abba gggg", Letters(), 5)
        np.testing.assert_allclose([hit.score for hit in hits], wanted, atol=1e-5)
    (tmp_path / "index" / FILE).write_bytes(kept[:100])
    with pytest.raises(RevelaError, match=r"is damaged .*made again by revela index --append"):
        Index.load(tmp_path / "index")


def test_one_hit_a_document_with_its_best_chunk(tmp_path):
    long = Document(
        "long", "aaaa aaaa aaaa. bbbb bbbb bbbb. aaab aaab aaab. " + "aaaa aaaa aaaa. " * 30, ""
    )
    made = build(
        tmp_path / "index",
        [long, Document("other", "cccc cccc.", "about"), Document("near", "aaaa bbbb.")],
    )
    hits = made.search("bbbb", Letters(), 2)
    assert [(h.id, h.chunk, h.text.strip()) for h in hits] == [
        ("long", 1, "bbbb bbbb bbbb."),
        ("near", 0, "aaaa bbbb."),
    ]
    assert [h.id for h in made.search("aaaa", Letters(), 3, "dense")] == [
        "long",
        "near",
        "other",
    ]  # 30 chunks of one do not hide the others
    assert made.search("cccc", None, 1, "lexical")[0] == Hit(
        "other", pytest.approx(1, abs=5), "about", "cccc cccc."
    )


def test_filters(index):
    hits = index.search("abba", Letters(), 40, "dense", "year > 2020 and year < 2024")
    assert {h.id for h in hits} == {d.id for d in DOCS if 2020 < d.metadata["year"] < 2024}
    assert all(h.metadata == DOCS[int(h.id[1:])].metadata for h in hits)
    assert {h.id for h in index.search("title", Letters(), 40, "lexical", "id = 'd3'")} == {"d3"}
    for wrong, why in [
        ("yaer > 1", "No field named yaer"),
        ("year >", "Expected: an expression"),
        ("year", "does not return a boolean"),
        ("year / 0 = 1", "Divide by zero"),
        ("sum(year) = 1", "not implemented"),
    ]:
        with pytest.raises(RevelaError, match=why) as caught:
            index.search("abba", Letters(), 5, where=wrong)
        assert "id, chunk, title, passage, year" in str(caught.value) and "\n" not in str(
            caught.value
        )
    with pytest.raises(RevelaError, match="longer than"):
        index.search("abba", Letters(), 5, where="year > 1 and " * 2000 + "year > 1")


def test_documents_are_added_replaced_passed_over_and_deleted(tmp_path):
    made, reader, encoder = (
        build(tmp_path / "index", DOCS[:20]),
        Index.load(tmp_path / "index"),
        Letters(),
    )
    changed = [Document("d3", "hhhh."), Document("d5", DOCS[5].text + " gggg.", DOCS[5].title)]
    added = extend(Index.load(tmp_path / "index"), [*changed, *DOCS[18:25]], encoder)
    assert (added.new, added.replaced, added.unchanged) == (5, 2, 2)
    assert set(encoder.seen) == {
        text for _, _, text in wanted_rows([*changed, *DOCS[20:25]])
    }  # nothing is encoded that is there already
    now = [*(d for d in DOCS[:25] if d.id not in ("d3", "d5")), *changed]
    assert rows_of(reader) == wanted_rows(now)  # one that was opened before sees it
    assert reader.search("hhhh", Letters(), 1)[0].id == "d3"
    chunks = len(made)
    gone = made.delete(["d3", "d7"])
    assert gone == len(wanted_rows([changed[0], DOCS[7]])) == chunks - len(made)
    made.finish()
    assert rows_of(reader) == wanted_rows([d for d in now if d.id not in ("d3", "d7")])
    with pytest.raises(RevelaError, match="has no document d3"):
        made.delete(["d1", "d3"])
    assert len(Index.load(tmp_path / "index")) == len(made)


@pytest.mark.parametrize("form", ["float32", "int8", "binary"])
def test_approximate_search_above_a_size(tmp_path, monkeypatch, form):
    monkeypatch.setattr(store, "EXACT_BELOW", 500)
    docs = documents(600, seed=1)
    made = build(tmp_path / "index", docs, metadata=["year"], vectors=form)
    assert {"vector", "year"} <= {
        column for found in made._table.list_indices() for column in found.columns
    }
    found = total = 0
    for query in [d.text for d in docs[:40]]:
        wanted = {round(score, 5) for *_, score in oracle(docs, query, "dense", 10)}
        hits = made.search(query, Letters(), 10, "dense")
        found, total = found + sum(round(h.score, 5) in wanted for h in hits), total + 10
        some = made.search(query, Letters(), 5, "dense", "year >= 2027")
        assert len(some) == 5 and min(hit.metadata["year"] for hit in some) >= 2027
    assert found / total > 0.95
    extend(made, [Document("new", "abcdefgh.")])
    assert made.search("abcdefgh", Letters(), 1)[0].id == "new"


def test_a_killed_run_is_finished_by_the_same_command(tmp_path, monkeypatch):
    monkeypatch.setattr("revela.index.encode_corpus.BATCH", 100)
    folder = tmp_path / "index"
    info = Info("model", "0123", 8, Indexing(chunk_words=3), metadata_columns(DOCS, ["year"]))
    begun = Index.create(folder, info)
    for _ in zip(range(3), add_documents(begun, DOCS, Letters()), strict=False):
        pass
    done = len({name for name, *_ in rows_of(begun)})
    assert 0 < done < len(DOCS)
    with pytest.raises(RevelaError, match="is not finished: run the same revela index again"):
        Index.load(folder)
    with pytest.raises(RevelaError, match="begun with another model or other settings"):
        build(folder, DOCS)
    encoder = Letters()
    made = build(folder, DOCS, encoder, metadata=["year"])
    assert rows_of(made) == rows_of(Index.load(folder)) == wanted_rows(DOCS)
    assert len(encoder.seen) == len(wanted_rows(DOCS[done:]))
    with pytest.raises(RevelaError, match="exists: choose another --out"):
        build(folder, DOCS)


def test_fewer_dimensions_are_of_length_one_again(tmp_path):
    made = build(tmp_path / "index", DOCS, dimensions=4)
    vectors = np.array([row["vector"] for row in made._table.search().limit(100).to_list()])
    assert vectors.shape[1] == 4 == made.info.width
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    texts = [passage for *_, passage in wanted_rows(DOCS)]
    cut = Letters().encode_passages(["abca", *texts])[:, :4]
    cut /= np.linalg.norm(cut, axis=1, keepdims=True)
    assert made.search("abca", Letters(), 1, "dense")[0].score == pytest.approx(
        float((cut[1:] @ cut[0]).max()), abs=1e-6
    )


class Broken(Letters):
    def __init__(self, value, width=8):
        super().__init__()
        self.value, self.width = value, width

    def encode_passages(self, texts, progress=False):
        return np.full((len(texts), self.width), self.value, np.float32)

    encode_queries = encode_passages


def test_bad_vectors_are_one_sentence(tmp_path):
    with pytest.raises(RevelaError, match="vectors that are not numbers"):
        build(tmp_path / "nan", DOCS, Broken(np.nan))
    made = build(tmp_path / "index", DOCS)
    with pytest.raises(RevelaError, match="vectors that are not numbers"):
        made.search("a", Broken(np.inf))
    with pytest.raises(RevelaError, match=r"gives 9 dimensions and .* holds 8"):
        made.search("a", Broken(0.3, 9))
    with pytest.raises(RevelaError, match="is not the model that made"):
        made.check_model("4567", "other")


@pytest.mark.parametrize(
    ("query", "why"),
    [("", "query is empty"), (" \n", "query is empty"), ("a\ud800", "not Unicode")],
)
def test_bad_queries_are_one_sentence(index, query, why):
    with pytest.raises(RevelaError, match=why):
        index.search(query, Letters())


def test_only_one_process_writes(tmp_path):
    build(tmp_path / "index", DOCS[:3])
    with (
        writing(tmp_path / "index"),
        pytest.raises(RevelaError, match="another process is writing"),
        writing(tmp_path / "index"),
    ):
        pass


def test_damaged_folders_are_one_sentence(tmp_path, index):
    with pytest.raises(RevelaError, match="is not an index"):
        Index.load(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / INFO).write_text(
        json.dumps({"model": "m", "fingerprint": "0", "passages": 3})
    )
    with pytest.raises(RevelaError, match="another version of revela: make it again"):
        Index.load(tmp_path / "old")
    (tmp_path / "old" / INFO).write_text("{")
    with pytest.raises(RevelaError, match="is damaged"):
        Index.load(tmp_path / "old")
    for part in ("data", "_versions", "_indices"):
        folder = tmp_path / part
        shutil.copytree(index.folder, folder)
        shutil.rmtree(folder / "chunks.lance" / part)
        with pytest.raises(RevelaError, match="is damaged or out of reach"):
            Index.load(folder).search("title", Letters(), where="year > 1")
    folder = tmp_path / "cut"
    shutil.copytree(index.folder, folder)
    for file in (folder / "chunks.lance" / "data").iterdir():
        file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(RevelaError, match="is damaged or out of reach"):
        Index.load(folder).search("title", Letters())


def test_an_empty_index_finds_nothing(tmp_path):
    made = build(tmp_path / "index", DOCS[:1])
    made.delete(["d0"])
    made.finish()
    assert len(made) == 0 and made.search("abba", Letters()) == []
