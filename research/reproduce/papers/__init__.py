"""The tables, by the stems of their files in research/published."""

from __future__ import annotations

from research.reproduce.papers import cde, dream, dwell, revela_v1, revela_v2
from research.reproduce.tables import Table
from revela.errors import RevelaError

TABLES: dict[str, Table] = {
    table.name: table for file in (revela_v1, revela_v2, dream, cde, dwell) for table in file.TABLES
}


def find_table(name: str) -> Table:
    """A table by its name, or by a part that is its own: revela-v1-table7, or revela-v1-7.

    Raises:
        RevelaError: there is none, or several.
    """
    paper, _, number = name.rpartition("-")
    starts = f"{name}-", f"{paper}-table{number}-"
    found = [table for stem, table in TABLES.items() if stem == name or stem.startswith(starts)]
    if len(found) != 1:
        raise RevelaError(f"--table {name} is unknown: --list prints all tables")
    return found[0]
