"""Source code is cut where functions and classes begin, and loses nothing."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.text import code
from revela.text.chunk import chunk, chunk_all
from revela.text.code import GRAMMARS, documented_functions, split_lines, units
from revela.types import Document

# Each string is a unit.
SOURCES = {
    "a.py": [
        '"""Doc."""\nimport x\n\n',
        "@x.deco\nclass A:\n    a = 1\n\n",
        "    @property\n    def f(self):\n        def g(): pass\n        return g\n",
        "    async def h(self):\n        return 1\n\n",
        "# either\nif x:\n",
        "    def i(): pass\nelse:\n",
        "    # or\n    def i(): return 2\n",
    ],
    "a.js": [
        "import x from 'y';\n",
        "// about f\nexport function f() {\n  const g = () => 1;\n  return g;\n}\n",
        "const h = async (a) => {\n  return a;\n};\n",
        "class A {\n",
        "  /** about m */\n  m() {\n\n    return 1;\n  }\n",
        "  n() { return 2; }\n}\n",
    ],
    "a.ts": [
        "export interface A { x: number }\n",
        "export class B<T> {\n  y: T;\n",
        "  m(x: T): void {\n    y(x);\n  }\n}\n",
    ],
    "A.java": [
        "package a;\n\n",
        "/** About A. */\npublic class A {\n    int x;\n\n",
        "    @Override\n    public int f() {\n        return x;\n    }\n",
        "    A(int x) {\n        this.x = x;\n    }\n}\n",
    ],
    "a.go": [
        "package a\n\n",
        "// F does.\nfunc F() int {\n\treturn 1\n}\n",
        "func (t *T) G() {\n}\n",
    ],
    "a.rs": [
        "use x;\n",
        "/// About S.\n#[derive(Debug)]\nstruct S {\n    x: i32,\n}\n",
        "impl S {\n",
        "    fn f(&self) -> i32 {\n        self.x\n    }\n",
        "    fn g() {}\n}\n",
    ],
    "a.c": [
        "#include <x.h>\nint x; /* not about f */\n",
        "/* about f */\nstatic int f(void)\n{\n\n\n    return 1;\n}\n",
        "int g(void) { return 2; }\n",
    ],
    "a.cpp": [
        "namespace a {\n",
        "template <class T>\nclass B {\n public:\n",
        "  int f() { return 1; }\n",
        "  int g() {\n    return 2;\n  }\n};\n}\n",
    ],
    "A.cs": [
        "namespace N {\n",
        "class A {\n",
        "    [X]\n    public int F() {\n        return 1;\n    }\n",
        "    int G() => 2;\n}\n}\n",
    ],
    "a.rb": [
        "require 'x'\n",
        "module M\n",
        "  class A\n",
        "    # about f\n    def f\n      1\n    end\n",
        "    def self.g\n      2\n    end\n  end\nend\n",
    ],
    "a.php": [
        "<?php\n",
        "class A {\n",
        "    /** about f */\n    public function f() {\n        return 1;\n    }\n",
        "    function g() { return 2; }\n}\n",
    ],
}


@pytest.mark.parametrize("name", SOURCES)
def test_units_begin_where_functions_and_classes_do(name):
    assert units("".join(SOURCES[name]), name) == SOURCES[name]


def test_a_margin_inside_of_a_function_is_none():
    text = "def f():\n    return '''\n\nat the margin\n'''\n"
    assert units(text, "a.py") == [text]
    text = "function f() {\n  return `\n\nat the margin`;\n}\n"
    assert units(text, "a.js") == [text]


def test_every_grammar_is_installed():
    for ending, grammar in GRAMMARS.items():
        assert code._parser(*grammar) is not None
        assert "".join(units("x\n", f"a{ending}")) == "x\n"


@pytest.fixture
def without_tree_sitter(monkeypatch):
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    code._parser.cache_clear()
    yield
    code._parser.cache_clear()


@pytest.mark.parametrize("workers", [1, 2])
def test_without_the_extra_code_is_cut_at_blank_lines(without_tree_sitter, monkeypatch, workers):
    javascript = "function f() { return 1; }\nfunction g() { return 2; }\n\nlet h = 3;\n\n"
    python = "".join(SOURCES["a.py"])
    assert units(python, "a.py") == SOURCES["a.py"]
    monkeypatch.setattr("revela.text.chunk.BATCH", 1)  # each document is a task of a worker
    documents = [Document(f"{i}.js", javascript, kind="code") for i in range(8)]
    pieces = [c.text for c in chunk_all(documents, 12, workers)]
    functions = javascript.index("let")
    assert pieces == [javascript[:functions], javascript[functions:]] * 8


BY_MARGIN = ["def f(:\n  1\n\n", "def g(:\n\n  2\n"]


@pytest.mark.parametrize("name", ["a.py", "a.go", "a.kt"])
def test_what_no_parser_understands_is_cut_at_the_margin(name):
    assert units("".join(BY_MARGIN), name) == BY_MARGIN


def test_without_a_known_ending_python_is_tried():
    assert units("".join(SOURCES["a.py"]), "row 7") == SOURCES["a.py"]


def test_lines_are_counted_as_the_parsers_count_them():
    """Form feeds and line separators end no line in Python, but they do in str.splitlines."""
    first = ["x = 'a\u2028b'\n\x0c\n", "y = '\x1c'\r\n"]
    functions = ["def f():\r    return 1\r", "def g():\r    return 2\r"]
    assert units("".join(first + functions), "a.py") == first + functions


def test_a_file_s_own_faults_are_not_printed(recwarn):
    units("def f():\n    return '\\d' is 'x'\n", "a.py")
    assert not recwarn.list


def test_a_huge_file_is_not_parsed(monkeypatch):
    monkeypatch.setattr(code, "LONGEST", 10)
    monkeypatch.setattr(code.ast, "parse", lambda text: pytest.fail("parsed"))
    cut = ["def f(): pass\n\n", "def g(): pass\n"]
    assert units("".join(cut), "a.py") == cut


LINES = [
    *("def f():", "class A {", "fn g() {", "}", "  }", "", "  x = 1;", "/* a", "*/", "// b"),
    *("\x0c", "'", "@a", "func (", "end", "é ü", "template <", "#define X \\", "<?php", "`${"),
    *("namespace a;", "\t", "if x:", "impl S {", "=begin"),
]
SNIPPETS = st.lists(st.sampled_from(LINES), max_size=25).flatmap(
    lambda lines: st.sampled_from(["\n", "\r\n", "\r"]).map(lambda end: end.join(lines))
)


@given(
    SNIPPETS | st.text(st.characters(codec="utf-8")),
    st.sampled_from(["x", "a.py", *(f"a{ending}" for ending in GRAMMARS)]),
)
def test_nothing_is_lost_in_any_language(text, name):
    assert "".join(units(text, name)) == text
    assert "".join(split_lines(text)) == text
    chunks = chunk(Document(name, text, kind="code"), 0, 7)
    assert "".join("".join(c.text for c in chunks).split()) == "".join(text.split())


FUNCTION = 'def area(radius):\n    """The area of a circle."""\n    return 3.14 * radius ** 2'


@pytest.mark.parametrize(
    "before", ["", "x = 1\n", "# \x0c a form feed\n", "\x0c\ny = '\x1c\x85\u2028'\n"]
)
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_lines_are_counted_as_the_parser_does(before, ending):
    source = (before + FUNCTION + "\nz = 2\n").replace("\n", ending)
    assert list(documented_functions(source)) == [
        ("The area of a circle.", "def area(radius):\n    return 3.14 * radius ** 2")
    ]


def test_a_form_feed_inside_stays():
    source = FUNCTION.replace("3.14", "len('\x0c')")
    ((_, function),) = documented_functions(source)
    assert function == "def area(radius):\n    return len('\x0c') * radius ** 2"
