"""Revela (Cai et al., ICLR 2026; arXiv 2506.16552): a retriever learns from an LM's next-token loss
which chunks help to predict which.

    Sim_ij = softmax_{j != i}( cos(q_i, p_j) / tau )             (section 3)
    b_ij   = softmax_m( Q_i K_j^T / sqrt(D) ) V_j, V-normalised  (eqs. 5, 6)
    b_i    = sum_j Sim_ij b_ij                                   (eq. 7)
    h_i    = s_i + b_i                --mix sum                  (eq. 8)
    h_i    = (1 - g) s_i + g b_i      --mix gated                (ours)
    L      = mean over groups of the mean over tokens of
             -log p(token | those before it, the other chunks)

- q_i, p_j: the retriever's vectors of chunk i as query and chunk j as passage, in one group.
- Q_i: the LM's attention queries of chunk i in this reading; K_j, V_j: keys and values of chunk j,
  from a plain reading of j; m: the tokens of j.
- s_i: the LM's own attention output within chunk i.
- h_i: the mixed output, from which the LM predicts chunk i. The sum is in all heads of an LM that
  is trained too, by LoRA. The gates g are in some heads of a frozen LM.

A chunk that helps lowers the loss, so its weight grows. The gated form gives a frozen LM a signal
from the first step. Its gates are on the heads that look to a related document, found without
labels:

    score = d loss(others) / d g - d loss(siblings) / d g        (ours)

The derivative is by the gate of one head, at 0.1 in every head. loss(siblings) has equal weights on
the other chunks of a chunk's document, loss(others) on the chunks of other documents. A head with a
high score helps to predict a chunk from its document, and not from others.

Differs from the paper, and the setting of the preset revela-paper that makes it equal:
- Gates on a frozen LM, Sim of cosines divided by their standard deviation, in fp32: --mix sum,
  which also takes bf16 cosines, as the authors' code does, and V-normalises b (in
  revela-paper-code not, as in the later version: --v-norm off); --lm-lora.
- SmolLM2-135M as LM: --lm meta-llama/Llama-3.2-1B.
- tau is 1: --tau 1e-4.
- Six lower layers with a fit and mean pooling: --layers 0, --pooling eos, --token-weighting 0,
  --whitening 0, --lexical 0, --lower-case no, --max-tokens 2048.
- LoRA of rank 64: --lora-rank 256, --lora-dropout 0.1 (alpha 64 is the code's, the paper has none).
- Chunks of 48 words: --chunk-words 120 (16 a group in both; the LM reads 156 tokens of each, as in
  the authors' code). Groups of one document and similar ones: --groups document-random, runs of
  contiguous chunks of any documents, one or two if each has half a group of chunks.
- One group a step, 10 steps of warm-up, 20 minutes: --groups-per-step 32, --warmup-steps 100,
  --max-steps 10000 (one epoch of Wikipedia; 11,000 for code), --max-minutes 0.
- The best state by a label-free check is kept: --keep last.

Differs still, in revela-paper too:
- SmolLM2-135M as retriever, the smallest of the paper's table 1: --model.
- The text is the user's, 5 % of it held out, near-duplicates dropped: revela groups
  hub:trumancai/revela_training_corpus, --held-out 0, --near-duplicates 0.
- For code the query is the whole chunk: revela-paper-code, or --query-side whole. The authors'
  code takes whole chunks of StackOverflow only: --whole-query-sources stackoverflow.
- Chunks of a group are contiguous, as in section 5.2; section 4.1 prints them interleaved over n
  passages: --groups interleaved, --interleaved-passages n.
- The trained LM is not saved: --save-lm.
- Prompts are "query: " and "passage: ", as in the authors' code: --query-prompt, --passage-prompt.
- The query is half of the chunk's own tokens; the authors' code counts BOS and prefix in the half,
  some three tokens. No setting: the paper says half of the chunk.
- Chunks are packed, not padded. No setting: padding changes no result.
- 32 groups are added up over passes: torchrun on stored groups spreads them over GPUs.
- The warm-up is linear; that of the authors' DeepSpeed is logarithmic. No setting: 100 steps of
  10,000.

Read next: lm/document_attention.py (eqs. 5 to 8), lm/language_model.py (the two readings),
groups/strategies.py (groups), base.py (what methods share), heads.py (cache of rankings);
docs/papers.md has every equation and setting in the order of the paper.

Cost: the LM reads each chunk once below the first gated layer and twice above it; with --mix sum
twice everywhere, forward and backward.
Memory: only d L / d Sim (B x B numbers) leaves a frozen LM, and is computed at once. With
--retriever-batch memory is the larger of the LM's graph and the retriever's, else their sum, as
with --mix sum, where the LM's graph is that of both readings.
When to use it: to adapt a retriever to prose without any queries.
Measured: eight minutes of one core from a fitted start take SciFact from 0.583 to 0.592 and CosQA
from 0.364 to 0.365 (one seed of two; no gain that holds). From raw weights 150 steps take a subset
of SciFact from 0.03 to 0.49.

Shapes: B chunks of a batch, T tokens in all, R of them predicted, L layers, H heads, G key-value
heads, D width of a head or a vector.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.terminal import progress_bar
from revela.text.words import joined, words
from revela.training.device import Tensors
from revela.training.lm.document_attention import EPSILON, InBatchAttention, Kernel, by_layer
from revela.training.lm.language_model import LanguageModel, Packed
from revela.training.methods.base import (
    BuildContext,
    Collate,
    DocumentAttention,
    Heads,
    Method,
    RetrieverLoss,
    Row,
    detached_backward,
    load_lm,
    off_diagonal,
    tokenize,
)
from revela.training.methods.heads import Head, cached_ranking, heads_from_file, ranked_heads
from revela.training.settings import (
    NO_FIT,
    Context,
    PositiveFloat,
    Preset,
    Rare,
    Retriever,
    checked,
)
from revela.types import Document

log = logging.getLogger(__name__)

TINY = 1e-12  # added to the variance of cosines: the gradient at equal cosines is finite
BASE_GATE = 0.1  # of every head in the probe
PROBE_GROUPS = 5
PROBE_PIECES = 4  # documents per group, and pieces per document
MIN_WORDS, MAX_WORDS = 6, 48  # of a piece

# What Revela and its baseline REPLUG share in the paper.
SHARED: Preset = (
    {"chunk_words": 120, "groups": "document-random", "lm": "meta-llama/Llama-3.2-1B"}
    | {"offline_model": "", "layers": 0, "pooling": "eos", "lower_case": "no", "max_tokens": 2048}
    | {"lora_rank": 256, "lora_alpha": 64, "lora_dropout": 0.1}
    | NO_FIT
    | {"warmup_steps": 100, "groups_per_step": 32, "max_minutes": 0.0, "keep": "last"}
)
PAPER: Preset = (
    SHARED
    | {"method": "revela", "lm_lora": True, "mix": "sum", "tau": 1e-4}
    | {"learning_rate": 1e-4, "max_steps": 10_000}
)
PRESETS: dict[str, Preset] = {
    # The default: a frozen LM whose best heads read the other chunks of a group through a gate.
    "revela-gated": {"method": "revela"},
    # As published: h = s + b in every layer of an LM that is trained too.
    "revela-paper": PAPER,
    # As published for code: the whole chunk is its query, and b is not V-normalised.
    "revela-paper-code": PAPER | {"query_side": "whole", "v_norm": "off", "max_steps": 11_000},
}


@checked
class ChunkQueries(Method):
    """Settings of queries that are made of the chunks themselves."""

    query_side: Rare[Literal["first-half", "whole"]] = "first-half"
    "Part of a chunk that is its query."
    whole_query_sources: Annotated[Rare[tuple[str, ...]], Field(strict=False)] = ()
    """Sources of stored groups whose whole chunks are queries: the numbers (1, 2, ...) of corpora
    that were given to revela groups, or names (src) in rows that were groups already."""


@checked
class Revela(DocumentAttention, ChunkQueries):
    """Learn from an LM's next-token loss with in-batch attention."""

    name = "revela"
    learned_from = (
        "{model} learned from the next-token prediction of {lm} which texts help each other."
    )

    tau: PositiveFloat = 1.0
    "Softmax temperature: of standardised cosines with --mix gated, of cosines with --mix sum."
    gate: float = Field(default=0.5, gt=0, le=1)
    "The gate g: share of the other chunks in the attention output of the gated heads."
    gate_heads: NonNegativeInt = 24
    "Gate this many heads, the best of the label-free probe. 0: all."
    gate_first_layer: ClassVar[float] = 0.6
    "Lowest layer with a gate, as a share of the LM's depth; below it the LM runs once."
    mix: Rare[Literal["gated", "sum"]] = "gated"
    """How the in-batch output joins the LM's own attention: (1-g) s + g b, with cosines divided by
    their standard deviation; or the paper's s + b, V-normalised, with bf16 cosines as they are."""
    v_norm: Rare[Literal["auto", "on", "off"]] = "auto"
    "V-normalise the in-batch output b; auto does so with --mix sum."
    lm_lora: Rare[bool] = False
    "Train the LM too, by LoRA of the retriever's rank; otherwise it is frozen."
    save_lm: Rare[bool] = False
    "Save the LM that --lm-lora trained, with its LoRA merged, in the folder lm of the run."

    def refuse(self, retriever: Retriever, context: Context) -> None:
        for name in ("gate", "gate_heads", "heads"):
            if self.mix == "sum" and getattr(self, name) != getattr(Revela(), name):
                raise RevelaError(
                    f"--{name.replace('_', '-')} has no effect on --mix sum: give --mix gated"
                )
        if self.save_lm and not self.lm_lora:
            raise RevelaError("--save-lm saves an LM that is trained: give --lm-lora")

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        lm, tokenizer, folder = load_lm(parts, self.lm_lora)
        gates_LH = gates(self, parts, lm, tokenizer, folder) if self.mix == "gated" else None
        v_norm, tau, kernel = {"on": True, "off": False}.get(self.v_norm), self.tau, self.kernel
        options = parts.batching
        loss = RevelaLoss(
            parts.model, lm, gates_LH=gates_LH, tau=tau, v_norm=v_norm, kernel=kernel, **options
        )
        return loss, ChunkBatches(parts, tokenizer, self.query_side, self.whole_query_sources)

    def save(self, loss: nn.Module, folder: Path) -> None:
        """Save the trained LM if requested."""
        for part in loss.modules() if self.save_lm else ():
            if isinstance(part, RevelaLoss):
                part.lm.save(folder / "lm")


@dataclass(frozen=True)
class ChunkBatches:
    """Collates chunks as queries, passages and LM input (revela, replug).

    ``query_side`` is the part of a chunk that is its query: the first half of its tokens (Revela,
    section 4), or all ("whole"). Whole chunks of ``whole_sources`` are queries in any case.
    """

    parts: BuildContext
    tokenizer: Any
    query_side: str
    whole_sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.whole_sources:
            return
        rows, numbers = self.parts.rows, range(1, len(self.parts.corpora) + 2)
        names = set(rows.column("name")) if hasattr(rows[0], "name") else set()
        if unknown := set(self.whole_sources) - {*map(str, numbers), *map(_source_in, names)}:
            raise RevelaError(
                f"--whole-query-sources {min(unknown)}: no stored group has this source: give the "
                "number of a corpus of revela groups, or the src of rows in its files"
            )

    def __call__(self, rows: Sequence[Row]) -> Tensors:
        texts = [row["text"] for row in rows]
        tokens = tokenize(self.tokenizer, texts, self.parts.lm.lm_tokens)
        return {
            **self.parts.sides(self._queries(rows, texts), texts),
            **{f"chunk_{name}": tokens[name] for name in ("input_ids", "attention_mask")},
        }

    def _queries(self, rows: Sequence[Row], texts: Sequence[str]) -> Sequence[str]:
        if self.query_side == "whole":
            return texts
        halves = split_in_half(texts, self.parts.model.tokenizer, self.parts.lm.lm_tokens)
        if not self.whole_sources:
            return halves
        pairs = zip(rows, halves, strict=True)
        return [row["text"] if self._is_whole(row) else half for row, half in pairs]

    def _is_whole(self, row: Row) -> bool:
        corpus = bisect(self.parts.corpora, row["document"]) + 1
        source = _source_in(getattr(self.parts.rows[row["row"]], "name", ""))
        return not {str(corpus), source}.isdisjoint(self.whole_sources)


def _source_in(name: str) -> str:
    """The src in the name of a row that was a group (groups/prebuilt.py); "" for other names."""
    source, _, place = name.rpartition(":")
    return source if place.isdigit() else ""


def split_in_half(texts: Sequence[str], tokenizer: Any, max_tokens: int) -> list[str]:
    """The first half of each text's tokens, after truncation to ``max_tokens``."""
    read = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    halves = []
    for text, spans in zip(texts, read["offset_mapping"], strict=True):
        length = min(len(spans), max_tokens) // 2
        halves.append(text[: spans[length - 1][1]] if length else text)
    return halves


def in_batch_weights(
    query_BD: Tensor, passage_BD: Tensor, tau: float | Tensor, *, standardise: bool = False
) -> Tensor:
    """(B, B) Sim: softmax over j != i of cos(query_i, passage_j) / tau.

    Asymmetric; the diagonal is 0, rows sum to 1.

    ``standardise`` (ours) divides a row's cosines by their standard deviation first, so that only
    their order and relative distances count. Without it the cheapest way to a lower loss is a
    sharper softmax: vectors collapse onto a few directions, where cosines differ most. The loss
    falls, and so does retrieval among thousands (research/notebook.md).

    Args:
        query_BD, passage_BD: unit vectors of the chunks as queries and passages.
        tau: temperature of the cosines, or of the standardised cosines.
        standardise: see above.
    """
    scores_BB = query_BD @ passage_BD.T
    if standardise:
        variance_B1 = off_diagonal(scores_BB).var(dim=1, correction=0, keepdim=True)
        scores_BB = scores_BB / (variance_B1 + TINY).sqrt()
    is_self_BB = torch.eye(len(scores_BB), dtype=torch.bool, device=scores_BB.device)
    return (scores_BB / tau).masked_fill(is_self_BB, -torch.inf).softmax(dim=-1)


class RevelaLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the language model.
        gates_LH: gates of the gated form. None: the paper's sum, with Sim from bf16 cosines that
            are not standardised.
        v_norm: V-normalise b. None: with the sum only.
        kernel: see document_attention.
        tau, batching: see RetrieverLoss.
    """

    gates_LH: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        *,
        gates_LH: Tensor | None,
        tau: float,
        v_norm: bool | None = None,
        kernel: Kernel = "auto",
        **batching: int,
    ) -> None:
        super().__init__(model, tau=tau, **batching)
        self.lm, self.kernel = lm, kernel
        self.v_norm = gates_LH is None if v_norm is None else v_norm
        self.register_buffer("gates_LH", gates_LH)
        self.heads = None if gates_LH is None else by_layer(gates_LH.nonzero().tolist())
        self.layers = list(range(lm.n_layers) if self.heads is None else self.heads)

    def forward(self, features: Sequence[Tensors]) -> Tensor:
        """Loss in nats per token; ``features`` are the chunks as queries, passages and LM input."""
        query, passage, chunk = features
        weights_BB = self.weights(self.embed(query), self.embed(passage))
        packed = self.lm.pack(chunk["input_ids"], chunk["attention_mask"])
        if self.lm.trainable:
            return self.lm_loss(packed, weights_BB)
        return detached_backward(partial(self.lm_loss, packed), weights_BB)

    def weights(self, query_BD: Tensor, passage_BD: Tensor) -> Tensor:
        """(B, B) Sim within each group, 0 between groups."""
        gated = self.gates_LH is not None
        if not gated:  # as the published run, where ties by rounding smooth Sim
            query_BD, passage_BD = query_BD.bfloat16(), passage_BD.bfloat16()
        sim = partial(in_batch_weights, tau=self.tau, standardise=gated)
        pairs = zip(self.groups(query_BD), self.groups(passage_BD), strict=True)
        blocks = [sim(query, passage).float() for query, passage in pairs]
        sim_NB = torch.cat(blocks).detach()
        own = {"sim_entropy": mean_entropy, "sim_hard_rows": hard_rows}
        self.logged = {name: partial(number, sim_NB) for name, number in own.items()}
        weights_BB: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return weights_BB

    def lm_loss(self, packed: Packed, weights_BB: Tensor) -> Tensor:
        """L with Sim = ``weights_BB``: the mean over groups of the mean over tokens."""
        inputs = weights_BB, packed.lengths, self.gates_LH, self.heads
        epsilon = 0.0 if self.gates_LH is None else EPSILON
        mix = InBatchAttention(*inputs, v_norm=self.v_norm, epsilon=epsilon, kernel=self.kernel)
        memory = self.lm.prefill(packed, self.layers)
        losses_R = self.lm.token_losses(packed, packed.layout.with_next_R, memory, mix)
        groups = self.groups(torch.tensor(packed.lengths) - 1)
        counts = [int(predicted.sum()) for predicted in groups]
        return torch.stack([losses.mean() for losses in torch.split(losses_R, counts)]).mean()


def mean_entropy(sim_NB: Tensor) -> Tensor:
    """The mean entropy of rows of Sim, in nats."""
    return -torch.xlogy(sim_NB, sim_NB).sum(dim=1).mean()


def hard_rows(sim_NB: Tensor) -> Tensor:
    """The share of rows of Sim with a weight above 0.99, which hardly have a gradient."""
    return (sim_NB.amax(dim=1) > 0.99).float().mean()


def gates_on_heads(lm: LanguageModel, gate: float, heads: Sequence[tuple[int, int]]) -> Tensor:
    """(L, H) the same gate on these (layer, head) pairs."""
    gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
    for layer, head in heads:
        gates_LH[layer, head] = gate
    return gates_LH


# Gates and the probe that finds their heads: ours, not in the paper.


def gates(settings: Revela, parts: BuildContext, lm: Any, tokenizer: Any, folder: Path) -> Tensor:
    """(L, H) gates; 0 for heads that are not gated."""
    gate, first = settings.gate, int(settings.gate_first_layer * lm.n_layers)

    def best_heads() -> Heads:
        """The best heads of the upper layers; []: gate all heads there."""
        if settings.heads:
            ranking = heads_from_file(Path(settings.heads), "siblings", folder)
        elif settings.gate_heads:
            lm_tokens, seed = parts.lm.lm_tokens, parts.training.seed
            ranking = sibling_heads(lm, tokenizer, folder, parts.documents, lm_tokens, seed)
        else:
            return []
        best = [(layer, head) for layer, head, _ in ranking if layer >= first]
        if settings.heads and not best:
            raise RevelaError(
                f"{settings.heads} names no head of layer {first} or above, where gates are: "
                "make another with revela heads --method revela --out"
            )
        return best[: settings.gate_heads or None]

    best = parts.heads(best_heads)
    if best:
        names = " ".join(f"{layer}-{head}" for layer, head in best[:12])
        log.info(f"gate {gate} on {len(best)} heads: {names}{' ...' if len(best) > 12 else ''}")
    else:
        why = "the documents are too short to probe the LM's heads: " if settings.gate_heads else ""
        log.info(f"{why}gate {gate} on every head of layers {first} to {lm.n_layers - 1}")
        best = [*product(range(first, lm.n_layers), range(lm.n_heads))]
    return gates_on_heads(lm, gate, best)


def sibling_heads(
    lm: LanguageModel,
    tokenizer: Any,
    folder: Path,
    documents: Sequence[Document],
    lm_tokens: int,
    seed: int,
) -> list[Head]:
    """Rank heads by how they look to a related document, by Revela's label-free probe.

    Empty if no document is long enough. Pieces of documents are truncated to ``lm_tokens``.
    """
    probed = list(_probe_groups(documents, seed))

    def probe() -> list[Head]:
        groups = []
        for texts, owners in probed:
            tokens = tokenize(tokenizer, texts, lm_tokens)
            packed = lm.pack(tokens["input_ids"], tokens["attention_mask"])
            groups.append((packed, torch.tensor(owners)))
        shown = progress_bar("probing heads", "group", groups)
        return ranked_heads(probe_heads(lm, shown)) if groups else []

    return cached_ranking("siblings", lm, folder, [lm_tokens, probed], probe)


def _probe_groups(
    documents: Sequence[Document], seed: int
) -> Iterator[tuple[list[str], list[int]]]:
    """(pieces, document of each) of groups of four documents cut in four.

    Every piece has siblings and others. No group if all documents are too short.
    """
    pieces: list[list[str]] = []
    for i in random.Random(seed).sample(range(len(documents)), len(documents)):
        all_words = words(documents[i].text)
        size = min(MAX_WORDS, len(all_words) // PROBE_PIECES)
        if size >= MIN_WORDS:
            starts = range(0, PROBE_PIECES * size, size)
            pieces.append([joined(all_words[start : start + size]) for start in starts])
        if len(pieces) == PROBE_GROUPS * PROBE_PIECES:
            break
    for start in range(0, len(pieces), PROBE_PIECES):
        members = pieces[start : start + PROBE_PIECES]
        if len(members) > 1:
            yield (
                [t for texts in members for t in texts],
                [i for i, texts in enumerate(members) for _ in texts],
            )


def probe_heads(lm: LanguageModel, groups: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Score every head as a head of in-batch attention, (L, H).

    ``groups`` are (packed chunks, document of each chunk (B,)) pairs. A chunk attends to nothing
    where it has no sibling, or where its group has no other document.
    """
    shape = lm.n_layers, lm.n_heads
    scores_LH, count = torch.zeros(shape), 0
    for packed, document_B in groups:
        document_B = document_B.to(packed.ids_1T.device)
        same_BB = document_B[:, None] == document_B[None, :]
        other_BB = ~same_BB
        same_BB.fill_diagonal_(False)
        memory = lm.prefill(packed, range(lm.n_layers))
        for sign, pairs_BB in ((-1.0, same_BB), (1.0, other_BB)):
            weights_BB = pairs_BB.float() / pairs_BB.sum(dim=1, keepdim=True).clamp(min=1)
            gates_LH = torch.full(shape, BASE_GATE, device=document_B.device, requires_grad=True)
            mix = InBatchAttention(weights_BB, packed.lengths, gates_LH, v_norm=False)
            loss = lm.loss(packed, memory, mix)
            scores_LH += sign * torch.autograd.grad(loss, gates_LH)[0].cpu()
        count += 1
    return scores_LH / max(1, count)
