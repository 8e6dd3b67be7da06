"""Open a hit: its document around a passage, as it was indexed, and its file."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from fastapi.responses import FileResponse

from revela.searching.index import Index
from revela.searching.results import WHOLE, Marked
from revela.searching.server.errors import APIError
from revela.searching.server.schemas import DocumentText, Passage
from revela.searching.word_search import Words
from revela.text.endings import suffix
from revela.text.readers import READERS
from revela.text.readers.common import display_path, size_and_time
from revela.text.readers.encodings import decode

NOT_FOUND = "the index has no such document or passage: search again"
AROUND = 12  # passages before and after the one that is wanted
MAX_DETECTED = 2**24  # bytes; a larger file is sent as UTF-8, without detecting its encoding
# Of formats that people read as text, or that a reader of text takes; no file is ever sent as HTML,
# which would run in this origin.
_AS_TEXT = {".html", ".htm", ".xhtml", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".srt"}
_AS_TEXT |= {".vtt", ".tex", ".ltx", ".eml", ".mht", ".mhtml", ".mbox", ".mbx", ".ipynb"}
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def read_document(
    index: Words | Index, name: str, query: str, chunk: int, with_file: bool
) -> DocumentText:
    """A document around one of its passages, with the words of a query marked.

    Raises:
        APIError: the document or the passage is unknown.
    """
    chunks = index.chunks(name)
    if not chunks[chunk:]:
        raise APIError(404, NOT_FOUND)
    shown = chunks[max(0, chunk - AROUND) : chunk + AROUND + 1]
    snippets = index.snippets(query, shown, WHOLE)
    file = index.file(name) if with_file else None
    return DocumentText(
        id=name,
        title=chunks[0].title,
        date=chunks[0].date,
        path=display_path(file) if file else None,
        file=f"v1/files/{quote(name, safe='')}" if file else None,
        chunks=len(chunks),
        passages=[
            Passage(chunk=hit.chunk, text=Marked(*snippet[:2]), line=hit.line, page=hit.page)
            for hit, snippet in zip(shown, snippets, strict=True)
        ],
        note=_note(index, name, file) if with_file else None,
    )


def _note(index: Words | Index, name: str, file: Path | None) -> str | None:
    """Whether a file has changed since it was indexed, or is gone; None for neither."""
    if isinstance(index, Words) or not (before := index.state.file_state(name)) or before.size < 0:
        return None  # not known, or of a data set
    if file is None:
        if (owner := index.state.owner_of(name)) and Path(owner).exists():
            return None  # it may not be opened, as a link leads to it
        return "The file no longer exists: this is its text as it was indexed."
    size, time = size_and_time(file)
    if size == before.size and before.mtime_ns in (-1, time):
        return None
    return "The file has changed since it was indexed: this is its indexed text."


def file_response(index: Words | Index, name: str) -> FileResponse:
    """The file of a document that is indexed; text as plain text, a PDF to be shown, anything else
    to be saved.

    Raises:
        APIError: the document is unknown, or its file has left the indexed folder.
    """
    if not index.chunks(name) or (file := index.file(name)) is None:
        raise APIError(404, NOT_FOUND)
    ending = suffix(file)
    if file.suffix.lower() == ".pdf":
        kind, how = "application/pdf", "inline"
    elif file.suffix.lower() == ending and (ending in _AS_TEXT or ending not in READERS):
        is_small = file.stat().st_size <= MAX_DETECTED
        _, encoding = decode(file.read_bytes()) if is_small else ("", "")
        kind, how = f"text/plain; charset={encoding.lower() or 'utf-8'}", "inline"
    else:
        kind, how = "application/octet-stream", "attachment"
    shown = display_path(Path(file.name))
    return FileResponse(
        file, media_type=kind, filename=shown, content_disposition_type=how, headers=HEADERS
    )
