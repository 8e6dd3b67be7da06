"""Read manual pages (roff, with the macros man and mdoc) as text; lines keep their numbers."""

from __future__ import annotations

import re

_BEGINS = re.compile(r"\s*+[.'](?s:.{,20000}?)^\.(?:TH|Dd|SH|Sh)[ \t]", re.MULTILINE)
_NAME = re.compile(r'^\.(?:TH|Dt)[ \t]+"?([^\s"]+)"?[ \t]+"?(\w+)', re.MULTILINE)
_MACRO = re.compile(r"^\.[ \t]*(?:de|am|ig)\b(?:.*\n){0,99}?\.[ \t]*\.[ \t]*$", re.MULTILINE)
_REQUEST = re.compile(r"""^[.'][ \t]*(\\["#]|[A-Za-z]*+)[ \t]*(.*)$""", re.MULTILINE)
_PARTS = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
# Requests whose rest is not text; of those of two fonts, the parts follow each other.
_SETTINGS = frozenset(
    """ad de ds el fi ft hy ie if ig in ll ls na ne nf nh nr ns pl ps rm rr rs sp ss ta ti tr UE PD
    RE RS TH IX INDENT UNINDENT Bd Bl Dd Dt Ed El Os Rs Re""".split()  # noqa: SIM905
)
_FONTS = frozenset("BI BR IB IR RB RI".split())  # noqa: SIM905
_NAMED = {
    **{"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "em": "—", "en": "–"},
    **{"bu": "•", "co": "©", "rg": "®", "rs": "\\", "ha": "^", "ti": "~", "hy": "-", "mu": "×"},
}
_ESCAPE = re.compile(
    r"""\\(?:f(?:\[[^\]\n]{0,40}\]|\(..|.)|s(?:[-+]?\d\d?|\[[^\]\n]{0,40}\])
    |[*n](?:\[[^\]\n]{0,40}\]|\(..|.)|\((?P<two>..)|\[(?P<named>[^\]\n]{0,40})\]|".*|(?P<sign>.))""",
    re.VERBOSE,
)
_SIGNS = dict.fromkeys(" ~0", " ") | {sign: sign for sign in "-'`.\\"} | {"e": "\\"}


def is_roff(source: str) -> bool:
    return bool(_BEGINS.match(source))


def plain_roff(source: str) -> tuple[str, str]:
    r"""Title and text of a manual page.

    >>> plain_roff('.TH HIVE 1\n.SH NAME\nhive \\- lists\n.BR \\-l ", " \\-\\-long\n\\fIall\\fR')
    ('HIVE(1)', '\nNAME\nhive - lists\n-l, --long\nall')
    """
    name = _NAME.search(source)
    text = _MACRO.sub(lambda found: "\n" * found[0].count("\n"), source)
    text = _ESCAPE.sub(_escaped, _REQUEST.sub(_words, text))
    return f"{name[1]}({name[2]})" if name else "", text


def _words(found: re.Match[str]) -> str:
    name, rest = found.groups()
    if name in _SETTINGS or not name[:1].isalpha():
        return ""
    parts = [quoted.replace('""', '"') or word for quoted, word in _PARTS.findall(rest)]
    return ("" if name in _FONTS else " ").join(parts)


def _escaped(found: re.Match[str]) -> str:
    named = found["two"] or found["named"]
    return _NAMED.get(named, "") if named else _SIGNS.get(found["sign"] or "", "")
