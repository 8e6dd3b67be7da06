"""A method of one's own: its settings, batches and loss in under 40 lines, by API and by file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from conftest import TINY, logged
from revela import Retriever, train
from revela.errors import RevelaError
from revela.training.recipe import Recipe

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_method.py"


@pytest.fixture
def file(tmp_path):
    """The method of the example, in a file of its own."""
    file, (method, _, _) = tmp_path / "neighbours.py", EXAMPLE.read_text().rpartition("# %% [markd")
    file.write_text(method)
    return file


@pytest.fixture
def neighbours(file):
    return type(Recipe.of(f"{file}:Neighbours").method)


def test_it_trains_through_the_api(neighbours, tiny_lm_folder, corpus_file, tmp_path):
    settings = TINY | dict(model=str(tiny_lm_folder), max_steps=12, learning_rate=5e-3)
    result = train(corpus_file, tmp_path / "out", neighbours(tau=0.2), **settings)
    assert Retriever(result.path).encode_queries(["ocean1"]).shape[0] == 1
    losses = [row["loss"] for row in logged(tmp_path / "out")]
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    settings = json.loads((tmp_path / "out" / "run.json").read_text())
    assert settings["method"] == "neighbours" and settings["tau"] == 0.2
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{tiny_lm_folder.name} learned which chunks are of one document." in card


def test_its_bounds_hold_and_options_that_it_lacks_are_refused(neighbours, tmp_path):
    with pytest.raises(ValidationError, match="greater than 0"):
        neighbours(tau=0)
    with pytest.raises(RevelaError, match="--tau 0: it should be greater than 0"):
        train("docs", tmp_path / "out", neighbours(), tau=0)
    with pytest.raises(RevelaError, match="--gate has no effect on --method neighbours"):
        train("docs", tmp_path / "out", neighbours(), gate=0.3)


def test_a_file_and_its_class_are_a_method(file):
    recipe = Recipe.of(f"{file}:Neighbours", tau=0.3, group_size=4)
    assert (recipe.method.name, recipe.method.tau) == ("neighbours", 0.3)
    assert recipe.replace(seed=1).method == recipe.method


BASE = "from revela.training.methods.base import Method\n"


BAD_FILES = [
    (None, "own.py does not exist"),
    ("x = 1", "own.py has no class 'Own' that is a subclass of"),
    ("Own = 3", "own.py has no class 'Own' that is a subclass of"),
    ("import nothing_like_it", "own.py raises ModuleNotFoundError: No module named"),
    (f"{BASE}class Own(Method): pass", "class Own lacks name and build"),
    (
        f"{BASE}class Own(Method):\n  name = 'own'; reads = 'windows'\n  def build(self): ...",
        r"class Own lacks window_words\(\)",
    ),
    (
        f"{BASE}from revela.training.settings import checked\n@checked\nclass Own(Method):\n"
        "  name = 'own'\n  tau: float\n  def build(self): ...",
        "Own.tau has no default: give it one",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES)
def test_a_file_without_a_method_is_refused_in_a_sentence(tmp_path, text, sentence):
    file = tmp_path / "own.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RevelaError, match=sentence) as error:
        Recipe.of(f"{file}:Own")
    with pytest.raises(RevelaError, match=r"own\.py lacks the name of the class: give"):
        Recipe.of(str(file))
    assert "\n" not in str(error.value)


UNKNOWN = [
    ("gated", "revela-gated"),
    ("paper", "revela-paper"),
    ("replugg", "replug"),
    ("cde-papr", "cde-paper"),
    ("REVELA", "revela"),
    ("crop", "contrastive-crop"),
]


@pytest.mark.parametrize(("name", "near"), UNKNOWN)
def test_an_unknown_method_is_refused_with_the_nearest_names(name, near):
    with pytest.raises(RevelaError, match=f"--method {name} is unknown: did you mean .*{near}"):
        Recipe.of(name)
