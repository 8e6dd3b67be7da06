"""research/reproduce.py: its commands are those of revela, and a table is written at tiny size."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from conftest import make_rows, parsed
from research import reproduce
from revela.cli.recipe_flags import recipes_of
from revela.evaluation.results import write_json
from revela.training.recipe import Recipe
from revela.training.record import Comparison, CurvePoint
from tests.collection_folder import write_judged


@pytest.mark.parametrize("name", reproduce.TABLES)
def test_commands_are_those_of_revela(name, capsys):
    table = reproduce.TABLES[name]
    flags = ["--table", name, "--sizes", *table.sizes, "--dry-run"]
    reproduce.main([*flags, "--max-steps", "7", "--seeds", "0", "1"])
    said = [shlex.split(line)[1:] for line in capsys.readouterr().out.splitlines()]
    expected = ["groups"] * table.grouped + ["compare"] * len(table.sizes)
    assert [words[0] for words in said] == expected
    for verb, given in map(parsed, said):
        if verb == "groups":
            assert [str(source) for source in given["corpus"]] == [table.corpus]
            continue
        recipes = recipes_of(given["methods"], given["recipe_file"], given["given"])
        known = [row for sizes in table.paper.values() for row in sizes.values()]
        assert {*chain(*known)} <= {"BM25", *recipes} and given["seeds"] == [0, 1]
        for recipe in recipes.values():
            assert recipe.training.max_steps == 7 and not recipe.training.max_minutes
            assert recipe.retriever.model in reproduce.MODELS.values()
            assert recipe.corpus.join_titles != table.grouped


def test_numbers_of_the_papers_are_of_sizes_and_rows_that_run():
    for table in reproduce.TABLES.values():
        for numbers in table.paper.values():
            assert numbers.keys() <= {*table.sizes} <= reproduce.MODELS.keys()
            values = [v for size in numbers.values() for row in size.values() for v in row.values()]
            assert values and all(0 < value < 1 for value in values)


def test_main_tables_are_trained_as_published():
    recipes = {
        name: recipes_of([table.method], reproduce.RECIPES / table.recipe, None)
        for name, table in reproduce.TABLES.items()
    }
    revela, replug = (recipes["revela-1"][name] for name in ("revela", "replug"))
    assert revela.method == Recipe.of("revela-paper").method and revela.method.mix == "sum"
    assert (replug.method.name, replug.method.tau) == ("replug", 1e-3)
    assert replug.retriever == revela.retriever and replug.groups == revela.groups
    assert (revela.training.max_steps, replug.training.max_steps) == (10_000, 4_500)
    assert (revela.optimizer.learning_rate, replug.optimizer.learning_rate) == (1e-4, 5e-4)
    assert {recipe.method.query_side for recipe in recipes["revela-2"].values()} == {"whole"}
    dream, infonce = recipes["dream-1"].values()
    assert dream == Recipe.of("dream-paper")
    assert replace(infonce, method=dream.method, lm=dream.lm) == dream
    cells = {name: (r.groups.groups, r.context.context) for name, r in recipes["cde-1"].items()}
    assert cells == {
        "plain": ("random", 0), "batches": ("cluster", 0),
        "context": ("random", 64), "both": ("cluster", 64),
    }  # fmt: skip


def test_a_table_has_means_over_seeds_and_empty_cells_for_what_is_not_known():
    def curve(start, end):
        points = ({"SciFact": s, "mine": s + 0.2} for s in (start, end))
        return [CurvePoint(0.0, 0, judged) for judged in points]

    curves = {"revela, seed 0": curve(0.0, 0.1), "revela, seed 1": curve(0.2, 0.3)}
    found = Comparison({"SciFact": 0.6, "mine": 0.4}, curves)
    text = reproduce.markdown(reproduce.TABLES["revela-1"], "revela-1", {"135m": found})
    assert 'over 13 tasks of BEIR, that of "here" over 2 collections' in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows == [
        "| size | system | source | SciFact | mine | mean |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 135m | BM25 | here | 0.600 | 0.400 | 0.500 |",
        "| 135m | BM25 | arXiv v1 | 0.687 |  | 0.418 |",
        "| 135m | start | here | 0.100 | 0.300 | 0.200 |",
        "| 135m | revela | here | 0.200 | 0.400 | 0.300 |",
        "| 135m | revela | arXiv v1 | 0.579 |  | 0.336 |",
        "| 135m | revela | ICLR, read off a figure |  |  | 0.333 |",
    ]


def test_without_collections_nothing_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["--table", "cde-1", "--data", str(tmp_path)])
    assert f"no collection in {tmp_path}: give --data" in capsys.readouterr().err


def test_a_table_is_written_of_what_its_commands_leave(tmp_path, monkeypatch, capsys):
    write_judged(tmp_path / "data" / "scifact", make_rows(20, seed=5))
    curve = [CurvePoint(0.0, 0, {"scifact": score}) for score in (0.1, 0.2)]

    def run(command, check):
        assert command[1:3] == ["-m", "revela"] and check
        if command[3] != "compare":
            return
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir(parents=True)
        write_json(Comparison({"scifact": 0.6}, {"replug, seed 0": curve}), folder / "compare.json")

    monkeypatch.setattr("subprocess.run", run)
    out = tmp_path / "out"
    reproduce.main(f"--table revela-1 --data {tmp_path / 'data'} --out {out}".split())
    text = (out / "revela-1.md").read_text()
    assert "| 135m | replug | here | 0.200 | 0.200 |" in text and text in capsys.readouterr().out
    assert "| 135m | replug | arXiv v1 |  | 0.284 |" in text
