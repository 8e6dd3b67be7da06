"""Dwell in the Beginning (ACL 2024): MS MARCO documents, whose folder is given as --pairs
(python -m research.msmarco_documents makes it). Our encoder-decoder starts from random weights, so
only the order of the rows can be expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from research.reproduce.papers.revela import plain
from research.reproduce.tables import MRR, OF_PAIRS, PAIRS, RECALL, Corpus, Row, Table

DOCUMENTS = Corpus("msmarco-documents", (PAIRS,))
SIZE = ("220M",)
NOT_OPEN = "no retriever of it in a form that revela opens"
SMALL = {"model": "new:tiny", "layers": 0, "lora_rank": 0, "lm_tokens": 256, "max_tokens": 256}


def stage(label: str, after: Row | None, settings: Mapping[str, Any], **small: Any) -> Row:
    """A stage of training, after another."""
    if after is not None:
        small["model"] = ""  # that of the stage before
    return Row(label, "", settings, {}, DOCUMENTS, after, small={**SMALL, **small}, sizes=SIZE)


def episodes(label: str, after: Row | None, count: int) -> Row:
    """Judged pairs with nine mined negatives, in episodes of two epochs."""
    settings = {"method": "dwell-paper", "pairs": [PAIRS], "max_epochs": 2 * count}
    steps = {"max_epochs": 0, "refresh_epochs": 0, "refresh_every": 4, "max_steps": 4 * count}
    return stage(label, after, settings, negatives=2, retriever_batch=0, **steps)


def row_of(pretraining: str, contrastive: str, count: int, after: Row | None) -> Row:
    name = f"T5-2K lm_pretraining={pretraining} contrastive={contrastive} episodes={count}"
    return episodes(name, after, count)


SPANS = stage("span corruption", None, {"method": "dwell-spans-paper"})
CROPS = stage("crops", SPANS, {"method": "dwell-crop-paper"}, groups_per_batch=1, retriever_batch=0)
STAGES = (
    row_of("no", "no", 1, None),
    row_of("yes", "no", 1, SPANS),
    row_of("yes", "yes", 1, CROPS),
    row_of("yes", "yes", 4, CROPS),
)


def table(name: str, shows: str, *rows: Row) -> Table:
    return Table(*(f"dwell-{name}", shows, rows, (OF_PAIRS,)), metrics=(MRR, RECALL), percent=False)


TABLES = (
    table(
        *("table1-msmarco", "MS MARCO documents: MRR@100 and recall@100, with five other models"),
        *(Row(name, sizes=("125M",), why_not=NOT_OPEN) for name in ("ANCE-MaxP",)),
        *(Row(name, sizes=("110M",), why_not=NOT_OPEN) for name in ("ADORE", "ICT", "SEED")),
        plain("RepLLaMA", "7B", "castorini/repllama-v1-7b-lora-doc"),
        episodes("T5-2K", CROPS, 4),
    ),
    table("table5-stages", "MRR@100 and recall@100 after each stage", *STAGES),
)
