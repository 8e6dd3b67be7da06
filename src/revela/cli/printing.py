"""Output for people: tables of numbers, hits of a search, groups."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from revela.terminal import CONTROL, MARKS, counted, printable

if TYPE_CHECKING:
    from revela.searching.snippets import Snippet
    from revela.text.readers.common import ReadReport
    from revela.types import Chunk, Explanation, Hit, Hits

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
    with console.capture() as shown:  # rich would exit with 1 where nobody reads on
        console.print(table)
    print(shown.get(), end="")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else printable(str(value))


def print_answer(hits: Hits) -> None:
    """Whether the first hit answers the query, in words."""
    from revela.types import ANSWERS

    if hits:
        print(f"{ANSWERS[hits.answer]}:")


def print_hits(hits: Sequence[Hit], snippets: Sequence[Snippet], top: int) -> None:
    """The first hits with different texts, with their snippets, whose marks are bold on a terminal,
    and the names of other hits with the same text.
    """
    from revela.searching.snippets import distinct

    names = [_named(*pair) for pair in zip(hits, snippets, strict=True)]
    for rank, (i, copies) in enumerate(distinct(hits, top).items(), 1):
        hit, shown = hits[i], snippets[i]
        text = _bold(shown) if sys.stdout.isatty() else printable_lines(shown.text)
        print(f"{rank}. {names[i]}  [{hit.score:.4f}]\n   {text}")
        if copies:
            print(f"   the same text: {'; '.join(names[copy] for copy in copies)}")
        if hit.explanation is not None:
            print(f"   {_explained(hit.explanation, hit.confidence)}")
    if not hits:
        print("nothing found")


def _named(hit: Hit, shown: Snippet) -> str:
    """The title of a hit, and where it stands: (notes/bees.md:12), (report.pdf, page 3)."""
    from revela.searching.snippets import heading_of

    place = hit.id
    if shown.page is not None:
        place += f", page {shown.page}"
    if shown.line is not None:
        place += f":{shown.line}"
    heading = heading_of(hit)
    return one_line(place if heading == hit.id else f"{heading} ({place})")


def _bold(shown: Snippet) -> str:
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
