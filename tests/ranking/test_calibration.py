"""Words and vectors are measured without labels, and the fusion follows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from revela.errors import RevelaError
from revela.ranking import steps
from revela.ranking.bm25 import BM25
from revela.ranking.calibration import PRIOR, Calibration
from revela.ranking.fusion import FusionRule, chance_of, fuse_scores
from revela.ranking.queries import sentence_queries
from revela.ranking.sentence_test import FEW, QUERIES, SentenceTest
from revela.ranking.steps import OTHER, Confidence
from revela.searching.index import Index
from revela.text.words import count_words
from revela.types import PERHAPS, SURE, Document, Hit, Hits
from tests.searching import letters
from tests.searching.letters import Letters, max_bm25


class Blind(Letters):
    """Vectors that say nothing of the text."""

    def encode_passages(self, texts, progress=False):
        made = np.array([[hash(t) % n + 1 for n in range(2, 10)] for t in texts], np.float32)
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    encode_queries = encode_passages


LETTERS = Letters()


def measure(texts, encoder=LETTERS, queries=QUERIES, scored=False, **about):
    test = SentenceTest(texts, "none", queries, **about)
    vectors = encoder.encode_passages([*texts, ""])[: len(texts)]  # of no texts, too
    return test(encoder, vectors, scored=scored)


def passages(count: int, seed: int = 0) -> list[str]:
    """Three sentences of six words each; words of one passage are like one another."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        own = rng.choice(list("abcdefgh"), 3, replace=False)
        words = ["".join(rng.choice(own, 4)) for _ in range(18)]
        made.append(" ".join(f"{'  '.join(words[i : i + 6]).capitalize()}." for i in (0, 6, 12)))
    return made


def build(folder, texts, encoder=None, **settings) -> Index:
    docs = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    return letters.build(folder, docs, encoder, language="none", chunk_words=120, **settings)


def test_a_query_is_a_sentence_that_is_taken_out_of_its_passage():
    texts = passages(60)
    found, test = measure(texts, queries=40), SentenceTest(texts, "none", 40)
    assert found.queries == 40 and found.passages == 60
    for place, query, rest in zip(test._places, test._queries, test._rests, strict=True):
        sentence = next(s for s in texts[place].split(".") if " ".join(s.split()) in f"{query}.")
        assert sentence not in rest and count_words(rest) == 12 and count_words(query) == 6
    assert measure(texts).queries == 60


def test_a_blind_embedder_leaves_it_to_the_words():
    texts = passages(80)
    seeing, blind = measure(texts), measure(texts, Blind())
    assert blind.words == seeing.words and blind.vectors < seeing.vectors
    ratio = (blind.words + PRIOR) / (blind.vectors + PRIOR)
    assert blind.rule.squared_ratio == ratio**2 > seeing.rule.squared_ratio
    cosines, shares = {"far": 0.9, "word": 0.1}, {"word": 0.4}
    assert next(iter(fuse_scores(cosines, shares, FusionRule(1)))) == "far"
    assert next(iter(fuse_scores(cosines, shares, FusionRule(100)))) == "word"


def test_vectors_that_know_the_sentences_better_do_not_count_more():
    assert Calibration(200, words=40, vectors=180).rule.squared_ratio == 1
    assert Calibration(200, words=40, vectors=40).rule.squared_ratio == 1
    assert Calibration(200, words=40, vectors=39).rule.squared_ratio > 1


def test_a_retriever_that_was_trained_on_the_text_counts_as_before_training():
    texts = passages(60)

    class Trained(Letters):
        words_to_vectors = 3.0

    found, before = measure(texts, Trained()), measure(texts)
    assert before.rule.squared_ratio < 9 == found.rule.squared_ratio
    assert found.vectors == before.vectors


@pytest.mark.parametrize("texts", [[], ["one two"], ["one"] * 30, ["one two three four"] * 30])
def test_too_few_sentences_measure_nothing(texts):
    found = measure(texts)
    assert found.queries == found.words == 0 and found.rule.squared_ratio == 1
    assert "too few sentences" in found.describe()


def test_it_is_said_in_a_sentence():
    said = Calibration(200, 100, 6, 1000).describe()
    assert "words find the right document in 50 of 100 cases, vectors in 3:" in said
    assert "does not know this text" in said and "docs/languages.md" in said
    assert "does not know" not in Calibration(200, 100, 90, 1000).describe()
    page = Path(__file__).parents[2] / "docs" / "languages.md"
    shown = " ".join(page.read_text(encoding="utf-8").split())
    assert f"language ru; {Calibration(1000, 460, 90, 1000).describe()}" in shown


def test_an_index_keeps_it_and_measures_again_when_it_has_doubled(tmp_path):
    made = build(tmp_path / "index", passages(40))
    first = made.info.calibration
    assert first.queries == first.passages == 40 == len(made)
    reader = Index.open(tmp_path / "index", encoder=Letters())
    assert reader.calibration == first
    made.add([Document(f"e{i}", text) for i, text in enumerate(passages(20, 1))])
    assert made.info.calibration == first
    made.add([Document(f"f{i}", text) for i, text in enumerate(passages(20, 2))])
    assert made.info.calibration.passages == 80
    reader.search("abba")  # which is when a reader looks
    assert reader.calibration == made.info.calibration


def test_search_uses_it_or_a_weight_by_hand(tmp_path):
    texts = passages(50)
    index = build(tmp_path / "index", texts, Blind())
    query = texts[7].split(".")[1]
    vector = Blind().encode_queries([query])[0]
    hits = index.search(query, 50, encoded=vector)
    cosines = {f"d{i}": float(v @ vector) for i, v in enumerate(Blind().encode_passages(texts))}
    bm25 = BM25(texts, "none")
    (places,), (scores,) = bm25.top_k([query], 50)
    best = max_bm25(bm25, query)
    shares = {f"d{i}": float(s / best) for i, s in zip(places, scores, strict=True) if s > 0}
    wanted = fuse_scores(cosines, shares, index.info.calibration.rule)
    assert {hit.id: hit.score for hit in hits} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for weight in (0.0, 0.3, 1.0):
        opened = Index.open(tmp_path / "index", encoder=Blind(), weight=weight)
        found = {hit.id: hit.score for hit in opened.search(query, 50, encoded=vector)}
        assert found == pytest.approx(
            fuse_scores(cosines, shares, index.info.calibration.rule, weight), rel=1e-4, abs=1e-6
        )
    with pytest.raises(RevelaError, match="--weight 2"):
        Index.open(tmp_path / "index", weight=2)


def test_tokens_weigh_less_where_vectors_know_nothing(tmp_path):
    index = build(tmp_path / "index", passages(30), Blind(), keep_tokens=True)
    moved = []
    for vectors in (30, 0):
        measured = Calibration(30, 30, vectors, 30)
        index.table.info = dataclasses.replace(index.info, calibration=measured)
        plain, again = (
            {hit.id: hit.score for hit in index.search("abba cdcd", 30, rerank=rerank)}
            for rerank in (None, "late-interaction")
        )
        moved.append(np.mean([abs(again[name] - plain[name]) for name in plain]))
    assert moved[0] > 5 * moved[1] > 0


def test_the_order_of_the_passages_does_not_matter():
    texts, order = passages(60), np.random.default_rng(0).permutation(60)
    found = measure(texts, queries=25)
    assert found == measure([texts[i] for i in order], queries=25) and found.words > 0


def test_confidence_is_half_where_97_of_100_hits_score_less_if_nothing_answers():
    first = np.random.default_rng(0).normal(0.5, 0.1, 20_000)
    sure = Confidence.from_wrong_hits(np.array([first, np.full(20_000, 0.4)]).T)
    half, slope, cut = sure
    assert half == pytest.approx(0.3 + 0.1 * 1.8808, abs=0.005)
    assert slope == pytest.approx(10, rel=0.02)
    assert cut == pytest.approx(half + 0.2)
    assert sure.of(half, 0) == sure.of(half + 0.1, 0.2) == 0.5
    assert sure.of(half + 0.1, 0) == pytest.approx(1 / (1 + np.exp(-1)), abs=0.01)
    assert sure.of(-1e9, 0) == pytest.approx(0)
    before, after = Confidence(0.2, 10, 0.4), Confidence(0.1, 20, 0.3)
    assert sure.scaled(before, after) == pytest.approx((half / 2, 2 * slope, 0.75 * cut))


def test_what_has_nothing_of_a_question_does_not_answer_it_though_nothing_was_measured(
    tmp_path, monkeypatch
):
    """Only a measured scale says that a score above 0 is low."""
    monkeypatch.setattr(steps, "FAR", 2.0)
    index = build(tmp_path / "index", ["aaaa bbbb", "aabb abab", "bbaa abba"])
    assert not index.calibration.confidences
    nothing, known = index.search("zzzz xxxx"), index.search("aaaa bbbb")
    assert nothing[0].score == 0 and nothing.answer == "elsewhere"
    assert known[0].score > 0 and known.answer is None
    assert index.search("zzzz xxxx", mode="dense").answer is None


def test_without_a_word_of_the_query_or_others_to_compare_with_a_hit_is_not_sure(tmp_path):
    texts = passages(80)
    index = build(tmp_path / "index", texts)
    query = texts[7].split(".")[1]
    assert index.search(query).answer == "sure"
    assert index.search("".join(query.split())).answer in ("unlikely", "elsewhere")
    weak = "abgh " + texts[9].split()[0]
    some = index.search(weak, where={"id": {"in": ["d9", "d10"]}})
    assert some[0].score < index.calibration.confidences["none"].cut and some.answer == "perhaps"


def test_what_many_documents_match_as_well_is_less_sure(tmp_path):
    """A copy of the first hit takes nothing from it, another document does; the number of hits that
    are asked for and a least score change nothing.
    """
    texts = passages(80)
    index = build(tmp_path / "index", texts)
    half, slope, _ = index.calibration.confidences["none"]

    def sure(hit, other):
        return 1 / (1 + np.exp(-slope * (hit.score - OTHER * other.score - half)))

    query = texts[7].split(".")[1]
    hits = index.search(query, 20)
    best_others = [hits[1], *[hits[0]] * 19]
    for hit, other in zip(hits, best_others, strict=True):
        assert hit.confidence == pytest.approx(sure(hit, other))
    assert index.search(query, 1)[0].confidence == hits[0].confidence
    assert index.search(query, min_score=hits[0].score)[0].confidence == hits[0].confidence
    index.add([Document("copy", f"{texts[7]} {texts[7].split()[0]}")])
    first, second, *_ = again = index.search(query, 20)
    assert {first.id, second.id} == {"d7", "copy"}
    assert min(first.confidence, second.confidence) > again[2].confidence
    assert first.confidence == pytest.approx(sure(first, again[2]))


def test_what_is_said_of_an_answer_follows_the_first_confidence():
    def said(*confidences):
        return Hits(Hit("d", 0.5, "", "", confidence=c) for c in confidences).answer

    assert said(SURE + 0.01, 0.0) == "sure"
    assert said(SURE, 0.9) == said(PERHAPS + 0.01) == "perhaps"
    assert said(PERHAPS) == said(1e-9) == "unlikely" and said(0.0) == "elsewhere"
    assert said(None) is said() is None


def test_an_index_is_cut_at_a_score_and_says_what_gave_it(tmp_path):
    texts = passages(80)
    index = build(tmp_path / "index", texts, keep_tokens=True)
    known = index.calibration.confidences
    assert set(known) == {"none", "late-interaction"}
    cuts = [f"{known[how].cut:.2f}" for how in ("none", "late-interaction")]
    assert "score below {} and, re-ranked, below {}".format(*cuts) in index.calibration.describe()
    query = " ".join(texts[7].split()[:6])
    for rerank in (None, "late-interaction"):
        hits = index.search(query, rerank=rerank, explain=True)
        sure = [hit.confidence for hit in hits]
        assert sure == sorted(sure, reverse=True) and 0 < sure[-1] < sure[0] < 1
        c = 0.75 * index.calibration.rule.weight
        for hit in hits:
            why = hit.explanation
            score = why.weight * why.vectors + (1 - why.weight) * (why.words or 0)
            if rerank:
                score = (score + c * why.tokens) / (1 + c)
            assert why.length == 1  # of one passage
            assert hit.score == pytest.approx(score, abs=1e-5)
        least = hits[3].score
        cut = index.search(query, rerank=rerank, min_score=least)
        assert [hit.id for hit in cut] == [hit.id for hit in hits if hit.score >= least]
    assert index.search(query, min_score=1.1) == []
    dense = index.search(query, mode="dense", explain=True)
    assert all(hit.explanation.vectors == pytest.approx(hit.score) for hit in dense)
    assert dense[0].confidence is None
    words = index.search(query, mode="lexical", explain=True)
    assert all(hit.explanation.words == pytest.approx(hit.score) for hit in words)
    with pytest.raises(RevelaError, match="minimum score must be a number"):
        index.search(query, min_score=float("nan"))
    again = Index.open(index.folder, encoder=Letters())
    assert again.search(query)[0].confidence == index.search(query)[0].confidence


def titled(count: int, size: int, seed: int = 0) -> list[Document]:
    """Documents of ``size`` passages that share the words of title and document."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        own = rng.choice(list("abcdefgh"), 3, replace=False)
        words = ["".join(rng.choice(own, 4)) for _ in range(6)]
        lines = [" ".join(rng.choice(words, 6)).capitalize() for _ in range(6 * size)]
        title = f"about {' '.join(words[:3])} case{i:03}"
        made.append(Document(f"d{i}", ". ".join(lines) + ".", title.replace("0", "o")))
    return made


def by_a_loop(test, texts, names):
    """Of each query: its place, which rows are of its document, and the scores of all rows by
    vectors and by words, without what the query was taken from; none by vectors if they do not find
    its document with that either.
    """
    places, rests, whole = test._places.tolist(), test._rests, LETTERS.encode_passages(texts)
    rights = [np.array([name == names[place] for name in names]) for place in places]
    encoded = LETTERS.encode_queries(test._queries)
    found = [right[np.argmax(whole @ q)] for right, q in zip(rights, encoded, strict=True)]
    vectors = whole.copy()
    for place, rest, is_found in zip(places, rests, found, strict=True):
        if is_found:
            (vectors[place],) = LETTERS.encode_passages([rest])
    without = dict(zip(places, rests, strict=True))
    left = [without.get(i, text) for i, text in enumerate(texts)]
    bm25 = BM25(left, "none")
    each = zip(places, rights, test._queries, encoded, found, strict=True)
    for place, right, query, vector, is_found in each:
        (indices,), (values,) = bm25.top_k([query], len(left))
        words = np.zeros(len(left))
        words[indices] = values / max_bm25(bm25, query)
        yield place, right, is_found, vectors @ vector, words


def test_a_hit_of_the_same_document_is_right_and_no_query_is_of_a_title(tmp_path):
    """Against a loop over the rows of an index of titled documents of three passages."""
    docs = titled(60, 3)
    index = letters.build(tmp_path / "index", docs, language="none", chunk_words=36)
    rows = index.table.sample("passage", "title", "id", "vector")
    passages, titles, names = (rows[name].to_pylist() for name in ("passage", "title", "id"))
    assert len(passages) > 150
    test = SentenceTest(passages, "none", titles=titles, documents=names)
    for place, query, rest in zip(test._places, test._queries, test._rests, strict=True):
        assert titles[place] in rest and not {*query.lower().split()} & {"about"}
    by_words = by_vectors = by_row = 0
    for place, right, is_found, cosines, scores in by_a_loop(test, passages, names):
        by_vectors += bool(is_found and right[int(np.argmax(cosines))])
        by_words += bool(scores[right].max() > scores[~right].max())
        by_row += bool(scores[place] > np.delete(scores, place).max())
    found = index.calibration
    counts = len(test._queries), by_words, by_vectors
    assert (found.queries, found.words, found.vectors) == counts
    assert by_words > 1.3 * by_row, "siblings share the title and the words"


def test_the_score_to_cut_at_is_of_what_does_not_answer():
    """The other passages of a query's document answer it, and do not raise the score."""
    passages, titles, names = [], [], []
    for document in titled(60, 3):
        for piece in document.text.split(". ", 17)[::6]:
            passages.append(f"{document.title} {piece}. {piece.split()[0]} {piece}.")
            titles.append(document.title)
            names.append(document.id)
    about = dict(titles=titles, documents=names)
    test = SentenceTest(passages, "none", **about)
    measured = measure(passages, scored=True, **about)
    firsts = []
    for _, right, _, cosines, words in by_a_loop(test, passages, names):
        others = np.flatnonzero(~right).tolist()
        shares = {row: float(words[row]) for row in others if words[row]}
        fused = fuse_scores({row: float(cosines[row]) for row in others}, shares, measured.rule)
        best = dict[str, float]()
        for row, score in fused.items():
            best.setdefault(names[row], score)
        firsts.append([*best.values()][:2])
    assert len(firsts) > 100
    wanted = Confidence.from_wrong_hits(np.array(firsts))
    assert measured.confidences["none"] == pytest.approx(wanted, rel=1e-3)


def test_docstrings_are_the_queries_of_code():
    """A function is asked for by its docstring, which it loses; words may then count less."""
    texts = passages(60)
    bodies = [f"    {text.lower().replace('.', '').replace(' ', '')} = a" for text in texts]
    code = [
        f'def f{i}(a):\r\n    """{text}"""\r\n{body}'
        for i, (text, body) in enumerate(zip(texts, bodies, strict=True))
    ]
    code[7] = "\n".join(f"    {line}" for line in code[7].splitlines())  # a method
    titled = [f"module.py > f{i} {text}" for i, text in enumerate(code)]
    titles = [f"module.py > f{i}" for i in range(60)]
    drawn, docstrings = sentence_queries(titled, 60, titles)
    assert len(drawn) == docstrings == 60
    assert drawn[3] == (" ".join(texts[3].split()), f"module.py > f3 def f3(a):\r\n{bodies[3]}")
    assert drawn[7][1].split() == f"module.py > f7 def f7(a): {bodies[7]}".split()
    assert sentence_queries(texts, 60)[1] == 0

    found = measure(titled, titles=titles)
    assert found.queries > 50 and found.least == 0
    assert found.ratio == found.lexical_to_dense_ratio < 1
    mixed = measure([*titled[:10], *texts[:50]], titles=[*titles[:10], *[""] * 50])
    assert mixed.least == 1, "most of its queries are sentences"


def test_the_chance_is_the_mean_cosine_of_queries_and_what_does_not_answer_them():
    """A corpus of one topic: passages are more like one another than questions are like them."""

    class Asked(Letters):
        def encode_queries(self, texts, progress=False):
            turned = self.encode_passages(texts) - 0.2
            return turned / np.linalg.norm(turned, axis=1, keepdims=True)

    texts = passages(60)
    test, vectors = SentenceTest(texts, "none"), Asked().encode_passages(texts)
    found = test(Asked(), vectors)
    queries = Asked().encode_queries(test._queries)
    found_Q = test._right_QN[np.arange(len(queries)), (queries @ vectors.T).argmax(axis=1)]
    left, rests = vectors.copy(), Asked().encode_passages(test._rests)
    left[test._places[found_Q]] = rests[found_Q]
    cosines = (queries @ left.T)[~test._right_QN]
    assert found.chance == pytest.approx(np.mean(cosines), abs=1e-5)
    assert found.chance < chance_of(vectors) - 0.1


def test_the_chance_is_measured_where_nothing_else_can_be():
    texts = ["one two", "three", "four five"]
    vectors = LETTERS.encode_passages(texts)
    assert measure(texts).rule == (1, chance_of(vectors), 0)
    assert chance_of(vectors) > 0.1


def test_a_passage_that_is_nearly_the_same_is_right():
    texts = passages(60)
    twice = [*texts, *(text.replace(".", "!") for text in texts)]
    found = measure(twice, queries=30)
    assert found.queries == 30 and found.words > 0.8 * 30, "the other has the sentence still"


def test_the_same_text_in_another_form_is_no_wrong_hit():
    """Two passages in one, with other marks: as a PDF of a page is cut."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 9)) for _ in range(60 * 18)]
    lines = [" ".join(words[i : i + 6]).capitalize() for i in range(0, len(words), 6)]
    texts = [". ".join(lines[i : i + 3]) + "." for i in range(0, len(lines), 3)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    other = [", ".join(pair).replace(". ", ", ") for pair in pairs]
    both = (measure(given, queries=60, scored=True) for given in (texts, [*texts, *other]))
    alone, with_other = (measured.confidences["none"].half for measured in both)
    assert with_other < 1.2 * alone


def test_an_embedder_that_knows_nothing_is_not_trusted_with_records():
    """A directory: a record is a few words, of which no sentence can be removed."""
    rng = np.random.default_rng(0)
    names = ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(600)]
    records = [f"{names[i]} {names[300 + i]} room {i} floor {i % 7}" for i in range(300)]
    blind = measure(records, Blind())
    seeing = measure(records)
    assert blind.queries >= FEW and blind.words > 0.9 * blind.queries
    assert blind.rule.squared_ratio > 2 * seeing.rule.squared_ratio
    assert seeing.vectors > blind.vectors + 20
    scored = measure(records, Blind(), scored=True)
    assert scored.confidences == {}, "halves of records say nothing of the scores of questions"


def test_a_department_is_found_among_records_by_its_name(tmp_path):
    places = ["财务部", "市场部", "人事部", "技术部", "法务部", "采购部", "客服部", "行政部"]
    people = [f"{chr(0x4E00 + 7 * i)}{chr(0x5E00 + 3 * i)}" for i in range(300)]
    texts = [f"{name} {places[i % 8]} 电话 {8000 + i}" for i, name in enumerate(people)]
    index = build(tmp_path / "index", texts, Blind())
    wanted = {f"d{i}" for i in range(0, 300, 8)}
    hits = [hit.id for hit in index.search("财务部", 10)]
    assert len(hits) == 10 and {*hits} <= wanted


def test_a_book_alone_is_judged_by_its_passages():
    texts = passages(60)
    assert measure(texts, documents=["book"] * 60) == measure(texts)
