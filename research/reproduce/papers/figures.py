"""The figures of the papers: a table of rows, and where the value of each row stands.

Values of x are those of the paper where its text has them. CDE's figures share their runs: 3, 4, 12
and 13 are one sweep over batches and clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from research.reproduce.measures import (
    AnswersBegin,
    Drawing,
    EachSet,
    FirstDocuments,
    Geometry,
    Hardness,
    Logged,
    Plot,
    Point,
    Profile,
    Score,
)
from research.reproduce.papers import TABLES, cde, dream, dwell
from research.reproduce.papers.revela import WIKIPEDIA, on_wikipedia, plain
from research.reproduce.papers.revela_v1 import SIZES
from research.reproduce.tables import Row, Table

Settings = dict[str, Any]


def by_setting(title: str, name: str, x_label: str, stem: str = "") -> Plot:
    """A published table as lines: its setting is what its rows have after "="."""
    table = TABLES[name]
    points = tuple(Point(row, row.label.rpartition("=")[2]) for row in table.rows)
    means = table.means or {"mean": table.columns}
    return Plot(title, replace(table, means=means), points, x_label, Score(stem=stem))


# Revela, arXiv v1.

ADAPTED = ("fiqa", "nfcorpus", "scifact", "scidocs", "trec-covid")
OWN = "and the text that is searched"
WITH_OWN = replace(
    WIKIPEDIA,
    name="wikipedia-and-own-text",
    settings={"groups": "document-random", "chunk_words": 120},
)


def adaptation(small: bool) -> list[Plot]:
    """A plot for each data set whose text is added; with --small, one with a line for each."""
    rows = {
        "Wikipedia": on_wikipedia("Wikipedia"),
        OWN: on_wikipedia("Wikipedia and own", corpus=WITH_OWN),
    }

    def plot(title: str, measure: Score | EachSet) -> Plot:
        alone, with_own = (
            Plot(
                *(title, Table("revela-v1-figure7", "trained on", (row,), ADAPTED, sizes=SIZES)),
                *((Point(row, name),), "trained on", measure),
                own_text=name == OWN,
            )
            for name, row in rows.items()
        )
        return replace(alone, also=(with_own,))

    if small:
        return [plot("collections at hand", EachSet())]
    return [plot(name, Score(column=name)) for name in ADAPTED]


REVELA = {
    "revela-v1-3": Drawing(
        "Revela v1, figure 3: size of the language model that gives the signal",
        "on code (CoIR) a larger language model helps every retriever; on BEIR it helps the "
        "smallest retriever, and the 500M retriever is best with the smallest (appendix B.1)",
        lambda small: [
            by_setting(
                "mean of 13 sets of BEIR", "revela-v1-table5-lm-size-beir", "size of the LM"
            ),
            by_setting("mean of 10 of CoIR", "revela-v1-table6-lm-size-coir", "size of the LM"),
        ],
    ),
    "revela-v1-5": Drawing(
        "Revela v1, figure 5: V-normalisation",
        "on is better at every size, by 2.4 to 4.5 points (appendix B.4)",
        lambda small: [
            by_setting(
                "mean of 13 sets of BEIR",
                "revela-v1-table12-vnorm-beir",
                "V-normalisation",
                "derived-means",
            )
        ],
    ),
    "revela-v1-6": Drawing(
        "Revela v1, figure 6: chunks per group, at equal tokens",
        "16 chunks are best on BEIR at every size; on CoIR the 1B retriever has about the same "
        "score with all three (section 5.2)",
        lambda small: [
            by_setting("mean of 13 sets of BEIR", "revela-v1-table10-batch-beir", "chunks a group"),
            by_setting("mean of 10 of CoIR", "revela-v1-table11-batch-coir", "chunks a group"),
        ],
    ),
    "revela-v1-7": Drawing(
        "Revela v1, figure 7: Wikipedia with the text of five data sets of BEIR",
        "the text has no number: whether the text that is searched, without labels, raises the "
        "scores on it is what the figure is for (section 5.2; 54,312 of 320,000 groups there, "
        "here all groups of the five texts)",
        adaptation,
    ),
}


# DREAM. Values of x that its text does not have are powers of two between those that it has.

HEADS = {"top 16": "published", "random of the middle layers": "random-middle", "random": "random"}
ONE_B = ("1B",)


def dream_sweep(
    name: str, x_label: str, rows: Sequence[tuple[str, str, Settings]], keeps: Sequence[str] = ()
) -> Callable[[bool], list[Plot]]:
    """Two plots, of BEIR and of RTEB, of DREAM with changed settings: (x, label, changes)."""

    def plots(small: bool) -> list[Plot]:
        changed = {
            x: replace(dream.DREAM, label=label, settings={**dream.DREAM.settings, **changes})
            for x, label, changes in rows
        }
        table = Table(
            *(f"dream-{name}", x_label, tuple(changed.values()), dream.BEIR + dream.RTEB),
            *(dream.MEANS, SIZES_OF.get(name, ONE_B)),
            percent=False,
            small_keeps=tuple(keeps),
        )
        points = tuple(Point(row, x) for x, row in changed.items())
        stem = "dream-table1-means" if name != "figure2-heads" else ""
        return [
            Plot(
                column.removeprefix("mean "),
                table,
                points,
                x_label,
                Score(column=column, stem=stem),
            )
            for column in dream.MEANS
        ]

    return plots


SIZES_OF = {"figure5": ("1B", "3B")}
DREAM = {
    "dream-2": Drawing(
        "DREAM, figure 2: heads by the probe against random heads",
        "random heads fall to 0.06 and 0.03; random ones of the middle layers lie between, far "
        "below the top 16 (section 5.1)",
        dream_sweep(
            "figure2-heads",
            "heads of the judge",
            [(name, f"DREAM heads={name}", {"heads": how}) for name, how in HEADS.items()],
            ["heads"],
        ),
    ),
    "dream-3": Drawing(
        "DREAM, figure 3: number of heads",
        "rises from 1 to 16 heads, falls at 32 and 64 (section 5.1)",
        dream_sweep(
            "figure3",
            "heads of the judge",
            [
                (str(n), "DREAM" if n == 16 else f"DREAM, {n} heads", {"query_heads": n})
                for n in (1, 2, 4, 8, 16, 32, 64)
            ],
        ),
    ),
    "dream-4": Drawing(
        "DREAM, figure 4: alignment against uniformity",
        "DREAM has the best (lowest) uniformity and an alignment like Revela's; RePlug is aligned "
        "but collapsed, with a uniformity near 0 (section 5)",
        lambda small: [
            Plot(
                "queries and positives of 9 sets of BEIR",
                Table(
                    *("dream-figure4", "geometry of the vectors"),
                    *(dream.ROWS[1:5], dream.BEIR, {"mean BEIR-9": dream.BEIR}, ("1B", "3B")),
                    percent=False,
                ),
                tuple(Point(row, series=row.label) for row in dream.ROWS[1:5]),
                "uniformity (lower is better)",
                Geometry("alignment (lower is better)", "alignment"),
                "scatter",
                x=Geometry("uniformity (lower is better)", "uniformity_of_both"),
            )
        ],
    ),
    "dream-5": Drawing(
        "DREAM, figure 5: LoRA on the judge",
        "the frozen judge is better in all four comparisons (section 5)",
        dream_sweep(
            "figure5",
            "judge",
            [
                ("frozen", "DREAM", {}),
                ("with LoRA", "DREAM, LoRA on the judge", {"lm_lora": True}),
            ],
        ),
    ),
    "dream-6": Drawing(
        "DREAM, figure 6: candidates of a question",
        "rises from 4 to 16 candidates (section 5)",
        dream_sweep(
            "figure6",
            "candidates",
            [
                (
                    str(n),
                    "DREAM" if n == 16 else f"DREAM, {n} candidates",
                    {"group_size": n, "lm_tokens": 156 * 16 // n} if n < 16 else {},
                )
                for n in (4, 8, 16)
            ],
            ["group_size"],
        ),
    ),
}


# CDE, small setting.

BATCHES = (256, 512, 1024, 2048, 4096)
CLUSTERS = (64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 2097152, 4194304)
SMALL_BATCHES, SMALL_CLUSTERS = (8, 16), (4, 16, 64)
BEIR = "truncated BEIR"
BATCH, CLUSTER = "batch size", "cluster size"
SETS = "8 truncated sets of BEIR"
CONTEXTS = {True: {}, False: {"context": 0}}
FILTERS = {True: {}, False: {"filter": ""}}
WITH = {True: "with the filter", False: "without the filter"}


def cde_table(name: str, rows: Sequence[Row]) -> Table:
    """A table over the truncated sets of BEIR."""
    first = TABLES["cde-table1-small"]
    keeps = ("group_size",) if any("group_size" in row.settings for row in rows) else ()
    return replace(first, name=f"cde-{name}", rows=tuple(rows), small_keeps=keeps)


def of_batch(
    batch: int, cluster: int, *, context: bool = False, filtered: bool = True, **more: Any
) -> Row:
    """The first phase with batches of this size, of clusters of that."""
    settings = {"method": "cde-paper-small", "group_size": batch, "cluster_size": cluster}
    settings |= {**CONTEXTS[context], **FILTERS[filtered], **more}
    about = ", ".join(f"{k}={v}" for k, v in settings.items() if k != "method")
    row = cde.trained(f"CDE {about}", settings)
    return row if filtered else replace(row, small={**row.small, "filter": ""})


def second_phase(before: Row, label: str = "", **changes: Any) -> Row:
    """The supervised phase after it."""
    row = cde.supervised(f"{before.label}, supervised{label}", before, before.settings)
    return replace(row, settings={**row.settings, **changes})


def sizes(small: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Batches and clusters."""
    return (SMALL_BATCHES, SMALL_CLUSTERS) if small else (BATCHES, CLUSTERS)


def sweep(
    name: str, small: bool, context: bool, filtered: bool
) -> tuple[Table, dict[tuple[int, int], Row]]:
    """(batch, cluster) -> its row, and their table."""
    rows = {
        (batch, cluster): of_batch(batch, cluster, context=context, filtered=filtered)
        for batch, cluster in product(*sizes(small))
    }
    return cde_table(name, [*rows.values()]), rows


def cde_maps(name: str, context: bool) -> Callable[[bool], list[Plot]]:
    """A map with the filter, and one without."""

    def plots(small: bool) -> list[Plot]:
        found = []
        for filtered, title in WITH.items():
            table, rows = sweep(name, small, context, filtered)
            points = tuple(Point(row, f"{b:,}", f"{c:,}") for (b, c), row in rows.items())
            found.append(
                Plot(title, table, points, BATCH, Score(column=BEIR), "map", y_label=CLUSTER)
            )
        return found

    return plots


def cde_lines(name: str, by_cluster: bool) -> Callable[[bool], list[Plot]]:
    """The same sweep as lines: by cluster size, a line for each batch size; or the reverse."""

    def plots(small: bool) -> list[Plot]:
        found = []
        for filtered, title in WITH.items():
            table, rows = sweep(name, small, False, filtered)
            points = tuple(
                Point(row, f"{c:,}", series=f"batch {b:,}")
                if by_cluster
                else Point(row, f"{b:,}", series=f"clusters of {c:,}")
                for (b, c), row in rows.items()
            )
            label = CLUSTER if by_cluster else BATCH
            found.append(Plot(title, table, points, label, Score(column=BEIR)))
        return found

    return plots


def cde_filter(small: bool) -> list[Plot]:
    """A dot for each batch and cluster size: its score without the filter, and with it."""
    rows, bare = (sweep("figure4", small, False, filtered)[1] for filtered in (True, False))
    points = tuple(
        Point(row, series=f"batch {batch:,}", note=f"{cluster:,}", other=bare[batch, cluster])
        for (batch, cluster), row in rows.items()
    )
    table = cde_table("figure4", [*rows.values(), *bare.values()])
    x, y = (Score(f"nDCG@10 {WITH[filtered]}", BEIR) for filtered in (False, True))
    title = "numbers next to dots are cluster sizes"
    return [Plot(title, table, points, x.label, y, "scatter", x, diagonal=True)]


def cde_difficulty(name: str, context: bool) -> Callable[[bool], list[Plot]]:
    """A dot for each batch and cluster size after the second phase: its loss and its score."""

    def plots(small: bool) -> list[Plot]:
        _, first = sweep(name, small, context, True)
        rows = {key: second_phase(row) for key, row in first.items()}
        table = cde_table(name, [*rows.values()])
        points = tuple(
            Point(row, series=f"batch {b:,}", note=f"{c:,}") for (b, c), row in rows.items()
        )
        loss = Logged("loss at the end of the supervised phase, nats")
        return [
            Plot(
                *("numbers next to dots are cluster sizes", table, points, loss.label),
                *(Score(column=BEIR), "scatter", loss),
            )
        ]

    return plots


def cde_series(
    name: str,
    x_label: str,
    rows: Callable[[bool], Sequence[Point]],
    measure: Any = None,
) -> Callable[[bool], list[Plot]]:
    """One plot of lines."""

    def plots(small: bool) -> list[Plot]:
        points = tuple(rows(small))
        table = cde_table(name, [point.row for point in points])
        return [Plot(SETS, table, points, x_label, measure or Score(column=BEIR))]

    return plots


def phases(setting: str, values: Sequence[int]) -> Callable[[bool], list[Point]]:
    """Points of the second phase, biencoder and contextual, by a setting of it. --small has no
    epochs: it has four steps for each.
    """

    def points(small: bool) -> list[Point]:
        found = []
        for name, context in (("biencoder", False), ("contextual", True)):
            first = both(CONTEXTS[context], name)
            for value in values:
                row = second_phase(first, f", {setting}={value}", **{setting: value})
                if small and setting == "max_epochs":
                    row = replace(row, small={**row.small, "max_steps": 4 * value})
                found.append(Point(row, str(value), series=name))
        return found

    return points


def packings(small: bool) -> list[Point]:
    batches, clusters = sizes(small)
    return [
        Point(of_batch(batches[1], c, packing=packing), f"{c:,}", series=name)
        for packing, name in (("path", "travelling salesman's path"), ("random", "random order"))
        for c in clusters
    ]


def hardness(small: bool) -> list[Plot]:
    table, rows = sweep("figure6", small, False, True)
    points = tuple(Point(row, f"{b:,}", f"{c:,}") for (b, c), row in rows.items())
    return [
        Plot(
            "groups of the text that is trained on",
            table,
            points,
            BATCH,
            Hardness(),
            "map",
            y_label=CLUSTER,
        )
    ]


def both(changes: Settings, label: str) -> Row:
    """The contextual model on contextual batches, changed."""
    return cde.trained(f"CDE, {label}", {"method": "cde-paper-small", **changes})


def vectors(small: bool) -> list[Plot]:
    slots = 8 if small else 64
    rows = {n: both({"context_vectors_per_document": n}, f"{n} vectors") for n in (1, 2, 4, 8)}
    table = cde_table("figure18", [*rows.values()])
    points = tuple(Point(row, str(n)) for n, row in rows.items())
    label = f"vectors a document, {slots} in all"
    return [Plot("truncated sets of BEIR", table, points, label, EachSet())]


def depths(small: bool) -> list[Point]:
    return [
        Point(both({"context_layers": n}, f"first stage of {n}"), str(n), series="contextual")
        for n in (1, 2, 3, 4, 6)
    ]


def first_documents(small: bool) -> list[Plot]:
    slots = 8 if small else 64
    row = both({}, "context and batches")
    counts = [n for n in (0, 1, 2, 4, 8, 16, 32, 64) if n <= slots]
    points = tuple(Point(row, str(n), series="contextual") for n in counts)
    table, label = cde_table("figure16", [row]), f"documents in {slots} slots"
    return [Plot(SETS, table, points, label, FirstDocuments(column=BEIR))]


CDE = {
    "cde-2": Drawing(
        "CDE, figure 2: difficulty of batches and score, biencoder, after the supervised phase",
        "within a batch size, harder batches (a higher loss) have a higher score (section 6)",
        cde_difficulty("figure2", context=False),
        correlation=True,
    ),
    "cde-3": Drawing(
        "CDE, figure 3: biencoder by batch and cluster size, first phase",
        "with the filter small clusters are better and large batches add little; without it large "
        "batches and clusters help (section 6)",
        cde_maps("figure3", context=False),
    ),
    "cde-4": Drawing(
        "CDE, figure 4: the filter of false negatives",
        "the filter is better: dots lie above the line (section 6)",
        cde_filter,
    ),
    "cde-5": Drawing(
        "CDE, figure 5: epochs of the supervised phase",
        "best after four epochs on BGE's data (section 6; MTEB there)",
        cde_series(
            "figure5",
            "epochs of the supervised phase",
            phases("max_epochs", (1, 2, 3, 4)),
        ),
    ),
    "cde-6": Drawing(
        "CDE, figure 6: how hard batches are",
        "larger batches have easier negatives, smaller clusters harder ones (section 7)",
        hardness,
    ),
    "cde-9": Drawing(
        "CDE, figure 9: contextual model by batch and cluster size, first phase",
        "as in figure 3, with higher scores throughout, and good ones at large clusters and small "
        "batches too (appendix 10.5)",
        cde_maps("figure9", context=True),
    ),
    "cde-10": Drawing(
        "CDE, figure 10: difficulty of batches and score, contextual, after the supervised phase",
        "the hardest clusters have the best score (appendix 10.5)",
        cde_difficulty("figure10", context=True),
        correlation=True,
    ),
    "cde-11": Drawing(
        "CDE, figure 11: mined hard negatives in the supervised phase",
        "more of them do not help, scores fall (appendix 10.5)",
        cde_series(
            *("figure11", "hard negatives", phases("negatives", (0, 1, 2, 4, 8))),
        ),
    ),
    "cde-12": Drawing(
        "CDE, figure 12: cluster size",
        "with the filter small clusters help more (appendix 10.5)",
        cde_lines("figure12", by_cluster=True),
    ),
    "cde-13": Drawing(
        "CDE, figure 13: batch size",
        "best between 100 and 10,000 with and without the filter, lower beyond (appendix 10.5)",
        cde_lines("figure13", by_cluster=False),
    ),
    "cde-14": Drawing(
        "CDE, figure 14: order of the clusters along which batches are cut",
        "the path is better, most at small clusters, and the difference is noisy (appendix 10.5)",
        cde_series("figure14", CLUSTER, packings),
    ),
    "cde-16": Drawing(
        "CDE, figure 16: documents of the corpus that are read",
        "best with all slots filled, and reasonable with none (appendix 10.5)",
        first_documents,
    ),
    "cde-17": Drawing(
        "CDE, figure 17: depth of the first stage",
        "deeper is a little better: twelve layers gain less than 1 % over one (appendix 10.10; the "
        "small model has six)",
        cde_series(
            *("figure17", "layers of the first stage", depths),
            Logged("accuracy within the batch, end of training", "accuracy"),
        ),
    ),
    "cde-18": Drawing(
        "CDE, figure 18: vectors a document at a fixed number of vectors",
        "no number of vectors is best on all sets (appendix 10.11)",
        vectors,
    ),
}


# Dwell in the Beginning.

ONE, FOUR = dwell.STAGES[2], dwell.STAGES[3]
REPLLAMA = plain("RepLLaMA", "7B", "castorini/repllama-v1-7b-lora-doc")
T5_BASE = plain("T5-base", "220M", "google-t5/t5-base")
PLACE, COSINE = "tenth of the document", "cosine with the document"
EXACT_MATCH = {"exact match": "", "exact match, by the decoder": "decoder"}


def of_stages(
    name: str, title: str, x_label: str, rows: dict[str, Row], profile: Profile
) -> Callable[[bool], list[Plot]]:
    """A plot by position of rows by name."""
    table = Table(f"dwell-{name}", title, tuple(rows.values()), (), sizes=("220M",))
    points = tuple(Point(row, series=label) for label, row in rows.items())
    return lambda small: [Plot(title, table, points, x_label, profile, "positions")]


DWELL = {
    "dwell-1": Drawing(
        "Dwell, figure 1: MRR@100 while the passage is moved through its document",
        "at the start above the run with documents as they are, anywhere else below; stronger "
        "after more fine-tuning (section 4.2)",
        of_stages(
            *("figure1", "MS MARCO documents", "place of the passage, in tenths"),
            {"T5-2K, 1 episode": ONE, "T5-2K, 4 episodes": FOUR, "RepLLaMA-7B": REPLLAMA},
            Profile("MRR@100", {"moved passage, MRR@100": ""}, move=True),
        ),
    ),
    "dwell-2": Drawing(
        "Dwell, figure 2: where passages begin in their documents",
        "most begin early: half of them before character 746 (section 4.2; training split)",
        lambda small: [
            Plot(
                "MS MARCO documents",
                Table("dwell-figure2", "where passages begin", (), ()),
                (),
                "characters before the passage",
                AnswersBegin("share of the passages", 746),
                "positions",
            )
        ],
    ),
    "dwell-3": Drawing(
        "Dwell, figure 3: a document and its tenths, after contrastive pre-training",
        "the cosine falls from the first tenth on (section 4.3)",
        of_stages(
            *("figure3", "after crops", PLACE, {"T5-2K": dwell.CROPS}),
            Profile(COSINE, EXACT_MATCH),
        ),
    ),
    "dwell-4": Drawing(
        "Dwell, figure 4: accuracy of a hidden span by place",
        "about the same in all windows, T5-base a little higher in late ones (section 4.4)",
        of_stages(
            *("figure4", "language models", PLACE, {"T5-2K": dwell.SPANS, "T5-base": T5_BASE}),
            Profile("accuracy", {"spans by place": ""}),
        ),
    ),
    "dwell-5": Drawing(
        "Dwell, figure 5: a document and its tenths, after language-model pre-training",
        "no fall, unlike figure 3 (section 4.4)",
        of_stages(
            *("figure5", "after span corruption", PLACE, {"T5-2K": dwell.SPANS}),
            Profile(COSINE, EXACT_MATCH),
        ),
    ),
}
FIGURES: dict[str, Drawing] = {**REVELA, **DREAM, **CDE, **DWELL}
NOT_DRAWN = {
    "revela-v1 1, 2": "diagrams of the method",
    "revela-v1 4": "a table: --table revela-v1-figure4-chunks-means",
    "dream 1": "a diagram of the method",
    "cde 1": "a diagram of the model",
    "cde 7": "each of its 144 cells is a `revela fit --context OTHER` and a `revela eval`, on "
    "forums of CQADupStack",
    "cde 8": "needs five published models and the counts of words in their training texts, of "
    "which no model here depends",
    "cde 15": "a picture of a few documents' vectors in two dimensions, without a score",
}
