"""The index folder against numpy and bm25s; what changes it; what is refused."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import lancedb
import numpy as np
import pydantic
import pytest
from killed_writer import kill_while_appending
from lancedb.table import LanceTable
from letters import Letters, build, documents, extend, oracle, reopen, rows_of, wanted_rows

from revela.encoders.load import load_encoder
from revela.errors import QueryError, RevelaError
from revela.ranking.bm25 import BM25, TermCounts, idf
from revela.ranking.fusion import reciprocal_rank_fusion
from revela.searching import table
from revela.searching.filters import id_filter
from revela.searching.index import Index
from revela.searching.state import STATE
from revela.searching.table import lance_errors
from revela.types import Document, Hit

DOCS = documents(40)
CHANGED = [Document("d3", "hhhh."), Document("d5", DOCS[5].text + " gggg.", DOCS[5].title)]
QUERIES = ["abba abab", "gggg hhhh gaga", "ccdd", "efef fefe eeee ffff"]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "index"
    build(folder, DOCS, metadata=["year"])
    return reopen(folder)


def passage(hit: Hit) -> str:
    return f"{hit.title} {hit.text}" if hit.title else hit.text


@pytest.mark.parametrize("mode", ["dense", "hybrid"])
@pytest.mark.parametrize("query", [*QUERIES, "unseen words only"])
def test_dense_and_hybrid_search_are_the_exact_scan(index, query, mode):
    query = f"{query} {DOCS[3].text.split('.')[0]}" if query in QUERIES else query
    hits, wanted = index.search(query, 10, mode), oracle(DOCS, query, mode, 40)
    scores = [score for *_, score in wanted]
    assert [hit.score for hit in hits] == pytest.approx(scores[:10], abs=1e-6)
    assert all(0 <= hit.score <= 1 for hit in hits)
    for hit, (name, text, _) in zip(hits, wanted, strict=False):
        ties = sum(abs(hit.score - score) < 1e-6 for score in scores)
        assert ties > 1 or (hit.id, passage(hit)) == (name, text)


def test_lexical_search_finds_the_words_and_nothing_else(index):
    word = DOCS[7].text.split(".")[0]
    hits = index.search(word, 40, "lexical")
    assert {h.id for h in hits} == {d.id for d in DOCS if word in d.text.replace(".", "").split()}
    scores = [h.score for h in hits]
    assert all(word in passage(h) for h in hits) and scores == sorted(scores, reverse=True)
    assert index.search("title", 40, "lexical") and not index.search("unseen", 40, "lexical")
    assert not index.search("the", 40, "lexical")


@pytest.mark.parametrize("query", QUERIES)
def test_fusion_by_rank_is_that_of_both_lists_of_documents(index, query):
    query = f"{query} {DOCS[3].text.split('.')[0]}"
    lists = [[h.id for h in index.search(query, 200, mode)] for mode in ("dense", "lexical")]
    fused = reciprocal_rank_fusion(lists)
    found = {h.id: h.score for h in index.search(query, 10, fusion="rank")}
    assert [*found.values()] == list(fused.values())[:10] and found.items() <= fused.items()


def counts_are_those_of(index, texts, query="hhhh gggg title") -> bool:
    """Whether its counts of terms give the idf that these passages give."""
    terms = index.table.query_terms(query)
    found, wanted = index.state.idf(terms), BM25(texts, index.info.language).idf(terms)
    assert found.tolist() == pytest.approx(wanted.tolist())
    return index.state.snapshot().chunks == len(texts)


def test_what_a_killed_run_left_is_finished_even_if_the_next_one_is_refused(tmp_path, monkeypatch):
    docs = [Document(f"d{i}", f"common w{i % 7} w{i}") for i in range(60)]
    made, fresh = build(tmp_path / "made", docs), build(tmp_path / "fresh", docs[4:])
    gone = [f"d{i}" for i in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(table.Table, "pack", Killed.kill)
        with pytest.raises(Killed):
            made.delete(gone)
    with pytest.raises(RevelaError, match="has no document"):
        made.delete(gone)
    for query in ("common", "w0 w1"):
        found, wanted = (i.search(query, 60, "lexical") for i in (made, fresh))
        assert [hit.id for hit in found] == [hit.id for hit in wanted]
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in wanted])


def test_only_cleaning_removes_versions_however_old_they_are(tmp_path, monkeypatch):
    made, optimize, ages = build(tmp_path / "index", DOCS[:5]), LanceTable.optimize, []

    def years_later(self, cleanup_older_than=timedelta(days=7), **how):
        ages.append(cleanup_older_than)
        is_old = cleanup_older_than < timedelta(days=3650)
        return optimize(self, cleanup_older_than=timedelta(0) if is_old else None, **how)

    monkeypatch.setattr(LanceTable, "optimize", years_later)
    monkeypatch.setattr(table.Table, "clean", Killed.kill)
    with pytest.raises(Killed):
        extend(made, [Document("new", "abba.")])
    versions = {found["version"] for found in made.table.lance.list_versions()}
    assert len(ages) == 2 and len(versions) > 2


@pytest.mark.parametrize("large", [False, True])
def test_a_kill_while_old_versions_are_removed_takes_nothing(tmp_path, monkeypatch, large):
    """Their files may be gone when their lists are still there."""
    if large:
        monkeypatch.setattr(table, "EXACT_BELOW", 50)
        monkeypatch.setattr(table, "UNPACKED", 0)
    made, data = build(tmp_path / "index", DOCS[:40]), tmp_path / "index" / "chunks.lance" / "data"
    with monkeypatch.context() as patch:
        patch.setattr(table.Table, "clean", Killed.kill)
        with pytest.raises(Killed):
            extend(made, CHANGED)
    copied = shutil.copytree(tmp_path / "index", tmp_path / "cleaned")
    lance = lancedb.connect(copied).open_table("chunks")
    table.Table.clean(SimpleNamespace(folder=copied, lance=lance))
    used = {file.name for file in (copied / "chunks.lance" / "data").iterdir()}
    assert large or {file.name for file in data.iterdir()} > used
    for file in data.iterdir():
        if file.name not in used:
            file.unlink()
    now = [*(d for d in DOCS[:40] if d.id not in ("d3", "d5")), *CHANGED]
    assert rows_of(reopen(tmp_path / "index")) == wanted_rows(now)
    extend(reopen(tmp_path / "index"), DOCS[40:])
    assert rows_of(reopen(tmp_path / "index")) == wanted_rows([*now, *DOCS[40:]])


class Killed(BaseException):
    @classmethod
    def kill(cls, *_):
        raise cls


def test_a_replaced_document_may_have_been_what_another_is_now(tmp_path):
    """Digests are of what is in a document, and not of its id."""
    first, second = Document("a", "abba."), Document("b", "cddc.")
    made = build(tmp_path / "index", [first, second])
    swapped = [Document("a", "cddc."), Document("b", "abba.")]
    assert extend(made, swapped).replaced == 2 and rows_of(made) == wanted_rows(swapped)


def test_a_small_change_of_a_large_index_is_searched_before_it_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "EXACT_BELOW", 50)
    monkeypatch.setattr(table, "UNPACKED", 250)
    monkeypatch.setattr(table, "PACKED_SHARE", 0.1)
    folder, packed = tmp_path / "index", []
    monkeypatch.setattr(table.Table, "pack", lambda *a, p=table.Table.pack: packed.append(p(*a)))
    build(folder, DOCS)
    reader, new = reopen(folder), Document("new", "hhhh hghg fafa.")
    now = [*(d for d in DOCS if d.id not in ("d3", "d5", "d7")), *CHANGED, new]
    assert reader.search("hhhh hghg fafa", 1, "lexical") == []
    extend(reopen(folder), [*CHANGED, new])  # and another process deletes
    reopen(folder).delete(["d7"])
    assert len(packed) == 1
    texts = [text for *_, text in wanted_rows(now)]
    for index in (reader, reopen(folder)):
        assert rows_of(index) == wanted_rows(now)
        assert index.search("hhhh hghg fafa", 1)[0].id == "new"
        assert index.search("hhhh hghg fafa", 1, "lexical")[0].id == "new"
        assert index.search("fafa hghg", 1, "dense", "id in ('new', 'd7')")[0].id == "new"
        assert counts_are_those_of(index, texts)
    extend(reopen(folder), [Document("more", "gaga.")])
    assert len(packed) == 2, "each of three commits counts as 100 chunks"
    extend(reopen(folder), [Document("last", "gaga.")])
    index = reopen(folder)
    assert len(packed) == 2 and index.state.snapshot().chunks == len(index) == len(texts) + 2


def test_a_version_that_is_removed_while_it_is_opened_is_opened_again(tmp_path, monkeypatch):
    index, writer = build(tmp_path / "index", DOCS[:5]), reopen(tmp_path / "index")
    at, changes = table.Table.at, [DOCS[5:8], DOCS[8:11]]

    def beside_a_writer(self, version, info=None):
        if info is not None and changes:  # a reader's; the writer removes the version before
            extend(writer, changes.pop())
        return at(self, version, info)

    extend(writer, [Document("new", "abba.")])
    monkeypatch.setattr(table.Table, "at", beside_a_writer)
    assert [hit.id for hit in index.search("abba", 1, "lexical")] == ["new"] and not changes
    assert len(index) == len(writer)

    def gone(self, version, info=None):
        return at(self, 10**6, info)

    extend(writer, [Document("newer", "abba.")])
    monkeypatch.setattr(table.Table, "at", gone)
    with pytest.raises(RevelaError, match="damaged or cannot be read"):
        index.search("abba", 1, "lexical")


def test_terms_are_counted_while_others_search(tmp_path):
    made, terms = build(tmp_path / "index", DOCS[:2]), [f"w{i}" for i in range(50)]
    before = made.state.snapshot().chunks
    with ThreadPoolExecutor(2) as pool:
        searches = [pool.submit(made.state.idf, terms) for _ in range(500)]
        for _ in range(100):
            made.state.commit(made.state.snapshot().version, TermCounts.of([terms]))
    assert all((search.result() >= 0).all() for search in searches)
    wanted = idf(np.array([100]), before + 100)[0]
    assert made.state.idf(terms).tolist() == [wanted] * 50


def test_one_hit_a_document_with_its_best_chunk(tmp_path):
    text = "aaaa aaaa aaaa. bbbb bbbb bbbb. aaab aaab aaab. " + "aaaa aaaa aaaa. " * 30
    other, near = Document("other", "cccc cccc.", "about"), Document("near", "aaaa bbbb.")
    made = build(tmp_path / "index", [Document("long", text), other, near])
    hits = [(h.id, h.chunk, h.text.strip()) for h in made.search("bbbb", 2)]
    assert hits == [("long", 1, "bbbb bbbb bbbb."), ("near", 0, "aaaa bbbb.")]
    # 30 chunks of one document do not hide the others.
    assert [h.id for h in made.search("aaaa", 3, "dense")] == ["long", "near", "other"]
    hit = Hit("other", pytest.approx(1, abs=5), "about", "cccc cccc.", language="en")
    assert made.search("cccc", 1, "lexical")[0] == hit


@pytest.mark.parametrize("rerank", ["none", "late-interaction"])
def test_of_equal_passages_that_of_the_longer_document_scores_a_little_less(tmp_path, rerank):
    log = "bbbb cdcd efef. " + "aaaa aaab abab. " * 40
    docs = [Document("log", log), Document("note", "bbbb cdcd efef."), Document("z", "gggg hhhh.")]
    made = build(tmp_path / "index", docs)
    note, found = made.search("bbbb cdcd efef", 2, rerank=rerank, explain=True)
    assert (note.id, found.id, note.text, found.chunk) == ("note", "log", "bbbb cdcd efef.", 0)
    factor = (21 / (20 + 41)) ** 0.1
    assert found.score == pytest.approx(factor * note.score)
    assert (note.explanation.length, found.explanation.length) == (1, pytest.approx(factor))
    extend(made, [replace(docs[0], text="bbbb cdcd efef. aaaa aaab abab.")])
    note, found = made.search("bbbb cdcd efef", 2, rerank=rerank)
    assert found.score == pytest.approx((21 / 22) ** 0.1 * note.score)
    for mode, fusion in (("dense", "score"), ("lexical", "score"), ("hybrid", "rank")):
        hits = made.search("bbbb cdcd efef", 2, mode, fusion=fusion, explain=True)
        assert [hit.explanation.length for hit in hits] == [None, None]


def test_fewer_documents_than_asked_for_are_not_read_again_and_again(tmp_path, monkeypatch):
    """Books of many chunks: they are asked for again without those that were found."""
    monkeypatch.setattr("revela.ranking.steps.DEPTH", 20)
    rng, read, ranked = np.random.default_rng(0), [], table.Table._ranking
    books = [
        Document(f"b'{i}", " ".join(f"title {''.join(words)}." for words in chunks))
        for i, chunks in enumerate(rng.choice(list("abcdefgh"), size=(9, 60, 4)))
    ]
    index = build(tmp_path / "index", books)

    def counted(*arguments):
        found = ranked(*arguments)
        read.append(len(found))
        return found

    monkeypatch.setattr(table.Table, "_ranking", counted)
    where = dict(where="id != 'b''4' -- ours")
    for ask in (dict(mode="dense"), dict(mode="lexical"), dict(fusion="rank"), dict(), where):
        read.clear()
        hits = index.search("title abba", 10, **ask)
        assert len(hits) == len({hit.id for hit in hits}) == (8 if "where" in ask else 9), ask
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert sum(read) < len(index), "each row is read once at most"
        if "mode" in ask:
            best = {name: score for name, _, score in oracle(books, "title abba", **ask, k=9)}
            assert {hit.id: hit.score for hit in hits} == pytest.approx(best, abs=1e-5)


def test_wrong_filters_are_one_sentence(index):
    for wrong, why in [
        ("yaer > 1", "No field named yaer"),
        ("year >", "Expected: an expression"),
        ("year", "does not return a boolean"),
        ("year / 0 = 1", "Divide by zero"),
        ("sum(year) = 1", "not implemented"),
    ]:
        with pytest.raises(RevelaError, match=why) as caught:
            index.search("abba", 5, where=wrong)
        columns = "id, chunk, title, passage, first_line, first_page, date, type, language, year"
        assert columns in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RevelaError, match="longer than"):
        index.search("abba", 5, where="year > 1 and " * 2000 + "year > 1")


def test_documents_are_added_replaced_passed_over_and_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "FILTER_IDS", 4)  # of which several are needed
    made, encoder = build(tmp_path / "index", DOCS[:20]), Letters()
    reader = reopen(tmp_path / "index")
    added = extend(reopen(tmp_path / "index"), [*CHANGED, *DOCS[18:25]], encoder)
    assert (added.new, added.replaced, added.unchanged) == (5, 2, 2)
    new = {text for _, _, text in wanted_rows([*CHANGED, *DOCS[20:25]])}
    former = {text for _, _, text in wanted_rows([DOCS[3], DOCS[5]])}
    assert set(encoder.seen) == new - former, "what is there already is not encoded"
    now = [*(d for d in DOCS[:25] if d.id not in ("d3", "d5")), *CHANGED]
    assert rows_of(reader) == wanted_rows(now)  # one that was opened before sees it
    assert reader.search("hhhh", 1)[0].id == "d3"
    chunks = len(made)
    gone = made.delete(["d3", "d7"])
    assert gone == len(wanted_rows([CHANGED[0], DOCS[7]])) == chunks - len(made)
    assert rows_of(reader) == wanted_rows([d for d in now if d.id not in ("d3", "d7")])
    with pytest.raises(RevelaError, match="has no document d3"):
        made.delete(["d1", "d3"])
    assert len(reopen(tmp_path / "index")) == len(made)


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_chunks_that_a_document_keeps_are_not_encoded_again(tmp_path, keep_tokens):
    log = "Aa bb cc. Dd ee ff. Aa bb cc. Gg hh aa."
    made = build(tmp_path / "index", [Document("log", log)], keep_tokens=keep_tokens)
    encoder = Letters()
    grown = [Document("log", f"{log} Ff ee dd."), Document("other", "Dd ee ff. Hh hh hh.")]
    extend(made, grown, encoder)
    assert sorted(encoder.seen) == ["Ff ee dd.", "Gg hh aa. ", "Hh hh hh."]
    again = build(tmp_path / "again", grown, keep_tokens=keep_tokens)
    columns = ["passage", "vector", *(["tokens"] if keep_tokens else [])]
    rows = [index.table.lance.to_arrow().select(columns).to_pylist() for index in (made, again)]
    assert sorted(map(str, rows[0])) == sorted(map(str, rows[1]))


def test_words_that_are_all_stop_words_are_searched_by_vectors(tmp_path):
    docs = [Document("a", "aaa bee the hive."), Document("b", "the ccc of the hhh")]
    index = build(tmp_path / "index", docs, language="en")
    for mode in ("lexical", "dense", "hybrid"):
        hits = index.search("the of the", 2, mode, explain=True)
        assert hits and hits[0].id == index.search("the of the", 2, "dense")[0].id
    assert [hit.id for hit in index.search("hhh", 2, "lexical")] == ["b"]


@pytest.mark.parametrize("form", ["float32", "int8", "binary"])
def test_approximate_search_above_a_size(tmp_path, monkeypatch, form):
    monkeypatch.setattr(table, "EXACT_BELOW", 500)
    docs = documents(600, seed=1)
    made = build(tmp_path / "index", docs, metadata=["year"], vectors=form)
    indices = made.table.lance.list_indices()
    assert {"vector", "year"} <= {column for found in indices for column in found.columns}
    found = total = 0
    for query in [d.text for d in docs[:40]]:
        wanted = {round(score, 5) for *_, score in oracle(docs, query, "dense", 10)}
        hits = made.search(query, 10, "dense")
        found, total = found + sum(round(h.score, 5) in wanted for h in hits), total + 10
        some = made.search(query, 5, "dense", "year >= 2027")
        assert len(some) == 5 and min(hit.metadata["year"] for hit in some) >= 2027
    assert found / total > 0.95
    extend(made, [Document("new", "abcdefgh.")])
    assert made.search("abcdefgh", 1)[0].id == "new"


def test_fewer_dimensions_are_of_length_one_again(tmp_path):
    made = build(tmp_path / "index", DOCS, dimensions=4)
    vectors = np.array([row["vector"] for row in made.table.lance.search().limit(100).to_list()])
    assert vectors.shape[1] == 4 == made.info.width
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    texts = [passage for *_, passage in wanted_rows(DOCS)]
    cut = Letters().encode_passages(["abca", *texts])[:, :4]
    cut /= np.linalg.norm(cut, axis=1, keepdims=True)
    best = pytest.approx(float((cut[1:] @ cut[0]).max()), abs=1e-6)
    assert made.search("abca", 1, "dense")[0].score == best


def test_pydantic_is_left_as_it_was(index):
    """What imports LanceDB replaces its ``validate_call`` meanwhile."""
    assert hasattr(pydantic.validate_call(lambda x: x), "raw_function")


class NineWide(Letters):
    def encode_queries(self, texts, progress=False):
        return np.full((len(texts), 9), 1 / 3, np.float32)


def test_lexical_search_needs_no_model(tmp_path):
    build(tmp_path / "index", DOCS)
    index = Index.open(tmp_path / "index")
    assert index.search("title", 1, "lexical")
    with pytest.raises(RevelaError, match="model is not in the hub cache"):
        index.search("title", 1)


def test_bad_vectors_are_one_sentence(tmp_path, saved_retriever):
    broken = load_encoder(saved_retriever, "fp32")
    next(broken.model.parameters()).data[:] = np.nan
    with pytest.raises(RevelaError, match=r"vectors that are not finite for \d+ of \d+ texts"):
        build(tmp_path / "nan", DOCS, broken)
    with pytest.raises(RevelaError, match="nan is not finished"):
        reopen(tmp_path / "nan")
    build(tmp_path / "index", DOCS)
    with pytest.raises(RevelaError, match="vectors that are not finite for 1 of 1 texts"):
        Index.open(tmp_path / "index", encoder=broken).search("a")
    with pytest.raises(RevelaError, match=r"gives 9 dimensions and .* holds 8"):
        Index.open(tmp_path / "index", encoder=NineWide()).search("a")
    with pytest.raises(RevelaError, match="is not the model that made"):
        Index.open(tmp_path / "index", saved_retriever)


BAD_OPTIONS = [
    ({"mode": "bm25"}, "unknown mode 'bm25': give one of dense, lexical, hybrid"),
    ({"mode": None}, "unknown mode None"),
    ({"fusion": "rrf"}, "unknown fusion 'rrf': give one of score, rank"),
    ({"rerank": "heads"}, "unknown rerank 'heads': give one of late-interaction, none"),
    *(({"k": k}, f"k must be .*got {k}") for k in (-1, 0, 2.5)),
    ({"min_score": float("nan")}, "the minimum score must be a number"),
    ({"rerank": "late-interaction", "fusion": "rank"}, "and hybrid search by score"),
    ({"rerank": "late-interaction", "mode": "lexical"}, "re-ranks dense search"),
    ({"where": {"colour": 1}}, "unknown column colour"),
    ({"where": "year > '\ud800'"}, "the filter is not Unicode"),
    *(({"query": query}, "query is empty") for query in ("", " \n")),
]


@pytest.mark.parametrize(("option", "why"), BAD_OPTIONS)
def test_an_option_without_such_a_value_is_refused_before_work(index, monkeypatch, option, why):
    monkeypatch.setattr(type(index), "encoder", property(lambda _: pytest.fail("encodes")))
    for search in (index.search, lambda query, **more: list(index.search_many([query], **more))):
        with pytest.raises(QueryError, match=why) as refused:
            search(**{"query": "abba", **option})
        assert refused.value.param in option


def test_half_a_surrogate_pair_is_not_called_damage(tmp_path):
    index, bad = build(tmp_path / "index", DOCS), "half \udfff"
    for document in (Document(bad, "a"), Document("a", bad), Document("a", "b", bad)):
        with pytest.raises(RevelaError, match=r"a text is not Unicode .*'half .udfff'"):
            index.add([document])
    with pytest.raises(QueryError, match="year of document a is not Unicode"):
        build(tmp_path / "other", [Document("a", "b", metadata={"year": bad})], metadata=["year"])
    for ask in (lambda name: index.delete(["a", name]), index.chunks, index.search):
        with pytest.raises(QueryError, match="is not Unicode"):
            ask(bad)
    assert len(reopen(tmp_path / "index")) == len(index)


def test_folders_of_something_else_are_one_sentence(tmp_path):
    made = {None: "is not an index", "": "another version of revela: make it"}
    for content, why in {**made, "{" * 1000: "is damaged"}.items():
        if content is not None:
            (tmp_path / STATE).write_text(content)
        with pytest.raises(RevelaError, match=why):
            reopen(tmp_path)


@pytest.mark.parametrize("part", ["data", "_versions", "_indices", "cut data", "cut manifest"])
def test_damaged_folders_are_one_sentence(tmp_path, index, part):
    folder = tmp_path / "index"
    shutil.copytree(index.folder, folder)
    lance = folder / "chunks.lance"
    if part == "cut data":
        for file in (lance / "data").iterdir():
            file.write_bytes(file.read_bytes()[:200])
    elif part == "cut manifest":  # which makes LanceDB panic
        for file in (lance / "_versions").iterdir():
            data = bytearray(file.read_bytes())
            place = int.from_bytes(data[-16:-8], "little")
            data[place : place + 4] = (2**28).to_bytes(4, "little")  # the length of what follows
            file.write_bytes(data)
    else:
        shutil.rmtree(lance / part)
    with pytest.raises(RevelaError, match="is damaged or cannot be read"):
        reopen(folder).search("title", where="year > 1")


FAULTS = [
    (RuntimeError('lance error: task panicked with message "range end"'), "is damaged or cannot"),
    (OSError("LanceError(IO): No space left on device (os error 28)"), "space left on device"),
]


@pytest.mark.parametrize(("error", "why"), FAULTS)
def test_the_filter_is_not_at_fault_where_the_disk_or_a_file_is(tmp_path, error, why):
    guarded = lance_errors(tmp_path, "year > 2000", ["year"])
    with pytest.raises(RevelaError, match=why) as caught, guarded:
        raise error
    assert not isinstance(caught.value, QueryError)


def test_an_empty_index_finds_nothing(tmp_path):
    made = build(tmp_path / "index", DOCS[:1])
    made.delete(["d0"])
    assert len(made) == 0 and made.search("abba") == [] == made.sample()


def test_ids_are_looked_up_by_their_index_however_much_is_added(tmp_path, monkeypatch):
    """So that a look-up takes as long in a large table as in a small one (scale.py measures it)."""
    monkeypatch.setattr(table, "EXACT_BELOW", 50)
    monkeypatch.setattr(table, "UNPACKED", 5)
    made = build(tmp_path / "index", DOCS[:30])
    with made.changes() as changes:
        changes.table.lance.drop_index("id_idx")  # as a killed first run leaves it
        before = changes.table.frozen()
        changes.put(DOCS[30:])
        after = changes.table.frozen()
        changes.finish = lambda: None
    for looked_up, added in ((before, False), (after, True)):
        found = looked_up.digests([document.id for document in DOCS])
        assert found.keys() == {d.id for d in (DOCS if added else DOCS[:30])}
        assert looked_up.lance.index_stats("id_idx").num_unindexed_rows == 0
        plan = looked_up.lance.search().where(id_filter(["d1", "d2"])).explain_plan()
        assert "ScalarIndexQuery" in plan
    assert rows_of(made) == wanted_rows(DOCS)


def test_what_a_kill_left_before_the_state_is_no_index(tmp_path):
    (tmp_path / f".{STATE}-abc").mkdir()
    assert len(build(tmp_path, DOCS[:2])) > 0


def test_nothing_acknowledged_is_lost_and_nothing_is_there_twice(tmp_path):
    assert kill_while_appending(tmp_path / "index", kills=2, seed=0)["acknowledged"] > 0
