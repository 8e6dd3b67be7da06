"""What training, groups, the fit, scores and search give on tiny models, beside what they gave.

A change of the code that is meant to change nothing must keep these numbers. ``make records``
rewrites records.json, for a change that is meant to change them: the diff shows what it moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import TINY, logged, make_documents
from revela import Retriever
from revela.evaluation.collection import Collection
from revela.evaluation.evaluate import outcomes
from revela.training import training_set
from revela.training.methods.registry import PRESETS
from revela.training.methods.revela import Revela
from revela.training.recipe import Recipe
from revela.training.train import train
from revela.training.training_set import TrainingSet

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="recorded on a CPU")
Record = dict[str, list[float] | list[str]]
FILE = Path(__file__).parent / "records.json"
# Another CPU adds fp32 numbers in another order: with the instructions of AVX2 alone these are met,
# with torch's plain code for any CPU one norm of "revela-paper" moves by 1.6e-3. A temperature or a
# learning rate that is 1 % off fails every run that has one. A small number of a list moves with
# the large ones: on another machine a norm of .036 by 7e-4 of itself, 3e-5 of the list's largest.
RELATIVE, OF_THE_LARGEST = 5e-4, 5e-5

DOCUMENTS, MORE = make_documents(24), make_documents(80)
TEXTS = ["ocean01 ocean02 ocean03", "Violin15 engine10.", DOCUMENTS[7].text]
RUN = TINY | dict(learning_rate=2e-3, max_steps=8)
ASKED: dict[str, Any] = dict(queries="telling-sentence", chunk_words=30, query_heads=3)
GATED = dict(gate_heads=4)
LEFT_OUT = ("dwell-pairs", "dwell-paper")  # these need --pairs
RUNS = {name: {"method": name, **RUN} for name in PRESETS if name not in LEFT_OUT}
RUNS["revela-gated"] |= GATED
for name in ("revela-paper", "replug-paper"):
    RUNS[name] |= dict(groups_per_step=2)
RUNS["dream"] |= ASKED
RUNS["dream-paper"] |= ASKED
RUNS["dream-infonce"] |= dict(queries="title")
RUNS["replug-questions"] |= dict(queries="telling-sentence", chunk_words=30)
RUNS["contrastive-crop"] |= dict(crop_window=40)
RUNS["contrastive-contriever"] |= dict(crop_window=40, groups_per_step=2, max_epochs=0)
RUNS["dwell-crop-paper"] |= dict(groups_per_step=2, groups_per_batch=2, max_epochs=0)
for name in ("dwell-spans", "dwell-spans-paper"):
    RUNS[name] |= dict(model="new:tiny", lora_rank=0, groups_per_step=1)
RUNS["cde"] |= dict(surrogate="")  # the preset's surrogate is MiniLM
for name in ("cde-paper", "cde-paper-small"):
    RUNS[name] |= dict(surrogate="", filter="same", context=4, lora_rank=0)
# A run that draws fewer random numbers, should another training loop draw them in another order;
# then what no preset turns on.
RUNS["paper without dropout"] = RUNS["revela-paper"] | dict(lora_dropout=0.0)
RUNS["options"] = RUNS["revela-gated"] | dict(retriever_batch=3)
CROPS = dict(method="contrastive-crop", crop_window=20)
GROUPS: dict[str, tuple[dict[str, Any], bool]] = {  # settings, and whether what is similar is known
    "document": ({}, False),
    "document, similar": ({}, True),
    "random": (dict(groups="random"), False),
    "cluster": (dict(groups="cluster"), False),
    "cluster, similar": (dict(groups="cluster"), True),
    "spread": (CROPS, False),
    "spread, similar": (CROPS | dict(groups="document"), True),
    "asking": (dict(method="dream-infonce", queries="first-sentence"), False),
}


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[[str, Record], None]:
    """Compares a record with the one of this name in the file, or writes it there."""

    def compare(name: str, found: Record) -> None:
        records = json.loads(FILE.read_text()) if FILE.exists() else {}
        if request.config.getoption("--write-records"):
            _write({**records, name: found})
            return
        assert found.keys() == records[name].keys()
        for what, values in records[name].items():
            if isinstance(values[0], str):
                assert found[what] == values, what
            else:
                least = OF_THE_LARGEST * max(map(abs, values))
                assert found[what] == pytest.approx(values, rel=RELATIVE, abs=least), what

    return compare


@pytest.mark.parametrize("name", RUNS)
def test_runs(tiny_lm_folder, tmp_path, keep, name, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))  # the LM's heads are found again
    if "gate_heads" in RUNS[name]:
        monkeypatch.setattr(Revela, "gate_first_layer", 0.3)  # of so few layers
    models = dict.fromkeys(("model", "lm"), str(tiny_lm_folder))
    recipe = Recipe.of(**models | RUNS[name])
    # A tokenizer takes more text.
    train(recipe, MORE if name.startswith("dwell-spans") else DOCUMENTS, tmp_path / "out")
    rows, names = logged(tmp_path / "out"), ("loss", "grad_norm", "learning_rate")
    record: Record = {what: _short(row[what] for row in rows) for what in names}
    keep(name, record | _vectors(Retriever(tmp_path / "out", "fp32")))


def test_groups_of_two_epochs(keep, monkeypatch):
    """As a method is given them, without a model: what is similar is made up."""
    rng = np.random.default_rng(0)
    vectors_ND = rng.normal(size=(len(DOCUMENTS), 4)).astype(np.float32)
    record: Record = {}
    for name, (settings, known) in GROUPS.items():
        recipe = Recipe.of(chunk_words=12, group_size=8, threads=1, **settings)
        data = TrainingSet(recipe, DOCUMENTS)
        order_R = np.arange(len(data.rows))
        similar = (vectors_ND, rng.permutation(order_R)) if known else (None, order_R)
        for what, made in zip(("lexical_vectors", "similar_order"), similar, strict=True):
            monkeypatch.setattr(training_set, what, lambda *_, made=made: made)
        groups = data.corpus_groups(lambda: None)
        record[name] = [" ".join(map(str, group)) for epoch in range(2) for group in groups(epoch)]
    keep("groups", record)


def test_the_fit(saved_retriever, keep):
    keep("fit", _vectors(Retriever(saved_retriever, "fp32")))


def test_scores_on_a_collection(saved_retriever, keep):
    """Of pieces of documents: a query has two words of one, and the middle piece helps too."""
    sentences = [document.text.split(". ") for document in DOCUMENTS]
    places = product(range(len(DOCUMENTS)), (0, 2, 4))
    texts = {f"{i}-{j}": ". ".join(sentences[i][j : j + 2]) for i, j in places}
    queries = {name: " ".join(text.split()[1:3]) for name, text in list(texts.items())[::7]}
    qrels = {name: {name: 2, f"{name[:-1]}2": 1} for name in queries}
    parts = (list(part) for part in (texts, texts.values(), queries, queries.values()))
    encoder = Retriever(saved_retriever, "fp32").encoder
    found = outcomes(
        Collection("made up", *parts, qrels), {"tiny": encoder}, rerank="late-interaction"
    )
    record: Record = {}
    for system, queries in found.items():
        record[system] = _short(scores["ndcg@10"] for scores in queries.values())
    keep("scores", record)


def test_search(saved_retriever, tmp_path, keep):
    retriever = Retriever(saved_retriever, "fp32")
    searcher = retriever.index(DOCUMENTS, tmp_path / "index", chunk_words=12, keep_tokens=True)
    ways: dict[str, Any] = {
        "hybrid": {},
        "by rank": dict(fusion="rank"),
        "dense": dict(mode="dense"),
        "lexical": dict(mode="lexical"),
        "late-interaction": dict(rerank="late-interaction"),
    }
    record: Record = {}
    for way, settings in ways.items():
        hits = [hit for text in TEXTS for hit in searcher.search(text, 4, **settings)]
        record[way] = _short(hit.score for hit in hits)
        record[f"{way}, found"] = [f"{hit.id} {hit.chunk}" for hit in hits]
    keep("search", record)


def test_nothing_is_recorded_that_is_not_compared():
    assert json.loads(FILE.read_text()).keys() == {*RUNS, "groups", "fit", "scores", "search"}


def _vectors(retriever: Retriever) -> Record:
    """Cosines of three queries with three passages, and the sizes of their vectors' first numbers.

    An eigenvector has no sign of its own, and so neither has a fitted retriever's number.
    """
    queries_ND, passages_ND = retriever.encode_queries(TEXTS), retriever.encode_passages(TEXTS)
    return {
        "cosines": _short((queries_ND @ passages_ND.T).flat),
        "queries": _short(np.abs(queries_ND[:, :4]).flat),
        "passages": _short(np.abs(passages_ND[:, :4]).flat),
    }


def _short(numbers: Iterable[float]) -> list[float]:
    """As they are written down, at more digits than fp32 has."""
    return [float(f"{number:.9g}") for number in numbers]


def _write(records: dict[str, Record]) -> None:
    """As JSON, a line for each list."""
    parts = []
    for name, record in records.items():
        lines = (f"  {json.dumps(what)}: {json.dumps(values)}" for what, values in record.items())
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
