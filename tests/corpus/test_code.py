"""Source code is cut where functions and classes begin, and loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.corpus import code
from revela.corpus.chunk import chunk
from revela.corpus.code import GRAMMARS, split_lines, units
from revela.types import Document

# Where each unit should begin, a string begins.
SOURCES = {
    "a.py": ['"""Doc."""\nimport x\n\n', "@x.deco\nclass A:\n    a = 1\n\n", "    @property\n    def f(self):\n        def g(): pass\n        return g\n",
             "    async def h(self):\n        return 1\n\n", "# either\nif x:\n", "    def i(): pass\nelse:\n", "    # or\n    def i(): return 2\n"],
    "a.js": ["import x from 'y';\n", "// about f\nexport function f() {\n  const g = () => 1;\n  return g;\n}\n", "const h = async (a) => {\n  return a;\n};\n",
             "class A {\n", "  /** about m */\n  m() {\n\n    return 1;\n  }\n", "  n() { return 2; }\n}\n"],
    "a.ts": ["export interface A { x: number }\n", "export class B<T> {\n  y: T;\n", "  m(x: T): void {\n    y(x);\n  }\n}\n"],
    "A.java": ["package a;\n\n", "/** About A. */\npublic class A {\n    int x;\n\n", "    @Override\n    public int f() {\n        return x;\n    }\n",
               "    A(int x) {\n        this.x = x;\n    }\n}\n"],
    "a.go": ["package a\n\n", "// F does.\nfunc F() int {\n\treturn 1\n}\n", "func (t *T) G() {\n}\n"],
    "a.rs": ["use x;\n", "/// About S.\n#[derive(Debug)]\nstruct S {\n    x: i32,\n}\n", "impl S {\n", "    fn f(&self) -> i32 {\n        self.x\n    }\n",
             "    fn g() {}\n}\n"],
    "a.c": ["#include <x.h>\nint x; /* not about f */\n", "/* about f */\nstatic int f(void)\n{\n\n\n    return 1;\n}\n", "int g(void) { return 2; }\n"],
    "a.cpp": ["namespace a {\n", "template <class T>\nclass B {\n public:\n", "  int f() { return 1; }\n", "  int g() {\n    return 2;\n  }\n};\n}\n"],
    "A.cs": ["namespace N {\n", "class A {\n", "    [X]\n    public int F() {\n        return 1;\n    }\n", "    int G() => 2;\n}\n}\n"],
    "a.rb": ["require 'x'\n", "module M\n", "  class A\n", "    # about f\n    def f\n      1\n    end\n", "    def self.g\n      2\n    end\n  end\nend\n"],
    "a.php": ["<?php\n", "class A {\n", "    /** about f */\n    public function f() {\n        return 1;\n    }\n", "    function g() { return 2; }\n}\n"],
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_units_begin_where_functions_and_classes_do(name):
    assert units("".join(SOURCES[name]), name) == SOURCES[name]


def test_a_margin_inside_of_a_function_is_none():
    text = "def f():\n    return '''\n\nat the margin\n'''\n"
    assert units(text, "a.py") == [text]
    text = "function f() {\n  return `\n\nat the margin`;\n}\n"
    assert units(text, "a.js") == [text]


def test_every_grammar_is_at_hand():
    for ending in GRAMMARS:
        assert "".join(units("x\n", f"a{ending}")) == "x\n"


def test_without_a_known_ending_python_is_tried_and_then_the_margin():
    assert units("".join(SOURCES["a.py"]), "row 7") == SOURCES["a.py"]
    assert units("fun f() {\n  1\n}\n\nfun g() {\n\n  2\n}\n", "a.kt") == [
        "fun f() {\n  1\n}\n\n",
        "fun g() {\n\n  2\n}\n",
    ]


def test_what_no_parser_understands_is_cut_at_the_margin():
    torn = "def f(:\n  1\n\ndef g(:\n\n  2\n"
    assert units(torn, "a.py") == ["def f(:\n  1\n\n", "def g(:\n\n  2\n"]
    assert units(torn, "a.go") == ["def f(:\n  1\n\n", "def g(:\n\n  2\n"]


def test_lines_are_counted_as_the_parsers_count_them():
    """A form feed or a line separator is no line end to Python, though str.splitlines breaks there."""
    first = ["x = 'a\u2028b'\n\x0c\n", "y = '\x1c'\r\n"]
    functions = ["def f():\r    return 1\r", "def g():\r    return 2\r"]
    assert units("".join(first + functions), "a.py") == first + functions


def test_a_file_s_own_faults_are_not_printed(recwarn):
    units("def f():\n    return '\\d' is 'x'\n", "a.py")
    assert not recwarn.list


def test_a_huge_file_is_not_parsed(monkeypatch):
    monkeypatch.setattr(code, "LONGEST", 10)
    monkeypatch.setattr(code.ast, "parse", lambda text: pytest.fail("parsed"))
    assert units("def f(): pass\n\ndef g(): pass\n", "a.py") == [
        "def f(): pass\n\n",
        "def g(): pass\n",
    ]


SNIPPETS = st.lists(
    st.sampled_from([
        *("def f():", "class A {", "fn g() {", "}", "  }", "", "  x = 1;", "/* a", "*/", "// b", "\x0c", "'", "@a", "func (", "end", "é ü"),
        *("template <", "#define X \\", "<?php", "namespace a;", "\t", "if x:", "impl S {", "`${", "=begin"),
    ]),
    max_size=25,
).flatmap(lambda lines: st.sampled_from(["\n", "\r\n", "\r"]).map(lambda end: end.join(lines)))  # fmt: skip


@given(
    SNIPPETS | st.text(st.characters(codec="utf-8")),
    st.sampled_from(["x", "a.py", *(f"a{ending}" for ending in GRAMMARS)]),
)
def test_nothing_is_lost_in_any_language(text, name):
    assert "".join(units(text, name)) == text
    assert "".join(split_lines(text)) == text
    chunks = chunk(Document(name, text, kind="code"), 0, 7)
    assert "".join("".join(c.text for c in chunks).split()) == "".join(text.split())
