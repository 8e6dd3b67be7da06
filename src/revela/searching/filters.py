"""Translate JSON filters, such as ``{"year": {"gt": 2020}, "lang": "en"}``, into the table's SQL.

Take SQL itself only from trusted callers: a function can ask for gigabytes (``repeat('a',
2000000000)``), and a long sum can overflow the parser's stack.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping

import regex

from revela.errors import QueryError
from revela.text.letters import LETTER

FILTER_LIMIT = 10_000  # characters of SQL
MAX_DEPTH = 20
OWN_COLUMNS = {"id": "string", "title": "string"}  # of every index
COMPARISONS = {"eq": "=", "ne": "!=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
MEMBERSHIP = {"in": "in", "not_in": "not in"}
EXAMPLE = '{"year": {"gt": 2020}, "lang": "en"}'

_PHRASE = re.compile(r"""(?<!\w)["“„«»]([^"“”„«»]*)["“”«»](?!\w)""")
_SPACED = regex.compile(LETTER, regex.V1)


def where_sql(where: str | Mapping[str, object], columns: Mapping[str, str]) -> str:
    """A filter as SQL; a string is SQL already and stays as it is.

    A column maps to a value, or to operators and their values: eq, ne, gt, gte, lt, lte, in,
    not_in. ``"and"`` and ``"or"`` map to a list of filters, ``"not"`` to a filter. All entries of
    an object must hold. A row without a value fails every comparison but ``{"column": null}``, and
    ``"not"`` selects every row that its filter does not.

    ``columns`` are the index's metadata and their Arrow types; JSON may name these, id and title.

    Example:
        >>> where_sql({"year": {"gte": 2019, "lt": 2021}}, {"year": "int64"})
        '`year` is not null and `year` >= 2019 and `year` is not null and `year` < 2021'
    """
    if isinstance(where, str):
        return _join("", [where])
    return _join("", [_all_of(where, {**OWN_COLUMNS, **columns}, 1)])


def phrases(query: str) -> list[str]:
    """Patterns of the phrases in double quotes in a query: these words in this order, whatever is
    between them is white space. QueryError for quotes without a word between them.

    >>> phrases('which "New  York" is old')
    ['\\\\bNew\\\\s+York\\\\b']
    """
    found = list[str]()
    for quoted in _PHRASE.finditer(query):
        words = quoted[1].split()
        if not re.search(r"\w", quoted[1]):
            raise QueryError(f"the phrase {quoted[0]} has no word: leave out its quotes", "query")
        edges = (r"\b" if _SPACED.fullmatch(edge) else "" for edge in (words[0][0], words[-1][-1]))
        found.append(r"\s+".join(map(re.escape, words)).join(edges))
    return found


def with_phrases(where: str, query: str) -> str:
    """A filter in SQL that also selects passages with all phrases of a query."""
    parts = [f"regexp_like(passage, {_quoted(phrase)}, 'i')" for phrase in phrases(query)]
    return " and ".join([*parts, f"({where}\n)"] if where and parts else parts or [where])


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
        raise _error(f"there is no column {str(name)[:40]}, only {', '.join(columns)}")
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
        values = _join(", ", (_literal(item, name, kind) for item in value))
        comparison = f"{MEMBERSHIP[str(operator)]} ({values})"
    elif operator in COMPARISONS:
        comparison = f"{COMPARISONS[str(operator)]} {_literal(value, name, kind)}"
    else:
        known = ", ".join([*COMPARISONS, *MEMBERSHIP])
        raise _error(f"there is no operator {str(operator)[:40]}, only {known}")
    return f"{column} is not null and {column} {comparison}"


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
