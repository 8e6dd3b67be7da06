"""Find near-duplicate documents, which share most word sequences with an earlier one.

Every run of five words is a shingle. rensa's R-MinHash turns a document's set of shingles into a
sketch; the share of equal numbers in two sketches estimates the Jaccard similarity of the sets,
with a standard deviation of 0.035 at 0.8. Only documents whose sketches agree in a whole band of
numbers are compared.

Memory: 2 to 4 kB per document, whatever its length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from revela.terminal import progress_bar
from revela.text.spool import ArrowList
from revela.text.words import terms
from revela.types import Document

RUN = 5  # words per shingle
# Minimum shingles: short texts, such as lines of code, can share words and differ in meaning.
SHORTEST = 16
SKETCH = 128  # numbers per document
SEED = 42
FOUND = 0.95  # probability that two documents of the given similarity share a band
PART = 2**20  # characters whose shingles are made at once, to bound memory


def near_duplicates(
    documents: ArrowList[Document], similarity: float, never: Collection[int] = ()
) -> dict[int, int]:
    """Row of each document to drop -> row of an earlier, similar document that is kept. Rows in
    ``never`` are never dropped, and come before all others.

    ``similarity`` is the minimum Jaccard similarity of two texts' shingles, 0 to 1. Titles are
    ignored; texts with fewer than ``SHORTEST`` shingles are never duplicates.

    >>> from revela.text.spool import arrow_list
    >>> text = " ".join(f"word{i}" for i in range(100))
    >>> documents = [Document("a", text), Document("b", "Other words."), Document("c", text + "!")]
    >>> near_duplicates(arrow_list(Document, documents), 0.8)
    {2: 0}
    """
    from rensa import RMinHash, RMinHashDeduplicator

    kept = RMinHashDeduplicator(similarity, SKETCH, True, bands_of(similarity), SEED)
    dropped: dict[int, int] = {}
    order = sorted(range(len(documents)), key=lambda row: row not in never)
    for row in progress_bar("near-duplicates", "document", order, len(order)):
        sketch, count = RMinHash(SKETCH, SEED), 0
        for part in shingles(documents.value(row, "text")):
            sketch.update(part)
            count += len(part)
        if count < SHORTEST:
            continue
        if not kept.add(str(row), sketch) and row not in never:
            dropped[row] = min(map(int, kept.get_duplicates(sketch)))
    return dropped


def bands_of(similarity: float) -> int:
    """The smallest number of bands with which two documents of this similarity share a band with
    probability ``FOUND``.

    The probability is 1 - (1 - s^r)^b for b bands of r numbers (Broder, 1997; Indyk & Motwani,
    1998). Fewer bands give fewer pairs to compare.
    """
    bands = 1
    while bands < SKETCH and 1 - (1 - similarity ** (SKETCH // bands)) ** bands < FOUND:
        bands *= 2
    return bands


def shingles(text: str) -> Iterator[list[str]]:
    """The runs of five words in each ``PART`` of a text, in lower case, without punctuation."""
    for start in range(0, len(text), PART):
        words = terms(text[start : start + PART].lower())
        yield [" ".join(run) for run in zip(*(words[i:] for i in range(RUN)), strict=False)]
