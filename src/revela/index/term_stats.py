"""Document frequencies of an index's terms, which the fusion needs and LanceDB does not give.

Terms are hashed, and saved as two arrays with the version of the table that they describe. If the
table has another version (a run was killed in between), they are counted again. Changes since a
large index was packed are saved in a second, small file.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.index.language import CORPUS_WORDS
from revela.types import hash64

K1, B = 1.2, 0.75  # of BM25
FILE, CHANGES = "statistics.safetensors", "statistics-changes.safetensors"
AGAIN = "remove it, and it is made again by revela index --append"
PENDING = 2**20  # changes to collect before they are merged into the sorted arrays

cached_hash = lru_cache(CORPUS_WORDS)(hash64)


def idf(frequencies_T: NDArray[np.int64], passages: int) -> NDArray[np.float64]:
    """Lucene's idf of terms in N passages, (T,): log(1 + (N - df + 0.5) / (df + 0.5))."""
    odds_T = (passages - frequencies_T + 0.5) / (frequencies_T + 0.5)
    return np.asarray(np.log1p(odds_T), np.float64)


def max_score(frequencies_T: NDArray[np.int64], passages: int) -> float:
    """The maximum BM25 score for a query: sum of idf (k1 + 1), the limit as term frequency grows
    (Bruch, Gai & Ingber, TOIS 2023, section 3).
    """
    return float((K1 + 1) * idf(frequencies_T, passages).sum())


@dataclass(frozen=True)
class TermCounts:
    """The number of chunks that hold each term: sorted hashes of terms, and counts."""

    chunks: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, terms: Iterable[Sequence[str]]) -> TermCounts:
        """Count the terms of each chunk."""
        counts, chunks = Counter[int](), 0
        for chunk in terms:
            chunks += 1
            counts.update(set(map(cached_hash, chunk)))
        return cls(chunks, *_sorted_counts(counts))


class Statistics:
    """Document frequencies of the terms of an index. Threads may search while one changes them.

    ``version`` is that of the table, ``saved`` the one that the files describe (-1: there are
    none); ``changes`` is the number of chunks changed since all counts were saved. ``chunks`` is 0
    if there is no file.
    """

    def __init__(self, folder: Path) -> None:
        self.file, self.changes_file = folder / FILE, folder / CHANGES
        self._lock = threading.RLock()
        self._stamp, self.saved = (0, 0), -1
        self.clear()
        self.refresh()

    def clear(self) -> None:
        """Forget all counts."""
        with self._lock:
            self.chunks, self.version, self.changes = 0, -1, 0
            self._hashes, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)
            self._base = -1  # the version of the file that holds these arrays
            self._pending = Counter[int]()  # not in the arrays yet

    # Search

    def refresh(self) -> None:
        """Read the files again if another process has written them."""
        with self._lock:
            stamp = self._stamps()
            if stamp == self._stamp or not stamp[0]:
                return
            about, hashes, counts = _read(self.file, "chunks", "version")
            base, changes, pending = about["version"], 0, Counter[int]()
            if stamp[1]:
                names = ("chunks", "version", "base", "changes")
                later, terms, differences = _read(self.changes_file, *names)
                if later["base"] == base:  # otherwise it is older than the file of all counts
                    about, changes = later, later["changes"]
                    pending.update(dict(zip(terms.tolist(), differences.tolist(), strict=True)))
            self.chunks, self.version, self.changes = about["chunks"], about["version"], changes
            self._hashes, self._counts, self._base = hashes, counts, base
            self._pending, self._stamp, self.saved = pending, stamp, self.version

    def current(self) -> Statistics:
        """Refreshed statistics for a search; a missing file is refused."""
        self.refresh()
        if not self._stamp[0]:
            raise RevelaError(f"{self.file} is missing: it is made again by revela index --append")
        return self

    def max_bm25(self, terms: Sequence[str]) -> float:
        return max_score(*self._frequencies(terms))

    def idf(self, terms: Sequence[str]) -> NDArray[np.float64]:
        return idf(*self._frequencies(terms))

    def _frequencies(self, terms: Sequence[str]) -> tuple[NDArray[np.int64], int]:
        """The number of chunks that hold each of these terms, and of all chunks."""
        hashes = [hash64(term) for term in terms]
        with self._lock:
            known, counts, chunks = self._hashes, self._counts, self.chunks
            frequencies = np.array([self._pending[term] for term in hashes], np.int64)
        places = np.searchsorted(known, np.array(hashes, np.uint64))
        found = places < len(known)
        found[found] = known[places[found]] == np.array(hashes, np.uint64)[found]
        frequencies[found] += counts[places[found]]
        return frequencies, chunks

    # Change

    def add(self, terms: TermCounts, sign: Literal[1, -1] = 1) -> None:
        """Add the terms of some chunks, or subtract them with ``sign`` -1."""
        with self._lock:
            self.chunks += sign * terms.chunks
            for term, count in zip(terms.hashes.tolist(), terms.counts.tolist(), strict=True):
                self._pending[term] += sign * count
            if len(self._pending) > PENDING:
                self._merge()

    def describe(self, version: int, changes: int = 0) -> None:
        """Note that the counts are those of this version of the table."""
        with self._lock:
            self.version, self.changes = version, self.changes + changes

    def save(self, version: int, whole: bool = True) -> None:
        """Write the counts of this version of the table: all (``whole``), or the changes since."""
        from safetensors.numpy import save_file

        with self._lock:
            whole = whole or self._base < 0
            about = {"chunks": self.chunks, "version": version}
            if whole:
                self._merge()
                counts = self._hashes, self._counts
            else:
                about |= {"base": self._base, "changes": self.changes}
                counts = _sorted_counts(self._pending)
        with atomic_write(self.file if whole else self.changes_file) as temporary:
            arrays = dict(zip(("hashes", "counts"), counts, strict=True))
            save_file(arrays, temporary, {name: str(value) for name, value in about.items()})
        with self._lock:
            if whole:
                self._base, self.changes = version, 0
            self.version = self.saved = version
            self._stamp = self._stamps()

    def _stamps(self) -> tuple[int, int]:
        """Modification times of both files; 0 for a missing one."""
        files = self.file, self.changes_file
        whole, changes = (f.stat().st_mtime_ns if f.is_file() else 0 for f in files)
        return whole, changes

    def _merge(self) -> None:
        if not self._pending:
            return
        pending, counts = _sorted_counts(self._pending)
        hashes, places = np.unique(np.concatenate([self._hashes, pending]), return_inverse=True)
        totals = np.zeros(len(hashes), np.int64)
        np.add.at(totals, places, np.concatenate([self._counts, counts]))
        self._hashes, self._counts, self._base = hashes[totals > 0], totals[totals > 0], -1
        self._pending = Counter[int]()


def _read(file: Path, *names: str) -> tuple[dict[str, int], NDArray[Any], NDArray[Any]]:
    """The numbers of these names in a file, its hashes, and their counts."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            about = {name: int(opened.metadata()[name]) for name in names}
            return about, opened.get_tensor("hashes"), opened.get_tensor("counts")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise RevelaError(f"{file} is damaged ({error}): {AGAIN}") from error


def _sorted_counts(counts: Counter[int]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    hashes = np.fromiter(counts.keys(), np.uint64, len(counts))
    order = np.argsort(hashes)
    return hashes[order], np.fromiter(counts.values(), np.int64, len(counts))[order]
