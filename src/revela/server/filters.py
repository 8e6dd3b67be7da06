"""Filters from strangers: comparisons of an index's columns with constants, joined by and, or, not,
in parentheses; no other SQL.

The store takes any expression of its SQL, which is right for its owner. From the net, a function
may ask for gigabytes (``repeat('a', 2000000000)``) and a long sum overflows the parser's stack,
which ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from revela.server.problems import Refused

TOKENS, DEPTH = 500, 20
KEYWORDS = {"and", "or", "not", "in", "like", "ilike", "between", "is", "null", "true", "false"}
TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*')
          | (?P<number>-?(?:\d++\.?\d*+|\.\d++)(?:e[+-]?\d++)?+(?!\w))
          | (?P<name>[^\W\d]\w*|`[^`]+`|"[^"]+")
          | (?P<sign><=|>=|!=|<>|[=<>(),]))\s*""",
    re.VERBOSE | re.IGNORECASE,
)


def refuse_wild(where: str, columns: Collection[str]) -> None:
    """Refuse a filter that is more than comparisons of these columns with constants. (What it
    means, the store finds out.)

    Raises:
        Refused: 400.
    """
    at = depth = count = 0
    after_value = False
    while at < len(where):
        token = TOKEN.match(where, at)
        if token is None:
            raise _refused(f"not at “{where[at : at + 20]}”")
        at, count = token.end(), count + 1
        name, sign = token["name"], token["sign"]
        if name and name.lower() not in KEYWORDS and name.strip('`"') not in columns:
            raise _refused(f"there is no column {name[:40]}, only {', '.join(columns)}")
        if after_value and (token["number"] or "").startswith("-"):
            raise _refused("no arithmetic")
        after_value = not (sign and sign != ")") and not (name and name.lower() in KEYWORDS)
        depth += {"(": 1, ")": -1}.get(sign or "", 0)
        if depth > DEPTH or count > TOKENS:
            raise _refused(f"at most {DEPTH} parentheses deep and {TOKENS} words long")


def _refused(why: str) -> Refused:
    return Refused(
        400,
        f"the filter must compare columns with constants, as in: year > 2020 and lang in ('en', 'de'); {why}",
        "where",
    )
