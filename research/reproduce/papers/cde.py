"""CDE (arXiv v2). Its pairs are not released as one: rows are trained on titles of Wikipedia, so
the order of the rows can be expected, not their height.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from research.reproduce.papers.revela import WIKIPEDIA_TEXT, plain
from research.reproduce.tables import PAIRS, Corpus, Row, Table, variants

TRUNCATED = ("nfcorpus", "scifact", "arguana", "scidocs", "trec-covid", "quora", "nq", "msmarco")
RETRIEVAL = (
    *("arguana", "cqadupstack", "climate-fever", "dbpedia-entity", "fever", "fiqa", "hotpotqa"),
    *("msmarco", "nfcorpus", "nq", "quora", "scidocs", "scifact", "trec-covid"),
    "webis-touche2020",
)
TASKS: Mapping[str, tuple[str, ...]] = {
    "classification": (
        "AmazonPolarityClassification",
        "AmazonReviewsClassification",
        "Banking77Classification",
        "EmotionClassification",
        "ImdbClassification",
        "MTOPDomainClassification",
        "MTOPIntentClassification",
        "MassiveIntentClassification",
        "MassiveScenarioClassification",
        "ToxicConversationsClassification",
        "TweetSentimentExtractionClassification",
        "AmazonCounterfactualClassification",
    ),
    "clustering": (
        "ArxivClusteringP2P",
        "ArxivClusteringS2S",
        "BiorxivClusteringP2P",
        "BiorxivClusteringS2S",
        "MedrxivClusteringP2P",
        "MedrxivClusteringS2S",
        "RedditClustering",
        "RedditClusteringP2P",
        "StackExchangeClustering",
        "StackExchangeClusteringP2P",
        "TwentyNewsgroupsClustering",
    ),
    "pair-classification": ("SprintDuplicateQuestions", "TwitterSemEval2015", "TwitterURLCorpus"),
    "reranking": (
        "AskUbuntuDupQuestions",
        "MindSmallReranking",
        "SciDocsRR",
        "StackOverflowDupQuestions",
    ),
    "sts": (
        "BIOSSES",
        "SICK-R",
        "STS12",
        "STS13",
        "STS14",
        "STS15",
        "STS16",
        "STSBenchmark",
        "STS17",
        "STS22",
    ),
    "summarization": ("SummEval",),
}
ALL_TASKS = tuple(chain.from_iterable(TASKS.values()))
NO_CODE = "its folder needs code from the hub, which is never run"
SMALL_CONTEXT = {"context": 8, "context_tokens": 32}


def small(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with --small: MiniLM, which is an encoder, and eight documents as context."""
    models = {"model": "embedded:minilm-l6", "layers": 0, "lora_rank": 0}
    if settings.get("groups") != "random":
        models |= {"surrogate": "embedded:minilm-l6", "filter": "same"}
    return models | (SMALL_CONTEXT if settings.get("context", 1) else {"context": 0})


def trained(label: str, settings: Mapping[str, Any], **row: Any) -> Row:
    """A row on titles of Wikipedia."""
    return Row(
        *(label, "", settings, {}, WIKIPEDIA_TEXT), small=small(settings), sizes=("",), **row
    )


CELLS = {
    f"CDE small batches={batches} context={context}": variant
    for (batches, context), variant in zip(
        [("random", "off"), ("clustered", "off"), ("random", "on"), ("clustered", "on")],
        variants("papers/cde-1.toml").values(),
        strict=True,
    )
}
LARGE = {"method": "cde-paper"}
PLAIN = {**LARGE, "context": 0}
OF_PAIRS = Corpus("pairs", (PAIRS,))
JUDGED = {"queries": "judged", "pairs": [PAIRS], "filter": "", "max_epochs": 4}


def supervised(label: str, before: Row, settings: Mapping[str, Any]) -> Row:
    """The second phase of a row, on judged pairs."""
    later = {**settings, **JUDGED}
    return Row(
        *(label, "", later, {}, OF_PAIRS, before),
        small={**small(settings), "filter": ""},
        sizes=("",),
    )


BIENCODER = trained("CDE biencoder phase=unsupervised", PLAIN)
CONTEXTUAL = trained("CDE contextual phase=unsupervised", LARGE)
BASELINES = (
    plain(
        *("nomic-embed-v1", "<=250M", "nomic-ai/nomic-embed-text-v1"),
        note="prompts of search for all tasks",
    ),
    plain("stella-base-en-v2", "<=250M", "infgrad/stella-base-en-v2"),
    plain("bge-base-en-v1.5", "<=250M", "BAAI/bge-base-en-v1.5"),
    plain("GIST-Embedding-v0", "<=250M", "avsolatorio/GIST-Embedding-v0"),
    Row("gte-base-en-v1.5", sizes=("<=250M",), why_not=NO_CODE),
)
OURS = "trained on titles of Wikipedia by the preset cde-paper; the released model: " + NO_CODE


def contextual(label: str, note: str, **row: Any) -> Row:
    """A contextual retriever that is scored on retrieval."""
    about: dict[str, Any] = {"sizes": ("<=250M",), "columns": RETRIEVAL, "note": note, **row}
    return Row(label, "", LARGE, {}, WIKIPEDIA_TEXT, small=small(LARGE), **about)


TABLES = (
    Table(
        "cde-table1-small",
        "batches of clusters, and a context, on and off; truncated BEIR",
        tuple(
            trained(label, {"method": "cde-paper-small", **settings})
            for label, settings in CELLS.items()
        ),
        TRUNCATED,
        {"truncated BEIR": TRUNCATED},
        depth=1024,
        candidates_by="sentence-transformers/gtr-t5-base",
    ),
    Table(
        "cde-table2-mteb",
        "56 tasks of MTEB by category: baselines, and CDE with a context per data set",
        (
            *BASELINES,
            contextual(
                "cde-small-v1 context=random",
                f"{OURS}; the context is another data set's; retrieval alone",
                in_other_context=True,
            ),
            contextual("cde-small-v1 context=of the task", f"{OURS}; retrieval alone"),
        ),
        RETRIEVAL + ALL_TASKS,
        {**TASKS, "retrieval": RETRIEVAL, "mean": RETRIEVAL + ALL_TASKS},
        tasks=ALL_TASKS,
    ),
    Table(
        "cde-table7-mteb-retrieval",
        "biencoder and contextual, after each phase, 15 sets",
        (
            *(BIENCODER, CONTEXTUAL),
            supervised("CDE biencoder phase=supervised", BIENCODER, PLAIN),
            supervised("CDE contextual phase=supervised", CONTEXTUAL, LARGE),
        ),
        RETRIEVAL,
        {"mean": RETRIEVAL},
        small_only="the paper trains on 234 million pairs with 8 H100, one and two days an epoch",
    ),
)
