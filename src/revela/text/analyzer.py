"""Split text into the terms that BM25 counts, the same for bm25s, LanceDB and the statistics.

A text is normalised (NFKC: half and full width, ligatures, presentation forms) and split into runs
of letters, digits and the marks that combine with them. Each run gives terms by its script:

- Where words are spaced: the word in lower case, without the vowel marks of Arabic and Hebrew,
  stemmed (Snowball), and then without accents; and the parts of an identifier such as
  ``getFileName``. Stop words are left out, unless they are names in capitals (IT, US).
- Strings with digits, and e-mail addresses: also the whole string (letters.py), so that
  2024-05-06 differs from 2024-06-05.
- Han, Kana and Hangul: single characters and pairs of neighbours. Thai, Lao, Khmer and Burmese:
  pairs and triples. Dictionaries are not needed for BM25 to rank well (research/notebook.md).

An index has the languages of its text: ``en``, ``ru+en`` for Russian and English documents, or
``en+de+fr``. If a script has several languages, the words of a passage are stemmed in the most
likely one, and those of a query, which is often too short to tell, in each. A word of a query is
left out only if it is a stop word in every language that the query may be in.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, starmap
from math import inf
from typing import Any

import regex

from revela.errors import RevelaError
from revela.text import letters
from revela.text.letters import LETTER, MARKED, PAIRED, TRIPLED, ZWNJ, wholes
from revela.types import evenly_spaced

# Code of a language -> Snowball's name.
STEMMERS = {
    "ar": "arabic", "ca": "catalan", "cs": "czech", "da": "danish", "de": "german", "el": "greek",
    "en": "english", "eo": "esperanto", "es": "spanish", "et": "estonian", "eu": "basque",
    "fa": "persian", "fi": "finnish", "fr": "french", "ga": "irish", "hi": "hindi",
    "hu": "hungarian", "hy": "armenian", "id": "indonesian", "it": "italian", "lt": "lithuanian",
    "nb": "norwegian", "ne": "nepali", "nl": "dutch", "nn": "norwegian", "no": "norwegian",
    "pl": "polish", "pt": "portuguese", "ro": "romanian", "ru": "russian", "sr": "serbian",
    "st": "sesotho", "sv": "swedish", "ta": "tamil", "tr": "turkish", "yi": "yiddish",
}  # fmt: skip
LATIN_WITHOUT_STEMMER = ("ms", "sk", "vi")  # other languages in Latin letters
# Code of a language -> its script, as Unicode's names of characters begin.
SCRIPTS = {
    "ar": "ARABIC", "bg": "CYRILLIC", "el": "GREEK", "fa": "ARABIC", "gu": "GUJARATI",
    "he": "HEBREW", "hi": "DEVANAGARI", "hy": "ARMENIAN", "ja": "CJK", "ko": "HANGUL",
    "ne": "DEVANAGARI", "ru": "CYRILLIC", "sr": "CYRILLIC", "ta": "TAMIL", "uk": "CYRILLIC",
    "yi": "HEBREW", "zh": "CJK",
}  # fmt: skip
SCRIPTS |= dict.fromkeys((*STEMMERS.keys() - SCRIPTS.keys(), *LATIN_WITHOUT_STEMMER), "LATIN")
WRITTEN_WITH = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}  # scripts that a text mixes
# Lucene's list: that of the library stop-words has 1,333 words, such as "computer".
ENGLISH_STOP_WORDS = """a an and are as at be but by for if in into is it no not of on or such that
    the their then there these they this to was will with""".split()  # noqa: SIM905
SAMPLE, LENGTH = 200, 2000  # texts to detect the language in, and characters of each
BLOCK = 500  # characters to classify at once; shorter texts are joined
MIN_LETTERS = 20  # of a script: "Hello" is classified as Breton, "OK" as Afrikaans
MIN_SHARE = 0.05  # minimum share of a language in all text
KNOWN = 0.5  # minimum share of a script's text that is in its frequent languages
NO_LANGUAGE = "zxx"  # the library's code for numbers and code
# Characters to classify at once, and by how much the log likelihood of another language must exceed
# that of English: 95 to 100 % of the pieces of other languages do, and under 1 % of English and of
# code in Python, C and JavaScript.
PIECE, MARGIN = 60, 30
DOUBT = 10  # a query may also be in a language whose log likelihood is lower by this much
# Words in the cache of terms: a corpus repeats most words, a service's queries may hold any.
CORPUS_WORDS, QUERY_WORDS = 2**18, 2**12
MAX_CACHED_LENGTH = 64  # characters of such a word

_SIGNED = r"(?<![A-Za-z0-9])(?:[Cc]\+\+|[CcFfJj]#)(?![A-Za-z])"  # C++ and C# differ from C
_RUN = regex.compile(
    rf"(?P<pairs>(?:[{MARKED}&&[{PAIRED}]]\p{{M}}*+)++)"
    rf"|(?P<triples>(?:[{MARKED}&&[{TRIPLED}]]\p{{M}}*+)++)"
    rf"|(?P<word>{_SIGNED}|(?:{LETTER}++(?:{ZWNJ}(?={LETTER}))?+)++)",
    regex.V1,
)
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+")
_ASCII_OR_SIGNED = re.compile(rf"{_SIGNED}|[A-Za-z0-9]+")
# Consecutive words (between white space) with characters other than ASCII.
_NOT_ASCII = r"[^\s\x80-\U0010ffff]*+[^\x00-\x7f]\S*"
_NOT_ASCII_WORDS = re.compile(rf"(?<!\S)({_NOT_ASCII}(?:\s++{_NOT_ASCII})*)")
_PART = regex.compile(r"\p{Lu}?[\p{Ll}\p{N}]+|\p{Lu}+(?!\p{Ll})")  # of getFileName, or HTTPServer
# A file's name, but not a row's id (d12, table.csv:7): it has an ending, or no digit and more than
# small letters.
_NAME = re.compile(r"(.*)\.([A-Za-z]\w{0,9})|(\D*[^\da-z]\D*)", re.S)
_JOINTS = regex.compile(r"(?<=\p{Ll})(?=\p{Lu})|(?<!\d)[\W_]|[\W_](?!\d)")  # in names of files
Languages = Mapping[str, Sequence[str]]
"""Script -> codes of its languages."""
Places = Iterator[tuple[int, int, str]]


class Analyzer:
    """Splits text into terms, in order; threads may share an instance.

    ``language`` is a code, several joined by +, or "none", which does not stem. ``cache_size`` is
    in words. Places are those in the normalised text.

    Examples:
        >>> Analyzer("en")("The invoices are kept for ten years.")
        ['invoic', 'kept', 'ten', 'year']
        >>> Analyzer("en+fr")("Les factures sont conservées pendant dix ans.")
        ['factur', 'conserv', 'dix', 'an']
        >>> Analyzer("none")("北京市 getFileName")
        ['北', '北京', '京', '京市', '市', 'getfilename', 'get', 'file', 'name']
    """

    def __init__(self, language: str, cache_size: int = CORPUS_WORDS) -> None:
        self.language, self._cache_size = language, cache_size
        self._codes = _by_script(language)
        self._is_mixed = any(len(codes) > 1 for codes in self._codes.values())
        self._words = dict[str, _WordTerms]()  # by their languages

    def __call__(self, text: str) -> list[str]:
        """The terms of a passage."""
        terms, words = list[str](), self._words_in(text)
        # Every second piece has characters other than ASCII; most texts have few of them.
        pieces = [text] if text.isascii() else _NOT_ASCII_WORDS.split(text)
        for number, piece in enumerate(pieces):
            if number % 2:
                terms += [term for _, _, term in _places(piece, words)]
            else:
                is_signed = "++" in piece or "#" in piece
                found = (_ASCII_OR_SIGNED if is_signed else _ASCII_WORD).findall(piece)
                terms += chain.from_iterable(map(words.__getitem__, found))
        return terms + letters.whole_terms(text)

    def places(self, text: str) -> Places:
        """Begin, end and term of each term of a passage."""
        return chain(_places(text, self._words_in(text)), wholes(text))

    def of_query(self, text: str, *, likely: bool = False) -> list[str]:
        """The terms of a query, each once: a word that a question repeats is not more important. A
        whole string says more than its parts, and counts twice.

        Args:
            likely: in the most likely language of each script; by default in each.
        """
        places = self.query_places(text, None if likely else self._codes)
        terms = dict.fromkeys(term for *_, term in places)
        return [*terms, *dict.fromkeys(term for *_, term in wholes(text))]

    def query_places(self, text: str, languages: Languages | None = None) -> Places:
        """Begin, end and term of each of these, by default in the most likely language."""
        words = self._words_by(languages or self._likely(text), self._likely(text, DOUBT))
        return chain(_places(text, words), wholes(text))

    def required(self, query: str) -> set[str]:
        """The terms that every sure answer to a query has: its whole strings, and its words with
        three digits or more.

        >>> sorted(Analyzer("en").required("the meeting of 2024-06-05 in room 101 at 7"))
        ['101', '2024', '2024-06-05']
        """
        numbers = {t for t in self.of_query(query) if sum(map(str.isdigit, t)) > 2}
        return numbers | {term for *_, term in wholes(query)}

    def _words_in(self, text: str) -> _WordTerms:
        """The terms of words in a passage, in its most likely languages."""
        likely = self._likely(text)
        return self._words_by(likely, likely)

    def _likely(self, text: str, doubt: float = 0.0) -> Languages:
        """The languages that a text may be in: of each script, those that are less likely than the
        most likely one by at most ``doubt``.
        """
        if not self._is_mixed:
            return self._codes
        ranks = dict(_identifier().rank(text[:BLOCK]))
        return {
            script: [code for code in codes if ranks.get(code, -inf) >= best - doubt]
            for script, codes in self._codes.items()
            for best in [max(ranks.get(code, -inf) for code in codes)]
        }

    def _words_by(self, languages: Languages, stopped: Languages) -> _WordTerms:
        name = str([*languages.values(), *stopped.values()])
        if name not in self._words:
            self._words.setdefault(name, _WordTerms(languages, stopped, self._cache_size))
        return self._words[name]


def _places(text: str, words: _WordTerms) -> Places:
    for run in _RUN.finditer(letters.normalised(text)):
        begin, end = run.span()
        if run.lastgroup == "word":
            for term in words[run.group()]:
                yield begin, end, term
        else:
            n = 2 if run.lastgroup == "pairs" else 3
            yield from letters.character_ngrams(run.group(), begin, n)


class _WordTerms(dict[str, tuple[str, ...]]):
    """A cache of the terms of words between spaces; emptied when it is full. ``stopped`` are the
    languages whose stop words are left out.
    """

    def __init__(self, languages: Languages, stopped: Languages, max_words: int) -> None:
        import Stemmer

        self._languages, self._stopped, self._max_words = languages, stopped, max_words
        codes = STEMMERS.keys() & {*chain.from_iterable(languages.values())}
        self._stem = {code: Stemmer.Stemmer(STEMMERS[code]).stemWord for code in codes}
        self._lock = threading.Lock()  # threads may not share a stemmer

    def __missing__(self, word: str) -> tuple[str, ...]:
        parts = _PART.findall(word) if word[1:] != word[1:].lower() else word.split(ZWNJ)
        pieces = [word.replace(ZWNJ, ""), *parts] if len(parts) > 1 else [word]
        with self._lock:
            if len(self) >= self._max_words:
                self.clear()
            terms = tuple(chain.from_iterable(map(self._terms, pieces)))
            if len(word) <= MAX_CACHED_LENGTH:
                self[word] = terms
        return terms

    def _terms(self, word: str) -> Iterable[str]:
        """The terms of a word by each language; nothing for a stop word of all ``stopped``, unless
        it is a name in capitals, such as IT.
        """
        script, is_name = letters.script_of(word), len(word) > 1 and word.isupper()
        forms = ((code, letters.lowercase(word, code)) for code in self._stopped.get(script, [""]))
        if not is_name and all(form[0] in _stop_words(code) for code, form in forms):
            return ()
        codes = self._languages.get(script, [""])
        pairs = ((code, form) for code in codes for form in letters.lowercase(word, code))
        return dict.fromkeys(chain.from_iterable(starmap(self._terms_in, pairs)))

    def _terms_in(self, language: str, word: str) -> tuple[str, ...]:
        """A word in lower case, stemmed and without accents. In Vietnamese, where accents
        distinguish words, also with accents.
        """
        word = letters.folded(word)
        if language in self._stem:
            word = self._stem[language](word)
        plain = word if word.isascii() else letters.without_accents(word)
        if not plain:
            return ()
        return (word, plain) if language == "vi" and word != plain else (plain,)


@cache
def _stop_words(language: str) -> frozenset[str]:
    if language == "en":
        return frozenset(ENGLISH_STOP_WORDS)
    import stop_words

    return frozenset(stop_words.safe_get_stop_words(STEMMERS.get(language, language)))


def _by_script(language: str) -> dict[str, list[str]]:
    """Script -> its languages, in their order."""
    found = defaultdict[str, list[str]](list)
    for code in language.split("+") if language not in ("", "none") else ():
        found[SCRIPTS.get(code, code)].append(code)
    return dict(found)


def check_language(language: str) -> None:
    """Raise RevelaError for an unknown language."""
    if language in ("auto", "none"):
        return
    for code in language.split("+"):
        if code not in STEMMERS and code not in _identifier().nb_classes:
            raise RevelaError(
                f'--language {language}: "{code}" is not known; give auto, none, a code such as '
                f"{', '.join(sorted(STEMMERS))}, zh, ja, ko or th, or several codes joined by +"
            )


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def detect(texts: Sequence[str]) -> str:
    """The languages of each script in these texts, the most frequent first; "none" if unknown.

    Text counts as its script's most frequent language unless it is surely in another. Languages
    with less than ``MIN_SHARE`` of all text are left out, and so are scripts with few letters, or
    with less than ``KNOWN`` of their text in the other languages.

    >>> detect(["Les factures sont conservées pendant dix ans.", "Le jardin ouvre à neuf heures."])
    'fr'
    """
    blocks = defaultdict[str, list[tuple[float, dict[str, float]]]](list)
    counts = Counter[str]()
    sample = [texts[i][:LENGTH] for i in evenly_spaced(len(texts), SAMPLE)]
    for block, size in _joined([(text, len(text)) for text in sample], BLOCK):
        scripts = _scripts(block)
        likely = dict(_identifier().rank(block))
        if scripts and next(iter(likely)) != NO_LANGUAGE:
            script, count = scripts.most_common(1)[0]
            blocks[script].append((size, likely))
            counts[script] += count
    total = sum(size for found in blocks.values() for size, _ in found)
    chosen = dict[str, float]()
    for script, found in blocks.items():
        votes = _votes(script, found, "")
        votes = _votes(script, found, max(votes, key=votes.__getitem__))
        large = {code: n for code, n in votes.items() if code and n >= MIN_SHARE * total}
        if sum(large.values()) >= KNOWN * sum(votes.values()) and counts[script] >= MIN_LETTERS:
            chosen |= large
    return "+".join(sorted(chosen, key=lambda code: -chosen[code])) or "none"


def language_of(text: str, languages: str) -> str:
    """The language of a text in a corpus of these ``languages`` (``detect``): the first one of its
    script, unless it is surely in another; "" if it has no letters.

    >>> language_of("Les factures sont conservées pendant dix ans à la mairie.", "en+de")
    'fr'
    """
    block = text[:BLOCK]
    if not (scripts := _scripts(block)):
        return ""
    ((script, _),) = scripts.most_common(1)
    first = next(iter(_by_script(languages).get(script, ())), "")
    votes = _votes(script, [(1.0, dict(_identifier().rank(block)))], first)
    return max(votes, key=votes.__getitem__) or first


def _scripts(text: str) -> Counter[str]:
    """The number of letters of each script at the beginning of a text."""
    return Counter(WRITTEN_WITH.get(s, s) for s in map(letters.script_of, text[:BLOCK]) if s)


def _votes(
    script: str, blocks: Sequence[tuple[float, dict[str, float]]], first: str
) -> dict[str, float]:
    """The size of the text in each language; "" for one that is not written in this script."""
    votes = defaultdict[str, float](float)
    for size, likely in blocks:
        code, most = next(iter(likely.items()))
        if most - likely.get(first, -inf) <= MARGIN:
            code = first
        votes[code if SCRIPTS.get(code, script) == script else ""] += size
    return votes


def other_languages(texts: Sequence[str]) -> dict[str, float]:
    """The share of each language except English in a sample of texts, the largest first. Every text
    has the same weight; code, numbers and single foreign words count as English.

    >>> other_languages(["The garden opens at nine.", "Сад открывается в девять часов утра."])
    {'ru': 0.5}
    """
    by_script = defaultdict[str, list[tuple[str, float]]](list)
    for i in evenly_spaced(len(texts), SAMPLE):
        pieces = _pieces(texts[i].strip(), SAMPLE // len(texts))
        for piece in pieces:
            if scripts := Counter(s for s in map(letters.script_of, piece) if s):
                script = scripts.most_common(1)[0][0]
                by_script[script].append((piece, 1 / len(pieces)))
    others = Counter[str]()
    for weighed in by_script.values():
        for block, weight in _joined(weighed, PIECE):
            (code, most), *rest = _identifier().rank(block)
            if code != NO_LANGUAGE and most - dict(rest).get("en", most) > MARGIN:
                others[code] += weight  # type: ignore[assignment]
    total = sum(weight for weighed in by_script.values() for _, weight in weighed)
    return {code: round(share / total, 3) for code, share in others.most_common()}


def _pieces(text: str, most: int) -> list[str]:
    """At most ``most`` pieces of a text, evenly spaced; a single one is from the middle."""
    count = max(1, min(len(text) // PIECE, most))
    middles = [(2 * i + 1) * len(text) // (2 * count) for i in range(count)]
    return [text[max(0, middle - PIECE // 2) : middle + PIECE // 2] for middle in middles]


def _joined(pieces: Iterable[tuple[str, float]], least: int) -> Iterator[tuple[str, float]]:
    """Pieces and their weights; pieces of fewer than ``least`` characters are joined."""
    block, weight = "", 0.0
    for piece, added in sorted(pieces, key=lambda pair: len(pair[0]) < least):
        block, weight = f"{block}\n{piece}" if block else piece, weight + added
        if len(block) >= least:
            yield block, weight
            block, weight = "", 0.0
    if block:
        yield block, weight


def file_name_words(document: str) -> tuple[str, str]:
    """The words in the name of a document's file, and its ending; "" for a row's id.

    >>> file_name_words("travel/holidayPlan_2024-05-06.txt"), file_name_words("table.csv:7")
    (('holiday Plan 2024-05-06', 'txt'), ('', ''))
    """
    name = _NAME.fullmatch(document.rpartition("/")[2])
    return (spaced(name[1] or name[3]), name[2] or "") if name else ("", "")


def spaced(name: str) -> str:
    """A name with spaces between its words."""
    return str(_JOINTS.sub(" ", name))


def searched(document: str, passage: str) -> str:
    """The text of a passage that BM25 searches: its own, and the name of its file."""
    return "\n".join([passage, " ".join(file_name_words(document))]).rstrip()
