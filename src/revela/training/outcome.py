"""The result of a run, and the saved retriever with its model card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from statistics import fmean

from revela.terminal import counted, duration
from revela.training.checks import format_scores
from revela.training.record import NOISE, MetricsRow, Provenance, Scores
from revela.training.retriever.card import Card, metadata_of, without_folders
from revela.training.retriever.context import ContextEncoder, SavedContext
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever
from revela.training.training_set import TrainingSet


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """The result of a run; printed as a sentence of what happened and a table of scores.

    Attributes:
        path: the folder of the saved retriever, for ``revela.Retriever``.
        scores: label-free scores, nDCG@10 by task, of "BM25", "start" (before the first step),
            "last step" and "saved"; if the run fitted its model first, also of "untrained", before
            that fit. {} without a check.
        curve: loss, learning rate, gradient norm and scores by step, as in metrics.jsonl.
        steps: optimiser steps done.
        kept: step of the saved state; 0: the start.
        minutes: training time.
        tokens: tokens that the retriever read.
        models: setting ("model", "lm", "query_lm", "surrogate", "filter") -> the model that was
            read.
        signal: number of the signal (Ctrl-C, SIGTERM) that ended the run; 0: none.
    """

    path: Path
    scores: dict[str, Scores]
    curve: list[MetricsRow]
    steps: int
    kept: int
    minutes: float
    tokens: int
    models: dict[str, str]
    signal: int

    def __repr__(self) -> str:
        rows = [f"{row:16} {format_scores(found, {})}" for row, found in self.scores.items()]
        return "\n".join([self.summary, *rows, self.cost])

    @property
    def summary(self) -> str:
        """What happened, in a sentence: whether training helped, and what was saved."""
        name, steps = self.signal and Signals(self.signal).name, counted(self.steps, "step")
        stopped = f"stopped by {name} after {steps}, continue with --resume; " if name else ""
        if not self.scores:
            return f"{stopped}there was no label-free check: the last state was saved unchecked"
        if self.kept == 0:
            return f"{stopped}training did not improve the label-free check: the start was saved"
        first, last = (fmean(self.scores[row].values()) for row in ("start", "saved"))
        verb = "improved" if last > first else "lowered"
        verb = verb if abs(last - first) > NOISE else "did not measurably change"
        return (
            f"{stopped}training {verb} the label-free check: nDCG@10 {first:.3f} at the start, "
            f"{last:.3f} in the saved state (after {counted(self.kept, 'step')})"
        )

    @property
    def cost(self) -> str:
        """Steps, time and tokens, the models that were read, and the path, in a line."""
        steps = f"{counted(self.steps, 'step')} in {duration(self.minutes)}"
        read = ", ".join(f"{name} {model}" for name, model in self.models.items())
        return f"{steps}, {self.tokens:,} tokens ({read}); saved to {self.path}"


def save_outcome(
    data: TrainingSet,
    encoder: RetrieverEncoder,
    result: TrainingResult,
    *,
    context_encoder: ContextEncoder | None,
    context_texts: Sequence[str],
    provenance: Provenance,
    folder: Path,
) -> None:
    """Save the retriever in its current state, and its model card.

    Args:
        context_encoder, context_texts: the first stage of a contextual retriever, and the documents
            that it is saved with.
        folder: of the model that was trained.
    """
    recipe = data.recipe
    settings = {**recipe.to_dict(), **result.models}
    if recipe.pairs:
        names = (without_folders(str(folder)) for folder in recipe.pairs)
        settings["queries"] = f"judged, of {' and '.join(names)}"
    card = Card(
        name=result.path.name,
        learned_from=recipe.method.learned_from,
        corpus=provenance.corpus,
        documents=data.n_documents,
        command=provenance.command,
        settings=settings,
        scores=result.scores,
        minutes=result.minutes,
        steps=result.steps,
        slots=recipe.context.context,
        supervised=bool(recipe.pairs),
        metadata=metadata_of(result.models["model"], folder),
        is_unchanged=result.kept == 0,
    ).text()
    context = None
    if context_encoder is not None:
        source = f"{len(context_texts)} chunks of {without_folders(provenance.corpus)}"
        rows = context_encoder.of_texts(context_texts)
        context = SavedContext(context_encoder, rows, {"drawn from": source})
    save_retriever(encoder.model, result.path, card, context, encoder.words_to_vectors)
