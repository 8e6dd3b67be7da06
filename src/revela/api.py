"""The library in five lines: load a retriever, encode, index, search. Thin over models.retriever and search.store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from revela.config import Precision
from revela.errors import RevelaError
from revela.models.retriever import load_encoder
from revela.models.weights import fingerprint, resolve
from revela.search.store import Index, Mode, passages_of
from revela.types import Document, Hit, Vectors


class Retriever:
    """A retriever that is loaded once, for everything it is used for.

    Args:
        model: a folder made by ``revela train``, any Sentence-Transformers folder, a hub id or embedded:minilm-l6.
        precision: arithmetic; "auto" is bf16 where the hardware has it.

    Raises:
        RevelaError: it is none of these, or cannot be opened.
    """

    def __init__(self, model: str | Path, precision: Precision = "auto") -> None:
        self.folder = resolve(str(model))
        self.encoder = load_encoder(self.folder, precision)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """(N, D) float32 vectors of length one of these texts as queries."""
        return self.encoder.encode_queries(texts)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """(N, D) float32 vectors of length one of these texts as passages; a dot product with a query's vector is their cosine."""
        return self.encoder.encode_passages(texts)

    def index(self, documents: Sequence[str | Document], folder: str | Path, chunk_words: int = 120) -> Searcher:
        """Cut documents into passages, encode and index them in a new folder.

        Args:
            documents: texts, whose ids are then their numbers from 0, or documents with ids and titles of your own.
            folder: for the index; must not exist.
            chunk_words: most words in a passage.

        Raises:
            RevelaError: there is nothing to index, or the folder exists.
        """
        folder = Path(folder)
        if folder.exists():
            raise RevelaError(f"{folder} exists: open it with Retriever(...).open, or choose another folder")
        whole = [Document(str(i), document) if isinstance(document, str) else document for i, document in enumerate(documents)]
        passages = passages_of(whole, chunk_words)
        if not passages:
            raise RevelaError("there is nothing to index: none of the documents has a word")
        Index.build(passages, self.encoder, str(self.folder.resolve()), fingerprint(self.folder)).save(folder)
        return self.open(folder)

    def open(self, folder: str | Path) -> Searcher:
        """Open an index that this retriever has made, here or by ``revela index``.

        Raises:
            RevelaError: the folder is no index, or another model made it.
        """
        index = Index.load(Path(folder))
        if index.fingerprint != fingerprint(self.folder):
            raise RevelaError(f"{self.folder} is not the model that made {folder}: open it with that one, or index again")
        return Searcher(self, index)


class Searcher:
    """An index with the retriever that made it; ``Retriever.index`` and ``Retriever.open`` give one."""

    def __init__(self, retriever: Retriever, index: Index) -> None:
        self._retriever, self._index = retriever, index

    def search(self, question: str, k: int = 10, mode: Mode = "hybrid") -> list[Hit]:
        """The k best passages, best first: by meaning ("dense"), by words ("lexical") or both.

        Raises:
            RevelaError: the question is empty.
        """
        return self._index.search(question, self._retriever.encoder, k, mode)
