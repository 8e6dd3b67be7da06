"""Probes of language models by place in a text.

- Loss: the next-token loss of a causal LM over ten equal stretches.
- Spans: how often an encoder-decoder writes a span of three tokens that is hidden in one of ten
  equal stretches, and nothing else is ("Dwell in the Beginning", figure 4).

Shapes: N texts of L tokens, P places, D width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from revela.errors import RevelaError
from revela.evaluation.probes.profile import PLACES, SEGMENT_TENTHS, profile
from revela.evaluation.results import Profile
from revela.types import Vectors

if TYPE_CHECKING:
    from revela.lm.encoder_decoder import EncoderDecoder
    from revela.lm.language_model import LanguageModel
    from revela.retriever.tokens import TokenWindow

BATCH = 8  # texts
SPAN = 3  # tokens of a hidden span


def loss_by_place(
    texts: Sequence[str], lm: LanguageModel, window: TokenWindow
) -> dict[str, Profile]:
    """Next-token loss (nats) over ten stretches of texts that fill the window; it falls for as long
    as more context helps.

    Raises:
        RevelaError: a loss is not finite.
    """
    import torch

    ids = _ids(texts, window)
    length = min(map(len, ids))
    ids_NL = torch.tensor([some[:length] for some in ids])
    rows = []
    with torch.inference_mode():
        for start in tqdm(range(0, len(ids_NL), BATCH), unit="batch"):
            packed = lm.pack(batch := ids_NL[start : start + BATCH], torch.ones_like(batch))
            losses_R = lm.token_losses(packed, packed.layout.with_next_R)
            rows.append(losses_R.float().cpu().view(len(batch), length - 1).numpy())
    losses_NL = np.concatenate(rows).astype(np.float64)
    if not np.isfinite(losses_NL).all():
        raise RevelaError(f"{lm.name} gives losses that are not finite: its weights are broken")
    stretches = np.array_split(losses_NL, PLACES, axis=1)
    means_NP = np.column_stack([stretch.mean(axis=1) for stretch in stretches])
    return {"next-token loss": profile(means_NP, SEGMENT_TENTHS)}


def spans_by_place(
    texts: Sequence[str], lm: EncoderDecoder, window: TokenWindow, seed: int = 0
) -> dict[str, Profile]:
    """How often a span of ``SPAN`` tokens is written as it was, hidden at a random place of each of
    ten stretches in turn; the decoder begins with the span's sentinel, and chooses greedily.

    Raises:
        RevelaError: the texts are too short for ten such spans, or the tokenizer has no sentinel.
    """
    import torch

    ids = _ids(texts, window)
    length = min(map(len, ids))
    if length < PLACES * SPAN:
        raise RevelaError(f"{length} tokens are too few for {PLACES} spans: raise --max-tokens")
    if not lm.sentinels:
        raise RevelaError(
            f"the tokenizer of {lm.name} has no sentinel (<extra_id_0>), by which a span is asked "
            "for: probe another model"
        )
    bounds = [round(place * length / PLACES) for place in range(PLACES + 1)]
    rng = random.Random(seed)
    read, hidden = [], []
    for some in ids:
        for first, past in pairwise(bounds):
            start = rng.randint(first, past - SPAN)
            end = start + SPAN
            read.append(lm.around([*some[:start], lm.sentinels[0], *some[end:length]]))
            hidden.append(some[start:end])
    written = []
    for start in tqdm(range(0, len(read), BATCH), unit="batch"):
        batch = torch.tensor(read[start : start + BATCH])
        written += lm.predict(batch, lm.sentinels[:1], SPAN).tolist()
    right_NP = (np.array(written) == np.array(hidden)).all(axis=1).reshape(len(texts), PLACES)
    return {"spans by place": profile(right_NP.astype(np.float64), SEGMENT_TENTHS)}


def _ids(texts: Sequence[str], window: TokenWindow) -> list[list[int]]:
    found: list[list[int]] = window.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return found


class DecoderPooling:
    """An ``Encoder`` by the decoder's first state, as "Dwell in the Beginning" reads a text."""

    def __init__(self, lm: EncoderDecoder, max_tokens: int) -> None:
        self.lm, self.max_tokens = lm, max_tokens

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors."""
        return self.encode_passages(texts, progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors; ``progress`` shows nothing."""
        by_length, found = sorted(range(len(texts)), key=lambda i: len(texts[i])), []
        for start in range(0, len(texts), BATCH):
            read = self.lm.tokenizer(
                [texts[i] for i in by_length[start : start + BATCH]],
                truncation=True,
                max_length=self.max_tokens,
                padding=True,
                padding_side="right",
                return_tensors="pt",
            )
            found.append(self.lm.pooled(read["input_ids"], read["attention_mask"]).numpy())
        vectors: Vectors = np.concatenate(found)[np.argsort(by_length)]
        return vectors
