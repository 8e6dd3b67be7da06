"""Read contacts (vCard) and calendars (iCalendar): a line per entry, each value with its label.

Pictures, time zones, alarms, and what programs tell programs are left out.
"""

from __future__ import annotations

import quopri
import re
from collections.abc import Iterator
from pathlib import Path

from revela.corpus.readers.common import ReadReport, read_decoded
from revela.corpus.readers.rows import Fields
from revela.corpus.readers.text import read_text
from revela.types import Document

ENTRIES = ("VCARD", "VEVENT", "VTODO", "VJOURNAL")
_LABELS = {
    **{"FN": "Name", "TEL": "Phone", "ADR": "Address", "ORG": "Organization", "BDAY": "Birthday"},
    **{"DTSTART": "Start", "DTEND": "End"},
}
_NOT_TOLD = frozenset(
    """N VERSION PRODID UID REV DTSTAMP CREATED LAST-MODIFIED SEQUENCE TRANSP CLASS PRIORITY RRULE
    EXDATE RECURRENCE-ID""".split()  # noqa: SIM905
)
_FOLD = re.compile(r"\r?\n[ \t]")
_BROKEN = re.compile(r"^[^:\n]*QUOTED-PRINTABLE[^:\n]*:(?:.*=\r?\n)+", re.MULTILINE | re.IGNORECASE)
_PROPERTY = re.compile(r'(?:[\w-]+\.)?([\w-]+)((?:;(?:"[^"]*"|[^":;])*)*):(.*)')
_TIME = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)(?:T(\d\d):?(\d\d)(?::?\d\d)?Z?)?")
_CALLED = re.compile(r'CN="?([^";:]+)', re.IGNORECASE)
_CHARSET = re.compile(r"CHARSET=([\w-]+)", re.IGNORECASE)


def read_cards(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file as one document; one without entries as it is, as .vcf has another meaning."""
    entries = [*_entries(read_decoded(path, name, report))]
    if entries:
        yield Document(name, "\n".join(entries))
    else:
        yield from read_text(path, name, fields, report)


def _entries(text: str) -> Iterator[str]:
    """The entries of a file, each as a line.

    >>> [*_entries("BEGIN:VCARD\\nFN:Anna\\nORG:Hives;South\\nTEL;HOME:12 34\\nEND:VCARD")]
    ['Name: Anna; Organization: Hives, South; Phone: 12 34']
    """
    text = _BROKEN.sub(lambda found: re.sub(r"=\r?\n", "", found[0]), _FOLD.sub("", text))
    within, entry = list[str](), list[str]()
    for found in filter(None, map(_PROPERTY.match, text.splitlines())):
        name, parameters, value = found[1].upper(), found[2], found[3].strip()
        if name == "BEGIN":
            within.append(value.upper())
            entry = [] if within[-1] in ENTRIES else entry
        elif name == "END":
            if within and within.pop() in ENTRIES and entry:
                yield "; ".join(entry)
        elif within and within[-1] in ENTRIES and (told := _told(name, parameters, value)):
            entry.append(f"{_LABELS.get(name, name.capitalize())}: {told}")


def _told(name: str, parameters: str, value: str) -> str:
    """A value as text; "" if it is not for people."""
    is_coded = re.search(r"ENCODING=(?:B\b|BASE64)|;BASE64", parameters, re.IGNORECASE)
    if is_coded or name in _NOT_TOLD or name.startswith("X-") or value.startswith("data:"):
        return ""
    if "QUOTED-PRINTABLE" in parameters.upper():
        charset = _CHARSET.search(parameters)
        raw = quopri.decodestring(value.encode("utf-8", "replace"))
        try:
            value = raw.decode(charset[1] if charset else "utf-8", "replace")
        except LookupError:
            value = raw.decode("utf-8", "replace")
    value = ", ".join(filter(None, re.split(r"(?<!\\);", value)))
    value = re.sub(r"\\([,;\\:])", r"\1", re.sub(r"\\[nN]", " ", value))
    if time := _TIME.fullmatch(value):
        clock = f" {time[4]}:{time[5]}" if time[4] else ""
        return f"{time[1]}-{time[2]}-{time[3]}{clock}"
    called = _CALLED.search(parameters)
    value = value.removeprefix("mailto:").removeprefix("tel:")
    return " ".join(f"{called[1] if called else ''} {value}".split())
