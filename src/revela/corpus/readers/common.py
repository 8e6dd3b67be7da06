"""What all readers share: the report, the errors, and how files are found, opened and decoded."""

from __future__ import annotations

import gzip
import io
import os
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
PLACES = 5  # that the report names per reason
ENDINGS = 10  # that the report names per reason why such files were not read


@dataclass
class ReadReport:
    """What was read from a corpus, and what was skipped and why.

    ``bad_reasons`` are faults of the corpus. ``unread`` counts the files of folders that probably
    hold no documents, by reason and ending.
    """

    documents: int = 0
    words: int = 0
    passages: int = 0
    articles: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    unread: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    bad_reasons: set[str] = field(default_factory=set)

    @property
    def bad(self) -> int:
        """How many files and rows cannot be read."""
        return sum(self.skipped[reason] for reason in self.bad_reasons)

    def skip(self, reason: str, where: str, bad: bool = False) -> None:
        self.skipped[reason] += 1
        if bad:
            self.bad_reasons.add(reason)
        if len(places := self.examples.setdefault(reason, [])) < PLACES:
            places.append(where)

    def leave(self, path: Path, reason: str = "no reader") -> None:
        """Count a file of a folder that is not read, and is no fault of the corpus."""
        ending = suffix(path) or path.suffix.lower() or "with no ending"
        self.unread[reason, shown(Path(ending))] += 1

    def add(self, other: ReadReport) -> None:
        """Add what was read of another part of the corpus."""
        self.documents += other.documents
        self.words += other.words
        self.passages += other.passages
        self.articles += other.articles
        self.skipped.update(other.skipped)
        self.unread.update(other.unread)
        self.bad_reasons |= other.bad_reasons
        for reason, places in other.examples.items():
            self.examples[reason] = [*self.examples.get(reason, []), *places][:PLACES]

    def lines(self, of: str = "documents") -> list[str]:
        """The report as text, one line per total and per reason."""
        out = [f"read {self.documents:,} {of}, {self.words:,} words"]
        if self.passages:
            out.append(
                f"joined {self.passages:,} passages into {self.articles:,} articles by title"
            )
        unread: dict[str, list[str]] = {}
        for (reason, ending), count in self.unread.most_common():
            unread.setdefault(reason, []).append(f"{count:,} {ending}")
        if unread:
            named = (f"{_some(endings)} ({reason})" for reason, endings in unread.items())
            out.append(f"not read: {'; '.join(named)}")
        for reason, count in self.skipped.most_common():
            places = self.examples[reason]
            more = ", ..." if count > len(places) else ""
            out.append(f"skipped {count:,}: {reason} ({', '.join(places)}{more})")
        return out


def _some(endings: list[str]) -> str:
    more = [f"{len(endings) - ENDINGS} other endings"] if len(endings) > ENDINGS else []
    return ", ".join(endings[:ENDINGS] + more)


class FileSkipped(Exception):
    """A file gives no (more) documents.

    Args:
        reason: what the report counts it under.
        detail: added to the file's name in the report.
        short: a folder's report counts such files by their ending, for this reason.
    """

    def __init__(self, reason: str, detail: str = "", short: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail, self.short = reason, detail, short


class DamagedFile(FileSkipped):
    """The file, or the rest of it, cannot be read."""


class UnsupportedFile(FileSkipped):
    """The file is intact but holds no documents: skipped in a folder, an error if given by name."""


READ_ERRORS = (DamagedFile, OSError, EOFError, zlib.error)


@contextmanager
def reader_extra(name: str, format: str) -> Iterator[None]:
    """Import what reads a format; UnsupportedFile if a package of the extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        install = f"pip install 'revela-retriever[{name}]'"
        message = f"{format}, which needs {error.name}: run {install}"
        raise UnsupportedFile(message, short=install) from error


def suffix(path: Path) -> str:
    """The ending that names the format: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(path.stem if path.suffix in COMPRESSED else path).suffix.lower()


def shown(path: Path) -> str:
    r"""A path as text; bytes of it that are not UTF-8 as \xe9."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def open_binary(path: Path) -> BinaryIO:
    """A file's bytes, unpacked."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(path.open("rb"), "zstd"))
    return path.open("rb")


def open_seekable(path: Path) -> BinaryIO:
    """A file's bytes, unpacked, for a format that is read here and there."""
    return io.BytesIO(read_bytes(path)) if path.suffix in COMPRESSED else path.open("rb")


def open_text(path: Path, errors: str = "surrogateescape", newline: str = "\n") -> TextIO:
    """A file's text; bytes that are not UTF-8 are surrogates (see ``is_unicode``)."""
    return io.TextIOWrapper(open_binary(path), "utf-8-sig", errors, newline)


def lines_of(handle: TextIO) -> Iterator[str]:
    """The lines of a file; of a longer one, its first ``MAX_BYTES + 1`` characters."""
    while line := handle.readline(MAX_BYTES + 1):
        rest = line
        while len(rest) > MAX_BYTES and not rest.endswith("\n"):
            rest = handle.readline(MAX_BYTES + 1)
        yield line


def whole(line: str) -> str:
    """The line; DamagedFile if ``lines_of`` has cut it."""
    if len(line) > MAX_BYTES:
        raise DamagedFile(f"line over {MAX_BYTES >> 20} MB")
    return line


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file, with their numbers from 1; RevelaError if one cannot be read."""
    number = 0
    with open_text(path, "strict") as handle:
        try:
            for number, line in enumerate(map(whole, lines_of(handle)), 1):
                yield number, line
        except (UnicodeDecodeError, *READ_ERRORS) as error:
            raise RevelaError(
                f"{path} cannot be read after line {number} ({error}): mend what follows, or get a "
                "whole copy of it"
            ) from error


def read_bytes(path: Path) -> bytes:
    """All bytes of a file that is one document; DamagedFile if there are over ``MAX_BYTES``."""
    with open_binary(path) as handle:
        raw = handle.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise DamagedFile(f"over {MAX_BYTES >> 20} MB")
    return raw


def read_utf8(path: Path) -> str:
    """The text of a file that is one document; DamagedFile if it is too large, or no UTF-8."""
    raw = read_bytes(path)
    if b"\0" in raw:
        raise DamagedFile("binary")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DamagedFile("not UTF-8") from error


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates: JSON may escape half of a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def walk_files(folder: Path, report: ReadReport) -> Iterator[Path]:
    """Files below a folder, sorted by path, without hidden files, dependencies and caches; links
    only to files below the folder.
    """

    def unreadable(error: OSError) -> None:
        report.skip(unreadable_because(error), shown(Path(error.filename)), bad=True)

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = {name for name in folders if name[0] != "."} - SKIPPED_FOLDERS
        found += (Path(parent, name) for name in names if name[0] != ".")
    inside = folder.resolve()
    if inside.parent.name == "snapshots":  # of the hub's cache, whose files are links beside it
        inside = inside.parent.parent
    for path in sorted(found):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            report.skip("link to a file outside of the folder", shown(path))
        else:
            yield path


def unreadable_because(error: OSError) -> str:
    return f"unreadable, {(error.strerror or str(error)).lower()}"


@contextmanager
def check_unchanged(path: Path) -> Iterator[None]:
    """Raise RevelaError at the end if the file changed in the meantime."""
    before = size_and_time(path)
    yield
    if size_and_time(path) != before:
        raise changed(path)


class FileChanged(RevelaError):
    """A file changed while it was read."""


def changed(path: Path) -> FileChanged:
    return FileChanged(
        f"{path} changed while it was read: wait until nothing writes to it, or give a copy, and "
        "run again"
    )


def size_and_time(path: Path) -> tuple[int, int]:
    """Size and time of the last change, in ns; (-1, 0) for a file that is not there."""
    try:
        found = path.stat()
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns
