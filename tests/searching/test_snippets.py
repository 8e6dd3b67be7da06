"""What is shown of a hit: which part, as what text, and what is marked."""

from __future__ import annotations

import time

import numpy as np
import pytest

from revela.ranking.bm25 import BM25
from revela.searching.highlight import HighlightTerms
from revela.searching.index_search import distinct
from revela.searching.plain_lines import plain
from revela.searching.snippets import CHARACTERS, LINES, Snippet, heading_of, snippet
from revela.text.analyzer import Analyzer
from revela.types import Hit

FILLER = "Filler words stand here and there. "


def shown(text, query, name="a.md", language="en", others=(FILLER,), characters=CHARACTERS):
    known = BM25([text, *others], language)
    terms = HighlightTerms.of(query, known.terms, known.idf)
    return snippet(Hit(name, 1, "", text, line=1, page=1), terms, characters)


def marked(found: Snippet) -> list[str]:
    return [found.text[begin:end] for begin, end in found.marks]


def test_the_window_is_that_with_the_rarest_words():
    common = "The engine stands here. "
    text = FILLER * 20 + common + FILLER * 20 + "The camshaft of it turns. " + FILLER * 20
    found = shown(text, "why does the engine camshaft turn", others=[common] * 9)
    assert found.text.startswith("… The camshaft of it turns. Filler") and found.text[-1] == "…"
    assert len(found.text) <= CHARACTERS + 4 and marked(found) == ["camshaft", "turns"]


def test_the_end_of_a_passage_fills_the_window_with_what_stands_before():
    found = shown(FILLER * 20 + "A camshaft turns.", "camshaft")
    assert found.text.endswith("there. A camshaft turns.") and len(found.text) > CHARACTERS - 40


def test_words_that_stand_everywhere_and_words_of_questions_are_not_marked():
    others = [f"bees fly to flower{i}" for i in range(30)]
    found = shown("What do bees do when wax melts?", "what do bees do with wax", others=others)
    assert marked(found) == ["wax"]
    assert marked(shown("What is it?", "what is it")) == ["What"]


@pytest.mark.parametrize(
    "text, query, language, words",
    [
        ("NW 5 and NW-1008, NW-10070 and NW-1007.", "NW-1007", "en", ["NW-1007"]),
        ("Order nw 1007 is late.", "where is NW-1007?", "en", ["nw 1007"]),
        ("订单号NW-1007的状态", "NW-1007", "en", ["NW-1007"]),
        ("Take 35 or 3.5 mg.", "3.5", "en", ["3.5"]),
        ("max_words and words", "max_words", "en", ["max_words"]),
        ("getFileName of a file", "getFileName", "en", ["getFileName"]),
        ("A well-known word is well put.", "well-known", "en", ["well", "known", "well"]),
        ("The tag v1.2.3 of 2024-06-05T10:30.", "1.2.3 of 2024-06-05", "en",
         ["1.2.3", "2024-06-05"]),
        ("Call +49 30 1234567 at 30.", "+49 30 1234567", "en", ["+49 30 1234567"]),
        ("In COVID19 times", "COVID-19", "en", ["COVID19"]),
        ("Die Bibliotheken öffnen früh.", "Wann öffnet die Bibliothek?", "de",
         ["Bibliotheken", "öffnen"]),
        ("蜜蜂在花丛之间，ＡＢ跳舞。", "蜜蜂怎样跳舞？", "zh", ["蜜蜂", "跳舞"]),
        ("ミツバチは踊ります。", "ミツバチはなぜ踊る", "ja", ["ミツバチ"]),
        ("يَفتَحُ المتحفُ أبوابَهُ صباحاً", "متى يفتح المتحف", "ar", ["يَفتَحُ", "المتحفُ"]),
        ("พิพิธภัณฑ์เปิดเวลาเก้าโมง", "พิพิธภัณฑ์เปิดกี่โมง", "th", ["พิพิธภัณฑ์เปิด", "โมง"]),
        ("मैं हिन्दी बोलता हूँ", "हिन्दी", "hi", ["हिन्दी"]),
        ("Die ﬁne Fußgänger\u00adzone", "Fine Fußgängerzone", "de", ["ﬁne", "Fußgänger\u00adzone"]),
    ],
)  # fmt: skip
def test_identifiers_stems_and_pairs_of_characters_are_marked(text, query, language, words):
    assert marked(shown(text, query, "a.txt", language)) == words


def test_a_long_text_without_spaces_is_cut_between_letters():
    found = shown("一二三四五六七八九十" * 60 + "蜜蜂跳舞。" + "好" * 400, "蜜蜂", "a.txt", "zh")
    assert "蜜蜂跳舞" in found.text and len(found.text) <= CHARACTERS // 2 + 4
    marks = "ก\u0e49" * 400 + "แมวดำ" + "ก\u0e49" * 400
    text = shown(marks, "แมวดำ", "a.txt", "th").text
    assert "แมวดำ" in text and not text.startswith(("… \u0e49", "\u0e49"))


MARKDOWN = """
[![CI](https://a.b/c.svg)](https://a.b/c) ![logo](logo.png)
# A *guide* #

Read [the **long** manual](https://a.b/c_(d) "Title") and [that][1], <https://a.b>, \\*so\\*.
> It is __very__ ~~un~~likely that `__init__` or `a*b*c` or snake_case_name is changed.

- first ![A picture of bees](bees.png)
- [x] second<br>

1. one

```python
x = a[0](**kw)  # **not bold**
```
<!-- nobody
sees this -->
[1]: https://a.b/long
"""


def test_markdown_is_shown_without_its_signs():
    found = shown(MARKDOWN, "init", characters=10**6)
    hit = Hit("a.md", 0.5, "The `big` book", MARKDOWN)
    assert heading_of(hit) == "The big book > A guide"
    assert found.text.splitlines() == [
        "Read the long manual and that, https://a.b, *so*. It is very unlikely that __init__ or "
        "a*b*c or snake_case_name is changed.",
        "• first A picture of bees",
        "• second",
        "1. one",
        "x = a[0](**kw)  # **not bold**",
    ]
    assert marked(found) == ["init"] and plain(MARKDOWN).count("\n") == MARKDOWN.count("\n")


def test_code_that_begins_a_line_begins_no_block():
    text = "```pump start``` turns it on.\r\n\r\n## Pump\r\n\r\n```\r\npump\tfill\r\n```\r\n"
    assert shown(text, "pump").text == "pump start turns it on.\nPump\npump    fill"


def test_the_line_of_the_first_mark_is_counted_in_the_file():
    lines = MARKDOWN.strip().splitlines()
    for query, words in [("snake_case_name", "snake_case"), ("kw", "**kw"), ("second", "second")]:
        number = next(i for i, line in enumerate(lines) if words in line)
        assert shown(MARKDOWN, query).line == number + 1
        assert shown(MARKDOWN.replace("\n", "\r\n"), query).line == number + 1
    found = shown("\n\nFirst page.\n\n\fSecond\fThe wax\nmelts.", "melt", "a.pdf")
    assert (found.line, found.page) == (4, 3) and found.text.endswith("wax melts.")
    assert shown("\n\n\fAfter a scanned cover.", "cover", "a.pdf").page == 1  # that of its text


ROWS = [("Animal", "Legs"), *((f"animal{i}", str(i)) for i in range(60))]


TABLES = [
    ("\n".join(f"| {a} | {b} |" for a, b in [ROWS[0], ("---", ":-:"), *ROWS[1:]]), "a.md"),
    ("\r\n".join(f"{a}\t{b}" for a, b in ROWS), "a.xlsx"),
    ("\n".join(["| Animal | Legs |", "=" * 20, *(f"| {a} | {b} |" for a, b in ROWS[1:])]), "a"),
]


@pytest.mark.parametrize("text, name", TABLES)
def test_the_row_of_a_table_is_shown_below_its_heading(text, name):
    found = shown("Before it.\n\n" + text + "\n\nAfter it.", "animal33", name, "none")
    assert found.text.split("\n")[:3] == ["Animal | Legs", "animal33 | 33", "animal34 | 34"]
    assert marked(found) == ["animal33"] and found.text.count("\n") <= LINES


def test_rows_with_their_headings_in_them_are_lines():
    rows = [f"Part: NW-{i}; Name: hinge, {i} mm; Shelf: C{i}" for i in range(3)]
    found = shown("Prices of\nparts.\n\n" + "\n".join(rows), "hinge", "a.xlsx")
    assert found.text.split("\n") == ["Prices of parts.", *rows]


BEGINNINGS = [
    ["* Bees", "** Wax", "It melts."],
    ["\\section{Wax}", "It melts.", "\\end{document}"],
    ["2024-05-01 12:00 wax melts", "2024-05-01 12:01 bees fly"],
    ["May  1 12:00:01 wax melts", "May  1 12:00:02 bees fly"],
]


@pytest.mark.parametrize("lines", BEGINNINGS)
def test_headings_commands_and_times_begin_a_line(lines):
    found = shown("\n".join(lines), "melt", "a.txt")
    wanted = [" ".join(line.split()) for line in lines]
    assert found.text.split("\n") == wanted


@pytest.mark.parametrize(
    ("name", "lines", "expected"),
    [
        ("a.rst", ["=====", "Title", "=====", "", "Bees make wax.", "", "Of wax", "~~~~~~",
                   "It melts."], ["Title", "Bees make wax.", "Of wax", "It melts."]),
        ("a.adoc", ["Title", "-----", "Bees make wax.", "", "Of wax", "^^^^^^", "It melts."],
         ["Title", "Bees make wax.", "Of wax", "It melts."]),
        ("a.md", ["Title", "=====", "", "Of wax", "---", "It melts."],
         ["Title", "Of wax", "It melts."]),
        ("README", ["Title", "*****", "It melts -- soon.", "...", "---- a rule"],
         ["Title", "It melts -- soon.", "---- a rule"]),
        ("a.rst", ["Both:", "", "=====  =======", "A      not A", "=====  =======",
                   "wax    it melts", "honey  flows", "=====  =======", "", "After", "it."],
         ["Both:", "A | not A", "wax | it melts", "honey | flows", "After it."]),
        ("a.txt", ["| Kind | Heat |", "-------------", "| wax | melts |"],
         ["Kind | Heat", "wax | melts"]),
        ("a.rst", ["+-----+------+", "| wax | melts |", "+-----+------+"],
         ["wax | melts"]),
        ("a.org", ["| Kind | Heat |", "|------+------|", "| wax | melts |"],
         ["Kind | Heat", "wax | melts"]),
        ("a.txt", ["kind | heat | bee", "-----+------+----", "wax | melts | no"],
         ["kind | heat | bee", "wax | melts | no"]),
        ("a.md", ["kind  heat", "----  ------", "wax   melts"], ["kind heat", "wax | melts"]),
        ("a.md", ["Title", "", "- - -", "It melts."], ["Title", "It melts."]),
        ("a.txt", ["It melts.", "", "-- ", "Anna"], ["It melts.", "Anna"]),
    ],
)  # fmt: skip
def test_lines_of_signs_are_left_out_but_no_rows(name, lines, expected):
    found = shown("\n".join(lines), "melt", name)
    assert found.text.splitlines() == expected and marked(found) == ["melts"]
    assert found.line == 1 + next(i for i, line in enumerate(lines) if "melts" in line)


def test_code_keeps_its_lines_without_what_all_are_indented_by():
    members = "".join(f"    def f{i}(self):\n\n        return {i}\n" for i in range(6))
    text = "class A:\n" + members + "    def close_file(self, path):\n        del a[i](x)\n" * 4
    for name in ("a.py", "d12"):
        found = shown(text, "close a file by path", name)
        assert "def close_file(self, path):\n    del a[i](x)\ndef" in found.text
        assert found.text.count("\n") < LINES
        assert set(marked(found)) == {"close", "file", "path"}
    found = shown("def f():\n    x = '" + "y " * 900 + "camshaft'\n", "camshaft", "a.py")
    assert marked(found) == ["camshaft"] and len(found.text) < CHARACTERS + 4


@pytest.mark.parametrize("text", ["", "  \n\n\f ", "no word of it", "\ufeff\u200d", "\ud800 a"])
def test_a_text_without_the_words_is_shown_from_its_start(text):
    found = shown(text, "camshaft", "a.txt")
    assert found.marks == [] and found.line == 1 and found.text == text.strip(" \n\f")


def test_without_stems_a_word_with_another_ending_is_marked():
    found = shown(
        "Below 1 bar, refill it; reform portable ports.", "refilled port", language="none"
    )
    assert marked(found) == ["refill", "ports"]
    assert marked(shown("animal33 and animal3", "animal33", language="none")) == ["animal33"]


def test_a_passage_of_headings_is_shown():
    assert shown("# One\n\n## Two", "two").text == "One\nTwo"
    assert heading_of(Hit("a.md", 1, "", "# One\n\n## Two")) == "a.md"
    assert heading_of(Hit("b.md", 1, "Bees", "# Bees\n\nThey dance.")) == "Bees"
    assert heading_of(Hit("d1", 1, "", "# a comment\nx = [\n  1,\n]")) == "d1"


@pytest.mark.parametrize(
    "piece", [".", "[a](", "**a ", "_a *", "<a ", "`a", "![", "<!--", "|", "a\t", "#", "a-", "\f\n"]
)
def test_no_text_takes_long(piece):
    known = Analyzer("en")
    terms = HighlightTerms.of("a needle-1", known, lambda terms: np.ones(len(terms)))
    start = time.perf_counter()
    found = snippet(Hit("a.md", 1, "", piece * (100_000 // len(piece))), terms)
    assert time.perf_counter() - start < 3 and len(found.text) <= CHARACTERS + 4


@pytest.mark.parametrize("piece", ["蜜", "a1-b2 ", "word{} ", "ก", "-", "a_"])
def test_no_query_takes_long(piece):
    query = "".join(piece.format(i) for i in range(10_000))[:10_000]
    start = time.perf_counter()
    terms = HighlightTerms.of(query, Analyzer("none"), lambda terms: np.ones(len(terms)))
    for _ in range(10):
        snippet(Hit("a.md", 1, "", FILLER * 20 + query[:2000]), terms)
    assert time.perf_counter() - start < 5


def test_equal_texts_are_grouped_below_their_first():
    hits = [Hit(str(i), 1, "", text) for i, text in enumerate(["a  b", "c", "a\nb", "c ", "d"])]
    assert distinct(hits, 9) == {0: [2], 1: [3], 4: []} and list(distinct(hits, 2)) == [0, 1]


FIRST = "The pump starts at nine."
HEADS = [
    ("a.md", f"aliases:\n- x\n- y\ntags: pumps\ndate: 2020-01-02\n\n\n{FIRST}\n"),
    ("a.eml", f"From: Anna <a@b.c>\nTo: Otto\nDate: Tue, 5 May 2020\n\n{FIRST}"),
    ("all.mbox:3", f"From: Anna\nDate: Tue, 5 May 2020\nAttachments: x.pdf\n\n{FIRST}\n"),
    ("a.py", f"#!/usr/bin/python\n# Copyright 2020 Anna\n# All rights.\n\n{FIRST}\n"),
    ("a.c", f"/*\n Licensed under\n the X license\n*/\n{FIRST}\n"),
]


@pytest.mark.parametrize(("name", "text"), HEADS)
def test_a_snippet_begins_with_the_text_and_not_with_its_head(name, text):
    def of(query, characters=CHARACTERS, **more):
        known = BM25([text, "other words"], "en")
        terms = HighlightTerms.of(query, known.terms, known.idf)
        return snippet(Hit(name, 1.0, "", text, line=1, **more), terms, characters)

    for query in ("zebra", "when does the pump start"):
        found = of(query)
        assert found.text == FIRST and found.line == text[: text.index(FIRST)].count("\n") + 1
    word = "license" if name == "a.c" else "anna" if "Anna" in text else "tags"
    assert word in of(f"pump {word}").text.lower()  # stands nowhere else
    assert of("zebra", 10**6).text != FIRST  # all of it is wanted
    assert of("zebra", chunk=1).text != FIRST


def test_comments_that_say_what_code_does_are_shown():
    text = "# Starts the pump at nine.\n\ndef pump():\n    pass\n"
    terms = HighlightTerms.of("zebra", Analyzer("en"), lambda terms: np.ones(len(terms)))
    assert snippet(Hit("a.py", 1.0, "", text), terms).text.startswith("# Starts the pump")
