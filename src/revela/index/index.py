"""An index: documents in one folder that are searched by their vectors, by their words, or by both.

Documents are cut into chunks, each a row of a LanceDB table (table.py). A search ranks chunks and
returns documents, each once, with its best chunk (search.py). Beside the table lie ``index.json``
(manifest.py) and the counts of terms that the fusion reads (term_stats.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from revela.errors import RevelaError
from revela.files import writing
from revela.index.filters import where_sql
from revela.index.fusion import Fusion, check_weight
from revela.index.language import check_language, detect
from revela.index.manifest import Calibration, Info, read_info, unfinished_in
from revela.index.rerankers import Rerank, load_reranker
from revela.index.rerankers.tokens import Weight, term_weights
from revela.index.search import IndexSnapshot, Mode, SearchOptions, check_query
from revela.index.table import COMMIT, REPLACING, Table, as_stored
from revela.index.term_stats import Statistics, TermCounts
from revela.model_files import fingerprint, resolve
from revela.retriever.saved_config import check_dimensions
from revela.settings import OFFLINE_MODEL, Indexing, Precision
from revela.types import (
    Document,
    Explanation,
    Hit,
    Hits,
    QueryTokens,
    Reranker,
    TokenEncoder,
    Vectors,
    is_missing,
)

if TYPE_CHECKING:
    from revela.corpus.load import Reading
    from revela.index.contexts import Choice, Context
    from revela.index.ingest import Added, Changes
    from revela.index.sync import Synced
    from revela.retriever.onnx_encoder import OnnxEncoder

log = logging.getLogger(__name__)
QUERIES = 256  # that are encoded together
FEW = 100  # chunks of a commit that are encoded sooner than torch is loaded


class Index:
    """An index in a folder. ``create`` makes an empty one, ``open`` opens one.

    Other processes may search it at any time and see what is added; one at a time may change it.

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
    """

    def __init__(
        self,
        table: Table,
        encoder: TokenEncoder | None = None,
        model: str | Path | None = None,
        precision: Precision = "auto",
        lm: str | Path = OFFLINE_MODEL,
        weight: float | None = None,
    ) -> None:
        self.folder, self.info, self.table, self.weight = table.folder, table.info, table, weight
        self._encoder, self._model, self._precision, self._lm = encoder, model, precision, lm
        self._statistics = Statistics(self.folder)
        self._calibrated = self._statistics.version  # of the table when the manifest was read
        self._miscounted = False  # whether the terms of all chunks have to be counted again
        self.default_rerank: Rerank | None = None  # of a search that names none
        self.kept_by: object = None  # what removes its folder, if that is temporary

    @classmethod
    def create(
        cls,
        folder: str | Path,
        model: str | Path,
        metadata: Mapping[str, str] | None = None,
        settings: Indexing = Indexing(),  # noqa: B008  (frozen)
        *,
        context: Choice | None = None,
        encoder: TokenEncoder | None = None,
        lm: str | Path = OFFLINE_MODEL,
    ) -> Index:
        """Make an empty index; or open what a killed run left of one with the same settings.

        Args:
            folder: for the index; it holds nothing else.
            model: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
            metadata: fields of the documents to keep, for filters, and their Arrow types: "string",
                "int64", "double" or "bool" (``ingest.metadata_columns`` finds them).
            settings: how to cut documents and to store vectors.
            context: for a retriever trained with a context, as ``Context.of`` takes it; by default
                the one it was saved with. It cannot be changed later.
            encoder: of ``model``, if it is loaded already.
            lm: language model of ``search(rerank="heads")``.
        """
        from revela.index.contexts import Context, slots_of
        from revela.index.ingest import describe

        check_language(settings.language)
        path = resolve(str(model))
        check_dimensions(path, settings.dimensions)
        if encoder is None:
            from revela.retriever.load import load_encoder

            encoder = load_encoder(path, "auto")
        info = describe(path, encoder, settings, metadata or {})
        known = Context.of("saved" if context is None else context)
        has_none = known.kind == "saved" and not slots_of(encoder)
        return cls.begin(Path(folder), info, encoder, lm, None if has_none else known)

    @classmethod
    def begin(
        cls,
        folder: Path,
        info: Info,
        encoder: TokenEncoder,
        lm: str | Path = OFFLINE_MODEL,
        context: Context | None = None,
    ) -> Index:
        """``create``, with a manifest."""
        from revela.index.contexts import with_slots, write_rows

        if context is not None:
            info = replace(info, context=context.about(with_slots(encoder).slots))
        with writing(folder):
            begun = unfinished_in(folder)
            if begun and begun.choices() != info.choices():
                raise RevelaError(
                    f"{folder} was begun with another model or other settings: "
                    "give those again, or remove it"
                )
            if begun:
                info = begun
            elif context is not None:
                digest = write_rows(folder, context.rows(encoder))
                info = replace(info, context={"digest": digest, **(info.context or {})})
            info.save(folder)
            return cls(Table.open(folder, info, create=True), encoder, lm=lm)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: str | Path | None = None,
        *,
        encoder: TokenEncoder | None = None,
        precision: Precision = "auto",
        lm: str | Path = OFFLINE_MODEL,
        weight: float | None = None,
    ) -> Index:
        """Open an index. Its retriever is loaded when it is first needed.

        Args:
            folder: made by ``create`` or ``revela index``.
            model: where the retriever is, if it has moved since the index was made.
            encoder: of the index's retriever, if it is loaded already.
            precision: arithmetic; "auto" is bf16 where the hardware has it.
            lm: language model of ``search(rerank="heads")``: a folder, a hub id or
                embedded:smollm2-135m; loaded when it is first needed.
            weight: of the vectors in hybrid search by score, from 0 (words alone) to 1; None: set
                for each query by what the index has measured.
        """
        check_weight(weight)
        folder = Path(folder)
        info = read_info(folder)
        if not info.finished:
            raise RevelaError(
                f"{folder} is not finished: run the same revela index again to resume it"
            )
        if info.language is None:
            log.warning(
                f"{folder} was made by an earlier version and stays as it is: its BM25 takes every "
                "language for English, and its fusion does not know how well the model knows the "
                "text; make it again with revela index to mend both"
            )
        index = cls(Table.open(folder, info), encoder, model, precision, lm, weight)
        if (folder / REPLACING).is_file():
            # If another process is writing, it will settle this.
            with suppress(RevelaError, OSError), writing(folder):
                index.table.settle()
        if model is not None:
            _ = index.model_folder  # refuses a model that did not make the index
        return index

    @cached_property
    def model_folder(self) -> Path:
        """The folder of the retriever that made the vectors; any other is refused."""
        folder = resolve(str(self._model or self.info.model))
        if fingerprint(folder) != self.info.fingerprint:
            raise RevelaError(
                f"{folder} is not the model that made {self.folder}: "
                "give that one as --model, or index again"
            )
        return folder

    @property
    def encoder(self) -> TokenEncoder:
        """The index's retriever, with the index's context; loaded when first needed."""
        if self._encoder is None:
            from revela.retriever.load import load_encoder

            self._encoder = load_encoder(self.model_folder, self._precision)
        if self.context is None:
            return self._encoder
        from revela.index.contexts import conditioned

        return conditioned(self._encoder, self.context)

    @property
    def encoder_or_copy(self) -> TokenEncoder:
        """``encoder``; or its ONNX copy as long as that is not loaded, which takes seconds."""
        if self._encoder is None and self._precision == "auto" and self.context is None:
            return self._copy or self.encoder
        return self.encoder

    @cached_property
    def _copy(self) -> OnnxEncoder | None:
        from revela.retriever.onnx_encoder import cached_copy

        return cached_copy(self.model_folder)

    def keep_copy(self) -> None:
        """Once its retriever is loaded, keep an ONNX copy, so that later searches need no torch."""
        from revela.retriever.static_encoder import is_static

        if self._encoder and self.context is None and not is_static(self.model_folder):
            from revela.retriever.onnx_export import cache_copy

            cache_copy(self._encoder, self.info.fingerprint)

    @cached_property
    def context(self) -> Vectors | None:
        """What its retriever reads before every text, (J, D); None if it reads nothing."""
        if not self.info.context:
            return None
        from revela.index.contexts import read_rows

        return read_rows(self.folder, self.info.context["digest"])

    @property
    def calibration(self) -> Calibration:
        """How well words and vectors find its passages, as measured last by any process."""
        self._statistics.refresh()
        if self._calibrated != self._statistics.version:
            self._calibrated = self._statistics.version
            self.info = replace(self.info, calibration=read_info(self.folder).calibration)
        return self.info.calibration

    def __len__(self) -> int:
        """The number of chunks."""
        return len(self.table)

    def sample(self) -> list[str]:
        """At most a thousand passages, evenly spaced."""
        return [str(text) for text in self.table.sample("passage")["passage"].to_pylist()]

    # Search

    def search(
        self,
        query: str,
        k: int = 10,
        mode: Mode = "hybrid",
        where: str | Mapping[str, object] | None = None,
        fusion: Fusion = "score",
        rerank: Rerank | Literal["none"] | Reranker | None = None,
        encoded: Vectors | QueryTokens | None = None,
        min_score: float | None = None,
        explain: bool = False,
    ) -> Hits:
        """The k best documents, best first, each with its best chunk.

        Scores are cosines (dense), BM25 (lexical), or those of the fusion of both (hybrid;
        fusion.py). By score, the maximum is 1.

        Args:
            query: what to look for.
            k: number of documents.
            mode: by vectors ("dense"), by words ("lexical") or by both.
            where: filter over metadata, id and title, as SQL: "year > 2020 and lang = 'en'"; or
                as JSON (filters.py): {"year": {"gt": 2020}, "lang": "en"}.
            fusion: join both rankings by score, or by rank.
            rerank: order the first documents again (rerankers/): 50 by the vectors of their
                "tokens", which the model reads now unless the index keeps them; or 20 by the
                "heads" of a language model, or by a re-ranker of your own; or "none". By default
                none, or "tokens" in the index of a folder (folder_index.py) where scores are
                cosines or fused by score.
            encoded: the query's vector, (D,), or ``QueryTokens``, if known already.
            min_score: leave out documents of a lower score.
            explain: say what words and vectors gave (``Hit.explanation``).

        Raises:
            RevelaError: the query is empty, the filter is wrong, two options exclude each other,
                the retriever or the language model cannot be loaded, or the folder is damaged.
        """
        where = where_sql(where, self.info.columns) if where else ""
        rerank = self.reranking(mode, fusion) if rerank is None else rerank
        rerank = None if rerank == "none" else rerank
        options = SearchOptions(k, mode, where, fusion, self.weight, min_score=min_score)
        check_query(query, options, rerank == "tokens")
        if rerank == "tokens":
            if not isinstance(encoded, QueryTokens):
                encoded = self.encoder_or_copy.query_tokens([query])[0]
            options = replace(options, reranker=encoded)
        else:
            options = replace(options, reranker=self._heads if rerank == "heads" else rerank)
        vector = None if mode == "lexical" else self._vector(query, encoded)
        makes_tokens = rerank == "tokens" and not self.info.settings.keep_tokens
        encoder = self.encoder_or_copy if makes_tokens else None
        by_score = mode == "hybrid" and fusion == "score" and self.weight is None
        search = ("tokens" if rerank == "tokens" else "hybrid") if by_score else ""
        while True:
            version, calibration = self.table.version, self.calibration
            snapshot = IndexSnapshot(self.table, self._statistics, calibration.odds, encoder)
            try:
                found = snapshot.search(query, vector, options)
                rows = self.table.rows(list(found))
                why = snapshot.explain(query, vector, options, list(found)) if explain else {}
                hits = Hits(
                    self._hit(rows[n], score, calibration.confidence(score, search), why.get(n))
                    for n, (_, score) in found.items()
                )
                if [hit.id for hit in hits] == [document for document, _ in found.values()]:
                    return hits
            except KeyError:  # a row is gone
                pass
            except RevelaError:
                if self.table.version == version:
                    raise
            # Another process may have packed the table, which renumbers its rows: search again.
            if self.table.version == version:
                raise RevelaError(
                    f"{self.folder} is damaged (rows that it names are not there): "
                    "make it again with revela index"
                )

    def reranking(self, mode: Mode, fusion: Fusion) -> Rerank | None:
        """How a search that names no re-ranker is re-ranked."""
        by_score = mode == "dense" or (mode == "hybrid" and fusion == "score")
        return self.default_rerank if by_score else None

    def search_many(self, queries: Sequence[str], **options: Any) -> Iterator[list[Hit]]:
        """``search`` for each query, with the same options; queries are encoded in batches."""
        mode, fusion = options.get("mode", "hybrid"), options.get("fusion", "score")
        by_tokens = (options.get("rerank") or self.reranking(mode, fusion)) == "tokens"
        for some in (queries[i : i + QUERIES] for i in range(0, len(queries), QUERIES)):
            encoded: Any = [None] * len(some)
            if by_tokens:
                encoded = self.encoder_or_copy.query_tokens(some)
            elif mode != "lexical":
                encoded = self.encoder_or_copy.encode_queries(some)
            for query, known in zip(some, encoded, strict=True):
                yield self.search(query, encoded=known, **options)

    def term_weights(self, query: str) -> list[Weight]:
        """Begin, end and BM25 idf of each term of a query."""
        return term_weights(query, self.table.query_terms, self._statistics.current().idf)

    def _vector(self, query: str, encoded: Vectors | QueryTokens | None) -> Vectors:
        vector = encoded.vector if isinstance(encoded, QueryTokens) else encoded
        vectors = self.encoder_or_copy.encode_queries([query]) if vector is None else vector[None]
        stored: Vectors = as_stored(vectors, self.info, self.folder)[0]
        return stored

    def chunks(self, document: str) -> list[Hit]:
        """The chunks of a document by its id, in order, with a score of 0; none if it has none.
        Their texts, joined, are the document's.
        """
        return [self._hit(row, 0.0) for row in self.table.document(document)]

    @cached_property
    def _heads(self) -> Reranker:
        return load_reranker("heads", str(self._lm), self.sample)

    def _hit(
        self,
        row: Mapping[str, Any],
        score: float,
        confidence: float | None = None,
        why: Explanation | None = None,
    ) -> Hit:
        title, passage = row["title"], row["passage"]
        metadata = {name: row[name] for name in self.info.columns if not is_missing(row[name])}
        text = passage[len(title) + 1 :] if title else passage
        return Hit(row["id"], score, title, text, row["chunk"], metadata, confidence, why)

    # Change

    def add(self, documents: Iterable[Document], progress: bool = False) -> Added:
        """Add documents; one whose id is in the index is replaced, unless it is the same.

        Args:
            documents: with ids of their own; those without a word are left out.
            progress: show a bar.

        Raises:
            RevelaError: two documents share an id, a metadata field does not fit its column, the
                model's vectors are not finite, or another process is writing to the index.
        """
        from tqdm import tqdm

        from revela.corpus.spool import ArrowList, LazyTexts, arrow_list
        from revela.index.ingest import Added, check_repeated

        if not isinstance(documents, ArrowList):
            texts = (document for document in documents if document.full_text.strip())
            documents = arrow_list(Document, texts)
        total = Added()
        with writing(self.folder):
            check_repeated(name for names in documents.arrays("id") for name in names.to_pylist())
            self.find_language(LazyTexts(documents, lambda document: document.full_text))
            with tqdm(total=len(documents), unit="document", disable=not progress) as bar:
                for added in self.add_batches(documents):
                    total += added
                    bar.update(added.new + added.replaced + added.unchanged)
            self.finish()
        return total

    def find_language(self, texts: Sequence[str]) -> None:
        """Find the language of a new index's documents in some of them, and keep it."""
        if self.info.language != "" or not texts:
            return
        chosen, found = self.info.settings.language, detect(texts)
        if chosen == "auto":
            chosen = found
        elif chosen != "none" and not {*chosen.split("+")} & {*found.split("+")}:
            log.warning(
                f"--language {chosen}, but the text looks like {found}: its words are stemmed as "
                f"{chosen} all the same"
            )
        self.info = replace(self.info, language=chosen)
        self.info.save(self.folder)
        self.table = Table(self.folder, self.info, self.table.lance)

    def add_batches(self, documents: Iterable[Document]) -> Iterator[Added]:
        """``add`` without its lock and without ``finish``: each batch is yielded once it is safe on
        disk.
        """
        from revela.index.ingest import Added, Changes, commits

        before = self.begin_adding()
        for batch in commits(documents):
            changes = Changes.of(batch, before, self.info)
            new = len(changes.documents) - len(changes.replaced)
            unchanged = len(batch) - len(changes.documents)
            chunks, cut = self._write(changes, before) if changes.documents else (0, 0)
            yield Added(new, len(changes.replaced), unchanged, chunks, cut)

    def _write(self, changes: Changes, before: Table) -> tuple[int, int]:
        """Commit documents; how many chunks they have, and how many of those were cut."""
        from revela.index.ingest import encode_rows, table_rows

        rows = table_rows(changes.documents, changes.digests, self.info, self.folder)
        find = self.table.passage_terms
        encoder = self.encoder_or_copy if len(rows["id"]) <= FEW else self.encoder
        encoded = encode_rows(rows, self.info, encoder, self.folder, find)
        former, gone = before.find(changes.replaced)
        with self._counting([TermCounts.of(encoded.terms)], gone):
            self.table.write(encoded.rows, former)
        return len(encoded.terms), encoded.cut

    def delete(self, ids: Iterable[str]) -> int:
        """Delete documents, all or none, in one commit; returns how many chunks they had."""
        if not (wanted := list(dict.fromkeys(ids))):
            return 0
        with writing(self.folder):
            self.table.settle()
            known = self.table.digests(wanted)
            if missing := [name for name in wanted if name not in known]:
                raise RevelaError(
                    f"{self.folder} has no document {', '.join(missing[:3])}: "
                    "nothing was deleted; give ids as revela search --json shows them"
                )
            chunks = self.drop(wanted)
            self.finish()
        return chunks

    def drop(self, ids: Sequence[str]) -> int:
        """``delete`` without its lock and without ``finish``; unknown ids are left out."""
        numbers, gone = self.table.find(ids)
        with self._counting([], gone):
            self.table.delete(numbers)
        return len(numbers)

    def sync(
        self,
        sources: str | Path | Sequence[str | Path] | None = None,
        *,
        reading: Reading | None = None,
        yes: bool = False,
        progress: bool = False,
    ) -> Synced:
        """Bring the index in step with folders and files: add what is new, replace what has
        changed, delete what is gone. Documents that were added otherwise stay.

        Args:
            sources: as for training; by default those of the last time.
            reading: how they are read; by default as the last time.
            yes: delete documents even if a source has lost half of its own, or more.
            progress: show a bar.

        Returns:
            The numbers of documents that were new, changed, gone and unchanged.

        Raises:
            RevelaError: a source is missing or has lost too much, or as for ``add``.
        """
        from revela.index.sync import sync

        given = [sources] if isinstance(sources, str | Path) else sources
        return sync(self, given, reading, yes=yes, progress=progress)[0]

    def begin_adding(self) -> Table:
        """Settle what a killed process has left half changed; the table as it is now."""
        self.table.settle()
        self._check_count()
        before = self.table.frozen()
        self._statistics.describe(before.version)
        return before

    def commit_written(
        self, commit: Callable[[], int], terms: Iterable[TermCounts], replaced: Sequence[str]
    ) -> int:
        """Add rows that other processes have written beside the table. ``commit`` does it, deletes
        the former rows of the ``replaced`` documents, and returns the version of the table.
        """
        with self._counting(terms, self.table.find(replaced)[1]):
            version = commit()
        if not self._miscounted:  # a file of an earlier version of the table has to show that
            self._statistics.save(version)
        return version

    def finish(
        self,
        count: Callable[[], Iterable[TermCounts]] | None = None,
        pack: Callable[[], None] | None = None,
        calibrate: Callable[[], Calibration] | None = None,
    ) -> None:
        """Pack the table unless little has changed, bring its indices and the counts of terms up to
        date, and let it be searched. After ``add_batches`` call it once, under the lock.

        Args:
            count: counts the terms of all passages, which is needed after a kill; None: here.
            pack: packs the table; None: ``Table.pack``.
            calibrate: measures words and vectors, when the index is new or has doubled; None: here.
        """
        self._check_count()
        new = not self.info.finished
        whole = new or self._miscounted or self.table.is_worth_packing(self._statistics.changes)
        if whole:
            pack() if pack else self.table.pack(new)
        if self._miscounted:
            self._statistics.clear()
            for some in count() if count else [TermCounts.of(self.table.terms())]:
                self._statistics.add(some)
            self._miscounted = False
        info = replace(self.info, finished=True)
        if 2 * info.calibration.passages <= len(self) and info.language is not None:
            measured = calibrate() if calibrate else self.table.calibrate(self.encoder)
            info = replace(info, calibration=replace(measured, passages=len(self)))
        if info != self.info:
            self.info = info
            info.save(self.folder)
        self._statistics.save(self.table.version, whole)

    @contextmanager
    def _counting(self, added: Iterable[TermCounts], gone: TermCounts) -> Iterator[None]:
        """While open, a commit is made; after it, as it may fail, the terms are counted."""
        self._check_count()
        yield
        chunks = gone.chunks
        self._statistics.add(gone, times=-1)
        for some in added:
            chunks += some.chunks
            self._statistics.add(some)
        self._statistics.describe(self.table.version, max(chunks, COMMIT))

    def _check_count(self) -> None:
        """Note if the counts are not those of the table, as after a kill or a failed commit."""
        counted = self._statistics
        if counted.version != self.table.version and (len(self) or counted.chunks):
            self._miscounted = True
