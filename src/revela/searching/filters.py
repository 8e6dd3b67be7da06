"""Translate JSON filters, such as ``{"year": {"gt": 2020}, "lang": "en"}``, into the table's SQL.

Accept SQL itself only from trusted callers: a function can ask for gigabytes (``repeat('a',
2000000000)``), and a long sum can overflow the parser's stack.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import regex

from revela.errors import QueryError
from revela.text.dates import iso_date
from revela.text.letters import LETTER, PAIRED, TRIPLED

FILTER_LIMIT = 10_000  # characters of SQL
MAX_DEPTH = 20
# Of every index; a date is a string in ISO 8601.
OWN_COLUMNS = dict.fromkeys(("id", "title", "date", "type", "language"), "string")
COMPARISONS = {"eq": "=", "ne": "!=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
MEMBERSHIP = {"in": "in", "not_in": "not in"}
PARTS = {"prefix": "starts_with({}, {})", "contains": "contains(lower({}), lower({}))"}
EXAMPLE = '{"year": {"gt": 2020}, "lang": "en"}'

NO_PHRASE = (
    "No passage that was searched contains the phrase in quotes: these results ignore the quotes."
)
_PHRASE = re.compile(r"""(?<!\w)["“„«»]([^"“”„«»]*)["“”«»](?!\w)""")
_OF_PHRASES = re.compile(r"\A(?:regexp_like\(passage, '(?:[^']|'')*', 'i'\)(?: and |\Z))+")
_SPACED = regex.compile(LETTER, regex.V1)
_UNSPACED = regex.compile(rf"[{PAIRED}{TRIPLED}]{{2}}", regex.V1)


@dataclass(frozen=True)
class Narrow:
    """Only documents that meet all of these."""

    folder: str = ""
    """Only documents in this folder, by the path that results show; or this file. Rows with an id
    of their own are in none."""
    since: str = ""
    "Only documents of this date or later: 2024, 2024-05 or 2024-05-31."
    until: str = ""
    "Only documents of this date or earlier."
    type: str = ""
    "Only documents with this file extension: pdf; or one of several: pdf,docx."
    language: str = ""
    "Only documents in this language: en; or one of several: en,de."
    title: str = ""
    "Only documents with this text in their title (case-insensitive)."

    def and_also(self, where: Mapping[str, object] | None = None) -> dict[str, object]:
        """These, and another filter, as a filter in JSON; {} if there are none."""
        path = PurePosixPath(self.folder)
        folder = path.as_posix() if path.parts else ""  # "." is all of it
        below = [{"id": {"prefix": folder + mark}} for mark in "/:"]  # "mails.mbox:1" is in a file
        within = {"or": [{"id": folder}, *below]}
        several = {"type": self.type.lower().replace(".", ""), "language": self.language.lower()}
        parts: list[Mapping[str, object] | None] = [
            within if folder else None,
            {"date": {"gte": self.since}} if self.since else None,
            {"date": {"lte": self.until}} if self.until else None,
            *({n: {"in": [v.strip() for v in of.split(",")]}} for n, of in several.items() if of),
            {"title": {"contains": self.title}} if self.title else None,
            where,
        ]
        given = [part for part in parts if part]
        return {"and": given} if given else {}


def where_sql(where: str | Mapping[str, object], columns: Mapping[str, str]) -> str:
    """A filter as SQL; a string is SQL already and stays as it is.

    A column maps to a value, or to operators and their values: eq, ne, gt, gte, lt, lte, in,
    not_in; of text, prefix, and contains in any case. A date is a year, a month or a day, and all
    of it: ``{"date": {"lte": "2024-05"}}`` selects the 31st of May, too. ``"and"`` and ``"or"`` map
    to a list of filters, ``"not"`` to a filter. All entries of an object must hold. A row without a
    value fails every comparison but ``{"column": null}``, and ``"not"`` selects every row that its
    filter does not.

    ``columns`` are the index's metadata and their Arrow types; JSON may name these, and those of
    ``OWN_COLUMNS``.

    Example:
        >>> where_sql({"year": {"gte": 2019, "lt": 2021}}, {"year": "int64"})
        '`year` is not null and `year` >= 2019 and `year` is not null and `year` < 2021'
    """
    if isinstance(where, str):
        return _join("", [where])
    return _join("", [_all_of(where, {**OWN_COLUMNS, **columns}, 1)])


def phrases(query: str) -> list[str]:
    """Patterns of the phrases in a query: several words in double quotes, in this order and with
    white space between them. QueryError if there is nothing but quotes.

    >>> phrases('which "New  York" is old')
    ['\\\\bNew\\\\s+York\\\\b']
    """
    found = list[str]()
    for quoted in _PHRASE.finditer(query):
        words = quoted[1].split()
        if not (_UNSPACED.search(quoted[1]) or len(re.findall(r"\w\S*", quoted[1])) > 1):
            if not re.search(r"\w", query):
                raise QueryError(
                    f"the phrase {quoted[0]} has no words: put words in the quotes", "query"
                )
            continue
        edges = (r"\b" if _SPACED.fullmatch(edge) else "" for edge in (words[0][0], words[-1][-1]))
        found.append(r"\s+".join(map(re.escape, words)).join(edges))
    return found


def with_phrases(where: str, query: str) -> str:
    """A filter in SQL that also selects passages with all phrases of a query."""
    parts = [f"regexp_like(passage, {_quoted(phrase)}, 'i')" for phrase in phrases(query)]
    return both(" and ".join(parts), where)


def own_filter(where: str) -> str:
    """The caller's part of a filter by ``with_phrases``, for messages."""
    own = _OF_PHRASES.sub("", where)
    return own if own == where else own.removeprefix("(").removesuffix("\n)")


def both(first: str, second: str) -> str:
    """A filter in SQL of two; either may be empty. The second may end with a comment."""
    return f"{first} and ({second}\n)" if first and second else first or second


def id_filter(documents: Iterable[str]) -> str:
    """SQL that selects the rows of these documents."""
    return f"id in ({', '.join(map(_quoted, documents))})"


def _quoted(text: str) -> str:
    return "'{}'".format(text.replace("'", "''"))


def _join(separator: str, parts: Iterable[str]) -> str:
    """Join parts; QueryError as soon as they are too long, so that no filter is slow."""
    sql = ""
    for part in parts:
        sql += separator + part if sql else part
        if len(sql) > FILTER_LIMIT:
            message = f"the filter is longer than {FILTER_LIMIT:,} characters: give a shorter one"
            raise QueryError(message, "where")
    return sql


def _all_of(where: object, columns: Mapping[str, str], depth: int) -> str:
    """The entries of a filter, joined by and; "" if there are none."""
    if not isinstance(where, Mapping):
        raise _error("and, or and not take objects", where)
    if depth > MAX_DEPTH:
        raise _error(f"it has more than {MAX_DEPTH} levels")
    return _join(" and ", (_entry(*entry, columns, depth) for entry in where.items()))


def _entry(name: object, value: object, columns: Mapping[str, str], depth: int) -> str:
    if name == "not":
        return f"not ({_all_of(value, columns, depth + 1) or 'true'})"
    if name in ("and", "or"):
        if not isinstance(value, list | tuple) or not value:
            raise _error(f"{name} takes a list of filters", value)
        parts = (f"({_all_of(part, columns, depth + 1) or 'true'})" for part in value)
        return f"({_join(f' {name} ', parts)})"
    if name not in columns:
        raise _error(f"unknown column {str(name)[:40]}: give one of {', '.join(columns)}")
    tests = value if isinstance(value, Mapping) else {"eq": value}
    if not tests:
        raise _error(f"{name} has no condition")
    kind = columns[str(name)]
    return _join(" and ", (_condition(str(name), *test, kind) for test in tests.items()))


def _condition(name: str, operator: object, value: object, kind: str) -> str:
    """A condition that is true or false for every row, never unknown. If x is missing, ``not (x in
    (1) and x not in (1))`` is unknown in SQL, but true for the table's optimiser."""
    column = "`{}`".format(name.replace("`", "``"))
    if value is None and operator in ("eq", "ne"):
        return f"{column} is {'not ' if operator == 'ne' else ''}null"
    if operator in MEMBERSHIP:
        if not isinstance(value, list | tuple) or not value:
            raise _error(f"{operator} takes a list of values", value)
        if name == "date":
            days = _join(" or ", (_date_test(column, "=", item) for item in value))
            test = f"{'not ' * (operator == 'not_in')}({days})"
        else:
            values = _join(", ", (_literal(item, name, kind) for item in value))
            test = f"{column} {MEMBERSHIP[str(operator)]} ({values})"
    elif operator in COMPARISONS:
        sign = COMPARISONS[str(operator)]
        if name == "date":
            test = _date_test(column, sign, value)
        else:
            test = f"{column} {sign} {_literal(value, name, kind)}"
    elif operator in PARTS and kind == "string":
        test = PARTS[str(operator)].format(column, _literal(value, name, kind))
    else:
        known = ", ".join([*COMPARISONS, *MEMBERSHIP, *(PARTS if kind == "string" else ())])
        raise _error(f"unknown operator {str(operator)[:40]}: give one of {known}")
    return f"{column} is not null and {test}"


def _date_test(column: str, sign: str, value: object) -> str:
    """A comparison with all days of a date."""
    if not isinstance(value, str) or iso_date(value) != value:
        got = reprlib.repr(value)[:60]
        message = f"a date must be a year, a month or a day such as 2024-05-31 (got {got})"
        raise QueryError(message, "where")
    if sign in ("=", "!="):
        return f"{'not ' * (sign == '!=')}starts_with({column}, {_quoted(value)})"
    end = "~" * (sign in (">", "<="))  # after - and digits
    return f"{column} {sign} {_quoted(value + end)}"


def _literal(value: object, name: str, kind: str) -> str:
    """A value as SQL writes it, if its column can hold it."""
    if kind == "string" and isinstance(value, str):
        return _quoted(value)
    if kind == "bool" and isinstance(value, bool):
        return str(value).lower()
    if kind in ("int64", "double") and type(value) in (int, float):
        integer = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(integer, int) and abs(integer) < 2**63:
            return str(integer)  # the table takes no 2020.0 for an int64
        if kind == "double" and isinstance(value, float) and math.isfinite(value):
            return repr(value)
    raise _error(f"{name} holds {kind}", value)


def _error(reason: str, found: object = ...) -> QueryError:
    not_this = "" if found is ... else f", not {reprlib.repr(found)[:60]}"
    message = f"the filter cannot be used ({reason}{not_this}): send one such as {EXAMPLE}"
    return QueryError(message, "where")
