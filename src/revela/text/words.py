"""Words, the unit of length for text in every script.

In scripts with spaces, a word is text between white space. In Han and Kana it is two characters; in
Thai, Lao, Tibetan, Myanmar and Khmer five, because a translation of 29,700 English words (XQuAD)
has 1.7 Chinese and 4.7 Thai characters per word, without vowel signs and tones. In a run of over
``LONGEST`` characters (base64, minified code, DNA) it is ``PIECE`` characters.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise

HAN, THAI = 2, 5  # characters per word
LONGEST, PIECE = 100, 6  # 124 of the 2.6 million words of Python's documentation are longer
# A letter beyond ASCII, or a word, perhaps with a number, that is not part of encoded data.
_NATURAL = re.compile(r"[^\W\d_\x00-\x7f]|(?<![\w+/=])[A-Za-z]+(?:(?<=\w{3})\d+)?(?![\w+/=])")
FEW_LETTERS = 0.05  # of a text's characters

# Unicode's blocks with combining marks; reading only these saves time at import.
_BLOCKS = ((0x300, 0x3100), (0xA600, 0xAC00), (0xFB1E, 0xFB1F), (0xFE00, 0xFE30),
           (0x10000, 0x12000), (0x13400, 0x13500), (0x16000, 0x17000), (0x1BC00, 0x1BD00),
           (0x1CF00, 0x1D300), (0x1DA00, 0x1DB00), (0x1E000, 0x1EA00))  # fmt: skip
_MARKS = [
    chr(code)
    for block in _BLOCKS
    for code in range(*block)
    if unicodedata.category(chr(code)).startswith("M")
]
# Joiners, modifiers of emoji, and the letter AM of Thai and Lao count as marks. Characters above
# the first plane are matched separately, because re compares them one by one, which is slow.
_LOW = "".join(mark for mark in _MARKS if mark < "\U00010000") + (
    "\u0e33\u0eb3\u200b-\u200d\u2060\ufeff"
)
_HIGH = "".join(mark for mark in _MARKS if mark >= "\U00010000") + (
    "\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef"
)
MARKS = f"(?:[{_LOW}]|[\U00010000-\U000fffff](?<=[{_HIGH}]))*+"
_HAN = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3035\u3038-\u303c\u3041-\u312f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
_THAI = "\u0e00-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\ua9e0-\ua9ff\uaa60-\uaadf"
_OPENING = "(\\[{\u2018\u201c\u3008\u300a\u300c\u300e\u3010\u3014\u3016\u3018\uff08\uff3b\uff5b"
CLOSING = "\"')\\]\u2019\u201d\u3009\u300b\u300d\u300f\u3011\u3015\u3017\u3019\uff09\uff3d\uff5d"
_AFTER = f"{CLOSING}.,:;!?\u00b7\u2014\u2025\u2026\u3001\u3002\uff01\uff0c\uff0e\uff1a\uff1b\uff1f"
_UNSPACED = re.compile(f"[{_HAN}{_THAI}]")
_ONE_HAN = f"[{_HAN}]{MARKS}"
_ONE_THAI = f"[{_THAI}](?:[{_LOW}]|(?<=[\u1039\u17d2])[{_THAI}])*+"  # a consonant may be stacked
_OTHER = f"[^\\s{_HAN}{_THAI}]"
_WORD = re.compile(
    f"(?:[{_OPENING}]{{0,8}}+(?:(?:{_ONE_HAN}){{1,{HAN}}}+|(?:{_ONE_THAI}){{1,{THAI}}}+)"
    f"[{_AFTER}]{{0,8}}+{MARKS}"
    f"|(?={_OTHER}{{{LONGEST + 1}}}){_OTHER}{{{PIECE}}}{MARKS}"
    f"|{_OTHER}{{1,{LONGEST}}}+{MARKS})\\s*"
)
_TERM = re.compile(f"{_ONE_HAN}|{_ONE_THAI}|(?:[^\\W{_HAN}{_THAI}]{MARKS})+")
_STRETCH = re.compile(f"(?P<han>(?:{_ONE_HAN})+)|(?:{_ONE_THAI})+")
_CLUSTER = re.compile(f"(?s:.){MARKS}")
_IS_HAN = re.compile(f"[{_HAN}]")
_HIRAGANA = re.compile("[\u3041-\u309f]")


def words(text: str) -> list[str]:
    """The words of a text, each with the white space after it; joined, they are the text.

    White space before the first word belongs to that word. A text of only white space has no word.

    >>> words("Bees (蜜蜂) dance in 花丛之间。")
    ['Bees ', '(蜜蜂) ', 'dance ', 'in ', '花丛', '之间。']
    """
    found: list[str] = _WORD.findall(text)
    if found and text[0].isspace():
        found[0] = text[: len(text) - len(text.lstrip())] + found[0]
    return found


def split_evenly(text: str, parts: int) -> list[str]:
    """Split a text into ``parts`` runs of words, or a single word into runs of characters. Some
    runs may be empty.
    """
    units = words(text)
    if len(units) < 2:
        units = _CLUSTER.findall(text)
    bounds = [round(part * len(units) / parts) for part in range(parts + 1)]
    return ["".join(units[a:b]) for a, b in pairwise(bounds)]


def count_words(text: str) -> int:
    if text.isascii() or not _UNSPACED.search(text):
        found = text.split()
        if len(text) <= LONGEST or not found or max(map(len, found)) <= LONGEST:
            return len(found)
    return len(_WORD.findall(text))


def joined(some: Iterable[str]) -> str:
    """Join ``words`` into one line."""
    return " ".join("".join(some).split())


def terms(text: str) -> list[str]:
    """The units by which texts are compared: words without punctuation, and single characters in
    scripts without spaces.

    >>> terms("It's 花丛。")
    ['It', 's', '花', '丛']
    """
    return _TERM.findall(text)


def splits_word(text: str, place: int) -> bool:
    """Whether a cut before the character at ``place`` splits one of the text's ``terms``.

    >>> splits_word("Article 5", 3), splits_word("Art 5", 3), splits_word("花丛", 1)
    (True, False, False)
    """
    pair = text[place - 1 : place + 1]
    return 0 < place < len(text) and terms(pair) == [pair]


def count_terms(terms: Sequence[str]) -> int:
    """The length of ``terms`` in words, rounded up."""
    shares = (
        1 / HAN if _IS_HAN.match(term) else 1 / THAI if _UNSPACED.match(term) else 1
        for term in terms
    )
    return math.ceil(math.fsum(shares))


def runs(text: str) -> list[str]:
    """All overlapping runs of a word's length in scripts without spaces. Runs with hiragana, which
    is mostly grammatical, are left out.

    >>> runs("花丛之间 in 花")
    ['花丛', '丛之', '之间']
    """
    all_runs = []
    for match in _STRETCH.finditer(text):
        chars = terms(match.group())
        size = HAN if match.lastgroup == "han" else THAI
        all_runs += ["".join(chars[i : i + size]) for i in range(len(chars) - size + 1)]
    return [run for run in all_runs if not _HIRAGANA.search(run)]


def has_words(text: str) -> bool:
    """Whether words make up more than ``FEW_LETTERS`` of a text's characters. Other texts, such as
    encoded data or bare numbers, get no vector, because encoders place them near to anything.

    >>> has_words("It melts at 63 °C."), has_words("iVBORw0KGgoAAAANSUhEUgAAAAUA/AAAF+CAYAAACN")
    (True, False)
    """
    return sum(map(len, _NATURAL.findall(text))) > FEW_LETTERS * len("".join(text.split()))
