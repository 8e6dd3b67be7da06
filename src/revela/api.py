"""``Retriever``: a trained retriever, from loading it to searching an index that it has made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from revela.corpus.arrow_list import arrow_list
from revela.errors import RevelaError
from revela.index.encode_corpus import metadata_columns
from revela.index.store import Index
from revela.retriever.encode import load_encoder
from revela.settings import Indexing, Precision, Recipe
from revela.types import Document, Vectors
from revela.weights import resolve


class Retriever:
    """A retriever, loaded once for everything that it is used for.

    Args:
        model: a folder made by ``revela train``, any Sentence-Transformers folder, a hub id or
            embedded:minilm-l6.
        precision: arithmetic; "auto" is bf16 where the hardware has it.
        lm: language model that re-ranks by its heads: a folder, a hub id or embedded:smollm2-135m;
            loaded when it is first needed.

    Raises:
        RevelaError: the model cannot be found or opened.

    Example:
        >>> from revela import Retriever
        >>> retriever = Retriever("my-retriever")
        >>> texts = ["Invoices are kept for ten years.", "The garden opens at nine."]
        >>> index = retriever.index(texts, "my-notes")
        >>> [hit.text for hit in index.search("are invoices kept for ten years", k=1)]
        ['Invoices are kept for ten years.']
        >>> retriever.open("my-notes").search("when does the garden open")[0].id
        '1'
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
        """Encode texts as queries: (N, D) float32 vectors of length one."""
        return self.encoder.encode_queries(texts)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Encode texts as passages: (N, D) float32 vectors of length one.

        The dot product of a passage's and a query's vector is their cosine.
        """
        return self.encoder.encode_passages(texts)

    def index(
        self,
        documents: Iterable[str | Document],
        folder: str | Path,
        metadata: Sequence[str] = (),
        chunk_words: int = Indexing.chunk_words,
        keep_tokens: bool = Indexing.keep_tokens,
    ) -> Index:
        """Make an index of documents in a new folder; the same call resumes a run that was killed.

        Args:
            documents: texts, which get their numbers from 0 as ids, or documents with ids and
                titles of their own. Those without a word are left out.
            folder: for the index.
            metadata: fields of the documents' ``metadata`` that searches can filter by.
            chunk_words: most words in a chunk.
            keep_tokens: keep token vectors, so that re-ranking takes milliseconds.

        Raises:
            RevelaError: there is nothing to index, the folder holds something else, two documents
                share an id, or no document has a metadata field.
        """
        numbered = (
            Document(str(i), document) if isinstance(document, str) else document
            for i, document in enumerate(documents)
        )
        rows = arrow_list(Document, (row for row in numbered if row.full_text.strip()))
        if not rows:
            raise RevelaError(
                "there is nothing to index: give texts or documents with words in them"
            )
        settings = Indexing(chunk_words=chunk_words, keep_tokens=keep_tokens)
        columns = metadata_columns(rows, metadata)
        index = Index.create(
            folder, self.folder, columns, settings, encoder=self.encoder, lm=self.lm
        )
        index.add(rows)
        return index

    def open(self, folder: str | Path) -> Index:
        """Open an index that this retriever has made, here or by ``revela index``.

        Raises:
            RevelaError: the folder is no index, or another model made it.
        """
        return Index.open(folder, self.folder, encoder=self.encoder, lm=self.lm)
