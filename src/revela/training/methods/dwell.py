"""Dwell in the Beginning (Coelho et al., ACL 2024; arXiv 2404.04163): encoders favour the beginning
of a text. The paper trains an encoder-decoder in three stages and probes it after each.

**1. Span corruption** (T5; Raffel et al., JMLR 2020), in this file: an encoder-decoder predicts
hidden spans of a text. Nothing in it favours the beginning.

    L = -mean_t log P(target_t | target_<t, input), the mean over groups of it

    x = x_1 .. x_n    ->    input   x_1 <0> x_4 x_5 <1> x_8 ..
                            target  <0> x_2 x_3 <1> x_6 x_7 .. END

- Sentinel k replaces span k.
- ``span_share`` of the tokens are hidden, in spans of ``span_length`` tokens on average.

The retriever is the encoder. To run it:

    revela train TEXT --method dwell-spans --out SPANS

**2. Crops** (eq. 1; contrastive.py): two random crops of a text find each other.

    revela train TEXT --recipe research/recipes/dwell/crops.toml --model SPANS --out CROPS

**3. Judged pairs** (contrastive.py), with hard negatives that the retriever mines again every
--refresh-every steps (training/negatives.py). research/msmarco_documents.py makes the paper's data.

    revela train JUDGED/corpus.jsonl --pairs JUDGED --method dwell-pairs --model CROPS --out PAIRS

**The probes**: an answer is moved through its document, and its rank is measured by place (figure
1; probes/moved_passage.py); the cosine of a document with each of its tenths (figures 3 and 5;
probes/exact_match.py); the accuracy of hidden spans by place, of a model with its decoder (figure
4; probes/decoder.py).

    revela probe PAIRS TEXT --move JUDGED --max-tokens 2048

Differs from the paper, and the preset that makes it nearly equal:
- Stage 1: dwell-spans has 64 windows of 512 tokens an update, at most 20 minutes, rate 1e-3 after
  50 steps, falling linearly. dwell-spans-paper has 80 of 2,048 tokens, 49,152 steps, rate 1e-5
  (for T5-base; an earlier version has 2e-2, nearer to what random weights need) with a cosine.
- Stage 2: research/recipes/dwell/crops.toml has 32 texts an update. dwell-crop-paper has 512, at
  5e-6, for one epoch; as 128 on each of 4 GPUs by torchrun. Crops are runs of words.
- Stage 3: dwell-pairs has 4 negatives of 8 queries, 40 steps, mined every 10. dwell-paper has 9
  negatives of 512 queries, which are compared with 5,120 passages, 8 epochs at 5e-6, mined every 2
  epochs, when the optimiser starts afresh. Stages 2 and 3 have no warm-up, as none is printed.
- Small runs compare cosines at --tau 0.05. Eq. 1 as printed has cosines without a temperature:
  with 5,120 passages its loss could not fall below log(1 + 5119 / e^2) = 6.5 nats, of 8.5 at the
  start. The authors' code does not normalise, so the presets have --similarity dot --tau 1.

Differs still:
- The encoder with mean pooling is the retriever; the paper takes the decoder's state at the first
  id it reads. No setting: no stock module of sentence-transformers pools by a decoder, and a saved
  retriever has stock modules only. The probe measures the decoder's vectors too, of the decoder
  that stage 1 saves with the encoder (``encoder-decoder/``).
- A T5Gemma of random weights (--model new:base) and a tokenizer of the corpus; the paper takes
  T5-base and replaces its bias by RoPE with dynamic NTK, which is in no library. Expect only the
  order of the rows of table 5, and which stage has the larger bias, not the numbers.
- A text may begin and end with a run or a span. T5's begin with a run and end with a span, so its
  places are not treated alike. No setting.
- The first negatives are BM25's; the paper's are ANCE-MaxP's: --negatives-from its ranking.
- Exact match cuts a document in parts of equal words, as the authors' code; the paper says tokens.
  It takes documents that fill the input, cut to it, as other lengths would look like a bias. A
  moved answer is put in ninths of tokens; the authors' code takes characters.

Read next: lm/encoder_decoder.py, contrastive.py, training/negatives.py, probes/run.py, base.py;
docs/papers.md has every equation and setting in the order of the paper.

Cost: one reading of each text by the encoder, and of a fifth as many tokens by the decoder.
Memory: the graph of encoder and decoder for one batch of texts.
When to use it: to train an encoder from nothing, before crops or pairs.
Measured: a small T5 from nothing (9.6 million weights, 1,450 steps of spans) has an MRR@100 of
0.087 where chance is 0.062, 0.083 after crops and 0.125 after four episodes of pairs, and no bias
by place at any stage (research/results/position.md).

Shapes: B texts of L tokens, D width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from revela.errors import RevelaError
from revela.training.device import Tensors
from revela.training.lm.encoder_decoder import FOLDER, EncoderDecoder, load_encoder_decoder
from revela.training.methods.base import (
    BuildContext,
    Collate,
    Method,
    Row,
    group_weights,
    row_random,
)
from revela.training.methods.contrastive import Pairs
from revela.training.settings import NO_FIT, Context, Preset, Retriever, checked

if TYPE_CHECKING:
    from revela.training.retriever.module import RetrieverModule

IGNORED = -100  # label of padding

SPANS: Preset = (
    {"method": "dwell-spans", "groups": "random"}
    | {"model": "new:small", "layers": 0, "lower_case": "no", "max_tokens": 2048, "lora_rank": 0}
    | {"query_prompt": "", "passage_prompt": "", "lm_tokens": 512}
    | NO_FIT
    | {"learning_rate": 1e-3, "warmup_steps": 50, "groups_per_step": 4}
    | {"check_every": 0, "keep": "last"}
)
ALL: Preset = {"held_out": 0.0, "near_duplicates": 0.0, "max_minutes": 0.0}
"All documents are trained on, up to a number of steps or epochs."
# What stages 2 and 3 share: all weights learn from whole documents.
LONG: Preset = NO_FIT | ALL | {"lora_rank": 0, "check_every": 0, "keep": "last"}
LONG |= {"groups": "document-random", "max_tokens": 2048, "lm_tokens": 2048}
PAPER: Preset = LONG | {"model": "new:base", "layers": 0, "lower_case": "no"}
PAPER |= {"query_prompt": "", "passage_prompt": ""}
PAPER |= {"offline_model": "", "similarity": "dot", "tau": 1.0, "warmup_steps": 0}
PAPER |= {"learning_rate": 5e-6, "retriever_batch": 24}
JUDGED: Preset = {"method": Pairs.name, "queries": "judged"}
PRESETS: dict[str, Preset] = {
    # Stage 1, small; and the paper's size, 80 texts of 2,048 tokens an update.
    "dwell-spans": SPANS,
    "dwell-spans-paper": (SPANS | ALL)
    | {"model": "new:base", "lm_tokens": 2048, "group_size": 20, "groups_per_step": 4}
    | {"learning_rate": 1e-5, "schedule": "cosine", "warmup_steps": 4915, "max_steps": 49_152},
    # Stage 2 of the paper's size, 512 texts an update: give --model.
    "dwell-crop-paper": PAPER
    | {"method": "contrastive-crop", "crop_window": 10**6, "max_epochs": 1}
    | {"group_size": 128, "groups_per_step": 4, "groups_per_batch": 4},
    # Stage 3, small; and the paper's size, 512 queries and 5,120 passages an update: give --model
    # and --pairs.
    "dwell-pairs": (LONG | JUDGED)
    | {"negatives": 4, "refresh_every": 10, "tau": 0.05, "group_size": 8, "retriever_batch": 16}
    | {"learning_rate": 3e-4, "warmup_steps": 2, "max_steps": 40},
    "dwell-paper": (PAPER | JUDGED | {"negatives": 9, "group_size": 512})
    | {"max_epochs": 8, "refresh_epochs": 2, "restart_optimizer": True},
}


@checked
class Spans(Method):
    """Learn to write the spans that are hidden from an encoder-decoder (T5)."""

    name = "dwell-spans"
    reads = "windows"
    learned_from = (
        "{model}, the encoder of an encoder-decoder, learned to write the hidden spans of a text."
    )
    span_share: ClassVar[float] = 0.15  # of the tokens
    span_length: ClassVar[float] = 3.0  # mean tokens of a span

    def refuse(self, retriever: Retriever, context: Context) -> None:
        if retriever.lora_rank:
            raise RevelaError("--method dwell-spans trains all weights: give --lora-rank 0")
        if context.context:
            raise RevelaError(
                "--context has no effect on --method dwell-spans: give it to the next stage"
            )

    def window_words(self, lm_tokens: int) -> int:
        # A word has at least one token, so a row has enough for SpanBatches to take a run of them.
        return lm_tokens

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        tokens = parts.lm.lm_tokens
        lm = load_encoder_decoder(parts.folder, parts.bf16)
        lm.share(parts.model.model[0].model.encoder, parts.model.tokenizer)
        needed = num_noise_spans(tokens, self.span_share, self.span_length)
        if needed > len(lm.sentinels):
            raise RevelaError(
                f"--lm-tokens {tokens} makes {needed} spans and the tokenizer has "
                f"{len(lm.sentinels)} sentinels: lower --lm-tokens"
            )
        return SpanLoss(parts.model, lm.to(parts.device)), SpanBatches(parts, lm, self)

    def save(self, loss: Any, folder: Path) -> None:
        """Save the encoder-decoder with the retriever."""
        loss.lm.save(folder / FOLDER)


@dataclass(frozen=True)
class SpanBatches:
    """Collates texts with hidden spans, and the spans as targets.

    Reads a run of at most ``lm_tokens`` tokens of a row, another one in each epoch. A row has about
    as many words, so the run is most of it.
    """

    parts: BuildContext
    lm: EncoderDecoder
    settings: Spans

    def __call__(self, rows: Sequence[Row]) -> Tensors:
        tokens = self.lm.tokenizer([row["text"] for row in rows], add_special_tokens=False)
        pairs = [self._pair(row, ids) for row, ids in zip(rows, tokens["input_ids"], strict=True)]
        inputs, targets = zip(*pairs, strict=True)
        padding, size = int(self.lm.tokenizer.pad_token_id), self.parts.groups.group_size
        lengths = [len(target) for target in targets]
        weight_B = group_weights([i // size for i in range(len(rows))], lengths)
        mask_BL = _padded([[1] * len(ids) for ids in inputs], 0)
        self.parts.count(int(mask_BL.sum()))
        return {
            "text_input_ids": _padded(inputs, padding),
            "text_attention_mask": mask_BL,
            "target_ids": _padded(targets, IGNORED),
            "target_weight": weight_B,
        }

    def _pair(self, row: Row, ids: list[int]) -> tuple[list[int], list[int]]:
        """Token ids of the encoder's input and of the target."""
        lm, max_tokens = self.lm, self.parts.lm.lm_tokens
        rng = row_random(row, self.parts.training.seed)
        start = rng.randint(0, max(0, len(ids) - max_tokens))
        run = ids[start : start + max_tokens]
        form = self.settings.span_share, self.settings.span_length
        kept, target = corrupt(run, *form, lm.sentinels, rng)
        return lm.with_special_tokens(kept), [*target, lm.tokenizer.eos_token_id]


def _padded(rows: Sequence[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], True, value)


def num_noise_tokens(length: int, share: float) -> int:
    """How many tokens of a text are hidden: at least one, and never all."""
    return min(max(1, round(length * share)), length - 1)


def num_noise_spans(length: int, share: float, mean_span: float) -> int:
    """How many spans the hidden tokens form; any two have a token between them."""
    hidden = num_noise_tokens(length, share)
    return min(max(1, round(hidden / mean_span)), hidden, length - hidden + 1)


def corrupt(
    ids: Sequence[int], share: float, mean_span: float, sentinels: Sequence[int], rng: random.Random
) -> tuple[list[int], list[int]]:
    """Hide spans of a text; returns the input and the target, without END.

    As in T5, the lengths of spans and of the runs between them are random compositions of their
    sums. T5's texts begin with a run and end with a span. Here a text may begin and end with
    either, so that a text and its reverse are treated alike. A text of one token stays as it is.
    """
    if len(ids) < 2:
        return list(ids), []
    hidden, spans = num_noise_tokens(len(ids), share), num_noise_spans(len(ids), share, mean_span)
    lengths = random_parts(hidden, spans, rng)
    # One extra token at each end, taken away below: the first and the last run may be empty.
    runs = random_parts(len(ids) - hidden + 2, spans + 1, rng)
    runs[0], runs[-1] = runs[0] - 1, runs[-1] - 1
    kept, target, at = list(ids[: runs[0]]), list[int](), runs[0]
    for sentinel, length, run in zip(sentinels, lengths, runs[1:], strict=False):
        target += [sentinel, *ids[at : at + length]]
        at += length
        kept += [sentinel, *ids[at : at + run]]
        at += run
    return kept, target


def random_parts(total: int, count: int, rng: random.Random) -> list[int]:
    """Positive integers with this sum; all compositions are equally likely."""
    cuts = sorted(rng.sample(range(1, total), count - 1))
    return [b - a for a, b in pairwise([0, *cuts, total])]


class SpanLoss(nn.Module):
    """The loss of a batch of texts with hidden spans.

    Args:
        model: the retriever.
        lm: shares the retriever's encoder.
    """

    def __init__(self, model: RetrieverModule, lm: EncoderDecoder) -> None:
        super().__init__()
        self.model, self.lm = model, lm

    def forward(self, features: Sequence[Tensors]) -> Tensor:
        """L in nats per token of the targets; ``features`` are the texts and the targets."""
        text, target = features
        hidden_BLD = self.model.states(text)["token_embeddings"]
        losses_B = self.lm.losses(hidden_BLD, text["attention_mask"], target["ids"])
        return losses_B @ target["weight"]
