"""What a person reads in the terminal."""

from __future__ import annotations

import sys

from revela.terminal import SNIPPET, print_hits
from revela.types import Hit

LONG = "filler words here " * 40 + "the camshaft turns " + "and then more " * 40


def test_hits_are_shown_from_shortly_before_the_words_looked_for(capsys, monkeypatch):
    print_hits([Hit("a", 0.5, "A title", "short text"), Hit("b", 0.25, "", LONG)], "why does the camshaft (turn")
    first, text, second, snippet = capsys.readouterr().out.splitlines()
    assert (first, text, second) == ("1. A title  [0.5000]", "   short text", "2. b  [0.2500]")
    assert snippet.startswith("   ... ") and 0 < snippet.index("the camshaft") < SNIPPET // 2 and snippet.endswith("...")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_hits([Hit("b", 0.25, "", LONG)], "Camshaft")
    assert "\033[1mcamshaft\033[0m" in capsys.readouterr().out
    print_hits([], "?")
    assert capsys.readouterr().out == "nothing found\n"
