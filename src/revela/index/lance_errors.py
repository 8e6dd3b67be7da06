"""LanceDB's errors as sentences for a user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from revela.errors import QueryError, RevelaError
from revela.files import disk_error
from revela.index.rows import HIT_COLUMNS

LANCE_ERRORS = (ValueError, RuntimeError, OSError)
PANIC = "RustPanic"  # of damaged files; its module is made by Rust and cannot be imported
_FILES = re.compile(r"\(IO\)|Not found:|panicked")  # are at fault, and not the filter
_SOURCE = re.compile(r",? ?/\S+\.rs:\d+:\d+.*", re.DOTALL)
_PREAMBLE = re.compile(r"(?:Schema error|sql parser error|Invalid user input|Invalid input)[:,] ")


@contextmanager
def lance_errors(folder: Path, where: str = "", columns: Iterable[str] = ()) -> Iterator[None]:
    """Turn LanceDB's errors into a QueryError if the filter ``where`` is at fault, otherwise into a
    RevelaError about a full disk or damaged files.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, LANCE_ERRORS) and type(error).__name__ != PANIC:
            raise
        if sentence := disk_error(error, folder):
            raise RevelaError(sentence) from error
        reason = " ".join(_SOURCE.sub("", str(error)).split())[:300]
        if where and not isinstance(error, OSError) and not _FILES.search(reason):
            why = _PREAMBLE.split(reason)[-1].split(". Valid fields")[0].rstrip(".)")
            names = ", ".join([*HIT_COLUMNS, *columns])
            raise QueryError(
                f'the filter "{where[:80]}" cannot be used ({why}): '
                f"compare columns of this index, which are {names}",
                "where",
            ) from error
        raise RevelaError(
            f"{folder} is damaged or out of reach ({reason}): "
            "mend that, or make it again with revela index"
        ) from error
