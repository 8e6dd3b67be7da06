"""A report's tables about the runs themselves: what they were trained on, their settings, and where
they ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from revela.evaluation.report.runs import Run
from revela.evaluation.report.score_tables import Cell, Table
from revela.settings import Recipe


def facts(runs: Sequence[Run]) -> Table:
    """What each run was made of and how far it went, a column a run."""
    rows: dict[str, list[str]] = {
        "corpus": [str(run.about.get("corpus", "")) for run in runs],
        **{
            name: [_count(run.about.get(name)) for run in runs]
            for name in ("documents", "chunks", "groups")
        },
        "objective": [_text(run.settings.get("objective")) for run in runs],
        "retriever starts from": [_text(run.settings.get("model")) for run in runs],
        "language model": [_text(run.settings.get("lm")) for run in runs],
        "updates": [_updates(run) for run in runs],
        "minutes of training": [
            f"{run.end()['minutes']:.1f}" if run.metrics else "" for run in runs
        ],
        "tokens read": [
            _count(
                max(
                    (row["tokens_read"] for row in run.metrics if "tokens_read" in row),
                    default=None,
                )
            )
            for run in runs
        ],
        "state": ["saved" if run.finished else "not finished" for run in runs],
    }
    return _plain("", runs, rows)


def settings(runs: Sequence[Run]) -> tuple[Table, Table]:
    """The recipe: settings that a run changed, beside the default; and the others."""
    defaults = Recipe.of().flat()
    names = list(dict.fromkeys([*defaults, *(name for run in runs for name in run.settings)]))
    changed = [
        n
        for n in names
        if any(run.settings.get(n, defaults.get(n)) != defaults.get(n) for run in runs)
    ]
    header = ["setting", "default", *(run.name for run in runs)]
    rows = [
        (
            n,
            [Cell(_text(defaults.get(n)))]
            + [Cell(_text(run.settings[n]) if n in run.settings else "") for run in runs],
        )
        for n in changed
    ]
    others = [(n, [Cell(_text(defaults[n]))]) for n in names if n not in changed]
    return Table("Settings that differ from their defaults", header, rows), Table(
        "All others", ["setting", "default"], others
    )


def environment(runs: Sequence[Run]) -> Table:
    """Versions and hardware as each run wrote them down."""
    told = [run.about.get("hardware", {}) | run.about.get("versions", {}) for run in runs]
    return _plain(
        "",
        runs,
        {
            name: [_text(each.get(name, "")) for each in told]
            for name in dict.fromkeys(n for each in told for n in each)
        },
    )


def _plain(caption: str, runs: Sequence[Run], rows: Mapping[str, Sequence[str]]) -> Table:
    return Table(
        caption,
        ["", *(run.name for run in runs)],
        [(name, [Cell(text) for text in texts]) for name, texts in rows.items() if any(texts)],
    )


def _updates(run: Run) -> str:
    end = run.end()
    if not end:
        return ""
    kept = end.get("kept", end["step"])
    return f"{end['step']:,}" + (
        f" (saved is the state after {kept:,})" if kept != end["step"] else ""
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _text(value: Any) -> str:
    """A setting as a recipe file has it."""
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else ""
        if value is None
        else str(value)
    )
