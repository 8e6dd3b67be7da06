"""Turn off the progress bars and warnings of libraries, so that revela's own log stays readable."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
