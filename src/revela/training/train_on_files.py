"""A run on files: read a corpus, hold documents out, train on the others, save a retriever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from revela.training.check_settings import check_recipe
from revela.training.checks import NO_CHECKS, CheckPlan
from revela.training.distributed import is_rank_zero, joined
from revela.training.groups.dataset import TrainingSet
from revela.training.held_out import read_training_set
from revela.training.outcome import Outcome
from revela.training.record import Provenance
from revela.training.settings import Recipe
from revela.training.train import train


def train_on_files(
    corpus: Sequence[Path], out: Path, recipe: Recipe, *, resume: bool = False, command: str = ""
) -> Outcome:
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
        return train(recipe, data, out, plan=plan, provenance=provenance, resume=resume)
