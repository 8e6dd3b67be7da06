"""Queries taken from documents, without labels: titles, docstrings, sentences and words of them.

Training reads a chunk and its query as a pair (``with_...``). ``sentence_queries`` and
``part_queries`` test words and vectors on a text (ranking/sentence_test.py). The label-free check
(evaluation/label_free.py) asks for documents by titles and docstrings, too.

A sentence or docstring is removed from its passage (the inverse cloze task; Lee et al., ACL 2019),
so that matching words is not enough. The best queries are those that authors wrote for readers:
docstrings and titles.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from revela.ranking.bm25 import K1, idf
from revela.text.code import documented_functions, without_docstring
from revela.text.sentences import ENDED, sentences
from revela.text.words import count_terms, count_words, joined, splits_word, terms, words
from revela.types import Chunk, Document, hash64, without_title

MIN_QUERY_WORDS, MAX_QUERY_WORDS = 4, 40
DRAWN_WORDS = 12  # maximum of a query of ``sentence_queries`` and ``part_queries``
MIN_WORDS = 4  # of a natural sentence, of the rest of its passage, and of a record
LONG = 4 * DRAWN_WORDS  # words of a text that a piece can be removed from
LETTERS = 0.8  # minimum share of the characters of prose, without spaces
# Links, images, fenced code, and lines that begin as headings, quotations and tables do.
_MARKUP = re.compile(r"://|\]\(|```|^\s*[#>|]", re.MULTILINE)
_CODE = re.compile(r"[{}<>=_*|\\]|\(\)|[;)]$")  # in a piece of a text without sentences


def query_hash(query: str) -> int:
    """A hash of 63 bits; -1 for no query."""
    return hash64(query) >> 1 if query else -1


def with_titles(chunks: Iterable[Chunk], documents: Sequence[Document]) -> Iterator[Chunk]:
    """Each chunk with its document's title as query, removed from its text."""
    for chunk in chunks:
        title = documents[chunk.document].title
        yield replace(chunk, text=_without(chunk.text, title), query=title)


def with_first_sentences(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Each chunk with its first sentence as query, removed from its text.

    >>> passage = "The mitral valve has two leaflets. It lies in the left half of the heart."
    >>> [(c.query, c.text) for c in with_first_sentences([Chunk(0, passage)])]
    [('The mitral valve has two leaflets.', 'It lies in the left half of the heart.')]
    """
    for chunk in chunks:
        yield _with_sentence(chunk, next(iter(_candidates(chunk.text)), ""))


def with_telling_sentences(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Each chunk with its most telling sentence as query, removed from its text.

    That is the sentence with the highest mean BM25 weight of its words, idf(w) tf / (tf + k1), with
    tf counted in the chunk (Robertson & Zaragoza, 2009).
    """
    frequency = Counter[str]()
    for chunk in chunks:
        frequency.update(set(terms(chunk.text.lower())))
    idf_T = idf(np.array([*frequency.values()], np.int64), len(chunks))
    idf_of = dict(zip(frequency, idf_T.tolist(), strict=True))

    def weight(sentence: str, counts: Counter[str]) -> float:
        words = set(terms(sentence.lower()))
        # fsum does not depend on the order of the set, which differs between processes.
        return math.fsum(idf_of[w] * counts[w] / (counts[w] + K1) for w in words) / len(words)

    for chunk in chunks:
        counts = Counter(terms(chunk.text.lower()))
        best = max(_candidates(chunk.text), key=lambda s: weight(s, counts), default="")
        yield _with_sentence(chunk, best)


def _candidates(text: str) -> list[str]:
    """Sentences that can be the query; none if too little text would remain."""
    all_sentences = sentences(text)
    if len(all_sentences) < 2 or count_terms(terms(text)) < 2 * MIN_QUERY_WORDS:
        return []
    return [s for s in all_sentences if MIN_QUERY_WORDS <= count_terms(terms(s)) <= MAX_QUERY_WORDS]


def _with_sentence(chunk: Chunk, sentence: str) -> Chunk:
    return replace(chunk, text=_without(chunk.text, sentence), query=joined([sentence]))


def _without(text: str, part: str) -> str:
    """Remove the first occurrence of ``part`` that begins and ends between words, unless nothing
    else would remain.
    """
    start = text.find(part) if part else -1
    while start >= 0:
        end = start + len(part)
        if not (splits_word(text, start) or splits_word(text, end)):
            rest = text[:start] + text[end:]
            return rest if rest.strip() else text
        start = text.find(part, start + 1)
    return text


def with_authors_words(chunks: Sequence[Chunk], documents: Sequence[Document]) -> Iterator[Chunk]:
    """Each chunk with its author's words as query: a docstring, a title, or a telling sentence.

    In code with docstrings, the documented functions, without docstrings, replace the chunks.
    """
    zipped = zip(chunks, with_telling_sentences(chunks), strict=True)
    for _, pairs in groupby(zipped, key=lambda pair: pair[0].document):
        plain, telling = zip(*pairs, strict=True)
        yield from list(with_docstrings_or_titles(plain, documents)) or telling


def with_docstrings_or_titles(
    chunks: Iterable[Chunk], documents: Sequence[Document]
) -> Iterator[Chunk]:
    """Chunks with a docstring or a title as query, as in ``with_authors_words``; documents with
    neither are left out.
    """
    for number, part in groupby(chunks, key=lambda chunk: chunk.document):
        if functions := list(with_docstrings(documents[number], number)):
            yield from functions
        elif documents[number].title:
            yield from with_titles(part, documents)


def with_docstrings(document: Document, number: int) -> Iterator[Chunk]:
    """The functions of Python code, each with its docstring as query, removed from its text."""
    if document.kind == "code":
        for docstring, function in documented_functions(document.text):
            yield Chunk(number, function, docstring)


def sentence_queries(
    passages: Sequence[str],
    max_queries: int,
    titles: Sequence[str] = (),
    documents: Sequence[object] = (),
) -> tuple[dict[int, tuple[str, str]], int]:
    """Draw queries of some words of a sentence; from code, docstrings.

    Only natural sentences that no other document has are taken; from a long text without any (Thai)
    a piece. The draw depends on the texts, not on their order.

    Args:
        passages: each begins with its title.
        max_queries: maximum number of queries.
        titles: the title of each passage, from which no query is taken; by default none.
        documents: the document of each passage; by default each passage is one.

    Returns:
        Index of a passage -> the query, and the passage without the sentence, in the order in which
        they were drawn; and the number of docstrings among the queries.
    """
    documents = documents or range(len(passages))
    texts = _without_titles(passages, titles)
    found = [[s for s in sentences(text) if is_natural(s)] for text in texts]
    owners = defaultdict[str, set[object]](set)
    for document, natural in zip(documents, found, strict=True):
        for sentence in natural:
            owners[joined([sentence])].add(document)
    drawn, docstrings = dict[int, tuple[str, str]](), 0
    for i, rng in _draw(passages):
        if len(drawn) == max_queries:
            break
        text, passage = texts[i], passages[i]
        if "def " in text and (documented := without_docstring(text)) is not None:
            query, rest = documented
            drawn[i] = query, passage[: -len(text)] + rest
            docstrings += 1
            continue
        own = [s for s in found[i] if len(owners[joined([s])]) == 1]
        if len(own) > 1:
            sentence = rng.choice(own)
        elif count_words(text) >= LONG and _is_prose(text):
            sentence = _piece(text, rng)
            if _CODE.search(sentence.strip()):
                continue
        else:
            continue
        rest = passage.replace(sentence, " ", 1)
        if count_words(rest) >= MIN_WORDS:
            drawn[i] = joined([_piece(sentence, rng)]), rest
    return drawn, docstrings


def part_queries(
    passages: Sequence[str], max_queries: int, titles: Sequence[str], used: Container[int]
) -> dict[int, tuple[str, str]]:
    """Draw queries of half a passage, as in ``sentence_queries``: for records and other texts of
    one sentence. The half is not removed, because the rest would lose its subject. Passages in
    ``used`` are left out.
    """
    texts, drawn = _without_titles(passages, titles), dict[int, tuple[str, str]]()
    for i, rng in _draw(passages):
        if len(drawn) == max_queries:
            break
        half = min(DRAWN_WORDS, len(words(texts[i])) // 2)
        if 2 * half >= MIN_WORDS and i not in used:
            drawn[i] = joined([_piece(texts[i], rng, half)]), passages[i]
    return drawn


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
    for i in sorted(range(len(passages)), key=seeds.__getitem__):
        yield i, random.Random(seeds[i])


def _without_titles(passages: Sequence[str], titles: Sequence[str]) -> list[str]:
    titles = titles or [""] * len(passages)
    pairs = zip(titles, passages, strict=True)
    return [without_title(*pair) for pair in pairs]


def _piece(text: str, rng: random.Random, most: int = DRAWN_WORDS) -> str:
    """Consecutive words of a text, at most ``most``."""
    pieces = words(text)
    size = min(most, len(pieces))
    start = rng.randrange(len(pieces) - size + 1)
    return "".join(pieces[start : start + size])
