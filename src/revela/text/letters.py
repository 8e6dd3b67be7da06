"""Characters of all scripts: what is a letter, normalisation, folding, the script of a text; and
strings that are also terms as a whole: dates, versions, part numbers, e-mail addresses.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

import regex

MARKED = r"\p{L}\p{N}\p{M}"
PAIRED = r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}ー"
TRIPLED = r"\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}"
# A letter, digit or mark where words are spaced (regex.V1).
LETTER = rf"[{MARKED}--[{PAIRED}{TRIPLED}]]"
ZWNJ = "\u200c"  # within a Persian word that is also written without it, or as two words
# Invisible characters within words: soft hyphens, joiners, marks of direction, variation selectors.
_INVISIBLE = regex.compile(rf"(?<!\p{{scx=Arabic}}){ZWNJ}|[\p{{Cf}}\p{{DI}}--{ZWNJ}]", regex.V1)
# In Ukrainian and Belarusian, an apostrophe of any kind is part of a word.
_APOSTROPHE = regex.compile(
    r"(?<=\p{Script=Cyrillic})['\u2018\u2019\u02bc`](?=\p{Script=Cyrillic})"
)
_VOWELS = regex.compile(
    r"[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew
    r"\u093c"  # the nukta of Hindi, which many leave out
    r"\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed]"  # Arabic
)
_ACCENTS = regex.compile(r"[\u0300-\u036f\u0483-\u0487\u0653-\u0655]")  # 0653 to 0655: hamza
_CLUSTER = regex.compile(r"\X")
_DIGIT = re.compile(r"(?![0-9])\d")
# Letters with two codes: Persian and Arabic kaf and yeh, and chillus of Malayalam.
_FOLDED = dict(zip("کیىۀٱ", "كييها", strict=True))
_FOLDED |= {c: f"{base}\u0d4d" for c, base in zip("ൺൻർൽൾൿൔൕൖ", "ണനരലളകമയഴ", strict=True)}
_LETTERS = {"ı": "i", "ø": "o", "ł": "l", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe"}
_FOLD, _PLAIN = str.maketrans(_FOLDED), str.maketrans(_LETTERS | _FOLDED)
MAX_LENGTH = 64  # characters of a string that is a term
CACHED = 2**18  # terms of strings, which a corpus repeats
_HYPHENS = r"\-\u2010-\u2015\u2212"
JOINT = rf"[_./:@#+\\{_HYPHENS}]{{1,2}}"  # between the parts of an identifier
# Strings with digits or @ that are also terms: identifiers, e-mail addresses, numbers with one kind
# of sign, numbers and telephone numbers with spaces, and dates in Chinese and Korean.
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


def normalised(text: str) -> str:
    """A text in NFKC, without invisible characters and the apostrophes of Cyrillic words."""
    if text.isascii():
        return text
    plain: str = _APOSTROPHE.sub("", unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)))
    return plain


def lowercase(word: str, language: str) -> list[str]:
    """A word in lower case. In Turkish it has two forms: I is ı, but i in foreign words (API)."""
    if language != "tr":
        return [word.lower()]
    return [form.replace("İ", "i").lower() for form in (word.replace("I", "ı"), word)]


def folded(word: str) -> str:
    """A word without vowel marks, with one code point for each letter."""
    plain: str = _VOWELS.sub("", word)
    return plain.translate(_FOLD)


def without_accents(word: str) -> str:
    """A word without accents, its letters and digits folded to plain ones."""
    word = _DIGIT.sub(lambda digit: str(int(digit[0])), word)
    plain = _ACCENTS.sub("", unicodedata.normalize("NFD", word))
    return unicodedata.normalize("NFC", plain).translate(_PLAIN)


def character_ngrams(run: str, begin: int, n: int) -> Iterator[tuple[int, int, str]]:
    """The character n-grams and (n - 1)-grams of a run; a shorter run is one term."""
    edges = [0, *(cluster.end() for cluster in _CLUSTER.finditer(run))]
    length = len(edges) - 1
    if length < n - 1:
        yield begin, begin + len(run), run
    for i in range(length):
        for end in range(i + n - 1, min(i + n, length) + 1):
            yield begin + edges[i], begin + edges[end], run[edges[i] : edges[end]]


def script_of(text: str) -> str:
    """The script of a text's first letter, as its name in Unicode begins, such as "CYRILLIC"."""
    letter = next(filter(str.isalpha, text), "")
    return unicodedata.name(letter, "").split(" ")[0] if letter else ""


def wholes(text: str) -> list[tuple[int, int, str]]:
    """Begin, end and term of each string that is a term as a whole. Signs other than @, + and # are
    equal, and a sign between letters and digits is left out. Strings may overlap.

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
    """The terms of ``wholes``, without their places, in less time."""
    if not _HAS_WHOLE.search(text):
        return []
    return [term for _, _, term in wholes(_WITHOUT_WHOLE.sub("x ", normalised(text)))]


@lru_cache(CACHED)
def _whole(string: str) -> str:
    """The term of a string; "" if it has no digit or @, or if it is numbers with spaces and has not
    as many digits as a telephone number.
    """
    if not _HAS_WHOLE.search(string):
        return ""
    plain = without_accents(string.lower())
    if plain[-1] in "日일":
        return "-".join(number.zfill(2) for number in re.findall(r"\d+", plain))
    if " " in plain and not 7 <= sum(map(str.isdigit, plain)) <= 15:
        return ""
    return str(_NEEDLESS.sub("", _SIGNS.sub("-", plain.replace("_", "-")).strip("-+")))
