"""The library in five lines: load a retriever, encode, index, search. Thin over models.retriever
and search/.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.errors import RevelaError
from revela.index import encode_corpus as indexing
from revela.index.fusion import Fusion
from revela.index.listwise import QueryHeads, load_query_heads
from revela.index.rerank import Rerank
from revela.index.store import Index, Mode
from revela.retriever.encode import load_encoder
from revela.settings import Indexing, Precision, Recipe
from revela.settings import Retriever as RetrieverSettings
from revela.types import Document, Hit, Vectors
from revela.weights import fingerprint, resolve

if TYPE_CHECKING:
    from revela.evaluation.label_free import HeldOutCheck
    from revela.groups.training_set import TrainingSet
    from revela.training.run import Outcome

log = logging.getLogger(__name__)


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
        lm: str | Path = RetrieverSettings.offline_model,
    ) -> None:
        self.folder, self.lm = resolve(str(model)), str(lm)
        self.encoder = load_encoder(self.folder, precision)

    @classmethod
    def train(
        cls,
        corpus: str | Path | Sequence[str | Path],
        out: str | Path,
        preset: str = "",
        *,
        resume: bool = False,
        **settings: Any,
    ) -> Retriever:
        """Train a retriever on raw text, save it and load it.

        >>> Retriever.train("docs/", "my-retriever", preset="pairs", max_minutes=5)  # doctest: +SKIP

        Args:
            corpus: folders, files or datasets of the hub (hub:owner/name), or a folder of groups.
            out: folder for the retriever, which does not exist yet.
            preset: settings to start from; empty: those of ``objective``, else "gated".
            resume: continue the run in ``out`` from its last checkpoint.
            settings: any setting by its flag's name (docs/settings.md); ``objective`` may also be an
                instance of an objective of your own (docs/objectives.md).

        Raises:
            RevelaError: the corpus, a model or a setting cannot be used, or ``out`` is in the way.
        """
        sources = [corpus] if isinstance(corpus, str | Path) else list(corpus)
        paths = [Path(source) for source in sources]
        train(paths, Path(out), Recipe.of(preset, **settings), resume=resume)
        return cls(out)

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


@dataclass(frozen=True)
class TrainingResult:
    """What a run gave.

    Attributes:
        outcome: of ``training.run.train``.
        scores: nDCG@10 of the label-free check by system, then by task; empty if it has no task.
    """

    outcome: Outcome
    scores: dict[str, dict[str, float]]


def train(
    corpus: Sequence[Path], out: Path, recipe: Recipe, *, resume: bool = False, command: str = ""
) -> TrainingResult:
    """Read a corpus, hold documents out, train on the others, and save a retriever.

    Args:
        corpus, out, resume: as for ``Retriever.train``.
        recipe: all settings.
        command: for the model card.
    """
    from revela.training.run import refuse_at_once
    from revela.training.run import train as run

    refuse_at_once(recipe, out, resume)  # before a language model writes questions for the check
    data, check = read_training_set(recipe, corpus)
    bm25 = check.bm25()
    outcome = run(
        recipe,
        data,
        out,
        check=check if check.tasks else None,
        bm25=bm25,
        corpus=", ".join(map(str, corpus)),
        command=command,
        resume=resume,
    )
    systems = {
        "BM25": bm25,
        "untrained": outcome.untrained,
        "before training": outcome.before,
        "trained": outcome.after,
    }
    return TrainingResult(outcome, systems if check.tasks else {})


def read_training_set(recipe: Recipe, corpus: Sequence[Path]) -> tuple[TrainingSet, HeldOutCheck]:
    """What is trained on, and the label-free check by what is held out; logs both."""
    from revela.evaluation.label_free import MIN_QUERIES, check_by
    from revela.groups.training_set import TrainingSet, written_answers
    from revela.silence import silence_libraries
    from revela.training.record import refuse_several_processes

    refuse_several_processes()  # before much is read
    silence_libraries()
    data = TrainingSet.read(recipe, corpus)
    path = data.queries_file
    assert path is not None
    ask = partial(written_answers, recipe, path=path, of="held-out chunks")
    check = check_by(data.held_out, recipe, ask)
    questions = recipe.training.check_questions
    if questions and all(task.name != "question" for task in check.tasks):
        log.info(
            f"fewer than {MIN_QUERIES} questions about held-out chunks were kept: "
            "the label-free check asks none"
        )
    unguarded = "too few for a task, so the last state is saved unchecked"
    if not questions:
        unguarded += ": --check-questions 100 has a language model write questions about them"
    log.info(
        f"held out {len(data.held_out):,} documents for the label-free check "
        f"({check.describe() or unguarded})"
    )
    return data, check
