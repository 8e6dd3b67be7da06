"""An index: documents in one folder that are searched by their vectors, by their words, or by both.

Documents are cut into chunks, each a row of a LanceDB table (table.py); a search ranks chunks and
returns documents, each once, with its best chunk. Beside the table lie ``index.json``
(manifest.py), which says which retriever made the vectors, and the statistics that the fusion of
both rankings reads (statistics.py).

Dense search of a small table is an exact scan; above ``table.EXACT_BELOW`` chunks an approximate
index finds candidates and the stored vectors score them (docs/results.md has what that costs and
loses). The table's BM25 counts the same terms as bm25.py, with the same k1 and b.

Shapes: N texts, W numbers of a stored vector.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from revela.corpus.arrow_list import ArrowList, Texts, arrow_list
from revela.errors import QueryError, RevelaError
from revela.files import writing
from revela.index.calibration import Calibration
from revela.index.contexts import (
    CHOSEN,
    Choice,
    Context,
    conditioned,
    drift,
    read_rows,
    slots_of,
    with_slots,
    write_rows,
)
from revela.index.encode_corpus import (
    Added,
    commits,
    cut_to_fit,
    digest_of,
    refuse_repeated,
    table_rows,
)
from revela.index.filters import where_sql
from revela.index.fusion import (
    DEPTH,
    Fusion,
    Ranking,
    best_chunks,
    check_weight,
    fuse_ranks,
    fuse_scores,
    joined,
)
from revela.index.language import check_language, detect
from revela.index.manifest import Info, read_info, unfinished_in
from revela.index.rerank import (
    READ,
    RERANKED,
    Rerank,
    encode_packed,
    term_weights,
    with_reranker,
    with_tokens,
)
from revela.index.statistics import Statistics, TermCounts
from revela.index.table import COMMIT, REPLACING, Table, id_filter
from revela.settings import OFFLINE_MODEL, Indexing, Precision
from revela.types import Document, Hit, QueryTokens, Reranker, TokenEncoder, Vectors, is_missing
from revela.weights import fingerprint, refuse_untrained_dimensions, resolve

log = logging.getLogger(__name__)

Mode = Literal["dense", "lexical", "hybrid"]


class Index:
    """An index in a folder. ``create`` makes an empty one, ``open`` opens one.

    Other processes may search it at any time, and see what is added; one at a time may change it.

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
        folder: Path,
        info: Info,
        table: Table,
        encoder: TokenEncoder | None = None,
        model: str | Path | None = None,
        precision: Precision = "auto",
        lm: str | Path = OFFLINE_MODEL,
        weight: float | None = None,
    ) -> None:
        self.folder, self.info, self.table, self.weight = folder, info, table, weight
        self._encoder, self._model, self._precision, self._lm = encoder, model, precision, lm
        self._statistics = Statistics(folder)
        self._calibrated = self._statistics.version  # of the table when the manifest was read
        self._miscounted = False  # whether the terms of all chunks have to be counted again

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
        precision: Precision = "auto",
        lm: str | Path = OFFLINE_MODEL,
    ) -> Index:
        """Make an empty index; or open what a killed run left of one with the same settings.

        Args:
            folder: for the index; it holds nothing else.
            model: the retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
            metadata: fields of the documents to keep with them, for filters, and their Arrow
                types, "string", "int64", "double" or "bool" (``encode_corpus.metadata_columns``
                finds them).
            settings: how to cut documents and to hold vectors.
            context: what a retriever with slots reads before every text, for good: texts drawn from
                what will be indexed, the context that it was "saved" with (the default), or
                "none". Others read none.
            encoder: of ``model``, if it is loaded already.
            precision: arithmetic; "auto" is bf16 where the hardware has it.
            lm: language model of ``search(rerank="heads")``.

        Raises:
            RevelaError: the folder holds something else, or the model cannot be opened, or was not
                trained for fewer dimensions.
        """
        check_language(settings.language)
        path = resolve(str(model))
        refuse_untrained_dimensions(path, settings.dimensions)
        if encoder is None:
            from revela.retriever.load import load_encoder

            encoder = load_encoder(path, precision)
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
        """``create``, of a manifest that is known."""
        if context is not None:
            about = context.about(with_slots(encoder).slots)
            info = replace(info, context=about)
        with writing(folder):
            begun = unfinished_in(folder)
            if begun and _choices(begun) != _choices(info):
                raise RevelaError(
                    f"{folder} was begun with another model or other settings: "
                    "give those again, or remove it"
                )
            if begun:
                info = begun
            elif context is not None:
                digest = write_rows(folder, context.rows(encoder))
                info = replace(info, context={"digest": digest, **about})
            info.save(folder)
            return cls(folder, info, Table.open(folder, info, create=True), encoder, lm=lm)

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

        Raises:
            RevelaError: the weight is not between 0 and 1; the folder is no index, is not finished,
                or is damaged; or ``model`` did not make it.
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
        index = cls(folder, info, Table.open(folder, info), encoder, model, precision, lm, weight)
        if (folder / REPLACING).is_file():
            with suppress(RevelaError, OSError), writing(folder):  # or who writes will settle it
                index.table.settle()
        if model is not None:
            _ = index.model_folder  # refuses a model that did not make the index
        return index

    @cached_property
    def model_folder(self) -> Path:
        """The folder of the retriever that made the vectors.

        Raises:
            RevelaError: the retriever is not there, or is not the one that made the index.
        """
        folder = resolve(str(self._model or self.info.model))
        self.check_model(fingerprint(folder), str(folder))
        return folder

    @property
    def encoder(self) -> TokenEncoder:
        """The encoder of the index's retriever with the index's context, loaded when it is first
        needed.

        Raises:
            RevelaError: the retriever is not there, or is not the one that made the index.
        """
        if self._encoder is None:
            from revela.retriever.load import load_encoder

            self._encoder = load_encoder(self.model_folder, self._precision)
        return self._encoder if self.context is None else conditioned(self._encoder, self.context)

    @cached_property
    def context(self) -> Vectors | None:
        """What its retriever reads before every text, (J, D); None if it reads nothing."""
        about = self.info.context
        return read_rows(self.folder, about["digest"]) if about else None

    def check_model(self, fingerprint: str, name: str) -> None:
        """Refuse a retriever whose fingerprint is not that of the one that made this index."""
        if fingerprint != self.info.fingerprint:
            raise RevelaError(
                f"{name} is not the model that made {self.folder}: "
                "give that one as --model, or index again"
            )

    def __len__(self) -> int:
        """The number of chunks."""
        return len(self.table)

    # Search

    def search(
        self,
        query: str,
        k: int = 10,
        mode: Mode = "hybrid",
        where: str | Mapping[str, object] | None = None,
        fusion: Fusion = "score",
        rerank: Rerank | Reranker | None = None,
        vector: Vectors | None = None,
        tokens: QueryTokens | None = None,
    ) -> list[Hit]:
        """The k best documents, best first, each with its best chunk.

        Scores are cosines (dense), BM25 (lexical), or those of the fusion of both (hybrid;
        fusion.py): by score, 1 is the best that can be.

        Args:
            query: what to look for.
            k: number of documents.
            mode: by vectors ("dense"), by words ("lexical") or by both.
            where: filter over metadata, id and title, as SQL: "year > 2020 and lang = 'en'"; or
                as JSON (filters.py): {"year": {"gt": 2020}, "lang": "en"}.
            fusion: join both rankings by score, or by rank.
            rerank: order the first documents again: 50 by the vectors of their "tokens"
                (rerank.py), which the model reads now unless the index keeps them; or 20 by the
                "heads" of a language model (listwise.py), or by another re-ranker.
            vector: of the query, (D,), if it is known already.
            tokens: of the query, to re-rank by, if they are known already.

        Raises:
            RevelaError: the query is empty, the filter is wrong, two options exclude each other,
                the retriever or the language model cannot be loaded, or the folder is damaged.
        """
        where = where_sql(where or "", self.info.columns)
        _refuse(query, mode, where, fusion, rerank)
        if rerank == "tokens":
            tokens = tokens or self.encoder.query_tokens([query])[0]
            vector = tokens.vector
        if mode == "lexical":
            vector = None
        else:
            found = self.encoder.encode_queries([query]) if vector is None else vector[None]
            vector = as_stored(found, self.info, self.folder)[0]
        reranker = tokens if rerank == "tokens" else self._heads if rerank == "heads" else rerank
        first = max(k, DEPTH) if mode == "hybrid" else max(2 * k, RERANKED if rerank else 0)
        while True:
            version = self.table.version
            try:
                best, scores = self._find(query, vector, k, first, mode, where, fusion)
                if reranker is not None:
                    scores = self._rerank(query, best, scores, reranker)
                documents = list(scores)[:k]
                rows = self.table.rows([best[document] for document in documents])
                hits = [self._hit(rows[best[name]], scores[name]) for name in documents]
                if [hit.id for hit in hits] == documents:
                    return hits
            except KeyError:  # a row is gone
                pass
            except RevelaError:
                if self.table.version == version:
                    raise
            # Otherwise another process has packed the table meanwhile, so that its rows have other
            # numbers: rank them again.
            if self.table.version == version:
                raise RevelaError(
                    f"{self.folder} is damaged (rows that it names are not there): "
                    "make it again with revela index"
                )

    def _find(
        self,
        query: str,
        vector: Vectors | None,
        k: int,
        depth: int,
        mode: Mode,
        where: str | None,
        fusion: Fusion,
    ) -> tuple[dict[str, int], dict[str, float]]:
        """Each document's best row, and the documents' scores, best first; k or all that match.

        Raises:
            KeyError: a row is gone.
        """
        rankings: list[Ranking] = [{}] * (1 + (mode == "hybrid"))
        others = where
        while True:
            found = [] if vector is None else [self.table.nearest(vector, depth, others)]
            if mode != "dense":
                found.append(self.table.matching(query, depth, others))
            rankings = [joined(*pair) for pair in zip(rankings, found, strict=True)]
            known = {document for ranking in rankings for document, _ in ranking.values()}
            if len(known) >= k or all(len(ranking) < depth for ranking in found):
                break
            # A few long documents fill the lists: ask again without them.
            others = f"not {id_filter(known)}" + (f" and ({where}\n)" if where else "")
        if vector is None or mode == "dense":
            return best_chunks(rankings[0])
        if fusion == "rank":
            return fuse_ranks(rankings)
        return best_chunks(self._fuse(query, vector, *rankings))

    def _fuse(self, query: str, vector: Vectors, nearest: Ranking, matching: Ranking) -> Ranking:
        """Both rankings of chunks as one, by score (``fusion.fuse_scores``)."""
        best = self._statistics.current().best(self.table.query_terms(query))
        cosines = {row: cosine for row, (_, cosine) in nearest.items()}
        cosines |= self.table.cosines([row for row in matching if row not in nearest], vector)
        shares = {row: score / best for row, (_, score) in matching.items()} if best else {}
        documents = {row: document for row, (document, _) in [*nearest.items(), *matching.items()]}
        fused = fuse_scores(cosines, shares, self.calibration.odds, self.weight)
        return {row: (documents[row], score) for row, score in fused.items()}

    def _rerank(
        self,
        query: str,
        best: Mapping[str, int],
        scores: Mapping[str, float],
        reranker: QueryTokens | Reranker,
    ) -> dict[str, float]:
        """Documents' scores, best first, with the first documents in another order.

        Raises:
            KeyError: a row is gone.
        """
        by_tokens = isinstance(reranker, QueryTokens)
        column = "tokens" if by_tokens and self.info.settings.keep_tokens else "passage"
        numbers = [best[name] for name in list(scores)[: RERANKED if by_tokens else READ]]
        rows = self.table.rows(numbers, [column])
        found: list[Any] = [rows[number][column] for number in numbers]
        if not isinstance(reranker, QueryTokens):
            return with_reranker(query, scores, found, reranker)
        tokens = found if column == "tokens" else encode_packed(self.encoder, found)[1]
        weights = term_weights(query, self.table.query_terms, self._statistics.current().idf)
        odds = self.calibration.odds
        again = with_tokens(reranker, list(scores.values()), tokens, weights, odds)
        return dict(sorted(zip(scores, again, strict=True), key=lambda pair: -pair[1]))

    @property
    def calibration(self) -> Calibration:
        """How well its words and vectors find its passages, as another process may have measured it
        since.
        """
        if self._calibrated != self._statistics.version:
            self._calibrated = self._statistics.version
            self.info = replace(self.info, calibration=read_info(self.folder).calibration)
        return self.info.calibration

    @cached_property
    def _heads(self) -> Reranker:
        from revela.index.listwise import load_query_heads

        return load_query_heads(str(self._lm), self.sample)

    def sample(self) -> list[str]:
        """At most a thousand passages, evenly spaced."""
        return self.table.sample_passages()

    def _hit(self, row: Mapping[str, Any], score: float) -> Hit:
        metadata = {name: row[name] for name in self.info.columns if not is_missing(row[name])}
        text = row["passage"][len(row["title"]) + 1 :] if row["title"] else row["passage"]
        return Hit(row["id"], score, row["title"], text, row["chunk"], metadata)

    # Change

    def add(self, documents: Iterable[Document], progress: bool = False) -> Added:
        """Add documents; those whose id is there already are replaced, unless they are the same.

        Args:
            documents: with ids of their own; those without a word are left out.
            progress: show a bar.

        Returns:
            How many documents are new, replaced and unchanged, and how many chunks were written.

        Raises:
            RevelaError: two documents share an id, a metadata field does not fit its column, the
                model's vectors are not finite, or another process is writing to the index.
        """
        if not isinstance(documents, ArrowList):
            texts = (document for document in documents if document.full_text.strip())
            documents = arrow_list(Document, texts)
        total, new = Added(), not self.info.finished
        with writing(self.folder):
            refuse_repeated(name for names in documents.arrays("id") for name in names.to_pylist())
            self.find_language(Texts(documents, lambda document: document.full_text))
            with tqdm(total=len(documents), unit="document", disable=not progress) as bar:
                for added in self.add_batches(documents):
                    total += added
                    bar.update(added.new + added.replaced + added.unchanged)
            self.finish()
        if total.chunks and not new:
            self.log_drift()
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

    def log_drift(self) -> None:
        """Say so if the index has become another corpus than its context was drawn from."""
        about = self.info.context
        if about is None or about["kind"] != "corpus":
            return
        encoder = with_slots(self.encoder)
        texts = self.table.draw_texts(encoder.slots)
        assert self.context is not None
        if line := drift(encoder, self.context, about, texts, len(self)):
            log.info(line)

    def add_batches(self, documents: Iterable[Document]) -> Iterator[Added]:
        """``add`` without its lock and without ``finish``: each batch is yielded once it is safe on
        disk. The documents have ids of their own.
        """
        settings, before = self.info.settings, self.begin_adding()
        for batch in commits(documents):
            digests = {document.id: digest_of(document, settings.chunk_words) for document in batch}
            present = before.digests(list(digests))
            changed = [d for d in batch if present.get(d.id) != digests[d.id]]
            rows, cut = table_rows(changed, digests, self.info, self.folder), 0
            replaced = [document.id for document in changed if document.id in present]
            if changed:
                rows, cut = cut_to_fit(rows, self.encoder)
                passages = [str(passage) for passage in rows["passage"]]
                tokens = None
                if settings.keep_tokens:
                    vectors, tokens = encode_packed(self.encoder, passages)
                else:
                    vectors = self.encoder.encode_passages(passages)
                vectors = as_stored(vectors, self.info, self.folder)
                terms = [self.table.passage_terms(passage) for passage in passages]
                rows["terms"] = [" ".join(found) for found in terms]
                former, gone = before.find(replaced)
                with self._counting([TermCounts.of(terms)], gone):
                    self.table.write(rows, vectors, tokens, former)
            new, unchanged = len(changed) - len(replaced), len(batch) - len(changed)
            yield Added(new, len(replaced), unchanged, len(rows["id"]), cut)

    def delete(self, ids: Iterable[str]) -> int:
        """Delete documents, in one commit.

        Returns:
            How many chunks they had.

        Raises:
            RevelaError: the index does not hold one of them, or another process is writing to it.
        """
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
            numbers, gone = self.table.find(wanted)
            with self._counting([], gone):
                self.table.delete(numbers)
            self.finish()
        return len(numbers)

    def commit_written(
        self, commit: Callable[[], int], terms: Iterable[TermCounts], replaced: Sequence[str]
    ) -> int:
        """Add rows that other processes have written beside the table.

        Args:
            commit: makes them part of the table; returns its version.
            terms: of the new rows.
            replaced: ids of documents whose former rows the commit deletes.
        """
        with self._counting(terms, self.table.find(replaced)[1]):
            version = commit()
        if not self._miscounted:  # a file that is old says so to the next process
            self._statistics.save(version)
        return version

    def finish(
        self,
        count: Callable[[], Iterable[TermCounts]] | None = None,
        pack: Callable[[], None] | None = None,
        calibrate: Callable[[], Calibration] | None = None,
    ) -> None:
        """Pack the table, bring its indices and the statistics up to date, and let it be searched.
        A large table of which little has changed is left as it is, so that this costs little.

        ``add`` and ``delete`` do it; after ``add_batches`` call it once, under the lock.

        Args:
            count: counts the terms of all passages, which is needed after a kill; None: here.
            pack: packs the table; None: ``Table.pack``.
            calibrate: measures words and vectors, when the index is new or has doubled; None: here.
        """
        self._check_count()
        new = not self.info.finished
        whole = self.table.is_worth_packing(self._statistics.changes)
        if whole := whole or new or self._miscounted:
            if pack:
                pack()
            else:
                self.table.pack(new)
        if self._miscounted:
            self._statistics.clear()
            for some in count() if count else [TermCounts.of(self.table.terms())]:
                self._statistics.add(some)
            self._miscounted = False
        info = replace(self.info, finished=True)
        if new and info.context:
            info = replace(info, context={**info.context, "passages": len(self)})
        if 2 * info.calibration.passages <= len(self) and info.language is not None:
            measured = calibrate() if calibrate else self.table.calibrate(self.encoder)
            info = replace(info, calibration=replace(measured, passages=len(self)))
        if info != self.info:
            self.info = info
            info.save(self.folder)
        self._statistics.save(self.table.version, whole)

    def begin_adding(self) -> Table:
        """The table for look-ups while documents are added, as it is now (``Table.as_it_is``), once
        it is sure that no killed process has left it half changed.
        """
        self.table.settle()
        self._check_count()
        before = self.table.as_it_is()
        self._statistics.describe(before.version)
        return before

    @contextmanager
    def _counting(self, added: Iterable[TermCounts], gone: TermCounts) -> Iterator[None]:
        """While open, a commit is made. Then, and not before, as it may fail, the terms of the new
        rows are counted, and those of the deleted ones no more.
        """
        self._check_count()
        yield
        chunks = gone.chunks
        self._statistics.add(gone, times=-1)
        for some in added:
            chunks += some.chunks
            self._statistics.add(some)
        self._statistics.describe(self.table.version, max(chunks, COMMIT))

    def _check_count(self) -> None:
        """Note if the counts are not those of the table: a run was killed before it could save
        them, a commit failed when half of it was made, or their file was removed.
        """
        counted = self._statistics
        if counted.version != self.table.version and (len(self) or counted.chunks):
            self._miscounted = True


def describe(
    model: Path, encoder: TokenEncoder, settings: Indexing, metadata: Mapping[str, str]
) -> Info:
    """The manifest of vectors that the encoder of a model's folder makes."""
    width = encoder.encode_passages(["."]).shape[1]
    width = min(width, settings.dimensions or width)
    return Info(str(model.resolve()), fingerprint(model), width, settings, metadata)


def as_stored(vectors: Vectors, info: Info, folder: Path) -> Vectors:
    """(N, D) vectors as an index stores them, (N, W): the first dimensions only, if it was made so,
    and of length one again.

    Raises:
        RevelaError: they have another width.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if (wanted := info.settings.dimensions) and vectors.shape[1] > wanted:
        vectors = vectors[:, :wanted]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    if vectors.shape[1] != info.width:
        raise RevelaError(
            f"the model gives {vectors.shape[1]} dimensions and {folder} holds "
            f"{info.width}: index again"
        )
    return vectors


def _choices(info: Info) -> Info:
    """A manifest with what a user has chosen, and not what came of it."""
    context = info.context
    chosen = context and {name: context[name] for name in CHOSEN}
    return replace(info, context=chosen, language="", calibration=Calibration())


def _refuse(
    query: str,
    mode: Mode,
    where: str,
    fusion: Fusion,
    rerank: Rerank | Reranker | None,
) -> None:
    """Refuse a search that cannot be made."""
    if not query.strip():
        raise QueryError("the query is empty: give some words to search for")
    if any("\ud800" <= letter <= "\udfff" for letter in query + where):
        raise QueryError(
            "the query or its filter is not Unicode (half of a surrogate pair): mend it"
        )
    if rerank == "tokens" and (mode == "lexical" or (mode == "hybrid" and fusion == "rank")):
        raise QueryError(
            "tokens are added to cosines and their sum with BM25: "
            "re-rank dense search, or hybrid search by score"
        )
