"""mteb gives our scores on the same folder, keeps what is finished, and every way to fail is one
sentence.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers

from conftest import make_rows, tiny_retriever
from revela.encoders.load import load_encoder
from revela.encoders.torch_encoder import TorchEncoder
from revela.errors import RevelaError
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.metrics import mean_scores
from tests.collection_folder import write_collection

pytest.importorskip("mteb")
import mteb

from revela.evaluation.mteb import MtebEncoder, evaluate_benchmarks, filed_as, find_tasks
from revela.evaluation.mteb import run as run_task
from tests.mteb_folder import folder_task

LOCAL = "results/local__m/r1"
PROMPTS = {"query_prompt": "ask: ", "passage_prompt": "read: "}


@pytest.fixture
def encoder(tiny_lm_folder):
    return TorchEncoder(tiny_retriever(tiny_lm_folder, **PROMPTS))


@pytest.fixture
def folder(tmp_path):
    """60 documents in five topics; each query is a sentence of one, whose topic is relevant, itself
    more so.
    """
    return write(tmp_path / "Judged")


def write(folder, grade=2):
    rows = make_rows(60, seed=4)
    for row in rows[:5]:
        row["title"] = ""
    queries = {f"q{i}": rows[i]["text"].split(". ")[1] for i in range(20)}
    pairs = [(i, j) for i in range(20) for j in range(i % 5, 60, 5)]
    judged = {(f"q{i}", f"d{j}"): grade if i == j else 1 for i, j in pairs}
    return write_collection(folder, rows, queries, judged)


def run(tasks, encoder, out, max_tokens=None):
    """Scores by task; ``tasks`` are folders or tasks of mteb."""
    found = [task if isinstance(task, mteb.AbsTask) else folder_task(task) for task in tasks]
    model = MtebEncoder(encoder, "local/m", "r1", max_tokens)
    return {task.metadata.name: run_task(task, model, out) for task in found}


def ours(folder, encoder):
    means = mean_scores(outcomes(load_collection(folder), {"m": encoder})["m"])
    return pytest.approx({**means, "main": means["ndcg@10"]}, abs=1e-4)


def test_mteb_gives_our_scores(folder, encoder, tmp_path):
    score = run([folder], encoder, tmp_path / "out")["Judged"]
    assert score.means == ours(folder, encoder) and 0.05 < score.means["ndcg@10"] < 0.95
    assert score.means["map"] != score.means["ndcg@10"]
    assert score.settings == PROMPTS | {"max_tokens": 64, "arithmetic": "fp32"}


def test_a_static_model_is_truncated_as_eval_truncates_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(mteb, "get_task", lambda name: folder_task(folder))
    static, out = save_static(tmp_path / "static"), tmp_path / "out"
    found = {}
    for limit in (7, None):
        _, scores = evaluate_benchmarks([str(static)], ["Judged"], out, max_tokens=limit)
        found[limit] = scores["Judged"]["static"]
        assert found[limit].settings["max_tokens"] == limit
        assert found[limit].means == ours(folder, load_encoder(static, "auto", limit))
    assert found[7].settings["arithmetic"] == "fp32"  # whatever the machine has
    assert found[7].means["ndcg@10"] != found[None].means["ndcg@10"]
    assert list(out.rglob("experiments/max_tokens_7/Judged.json"))
    assert not any("Infinity" in file.read_text() for file in out.rglob("*.json*"))


def save_static(folder):
    """A static model whose words are those of the test documents."""
    words = sorted({word for row in make_rows(60, seed=4) for word in row["text"].split()})
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", *words])}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rows = torch.randn(1 + len(words), 16, generator=torch.Generator().manual_seed(0))
    model = SentenceTransformer(modules=[modules.StaticEmbedding(made, rows)], device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


def test_mteb_too_lets_no_query_find_itself(encoder, tmp_path):
    rows = make_rows(60, seed=4)
    queries = {row["_id"]: row["text"] for row in rows[:20]}
    pairs = [(i, j) for i in range(20) for j in range(i % 5, 60, 5) if i != j]
    judged = {(f"d{i}", f"d{j}"): 1 for i, j in pairs}
    folder = write_collection(tmp_path / "Judged", rows, queries, judged)
    assert run([folder], encoder, tmp_path / "out")["Judged"].means == ours(folder, encoder)


def test_results_lie_in_mtebs_layout_and_are_used_again(folder, encoder, tmp_path):
    first = run([folder], encoder, tmp_path / "out")["Judged"]
    place = tmp_path / "out" / LOCAL
    written = json.loads((place / "Judged.json").read_text())
    assert written["scores"]["test"][0]["main_score"] == first.means["main"]
    recorded = json.loads((place / "run_settings.jsonl").read_text())["encode_kwargs"]
    assert recorded["passage_prompt"] == "read: " and recorded["max_tokens"] == 64
    written_at = (place / "Judged.json").stat().st_mtime_ns
    again = run([folder], encoder, tmp_path / "out")["Judged"]
    assert (place / "Judged.json").stat().st_mtime_ns == written_at
    assert again.means == pytest.approx(first.means, abs=1e-5)  # the file has five digits
    assert again.settings == first.settings
    short = TorchEncoder(encoder.model, max_tokens=8)  # other vectors, so another place
    shorter = run([folder], short, tmp_path / "out", 8)["Judged"]
    assert shorter.settings["max_tokens"] == 8 and shorter != first
    assert (place / "experiments" / "max_tokens_8" / "Judged.json").is_file()
    (place / "Judged.json").write_text('{"task_name":')
    with pytest.raises(RevelaError, match=r"Judged: mteb cannot read .* or delete the result"):
        run([folder], encoder, tmp_path / "out")


def test_a_broken_model_is_one_sentence_and_finished_tasks_stay(folder, encoder, tmp_path):
    run([folder], encoder, tmp_path / "out")
    next(encoder.model.parameters()).data[:] = np.nan
    with pytest.raises(RevelaError, match="gives vectors that are not finite for 20 of 20 texts"):
        run([folder, write(tmp_path / "Second")], encoder, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").rglob("[JS]*.json")] == ["Judged.json"]


def test_no_network_is_one_sentence_and_finished_tasks_stay(folder, encoder, tmp_path):
    message = r"NanoSciFactRetrieval: mteb cannot read its data .*run again with a network"
    with pytest.raises(RevelaError, match=message) as caught:
        run([folder, mteb.get_task("NanoSciFactRetrieval")], encoder, tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "out" / LOCAL / "Judged.json").is_file()


def test_a_task_made_of_tasks_is_their_mean(folder, encoder, tmp_path):
    from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    parts = [folder_task(f) for f in (folder, write(tmp_path / "Second", grade=5))]
    about = dict(description="two", main_score="ndcg_at_10", type="Retrieval", eval_splits=["test"])

    class Both(AbsTaskAggregate):
        metadata = AggregateTaskMetadata(name="Both", tasks=parts, **about)

    single = run(parts, encoder, tmp_path / "out")
    both = run([Both()], encoder, tmp_path / "out")["Both"].means["main"]
    mean = np.mean([single[name].means["main"] for name in ("Judged", "Second")])
    assert both == pytest.approx(mean, abs=1e-4)


BAD_NAMES = [
    ("scifat", r"neither a benchmark nor a task of mteb .*Did you mean: 'SciFact"),
    ("///", "lists all tasks"),
    ("Code1Retrieval", "every task is private"),
]


@pytest.mark.parametrize(("name", "message"), BAD_NAMES)
def test_unknown_and_private_names_are_refused(name, message):
    with pytest.raises(RevelaError, match=message):
        find_tasks(name)


def test_private_tasks_are_named_and_left_out(caplog):
    caplog.set_level("INFO", "revela")
    names = [task.metadata.name for task in find_tasks("RTEB(eng, beta)")]
    assert "AppsRetrieval" in names and "Code1Retrieval" not in names
    (line,) = caplog.messages
    assert "Code1Retrieval" in line and line.count(",") == 6 and ": private, only mteb" in line


def test_a_model_is_filed_under_its_own_name(tmp_path, tiny_lm_folder):
    assert filed_as("embedded:minilm-l6", tiny_lm_folder)[0] == "embedded/minilm-l6"
    local = filed_as(str(tiny_lm_folder), tiny_lm_folder)
    assert local[0] == f"local/{tiny_lm_folder.name}"
    snapshot = tmp_path / "models--owner--model" / "snapshots" / "0123abcd"
    for given in ("owner/model", "owner/model@v2", "model"):
        assert filed_as(given, snapshot) == ("owner/model", "0123abcd")
