"""Filters in JSON: what they select in a real table against Python's own comparisons, and that
nothing but quoted columns, known operators and literals reaches the SQL.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from letters import Letters, build

from revela.errors import QueryError, RevelaError
from revela.searching.filters import FILTER_LIMIT, Narrow, where_sql
from revela.searching.index import Index
from revela.types import Document

COLUMNS = {"year": "int64", "price in €": "double", "open": "bool", "select": "string"}
YEARS, PRICES = [-5, 0, 2020, 2021, 2**53 + 1], [-1.5, 0.0, 2.0, 1e300]
NAMES = ["en", "it's", "' or 1 = 1 --", "%", "é\\\n", ""]
OPERATORS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
    "in": lambda a, b: a in b,
    "not_in": lambda a, b: a not in b,
    "prefix": str.startswith,
    "contains": lambda a, b: b.lower() in a.lower(),
}
"""A row's value and the filter's; neither is null."""


def rows() -> list[dict]:
    """Every value of each column, a null among them, in mixed company."""
    return [
        {
            "year": [*YEARS, None][i % 6],
            "price in €": [*PRICES, None][i % 5],
            "open": [True, False, None][i % 3],
            "select": [*NAMES, None][i % 7],
        }
        for i in range(35)
    ]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    documents = [
        Document(str(i), "a b", metadata={k: v for k, v in row.items() if v is not None})
        for i, row in enumerate(rows())
    ]
    return build(tmp_path_factory.mktemp("filters") / "index", documents, metadata=tuple(COLUMNS))


def of_column(name: str, values: list) -> st.SearchStrategy:
    value = st.sampled_from(values)
    compare = st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte"])
    test = st.one_of(
        st.tuples(compare, value),
        st.tuples(st.sampled_from(["in", "not_in"]), st.lists(value, min_size=1, max_size=3)),
        st.tuples(st.sampled_from(["eq", "ne"]), st.none()),
    )
    condition = st.one_of(value, st.none(), st.lists(test, min_size=1, max_size=2).map(dict))
    return condition.map(lambda found: {name: found})


CONDITIONS = st.one_of(
    of_column("year", [*YEARS, 2020.0]),
    of_column("price in €", [*PRICES, 2]),
    of_column("open", [True, False]),
    of_column("select", NAMES),
    st.tuples(
        st.sampled_from(["prefix", "contains"]), st.sampled_from([*NAMES, "E", "IT", "É"])
    ).map(lambda test: {"select": {test[0]: test[1]}}),
)
FILTERS = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3)).map(
            lambda pair: {pair[0]: pair[1]}
        ),
        inner.map(lambda found: {"not": found}),
        st.tuples(inner, inner).map(lambda pair: {**pair[0], **pair[1]}),
    ),
    max_leaves=5,
)


def holds(where: dict, row: dict) -> bool:
    """What a filter means, by a naive loop: a missing value fails every comparison."""
    results = []
    for name, value in where.items():
        if name == "not":
            results.append(not holds(value, row))
        elif name in ("and", "or"):
            results.append((any if name == "or" else all)(holds(part, row) for part in value))
        else:
            tests = value if isinstance(value, dict) else {"eq": value}
            results.append(all(compare(row[name], *test) for test in tests.items()))
    return all(results)


def compare(value, operator, other) -> bool:
    if other is None:
        return (value is None) == (operator == "eq")
    return value is not None and OPERATORS[operator](value, other)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(where=FILTERS)
@example({"not": {"and": [{"year": {"in": [-5], "not_in": [-5]}}]}})  # the optimiser calls it true
@example({"or": [{"year": {"in": [-5]}}, {"year": {"not_in": [-5]}}]})
def test_filters_select_what_python_selects(index, where):
    found = {hit.id for hit in index.search("ab", 40, "dense", where)}
    assert found == {str(i) for i, row in enumerate(rows()) if holds(where, row)}


def test_an_empty_filter_selects_everything_and_ids_and_titles_are_columns(index):
    assert where_sql({}, COLUMNS) == "" and len(index.search("ab", 40, "dense", {})) == 35
    found = index.search("ab", 40, "dense", {"id": {"in": ["3", "4"]}, "title": ""})
    assert {hit.id for hit in found} == {"3", "4"}
    assert where_sql("any SQL", COLUMNS) == "any SQL"


REFUSED = [
    ({"colour": 1}, "unknown column colour: give one of id, title, date, type, language, year"),
    ({"year` > 0 or `year": 1}, "unknown column year` > 0"),
    ({"year": {"like": 1}}, "unknown operator like: give one of eq, ne"),
    ({"year": {"> 0 or 1 =": 1}}, "unknown operator > 0 or"),
    ({"year": "2020"}, "year holds int64, not '2020'"),
    ({"year": {"prefix": "2"}}, "unknown operator prefix: give one of eq, ne"),
    ({"id": {"contains": 2}}, "id holds string, not 2"),
    ({"year": 2020.5}, "year holds int64, not 2020.5"),
    ({"year": 2**63}, "year holds int64"),
    ({"year": 10**400}, "year holds int64"),
    ({"year": True}, "year holds int64, not True"),
    ({"year": {"gt": None}}, "year holds int64, not None"),
    ({"year": {"in": [None]}}, "year holds int64, not None"),
    ({"year": [2020]}, r"year holds int64, not \[2020\]"),
    ({"price in €": float("nan")}, "holds double, not nan"),
    ({"open": 1}, "open holds bool, not 1"),
    ({"year": {}}, "year has no condition"),
    ({"year": {"in": []}}, "in takes a list of values"),
    ({"year": {"in": "2020"}}, "in takes a list of values"),
    ({"or": []}, "or takes a list of filters"),
    ({"and": {"year": 1}}, "and takes a list of filters"),
    ({"or": ["year = 1"]}, "take objects"),
    ({"not": "year = 1"}, "take objects"),
]


@pytest.mark.parametrize(("where", "why"), REFUSED)
def test_anything_else_is_refused_in_one_sentence(where, why):
    with pytest.raises(RevelaError, match=why) as refused:
        where_sql(where, COLUMNS)
    message = str(refused.value)
    assert message.endswith('send one such as {"year": {"gt": 2020}, "lang": "en"}')
    assert len(message) < 300 and "\n" not in message


@pytest.mark.parametrize("date", [{"gt": "soon"}, "2023-02-29", {"lte": 2024}])
def test_a_date_is_a_year_a_month_or_a_day(date):
    with pytest.raises(
        RevelaError, match=r"must be a year, a month or a day .* \(got ('soon|'2023|2024)"
    ):
        where_sql({"date": date}, COLUMNS)


def test_a_value_that_is_no_number_is_missing(tmp_path):
    """SQL takes NaN for greater than all numbers."""
    values = {"nan": math.nan, "endless": math.inf, "none": None, "two": 2.5}
    docs = [Document(name, "abba", metadata={"price": value}) for name, value in values.items()]
    index = build(tmp_path / "index", docs, metadata=["price"])
    for where, names in (
        ({"price": {"gt": 1}}, {"two"}),
        ({"price": {"ne": 1.5}}, {"two"}),
        ("price > 1", {"two"}),
        ({"price": None}, {"nan", "endless", "none"}),
        ({"not": {"price": {"lt": 1}}}, {*values}),
    ):
        hits = index.search("abba", where=where)
        assert {hit.id for hit in hits} == names, where
        # JSON lacks the others.
        assert all(hit.metadata == ({"price": 2.5} if hit.id == "two" else {}) for hit in hits)


@pytest.mark.parametrize("name", ["a.b", "a`b", "_id", "passage"])
def test_a_column_that_a_table_cannot_have_is_refused_before_work(tmp_path, saved_retriever, name):
    docs = [Document("a", "abba", metadata={name: 1})]
    encoder = Letters()
    with pytest.raises(RevelaError, match=f"--metadata {name}: .*column.*; rename the field"):
        build(tmp_path / "index", docs, encoder, metadata=[name])
    with pytest.raises(RevelaError, match="rename the field"):
        Index.create(tmp_path / "index", saved_retriever, {name: "int64"}, encoder=encoder)
    assert not encoder.seen


def test_depth_and_length_are_bounded():
    deep = {"year": 1}
    for _ in range(19):
        deep = {"not": deep}
    assert where_sql(deep, COLUMNS).count("not (") == 19
    with pytest.raises(RevelaError, match="more than 20 levels"):
        where_sql({"not": deep}, COLUMNS)
    for long in ({"year": {"in": [1] * FILTER_LIMIT}}, "a" * (FILTER_LIMIT + 1)):
        with pytest.raises(RevelaError, match="longer than 10,000 characters"):
            where_sql(long, COLUMNS)


MANY_OPERATORS = [
    ({"or": [{}] * 980}, 35),
    ({"or": [{"id": None}] * 500}, 0),
    ({"and": [{"or": [{"id": "1"}, {"id": "2"}]}] * 120}, 2),
]


@pytest.mark.parametrize(("where", "count"), MANY_OPERATORS)
def test_as_many_operators_as_fit_do_not_overflow_the_table_s_parser(index, where, count):
    assert len(where_sql(where, COLUMNS)) > 8000
    assert len(index.search("ab", 40, "dense", where)) == count


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*COLUMNS, *OPERATORS, "and", "or", "not"]) | st.text(max_size=8),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
TOKEN = re.compile(
    r"`(?:year|price in €|open|select|id|title)`|'(?:[^']|'')*'"
    r"|(?:and|or|not|in|is|null|true|false)\b|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|!=|[<>]=?|[=(), ]"
)


@settings(max_examples=150, deadline=None)
@given(where=st.dictionaries(st.sampled_from([*COLUMNS, "and", "or", "not"]), JSON, max_size=3))
def test_any_json_gives_plain_comparisons_or_one_sentence(where):
    try:
        sql = where_sql(where, COLUMNS)
    except RevelaError as error:
        assert len(str(error)) < 300
        return
    assert not TOKEN.sub("", sql)


DATES = ["2023-12-31", "2024-01-01", "2024-05-31", "2024-06-01", "2024", None]
SELECTED = [
    (Narrow(since="2024-05"), {"2", "3"}),
    (Narrow(until="2024-05"), {"0", "1", "2", "4"}),
    (Narrow(since="2024", until="2024-01-01"), {"1", "4"}),
    (Narrow(folder="./a/b"), {"a/b/1", "a/b"}),
    (Narrow(folder="a/"), {"a/b/1", "a/b", "a/bc", "a/m.mbox:1"}),
    (Narrow(folder="a/m.mbox"), {"a/m.mbox:1"}),
    (Narrow(type=".PDF, md"), {"0", "3"}),
    (Narrow(language="de", title="TITLE"), {"1"}),
]


@pytest.fixture(scope="module")
def dated(tmp_path_factory):
    documents = [
        Document(str(i), "a b", metadata={"date": day} if day else {})
        for i, day in enumerate(DATES)
    ]
    kinds = ({"type": "pdf"}, {"language": "de"}, {}, {"type": "md"}, {}, {"language": "de"})
    documents = [
        replace(one, metadata={**one.metadata, **kind}, title="A Title" if one.id == "1" else "")
        for one, kind in zip(documents, kinds, strict=True)
    ]
    documents += [Document(name, "a b") for name in ("a/b/1", "a/b", "a/bc", "a/m.mbox:1")]
    return build(tmp_path_factory.mktemp("dated") / "index", documents, metadata=("date",))


@pytest.mark.parametrize(("narrow", "wanted"), SELECTED)
def test_short_filters_select_what_they_say(dated, narrow, wanted):
    found = dated.search("ab", 40, "dense", narrow.and_also({"id": {"ne": "x"}}))
    assert {hit.id for hit in found} == wanted


@pytest.mark.parametrize("query", ['"a b" it\'s', '"a b" "it\'s so"'])
def test_a_refused_filter_is_quoted_without_the_phrases(dated, query):
    for where in ("nope = 1", "nope = 1 -- no column"):
        with pytest.raises(QueryError, match=f'the filter "{where}" cannot be used'):
            dated.search(query, 3, "dense", where)


@pytest.mark.parametrize(
    ("test", "wanted"),
    [
        ("2024", "1234"),
        ({"ne": "2024-01"}, "0234"),
        ({"gt": "2024-01"}, "23"),
        ({"lt": "2024"}, "0"),
        ({"in": ["2024-05", "2023"]}, "02"),
        ({"not_in": ["2024-01", "2023"]}, "234"),
    ],
)
def test_a_date_is_all_of_its_days(dated, test, wanted):
    found = dated.search("ab", 40, "dense", {"date": test})
    assert {hit.id for hit in found} == {*wanted}
    assert all(hit.date == DATES[int(hit.id)] for hit in found) and not dated.info.columns
