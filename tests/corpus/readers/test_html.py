"""HTML: the text stays, the boilerplate goes, and the encoding is UTF-8 or the declared one."""

from __future__ import annotations

import pytest

from revela.corpus.load import read_corpus
from revela.corpus.readers.html import extract_fragment, extract_page
from revela.errors import RevelaError

PAGE = """<!DOCTYPE html><html><head><title>Invoices &amp;
 more</title><script>no()</script><style>p {{}}</style></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/b">Blog</a></li></ul></nav>
<div class="sidebar"><a href="/x">Related things</a></div>
<main><h1>Invoices</h1><p>Invoices are archived {0} for <b>ten years</b> by law.</p>
<pre><code>def archive(x):
    return x
</code></pre><p>They are then deleted without a trace.</p></main>
<footer>Copyright, cookies and contact</footer></body></html>"""


def test_boilerplate_goes_and_text_stays():
    title, text = extract_page(PAGE.format("here"))
    assert title == "Invoices & more"
    for kept in (
        "Invoices are archived here for ten years by law.",
        "def archive(x):\n    return x",
        "deleted without a trace.",
    ):
        assert kept in text
    for gone in ("Home", "Blog", "Related", "Copyright", "no()", "p {"):
        assert gone not in text


def test_a_page_without_a_main_part_is_read_whole():
    assert extract_page("<p>too short</p>") == ("", "too short")
    assert extract_page("<nav><a href=x>Only a link</a></nav>") == ("", "Only a link")


def test_a_fragment_keeps_code_as_it_stands():
    assert extract_fragment(
        "<p>Do <code>x</code>:</p>\n<pre><code>for i in x:\n    print(i &lt; 5)\n</code></pre>"
    ) == ("Do x:\n\nfor i in x:\n    print(i < 5)")


def write_latin1(path, declaration):
    page = PAGE.format("über").replace("<head>", f"<head>{declaration}")
    path.write_bytes(page.encode("latin-1"))


@pytest.mark.parametrize(
    "declaration",
    [
        '<meta charset="iso-8859-1">',
        '<meta http-equiv=x content="text/html; charset=windows-1252">',
    ],
)
def test_the_declared_encoding_is_used(tmp_path, declaration):
    write_latin1(tmp_path / "a.html", declaration)
    assert "archived über for" in read_corpus([tmp_path])[0][0].text


# The last two are encodings of Python that no page has.
@pytest.mark.parametrize("charset", ["", "no-such-thing", "utf-8", "unicode_escape", "undefined"])
def test_an_unknown_encoding_is_named(tmp_path, charset):
    write_latin1(tmp_path / "a.html", f'<meta charset="{charset}">' if charset else "")
    with pytest.raises(
        RevelaError, match=r"neither UTF-8 nor the encoding that the page declares: a\.html"
    ):
        read_corpus([tmp_path])
