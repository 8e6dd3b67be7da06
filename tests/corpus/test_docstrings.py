"""Functions and their docstrings, cut out of a file line by line as the parser counts lines."""

from __future__ import annotations

import pytest

from revela.corpus.code import documented_functions

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
    source = 'def f(a):\n    """Says what it does."""\n    b = "\x0c"\n    return a + b\n'
    assert [function for _, function in documented_functions(source)] == [
        'def f(a):\n    b = "\x0c"\n    return a + b'
    ]
