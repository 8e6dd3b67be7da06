"""Strings that are one term more as a whole: dates, versions, part numbers, e-mail addresses."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain

import regex

from revela.text.letters import LETTER, MARKED, normalised, without_accents

MAX_LENGTH = 64  # characters; a longer string is none
CACHED = 2**18  # terms of strings, which a corpus repeats
_HYPHENS = r"\-\u2010-\u2015\u2212"
JOINT = rf"[_./:@#+\\{_HYPHENS}]{{1,2}}"  # between the parts of an identifier
# Strings that are one term more, with digits or @: identifiers, e-mail addresses, numbers with one
# kind of sign, numbers and telephone numbers with spaces, and dates in Chinese and Korean.
_HAS_WHOLE = re.compile(r"[\d@]")
_WITHOUT_WHOLE = re.compile(r"(?:(?<!\S)[^\s\d@]++(?!\S)\s*+)++")
_WHOLES = [
    regex.compile(pattern, regex.V1)
    for pattern in (
        rf"(?<!{LETTER}){LETTER}++(?:{JOINT}{LETTER}++)++",
        r"(?<![a-zA-Z\d.+_-])[a-zA-Z\d][a-zA-Z\d.+_-]*+@[a-zA-Z\d](?:[a-zA-Z\d._-]*[a-zA-Z\d])?",
        rf"(?<!\d)\d++([./:,'_\u2019{_HYPHENS}])\d++(?:\1\d++)*+",
        rf"(?<![.,:/\-])(?<!{LETTER})"
        rf"(?:\d+(?:\ \d+)+|(?:\+|\(\+?|0)\d+(?:[ ()./\-]{{1,3}}\d+)+)(?![.,:/\-]?{LETTER})",
        *(rf"(?<!\d){year}\d+[月월]\ ?\d+[日일]" for year in ("", r"\d+[年년]\ ?")),
    )
]
_SIGNS = regex.compile(rf"[^{MARKED}@+#]+", regex.V1)
_NEEDLESS = regex.compile(r"(?<=\p{L})-(?=\d)|(?<=\d)-(?=\p{L})")  # NW-1007 is also NW1007


def wholes(text: str) -> list[tuple[int, int, str]]:
    """Begin, end and term of each string that is a term as a whole: signs but @, + and # are alike,
    and none is needed between letters and digits. Strings may overlap.

    >>> wholes("v1.2.3 of 2024/06/05, NW-1007")
    [(0, 6, 'v1-2-3'), (10, 20, '2024-06-05'), (22, 29, 'nw1007'), (1, 6, '1-2-3')]
    """
    if not _HAS_WHOLE.search(text):
        return []
    text = normalised(text)
    matches = chain.from_iterable(pattern.finditer(text) for pattern in _WHOLES)
    short = (match for match in matches if match.end() - match.start() <= MAX_LENGTH)
    found = ((*match.span(), _whole(match[0])) for match in short)
    return list(dict.fromkeys(whole for whole in found if whole[2]))


def whole_terms(text: str) -> list[str]:
    """The terms of ``wholes``, without their places, which takes less time."""
    if not _HAS_WHOLE.search(text):
        return []
    return [term for _, _, term in wholes(_WITHOUT_WHOLE.sub("x ", normalised(text)))]


@lru_cache(CACHED)
def _whole(string: str) -> str:
    """The term of a string; "" if it has no digit or @, or is a row of numbers that is not as long
    as a telephone number.
    """
    if not _HAS_WHOLE.search(string):
        return ""
    plain = without_accents(string.lower())
    if plain[-1] in "日일":
        return "-".join(number.zfill(2) for number in re.findall(r"\d+", plain))
    if " " in plain and not 7 <= sum(map(str.isdigit, plain)) <= 15:
        return ""
    return str(_NEEDLESS.sub("", _SIGNS.sub("-", plain.replace("_", "-")).strip("-+")))
