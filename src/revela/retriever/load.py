"""Open a saved retriever for encoding: as a table of words or as a graph, else by torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from revela.encoder.graph_encoder import GraphEncoder
from revela.encoder.graphs import export_folder, open_graph
from revela.encoder.processor import has_gpu, has_openvino, has_torch
from revela.encoder.prompts import OWN, Given, prompts_of
from revela.encoder.static_encoder import StaticEncoder, is_static
from revela.errors import RevelaError, extra, first_line
from revela.model_files import check_retriever, fingerprint
from revela.settings import Precision

if TYPE_CHECKING:
    from revela.retriever.encode import RetrieverEncoder

    Loaded = RetrieverEncoder | StaticEncoder | GraphEncoder

log = logging.getLogger(__name__)


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
    if precision == "int8" or (not has_gpu() and has_openvino()):
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


def keep_graph(folder: Path, even_with_gpu: bool = False) -> None:
    """Export a retriever without a graph, once, so that later runs need no torch. If it cannot be
    exported, torch goes on to read it, and this is logged. Does nothing with a GPU, unless
    ``even_with_gpu``.
    """
    if (has_gpu() and not even_with_gpu) or not has_openvino():
        return
    if is_static(folder) or export_folder(fingerprint(folder)).exists():
        return
    if not has_torch() or open_graph(folder, "fp32") is not None:
        return
    try:
        from revela.retriever.onnx_export import export_to_cache

        export_to_cache(folder)
    except Exception as error:  # of the exporter
        log.info(f"{folder} is read by torch at each start ({first_line(error)})")
