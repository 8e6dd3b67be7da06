"""Progress bars, and numbers and times in words, for messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

SHOWN_AFTER = 5.0  # seconds
LARGE_MODEL = 2_000_000_000  # bytes of weights that take longer to load


def progress_bar(
    what: str, unit: str, items: Iterable[Any] | None = None, total: int | None = None
) -> tqdm[Any]:
    """A bar that the first process shows after ``SHOWN_AFTER``, and removes at the end."""
    from tqdm.auto import tqdm

    return tqdm(
        items, what, total, False, unit=unit, delay=SHOWN_AFTER, disable=not _is_first_process()
    )


def duration(minutes: float) -> str:
    """A time as a person reads it: in seconds below two minutes.

    >>> duration(0.2), duration(2.5)
    ('12.0 seconds', '2.5 minutes')
    """
    return f"{60 * minutes:.1f} seconds" if minutes < 2 else f"{minutes:.1f} minutes"


def counted(number: int, one: str, many: str = "") -> str:
    """A number and what it counts, for messages; ``many`` is by default ``one`` with an s.

    >>> counted(1, "document"), counted(2000, "document is", "documents are")
    ('1 document', '2,000 documents are')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def megabytes(size: int) -> str:
    """A number of bytes, for messages."""
    return f"{size / 1e6:,.1f} MB"


@contextmanager
def loading_bar(folder: Path) -> Iterator[None]:
    """While open, transformers shows its bar if the weights are large."""
    from transformers.utils import logging as bars

    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if size < LARGE_MODEL or not _is_first_process():
        yield
        return
    bars.enable_progress_bar()
    try:
        yield
    finally:
        bars.disable_progress_bar()


def _is_first_process() -> bool:
    return int(os.environ.get("RANK") or 0) == 0
