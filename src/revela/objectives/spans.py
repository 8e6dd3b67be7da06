"""Span corruption (T5; Raffel et al., JMLR 2020): an encoder-decoder writes what is hidden from it.

    x = x_1 .. x_n    ->    input   x_1 <0> x_4 x_5 <1> x_8 ..
                            target  <0> x_2 x_3 <1> x_6 x_7 .. END
    L = -mean_t log P(target_t | target_<t, input)        nats per token of the target

Each span gives way to one sentinel <k>; ``span_share`` of the tokens are hidden, in spans of
``span_length`` on average. It is the first stage of "Dwell in the Beginning" (Coelho et al., ACL
2024): nothing in it favours the beginning of a text.

The retriever is the encoder with mean pooling, and both are trained by this loss alone; the decoder
is saved beside it (``encoder-decoder/``), so that training can go on.

Cost: one reading of each text by the encoder, and of a fifth as many tokens by the decoder.
When to use it: to train an encoder from nothing, before crops or pairs (preset ``spans``).

Shapes: B texts of L tokens, T tokens of a target, D width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from revela.device import autocast
from revela.errors import RevelaError
from revela.objectives.base import Batch, BuildContext, Collate, Row, Side, row_random
from revela.settings import Spans

NO_TARGET = -100  # the label of padding


def build(settings: Spans, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``spans``, and what makes its batches."""
    from revela.lm.encoder_decoder import load_encoder_decoder

    tokens = parts.recipe.lm.lm_tokens
    lm = load_encoder_decoder(parts.folder, parts.bf16)
    lm.share(parts.model[0].model.encoder, parts.model.tokenizer)
    needed = num_noise_spans(tokens, settings.span_share, settings.span_length)
    if needed > len(lm.sentinels):
        raise RevelaError(
            f"--lm-tokens {tokens} makes {needed} spans and the tokenizer has "
            f"{len(lm.sentinels)} sentinels: lower --lm-tokens"
        )
    return SpanLoss(parts.model, lm.to(parts.device)), SpanBatches(parts, lm, settings)


def save(loss: SpanLoss, folder: Path) -> None:
    """Save the encoder-decoder beside the retriever."""
    from revela.lm.encoder_decoder import FOLDER

    loss.lm.save(folder / FOLDER)


@dataclass(frozen=True)
class SpanBatches:
    """A run of ``lm_tokens`` tokens of each row, with spans hidden, and what is hidden.

    A row has as many words as a run has tokens, or a few more, so a run is most of it: which part
    differs by epoch. A shorter row is read whole.
    """

    parts: BuildContext
    lm: Any
    settings: Spans

    def __call__(self, rows: Sequence[Row]) -> Batch:
        given = self.lm.tokenizer([row["text"] for row in rows], add_special_tokens=False)
        pairs = [self._pair(row, ids) for row, ids in zip(rows, given["input_ids"], strict=True)]
        inputs, targets = zip(*pairs, strict=True)
        padding = int(self.lm.tokenizer.pad_token_id)
        mask_BL = _padded([[1] * len(ids) for ids in inputs], 0)
        self.parts.count(int(mask_BL.sum()))
        return {
            "text_input_ids": _padded(inputs, padding),
            "text_attention_mask": mask_BL,
            "target_ids": _padded(targets, NO_TARGET),
        }

    def _pair(self, row: Row, ids: list[int]) -> tuple[list[int], list[int]]:
        """What the encoder reads, and what the decoder is to write."""
        lm, longest = self.lm, self.parts.recipe.lm.lm_tokens
        draw = row_random(row, self.parts.recipe.training.seed)
        start = draw.randint(0, max(0, len(ids) - longest))
        run = ids[start : start + longest]
        of_spans = self.settings.span_share, self.settings.span_length
        read, target = corrupt(run, *of_spans, lm.sentinels, draw)
        return lm.around(read), [*target, lm.tokenizer.eos_token_id]


def _padded(rows: Sequence[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], True, value)


def num_noise_tokens(length: int, share: float) -> int:
    """How many tokens of a text are hidden: one at least, and never all."""
    return min(max(1, round(length * share)), length - 1)


def num_noise_spans(length: int, share: float, mean_span: float) -> int:
    """In how many spans they are; any two have a token between them."""
    hidden = num_noise_tokens(length, share)
    return min(max(1, round(hidden / mean_span)), hidden, length - hidden + 1)


def corrupt(
    ids: Sequence[int],
    share: float,
    mean_span: float,
    sentinels: Sequence[int],
    rng: random.Random,
) -> tuple[list[int], list[int]]:
    """Hide spans of a text. Gives what is left, with a sentinel for each, and the target: each span
    after its sentinel, without the token that ends a target.

    The lengths of the spans, and of the runs between them, are random compositions of their sums,
    as in T5. But T5's texts always begin with a run and end with a span; here both ends may be
    either, so that the hidden tokens lie alike in a text and in its reverse. A text of one token
    stays as it is.
    """
    if len(ids) < 2:
        return list(ids), []
    hidden, spans = num_noise_tokens(len(ids), share), num_noise_spans(len(ids), share, mean_span)
    lengths = random_parts(hidden, spans, rng)
    # One token more at each end, so that the first and the last run may have none of the text's.
    runs = random_parts(len(ids) - hidden + 2, spans + 1, rng)
    runs[0], runs[-1] = runs[0] - 1, runs[-1] - 1
    read, target, at = list(ids[: runs[0]]), list[int](), runs[0]
    for sentinel, length, run in zip(sentinels, lengths, runs[1:], strict=False):
        target += [sentinel, *ids[at : at + length]]
        at += length
        read += [sentinel, *ids[at : at + run]]
        at += run
    return read, target


def random_parts(total: int, count: int, rng: random.Random) -> list[int]:
    """Positive whole numbers with this sum; all compositions are as likely."""
    cuts = sorted(rng.sample(range(1, total), count - 1))
    return [b - a for a, b in pairwise([0, *cuts, total])]


class SpanLoss(nn.Module):
    """The loss of a batch of texts with hidden spans. ``lm``, an ``EncoderDecoder``, shares its
    encoder with ``model``, whose first module gives ``token_embeddings``.
    """

    def __init__(self, model: nn.Module, lm: Any) -> None:
        super().__init__()
        self.model, self.lm = model, lm

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per token of the targets; ``features`` are the texts and the targets."""
        text, target = features
        model: Any = self.model
        # Through the retriever the encoder computes nothing on padding.
        with autocast(text["input_ids"].device, self.lm.bf16):
            hidden_BLD = model[0](dict(text))["token_embeddings"]
        loss: Tensor = self.lm.loss(hidden_BLD, text["attention_mask"], target["ids"])
        return loss
