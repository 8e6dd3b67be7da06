"""Statistics of an index as a whole, which the fusion needs and LanceDB does not give: how many
chunks hold each word, and the geometry of the vectors.

Words are hashed, so that ten million of them are two arrays in one file. They are counted as
batches are written, and saved with the version of the table that they describe; where the two
differ (a run was killed in between), they are counted again.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.index.bm25 import STOP_WORDS, best_score, idf
from revela.index.fusion import Geometry
from revela.types import hash64

FILE = "statistics.safetensors"
AGAIN = "remove it, and it is made again by revela index --append"
WORD = re.compile(r"[^\W_]+")  # as LanceDB splits text
# Words whose hashes are kept, with some 150 bytes each: in a corpus most come back; in the queries
# that a service answers any may come.
CORPUS_WORDS, QUERY_WORDS = 2**18, 2**12
PENDING = 2**20  # changes that are collected before they are merged into the sorted arrays


@dataclass(frozen=True)
class WordCounts:
    """How many of some chunks hold each word: sorted hashes of words, and their counts."""

    chunks: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, passages: Iterable[str]) -> WordCounts:
        """Of these chunks."""
        hash_of, counts, chunks = _Hashes(), Counter[int](), 0
        for passage in passages:
            chunks += 1
            counts.update(_distinct(passage, hash_of))
        return cls(chunks, *_sorted_counts(counts))


class Statistics:
    """Document frequencies of the words of an index, and the geometry of its vectors.

    Attributes:
        chunks: how many the frequencies are of; 0 if there is no file.
        geometry: of the vectors.
        version: of the table when they were saved.
        changed: whether there is something to save.

    Args:
        folder: of the index.

    Raises:
        RevelaError: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._hash_of = _Hashes()
        self._hash_of_query = _Hashes(QUERY_WORDS)
        self._lock = threading.Lock()  # searches in several threads share them
        self.clear()
        self.refresh()

    def clear(self) -> None:
        """Reset everything."""
        self.chunks, self.version, self.changed = 0, -1, False
        self._hashes, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._pending = Counter[int]()
        self.geometry = Geometry(np.zeros(0, np.float32), 0.0)
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
                geometry = Geometry(file.get_tensor("mean"), float(about["spread"]))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RevelaError(f"{self.file} is damaged ({error}): {AGAIN}") from error
        with self._lock:
            self.chunks, self.version, self._stamp = chunks, version, stamp
            self._hashes, self._counts, self.geometry = hashes, counts, geometry

    def current(self, width: int) -> Statistics:
        """These, for a search, with what another process has added.

        Args:
            width: of the index's vectors.

        Raises:
            RevelaError: the file is missing, damaged, or another index's.
        """
        self.refresh()
        if len(self.geometry.mean) != width:
            raise RevelaError(f"{self.file} is missing or another index's: {AGAIN}")
        return self

    def save(self, version: int, geometry: Geometry) -> None:
        """Write the file: the words of this version of the table, and the geometry."""
        from safetensors.numpy import save_file

        self._merge()
        with atomic_write(self.file) as temporary:
            tensors: dict[str, NDArray[Any]] = {
                "hashes": self._hashes,
                "counts": self._counts,
                "mean": geometry.mean,
            }
            about = {"chunks": str(self.chunks), "version": str(version)}
            save_file(tensors, temporary, about | {"spread": repr(geometry.spread)})
        self.geometry, self.version, self.changed = geometry, version, False
        self._stamp = self.file.stat().st_mtime_ns

    def add(self, passages: Iterable[str], times: int = 1) -> None:
        """Add the words of these chunks to the counts; with ``times`` -1, take them off."""
        self.changed = True
        for passage in passages:
            self.chunks += times
            for word in _distinct(passage, self._hash_of):
                self._pending[word] += times
        if len(self._pending) > PENDING:
            self._merge()

    def add_counts(self, words: WordCounts) -> None:
        """``add``, of chunks that were counted by somebody else."""
        self.changed, self.chunks = True, self.chunks + words.chunks
        self._merge()
        self._merge_in(words.hashes, words.counts)

    def best(self, query: str) -> float:
        """The greatest BM25 score that a chunk could have for this query; 0 if all its words are
        stop words.
        """
        words = [word for word in WORD.findall(query.lower()) if word not in STOP_WORDS]
        return best_score(self._frequencies(words), self.chunks)

    def idf(self, word: str) -> float:
        """The BM25 idf of a word in lower case; 0 for a stop word."""
        return 0.0 if word in STOP_WORDS else float(idf(self._frequencies([word]), self.chunks)[0])

    def _frequencies(self, words: Sequence[str]) -> NDArray[np.int64]:
        with self._lock:
            self._merge()
            known, counts = self._hashes, self._counts
        hashes = np.array([self._hash_of_query[word] for word in words], np.uint64)
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


def _distinct(passage: str, hash_of: _Hashes) -> set[int]:
    return {hash_of[word] for word in WORD.findall(passage.lower())}


def _sorted_counts(counts: Counter[int]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    hashes = np.fromiter(counts.keys(), np.uint64, len(counts))
    order = np.argsort(hashes)
    return hashes[order], np.fromiter(counts.values(), np.int64, len(counts))[order]


class _Hashes(dict[str, int]):
    """A word -> 64 bits of its stem, computed once; emptied when it holds too many."""

    def __init__(self, most: int = CORPUS_WORDS) -> None:
        import Stemmer

        self._most = most
        self._stem = Stemmer.Stemmer("english").stemWord
        self._lock = threading.Lock()  # threads may not share a stemmer

    def __missing__(self, word: str) -> int:
        with self._lock:
            if len(self) >= self._most:
                self.clear()
            self[word] = hashed = hash64(self._stem(word))
            return hashed
