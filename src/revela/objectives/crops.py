"""Random crops of a text, for contrastive training (Contriever; Izacard et al., TMLR 2022)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from revela.types import Chunk

MIN_WORDS = 3


def windows(chunks: Iterable[Chunk], words: int) -> Iterator[Chunk]:
    """Neighbouring chunks of a document joined, up to so many words: what crops are taken from."""
    document, parts, total = -1, list[str](), 0
    for chunk in chunks:
        size = len(chunk.text.split())
        if parts and (chunk.document != document or total + size > words):
            yield Chunk(document, "".join(parts))
            parts, total = [], 0
        document, total = chunk.document, total + size
        parts.append(chunk.text)
    if parts:
        yield Chunk(document, "".join(parts))


def crop(text: str, least: float, most: float, deletion: float, rng: random.Random) -> str:
    """A random run of a text's words, some of them left out.

    Args:
        text: words are separated by white space.
        least, most: the run's share of the words is uniform between these; it has ``MIN_WORDS``
            words at least.
        deletion: chance of each word to be left out.
    """
    words = text.split()
    length = min(len(words), max(MIN_WORDS, round(rng.uniform(least, most) * len(words))))
    start = rng.randint(0, len(words) - length)
    run = words[start : start + length]
    return " ".join([w for w in run if rng.random() >= deletion] or run)
