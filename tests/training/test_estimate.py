"""revela train --dry-run: as a real run where the corpus is read whole, near it where a part is."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from conftest import TINY, logged, make_rows, write_texts
from revela.training import estimate
from revela.training.on_files import train_on_files
from revela.training.recipe import Recipe

NAMED = {name: f"{name}?" for name in ("documents", "chunks", "groups")}  # 1 document
NAMED |= {"tokens": "per step for the ret", "memory": "GiB", "seconds": "s per step"}


def say(folder, corpus, recipe, sample=2**20):
    """Numbers of an estimate by name, and the whole of it; nothing is left in the folder."""
    before = {*folder.iterdir()}
    text = " ".join(estimate.estimate([corpus], folder / "out", recipe, sample)).replace(",", "")
    found = {name: re.search(rf"([\d.e+-]+) {after}", text) for name, after in NAMED.items()}
    assert {*folder.iterdir()} == before
    return {name: float(number[1]) for name, number in found.items() if number}, text


@pytest.fixture
def recipe(tiny_lm_folder):
    return Recipe.of(**TINY, model=str(tiny_lm_folder), lm=str(tiny_lm_folder))


@pytest.mark.parametrize("method", ["revela-gated", "contrastive-crop"])
def test_it_says_what_a_run_reads(recipe, corpus_file, tmp_path, monkeypatch, method):
    monkeypatch.setattr(estimate, "COUNTED", TINY["max_steps"])
    recipe, run = recipe.merge({"method": method})[0], tmp_path / "run"
    train_on_files([corpus_file], run, recipe)
    about = json.loads((run / "run.json").read_text())["about"]
    read = round(logged(run)[-1]["tokens_read"] / TINY["max_steps"])
    said, _ = say(tmp_path, corpus_file, recipe)
    assert said.pop("memory") > 0 and said.pop("seconds") > 0
    counts = {name: about[name] for name in ("documents", "chunks", "groups")}
    assert said == counts | {"tokens": read}


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_larger_corpus_it_reads_a_part(recipe, tmp_path, monkeypatch, packed):
    rows, corpus = make_rows(300), tmp_path / "corpus.jsonl.gz"
    if packed:
        corpus.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        monkeypatch.setattr(estimate, "READ", 60_000)
    else:
        write_texts(corpus, rows)
    (whole, _), (part, text) = (say(tmp_path, corpus, recipe, size) for size in (2**30, 20_000))
    for name in ("documents", "chunks", "groups", "tokens"):
        assert part[name] == pytest.approx(whole[name], rel=0.3)
    assert "% of them" in text


def test_of_one_large_document_it_reads_the_document(recipe, tmp_path):
    (tmp_path / "large.txt").write_text(make_rows(1, sentences=200)[0]["text"])
    size = (tmp_path / "large.txt").stat().st_size
    found, text = say(tmp_path, tmp_path / "large.txt", recipe, size // 2)
    assert found["documents"] == 1 and "made-up" not in text


def test_it_says_what_is_not_read_or_written(recipe, corpus_file, tmp_path):
    """The tiny LM would write no question, and the hub cannot be reached."""
    _, text = say(tmp_path, corpus_file, recipe.merge({"method": "dream"})[0])
    assert re.search(r"up to \d+ questions to write", text)
    assert "hub datasets are not read" in say(tmp_path, Path("hub:a/b"), recipe)[1]


def test_refusals_come_before_text_is_read(refused, models, tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "_sample", lambda *_: pytest.fail("text was read"))
    command = "train", tmp_path, f"--out {tmp_path / 'out'} --dry-run", models
    assert "a run needs a limit" in refused(*command, "--max-minutes 0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "leave out torchrun" in refused(*command)
