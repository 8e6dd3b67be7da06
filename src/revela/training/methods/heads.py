"""A ranking of an LM's heads: found once for each LM and text, cached, saved and read again.

Revela gates heads that look to a related document (revela.py), and DREAM injects into heads that
look from a question to its answer (dream.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from revela.encoders.model_files import fingerprint
from revela.errors import RevelaError
from revela.files import atomic_write, cache_folder
from revela.training.distributed import from_rank_zero, is_rank_zero
from revela.training.lm.language_model import LanguageModel

log = logging.getLogger(__name__)

# Kinds of ranking, and what its best heads do.
KINDS = {
    "siblings": "look to a related document",
    "questions": "look from a question to its answer",
}
METHOD = {"siblings": "revela", "questions": "dream"}  # for which ``revela heads`` finds them
Head = tuple[int, int, float]
"""(layer, head, score)"""


def save_heads(path: Path, kind: str, name: str, folder: Path, ranking: Sequence[Head]) -> None:
    """Write a ranking of this kind with the name and fingerprint of the LM in ``folder``."""
    saved = {"lm": name, "fingerprint": fingerprint(folder), "kind": kind, "ranking": ranking}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(saved))


def heads_from_file(path: Path, kind: str, folder: Path) -> list[Head]:
    """Read a ranking of this kind that ``save_heads`` wrote for the LM in ``folder``.

    Raises:
        RevelaError: the file is not a ranking, is of another kind or another LM, or is empty.
    """
    make = f"revela heads --method {METHOD[kind]} --out"
    try:
        saved = json.loads(path.read_text())
        ranking = [(int(layer), int(head), float(score)) for layer, head, score in saved["ranking"]]
        owner, name, found = (str(saved[key]) for key in ("fingerprint", "lm", "kind"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RevelaError(
            f"{path} is not a ranking of heads: make one with {make} {path}"
        ) from error
    if owner != fingerprint(folder):
        raise RevelaError(
            f"{path} ranks the heads of {name}, not of this run's --lm: make another with {make}"
        )
    if found != kind:
        raise RevelaError(
            f"{path} ranks heads by how they {KINDS.get(found, found)}, and this method needs "
            f"those that {KINDS[kind]}: make another with {make}"
        )
    if not ranking:
        raise RevelaError(f"{path} names no head: make another with {make}")
    return ranking


def cached_ranking(
    kind: str, lm: LanguageModel, folder: Path, probed: Any, probe: Callable[[], list[Head]]
) -> list[Head]:
    """The cached ranking of an LM's heads, or else ``probe``'s, best first; the same in all ranks.

    An empty ranking is not cached.

    Args:
        kind: one of ``KINDS``.
        folder: holds the LM.
        probed: all that the probe reads, as JSON; the cached ranking is for this only.
    """
    read = hashlib.blake2b(json.dumps(probed).encode(errors="surrogatepass"), digest_size=8)
    name = f"{fingerprint(folder)}-{kind}-{read.hexdigest()}.json"
    path = cache_folder() / "heads" / name
    cached = from_rank_zero(lambda: heads_from_file(path, kind, folder) if path.is_file() else None)
    if cached is not None:
        return cached
    log.info(
        f"probing the {lm.n_layers * lm.n_heads} heads of {lm.name} for those that "
        f"{KINDS[kind]}, once for this language model and text"
    )
    own = probe()  # in all ranks: they may share the LM
    ranking = from_rank_zero(lambda: own)
    if ranking and is_rank_zero():
        save_heads(path, kind, lm.name, folder, ranking)
    return ranking


def ranked_heads(scores_LH: Tensor) -> list[Head]:
    """The heads by score, best first."""
    scores, order = (found.tolist() for found in scores_LH.flatten().sort(descending=True))
    n_heads = scores_LH.shape[1]
    return [(*divmod(i, n_heads), score) for i, score in zip(order, scores, strict=True)]
