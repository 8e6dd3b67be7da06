"""Take a query for each chunk from the text: its title, one of its sentences, or a docstring.

The sentence is removed from its chunk (the inverse cloze task; Lee et al., ACL 2019), so that
matching words does not suffice. The best queries were written for readers: docstrings and titles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from revela.text.code import documented_functions
from revela.text.sentences import sentences
from revela.text.words import count_terms, splits_word, terms
from revela.types import Chunk, Document, hash64

MIN_QUERY_WORDS, MAX_QUERY_WORDS = 4, 40
SATURATION = 1.2  # BM25's k1


def query_hash(query: str) -> int:
    """A hash of 63 bits; -1 for no query."""
    return hash64(query) >> 1 if query else -1


def with_titles(chunks: Iterable[Chunk], documents: Sequence[Document]) -> Iterator[Chunk]:
    """Each chunk with its document's title as query, removed from its text."""
    for chunk in chunks:
        title = documents[chunk.document].title
        text = _without(chunk.text, title) if title else chunk.text
        yield replace(chunk, text=text, query=title)


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
    n_chunks = len(chunks)

    def weight(sentence: str, counts: Counter[str]) -> float:
        words = set(terms(sentence.lower()))
        rarity = {w: (n_chunks - frequency[w] + 0.5) / (frequency[w] + 0.5) for w in words}
        idf = {w: math.log(1 + rarity[w]) for w in words}
        # fsum does not depend on the order of the set, which differs between processes.
        return math.fsum(idf[w] * counts[w] / (counts[w] + SATURATION) for w in words) / len(words)

    for chunk in chunks:
        counts = Counter(terms(chunk.text.lower()))
        best = max(_candidates(chunk.text), key=lambda s: weight(s, counts), default="")
        yield _with_sentence(chunk, best)


def _candidates(text: str) -> list[str]:
    """Sentences that can be the query; none if too little text would be left."""
    all_sentences = sentences(text)
    if len(all_sentences) < 2 or count_terms(terms(text)) < 2 * MIN_QUERY_WORDS:
        return []
    return [s for s in all_sentences if MIN_QUERY_WORDS <= count_terms(terms(s)) <= MAX_QUERY_WORDS]


def _with_sentence(chunk: Chunk, sentence: str) -> Chunk:
    if not sentence:
        return chunk
    return replace(chunk, text=_without(chunk.text, sentence), query=" ".join(sentence.split()))


def _without(text: str, part: str) -> str:
    """Remove the first occurrence of ``part`` that begins and ends between words, unless nothing
    else would be left.
    """
    start = text.find(part)
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
    for document, part in groupby(chunks, key=lambda chunk: chunk.document):
        source = documents[document]
        functions = list(documented_functions(source.text)) if source.kind == "code" else []
        if functions:
            yield from (Chunk(document, function, docstring) for docstring, function in functions)
        elif source.title:
            yield from with_titles(part, documents)
