"""Run a table of a paper by `revela compare`, and write it beside the paper's numbers.

    python -m research.reproduce --table revela-1 --sizes 135m --dry-run       # prints the commands
    python -m research.reproduce --table revela-1 --sizes 135m --data BEIR

A size is one `revela compare`, and each of its runs a row. Flags that are not named here go to
every compare, in place of the table's own: ``--max-steps 100``, ``--seeds 0 1``. Finished runs are
kept. ``--data`` has test collections in BEIR layout. ``--corpus`` is a text, or a folder of groups;
by default the paper's own, whose groups are made once. docs/reproduce.md lists the tables, what
they cost and what is expected.

Numbers are nDCG@10. Those of the papers are in ``TABLES`` with their source; a cell is empty if the
number is not known.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from research.benchmarks.options import OUT, RESEARCH, collections_in, parser_of
from revela.training.record import Comparison

RECIPES = RESEARCH / "recipes"
MODELS = {
    "135m": "HuggingFaceTB/SmolLM2-135M",
    "500m": "Qwen/Qwen2.5-0.5B",
    "1b": "meta-llama/Llama-3.2-1B",
    "3b": "meta-llama/Llama-3.2-3B",
    "bert": "google-bert/bert-base-uncased",
}
WIKIPEDIA_GROUPS = "hub:trumancai/revela_training_corpus"
CODE_GROUPS = "hub:trumancai/revela_code_training_corpus"
WIKIPEDIA = "hub:Tevatron/wikipedia-nq-corpus"  # passages; --join-titles makes articles of them
JUDGE = {"--lm": "meta-llama/Llama-3.2-1B"}
STEPS = {"--max-minutes": "0", "--max-steps": "10000"}
MEAN = "mean"
Numbers = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Size -> system -> collection, or the mean over all of the paper's -> nDCG@10."""


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        shows: what the paper's mean is over.
        recipe: below ``research/recipes``; its variants are the rows.
        method: the preset that the recipe changes.
        sizes: of ``MODELS``.
        corpus: the paper's own: groups if ``grouped``.
        flags: of `revela compare`.
        paper: the paper's numbers by source.
    """

    shows: str
    recipe: str
    method: str
    sizes: Sequence[str]
    corpus: str = WIKIPEDIA
    grouped: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)
    paper: Mapping[str, Numbers] = field(default_factory=dict)


def _means(sizes: Mapping[str, Mapping[str, float]]) -> Numbers:
    """The numbers of a table of which only means are known."""
    return {
        size: {system: {MEAN: value} for system, value in systems.items()}
        for size, systems in sizes.items()
    }


COIR_3B = {
    **{"apps": 0.266, "cosqa": 0.290, "st2sql": 0.559, "sn": 0.626, "sncc": 0.691},
    **{"transc": 0.832, "transdl": 0.345, "soqa": 0.883, "f-st": 0.788, "f-mt": 0.730},
}
TABLES = {
    "revela-1": Table(
        "13 tasks of BEIR",
        *(
            "papers/revela-1.toml",
            "revela-paper",
            ("135m", "500m", "1b", "3b"),
            WIKIPEDIA_GROUPS,
            True,
        ),
        JUDGE,
        {
            "arXiv v1": {
                "135m": {
                    "revela": {"scifact": 0.579, MEAN: 0.336},
                    "replug": {MEAN: 0.284},
                    "BM25": {"scifact": 0.687, MEAN: 0.418},
                },
                "500m": {"revela": {"scifact": 0.652, MEAN: 0.387}, "replug": {MEAN: 0.336}},
                "1b": {"revela": {"scifact": 0.718, MEAN: 0.423}, "replug": {MEAN: 0.352}},
            },
            "ICLR, read off a figure": _means(
                {
                    "135m": {"revela": 0.333},
                    "500m": {"revela": 0.388},
                    "1b": {"revela": 0.427},
                    "3b": {"revela": 0.452},
                }
            ),
        },
    ),
    "revela-2": Table(
        "10 tasks of CoIR",
        *(
            "papers/revela-2.toml",
            "revela-paper-code",
            ("135m", "500m", "1b", "3b"),
            CODE_GROUPS,
            True,
        ),
        JUDGE,
        {
            "arXiv v1": _means(
                {"135m": {"revela": 0.447}, "500m": {"revela": 0.529}, "1b": {"revela": 0.546}}
            ),
            "ICLR, read off a figure": {
                "135m": {"revela": {MEAN: 0.484}},
                "500m": {"revela": {MEAN: 0.561}},
                "1b": {"revela": {MEAN: 0.586}, "replug": {MEAN: 0.482}},
                "3b": {"revela": {**COIR_3B, MEAN: 0.601}, "replug": {MEAN: 0.539}},
            },
        },
    ),
    "revela-groups": Table(
        "13 tasks of BEIR",
        *("random-groups.toml", "revela-paper", ("135m", "500m", "1b")),
        flags={**JUDGE, **STEPS},
        paper={
            "arXiv v1, tables 8 and 9": _means(
                {
                    "135m": {"document": 0.336, "random": 0.039},
                    "500m": {"document": 0.387, "random": 0.048},
                    "1b": {"document": 0.423, "random": 0.045},
                }
            )
        },
    ),
    "revela-lm": Table(
        "13 tasks of BEIR",
        *("lm-size.toml", "revela-paper", ("500m",), WIKIPEDIA_GROUPS, True),
        STEPS,
        {"arXiv v1": _means({"500m": {"lm-135m": 0.412, "lm-1b": 0.387}})},
    ),
    "revela-rank": Table(
        "13 tasks of BEIR",
        *("lora-rank.toml", "revela-paper", ("1b",), WIKIPEDIA_GROUPS, True),
        {**JUDGE, **STEPS},
        {"arXiv v1": _means({"1b": {"rank-16": 0.396, "rank-64": 0.408, "rank-256": 0.423}})},
    ),
    "revela-batch": Table(
        "13 tasks of BEIR",
        *("group-size.toml", "revela-paper", ("1b",), WIKIPEDIA_GROUPS, True),
        flags=JUDGE,
        paper={
            "arXiv v1": _means({"1b": {"chunks-8": 0.413, "chunks-12": 0.411, "chunks-16": 0.423}})
        },
    ),
    "dream-1": Table(
        "9 tasks of BEIR",
        *("papers/dream-1.toml", "dream-paper", ("500m", "1b", "3b")),
        flags={"--lm": "meta-llama/Llama-3.1-8B-Instruct"},
        paper={
            "arXiv 2606.24667": _means(
                {
                    "500m": {"dream": 0.4163, "infonce": 0.299},
                    "1b": {"dream": 0.4888, "infonce": 0.327},
                    "3b": {"dream": 0.5074, "infonce": 0.334},
                }
            )
        },
    ),
    "cde-1": Table(
        "BEIR with fewer documents",
        *("papers/cde-1.toml", "cde-paper-small", ("bert",)),
        paper={
            "table 1, small model": _means(
                {"bert": {"plain": 0.599, "batches": 0.617, "context": 0.624, "both": 0.631}}
            )
        },
    ),
}


def commands(
    name: str, sizes: Sequence[str], corpus: str, on: Sequence[Path], out: Path, more: Sequence[str]
) -> list[list[str]]:
    """The `revela` commands of a table: groups of the paper's corpus if there are none yet, and a
    compare for each size.

    Args:
        corpus: a text or a folder of groups; empty: the paper's.
        more: flags of compare, in place of the table's.
    """
    table, needed = TABLES[name], []
    flags = {"--recipe": str(RECIPES / table.recipe), "--methods": table.method, "--points": "1"}
    flags |= table.flags
    if not corpus and table.grouped:
        corpus = str(out / "groups" / table.corpus.rpartition("/")[2])
        if not Path(corpus).exists():
            needed = [["groups", table.corpus, "--out", corpus]]
    elif not corpus:
        corpus = table.corpus
        more = [*more, "--join-titles"]
    given = {token.partition("=")[0] for token in more}
    for size in sizes:
        own = flags | {"--model": MODELS[size], "--out": str(out / name / size)}
        kept = [word for flag, value in own.items() if flag not in given for word in (flag, value)]
        needed.append(["compare", corpus, "--on", *map(str, on), *kept, *more])
    return needed


def rows_of(table: Table, size: str, comparison: Comparison) -> Iterator[list[object]]:
    """[size, system, source, a score for each collection, mean]: each row of the comparison, and
    the paper's numbers below it.
    """
    found: dict[str, list[dict[str, float]]] = {"BM25": [comparison.bm25]}
    for label, curve in comparison.curves.items():
        found.setdefault("start", []).append(curve[0].judged)
        found.setdefault(label.rpartition(", seed ")[0], []).append(curve[-1].judged)
    for system, runs in found.items():
        scores = [fmean(run[name] for run in runs) for name in comparison.bm25]
        yield [size, system, "here", *scores, fmean(scores)]
        for source, numbers in table.paper.items():
            if known := numbers.get(size, {}).get(system):
                columns = [*map(str.lower, comparison.bm25), MEAN]
                yield [size, system, source, *map(known.get, columns)]


def markdown(table: Table, name: str, comparisons: Mapping[str, Comparison]) -> str:
    """The table beside the paper's numbers; the mean of "here" is over the collections given."""
    collections = list(next(iter(comparisons.values())).bm25)
    header = ["size", "system", "source", *collections, MEAN]
    rows = [row for size, found in comparisons.items() for row in rows_of(table, size, found)]
    cells = [[f"{c:.3f}" if isinstance(c, float) else c or "" for c in row] for row in rows]
    lines = [header, ["---"] * len(header), *cells]
    note = f'{name}, nDCG@10. The paper\'s mean is over {table.shows}, that of "here" over '
    note += f"{len(collections)} collection{'s' * (len(collections) > 1)}."
    return "\n".join([note, "", *(f"| {' | '.join(map(str, line))} |" for line in lines)]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--table", choices=TABLES, required=True)
    add("--sizes", nargs="+", choices=MODELS, help="of the retriever; the table's first by default")
    add("--corpus", default="", help="a text or a folder of groups; the paper's by default")
    add("--data", type=Path, nargs="+", default=[Path("BEIR")], help="folders of collections")
    add("--only", nargs="*", default=[], help="collections; all by default")
    add("--out", type=Path, default=OUT / "reproduce")
    add("--dry-run", action="store_true", help="print the commands")
    arguments, more = parser.parse_known_args(argv)
    on = list(collections_in(arguments.data, arguments.only).values())
    if not on and not arguments.dry_run:
        parser.error(f"no collection in {', '.join(map(str, arguments.data))}: give --data")
    run_table(arguments, on or [folder / "*" for folder in arguments.data], more)


def run_table(arguments: argparse.Namespace, on: Sequence[Path], more: Sequence[str]) -> None:
    """Run the commands of a table, or print them; write TABLE.md below ``--out``."""
    name, out = arguments.table, arguments.out
    table = TABLES[name]
    sizes = arguments.sizes or table.sizes[:1]
    for command in commands(name, sizes, arguments.corpus, on, out, more):
        print("revela " + shlex.join(command), flush=True)
        if not arguments.dry_run:
            subprocess.run([sys.executable, "-m", "revela", *command], check=True)
    if not arguments.dry_run:
        folders = {size: out / name / size for size in sizes}
        comparisons = {size: Comparison.read(folder) for size, folder in folders.items()}
        text = markdown(table, name, comparisons)
        (out / f"{name}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
