"""Open a saved retriever for encoding: as a table of words or as a graph, else by torch."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from revela.encoders.base import TextEncoder
from revela.encoders.cpu import has_gpu, has_torch
from revela.encoders.graph_encoder import GraphEncoder
from revela.encoders.graphs import VERSION, export_folder, open_graph
from revela.encoders.model_files import (
    check_retriever,
    embedded_name,
    fingerprint,
    saved_for_dot,
    table_folder,
    words_to_vectors_of,
)
from revela.encoders.prompts import OWN, Given
from revela.encoders.static_encoder import StaticEncoder
from revela.errors import RevelaError, extra, first_line
from revela.files import atomic_write, cache_folder
from revela.types import Precision

log = logging.getLogger(__name__)
MAX_DIFFERENCE = 3e-4  # between a graph's vectors and torch's, in any component


def load_encoder(
    folder: Path,
    precision: Precision = "auto",
    max_tokens: int | None = None,
    prompts: Given = OWN,
    as_compared: bool = False,
) -> TextEncoder:
    """Open a saved retriever, or any Sentence-Transformers folder, for encoding.

    Args:
        folder: of the retriever.
        precision: arithmetic; "auto" is the fastest on this hardware: with a GPU and torch, torch's
            bf16.
        max_tokens: truncate texts here instead of at the model's own limit.
        prompts: replace the model's own.
        as_compared: give the vectors of a model for dot products as they are, by torch. Otherwise
            all vectors have length one.

    Raises:
        RevelaError: the folder is not one, is damaged, or needs torch, which is not installed.
    """
    check_retriever(folder)
    by_dot = as_compared and saved_for_dot(folder)
    encoder = _open(folder, precision, max_tokens, prompts, by_dot)
    encoder.words_to_vectors = words_to_vectors_of(folder)
    return encoder


def _open(
    folder: Path, precision: Precision, max_tokens: int | None, prompts: Given, by_dot: bool
) -> TextEncoder:
    """By the first that reads the folder: a table, a graph, torch."""
    if table_folder(folder) and not by_dot:
        return StaticEncoder.load(folder, max_tokens, prompts)
    if not by_dot and (precision == "int8" or not has_gpu()):
        how = precision, max_tokens, prompts
        encoder = _open_graph(folder, *how)
        if encoder is None and precision == "int8":  # for an index whose export is gone
            keep_graph(folder, even_with_gpu=True)
            encoder = _open_graph(folder, *how)
        if encoder is not None:
            return encoder
        if precision == "int8":
            raise RevelaError(
                f"{folder} cannot be read in int8, as only torch reads it here: install the extra "
                "train to export it, or give --precision fp32"
            )
    with extra("train", f"{folder}, a model that only torch reads,"):
        from revela.encoders.torch_encoder import TorchEncoder

        return TorchEncoder.load(folder, precision, max_tokens, prompts, by_dot)


def _open_graph(
    folder: Path, precision: Precision, max_tokens: int | None = None, prompts: Given = OWN
) -> GraphEncoder | None:
    """``open_graph``; None also for a graph that gives other vectors than torch.

    They are compared once, and the cache keeps the result. Embedded models are known, and exports
    were compared when they were made. Without torch a graph is used as it is.
    """
    digest, agrees = fingerprint(folder), True
    kept = cache_folder() / "compared" / f"{digest}-{VERSION}.json"
    if not (export_folder(digest).exists() or embedded_name(folder)):
        if kept.is_file():
            agrees = json.loads(kept.read_text(encoding="utf-8"))
        elif has_torch() and find_spec("sentence_transformers"):
            if (graph := open_graph(folder, "fp32")) is None:
                return None
            agrees = _agrees_with_torch(folder, graph)
            with suppress(RevelaError, OSError), atomic_write(kept) as temporary:
                temporary.write_text(json.dumps(agrees), encoding="utf-8")
    return open_graph(folder, precision, max_tokens, prompts) if agrees else None


def _agrees_with_torch(folder: Path, graph: GraphEncoder) -> bool:
    """Whether a folder's graph gives the vectors that sentence-transformers gives."""
    from revela.encoders.graph_export import difference
    from revela.encoders.torch_model import open_model

    agrees = difference(graph, open_model(folder, device="cpu")) < MAX_DIFFERENCE
    if not agrees:
        log.info(f"{folder}: its graph gives other vectors than torch, and is not used")
    return agrees


def keep_graph(folder: Path, even_with_gpu: bool = False) -> None:
    """Export a retriever without a graph, once, so that later runs need no torch. If it cannot be
    exported, torch goes on to read it, and this is logged. Does nothing with a GPU, unless
    ``even_with_gpu``.
    """
    if has_gpu() and not even_with_gpu:
        return
    if table_folder(folder) or export_folder(fingerprint(folder)).exists():
        return
    if not has_torch() or _open_graph(folder, "fp32") is not None:
        return
    try:
        from revela.encoders.graph_export import export_to_cache

        export_to_cache(folder)
    except Exception as error:  # of the exporter
        log.info(f"{folder} is read by torch at each start ({first_line(error)})")
