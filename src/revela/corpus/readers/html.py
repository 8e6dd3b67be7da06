"""HTML pages without their boilerplate, by resiliparse: navigation, side bars and footers go,
headings, paragraphs and code stay.

Chosen over trafilatura for speed (1-3 ms a page against 13-37) and because it keeps reference
pages, of which trafilatura dropped nearly half of the words (docs/log.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from revela.corpus.readers.opened import Damaged, decoded, read_bytes
from revela.corpus.readers.rows import Fields
from revela.corpus.report import Report
from revela.types import Document

DEEPEST = (
    2000  # blocks within blocks; finding the main part takes time that grows with the square of it
)
_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([\w.:-]+)""", re.I)
_BLOCK = re.compile(r"<(/?)(?:div|section|article|main|span|blockquote)\b", re.I)


def read_html(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    title, text = page(_decoded(read_bytes(path)))
    yield Document(name, text, title)


def page(source: str) -> tuple[str, str]:
    """Title and main text of a page. A page in which nothing looks like its main part is read
    whole.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(source)
    main = "" if _is_deep(source) else extract_plain_text(tree, main_content=True)
    text = main if main.strip() else extract_plain_text(tree)
    return " ".join((tree.title or "").split()), text.strip()


def fragment(source: str) -> str:
    """The text of a piece of HTML that has no boilerplate, such as a post."""
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(source).strip()


def _is_deep(source: str) -> bool:
    if source.count("<") <= DEEPEST:
        return False
    return (
        max(accumulate(-1 if block[1] else 1 for block in _BLOCK.finditer(source)), default=0)
        > DEEPEST
    )


def _decoded(raw: bytes) -> str:
    """UTF-8, or what the page itself declares in its first kilobyte."""
    if (text := decoded(raw)) is not None:
        return text
    if declared := _CHARSET.search(raw[:1024]):
        try:
            return raw.decode(declared[1].decode("ascii"))
        except (LookupError, UnicodeDecodeError):
            pass
    raise Damaged("neither UTF-8 nor what the page declares")
