"""Settings with --small: the same rows and code in a minute or a few on two cores. Their numbers
say nothing about a method: they show that everything runs before a GPU is paid for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from research.reproduce.tables import Row, Table, merged

STEPS = 6  # of the row with the most published steps; others have their share of it
COLLECTIONS = 2
MODEL = "embedded:smollm2-135m"
SMALL: Mapping[str, Any] = {
    "model": MODEL,
    "lm": MODEL,
    "layers": 2,
    "lora_rank": 8,
    "chunk_words": 48,
    "lm_tokens": 64,
    "max_tokens": 64,
    "group_size": 4,
    "groups_per_batch": 1,
    "warmup_steps": 2,
    "check_every": 0,
    "held_out": 0.0,
    "max_epochs": 0,
    # DREAM: questions by the small model, with examples; heads of the small model.
    "query_lm": "",
    "question_prompt": "",
    "max_queries": 24,
    "heads": "",
    "probe_questions": 8,
}


def small_settings(
    table: Table, row: Row, settings: Mapping[str, Any], processes: int
) -> dict[str, Any]:
    """What --small puts above a row's published settings."""
    most = max((_steps(other.settings) for other in table.rows if other.settings), default=0)
    steps = _steps(settings)
    share = steps / most if most and steps else 1.0
    small = {name: value for name, value in SMALL.items() if name not in table.small_keeps}
    small |= {"groups_per_step": processes, "max_steps": max(2, round(STEPS * share))}
    return {**small, **row.small}


def _steps(settings: Mapping[str, Any]) -> int:
    return merged(settings)[0].training.max_steps
