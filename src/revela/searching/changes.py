"""Change an index: add, replace and delete documents, count their terms, and finish.

Each commit changes the table first, then the state with the counts of terms (state.py). If a run is
killed between the two, the next run undoes the change of the table.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.ranking.bm25 import TermCounts
from revela.ranking.calibration import Calibration
from revela.ranking.sentence_test import SentenceTest
from revela.searching.ingest import Counts, batches_of, changed_rows, check_repeated, encode_rows
from revela.searching.manifest import Info
from revela.searching.state import FileState, State
from revela.searching.table import Table
from revela.terminal import duration
from revela.text.analyzer import detect
from revela.text.spool import ArrowList, LazyTexts, arrow_list
from revela.text.words import count_words
from revela.types import Document, items_of

log = logging.getLogger(__name__)


class Changes:
    """Changes an index, whose lock the caller must hold (``Index.changes``). When a method returns,
    its change is on the disk.

    Args:
        encoder: gives its retriever, when that is first needed.
    """

    def __init__(self, folder: Path, encoder: Callable[[], TextEncoder]) -> None:
        self.folder, self._encoder = folder, encoder
        self.state = State(folder)
        self.info = self.state.info
        self.table = Table.open(folder, self.info, create=not self.state.snapshot().version)
        self._done, self._total = 0, 0  # documents in the index, and to add
        self._restore()

    def put(self, documents: Iterable[Document], progress: bool = False) -> Counts:
        """Add documents; one whose id is in the index is replaced, unless it is the same."""
        if not isinstance(documents, ArrowList):
            given = items_of(documents, "documents", Document)
            documents = arrow_list(Document, (one for one in given if one.full_text.strip()))
        names: list[str] = documents.column("id").tolist()
        check_repeated(names)
        self.state.forget(names)
        return self.follow(self.commits(documents, progress))

    def drop(self, ids: Iterable[str]) -> int:
        """Delete documents, all or none; returns the number of their chunks."""
        ids = items_of(list(ids) if isinstance(ids, Set) else ids, "ids")
        ids, before = list(dict.fromkeys(ids)), len(self.table)
        present = self.table.digests(ids)
        if missing := [name for name in ids if name not in present]:
            raise RevelaError(
                f"{self.folder} has no document {', '.join(missing[:3])}: "
                "nothing was deleted; give ids as revela search --json shows them"
            )
        self.state.forget(ids)
        self.follow((), [ids])
        return before - len(self.table)

    def follow(
        self,
        commits: Iterable[Counts],
        gone: Iterable[Sequence[str]] = (),
        files: Iterable[FileState] = (),
    ) -> Counts:
        """Add documents and note the files that are complete, then delete others. Every write to
        an index is done here, in commits.

        Args:
            commits: the counts of each commit, which is made when the next item is requested.
            gone: ids to delete; each sequence in one commit.
            files: that the documents were read from, in the same order.
        """
        total, unfinished, pending = Counts(), deque(files), 0
        for changed in commits:
            total, pending = total + changed, pending + changed.documents
            finished = list[FileState]()
            while unfinished and unfinished[0].documents <= pending:
                pending -= unfinished[0].documents
                finished.append(unfinished.popleft())
            self.state.keep(finished)
        self.state.keep(unfinished)  # without documents
        for ids in gone:
            self.commit(None, self.table.find(ids))
            self.state.forget(ids)
            total += Counts(gone=len(ids))
        return total

    def commits(
        self,
        documents: Sequence[Document],
        progress: bool = False,
        tell: Callable[[float], None] | None = None,
    ) -> Iterator[Counts]:
        """Add documents in commits, for ``follow``. Passages that a replaced document already had
        are not encoded again.

        Args:
            documents: with different ids.
            progress: show a bar that counts their words.
            tell: called after each commit with the share of the words that are in the index.
        """
        if not documents:
            return
        self.find_language(LazyTexts(documents, lambda document: document.full_text))
        before = self.table.frozen()
        self.state.commit(before.number)
        is_counted = progress or tell is not None
        total = _count_words(documents) if is_counted else 0
        done = 0
        self._total += len(documents)
        # Without smoothing, the time left follows from all batches: chunks differ in length.
        with tqdm(
            total=total, unit="word", unit_scale=True, smoothing=0, disable=not progress
        ) as bar:
            for some in batches_of(documents):
                counts, replaced, rows = changed_rows(some, before, self.info, self.folder)
                if rows:
                    known, analyze = before.passages(replaced), self.table.passage_terms
                    encoded, cut = encode_rows(
                        rows, self.info, self._encoder(), self.folder, analyze, known
                    )
                    terms = TermCounts.of(map(str.split, encoded["terms"].to_pylist()))
                    self.commit(encoded, before.find(replaced), terms)
                    counts += Counts(chunks=len(encoded), cut=cut)
                self._done += len(some)
                yield counts
                read = _count_words(some) if is_counted else 0
                done += read
                if rows:
                    if progress and read and not bar.n:
                        minutes = bar.format_dict["elapsed"] * (total - done) / read / 60
                        if minutes > 1:
                            log.info(f"encoding takes about {duration(minutes)} more")
                    bar.update(read)
                elif bar.total:  # unchanged documents would distort the speed
                    bar.total -= read
                if tell:
                    tell(done / max(1, total))

    def commit(
        self, rows: Any, former: tuple[list[int], TermCounts], terms: TermCounts | None = None
    ) -> None:
        """Add rows in Arrow with these terms, and delete the former ones (``Table.find``)."""
        numbers, removed = former
        if rows is None and not numbers:
            return
        self.table.replace(rows, numbers)
        self.state.commit(self.table.version, terms, removed)

    # Steps

    def find_language(self, texts: Sequence[str]) -> None:
        """Find the language of a new index in a sample of its texts, and note it."""
        if self.info.language:
            return
        chosen, found = self.info.settings.language, detect(texts)
        if chosen == "auto":
            chosen = found
        elif chosen != "none" and not {*chosen.split("+")} & {*found.split("+")}:
            log.warning(
                f"--language {chosen}, but the text looks like {found}: its words are still "
                f"stemmed as {chosen}"
            )
        self._use(replace(self.info, language=chosen))
        self.state.commit(self.table.version, info=self.info)

    def finish(self) -> None:
        """Pack the table unless little has changed, measure words and vectors if the index is new
        or has doubled, and mark it as finished.
        """
        size, is_new = len(self.table), not self.info.finished
        must_measure = self.info.calibration.is_outdated(size)
        if must_measure:
            self._find_language_again()
        if is_new or self.table.is_worth_packing(self.state.snapshot().changed):
            self._pack()
        info = replace(self.info, finished=True)
        if must_measure:
            measured = calibrate(self.table, self._encoder())
            info = replace(info, calibration=replace(measured, passages=size))
        if info != self.info:
            self.state.commit(self.table.version, info=info)
            self._use(info)

    def stopped(self) -> None:
        """Log how to resume if the process is asked to stop."""
        if self._total:
            log.warning(
                f"stopped: {self._done:,} of {self._total:,} documents are in the index: "
                "run the same command again to resume"
            )

    def _pack(self) -> None:
        self.table.pack()
        self.state.commit(self.table.version, packed=True)
        self.table.clean()  # of versions that the state no longer names

    def _find_language_again(self) -> None:
        """Detect the language again in a table that has doubled, so that a first note in English
        does not decide how 240 Russian ones are stemmed. Rewrites all terms; encodes nothing.
        """
        info = self.info
        if info.settings.language != "auto" or not info.calibration.passages:
            return
        language = detect(self.table.first_passages())
        if {*language.split("+")} == {*info.language.split("+")}:
            return
        log.info(f"{self.folder}: the language changed from {info.language} to {language}")
        self._use(replace(info, language=language))
        self.table.rewrite_terms()
        terms = TermCounts.of(self.table.terms())
        self.state.commit(self.table.version, terms, info=self.info, replace_all=True)

    def _restore(self) -> None:
        """Undo what a killed run wrote to the table but not to the state, and pack what it left."""
        version = self.state.snapshot().version
        if version != self.table.version:
            if version:
                self.table.restore(version)
            self.state.commit(self.table.version)
        changed = self.state.snapshot().changed
        if self.info.finished and self.table.is_worth_packing(changed):
            self._pack()

    def _use(self, info: Info) -> None:
        self.info, self.table = info, replace(self.table, info=info)


def calibrate(table: Table, encoder: TextEncoder) -> Calibration:
    """Measure words and vectors on a sample of an index's rows."""
    tokens = ["tokens"] if table.info.settings.keep_tokens else []
    names = "passage", "title", "id", "chunks"
    rows = table.sample(*names, "vector", *tokens)
    passages, titles, documents, lengths = (rows[name].to_pylist() for name in names)
    test = SentenceTest(
        passages, table.info.language or "en", titles=titles, documents=documents, lengths=lengths
    )
    vectors_ND, packed = table.vectors_in(rows), rows["tokens"].to_pylist() if tokens else []
    return test(encoder, vectors_ND, by_tokens=True, scored=True, packed=packed, progress=True)


def _count_words(documents: Iterable[Document]) -> int:
    return sum(count_words(document.full_text) for document in documents)
