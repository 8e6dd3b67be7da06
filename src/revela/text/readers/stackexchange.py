"""Read StackExchange dumps: a question and its answers, best first, are one document.

In a dump, answers may be far from their question. So posts are first written to disk, then read
sorted by question and rank; memory holds two numbers per post.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np

from revela.text.readers.common import ReadReport, UnsupportedFile, open_binary
from revela.text.readers.encodings import HEAD
from revela.text.readers.html import extract_fragment
from revela.text.readers.rows import Fields
from revela.text.readers.text import read_text
from revela.text.spool import ArrowList, arrow_list
from revela.types import Document

QUESTION, ANSWER = "1", "2"  # PostTypeId
QUESTION_RANK = -(2**63)  # before all answers


@dataclass(frozen=True, slots=True)
class Post:
    """A question or an answer; ``question`` is the question's Id, ``rank`` orders its posts."""

    question: int
    rank: int
    title: str
    text: str


def read_posts(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read questions with their answers; other XML as it is."""
    with open_binary(path) as handle:
        is_posts = b"<posts" in handle.read(HEAD)
    if not is_posts:
        yield from read_text(path, name, fields, report)
        return
    with open_binary(path) as handle:
        posts = arrow_list(Post, _posts(handle, name, report))
    if posts:
        yield from _questions(posts, name, report)


def _questions(posts: ArrowList[Post], name: str, report: ReadReport) -> Iterator[Document]:
    order = np.lexsort((posts.column("rank"), posts.column("question")))
    for number, group in groupby(posts.select(order), key=lambda post: post.question):
        question, *answers = group
        where = f"{name}:{number}"
        if question.rank != QUESTION_RANK:
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
            question = int(row["Id"] if kind == QUESTION else row["ParentId"])
            rank = QUESTION_RANK if kind == QUESTION else -int(row.get("Score", "0"))
            body = row["Body"]
        except (KeyError, ValueError):
            report.skip("post without Id, ParentId or Body", where, bad=True)
            continue
        yield Post(question, rank, " ".join(row.get("Title", "").split()), extract_fragment(body))


def _rows(handle: BinaryIO) -> Iterator[Mapping[str, str]]:
    """The attributes of each row, with one element in memory at a time."""
    events = ET.iterparse(handle, ("start", "end"))
    _, root = next(events)
    if root.tag != "posts":
        message = "XML that is not a StackExchange Posts.xml"
        raise UnsupportedFile(message, f"begins with <{root.tag}>")
    for event, element in events:
        if event == "end":
            if element.tag == "row":
                yield element.attrib
            root.clear()
