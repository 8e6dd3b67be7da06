"""Measure how well words and vectors find the documents of a corpus, without labels.

A few words of a sentence should find the document that the sentence was removed from, once by BM25
and once by vectors. An embedder that was not trained for a language or a subject fails where words
succeed, and the fusion (fusion.py) follows the side that succeeds. The hits of the same queries
among passages that do not answer them give the confidence in other hits (calibration.py).

Shapes: Q queries, N passages, K candidates of a query, D width of a vector.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela.errors import QueryError
from revela.ranking.bm25 import BM25, term_weights
from revela.ranking.calibration import Calibration, confidence_from
from revela.ranking.exact import rankings_of, top_k
from revela.ranking.fusion import (
    DEPTH,
    Owner,
    Scores,
    as_chance,
    best_chunks,
    by_length,
    chance_of,
)
from revela.ranking.late_interaction import encode_packed, match_by_tokens
from revela.ranking.steps import (
    ALIKE,
    MemoryStore,
    SearchOptions,
    runner_up,
)
from revela.text.analyzer import Analyzer, detect
from revela.text.code import without_docstring
from revela.text.sentences import ENDED, sentences
from revela.text.words import count_words, joined, words
from revela.types import (
    Encoder,
    QueryTokens,
    TokenEncoder,
    Vectors,
    evenly_spaced,
    hash64,
    shortened,
)

QUERIES, FEW = 400, 100  # maximum; of sentences, if there are fewer, parts of passages are added
FEW_TOKENS = 50  # queries and passages that the chance of token vectors is measured on
QUERY_WORDS = 12  # maximum
MIN_WORDS = 4  # of a sentence, of the rest of its passage, and of a record
LONG = 4 * QUERY_WORDS  # words of a text that a piece can be removed from
HELD = 0.7  # least share of a query's terms in a passage that has its sentence, or nearly
LETTERS = 0.8  # minimum share of the characters of prose, without spaces
MIN_WRONG = 20  # hits where nothing answers that a confidence needs
# Links, images, fenced code, and lines that begin as headings, quotations and tables do.
_MARKUP = re.compile(r"://|\]\(|```|^\s*[#>|]", re.MULTILINE)
_CODE = re.compile(r"[{}<>=_*|\\]|\(\)|[;)]$")  # in a piece of a text without sentences


class Example(NamedTuple):
    """A query, the index of the passage that answers it, and the rest of that passage.

    ``is_docstring``: the query is a docstring of the rest, so it is like a user's question.
    """

    place: int
    query: str
    rest: str
    is_docstring: bool = False


class SentenceTest:
    """A test of queries taken from passages. Call it with an encoder and the passages' vectors.

    Args:
        passages: each begins with its title.
        language: as for ``BM25``.
        queries: maximum number of queries.
        titles: the title of each passage, from which no query is taken; by default none.
        documents: the document of each passage. A hit is right if it is of the query's document, or
            much like its passage; a query that cannot fail is left out. By default each passage is
            one.
        lengths: the number of passages of each passage's document, which may not all be here; by
            default 1.
    """

    def __init__(
        self,
        passages: Sequence[str],
        language: str,
        queries: int = QUERIES,
        *,
        titles: Sequence[str] = (),
        documents: Sequence[object] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        documents = documents or range(len(passages))
        examples = list(sentence_queries(passages, queries, titles, documents))
        of_sentences = len(examples)
        if of_sentences < min(FEW, queries):
            used = {example.place for example in examples}
            examples += part_queries(passages, queries - of_sentences, titles, used)
        self._size, self._words, self._queries = len(passages), 0, list[str]()
        # Of sentences, W / V below 1 says little (fusion.py).
        of_code = sum(example.is_docstring for example in examples)
        self._least = 0.0 if 2 * of_code > len(examples) else 1.0
        if not examples:
            return
        rests = {example.place: example.rest for example in examples}
        self._texts = [rests.get(i, passage) for i, passage in enumerate(passages)]
        analyze = Analyzer(detect(self._texts) if language == "auto" else language)
        terms = [analyze(text) for text in self._texts]
        self._bm25 = BM25(self._texts, analyze.language, terms)
        places_Q = np.array([example.place for example in examples], np.int64)
        right_QN = _same_documents(places_Q, documents)
        self._owners = [*map(Owner, map(str, documents), lengths or [1] * len(passages))]
        self._terms = [
            frozenset(analyze(passage) if i in rests else terms[i])
            for i, passage in enumerate(passages)
        ]
        right_QN |= _alike(places_Q, self._terms)
        can_fail = np.flatnonzero(~right_QN.all(axis=1))
        self._places, self._right_QN = places_Q[can_fail], right_QN[can_fail]
        self._queries = [examples[i].query for i in can_fail]
        # Of the first queries; of the others, the passages are as they were.
        self._rests = [examples[i].rest for i in can_fail if i < of_sentences]
        self._matching = rows_QK, scores_QK = self._bm25.top_k(self._queries, DEPTH)
        right_QK = np.take_along_axis(self._right_QN, rows_QK, axis=1)
        best_Q, others_Q = (
            np.where(of, scores_QK, 0).max(axis=1, initial=0) for of in (right_QK, ~right_QK)
        )
        self._words = int((best_Q > others_Q).sum())

    def __call__(
        self,
        encoder: Encoder,
        vectors_ND: Vectors,
        *,
        by_tokens: bool = False,
        scored: bool = False,
        packed: Sequence[bytes] = (),
    ) -> Calibration:
        """Measure the unit vectors (N, D) of the passages; the encoder's may be wider.

        Args:
            by_tokens: also measure token vectors.
            scored: also measure the confidence by score, if there are enough sentences (halves of
                passages score higher than questions do).
            packed: signs of the passages' tokens, to measure the confidence after re-ranking, too.
        """
        fitted = getattr(encoder, "words_to_vectors", 1.0)
        least = fitted if fitted > 1 else self._least
        measured = Calibration(passages=self._size, least=least)
        if not self._queries:
            return replace(measured, chance=chance_of(vectors_ND))
        vectors_ND, signs, tokens = vectors_ND.copy(), list(packed), list[QueryTokens]()
        width, changed = vectors_ND.shape[1], self._places[: len(self._rests)]
        if packed and isinstance(encoder, TokenEncoder):
            tokens = encoder.query_tokens(self._queries)
            queries_QD = np.array([query.vector for query in tokens])
            if self._rests:
                rests_RD, rests = encode_packed(encoder, self._rests)
                vectors_ND[changed] = shortened(rests_RD, width)
                for place, rest in zip(changed, rests, strict=True):
                    signs[place] = rest
        else:
            queries_QD = encoder.encode_queries(self._queries)
            if self._rests:
                vectors_ND[changed] = shortened(encoder.encode_passages(self._rests), width)
        queries_QD = shortened(queries_QD, width)
        nearest = top_k(queries_QD, vectors_ND, DEPTH)
        first_Q1 = nearest[0][:, :1]
        right = int(np.take_along_axis(self._right_QN, first_Q1, axis=1).sum())
        wrong_cosines = (queries_QD @ vectors_ND.T)[~self._right_QN]
        measured = replace(
            measured,
            queries=len(self._queries),
            words=self._words,
            vectors=right,
            chance=as_chance(float(wrong_cosines.mean(dtype=np.float64))),
        )
        if by_tokens and isinstance(encoder, TokenEncoder):
            with suppress(QueryError):  # a static model has none
                measured = replace(measured, tokens=self._chance_of_tokens(encoder, tokens, signs))
        if not scored:
            return measured
        store = MemoryStore(self._bm25, vectors_ND, measured.rule, signs)
        asked = self._queries, queries_QD, *self._unanswered(nearest)
        wrong = {"hybrid": store.rankings(*asked)}
        if tokens:
            by_tokens_too = SearchOptions(rerank="late-interaction")
            wrong["late-interaction"] = store.rankings(*asked, by_tokens_too, tokens)
        firsts = {how: [self._first_two(f) for f in found if f] for how, found in wrong.items()}
        scores = {
            how: confidence_from(np.array(f)) for how, f in firsts.items() if len(f) >= MIN_WRONG
        }
        return replace(measured, scores=scores)

    def _first_two(self, found: Scores) -> tuple[float, float]:
        """The scores of the first document and of the best other one."""
        owner_of = self._owners.__getitem__
        scores = by_length(best_chunks(found, owner_of), owner_of)
        return next(iter(scores.values())), runner_up(scores, self._terms.__getitem__)

    def _chance_of_tokens(
        self, encoder: TokenEncoder, tokens: Sequence[QueryTokens], signs: Sequence[bytes]
    ) -> float:
        """The mean m (late_interaction.py) of a few queries and passages that are not related."""
        rows, queries = evenly_spaced(len(self._texts), FEW_TOKENS), self._queries[:FEW_TOKENS]
        if signs:
            some = [signs[row] for row in rows]
        else:
            _, some = encode_packed(encoder, [self._texts[row] for row in rows])
        read = tokens[:FEW_TOKENS] or encoder.query_tokens(queries)
        terms, idf = self._bm25.terms, self._bm25.idf
        weights = [term_weights(query, terms, idf) for query in queries]
        found = [match_by_tokens(q, some, own) for q, own in zip(read, weights, strict=True)]
        return as_chance(float(np.mean(found)))

    def _unanswered(
        self, nearest: tuple[NDArray[np.int64], Vectors]
    ) -> tuple[list[Scores], list[Scores]]:
        """The wrong hits by vectors and by words of each query that is a sentence. Passages with
        most words of the query are left out: they may be the same text in another form.
        """
        found = list[Scores](), list[Scores]()
        asked = zip(
            self._queries,
            self._right_QN,
            rankings_of(*nearest),
            rankings_of(*self._matching),
            strict=True,
        )
        for query, right_N, *sides in islice(asked, len(self._rests)):
            sought = {*self._bm25.terms(query)}
            wrong = {
                row
                for row in chain(*sides)
                if not right_N[row] and len(sought & self._terms[row]) < HELD * len(sought)
            }
            near, match = ({r: s for r, s in side.items() if r in wrong} for side in sides)
            found[0].append(near)
            found[1].append({row: score for row, score in match.items() if near and score > 0})
        return found


def sentence_queries(
    passages: Sequence[str],
    max_queries: int,
    titles: Sequence[str] = (),
    documents: Sequence[object] = (),
) -> Iterator[Example]:
    """Queries of some words of a sentence, with the passage without that sentence; in code of a
    docstring.

    Only natural sentences that no other document has are taken; from a long text without any (Thai)
    a piece. The draw depends on the texts, not on their order.
    """
    documents = documents or range(len(passages))
    texts = _without_titles(passages, titles)
    found = [[s for s in sentences(text) if is_natural(s)] for text in texts]
    owners = defaultdict[str, set[object]](set)
    for document, natural in zip(documents, found, strict=True):
        for sentence in natural:
            owners[joined([sentence])].add(document)
    count = 0
    for place, rng in _draw(passages):
        if count == max_queries:
            return
        text = texts[place]
        if "def " in text and (documented := without_docstring(text)) is not None:
            title, (query, rest) = passages[place][: -len(text)], documented
            count += 1
            yield Example(place, query, title + rest, is_docstring=True)
            continue
        own = [s for s in found[place] if len(owners[joined([s])]) == 1]
        if len(own) > 1:
            sentence = rng.choice(own)
        elif count_words(text) >= LONG and _is_prose(text):
            sentence = _piece(text, rng, QUERY_WORDS)
            if _CODE.search(sentence.strip()):
                continue
        else:
            continue
        rest = passages[place].replace(sentence, " ", 1)
        if count_words(rest) >= MIN_WORDS:
            count += 1
            yield Example(place, joined([_piece(sentence, rng, QUERY_WORDS)]), rest)


def part_queries(
    passages: Sequence[str], max_queries: int, titles: Sequence[str], used: set[int]
) -> Iterator[Example]:
    """Queries of half a passage, which is not removed: for records and other texts of one sentence.
    Without the half, they would lose what they are about. Passages in ``used`` are left out.
    """
    texts, count = _without_titles(passages, titles), 0
    for place, rng in _draw(passages):
        if count == max_queries:
            return
        half = min(QUERY_WORDS, len(words(texts[place])) // 2)
        if 2 * half >= MIN_WORDS and place not in used:
            count += 1
            yield Example(place, joined([_piece(texts[place], rng, half)]), passages[place])


def is_natural(sentence: str) -> bool:
    """Whether a piece of ``sentences`` is a sentence of prose, not a heading, a link, a row of a
    table or a line of code.

    >>> is_natural("Bees dance to show the way."), is_natural("## How bees dance")
    (True, False)
    """
    text = sentence.strip()
    is_whole = count_words(text) >= MIN_WORDS and ENDED.search(text) is not None
    return is_whole and _MARKUP.search(text) is None and _is_prose(text, "LMN")


def _is_prose(text: str, kinds: str = "LM") -> bool:
    """Whether a text is mostly letters and marks, which code and tables of numbers are not."""
    characters = "".join(text.split())
    count = sum(unicodedata.category(character)[0] in kinds for character in characters)
    return count >= LETTERS * len(characters)


def _draw(passages: Sequence[str]) -> Iterator[tuple[int, random.Random]]:
    """(index, random generator) of each passage, in an order that depends on their texts."""
    seeds = [hash64(passage) for passage in passages]
    for place in sorted(range(len(passages)), key=seeds.__getitem__):
        yield place, random.Random(seeds[place])


def _without_titles(passages: Sequence[str], titles: Sequence[str]) -> list[str]:
    titles = titles or [""] * len(passages)
    pairs = zip(passages, titles, strict=True)
    return [passage[len(title) + 1 :] if title else passage for passage, title in pairs]


def _piece(text: str, rng: random.Random, most: int) -> str:
    """Consecutive words of a text, at most so many."""
    pieces = words(text)
    size = min(most, len(pieces))
    start = rng.randrange(len(pieces) - size + 1)
    return "".join(pieces[start : start + size])


def _same_documents(places_Q: NDArray[np.int64], documents: Sequence[object]) -> NDArray[np.bool_]:
    """(Q, N): whether each passage is of the query's document. In a document with over half of all
    passages, such as a single book, each passage counts as a document.
    """
    sizes = Counter(documents)
    units = [(d, i if 2 * sizes[d] > len(documents) else -1) for i, d in enumerate(documents)]
    number = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
    numbers_N = np.array([number[unit] for unit in units], np.int64)
    return np.equal(numbers_N[places_Q, None], numbers_N)


def _alike(places_Q: NDArray[np.int64], sets: Sequence[frozenset[str]]) -> NDArray[np.bool_]:
    """(Q, N): whether each passage has nearly the terms of the query's passage (``are_alike``)."""
    holders = defaultdict[str, list[int]](list)
    for row, found in enumerate(sets):
        for term in found:
            holders[term].append(row)
    sizes_N = np.array([len(found) for found in sets])
    alike_QN = np.zeros((len(places_Q), len(sets)), np.bool_)
    for own, place in zip(alike_QN, places_Q, strict=True):
        rows = [row for term in sets[place] for row in holders[term]]
        shared_N = np.bincount(np.array(rows, np.int64), minlength=len(sets))
        own[:] = shared_N >= ALIKE * np.maximum(sizes_N + sizes_N[place] - shared_N, 1)
    return alike_QN
