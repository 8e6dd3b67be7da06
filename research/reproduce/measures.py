"""What a figure of a paper shows: for each row of a table a score, a number of its log, of its
groups or of a probe. Reading one runs the commands that it needs, or prints them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import numpy as np

from research.benchmarks.options import corpus_of, kept_json
from research.plot_run import Run
from research.plots import Mark, Panel, Shape
from research.reproduce import run
from research.reproduce.data import Folders
from research.reproduce.published import PUBLISHED, cell
from research.reproduce.run import Options, Results, Scores, margin_of, mean_of
from research.reproduce.tables import NDCG, Row, Table
from revela.errors import RevelaError
from revela.training.commands import (
    MODULES,
    Command,
    eval_commands,
    run_commands,
    train_commands,
)
from revela.training.groups.store import GroupFolder, is_group_folder
from revela.training.recipe import Recipe

LAST = 0.1  # share of a run's lines whose mean is "the end of training"
PROBED = 1130  # documents and answers of a probe (Dwell: queries with a located passage)
PAIRS_PROBED = 5000  # in all (DREAM, figure 4)
BIN, BINS = 500, 20  # characters (Dwell, figure 2)


@dataclass(frozen=True)
class Point:
    """Where the value of a row stands.

    Attributes:
        x, y: settings; ``y`` of a map.
        series: empty: the size.
        note: next to a dot of a scatter.
        other: row whose value is x in a scatter; none: ``row``.
    """

    row: Row
    x: str = ""
    y: str = ""
    series: str = ""
    note: str = ""
    other: Row | None = None


@dataclass(frozen=True)
class Plot:
    """A panel of a figure, before its rows have run.

    Attributes:
        table: of all rows of the points.
        measure: what is read of each row.
        x: of a scatter: what is read in place of a setting.
        own_text: train on the text of the table's data sets, too.
        also: plots whose marks stand in the same panel.
    """

    title: str
    table: Table
    points: Sequence[Point]
    x_label: str
    measure: Measure
    shape: Shape = "lines"
    x: Measure | None = None
    y_label: str = ""
    own_text: bool = False
    also: Sequence[Plot] = ()
    diagonal: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure of a paper.

    Attributes:
        shows: what it compares, in one line.
        expected: what the paper finds, with its section.
        plots: with --small or without -> its panels.
        correlation: give Pearson's r of each series.
    """

    shows: str
    expected: str
    plots: Callable[[bool], Sequence[Plot]]
    correlation: bool = False


@dataclass(frozen=True)
class Value:
    """A number, and half its 95 % interval."""

    value: float
    margin: float | None = None


class Session:
    """Runs what the panels of a figure need, each thing once.

    Attributes:
        notes: sentences for below the figure.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.notes = options, dict[str, None]()
        self._results = dict[str, Results]()
        self._printed = set[str]()

    def prepare(self, plot: Plot) -> Work:
        """Run the rows of a plot, or print their commands."""
        table, options = plot.table, self.options
        # A figure may have panels of other data sets than --only names.
        options = replace(options, only=tuple(c for c in options.only if c in table.columns))
        if self.options.only and table.columns and not options.only:
            table = replace(table, rows=(), columns=())
        folders = run.folders_of(table, options)
        if plot.own_text and table.rows:
            table, options = self._with_own_text(table, options, folders)
        key = repr((table.name, [row.label for row in table.rows], options.corpus))
        if plot.measure.trains and key not in self._results:
            self._results[key] = run.run_table(table, options)
        return Work(self, table, options, folders, self._results.get(key, {}))

    def _with_own_text(
        self, table: Table, options: Options, folders: Folders
    ) -> tuple[Table, Options]:
        """The table and options by which its row is trained on the text of the data sets, too."""
        texts = tuple(str(corpus_of(f)) for parts in folders.values() for f in parts)
        if options.corpus:
            return table, replace(options, corpus=(*options.corpus, *texts))
        (row,) = table.rows
        assert row.corpus is not None
        both = replace(row.corpus, sources=(*row.corpus.sources, *texts))
        return replace(table, rows=(replace(row, corpus=both),)), options

    def run(self, command: Command) -> None:
        """Run a command that is not done, or print it."""
        run_commands([command], dry_run=self.options.dry_run, printed=self._printed)

    def panel(self, plot: Plot) -> Panel:
        """The panel of a plot; without marks of ours in a dry run."""
        found = Marks([])
        for part in (plot, *plot.also):
            more = part.measure.marks(self.prepare(part), part)
            found = Marks(
                [*found.marks, *more.marks],
                {**found.levels, **more.levels},
                {**found.verticals, **more.verticals},
            )
        label = plot.measure.label
        y_label, value_label = (plot.y_label, label) if plot.shape == "map" else (label, "")
        return Panel(
            *(plot.title, plot.x_label, y_label, found.marks, plot.shape),
            *(found.levels, found.verticals, value_label, plot.diagonal),
        )


@dataclass(frozen=True)
class Work:
    """A table whose rows have run, or whose commands are printed."""

    session: Session
    table: Table
    options: Options
    folders: Folders
    results: Results

    @property
    def is_dry(self) -> bool:
        return self.options.dry_run

    def sizes(self, row: Row) -> list[str]:
        """The sizes of a row that are run."""
        every = run.selected(self.table, self.options)
        return [size for other, size in every if other.label == row.label]

    def runs(self, row: Row, size: str) -> list[Path]:
        """The folders of a trained row, by seed."""
        seeds = self.options.seeds
        return [run.folder_of(self.table, row, size, seed, self.options) for seed in seeds]

    def model(self, row: Row, size: str) -> str:
        """A retriever's folder, or its name."""
        if row.settings:
            return str(self.runs(row, size)[0])
        return row.model if isinstance(row.model, str) else row.model[size]

    def probe(self, row: Row, size: str, flags: Sequence[str]) -> Mapping[str, Any]:
        """What `revela probe --json` writes about a row; {} in a dry run."""
        model = self.model(row, size)
        name = Path(model).name if row.settings else model.replace("/", "-")
        digest = hashlib.blake2b(" ".join(flags).encode(), digest_size=3).hexdigest()
        file = self.options.out / "probes" / f"{name}-{digest}.json"
        after = Path(model) / MODULES if row.settings else None
        self.session.run(Command(["probe", model, *flags, "--json", str(file)], file, after))
        return {} if self.is_dry else json.loads(file.read_text())


@dataclass(frozen=True)
class Marks:
    """The marks of a panel, and its lines."""

    marks: Sequence[Mark]
    levels: Mapping[str, float] = field(default_factory=dict)
    verticals: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A number for each row, as its label says."""

    label: str = ""
    trains: ClassVar[bool] = True

    def value(self, work: Work, row: Row, size: str) -> Value | None:
        """The number of a row; None if it is not known."""
        raise NotImplementedError

    def published(self, work: Work, row: Row, size: str) -> float | None:
        """The paper's number."""
        return None

    def marks(self, work: Work, plot: Plot) -> Marks:
        """The marks of all points of a plot."""
        found = list[Mark]()
        for point in plot.points:
            for size in work.sizes(point.row):
                value = self.value(work, point.row, size)
                if plot.x is None:
                    found += _at_settings(plot, point, size, value)
                    found += _at_settings(
                        *(plot, point, size, self.published(work, point.row, size))
                    )
                elif (x := plot.x.value(work, point.other or point.row, size)) and value:
                    note = point.note or (size if point.series else "")
                    found.append(Mark(point.series or size, x.value, value.value, note=note))
        return Marks(found)


def _at_settings(
    plot: Plot, point: Point, size: str, value: Value | float | None
) -> Iterator[Mark]:
    """The mark of a value at a point's settings; a plain number is published."""
    if value is None:
        return
    published = not isinstance(value, Value)
    number = value if published else value.value
    if plot.shape == "map":
        yield Mark("", point.x, point.y, number, published=published)
    elif published:
        yield Mark(point.series or size, point.x, number, published=True)
    else:
        yield _with_interval(point.series or size, point.x, value)


def _with_interval(series: str, x: str, value: Value) -> Mark:
    """A mark with the bounds of its interval."""
    if value.margin is None:
        return Mark(series, x, value.value)
    low, high = value.value - value.margin, value.value + value.margin
    return Mark(series, x, value.value, low=low, high=high)


@dataclass(frozen=True)
class Score(Measure):
    """The mean of a column over queries, or a mean of columns.

    Attributes:
        column: of the table; with --small, where other collections may be at hand, a mean is over
            all of them.
        stem: file of published numbers, if it is not the table's own.
    """

    label: str = "nDCG@10"
    column: str = "mean"
    stem: str = ""

    def value(self, work: Work, row: Row, size: str) -> Value | None:
        scores = work.results.get(row.label, {}).get(size, {})
        return self.mean(work, scores) if scores else None

    def mean(self, work: Work, scores: Mapping[str, Scores]) -> Value | None:
        """The number of a row by the scores of its columns."""
        names = [self.column]
        if of := work.table.means.get(self.column):
            names = [column for column in scores if work.options.small or column in of]
            if names and {*names} != {*of}:
                said = f"{self.column}: here over {', '.join(names)}; in the paper over {len(of)}"
                work.session.notes[f"{said} data sets."] = None
        known = [scores[name] for name in names if name in scores]
        if not known:
            return None
        margins = [margin_of(score) for score in known]
        sure = None if None in margins else float(np.hypot.reduce(margins)) / len(margins)
        return Value(fmean(map(mean_of, known)), sure)

    def published(self, work: Work, row: Row, size: str) -> float | None:
        table, label = work.table, row.published or row.label
        stem = self.stem or table.name
        if not (PUBLISHED / f"{stem}.csv").is_file():
            return None
        found = cell(stem, label, size, self.column, NDCG)
        return found.value / (100 if table.percent else 1) if found else None


@dataclass(frozen=True)
class EachSet(Measure):
    """The score of each data set, a series each."""

    label: str = "nDCG@10"

    def marks(self, work: Work, plot: Plot) -> Marks:
        return Marks(
            [
                _with_interval(column, point.x, Value(mean_of(scores), margin_of(scores)))
                for point in plot.points
                for sizes in work.results.get(point.row.label, {}).values()
                for column, scores in sizes.items()
            ]
        )


@dataclass(frozen=True)
class Logged(Measure):
    """The loss, or a number of the method's own, at the end of training: the mean of the last tenth
    of its lines, and over seeds.
    """

    name: str = "loss"

    def value(self, work: Work, row: Row, size: str) -> Value | None:
        if work.is_dry:
            return None
        ends = list[float]()
        for folder in work.runs(row, size):
            lines = Run.read(folder).metrics
            if self.name == "loss":
                known = [line.loss for line in lines if line.loss is not None]
            else:
                known = [m[self.name] for line in lines if self.name in (m := line.method or {})]
            if not known:
                return None
            ends.append(fmean(known[-max(1, round(LAST * len(known))) :]))
        return Value(fmean(ends))


@dataclass(frozen=True)
class Hardness(Measure):
    """How hard groups are: the surrogate's mean score of the negatives of a group. The groups are
    stored, and nothing is trained.
    """

    label: str = "mean cosine of the negatives"
    trains: ClassVar[bool] = False

    def value(self, work: Work, row: Row, size: str) -> Value | None:
        options = work.options
        settings = run.settings_of(work.table, row, size, options.seeds[0], options)
        sources = run.corpus_of(row, options).sources
        if stored := next((s for s in sources if is_group_folder(Path(s))), None):
            raise RevelaError(f"{stored} holds groups, and the figure makes its own: give a text")
        # For several processes, training begins with the command that stores the groups.
        command = next(train_commands(sources, settings, work.runs(row, size)[0], processes=2))
        work.session.run(command)
        if work.is_dry:
            return None
        from revela.training.build_groups import hardness  # imports training: seconds

        file = options.out / "hardness" / f"{command.makes.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        recipe, folder = Recipe.of(**settings), GroupFolder(command.makes)
        return Value(kept_json(file, lambda: hardness(recipe, folder)))


@dataclass(frozen=True)
class Geometry(Measure):
    """A number of the geometry of a row's vectors, over pairs of the table's data sets."""

    name: str = "alignment"

    def value(self, work: Work, row: Row, size: str) -> Value | None:
        folders = [folder for parts in work.folders.values() for folder in parts]
        each = 20 if work.options.small else -(-PAIRS_PROBED // len(folders))
        longest = work.folders.get("webis-touche2020", folders)[-1]  # many of 512 tokens
        text = work.options.corpus or (str(corpus_of(longest)),)
        tokens = "64" if work.options.small else "512"
        flags = [*text, "--pairs", *map(str, folders), "--documents", str(each)]
        found = work.probe(row, size, [*flags, "--max-tokens", tokens])
        return Value(found["geometry"][self.name]) if found else None


@dataclass(frozen=True)
class Profile(Measure):
    """A probe by place: its mean score at ten places of a text.

    Attributes:
        tests: the probe's test -> what its series is called, after the row.
        move: move the passages of --pairs through their documents.
    """

    tests: Mapping[str, str] = field(default_factory=dict)
    move: bool = False

    def marks(self, work: Work, plot: Plot) -> Marks:
        small, pairs = work.options.small, work.options.pairs or Path("PAIRS")
        own = work.options.corpus if not self.move else ()
        flags = [
            *(own or (str(corpus_of(pairs)),)),
            "--max-tokens",
            "128" if small else "2048",
        ]
        flags += ["--documents", "16" if small else str(PROBED)]
        flags += ["--move", str(pairs)] if self.move else []
        marks, levels = list[Mark](), dict[str, float]()
        for point in plot.points:
            for size in work.sizes(point.row):
                profiles = work.probe(point.row, size, flags).get("profiles", {})
                for test, name in self.tests.items():
                    if profile := profiles.get(test):
                        series = ", ".join(filter(None, (point.series, name)))
                        marks += _by_place(series, profile["places"])
                        if profile["unmoved"] is not None:
                            levels[f"{series}: documents as they are"] = profile["unmoved"]
        return Marks(marks, levels)


def _by_place(series: str, places: Sequence[Mapping[str, Any]]) -> Iterator[Mark]:
    for place, score in enumerate(places, 1):
        yield Mark(series, place, score["value"], low=score["low"], high=score["high"])


@dataclass(frozen=True)
class AnswersBegin(Measure):
    """Where the passages of --pairs begin in their documents: a share of them for every 500
    characters.
    """

    median: float = 0.0
    trains: ClassVar[bool] = False

    def marks(self, work: Work, plot: Plot) -> Marks:
        if work.is_dry:
            print("no command: it reads the folder of --pairs")
            return Marks([])
        if work.options.pairs is None:
            raise RevelaError("passages and their documents are read from --pairs: give it")
        from revela.training.probes.moved_passage import load_answers

        begins = [answer.begin for answer in load_answers(work.options.pairs).answers]
        counts = Counter(begin // BIN for begin in begins)
        shares = [counts[place] / len(begins) for place in range(BINS)]
        marks = [Mark("here", (i + 0.5) * BIN, share) for i, share in enumerate(shares)]
        half = {"here: median": median(begins), "published: median": self.median}
        return Marks(marks, verticals=half)


@dataclass(frozen=True)
class FirstDocuments(Score):
    """The score of a contextual retriever that reads the first documents of a context: as many as
    the x of a point says.
    """

    def marks(self, work: Work, plot: Plot) -> Marks:
        found = list[Mark]()
        for point in plot.points:
            for size in work.sizes(point.row):
                scores = {
                    column: {f.name: self._of(work, point, size, column, f) for f in parts}
                    for column, parts in work.folders.items()
                }
                if not work.is_dry and (value := self.mean(work, scores)):
                    found.append(_with_interval(point.series, point.x, value))
        return Marks(found)

    def _of(
        self, work: Work, point: Point, size: str, column: str, folder: Path
    ) -> dict[str, dict[str, float]]:
        """The scores of each query of a collection."""
        table, options, model = work.table, work.options, work.model(point.row, size)
        read = f"{model}-in-{folder.name}-first-{point.x}"
        words = ["fit", "--model", model, "--context", str(corpus_of(folder))]
        words += ["--context-first", point.x, "--out", read]
        work.session.run(Command(words, Path(read) / MODULES, Path(model) / MODULES))
        flags = list[str]()
        if table.depth:
            candidates = run.candidates_of(table, options, column, folder)
            flags = ["--candidates", str(candidates.makes), "--depth", str(table.depth)]
        out = options.out / "scores" / f"{Path(read).name}-top{table.depth}"
        for command in eval_commands(read, [folder], out, flags=flags):
            work.session.run(command)
        if work.is_dry:
            return {}
        from revela.training.compare import scores_of

        return run.queries_of(scores_of(out / f"{folder.name}.json"))
