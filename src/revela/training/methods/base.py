"""What methods share: their settings and facts, what they are built from, batches of chunks, and
cosines per group.

A method is one file: its settings (a frozen dataclass, ``Method``), its batches, its loss, and
``build``, which makes the last two. docs/write-a-method.md shows how to write one.

GradCache (Gao et al., 2021) computes a step's backward pass in parts, with the same gradient:
- ``embed_in_parts`` runs the retriever on a few texts at a time without storing activations. The
  backward pass runs it again.
- ``detached_backward`` computes the gradient of a loss with respect to a few small tensors at once.
  This frees the graph of the loss before the backward pass through what made those tensors. With
  both, memory is the larger of the two graphs instead of their sum.

Shapes: N texts of a batch, n of one of its groups, D width of a vector.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revela.encoders.prompts import Prompts
from revela.text.spool import ArrowList
from revela.training import distributed
from revela.training.device import Tensors
from revela.training.generated_queries import GeneratedQueries
from revela.training.lm.language_model import load_language_model
from revela.training.models import find_weights, load_tokenizer
from revela.training.settings import (
    LM,
    Context,
    Groups,
    Queries,
    Rare,
    Reads,
    Retriever,
    Training,
    checked,
)
from revela.types import Chunk, Document

if TYPE_CHECKING:
    from revela.training.retriever.context import ContextEncoder

Row = Mapping[str, Any]
Collate = Callable[[Sequence[Row]], Tensors]
Heads = list[tuple[int, int]]
"""(layer, head) pairs, best first."""


@checked
class Method:
    """Settings of a method, and facts about it that the rest of the package needs.

    To add a method, subclass this with its settings, and write ``build``
    (docs/write-a-method.md). Name it as ``--method FILE.py:Class``, or pass an instance to
    ``Recipe(method=...)`` or ``revela.train(method=...)``.
    """

    name: ClassVar[str] = ""
    file: ClassVar[str] = ""
    "FILE.py:Class, if --method named the class so."
    reads: ClassVar[Reads] = "chunks"
    "Rows of a group: chunks; chunks with queries; or windows, which are joined chunks."
    learned_from: ClassVar[str] = "{model} was trained by a custom method."
    "A sentence for the model card, with settings of the recipe in braces."
    reads_lm: ClassVar[bool] = False
    "Whether it uses the recipe's LM (--lm), with the attention of ``lm/``."
    kind_of_heads: ClassVar[str] = "siblings"
    "The ranking of the LM's heads that it reads (``heads.KINDS``), if any."
    across_groups: ClassVar[bool] = False
    "Whether it compares texts of all groups of a batch; several processes then share each batch."
    can_share: ClassVar[bool] = False
    """Whether processes may share a batch, each embedding a part of its texts. Then the batch has
    all texts by ``parts.sides``, and the loss has all vectors by ``RetrieverLoss.embed``."""

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        """The loss and its collator.

        Returns:
            A module from the sides of a batch (a dict of tensors each, in the order of their first
            tensor) to a scalar loss; and a function from rows ("text", "query", which may be "",
            "document", "row", "epoch") to tensors by name, SIDE_NAME. It counts the tokens that
            the retriever reads by ``parts.count``, as ``parts.sides`` does.
        """
        raise NotImplementedError

    def refuse(self, retriever: Retriever, context: Context) -> None:
        """Raise RevelaError for a setting that the method cannot use; called before a corpus is
        read.
        """

    def shares_batches(self, training: Training) -> bool:
        """Whether all processes share each batch. They do if it is compared as a whole, or if whole
        batches cannot be dealt out evenly, as when one large group is a step.
        """
        if self.across_groups or not self.can_share:
            return self.across_groups
        whole = distributed.world_size() * training.fixed_groups_per_batch
        return training.groups_per_step % whole > 0

    def model_of_batches(self, groups: Groups) -> str:
        """The name of the model that makes the batches; "" if there is none."""
        return ""

    def lm_length(self, size: int, tokens: int) -> int:
        """Maximum tokens that the LM reads in sequence, for groups of ``size`` texts, each of at
        most ``tokens`` tokens.
        """
        return tokens

    def window_words(self, lm_tokens: int) -> int:
        """Maximum words of a row, for a method that reads windows."""
        raise NotImplementedError

    def save(self, loss: nn.Module, folder: Path) -> None:
        """Save trained modules other than the retriever; by default there are none.

        Args:
            loss: the module from ``build``.
            folder: the run's folder.
        """


@checked
class DocumentAttention(Method):
    """Settings of attention to other texts in some heads of an LM."""

    reads_lm = True

    heads: Rare[str] = ""
    """JSON file of the heads to use, from revela heads --out with the same --method. Empty: find
    them."""
    kernel: Rare[Literal["auto", "torch", "varlen"]] = "auto"
    """What computes document attention: torch anywhere; varlen (flash attention) on a GPU in bf16.
    auto: varlen where it runs, else torch."""


@dataclass(frozen=True)
class BuildContext:
    """What a method is built from: the sections of the recipe that it reads, the retriever and the
    rows.
    """

    groups: Groups
    queries: Queries
    retriever: Retriever
    context: Context
    lm: LM
    training: Training
    model: Any
    "The retriever, a ``RetrieverModule``."
    documents: Sequence[Document]
    rows: ArrowList[Chunk]
    "Rows that groups consist of; without queries if ``written`` has them."
    bf16: bool
    count: Callable[[int], None] = lambda tokens: None
    "Called with the number of tokens that the retriever reads, for each side of a batch."
    context_encoder: ContextEncoder | None = None
    "Only for a retriever that reads a context."
    corpora: Sequence[int] = ()
    "First document of each corpus but the first; documents are numbered across corpora."
    relevant: Mapping[int, Collection[int]] = field(default_factory=dict)
    "Documents that answer a judged query, by the query's hash."
    mined: Callable[[Sequence[Row]], Sequence[Sequence[int]]] | None = None
    "Rows of a batch -> mined negatives of each, as row indices."
    folder: Path = Path()
    "Where the retriever was loaded from."
    written: GeneratedQueries | None = None
    "Queries that a language model writes during training."
    heads: Callable[[Callable[[], Heads]], Heads] = lambda find: find()
    "Returns the LM's heads for the run: those of ``find``, or those that a resumed run began with."
    prompts: Callable[[int], Prompts] = lambda document: Prompts()
    "Document -> prompts of its domain, which follow the retriever's own."
    is_shared: bool = False
    "Whether all processes share each batch."

    @property
    def device(self) -> torch.device:
        """The device of the retriever."""
        return torch.device(next(self.model.parameters()).device)

    @property
    def batching(self) -> dict[str, int]:
        """``group_size`` and ``retriever_batch`` of RetrieverLoss."""
        size, batch = self.groups.group_size, self.training.retriever_batch
        return {"group_size": size, "retriever_batch": batch}

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Tensors:
        """Tokenized queries and passages: query_input_ids, passage_input_ids and so on."""
        return {**self.side("query", queries), **self.side("passage", passages)}

    def side(self, name: str, texts: Sequence[str], model: Any = None) -> Tensors:
        """One side of a batch, tokenized by the retriever or ``model``; passages unless its name is
        query. If processes share the batch, only this process's texts, and NAME_of, which has a row
        for each text of all.
        """
        mine = texts[self.share(len(texts))]
        features = (model or self.model).tokenize(mine, "query" if name == "query" else "passage")
        if "prompt_length" in features:  # for a pooling that leaves the prompt out
            features["prompt_length"] = torch.full((len(mine),), features["prompt_length"])
        self.count(int(features["attention_mask"].sum()))
        tensors = {k: v for k, v in features.items() if isinstance(v, Tensor)}
        if len(mine) < len(texts):
            tensors["of"] = torch.empty(len(texts), 0)
        return {f"{name}_{k}": v for k, v in tensors.items()}

    def share(self, length: int) -> slice:
        """This process's share of a side's texts; all of them if there are more processes."""
        is_shared = self.is_shared and length >= distributed.world_size()
        return distributed.my_share(length) if is_shared else slice(length)


class RetrieverLoss(nn.Module):
    """Base class of losses: embeds texts, and compares those of a group by cosine.

    Args:
        model: the retriever; gives unit vectors of tokenized texts.
        tau: temperature of the cosines.
        group_size: texts per group; a batch has one or more groups. 0: a batch is one group.
        retriever_batch: texts per forward pass; see ``embed_in_parts``.

    Attributes:
        logged: functions that give numbers of the last batch, by name, for metrics.jsonl and
            trackers; they are called for a logged step only, and give scalars without a gradient.
    """

    def __init__(
        self, model: nn.Module, *, tau: float, group_size: int = 0, retriever_batch: int = 0
    ) -> None:
        super().__init__()
        self.model, self.tau, self.logged = model, tau, dict[str, Callable[[], Tensor]]()
        self.group_size, self.retriever_batch = group_size, retriever_batch

    def embed(self, side: Tensors) -> Tensor:
        """(N, D) unit vectors of tokenized texts, of all processes if they share the batch."""
        return embed_in_parts(self.model, side, self.retriever_batch)

    def groups(self, rows_N: Tensor) -> tuple[Tensor, ...]:
        """The rows of a batch, split by group."""
        return torch.split(rows_N, self.group_size or len(rows_N))

    def cosines(self, query: Tensors, passage: Tensors) -> list[Tensor]:
        """(n, n) cosines of each group: queries in rows, passages in columns."""
        sides = self.groups(self.embed(query)), self.groups(self.embed(passage))
        return [query_nD @ passage_nD.T for query_nD, passage_nD in zip(*sides, strict=True)]


def embed_in_parts(vectors: Callable[[Tensors], Tensor], features: Tensors, batch: int) -> Tensor:
    """(N, D) vectors of tokenized texts.

    Args:
        vectors: embeds a part of the texts.
        features: of N texts, or of this process's share of N, with ``of`` (``BuildContext.side``).
        batch: texts per forward pass; the backward pass repeats it with the same dropout. 0: all at
            once, without repetition.
    """
    features = {**features}
    of = features.pop("of", None)
    if of is not None:
        return distributed.gather_shares(embed_in_parts(vectors, features, batch), len(of))
    if not batch or not torch.is_grad_enabled():
        return vectors(features)
    parts = []
    for i in range(0, len(features["input_ids"]), batch):
        rows = slice(i, i + batch)
        part = {name: tensor[rows] for name, tensor in features.items()}
        parts.append(checkpoint(vectors, part, use_reentrant=False))
    return torch.cat(parts)


def detached_backward(loss_of: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``loss_of(*inputs)``, a scalar, with the same gradient but its graph already freed.

    The result is linear in the inputs: loss + sum_i g_i (x_i - detached x_i), where g_i = d loss /
    d x_i. ``loss_of`` must depend on no other trained tensor. It need not use all inputs.
    """
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    loss = loss_of(*leaves)
    trained = [pair for pair in zip(inputs, leaves, strict=True) if pair[1].requires_grad]
    if not trained or not loss.requires_grad:
        return loss.detach()
    gradients = torch.autograd.grad(loss, [leaf for _, leaf in trained], allow_unused=True)
    pairs = zip((t for t, _ in trained), gradients, strict=True)
    linear = torch.stack([(t * g).sum() for t, g in pairs if g is not None]).sum()
    return loss.detach() + linear - linear.detach()


def group_weights(group_N: Sequence[int], counts: Sequence[int] | None = None) -> Tensor:
    """The weight of each item in a mean over groups of the mean within each, (N,).

    Groups weigh the same, whether in one batch or in several.

    Args:
        group_N: the group of each item.
        counts: how many equal parts each item is a sum of; default: one.
    """
    parts: dict[int, int] = {}
    for group, count in zip(group_N, counts or [1] * len(group_N), strict=True):
        parts[group] = parts.get(group, 0) + count
    return torch.tensor([1 / (len(parts) * parts[group]) for group in group_N])


def off_diagonal(scores_nn: Tensor) -> Tensor:
    """(n, n - 1) rows without the diagonal. (A boolean mask would synchronise with a GPU.)"""
    size = len(scores_nn)
    rows = scores_nn.flatten()[1:].view(size - 1, size + 1)[:, :-1]
    return rows.reshape(size, size - 1)


def load_lm(parts: BuildContext, trained: bool = False) -> tuple[Any, Any, Path]:
    """The recipe's LM on the device, its tokenizer and its folder.

    The LM is frozen, or has LoRA of the retriever's rank if ``trained``.
    """
    settings, retriever = parts.lm, parts.retriever
    folder = find_weights(settings.lm, retriever.offline_model)
    lora = (retriever.lora_rank, retriever.lora_alpha, retriever.lora_dropout) if trained else None
    lm = load_language_model(folder, bf16=parts.bf16, lora=lora, name=settings.lm)
    return lm.to(parts.device), load_tokenizer(folder), folder


def tokenize(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> Mapping[str, Tensor]:
    """``input_ids`` and ``attention_mask`` for the LM, padded on the right."""
    form = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
    tokens: Mapping[str, Tensor] = tokenizer(texts, truncation=True, max_length=max_tokens, **form)
    return tokens


def row_random(row: Row, seed: int) -> random.Random:
    """Random numbers of a row in an epoch, the same in any batch."""
    return random.Random(f"{seed}/{row['epoch']}/{row['row']}")
