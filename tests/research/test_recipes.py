"""research/recipes: variants are recipes, and the commands at their heads parse."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from conftest import make_rows, parsed
from revela.errors import RevelaError
from revela.training.compare import rows_of
from revela.training.recipe import Recipe, read_recipe
from revela.training.training_set import TrainingSet
from revela.types import Document
from test_cli import TINY_FLAGS
from tests.collection_folder import write_judged, write_lines

RECIPES = Path(__file__).parents[2] / "research" / "recipes"
# from-raw.toml and from-fit.toml are for research.benchmarks.from_raw (test_commands.py).
FILES = sorted(file for file in RECIPES.glob("*.toml") if not file.stem.startswith("from-"))


def recipes_of(methods: list[str], file: Path) -> dict[str, Recipe]:
    rows = rows_of(methods, *read_recipe(file), {})
    return {name: Recipe.of(**settings) for name, settings in rows.items()}


def commands(file: Path) -> list[list[str]]:
    return [
        shlex.split(line)[1:] for line in re.findall(r"^#   (revela .*)$", file.read_text(), re.M)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_commands_at_the_head_parse(file):
    verbs = []
    for verb, given in map(parsed, commands(file)):
        verbs.append(verb)
        assert verb != "compare" or given["recipe_file"] == Path("research/recipes") / file.name
    assert {*verbs} - {"groups"} == {"compare"}


@pytest.mark.parametrize("stage", ["spans", "crops"])
def test_the_stages_of_dwell_parse(stage):
    file = RECIPES / "dwell" / f"{stage}.toml"
    ((_, given),) = map(parsed, commands(file))
    (recipe,) = recipes_of([], file).values()
    assert given["recipe_file"] == Path("research/recipes/dwell") / file.name
    assert recipe.method.name == {"crops": "contrastive-crop", "spans": "dwell-spans"}[stage]
    assert recipe.retriever.max_tokens == 2048 and recipe.training.max_steps


def test_the_phases_of_cde_parse():
    file = RECIPES / "papers" / "cde-2-phases.toml"
    (_, first), (_, second) = map(parsed, commands(file))
    recipes = recipes_of(second["methods"], file)
    assert [recipe.negatives for recipe in recipes.values()] == [0, 1, 2, 4, 8]
    assert first["out"] == Path("runs/phase-1") and second["methods"] == ["cde-paper-small"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("method", ["revela-gated", "revela-paper"])
def test_variants_differ_in_what_the_file_says_and_nothing_else(file, method):
    recipes = recipes_of([method], file)
    settings, variants = read_recipe(file)
    base = Recipe.of(method, keep="last").to_dict() | settings
    assert {name: recipe.to_dict() for name, recipe in recipes.items()} == {
        name: base | changes for name, changes in (variants or {method: {}}).items()
    }


def test_variants_of_the_reading_are_trained_on_what_they_read(
    succeeds, models, tmp_path, in_process
):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    (row,), others = make_rows(1), make_rows(30, seed=1)
    near = [{**row, "_id": f"n{i}", "text": f"{row['text']} And number {i}."} for i in range(20)]
    write_lines(corpus, [*near, *others])
    judged = write_judged(tmp_path / "judged", [row])
    variants = "[variants.all.corpus]\nnear_duplicates = 0\n[variants.apart.corpus]\n"
    (tmp_path / "r.toml").write_text(variants + "near_duplicates = 0.8\n")
    flags = ("--on", judged, "--recipe", tmp_path / "r.toml", "--out", out)
    flags += ("--points 1 --methods revela-gated", models)
    small = (*TINY_FLAGS[:-2], "--group-size", 4, "--groups-per-step", 1, "--warmup-steps", 0)
    small = (*small, "--held-out", 0.4)
    for _ in range(2):  # the second time, both runs are kept
        succeeds("compare", corpus, *flags, *small)
    about = {
        name: json.loads((out / f"{name}-0" / "run.json").read_text())["about"]
        for name in ("all", "apart")
    }
    assert {name: run["documents"] for name, run in about.items()} == {"all": 30, "apart": 19}


def test_a_training_set_is_not_that_of_another_reading():
    data = TrainingSet(Recipe.of(), [Document("d", "text")])
    assert data.replace(Recipe.of(seed=1)).documents is data.documents
    with pytest.raises(RevelaError, match=r"other settings of \[corpus\]"):
        data.replace(Recipe.of(near_duplicates=0))


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("[variants.a.method]\ntau = 1.0\n[variants.b.method]\ntau = 2.0\n", ("--tau", "3"),
         "a and b are the same run: leave one out"),
        ('[variants."a/b".method]\ntau = 1.0\n', (),
         "name variant 'a/b' by letters"),
    ],
)  # fmt: skip
def test_bad_variants_are_refused(refused, corpus_file, tmp_path, recipe, flags, message):
    (tmp_path / "r.toml").write_text(recipe)
    folders = ("--on", tmp_path, "--out", tmp_path / "o", "--recipe", tmp_path / "r.toml")
    arguments = ("compare", corpus_file, *folders, "--methods", "revela-gated", *flags)
    assert message in refused(*arguments)
    assert not (tmp_path / "o").exists()


def test_only_compare_takes_variants(refused, tmp_path):
    flags = ("--out", tmp_path / "o", "--recipe", RECIPES / "random-groups.toml")
    err = refused("train", tmp_path, *flags)
    said = "random-groups.toml has variants: run it with revela compare"
    assert said in err


def test_several_methods_and_variants_are_told_apart():
    both = ["revela-gated", "revela-paper"]
    assert list(recipes_of(both, RECIPES / "random-groups.toml")) == [
        "revela-gated-document", "revela-gated-random",
        "revela-paper-document", "revela-paper-random",
    ]  # fmt: skip
    with pytest.raises(RevelaError, match="does not exist"):
        recipes_of(["revela-gated"], RECIPES / "none.toml")
