"""Revela, arXiv v1 (June 2025). V-normalisation is on for code, too."""

from __future__ import annotations

from typing import Any

from research.reproduce.papers.revela import (
    BATCH,
    BEIR,
    BM25,
    CODE,
    COIR,
    CONTRIEVER,
    GRAPHCODEBERT,
    HOURS_BOTH,
    HOURS_CODE,
    HOURS_WIKIPEDIA,
    LAPRADOR,
    MIXED,
    REPLLAMA,
    RETROMAE,
    UNIXCODER,
    WIKIPEDIA,
    api,
    batch_of,
    language_models,
    on_code,
    on_wikipedia,
    released,
    replug,
)
from research.reproduce.tables import Row, Table, variants

SIZES = ("135M", "500M", "1B")
V1 = {"v_norm": "on"}  # of code; the preset is the later version's
REVELA, REVELA_CODE = on_wikipedia("Revela"), on_code("Revela", V1)
ORDERS, NORMS, RANKS = (
    variants(f"{name}.toml") for name in ("random-groups", "v-norm", "lora-rank")
)


def beir(name: str, shows: str, *rows: Row, **table: Any) -> Table:
    """A table over 13 sets of BEIR."""
    means = {} if "vnorm" in name else {"mean": BEIR}  # the text of table 12 has no means
    about = {"means": means, "sizes": SIZES, "hours": HOURS_WIKIPEDIA, **table}
    return Table(f"revela-v1-{name}-beir", shows, rows, BEIR, **about)


def coir(name: str, shows: str, *rows: Row, **table: Any) -> Table:
    """A table over 10 sets of CoIR."""
    about = {"means": {"mean": COIR}, "sizes": SIZES, "hours": HOURS_CODE, **table}
    return Table(f"revela-v1-{name}", shows, rows, COIR, **about)


def chunks(label: str, of: str) -> tuple[Row, Row]:
    """Rows with this order of chunks: on Wikipedia, and on code."""
    # Of stored groups, "document-random" is the authors' order and "random" shuffles all chunks.
    changes = ORDERS[of] if of == "random" else {}
    return on_wikipedia(label, changes), on_code(label, {**V1, **changes})


CONTIGUOUS, RANDOM = (
    chunks("Revela chunks=contiguous", "document"),
    chunks("Revela chunks=random", "random"),
)
DUAL = on_wikipedia("Revela corpus=wikipedia+code", corpus=MIXED)
FIGURE_4 = [
    Row(
        f"{row.label}, on {row.corpus.name}" if row.corpus else row.label,
        row.label,
        row.settings,
        row.of_size,
        row.corpus,
        columns=columns,
    )
    for rows in (CONTIGUOUS, RANDOM)
    for row, columns in zip(rows, (BEIR, COIR), strict=True)
]
BATCH_SIZES = (8, 12, 16)
TABLES = (
    beir(
        *("table1", "Revela and baselines, 13 sets of BEIR"),
        *(BM25, CONTRIEVER, RETROMAE, LAPRADOR, replug(WIKIPEDIA), REVELA),
        released("Revela", sizes=("500M", "1B")),
        Row("Revela+BM25 rrf", rrf=REVELA, sizes=("1B",)),
        REPLLAMA,
    ),
    coir(
        *("table2-coir", "Revela and baselines, 10 sets of CoIR"),
        *(BM25, CONTRIEVER, GRAPHCODEBERT, UNIXCODER, replug(CODE), REVELA_CODE),
        *(api("OpenAI-Ada-002"), api("Voyage-Code-002")),
    ),
    beir(
        *("table5-lm-size", "size of the language model, BEIR"),
        *(on_wikipedia(label, settings) for label, settings in language_models().items()),
    ),
    coir(
        *("table6-lm-size-coir", "size of the language model, CoIR"),
        *(on_code(label, {**V1, **changes}) for label, changes in language_models().items()),
    ),
    beir(
        *("table7-lora-rank", "rank of LoRA, BEIR"),
        *(on_wikipedia(f"Revela lora_rank={r}", RANKS[f"rank-{r}"]) for r in (16, 64, 256)),
        small_keeps=("lora_rank",),
    ),
    beir(
        *("table8-chunks", "contiguous or random chunks, and both corpora, BEIR"),
        *(CONTIGUOUS[0], RANDOM[0], DUAL),
    ),
    coir(
        *("table9-chunks-coir", "contiguous or random chunks, and both corpora, CoIR"),
        *(CONTIGUOUS[1], RANDOM[1], DUAL),
        hours=HOURS_BOTH,
    ),
    beir(
        *("table10-batch", "8, 12 or 16 chunks a group at equal tokens, BEIR"),
        *(on_wikipedia(f"Revela batch={n}", batch_of(n)) for n in BATCH_SIZES),
        small_keeps=BATCH,
    ),
    coir(
        *("table11-batch-coir", "8, 12 or 16 chunks a group at equal tokens, CoIR"),
        *(on_code(f"Revela batch={n}", {**V1, **batch_of(n, code=True)}) for n in BATCH_SIZES),
        small_keeps=BATCH,
    ),
    beir(
        *("table12-vnorm", "V-normalisation off or on, BEIR"),
        *(on_wikipedia(f"Revela v_norm={x}", NORMS[f"v-norm-{x}"]) for x in ("off", "on")),
    ),
    Table(
        "revela-v1-figure4-chunks-means",
        "means of tables 8 and 9",
        (*FIGURE_4, DUAL),
        BEIR + COIR,
        {"mean BEIR": BEIR, "mean CoIR": COIR},
        SIZES,
        hours=HOURS_BOTH,
    ),
)
