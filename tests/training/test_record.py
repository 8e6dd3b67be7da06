"""A run is resumed with what it was begun with, or refused in one sentence."""

from __future__ import annotations

import json
import re

import huggingface_hub
import pytest

from conftest import TINY, make_documents, make_rows
from revela.encoders.model_files import fingerprint
from revela.errors import RevelaError
from revela.text.spool import arrow_list
from revela.training.check_settings import check_recipe
from revela.training.checkpoint import (
    IGNORED_WHEN_COMPARING_FINISHED_RUNS,
    check_same_run,
    resume_run,
    write_record,
)
from revela.training.groups.store import GroupedCorpus, save_groups
from revela.training.methods.registry import PRESETS
from revela.training.recipe import Recipe
from revela.training.record import RUN_FILE, About, Metrics, MetricsRow, RunFile
from revela.training.train import train
from revela.training.training_set import TrainingSet
from revela.types import Chunk, Document


def settings(**changes):
    return Recipe.of(**{"gate_heads": 8, **changes}).to_dict()


@pytest.fixture
def begun(tmp_path):
    """A run that got as far as its first checkpoint."""
    out = tmp_path / "out"
    (checkpoint := out / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    for name in ("trainable.safetensors", "optimizer.safetensors"):
        (checkpoint / name).touch()
    (checkpoint / "clock.json").write_text('{"seconds": 60, "tokens": 1000}')
    Metrics(out / "metrics.jsonl").write(MetricsRow(5, loss=1.0))
    about = About(corpus_digest="one", finished=False, models={"lm": {"name": "a", "digest": "1"}})
    write_record(RunFile(settings(), about), out)
    return out


def resumed(out, digest="one", **changes):
    return resume_run(Recipe.of(**{"gate_heads": 8, **changes}), digest, out)[0]


def test_the_same_goes_on_whatever_its_limits(begun):
    for changes in ({}, dict(max_minutes=1.0, threads=3)):
        assert resumed(begun, **changes).name == "checkpoint-5"


OTHERS = [
    (dict(tau=0.5, seed=1), "one", r"other settings \(seed, tau\)"),
    (dict(gate_heads=9), "one", r"other settings \(gate_heads\)"),
    ({}, "another", "was started on another corpus: give that one"),
]


@pytest.mark.parametrize(("changes", "digest", "message"), OTHERS)
def test_something_else_is_refused(begun, changes, digest, message):
    with pytest.raises(RevelaError, match=message):
        resumed(begun, digest, **changes)


def test_a_finished_run_is_done_with_its_own_limits_only(begun):
    given = begun, IGNORED_WHEN_COMPARING_FINISHED_RUNS
    check_same_run(settings(save_every=1), *given)
    message = r"other settings \(max_minutes\): give the same, or another --out"
    with pytest.raises(RevelaError, match=message):
        check_same_run(settings(max_minutes=1.0), *given)


EDITED = [
    ("run.json", None, r"holds no run of revela \(no run.json\)"),
    ("run.json", '{"name": "another tool"}', "holds no run of revela"),
    ("run.json", "[]", r"run\.json is damaged"),
    ("run.json", "no JSON", r"run\.json is damaged"),
    ("run.json", {"tau": None}, r"other settings \(tau\)"),
    ("run.json", {"tau": "warm"}, r"run\.json is damaged \(--tau warm: it should be a"),
    ("run.json", {"method": "art"}, r"run\.json is damaged \(--method art is unknown"),
    ("run.json", {"about": {"groups": "few"}}, r"run\.json is damaged \(about\.groups"),
    ("metrics.jsonl", None, r"metrics\.jsonl has no line of step 5, the last checkpoint"),
    ("metrics.jsonl", '{"step": 4}\n{"st', r"metrics\.jsonl has no line of step 5"),
    ("metrics.jsonl", '{"step": []}\n', r"metrics\.jsonl:1 is damaged \(step: "),
    ("checkpoints/checkpoint-5/clock.json", None, r"clock\.json cannot be read"),
    ("checkpoints/checkpoint-5/clock.json", "{}", r"clock\.json cannot be read"),
    ("checkpoints/checkpoint-5/optimizer.safetensors", None, "optimizer.* cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "message"), EDITED)
def test_a_folder_edited_by_hand_is_one_sentence(begun, refused, name, content, message):
    """Before anything is read: there is no such corpus."""
    (begun / name).unlink()
    if isinstance(content, dict):
        record = settings() | {"about": {"corpus_digest": "one", "finished": False}} | content
        content = json.dumps({k: v for k, v in record.items() if v is not None})
    if content is not None:
        (begun / name).write_text(content)
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("*")}
    said = refused("train", "hub:no/corpus", f"--out {begun} --resume")
    assert re.search(message, said)
    assert before == {path: path.stat().st_mtime_ns for path in begun.rglob("*")}


def test_a_corpus_is_known_by_its_texts():
    def fingerprint(documents):
        return TrainingSet(Recipe.of(), documents).fingerprint

    documents = [Document("a", "text", "title"), Document("b", "more")]
    assert fingerprint(documents) == fingerprint(arrow_list(Document, documents))
    other = [*documents[:1], Document("b", "More")]
    assert len({fingerprint(some) for some in (documents, documents[:1], other)}) == 3


def test_what_a_run_began_with_stays_and_a_record_is_whole_or_not_there(begun, monkeypatch):
    later = About(corpus_digest="one", bm25={"title": 0.5}, sources=["/new"])
    write_record(RunFile(settings(threads=3), later), begun)
    written = json.loads((begun / RUN_FILE).read_text())
    assert written["threads"] == 3 and written["about"]["corpus_digest"] == "one"
    assert written["about"]["bm25"] == {} and "heads" not in written["about"]
    assert written["about"]["sources"] == ["/new"] and not written["about"]["finished"]
    before = (begun / RUN_FILE).read_text()
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_record(RunFile({}, later), begun)
    assert (begun / RUN_FILE).read_text() == before and not list(begun.glob(".*"))


def test_a_run_goes_on_with_the_weights_that_it_began_with(tmp_path):
    def record(digest):
        models = {"model": {"name": "embedded:smollm2-135m", "digest": digest}}
        return RunFile(settings(), About(corpus_digest="one", models=models, finished=False))

    write_record(record("1"), tmp_path)
    write_record(record("1"), tmp_path)
    message = r"other weights of --model \(embedded:smollm2-135m\): use those weights \(set HF_HUB_"
    with pytest.raises(RevelaError, match=message):
        write_record(record("2"), tmp_path)
    assert RunFile.read(tmp_path).about == record("1").about


def test_a_resumed_run_drops_what_it_will_write_again_and_a_line_cut_short(tmp_path):
    path = tmp_path / "m.jsonl"
    metrics = Metrics(path)
    for step in range(5):
        metrics.write(MetricsRow(step, minutes=0.1 * step, loss=5.0 - step))
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:9])  # by a kill
    assert [row.step for row in Metrics(path, keep_until=9).rows] == [0, 1, 2, 3, 4]
    assert path.read_text() == whole and list(tmp_path.iterdir()) == [path]
    again = Metrics(path, keep_until=2)
    written = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert written == [row.step for row in again.rows] == [0, 1, 2]


@pytest.mark.parametrize("bad", [b'{"step": 1, "lo', b"\xff", b"[1]", b"{}", b'{"step": null}'])
def test_a_damaged_line_among_others_is_one_sentence(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
    with pytest.raises(RevelaError, match=r"m\.jsonl:2 is damaged \(.*leave it out"):
        Metrics(path, keep_until=9)


@pytest.fixture
def nothing_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_what_replaced_a_default_is_recorded_and_named(nothing_cached, tiny_lm_folder, tmp_path):
    small, out = dict(gate_heads=4, max_steps=1, group_size=4), tmp_path / "out"
    recipe = Recipe.of(offline_model=str(tiny_lm_folder), **TINY | small)
    train(recipe, make_documents(12), out)
    record = json.loads((out / RUN_FILE).read_text())
    used = {"name": str(tiny_lm_folder), "digest": fingerprint(tiny_lm_folder)}
    assert record["about"]["models"] == {"model": used, "lm": used}
    assert record["model"] == "HuggingFaceTB/SmolLM2-135M"
    assert "HuggingFaceTB" not in (out / "README.md").read_text()


PAPERS = [k for k, v in PRESETS.items() if "-paper" in k and "new:" not in v.get("model", "")]


@pytest.mark.parametrize("method", PAPERS)
def test_a_paper_is_not_reproduced_by_another(nothing_cached, tiny_lm_folder, tmp_path, method):
    named = dict(model=str(tiny_lm_folder), lm=str(tiny_lm_folder))
    for missing in named if Recipe.of(method).method.reads_lm else ["model"]:
        recipe = Recipe.of(method, **{**named, missing: Recipe().lm.lm})
        with pytest.raises(RevelaError, match="take no other model in its place: connect"):
            train(recipe, [Document("d", "text")], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    recipe = Recipe.of(method, lm_tokens=64, **named)
    if recipe.method.model_of_batches(recipe.groups):
        with pytest.raises(RevelaError, match="nomic-ai/nomic-embed-text-v1 is not in the hub"):
            check_recipe(recipe, tmp_path / "out", resume=False)
        recipe = recipe.replace(filter="")
    check_recipe(recipe, tmp_path / "out", resume=False)


def test_groups_of_other_text_have_another_fingerprint(tmp_path):
    """Also where every file is as long as it was."""

    def fingerprint(name, texts):
        documents = arrow_list(Document, [Document("d", "t")])
        rows = arrow_list(Chunk, (Chunk(0, text) for text in texts))
        groups = [list(range(i, i + 4)) for i in range(0, len(texts), 4)]
        corpus = GroupedCorpus(documents, [], rows, groups)
        return save_groups(tmp_path / name, corpus, 4, {"seed": 0}).fingerprint

    texts = [row["text"] for row in make_rows(8)]
    first, same = (fingerprint(name, texts) for name in "ab")
    assert first == same != fingerprint("c", [texts[0].swapcase(), *texts[1:]])
