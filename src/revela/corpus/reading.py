"""How a corpus is read: the options that every verb shares."""

from __future__ import annotations

from dataclasses import dataclass

from revela.settings import Corpus


@dataclass(frozen=True)
class Reading:
    """How a corpus is read, for verbs that take no settings of training."""

    text_field: str = Corpus.text_field
    "Field or column that holds the text."
    title_field: str = Corpus.title_field
    "Field or column that holds the title."
    join_titles: bool = Corpus.join_titles
    "Join neighbouring rows of one title: a file of passages becomes articles again."
    max_bad_share: float = Corpus.max_bad_share
    "Share of unreadable rows and files above which the run stops."


READING = Reading()
