"""A row of JSONL, a table or a dataset -> a document."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from revela.corpus.readers.opened import CODE, Unsuited
from revela.corpus.report import Report
from revela.types import Document, Kind, Value, is_missing

ID_FIELDS = ("_id", "id", "docid")


@dataclass(frozen=True)
class Fields:
    """What the fields of a row are called. The text is required; a row may lack a title and any
    field of metadata.
    """

    text: str
    title: str
    metadata: tuple[str, ...] = ()


def document_of(
    row: Mapping[str, object], where: str, fields: Fields, report: Report
) -> Document | None:
    """The row as a document, or None and a line of the report.

    Args:
        row: its values by name.
        where: the row's place, and its id if it has none.
        fields: which values to take.
        report: told of a row without text.
    """
    text, title = row.get(fields.text), row.get(fields.title)
    if not isinstance(text, str):
        named = "" if fields.text in row else f" (has {_listed(row)})"
        report.skip(f'no text field "{fields.text}"', f"{where}{named}", bad=True)
        return None
    found = next((row[name] for name in ID_FIELDS if row.get(name) is not None), where)
    key = str(found)
    metadata = {
        name: _plain(value) for name in fields.metadata if not is_missing(value := row.get(name))
    }
    document = Document(
        key, text, title if isinstance(title, str) else "", _kind_of(key, text), metadata
    )
    try:
        "".join((key, document.full_text, *map(str, metadata.values()))).encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which is no character
        report.skip("not Unicode (half of a surrogate pair)", where, bad=True)
        return None
    return document


def columns_of(names: Collection[str], fields: Fields) -> list[str]:
    """The columns to read of a table that has these."""
    if fields.text not in names:
        raise Unsuited(
            f'no column "{fields.text}"; name one with --text-field', f"has {_listed(names)}"
        )
    return [
        name
        for name in dict.fromkeys((*ID_FIELDS, fields.title, fields.text, *fields.metadata))
        if name in names
    ]


def _plain(value: object) -> Value:
    """Text and numbers as they are; lists and objects as JSON, anything else (a date) as it is
    written.
    """
    if isinstance(value, str | int | float):
        return value
    return (
        json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list | dict)
        else str(value)
    )


def _listed(names: Collection[str]) -> str:
    """Column names for a person: of a table without a header they are whatever its first row says."""
    shown = [name if len(name) <= 40 else f"{name[:40]}..." for name in islice(names, 12)]
    return ", ".join(shown + ["..."] * (len(names) > 12)) or "nothing"


_DEFINITIONS = (
    *("def ", "class ", "import ", "from ", "async def ", "@"),
    *("public ", "private ", "static ", "function ", "func ", "fn ", "#include"),
)


def _kind_of(key: str, text: str) -> Kind:
    """Rows have no file ending of their own: an id that ends like source code is code, and so is
    text that begins as a definition.
    """
    if "." in key and Path(key).suffix.lower() in CODE:
        return "code"
    head = text[:400].lstrip()[:200]
    looks = (
        head.startswith(_DEFINITIONS)
        and ("\n" in text or "(" in head)
        and any(c in head for c in "(){}:;=")
    )
    return "code" if looks else "prose"
