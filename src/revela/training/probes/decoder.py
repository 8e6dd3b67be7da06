"""Probe an encoder-decoder as in "Dwell in the Beginning" (Coelho et al., ACL 2024): accuracy of
hidden spans by place (figure 4), and the decoder's vector of a text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from revela.encoders.base import Encoded, Features, TextEncoder
from revela.errors import RevelaError
from revela.terminal import progress_bar
from revela.training.lm.encoder_decoder import EncoderDecoder
from revela.training.methods.base import tokenize
from revela.training.probes.places import PLACES, SEGMENT_TENTHS, Profile, profile
from revela.types import Role

BATCH = 8  # texts
SPAN = 3  # tokens per hidden span


def spans_by_place(texts: Sequence[str], lm: EncoderDecoder, seed: int = 0) -> dict[str, Profile]:
    """Accuracy of greedy decoding of a hidden span of three tokens. In each of ten equal parts of a
    text, one after another, a random span is hidden.
    """
    ids: list[list[int]] = lm.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    length = min(map(len, ids))
    if length < PLACES * SPAN:
        raise RevelaError(f"{length} tokens are too few for {PLACES} spans: raise --max-tokens")
    if not lm.sentinels:
        raise RevelaError(
            f"{lm.name} has no sentinel token (<extra_id_0>) for a span: probe another model"
        )
    bounds = [round(place * length / PLACES) for place in range(PLACES + 1)]
    rng = random.Random(seed)
    inputs, targets = [], []
    for text in ids:
        for first, last in pairwise(bounds):
            start = rng.randint(first, last - SPAN)
            end = start + SPAN
            corrupted = [*text[:start], lm.sentinels[0], *text[end:length]]
            inputs.append(lm.with_special_tokens(corrupted))
            targets.append(text[start:end])
    predicted = []
    for start in progress_bar("spans by place", "batch", range(0, len(inputs), BATCH)):
        batch = torch.tensor(inputs[start : start + BATCH])
        predicted += lm.predict(batch, lm.sentinels[:1], SPAN).tolist()
    right_NP = (np.array(predicted) == np.array(targets)).all(axis=1).reshape(len(texts), PLACES)
    return {"spans by place": profile(right_NP.astype(np.float64), SEGMENT_TENTHS)}


class DecoderPooling(TextEncoder):
    """An encoder whose vectors are the decoder's first state."""

    def __init__(self, lm: EncoderDecoder, max_tokens: int) -> None:
        self.lm, self.max_tokens = lm, max_tokens

    def tokenize(self, texts: Sequence[str], role: Role) -> Features:
        return dict(tokenize(self.lm.tokenizer, texts, self.max_tokens))

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        return Encoded(self.lm.pooled(features["input_ids"], features["attention_mask"]).numpy())
