"""What all readers share: the report, the errors, and how files are found, opened and decoded."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from revela.errors import RevelaError

PROSE = frozenset({".txt", ".md", ".markdown", ".rst"})
CODE = frozenset({
    ".py", ".pyi", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".go", ".rs",
    ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cs", ".rb", ".php", ".swift", ".lua", ".pl", ".r",
    ".jl", ".sh", ".sql",
})  # fmt: skip
MAX_BYTES = 64 * 2**20  # per line, text or page; anything longer is data, not a document
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})
COMPRESSED = (".gz", ".zst")  # one file each, of any format
NAMED = 5  # places that the report names per reason
BEGINNING = b'{"passage": "'  # of every line of a file of written queries
QUERIES = ".queries.jsonl"  # ends the name of one that an earlier version wrote beside its corpus
ENDINGS = 10  # that the report names per reason why such files were not read


@dataclass
class ReadReport:
    """What was read from a corpus, and what was skipped and why.

    ``skipped`` counts by reason and ``examples`` names the first few places of each; ``bad`` counts
    those that could not be read. ``unread`` counts the files of folders that hold no documents as
    far as is known, by the reason and their ending.
    """

    documents: int = 0
    words: int = 0
    bad: int = 0
    passages: int = 0
    articles: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    unread: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    bad_reasons: set[str] = field(default_factory=set)

    def skip(self, reason: str, where: str, bad: bool = False) -> None:
        self.skipped[reason] += 1
        if bad:
            self.bad += 1
            self.bad_reasons.add(reason)
        if len(named := self.examples.setdefault(reason, [])) < NAMED:
            named.append(where)

    def leave(self, path: Path, reason: str = "no reader") -> None:
        """Count a file of a folder that is not read, and is no fault of the corpus."""
        ending = suffix(path) or path.suffix.lower() or "with no ending"
        self.unread[reason, shown(Path(ending))] += 1

    def add(self, other: ReadReport) -> None:
        """Add what was read of another part of the corpus."""
        self.documents += other.documents
        self.words += other.words
        self.bad += other.bad
        self.passages += other.passages
        self.articles += other.articles
        self.skipped.update(other.skipped)
        self.unread.update(other.unread)
        self.bad_reasons |= other.bad_reasons
        for reason, places in other.examples.items():
            named = self.examples.setdefault(reason, [])
            named += places[: NAMED - len(named)]

    def lines(self, of: str = "documents") -> list[str]:
        """The report as text: the totals, the joined passages, the files that were not read, and
        one line per skip reason.
        """
        out = [f"read {self.documents:,} {of}, {self.words:,} words"]
        if self.passages:
            out.append(
                f"joined {self.passages:,} passages into {self.articles:,} articles by title"
            )
        if self.unread:
            out.append(f"not read: {'; '.join(self._unread())}")
        for reason, count in self.skipped.most_common():
            named = self.examples[reason]
            places = ", ".join(named) + (", ..." if count > len(named) else "")
            out.append(f"skipped {count:,}: {reason} ({places})")
        return out

    def _unread(self) -> Iterator[str]:
        """The files that were not read, per reason: 4 .xyz, 2 .png (no reader)."""
        endings: dict[str, list[str]] = {}
        for (reason, ending), count in self.unread.most_common():
            endings.setdefault(reason, []).append(f"{count:,} {ending}")
        for reason, named in endings.items():
            more = [f"{len(named) - ENDINGS} other endings"] if len(named) > ENDINGS else []
            yield f"{', '.join(named[:ENDINGS] + more)} ({reason})"


class FileSkipped(Exception):
    """A file gives no (more) documents.

    Args:
        reason: what the report counts it under.
        detail: added to the file's name in the report.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


class DamagedFile(FileSkipped):
    """The file, or the rest of it, cannot be read."""


class TooLarge(DamagedFile):
    """The file is larger than a document is."""


class UnsupportedFile(FileSkipped):
    """The file is intact but holds no documents.

    In a folder it is skipped and counted; given by name, it is an error.
    """


class NoDocuments(UnsupportedFile):
    """The file is none that anybody would miss in a folder, or an extra is missing: it is counted
    by its ending.

    Args:
        reason: of the error, if the file is given by name.
        short: what the report of a folder says instead.
    """

    def __init__(self, reason: str, short: str) -> None:
        super().__init__(reason)
        self.short = short


@contextmanager
def reader_extra(name: str, format: str) -> Iterator[None]:
    """Import what reads a format; without it, files of the format are not read.

    Raises:
        NoDocuments: a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        install = f"pip install 'revela[{name}]'"
        raise NoDocuments(f"{format}, which needs {error.name}: run {install}", install) from error


READ_ERRORS = (DamagedFile, OSError, EOFError, zlib.error)


def suffix(path: Path) -> str:
    """The ending that names the format: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(path.stem if path.suffix in COMPRESSED else path).suffix.lower()


def open_binary(path: Path) -> BinaryIO:
    """A file's bytes, unpacked."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        import pyarrow as pa

        packed = pa.OSFile(os.fsencode(path))  # its name may be no text
        return io.BufferedReader(pa.CompressedInputStream(packed, "zstd"))
    return path.open("rb")


def open_seekable(path: Path) -> BinaryIO:
    """A file's bytes, unpacked, for a format that is read here and there.

    Raises:
        TooLarge: it has to be unpacked, and is larger than ``MAX_BYTES``.
    """
    return io.BytesIO(read_bytes(path)) if path.suffix in COMPRESSED else path.open("rb")


def open_text(path: Path) -> TextIO:
    return io.TextIOWrapper(open_binary(path), encoding="utf-8")


def lines_of(handle: TextIO) -> Iterator[str]:
    """The lines of a file.

    Raises:
        DamagedFile: one is longer than ``MAX_BYTES`` characters; no more of it is read.
    """
    while line := handle.readline(MAX_BYTES + 1):
        if len(line) > MAX_BYTES:
            raise DamagedFile(f"line over {MAX_BYTES >> 20} MB, the file's rest lost")
        yield line


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file, with their numbers from 1.

    Raises:
        RevelaError: the file is damaged or not UTF-8, or a line is longer than ``MAX_BYTES``.
    """
    number = 0
    with open_text(path) as handle:
        try:
            for number, line in enumerate(lines_of(handle), 1):
                yield number, line
        except (UnicodeDecodeError, *READ_ERRORS) as error:
            raise RevelaError(
                f"{path} cannot be read after line {number} ({error}): mend what follows, or get a "
                "whole copy of it"
            ) from error


def read_bytes(path: Path) -> bytes:
    """All bytes of a file that is one document.

    Raises:
        TooLarge: it is larger than ``MAX_BYTES``.
    """
    with open_binary(path) as handle:
        raw = handle.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise TooLarge(f"over {MAX_BYTES >> 20} MB")
    return raw


def read_utf8(path: Path) -> str:
    """The text of a file that is one document.

    Raises:
        DamagedFile: it is too large, binary or not UTF-8.
    """
    raw = read_bytes(path)
    if b"\0" in raw:
        raise DamagedFile("binary")
    if (text := decode(raw)) is None:
        raise DamagedFile("not UTF-8")
    return text


def decode(raw: bytes) -> str | None:
    """UTF-8 with or without a byte order mark; None if it is something else."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def is_unicode(text: str) -> bool:
    """Whether a text is all characters: JSON may escape half of a surrogate pair, which is none."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def walk_files(folder: Path, report: ReadReport) -> Iterator[Path]:
    """Files below a folder, sorted by path, without hidden files, dependencies and caches; links
    only to files below the folder.
    """
    inside = folder.resolve()
    if inside.parent.name == "snapshots":  # of the hub's cache, whose files are links beside it
        inside = inside.parent.parent
    waiting = [(folder, True)]  # the next one last
    while waiting:
        path, is_folder = waiting.pop()
        if is_folder:
            waiting += reversed(_entries(path, report))
            continue
        try:
            is_link = stat.S_ISLNK(path.lstat().st_mode)
        except OSError as error:  # its path may be too long
            _skip_unreadable(path, error, report)
            continue
        if is_link and not Path(os.path.realpath(path)).is_relative_to(inside):
            report.skip("link to a file outside of the folder", shown(path))
        else:
            yield path


def _entries(folder: Path, report: ReadReport) -> list[tuple[Path, bool]]:
    """What a folder holds, sorted by name, and what of it is a folder."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        _skip_unreadable(folder, error, report)
        return []
    skipped = SKIPPED_FOLDERS
    return [(folder / name, is_dir) for name, is_dir in found if not (is_dir and name in skipped)]


def is_query_file(path: Path) -> bool:
    """Whether a file that stands in a corpus holds queries that were written for it."""
    if not path.name.endswith(QUERIES):
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(BEGINNING)) == BEGINNING
    except OSError:
        return False  # whoever reads documents says what is wrong


def _skip_unreadable(path: Path, error: OSError, report: ReadReport) -> None:
    reason = (error.strerror or "unknown error").lower()
    report.skip(f"unreadable, {reason}", shown(path), bad=True)


def shown(path: Path) -> str:
    r"""A path as text; bytes of it that are not UTF-8 as \xe9."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


@contextmanager
def refuse_changes(path: Path) -> Iterator[None]:
    """Raise RevelaError at the end if the file changed in the meantime."""
    before = size_and_time(path)
    yield
    after = size_and_time(path)
    if after != before:
        old, new = before[0], after[0]
        how = "vanished" if new < 0 else f"changed ({old:,} bytes, now {new:,})"
        raise RevelaError(
            f"{path} {how} while it was read: "
            "wait until nothing writes to it, or give a copy, and run again"
        )


def size_and_time(path: Path) -> tuple[int, int]:
    """Of the last change, in ns; (-1, 0) for a file that is not there."""
    try:
        found = path.stat()
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns
