"""Run all probes of one model. All texts are read and cut before any is encoded, so that bad input
fails early.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median

from revela.encoders.torch_model import open_model, uses_bf16
from revela.evaluation.collection import load_collection
from revela.quiet_libraries import silence_libraries
from revela.training.device import compute_device
from revela.training.lm.encoder_decoder import FOLDER as DECODER_FOLDER
from revela.training.lm.encoder_decoder import EncoderDecoder, load_encoder_decoder
from revela.training.probes.decoder import DecoderPooling, spans_by_place
from revela.training.probes.exact_match import exact_match
from revela.training.probes.geometry import Geometry, geometry, pairs_of_collection, pairs_of_text
from revela.training.probes.moved_passage import cut_others, load_answers, move_all, moved_passage
from revela.training.probes.places import SPARE, Profile, TokenWindow, long_texts, token_window
from revela.training.retriever.module import RetrieverEncoder
from revela.types import Document, Precision

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeOptions:
    """Options of a probe.

    Args:
        max_tokens: maximum tokens per text, prompt included; at most the model's own limit.
        count: maximum number of documents, of answers, and of pairs of a folder.
        move: folder in BEIR layout with answers to move.
        pairs: folders in BEIR layout for the geometry; none: halves of chunks.
    """

    max_tokens: int = 512
    count: int = 200
    seed: int = 0
    precision: Precision = "auto"
    move: Path | None = None
    pairs: Sequence[Path] = ()


@dataclass(frozen=True)
class ProbeResult:
    """probe.json.

    Attributes:
        profiles: test -> profile.
        tokens: tokens per text.
        geometry: of a retriever.
        context: number of documents in a contextual retriever's context.
        answers_begin: the median number of characters before an answer in its document; 0: none.
    """

    profiles: dict[str, Profile]
    model: str = ""
    corpus: list[str] = field(default_factory=list)
    tokens: int = 0
    geometry: Geometry | None = None
    context: int = 0
    answers_begin: float = 0.0


def probe_retriever(
    folder: Path, name: str, documents: Sequence[Document], options: ProbeOptions
) -> ProbeResult:
    """Probe a retriever: exact match, moved passages (with ``options.move``), geometry, and the
    decoder if one is saved with it.
    """
    silence_libraries()
    count, seed = options.count, options.seed
    model = open_model(folder)
    bf16 = uses_bf16(options.precision, model.device)
    encoder = RetrieverEncoder(model, bf16)
    encoder.retriever.lower_limit(options.max_tokens)
    window = token_window(encoder.retriever, name)
    texts = long_texts(documents, window, count, seed)
    judged = (pairs_of_collection(load_collection(f), count, seed) for f in options.pairs)
    pairs = [*chain.from_iterable(judged)] or pairs_of_text(documents, count, seed)
    answered = options.move and load_answers(options.move)
    moved = move_all(answered, window, count, seed) if answered else []
    begin = median(a.begin for a in answered.answers) if answered else 0.0
    tokens = window.size - SPARE
    log.info(f"exact match: {len(texts):,} documents of {tokens} tokens")
    profiles = exact_match(texts, encoder)
    if (folder / DECODER_FOLDER).is_dir():
        lm = load_encoder_decoder(folder, bf16).to(model.device)
        profiles |= _decoder_profiles(texts, lm, options)
    if answered:
        others = cut_others(answered, moved, window)
        queries = sum(len(m.answer.queries) for m in moved)
        log.info(
            f"moved passage: {queries:,} queries, {len(moved):,} answers at ten places each, "
            f"{len(others):,} other documents; half of the answers begin before character "
            f"{begin:,.0f}"
        )
        profiles |= moved_passage(moved, others, encoder)
    log.info(f"geometry: {len(pairs):,} pairs")
    measured = geometry(pairs, encoder)
    return ProbeResult(profiles, name, [], tokens, measured, encoder.slots, begin)


def probe_encoder_decoder(
    folder: Path, name: str, documents: Sequence[Document], options: ProbeOptions
) -> ProbeResult:
    """Probe an encoder-decoder: spans by place, and exact match of the decoder's vectors."""
    silence_libraries()
    device = compute_device()
    lm = load_encoder_decoder(folder, uses_bf16(options.precision, device)).to(device)
    window = TokenWindow(lm.tokenizer, options.max_tokens - len(lm.with_special_tokens([])))
    texts = long_texts(documents, window, options.count, options.seed)
    return ProbeResult(_decoder_profiles(texts, lm, options), name, tokens=window.size - SPARE)


def _decoder_profiles(
    texts: Sequence[str], lm: EncoderDecoder, options: ProbeOptions
) -> dict[str, Profile]:
    log.info(f"spans by place: {len(texts):,} documents")
    profiles = spans_by_place(texts, lm, options.seed)
    pooled = exact_match(texts, DecoderPooling(lm, options.max_tokens))
    return profiles | {f"{test}, by the decoder": found for test, found in pooled.items()}
