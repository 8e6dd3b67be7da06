"""Rankings of an LM's heads, best first: by a probe of in-batch attention, cached, in files.

The probe needs no labels. In-batch attention with a gate g per head (0.1 everywhere) weights, for
each chunk, either its siblings (the other chunks of its document) or the chunks of other documents
equally. A head is good if more of it lowers the next-token loss on siblings and raises it on
others:

    score = d loss(others) / d g - d loss(siblings) / d g                                  (ours)

A file of a ranking names its LM by a fingerprint, and is refused with another LM. query_heads.py
ranks heads for DREAM.

Shapes: B chunks of a group, L layers, H heads per layer.
"""

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
from revela.lm.in_batch_attention import InBatchAttention
from revela.lm.language_model import LanguageModel
from revela.lm.streams import ReadableLM
from revela.processes import is_first, of_first
from revela.weights import cache_folder, fingerprint

log = logging.getLogger(__name__)

BASE_GATE = 0.1
# What heads are ranked by, which is in the name of a cached ranking: what the best of them do.
SOUGHT = {
    "siblings": "look to a related document",
    "questions": "look from a question to its answer",
}
SOUGHT["questions-without-outliers"] = SOUGHT["questions"]
Head = tuple[int, int, float]
"""(layer, head, score)"""


def save_heads(path: Path, name: str, folder: Path, ranking: Sequence[Head]) -> None:
    """Write a ranking of heads with the name and fingerprint of the LM in ``folder``."""
    saved = {"lm": name, "fingerprint": fingerprint(folder), "ranking": ranking}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(saved))


def heads_from_file(path: Path, folder: Path) -> list[Head]:
    """Read a ranking that ``save_heads`` wrote for the LM in ``folder``.

    Raises:
        RevelaError: the file is not one of ``save_heads``, or that of another LM.
    """
    try:
        saved = json.loads(path.read_text())
        ranking = [(int(layer), int(head), float(score)) for layer, head, score in saved["ranking"]]
        owner, name = saved["fingerprint"], saved["lm"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RevelaError(
            f"{path} is not a ranking of heads: "
            f"make one with revela heads --objective dream --out {path}"
        ) from error
    if owner != fingerprint(folder):
        raise RevelaError(
            f"{path} ranks the heads of {name}, not of this run's --lm: "
            "make another with revela heads --objective dream --out"
        )
    return ranking


def cached_ranking(
    kind: str, lm: LanguageModel, folder: Path, probe: Callable[[], list[Head]]
) -> list[Head]:
    """The cached ranking of an LM's heads, or that of ``probe``, which is cached unless empty; the
    same in all processes.

    Args:
        kind: one of ``SOUGHT``.
        lm: the language model.
        folder: its weights, whose fingerprint is part of the file's name.
        probe: ranks the heads, best first.
    """
    path = cache_folder() / "heads" / f"{fingerprint(folder)}-{kind}.json"
    known = of_first(lambda: heads_from_file(path, folder) if path.is_file() else None)
    if known is not None:
        return known
    log.info(
        f"probing the {lm.n_layers * lm.n_heads} heads of {lm.name} for those that "
        f"{SOUGHT[kind]}, once for this language model"
    )
    found = probe()  # in all processes: they may share the LM
    ranking = of_first(lambda: found)
    if ranking and is_first():
        save_heads(path, lm.name, folder, ranking)
    return ranking


def probe_heads(lm: ReadableLM, groups: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Score of every head as a head of in-batch attention, (L, H); higher is better.

    Args:
        lm: a language model; its parameters get no gradient.
        groups: (packed chunks, document of each chunk (B,)) pairs. A chunk attends to nothing
            where it has no sibling, or where its group has no other document.
    """
    shape = lm.n_layers, lm.n_heads
    scores_LH, count = torch.zeros(shape), 0
    for packed, document_B in groups:
        document_B = document_B.to(packed.ids_1T.device)
        same_BB = document_B[:, None] == document_B[None, :]
        other_BB = ~same_BB
        same_BB.fill_diagonal_(False)
        memory = lm.read(packed, range(lm.n_layers))
        for sign, pairs_BB in ((-1.0, same_BB), (1.0, other_BB)):
            weights_BB = pairs_BB.float() / pairs_BB.sum(dim=1, keepdim=True).clamp(min=1)
            gates_LH = torch.full(shape, BASE_GATE, device=document_B.device, requires_grad=True)
            mix = InBatchAttention(weights_BB, packed.lengths, gates_LH, v_norm=False)
            loss = lm.loss(packed, memory, mix)
            scores_LH += sign * torch.autograd.grad(loss, gates_LH)[0].cpu()
        count += 1
    return scores_LH / max(1, count)


def ranked_heads(scores_LH: Tensor) -> list[Head]:
    """The heads by score, best first."""
    n_heads = scores_LH.shape[1]
    order = scores_LH.flatten().argsort(descending=True)
    return [(int(i) // n_heads, int(i) % n_heads, float(scores_LH.flatten()[i])) for i in order]
