"""Sources -> documents: folders of text and code, and JSONL files, each optionally gzipped.

What cannot be read is named and counted, never passed over in silence; past a settable share it stops the run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from revela.data.store import Stored, stored
from revela.errors import RevelaError
from revela.types import Document, Kind

PROSE = frozenset({".txt", ".md", ".markdown", ".rst", ".html", ".htm"})
CODE = frozenset({
    ".py", ".pyi", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".go", ".rs", ".c", ".h", ".cc", ".cpp",
    ".cxx", ".hpp", ".cs", ".rb", ".php", ".swift", ".lua", ".pl", ".r", ".jl", ".sh", ".sql",
})  # fmt: skip
LINES = frozenset({".jsonl", ".ndjson"})
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})
MAX_BYTES = 64 * 2**20  # of one JSONL line or one text file; longer ones are data, not documents
MIN_WORDS = 5  # fewer are no sentence
NAMED = 5  # how many of each problem are named


@dataclass
class Report:
    """What reading a corpus found. ``skipped`` counts by reason, ``examples`` names the first few places of each."""

    documents: int = 0
    words: int = 0
    bad: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, where: str, bad: bool = False) -> None:
        self.skipped[reason] += 1
        self.bad += bad
        if len(named := self.examples.setdefault(reason, [])) < NAMED:
            named.append(where)

    def lines(self) -> list[str]:
        """The report for a person: one line, and one for each reason to skip."""
        out = [f"read {self.documents:,} documents, {self.words:,} words"]
        for reason, count in self.skipped.most_common():
            named = self.examples[reason]
            out.append(f"skipped {count:,}: {reason} ({', '.join(named)}{', ...' if count > len(named) else ''})")
        return out


def read_corpus(
    sources: Sequence[Path | str],
    *,
    text_field: str = "text",
    title_field: str = "title",
    max_bad_share: float = 0.01,
    distinct: bool = True,
    min_words: int = MIN_WORDS,
) -> tuple[Stored[Document], Report]:
    """Read every document of every source into a file of their own.

    Args:
        sources: folders (searched for text and code), text files and JSONL files; ``.gz`` of each.
        text_field: JSONL field of the text; required in every line.
        title_field: JSONL field of the title; optional in a line.
        max_bad_share: share of unreadable lines and files past which reading stops. 0 stops at the first.
        distinct: drop documents whose text was seen before (training). An index keeps them.
        min_words: documents with fewer words (title included) are skipped.

    Returns:
        The documents, in order of source, file name and line, and the report.

    Raises:
        RevelaError: a source is missing, too much is bad, or nothing is left.
    """
    report = Report()
    read = _read_sources([Path(s) for s in sources], text_field, title_field, report)
    documents = stored(Document, _wanted(read, distinct, min_words, report))
    report.documents = len(documents)
    total = report.documents + sum(report.skipped.values())
    if report.bad > max_bad_share * total or (report.bad and not documents):
        reason = next(r for r in report.skipped if report.examples[r])
        bad = "; ".join(f"{r}: {', '.join(w)}" for r, w in report.examples.items() if r not in _HARMLESS)
        raise RevelaError(
            f"{report.bad:,} of {total:,} entries cannot be read ({bad or reason}): mend them, or allow more with --max-bad-share"
        )
    if not documents:
        why = "; ".join(report.lines()[1:]) or "no file with a known ending (.txt .md .rst .html .jsonl, source code; .gz of each)"
        raise RevelaError(f"no document found in {', '.join(map(str, sources))}: {why}")
    return documents, report


def _wanted(documents: Iterator[Document], distinct: bool, min_words: int, report: Report) -> Iterator[Document]:
    seen = set[bytes]()
    for document in documents:
        words = len(document.full_text.split())
        if words < min_words:
            report.skip("shorter than a sentence", document.id)
            continue
        digest = hashlib.blake2b(document.full_text.encode(), digest_size=16).digest()
        if distinct and digest in seen:
            report.skip("duplicate text", document.id)
            continue
        seen.add(digest)
        report.words += words
        yield document


_HARMLESS = frozenset({"shorter than a sentence", "duplicate text"})


def _read_sources(sources: list[Path], text_field: str, title_field: str, report: Report) -> Iterator[Document]:
    for source in sources:
        if not source.exists():
            raise RevelaError(f"{source} does not exist: give a folder, a text file or a JSONL file")
        if source.is_dir():
            files = [f for f in sorted(source.rglob("*")) if _suffix(f) in PROSE | CODE | LINES and _is_wanted(f, source)]
        elif _suffix(source) in PROSE | CODE | LINES:
            files = [source]
        else:
            raise RevelaError(f"{source}: unknown ending; give a folder, text, source code or JSONL (each may be .gz)")
        for file in files:
            base = source if source.is_dir() else source.parent
            try:
                if _suffix(file) in LINES:
                    yield from _read_lines(file, text_field, title_field, report)
                else:
                    yield from _read_file(file, str(file.relative_to(base)), report)
            except (OSError, EOFError, zlib.error) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged gzip"
                report.skip(f"unreadable, {reason.lower()}", str(file), bad=True)


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _is_wanted(file: Path, base: Path) -> bool:
    parts = file.relative_to(base).parts
    return file.is_file() and not any(p.startswith(".") or p in SKIPPED_FOLDERS for p in parts)


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _read_file(path: Path, name: str, report: Report) -> Iterator[Document]:
    with _open(path) as handle:
        raw = handle.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        report.skip(f"over {MAX_BYTES >> 20} MB", name, bad=True)
    elif b"\0" in raw:
        report.skip("binary", name, bad=True)
    elif (text := _decode(raw)) is None:
        report.skip("not UTF-8", name, bad=True)
    else:
        suffix = _suffix(path)
        kind: Kind = "code" if suffix in CODE else "prose"
        title = ""
        if suffix in {".html", ".htm"}:
            title, text = _html(text)
        yield Document(name, text, title, kind)


def _read_lines(path: Path, text_field: str, title_field: str, report: Report) -> Iterator[Document]:
    with _open(path) as handle:
        number = 0
        while line := handle.readline(MAX_BYTES + 1):
            number += 1
            where = f"{path.name}:{number}"
            if len(line) > MAX_BYTES:
                while line and not line.endswith(b"\n"):
                    line = handle.readline(MAX_BYTES)
                report.skip(f"line over {MAX_BYTES >> 20} MB", where, bad=True)
            elif (decoded := _decode(line)) is None:
                report.skip("not UTF-8", where, bad=True)
            elif decoded.strip():
                document = _parse(decoded, where, text_field, title_field, report)
                if document:
                    yield document


def _parse(line: str, where: str, text_field: str, title_field: str, report: Report) -> Document | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        report.skip("broken JSON", where, bad=True)
        return None
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        report.skip(f'no text field "{text_field}"', where, bad=True)
        return None
    title = row.get(title_field)
    text = row[text_field]
    key = str(row.get("_id", row.get("id", where)))
    document = Document(key, text, title if isinstance(title, str) else "", _kind_of(key, text))
    try:
        f"{key}{document.full_text}".encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which is no character
        report.skip("not Unicode (half of a surrogate pair)", where, bad=True)
        return None
    return document


def _kind_of(key: str, text: str) -> Kind:
    """JSONL has no file ending of its own: an id that ends like source code is code, and so is text that begins as a definition."""
    if Path(key).suffix.lower() in CODE:
        return "code"
    head = text.lstrip()[:200]
    starts = (
        "def ",
        "class ",
        "import ",
        "from ",
        "async def ",
        "@",
        "public ",
        "private ",
        "static ",
        "function ",
        "func ",
        "fn ",
        "#include",
    )
    looks = head.startswith(starts) and ("\n" in text or "(" in head) and any(c in head for c in "(){}:;=")
    return "code" if looks else "prose"


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _html(source: str) -> tuple[str, str]:
    """Title and visible text of an HTML page."""
    from bs4 import BeautifulSoup

    page = BeautifulSoup(source, "html.parser")
    title = page.title.get_text(" ", strip=True) if page.title else ""
    for tag in page(["script", "style", "nav", "head"]):
        tag.decompose()
    return title, page.get_text("\n", strip=True)
