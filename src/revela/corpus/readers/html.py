"""HTML pages without boilerplate, by resiliparse.

It takes 1-6 ms per page; trafilatura takes 13-37, and dropped nearly half of the words of reference
pages.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from revela.corpus.readers.common import DamagedFile, ReadReport, read_bytes
from revela.corpus.readers.rows import Fields
from revela.types import Document

if TYPE_CHECKING:
    from resiliparse.parse.html import ElementNode, HTMLTree

# What XHTML closes in its own tag, or marks as text, HTML leaves open: to it, <title/> begins a
# title that goes on to the end of the page. Comments, scripts and the like are passed over.
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
# The share of links in a list's text above which it is navigation. In manuals, it is below .2 in 44
# of 100 lists, and .9 or more in 20; the others tell of options, types and changes.
NAVIGATION = 0.8

# As browsers do, the mark at the start decides, then what the page says of itself.
_STARTS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    b"<\0?\0": "utf-16-le",
    b"\0<\0?": "utf-16-be",
}
_DECLARED = re.compile(
    rb"""<(?:\?xml[^>]*?\sencoding|meta[^>]*?\bcharset)\s*=\s*["']?\s*([^\s"';/>]+)""", re.I
)
# Where browsers know more characters than Python's codec of this name; and a page is not UTF-16 if
# its declaration can be read byte by byte.
_BROWSER_CODECS = {
    "big5": "big5hkscs",
    "euc_kr": "cp949",
    "gbk": "gb18030",
    "iso8859-11": "cp874",
    "shift_jis": "cp932",
    "utf-16-be": "utf-8",
    "utf-16-le": "utf-8",
}
REPLACED = 0.001  # maximum share of characters that cannot be decoded


def read_html(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """A page as one document."""
    title, text = extract_page(decode_page(read_bytes(path)))
    yield Document(name, text, title)


def extract_page(source: str) -> tuple[str, str]:
    """Title and main text of a page; all of its text if no part looks like the main content.

    >>> extract_page("<title>Bees</title><nav><a href=/>Home</a></nav><p>They dance.</p>")
    ('Bees', 'They dance.')
    """
    from resiliparse.extract.html2text import extract_plain_text

    tree = _parsed(source)
    _keep_lists(tree)
    text = extract_plain_text(tree, main_content=True).strip() or extract_plain_text(tree).strip()
    return " ".join((tree.title or "").split()), text


def extract_fragment(source: str) -> str:
    """The text of HTML without boilerplate, such as a forum post."""
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(_parsed(source)).strip()


def decode_page(raw: bytes) -> str:
    """The text of a page in UTF-8, or in the encoding that it declares in its first kilobyte.

    Few wrong bytes are replaced, as browsers do: a page is worth more than one letter of it. Many
    of them say that the encoding is another one, and the page is DamagedFile.
    """
    from resiliparse.parse.encoding import map_encoding_to_html5

    encodings = [codec for start, codec in _STARTS.items() if raw.startswith(start)]
    if not encodings:
        encodings = ["utf-8"]
        if declared := _DECLARED.search(raw[:1024]):
            # None for what is an encoding of Python only.
            known = map_encoding_to_html5(declared[1].decode("ascii", "replace"), False) or "utf-8"
            encodings.append(_BROWSER_CODECS.get(known, known))
        if b"\x1b" in raw:
            encodings.reverse()  # ISO-2022-JP, whose bytes are all ASCII
    for encoding in encodings:
        try:
            return raw.decode(encoding)
        except UnicodeError:
            pass
    text = raw.decode(encodings[-1], "replace")
    if text.count("\ufffd") > REPLACED * len(text):
        raise DamagedFile("neither UTF-8 nor the encoding that the page declares")
    return text


def _parsed(source: str) -> HTMLTree:
    from resiliparse.parse.html import HTMLTree

    return HTMLTree.parse(_XHTML.sub(_as_html, source))


def _as_html(found: re.Match[str]) -> str:
    if found["empty"]:
        return f"<{found['empty']}></{found['name']}>"
    return found[0] if found["text"] is None else html.escape(found["text"])


def _keep_lists(tree: HTMLTree) -> None:
    """Have lists taken for text unless they are navigation.

    resiliparse drops each <ul> within three levels of <body>, and each of which a fifth is links.
    """
    for found in tree.body.query_selector_all("ul:not(ul ul)").values() if tree.body else ():
        links = found.get_elements_by_tag_name("a").values()
        if sum(_size(link) for link in links) > NAVIGATION * _size(found):
            continue
        for link in links:
            link.replace_with(*link.child_nodes.values())
        found.outer_html = f"<div><div><div>{found.outer_html}</div></div></div>"


def _size(element: ElementNode) -> int:
    return sum(map(len, (element.text or "").split()))
