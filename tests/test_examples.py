"""The examples run on tiny models, and stay short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from conftest import make_rows
from examples import (
    adapt_an_embedder,
    contextual_retriever,
    own_objective,
    train_on_a_folder,
)
from revela import Retriever

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {
    "chunk_words": 20,
    "group_size": 8,
    "lora_rank": 4,
    "gate_heads": 4,
    "max_minutes": 0,
    "max_steps": 3,
    "precision": "fp32",
    "threads": 1,
    "held_out": 0.2,
}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_it_has_at_most_60_lines(file):
    assert len(file.read_text().splitlines()) <= 60


def test_train_on_a_folder(corpus_file, tiny_lm_folder, tmp_path):
    out, question = tmp_path / "retriever", "ocean01 ocean02"
    hits = train_on_a_folder.main(
        corpus_file.parent, out, question, tiny_lm_folder, tiny_lm_folder, layers=2, **TINY
    )
    assert len(hits) == 5 and hits[0].score >= hits[-1].score
    assert SentenceTransformer(str(out)).encode_query([question]).shape[0] == 1


@pytest.mark.parametrize("settings", [{}, {"keep": "last"}])
def test_adapt_an_embedder(corpus_file, saved_retriever, tiny_lm_folder, tmp_path, settings):
    before, after, changed = adapt_an_embedder.main(
        corpus_file, tmp_path / "out", saved_retriever, tiny_lm_folder, check_questions=0,
        **(TINY | settings),
    )  # fmt: skip
    assert before.keys() == after.keys() and {"title", "sibling"} & before.keys()
    assert changed or settings != {"keep": "last"}
    assert SentenceTransformer(str(tmp_path / "out")).prompts["query"] == "query: "


def test_own_objective(corpus_file, tiny_lm_folder, tmp_path):
    settings = {**TINY, "layers": 2, "model": str(tiny_lm_folder)}
    del settings["gate_heads"]  # of another objective
    objective = own_objective.Neighbours(tau=0.05)
    retriever = Retriever.train(corpus_file, tmp_path / "out", objective=objective, **settings)
    assert retriever.encode_queries(["ocean01"]).shape[0] == 1


def test_contextual_retriever(corpus_file, saved_retriever, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in make_rows(40, seed=7)[::-1]))
    settings = {**TINY, "context": 4, "queries": "telling-sentence", "keep": "last"}
    settings |= {"learning_rate": 1e-2, "max_steps": 15}
    del settings["gate_heads"]
    one, two = contextual_retriever.main(
        [corpus_file, other], tmp_path / "out", "ocean01", saved_retriever, **settings
    )
    assert one @ one == pytest.approx(1, abs=1e-5) and 0 < abs(one - two).max() < 0.5
