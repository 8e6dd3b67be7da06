"""Contrastive learning: a query should find its passage among other passages.

    L = -mean_i log softmax_j( cos(q_i, d_j) / tau )  at j = target(i)

- q_i, d_j: vectors of query i and passage j.
- target(i): the passage of query i. The other passages that the softmax is over are negatives.

**Pairs** (InfoNCE): a query that was written for a chunk or taken from it should find it among the
chunks of its group. Groups weigh the same, however many queries they have. Queries may also be
judged (--pairs); passages are then whole documents. Hard negatives may be added (--negatives; ANCE,
Xiong et al., ICLR 2021): BM25, and later the retriever, ranks them high for the query, but they do
not answer it. No passage of the same query is a negative (the chunks of a document with its title
as query, all judged relevant documents).

**Crops** (Contriever; Izacard et al., TMLR 2022): a crop of a text finds another crop of it among
the crops of all texts of the batch, and of all processes. For a share of the texts a sentence finds
the rest of its text instead (--inverse-cloze; Lee et al., ACL 2019).

Differs from Contriever, and the setting that makes it nearly equal:
- Crops are runs of words, not of tokens, of 10 to 50 % of a window of 240 words (--crop-window,
  --crop-shares 0.05 0.5); no word is deleted: --crop-deletion 0.1.
- Cosines at --tau 0.05; Contriever compares by dot products: --similarity dot.
- Negatives are the crops of the batch; Contriever has a queue and a momentum encoder. No setting:
  --group-size and --groups-per-batch enlarge the batch.

The preset contrastive-contriever is Revela's comparison (later version, tables 2, 8 and 9): LoRA of
rank 256, EOS, tau 0.01, 15 negatives of each text, 256 texts an update, crops and inverse cloze.
The paper does not say the rest. Taken from revela-paper: the rate, its warm-up, alpha and dropout
of LoRA, all layers without a fit, the last state. From Contriever: windows, shares of crops,
deletion of a tenth. Guesses: both tasks have equal shares, the negatives are the other texts of a
group of 16, which are of other documents, and one epoch: the paper has 500,000 pairs of Wikipedia
and 359,000 of code, some 1,950 and 1,400 steps.
Differs from ANCE: training waits while negatives are mined, and the optimiser goes on from round to
round (--restart-optimizer).

Read next: base.py, training/negatives.py (mined hard negatives), generated_queries.py and
ranking/queries.py (queries), text/judgements.py (judged pairs); docs/papers.md has every equation
and setting in the order of the paper.

Cost: the retriever reads both sides; no LM.
Memory: texts are embedded a few at a time with --retriever-batch (GradCache), so time limits a
batch, not memory.
When to use it: pairs on docstrings and titles for code, or with judged queries; crops as a
baseline.
Measured: eight minutes of one core from a fitted start take CosQA from 0.364 to 0.409 and 0.399
by contrastive-pairs (two seeds), to 0.383 by contrastive-crop; SciFact falls from 0.583 to 0.569
and 0.580.

Shapes: Q queries, B passages, D width of a vector.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.ranking.queries import query_hash
from revela.terminal import counted
from revela.text.sentences import sentences
from revela.text.words import joined, words
from revela.training.device import Tensors
from revela.training.methods.base import (
    BuildContext,
    Collate,
    Method,
    RetrieverLoss,
    Row,
    group_weights,
    row_random,
)
from revela.training.settings import (
    NO_FIT,
    Context,
    PositiveFloat,
    Preset,
    Rare,
    Retriever,
    Share,
    checked,
)

MIN_WORDS = 3  # of a crop


def as_list(given: Any) -> Any:
    """A path alone as a list."""
    return [given] * bool(given) if isinstance(given, str) else given


Paths = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(as_list)]

PRESETS: dict[str, Preset] = {
    # What authors wrote for their readers: docstrings find their functions, titles their texts,
    # else a telling sentence the rest of its chunk, among those of 31 other documents.
    "contrastive-pairs": {"method": "contrastive-pairs"}
    | {"group_size": 32, "groups": "document-random", "queries": "authors-words"},
    # Two random crops of each text, among those of the other documents.
    "contrastive-crop": {"method": "contrastive-crop"}
    | {"group_size": 32, "groups": "document-random"},
    # Revela's comparison with Contriever on the same text.
    "contrastive-contriever": {"method": "contrastive-crop", "groups": "document-random"}
    | {"tau": 0.01, "inverse_cloze": 0.5, "crop_shares": [0.05, 0.5], "crop_deletion": 0.1}
    | {"offline_model": "", "layers": 0, "pooling": "eos", "lower_case": "no", "max_tokens": 2048}
    | {"lm_tokens": 320}  # of a whole window
    | {"lora_rank": 256, "lora_alpha": 64, "lora_dropout": 0.1}
    | NO_FIT
    | {"learning_rate": 1e-4, "warmup_steps": 100, "groups_per_step": 16, "groups_per_batch": 1}
    | {"max_epochs": 1, "max_minutes": 0.0, "keep": "last"},
}


@checked
class Contrastive(Method):
    """Settings of the contrastive methods."""

    can_share = True

    tau: PositiveFloat = 0.05
    "Temperature of the cosines."

    def loss(self, parts: BuildContext) -> ContrastiveLoss:
        """The loss, which compares all texts of a batch."""
        batch = parts.training.retriever_batch
        return ContrastiveLoss(parts.model, tau=self.tau, retriever_batch=batch)


@checked
class Pairs(Contrastive):
    """Learn to find the chunk that a query was made for."""

    name = "contrastive-pairs"
    reads = "queries"
    learned_from = (
        "{model} learned to find the text that a query was made for among others"
        " (queries: {queries})."
    )

    pairs: Paths = ()
    """Folder in BEIR layout (queries.jsonl, qrels/train.tsv): each judged query is paired with a
    whole document that answers it. Several folders: one for each corpus, in the same order; no
    group mixes two of them. prompts.json in a folder has prefixes of its queries and passages
    ({"query": "...", "passage": "..."}), which follow --query-prompt and --passage-prompt. Empty:
    --queries."""
    negatives: int = Field(default=0, ge=0, le=200)
    """Hard negatives per query, in addition to the passages of its group: drawn from the 200 best
    documents that do not answer it, found by BM25 at first and then by the retriever. 0: none."""
    negatives_from: Rare[Paths] = ()
    """TREC run of another system, which takes the place of BM25: for each folder of --pairs, a
    ranking of its documents for its queries. Empty: BM25."""

    def refuse(self, retriever: Retriever, context: Context) -> None:
        runs = self.negatives_from
        if runs and not (self.negatives and len(runs) == len(self.pairs)):
            raise RevelaError(
                "--negatives-from needs --negatives, and one run for each folder of --pairs "
                f"(got {counted(len(runs), 'run')} for {counted(len(self.pairs), 'folder')})"
            )
        if absent := next((run for run in runs if not Path(run).is_file()), None):
            raise RevelaError(f"--negatives-from {absent} does not exist: give a TREC run")

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        return self.loss(parts), QueryBatches(parts)


@checked
class Crops(Contrastive):
    """Learn to find another crop of the same text."""

    name = "contrastive-crop"
    reads = "windows"
    across_groups = True
    learned_from = "{model} learned to find another crop of the same text among crops of others."

    crop_window: int = Field(default=240, ge=2)
    "Maximum words of a document that two crops are taken from."
    crop_shares: Rare[Annotated[tuple[Share, Share], Field(strict=False)]] = (0.1, 0.5)
    "Shortest and longest crop, as a share of these words."
    crop_deletion: Rare[Share] = 0.0
    "Probability of each word of a crop to be deleted."
    inverse_cloze: Rare[Share] = 0.0
    "Share of the texts of which a sentence finds the rest of the text, instead of two crops."

    def refuse(self, retriever: Retriever, context: Context) -> None:
        if self.crop_shares[0] > self.crop_shares[1]:
            raise RevelaError("--crop-shares has the larger one first: give the smaller one first")

    def window_words(self, lm_tokens: int) -> int:
        return self.crop_window

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        return self.loss(parts), CropBatches(parts, self)


@dataclass(frozen=True)
class QueryBatches:
    """Collates queries and passages: those of the groups, then the mined ones. A query has the
    index of its passage, and a mask of allowed passages.
    """

    parts: BuildContext

    def __call__(self, rows: Sequence[Row]) -> Tensors:
        size = self.parts.groups.group_size
        mined = list(self._mined(rows, size))
        passages = [*rows, *(row for _, row in mined)]
        has_query = [i for i, row in enumerate(rows) if row["query"]]
        prompts = [self.parts.prompts(row["document"]) for row in passages]
        queries = [prompts[i].query + rows[i]["query"] for i in has_query]
        texts = [p.passage + row["text"] for p, row in zip(prompts, passages, strict=True)]
        batch = self.sides(queries, texts)
        target_Q = torch.tensor(has_query)
        weight_Q = group_weights([i // size for i in has_query])
        group_B = [*(i // size for i in range(len(rows))), *(group for group, _ in mined)]
        hash_B = torch.tensor([query_hash(row["query"]) for row in passages])
        allowed_QB = comparison_mask(target_Q, torch.tensor(group_B), hash_B)
        if self.parts.relevant:
            allowed_QB &= ~self._answers(hash_B[has_query], passages).scatter(
                1, target_Q[:, None], False
            )
        own = {"target": target_Q, "weight": weight_Q, "allowed": allowed_QB}
        return {**batch, **{f"query_{name}": tensor for name, tensor in own.items()}}

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Tensors:
        """Tokenized queries and passages."""
        return self.parts.sides(queries, passages)

    def _mined(self, rows: Sequence[Row], size: int) -> Iterator[tuple[int, Row]]:
        """(group, row) of the mined negatives of each group, each text once per group."""
        if self.parts.mined is None:
            return
        mined = self.parts.mined(rows)
        for start in range(0, len(rows), size):
            seen = {row["text"] for row in rows[start : start + size]}
            for index in chain.from_iterable(mined[start : start + size]):
                chunk = self.parts.rows[index]
                if chunk.text not in seen:
                    seen.add(chunk.text)
                    row = {"document": chunk.document, "text": chunk.text, "query": chunk.query}
                    yield start // size, row

    def _answers(self, hash_Q: Tensor, passages: Sequence[Row]) -> Tensor:
        """(Q, B) whether a passage is of a document that is relevant to a query."""
        relevant = [self.parts.relevant.get(query, ()) for query in hash_Q.tolist()]
        return torch.tensor([[row["document"] in ids for row in passages] for ids in relevant])


@dataclass(frozen=True)
class CropBatches:
    """Collates two independent crops of each text, drawn by row and epoch."""

    parts: BuildContext
    settings: Crops

    def __call__(self, rows: Sequence[Row]) -> Tensors:
        first, second = zip(*map(self._crops, rows), strict=True)
        return {**self.parts.sides(first, second), "query_target": torch.arange(len(rows))}

    def _crops(self, row: Row) -> tuple[str, str]:
        rng, s = row_random(row, self.parts.training.seed), self.settings
        if s.inverse_cloze and rng.random() < s.inverse_cloze:
            parts = sentences(row["text"])
            if len(parts) > 1:  # a single part has no rest
                query = parts.pop(rng.randrange(len(parts)))
                return joined([query]), joined(parts)
        first, second = (crop(row["text"], *s.crop_shares, s.crop_deletion, rng) for _ in range(2))
        return first, second


def crop(text: str, low: float, high: float, deletion: float, rng: random.Random) -> str:
    """A random run of a text's words, some of them deleted.

    Args:
        text: cut into words by text/words.py.
        low, high: the run's share of the words is uniform between these, but at least
            ``MIN_WORDS`` words.
        deletion: probability of each word to be deleted.
    """
    all_words = words(text)
    total = len(all_words)
    length = min(total, max(MIN_WORDS, round(rng.uniform(low, high) * total)))
    start = rng.randint(0, total - length)
    run = all_words[start : start + length]
    return joined([word for word in run if rng.random() >= deletion] or run)


def info_nce(
    query_QD: Tensor,
    passage_BD: Tensor,
    target_Q: Tensor,
    tau: float | Tensor,
    allowed_QB: Tensor | None = None,
    weight_Q: Tensor | None = None,
    logged: dict[str, Callable[[], Tensor]] | None = None,
) -> Tensor:
    """L in nats, over the ``allowed_QB`` passages or all. ``weight_Q`` is each query's share in the
    mean; None: all are equal. ``logged`` gets the accuracy (see RetrieverLoss).
    """
    scores_QB = query_QD @ passage_BD.T / tau
    if allowed_QB is not None:
        scores_QB = scores_QB.masked_fill(~allowed_QB, -torch.inf)
    if logged is not None:
        logged["accuracy"] = partial(accuracy, scores_QB.detach(), target_Q)
    if weight_Q is None:
        return F.cross_entropy(scores_QB, target_Q)
    return F.cross_entropy(scores_QB, target_Q, reduction="none") @ weight_Q


def accuracy(scores_QB: Tensor, target_Q: Tensor) -> Tensor:
    """The share of queries that score their own passage highest."""
    return (scores_QB.argmax(dim=1) == target_Q).float().mean()


def comparison_mask(target_Q: Tensor, group_B: Tensor, hash_B: Tensor) -> Tensor:
    """(Q, B) allowed passages: a query's own, and those of its group with another query or none.

    ``hash_B`` identifies the query of each passage.
    """
    own_Q1 = target_Q[:, None]
    return ((group_B[own_Q1] == group_B) & (hash_B[own_Q1] != hash_B)).scatter(1, own_Q1, True)


class ContrastiveLoss(RetrieverLoss):
    """The loss of a batch of pairs; arguments as for RetrieverLoss."""

    def forward(self, features: Sequence[dict[str, Any]]) -> Tensor:
        """Loss in nats per query.

        Args:
            features: queries, with ``target``, the index of each query's passage, and passages.
                Optional: ``allowed``, a (Q, B) mask of the passages that the softmax is over, by
                default all; ``weight``, each query's share in the mean. Of a batch that processes
                share, each has its texts and all of these.
        """
        query, passage = {**features[0]}, features[1]
        target_Q, allowed_QB = query.pop("target"), query.pop("allowed", None)
        weight_Q = query.pop("weight", None)
        query_QD, passage_BD = self.embed(query), self.embed(passage)
        masked = self.tau, allowed_QB, weight_Q
        return info_nce(query_QD, passage_BD, target_Q, *masked, self.logged)
