"""mteb gives our scores on the same folder, keeps what is finished, and every way to fail is one
sentence.
"""

from __future__ import annotations

import json
import runpy
import sys

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers

from conftest import make_rows
from revela.errors import RevelaError
from revela.evaluation.beir import load_collection, mean_outcomes
from revela.retriever.build import build_retriever
from revela.retriever.encode import RetrieverEncoder
from revela.retriever.load import load_encoder

pytest.importorskip("mteb")
import mteb

from revela.evaluation.benchmarks import (
    Contender,
    contender,
    evaluate_benchmarks,
    find_tasks,
    register,
    run_tasks,
)


@pytest.fixture
def encoder(tiny_lm_folder):
    model = build_retriever(
        tiny_lm_folder,
        layers=2,
        pooling="mean",
        max_tokens=64,
        lower_case=False,
        query_prompt="ask: ",
        passage_prompt="read: ",
    )
    return RetrieverEncoder(model, bf16=False)


@pytest.fixture
def folder(tmp_path):
    """60 documents in five topics; each query is a sentence of one, whose topic is relevant, itself
    more so.
    """
    return write(tmp_path / "Judged")


def write(folder, grade=2):
    (folder / "qrels").mkdir(parents=True)
    rows = make_rows(60, seed=4)
    for row in rows[:5]:
        row["title"] = ""
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = [{"_id": f"q{i}", "text": rows[i]["text"].split(". ")[1]} for i in range(20)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    judged = [
        f"q{i}\td{j}\t{grade if i == j else 1}\n" for i in range(20) for j in range(i % 5, 60, 5)
    ]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    return folder


def run(folders, encoder, out):
    tasks = [task for found in find_tasks([str(f) for f in folders]).values() for task in found]
    return run_tasks(
        tasks,
        {"m": Contender(encoder, "local/m", "r1")},
        out,
    )


def test_mteb_gives_our_scores(folder, encoder, tmp_path):
    ours = mean_outcomes(load_collection(folder), {"m": encoder})["m"]
    score = run([folder], encoder, tmp_path / "out")["Judged"]["m"]
    assert 0.05 < ours["ndcg@10"] < 0.95 and ours["map"] != ours["ndcg@10"]
    assert score.metrics == pytest.approx(ours, abs=1e-4) and score.main == pytest.approx(
        ours["ndcg@10"], abs=1e-4
    )
    assert score.settings == {
        "query_prompt": "ask: ",
        "passage_prompt": "read: ",
        "max_tokens": 64,
        "arithmetic": "fp32",
    }


def test_a_static_model_is_truncated_as_eval_truncates_it(folder, tmp_path):
    static = save_static(tmp_path / "static")
    names, out = [str(folder)], tmp_path / "out"
    _, scores = evaluate_benchmarks([str(static)], names, out, max_tokens=7)
    _, whole = evaluate_benchmarks([str(static)], names, out)
    short, full = scores["Judged"]["static"], whole["Judged"]["static"]
    assert (short.settings["max_tokens"], full.settings["max_tokens"]) == (7, None)
    assert short.settings["arithmetic"] == "fp32"  # whatever the machine has
    assert short.metrics["ndcg@10"] != full.metrics["ndcg@10"]
    for found, limit in ((short, 7), (full, None)):
        encoder = load_encoder(static, "auto", limit)
        ours = mean_outcomes(load_collection(folder), {"m": encoder})["m"]
        assert found.metrics == pytest.approx(ours, abs=1e-4)
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


def test_mteb_too_lets_no_query_find_itself(folder, encoder, tmp_path):
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    asked = [{"_id": row["_id"], "text": row["text"]} for row in rows[:20]]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    judged = [f"d{i} 0 d{j} 1\n" for i in range(20) for j in range(i % 5, 60, 5) if i != j]
    (folder / "qrels" / "test.tsv").write_text("".join(judged))
    ours = mean_outcomes(load_collection(folder), {"m": encoder})["m"]
    assert run([folder], encoder, tmp_path / "out")["Judged"]["m"].metrics == pytest.approx(
        ours, abs=1e-4
    )


def test_results_lie_in_mtebs_layout_and_are_used_again(
    folder, encoder, tmp_path, monkeypatch, caplog
):
    first = run([folder], encoder, tmp_path / "out")
    place = tmp_path / "out" / "results" / "local__m" / "r1"
    assert (
        json.loads((place / "Judged.json").read_text())["scores"]["test"][0]["main_score"]
        == first["Judged"]["m"].main
    )
    recorded = json.loads((place / "run_settings.jsonl").read_text())
    assert (
        recorded["encode_kwargs"]["passage_prompt"] == "read: "
        and recorded["encode_kwargs"]["max_tokens"] == 64
    )
    caplog.set_level("INFO", "revela")
    with monkeypatch.context() as patched:
        patched.setattr(encoder, "encode_passages", None)  # a second run encodes nothing
        again = run([folder], encoder, tmp_path / "out")
    assert again["Judged"]["m"].metrics == pytest.approx(
        first["Judged"]["m"].metrics, abs=1e-5
    )  # the file has five digits
    assert again["Judged"]["m"].settings == first["Judged"]["m"].settings
    assert "finished before" in caplog.messages[0]
    encoder.max_tokens = 8  # other vectors, so another place
    shorter = run([folder], encoder, tmp_path / "out")
    assert shorter["Judged"]["m"].settings["max_tokens"] == 8 and shorter != first
    assert (place / "experiments" / "max_tokens_8" / "Judged.json").is_file()


def test_a_folder_that_changed_is_scored_again(folder, encoder, tmp_path):
    first = run([folder], encoder, tmp_path / "out")
    again = run([write(tmp_path / "other" / "Judged", grade=5)], encoder, tmp_path / "out")
    assert again["Judged"]["m"].metrics["ndcg@10"] != first["Judged"]["m"].metrics["ndcg@10"]


def test_a_damaged_result_is_one_sentence(folder, encoder, tmp_path):
    run([folder], encoder, tmp_path / "out")
    (tmp_path / "out" / "results" / "local__m" / "r1" / "Judged.json").write_text('{"task_name":')
    with pytest.raises(RevelaError, match=r"Judged\.json is damaged: delete it"):
        run([folder], encoder, tmp_path / "out")


def test_a_broken_model_is_one_sentence_and_finished_tasks_stay(
    folder, encoder, tmp_path, monkeypatch
):
    second, whole = write(tmp_path / "Second"), encoder.encode_queries
    calls: list[int] = []

    def break_later(texts, progress=False):
        calls.append(len(texts))
        if len(calls) > 1:
            next(encoder.model.parameters()).data[:] = np.nan
        return whole(texts)

    monkeypatch.setattr(encoder, "encode_queries", break_later)
    with pytest.raises(RevelaError, match="gives vectors that are not finite for 20 of 20 texts"):
        run([folder, second], encoder, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").rglob("[JS]*.json")] == ["Judged.json"]


def test_no_network_is_one_sentence_and_finished_tasks_stay(folder, encoder, tmp_path):
    tasks = [
        *find_tasks([str(folder)]).values(),
        *find_tasks(["NanoSciFactRetrieval"]).values(),
    ]
    with pytest.raises(
        RevelaError,
        match=r"NanoSciFactRetrieval: its data cannot be loaded .*run again with a network",
    ) as caught:
        run_tasks(
            [task for found in tasks for task in found],
            {"m": Contender(encoder, "local/m", "r1")},
            tmp_path / "out",
        )
    assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "out" / "results" / "local__m" / "r1" / "Judged.json").is_file()


def test_a_task_made_of_tasks_is_their_mean_and_keeps_them(folder, encoder, tmp_path, caplog):
    from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    parts = [find_tasks([str(f)])[str(f)][0] for f in (folder, write(tmp_path / "Second", grade=5))]

    class Both(AbsTaskAggregate):
        metadata = AggregateTaskMetadata(
            name="Both",
            description="two",
            tasks=parts,
            main_score="ndcg_at_10",
            type="Retrieval",
            eval_splits=["test"],
        )

    models, out = {"m": Contender(encoder, "local/m", "r1")}, tmp_path / "out"
    single = run_tasks(parts, models, out)
    caplog.set_level("INFO", "revela")
    both = run_tasks([Both()], models, out)["Both"]["m"].main
    assert both == pytest.approx(
        np.mean([single[name]["m"].main for name in ("Judged", "Second")]), abs=1e-4
    )
    assert [line.split(" (")[0] for line in caplog.messages] == [
        "Judged, m: finished before",
        "Second, m: finished before",
    ]


def test_unknown_names_get_the_nearest():
    with pytest.raises(
        RevelaError,
        match=r"scifat is neither a benchmark nor a task of mteb .*did you mean SciFact",
    ):
        find_tasks(["scifat"])
    with pytest.raises(RevelaError, match="did you mean NanoBEIR"):
        find_tasks(["nanobeir"])
    with pytest.raises(RevelaError, match="lists all tasks"):
        find_tasks(["///"])


def test_private_tasks_are_named_and_left_out(caplog):
    caplog.set_level("INFO", "revela")
    found = find_tasks(["RTEB(eng, beta)", "SciFact"])
    names = [task.metadata.name for task in found["RTEB(eng, beta)"]]
    assert "AppsRetrieval" in names and "Code1Retrieval" not in names and len(found["SciFact"]) == 1
    assert (
        any(line.startswith("Code1Retrieval: private") for line in caplog.messages)
        and len(caplog.messages) == 6
    )
    with pytest.raises(RevelaError, match="every task is private"):
        find_tasks(["Code1Retrieval"])


def test_a_model_is_filed_under_its_own_name(encoder, tmp_path, tiny_lm_folder):
    assert contender("embedded:minilm-l6", tiny_lm_folder, encoder).name == "embedded/minilm-l6"
    assert (
        contender(str(tiny_lm_folder), tiny_lm_folder, encoder).name
        == f"local/{tiny_lm_folder.name}"
    )
    snapshot = tmp_path / "models--owner--model" / "snapshots" / "0123abcd"
    for given in ("owner/model", "owner/model@v2", "model"):
        hub = contender(given, snapshot, encoder)
        assert (hub.name, hub.revision) == ("owner/model", "0123abcd")


def test_mteb_takes_a_folder_that_is_registered(folder, encoder, tmp_path):
    encoder.model.save_pretrained(str(tmp_path / "my-retriever"))
    name = str(tmp_path / "my-retriever")
    meta = register(name, precision="fp32")
    assert (meta.name, meta.embed_dim, meta.use_instructions) == ("local/my-retriever", 32, True)
    model = mteb.get_model(name, device="cpu")
    assert (
        model.settings["query_prompt"] == "ask: " and model.settings["passage_prompt"] == "read: "
    )
    (task,) = find_tasks([str(folder)])[str(folder)]
    cache = mteb.ResultCache(tmp_path / "out")
    (result,) = mteb.evaluate(model, task, cache=cache, show_progress_bar=False).task_results
    ours = mean_outcomes(load_collection(folder), {"m": encoder})["m"]["ndcg@10"]
    assert result.get_score() == pytest.approx(ours, abs=1e-4)
    assert list((tmp_path / "out").rglob("local__my-retriever/*/Judged.json"))


def test_mtebs_command_line_with_our_folders(encoder, tmp_path, monkeypatch):
    encoder.model.save_pretrained(str(tmp_path / "my-retriever"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mteb", "run", "-m", "my-retriever", "-t", "SciFact"])
    taken = []
    monkeypatch.setattr("mteb.cli.main", lambda: taken.append(mteb.get_model(sys.argv[3])))
    runpy.run_module("revela.evaluation.benchmarks", run_name="__main__")
    assert taken[0].mteb_model_meta.name == "local/my-retriever"
