"""An index in one folder: a LanceDB table of chunks, searched by meaning, by words, or by both.

A row is a chunk: the id, title and metadata of its document, its number in it, what was embedded
(title and text), and the vector. Documents are found, each once, by the chunk that suits best.
``index.json`` beside the table says which model made the vectors.

Each change is one commit of the table, so a kill leaves all of it or nothing. Below ``EXACT_BELOW``
chunks search by meaning is an exact scan; above, an approximate index finds candidates and the
stored vectors score them (docs/results.md has what that costs and loses). What is LanceDB's own
stands in lance.py. Its BM25 has lexical.py's k1 and b, stemmer and stop words, and splits at
underscores too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np

from revela.errors import RevelaError
from revela.index.filters import where_sql
from revela.index.fusion import (
    DEPTH,
    Fusion,
    Geometry,
    Ranking,
    best_chunks,
    evenly,
    fuse_ranks,
    fuse_scores,
)
from revela.index.manifest import Info, begun_in, read_info
from revela.index.rerank import READ, RERANKED, Reranking, encode_packed, with_reranker, with_tokens
from revela.index.statistics import Statistics
from revela.index.table import (
    SHOWN,
    among,
    connect,
    damage,
    make_indices,
    query_of_words,
    schema_of,
)
from revela.types import Hit, Reranker, TokenEncoder, Value, Vectors, is_missing

Mode = Literal["dense", "lexical", "hybrid"]
TABLE = "chunks"
EXACT_BELOW = 20_000  # chunks
CELLS, CANDIDATES = (
    20,
    200,
)  # of the approximate index: cells that a query reads, candidates that it keeps at the least
COUNTED = 2**14  # chunks whose words are counted at a time, when all of a table's are
KEPT = timedelta(days=1)  # how long what a change replaced stays, for readers that had opened it


class Index:
    """Chunks of documents that can be searched; ``load`` opens one, ``create`` begins one."""

    def __init__(self, folder: Path, info: Info, table: Any) -> None:
        self.folder, self.info, self._table = folder, info, table
        self._statistics = Statistics(folder)
        self._miscounted = False  # whether the words of all chunks have to be counted again

    @property
    def model(self) -> str:
        """The folder of the model that made the vectors."""
        return self.info.model

    @property
    def fingerprint(self) -> str:
        return self.info.fingerprint

    def __len__(self) -> int:
        """The number of chunks."""
        return int(self._table.count_rows())

    @classmethod
    def create(cls, folder: Path, info: Info) -> Index:
        """A new and empty index; or what a run that was killed has left of one, if it was made with
        the same settings.

        Raises:
            RevelaError: the folder holds something else.
        """
        if (begun := begun_in(folder)) and begun != info:
            raise RevelaError(
                f"{folder} was begun with another model or other settings: give those again, or remove it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        info.save(folder)
        database = connect(folder)
        with damage(folder):
            names = database.list_tables().tables
            return cls(
                folder,
                info,
                database.open_table(TABLE)
                if TABLE in names
                else database.create_table(TABLE, schema=schema_of(info)),
            )

    @classmethod
    def load(cls, folder: Path) -> Index:
        """Open an index folder. What others add to it later is found as well.

        Raises:
            RevelaError: the folder is no index, is not finished, or is damaged.
        """
        info = read_info(folder)
        if not info.finished:
            raise RevelaError(
                f"{folder} is not finished: run the same revela index again, and it goes on where it was"
            )
        with damage(folder):
            return cls(folder, info, connect(folder).open_table(TABLE))

    def check_model(self, fingerprint: str, named: str) -> None:
        """Refuse a model that did not make this index."""
        if fingerprint != self.fingerprint:
            raise RevelaError(
                f"{named} is not the model that made {self.folder}: give that one as --model, or index again"
            )

    # Search

    def search(
        self,
        query: str,
        encoder: TokenEncoder | None,
        k: int = 10,
        mode: Mode = "hybrid",
        where: str | Mapping[str, object] | None = None,
        fusion: Fusion = "score",
        rerank: Reranking | None = None,
    ) -> list[Hit]:
        """The k best documents, each with its best chunk.

        Scores are cosines (dense), BM25 (lexical), or those of the fusion of both (hybrid;
        fusion.py): 1 is as good as can be, by score.

        Args:
            query: what to look for.
            encoder: that of the index's own model; lexical search needs none.
            k: how many.
            mode: by meaning, by words, or both.
            where: only rows that this holds for, as SQL: "year > 2020 and lang = 'en'"; or as JSON
                (filters.py): {"year": {"gt": 2020}, "lang": "en"}.
            fusion: of both, by score or by rank.
            rerank: order the first 50 again by their "tokens" (rerank.py); where the index keeps
                none, the model reads their chunks now. Or the first 20 by what reads them, such as
                the heads of an LM (listwise.py).

        Raises:
            RevelaError: the query is empty, the filter is wrong, what is asked for does not go
                together, or the folder is damaged.
        """
        if not query.strip():
            raise RevelaError("the query is empty: give some words to search for")
        where = where_sql(where or "", self.info.columns)
        if any("\ud800" <= letter <= "\udfff" for letter in query + where):
            raise RevelaError(
                "the query or its filter is not Unicode (half of a surrogate pair): mend it"
            )
        if rerank == "tokens" and (mode == "lexical" or (mode == "hybrid" and fusion == "rank")):
            raise RevelaError(
                "tokens are added to cosines and their sum with BM25: re-rank dense search, or hybrid search by score"
            )
        vector = None
        if mode != "lexical":
            assert encoder is not None
            vector = self.cut(encoder.encode_queries([query]))[0]
        depth = max(k, DEPTH) if mode == "hybrid" else max(2 * k, RERANKED if rerank else 0)
        while True:
            version = self._table.version
            try:
                rankings = [self._near(vector, depth, where)] if vector is not None else []
                rankings += [self._worded(query, depth, where)] if mode != "dense" else []
                if vector is not None and mode == "hybrid" and fusion == "score":
                    rankings = [self._fused(query, vector, *rankings)]
                best, scores = (
                    fuse_ranks(rankings) if len(rankings) > 1 else best_chunks(rankings[0])
                )
                if len(scores) < k and any(len(ranking) >= depth for ranking in rankings):
                    depth *= 4  # a few long documents fill the lists
                    continue
                if rerank == "tokens":
                    assert encoder is not None
                    scores = self._by_tokens(query, best, scores, encoder)
                elif rerank is not None:
                    scores = self._read_again(query, best, scores, rerank)
                documents = list(scores)[:k]
                rows = self._rows([best[document] for document in documents])
                found = [
                    self._hit(rows[best[document]], scores[document]) for document in documents
                ]
                if [hit.id for hit in found] == documents:
                    return found
            except KeyError:
                pass
            except RevelaError:
                if self._table.version == version:
                    raise
            # Otherwise another process has packed the table meanwhile, so that its rows have other
            # numbers: rank them again.
            if self._table.version == version:
                raise RevelaError(
                    f"{self.folder} is damaged (rows that it names are not there): make it again with revela index"
                )

    def _by_tokens(
        self,
        query: str,
        best: Mapping[str, int],
        scores: Mapping[str, float],
        encoder: TokenEncoder,
    ) -> dict[str, float]:
        """Documents' scores, best first, with those of the first ones' tokens.

        Raises:
            KeyError: a row is not there any more.
        """
        numbers = [best[document] for document in list(scores)[:RERANKED]]
        rows = self._rows(numbers, ["tokens" if self.info.settings.keep_tokens else "passage"])
        if self.info.settings.keep_tokens:
            tokens = [rows[number]["tokens"] for number in numbers]
        else:
            _, tokens = encode_packed(encoder, [rows[number]["passage"] for number in numbers])
        self._statistics.refresh()
        again = with_tokens(query, list(scores.values()), tokens, encoder, self._statistics.idf)
        return dict(sorted(zip(scores, again, strict=True), key=lambda pair: -pair[1]))

    def _read_again(
        self, query: str, best: Mapping[str, int], scores: Mapping[str, float], reranker: Reranker
    ) -> dict[str, float]:
        """The same scores, best first, with the first documents as a re-ranker orders them.

        Raises:
            KeyError: a row is not there any more.
        """
        numbers = [best[document] for document in list(scores)[:READ]]
        rows = self._rows(numbers, ["passage"])
        return with_reranker(
            query, scores, [rows[number]["passage"] for number in numbers], reranker
        )

    def _fused(self, query: str, vector: Vectors, near: Ranking, worded: Ranking) -> Ranking:
        """Both rankings as one, by score. The cosines of chunks that only their words have found
        are made here.
        """
        self._statistics.refresh()  # another process may have added to the index
        best, geometry = self._statistics.best(query), self._statistics.geometry
        cosines = {row: cosine for row, (_, cosine) in near.items()}
        cosines |= self._cosines([row for row in worded if row not in near], vector)
        shares = {row: score / best for row, (_, score) in worded.items()} if best else {}
        owners = {
            row: document for ranking in (near, worded) for row, (document, _) in ranking.items()
        }
        fused = fuse_scores(cosines, shares, float(geometry.mean @ vector), geometry.spread)
        return {row: (owners[row], score) for row, score in fused.items()}

    def _cosines(self, numbers: Sequence[int], vector: Vectors) -> dict[int, float]:
        """The cosine of each of these rows with a vector.

        Raises:
            KeyError: one of them is not there any more.
        """
        if not numbers:
            return {}
        with damage(self.folder):
            found = (
                self._table.take_row_ids(list(numbers)).select(["vector"]).with_row_id().to_arrow()
            )
        cosines = dict(
            zip(found["_rowid"].to_pylist(), (self._matrix(found) @ vector).tolist(), strict=True)
        )
        return {row: cosines[row] for row in numbers}

    def _near(self, vector: Vectors, depth: int, where: str | None) -> Ranking:
        """The chunks nearest to a vector, by cosine."""
        query = self._table.search(
            vector, vector_column_name="vector", query_type="vector"
        ).distance_type("dot")
        # More cells are read where a filter leaves too little in these; candidates are scored again
        # by the stored vectors.
        query = (
            query.minimum_nprobes(CELLS).maximum_nprobes(0).refine_factor(-(-CANDIDATES // depth))
        )
        return self._ranking(query, depth, where, "_distance", lambda distance: 1.0 - distance)

    def _worded(self, text: str, depth: int, where: str | None) -> Ranking:
        """The chunks that hold the query's words, by BM25."""
        return self._ranking(
            self._table.search(query_of_words(text), query_type="fts"),
            depth,
            where,
            "_score",
            float,
        )

    def _ranking(
        self,
        query: Any,
        depth: int,
        where: str | None,
        column: str,
        score: Callable[[float], float],
    ) -> Ranking:
        query = query.limit(depth).select(["id", column]).with_row_id(True)
        with damage(self.folder, where or "", self.info.columns):
            found = (query.where(where) if where else query).to_arrow()
        rows, documents, values = (found[name].to_pylist() for name in ("_rowid", "id", column))
        return {
            row: (document, score(value))
            for row, document, value in zip(rows, documents, values, strict=True)
        }

    def _rows(self, numbers: Sequence[int], names: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
        names = list(names) or [*SHOWN, *self.info.columns]
        with damage(self.folder):
            found = (
                self._table.take_row_ids(list(numbers)).select(names).with_row_id().to_list()
                if numbers
                else []
            )
        return {row["_rowid"]: row for row in found}

    def _hit(self, row: Mapping[str, Any], score: float) -> Hit:
        metadata = {name: row[name] for name in self.info.columns if not is_missing(row[name])}
        text = row["passage"][len(row["title"]) + 1 :] if row["title"] else row["passage"]
        return Hit(row["id"], score, row["title"], text, row["chunk"], metadata)

    # Change

    def cut(self, vectors: Vectors) -> Vectors:
        """Vectors as they are stored: the first dimensions only, if the index was made so, and of
        length one again.

        Raises:
            RevelaError: they are not numbers, or of another width.
        """
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise RevelaError(
                f"the model {self.model} gives vectors that are not numbers (NaN or infinite): check it with revela eval"
            )
        if (wanted := self.info.settings.dimensions) and vectors.shape[1] > wanted:
            vectors = vectors[:, :wanted]
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        if vectors.shape[1] != self.info.width:
            raise RevelaError(
                f"the model gives {vectors.shape[1]} dimensions and {self.folder} holds {self.info.width}: index again"
            )
        return vectors

    def digests(self, documents: Sequence[str]) -> dict[str, str]:
        """Of these documents, those that are here, with what ``put`` was told of their content."""
        with damage(self.folder):
            query = (
                self._table.search()
                .where(f"{among(documents)} and chunk = 0")
                .select(["id", "digest"])
                .limit(len(documents))
            )
            return {row["id"]: row["digest"] for row in query.to_list()}

    def put(
        self,
        columns: Mapping[str, Sequence[Value | None]],
        vectors: Vectors,
        tokens: Sequence[bytes] | None,
        replaced: Sequence[str],
    ) -> None:
        """Add whole documents, in one commit.

        Args:
            columns: a value a chunk, of "id", "chunk", "title", "passage", "digest" and the
                metadata.
            vectors: (N, width), as the encoder gave them.
            tokens: ``packed_signs`` of each chunk, where the index keeps them.
            replaced: those of the documents that are here already; their former chunks go with the
                same commit.
        """
        import pyarrow as pa

        vectors = self.cut(vectors)
        schema = schema_of(self.info)
        arrays = {
            name: pa.array(columns[name], schema.field(name).type)
            for name in schema.names
            if name in columns
        }
        if tokens is not None:
            arrays["tokens"] = pa.array(tokens, pa.binary())
        arrays["vector"] = pa.FixedSizeListArray.from_arrays(
            pa.array(vectors.ravel()), self.info.width
        )
        rows = pa.table(arrays, schema=schema)
        with damage(self.folder):
            self._count(rows["passage"].to_pylist(), replaced)
            if not replaced:
                self._table.add(rows)
                return
            merge = (
                self._table.merge_insert(["id", "chunk"])
                .when_matched_update_all()
                .when_not_matched_insert_all()
            )
            merge.when_not_matched_by_source_delete(among(replaced)).execute(rows)

    def delete(self, documents: Sequence[str]) -> int:
        """Remove documents, in one commit; how many chunks went.

        Raises:
            RevelaError: one of them is not here.
        """
        known = self.digests(documents)
        if missing := [name for name in documents if name not in known]:
            raise RevelaError(
                f"{self.folder} has no document {', '.join(missing[:3])}: nothing was deleted; give ids that revela search shows"
            )
        with damage(self.folder):
            self._count([], documents)
            before = len(self)
            self._table.delete(among(documents))
            return before - len(self)

    def _count(self, passages: Sequence[str], gone: Sequence[str]) -> None:
        """Keep the table of words true: these passages come, and those of these documents go."""
        self._check_count()
        if gone:
            self._statistics.add((row["passage"] for row in self._passages(among(gone))), times=-1)
        self._statistics.add(passages)

    def _check_count(self) -> None:
        if (
            not self._statistics.changed
            and self._statistics.version != self._table.version
            and len(self)
        ):
            self._miscounted = (
                True  # a run was killed before it could save them, or their file was removed
            )

    def _geometry(self) -> Geometry:
        """How the vectors lie, by some that lie evenly in the table."""
        if not len(self):
            return Geometry(np.zeros(self.info.width, np.float32), 0.0)
        some = self._table.take_offsets(evenly(len(self)).tolist()).select(["vector"]).to_arrow()
        return Geometry.of(self._matrix(some))

    def _matrix(self, found: Any) -> Vectors:
        """The vectors of rows of the table, (N, width)."""
        matrix: Vectors = (
            found["vector"].combine_chunks().flatten().to_numpy().reshape(-1, self.info.width)
        )
        return matrix

    def sample(self) -> list[str]:
        """At most a thousand passages, evenly chosen."""
        if not len(self):
            return []
        with damage(self.folder):
            return [
                str(row["passage"])
                for row in self._table.take_offsets(evenly(len(self)).tolist())
                .select(["passage"])
                .to_list()
            ]

    def _passages(self, where: str | None = None) -> Iterator[dict[str, str]]:
        query = self._table.search().select(["passage"])
        for batch in (query.where(where) if where else query).to_batches(COUNTED):
            yield from batch.to_pylist()

    def finish(self) -> None:
        """Pack the table, bring its indices up to date, make those that it lacks, and let it be
        searched.
        """
        with damage(self.folder):
            self._check_count()
            new = not self.info.finished
            # The lock keeps other writers away, so whatever no version holds is a killed run's.
            self._table.optimize(
                cleanup_older_than=timedelta(milliseconds=1) if new else KEPT,
                delete_unverified=True,
            )
            make_indices(self._table, self.info, approximate=len(self) >= EXACT_BELOW)
            if self._miscounted:
                self._statistics.clear()
                self._statistics.add(row["passage"] for row in self._passages())
                self._miscounted = False
            self._statistics.save(self._table.version, self._geometry())
        if new:
            self.info = replace(self.info, finished=True)
            self.info.save(self.folder)
