"""Split prose into sentences. Closing quotes belong to the sentence; full stops in abbreviations,
initials, ordinals and list numbers do not end it.

A full stop that may be either, as in "He lives in the U.S. It is large", does not end a sentence.
"""

from __future__ import annotations

import re

from revela.text.words import CLOSING, MARKS

# Marks that end a sentence only before white space; and marks that need no white space (Unicode's
# Sentence_Terminal, without the full-width full stop, which numbers also have).
_SPACED = ".!?\u2026"
_ENDS = (
    "\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0964\u0965\u104a\u104b\u1362\u1367\u1368"
    "\u166e\u17d4\u17d5\u1803\u1809\u1944\u1945\u1b5a\u1b5b\u1c3b\u1c3c\u203c\u203d\u2047-\u2049"
    "\u3002\ua4ff\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uabeb\ufe56\ufe57\uff01\uff1f\uff61"
)
_MARK = f"[{_SPACED}{_ENDS}]"
# A search is twice as fast if the pattern begins with one set of characters. A run of marks is
# tried only at its first mark; otherwise time would grow with the square of its length.
_BOUNDARY = re.compile(
    f"[{_SPACED}{_ENDS}\n](?:(?<=\n)[ \t\r]*+\n\\s*+"
    f"|(?<!\n)(?<!{_MARK}{_MARK}){_MARK}*+(?:[{CLOSING}]*+\\s++"
    # A comma continues the sentence, and so does \u3068 (to) after a quotation.
    f"|(?<=[{_ENDS}])(?:[{CLOSING}]++(?!\u3068)|(?![{CLOSING}])){MARKS}"
    "(?![\u3001\uff0c])))"
)
ENDED = re.compile(f"(?:{_MARK})[{CLOSING}]*$")  # the end of a text that ends with a sentence
# By language. Single letters and abbreviations with full stops inside, such as z.B. and т.д., are
# recognised without a list.
_ABBREVIATIONS = frozenset(
    """
    Mr Mrs Ms Dr Prof St Mt Fig Figs fig Eq Eqs eq No Nos Vol vol pp cf vs al approx ca etc Inc Ltd
    Co Corp Jr Sr Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec Ph.D Rev Hon Gen Col Capt Lt Sgt
    Gov Sen Rep Ave Blvd Rd dept Dept est Est ed eds Ed Eds ch sec Sec Ch

    N° n° Nº nº

    Abb Abs Art Aufl Az Bd Bde Bf Bsp Chr Ges Hbf Hr Hrn Hrsg Ing Jh Jhd Kap Mio Mrd Nr Nrn Pos Pr
    Str Tab Tel Ziff bspw bzgl bzw dgl einschl evtl exkl gem ggf ggfs ggü inkl insb insbes max min
    mind mtl nr od s.o sog str tägl u.a ugs usw vgl zzgl zz dt engl frz lat geb gest verh Dipl Mag

    av bd boul chap coll éd env ex hab Me MM Mgr Mlle Mme Mmes réf rééd suiv tél trad

    Av Avda Cía Da Dña Dra Dras Drs Exmo Gral Ilmo Ing Lic Sra Sras Srta Srtas Ud Uds EE UU pág págs
    núm núms art arts aprox tel

    Avv Dott Geom Gent Rag Sig Sigg pag pagg ecc cap ess fig op Mons Sigra

    dhr drs mevr bijv blz enz excl incl ir jl jr mr nl resp ds Mej

    bl evt jfr kl kgl kr osv dvs ev forts mfl mm resp tex ang ung fvs iflg inkl jf nr pga sml

    godz im inż lek mgr np nr odp os par płk pow prof przyp rozdz ul św tj tzn tzw wyd zob str tys
    al pl

    atd apod č čl čp např ing jz kpt měs mj mld mil nám obr pozn ppor tj tzv ul vyd stol tis spol

    kb kft kér pl stb ún vm ill id dr ker

    esim eli ks mm ns nyk yms ym

    Sok Cad Mah Apt Bul vb vd vs yy Yrd Doç Alb Av Şti

    др ул стр рис табл им проф акад тыс млн млрд трлн руб коп гг вв св см ср напр обл пер просп пл
    кв корп пос тел факс эт чел англ нем фр лат итал исп рус греч букв изд отд прим сокр доп вып гл
    ред сост инж доц зам зав ген мл ст пп шт вул м'я грн тис напр див буд просп

    δηλ κλπ κτλ σελ αρ τηλ βλ εκ περ πρβ Δρ κα κος

    डॉ श्री सं पं ड़ॉ प्रो
    """.split()  # noqa: SIM905
)
_ABBREVIATIONS |= {word[0].upper() + word[1:] for word in _ABBREVIATIONS}
_LONGEST = 1 + max(map(len, _ABBREVIATIONS))
_DOTTED = re.compile(r"[^\W\d_]{1,2}(?:\.[^\W\d_]{1,3})+")  # z.B, т.д, U.S.A
_ROMAN = re.compile(r"[IVXLC]+")
_NUMBER = re.compile(r"\W*(?:\d{1,3}\.)*(?:\d{1,3}|[ivx]{1,4})")
_NUMBERED = re.compile(r"\W*\d{1,3}[.)]")  # the beginning of a list
# In languages whose ordinals have a full stop: words before and after an ordinal.
_BEFORE_ORDINAL = frozenset(
    """am im vom zum zur beim der die das den dem des seit ab bis und oder ein eine einen einer
    eines jeder jede jedes dieser diese ihr sein mein unser den det til fra og eller på dne od do ve
    ze dnia od roku w z kl. kl
    """.split()  # noqa: SIM905
)
_AFTER_ORDINAL = frozenset(
    """Januar Jänner Februar März April Mai Juni Juli August September Oktober November Dezember
    Jahrhundert Jahrhunderts Jahrhunderten Jh Kapitel Klasse Auflage Platz Mal Tag Tage Lebensjahr
    Stock Etage Obergeschoss OG Weltkrieg Weltkriegs Weltkrieges Bundesliga Liga Runde Rang Quartal
    Semester Absatz Satz Senat Strafsenat Zivilsenat Spieltag Wahlperiode Sitzung Jahrestag
    Geburtstag Band Teil Akt Symphonie Sinfonie Bezirk Armee Division Kompanie Woche Stunde Minute
    Generation Dynastie Dezember Advent Preis Halbjahr Halbzeit
    """.split()  # noqa: SIM905
)
_SENTENCE_LEFT = 32  # characters before a full stop to consider


def sentences(text: str) -> list[str]:
    """Split prose after the ends of sentences and at blank lines; joined, they are the text.

    >>> sentences("Dr. Smith saw 3.5 mg. It works.")
    ['Dr. Smith saw 3.5 mg. ', 'It works.']
    """
    out, start = [], 0
    for match in _BOUNDARY.finditer(text):
        place, end, mark = match.start(), match.end(), match.group()[0]
        if mark in _SPACED and _continues(text, start, place, end):
            continue
        out.append(text[start:end])
        start = end
    if start < len(text):
        out.append(text[start:])
    return out


def _continues(text: str, start: int, place: int, end: int) -> bool:
    """Whether a sentence continues after a mark that is followed by white space.

    Args:
        start: index where the sentence begins.
        place: index of the mark, the first if there are several.
        end: index where the next sentence would begin.

    >>> text = "Dr. Ito lives in Hauptstr. 5, z. B. since May. It is small."
    >>> [_continues(text, 0, i, i + 2) for i, mark in enumerate(text[:-1]) if mark == "."]
    [True, True, True, True, False]
    """
    after = text[end : end + 1]
    if text[place - 1 : place].isspace() if place > start else place > 0:
        # A mark in tokenized text, which often has no capitals; or an ellipsis of separate marks.
        return text[place] == "." and ("." in (after, text[place - 2 : place - 1]))
    if after.islower() or after in (".", "\u2026"):
        return True
    if text[place] != ".":
        return False
    # This decides most cases.
    word = text[max(start, place - _LONGEST) : place]
    word = word[word.rfind(" ") + 1 :]
    if word.isalpha():
        if len(word) == 1 or word in _ABBREVIATIONS:
            return True
        if len(word) > 4 or not word.isascii() or (word.islower() and word.strip("ivx")):
            return word.endswith("str")
    elif word.isdigit() and len(word) == place - start < 4:
        return True
    return _continues_after_short_word(text, start, place, end)


def _continues_after_short_word(text: str, start: int, place: int, end: int) -> bool:
    """``_continues``, for a full stop after a short word, a number or the like."""
    parts = text[max(start, place - _SENTENCE_LEFT) : place].split()
    if not parts:
        return False
    word = parts[-1].lstrip("([{\u201e\u201c\"'\u00ab\u2018\u2019\u203a\u2013/").rpartition("-")[2]
    if word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha()) or parts[-1].endswith("["):
        return True
    if word[-1:].isalpha():
        return bool(
            _DOTTED.fullmatch(word)
            or (word.isupper() and _ROMAN.fullmatch(word))
            or (word.endswith("str") and word[0].isupper())
            or (word.islower() and _is_number_of_list(text, start, place))
        )
    if word[-1:].isdigit() and len(word) < 4:
        return (
            _is_number_of_list(text, start, place)
            or text[place + 1 : place + 2] == ")"
            or _NUMBERED.match(text, start) is not None
            or _is_ordinal(parts, text[end : end + _SENTENCE_LEFT].split())
        )
    return False


def _is_number_of_list(text: str, start: int, place: int) -> bool:
    """Whether the full stop follows only a number in its sentence or line."""
    line = text.rfind("\n", max(start, place - _SENTENCE_LEFT), place) + 1 or start
    return place - line < _SENTENCE_LEFT and bool(_NUMBER.fullmatch(text, line, place))


def _is_ordinal(before: list[str], after: list[str]) -> bool:
    """Whether a number is an ordinal (3. Oktober) or numbers an item of a list, by its context."""
    former = before[-2] if len(before) > 1 else ""
    is_bullet = bool(former) and not any(map(str.isalnum, former))
    next_word = after[0].rstrip(",.;:!?)") if after else ""
    return is_bullet or former.lower() in _BEFORE_ORDINAL or next_word in _AFTER_ORDINAL
