"""The `revela` commands that the benchmarks and the demo run parse, flags included."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from conftest import make_rows, parsed
from research.benchmarks import demo, from_raw
from revela.errors import RevelaError
from revela.training.commands import eval_commands, run_commands
from tests.collection_folder import write_judged

RECIPES = Path(__file__).parents[2] / "research" / "recipes"
TINY = """
[corpus]
held_out = 0.0
chunk_words = 20
[retriever]
model = "{0}"
layers = 2
lora_rank = 4
[fit]
token_weighting = 0.0
whitening = 0.0
lexical = 0.0
[lm]
lm = "{0}"
lm_tokens = 8
[training]
max_steps = 2
max_minutes = 0
keep = "last"
check_every = 0
threads = 1
precision = "fp32"
[method]
method = "revela-gated"
[variants.revela-gated.method]
method = "revela-gated"
gate_heads = 4
[variants.crops.method]
method = "contrastive-crop"
"""


def test_a_row_from_raw_weights_is_kept(
    doing, tiny_lm_folder, corpus_file, monkeypatch, tmp_path, capsys
):
    for name in from_raw.JUDGED:
        write_judged(tmp_path / name, make_rows(40, sentences=30, seed=5))
    (tmp_path / "tiny.toml").write_text(TINY.format(tiny_lm_folder))
    monkeypatch.setattr(from_raw, "PROBED", ["--max-tokens", "128"])
    monkeypatch.setattr(from_raw, "ProcessPoolExecutor", InThisProcess)
    ran = []

    def run(command):
        code, _, said = doing(*map(str, command.words))
        assert not code, said
        ran.append(command.words[0])

    monkeypatch.setattr("revela.training.commands.Command.run", run)
    folders = ["--recipe", "tiny.toml", "--runs", "runs", "--results", "results"]
    monkeypatch.chdir(tmp_path)
    given = ["--text", str(corpus_file), "--data", str(tmp_path), *folders]
    from_raw.main([*given, "--only", "crops"])
    assert ran == ["train", "eval", "eval", "probe"]
    from_raw.main([*given, "--only", "crops"])
    assert len(ran) == 4
    assert "missing: revela-gated, seed 0; revela-gated-and-own-" in capsys.readouterr().out
    (row,) = csv.DictReader((tmp_path / "results" / "tiny.csv").open())
    assert row["row"] == "crops, seed 0" and row["steps"] == "2"
    scores = json.loads((tmp_path / "runs" / "crops-0-scores" / "cosqa.json").read_text())
    found = {name: system["means"]["ndcg@10"] for name, system in scores["cosqa"].items()}
    assert float(row["cosqa"]) == pytest.approx(found["crops-0"], abs=1e-4)
    # Scored on whole texts while it is trained on eight tokens.
    lines = map(json.loads, (tmp_path / "runs" / "crops-0" / "metrics.jsonl").open())
    curve = [line["judged"]["cosqa-500"] for line in lines if line.get("judged")]
    assert curve[-1] == pytest.approx(found["crops-0"], abs=1e-6) and len(curve) == 3
    assert float(row["BM25 scifact"]) == 1.0
    # Rows of another run of the command, of another machine say, stay in the table and the curves.
    table, curves = (tmp_path / "results" / f"tiny{name}.csv" for name in ("", "-curves"))
    before = curves.read_text()
    table.write_text(table.read_text().replace("crops, seed 0", "crops, seed 7 on a GPU"))
    curves.write_text(before.replace("crops, seed 0", "crops, seed 7 on a GPU"))
    from_raw.main([*given, "--show"])
    rows = [row["row"] for row in csv.DictReader(table.open())]
    assert rows == ["crops, seed 0", "crops, seed 7 on a GPU"]
    assert len(curves.read_text().splitlines()) == 2 * len(before.splitlines()) - 1
    assert curves.with_suffix(".png").is_file()
    with pytest.raises(SystemExit, match="2"):
        from_raw.main([*given, "--only", "crop"])
    assert "--only crop: there is no such row; there are revela-gated, c" in capsys.readouterr().err
    for judged in (["cosqa"], ["scifact", "cosqa", "other"]):
        from_raw.main([*given, "--show", "--judged", *judged])
        assert [float(row["scifact"]) > 0 for row in csv.DictReader(table.open())] == [True, True]
    (tmp_path / "tiny.toml").write_text(TINY.format(tiny_lm_folder).replace("= 2\nmax", "= 3\nmax"))
    with pytest.raises(SystemExit):
        from_raw.main([*given, "--only", "crops"])
    assert "crops-0 has other settings (max_steps): give the same" in capsys.readouterr().err


class InThisProcess:
    """In place of a pool of processes."""

    def __init__(self, workers, mp_context): ...

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def submit(self, run, row):
        future = Future()
        try:
            future.set_result(run(row))
        except RevelaError as error:
            future.set_exception(error)
        return future


def test_rows_that_fail_are_named_and_others_run(monkeypatch, capsys):
    monkeypatch.setattr(from_raw, "ProcessPoolExecutor", InThisProcess)
    rows = [from_raw.Row(name, name, [], {}, [], Path(name)) for name in "abc"]

    def run(row):
        if row.name == "b":
            raise RevelaError("no memory")

    ended = []
    with pytest.raises(RevelaError, match="some rows failed: b: run"):
        ended.extend(row.name for row in from_raw.run_rows(rows, run, 1))
    assert capsys.readouterr().out == "b: no memory\n"


@pytest.mark.parametrize(("recipe", "count"), [("from-raw", 10), ("from-fit", 7)])
def test_commands_of_the_rows(tmp_path, recipe, count):
    write_judged(tmp_path / "scifact", make_rows(3))
    plan = from_raw.Plan(RECIPES / f"{recipe}.toml", tmp_path, tmp_path, ["scifact"])
    rows = plan.rows("text.jsonl", tmp_path, [0, 1], {"threads": 1, "max_tokens_read": 4})
    assert (
        len({row.name for row in rows}) == len({r.folder for r in rows}) == len(rows) == 2 * count
    )
    assert all(", max tokens read 4, seed " in row.name for row in rows)
    others = plan.rows("text.jsonl", tmp_path, [0, 1], {"groups_per_step": 4})
    assert {row.folder for row in rows}.isdisjoint(row.folder for row in others)
    plain = plan.rows("text.jsonl", tmp_path, [3], {"threads": 1})
    assert all(row.folder.name == f"{row.variant}-3" for row in plain)
    for row in rows:
        for command in row.commands([tmp_path / "scifact"], [tmp_path / "part"]):
            assert parsed([*map(str, command.words)])[0] == command.words[0]


def test_a_contextual_retriever_reads_a_compressed_collection(tmp_path):
    write_judged(tmp_path / "scifact", make_rows(3))
    file = tmp_path / "scifact" / "corpus.jsonl"
    with gzip.open(f"{file}.gz", "wb") as compressed:
        compressed.write(file.read_bytes())
    for name in ("corpus.jsonl", "corpus.jsonl.gz"):  # the first while both are there
        fit, _ = eval_commands("model", [tmp_path / "scifact"], tmp_path, slots=8)
        assert fit.words[-3] == str(tmp_path / "scifact" / name)
        file.unlink(missing_ok=True)


def test_a_retriever_in_a_context_is_made_again_after_another_training(tmp_path, monkeypatch):
    for name in ("model", "model-in-scifact"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "modules.json").touch()
    os.utime(tmp_path / "model-in-scifact" / "modules.json", (0, 0))
    fit, _ = eval_commands(tmp_path / "model", [tmp_path / "scifact"], tmp_path, slots=8)
    monkeypatch.setattr(sys, "executable", "true")
    run_commands([fit])
    assert not (tmp_path / "model-in-scifact").exists()  # which revela fit makes


def test_steps_of_the_demo(monkeypatch, tmp_path, capsys):
    """With commands that do nothing."""
    out, ran = tmp_path / "demo", []

    def run(*command):
        name, given = parsed([*command])
        ran.append(name)
        if name == "train":
            (out / "trained").mkdir()
            rows = {"step": 0, "judged": {"test": 0.0625}}, {"step": 40, "minutes": 2.0}
            lines = (json.dumps(row) + "\n" for row in rows)
            (out / "trained" / "metrics.jsonl").write_text("".join(lines))
        if name == "eval":
            models = [Path(model).name for model in given["model"]]
            systems = ["BM25", *(model + more for model in models for more in ("", " + BM25"))]
            means = {name: {"ndcg@10": 0.5 + 0.1 * ("fitted" in name)} for name in systems}
            scores = {name: {"means": each} for name, each in means.items()}
            (out / "scores.json").write_text(json.dumps({"test": scores}))
        return 6.0

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "plot_run", lambda folders: None)
    sizes = ["--files", "20", "--held-out-files", "5", "--functions", "10"]
    demo.main(["--out", str(out), *sizes])
    assert (out / "test" / "qrels" / "test.tsv").is_file()
    assert ran == ["train", "fit", "eval", "index", *["search"] * 3]
    said = capsys.readouterr().out
    assert "| SmolLM2-135M, raw | 0.062 |" in said and "| BM25 | 0.500 |" in said
    assert "| SmolLM2-135M, fitted | 0.600 | 0.600 |" in said
    assert "from 0.062 to 0.500 in 2.0 minutes" in said
    assert "less than the label-free fit gives in 6.0 seconds, 0.600" in said
