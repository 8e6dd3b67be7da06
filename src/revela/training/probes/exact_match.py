"""Exact match: test without labels if a retriever reads the beginning of a text more than its end
(Coelho et al., "Dwell in the Beginning", ACL 2024).

Each of ten equal parts of a document is a query, compared with the document. The beginning often
states the topic, so each document is also encoded with its parts in reverse order: the mean over
both orders at a place cancels the effect of content.

Shapes: N documents, P places, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from revela.encoders.base import TextEncoder
from revela.text.words import split_evenly
from revela.training.probes.places import PLACES, SEGMENT_TENTHS, Profile, profile
from revela.types import unit


def exact_match(texts: Sequence[str], encoder: TextEncoder) -> dict[str, Profile]:
    """Cosine of each text with its ten parts: in the order of the text, and averaged over both
    orders. The encoder must truncate nothing.
    """
    parts = [split_evenly(text, PLACES) for text in texts]
    reverse = [
        (" " if of_text[0][-1].isspace() else "").join(map(str.strip, reversed(of_text)))
        for of_text in parts
    ]
    passages = unit(encoder.encode_passages([*texts, *reverse], progress=True))
    queries = unit(encoder.encode_queries(list(chain.from_iterable(parts)), progress=True))
    queries_NPD = queries.reshape(len(texts), PLACES, -1)
    forward_NP, reverse_NP = (
        np.einsum("nd,npd->np", passages_ND, queries_NPD).astype(np.float64)
        for passages_ND in passages.reshape(2, len(texts), -1)
    )
    # Part p of the reversed text is at place P - 1 - p. What a part scores for its content counts
    # at two mirrored places, so it cancels in slope and drop.
    both_orders_NP = (forward_NP + reverse_NP[:, ::-1]) / 2
    return {
        "exact match": profile(forward_NP, SEGMENT_TENTHS),
        "exact match, both orders": profile(both_orders_NP, SEGMENT_TENTHS),
    }
