"""``Retriever``: train, fit or load a retriever, encode, and make and open indexes with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela.corpus.spool import arrow_list
from revela.encoder.load import load_encoder
from revela.encoder.prompts import OWN, Given, prompts_of
from revela.errors import RevelaError, extra
from revela.fitting import FITTED_BY, FitOptions, fit
from revela.index.index import Index
from revela.index.ingest import metadata_columns
from revela.model_files import resolve
from revela.settings import Indexing, Recipe
from revela.types import Document, Precision, Vectors, items_of

if TYPE_CHECKING:
    from revela.training.outcome import Outcome

log = logging.getLogger(__name__)


class Retriever:
    """A loaded retriever: encodes texts, makes and opens indexes.

    Args:
        model: a folder made by ``revela train``, any Sentence-Transformers folder, a hub id or
            embedded:minilm-l6.
        precision: arithmetic; "auto" is the fastest of int8, bf16 and fp32 on this hardware.
        prompts: prefixes of queries and of passages; None keeps the model's own.

    Examples:
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
        prompts: Given = OWN,
    ) -> None:
        self.folder = resolve(str(model))
        self.prompts = prompts_of(self.folder, prompts)
        self.encoder = load_encoder(self.folder, precision, prompts=self.prompts)

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

        Args:
            corpus: folders, files or datasets of the hub (hub:owner/name), or a folder of groups.
            out: a new folder for the retriever.
            preset: settings to start from; "": those of ``objective``, else "gated".
            resume: continue the run in ``out`` from its last checkpoint.
            settings: any setting by its flag's name (docs/command-line.md); ``objective`` may also
                be an objective of your own (docs/train.md).

        Examples:
            >>> Retriever.train("docs/", "out", preset="pairs", max_minutes=5)  # doctest: +SKIP
        """
        train(_paths(corpus), Path(out), Recipe.of(preset, **settings), resume=resume)
        return cls(out)

    @classmethod
    def fit(
        cls,
        corpus: str | Path | Sequence[str | Path],
        out: str | Path,
        *,
        model: str | Path,
        prune: bool = False,
        static: bool = False,
        steps: int | None = None,
        **settings: Any,
    ) -> Retriever:
        """Fit a raw language model to text, save it as a retriever and load it. Takes minutes, and
        no labels.

        Args:
            corpus, out: as for ``train``.
            model: the language model: a hub id, a folder or embedded:smollm2-135m.
            prune: drop the tokens that the corpus does not use.
            static: make a table of word vectors, without any layer.
            steps: training steps of the table, or of the lexical half; None: by the size of the
                corpus, 0: none.
            settings: any of ``fitting.FITTED_BY``, by its flag's name (docs/command-line.md).

        Examples:
            >>> Retriever.fit("docs/", "out", model="embedded:smollm2-135m")  # doctest: +SKIP
        """
        if unread := settings.keys() - set(FITTED_BY):
            raise RevelaError(
                f"a fit reads no setting {min(unread)}: give some of {', '.join(FITTED_BY)}"
            )
        recipe = Recipe.of(model=str(model), **settings)
        fit(_paths(corpus), Path(out), recipe, FitOptions(prune, static, steps))
        return cls(out, recipe.training.precision)

    def encode_queries(self, texts: Iterable[str]) -> Vectors:
        """Encode texts as queries: (N, D) float32 vectors of length one, in the order of the texts.

        Raises:
            RevelaError: a text is not a string, or a vector is not finite.
        """
        return self.encoder.encode_queries(list(items_of(texts, "texts")))

    def encode_passages(self, texts: Iterable[str]) -> Vectors:
        """``encode_queries``, but as passages. Their dot products with queries are cosines."""
        return self.encoder.encode_passages(list(items_of(texts, "texts")))

    def index(
        self,
        documents: Iterable[str | Document],
        folder: str | Path,
        metadata: Sequence[str] = (),
        chunk_words: int = Indexing.chunk_words,
        keep_tokens: bool = Indexing.keep_tokens,
        language: str = Indexing.language,
    ) -> Index:
        """Make an index of documents in a new folder. The same call resumes a killed run.

        Args:
            documents: texts, numbered from 0 as ids, or ``Document``s. Empty ones are left out.
            folder: for the index.
            metadata: fields of the documents' ``metadata`` that searches can filter by.
            chunk_words: maximum words per chunk.
            keep_tokens: keep token vectors, so that re-ranking takes milliseconds.
            language: language of the texts, for BM25: "auto", "none" (no stemming), or a code such
                as "de".

        Raises:
            RevelaError: there is nothing to index, ``folder`` holds something else, or two
                documents share an id.
        """
        metadata = list(items_of(metadata, "metadata"))
        numbered = (
            Document(str(i), document) if isinstance(document, str) else document
            for i, document in enumerate(items_of(documents, "documents", (str, Document)))
        )
        rows = arrow_list(Document, (row for row in numbered if row.full_text.strip()))
        if not rows:
            raise RevelaError(
                "there is nothing to index: give texts or documents with words in them"
            )
        settings = Indexing(chunk_words=chunk_words, keep_tokens=keep_tokens, language=language)
        columns = metadata_columns(rows, metadata)
        index = Index.create(
            folder, self.folder, columns, settings, encoder=self.encoder, prompts=self.prompts
        )
        index.add(rows)
        return index

    def open(self, folder: str | Path) -> Index:
        """Open an index that was made with this retriever, here or by ``revela index``."""
        return Index.open(folder, self.folder, encoder=self.encoder, prompts=self.prompts)


def _paths(corpus: str | Path | Sequence[str | Path]) -> list[Path]:
    if isinstance(corpus, str | Path):
        return [Path(corpus)]
    return [Path(part) for part in items_of(corpus, "corpus", (str, Path))]


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run. ``scores``: system -> task -> nDCG@10 of the label-free check."""

    outcome: Outcome
    scores: dict[str, dict[str, float]]


def train(
    corpus: Sequence[Path], out: Path, recipe: Recipe, *, resume: bool = False, command: str = ""
) -> TrainingResult:
    """Read a corpus, hold documents out, train on the others, and save a retriever.

    ``command`` is the command line, for the model card.
    """
    with extra("train", "training"):
        from revela.distributed import from_rank_zero, is_rank_zero, joined
        from revela.groups.dataset import TrainingSet
        from revela.training.check_settings import check_recipe
        from revela.training.checks import NO_CHECKS, CheckPlan
        from revela.training.held_out import read_training_set
        from revela.training.record import Provenance
        from revela.training.train import train as run

    with joined():
        check_recipe(recipe, out, resume)  # first, as writing questions takes long
        plan = NO_CHECKS
        if is_rank_zero():
            data, check = read_training_set(recipe, corpus)
            plan = CheckPlan(check if check.tasks else None, check.bm25())
        else:
            data = TrainingSet.read(recipe, corpus)
        provenance = Provenance(", ".join(map(str, corpus)), command)
        outcome = run(recipe, data, out, plan=plan, provenance=provenance, resume=resume)
        bm25 = from_rank_zero(lambda: plan.bm25)
    systems = {
        "BM25": bm25,
        "untrained": outcome.untrained,
        "before training": outcome.before,
        "trained": outcome.last,
    }
    if outcome.kept != outcome.steps:
        systems[f"saved (step {outcome.kept})"] = outcome.after
    return TrainingResult(outcome, systems if outcome.after else {})
