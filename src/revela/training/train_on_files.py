"""A run on files: read a corpus, hold documents out, train on the others, save a retriever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from revela.training.check_settings import check_recipe
from revela.training.checks import NO_CHECKS, CheckPlan
from revela.training.distributed import from_rank_zero, is_rank_zero, joined
from revela.training.groups.dataset import TrainingSet
from revela.training.held_out import read_training_set
from revela.training.outcome import Outcome
from revela.training.record import Provenance
from revela.training.settings import Recipe
from revela.training.train import train


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run. ``scores``: system -> task -> nDCG@10 of the label-free check."""

    outcome: Outcome
    scores: dict[str, dict[str, float]]


def train_on_files(
    corpus: Sequence[Path], out: Path, recipe: Recipe, *, resume: bool = False, command: str = ""
) -> TrainingResult:
    """Read a corpus, hold documents out, train on the others, and save a retriever.

    ``command`` is the command line, for the model card.
    """
    with joined():
        check_recipe(recipe, out, resume)  # first, as writing questions takes long
        plan = NO_CHECKS
        if is_rank_zero():
            data, check = read_training_set(recipe, corpus)
            plan = CheckPlan(check if check.tasks else None, check.bm25())
        else:
            data = TrainingSet.read(recipe, corpus)
        provenance = Provenance(", ".join(map(str, corpus)), command)
        outcome = train(recipe, data, out, plan=plan, provenance=provenance, resume=resume)
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
