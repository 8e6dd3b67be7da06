"""Encode by onnxruntime, without torch: what onnx.py has exported, or keeps in the cache.

Shapes: N texts, B texts of a batch, L tokens, D width of the vectors.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from revela.errors import RevelaError, extra, first_line
from revela.types import Vectors
from revela.weights import cache_folder

MODEL, TOKENIZER, CONFIG = "model.onnx", "tokenizer.json", "retriever.json"
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
BATCH = 32  # texts


def copy_folder(fingerprint: str) -> Path:
    """Where the copy of a retriever with this fingerprint is kept."""
    return cache_folder() / "onnx" / fingerprint


def kept_copy(fingerprint: str) -> OnnxEncoder | None:
    """The encoder of a retriever's copy, if there is one and onnxruntime is installed.

    Raises:
        RevelaError: the copy is damaged.
    """
    folder = copy_folder(fingerprint)
    if not folder.is_dir() or importlib.util.find_spec("onnxruntime") is None:
        return None
    try:
        return OnnxEncoder(folder)
    except Exception as error:  # onnxruntime and tokenizers raise no other
        raise RevelaError(
            f"{folder} cannot be read ({first_line(error)}): remove it, and torch is used instead"
        ) from error


class OnnxEncoder:
    """The ``Encoder`` of an exported folder; ``threads`` of 0 are all cores."""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        with extra("onnx", "an ONNX model"):
            import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self.session = onnxruntime.InferenceSession(
            str(folder / MODEL), options, providers=["CPUExecutionProvider"]
        )
        self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self.config: dict[str, Any] = json.loads((folder / CONFIG).read_text())

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of length one."""
        return self._encode(texts, self.config["prompts"]["query"], progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of length one."""
        return self._encode(texts, self.config["prompts"]["passage"], progress)

    def _encode(self, texts: Sequence[str], prompt: str, progress: bool) -> Vectors:
        vectors_ND = np.empty((len(texts), self.config["dimension"]), dtype=np.float32)
        if "<|" in prompt:  # maybe the slots of a context
            from revela.retriever.context import STEM, read_as_text

            texts = read_as_text(texts) if STEM in prompt else texts
        by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in tqdm(range(0, len(texts), BATCH), unit="batch", disable=not progress):
            rows = by_length[start : start + BATCH]
            # An empty text has no token to pool.
            read = [prompt + (texts[i] if texts[i].strip() else ".") for i in rows]
            encodings = self.tokenizer.encode_batch(read)
            ids_BL = np.array([e.ids for e in encodings], np.int64)
            mask_BL = np.array([e.attention_mask for e in encodings], np.int64)
            inputs = dict(zip(INPUTS, (ids_BL, mask_BL), strict=True))
            vectors_ND[rows] = self.session.run([OUTPUT], inputs)[0]
        return vectors_ND
