"""Change an index: add, replace and delete documents, count their terms, and finish.

Each commit changes the table first, then the state with the counts of terms (state.py). If a run is
killed between the two, the next run undoes the change of the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from revela.errors import RevelaError
from revela.ranking.bm25 import TermCounts
from revela.ranking.calibration import Calibration
from revela.ranking.sentence_test import SentenceTest
from revela.searching.ingest import (
    Added,
    Batch,
    check_repeated,
    commits,
    encode_rows,
    table_rows,
)
from revela.searching.manifest import Info
from revela.searching.state import State
from revela.searching.table import Table
from revela.text.analyzer import detect
from revela.text.spool import ArrowList, LazyTexts, arrow_list
from revela.text.words import count_words
from revela.types import Document, Encoder, TokenEncoder

log = logging.getLogger(__name__)


@contextmanager
def word_bar(
    documents: Sequence[Document],
    shown: bool,
    tell: Callable[[float], None] | None = None,
    kept: bool = True,
) -> Iterator[Callable[[Added], None]]:
    """While open, a bar counts the words of documents as they are put into an index; it yields what
    counts each batch. If the process is asked to stop, a line says how to go on.

    Args:
        documents: in their order.
        shown: show the bar.
        tell: is given the share of the words that are in the index, after each batch.
        kept: what was put stays when the process stops.
    """
    words = [count_words(document.text) for document in documents] if shown or tell else []
    left, total, done, number = iter(words), sum(words), 0, 0
    # Without smoothing, the time left follows from all batches: chunks differ in length.
    how: Any = dict(unit="word", unit_scale=True, smoothing=0, disable=not (shown and documents))
    with tqdm(total=total, **how) as bar:

        def count(batch: Added) -> None:
            nonlocal done, number
            read = sum(islice(left, batch.documents))
            done, number = done + read, number + batch.documents
            if batch.chunks:
                bar.update(read)
            elif bar.total:  # was there before, and says nothing about the pace
                bar.total -= read
            if tell:
                tell(done / max(1, total))
            if number == len(documents):
                bar.close()  # what finishes the index is not counted

        try:
            yield count
        except (KeyboardInterrupt, SystemExit):
            if kept and documents:
                log.warning(
                    f"stopped: {number:,} of {len(documents):,} documents are in the index, the "
                    "same command goes on from there"
                )
            raise


class Changes:
    """Changes an index, whose lock the caller must hold (``Index.changes``). When a method returns,
    its change is on the disk.

    Args:
        encoder: gives its retriever, when that is first needed.
    """

    def __init__(self, folder: Path, encoder: Callable[[], TokenEncoder]) -> None:
        self.folder, self._encoder = folder, encoder
        self.state = State(folder)
        self.info = self.state.info
        self.table = Table.open(folder, self.info, create=not self.state.snapshot().version)
        self._restore()

    def put(self, documents: Iterable[Document], progress: bool = False) -> Added:
        """Add documents; one whose id is in the index is replaced, unless it is the same."""
        if not isinstance(documents, ArrowList):
            texts = (document for document in documents if document.full_text.strip())
            documents = arrow_list(Document, texts)
        names = [name for some in documents.arrays("id") for name in some.to_pylist()]
        check_repeated(names)
        self.state.forget(names)
        total = Added()
        with word_bar(documents, progress) as count:
            for added in self.put_by_commits(documents):
                total += added
                count(added)
        return total

    def put_by_commits(self, documents: Sequence[Document]) -> Iterator[Added]:
        """``put`` without its checks; each batch is yielded once it is safe on the disk."""
        self.find_language(LazyTexts(documents, lambda document: document.full_text))
        before = self.frozen()
        for documents_of_batch in commits(documents):
            batch = Batch.of(documents_of_batch, before, self.info)
            new = len(batch.documents) - len(batch.replaced)
            unchanged = len(documents_of_batch) - len(batch.documents)
            chunks, cut = self._write(batch, before) if batch.documents else (0, 0)
            yield Added(new, len(batch.replaced), unchanged, chunks, cut)

    def _write(self, batch: Batch, before: Table) -> tuple[int, int]:
        """Commit documents; returns the numbers of their chunks and of chunks that were cut.
        Passages that a replaced document already had are not encoded again.
        """
        rows = table_rows(batch.documents, batch.digests, self.info, self.folder)
        encoded = encode_rows(
            *(rows, self.info, self._encoder(), self.folder, self.table.passage_terms),
            before.passages(batch.replaced),
        )
        former, removed = before.find(batch.replaced)
        self.table.add(encoded.rows)
        self.table.delete(former)
        self.state.commit(self.table.version, [TermCounts.of(encoded.terms)], [removed])
        return len(encoded.terms), encoded.cut

    def drop(self, ids: Iterable[str]) -> int:
        """Delete documents, all or none; returns the number of their chunks."""
        ids = list(dict.fromkeys(ids))
        present = self.table.digests(ids)
        if missing := [name for name in ids if name not in present]:
            raise RevelaError(
                f"{self.folder} has no document {', '.join(missing[:3])}: "
                "nothing was deleted; give ids as revela search --json shows them"
            )
        self.state.forget(ids)
        return self.drop_known(ids)

    def drop_known(self, ids: Sequence[str]) -> int:
        """``drop`` those of the documents that the index has."""
        rows, removed = self.table.find(ids)
        if rows:
            self.table.delete(rows)
            self.state.commit(self.table.version, removed=[removed])
        return len(rows)

    # Steps

    def find_language(self, texts: Sequence[str]) -> None:
        """Find the language of a new index in a sample of its texts, and note it."""
        if self.info.language or not texts:
            return
        chosen, found = self.info.settings.language, detect(texts)
        if chosen == "auto":
            chosen = found
        elif chosen != "none" and not {*chosen.split("+")} & {*found.split("+")}:
            log.warning(
                f"--language {chosen}, but the text looks like {found}: its words are stemmed as "
                f"{chosen} all the same"
            )
        self._use(replace(self.info, language=chosen))
        self.state.commit(self.table.version, info=self.info)

    def frozen(self) -> Table:
        """``Table.frozen``, of the index as it is now."""
        before = self.table.frozen()
        self.state.commit(before.number)
        return before

    def finish(
        self,
        pack: Callable[[], None] | None = None,
        measure: Callable[[], Calibration] | None = None,
    ) -> None:
        """Pack the table unless little has changed, measure words and vectors if the index is new
        or has doubled, and let it be searched.

        Args:
            pack: packs the table; None: ``Table.pack``.
            measure: None: here.
        """
        size, is_new = len(self.table), not self.info.finished
        must_measure = self.info.calibration.is_outdated(size)
        if must_measure and not measure:
            self._find_language_again()
        if is_new or self._is_worth_packing():
            self._pack(pack or self.table.pack)
        info = replace(self.info, finished=True)
        if must_measure:
            measured = measure() if measure else calibrate(self.table, self._encoder())
            info = replace(info, calibration=replace(measured, passages=size))
        if info != self.info:
            self.state.commit(self.table.version, info=info)
            self._use(info)

    def _is_worth_packing(self) -> bool:
        return self.table.is_worth_packing(self.state.snapshot().changed)

    def _pack(self, pack: Callable[[], None]) -> None:
        pack()
        self.state.commit(self.table.version, packed=True)
        self.table.clean()  # of versions that the state names no more

    def _find_language_again(self) -> None:
        """Detect the language again in a table that has doubled, so that a first note in English
        does not decide how 240 Russian ones are stemmed. Makes all terms again; encodes nothing.
        """
        info = self.info
        if info.settings.language != "auto" or not info.calibration.passages:
            return
        language = detect(self.table.sample("passage")["passage"].to_pylist())
        if {*language.split("+")} == {*info.language.split("+")}:
            return
        log.info(f"{self.folder}: the language is {language} now, not {info.language}")
        self._use(replace(info, language=language))
        self.table.rewrite_terms()
        terms = TermCounts.of(self.table.terms())
        self.state.commit(self.table.version, [terms], info=self.info, replace_all=True)

    def _restore(self) -> None:
        """Undo what a killed run wrote to the table but not to the state, and pack what it left."""
        version = self.state.snapshot().version
        if version != self.table.version:
            if version:
                self.table.restore(version)
            self.state.commit(self.table.version)
        if self.info.finished and self._is_worth_packing():
            self._pack(self.table.pack)

    def _use(self, info: Info) -> None:
        self.info, self.table = info, self.table.of(info)


def calibrate(table: Table, encoder: Encoder) -> Calibration:
    """Measure words and vectors on a sample of an index's rows."""
    tokens = ["tokens"] if table.info.settings.keep_tokens else []
    names = "passage", "title", "id", "chunks"
    rows = table.sample(*names, "vector", *tokens)
    passages, titles, documents, lengths = (rows[name].to_pylist() for name in names)
    about: Any = dict(titles=titles, documents=documents, lengths=lengths)
    test = SentenceTest(passages, table.info.language or "en", **about)
    packed = rows["tokens"].to_pylist() if tokens else []
    return test(encoder, table.vectors_in(rows), by_tokens=True, scored=True, packed=packed)
