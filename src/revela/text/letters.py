"""Characters of all scripts: what is a letter, normalisation, folding, and the script of a text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import regex

MARKED = r"\p{L}\p{N}\p{M}"
PAIRED = r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}ー"
TRIPLED = r"\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}"
# A letter, digit or mark where words are spaced (regex.V1).
LETTER = rf"[{MARKED}--[{PAIRED}{TRIPLED}]]"
ZWNJ = "\u200c"  # parts a Persian word that is also written as one, or as two
# Invisible characters within words: soft hyphens, joiners, marks of direction, variation selectors.
_INVISIBLE = regex.compile(rf"(?<!\p{{scx=Arabic}}){ZWNJ}|[\p{{Cf}}\p{{DI}}--{ZWNJ}]", regex.V1)
# In Ukrainian and Belarusian, an apostrophe of any kind parts no word.
_APOSTROPHE = regex.compile(
    r"(?<=\p{Script=Cyrillic})['\u2018\u2019\u02bc`](?=\p{Script=Cyrillic})"
)
_VOWELS = regex.compile(
    r"[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew
    r"\u093c"  # the nukta of Hindi, which many leave out
    r"\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed]"  # Arabic
)
_ACCENTS = regex.compile(r"[\u0300-\u036f\u0483-\u0487\u0653-\u0655]")  # the last ones: hamza
_CLUSTER = regex.compile(r"\X")
_DIGIT = re.compile(r"(?![0-9])\d")
# Letters with two codes: Persian and Arabic kaf and yeh, and chillus of Malayalam.
_FOLDED = dict(zip("کیىۀٱ", "كييها", strict=True))
_FOLDED |= {c: f"{base}\u0d4d" for c, base in zip("ൺൻർൽൾൿൔൕൖ", "ണനരലളകമയഴ", strict=True)}
_LETTERS = {"ı": "i", "ø": "o", "ł": "l", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe"}
_FOLD, _PLAIN = str.maketrans(_FOLDED), str.maketrans(_LETTERS | _FOLDED)


def normalised(text: str) -> str:
    """NFKC, without invisible characters, and apostrophes of Cyrillic words."""
    if text.isascii():
        return text
    plain: str = _APOSTROPHE.sub("", unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)))
    return plain


def lowercase(word: str, language: str) -> list[str]:
    """A word in lower case; in Turkish I is ı, but i in foreign words such as API."""
    forms = [word.replace("I", "ı"), word] if language == "tr" else [word]
    return [form.replace("İ", "i").lower() for form in forms] if len(forms) > 1 else [word.lower()]


def folded(word: str) -> str:
    """A word without vowel marks, and with one code for each letter."""
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
    letter = next((letter for letter in text if letter.isalpha()), "")
    return _script_of(letter) if letter else ""


@lru_cache(maxsize=2**12)
def _script_of(letter: str) -> str:
    return unicodedata.name(letter, "").split(" ")[0]
