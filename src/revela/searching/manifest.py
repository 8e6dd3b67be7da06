"""The manifest of an index, part of its state (state.py): model, settings, measurements, and
whether it is finished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from revela.encoders.base import TextEncoder
from revela.encoders.cpu import has_bf16, has_gpu
from revela.encoders.model_files import fingerprint
from revela.encoders.prompts import OWN, GivenPrompts, Prompts, prompts_of
from revela.ranking.calibration import Calibration
from revela.text.analyzer import CORPUS_WORDS, Analyzer
from revela.text.chunk import PASSAGE_WORDS
from revela.types import Precision

VectorForm = Literal["float32", "int8", "binary"]


@dataclass(frozen=True)
class Indexing:
    """Settings of an index, which also hold for documents that are added later."""

    chunk_words: int = PASSAGE_WORDS
    """Maximum words per chunk, counted as for train; one that has more tokens than the model reads
    is cut again."""
    language: str = "auto"
    """Language whose words BM25 stems. auto: found in the text. none: nothing is stemmed. Or a code
    such as en, de or zh; en+de for several."""
    dimensions: int = 0
    "Keep this many dimensions of each vector, of those the model was trained for. 0: all."
    vectors: VectorForm = "binary"
    """Form of the vectors that a large index scans first; the best are scored again by the full
    vectors."""
    keep_tokens: bool = False
    """Keep each token's vector too, at one bit per number, so that search --rerank late-interaction
    takes milliseconds: about 8 kB more per chunk."""


@dataclass(frozen=True)
class Info:
    """The manifest of an index: model, settings and measurements."""

    model: str  # folder of the retriever
    fingerprint: str  # of that folder
    width: int  # of the stored vectors
    settings: Indexing
    columns: Mapping[str, str] = field(default_factory=dict)  # of metadata, and their Arrow types
    finished: bool = False  # the first documents are all in
    language: str = ""  # for ``Analyzer``; "": not found yet
    calibration: Calibration = field(default_factory=Calibration)
    precision: str = ""  # that the vectors were made in
    prompts: Prompts = field(default_factory=Prompts)  # that the vectors were made with

    def analyzer(self, cache_size: int = CORPUS_WORDS) -> Analyzer:
        """The analyzer that splits passages and queries into terms."""
        return Analyzer(self.language, cache_size)

    def precision_of(self, given: Precision) -> Precision:
        """The precision for queries and new documents: the given one. "auto" is that of the
        vectors, but fp32 instead of bf16 where bf16 is slow.
        """
        if given != "auto":
            return given
        if self.precision == "int8":
            return "int8"
        is_fast = self.precision != "fp32" and (has_bf16() or has_gpu())
        return "bf16" if is_fast else "fp32"

    def choices(self) -> Info:
        """The user's choices only, without measurements."""
        return replace(self, language="", calibration=Calibration())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    @lru_cache(1)
    def from_json(cls, text: str) -> Info:
        return TypeAdapter(cls).validate_json(text)


def new_info(
    model: Path,
    encoder: TextEncoder,
    settings: Indexing,
    metadata: Mapping[str, str],
    prompts: GivenPrompts = OWN,
) -> Info:
    """The manifest of a new index; ``prompts`` as given when the encoder was loaded."""
    width = encoder.encode_passages(["."]).shape[1]
    width = min(width, settings.dimensions or width)
    made = str(model.resolve()), fingerprint(model), width, settings, metadata
    return Info(*made, prompts=prompts_of(model, prompts), precision=encoder.precision)
