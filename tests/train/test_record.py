"""A run is resumed with what it was begun with, or refused in one sentence."""

from __future__ import annotations

import json

import pytest

from conftest import make_rows
from revela.config import Recipe
from revela.data.shards import save_groups
from revela.data.store import stored
from revela.errors import RevelaError
from revela.train.record import RUN_FILE, checkpoint_to_resume, settings_of, write_record
from revela.types import Chunk, Document


@pytest.fixture
def begun(tmp_path):
    """A run that got as far as its first checkpoint."""
    out = tmp_path / "out"
    (out / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    write_record(settings_of(Recipe(matryoshka=(8,))), {"group_folder": "groups-1", "bm25": {}}, out)
    return out


def test_the_same_goes_on_whatever_its_limits(begun):
    for recipe in (Recipe(matryoshka=(8,)), Recipe(matryoshka=(8,), max_minutes=1.0, threads=3)):
        assert checkpoint_to_resume(settings_of(recipe), "groups-1", begun).name == "checkpoint-5"


@pytest.mark.parametrize(
    ("recipe", "groups", "message"),
    [
        (Recipe(matryoshka=(8,), tau=0.5, seed=1), "groups-1", r"other settings \(seed, tau\)"),
        (Recipe(), "groups-1", r"other settings \(matryoshka\)"),
        (Recipe(matryoshka=(8,)), "groups-2", "was begun on other groups: resume with the folder of groups as it was"),
        (Recipe(matryoshka=(8,)), "", "was begun on other groups"),
    ],
)
def test_something_else_is_refused(begun, recipe, groups, message):
    with pytest.raises(RevelaError, match=message):
        checkpoint_to_resume(settings_of(recipe), groups, begun)


def test_a_record_of_a_time_without_groups_is_one_of_text(begun):
    written = json.loads((begun / RUN_FILE).read_text())
    (begun / RUN_FILE).write_text(json.dumps({k: v for k, v in written.items() if k != "about"}))
    assert checkpoint_to_resume(settings_of(Recipe(matryoshka=(8,))), "", begun)


def test_what_a_run_began_with_stays(begun):
    write_record(settings_of(Recipe(matryoshka=(8,), threads=3)), {"group_folder": "groups-1", "bm25": {"title": 0.5}}, begun)
    written = json.loads((begun / RUN_FILE).read_text())
    assert written["threads"] == 3 and written["about"] == {"group_folder": "groups-1", "bm25": {}}


def test_a_record_is_whole_or_not_there(begun, monkeypatch):
    before = (begun / RUN_FILE).read_text()
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_record({}, {}, begun)
    assert (begun / RUN_FILE).read_text() == before and not [p for p in begun.iterdir() if p.name.startswith(".")]


def test_groups_of_other_text_have_another_fingerprint(tmp_path):
    """Also where every file is as long as it was."""

    def fingerprint(name, texts):
        documents, rows = stored(Document, [Document("d", "t")]), stored(Chunk, (Chunk(0, text) for text in texts))
        groups = [list(range(i, i + 4)) for i in range(0, len(texts), 4)]
        return save_groups(tmp_path / name, rows, groups, documents, size=4, sample=[0], held_out=[], settings={"seed": 0}).fingerprint

    texts = [row["text"] for row in make_rows(8)]
    assert fingerprint("a", texts) == fingerprint("b", texts) != fingerprint("c", [texts[0].swapcase(), *texts[1:]])
