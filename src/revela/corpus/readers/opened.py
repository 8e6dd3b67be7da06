"""What every reader of files shares: walking folders, opening, decoding, and noticing a file that
changes under its reader.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from revela.corpus.report import Report
from revela.errors import RevelaError

PROSE = frozenset({".txt", ".md", ".markdown", ".rst"})
CODE = frozenset({
    ".py", ".pyi", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".go", ".rs", ".c", ".h", ".cc", ".cpp",
    ".cxx", ".hpp", ".cs", ".rb", ".php", ".swift", ".lua", ".pl", ".r", ".jl", ".sh", ".sql",
})  # fmt: skip
MAX_BYTES = 64 * 2**20  # of one line, one text or one page; longer ones are data, not documents
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})


class Trouble(Exception):
    """Why a file gives no (more) documents: ``reason``, under which it is counted, and ``detail``,
    which goes with its name.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


class Damaged(Trouble):
    """The file, or the rest of it, cannot be read."""


class Unsuited(Trouble):
    """The file is whole but holds no documents. In a folder it is counted and left out; asked for
    by name, it is an error.
    """


READ_ERRORS = (Damaged, OSError, EOFError, zlib.error)


def suffix(path: Path) -> str:
    """The ending that says what is inside: ``.jsonl`` of ``a.jsonl.gz``."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def opened_text(path: Path) -> TextIO:
    return io.TextIOWrapper(opened(path), encoding="utf-8")


def read_bytes(path: Path) -> bytes:
    """All bytes of a file that is small enough to be one document."""
    with opened(path) as handle:
        raw = handle.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise Damaged(f"over {MAX_BYTES >> 20} MB")
    return raw


def whole_text(path: Path) -> str:
    raw = read_bytes(path)
    if b"\0" in raw:
        raise Damaged("binary")
    if (text := decoded(raw)) is None:
        raise Damaged("not UTF-8")
    return text


def decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def walked(folder: Path, report: Report) -> Iterator[Path]:
    """Files below a folder, sorted by path. Hidden ones, and folders of dependencies and caches,
    are left out.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        report.skip(
            f"unreadable, {(error.strerror or 'unknown error').lower()}", str(folder), bad=True
        )
        return
    for name, is_folder in found:
        if not is_folder:
            yield folder / name
        elif name not in SKIPPED_FOLDERS:
            yield from walked(folder / name, report)


class Steady:
    """A file as it was when reading began; ``check`` refuses one that is no longer the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._changed = _state(path)

    def check(self) -> None:
        size, changed = _state(self.path)
        if (size, changed) == (self._size, self._changed):
            return
        how = "vanished" if size < 0 else f"changed ({self._size:,} bytes, now {size:,})"
        raise RevelaError(
            f"{self.path} {how} while it was read: let whatever writes it finish, or give a copy, and run again"
        )


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns
