"""CDE, contextual document embeddings (Morris & Rush, ICLR 2025; arXiv 2410.02525): batches of
similar texts, and a retriever that reads other documents of the corpus before every text.

**Contextual batches** (section 4.1). Pairs of query and passage are clustered by a surrogate f
(k-means over [q; d] and [d; q], groups/similarity.py), and groups are cut from an order in which
similar clusters are neighbours (a greedy travelling salesman's). Some passages of a group answer
each other's queries. They leave the softmax:

    L    = -mean_i log( exp(s_ii) / sum_{j in S_i} exp(s_ij) )
    s_ij = cos(q_i, d_j) / tau
    S_i  = {i} and all j with f(q_i, d_j) < f(q_i, d_i)          (eq. 4)

**Contextual encoder** (section 4.2), for any method, with phi in place of every vector:

    c_j  = a_j + head(M1(y_j)),  j = 1 .. J
    phi  = M2(c_1 .. c_J, E(x_1) .. E(x_T))                      (eqs. 5, 6)

- y_j: the context documents of the batch; x_t: the tokens of a text, E: their embeddings. With
  several vectors per document, y_j is a run of its tokens.
- M1, head: the first stage (``ContextEncoder``); a_j are its anchors, learned rows.
- M2: the second stage, the retriever. It reads c before the text, and pools over the text alone.

Both stages learn from L: d L / d c sums over all texts of the batch, queries and passages, and goes
on to M1. If ``embed`` computes texts in parts (GradCache), autograd sums over the parts before it
reaches M1, so two stages need no cache of their own. Context documents are embedded in parts too.
With LoRA (--lora-rank) or all weights (0) of both stages. A second phase is a run whose --model is
the retriever of the first; its first stage trains on.

Differs from the paper, and the setting that switches it off. ``cde-paper`` has all of them, for the
large model; ``cde-paper-small`` for table 1 and most figures:
- tau is 0.05: --tau 0.02. The rate is 1e-4 with 10 steps of warm-up: --learning-rate 2e-5
  --warmup-steps 1000. A run stops after 20 minutes: --max-epochs 3 --max-minutes 0. The state with
  the best check is kept: --keep last. (Both presets hold 5 % of the documents out and drop
  near-duplicates: --held-out 0 --near-duplicates 0.)
- Groups of 32 pairs: --group-size 512 --retriever-batch 32, to save memory. Clusters have the size
  of a group: --cluster-size; random batches: --groups random; random order: --packing random.
- 16 documents as context: --context 64 (small) or 512. None: --context 0.
- Chunks of 48 words: --chunk-words 400 --lm-tokens 512 (large), --lm-tokens 64 (small). A context
  document has 64 tokens, as has a text for the surrogate: --context-tokens 512
  --surrogate-tokens 512.
- The start of all methods here, six layers of a decoder with a fit and mean pooling, M1 its lowest
  layer, and LoRA: --model google-bert/bert-base-uncased --layers 0 --context-layers 0 --lora-rank 0
  and no fit. The paper has NomicBERT, whose folder in the hub needs code that is never run here.
  BERT has learned positions, dropout of 0.1 (the authors train without) and 110 million weights
  (137).
- MiniLM is the surrogate of clusters and filter: --surrogate sentence-transformers/gtr-t5-base
  --filter nomic-ai/nomic-embed-text-v1, which transformers opens without code of the hub. No
  filter: --filter ''.
- k-means of 10 steps from one start: --kmeans-steps 100 --kmeans-starts 3.
- Queries are words that the authors of the text wrote (--queries: titles, docstrings, telling
  sentences); the paper trains on 234 million mined pairs, then on 1.8 million labelled ones:
  --pairs, a folder for each domain, with its prompts. Prompts of all: --query-prompt
  'search_query: ' --passage-prompt 'search_document: '.
- A batch without documents has probability 0.1, so that the retriever works without a corpus:
  --context-null 0. The paper only drops slots, as --context-dropout 0.005 does.

What has no setting, in the presets of the paper too:
- A context vector is added to an anchor, by a head that gives 0 at first: a decoder whose slots
  hold vectors of documents before any training is ruined by them.
- The residual MLP after M2 is left out: sentence-transformers has no module for it. The eight
  soft-prompt tokens are anchors without documents: --context-from constant.
- One context per batch, not permuted per text. A decoder attends to it causally, so order matters.
- k-means goes level by level, 256 clusters each, as flat k-means is quadratic; no SVD. A group
  never has chunks of two domains.
- The filter also drops mined negatives, which the authors' code keeps: without labels they hold the
  most false ones, and all queries of a group share them.
- At use, the context is drawn once from the corpus and saved: revela fit --context, with
  --context-first N for the first n documents alone.

Read next: retriever/context.py (M1, slots), retriever/module.py (M2), groups/similarity.py
(clusters and their order), groups/strategies.py (groups along the order), contrastive.py, base.py;
docs/papers.md has every equation and setting in the order of the paper.

Cost: J more tokens per text, and J documents per batch for the first stage; no LM.
Memory: as for contrastive learning, and the first stage's graph of J documents.
When to use it: with several corpora, or to study contexts.
Measured: 50 steps of 32 pairs from MiniLM give 0.5771 (mean of three seeds, 725 queries of CoNaLa
and Cranfield), 16 learned rows without documents 0.5771, neither 0.5759: contexts add nothing here.

Shapes: J slots, N <= J documents, D width of the embedding table; Q queries, B passages, S width of
a surrogate's vector.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from revela.encoders.base import TextEncoder
from revela.training.device import Tensors
from revela.training.distributed import all_gather
from revela.training.methods.base import (
    BuildContext,
    Collate,
    Row,
    embed_in_parts,
    row_random,
)
from revela.training.methods.contrastive import ContrastiveLoss, Pairs, QueryBatches
from revela.training.models import load_surrogate
from revela.training.settings import NO_FIT, Groups, Preset, Rare, checked
from revela.types import Vectors

if TYPE_CHECKING:
    from revela.training.retriever.context import ContextEncoder

PAPER: Preset = (
    NO_FIT
    | {"method": "cde", "groups": "cluster", "group_size": 512}
    | {"kmeans_steps": 100, "kmeans_starts": 3, "surrogate": "sentence-transformers/gtr-t5-base"}
    | {"filter": "nomic-ai/nomic-embed-text-v1", "queries": "authors-words"}
    | {"model": "google-bert/bert-base-uncased", "offline_model": "", "lora_rank": 0}
    | {"query_prompt": "search_query: ", "passage_prompt": "search_document: "}
    | {"context_layers": 0, "context_null": 0.0}
    | {"tau": 0.02, "learning_rate": 2e-5, "warmup_steps": 1000, "retriever_batch": 32}
    | {"max_minutes": 0.0, "max_epochs": 3, "keep": "last"}
)
PRESETS: dict[str, Preset] = {
    # Similar chunks share a group, the retriever reads 16 documents; queries are authors' words.
    "cde": {"method": "cde", "groups": "cluster", "group_size": 32}
    | {"surrogate": "embedded:minilm-l6", "queries": "authors-words", "context": 16},
    # The contextual encoder, trained by next-token prediction alone. Give it several corpora
    # (revela groups A B --method cde-revela --weights 1 1): a context can only say what is special
    # in a corpus if there is another.
    "cde-revela": {"method": "revela", "groups": "cluster"}
    | {"context": 16, "context_from": "corpus"},
    # As published: two whole encoders, 512 tokens, 512 documents as context, batches of a cluster.
    "cde-paper": PAPER
    | {"layers": 0, "chunk_words": 400, "lm_tokens": 512, "context": 512}
    | {"context_tokens": 512, "surrogate_tokens": 512},
    # The small setting of table 1 and of most figures.
    "cde-paper-small": PAPER | {"layers": 6, "lm_tokens": 64, "max_tokens": 64, "context": 64},
}


@checked
class CDE(Pairs):
    """Learn to find a query's passage among similar ones, in the context of the corpus."""

    name = "cde"

    filter: Rare[str] = "same"
    """Model of the false-negative filter, as for --surrogate. same: the surrogate. Empty: no
    filter."""

    def model_of_batches(self, groups: Groups) -> str:
        return groups.surrogate if self.filter == "same" else self.filter

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        training, name = parts.training, self.model_of_batches(parts.groups)
        if not name:
            return super().build(parts)
        surrogate = load_surrogate(name, training.precision, parts.groups.surrogate_tokens)
        loss = FilteredLoss(parts.model, tau=self.tau, retriever_batch=training.retriever_batch)
        return loss, FilteredBatches(parts, surrogate)


@dataclass(frozen=True)
class FilteredBatches(QueryBatches):
    """Adds the surrogate's vectors of queries and passages."""

    surrogate: TextEncoder

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Tensors:
        return {
            **super().sides(queries, passages),
            "query_surrogate": self._encoded(self.surrogate.encode_queries, queries),
            "passage_surrogate": self._encoded(self.surrogate.encode_passages, passages),
        }

    def _encoded(self, encode: Callable[[Sequence[str]], Vectors], texts: Sequence[str]) -> Tensor:
        """The surrogate's vectors, of which each process computes its share."""
        mine_nS = encode(texts[self.parts.share(len(texts))])
        shares = all_gather(mine_nS) if len(mine_nS) < len(texts) else [mine_nS]
        return torch.from_numpy(np.concatenate(shares))


class FilteredLoss(ContrastiveLoss):
    """L without the false negatives that a surrogate finds; arguments as for RetrieverLoss."""

    def forward(self, features: Sequence[dict[str, Any]]) -> Tensor:
        """Loss in nats per query; ``features`` as for ContrastiveLoss, with a mask of ``allowed``
        passages, and the ``surrogate``'s vectors of both sides.
        """
        query, passage = ({**side} for side in features)
        surrogates = query.pop("surrogate"), passage.pop("surrogate")
        query["allowed"] = query["allowed"] & true_negative_mask(*surrogates, query["target"])
        return super().forward([query, passage])


def true_negative_mask(query_QS: Tensor, passage_BS: Tensor, target_Q: Tensor) -> Tensor:
    """(Q, B) allowed passages: a query's own, and every j with f(q, d_j) < f(q, d_own) (eq. 4);
    f is the dot product of the surrogate's vectors.
    """
    scores_QB = query_QS @ passage_BS.T
    own_Q1 = target_Q[:, None]
    return (scores_QB < scores_QB.gather(1, own_Q1)).scatter(1, own_Q1, True)


def in_context(
    loss: nn.Module, collate: Collate, parts: BuildContext, encoder: ContextEncoder
) -> tuple[nn.Module, Collate]:
    """A method's loss and collator for a retriever that reads a context."""
    constant = encoder.constant
    parts.model.slot_dropout = 0.0 if constant else parts.context.context_dropout
    contextual = Contextual(loss, encoder, parts)
    return contextual, collate if constant else ContextBatches(parts, collate, encoder)


class Contextual(nn.Module):
    """The loss of a method whose retriever reads a context per batch.

    Args:
        loss: trains the retriever, which is the second stage.
        encoder: the first stage. Unless it is constant, its documents are the last side of a batch.
        parts: what the method is built from.
    """

    def __init__(self, loss: nn.Module, encoder: ContextEncoder, parts: BuildContext) -> None:
        super().__init__()
        self.loss, self.retriever, self.context_encoder = loss, parts.model, encoder
        self.null, self.bf16 = parts.context.context_null, parts.bf16
        self.retriever_batch = parts.training.retriever_batch

    def forward(self, features: Sequence[Tensors]) -> Tensor:
        """The loss in the context of this batch."""
        sides, encoder = list(features), self.context_encoder
        if encoder.constant:
            rows_JD = encoder.anchors_JD
        else:
            # Drawn first: of dropout, processes that share the batch draw unequally many numbers.
            is_null = self.training and self.null and torch.rand(()) < self.null
            read, documents = partial(encoder.vectors, bf16=self.bf16), sides.pop()
            rows_JD = encoder.null_JD
            if not is_null:
                rows_JD = encoder.of_vectors(embed_in_parts(read, documents, self.retriever_batch))
        # Kept until the next batch: a backward pass may run the retriever again.
        self.retriever.context = rows_JD, encoder.null_JD
        loss: Tensor = self.loss(sides)
        return loss


@dataclass(frozen=True)
class ContextBatches:
    """Adds the context documents of a batch to another collator's batch, as the last side."""

    parts: BuildContext
    collate: Collate
    context_encoder: ContextEncoder

    def __call__(self, rows: Sequence[Row]) -> Tensors:
        batch = self.collate(rows)
        chosen = [self.parts.rows[i] for i in self.choose(rows)]
        texts = [self.parts.prompts(row.document).passage + row.text for row in chosen]
        return {**batch, **self.parts.side("context", texts, self.context_encoder.stage)}

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """Rows of the corpus for the context of a batch: J / V, or all if there are fewer."""
        slots = self.context_encoder.documents
        own = [int(row["row"]) for row in rows]
        rng = row_random(rows[0], self.parts.training.seed)
        if self.parts.context.context_from == "batch":
            return rng.sample(own, min(slots, len(own)))
        corpus = self._rows_by_corpus[bisect(self.parts.corpora, rows[0]["document"])]
        drawn = rng.sample(range(len(corpus)), min(slots + len(own), len(corpus)))
        others = [row for row in corpus[drawn].tolist() if row not in set(own)]
        return (others or own)[:slots]

    @cached_property
    def _rows_by_corpus(self) -> list[NDArray[np.int64]]:
        owners_N = self.parts.rows.column("document")
        corpus_N = np.searchsorted(self.parts.corpora, owners_N, side="right")
        return [np.flatnonzero(corpus_N == i) for i in range(len(self.parts.corpora) + 1)]
