"""An encoder that is held to its word: vectors of length one, and numbers in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from revela.errors import RevelaError
from revela.types import Encoder, Vectors


class Finite:
    """Another encoder's vectors, brought to length one.

    Args:
        encoder: the other.
        name: what to call it in messages.

    Raises:
        RevelaError: (when encoding) a vector is not finite.
    """

    def __init__(self, encoder: Encoder, name: str) -> None:
        self.encoder, self.name = encoder, name

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors."""
        return self._checked(self.encoder.encode_queries(texts, progress=progress))

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) unit vectors."""
        return self._checked(self.encoder.encode_passages(texts, progress=progress))

    def _checked(self, vectors_ND: Vectors) -> Vectors:
        if broken := int((~np.isfinite(vectors_ND)).any(axis=1).sum()):
            raise RevelaError(
                f"{self.name} gives vectors that are not finite for {broken:,} of {len(vectors_ND):,} texts: its weights are broken"
            )
        unit_ND: Vectors = vectors_ND / np.maximum(
            np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12
        )
        return unit_ND
