"""Revela, the later text: code without V-normalisation, 3B and 8B in groups of 8."""

from __future__ import annotations

from typing import Any

from research.reproduce.papers.revela import (
    BATCH,
    BEIR,
    BGE_M3,
    BM25,
    BRIGHT,
    CODE,
    CODE_TEXT,
    COIR,
    CONTRIEVER,
    E5_MISTRAL,
    E5_PT,
    FINEWEB_EDU,
    HOURS_BOTH,
    HOURS_CODE,
    HOURS_WIKIPEDIA,
    LAPRADOR,
    MIXED,
    UNIXCODER,
    WIKIPEDIA,
    WIKIPEDIA_TEXT,
    api,
    batch_of,
    language_models,
    on_code,
    on_wikipedia,
    released,
    replug,
)
from research.reproduce.tables import Corpus, Row, Table

SMALL_SIZES = ("135M", "500M", "1B")
SIZES = (*SMALL_SIZES, "3B")
BATCH_SIZES = (4, 8, 16)
OF_WIKIPEDIA = on_wikipedia("Revela corpus=wikipedia", note="3B and 8B: one epoch of groups of 8")
OF_CODE = on_code("Revela corpus=code", note="3B: one epoch of groups of 8")
OF_BOTH = on_wikipedia("Revela corpus=wikipedia+code", corpus=MIXED)
OF_FINEWEB = on_wikipedia(
    "Revela corpus=fineweb-edu",
    corpus=FINEWEB_EDU,
    note="groups are ours, of the hub's sample of 10 billion tokens",
)


def crops(corpus: Corpus, name: str, pairs: int) -> Row:
    """Contriever's crops, on the text that Revela's groups are made of."""
    steps = pairs // 256  # of an effective batch of 256
    return Row(
        f"Contriever crops corpus={name}",
        settings={"method": "contrastive-contriever", "max_epochs": 0, "max_steps": steps},
        corpus=corpus,
        note="rate and mix of the two tasks are ours; crops of whole documents",
    )


def beir(name: str, shows: str, *rows: Row, **table: Any) -> Table:
    """A table over 13 sets of BEIR."""
    about = {"means": {"mean": BEIR}, "sizes": SMALL_SIZES, "hours": HOURS_WIKIPEDIA, **table}
    return Table(f"revela-v2-{name}", shows, rows, BEIR, **about)


def coir(name: str, shows: str, *rows: Row, **table: Any) -> Table:
    """A table over 10 sets of CoIR."""
    about = {"means": {"mean": COIR}, "sizes": SMALL_SIZES, "hours": HOURS_CODE, **table}
    return Table(f"revela-v2-{name}", shows, rows, COIR, **about)


CONTROLLED = (
    *(OF_WIKIPEDIA, crops(WIKIPEDIA_TEXT, "wikipedia", 500_000)),
    *(OF_CODE, crops(CODE_TEXT, "code", 359_000)),
)
TABLES = (
    coir(
        *("table1-coir", "Revela and baselines, 10 sets of CoIR"),
        *(BM25, UNIXCODER, OF_CODE, released("Revela corpus=code", code=True), E5_PT, BGE_M3),
        *(replug(CODE, sizes=("1B", "3B")), E5_MISTRAL),
        *(api("OpenAI-Ada-002"), api("Voyage-Code-002")),
        sizes=SIZES,
    ),
    Table(
        "revela-v2-table2-contriever",
        "means of tables 8 and 9: Revela against Contriever's crops, same text and backbone",
        CONTROLLED,
        BEIR + COIR,
        {"mean BEIR": BEIR, "mean CoIR": COIR, "mean": ("mean BEIR", "mean CoIR")},
        ("1B",),
        hours=HOURS_BOTH,
    ),
    beir(
        *("table6-beir", "Revela and baselines, 13 sets of BEIR"),
        *(BM25, CONTRIEVER, LAPRADOR, OF_WIKIPEDIA, released("Revela corpus=wikipedia"), E5_PT),
        replug(WIKIPEDIA, sizes=("500M", "1B", "3B")),
        on_code("Revela corpus=code", sizes=("3B",)),
        sizes=SIZES,
    ),
    Table(
        "revela-v2-table7-bright",
        "Revela and baselines, 12 sets of BRIGHT",
        (
            *(BM25, E5_PT, OF_WIKIPEDIA, released("Revela corpus=wikipedia")),
            *(replug(WIKIPEDIA, sizes=("3B",)), E5_MISTRAL),
            *(api("cohere-embed-english-v3.0"), api("text-embedding-3-large")),
            api("voyage-large-2-instruct"),
        ),
        BRIGHT,
        {"mean": BRIGHT},
        ("500M", "1B", "3B", "8B"),
        hours=HOURS_WIKIPEDIA,
    ),
    coir(
        *("table8-contriever-coir", "Revela against Contriever's crops, CoIR", *CONTROLLED),
        sizes=("1B",),
        hours=HOURS_BOTH,
    ),
    beir(
        *("table9-contriever-beir", "Revela against Contriever's crops, BEIR", *CONTROLLED),
        sizes=("1B",),
        hours=HOURS_BOTH,
    ),
    coir(
        *("table10-batch-coir", "4, 8 or 16 chunks a group, CoIR"),
        *(on_code(f"Revela batch={n}", batch_of(n, code=True)) for n in BATCH_SIZES),
        small_keeps=BATCH,
    ),
    beir(
        *("table11-batch-beir", "4, 8 or 16 chunks a group, BEIR"),
        *(on_wikipedia(f"Revela batch={n}", batch_of(n)) for n in BATCH_SIZES),
        small_keeps=BATCH,
    ),
    beir(
        *("table12-lm-size-beir", "size of the language model, BEIR"),
        *(on_wikipedia(label, settings) for label, settings in language_models().items()),
    ),
    coir(
        *("table13-lm-size-coir", "size of the language model, CoIR"),
        *(on_code(label, settings) for label, settings in language_models().items()),
    ),
    coir("table14-mixed-coir", "trained on Wikipedia and code, CoIR", OF_BOTH),
    beir("table15-mixed-beir", "trained on Wikipedia and code, BEIR", OF_BOTH),
    coir("table16-fineweb-coir", "trained on FineWeb-Edu, CoIR", OF_FINEWEB, hours=""),
    beir("table17-fineweb-beir", "trained on FineWeb-Edu, BEIR", OF_FINEWEB, hours=""),
)
