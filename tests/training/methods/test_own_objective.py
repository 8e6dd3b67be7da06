"""An objective of one's own: its settings, batches and loss in under 40 lines, through the API."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, ValidationError
from pydantic.dataclasses import dataclass

from conftest import TINY, logged
from revela import Retriever
from revela.errors import RevelaError
from revela.training.methods.base import RetrieverLoss
from revela.training.settings import Objective


# docs/train.md names these two classes.
@dataclass(frozen=True)
class Neighbours(Objective):
    """A chunk should be nearer to the other chunks of its document than to those of others."""

    name = "neighbours"
    learned_from = "{model} learned which chunks are of one document."

    tau: PositiveFloat = 0.1

    def build(self, parts):
        size = parts.recipe.groups.group_size
        loss = NeighboursLoss(parts.model, tau=self.tau, group_size=size)

        def collate(rows):
            texts = [row["text"] for row in rows]
            documents = torch.tensor([row["document"] for row in rows])
            return {**parts.sides(texts, texts), "query_document": documents}

        return loss, collate


class NeighboursLoss(RetrieverLoss):
    def forward(self, features):
        query, passage = ({**side} for side in features)
        losses = []
        documents = self.groups(query.pop("document"))
        for cosine, document in zip(self.cosines(query, passage), documents, strict=True):
            same = (document[:, None] == document).float().fill_diagonal_(0)
            scores = (cosine / self.tau).fill_diagonal_(-1e4)
            losses.append(-(F.log_softmax(scores, dim=1) * same).sum() / same.sum().clamp(min=1))
        return torch.stack(losses).mean()


def test_it_trains_through_the_api(tiny_lm_folder, corpus_file, tmp_path):
    settings = TINY | dict(model=str(tiny_lm_folder), max_steps=12, learning_rate=5e-3)
    objective = Neighbours(tau=0.2)
    retriever = Retriever.train(corpus_file, tmp_path / "out", objective=objective, **settings)
    assert retriever.encode_queries(["ocean1"]).shape[0] == 1
    losses = [row["loss"] for row in logged(tmp_path / "out")]
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    settings = json.loads((tmp_path / "out" / "run.json").read_text())
    assert settings["objective"] == "neighbours" and settings["tau"] == 0.2
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{tiny_lm_folder.name} learned which chunks are of one document." in card


def test_its_bounds_hold_and_options_that_it_lacks_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="greater than 0"):
        Neighbours(tau=0)
    with pytest.raises(RevelaError, match="--tau 0: it should be greater than 0"):
        Retriever.train("docs", tmp_path / "out", objective=Neighbours(), tau=0)
    with pytest.raises(RevelaError, match="--gate has no effect on --objective neighbours"):
        Retriever.train("docs", tmp_path / "out", objective=Neighbours(), gate=0.3)
