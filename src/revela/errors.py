"""Errors that the user can fix: one sentence of what, where and what to do; exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RevelaError(Exception):
    """An error that the user can fix. The message is one sentence, printed without a traceback.

    Attributes:
        exit_code: of the command line.
    """

    exit_code = 2


class QueryError(RevelaError):
    """An invalid search. The message mentions only what the caller sent, so a server may return it.

    Attributes:
        param: name of the invalid argument; "" if no single one is.
    """

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, and the next if it ends with a colon; the
    error's class name if it has none.
    """
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Import optional dependencies; a missing one is an error that names the extra to install.

    Args:
        name: the extra in pyproject.toml.
        purpose: what needs the extra; begins the sentence.

    Raises:
        RevelaError: a package is not installed.

    >>> with extra("hub", "hub:a/b"):
    ...     import not_installed
    Traceback (most recent call last):
    revela.errors.RevelaError: hub:a/b needs not_installed: run pip install '.[hub]' in ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        install = f"pip install '.[{name}]' in a checkout of revela"  # it is not on PyPI
        raise RevelaError(f"{purpose} needs {error.name}: run {install}") from error
