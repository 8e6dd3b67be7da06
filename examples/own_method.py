# %% [markdown]
# # Write a method, and compare it
#
# A method has settings (a frozen dataclass), a function that makes batches, and a loss. This one
# brings the chunks of a document close together. [Write a method](../docs/write-a-method.md)
# explains the parts. To use it on the command line:
# `revela train TEXT --method examples/own_method.py:Neighbours`.

# %%
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

from revela import Document, LabelFreeEvaluator, train
from revela.training.methods.base import Method, RetrieverLoss
from revela.training.settings import PositiveFloat, checked


@checked
class Neighbours(Method):
    """A chunk should be nearer to the chunks of its document than to others."""

    name = "neighbours"
    learned_from = "{model} learned which chunks are of one document."

    tau: PositiveFloat = 0.1
    "Temperature of the cosines."

    def build(self, parts):
        def batch(rows):
            texts = [row["text"] for row in rows]
            documents = torch.tensor([row["document"] for row in rows])
            return {**parts.sides(texts, texts), "query_document": documents}

        size = parts.groups.group_size
        return NeighboursLoss(parts.model, tau=self.tau, group_size=size), batch


class NeighboursLoss(RetrieverLoss):
    def forward(self, sides):
        query, passage = ({**side} for side in sides)
        documents, losses = self.groups(query.pop("document")), []
        for cosine, document in zip(self.cosines(query, passage), documents, strict=True):
            same = (document[:, None] == document).float().fill_diagonal_(0)
            scores = (cosine / self.tau).fill_diagonal_(-1e4)
            losses.append(-(F.log_softmax(scores, dim=1) * same).sum() / same.sum().clamp(min=1))
        return torch.stack(losses).mean()


# %% [markdown]
# Train it and two other methods for a minute each, with the same text, start and groups.

# %%
if __name__ == "__main__":
    documents = [Document(name, text, name) for name, text in topics.items()]
    d_to_z = [d for d in documents if d.id[0] > "c"]
    evaluator = LabelFreeEvaluator([d for d in documents if d.id[0] <= "c"])
    shared = {"model": "embedded:minilm-l6", "keep": "last", "max_minutes": 1}
    for method in (Neighbours(tau=0.05), "contrastive-crop", "revela-gated"):
        name = getattr(method, "name", method)
        result = train(d_to_z, f"runs/{name}", method, **shared)
        scores = evaluator(SentenceTransformer(str(result.path)))
        print(f"{name:16} nDCG@10 {scores['mean_ndcg@10']:.3f}")
