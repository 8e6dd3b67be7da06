"""What a table of a paper is: its rows, each a run of `revela train` or a model as it is, and the
data sets that they are scored on. The tables themselves are in papers/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revela.training.recipe import Recipe, read_recipe

Settings = Mapping[str, Any]
"""Settings of `revela train` by name, with ``method``: a preset."""
RECIPES = Path(__file__).parents[1] / "recipes"
PAIRS = "{pairs}"
"""In settings: the folder of judged pairs that --pairs gives; as a source: its documents."""
OF_PAIRS = "MS MARCO documents dev"
"""The column that is scored on that folder."""

MODELS = {
    "135M": "HuggingFaceTB/SmolLM2-135M",
    "500M": "Qwen/Qwen2.5-0.5B",
    "1B": "meta-llama/Llama-3.2-1B",
    "3B": "meta-llama/Llama-3.2-3B",
    "8B": "meta-llama/Llama-3.1-8B",
}
"""The retriever of a size, before training."""
NDCG, MRR, RECALL = "ndcg@10", "mrr@100", "recall@100"
_MERGED = dict[str, tuple[Recipe, set[str]]]()


@dataclass(frozen=True)
class Corpus:
    """A text to train on.

    Attributes:
        name: of the folder of its groups.
        sources: as for `revela train`.
        stored: `revela groups` stores its groups once, for all rows.
        weights: shares of the sources in the stored groups.
        settings: of `revela train`, that belong to this text.
    """

    name: str
    sources: tuple[str, ...]
    stored: bool = False
    weights: tuple[float, ...] = ()
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row of a table: a run that is trained, or a model that is scored as it is.

    Attributes:
        label: unique in its table.
        published: the label in the CSV file; empty: ``label``.
        settings: of `revela train`, with the method; none: not trained.
        of_size: further settings of a size.
        corpus: text that it is trained on; with `pairs` among the settings that of the pairs.
        after: another row, whose retriever is trained on (`--model`).
        model: not trained: "BM25", or the name for `revela eval`; by size, if there are several.
        columns: data sets that it is scored on; none: all of the table.
        in_other_context: the slots of a contextual retriever (CDE) have documents of another data
            set than the one that is searched.
        rrf: row that is fused with BM25 by reciprocal ranks (k = 60, 200 kept): this is the fusion.
        sizes: sizes in the CSV file; none: those of the table.
        small: settings with --small, above those of ``small.py``.
        note: what differs from the paper in this row.
        why_not: one phrase: why it is not run. It is in reports with its published numbers.
    """

    label: str
    published: str = ""
    settings: Settings = field(default_factory=dict)
    of_size: Mapping[str, Settings] = field(default_factory=dict)
    corpus: Corpus | None = None
    after: Row | None = None
    model: str | Mapping[str, str] = ""
    columns: tuple[str, ...] = ()
    in_other_context: bool = False
    rrf: Row | None = None
    sizes: tuple[str, ...] = ()
    small: Settings = field(default_factory=dict)
    note: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        name: stem of its CSV file in research/published.
        shows: what it compares, in one line.
        rows: all of it, with those that cannot be run.
        columns: data sets, by names.csv.
        means: column of means -> the columns (or other means) that it is the mean of.
        sizes: of ``MODELS``.
        metrics: of `revela eval --json`; their published values are ``percent`` or from 0 to 1.
        depth: rank only so many documents that ``candidates_by`` finds (truncated BEIR).
        candidates_by: a retriever.
        tasks: columns that are tasks of mteb without judged passages: it loads and scores them.
        hours: as published; empty: not published.
        expected: the direction, where there is no number.
        small_keeps: settings of rows that --small leaves as published, as the table is about them.
        small_only: why the published size cannot be run.
        heads: the table is a ranking of the heads that `revela heads` finds with these settings.
    """

    name: str
    shows: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    metrics: tuple[str, ...] = (NDCG,)
    percent: bool = True
    depth: int = 0
    candidates_by: str = ""
    tasks: tuple[str, ...] = ()
    hours: str = ""
    expected: str = ""
    small_keeps: tuple[str, ...] = ()
    small_only: str = ""
    heads: Settings = field(default_factory=dict)

    def sizes_of(self, row: Row, sizes: Sequence[str] = ()) -> tuple[str, ...]:
        """The sizes of a row among these (none: all); rows of other sizes are in every selection,
        once.
        """
        own = row.sizes or self.sizes
        return tuple(size for size in own if size not in self.sizes or not sizes or size in sizes)


def merged(settings: Settings) -> tuple[Recipe, set[str]]:
    """The recipe of these settings, and the names of those that its method does not read. Kept, as
    the commands of a row ask for it many times.
    """
    key = repr(sorted(settings.items()))
    if key not in _MERGED:
        _MERGED[key] = Recipe().merge(settings)
    return _MERGED[key]


def variants(recipe: str) -> dict[str, dict[str, Any]]:
    """The settings of each variant of a file in research/recipes."""
    settings, changes = read_recipe(RECIPES / recipe)
    return {name: {**settings, **variant} for name, variant in changes.items()}
