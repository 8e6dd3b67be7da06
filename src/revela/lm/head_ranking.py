"""Rankings of an LM's heads, best first: kept in files, which say whose heads they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from revela.errors import RevelaError
from revela.files import whole
from revela.lm.language_model import LanguageModel
from revela.types import Say
from revela.weights import cache_folder, fingerprint

Head = tuple[int, int, float]
"""(layer, head, score)."""


def save_heads(path: Path, name: str, folder: Path, ranking: Sequence[Head]) -> None:
    """Write a ranking of heads, with the model that it belongs to."""
    with whole(path) as temporary:
        temporary.write_text(
            json.dumps({"lm": name, "fingerprint": fingerprint(folder), "ranking": ranking})
        )


def heads_from_file(path: Path, folder: Path) -> list[Head]:
    """A ranking that ``save_heads`` wrote.

    Raises:
        RevelaError: it is none, or another model's.
    """
    try:
        saved = json.loads(path.read_text())
        ranking = [(int(layer), int(head), float(score)) for layer, head, score in saved["ranking"]]
        owner, name = saved["fingerprint"], saved["lm"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RevelaError(
            f"{path} is not a file of heads: make one with revela heads --objective dream --out {path}"
        ) from error
    if owner != fingerprint(folder):
        raise RevelaError(
            f"{path} ranks the heads of {name}, not of this run's --lm: make another with revela heads --objective dream --out"
        )
    return ranking


def cached_ranking(
    kind: str, lm: LanguageModel, folder: Path, probe: Callable[[], list[Head]], say: Say
) -> list[Head]:
    """The ranking of this kind that is kept for this LM; where there is none, that of ``probe``,
    which is kept unless it is empty.

    Args:
        kind: what the heads look for.
        lm: in messages.
        folder: of its weights.
        probe: ranks them.
        say: prints a line.
    """
    path = cache_folder() / "heads" / f"{fingerprint(folder)}-{kind}.json"
    if path.is_file():
        return heads_from_file(path, folder)
    say(f"probing the {lm.n_layers * lm.n_heads} heads of {lm.name}, once")
    if ranking := probe():
        save_heads(path, lm.name, folder, ranking)
    return ranking
