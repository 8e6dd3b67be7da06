"""Span corruption (T5; Raffel et al., JMLR 2020): an encoder-decoder predicts hidden spans of a
text.

    L = -mean_t log P(target_t | target_<t, input)                          mean over groups of it

    x = x_1 .. x_n    ->    input   x_1 <0> x_4 x_5 <1> x_8 ..
                            target  <0> x_2 x_3 <1> x_6 x_7 .. END

- <k>: the sentinel that replaces span k.
- ``span_share`` of the tokens are hidden, in spans of ``span_length`` tokens on average.

The retriever is the encoder with mean pooling. The decoder is saved beside it
(``encoder-decoder/``), so that training can go on. This is the first stage of "Dwell in the
Beginning" (Coelho et al., ACL 2024); nothing in it favours the beginning of a text.

Cost: one reading of each text by the encoder, and of a fifth as many tokens by the decoder.
When to use it: to train an encoder from nothing, before crops or pairs (preset ``spans``).

Shapes: B texts of L tokens, D width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from revela.errors import RevelaError
from revela.training.lm.encoder_decoder import FOLDER, EncoderDecoder, load_encoder_decoder
from revela.training.methods.base import (
    Batch,
    BuildContext,
    Collate,
    Row,
    Side,
    group_weights,
    row_random,
)
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import Spans

IGNORED = -100  # label of padding


def build(settings: Spans, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``spans`` and its collator."""
    tokens = parts.recipe.lm.lm_tokens
    lm = load_encoder_decoder(parts.folder, parts.bf16)
    lm.share(parts.model.model[0].model.encoder, parts.model.tokenizer)
    needed = num_noise_spans(tokens, settings.span_share, settings.span_length)
    if needed > len(lm.sentinels):
        raise RevelaError(
            f"--lm-tokens {tokens} makes {needed} spans and the tokenizer has "
            f"{len(lm.sentinels)} sentinels: lower --lm-tokens"
        )
    return SpanLoss(parts.model, lm.to(parts.device)), SpanBatches(parts, lm, settings)


def save(loss: SpanLoss, folder: Path) -> None:
    """Save the encoder-decoder beside the retriever."""
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

    def __call__(self, rows: Sequence[Row]) -> Batch:
        tokens = self.lm.tokenizer([row["text"] for row in rows], add_special_tokens=False)
        pairs = [self._pair(row, ids) for row, ids in zip(rows, tokens["input_ids"], strict=True)]
        inputs, targets = zip(*pairs, strict=True)
        padding, size = int(self.lm.tokenizer.pad_token_id), self.parts.recipe.groups.group_size
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
        lm, max_tokens = self.lm, self.parts.recipe.lm.lm_tokens
        rng = row_random(row, self.parts.recipe.training.seed)
        start = rng.randint(0, max(0, len(ids) - max_tokens))
        run = ids[start : start + max_tokens]
        share, mean_length = self.settings.span_share, self.settings.span_length
        kept, target = corrupt(run, share, mean_length, lm.sentinels, rng)
        return lm.around(kept), [*target, lm.tokenizer.eos_token_id]


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
    ids: Sequence[int],
    share: float,
    mean_span: float,
    sentinels: Sequence[int],
    rng: random.Random,
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

    def forward(self, features: Sequence[Side]) -> Tensor:
        """L in nats per token of the targets; ``features`` are the texts and the targets."""
        text, target = features
        hidden_BLD = self.model.states(text)["token_embeddings"]
        losses_B = self.lm.losses(hidden_BLD, text["attention_mask"], target["ids"])
        loss: Tensor = losses_B @ target["weight"]
        return loss
