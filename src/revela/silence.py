"""Turn off the progress bars and warnings of libraries, so that revela's own log stays
readable; and show its own bars where one has to wait.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

SHOWN_AFTER = 5.0  # seconds
_STDERR = threading.Lock()


def silence_libraries() -> None:
    """Turn off the progress bars and notices of transformers, datasets and sentence-transformers
    for the rest of the process; errors are still shown.
    """
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


def waiting(
    what: str, unit: str, items: Iterable[Any] | None = None, total: int | None = None
) -> tqdm[Any]:
    """A bar of work that is seldom long: shown after ``SHOWN_AFTER``, by the first process, and
    gone when the work is done.

    Args:
        what: is done.
        unit: of the work.
        items: are passed on, each counts; None: ``update`` counts.
        total: of the units; None: as many as there are items.
    """
    from tqdm.auto import tqdm

    other = int(os.environ.get("RANK") or 0) > 0
    return tqdm(items, what, total, False, unit=unit, delay=SHOWN_AFTER, disable=other)


@contextmanager
def silence_stderr() -> Iterator[None]:
    """While open, what the process writes to stderr is lost, native code included: Rust adds a note
    of its own to a panic that is an exception too. One thread at a time.
    """
    with _STDERR, Path(os.devnull).open("w") as nothing:
        try:
            real = os.dup(2)
        except OSError:  # a service may have none
            yield
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)


@contextmanager
def silence_warnings() -> Iterator[None]:
    """While open, no warning is shown or logged; errors are."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
