"""An index in one folder: passages, their vectors, BM25, and the fingerprint of the model that made the vectors. Exact search.

It is written under a temporary name and renamed when whole, so a folder that exists is a whole index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from revela.data.chunk import chunk_all
from revela.errors import RevelaError
from revela.files import whole
from revela.search.dense import top_k
from revela.search.fusion import RRF_DEPTH, reciprocal_rank_fusion
from revela.search.lexical import BM25
from revela.types import Document, Encoder, Hit, Vectors

Mode = Literal["dense", "lexical", "hybrid"]
INFO, PASSAGES, VECTORS, LEXICAL = "index.json", "passages.jsonl", "vectors.npy", "bm25"


def passages_of(documents: Sequence[Document], max_words: int) -> list[Hit]:
    """What is found: the documents' chunks, under the id and the title of their document."""
    return [Hit(documents[c.document].id, 0.0, documents[c.document].title, c.text) for c in chunk_all(documents, max_words)]


class Index:
    """Passages that can be searched by meaning, by words, or by both."""

    def __init__(self, passages: list[Hit], vectors: Vectors, bm25: BM25, model: str, fingerprint: str) -> None:
        self.passages, self.vectors, self.bm25, self.model, self.fingerprint = passages, vectors, bm25, model, fingerprint

    @classmethod
    def build(cls, passages: Sequence[Hit], encoder: Encoder, model: str, fingerprint: str, progress: bool = False) -> Index:
        """Index passages (their score is ignored) with an encoder; ``model`` is the folder it came from."""
        texts = [f"{p.title} {p.text}".strip() for p in passages]
        return cls(list(passages), encoder.encode_passages(texts, progress=progress), BM25(texts), model, fingerprint)

    def save(self, folder: Path) -> None:
        if folder.exists():
            raise RevelaError(f"{folder} exists: choose another --out")
        with whole(folder) as temporary:
            temporary.mkdir()
            np.save(temporary / VECTORS, self.vectors, allow_pickle=False)
            with (temporary / PASSAGES).open("w", encoding="utf-8") as handle:
                for p in self.passages:
                    handle.write(json.dumps({"id": p.id, "title": p.title, "text": p.text}, ensure_ascii=False) + "\n")
            if not self.bm25.empty:
                self.bm25.save(temporary / LEXICAL)
            (temporary / INFO).write_text(
                json.dumps({"model": self.model, "fingerprint": self.fingerprint, "passages": len(self.passages)})
            )

    @classmethod
    def load(cls, folder: Path) -> Index:
        """Open an index folder.

        Raises:
            RevelaError: the folder is none, or is damaged.
        """
        if not (folder / INFO).is_file():
            raise RevelaError(f"{folder} is not an index: it has no {INFO}; make one with revela index")
        try:
            info = json.loads((folder / INFO).read_text())
            rows = [json.loads(line) for line in (folder / PASSAGES).read_text(encoding="utf-8").splitlines()]
            passages = [Hit(r["id"], 0.0, r["title"], r["text"]) for r in rows]
            vectors = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
            bm25 = BM25.load(folder / LEXICAL, len(passages)) if (folder / LEXICAL).is_dir() else BM25([])
        except (OSError, ValueError, KeyError) as error:
            raise RevelaError(f"{folder} is damaged ({error}): make it again with revela index") from error
        if len(vectors) != len(passages):
            raise RevelaError(f"{folder} is damaged ({len(vectors)} vectors, {len(passages)} passages): make it again with revela index")
        return cls(passages, vectors, bm25, info["model"], info["fingerprint"])

    def search(self, query: str, encoder: Encoder | None, k: int = 10, mode: Mode = "hybrid") -> list[Hit]:
        """The k best passages. ``encoder`` must be the index's own; lexical search needs none."""
        if not query.strip():
            raise RevelaError("the query is empty: give some words to search for")
        rankings: list[list[int]] = []
        scores: dict[int, float] = {}
        depth = max(k, RRF_DEPTH) if mode == "hybrid" else k
        if mode in ("dense", "hybrid"):
            assert encoder is not None
            indices, values = top_k(encoder.encode_queries([query]), np.asarray(self.vectors), depth)
            scores = {int(i): float(v) for i, v in zip(indices[0], values[0], strict=True)}
            rankings.append(list(scores))
        if mode in ("lexical", "hybrid"):
            indices, values = self.bm25.top_k([query], depth)
            scores = {int(i): float(v) for i, v in zip(indices[0], values[0], strict=True) if v > 0}
            rankings.append(list(scores))
        if mode == "hybrid":
            scores = reciprocal_rank_fusion(rankings)
        best = list(scores.items())[:k]
        return [Hit(self.passages[i].id, score, self.passages[i].title, self.passages[i].text) for i, score in best]
