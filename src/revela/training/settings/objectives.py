"""The settings of each objective.

Losses and batches are in ``revela.training.methods``, which imports torch and is imported only when
an objective is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from revela.errors import RevelaError
from revela.training.settings.sections import CHECKED, Context, PositiveFloat, Rare, Retriever

Reads = Literal["chunks", "queries", "windows"]


@dataclass(frozen=True, config=CHECKED)
class Objective:
    """Settings of an objective, and facts about it that the rest of the package needs.

    To add an objective, subclass this with its settings, and write ``build`` (docs/train.md). Pass
    an instance to ``Recipe(objective=...)`` or ``Retriever.train(objective=...)``.
    """

    name: ClassVar[str] = ""
    module: ClassVar[str] = ""
    "Module of ``revela.training.methods`` that has ``build``."
    reads: ClassVar[Reads] = "chunks"
    "Rows of a group: chunks; chunks with queries; or windows, which are joined chunks."
    learned_from: ClassVar[str] = "{model} was trained by an objective of its own."
    "A sentence for the model card, with settings of the recipe in braces."
    reads_lm: ClassVar[bool] = False
    "Whether it uses the recipe's LM (--lm), with the attention of ``lm/``."
    across_groups: ClassVar[bool] = False
    """Whether it compares texts of all groups of a batch. Several processes then share each batch
    and gather its vectors."""

    def build(self, parts: Any) -> tuple[Any, Callable[[Sequence[Mapping[str, Any]]], Any]]:
        """The loss and its collator.

        Args:
            parts: a ``methods.base.BuildContext``: recipe, retriever, rows of the corpus.

        Returns:
            A module from the sides of a batch (a dict of tensors each) to a scalar loss; and a
            function from rows ({"text", "query", "document"}) to tensors by name, SIDE_NAME.
        """
        if not self.module:
            raise NotImplementedError(f"{type(self).__name__} has no build(): write it")
        code = import_module(f"revela.training.methods.{self.module}")
        made: tuple[Any, Any] = code.build(self, parts)
        return made

    def refuse(self, retriever: Retriever, context: Context) -> None:
        """Raise RevelaError for a setting that the objective cannot use; called before a corpus is
        read.
        """

    def window_words(self, lm_tokens: int) -> int:
        """Maximum words of a row, for an objective that reads windows."""
        raise NotImplementedError(f"{type(self).__name__} has no window_words(): write it")

    def save(self, loss: Any, folder: Path) -> None:
        """Save other trained modules than the retriever; by default there are none.

        Args:
            loss: the module from ``build``.
            folder: the run's folder.
        """


@dataclass(frozen=True, config=CHECKED)
class DocumentAttention(Objective):
    """Settings of attention to other texts in some heads of an LM."""

    reads_lm = True

    heads: Rare[str] = ""
    """JSON file of the heads to use, from revela heads --out with the same --objective. Empty: find
    them."""
    kernel: Rare[Literal["auto", "torch", "varlen"]] = "auto"
    """What computes document attention: torch anywhere; varlen (flash attention) on a GPU in bf16.
    auto: varlen where it runs, else torch."""


@dataclass(frozen=True, config=CHECKED)
class ChunkQueries(Objective):
    """Settings of queries that are made of the chunks themselves."""

    query_side: Rare[Literal["first-half", "random-span", "whole"]] = "first-half"
    "Part of a chunk that is its query; random-span: half of its tokens, from a random place on."


@dataclass(frozen=True, config=CHECKED)
class InBatch(DocumentAttention, ChunkQueries):
    """Settings of in-batch attention, for the objectives that use it."""

    tau: PositiveFloat = 1.0
    "Softmax temperature: of z-scored cosines with --mix gated, of raw cosines with --mix sum."
    gate: float = Field(default=0.5, gt=0, le=1)
    "The gate g: share of the other chunks in the attention output of the gated heads."
    gate_heads: NonNegativeInt = 24
    "Gate this many heads, the best of the label-free probe. 0: all."
    gate_first_layer: ClassVar[float] = 0.6
    "Lowest layer with a gate, as a share of the LM's depth; below it the LM runs once."


@dataclass(frozen=True, config=CHECKED)
class Revela(InBatch):
    """Learn from an LM's next-token loss with in-batch attention."""

    name = module = "revela"
    learned_from = (
        "The next-token prediction of {lm} told {model} which text helps to predict which."
    )

    mix: Rare[Literal["gated", "sum"]] = "gated"
    """How the in-batch output joins the LM's own attention: (1-g) s + g b, with cosines divided by
    their standard deviation; or the paper's s + b, V-normalised, with bf16 cosines as they are."""
    lm_lora: Rare[bool] = False
    "Train the LM too, by LoRA of the retriever's rank; otherwise it is frozen."

    def refuse(self, retriever: Retriever, context: Context) -> None:
        if self.lm_lora and not retriever.lora_rank:
            raise RevelaError(
                "--lm-lora puts LoRA of the retriever's rank on the LM: give --lora-rank 1 or more"
            )


@dataclass(frozen=True, config=CHECKED)
class Gains(InBatch):
    """Learn the ranking of chunks by how much they help an LM, at equal weights."""

    name = module = "gains"
    learned_from = "{model} learned to rank texts by how much each helps {lm} to predict another."

    tau: PositiveFloat = 0.05
    "Temperature of the cosines."

    def refuse(self, retriever: Retriever, context: Context) -> None:
        if not retriever.lora_rank:
            raise RevelaError(
                "--objective gains compares with the retriever before training, which "
                "--lora-rank 0 does not keep: give a rank of 1 or more"
            )


@dataclass(frozen=True, config=CHECKED)
class Dream(DocumentAttention):
    """Learn from an LM's loss on answers, with scores injected into query-focused heads."""

    name = module = "dream"
    reads = "queries"
    learned_from = "{lm}, which answers questions by what {model} finds, told it what to find."

    tau: PositiveFloat = 0.2
    "Initial temperature of the cosines; it is trained."
    gate: float = Field(default=0.5, gt=0, lt=1)
    "Initial gate g: share of the retriever in the attention of the heads; it is trained."
    query_heads: PositiveInt = 16
    "Use this many heads: the best that look from a question to its answer."


@dataclass(frozen=True, config=CHECKED)
class Replug(ChunkQueries):
    """Learn the ranking of chunks by the likelihood of another chunk after each."""

    name = module = "replug"
    reads_lm = True
    learned_from = "{model} learned to rank texts by how likely {lm} finds another text after each."

    tau: PositiveFloat = 1e-3
    "Temperature of the cosines."
    tau_lm: ClassVar[float] = 1e-3
    "Temperature of the LM's mean log-likelihoods."


@dataclass(frozen=True, config=CHECKED)
class Contrastive(Objective):
    """Settings of the objectives that tell a text from others."""

    module = "contrastive"

    tau: PositiveFloat = 0.05
    "Temperature of the cosines."


@dataclass(frozen=True, config=CHECKED)
class InfoNCE(Contrastive):
    """Learn to find the chunk that a query was made for."""

    name = "infonce"
    reads = "queries"
    learned_from = (
        "{model} learned to tell the text that a query was made for from others"
        " (queries: {queries})."
    )

    pairs: str = ""
    """Folder in BEIR layout (queries.jsonl, qrels/train.tsv) whose judged queries are learned from,
    each beside a whole document that answers it. Empty: --queries."""
    negatives: int = Field(default=0, ge=0, le=200)
    """Hard negatives per query, mined for it beside the passages of its group: drawn from the 200
    best that do not answer it, of BM25 at first and then of the retriever. 0: none."""
    mined_from: ClassVar[int] = 200


@dataclass(frozen=True, config=CHECKED)
class Crop(Contrastive):
    """Learn to find another crop of the same text."""

    name = "crop"
    reads = "windows"
    across_groups = True
    learned_from = "{model} learned to tell another crop of the same text from crops of others."

    crop_window: int = Field(default=240, ge=2)
    "Maximum words of a document that two crops, of a tenth to a half of them, are taken from."

    crop_shares: ClassVar[tuple[float, float]] = (0.1, 0.5)
    "Shortest and longest crop, as a share of the text's words."
    crop_deletion: ClassVar[float] = 0.0  # probability of each word

    def window_words(self, lm_tokens: int) -> int:
        return self.crop_window


@dataclass(frozen=True, config=CHECKED)
class Spans(Objective):
    """Learn to write the spans that are hidden from an encoder-decoder (T5)."""

    name = module = "spans"
    reads = "windows"
    learned_from = (
        "{model}, the encoder of an encoder-decoder, learned to say what is hidden in a text."
    )
    span_share: ClassVar[float] = 0.15  # of the tokens
    span_length: ClassVar[float] = 3.0  # mean tokens of a span

    def refuse(self, retriever: Retriever, context: Context) -> None:
        if retriever.lora_rank:
            raise RevelaError("--objective spans trains all weights: give --lora-rank 0")
        compared = {"--context": context.context, "--matryoshka": retriever.matryoshka}
        for flag, given in compared.items():
            if given:
                raise RevelaError(
                    f"{flag} has no effect on --objective spans, which compares no vectors: "
                    "leave it out, and give it to the stage after"
                )

    def window_words(self, lm_tokens: int) -> int:
        # A word has at least one token, so a row has enough for SpanBatches to take a run of them.
        return lm_tokens

    def save(self, loss: Any, folder: Path) -> None:
        import_module("revela.training.methods.spans").save(loss, folder)


OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (Revela, Gains, Dream, Replug, InfoNCE, Crop, Spans)
}


def objective_class(name: str) -> type[Objective]:
    """The settings class of an objective, by name; RevelaError if there is none."""
    if name not in OBJECTIVES:
        raise RevelaError(f"--objective {name}: give one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
