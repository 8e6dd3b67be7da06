"""Open a saved retriever for encoding, without torch if it is static."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from revela.encoder.static_encoder import StaticEncoder, is_static
from revela.errors import extra
from revela.settings import Precision

if TYPE_CHECKING:
    from revela.retriever.encode import RetrieverEncoder

    Loaded = RetrieverEncoder | StaticEncoder


def load_encoder(folder: Path, precision: Precision, max_tokens: int | None = None) -> Loaded:
    """Open a saved retriever, or any Sentence-Transformers folder, for encoding.

    Raises:
        RevelaError: the folder is not one, or is damaged.
    """
    if is_static(folder):
        return StaticEncoder.load(folder, max_tokens)
    with extra("train", f"{folder}, a model that is read by torch,"):
        from revela.retriever.encode import RetrieverEncoder
    return RetrieverEncoder.load(folder, precision, max_tokens)
