"""What an index folder holds beside its table: index.json, which says what made the index and
whether it is finished, and the context of a retriever that reads one (contexts.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from revela.errors import RevelaError
from revela.files import LOCK, atomic_write, hidden_prefix
from revela.index.calibration import Calibration
from revela.index.language import CORPUS_WORDS, Analyzer, FormerEnglish, Terms
from revela.settings import Indexing

INFO, CONTEXT = "index.json", "context.safetensors"
FORMAT = 5
EARLIER = (3, 4)  # formats that can be read, too: without terms of their own


@dataclass(frozen=True)
class Info:
    """The contents of ``index.json``.

    Args:
        model: folder of the retriever that makes the vectors.
        fingerprint: of that folder.
        width: of the stored vectors.
        settings: how documents are cut and vectors are held.
        columns: metadata fields and their Arrow types.
        finished: false until the first documents are all in.
        format: version of the folder's layout.
        language: of the terms in the table, as ``Analyzer`` takes it; "" until the first documents
            are known, None in an index of an earlier version, which keeps LanceDB's English.
        calibration: how well its words and vectors find its passages.
        context: of a retriever with slots: the digest of its rows, what they were drawn from
            (``Context.about``), and how many passages the index held then.
    """

    model: str
    fingerprint: str
    width: int
    settings: Indexing
    columns: Mapping[str, str] = field(default_factory=dict)
    finished: bool = False
    format: int = FORMAT
    language: str | None = ""
    calibration: Calibration = field(default_factory=Calibration)
    context: Mapping[str, Any] | None = None

    def analyzer(self, known_words: int = CORPUS_WORDS) -> Terms:
        """Finds the terms of its passages and queries; arguments as for ``Analyzer``."""
        if self.language is None:
            return FormerEnglish()
        return Analyzer(self.language, known_words)

    def save(self, folder: Path) -> None:
        with atomic_write(folder / INFO) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def read_info(folder: Path) -> Info:
    """Read ``index.json`` of a folder.

    Raises:
        RevelaError: it is not there, is damaged, or is another version's.
    """
    if not (folder / INFO).is_file():
        raise RevelaError(f"{folder} is not an index: it has no {INFO}; make one with revela index")
    try:
        found = json.loads((folder / INFO).read_text(encoding="utf-8"))
        if found.get("format") in EARLIER:
            found["language"] = None
        if found.get("format") in (FORMAT, *EARLIER):
            found["calibration"] = Calibration(**found.get("calibration", {}))
            return Info(**{**found, "settings": Indexing(**found["settings"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RevelaError(
            f"{folder} is damaged ({INFO}: {error}): make it again with revela index"
        ) from error
    raise RevelaError(
        f"{folder} was made by another version of revela: make it again with revela index"
    )


def unfinished_in(folder: Path) -> Info | None:
    """The manifest that a killed run has left in this folder; None if the folder is free.

    Raises:
        RevelaError: the folder holds a finished index, or something else.
    """
    # What is written before index.json is there.
    early = (LOCK, CONTEXT, hidden_prefix(CONTEXT), hidden_prefix(INFO))
    if not folder.exists() or (
        folder.is_dir() and all(entry.name.startswith(early) for entry in folder.iterdir())
    ):
        return None
    if not (folder / INFO).is_file() or (info := read_info(folder)).finished:
        raise RevelaError(
            f"{folder} exists: choose another --out, or add to an index with --append"
        )
    return info
