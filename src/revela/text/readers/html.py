"""Read HTML pages without boilerplate, by resiliparse.

It takes 1-6 ms per page; trafilatura takes 13-37 ms, and dropped nearly half of the words of
reference pages.
"""

from __future__ import annotations

import html
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from revela.text.readers.common import ReadReport, read_decoded
from revela.text.readers.rows import Fields
from revela.text.readers.table_lines import table_lines
from revela.text.readers.text import plain_title
from revela.types import Document

if TYPE_CHECKING:
    from resiliparse.parse.html import ElementNode, HTMLTree

# XHTML's self-closing tags and CDATA, which mean something else in HTML: there <title/> begins a
# title that continues to the end of the page. Comments, scripts and the like are skipped.
_VOID = (
    "area|base|basefont|bgsound|br|col|embed|frame|hr|image|img|input|keygen|link|meta|param|"
    "source|track|wbr"
)
_VERBATIM = "iframe|noembed|noframes|script|style|textarea|title|xmp"
_ATTRIBUTES = r"""(?:"[^"]*+"|'[^']*+'|=(?:\s*+[^\s"'<>]++)?+|[^"'/<>=]++|/(?!>))*+"""
_XHTML = re.compile(
    rf"<(?:!--.*?(?:-->|\Z)|!\[CDATA\[(?P<text>.*?)(?:\]\]>|\Z)"
    rf"|(?P<verbatim>{_VERBATIM})(?=[\s/>]){_ATTRIBUTES}>.*?(?:</(?P=verbatim)\b|\Z)"
    rf"|(?P<empty>(?!(?:{_VOID})[\s/])(?P<name>[a-z][^\s\"'/<=>]*+){_ATTRIBUTES})/>)",
    re.I | re.S,
)
# A list is navigation if links are a larger share of its text. In manuals, the share is below 0.2
# in 44 % of the lists, and 0.9 or more in 20 %; those between list options, types and changes.
NAVIGATION = 0.8
LONG_CELL = 100  # words
_DEEP = ">".join(["*"] * 256)
_LAID_OUT = "table, h1, h2, h3, pre"  # contents of tables that only lay out a page


def read_html(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a page as one document."""
    title, text = extract_page(read_decoded(path, name, report))
    yield Document(name, text, plain_title(title))


def extract_page(source: str) -> tuple[str, str]:
    """Title and main text of a page; all of its text if no part looks like the main content.

    >>> extract_page("<title>Bees</title><nav><a href=/>Home</a></nav><p>They dance.</p>")
    ('Bees', 'They dance.')
    """
    from resiliparse.extract.html2text import extract_plain_text

    tree = _parsed(source)
    _keep_lists(tree)
    _keep_tables(tree)
    # The search for the main content takes time quadratic in the depth, and would not end.
    is_deep = tree.body is not None and tree.body.query_selector(_DEEP) is not None
    text = "" if is_deep else extract_plain_text(tree, main_content=True).strip()
    return " ".join((tree.title or "").split()), text or extract_plain_text(tree).strip()


def extract_fragment(source: str) -> str:
    """The text of HTML without boilerplate, such as a forum post."""
    from resiliparse.extract.html2text import extract_plain_text

    tree = _parsed(source)
    _keep_tables(tree)
    return extract_plain_text(tree).strip()


def _parsed(source: str) -> HTMLTree:
    from resiliparse.parse.html import HTMLTree

    return HTMLTree.parse(_XHTML.sub(_as_html, source))


def _as_html(found: re.Match[str]) -> str:
    if found["empty"]:
        return f"<{found['empty']}></{found['name']}>"
    return found[0] if found["text"] is None else html.escape(found["text"])


def _keep_lists(tree: HTMLTree) -> None:
    """Keep lists in the text, unless they are navigation.

    Otherwise resiliparse drops each <ul> within three levels of <body>, and each with a fifth of
    links.
    """
    for found in tree.body.query_selector_all("ul:not(ul ul)").values() if tree.body else ():
        links = found.get_elements_by_tag_name("a").values()
        if sum(_size(link) for link in links) > NAVIGATION * _size(found):
            continue
        for link in links:
            link.replace_with(*link.child_nodes.values())
        found.outer_html = f"<div><div><div>{found.outer_html}</div></div></div>"


def _keep_tables(tree: HTMLTree) -> None:
    """Write each table as lines, unless its contents show that it only lays out the page."""
    tables = tree.body.query_selector_all("table").values() if tree.body else ()
    for table in [table for table in tables if not table.query_selector(_LAID_OUT)]:
        rows, headings = _grid(table)
        is_laid_out = any(len(cell.split()) > LONG_CELL for row in rows for cell in row)
        if max(map(len, rows), default=0) > 1 and not is_laid_out:
            caption = table.query_selector("caption")
            lines = [_line(caption)] if caption else []
            lines += table_lines(rows, headings)
            table.outer_html = f"<p>{'<br>'.join(map(html.escape, lines))}</p>"


def _grid(table: ElementNode) -> tuple[list[list[str]], int]:
    """The rows of a table, with spanning cells repeated; and the number of rows of headings (<th>)
    at its beginning.
    """
    from resiliparse.parse.html import ElementNode

    rows, headings, spans = list[list[str]](), 0, dict[int, tuple[int, str]]()
    for row in table.get_elements_by_tag_name("tr").values():
        nodes = (node for node in row.child_nodes.values() if isinstance(node, ElementNode))
        cells = [cell for cell in nodes if cell.tag in ("td", "th")]
        waiting, texts = deque(cells), list[str]()
        while waiting or len(texts) in spans:
            place = len(texts)
            if place in spans:
                left, text = spans.pop(place)
                if left > 1:
                    spans[place] = left - 1, text
                texts.append(text)
                continue
            cell = waiting.popleft()
            text = _line(cell)
            for _ in range(_span(cell, "colspan")):
                if (down := _span(cell, "rowspan")) > 1:
                    spans[len(texts)] = down - 1, text
                texts.append(text)
        if any(texts):
            headings += headings == len(rows) and all(cell.tag == "th" for cell in cells)
            rows.append(texts)
    return rows, headings


def _span(cell: ElementNode, name: str) -> int:
    value = cell.getattr(name) or "1"
    return min(50, max(1, int(value))) if value.isdecimal() else 1


def _line(element: ElementNode) -> str:
    return " ".join((element.text or "").split())


def _size(element: ElementNode) -> int:
    return sum(map(len, (element.text or "").split()))
