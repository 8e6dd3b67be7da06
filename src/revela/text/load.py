"""Read a corpus into documents on disk, without duplicates, and report what was skipped."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from revela.errors import RevelaError
from revela.terminal import progress_bar
from revela.text.dedupe import near_duplicates
from revela.text.readers import FORMATS, Source, common, read_sources
from revela.text.readers.common import ReadReport
from revela.text.readers.rows import Fields
from revela.text.spool import ArrowList, arrow_list
from revela.text.words import count_words
from revela.types import Document, hash64

MIN_WORDS = 5  # per document; shorter ones hold no sentence


@dataclass(frozen=True)
class Reading:
    """Options of reading a corpus, for commands that take no training settings."""

    text_field: str = "text"
    "Field or column that holds the text."
    title_field: str = "title"
    "Field or column that holds the title."
    join_titles: bool = False
    "Join neighbouring rows with the same title: a file of passages becomes articles again."

    def fields(self, metadata: Sequence[str] = (), for_search: bool = False) -> Fields:
        """The names of a row's fields."""
        return Fields(self.text_field, self.title_field, tuple(metadata), for_search)


READING = Reading()


def read_corpus(
    sources: Sequence[Source | str],
    reading: Reading = READING,
    *,
    distinct: bool = True,
    near: float = 0.0,
    min_words: int = MIN_WORDS,
    max_bad_share: float = 1.0,
    rename_repeated: bool = False,
    metadata: Sequence[str] = (),
    for_search: bool = False,
    judged: Collection[str] = (),
) -> tuple[ArrowList[Document], ReadReport]:
    """Read all documents into a temporary file, in order of source, path and row.

    Args:
        sources: folders, files of any format in ``readers.READERS``, hub:owner/name, and those of
            ``sources_of``.
        reading: names of fields, and whether to join titles.
        distinct: drop documents with the same title and text as an earlier one.
        near: drop documents at least this similar to an earlier one (``near_duplicates``); 0: none.
        min_words: skip documents with fewer words, title included.
        max_bad_share: RevelaError if a larger share of files and rows cannot be read.
        rename_repeated: use a row's place as its id if another row has the same id.
        metadata: other fields or columns to keep with each document.
        for_search: also keep the date and the type of its file.
        judged: ids of documents that are never dropped, unless they are empty; their
            near-duplicates are dropped instead.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "bees.txt").write_text("Bees dance to show where flowers are.")
    ...     documents, report = read_corpus([folder])
    >>> documents[0].id, documents[0].text
    ('bees.txt', 'Bees dance to show where flowers are.')
    >>> report.lines()
    ['read 1 document, 7 words: 100.0 % of the bytes of files that may hold text']
    """
    report = ReadReport(judged=judged, claim=first_claim() if rename_repeated else None)
    read = read_sources(sources, reading.fields(metadata, for_search), report)
    if reading.join_titles:
        read = joined_by_title(read, report)
    bar = progress_bar("reading", "document", read)
    documents = arrow_list(Document, filter_documents(bar, distinct, min_words, report))
    check_report(len(documents), report, sources, max_bad_share)
    if near:
        never = {row for row, name in enumerate(documents.column("id")) if name in judged}
        dropped = near_duplicates(documents, near, never)
        for row, kept in dropped.items():
            document = documents[row]
            report.words -= count_words(document.full_text)
            report.skip("near-duplicate text", f"{document.id} like {documents[kept].id}")
        documents = documents.select(row for row in range(len(documents)) if row not in dropped)
    report.documents = len(documents)
    return documents, report


def first_claim() -> Callable[[str], bool]:
    """A function that tells whether an id is given to it for the first time."""
    seen = set[int]()

    def claim(name: str) -> bool:
        before = len(seen)
        seen.add(hash64(name))
        return len(seen) > before

    return claim


def check_report(
    documents: int, report: ReadReport, sources: Sequence[Source | str], max_bad_share: float = 1.0
) -> None:
    """Raise RevelaError if too much could not be read, or nothing was found."""
    total = documents + sum(report.skipped.values())
    if report.bad > max_bad_share * total:
        examples = ((r, report.examples[r]) for r in report.examples if r in report.bad_reasons)
        bad = "; ".join(f"{reason}: {', '.join(places)}" for reason, places in examples)
        raise RevelaError(
            f"{report.bad:,} of {total:,} entries cannot be read ({bad}): "
            "fix them, or allow more with --max-bad-share"
        )
    if not documents:
        why = report.lines()[1:]
        if not report.skipped or "binary" in report.skipped:
            why.append(f"revela reads {FORMATS}")
        raise RevelaError(f"no document found in {', '.join(map(str, sources))}: {'; '.join(why)}")


def filter_documents(
    documents: Iterable[Document], distinct: bool, min_words: int, report: ReadReport
) -> Iterator[Document]:
    """Documents with at least ``min_words`` words; with ``distinct`` each text once. Judged
    documents need only one word, and may have the text of another.
    """
    seen = set[bytes]()
    for document in documents:
        words = count_words(document.full_text)
        digest = hashlib.blake2b(document.full_text.encode(), digest_size=16).digest()
        is_judged = document.id in report.judged
        if words < (1 if is_judged else min_words):
            report.skip("shorter than a sentence", document.id)
        elif distinct and digest in seen and not is_judged:
            report.skip("duplicate text", document.id)
        else:
            if distinct:
                seen.add(digest)
            report.words += words
            yield document


def joined_by_title(documents: Iterable[Document], report: ReadReport) -> Iterator[Document]:
    """Join neighbouring passages with the same title into an article, with the first one's id.

    They are joined by a space, because files of 100-word passages cut sentences.
    """
    for title, group in groupby(documents, key=lambda document: document.title):
        if not title:
            yield from group
            continue
        passages, length = [], 0
        for passage in group:
            passages.append(passage)
            length += len(passage.text)
            if length > common.MAX_BYTES:
                raise RevelaError(
                    f"over {common.MAX_BYTES >> 20} MB of neighbouring passages share the title "
                    f'"{title}" (from {passages[0].id} on): name the field of the article titles '
                    "with --title-field, or drop --join-titles"
                )
        report.passages += len(passages)
        report.articles += 1
        yield dataclasses.replace(passages[0], text=" ".join(p.text for p in passages))


def split_held_out(
    documents: ArrowList[Document], share: float, at_most: int
) -> tuple[ArrowList[Document], list[Document]]:
    """Hold out a share of the documents, at most ``at_most``; returns the rest and those held out.

    A hash of title and text selects them, so they are the same in any order, run and seed.
    """
    digests = [hashlib.blake2b(d.full_text.encode(), digest_size=8).digest() for d in documents]
    ranked = sorted(range(len(digests)), key=digests.__getitem__)
    n_held_out = min(at_most, int(share * len(digests)))
    rest, held_out = sorted(ranked[n_held_out:]), sorted(ranked[:n_held_out])
    return documents.select(rest), list(documents.select(held_out))
