"""The library in five lines: load a retriever, encode, index, search. Thin over models.retriever
and search/.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.errors import RevelaError
from revela.index import encode_corpus as indexing
from revela.index.fusion import Fusion
from revela.index.listwise import QueryHeads, load_query_heads
from revela.index.rerank import Rerank
from revela.index.store import Index, Mode
from revela.retriever.encode import load_encoder
from revela.settings import Indexing, Precision, Recipe
from revela.types import Document, Hit, Vectors
from revela.weights import fingerprint, resolve


class Retriever:
    """A retriever that is loaded once, for everything it is used for.

    Args:
        model: a folder made by ``revela train``, any Sentence-Transformers folder, a hub id or
            embedded:minilm-l6.
        precision: arithmetic; "auto" is bf16 where the hardware has it.
        lm: language model that re-ranks by its heads: a folder, a hub id or embedded:smollm2-135m;
            loaded when it is first needed.

    Raises:
        RevelaError: it is none of these, or cannot be opened.
    """

    def __init__(
        self,
        model: str | Path,
        precision: Precision = "auto",
        lm: str | Path = Recipe.offline_model,
    ) -> None:
        self.folder, self.lm = resolve(str(model)), str(lm)
        self.encoder = load_encoder(self.folder, precision)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """(N, D) float32 vectors of length one of these texts as queries."""
        return self.encoder.encode_queries(texts)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """(N, D) float32 vectors of length one of these texts as passages; a dot product with a
        query's vector is their cosine.
        """
        return self.encoder.encode_passages(texts)

    def index(
        self,
        documents: Iterable[str | Document],
        folder: str | Path,
        metadata: Sequence[str] = (),
        chunk_words: int = Indexing.chunk_words,
        keep_tokens: bool = Indexing.keep_tokens,
    ) -> Searcher:
        """Cut documents into chunks, encode and index them in a new folder; a run that was killed
        goes on when it is called again.

        Args:
            documents: texts, whose ids are then their numbers from 0, or documents with ids and
                titles of your own.
            folder: for the index.
            metadata: fields of the documents' ``metadata`` that results can be filtered by.
            chunk_words: most words in a chunk.
            keep_tokens: keep token vectors, so that re-ranking takes milliseconds.

        Raises:
            RevelaError: there is nothing to index, the folder holds something else, or two
                documents share an id.
        """
        if not (rows := _documents(documents)):
            raise RevelaError(
                "there is nothing to index: give texts or documents with words in them"
            )
        index, _ = indexing.build(
            Path(folder),
            rows,
            self.encoder,
            model=str(self.folder.resolve()),
            fingerprint=fingerprint(self.folder),
            settings=Indexing(chunk_words=chunk_words, keep_tokens=keep_tokens),
            metadata=metadata,
        )
        return Searcher(self, index)

    def open(self, folder: str | Path) -> Searcher:
        """Open an index that this retriever has made, here or by ``revela index``.

        Raises:
            RevelaError: the folder is no index, or another model made it.
        """
        index = Index.load(Path(folder))
        if index.fingerprint != fingerprint(self.folder):
            raise RevelaError(
                f"{self.folder} is not the model that made {folder}: open it with that one, or index again"
            )
        return Searcher(self, index)


class Searcher:
    """An index with the retriever that made it; ``Retriever.index`` and ``Retriever.open`` give
    one.
    """

    def __init__(self, retriever: Retriever, index: Index) -> None:
        self._retriever, self._index = retriever, index

    def search(
        self,
        question: str,
        k: int = 10,
        mode: Mode = "hybrid",
        where: str | None = None,
        fusion: Fusion = "score",
        rerank: Rerank | None = None,
    ) -> list[Hit]:
        """The k best documents, best first, each with its best chunk: found by meaning ("dense"),
        by words ("lexical") or both.

        Args:
            question: what to look for.
            k: how many.
            mode: see above.
            where: only documents whose metadata this holds for, as SQL: "year > 2020".
            fusion: how both are joined, by score or by rank.
            rerank: "tokens" orders the first 50 again by the vectors of single tokens, "heads" the
                first 20 by a language model.

        Raises:
            RevelaError: the question is empty, the filter is wrong, or the language model cannot be
                loaded.
        """
        how = self._heads if rerank == "heads" else rerank
        return self._index.search(question, self._retriever.encoder, k, mode, where, fusion, how)

    @cached_property
    def _heads(self) -> QueryHeads:
        return load_query_heads(self._retriever.lm, self._index.sample)

    def add(self, documents: Iterable[Document]) -> None:
        """Add documents; those whose id is there already are replaced."""
        indexing.extend(self._index, _documents(documents), self._retriever.encoder)


def _documents(documents: Iterable[str | Document]) -> ArrowList[Document]:
    """On disk, as indexing reads them; texts get their numbers as ids, and what has no word is left
    out.
    """
    whole = (
        Document(str(i), document) if isinstance(document, str) else document
        for i, document in enumerate(documents)
    )
    return arrow_list(Document, (document for document in whole if document.full_text.strip()))
