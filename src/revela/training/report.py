"""One HTML page about runs: curves, scores, data, settings and commands, from their records.

Styles and plots are inline; the page loads nothing and runs no script. The template (report.html)
escapes all text, such as names of corpora, files and models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from revela.errors import RevelaError, extra
from revela.files import atomic_write
from revela.terminal import duration
from revela.training import plots
from revela.training.methods.registry import METHODS
from revela.training.recipe import Recipe
from revela.training.record import COMPARISON, NOISE, RUN_FILE, Comparison, CurvePoint, Run

Runs = Mapping[str, Run]


@dataclass
class Results:
    """All results of a report: name -> result, in the order given."""

    runs: dict[str, Run] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def add_comparison(self, folder: Path, prefix: str) -> None:
        """Read a comparison and its runs; the prefix is put before their names."""
        comparison = Comparison.read(folder)
        self.comparisons[prefix or folder.resolve().name] = comparison
        prefix = f"{prefix}: " if prefix else ""
        for label in comparison.curves:
            kind, _, seed = label.rpartition(", seed ")
            run = folder / Path(f"{kind}-{seed}").name  # an untrusted label must stay inside
            if (run / RUN_FILE).is_file():
                self.runs[prefix + label] = Run.read(run)


@dataclass
class Cell:
    """A text, whether it is marked as the best of its row or column, and a note in small type."""

    text: str
    best: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A caption, column names (the first is that of the row names), and rows: name, cells."""

    caption: str
    header: list[str]
    rows: list[tuple[str, list[Cell]]]


def read_results(paths: Sequence[Path]) -> Results:
    """Read folders of runs and comparisons."""
    results = Results()
    for name, path in _named(paths).items():
        if (path / COMPARISON).is_file():
            results.add_comparison(path, name if len(paths) > 1 else "")
        elif (path / RUN_FILE).is_file():
            results.runs[name] = Run.read(path)
        else:
            raise RevelaError(
                f"{path} {'is no run' if path.exists() else 'does not exist'}: give folders of "
                "revela train or compare"
            )
    return results


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Name -> path. The name is the last part, or the whole path if several share the last part."""
    resolved = [path.resolve() for path in paths]
    if twice := next((path for path in resolved if resolved.count(path) > 1), None):
        raise RevelaError(f"{twice} is named twice: name it once")
    last = [path.name for path in resolved]
    names = [name if last.count(name) == 1 else str(p) for name, p in zip(last, paths, strict=True)]
    return dict(zip(names, paths, strict=True))


def report(paths: Sequence[Path], out: Path) -> Results:
    """Write the page about ``paths`` (see ``read_results``) to ``out``."""
    if out.is_dir():
        raise RevelaError(
            f"{out} is a folder: give the page a file name, such as --out {out / 'report.html'}"
        )
    results = read_results(paths)
    page = render(results, [path.resolve().name for path in paths])
    with atomic_write(out) as temporary:
        # A file name that is not UTF-8 is shown with "?".
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
    return results


def render(results: Results, names: Sequence[str]) -> str:
    """The HTML page, with ``names`` in its title."""
    with extra("report", "the report page"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    runs = results.runs
    return environment.get_template("report.html").render(
        title=", ".join(names),
        runs=runs,
        happened={name: run.in_words() for name, run in runs.items()},
        legend=_legend(plots.kinds_of(runs)),
        facts=facts_table(runs),
        label_free=check_tables(runs),
        checks=_figures(plots.check_plots(runs)),
        training=_figures(plots.loss_plots(runs)),
        comparisons=[
            (
                comparison_table(name, comparison),
                _legend(plots.kinds_of(comparison.curves)),
                _figures(plots.comparison_plots(comparison)),
            )
            for name, comparison in results.comparisons.items()
        ],
        changed=settings_table(runs),
        commands=dict.fromkeys(run.about.command for run in runs.values() if run.about.command),
    )


def _legend(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, plots.colour(series)) for series, name in enumerate(names)]


def _figures(drawn: Iterable[plots.Plot]) -> list[tuple[str, str]]:
    """Captions and SVG elements."""
    return [(plot.title, plot.svg()) for plot in drawn]


def check_tables(runs: Runs) -> list[Table]:
    """A table per task, with a column per run; the best score of each column is marked."""
    systems: dict[str, Callable[[Run], Mapping[str, float]]] = {
        "BM25": lambda run: run.about.bm25,
        "untrained": lambda run: run.about.untrained,
        "before the first step": Run.start,
        "saved": Run.saved,
    }
    tables = []
    for task in plots.check_tasks(runs):
        columns = [
            _marked([scores(run).get(task) for scores in systems.values()], NOISE)
            for run in runs.values()
        ]
        rows = list(zip(systems, map(list, zip(*columns, strict=True)), strict=True))
        tables.append(Table(task, ["nDCG@10", *runs], rows))
    return tables


def comparison_table(name: str, comparison: Comparison) -> Table:
    """Final nDCG@10 by collection: BM25, and each kind of run (mean over seeds), with its start."""
    kinds: dict[str, list[list[CurvePoint]]] = {}
    for label, curve in comparison.curves.items():
        if curve:
            kinds.setdefault(plots.kind_of(label), []).append(curve)
    rows, averaged = [], {name: [name] for name in comparison.bm25}
    if len(averaged) > 1:
        averaged["mean"] = list(averaged)
    for row, collections in averaged.items():

        def score(scores: Mapping[str, float], names: Sequence[str] = collections) -> float:
            return fmean(scores[name] for name in names)

        starts = [[score(curve[0].judged) for curve in curves] for curves in kinds.values()]
        ends = [[score(curve[-1].judged) for curve in curves] for curves in kinds.values()]
        cells = _marked([score(comparison.bm25), *map(fmean, ends)])
        for cell, start, end in zip(cells[1:], starts, ends, strict=True):
            cell.note = _from_to(start, end)
        rows.append((row, cells))
    return Table(name, ["nDCG@10", "BM25", *kinds], rows)


def facts_table(runs: Runs) -> Table:
    """Data, progress and machine of each run."""
    facts: dict[str, Callable[[Run], str]] = {
        "corpus": lambda run: run.about.corpus,
        "documents": lambda run: _number(run.about.documents),
        "chunks": lambda run: _number(run.about.chunks),
        "groups": lambda run: _number(run.about.groups),
        "method": lambda run: _text(run.settings.get("method")),
        "retriever starts from": lambda run: run.about.models.get("model", {}).get("name", ""),
        "language model": lambda run: run.about.models.get("lm", {}).get("name", ""),
        "steps": lambda run: _number(max((row.step for row in run.metrics), default=None)),
        "saved step": lambda run: _number(run.metrics[-1].kept if run.metrics else None),
        "training took": lambda run: duration(run.metrics[-1].minutes) if run.metrics else "",
        "tokens read": lambda run: _number(run.metrics[-1].tokens_read if run.metrics else None),
    }
    texts = {name: [fact(run) for run in runs.values()] for name, fact in facts.items()}
    recorded = [run.about.hardware | run.about.versions for run in runs.values()]
    for name in dict.fromkeys(name for each in recorded for name in each):
        texts[name] = [_text(each.get(name)) for each in recorded]
    rows = [(name, [Cell(text) for text in row]) for name, row in texts.items() if any(row)]
    return Table("", ["", *runs], rows)


def settings_table(runs: Runs) -> Table:
    """Settings that differ from the defaults of its method in any run."""
    names = list[str]()
    for run in runs.values():
        method = str(run.settings.get("method"))
        defaults = Recipe.of(method).to_dict() if method in METHODS else {}
        changed = (name for name, value in run.settings.items() if value != defaults.get(name))
        names += ["method", *changed]
    rows = [
        (name, [Cell(_text(run.settings.get(name))) for run in runs.values()])
        for name in dict.fromkeys(names)
    ]
    return Table("Settings that differ from the defaults of the method", ["", *runs], rows)


def _from_to(starts: Sequence[float], ends: Sequence[float]) -> str:
    """The mean start; with several seeds also the range of final scores."""
    seeds = f", seeds {min(ends):.3f} to {max(ends):.3f}" if len(ends) > 1 else ""
    return f"from {fmean(starts):.3f}{seeds}"


def _marked(values: Iterable[float | None], tie: float = 0.0) -> list[Cell]:
    """Values with three digits; the highest is marked, unless another is within ``tie`` of it."""
    texts = ["" if value is None else f"{value:.3f}" for value in values]
    known = sorted(float(text) for text in texts if text and text != "nan")
    wins = len(known) > 1 and known[-1] - known[-2] > tie + 1e-9
    best = f"{known[-1]:.3f}" if wins else None
    return [Cell(text, best=text == best) for text in texts]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _text(value: Any) -> str:
    """A value as in a recipe file."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
