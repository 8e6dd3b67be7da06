"""HTML: the text stays, the boilerplate goes, and the encoding is UTF-8 or the declared one."""

from __future__ import annotations

import time

import pytest

from revela.text.readers.html import extract_fragment, extract_page

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


# Elements whose content HTML does not parse, one that it does, and one of another vocabulary.
@pytest.mark.parametrize(
    "name",
    [
        *("iframe", "noembed", "noframes", "noscript", "script", "style", "textarea", "title"),
        *("xmp", "a", "canvas", "div", "i", "o:p", "p", "template"),
    ],
)
@pytest.mark.parametrize("attributes", ["", " ", " src='a>b/' id=\"/>\" ", " defer class = x "])
def test_an_element_closed_in_its_own_tag_is_empty(name, attributes):
    tag = f"<{name}{attributes}/>"
    page = f"<html><head>{tag}</head><body><p>It{tag} begins.</p>{tag}<p>It ends.</p></body></html>"
    for text in (extract_page(page)[1], extract_page(page.upper())[1], extract_fragment(page)):
        assert text.lower().split() == ["it", "begins.", "it", "ends."]


def test_scripts_and_comments_and_tags_without_an_end_are_read_as_html():
    page = """<title>A <br/> B</title><script>if (a < b) c = "<p/>" + '<title/>' </script>
        <!-- <title/> <script> --><style>a > b {}</style><p>One<br/>two <img src=x alt=three />
        <a href=/four/>four</a> 5 < 6 <b/>seven.</p><![CDATA[8 < 9 & <p/>]]>"""
    title, text = extract_page(page)
    assert title == "A <br/> B"
    assert " ".join(text.split()) == "One two three four 5 < 6 seven. 8 < 9 & <p/>"


@pytest.mark.parametrize("unit", ["<a ", "<a '", "<script>", "<!--", "<![CDATA[", "<i/", "<a =x/"])
def test_tags_that_do_not_end_take_no_time(unit):
    begin = time.process_time()
    assert len(extract_fragment(unit * 100_000)) <= len(unit) * 100_000
    assert time.process_time() - begin < 2


def test_lists_near_the_body_are_text_and_navigation_still_goes():
    links = "".join(f"<li><a href=/{name}>{name} of all</a></li>" for name in ("Home", "News"))
    items = "<li>Dogs stay <a href=/x>outside the house</a>.<ul><li>Cats too.</li></ul></li>"
    for wrapped in ("{}", "<div>{}</div>", "<div><section>{}</section></div>"):
        text = extract_page(
            wrapped.format(
                f"<ul>{links}</ul><h1>Rules</h1><p>These hold:</p><ul>{items}</ul>"
                f"<ol><li>First.</li></ol><dl><dt>Bees</dt><dd>Fly.</dd></dl><ul>{links}</ul>"
            )
        )[1]
        assert " ".join(text.split()) == (
            "Rules These hold: • Dogs stay outside the house. • Cats too. 1. First. Bees Fly."
        )


def test_a_list_of_changes_with_links_is_text():
    item = "<li>Added <a href=/1>the compression of what is archived</a> (Ann)</li>"
    assert "compression of what is archived" in extract_page(f"<h1>1.2</h1><ul>{item * 3}</ul>")[1]


# The last two are encodings of Python that no page has.
@pytest.mark.parametrize("charset", ["", "no-such-thing", "utf-8", "unicode_escape", "undefined"])
def test_without_a_declaration_that_holds_the_encoding_is_found(reads, charset):
    declared = f'<head><meta charset="{charset}">' if charset else "<head>"
    page = PAGE.format("über").replace("<head>", declared)
    documents, report = reads({"a.html": page.encode("latin-1")})
    assert "archived über for" in documents[0].text
    assert report.examples == {"read as windows-1252": ["a.html"]}


@pytest.mark.parametrize(
    ("declared", "codec", "text"),
    [
        ("us-ascii", "cp1252", "“ten” – €"),
        ("gb2312", "gb18030", "朱镕基 𠀀"),
        ("x-sjis", "cp932", "①髙い"),
        ("ks_c_5601-1987", "cp949", "똠방각하"),
        ("latin-1", "latin-1", "Ñandú"),
        ("euc-jp", "euc_jp", "蜜蜂は踊る"),
        ("big5", "big5hkscs", "嘅蜜蜂"),
        ("tis-620", "cp874", "ผึ้ง…"),
        ("windows-1251", "cp1251", "Пчёлы"),
        ("utf-8", "utf-16", "Пчёлы und 蜂"),
        ("utf-16", "utf-8", "Пчёлы"),
    ],
)
@pytest.mark.parametrize(
    "declaration", ["<meta charset={}>", "<META http-equiv=x content='text/html; charset={}'>", ""]
)
def test_a_page_is_decoded_as_browsers_do(reads, declared, codec, text, declaration):
    page = PAGE.format(text).replace("<head>", f"<head>{declaration.format(declared)}")
    start = "" if declaration else f"<?xml version='1.0' encoding='{declared}'?>"
    assert f"archived {text} for" in reads({"a.html": (start + page).encode(codec)})[0][0].text


def test_a_wrong_byte_costs_a_letter_and_not_the_page(reads):
    page = PAGE.format("here").replace("<head>", "<head><meta charset=gb2312>")
    longer = page.replace("trace.", "trace. " + "蜜蜂跳舞告诉同伴花在哪里。" * 100)
    wrong = longer.encode("gb18030").replace(b"here", b"her\xff")
    assert "archived her\ufffd for" in reads({"a.html": wrong})[0][0].text


def test_elements_deep_in_others_take_no_quadratic_time():
    begin = time.process_time()
    deep = "<div>" * 20_000 + "<p>They dance.</p>" + "</div>" * 20_000
    assert extract_page(deep)[1] == "They dance."
    assert time.process_time() - begin < 2


PRICES = """<h1>Prices of the stay</h1><p>Rooms are let by the night, and by the week.</p><table>
<caption>By season</caption><thead><tr><th>Room</th><th>Summer</th><th>Winter</th></tr></thead>
<tbody><tr><td rowspan=2>Oslo</td><td><p>120</p></td><td>80</td></tr><tr><td colspan=2>on request
</td></tr></tbody></table><table><tr><th>Phone</th><td>123 45</td></tr></table>"""


def test_a_table_is_a_line_for_each_row():
    text = extract_page(PRICES)[1]
    assert "By season\nRoom: Oslo; Summer: 120; Winter: 80" in text
    assert "Room: Oslo; Summer: on request; Winter: on request" in text
    assert "Phone: 123 45" in text


def test_rows_of_headings_are_joined():
    head = "<th rowspan=2>Room<th colspan=2>Summer<th>Winter<tr><th>low<th>high<th>low"
    page = f"<table><tr><th colspan=4>Prices<tr>{head}<tr><td>Oslo<td>1<td>2<td>3</table>"
    line = "Room: Oslo; Summer low: 1; Summer high: 2; Winter low: 3"
    assert extract_page(page)[1].split("\n") == ["Prices", line]


def test_a_page_that_is_laid_out_by_a_table_is_no_table():
    page = f"<table><tr><td>Menu</td><td><h1>Bees</h1><p>They dance.</p>{PRICES}</td></tr></table>"
    text = extract_page(page)[1]
    assert "They dance." in text.split("\n") and "Room: Oslo; Summer: 120; Winter: 80" in text
