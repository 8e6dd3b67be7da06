"""Find the words of a query in a text, to mark them.

They are found as BM25 finds them (language.py): by their stems, and pairs of characters where words
are not spaced. An identifier such as NW-1007 is one word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import regex
from numpy.typing import NDArray

from revela.index.language import ENGLISH_STOP_WORDS, JOINT, LETTER, Analyzer, normalised, wholes

QUERY = 1000  # characters of a query whose words are marked
RARE = 0.25  # of the greatest idf: words below it are not marked, as they stand everywhere
# What questions are made of, and BM25 counts.
QUESTION_WORDS = frozenset([
    *ENGLISH_STOP_WORDS, *"""about am been can could did do does from had has have he her his how i
    its me my our she should so than them us we were what when where which who whom whose why would
    you your""".split()  # noqa: SIM905
])  # fmt: skip
_IDENTIFIER = regex.compile(rf"{LETTER}+(?:{JOINT}{LETTER}+)+", regex.V1)
_NAMES = re.compile(r"\d|[_.@\\]|::")  # a sign of an identifier; well-known and he/she have none
_PART = regex.compile(rf"{LETTER}+", regex.V1)
_HIRAGANA = re.compile("[\u3041-\u309f]")
_CLUSTER = regex.compile(r"\X")


@dataclass(frozen=True)
class Sought:
    """The words of a query that are marked, and their idf; identifiers are in lower case."""

    analyzer: Analyzer
    terms: dict[str, float]
    identifiers: dict[str, float]
    unstemmed: frozenset[str] = frozenset()  # terms that are the words themselves

    @classmethod
    def of(
        cls, query: str, analyzer: Analyzer, idf: Callable[[Sequence[str]], NDArray[np.float64]]
    ) -> Sought:
        """The words of a query and their idf, without words that are everywhere."""
        query = normalised(query[:QUERY])
        places, whole = list(analyzer.query_places(query)), wholes(query)
        *found, absent = idf([*(term for *_, term in places), "\0"]).tolist()
        weights = dict(zip(places, found, strict=True))
        names, identifiers = [place[:2] for place in whole], dict[str, float]()
        for name in _IDENTIFIER.finditer(query):
            if _NAMES.search(name[0]):
                begin, end = name.span()
                names.append((begin, end))
                inside = (w for (b, e, _), w in weights.items() if begin <= b and e <= end)
                identifiers[name[0].lower()] = sum(inside)
        words, before = dict[str, float](), (-1, -1)
        for i, (begin, end, term) in enumerate(places):
            # Of getFileName the whole; of characters in a row the longest n-grams.
            near = places[max(0, i - 3) : i + 4]
            is_part = (begin, end) == before or _is_inside(begin, end, near)
            before = begin, end
            if not is_part and not any(b <= begin and end <= e for b, e in names):
                word = query[begin:end].lower()
                others = analyzer.of_query(word) if _PART.fullmatch(word) else []
                words |= dict.fromkeys([term, *others], weights[begin, end, term])
        common = QUESTION_WORDS.union(analyzer(" ".join(QUESTION_WORDS)))
        telling = {t: w for t, w in words.items() if t not in common and not _HIRAGANA.search(t)}
        words = telling or words
        least = RARE * max((weight for weight in words.values() if weight < absent), default=0)
        kept = {term: weight for term, weight in words.items() if weight >= least}
        kept |= {place[2]: weights[place] for place in whole}
        unstemmed = (t for b, e, t in places if t in kept and _is_word(t, query[b:e]))
        return cls(analyzer, kept, identifiers, frozenset(unstemmed))

    def places(self, text: str) -> list[tuple[int, int, str, float]]:
        """(begin, end, word, idf) of each sought word in a text, in order."""
        plain, begins, ends = _normalised(text)
        found = [
            (begins[begin], ends[end - 1], known, self.terms[known])
            for begin, end, term in self.analyzer.places(plain)
            if (known := self._known(term, plain[begin:end]))
        ]
        lower = plain.lower()
        for name, weight in self.identifiers.items():
            if not all(part in lower for part in _PART.findall(name)):
                continue
            for match in _whole(name).finditer(plain):
                begin, end = match.span()
                found.append((begins[begin], ends[end - 1], name, weight))
        return sorted(found)

    def _known(self, term: str, word: str) -> str:
        """The term sought that this one of a text is; "" if there is none. Where words are not
        stemmed, as the text is in several languages, some letters more or less are its ending.
        """
        if term in self.terms:
            return term
        if not self.unstemmed or len(term) < 4 or not _is_word(term, word):
            return ""
        return next((known for known in self.unstemmed if _has_ending(known, term)), "")


def _is_word(term: str, word: str) -> bool:
    return term == word.lower() and word.isalpha()


def _has_ending(one: str, other: str) -> bool:
    """Whether one is the other with up to three letters at its end, fewer for short words."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and len(long) - len(short) <= min(3, len(short) - 3)


def _is_inside(begin: int, end: int, places: Sequence[tuple[int, int, str]]) -> bool:
    return any(b <= begin and end <= e and e - b > end - begin for b, e, _ in places)


@lru_cache
def _whole(name: str) -> regex.Pattern[str]:
    """An identifier with any signs between its parts; some between digits."""
    parts = _PART.findall(name)
    pattern = regex.escape(parts[0])
    for last, part in pairwise(parts):
        least = 1 if last[-1].isdigit() and part[0].isdigit() else 0
        pattern += rf"[\W_]{{{least},2}}{regex.escape(part)}"
    return regex.compile(rf"(?<!{LETTER}){pattern}(?!{LETTER})", regex.V1 | regex.IGNORECASE)


def _normalised(text: str) -> tuple[str, Sequence[int], Sequence[int]]:
    """A text as the analyzer reads it; and of each of its characters, begin and end in the text."""
    if normalised(text) == text:
        return text, range(len(text)), range(1, len(text) + 1)
    plain, begins, ends = list[str](), list[int](), list[int]()
    for cluster in _CLUSTER.finditer(text):
        part = normalised(cluster[0])
        plain.append(part)
        begins += [cluster.start()] * len(part)
        ends += [cluster.end()] * len(part)
    return "".join(plain), begins, ends
