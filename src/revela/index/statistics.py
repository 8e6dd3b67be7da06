"""Statistics of an index as a whole, which the fusion needs and LanceDB does not give: how many
chunks hold each term.

Terms are hashed, so that ten million of them are two arrays in one file. They are counted as
batches are written, and saved with the version of the table that they describe; where the two
differ (a run was killed in between), they are counted again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.index.bm25 import best_score, idf
from revela.index.language import CORPUS_WORDS
from revela.types import hash64

FILE = "statistics.safetensors"
AGAIN = "remove it, and it is made again by revela index --append"
PENDING = 2**20  # changes that are collected before they are merged into the sorted arrays


@dataclass(frozen=True)
class TermCounts:
    """How many of some chunks hold each term: sorted hashes of terms, and their counts."""

    chunks: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, terms: Iterable[Sequence[str]]) -> TermCounts:
        """Of the terms of each chunk."""
        hash_of, counts, chunks = lru_cache(CORPUS_WORDS)(hash64), Counter[int](), 0
        for found in terms:
            chunks += 1
            counts.update(set(map(hash_of, found)))
        return cls(chunks, *_sorted_counts(counts))


class Statistics:
    """Document frequencies of the terms of an index.

    Attributes:
        chunks: how many the frequencies are of; 0 if there is no file.
        version: of the table when they were saved.
        changed: whether there is something to save.

    Args:
        folder: of the index.

    Raises:
        RevelaError: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._hash_of = lru_cache(CORPUS_WORDS)(hash64)  # most of a corpus comes back
        self._lock = threading.Lock()  # searches in several threads share them
        self.clear()
        self.refresh()

    def clear(self) -> None:
        """Reset everything."""
        self.chunks, self.version, self.changed = 0, -1, False
        self._hashes, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._pending = Counter[int]()
        self._stamp = 0

    def refresh(self) -> None:
        """Read the file again if another process has written it and there is nothing to save."""
        from safetensors import SafetensorError, safe_open

        stamp = self.file.stat().st_mtime_ns if self.file.is_file() else 0
        if stamp == self._stamp or self.changed:
            return
        try:
            with safe_open(self.file, "numpy") as file:
                about = file.metadata()
                chunks, version = int(about["chunks"]), int(about["version"])
                hashes, counts = file.get_tensor("hashes"), file.get_tensor("counts")
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RevelaError(f"{self.file} is damaged ({error}): {AGAIN}") from error
        with self._lock:
            self.chunks, self.version, self._stamp = chunks, version, stamp
            self._hashes, self._counts = hashes, counts

    def current(self) -> Statistics:
        """These, for a search, with what another process has added.

        Raises:
            RevelaError: the file is missing or damaged.
        """
        self.refresh()
        if not self._stamp:
            raise RevelaError(f"{self.file} is missing: it is made again by revela index --append")
        return self

    def save(self, version: int) -> None:
        """Write the file: the terms of this version of the table."""
        from safetensors.numpy import save_file

        self._merge()
        with atomic_write(self.file) as temporary:
            about = {"chunks": str(self.chunks), "version": str(version)}
            save_file({"hashes": self._hashes, "counts": self._counts}, temporary, about)
        self.version, self.changed = version, False
        self._stamp = self.file.stat().st_mtime_ns

    def add(self, terms: Iterable[Sequence[str]], times: int = 1) -> None:
        """Add the terms of these chunks to the counts; with ``times`` -1, take them off."""
        self.changed = True
        for found in terms:
            self.chunks += times
            for term in set(map(self._hash_of, found)):
                self._pending[term] += times
        if len(self._pending) > PENDING:
            self._merge()

    def add_counts(self, terms: TermCounts) -> None:
        """``add``, of chunks that were counted by somebody else."""
        self.changed, self.chunks = True, self.chunks + terms.chunks
        self._merge()
        self._merge_in(terms.hashes, terms.counts)

    def best(self, terms: Sequence[str]) -> float:
        """The greatest BM25 score that a chunk could have for a query of these terms; 0 if there is
        none.
        """
        return best_score(self._frequencies(terms), self.chunks)

    def idf(self, terms: Sequence[str]) -> NDArray[np.float64]:
        """The BM25 idf of each of these terms, (T,)."""
        return idf(self._frequencies(terms), self.chunks)

    def _frequencies(self, terms: Sequence[str]) -> NDArray[np.int64]:
        with self._lock:
            self._merge()
            known, counts = self._hashes, self._counts
        hashes = np.array([hash64(term) for term in terms], np.uint64)
        places = np.searchsorted(known, hashes)
        found = places < len(known)
        found[found] = known[places[found]] == hashes[found]
        frequencies = np.zeros(len(hashes), np.int64)
        frequencies[found] = counts[places[found]]
        return frequencies

    def _merge(self) -> None:
        if not self._pending:
            return
        self._merge_in(*_sorted_counts(self._pending))
        self._pending.clear()

    def _merge_in(self, hashes: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
        hashes, places = np.unique(np.concatenate([self._hashes, hashes]), return_inverse=True)
        totals = np.zeros(len(hashes), np.int64)
        np.add.at(totals, places, np.concatenate([self._counts, counts]))
        self._hashes, self._counts = hashes[totals > 0], totals[totals > 0]


def _sorted_counts(counts: Counter[int]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    hashes = np.fromiter(counts.keys(), np.uint64, len(counts))
    order = np.argsort(hashes)
    return hashes[order], np.fromiter(counts.values(), np.int64, len(counts))[order]
