"""Open a saved retriever for encoding: as a table of words or as a graph, else by torch."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revela.embedded import is_embedded
from revela.encoder.graph_encoder import GraphEncoder
from revela.encoder.graphs import Comparison, export_folder, open_graph
from revela.encoder.processor import has_gpu, has_torch
from revela.encoder.prompts import OWN, Given, prompts_of
from revela.encoder.static_encoder import StaticEncoder, is_static
from revela.errors import RevelaError, extra, first_line
from revela.model_files import MissingWeights, check_retriever, fingerprint
from revela.settings import Precision

if TYPE_CHECKING:
    from revela.retriever.encode import RetrieverEncoder

    Loaded = RetrieverEncoder | StaticEncoder | GraphEncoder

log = logging.getLogger(__name__)
MIN_COSINE = 0.9999  # between a graph's vectors and torch's
# Capitals, accents, other alphabets, white space, and a text that every limit of 512 truncates.
SAMPLE = (
    "The NATO summit in Paris",
    "Übermäßig müde ÄRZTE, café à la crème, Đà Nẵng",
    "漢字とかな, русский текст, العربية",
    "two\r\nlines  of\ttext",
    " ".join(map(str, range(1000))),
)


def load_encoder(
    folder: Path,
    precision: Precision = "auto",
    max_tokens: int | None = None,
    prompts: Given = OWN,
) -> Loaded:
    """Open a saved retriever, or any Sentence-Transformers folder, for encoding.

    Args:
        folder: of the retriever.
        precision: arithmetic; "auto" is the fastest on this hardware: with a GPU and torch, torch's
            bf16.
        max_tokens: truncate texts here instead of at the model's own limit.
        prompts: replace the model's own.

    Raises:
        RevelaError: the folder is not one, is damaged, or needs torch, which is not installed.
    """
    check_retriever(folder)
    if is_static(folder):
        return StaticEncoder.load(folder, max_tokens, prompts)
    if precision == "int8" or not has_gpu():
        compare_with_torch(folder)
        how = precision, max_tokens, prompts_of(folder, prompts)
        encoder = open_graph(folder, *how)
        if encoder is None and precision == "int8":  # for an index whose export is gone
            keep_graph(folder, even_with_gpu=True)
            encoder = open_graph(folder, *how)
        if encoder is not None:
            return encoder
        if precision == "int8":
            raise RevelaError(
                f"{folder} cannot be read in int8, as only torch reads it here: install the extra "
                "train to export it, or give --precision fp32"
            )
    with extra("train", f"{folder}, a model that only torch reads,"):
        from revela.retriever.encode import RetrieverEncoder
    return RetrieverEncoder.load(folder, precision, max_tokens, prompts)


def compare_with_torch(folder: Path) -> None:
    """Compare the vectors of a folder's graph with torch's, once, and keep the result for
    ``open_graph``: whether they agree, perhaps only with the tokenizer of transformers.

    Does nothing without torch, for an embedded model, and for an export, which is compared when it
    is made.

    Raises:
        RevelaError: the folder lacks weights.
    """
    digest = fingerprint(folder)
    is_known = Comparison.of(digest) or export_folder(digest).exists() or is_embedded(folder)
    if is_known or not has_torch() or open_graph(folder, "fp32") is None:
        return
    try:
        from revela.retriever.encode import RetrieverEncoder

        torchs = RetrieverEncoder.load(folder, "fp32")
    except ImportError:
        return
    except MissingWeights:
        raise
    except RevelaError as error:  # perhaps it needs code of its own
        log.info(f"{error}: its graph is used without a comparison")
        return Comparison(True).keep(digest)
    expected = torchs.encode_queries(SAMPLE), torchs.encode_passages(SAMPLE)
    found, own = Comparison(False), getattr(torchs.retriever.tokenizer, "backend_tokenizer", None)
    for tokenizer in ("", *([own.to_str()] if own else ())):
        with suppress(Exception):  # of OpenVINO, for a graph that does not fit
            how: Any = "fp32", None, prompts_of(folder), Comparison(True, tokenizer)
            encoder: Any = open_graph(folder, *how)
            vectors = encoder.encode_queries(SAMPLE), encoder.encode_passages(SAMPLE)
            if (np.array(vectors) * expected).sum(axis=2).min() > MIN_COSINE:
                found = Comparison(True, tokenizer)
                break
    if not found.agrees:
        log.info(f"{folder}: the graph gives other vectors than the weights, and is not used")
    found.keep(digest)


def keep_graph(folder: Path, even_with_gpu: bool = False) -> None:
    """Export a retriever without a graph, once, so that later runs need no torch. If it cannot be
    exported, torch goes on to read it, and this is logged. Does nothing with a GPU, unless
    ``even_with_gpu``.
    """
    if has_gpu() and not even_with_gpu:
        return
    if is_static(folder) or export_folder(fingerprint(folder)).exists():
        return
    compare_with_torch(folder)
    if not has_torch() or open_graph(folder, "fp32") is not None:
        return
    try:
        from revela.retriever.onnx_export import export_to_cache

        export_to_cache(folder)
    except Exception as error:  # of the exporter
        log.info(f"{folder} is read by torch at each start ({first_line(error)})")
