"""Silence progress bars and warnings of libraries, and hide a package from them."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def silence_libraries() -> None:
    """Turn off the progress bars and warnings of libraries for the rest of the process."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with suppress(ImportError):  # only reading from the hub needs it
        import datasets

        datasets.disable_progress_bars()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


@contextmanager
def silence_warnings() -> Iterator[None]:
    """While open, no warning is shown or logged."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


@contextmanager
def without(package: str) -> Iterator[None]:
    """While open, importing this package fails as if it were not installed."""
    modules: dict[str, Any] = sys.modules
    imported = modules.pop(package, None)
    modules[package] = None
    try:
        yield
    finally:
        del modules[package]
        if imported:
            modules[package] = imported
