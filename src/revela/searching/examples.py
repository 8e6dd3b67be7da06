"""Example queries of an index: headings of its documents, or else sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from revela.searching.plain_lines import lines_of
from revela.searching.snippets import heading_of
from revela.text.sentences import sentences
from revela.text.words import count_words
from revela.types import Hit, evenly_spaced


def examples_of(hits: Sequence[Hit], most: int = 3) -> list[str]:
    """Example queries: headings that occur once, or else sentences."""
    named = Counter(" ".join(heading_of(hit).rsplit(" > ", 1)[-1].split()) for hit in hits)
    found = [name for name, count in named.items() if count == 1 and _is_natural(name, 2)]
    if len(found) < most:
        lines = (line for hit in hits for line in lines_of(hit.text, hit.id))
        prose = (line.text for line in lines if line.kind == "prose")
        said = (sentence.strip() for text in prose for sentence in sentences(text))
        found += dict.fromkeys(sentence for sentence in said if _is_natural(sentence, 4))
    return [found[i] for i in evenly_spaced(len(found), most)] if found else []


def _is_natural(text: str, least: int) -> bool:
    """Whether a text is some words, and hardly anything but letters."""
    letters = sum(letter.isalpha() or letter.isspace() for letter in text)
    if not text[:1].isalnum() or len(text) > 80:
        return False
    return least <= count_words(text) <= 12 and letters >= 0.9 * len(text)
