"""Turn a row of JSON, of a table or of a dataset into a document."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from revela.text.endings import CODE
from revela.text.readers import common
from revela.text.readers.common import ReadReport, UnsupportedFile, is_of_file
from revela.types import Document, Kind, Value, is_missing, is_unicode

ID_FIELDS = ("_id", "id", "docid")
PATH_FIELDS = ("path", "file_path", "filepath", "filename", "file_name")
LANGUAGE_FIELDS = ("language", "programming_language", "lang")
PROGRAMMING = frozenset(
    """assembly awk bash c c# c++ clojure cobol cpp csharp css cuda dart elixir erlang f# fortran go
    golang groovy haskell java javascript js julia kotlin lua matlab objective-c ocaml perl php
    powershell python r ruby rust scala scheme shell solidity sql swift typescript ts vb verilog
    vhdl zig""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Fields:
    """Names of a row's fields. The text is required; the title and metadata are optional.

    Attributes:
        for_search: also keep the fields by which every index can be filtered: date and file type.
    """

    text: str
    title: str
    metadata: tuple[str, ...] = ()
    for_search: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the metadata to keep."""
        return (*self.metadata, "date") if self.for_search else self.metadata


def document_of(
    row: Mapping[str, object], where: str, fields: Fields, report: ReadReport
) -> Document | None:
    """The row as a document; None if it has no valid text, which is reported. ``where`` is the id
    of a row without one.
    """
    text, title = row.get(fields.text), row.get(fields.title)
    if not isinstance(text, str):
        named = "" if fields.text in row else f" (has {_list_names(row)})"
        report.skip(f'no text field "{fields.text}"', f"{where}{named}", bad=True)
        return None
    if len(text) > common.MAX_BYTES:
        report.skip(f"text over {common.MAX_BYTES >> 20} MB", where, bad=True)
        return None
    ids = (row.get(name) for name in ID_FIELDS)
    key = next((str(value) for value in ids if value != "" and not is_missing(value)), "")
    is_taken = key != where and is_of_file(key, report.names)
    if key and report.claim and (is_taken or not report.claim(key)):
        report.note("rows with the id of another row or file: their place is their id", where)
        key = ""
    key = key or where
    title = "" if is_missing(title) or isinstance(title, bool | list | dict) else str(title)
    values = ((name, row.get(name)) for name in fields.kept)
    metadata = {name: plain_value(value) for name, value in values if not is_missing(value)}
    if not all(map(is_unicode, (key, title, text, *map(str, metadata.values())))):
        report.skip("not UTF-8", where, bad=True)
        return None
    return Document(key, text, title, _kind_of(key, row, text), metadata)


def columns_of(names: Collection[str], fields: Fields) -> list[str]:
    """The columns of a table to read; UnsupportedFile without a text column."""
    if fields.text not in names:
        message = f'no column "{fields.text}"; name one with --text-field'
        raise UnsupportedFile(message, f"has {_list_names(names)}")
    of_kind = (*PATH_FIELDS, *LANGUAGE_FIELDS)
    columns = dict.fromkeys((*ID_FIELDS, fields.title, fields.text, *fields.kept, *of_kind))
    return [name for name in columns if name in names]


def plain_value(value: object) -> Value:
    """Text and numbers unchanged, lists and objects as JSON, others (such as a date) as text."""
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _list_names(names: Collection[str]) -> str:
    """Column names, shortened: in a file without a header they are its first row."""
    shown = [name if len(name) <= 40 else f"{name[:40]}..." for name in islice(names, 12)]
    return ", ".join(shown + ["..."] * (len(names) > 12)) or "nothing"


# The beginning of source code: a complete definition or import, after decorators or annotations.
# "function words (of, the)" and "public schools (K-12)" do not match.
_DEFINITION = re.compile(
    r"""
    (?: @[\w.]+ (?: \( (?: [^()] | \([^()]*\) )* \) )? \s+ )*
    (?: (?: async\s+ )? def \s+ [\w.]+ [?!]? \s* [(\[:=\n]
    | class \s+ \w+ (?: \( | [^\n;]* \{ \s*$ | \s*:\s*$ )
    | class \s+ [A-Z]\w* (?: \s*<\s* [\w:]+ )? [ \t]* \r?\n (?= [ \t]+ \S )
    | package \s+ [\w.]+ (?: ; \s*$ | \s*\n\s*\n\s* (?: import | func | type | var | const | // ) )
    | <\?php \b
    | impl \b [^\n{]* \{ \s*$
    | use \s+ [\w:\\]+ (?: ::\{ [^}]* \} )? ; \s*$
    | using \s+ [\w.]+ ; \s*$
    | namespace \s+ [\w.:\\]+ \s* [;{] \s*$
    | \#!/
    | from \s+ [\w.]+ \s+ import \s
    | import \s+ (?: ["'{(*] | [^\n]* \s from \s+ ["'] )
    | import \s+ (?: static\s+ )? [\w.*]+ (?: \s+as\s+\w+ )?
      (?: \s*,\s* [\w.]+ (?: \s+as\s+\w+ )? )* \s* ;? \s* (?: (?: \# | // ) .* )? $
    | \#include \s* [<"]
    | (?: pub\s+ )? fn \s+ \w+ \s* [(<]
    | func \s+ (?: \([^)]*\) \s* )? \w+ \s* [(<\[]
    | function \s* \*? \s* [\w$]* \s* \([^)]*\) \s* (?: : \s* [\w<>|\[\]]+ \s* )? \{
    | function \s+ [\w.:]+ \([^)]*\) \s*$
    | (?: public | private | protected | static ) \s+
      (?: (?: val | var | let | const | fun | func | def ) \s+ \w
      | [^{};]{0,300} (?: ; | \{ (?: [^\n]* \} )? ) \s*$ )
    )
    """,
    re.VERBOSE | re.MULTILINE,
)


def _kind_of(key: str, row: Mapping[str, object], text: str) -> Kind:
    """Code or prose, by the row's path, id or language, or else by a definition at the beginning of
    the text.
    """
    names = [key, *(str(row[name]) for name in PATH_FIELDS if row.get(name))]
    if any(Path(name).suffix.lower() in CODE for name in names):
        return "code"
    if language := next((str(row[name]) for name in LANGUAGE_FIELDS if row.get(name)), ""):
        return "code" if language.lower() in PROGRAMMING else "prose"
    return "code" if _DEFINITION.match(text[:1000].lstrip()) else "prose"
