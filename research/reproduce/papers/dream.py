"""DREAM (arXiv 2606.24667): 9 sets of BEIR and 14 of RTEB; nDCG@10 from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from research.reproduce.papers.revela import BM25, E5_MISTRAL, WIKIPEDIA_TEXT, api, plain
from research.reproduce.tables import Row, Table, variants

BEIR = (
    *("arguana", "nfcorpus", "fiqa", "scifact", "scidocs", "quora", "trec-covid"),
    *("webis-touche2020", "cqadupstack"),
)
RTEB = (
    *("aila-casedocs", "aila-statutes", "legalsum", "financebench", "hc3finance", "finqa", "apps"),
    *("ds1000", "humaneval", "mbpp", "wikisql", "freshstack", "chatdoctor", "curev1"),
)
MEANS: Mapping[str, Any] = {"mean BEIR-9": BEIR, "mean RTEB-14": RTEB}
SIZES = ("500M", "1B", "3B")
SETTINGS = variants("papers/dream-1.toml")
UNKNOWN = "the paper does not state its form"


def trained(label: str, name: str, **row: Any) -> Row:
    """A row that is trained, by its variant in the recipe."""
    return Row(label, settings=SETTINGS[name], corpus=WIKIPEDIA_TEXT, **row)


DREAM = trained("DREAM", "dream", note="learning rate, temperature and gate are ours")
RELEASED = Row(
    "DREAM, released adapter",
    "DREAM",
    model={"500M": "yixuantt/DREAM-0.5B", "3B": "yixuantt/DREAM-3B"},
    sizes=("500M", "3B"),
)
ROWS = (
    *(BM25, trained("InfoNCE", "infonce", note="its temperature is ours")),
    *(trained("RePlug", "replug", note=UNKNOWN), trained("Revela", "revela", note=UNKNOWN)),
    *(DREAM, RELEASED),
)


def table(name: str, shows: str, rows: tuple[Row, ...], *columns: Any, **about: Any) -> Table:
    """A table of DREAM."""
    return Table(f"dream-{name}", shows, rows, *columns, **{"percent": False, **about})


TABLES = (
    table("table1-means", "means of tables 4 and 5", ROWS, BEIR + RTEB, MEANS, SIZES),
    table(
        "table2-8b",
        "8B, and embedders of others",
        (
            plain("BGE-large-en-v1.5", "", "BAAI/bge-large-en-v1.5"),
            api("Cohere-embed-english-v3.0"),
            plain("E5-mistral-7b-instruct", "7B", str(E5_MISTRAL.model)),
            trained("DREAM", "dream", note=DREAM.note),
            plain("Qwen3-Embedding-8B", "8B", "Qwen/Qwen3-Embedding-8B"),
        ),
        BEIR + RTEB,
        MEANS,
        ("8B",),
    ),
    table(
        "table3-heads",
        "the 16 heads of Llama-3.1-8B-Instruct that the probe finds",
        (),
        (),
        expected="most of the 16 published heads",
        heads={**SETTINGS["dream"], "heads": ""},
    ),
    table("table4-beir", "DREAM and baselines, 9 sets of BEIR", ROWS, BEIR, {"mean": BEIR}, SIZES),
    table("table5-rteb", "DREAM and baselines, 14 of RTEB", ROWS, RTEB, {"mean": RTEB}, SIZES),
)
