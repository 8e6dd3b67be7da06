"""What each paper's method teaches a raw language model, at equal tokens of the retriever.

    python -m research.benchmarks.from_raw --text wikipedia_vital.jsonl.gz --data COLLECTIONS

The rows are the variants of research/recipes/from-raw.toml, and revela-gated on groups of Wikipedia
and of SciFact's own text (Revela, figure 7). Each row is four commands, printed before they run:
`revela train`, scored at six points on 500 abstracts of SciFact and 500 functions of cosqa;
`revela eval` on the whole collections; and `revela probe`, the position bias on SciFact's
abstracts (score of the first tenth minus that of the last, with its 95 % interval). Rows that have
finished are kept; research/results/from-raw.csv and the curves are written after each, and rows
that are missing are named.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
)
from research.plot_run import Run
from research.plots import Mark, Panel, write_figure
from revela.evaluation.collection import load_collection, save_collection
from revela.evaluation.significance import MEASURE
from revela.files import atomic_write
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
RESULTS = RESEARCH / "results" / "from-raw.csv"
CURVES = RESULTS.with_name("from-raw-curves.png")
JUDGED = ("scifact", "cosqa")
PART = 500  # documents of the parts that are scored while a run goes on
POINTS = 5
PROBED = ["--max-tokens", "256", "--documents", "100"]
BOTH_TEXTS = "revela-gated-and-own-text"


@dataclass(frozen=True)
class Row:
    """A run: the text that it reads, and its settings by name."""

    name: str
    corpus: Sequence[str]
    settings: Mapping[str, Any]
    folder: Path

    @property
    def scores(self) -> Path:
        """Folder of its scores on whole collections, and of its probe."""
        return self.folder.with_name(f"{self.folder.name}-scores")

    @property
    def is_complete(self) -> bool:
        return is_finished(self.folder) and all(file.is_file() for file in self.files())

    def files(self) -> list[Path]:
        return [self.scores / f"{name}.json" for name in (*JUDGED, "probe")]

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


def plan(text: str, data: Path, seeds: Sequence[int], given: Mapping[str, Any]) -> list[Row]:
    """All rows, seed after seed; ``given`` are settings above the recipe's."""
    settings, variants = read_recipe(RECIPE)
    named = rows_of(["revela-gated"], settings, variants, given)
    texts = {name: [text] for name in named}
    named[BOTH_TEXTS] = named["revela-gated"]
    texts[BOTH_TEXTS] = [text, str(corpus_of(data / JUDGED[0]))]
    return [
        Row(f"{name}, seed {seed}", texts[name], {**made, "seed": seed}, folder)
        for seed in seeds
        for name, made in named.items()
        if (folder := OUT / "from-raw" / f"{name}-{seed}")
    ]


def parts_of(data: Path) -> list[Path]:
    """The parts of the collections, saved once."""
    folders = []
    for name in JUDGED:
        folder = OUT / "from-raw" / "parts" / f"{name}-{PART}"
        if not folder.is_dir():
            whole = load_collection(data / name)
            save_collection(part_of(whole, PART, PART // 2), folder)
        folders.append(folder)
    return folders


def write_results(rows: Sequence[Row]) -> None:
    """The table of complete rows, and the curves of all that have begun."""
    header = ["row", "steps", "million tokens", "minutes", *JUDGED, "BM25 scifact", "BM25 cosqa"]
    header += ["position drop", "from", "to"]
    complete = [(row, _cells(row)) for row in rows if row.is_complete]
    RESULTS.parent.mkdir(exist_ok=True)
    with atomic_write(RESULTS) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([header, *([row.name, *cells] for row, cells in complete)])
    begun = {row.name: Run.read(row.folder) for row in rows if (row.folder / METRICS).is_file()}
    panels = []
    for name in JUDGED:
        marks = [
            Mark(label, (line.tokens_read or 0) / 1e6, line.judged[f"{name}-{PART}"])
            for label, run in begun.items()
            for line in run.metrics
            if line.judged
        ]
        title = f"{PART} documents of {name}"
        panels.append(Panel(title, "million tokens read", "nDCG@10", marks))
    if any(panel.marks for panel in panels):
        write_figure(panels, CURVES, "From raw weights, at equal tokens")
    print_header(header[1:])
    for row, cells in complete:
        print_cells(row.name, cells)
    if missing := [row.name for row in rows if not row.is_complete]:
        print(f"missing: {'; '.join(missing)}")


def _cells(row: Row) -> list[Any]:
    last = [line for line in Run.read(row.folder).metrics if line.tokens_read][-1]
    scores = [scores_of(row.scores / f"{name}.json") for name in JUDGED]
    alone = [next(s for name, s in by.items() if name != "BM25").means[MEASURE] for by in scores]
    words = [by["BM25"].means[MEASURE] for by in scores]
    drop = json.loads(row.files()[-1].read_text())["profiles"]["exact match, both orders"]["drop"]
    numbers = [(last.tokens_read or 0) / 1e6, last.minutes, *alone, *words, *drop.values()]
    return [last.step, *(round(number, 4) for number in numbers)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--text", required=True, help="what all rows read")
    add("--data", type=Path, required=True, help="folder of BEIR-layout collections")
    add("--only", nargs="*", default=[], help="variants")
    add("--seeds", type=int, nargs="*", default=[0])
    add("--tokens", type=float, help="millions; default: the recipe's")
    add("--threads", type=int, help="1: two rows may run at a time, in two processes")
    add("--show", action="store_true", help="run nothing, print rows that exist")
    given = parser.parse_args(argv)
    settings = {"max_tokens_read": given.tokens, "threads": given.threads}
    settings = {name: value for name, value in settings.items() if value}
    rows = plan(given.text, given.data, given.seeds, settings)
    wanted = [r for r in rows if not given.only or r.name.rpartition(",")[0] in given.only]
    parts = parts_of(given.data)
    for row in () if given.show else wanted:
        run_commands(row.commands([given.data / name for name in JUDGED], parts))
        write_results(rows)
    if given.show:
        write_results(rows)


if __name__ == "__main__":
    main()
