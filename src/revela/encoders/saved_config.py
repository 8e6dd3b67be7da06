"""Read and write revela's own keys in a retriever's ``config_sentence_transformers.json``.

sentence-transformers ignores these keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from revela.errors import RevelaError

FILE = "config_sentence_transformers.json"
MATRYOSHKA, WORDS_TO_VECTORS = "matryoshka_dims", "words_to_vectors"


def read_config(folder: Path) -> dict[str, Any]:
    """The whole configuration; {} if it cannot be read."""
    try:
        config = json.loads((folder / FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def add_to_config(folder: Path, matryoshka: Sequence[int], words_to_vectors: float) -> None:
    """Add the widths that vectors may be truncated to, and the minimum of W / V."""
    config = read_config(folder)
    if matryoshka:
        config[MATRYOSHKA] = sorted(set(matryoshka))
    if words_to_vectors != 1:
        config[WORDS_TO_VECTORS] = words_to_vectors
    (folder / FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")


def trained_dimensions(folder: Path) -> list[int]:
    """The widths that a model was trained to truncate its vectors to."""
    dimensions = read_config(folder).get(MATRYOSHKA)
    return dimensions if isinstance(dimensions, list) else []


def words_to_vectors_of(folder: Path) -> float:
    """The minimum of W / V (words to vectors) in fused search (ranking/fusion.py); 1 by default."""
    least = read_config(folder).get(WORDS_TO_VECTORS)
    return max(1.0, float(least)) if isinstance(least, int | float) else 1.0


def check_dimensions(folder: Path, dimensions: int) -> None:
    """Raise RevelaError if a model was not trained for this number of dimensions (0: all)."""
    trained = trained_dimensions(folder)
    if dimensions and dimensions not in trained:
        only = f"{', '.join(map(str, trained))} only" if trained else "all its dimensions only"
        raise RevelaError(
            f"--dimensions {dimensions}: {folder} was trained for {only}; "
            "give one of those, or leave the flag away"
        )
