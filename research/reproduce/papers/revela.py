"""What the tables of both versions of Revela share: texts, data sets, rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from research.reproduce.tables import Corpus, Row, variants

WIKIPEDIA = Corpus("wikipedia", ("hub:trumancai/revela_training_corpus",), stored=True)
CODE = Corpus("code", ("hub:trumancai/revela_code_training_corpus",), stored=True)
MIXED = Corpus(
    "wikipedia-and-code",
    WIKIPEDIA.sources + CODE.sources,
    stored=True,
    weights=(1.0, 1.0),  # 10,000 steps read 160,000 groups of each
    settings={"whole_query_sources": ["stackoverflow"]},
)
# The text that the groups were made of.
WIKIPEDIA_TEXT = Corpus(
    "wikipedia-text", ("hub:Tevatron/wikipedia-nq-corpus",), settings={"join_titles": True}
)
CODE_TEXT = Corpus(
    "code-text",
    (
        "hub:code-rag-bench/stackoverflow-posts",
        "hub:code-rag-bench/online-tutorials",
        "hub:code-rag-bench/library-documentation",
    ),
)
FINEWEB_EDU = Corpus("fineweb-edu", ("hub:HuggingFaceFW/fineweb-edu:sample-10BT",))

BEIR = (
    *("arguana", "climate-fever", "dbpedia-entity", "fever", "fiqa", "hotpotqa", "nfcorpus"),
    *("nq", "quora", "scidocs", "scifact", "trec-covid", "webis-touche2020"),
)
COIR = ("apps", "cosqa", "st2sql", "sn", "sncc", "transc", "transdl", "soqa", "f-st", "f-mt")
BRIGHT = (
    *("biology", "earth-science", "economics", "psychology", "robotics", "stackoverflow"),
    *("sustainable-living", "pony", "leetcode", "aops", "theoremqa-theorems"),
    "theoremqa-questions",
)
HOURS_WIKIPEDIA = "about 44 h a run on 4 A100 with 80 GB"
HOURS_CODE = "about 48 h a run on 4 A100 with 80 GB"
HOURS_BOTH = f"Wikipedia {HOURS_WIKIPEDIA}; code {HOURS_CODE}"
CODE_STEPS = 11_000  # of the preset revela-paper-code, one epoch; 10,000 of Wikipedia

BATCHES = variants("group-size.toml")
"chunks-N -> settings with steps for equal tokens, by 10,000 steps of 16 chunks."


def batch_of(chunks: int, *, code: bool = False) -> dict[str, Any]:
    """Settings of groups of so many chunks, at equal tokens."""
    settings = dict(BATCHES[f"chunks-{chunks}"])
    if code:
        settings["max_steps"] = settings["max_steps"] * CODE_STEPS // 10_000
    return settings


def on_wikipedia(label: str, changes: Mapping[str, Any] = {}, **row: Any) -> Row:
    """A row of Revela, trained on Wikipedia."""
    of_size = {size: batch_of(8) for size in ("3B", "8B")}
    settings = {"method": "revela-paper", **changes}
    return Row(label, settings=settings, **{"corpus": WIKIPEDIA, "of_size": of_size, **row})


def on_code(label: str, changes: Mapping[str, Any] = {}, **row: Any) -> Row:
    """A row of Revela, trained on code."""
    of_size = {size: batch_of(8, code=True) for size in ("3B", "8B")}
    settings = {"method": "revela-paper-code", **changes}
    return Row(label, settings=settings, **{"corpus": CODE, "of_size": of_size, **row})


def replug(corpus: Corpus, **row: Any) -> Row:
    """REPLUG's batch form; the query is the whole chunk on code, as Revela's is there."""
    settings: dict[str, Any] = {"method": "replug-paper"}
    if corpus is CODE:
        settings["query_side"] = "whole"
    return Row("REPLUG", settings=settings, corpus=corpus, **row)


def language_models() -> dict[str, dict[str, str]]:
    """Published row -> settings, in the tables of the language model's size."""
    files = variants("lm-size.toml")
    return {f"Revela lm={size}": files[f"lm-{size.lower()}"] for size in ("135M", "500M", "1B")}


def released(published: str, code: bool = False, **row: Any) -> Row:
    """The authors' adapters, which tell whether the evaluation is theirs."""
    sizes = ("500M", "1B", "3B")
    names = {"500M": "500M", "1B": "1b", "3B": "3b"}
    stem = "trumancai/Revela-code-" if code else "trumancai/Revela-"
    models = {size: f"{stem}{names[size]}" for size in sizes}
    return Row("Revela, released adapter", published, model=models, **{"sizes": sizes, **row})


def plain(label: str, size: str, model: str, **row: Any) -> Row:
    """A published model, scored as it is."""
    return Row(label, model=model, sizes=(size,), **row)


BM25 = Row("BM25", model="BM25", sizes=("",))
CONTRIEVER = plain("Contriever", "0.1B", "facebook/contriever")
RETROMAE = plain("RetroMAE", "0.1B", "Shitao/RetroMAE")
LAPRADOR = plain(
    *("LaPraDoR", "0.1B", "canwenxu/laprador"),
    note="without its lexical part, which multiplies scores by BM25's",
)
NO_FORM = "no source says how it is pooled and prompted"
GRAPHCODEBERT = Row("GraphCodeBERT", sizes=("0.1B",), why_not=NO_FORM)
UNIXCODER = Row("UniXcoder", sizes=("0.1B",), why_not=NO_FORM)
E5_PT = plain("E5-PT", "0.3B", "intfloat/e5-large-unsupervised")
BGE_M3 = plain("BGE-M3", "0.6B", "BAAI/bge-m3")
E5_MISTRAL = plain(
    *("E5-Mistral-7B-Instruct", "7B", "intfloat/e5-mistral-7b-instruct"),
    note="one instruction for all data sets",
)


def api(label: str) -> Row:
    """A model behind an API."""
    return Row(label, sizes=("",), why_not="an API, no weights")


REPLLAMA = Row(
    "RepLLaMA",
    sizes=("1B",),
    why_not="the 1B reproduction that was scored is not named; the released one has 7B",
)
BATCH = ("group_size",)
