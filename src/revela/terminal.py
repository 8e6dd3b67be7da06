"""Progress bars, and numbers and times in words, for messages."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

SHOWN_AFTER = 5.0  # seconds


def progress_bar(
    what: str, unit: str, items: Iterable[Any] | None = None, total: int | None = None
) -> tqdm[Any]:
    """A bar that the first process shows after ``SHOWN_AFTER``, and removes at the end."""
    from tqdm.auto import tqdm

    is_first = int(os.environ.get("RANK") or 0) == 0
    return tqdm(items, what, total, False, unit=unit, delay=SHOWN_AFTER, disable=not is_first)


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
