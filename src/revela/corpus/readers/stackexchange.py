"""StackExchange dumps: a question and its answers, best first, are one document.

An answer may come anywhere after its question, years later in a long dump. So one pass writes
every post's text to disk (``ArrowList``) and keeps two numbers per post in memory, its question and
its rank; sorted by them, the posts are read back.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.corpus.readers import common
from revela.corpus.readers.common import (
    READ_ERRORS,
    DamagedFile,
    ReadReport,
    UnsupportedFile,
    open_binary,
)
from revela.corpus.readers.html import extract_fragment
from revela.corpus.readers.rows import Fields
from revela.types import Document

QUESTION, ANSWER = "1", "2"  # PostTypeId
MAX_DEPTH = 16  # a row is at the second level
FIRST = -(2**63)  # the rank of a question among its answers
MOST = 2**62  # of an Id or a score


@dataclass(frozen=True, slots=True)
class Post:
    """A question or an answer: ``question`` is the question's Id, ``rank`` orders its posts."""

    question: int
    rank: int
    title: str
    text: str


def read_posts(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Questions with their answers, as far as the file can be read."""
    broken: list[Exception] = []

    def readable_posts() -> Iterator[Post]:
        try:
            with open_binary(path) as handle:
                yield from _posts(handle, name, report)
        except READ_ERRORS as error:
            broken.append(error)

    posts = arrow_list(Post, readable_posts())
    yield from _questions(posts, name, report)
    if broken:
        raise broken[0]


def _questions(posts: ArrowList[Post], name: str, report: ReadReport) -> Iterator[Document]:
    if not posts:
        return
    order = np.lexsort((posts.column("rank"), posts.column("question")))
    for number, group in groupby(posts.chosen(order), key=lambda post: post.question):
        question, *answers = group
        where = f"{name}:{number}"
        if question.rank != FIRST:
            report.skip("answers without their question", where)
            continue
        text = "\n\n".join(post.text for post in (question, *answers) if post.text)
        yield Document(where, text, question.title)


def _posts(handle: BinaryIO, name: str, report: ReadReport) -> Iterator[Post]:
    for row in _rows(handle):
        where = f"{name}:{row.get('Id', '?')}"
        kind = row.get("PostTypeId")
        if kind not in (QUESTION, ANSWER):
            report.skip("neither question nor answer", where)
            continue
        try:
            question = _number(row["Id"] if kind == QUESTION else row["ParentId"])
            rank = FIRST if kind == QUESTION else -_number(row.get("Score", "0"))
            body = row["Body"]
        except (KeyError, ValueError):
            report.skip("post without Id, ParentId or Body", where, bad=True)
            continue
        yield Post(question, rank, " ".join(row.get("Title", "").split()), extract_fragment(body))


def _number(text: str) -> int:
    """An Id or a score.

    Raises:
        ValueError: it is none, or is too large for the 64 bits that it is kept in.
    """
    if abs(number := int(text)) > MOST:
        raise ValueError(f"more than {MOST}")
    return number


def _elements(handle: BinaryIO) -> Iterator[tuple[str, ET.Element]]:
    """("start" or "end", element), as they are read.

    Raises:
        DamagedFile: one is longer than ``MAX_BYTES``.
    """
    parser: Any = ET.XMLPullParser(("start", "end"))
    size = 0
    while part := handle.read(2**16):
        parser.feed(part)
        size += len(part)
        for event in parser.read_events():
            size = 0
            yield event
        if size > common.MAX_BYTES:
            raise DamagedFile(f"XML element over {common.MAX_BYTES >> 20} MB, its rest lost")
    parser.close()


def _rows(handle: BinaryIO) -> Iterator[Mapping[str, str]]:
    """The attributes of each row; an element is freed once it is read."""
    try:
        root: ET.Element | None = None
        depth = 0
        for event, element in _elements(handle):
            depth += 1 if event == "start" else -1
            if root is None:
                root = element
                if root.tag != "posts":
                    raise UnsupportedFile(
                        "XML that is not a StackExchange Posts.xml", f"begins with <{root.tag}>"
                    )
            elif depth > MAX_DEPTH:
                raise DamagedFile("elements within elements, no StackExchange Posts.xml")
            elif event == "end":
                if element.tag == "row":
                    yield element.attrib
                root.clear()
    except ET.ParseError as error:
        where = f"after line {error.position[0]:,}"
        raise DamagedFile("broken XML, its rest lost", where) from error
