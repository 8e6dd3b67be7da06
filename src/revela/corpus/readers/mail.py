"""Read mail: a message is a document, with its subject as title, the mail and text attached to it,
and the names of other attachments. A web page that a browser saved in one file is a mail, too.
"""

from __future__ import annotations

import email
import email.policy
from collections.abc import Iterator, Sequence
from email.message import EmailMessage
from pathlib import Path

from revela.corpus.readers.common import (
    DamagedFile,
    ReadReport,
    open_binary,
    read_bytes,
    without_surrogates,
)
from revela.corpus.readers.encodings import decode
from revela.corpus.readers.html import extract_fragment
from revela.corpus.readers.rows import Fields
from revela.types import Document

NAMED = ("From", "To", "Cc", "Date")


def read_eml(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file with one message."""
    yield from _document(read_bytes(path), name, report)


def read_mbox(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file of messages, each after a line that begins with "From "."""
    number, message = 0, list[bytes]()
    with open_binary(path) as handle:
        is_blank = True
        for line in handle:
            if is_blank and line.startswith(b"From "):
                if message:
                    yield from _document(b"".join(message), f"{name}:{number}", report)
                number, message = number + 1, []
            elif number:
                message.append(line[1:] if line.startswith(b">From ") else line)
            is_blank = not line.strip()
    if message:
        yield from _document(b"".join(message), f"{name}:{number}", report)
    if not number:
        raise DamagedFile("no mail in mbox format")


def _document(raw: bytes, name: str, report: ReadReport) -> Iterator[Document]:
    """The document of a message; none if the bytes are no mail, which is reported."""
    message = email.message_from_bytes(raw, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    if not message.keys():
        report.skip("no mail", name, bad=True)
        return
    text = "\n\n".join(dict.fromkeys(filter(None, [_body(message), *_attached(message)])))
    text = f"{_headers(message, NAMED)}\n\n{text}"
    yield Document(name, without_surrogates(text).strip(), _header(message, "Subject"))


def _headers(message: EmailMessage, names: Sequence[str]) -> str:
    lines = [f"{key}: {_header(message, key)}" for key in names if _header(message, key)]
    files = [part.get_filename() or "" for part in message.walk() if part.is_attachment()]
    if files := [without_surrogates(file) for file in files if file]:
        lines.append(f"Attachments: {', '.join(files)}")
    return "\n".join(lines)


def _attached(message: EmailMessage) -> Iterator[str]:
    """The mail and the text in the attachments of a message."""
    for part in message.walk():
        if not isinstance(part, EmailMessage) or part is message:
            continue
        inner = part.get_payload()
        if part.get_content_type() == "message/rfc822" and isinstance(inner, list):
            for mail in inner:
                assert isinstance(mail, EmailMessage)
                yield f"{_headers(mail, ('Subject', *NAMED))}\n\n{_body(mail)}".strip()
        elif part.is_attachment() and part.get_content_maintype() == "text":
            yield _shown(part).strip()


def _header(message: EmailMessage, key: str) -> str:
    stored = next((text for name, text in message.raw_items() if name.lower() == key.lower()), "")
    # Bytes beyond ASCII are surrogates in it; the library's own value has lost them.
    if (known := without_surrogates(stored)) != stored:
        known = decode(stored.encode("utf-8", "surrogateescape"))[0] or known
        return " ".join(known.split())
    try:
        return " ".join(str(message.get(key, "")).split())
    except Exception:  # the library fails on some broken headers
        return ""


def _body(message: EmailMessage) -> str:
    """The plain text of a message, else the text of its HTML."""
    shown = message.get_body(("plain", "html")) or next(
        (part for part in message.walk() if part.get_content_maintype() == "text"), None
    )
    return _shown(shown).strip() if isinstance(shown, EmailMessage) else ""


def _shown(part: EmailMessage) -> str:
    text = _content(part)
    is_page = part.get_content_type() == "text/html"
    return extract_fragment(text) if is_page else text.replace("\r\n", "\n")


def _content(part: EmailMessage) -> str:
    raw = part.get_payload(decode=True)
    if not isinstance(raw, bytes):
        return ""
    try:
        return raw.decode(part.get_content_charset() or "utf-8")
    except (LookupError, UnicodeDecodeError):
        return decode(raw)[0] or raw.decode("utf-8", "replace")
