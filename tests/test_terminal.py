"""What a person reads in the terminal."""

from __future__ import annotations

import sys

from revela.cli.printing import SNIPPET, print_group, print_hits
from revela.types import Chunk, Hit

LONG = "filler words here " * 40 + "the camshaft turns " + "and then more " * 40


def test_hits_are_shown_from_shortly_before_the_words_looked_for(capsys, monkeypatch):
    print_hits(
        [Hit("a", 0.5, "A title", "short text"), Hit("b", 0.25, "", LONG)],
        "why does the camshaft (turn",
    )
    first, text, second, snippet = capsys.readouterr().out.splitlines()
    assert (first, text, second) == ("1. A title  [0.5000]", "   short text", "2. b  [0.2500]")
    assert (
        snippet.startswith("   ... ")
        and 0 < snippet.index("the camshaft") < SNIPPET // 2
        and snippet.endswith("...")
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_hits([Hit("b", 0.25, "", LONG)], "Camshaft")
    assert "\033[1mcamshaft\033[0m" in capsys.readouterr().out
    print_hits([], "?")
    assert capsys.readouterr().out == "nothing found\n"


def test_code_keeps_its_lines(capsys):
    code = (
        "class A:\n"
        + "".join(f"    def f{i}(self):\n\n        return {i}\n" for i in range(6))
        + "    def close_file(self, path):\n        x\n" * 3
    )
    print_hits([Hit("a.py", 0.5, "", code)], "close a file by path")
    assert capsys.readouterr().out.splitlines() == [
        "1. a.py  [0.5000]",
        "   ...",
        "   def close_file(self, path):",
        "       x",
        "   def close_file(self, path):",
        "       x",
        "   def close_file(self, path):",
        "       x",
    ]


def test_a_group_is_shown_document_by_document_with_each_title_once(capsys):
    bees, more = (
        Chunk(7, "On bees\n\nBees dance."),
        Chunk(7, "They find flowers.", "What do bees find?"),
    )
    members = [bees, more, Chunk(3, "d3 begins"), Chunk(9, "Wax\n\n")]
    print_group("group 1", members, ["On bees", "On bees", "d3", "Wax"])
    assert capsys.readouterr().out.splitlines() == [
        "",
        "group 1: 4 chunks of 3 documents",
        "  d3",
        "    - d3 begins",
        "  On bees",
        "    - Bees dance.",
        "    - They find flowers.",
        "      asked for by: What do bees find?",
        "  Wax",
        "    - (nothing but the title)",
    ]
