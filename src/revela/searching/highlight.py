"""Find the words of a query in a text, to highlight them.

They are found as BM25 finds them (text/analyzer.py): by their stems, and pairs of characters where
words are not spaced. An identifier such as NW-1007 is one word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import regex
from numpy.typing import NDArray

from revela.text.analyzer import ENGLISH_STOP_WORDS, Analyzer
from revela.text.letters import JOINT, LETTER, normalised, wholes

QUERY = 1000  # characters of a query whose words are marked
RARE = 0.25  # of the greatest idf: words below it are not marked, because they are everywhere
# Words of questions that BM25 counts.
QUESTION_WORDS = frozenset([
    *ENGLISH_STOP_WORDS, *"""about am been can could did do does from had has have he her his how i
    its me my our she should so than them us we were what when where which who whom whose why would
    you your""".split()  # noqa: SIM905
])  # fmt: skip
_IDENTIFIER = regex.compile(rf"{LETTER}+(?:{JOINT}{LETTER}+)+", regex.V1)
_NAMES = re.compile(r"\d|[_.@\\]|::")  # a sign of an identifier; well-known and he/she have none
_PART = regex.compile(rf"{LETTER}+", regex.V1)
_ANY_SIGNS = r"(?:[\W_]{1,2}|(?<!\d)|(?!\d))"  # some between digits
_HIRAGANA = re.compile("[\u3041-\u309f]")
_CLUSTER = regex.compile(r"\X")


class Match(NamedTuple):
    """A word of the query in a text."""

    begin: int
    end: int
    term: str
    idf: float


@dataclass(frozen=True)
class HighlightTerms:
    """The words of a query that are marked, and their idf; identifiers are in lower case."""

    analyzer: Analyzer
    terms: dict[str, float]
    identifiers: dict[str, float]
    unstemmed: list[str]  # terms that are the words themselves

    @classmethod
    def of(
        cls, query: str, analyzer: Analyzer, idf: Callable[[Sequence[str]], NDArray[np.float64]]
    ) -> HighlightTerms:
        """The words of a query and their idf, without words that are everywhere."""
        query = normalised(query[:QUERY])
        places, whole = list(analyzer.query_places(query)), wholes(query)
        *found, absent = idf([*(term for *_, term in places), "\0"]).tolist()
        weights = dict(zip(places, found, strict=True))
        names, identifiers = [place[:2] for place in whole], dict[str, float]()
        for name in _IDENTIFIER.finditer(query):
            if _NAMES.search(name[0]):
                names.append(name.span())
                begin, end = name.span()
                inside = (w for (b, e, _), w in weights.items() if begin <= b and e <= end)
                identifiers[name[0].lower()] = sum(inside)
        words, before = dict[str, float](), (-1, -1)
        for i, (begin, end, term) in enumerate(places):
            # Of getFileName the whole; of characters in a row the longest n-grams.
            near = places[max(0, i - 3) : i + 4]
            longer = [(b, e) for b, e, _ in near if e - b > end - begin]
            is_part = any(b <= begin and end <= e for b, e in [*names, *longer])
            if not is_part and before != (begin, end):
                word = query[begin:end].lower()
                others = analyzer.of_query(word) if _PART.fullmatch(word) else []
                words |= dict.fromkeys([term, *others], weights[begin, end, term])
            before = begin, end
        common = QUESTION_WORDS.union(analyzer(" ".join(QUESTION_WORDS)))
        telling = {t: w for t, w in words.items() if t not in common and not _HIRAGANA.search(t)}
        words = telling or words
        least = RARE * max((weight for weight in words.values() if weight < absent), default=0)
        kept = {term: weight for term, weight in words.items() if weight >= least}
        kept |= {place[2]: weights[place] for place in whole}
        unstemmed = [t for b, e, t in places if t in kept and _is_word(t, query[b:e])]
        return cls(analyzer, kept, identifiers, unstemmed)

    def matches(self, text: str) -> list[Match]:
        """The words in a text, in order."""
        plain, spans = _normalised(text)
        found = [
            (begin, end, known, self.terms[known])
            for begin, end, term in self.analyzer.places(plain)
            if (known := self._known(term, plain[begin:end]))
        ]
        for name, weight in self.identifiers.items():
            whole = _with_any_signs(name).finditer(plain)
            found += [(*match.span(), name, weight) for match in whole]
        return sorted(Match(spans[b][0], spans[e - 1][1], term, idf) for b, e, term, idf in found)

    def _known(self, term: str, word: str) -> str:
        """The term of the query that this one of a text is; "" if there is none. Where words are
        not stemmed, as the text is in several languages, one that has up to three letters more or
        less at its end, fewer if it is short, is the same.
        """
        if term in self.terms:
            return term
        if len(term) < 4 or not _is_word(term, word):
            return ""
        for known in self.unstemmed:
            short, long = sorted((known, term), key=len)
            if long.startswith(short) and len(long) - len(short) <= min(3, len(short) - 3):
                return known
        return ""


def _is_word(term: str, word: str) -> bool:
    return term == word.lower() and word.isalpha()


@lru_cache
def _with_any_signs(name: str) -> regex.Pattern[str]:
    """An identifier with any signs between its parts."""
    pattern = _ANY_SIGNS.join(_PART.findall(name))
    return regex.compile(rf"(?<!{LETTER}){pattern}(?!{LETTER})", regex.V1 | regex.IGNORECASE)


def _normalised(text: str) -> tuple[str, Sequence[tuple[int, int]]]:
    """A text as the analyzer reads it; and of each of its characters, begin and end in the text."""
    if normalised(text) == text:
        return text, [*pairwise(range(len(text) + 1))]
    parts = [(normalised(cluster[0]), cluster.span()) for cluster in _CLUSTER.finditer(text)]
    return "".join(part for part, _ in parts), [span for part, span in parts for _ in part]
