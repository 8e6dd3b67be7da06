"""Hard negatives: passages that rank high for a query but do not answer it.

After ANCE (Xiong et al., ICLR 2021), and stage 3 of Dwell in the Beginning.

Training has rounds of ``refresh_every`` steps, or of ``refresh_epochs`` passes over the groups. The
first batch of a round ranks all passages for the queries of the round's groups: with BM25 in the
first round, or by a run of another system (``--negatives-from``), later with the current retriever.
Of the ``MINED_FROM`` best passages that do not answer the query, ``--negatives`` are drawn for each
row, seeded by run, round and row.

The optimiser and its learning-rate schedule continue over the rounds; with ``restart_optimizer``
they start afresh in each, as in Dwell. The loss filters false negatives by the surrogate, mined
ones included.

Cost: each round encodes the whole corpus once, and keeps a vector per passage on disk.

Shapes: U queries, N passages, K places of a ranking, R rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.evaluation.runs import read_run
from revela.ranking.bm25 import BM25
from revela.ranking.exact import top_k
from revela.ranking.queries import query_hash
from revela.text.judgements import domain_id, read_judgements
from revela.text.spool import LazyTexts
from revela.training.distributed import from_rank_zero
from revela.training.groups.order import encode_on_all_ranks, load_or_make
from revela.training.groups.strategies import Groups
from revela.training.methods.base import Row
from revela.training.training_set import TrainingSet

MINED_FROM = 200  # of the ranking, without the answers


def read_rankings(data: TrainingSet, runs: Sequence[str]) -> dict[str, dict[int, None]]:
    """Query -> the documents that a run ranks for it, best first. There is a run for each folder of
    judged queries. Documents that are not trained on, such as duplicates, are skipped.

    Raises:
        RevelaError: no document of a query's ranking is trained on.
    """
    rankings: dict[str, dict[int, None]] = {}
    folders, trained = data.recipe.pairs, {*data.rows.column("query").tolist()}
    number = {document.id: i for i, document in enumerate(data.documents)}
    for i, (folder, file) in enumerate(zip(folders, runs, strict=True)):
        run = read_run(Path(file))
        for query, text in read_judgements(folder, "train")[0].items():
            names = (domain_id(name, i, folders) for name in run.get(query, ()))
            ranked = {number[name]: None for name in names if name in number}
            if text in trained and not ranked:
                raise RevelaError(
                    f"{file} ranks no document that is trained on for the query {query} of "
                    f"{folder}: rank the corpus for all queries, or leave out --negatives-from"
                )
            rankings.setdefault(text, {}).update(ranked)
    return rankings


class Negatives:
    """Mines negatives for the rows of a batch, and yields the groups of each round.

    Drawn negatives are saved, so that a resumed run reads the same. Skipped rounds are not mined.

    Args:
        data: rows, judgements and the recipe.
        groups: epoch -> groups.
        encoder: the retriever in training.
        folder: keeps the drawn negatives until the run ends.
        size: number of groups of a round.

    Raises:
        RevelaError: there are too few passages.
    """

    def __init__(
        self, data: TrainingSet, groups: Groups, encoder: TextEncoder, folder: Path, size: int
    ) -> None:
        recipe = data.recipe
        self.data, self.encoder, self.folder, self.size = data, encoder, folder, size
        self.count, self.seed = recipe.negatives, recipe.training.seed
        self.rows, self.relevant, self.prompts = data.rows, data.relevant, data.prompts
        self.corpora = data.corpora if data.relevant else []
        self.runs: Sequence[str] = getattr(recipe.method, "negatives_from", ())
        self._endless = (group for epoch in count() for group in groups(epoch))
        self._groups, self._mined, self._round = list[list[int]](), dict[int, list[int]](), -1
        if self.count >= len(self.passages):
            raise RevelaError(
                f"--negatives {self.count} from {len(self.passages)} passages: give fewer, or more "
                "text"
            )

    def groups(self, round_: int) -> Iterator[list[int]]:
        """The groups of a round; rounds are requested in order."""
        self._groups = list(islice(self._endless, self.size))
        yield from self._groups

    def __call__(self, rows: Sequence[Row]) -> list[list[int]]:
        """The negatives of each row of a batch, as row indices; a row's "epoch" is the round.

        A row has fewer than ``count`` if the ranking is shorter.
        """
        if rows[0]["epoch"] != self._round:
            self._round = int(rows[0]["epoch"])
            file = self.folder / f"negatives-{self._round}.npy"
            found = load_or_make(file, partial(self._mine, self._round))
            self._mined = {row: [i for i in mined if i >= 0] for row, *mined in found.tolist()}
        return [self._mined.get(row["row"], []) for row in rows]

    @cached_property
    def passages(self) -> NDArray[np.int64]:
        """(N,) the first row of each passage. A judged document is one passage in several rows."""
        if not self.relevant:
            return np.arange(len(self.rows))
        _, first = np.unique(self.rows.column("document"), return_index=True)
        return first.astype(np.int64)

    def _mine(self, round_: int) -> NDArray[np.int64]:
        """(R, 1 + count): for each row with a query in the round, the row, its negatives, and
        -1 where there are fewer.
        """
        began = time.monotonic()
        members = sorted({row for group in self._groups for row in group})
        query_of = {row: str(self.rows.value(row, "query")) for row in members}
        query_of = {row: query for row, query in query_of.items() if query}
        row_of = {query: row for row, query in query_of.items()}
        queries, passages = list(row_of), self.rows.select(self.passages)
        if round_:  # every process encodes its share, and the first gets all
            passages_ND = encode_on_all_ranks(self.encoder.encode_passages)(
                LazyTexts(passages, lambda row: self.prompts(row.document).passage + row.text)
            )
            prompts = (self.prompts(self.rows.value(row, "document")) for row in row_of.values())
            asked = [prompt.query + query for prompt, query in zip(prompts, queries, strict=True)]
            queries_UD = encode_on_all_ranks(self.encoder.encode_queries)(asked)

        def draw() -> NDArray[np.int64]:
            answers = self._answers(queries)
            k = MINED_FROM + max(map(len, answers))
            if round_:
                rankings = top_k(queries_UD, passages_ND, k)[0].tolist()
            elif self.runs:
                documents, place = read_rankings(self.data, self.runs), self._place
                rankings = [[place[d] for d in documents[query]] for query in queries]
            else:
                texts = LazyTexts(passages, lambda row: row.text)
                indices_UK, scores_UK = BM25(texts).top_k(queries, k)
                rankings = np.where(scores_UK > 0, indices_UK, -1).tolist()
            best = {
                query: [place for place in ranking if place >= 0 and place not in own]
                for query, own, ranking in zip(queries, answers, rankings, strict=True)
            }
            return self._draw(round_, {row: best[query] for row, query in query_of.items()})

        drawn = from_rank_zero(draw)
        by = "the retriever" if round_ else "a run" if self.runs else "BM25"
        tqdm.write(
            f"negatives for {len(queries):,} queries mined among {len(self.passages):,} passages "
            f"by {by} in {time.monotonic() - began:.0f} s"
        )
        return drawn

    def _draw(self, round_: int, best: dict[int, list[int]]) -> NDArray[np.int64]:
        """The negatives of each row, drawn from its best passages."""
        drawn = np.full((len(best), 1 + self.count), -1, dtype=np.int64)
        corpus_R = np.searchsorted(self.corpora, self.rows.column("document"), side="right")
        for line, (row, ranked) in zip(drawn, best.items(), strict=True):
            rng = np.random.default_rng([self.seed, round_, row])
            places = np.array(ranked, dtype=np.int64)
            places = places[corpus_R[self.passages[places]] == corpus_R[row]][:MINED_FROM]
            found = self.passages[rng.permutation(places)[: self.count]]
            line[0], line[1 : 1 + len(found)] = row, found
        return drawn

    def _answers(self, queries: Sequence[str]) -> list[set[int]]:
        """Indices of each query's own passages: of its rows, or of its relevant documents."""
        numbers = [query_hash(query) for query in queries]
        if self.relevant:
            return [{self._place[d] for d in self.relevant[number]} for number in numbers]
        found: dict[int, set[int]] = {number: set() for number in numbers}
        for i in np.flatnonzero(np.isin(self._numbers, numbers)).tolist():
            found[int(self._numbers[i])].add(i)
        return [found[number] for number in numbers]

    @cached_property
    def _place(self) -> dict[int, int]:
        """Document -> its place among the passages, if they are judged documents."""
        documents = self.rows.column("document")[self.passages].tolist()
        return {document: i for i, document in enumerate(documents)}

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        """The hash of each row's query."""
        return np.array([query_hash(query) for query in self.rows.column("query")], np.int64)
