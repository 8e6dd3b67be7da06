"""All probes of one model: where in a text it looks, and how its vectors lie. Everything is read
and cut before anything is encoded.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from revela.device import uses_bf16
from revela.evaluation.beir import load_collection
from revela.evaluation.probe.answers import load_answers
from revela.evaluation.probe.geometry import Geometry, geometry, pairs_of_collection, pairs_of_text
from revela.evaluation.probe.moved_passage import Unit, move_all, moved_passage, untouched
from revela.evaluation.probe.position import SPARE, exact_match, long_texts, loss_by_place
from revela.evaluation.probe.profile import Profile
from revela.lm.language_model import load_language_model, load_tokenizer
from revela.quiet import quieten
from revela.retriever.build import load_retriever
from revela.retriever.encode import RetrieverEncoder
from revela.retriever.tokens import Ruler, ruler_of
from revela.settings import Precision
from revela.types import Document, Encoder, Vectors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What the probes say: profiles by test, over texts of so many tokens; and, of a retriever, the
    geometry of its vectors.
    """

    tokens: int
    profiles: dict[str, Profile]
    geometry: Geometry | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return dataclasses.asdict(self)


class UnitLength:
    """Another encoder's vectors, brought to length one."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors."""
        return _unit(self.encoder.encode_queries(texts, progress=progress))

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors."""
        return _unit(self.encoder.encode_passages(texts, progress=progress))


def _unit(vectors_ND: Vectors) -> Vectors:
    unit_ND: Vectors = vectors_ND / np.maximum(
        np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12
    )
    return unit_ND


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
) -> Found:
    """Exact match and geometry of a retriever; with ``move``, the moved passage.

    Args:
        folder: of Sentence Transformers.
        name: what to call it in messages.
        documents: what to sample from.
        max_tokens: longest text, prompt included; the model's own limit if that is less.
        count: how many documents, answers and pairs, at most.
        seed: of samples and intervals.
        precision: arithmetic.
        move: folder in BEIR layout with answers.
        join_titles: its documents are passages of articles.
        unit: what places of an answer count.
        pairs: folder in BEIR layout for the geometry; None: halves of chunks.
        progress: show bars.

    Raises:
        RevelaError: there is too little of anything, or a vector is not finite.
    """
    quieten()
    model = load_retriever(folder)
    ruler = ruler_of(model, name, max_tokens)
    texts = long_texts(documents, ruler, count, seed)
    two = (
        pairs_of_text(documents, count, seed)
        if pairs is None
        else pairs_of_collection(load_collection(pairs), count, seed)
    )
    answered = load_answers(move, join_titles) if move is not None else None
    moved = move_all(answered, ruler, count, unit, seed) if answered else []
    bf16 = uses_bf16(precision, model.device)
    encoder = UnitLength(RetrieverEncoder(model, bf16, max_tokens, name))
    log.info(f"exact match: {len(texts):,} documents of {ruler.room - SPARE} tokens")
    profiles = exact_match(texts, encoder, seed, progress)
    if answered:
        others = untouched(answered, moved, ruler)
        asked = sum(len(m.answer.queries) for m in moved)
        log.info(
            f"moved passage: {asked:,} queries, {len(moved):,} answers at ten places each, {len(others):,} other documents"
        )
        profiles |= moved_passage(moved, others, encoder, seed, progress)
    log.info(f"geometry: {len(two):,} pairs")
    return Found(ruler.room - SPARE, profiles, geometry(two, encoder, progress))


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
) -> Found:
    """Next-token loss of a causal LM by place; the arguments are those of ``probe_retriever``."""
    quieten()
    ruler = Ruler(load_tokenizer(folder), max_tokens)
    texts = long_texts(documents, ruler, count, seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lm = load_language_model(folder, bf16=uses_bf16(precision, device), name=name).to(device)
    log.info(f"next-token loss: {len(texts):,} documents of {ruler.room - SPARE} tokens")
    return Found(ruler.room - SPARE, loss_by_place(texts, lm, ruler, seed, progress))
