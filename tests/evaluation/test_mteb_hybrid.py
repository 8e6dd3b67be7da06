"""Our hybrid search in mteb's search protocol gives the scores of ``revela eval``, for our encoders
and mteb's own; research/mteb.patch registers it there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from conftest import make_rows, tiny_retriever
from revela import RevelaError, __version__
from revela.encoder.load import load_encoder
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import mean_outcomes, rankings
from tests.collection_folder import write_collection

pytest.importorskip("mteb")
import mteb
from mteb.models import SentenceTransformerEncoderWrapper

from revela.evaluation.mteb import MtebEncoder, folder_task
from revela.evaluation.mteb_hybrid import MtebHybrid

PATCH = Path(__file__).parents[2] / "research" / "mteb.patch"


@pytest.fixture(scope="module")
def retriever(tiny_lm_folder, tmp_path_factory):
    """An embedder with prompts, saved."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    prompts = dict(query_prompt="ask: ", passage_prompt="read: ")
    tiny_retriever(tiny_lm_folder, **prompts).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module", params=["our encoder", "mteb's encoder"])
def hybrid(request, retriever):
    if request.param == "our encoder":
        return MtebHybrid(MtebEncoder.load(str(retriever), "fp32"))
    return MtebHybrid(SentenceTransformerEncoderWrapper(SentenceTransformer(str(retriever))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """300 documents, five without a title. Half of the queries are sentences of documents whose
    topic is relevant, half are documents, which do not find themselves.
    """
    rows = make_rows(300, seed=4)
    for row in rows[:5]:
        row["title"] = ""
    queries = {f"q{i}": rows[i]["text"].split(". ")[1] for i in range(20)}
    queries |= {f"d{i}": rows[i]["text"] for i in range(20, 40)}
    numbers = {name: int(name[1:]) for name in queries}
    pairs = [(name, j) for name, i in numbers.items() for j in range(i % 5, 300, 5)]
    judged = {(name, f"d{j}"): 1 for name, j in pairs if name != f"d{j}"}
    return write_collection(tmp_path_factory.mktemp("judged") / "Judged", rows, queries, judged)


@pytest.fixture(scope="module")
def task(folder):
    task = folder_task(folder)
    task.load_data()
    return task


def searched(hybrid, task, **how):
    """The documents that each query of a task finds, and their scores."""
    split = task.dataset["default"]["test"]
    part = dict(task_metadata=task.metadata, hf_split="test", hf_subset="default", encode_kwargs={})
    hybrid.index(split["corpus"], **part, num_proc=None)
    return hybrid.search(split["queries"], **part, num_proc=None, **{"top_k": 1000, **how})


def first_of(result):
    """A query's documents, best first."""
    return sorted(result, key=result.get, reverse=True)


def test_mteb_gives_the_scores_of_eval(hybrid, folder, retriever):
    how = dict(cache=None, show_progress_bar=False, co2_tracker=False)
    (result,) = mteb.evaluate(hybrid, folder_task(folder), **how).task_results
    collection = load_collection(folder)
    assert len(collection.among_documents) == 20
    found = mean_outcomes(collection, {"m": load_encoder(retriever, "fp32")})
    assert result.get_score() == pytest.approx(found["m + BM25"]["ndcg@10"], abs=1e-4)
    assert 0.05 < result.get_score() < 0.95


def test_documents_have_the_scores_of_eval(hybrid, folder, retriever, task):
    collection = load_collection(folder)
    ours = dict(rankings(collection, {"m": load_encoder(retriever, "fp32")}))["m + BM25"]
    found = searched(hybrid, task)
    assert found.keys() == ours.keys() and 200 <= len(found["q0"]) <= 300
    for query, scores in ours.items():
        assert found[query] == pytest.approx(scores, abs=1e-5)
    first = searched(hybrid, task, top_k=7)["q0"]
    assert list(first) == first_of(found["q0"])[:7]


def test_documents_that_the_task_names_are_ranked_and_no_others(hybrid, task):
    top_ranked = {"q0": ["d7", "d0", "d299", "d5"], "q1": ["d9"], "q2": []}
    found = searched(hybrid, task, top_ranked=top_ranked)
    assert {query: set(found[query]) for query in top_ranked} == {
        query: set(names) for query, names in top_ranked.items()
    }
    assert found["q3"] == {} and list(found["q0"]) == first_of(found["q0"])
    assert first_of(found["q0"])[0] == "d0"  # whose sentence it is
    every = {query: [f"d{i}" for i in range(300)] for query in found}
    assert searched(hybrid, task, top_ranked=every)["q0"].keys() == set(every["q0"])
    assert len(searched(hybrid, task, top_ranked=every, top_k=7)["q0"]) == 7


def test_instructions_are_read_with_queries(hybrid, task):
    queries = Dataset.from_dict({"id": ["a"], "text": ["room"], "instruction": ["of the ocean0"]})
    joined = Dataset.from_dict({"id": ["a"], "text": ["room of the ocean0"]})
    searched(hybrid, task)
    part = dict(task_metadata=task.metadata, hf_split="test", hf_subset="default", encode_kwargs={})
    found = [hybrid.search(q, top_k=5, num_proc=None, **part) for q in (queries, joined)]
    assert found[0] == found[1]


def test_a_hybrid_is_filed_under_its_own_name(hybrid):
    meta, of = hybrid.mteb_model_meta, hybrid.encoder.mteb_model_meta
    assert meta.name == f"revela/hybrid-bm25-{of.name.split('/')[1]}"
    assert meta.model_type == ["hybrid"] and of.model_type == ["dense"]
    assert meta.revision == f"{__version__}-{of.revision}" and meta.adapted_from == of.name


def test_what_gives_no_vectors_is_refused():
    with pytest.raises(RevelaError, match="BM25Search is not a dense encoder of mteb: give one"):
        MtebHybrid(mteb.get_model("mteb/baseline-bm25s"))


def test_the_patch_of_mteb_registers_a_hybrid(hybrid, monkeypatch):
    patch = PATCH.read_text()
    file = patch.partition("+++ b/mteb/")[2]
    lines = [line[1:] for line in file.splitlines() if line.startswith("+")]
    module = {"__package__": "mteb.models.model_implementations"}
    exec("\n".join(lines), module)
    meta = module["revela_hybrid_minilm"]
    encoder = hybrid.encoder
    monkeypatch.setattr(mteb, "get_model", lambda name: encoder)
    loaded = meta.loader(meta.name, revision=meta.revision)
    assert loaded.encoder is encoder and meta.model_type == ["hybrid"]
    assert set(meta.extra_requirements_groups) <= set(re.findall(r"^\+(\w+) = ", patch, re.M))
