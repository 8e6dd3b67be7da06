"""Change an index: add, replace and delete documents, count their terms, and finish.

After each commit of the table, the terms that it adds and removes are counted, and saved if the
index is searched already. If a process is killed in between, the versions of table and counts
differ, and ``finish`` counts all terms again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tqdm import tqdm

from revela.corpus.spool import ArrowList, LazyTexts, arrow_list
from revela.errors import RevelaError
from revela.files import writing
from revela.index.calibration import calibrate
from revela.index.ingest import (
    Added,
    Changes,
    check_repeated,
    commits,
    encode_rows,
    table_rows,
)
from revela.index.language import detect
from revela.index.manifest import Calibration
from revela.index.table import COMMIT, Table
from revela.index.term_stats import TermCounts
from revela.types import Document

if TYPE_CHECKING:
    from revela.index.index import Index

log = logging.getLogger(__name__)


class IndexWriter:
    """Changes an index.

    ``add`` and ``delete`` take the lock of its folder (``files.writing``). The other methods are
    their steps: the caller holds the lock, and calls ``finish`` once at the end.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.must_recount = False  # the terms of all chunks

    def add(self, documents: Iterable[Document], progress: bool = False) -> Added:
        """``Index.add``."""
        if not isinstance(documents, ArrowList):
            texts = (document for document in documents if document.full_text.strip())
            documents = arrow_list(Document, texts)
        total = Added()
        with writing(self.index.folder):
            check_repeated(name for names in documents.arrays("id") for name in names.to_pylist())
            self.find_language(LazyTexts(documents, lambda document: document.full_text))
            with tqdm(total=len(documents), unit="document", disable=not progress) as bar:
                for added in self.add_batches(documents):
                    total += added
                    bar.update(added.documents)
            self.finish()
        return total

    def delete(self, ids: Iterable[str]) -> int:
        """``Index.delete``."""
        ids, folder = list(dict.fromkeys(ids)), self.index.folder
        if not ids:
            return 0
        with writing(folder):
            self.index.table.settle()
            present = self.index.table.digests(ids)
            if missing := [name for name in ids if name not in present]:
                raise RevelaError(
                    f"{folder} has no document {', '.join(missing[:3])}: "
                    "nothing was deleted; give ids as revela search --json shows them"
                )
            chunks = self.drop(ids)
            self.finish()
        return chunks

    # Steps

    @property
    def is_finished(self) -> bool:
        """Whether ``finish`` has nothing to do. A run that is stopped or killed after its last
        commit leaves a table whose terms are not counted, or that is not packed.
        """
        index, statistics = self.index, self.index.statistics
        is_saved = index.info.finished and statistics.saved == index.table.version
        if not is_saved or self._must_measure:
            return False
        return not (statistics.changes and index.table.is_worth_packing(statistics.changes))

    @property
    def _must_measure(self) -> bool:
        info = self.index.info
        return info.language is not None and info.calibration.is_outdated(len(self.index))

    def find_language(self, texts: Sequence[str]) -> None:
        """Find the language of a new index in a sample of its texts, and save it."""
        info = self.index.info
        if info.language != "" or not texts:
            return
        chosen, found = info.settings.language, detect(texts)
        if chosen == "auto":
            chosen = found
        elif chosen != "none" and not {*chosen.split("+")} & {*found.split("+")}:
            log.warning(
                f"--language {chosen}, but the text looks like {found}: its words are stemmed as "
                f"{chosen} all the same"
            )
        self.index.update(replace(info, language=chosen))

    def _find_language_again(self) -> None:
        """Find the language again in a table that has doubled, as a first note in English must not
        decide how 240 Russian ones are stemmed. Terms are made anew; nothing is encoded.
        """
        info, table = self.index.info, self.index.table
        if info.settings.language != "auto" or not info.calibration.passages:
            return
        language = detect(table.sample("passage")["passage"].to_pylist())
        if language != info.language:
            log.info(f"{self.index.folder}: the language is {language} now, not {info.language}")
            info = replace(info, language=language)
            table.rewrite_terms(info.analyzer())
            self.must_recount = True
            self.index.update(info)

    def begin_adding(self) -> Table:
        """Settle what a killed process has left half changed; the table as it is now."""
        table, statistics = self.index.table, self.index.statistics
        table.settle()
        self._check_count()
        before = table.frozen()
        statistics.describe(before.version)
        return before

    def add_batches(self, documents: Iterable[Document]) -> Iterator[Added]:
        """Add documents by commits; each batch is yielded once it is safe on disk."""
        before = self.begin_adding()
        for batch in commits(documents):
            changes = Changes.of(batch, before, self.index.info)
            new = len(changes.documents) - len(changes.replaced)
            unchanged = len(batch) - len(changes.documents)
            chunks, cut = self._write(changes, before) if changes.documents else (0, 0)
            yield Added(new, len(changes.replaced), unchanged, chunks, cut)

    def _write(self, changes: Changes, before: Table) -> tuple[int, int]:
        """Commit documents; how many chunks they have, and how many of those were cut."""
        index, table = self.index, self.index.table
        rows = table_rows(changes.documents, changes.digests, index.info, index.folder)
        encoded = encode_rows(rows, index.info, index.encoder, index.folder, table.passage_terms)
        former, removed = before.find(changes.replaced)
        with self._counting([TermCounts.of(encoded.terms)], removed):
            table.write(encoded.rows, former)
        return len(encoded.terms), encoded.cut

    def drop(self, ids: Sequence[str]) -> int:
        """Delete documents, in one commit; unknown ids are left out. How many chunks they had."""
        rows, removed = self.index.table.find(ids)
        with self._counting([], removed):
            self.index.table.delete(rows)
        return len(rows)

    def commit_written(
        self, commit: Callable[[], int], added: Iterable[TermCounts], replaced: Sequence[str]
    ) -> int:
        """Add rows that other processes have written beside the table. ``commit`` does it, deletes
        the former rows of the ``replaced`` documents, and returns the version of the table.
        """
        with self._counting(added, self.index.table.find(replaced)[1]):
            version = commit()
        if not self.must_recount and not self.index.info.finished:  # else they are saved
            self.index.statistics.save(version)
        return version

    def finish(
        self,
        count: Callable[[], Iterable[TermCounts]] | None = None,
        pack: Callable[[], None] | None = None,
        measure: Callable[[], Calibration] | None = None,
    ) -> None:
        """Pack the table unless little has changed, bring its indices and the counts of terms up to
        date, and let it be searched.

        Args:
            count: counts the terms of all passages, which is needed after a kill; None: here.
            pack: packs the table; None: ``Table.pack``.
            measure: measures words and vectors, when the index is new or has doubled; None: here.
        """
        index, statistics = self.index, self.index.statistics
        self._check_count()
        is_new = not index.info.finished
        must_measure = self._must_measure
        if must_measure and not measure:
            self._find_language_again()
        table = index.table
        whole = is_new or self.must_recount or table.is_worth_packing(statistics.changes)
        if whole:
            pack() if pack else table.pack(is_new)
        if self.must_recount:
            statistics.clear()
            for counts in count() if count else [TermCounts.of(table.terms())]:
                statistics.add(counts)
            self.must_recount = False
        if must_measure:
            measured = measure() if measure else calibrate(table, index.encoder)
            measured = replace(measured, passages=len(index))
            index.update(replace(index.info, calibration=measured))
        statistics.save(table.version, whole)
        if is_new:  # last, as no hybrid search opens an index without counts
            index.update(replace(index.info, finished=True))

    @contextmanager
    def _counting(self, added: Iterable[TermCounts], removed: TermCounts) -> Iterator[None]:
        """While open, a commit is made; after it, as it may fail, the terms are counted."""
        index, statistics = self.index, self.index.statistics
        self._check_count()
        yield
        chunks, version = removed.chunks, index.table.version
        statistics.add(removed, sign=-1)
        for counts in added:
            chunks += counts.chunks
            statistics.add(counts)
        statistics.describe(version, max(chunks, COMMIT))
        # A file of an earlier version of the table shows that all has to be counted.
        if index.info.finished and not self.must_recount:
            statistics.save(version, whole=False)

    def _check_count(self) -> None:
        """Note if the counts are not those of the table, as after a kill or a failed commit."""
        index, statistics = self.index, self.index.statistics
        if statistics.version != index.table.version and (len(index) or statistics.chunks):
            self.must_recount = True
