"""Run a table or a figure of a paper, and write it next to the published numbers.

    python -m research.reproduce --list
    python -m research.reproduce --table revela-v1-1 --sizes 135M 500M --data BEIR --dry-run
    python -m research.reproduce --table revela-v1-1 --small --corpus TEXT --data FOLDERS

Flags that are not named here go to every `revela train`: --max-steps 100, --lm MODEL. What is
finished is kept, and an interrupted table goes on. OUT/TABLE.md and OUT/TABLE.csv have the result.
docs/reproduce.md says what it needs, and what differs from the papers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.benchmarks.options import OUT, parser_of
from research.reproduce.papers import TABLES, find_table
from research.reproduce.report import write_report
from research.reproduce.run import Options, run_table
from research.reproduce.tables import MODELS, Table
from revela.errors import RevelaError
from revela.training.commands import processes_here


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--table", default="", help="the stem of its file, or short: revela-v1-7")
    add("--figure", default="", help="a figure of --list")
    add("--list", action="store_true", help="print all tables and figures")
    add("--sizes", nargs="+", choices=MODELS, default=[], help="of the retriever; all by default")
    add("--rows", nargs="+", default=[], help="labels of rows; all by default")
    add("--only", nargs="+", default=[], help="data sets; all of the table by default")
    add("--seeds", nargs="+", type=int, default=[0], help="each row is trained with each of them")
    add("--data", type=Path, default=Path("BEIR"), help="folder of test collections")
    add("--corpus", nargs="+", default=[], help="a text or groups; the paper's by default")
    add("--pairs", type=Path, help="folder of judged pairs: CDE's second phase, MS MARCO documents")
    add("--out", type=Path, default=Path(os.path.relpath(OUT / "reproduce")))
    add("--processes", type=int, default=processes_here(), help="that train; one a GPU by default")
    add("--small", action="store_true", help="tiny budgets, to try everything on two cores")
    add("--dry-run", action="store_true", help="print the commands")
    arguments, more = parser.parse_known_args(argv)
    try:
        run(arguments, more)
    except RevelaError as error:
        print(f"research.reproduce: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def run(arguments: argparse.Namespace, more: Sequence[str]) -> None:
    """Do what the arguments ask for."""
    if arguments.list:
        print("\n".join(listed()))
        return
    if bool(arguments.table) == bool(arguments.figure):
        raise RevelaError("give one of --table, --figure and --list")
    options = Options(
        out=arguments.out,
        data=arguments.data,
        sizes=tuple(arguments.sizes),
        seeds=tuple(arguments.seeds),
        given=given_settings(more),
        corpus=tuple(arguments.corpus),
        pairs=arguments.pairs,
        only=tuple(arguments.only),
        rows=tuple(arguments.rows),
        small=arguments.small,
        processes=arguments.processes,
        dry_run=arguments.dry_run,
    )
    if arguments.figure:
        from research.reproduce import figures  # draws, which needs matplotlib

        for path in figures.draw(arguments.figure, options):
            print(path)
        return
    table = find_table(arguments.table)
    results = run_table(table, options)
    if not options.dry_run:
        print(write_report(table, results, options))


def given_settings(words: Sequence[str]) -> dict[str, Any]:
    """Flags of `revela train` as settings by name.

    Raises:
        RevelaError: one of them is not a setting.
    """
    if not words:
        return {}
    from revela import cli
    from revela.cli.main import prepare
    from revela.cli.recipe_flags import given_settings as by_name

    tokens = ["train", "corpus", "--out", "out", *words]
    prepare(tokens)
    try:
        _, bound, _ = cli.app.parse_args(tokens, exit_on_error=False, print_error=False)
    except Exception as error:  # cyclopts has several
        raise RevelaError(f"{' '.join(words)}: {error}") from error
    if other := bound.arguments.keys() - {"corpus", "out", "given"}:
        raise RevelaError(f"{', '.join(other)} cannot be given to every revela train of a table")
    return by_name(bound.arguments.get("given"))


def listed() -> list[str]:
    """A line for each table and figure."""
    lines = [f"{table.name}: {table.shows}{_about(table)}" for table in TABLES.values()]
    try:
        from research.reproduce import figures
    except ImportError:
        return lines
    return lines + [f"{name}: {figure.shows}" for name, figure in figures.FIGURES.items()]


def _about(table: Table) -> str:
    sizes = f" ({', '.join(table.sizes)})" if table.sizes else ""
    expected = f"expected: {table.expected}" if table.expected else ""
    more = filter(None, (expected, table.hours, "--small only" if table.small_only else ""))
    return sizes + "".join(f"; {part}" for part in more)


if __name__ == "__main__":
    main()
