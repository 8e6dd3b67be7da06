"""Output for people: tables of numbers, hits of a search, groups."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from revela.terminal import CONTROL, MARKS, counted, printable

if TYPE_CHECKING:
    from revela.searching.results import Marked, Result
    from revela.text.readers.common import ReadReport
    from revela.types import Chunk, Explanation

SNIPPET = 240  # characters
FILE_WIDTH = 160  # columns of a table in a file or a pipe


def print_json(value: object, indent: int | None = 1) -> None:
    """JSON in UTF-8, with escapes for characters that control a terminal."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    escaped = f"[{CONTROL}]|{MARKS.pattern}"
    print(re.sub(escaped, lambda found: f"\\u{ord(found[0]):04x}", text))


def print_report(report: ReadReport) -> None:
    """Counts of what was read from a corpus and what was skipped."""
    for line in report.lines():
        print(printable(line))


def print_scores(
    title: str, tasks: Iterable[str], systems: Mapping[str, Mapping[str, float]]
) -> None:
    """A row per system, a column per task."""
    tasks = list(tasks)
    rows = [[name, *(scores.get(task) for task in tasks)] for name, scores in systems.items()]
    print_table(title, ["system", *tasks], rows)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Floats with three digits, numbers at the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [[_cell(value) for value in row] for row in rows]
    table = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for name, *cells in zip(header, *texts, strict=True):
        numeric = all(cell.replace(".", "", 1).isdigit() for cell in cells if cell)
        table.add_column(
            Text(printable(name)), justify="right" if numeric else "left", overflow="fold"
        )
    for row in texts:
        table.add_row(*map(Text, row))  # a str would be read as rich's markup
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    with console.capture() as shown:  # rich would exit with 1 on a closed pipe
        console.print(table)
    print(shown.get(), end="")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else printable(str(value))


def print_results(results: Sequence[Result], top: int, is_filtered: bool = False) -> None:
    """The first results with different texts, with their snippets, whose marks are bold on a
    terminal, and the names of others with the same text.
    """
    from revela.searching.index_search import distinct

    for rank, (i, copies) in enumerate(distinct(results, top).items(), 1):
        result = results[i]
        shown = result.snippet
        text = _bold(shown) if sys.stdout.isatty() else printable_lines(shown.text)
        print(f"{rank}. {_named(result)}  [{result.score:.4f}]\n   {text}")
        if copies:
            print(f"   the same text: {'; '.join(_named(results[copy]) for copy in copies)}")
        if result.explanation is not None:
            print(f"   {_explained(result.explanation, result.confidence)}")
    if not results:
        print("nothing found with this filter" if is_filtered else "nothing found")


def _named(result: Result) -> str:
    """The title of a result, and where it stands, as editors open it, from the current folder on:
    (notes/bees.md:12), (report.pdf, page 3), (17 in rows.csv).
    """
    place = result.id
    if result.path:
        full, here = Path(result.path), Path.cwd()
        path = str(full.relative_to(here) if full.is_relative_to(here) else full)
        file, _, row = result.id.rpartition(":")
        is_row = bool(file) and row.isdigit() and path.endswith(file)
        place = path if path.endswith(result.id) else f"{result.id} in {path}"
        place = f"{path}:{row}" if is_row else place
    if result.page is not None:
        place += f", page {result.page}"
    if result.line is not None:
        place += f":{result.line}"
    return one_line(place if result.heading == result.id else f"{result.heading} ({place})")


def _bold(shown: Marked) -> str:
    """A snippet as a terminal shows it."""
    parts, at = list[str](), 0
    for begin, end in shown.marks:
        parts += (
            printable_lines(shown.text[at:begin]),
            f"\033[1m{printable(shown.text[begin:end])}\033[0m",
        )
        at = end
    return "".join([*parts, printable_lines(shown.text[at:])])


def printable_lines(text: str) -> str:
    """Untrusted text, ``printable`` but for its lines, which are indented."""
    return "\n   ".join(map(printable, text.split("\n")))


def _explained(why: Explanation, confidence: float | None) -> str:
    """The parts of a hit's score."""
    parts = [f"{name} {value:.2f}" for name, value in asdict(why).items() if value is not None]
    if confidence is not None:
        parts.append(f"confidence {confidence:.2f}")
    return ", ".join(parts)


def print_group(title: str, members: Sequence[Chunk], names: Sequence[str]) -> None:
    """A group: its documents, with their chunks under them without the title."""
    names_of = {member.document: name for member, name in zip(members, names, strict=True)}
    print(f"\n{title}: {len(members)} chunks of {counted(len(names_of), 'document')}")
    for owner, name in sorted(names_of.items()):
        print(f"  {snippet(name)}")
        for member in members:
            if member.document == owner:
                body = snippet(member.text.removeprefix(f"{name}\n"))
                print(f"    - {body or '(nothing but the title)'}")
                if member.query:
                    print(f"      asked for by: {one_line(member.query)}")


def one_line(text: str) -> str:
    """A text on one line, ``printable``."""
    return printable(" ".join(text.split()))


def snippet(text: str) -> str:
    """The beginning of a text, on one line."""
    line = one_line(text)
    return line if len(line) <= SNIPPET else f"{line[:SNIPPET]}..."
