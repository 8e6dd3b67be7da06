"""Read mail: a message is a document, with its subject as title, the mail and text attached to it,
and the names of other attachments. A web page that a browser saved as one file is mail, too.
"""

from __future__ import annotations

import email
import email.policy
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from email.message import EmailMessage
from email.utils import parsedate_to_datetime
from pathlib import Path

from revela.errors import first_line
from revela.text.readers import common
from revela.text.readers.common import DamagedFile, ReadReport
from revela.text.readers.encodings import decode
from revela.text.readers.html import extract_fragment
from revela.text.readers.rows import Fields
from revela.types import Document, Value

ENCODED = ("base64", "quoted-printable")
NAMED = ("From", "To", "Cc", "Date")


def read_eml(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file with one message."""
    raw = common.read_bytes(path).removeprefix(BOM_UTF8)
    is_wide = raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    raw = raw.decode("utf-16", "replace").encode() if is_wide else raw
    yield from _document(raw, name, report)


def read_mbox(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file of messages, each after a line that begins with "From "."""
    number, message = 0, list[bytes]()
    with common.open_text(path) as handle:
        is_blank = True
        for line in (line.encode("utf-8", "surrogateescape") for line in handle):
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
        raise DamagedFile("not in mbox format")


def _document(raw: bytes, name: str, report: ReadReport) -> Iterator[Document]:
    """The document of a message; none if the bytes are not mail, or damaged, which is reported."""
    try:
        message = email.message_from_bytes(raw, policy=email.policy.default)
        assert isinstance(message, EmailMessage)
        if not message.keys():
            report.skip("not mail", name, bad=True)
            return
        text = "\n\n".join(dict.fromkeys(filter(None, _texts(message))))
        text = f"{_headers(message, NAMED)}\n\n{text}"
        text = common.without_surrogates(text).strip()
        subject = _header(message, "Subject")
        document = Document(name, text, subject, metadata=_metadata(message))
    except Exception as error:  # of the library; the other messages must still be read
        report.skip("damaged mail", f"{name}: {first_line(error)[:80]}", bad=True)
    else:
        yield document


def _headers(message: EmailMessage, names: Sequence[str]) -> str:
    lines = [f"{key}: {_header(message, key)}" for key in names if _header(message, key)]
    files = [part.get_filename() or "" for part in message.walk() if part.is_attachment()]
    if files := [common.without_surrogates(file) for file in files if file]:
        lines.append(f"Attachments: {', '.join(files)}")
    return "\n".join(lines)


def _texts(
    part: EmailMessage, path: Collection[EmailMessage] | None = None, is_shown: bool = True
) -> Iterator[str]:
    """The texts of a message or of a part, in order, with attached mail and text.

    Of alternatives, and of a page with what belongs to it, only the best text is shown; ``path``
    leads to it from the outermost of them.
    """
    parts = _parts(part)
    if part.get_content_type() == "message/rfc822":
        for mail in parts:
            yield _headers(mail, ("Subject", *NAMED))
            yield from _texts(mail)
    elif parts:
        best = None
        if part.get_content_type() in ("multipart/alternative", "multipart/related"):
            path = _path_to(part.get_body(("plain", "html")), part) if path is None else path
            best = next((inner for inner in parts if inner in path), None)
        for inner in parts:
            yield from _texts(inner, path, is_shown and best in (None, inner))
    elif part.get_content_maintype() == "text" and (is_shown or part.is_attachment()):
        yield _shown(part).strip()


def _parts(part: EmailMessage) -> list[EmailMessage]:
    return [inner for inner in part.iter_parts() if isinstance(inner, EmailMessage)]


def _path_to(body: object, part: EmailMessage) -> list[EmailMessage]:
    """The parts from ``part`` down to ``body``; none if it is not in it."""
    if part is body:
        return [part]
    below = (_path_to(body, inner) for inner in _parts(part))
    return next(([part, *path] for path in below if path), [])


def _header(message: EmailMessage, key: str) -> str:
    stored = next((text for name, text in message.raw_items() if name.lower() == key.lower()), "")
    # Bytes beyond ASCII are surrogates in it; the library's parsed value has lost them.
    if (known := common.without_surrogates(stored)) != stored:
        known = decode(stored.encode("utf-8", "surrogateescape"))[0] or known
        return " ".join(known.split())
    with suppress(Exception):  # the library fails on some broken headers
        return " ".join(str(message.get(key, "")).split())
    return ""


def _metadata(message: EmailMessage) -> dict[str, Value]:
    """The day on which a message was sent, in ISO 8601, if it is known."""
    with suppress(TypeError, ValueError):
        return {"date": parsedate_to_datetime(_header(message, "Date")).date().isoformat()}
    return {}


def _shown(part: EmailMessage) -> str:
    text = _content(part)
    is_page = part.get_content_type() == "text/html"
    return extract_fragment(text) if is_page else text.replace("\r\n", "\n")


def _content(part: EmailMessage) -> str:
    raw = part.get_payload(decode=True)
    if not isinstance(raw, bytes):
        return ""
    # A part in UTF-8 that declares another charset was converted together with its file.
    is_encoded = raw.isascii() or part.get("Content-Transfer-Encoding", "").lower() in ENCODED
    for charset in (*(() if is_encoded else ("utf-8",)), part.get_content_charset() or "utf-8"):
        with suppress(LookupError, ValueError):
            return raw.decode(charset)
    return decode(raw)[0] or raw.decode("utf-8", "replace")
