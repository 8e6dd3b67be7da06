"""What each paper's method teaches a raw language model, at equal tokens of the retriever.

    python -m research.benchmarks.from_raw --text wikipedia_vital.jsonl.gz --data COLLECTIONS
    python -m research.benchmarks.from_raw ... --recipe research/recipes/from-fit.toml \\
        --judged scifact cosqa med cranfield        # from the label-free fit

The rows are the variants of the recipe, and for research/recipes/from-raw.toml also revela-gated on
groups of Wikipedia and of SciFact's own text (Revela, figure 7). Each row is some commands, printed
before they run: `revela train`, scored at six points on 500 documents of each collection; `revela
eval` on the whole collections; and `revela probe`, the position bias on the first collection (score
of the first tenth minus that of the last, with its 95 % interval). Rows that have finished are
kept. RECIPE.csv and RECIPE-curves.png and .csv in --results are written after each row, with the
rows that they had before, and rows that are missing are named.

With --at-once 2 --threads 1 two rows run at a time on two cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from research.benchmarks.options import (
    OUT,
    RESEARCH,
    corpus_of,
    parser_of,
    part_of,
    print_cells,
    print_header,
    read_table,
)
from research.plot_run import Run
from research.plots import Mark, Panel, write_figure
from revela.errors import RevelaError
from revela.evaluation.collection import load_collection, save_collection
from revela.evaluation.significance import MEASURE
from revela.files import atomic_write
from revela.terminal import counted
from revela.training.checkpoint import IGNORED_WHEN_COMPARING_FINISHED_RUNS, check_same_run
from revela.training.commands import (
    MODULES,
    Command,
    eval_commands,
    is_finished,
    run_commands,
    train_commands,
)
from revela.training.compare import rows_of, scores_of
from revela.training.recipe import Recipe, read_recipe
from revela.training.record import METRICS

RECIPE = RESEARCH / "recipes" / "from-raw.toml"
RESULTS = RESEARCH / "results"
JUDGED = ("scifact", "cosqa")
PART = 500  # documents of the parts that are scored while a run goes on
POINTS = 5
PROBED = ["--max-tokens", "256", "--documents", "100"]
MAY_DIFFER = IGNORED_WHEN_COMPARING_FINISHED_RUNS | {"threads", "model", "lm"}
BOTH_TEXTS = "revela-gated-and-own-text"
ON_GPU = " on a GPU"


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        name: variant, settings that differ from the recipe's, seed.
        corpus: the text that it reads.
        settings: by name.
        judged: names of the collections.
        folder: of the run.
    """

    name: str
    variant: str
    corpus: Sequence[str]
    settings: Mapping[str, Any]
    judged: Sequence[str]
    folder: Path

    @property
    def scores(self) -> Path:
        """Folder of its scores on whole collections, and of its probe."""
        return self.folder.with_name(f"{self.folder.name}-scores")

    def check(self) -> None:
        """Raise RevelaError if its folder has a finished run with other settings."""
        if is_finished(self.folder):
            check_same_run(Recipe.of(**self.settings).to_dict(), self.folder, MAY_DIFFER)

    @property
    def is_complete(self) -> bool:
        return is_finished(self.folder) and all(file.is_file() for file in self.files())

    def files(self) -> list[Path]:
        return [self.scores / f"{name}.json" for name in (*self.judged, "probe")]

    def commands(self, collections: Sequence[Path], parts: Sequence[Path]) -> Iterator[Command]:
        """Train, score and probe it."""
        recipe = Recipe.of(**self.settings)
        yield from train_commands(self.corpus, self.settings, self.folder, on=parts, points=POINTS)
        slots = recipe.context.context
        how = dict(slots=slots, precision=recipe.training.precision)
        yield from eval_commands(self.folder, collections, self.scores, **how)
        probed, file = str(corpus_of(collections[0])), self.files()[-1]
        words = ["probe", str(self.folder), probed, *PROBED, "--json", str(file)]
        yield Command(words, file, self.folder / MODULES)


@dataclass(frozen=True)
class Plan:
    """A recipe's rows: where they run, and where their results are written."""

    recipe: Path
    runs: Path
    results: Path
    judged: Sequence[str]

    @property
    def table(self) -> Path:
        return self.results / f"{self.recipe.stem}.csv"

    @property
    def curves(self) -> Path:
        return self.results / f"{self.recipe.stem}-curves.png"

    def rows(
        self, text: str, data: Path, seeds: Sequence[int], given: Mapping[str, Any]
    ) -> list[Row]:
        """All rows, seed after seed; ``given`` are settings above the recipe's."""
        settings, variants = read_recipe(self.recipe)
        named = rows_of([], settings, variants, given)
        texts = {name: [text] for name in named}
        if "revela-gated" in named:
            named[BOTH_TEXTS] = named["revela-gated"]
            texts[BOTH_TEXTS] = [text, str(corpus_of(data / self.judged[0]))]
        changed = {name: value for name, value in given.items() if name != "threads"}
        more = "".join(f", {name.replace('_', ' ')} {value:g}" for name, value in changed.items())
        short = "".join(f"-{name.replace('_', '-')}-{value:g}" for name, value in changed.items())
        return [
            Row(
                name=f"{name}{more}, seed {seed}",
                variant=name,
                corpus=texts[name],
                settings={**made, "seed": seed},
                judged=self.judged,
                folder=self.runs / f"{name}{short}-{seed}",
            )
            for seed in seeds
            for name, made in named.items()
        ]

    def parts(self, data: Path) -> list[Path]:
        """The parts of the collections, saved once."""
        folders = []
        for name in self.judged:
            folder = self.runs / "parts" / f"{name}-{PART}"
            if not folder.is_dir():
                whole = load_collection(data / name)
                save_collection(part_of(whole, PART, PART // 2), folder)
            folders.append(folder)
        return folders

    def write_results(self, rows: Sequence[Row]) -> None:
        """The table of complete rows and the curves of all that have begun, with those that the
        files had before.
        """
        runs = {row.name: Run.read(row.folder) for row in rows if (row.folder / METRICS).is_file()}
        names = {
            name: name + ON_GPU if "gpu" in run.about.hardware else name
            for name, run in runs.items()
        }
        table = {row["row"]: row for row in read_table(self.table)}
        for row in rows:
            if row.is_complete:
                name = names[row.name]
                before = table.get(name, {"row": name})  # with other collections, maybe
                table[name] = before | _cells(row, runs[row.name])
        self._write_table([table[name] for name in sorted(table)])
        self.write_curves({names[name]: run for name, run in runs.items()})
        done = {name.removesuffix(ON_GPU) for name in table}
        if missing := [row.name for row in rows if row.name not in done]:
            print(f"missing: {'; '.join(missing)}")

    def _write_table(self, table: Sequence[Mapping[str, Any]]) -> None:
        columns = ["row", "steps", "million tokens", "minutes", *self.judged]
        columns += [*(f"BM25 {name}" for name in self.judged), "position drop", "from", "to"]
        columns += ["machine"]
        columns = [*dict.fromkeys(chain(columns, *table))]  # of other collections too
        self.results.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.table) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
        print_header(columns[1:])
        for row in table:
            print_cells(row["row"], [row.get(name, "") for name in columns[1:]])

    def write_curves(self, series: Mapping[str, Run]) -> None:
        """Write the curves of these runs by name, and of those that the CSV had before."""
        before = read_table(self.curves.with_suffix(".csv"))
        panels = []
        for name in self.judged:
            title = f"{PART} documents of {name}"
            marks = [
                Mark(line["series"], float(line["x"]), float(line["value"]))
                for line in before
                if line["panel"] == title and line["series"] not in series
            ]
            marks += [
                Mark(label, (line.tokens_read or 0) / 1e6, scores[f"{name}-{PART}"])
                for label, run in series.items()
                for line in run.metrics
                if f"{name}-{PART}" in (scores := line.judged or {})
            ]
            marks.sort(key=lambda mark: mark.series)
            panels.append(Panel(title, "million tokens read", "nDCG@10", marks))
        if any(panel.marks for panel in panels):
            write_figure(panels, self.curves, f"{self.recipe.stem}, at equal tokens")


def _cells(row: Row, run: Run) -> dict[str, Any]:
    last = [line for line in run.metrics if line.tokens_read][-1]
    about = run.about.hardware
    cells: dict[str, Any] = {"steps": last.step, "minutes": last.minutes}
    cells["million tokens"] = (last.tokens_read or 0) / 1e6
    for name in row.judged:
        by = scores_of(row.scores / f"{name}.json")
        cells[name] = next(s for system, s in by.items() if system != "BM25").means[MEASURE]
        cells[f"BM25 {name}"] = by["BM25"].means[MEASURE]
    probe = json.loads(row.files()[-1].read_text())["profiles"]["exact match, both orders"]
    cells["position drop"], cells["from"], cells["to"] = probe["drop"].values()
    rounded = {key: round(v, 4) if isinstance(v, float) else v for key, v in cells.items()}
    cpu = f"{about['cpu']}, {counted(about['threads'], 'thread')}"
    return rounded | {"machine": about.get("gpu") or cpu}


def run_rows(rows: Sequence[Row], run: Any, at_once: int) -> Iterable[Row]:
    """Run rows; each as it ends. One that fails is named, and the others go on.

    Raises:
        RevelaError: some have failed.
    """
    failed = []
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, row): row for row in rows}
        for future in as_completed(running):
            row = running[future]
            if error := future.exception():
                failed.append(row.name)
                print(f"{row.name}: {error}", flush=True)
            else:
                yield row
    if failed:
        raise RevelaError(f"some rows failed: {'; '.join(failed)}: run the same command again")


def run_row(row: Row, collections: Sequence[Path], parts: Sequence[Path]) -> None:
    run_commands(row.commands(collections, parts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--text", required=True, help="what all rows read")
    add("--data", type=Path, required=True, help="folder of BEIR-layout collections")
    add("--recipe", type=Path, default=RECIPE, help="TOML file whose variants are the rows")
    add("--judged", nargs="*", default=JUDGED, help="collections of --data")
    add("--only", nargs="*", default=[], help="variants")
    add("--seeds", type=int, nargs="*", default=[0])
    add("--tokens", type=float, help="millions; default: the recipe's")
    add("--groups-per-step", type=int, help="default: the recipe's")
    add("--threads", type=int, help="of a row; default: all")
    add("--at-once", type=int, default=1, help="rows that run at a time")
    add("--runs", type=Path, help="folder of the runs; default: research/out/RECIPE")
    add("--results", type=Path, default=RESULTS, help="folder of the table and the curves")
    add("--show", action="store_true", help="run nothing, write rows that exist")
    try:
        run(parser.parse_args(argv))
    except RevelaError as error:
        print(f"from_raw: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def run(given: argparse.Namespace) -> None:
    """Run the rows that were asked for.

    Raises:
        RevelaError: a name is unknown, a finished row has other settings, or rows have failed.
    """
    settings = {"max_tokens_read": given.tokens, "groups_per_step": given.groups_per_step}
    settings = {name: v for name, v in {**settings, "threads": given.threads}.items() if v}
    runs = given.runs or OUT / given.recipe.stem
    plan = Plan(given.recipe, runs, given.results, given.judged)
    rows = plan.rows(given.text, given.data, given.seeds, settings)
    known = dict.fromkeys(row.variant for row in rows)
    if unknown := next((name for name in given.only if name not in known), None):
        raise RevelaError(f"--only {unknown}: there is no such row; there are {', '.join(known)}")
    if given.show:
        plan.write_results(rows)
        return
    wanted = [row for row in rows if not given.only or row.variant in given.only]
    for row in wanted:
        row.check()
    collections = [given.data / name for name in given.judged]
    each = partial(run_row, collections=collections, parts=plan.parts(given.data))
    for _ in run_rows(wanted, each, given.at_once):
        plan.write_results(rows)


if __name__ == "__main__":
    main()
