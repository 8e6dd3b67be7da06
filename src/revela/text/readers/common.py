"""Shared parts of all readers: the report, errors, and opening and decoding files."""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from revela.errors import RevelaError
from revela.terminal import counted
from revela.text.endings import COMPRESSED, suffix
from revela.text.readers.encodings import HEAD, decode, is_binary

MAX_BYTES = 64 * 2**20  # per line, text or page; anything longer is data, not a document
BLANK = 2**16  # characters of white space
# Embedded data: a URI with its type or encoding, whose signs may be percent-encoded, and then SVG
# or characters without spaces; base64 may be on several lines.
_DATA = re.compile(
    r"(\bdata(?::|%3A)(?=[^\s,]{0,99}?(?:[/;]|%2F|%3B))[\w.+/;=%-]{1,200}?(?:,|%2C))"
    r"(?:(?:<|%3C)svg\b(?:[^<%]|<(?!/?svg)|%(?!3C(?:/|%2F)?svg))*+(?:<|%3C)(?:/|%2F)svg(?:>|%3E)"
    r"|[^\s\"'()<>`]{16,}(?:\r?\n[ \t]*"
    r"(?:(?=[A-Z+/]*[\d=])[A-Z\d+/]{16,}=*|[A-Z\d+/]+=+)(?=[\s\"')>`]|\Z))*)",
    re.I,
)
_BLANK = re.compile(rf"(\s{{256}})\s{{{BLANK - 256},}}")
# These limit the report to one screen.
MAX_EXAMPLES = 5  # per reason
MAX_ENDINGS = 10  # per reason
MAX_REASONS = 12


@dataclass
class ReadReport:
    """Counts what was read from a corpus, and what was skipped and why.

    Attributes:
        skipped: reason -> number of skipped files and rows.
        bad_reasons: reasons that are faults of the corpus.
        noted: remark (such as an encoding) -> number of files and rows that were read with it.
        unread: (reason, ending) -> number of files in folders that were left out.
        bytes_read, bytes_unread: bytes of files that may hold text, without files left out.
        judged: ids of documents that are never dropped, unless they are empty.
        claim: reserves an id for a row; False if another row has it. None: rows may share ids.
        names: ids of files, which no row may have.
        examples: reason or remark -> places.
        unlisted: folders whose files are unknown.
    """

    documents: int = 0
    words: int = 0
    passages: int = 0
    articles: int = 0
    bytes_read: int = 0
    bytes_unread: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    unread: Counter[tuple[str, str]] = field(default_factory=Counter)
    judged: Collection[str] = field(default=(), repr=False)
    claim: Callable[[str], bool] | None = field(default=None, repr=False)
    names: set[str] = field(default_factory=set, repr=False)
    examples: dict[str, list[str]] = field(default_factory=dict)
    bad_reasons: set[str] = field(default_factory=set)
    unlisted: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Number of files and rows that cannot be read."""
        return sum(self.skipped[reason] for reason in self.bad_reasons)

    def skip(self, reason: str, where: str, bad: bool = False) -> None:
        """Count a file or a row that is not read."""
        if bad:
            self.bad_reasons.add(reason)
        self._count(self.skipped, reason, where)

    def note(self, remark: str, where: str) -> None:
        """Count a file or a row that is read, with a remark."""
        self._count(self.noted, remark, where)

    def _count(self, counter: Counter[str], reason: str, where: str) -> None:
        counter[reason] += 1
        if len(places := self.examples.setdefault(reason, [])) < MAX_EXAMPLES:
            places.append(where if len(where) < 500 else f"{where[:200]}...{where[-200:]}")

    def leave_unread(self, path: Path, reason: str, named: str = "") -> None:
        """Count a file of a folder that is left out on purpose; ``named`` replaces its ending."""
        ending = named or suffix(path) or path.suffix.lower() or "with no ending"
        self.unread[reason, display_path(Path(ending)) + "/" * ending.endswith("/")] += 1

    def count_bytes(self, path: Path, read: bool) -> None:
        """Count the bytes of a file that has, or may have, text."""
        size = max(0, size_and_time(path)[0])
        self.bytes_read += size if read else 0
        self.bytes_unread += 0 if read else size

    def add(self, other: ReadReport) -> None:
        """Add what another report has skipped and noted."""
        self.skipped.update(other.skipped)
        self.noted.update(other.noted)
        self.bad_reasons.update(other.bad_reasons)
        for reason, places in other.examples.items():
            self.examples[reason] = [*self.examples.get(reason, []), *places][:MAX_EXAMPLES]

    def lines(self) -> list[str]:
        """The report as text, one line per total and per reason."""
        out = [f"read {counted(self.documents, 'document')}, {counted(self.words, 'word')}"]
        if total := self.bytes_read + self.bytes_unread:
            percent = 1000 * self.bytes_read // total / 10
            out[0] += f": {percent} % of the bytes of files that may hold text"
        if self.passages:
            articles = f"{self.articles:,} articles by title"
            out.append(f"joined {self.passages:,} passages into {articles}")
        out += self._counted("", self.noted)
        unread: dict[str, list[str]] = {}
        for (reason, ending), count in self.unread.most_common():
            unread.setdefault(reason, []).append(f"{count:,} {ending}")
        if unread:
            shown = {why: _first(some, MAX_ENDINGS, "endings") for why, some in unread.items()}
            named = [f"{', '.join(endings)} ({reason})" for reason, endings in shown.items()]
            out.append(f"not read: {'; '.join(_first(named, MAX_REASONS, 'reasons'))}")
        out += self._counted("skipped ", self.skipped)
        return out

    def _counted(self, verb: str, counter: Counter[str]) -> list[str]:
        """A line per reason, faults of the corpus first."""
        out = []
        order = sorted(counter.most_common(), key=lambda pair: pair[0] not in self.bad_reasons)
        for reason, count in order:
            places = self.examples[reason]
            more = ", ..." if count > len(places) else ""
            out.append(f"{verb}{count:,}: {reason} ({', '.join(places)}{more})")
        return _first(out, MAX_REASONS, "lines of this kind")


def _first(lines: list[str], most: int, what: str) -> list[str]:
    """The first lines, and the number of others."""
    n_more = len(lines) - most
    return lines[:most] + ([f"{n_more} other {what}"] if n_more > 0 else [])


class DamagedFile(Exception):
    """The file, or the rest of it, cannot be read; the message is the report's reason."""


class TooLarge(DamagedFile):
    """The file has more than ``MAX_BYTES``."""

    def __init__(self) -> None:
        super().__init__(f"over {MAX_BYTES >> 20} MB: split it")


class UnsupportedFile(Exception):
    """The file is intact but has no documents: skipped in a folder, an error if given by name.

    Args:
        reason: the report's reason.
        detail: added to the file's name in the report.
        short: if given, a folder's report counts such files by ending, for this reason.
        by_programs: whether a program wrote the file for other programs.
    """

    def __init__(
        self, reason: str, detail: str = "", short: str = "", by_programs: bool = False
    ) -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail, self.short = reason, detail, short
        self.by_programs = by_programs


def is_of_file(name: str, files: Collection[str]) -> bool:
    """Whether an id belongs to one of these files, or to a row of one."""
    file, _, number = name.rpartition(":")
    return name in files or (number.isdigit() and file in files)


def display_path(path: Path) -> str:
    r"""A path as text; bytes that are not UTF-8 are escaped as \xe9."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def open_binary(path: Path) -> BinaryIO:
    """Open a file, decompressed."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(path.open("rb"), "zstd"))
    return path.open("rb")


def open_seekable(path: Path) -> BinaryIO:
    """Open a file, decompressed, for random access."""
    return io.BytesIO(read_bytes(path)) if path.suffix in COMPRESSED else path.open("rb")


def open_text(path: Path, errors: str = "surrogateescape", newline: str = "\n") -> TextIO:
    """Open a text file, decompressed, in UTF-8, or in UTF-16 if it has a byte order mark. Other
    bytes become surrogates.
    """
    with open_binary(path) as handle:
        is_wide = handle.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE)
    encoding = "utf-16" if is_wide else "utf-8-sig"
    return io.TextIOWrapper(open_binary(path), encoding, errors, newline)


def lines_of(handle: TextIO) -> Iterator[str]:
    """The lines of a file, truncated to ``MAX_BYTES + 1`` characters."""
    while line := handle.readline(MAX_BYTES + 1):
        rest = line
        while len(rest) > MAX_BYTES and not rest.endswith("\n"):
            rest = handle.readline(MAX_BYTES + 1)
        yield line


def check_length(line: str) -> str:
    """The line; DamagedFile if ``lines_of`` truncated it."""
    if len(line) > MAX_BYTES:
        raise DamagedFile(f"line over {MAX_BYTES >> 20} MB")
    return line


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of a file's lines; RevelaError if a line cannot be read."""
    number = 0
    with open_text(path, "strict") as handle:
        try:
            for number, line in enumerate(map(check_length, lines_of(handle)), 1):
                yield number, line
        except (UnicodeDecodeError, DamagedFile, OSError, EOFError, zlib.error) as error:
            raise RevelaError(
                f"{path} cannot be read after line {number} ({error}): correct what follows, or "
                "get a whole copy of it"
            ) from error


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, decompressed; DamagedFile for more than ``MAX_BYTES``."""
    with open_binary(path) as handle:
        raw = handle.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise TooLarge
    return raw


def read_decoded(path: Path, name: str, report: ReadReport) -> str:
    """The text of a file. Notes the encoding in the report if it is not UTF-8.

    Raises:
        DamagedFile: the file is too large, or is not text.
    """
    return decoded(read_bytes(path), name, report)


def decoded(raw: bytes, name: str, report: ReadReport) -> str:
    """``read_decoded``, for bytes."""
    if is_binary(raw[:HEAD]):
        raise DamagedFile("binary")
    text, encoding = decode(raw)
    if not encoding:
        raise DamagedFile("unknown encoding: save it as UTF-8")
    if encoding != "UTF-8":
        report.note(f"read as {encoding}", name)
    # The logs of programs that were killed have runs of zero bytes.
    return text.replace("\0", " ").removeprefix("\ufeff")


def without_data(text: str) -> str:
    """A text without embedded data, such as pictures; its lines keep their numbers."""
    return _DATA.sub(lambda data: data[1] + "\n" * data[0].count("\n"), text)


def squeeze(text: str) -> str:
    """A text with runs of white space of ``BLANK`` characters or more cut to 256."""
    return _BLANK.sub(r"\1", text) if len(text) > BLANK else text


def without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def unreadable_because(error: OSError) -> str:
    return f"unreadable, {(error.strerror or str(error)).lower()}"


class FileChanged(RevelaError):
    """A file changed while it was read."""


def size_and_time(path: Path) -> tuple[int, int]:
    """Size in bytes, and time of the last change in ns; (-1, 0) for a missing file. Programs can
    set a file's mtime back, but not its ctime, which on Windows is the time of its creation.
    """
    try:
        stat = path.stat()
    except OSError:
        return -1, 0
    return stat.st_size, stat.st_mtime_ns if os.name == "nt" else stat.st_ctime_ns
