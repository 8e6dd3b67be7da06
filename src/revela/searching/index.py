"""An index: documents in one folder that are searched by their vectors, by their words, or by both.

Documents are cut into chunks, each a row of a LanceDB table (table.py). A search ranks chunks and
returns documents, each once, with its best chunk (index_search.py). changes.py changes an index.
Beside the table lies its state (state.py), which says in which version it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from revela.encoders import load
from revela.encoders.base import TextEncoder
from revela.encoders.model_files import check_dimensions, fingerprint, saved_for_dot
from revela.encoders.prompts import OWN, GivenPrompts, Prompts, check_prompts
from revela.errors import QueryError, RevelaError
from revela.files import writing
from revela.ranking.bm25 import Weight, term_weights
from revela.ranking.calibration import Calibration
from revela.ranking.fusion import Fusion, check_weight
from revela.ranking.steps import Mode, Rerank, SearchOptions, check_query
from revela.searching.filters import NO_PHRASE, OWN_COLUMNS, where_sql, with_phrases
from revela.searching.highlight import HighlightTerms
from revela.searching.index_search import IndexStore, hit_of, hits_of
from revela.searching.manifest import Indexing, Info, new_info
from revela.searching.rows import check_columns
from revela.searching.snippets import CHARACTERS, Snippet, snippet
from revela.searching.state import STATE, Snapshot, StaleSnapshot, State, unfinished_in
from revela.searching.table import Table, as_stored
from revela.text.analyzer import check_language
from revela.types import (
    Document,
    Hit,
    Hits,
    Precision,
    QueryTokens,
    Vectors,
    check_unicode,
    items_of,
)

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from revela.searching.changes import Changes
    from revela.searching.ingest import Counts
    from revela.text.load import Reading

T = TypeVar("T")
QUERY_BATCH = 256  # queries that are encoded together


class Index:
    """An index in a folder. ``create`` makes an empty one, ``open`` opens one.

    Other processes may search it at any time and see what is added; only one at a time may change
    it.

    Examples:
        >>> from revela import Document, Index
        >>> index = Index.create("my-notes", "my-retriever", {"year": "int64"})
        >>> first = Document("a", "Invoices are kept for ten years.", metadata={"year": 2020})
        >>> index.add([first, Document("b", "The garden opens at nine.")]).new
        2
        >>> index = Index.open("my-notes")
        >>> [hit.id for hit in index.search("how long are invoices kept", where="year > 2010")]
        ['a']
        >>> index.delete(["b"])
        1
        >>> with index.changes() as changes:
        ...     added = changes.put([Document("c", "The pond is deep.")])
        ...     deleted = changes.drop(["a"])
    """

    def __init__(
        self,
        folder: Path,
        encoder: TextEncoder | None = None,
        model: str | Path | None = None,
        precision: Precision = "auto",
        weight: float | None = None,
        default_rerank: Rerank | None = None,
    ) -> None:
        self.folder, self.weight = folder, weight
        self._encoder, self._model, self._precision = encoder, model, precision
        self._default_rerank = default_rerank
        self.notice = ""  # what is missing while documents are added (folder_index.py)
        self._open()

    def _open(self) -> None:
        self.state = State(self.folder)
        self._opened: tuple[Snapshot, Table] | None = None  # the table, and the state of that time

    @property
    def table(self) -> Table:
        """The table in the version of the current state, which another process may have changed."""
        opened = self._opened
        while opened is None or opened[0] != self.state.snapshot():
            now = self.state.snapshot()
            info = Info.from_json(now.info)
            table = opened[1] if opened else Table.open(self.folder, info, now.chunks)
            try:
                opened = now, table.at(now.version, info)
            except RevelaError:
                if now == self.state.snapshot():
                    raise
        self._opened = opened
        return opened[1]

    @property
    def info(self) -> Info:
        """The manifest: model, settings and measurements."""
        return self.table.info

    @classmethod
    def create(
        cls,
        folder: str | Path,
        model: str | Path,
        metadata: Mapping[str, str] | None = None,
        settings: Indexing = Indexing(),  # noqa: B008  (frozen)
        *,
        encoder: TextEncoder | None = None,
        prompts: GivenPrompts = OWN,
    ) -> Index:
        """Make an empty index, or open the one that a killed run began with the same settings.

        Args:
            folder: for the index, and for nothing else.
            model: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
            metadata: fields of the documents to keep, for filters, and their Arrow types: "string",
                "int64", "double" or "bool" (``rows.metadata_columns`` finds them).
            settings: how to cut documents and to store vectors.
            encoder: the encoder of ``model``, if it is loaded already.
            prompts: prefixes of queries and of passages, as ``encoder`` was loaded with; None keeps
                the model's own.
        """
        metadata = {n: k for n, k in (metadata or {}).items() if n not in OWN_COLUMNS}
        check_columns(metadata)
        check_language(settings.language)
        path = load.resolve(str(model))
        check_dimensions(path, settings.dimensions)
        if saved_for_dot(path):
            log.warning(f"{path} was trained for dot products; the index compares by cosines")
        if encoder is None:
            encoder = load.load_encoder(path, "auto", prompts=prompts)
        return cls.begin(
            Path(folder), new_info(path, encoder, settings, metadata, prompts), encoder
        )

    @classmethod
    def begin(cls, folder: Path, info: Info, encoder: TextEncoder) -> Index:
        """``create``, with a manifest."""
        from revela.searching.changes import Changes

        with writing(folder):
            if (unfinished := unfinished_in(folder)) is None:
                State.create(folder, info)
            elif unfinished.choices() != info.choices():
                raise RevelaError(
                    f"{folder} was started with another model or other settings: "
                    "give those again, or remove the folder"
                )
            Changes(folder, lambda: encoder).state.close()  # makes the table
            return cls(folder, encoder)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: str | Path | None = None,
        *,
        encoder: TextEncoder | None = None,
        precision: Precision = "auto",
        weight: float | None = None,
        default_rerank: Rerank | None = None,
        prompts: GivenPrompts = OWN,
    ) -> Index:
        """Open an index. Its retriever is loaded when it is first needed.

        Args:
            folder: made by ``create`` or ``revela index``.
            model: where the retriever is, if it has moved since the index was made.
            encoder: the index's retriever, if it is loaded already.
            precision: arithmetic; "auto" is that of the index's vectors.
            weight: weight of the vectors in hybrid search by score, from 0 (words alone) to 1;
                None: as measured on the index.
            default_rerank: re-ranker of searches that name none, if scores are cosines or fused by
                score.
            prompts: RevelaError if they are not those that the index was made with.
        """
        check_weight(weight)
        folder = Path(folder)
        index = cls(folder, encoder, model, precision, weight, default_rerank)
        if not index.state.info.finished:
            raise RevelaError(
                f"{folder} is not finished: run the same revela index again to resume it"
            )
        _ = index.table  # refuses one that is damaged
        if model is not None:
            _ = index.model_folder  # refuses a model that did not make the index
        if prompts != OWN:
            check_prompts(index.prompts, prompts, folder)
        return index

    @cached_property
    def model_folder(self) -> Path:
        """The folder of the index's retriever; RevelaError if it is another model's."""
        folder = load.resolve(str(self._model or self.info.model))
        if fingerprint(folder) != self.info.fingerprint:
            raise RevelaError(
                f"{folder} is not the model that made {self.folder}: "
                "give that one as --model, or index again"
            )
        return folder

    @property
    def prompts(self) -> Prompts:
        """The prompts that the retriever reads before queries and before passages."""
        return self.info.prompts

    @property
    def encoder(self) -> TextEncoder:
        """The index's retriever; loaded when first needed."""
        if self._encoder is None:
            precision = self.info.precision_of(self._precision)
            self._encoder = load.load_encoder(self.model_folder, precision, prompts=self.prompts)
        return self._encoder

    @property
    def calibration(self) -> Calibration:
        """How well words and vectors find its passages, by the last measurement."""
        return self.info.calibration

    def ids_among(self, documents: Sequence[str]) -> Set[str]:
        """Which of these ids are in the index."""
        return self.table.digests(documents).keys()

    def example_ids(self) -> list[str]:
        """Some ids of the index."""
        ids: list[str] = self.table.sample("id")["id"].to_pylist()
        return ids

    def __len__(self) -> int:
        """The number of chunks."""
        return len(self.table)

    @property
    def documents(self) -> int:
        """The number of documents."""
        return self._retried(lambda: self.table.documents)

    @property
    def updated(self) -> datetime:
        """When it was last changed, or updated from its files."""
        return datetime.fromtimestamp((self.folder / STATE).stat().st_mtime, UTC)

    def sample(self) -> list[str]:
        """At most a thousand passages, evenly spaced."""
        rows = self._retried(lambda: self.table.sample("passage"))
        return [str(text) for text in rows["passage"].to_pylist()]

    # Search

    def search(
        self,
        query: str,
        k: int = 10,
        mode: Mode = "hybrid",
        where: str | Mapping[str, object] | None = None,
        fusion: Fusion = "score",
        rerank: Rerank | None = None,
        encoded: Vectors | QueryTokens | None = None,
        min_score: float | None = None,
        explain: bool = False,
    ) -> Hits:
        """The k best documents, best first, each with its best chunk.

        Scores are cosines (dense), BM25 (lexical), or those of the fusion of both (hybrid;
        fusion.py). By score, the maximum is 1.

        Args:
            query: the question or words. A result contains the phrases in double quotes, if any
                passage does; otherwise ``Hits.notice`` says so.
            k: number of documents.
            mode: by vectors ("dense"), by words ("lexical") or by both ("hybrid"). A query of stop
                words alone is searched by vectors.
            where: filter over metadata, id and title, as SQL: "year > 2020 and lang = 'en'"; or
                as JSON (filters.py): {"year": {"gt": 2020}, "lang": "en"}.
            fusion: join both rankings by score, or by rank.
            rerank: "late-interaction" re-ranks the first 50 documents by token vectors, which are
                computed now unless the index keeps them; or "none", the default. The default for
                the index of a folder (folder_index.py) is "late-interaction" if scores are cosines
                or fused by score.
            encoded: the query's vector, (D,), or ``QueryTokens``, if known.
            min_score: leave out documents with a lower score.
            explain: add the parts of each score (``Hit.explanation``).

        Raises:
            QueryError: the query is empty or longer than ``QUERY_CHARACTERS``, the filter is wrong,
                an option has no such value, or two exclude each other.
            RevelaError: the retriever cannot be loaded, or the folder is damaged.
        """
        options = self.options(k, mode, where, fusion, rerank, min_score, explain)
        check_query(query)
        return self._search(query, options, encoded)

    def _search(
        self, query: str, options: SearchOptions, encoded: Vectors | QueryTokens | None
    ) -> Hits:
        if options.rerank == "late-interaction":
            if not isinstance(encoded, QueryTokens):
                (encoded,) = self.encoder.query_tokens([query])
            options = replace(options, tokens=encoded)
        # A stop word can be a term of rows in another language.
        by_words = options.mode == "lexical" and (
            self.table.query_terms(query) or self._retried(lambda: self.table.matching(query, 1))
        )
        vector: Vectors | None = None
        if not by_words:
            known = encoded.vector if isinstance(encoded, QueryTokens) else encoded
            vectors = self.encoder.encode_queries([query]) if known is None else known[None]
            vector = as_stored(vectors, self.info, self.folder)[0]

        def read(options: SearchOptions) -> Hits:
            store = IndexStore(self.table, self.state, lambda: self.encoder)
            return hits_of(store, query, vector, options)

        phrased = replace(options, where=with_phrases(options.where, query))
        hits = self._retried(lambda: read(phrased))
        if hits or phrased == options:
            return hits
        any_phrased = replace(phrased, k=1, min_score=None)
        if options.min_score is None or not self._retried(lambda: read(any_phrased)):
            without = replace(options, ignores_phrases=True)
            if hits := self._retried(lambda: read(without)):
                hits.notice = NO_PHRASE
        return hits

    def _retried(self, read: Callable[[], T]) -> T:
        """Call ``read``, and retry if another process has changed or packed the table meanwhile."""
        failed = -1
        while True:
            try:
                return read()
            except StaleSnapshot:
                continue
            except QueryError:
                raise
            except (KeyError, RevelaError) as error:
                self._open()
                version = self.table.version
                if version != failed:
                    failed = version
                    continue
                if isinstance(error, RevelaError):
                    raise
                raise RevelaError(
                    f"{self.folder} is damaged (rows are missing): make it again with revela index"
                ) from error

    def options(
        self,
        k: int = 10,
        mode: Mode = "hybrid",
        where: str | Mapping[str, object] | None = None,
        fusion: Fusion = "score",
        rerank: Rerank | None = None,
        min_score: float | None = None,
        explain: bool = False,
    ) -> SearchOptions:
        """The checked options of a search; QueryError as for ``search``."""
        sql = where_sql(where, self.info.columns) if where else ""
        if rerank is None:
            by_score = mode == "dense" or (mode == "hybrid" and fusion == "score")
            rerank = (self._default_rerank if by_score else None) or "none"
        return SearchOptions(k, mode, sql, fusion, self.weight, rerank, min_score, explain)

    def search_many(self, queries: Iterable[str], **options: Any) -> Iterator[Hits]:
        """``search`` for each query, with the same options; queries are encoded in batches."""
        queries = list(items_of(queries, "queries"))
        given = self.options(**options)
        for query in queries:
            check_query(query)
        for start in range(0, len(queries), QUERY_BATCH):
            batch = queries[start : start + QUERY_BATCH]
            encoded: Any = [None] * len(batch)
            if given.rerank == "late-interaction":
                encoded = self.encoder.query_tokens(batch)
            elif given.mode != "lexical":
                encoded = self.encoder.encode_queries(batch)
            for query, read in zip(batch, encoded, strict=True):
                yield self._search(query, given, read)

    def term_weights(self, query: str) -> list[Weight]:
        """Begin, end and BM25 idf of each term of a query."""
        return term_weights(query, self.table.query_terms, self.state.idf)

    def chunks(self, document: str) -> list[Hit]:
        """The chunks of a document, in order, with a score of 0; [] for an unknown id. Their texts
        joined are the document's text.
        """
        check_unicode(document, "the id")
        rows = self._retried(lambda: self.table.document(document))
        return [hit_of(row, self.info.columns) for row in rows]

    def snippets(
        self, query: str, hits: Sequence[Hit], characters: int = CHARACTERS
    ) -> list[Snippet]:
        """The part of each hit's text with the rarest words of the query, of at most
        ``characters``.
        """
        terms = HighlightTerms.of(query, self.table.query_terms, self.state.idf)
        return [snippet(hit, terms, characters) for hit in hits]

    def file(self, document: str) -> Path | None:
        """The file of a document; None if it is unknown or was deleted."""
        from revela.searching.locations import file_of

        return file_of(self.sources, document, self.state.owner_of(document) or "")

    @property
    def sources(self) -> list[str]:
        """The folders and files that the index was made of, if it records them."""
        return list(self.state.sources.get("sources", []))

    # Change

    @contextmanager
    def changes(self, wait: bool = False) -> Iterator[Changes]:
        """Lock the index to change it. Each change can be searched immediately; at the end the
        index is packed and calibrated, if necessary.

        Args:
            wait: wait for another process that is writing to the index; otherwise RevelaError.
        """
        from revela.searching.changes import Changes

        State(self.folder).close()  # raises for another folder, which must not get a lock file
        with writing(self.folder, wait):
            changes = Changes(self.folder, lambda: self.encoder)
            try:
                yield changes
                changes.finish()
            except (KeyboardInterrupt, SystemExit):
                changes.stopped()
                raise
            finally:
                changes.state.close()

    def add(self, documents: Iterable[Document], progress: bool = False) -> Counts:
        """Add documents; one whose id is in the index is replaced, unless it is the same.

        Args:
            documents: with different ids; those without a word are left out.
            progress: show a bar.

        Raises:
            RevelaError: two documents share an id, a metadata field does not fit its column, the
                model's vectors are not finite, or another process is writing to the index.
        """
        with self.changes() as changes:
            return changes.put(documents, progress)

    def delete(self, ids: Iterable[str]) -> int:
        """Delete documents, all or none, in one commit; returns the number of their chunks."""
        with self.changes() as changes:
            return changes.drop(ids)

    def sync(
        self,
        sources: str | Path | Sequence[str | Path] | None = None,
        *,
        reading: Reading | None = None,
        yes: bool = False,
        progress: bool = False,
    ) -> Counts:
        """Update the index from folders and files: add what is new, replace what has changed,
        delete what is gone. Documents that were added otherwise stay.

        Args:
            sources: folders and files; by default those of the last time.
            reading: settings of reading; by default those of the last time.
            yes: delete documents even if a source has lost half of its documents or more.
            progress: show a bar.

        Returns:
            The numbers of documents that were new, replaced, gone and unchanged.

        Raises:
            RevelaError: a source is missing or has lost too much, or as for ``add``.
        """
        from revela.searching.sync import HALF, NONE, rescan, sync

        given = [sources] if isinstance(sources, str | Path) else sources
        with self.changes() as changes:
            scan = rescan(changes, given, reading)
            return sync(changes, scan, NONE if yes else HALF, progress)
