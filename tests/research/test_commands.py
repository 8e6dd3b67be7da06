"""The `revela` commands that the benchmarks and the demo run parse, flags included."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from conftest import make_rows, parsed
from research.benchmarks import demo, from_raw
from tests.collection_folder import write_judged

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
    monkeypatch.setattr(from_raw, "RECIPE", tmp_path / "tiny.toml")
    monkeypatch.setattr(from_raw, "OUT", tmp_path / "out")
    monkeypatch.setattr(from_raw, "RESULTS", tmp_path / "from-raw.csv")
    monkeypatch.setattr(from_raw, "CURVES", tmp_path / "curves.png")
    monkeypatch.setattr(from_raw, "PROBED", ["--max-tokens", "128"])
    ran = []

    def run(command):
        code, _, said = doing(*map(str, command.words))
        assert not code, said
        ran.append(command.words[0])

    monkeypatch.setattr("revela.training.commands.Command.run", run)
    given = ["--text", str(corpus_file), "--data", str(tmp_path), "--only", "crops"]
    from_raw.main(given)
    assert ran == ["train", "eval", "eval", "probe"]
    from_raw.main(given)
    assert len(ran) == 4
    said = capsys.readouterr().out
    assert "missing: revela-gated, seed 0; revela-gated-and-own-text, seed 0" in said
    (row,) = csv.DictReader((tmp_path / "from-raw.csv").open())
    assert row["row"] == "crops, seed 0" and row["steps"] == "2"
    scores = json.loads(
        (tmp_path / "out" / "from-raw" / "crops-0-scores" / "cosqa.json").read_text()
    )
    found = {name: system["means"]["ndcg@10"] for name, system in scores["cosqa"].items()}
    assert float(row["cosqa"]) == pytest.approx(found["crops-0"], abs=1e-4)
    # Scored on whole texts while it is trained on eight tokens.
    lines = map(json.loads, (tmp_path / "out" / "from-raw" / "crops-0" / "metrics.jsonl").open())
    curve = [line["judged"]["cosqa-500"] for line in lines if line.get("judged")]
    assert curve[-1] == pytest.approx(found["crops-0"], abs=1e-6) and len(curve) == 3
    assert float(row["BM25 scifact"]) == 1.0 and (tmp_path / "curves.png").is_file()


def test_commands_of_the_rows_from_raw_weights(tmp_path):
    write_judged(tmp_path / "scifact", make_rows(3))
    rows = from_raw.plan("text.jsonl", tmp_path, [0, 1], {"threads": 1})
    assert len({row.name for row in rows}) == len(rows) == 2 * 10
    for row in rows:
        for command in row.commands([tmp_path / "scifact"], [tmp_path / "part"]):
            assert parsed([*map(str, command.words)])[0] == command.words[0]


def test_steps_of_the_demo(monkeypatch, tmp_path, capsys):
    """With commands that do nothing."""
    out, ran = tmp_path / "demo", []

    def run(*command):
        name, given = parsed([*command])
        ran.append(name)
        if name == "train":
            (out / "trained").mkdir()
            row = {"step": 0, "minutes": 0.0, "judged": {"test": 0.0625}}
            (out / "trained" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
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
