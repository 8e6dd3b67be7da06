"""Output for people: the log, progress bars, numbers and durations."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tqdm import tqdm

SHOWN_AFTER = 5.0  # seconds
# Characters that control a terminal, that it cannot show, that reorder text or that end lines.
CONTROL = "\x7f-\x9f\u2028-\u202e\u2066-\u206f"
_UNPRINTABLE = re.compile(f"[\x00-\x1f{CONTROL}\ud800-\udfff]")
MARKS = re.compile("[\u061c\u200e\u200f]")  # of text direction; common in right-to-left text


def progress_bar(
    what: str, unit: str, items: Iterable[Any] | None = None, total: int | None = None
) -> tqdm[Any]:
    """A progress bar, shown by the first process after ``SHOWN_AFTER`` and removed at the end."""
    from tqdm.auto import tqdm

    is_first = int(os.environ.get("RANK") or 0) == 0
    return tqdm(items, what, total, False, unit=unit, delay=SHOWN_AFTER, disable=not is_first)


def duration(minutes: float) -> str:
    """A duration for messages, in seconds below two minutes.

    >>> duration(0.2), duration(2.5)
    ('12.0 seconds', '2.5 minutes')
    """
    return f"{60 * minutes:.1f} seconds" if minutes < 2 else f"{minutes:.1f} minutes"


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun, for messages; ``many``, the plural, is by default ``one`` with an s.

    >>> counted(1, "document"), counted(2000, "document is", "documents are")
    ('1 document', '2,000 documents are')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def megabytes(size: int) -> str:
    """A number of bytes, for messages."""
    return f"{size / 1e6:,.1f} MB"


class LogLines(logging.Handler):
    """Prints revela's log, a line per message."""

    stream: Literal["stdout", "stderr"] = "stdout"

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(record.getMessage()), file=getattr(sys, self.stream), flush=True)


LOG_LINES = LogLines()


def print_log(stream: Literal["stdout", "stderr"]) -> None:
    """Print the package's log to this stream from now on."""
    LOG_LINES.stream = stream
    log = logging.getLogger("revela")
    log.setLevel(logging.INFO)
    if LOG_LINES not in log.handlers:
        log.addHandler(LOG_LINES)


@contextmanager
def show_log() -> Iterator[None]:
    """Print the package's log while open, unless the program has set up handlers for it."""
    log = logging.getLogger("revela")
    with ExitStack() as stack:
        if not log.hasHandlers():
            stack.callback(log.setLevel, log.level)
            stack.callback(log.removeHandler, LOG_LINES)
            print_log("stdout")
        yield


def printable(text: str) -> str:
    """Untrusted text, without characters that control the terminal."""
    return _UNPRINTABLE.sub("\ufffd", MARKS.sub("", text))
