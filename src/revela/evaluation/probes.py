"""All probes of one model: position bias, moved passages, geometry. Everything is read and cut
before anything is encoded, so that bad input costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from revela.device import compute_device, uses_bf16
from revela.evaluation.beir import load_collection
from revela.evaluation.geometry import geometry, pairs_of_collection, pairs_of_text
from revela.evaluation.moved_passage import Unit, load_answers, move_all, moved_passage, untouched
from revela.evaluation.position import (
    SPARE,
    exact_match,
    long_texts,
    loss_by_place,
    spans_by_place,
)
from revela.evaluation.results import ProbeResult, Profile
from revela.lm.encoder_decoder import FOLDER as DECODER_BESIDE
from revela.lm.encoder_decoder import (
    DecoderPooling,
    EncoderDecoder,
    is_encoder_decoder,
    load_encoder_decoder,
)
from revela.lm.language_model import load_language_model, load_tokenizer
from revela.retriever.build import load_retriever
from revela.retriever.encode import RetrieverEncoder
from revela.retriever.tokens import TokenWindow, token_window
from revela.settings import Precision
from revela.silence import silence_libraries
from revela.types import Document, Encoder, Vectors

log = logging.getLogger(__name__)


def probe_retriever(
    folder: Path,
    name: str,
    documents: Sequence[Document],
    *,
    max_tokens: int,
    count: int,
    seed: int,
    precision: Precision,
    move: Path | None,
    join_titles: bool,
    unit: Unit,
    pairs: Path | None,
    progress: bool = True,
) -> ProbeResult:
    """Exact match and geometry of a retriever and, with ``move``, moved passages; of one that has a
    decoder beside it, spans by place too.

    Args:
        folder: of Sentence Transformers.
        name: the model in messages and in the result.
        documents: to sample from.
        max_tokens: longest text, prompt included; at most the model's own limit.
        count: maximum number of documents, answers and pairs.
        seed: of samples and intervals.
        precision: arithmetic.
        move: folder in BEIR layout with answers.
        join_titles: its documents are passages of articles.
        unit: what places of an answer count.
        pairs: folder in BEIR layout for the geometry; None: halves of chunks.
        progress: show bars.

    Raises:
        RevelaError: there is too little text, or a vector is not finite.
    """
    silence_libraries()
    model = load_retriever(folder)
    window = token_window(model, name, max_tokens)
    tokens = window.size - SPARE
    texts = long_texts(documents, window, count, seed)
    if pairs is None:
        two = pairs_of_text(documents, count, seed)
    else:
        two = pairs_of_collection(load_collection(pairs), count, seed)
    answered = load_answers(move, join_titles) if move is not None else None
    moved = move_all(answered, window, count, unit, seed) if answered else []
    plain = RetrieverEncoder(model, uses_bf16(precision, model.device), max_tokens)
    encoder = UnitEncoder(plain)
    log.info(f"exact match: {len(texts):,} documents of {tokens} tokens")
    profiles = exact_match(texts, encoder, seed, progress)
    if (folder / DECODER_BESIDE).is_dir():
        lm = load_encoder_decoder(folder, plain.bf16).to(model.device)
        profiles |= _of_decoder(texts, lm, window, max_tokens, seed, progress)
    if answered:
        others = untouched(answered, moved, window)
        asked = sum(len(m.answer.queries) for m in moved)
        log.info(
            f"moved passage: {asked:,} queries, {len(moved):,} answers at ten places each, "
            f"{len(others):,} other documents"
        )
        profiles |= moved_passage(moved, others, encoder, seed, progress)
    log.info(f"geometry: {len(two):,} pairs")
    found: Any = dict(geometry=geometry(two, encoder, progress), context=plain.slots)
    return ProbeResult(model=name, tokens=tokens, profiles=profiles, **found)


def _of_decoder(
    texts: Sequence[str],
    lm: EncoderDecoder,
    window: TokenWindow,
    max_tokens: int,
    seed: int,
    progress: bool,
) -> dict[str, Profile]:
    log.info(f"spans by place: {len(texts):,} documents of {window.size - SPARE} tokens")
    profiles = spans_by_place(texts, lm, window, seed, progress)
    pooled = exact_match(texts, DecoderPooling(lm, max_tokens), seed, progress)
    return profiles | {f"{test}, by the decoder": found for test, found in pooled.items()}


def probe_language_model(
    folder: Path,
    name: str,
    documents: Sequence[Document],
    *,
    max_tokens: int,
    count: int,
    seed: int,
    precision: Precision,
    progress: bool = True,
) -> ProbeResult:
    """Next-token loss of a causal LM by place; of an encoder-decoder, spans by place, and the exact
    match of its decoder's vectors. Arguments as for ``probe_retriever``.
    """
    silence_libraries()
    device = compute_device()
    bf16 = uses_bf16(precision, device)
    if is_encoder_decoder(folder):
        both = load_encoder_decoder(folder, bf16).to(device)
        window = TokenWindow(both.tokenizer, max_tokens - len(both.around([])))
        texts = long_texts(documents, window, count, seed)
        profiles = _of_decoder(texts, both, window, max_tokens, seed, progress)
    else:
        window = TokenWindow(load_tokenizer(folder), max_tokens)
        texts = long_texts(documents, window, count, seed)
        lm = load_language_model(folder, bf16=bf16, name=name).to(device)
        log.info(f"next-token loss: {len(texts):,} documents of {window.size - SPARE} tokens")
        profiles = loss_by_place(texts, lm, window, seed, progress)
    return ProbeResult(model=name, tokens=window.size - SPARE, profiles=profiles)


class UnitEncoder:
    """An encoder whose vectors are scaled to length one."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors."""
        return self._scaled(self.encoder.encode_queries(texts, progress=progress))

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors."""
        return self._scaled(self.encoder.encode_passages(texts, progress=progress))

    def _scaled(self, vectors_ND: Vectors) -> Vectors:
        norms_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
        unit_ND: Vectors = vectors_ND / np.maximum(norms_N1, 1e-12)
        return unit_ND
