"""Rankings of an LM's heads, best first: kept in files, which say whose heads they are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.lm.document_attention import InBatchAttention
from revela.lm.language_model import LanguageModel
from revela.lm.streams import ReadableLM
from revela.weights import cache_folder, fingerprint

log = logging.getLogger(__name__)

Head = tuple[int, int, float]
"""(layer, head, score)."""


def save_heads(path: Path, name: str, folder: Path, ranking: Sequence[Head]) -> None:
    """Write a ranking of heads, with the model that it belongs to."""
    with atomic_write(path) as temporary:
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
    kind: str, lm: LanguageModel, folder: Path, probe: Callable[[], list[Head]]
) -> list[Head]:
    """The ranking of this kind that is kept for this LM; where there is none, that of ``probe``,
    which is kept unless it is empty.

    Args:
        kind: what the heads look for.
        lm: in messages.
        folder: of its weights.
        probe: ranks them.
    """
    path = cache_folder() / "heads" / f"{fingerprint(folder)}-{kind}.json"
    if path.is_file():
        return heads_from_file(path, folder)
    log.info(f"probing the {lm.n_layers * lm.n_heads} heads of {lm.name}, once")
    if ranking := probe():
        save_heads(path, lm.name, folder, ranking)
    return ranking


BASE_GATE = 0.1


def probe_heads(lm: ReadableLM, groups: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Score every head by d loss(other) / d gate - d loss(sibling) / d gate; (L, H), higher is
    better.

    Args:
        lm: a language model; its parameters get no gradient.
        groups: (packed chunks, document of each chunk (B,)) pairs. Chunks without a sibling, or
            without a stranger, read nothing.
    """
    scores_LH = torch.zeros(lm.n_layers, lm.n_heads)
    count = 0
    for packed, document_B in groups:
        document_B = document_B.to(packed.ids_1T.device)
        same_BB = document_B[:, None] == document_B[None, :]
        other_BB = ~same_BB
        same_BB.fill_diagonal_(False)
        memory = lm.read(packed, range(lm.n_layers))
        for sign, pairs_BB in ((-1.0, same_BB), (1.0, other_BB)):
            weights_BB = pairs_BB.float() / pairs_BB.sum(dim=1, keepdim=True).clamp(min=1)
            gates_LH = torch.full(
                (lm.n_layers, lm.n_heads), BASE_GATE, device=document_B.device, requires_grad=True
            )
            loss = lm.loss(
                packed, memory, InBatchAttention(weights_BB, packed.lengths, gates_LH, v_norm=False)
            )
            scores_LH += sign * torch.autograd.grad(loss, gates_LH)[0].cpu()
        count += 1
    return scores_LH / max(1, count)


def ranked_heads(scores_LH: Tensor) -> list[tuple[int, int, float]]:
    """(layer, head, score), best first."""
    n_heads = scores_LH.shape[1]
    order = scores_LH.flatten().argsort(descending=True)
    return [(int(i) // n_heads, int(i) % n_heads, float(scores_LH.flatten()[i])) for i in order]
