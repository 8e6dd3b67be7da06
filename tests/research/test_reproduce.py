"""research/reproduce: commands that revela accepts, published cells, reports, whole tiny tables."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import revela
from conftest import make_rows, parsed
from research.reproduce import published, report
from research.reproduce.__main__ import main
from research.reproduce.data import write_task
from research.reproduce.figures import FIGURES
from research.reproduce.papers import TABLES, find_table
from research.reproduce.run import Options, check, corpus_of, settings_of
from revela.errors import RevelaError
from revela.evaluation.collection import load_collection
from revela.training import check_settings, commands, distributed
from revela.training.methods.dream import PUBLISHED_HEADS
from revela.training.recipe import Recipe
from tests.collection_folder import write_judged
from tests.mteb_folder import folder_task


def recipes_of(name: str, size: str = "") -> dict[str, Recipe]:
    table, options = find_table(name), Options(Path("out"), pairs=Path("PAIRS"), processes=1)
    size = size or (table.sizes or ("",))[0]
    trained = [row for row in table.rows if row.settings]
    return {row.label: Recipe.of(**settings_of(table, row, size, 0, options)) for row in trained}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_judged(tmp_path_factory.mktemp("data") / "pairs", make_rows(6), "train")


VERBS = {"dwell-2": set(), "cde-6": {"groups"}, "dream-table3-heads": {"heads"}}
PARSED = set[str]()  # the verb and flags of one command of each form


@pytest.mark.parametrize("small", ["", "--small --corpus TEXT"], ids=["published", "small"])
@pytest.mark.parametrize("name", [*TABLES, *FIGURES])
def test_a_dry_run_prints_commands_that_can_start(name, small, pairs, monkeypatch, capsys):
    made, flags_of = list[Recipe](), commands.flags_of
    monkeypatch.setattr(commands, "flags_of", lambda s: made.append(Recipe.of(**s)) or flags_of(s))
    monkeypatch.setattr(check_settings, "_check_models", lambda *_, **__: None)  # of the hub
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    kind, more = "table" if name in TABLES else "figure", "--max-tokens 77" * ("table1-" in name)
    main(f"--{kind} {name} --dry-run --processes 4 --pairs {pairs} {small} {more}".split())
    said, verbs = capsys.readouterr().out, list[str]()
    for torchrun, command in re.findall("^(torchrun .* 4 -m )?revela (.*)", said, re.M):
        verbs.append(command.split()[0])
        assert (verbs[-1] == "train") == bool(torchrun)
        if (form := str(re.findall(r"^\w+|--\S+", command))) not in PARSED:
            parsed(shlex.split(command))
            PARSED.add(form)
    for recipe in made:
        check_settings.check_recipe(recipe, Path("new"), resume=True)
        assert not more or recipe.retriever.max_tokens == 77
    reads = "probe" if re.match("dwell-[1345]$", name) else "eval"
    assert {*verbs} >= VERBS.get(name, {"train", reads})
    assert (f"--on {pairs} " in said) == ("dwell-table" in name)
    assert not re.search("revela groups [^ ]*/groups/", said)  # stored once
    assert kind == "table" or said.endswith(f"Expected: {FIGURES[name].expected}.\n")
    if kind == "table" and not small:
        rows = TABLES[name].rows
        assert verbs.count("train") >= len({str(row.settings) for row in rows if row.settings})


@pytest.mark.parametrize("table", [t for t in TABLES.values() if not t.heads], ids=lambda t: t.name)
def test_every_row_has_published_cells(table):
    means, known = {*table.means}, {*published.columns_of(table.name)}
    for row in table.rows:
        assert not row.why_not or not (row.settings or row.model)
        for size in row.sizes or table.sizes:
            cell = partial(published.cell, table.name, row.published or row.label, size)
            found = {c for c in {*table.columns} | means if cell(c, table.metrics[0])}
            assert found and means & found == means & known


@pytest.mark.parametrize("name", ["v1-10", "v1-11", "v2-10", "v2-11"])
def test_batches_read_equal_tokens(name):
    for label, recipe in recipes_of(f"revela-{name}").items():
        size, most = recipe.groups.group_size, 10_000 if name in ("v1-10", "v2-11") else 11_000
        assert label == f"Revela batch={size}"
        assert size * recipe.training.max_steps == pytest.approx(16 * most, 1e-4)


def test_main_tables_are_trained_as_published():
    rows, dream = recipes_of("revela-v1-1"), recipes_of("dream-4", "1B")
    assert rows["Revela"] == Recipe.of("revela-paper")
    assert rows["REPLUG"] == Recipe.of("replug-paper")
    assert recipes_of("revela-v2-1")["Revela corpus=code"] == Recipe.of("revela-paper-code")
    assert recipes_of("revela-v2-6", "3B")["Revela corpus=wikipedia"].training.max_steps == 20_000
    infonce = replace(dream["InfoNCE"], method=dream["DREAM"].method, lm=dream["DREAM"].lm)
    named = Recipe.of("dream-paper", model="meta-llama/Llama-3.2-1B", join_titles=True)
    assert dream["DREAM"] == infonce == named and {
        recipe.training.max_steps for recipe in dream.values()
    } == {1500}
    cells = [(r.groups.groups, r.context.context) for r in recipes_of("cde-1").values()]
    assert cells == [("random", 0), ("cluster", 0), ("random", 64), ("cluster", 64)]
    assert [r.training.max_epochs for r in recipes_of("dwell-5").values()] == [2, 2, 2, 8]
    assert published.published_heads("dream-table3-heads") == PUBLISHED_HEADS


def test_a_report_has_numbers_here_published_and_their_difference():
    def made_up(*values: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"scifact": {f"q{i}": {"ndcg@10": value} for i, value in enumerate(values)}}

    table = find_table("revela-v1-1")
    results = {"BM25": {"": {"scifact": made_up(0.6, 0.7, 0.8)}}}
    results["Revela"] = {"135M": {"scifact": made_up(0.5, 0.6, 0.7), "nfcorpus": made_up(0.2)}}
    results["Revela+BM25 rrf"] = {"1B": {"trec-covid": made_up(0.5, 0.5)}}
    lines, pairs = list(report.lines_of(table, results)), list(report.pairs_of(table, results))
    half = f"{100 * 4.30265 * 0.1 / 3**0.5:.4f}"  # by Student's t of two degrees of freedom
    assert {
        f"135M,Revela,scifact,ndcg@10,60,{half},57.9,2.1,",
        "135M,Revela,mean (3 of 13),ndcg@10,,,47.2,,",  # trec-covid did not run
        "1B,Revela+BM25 rrf,trec-covid,ndcg@10,50,0,26.7,,not to be reproduced",
    } <= {*report.as_csv(lines).splitlines()}
    text = report.markdown(table, lines, pairs, small=False)
    assert "| 135M | BM25 - Revela | scifact | +10.0 ± 0.0 | 0.2500 |" in text
    assert "26.7 (not to be reproduced)" in text and "- RepLLaMA: not run: the 1B" in text


@pytest.mark.parametrize("name", ["dwell-5", "cde-7"])
def test_stages_are_checked_before_the_first_has_run(name, pairs, tmp_path):
    corpus = (str(pairs / "corpus.jsonl"),)
    check(find_table(name), Options(tmp_path, small=True, corpus=corpus, pairs=pairs))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("--figure revela-v1-7", ("--only scifact", "--only fiqa")),
        ("--table dream-table3-heads", ("--lm A", "--lm B")),
    ],
)
def test_what_is_stored_is_named_by_what_it_is_made_of(words, changes, capsys):
    made = list[set[str]]()
    for change in changes:
        main(f"{words} {change} --dry-run".split())
        lines = re.findall(
            "^revela (?:groups|heads) .* --out ([^ ]+)", capsys.readouterr().out, re.M
        )
        made.append({*lines})
    assert all(made) and made[0] != made[1]


def test_compressed_documents_of_judged_pairs_are_read(tmp_path):
    (tmp_path / "corpus.jsonl.gz").touch()
    row, options = find_table("dwell-5").rows[0], Options(tmp_path, pairs=tmp_path)
    assert corpus_of(row, options).sources == (f"{tmp_path}/corpus.jsonl.gz",)


REFUSED = {
    "revela-v1-4": "is unknown",
    "revela-v1-1 --only msmarco": "has no 'msmarco'",
    "cde-7": "runs with --small only: the paper trains",
    "dwell-5": "is trained on judged pairs: give their folder as --pairs",
    "revela-v1-1 --small": "give --corpus TEXT",
    "dream-2 --small --corpus t --data none --rows Qwen3-Embedding-8B": "no collection in none",
    "revela-v1-1 --query-heads 4": "--query-heads has no effect",
    "cde-table2-mteb --only scifact --dry-run": "scifact needs another data set as context",
    "--figure cde-6 --corpus GROUPS --dry-run": "GROUPS holds groups",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_run_is_said_in_one_sentence(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "GROUPS").mkdir()
    (tmp_path / "GROUPS" / "groups.json").touch()
    with pytest.raises(SystemExit):
        main(shlex.split(flags if flags.startswith("--") else f"--table {flags}"))
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert REFUSED[flags] in said


def test_a_task_of_mteb_becomes_a_folder(tmp_path):
    task = folder_task(write_judged(tmp_path / "made", make_rows(12, seed=5)))
    (folder,) = write_task(task, tmp_path / "data" / "made")
    before, after = load_collection(tmp_path / "made"), load_collection(folder)
    assert (after.documents, after.qrels) == (before.documents, before.qrels)


def test_published_means_agree_with_their_cells(tmp_path):
    said = subprocess.check_output([sys.executable, published.PUBLISHED / "check.py"], text=True)
    assert "\nNO: 6 of 275\n" in said and "\nok: 259 of 275\n" in said
    (tmp_path / "t.csv").write_text("row,size,column,metric,value,note\nr,1B,nq,ndcg@10,none,\n")
    with pytest.raises(RevelaError, match="is not a table of published numbers"):
        published.read_published("t", tmp_path)


# Flags with which each row runs in seconds; the models are made up, but for MiniLM in CDE.
TINY = {
    "revela-v1-1": "--rows Revela REPLUG 'Revela+BM25 rrf' --model {lm} --lm {lm} --processes 2",
    "dream-4": "--model {lm} --lm {lm} --groups document --queries authors-words",
    "cde-1": "--model {bert} --context-tokens 16",
    "dwell-5": "--pairs {data}/scifact --group-size 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tiny_tables_run_once(name, tiny_lm_folder, tiny_bert_folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(Path(revela.__file__).parents[1]))
    data, out, table = tmp_path / "data", tmp_path / "out", find_table(name)
    for split in ("test", "train"):
        write_judged(data / "scifact", make_rows(60, sentences=10), split)
    given = TINY[name].format(lm=tiny_lm_folder, bert=tiny_bert_folder, data=data)
    folders = f"--corpus {data}/scifact/corpus.jsonl --data {data} --out {out}"
    command = f"--table {name} {folders} --small --max-steps 4 --threads 1 {given}"
    main(shlex.split(command))
    found = csv.DictReader((out / f"{table.name}-small.csv").open())
    ran = {row["row"] for row in found if row["here"]}
    assert ran >= {row.label for row in table.rows if row.settings}
    assert ("torchrun" in capfd.readouterr().out) == ("--processes" in given)
    main(shlex.split(command))
    assert "revela train" not in capfd.readouterr().out
