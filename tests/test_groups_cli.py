"""``revela groups`` as a user meets it, and training on what it stored."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_rows
from revela.groups.folder import GroupFolder
from revela.retriever.build import build_retriever
from test_cli import TINY, run

CUT = ("--chunk-words", "12", "--threads", "1", "--held-out", "0.2")
BUILD = (*CUT, "--group-size", "8")


def models(folder: Path) -> tuple[object, ...]:
    return ("--model", folder, "--lm", folder)


@pytest.mark.parametrize("kind", ["document", "random", "cluster"])
def test_groups_are_built_shown_stored_and_trained_on(
    monkeypatch, capsys, corpus_file, tiny_lm_folder, tmp_path, kind
):
    out = tmp_path / "groups"
    flags = (*BUILD, *models(tiny_lm_folder), "--groups", kind)
    code, said, err = run(
        monkeypatch, capsys, "groups", corpus_file, "--out", out, "--show", 2, *flags
    )
    assert code == 0, err
    folder = GroupFolder(out)
    assert len(folder.held_out) == 16 and len(folder.documents) == 64
    assert (
        f"{len(folder)} groups of 8 in {out}" in said
        and said.count("8 chunks of ") == 2
        and "About the" in said
    )
    owners = [
        len({member.document for member in folder.members(group)}) for group in folder.order(0)(0)
    ]
    assert (sum(owners) / len(owners) > 5) == (kind == "random")
    code, _, err = run(monkeypatch, capsys, "groups", corpus_file, "--out", out, *flags)
    assert code == 2 and "exists: choose another --out" in err
    code, again, err = run(monkeypatch, capsys, "groups", out, "--show", 2)
    assert code == 0 and again[again.index("\ngroup") :] == said[said.index("\ngroup") :]
    train = ("--out", tmp_path / "model", *models(tiny_lm_folder), *TINY)
    code, _, err = run(monkeypatch, capsys, "train", out, *train)
    assert code == 2 and "give --group-size 8" in err
    code, said, err = run(monkeypatch, capsys, "train", out, *train, "--group-size", 8)
    assert code == 0, err
    assert (
        f"64 documents -> {len(folder.rows)} chunks -> {len(folder)} groups of 8 per epoch" in said
    )
    assert "held out 16 documents for the label-free check (sibling" in said


def test_who_holds_nothing_out_is_told_that_nothing_is_checked(
    monkeypatch, capsys, corpus_file, tiny_lm_folder, tmp_path
):
    flags = ("--out", tmp_path / "model", *models(tiny_lm_folder), *TINY[:-1], 0)
    code, said, err = run(monkeypatch, capsys, "train", corpus_file, *flags)
    assert code == 0, err
    assert "no documents held out, so no label-free check: the last state is saved" in said


def test_clusters_of_what_a_surrogate_finds_similar(
    monkeypatch, capsys, corpus_file, tiny_lm_folder, tmp_path
):
    model = build_retriever(
        tiny_lm_folder,
        layers=1,
        pooling="mean",
        max_tokens=64,
        lower_case=False,
        query_prompt="",
        passage_prompt="passage: ",
    )
    model.save(str(tmp_path / "surrogate"))
    clusters = ("--groups", "cluster", "--surrogate", tmp_path / "surrogate")
    flags = (*BUILD, *models(tiny_lm_folder), *clusters)
    for objective in ("revela", "dream"):
        asked = ["--objective", objective]
        asked += ["--queries", "title"] if objective == "dream" else []
        given = ("groups", corpus_file, "--out", tmp_path / objective, *flags, *asked)
        code, _, err = run(monkeypatch, capsys, *given)
        assert code == 0, err
        folder = GroupFolder(tmp_path / objective)
        assert len(folder) > 10 and folder.settings["groups"] == ["cluster"]


def test_several_corpora_in_given_shares(monkeypatch, capsys, tiny_lm_folder, tmp_path):
    for name, count in (("few", 12), ("many", 60)):
        rows = [{**row, "title": name} for row in make_rows(count, seed=count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (tmp_path / "few.jsonl", tmp_path / "many.jsonl")
    flags = (*BUILD, *models(tiny_lm_folder))
    code, _, err = run(
        monkeypatch, capsys, "groups", *sources, "--out", tmp_path / "g", "--weights", 1, 2, *flags
    )
    assert code == 0, err
    folder = GroupFolder(tmp_path / "g")
    kinds = [{member.name for member in folder.members(group)} for group in folder.order(0)(0)]
    assert (
        all(len(kind) == 1 for kind in kinds)
        and abs(kinds.count({"many"}) - 2 * kinds.count({"few"})) <= 2
    )
    code, _, err = run(
        monkeypatch, capsys, "groups", *sources, "--out", tmp_path / "h", "--weights", 1, *flags
    )
    assert code == 2 and "--weights gives 1 numbers for 2 corpora" in err


def write_ready(folder: Path, kind: str) -> tuple[str, list[list[str]]]:
    """Rows that are groups of eight texts or more, as a source of this kind."""
    texts = [[f"{r['text']} {j}" for j in range(8 + i % 2)] for i, r in enumerate(make_rows(30))]
    rows = [{"src": f"posts {i}", "text": some} for i, some in enumerate(texts)]
    lines = [json.dumps(row if i % 2 else row["text"]) + "\n" for i, row in enumerate(rows)]
    if kind == "jsonl":
        (folder / "ready.jsonl").write_text("".join(lines))
        return str(folder / "ready.jsonl"), texts
    source = folder / "owner" / "name"
    source.mkdir(parents=True)
    if kind == "parquet":
        table = pa.Table.from_pylist(rows)
        pq.write_table(table.slice(0, 20), source / "0.parquet")
        pq.write_table(table.slice(20).select(["text"]), source / "1.parquet")
        return str(source), texts
    (source / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"hub:{source}", texts


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_ready_groups_are_stored_before_training(
    monkeypatch, capsys, tiny_lm_folder, tmp_path, kind
):
    source, texts = write_ready(tmp_path, kind)
    given = ("--out", tmp_path / "model", *models(tiny_lm_folder))
    code, _, err = run(monkeypatch, capsys, "train", source, *given)
    assert code == 2 and f"{source} holds groups: store them by revela groups" in err
    code, _, err = run(monkeypatch, capsys, "groups", source, "--out", tmp_path / "g", *BUILD)
    assert code == 0, err
    folder = GroupFolder(tmp_path / "g")
    assert len(folder) == 24 and len(folder.held_out) == 6
    found = {frozenset(m.text for m in folder.members(group)) for group in folder.order(0)(0)}
    assert found < {frozenset(some[:8]) for some in texts}
    larger = ("--out", tmp_path / "h", *CUT, "--group-size", 9)
    code, _, err = run(monkeypatch, capsys, "groups", source, *larger)
    assert code == 2 and ":1 has 8 texts, fewer than a group of 9: lower --group-size" in err
    assert len(err.strip().splitlines()) == 1


def test_a_run_on_groups_that_have_changed_is_not_resumed(
    monkeypatch, capsys, corpus_file, tiny_lm_folder, tmp_path
):
    flags = (*BUILD, *models(tiny_lm_folder))
    for name, seed in (("first", 0), ("second", 1)):
        given = ("groups", corpus_file, "--out", tmp_path / name, "--seed", seed, *flags)
        code, _, err = run(monkeypatch, capsys, *given)
        assert code == 0, err
    more = ("--out", tmp_path / "model", *models(tiny_lm_folder), *TINY, "--group-size", 8)
    code, _, err = run(monkeypatch, capsys, "train", tmp_path / "first", *more)
    assert code == 0, err
    code, _, err = run(monkeypatch, capsys, "train", tmp_path / "second", *more, "--resume")
    assert code == 2 and "was begun on another corpus" in err and len(err.strip().splitlines()) == 1
    code, _, err = run(monkeypatch, capsys, "train", tmp_path / "first", *more, "--resume")
    assert code == 2 and "has no checkpoint" in err  # it had ended


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: (folder / "a.jsonl").write_text(""), "no document found"),
        (
            lambda f: (f / "a.jsonl").write_text(json.dumps(make_rows(1, sentences=3)[0])),
            "give no group of 8",
        ),
        (lambda folder: (folder / "shard-00.arrow").write_text(""), "no whole group folder"),
        (lambda folder: None, "no document found"),
    ],
)
@pytest.mark.parametrize("kind", ["document", "cluster"])
def test_what_gives_no_groups_is_one_sentence(
    monkeypatch, capsys, tiny_lm_folder, tmp_path, prepare, message, kind
):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    prepare(corpus)
    flags = ("--groups", kind, *BUILD, *models(tiny_lm_folder))
    code, _, err = run(monkeypatch, capsys, "groups", corpus, "--out", tmp_path / "g", *flags)
    assert (
        code == 2
        and message in err
        and err.startswith("revela: ")
        and len(err.strip().splitlines()) == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_one_document_is_enough_if_it_is_long(monkeypatch, capsys, tiny_lm_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(make_rows(1, sentences=60)[0]))
    given = (tmp_path / "a.jsonl", "--out", tmp_path / "g", *BUILD, *models(tiny_lm_folder))
    code, _, err = run(monkeypatch, capsys, "groups", *given)
    assert code == 0 and len(GroupFolder(tmp_path / "g")) >= 2, err


def test_groups_need_a_folder(monkeypatch, capsys, corpus_file, tmp_path):
    code, _, err = run(monkeypatch, capsys, "groups", corpus_file)
    assert code == 2 and "give --out" in err
    code, _, err = run(monkeypatch, capsys, "groups", corpus_file, "--out", tmp_path)
    assert code == 2 and "exists" in err


def test_dream_trains_on_stored_questions(
    monkeypatch, capsys, corpus_file, tiny_lm_folder, tmp_path
):
    asking = ("--objective", "dream", "--queries", "title", "--lm-tokens", 32)
    flags = (*BUILD, *models(tiny_lm_folder), *asking)
    code, _, err = run(monkeypatch, capsys, "groups", corpus_file, "--out", tmp_path / "g", *flags)
    assert code == 0, err
    rest = ("--layers", 2, "--lora-rank", 4, "--precision", "fp32", "--max-steps", 1)
    rest = (*rest, "--max-minutes", 0)
    code, said, err = run(
        monkeypatch, capsys, "train", tmp_path / "g", "--out", tmp_path / "model", *flags, *rest
    )
    assert code == 0 and "heads that look from questions" in said, err
    code, _, err = run(monkeypatch, capsys, "queries", tmp_path / "g", *flags)
    assert code == 2 and "holds groups" in err


def test_groups_without_queries_are_refused_where_they_are_needed(
    monkeypatch, capsys, corpus_file, tiny_lm_folder, tmp_path
):
    flags = (*BUILD, *models(tiny_lm_folder))
    assert run(monkeypatch, capsys, "groups", corpus_file, "--out", tmp_path / "g", *flags)[0] == 0
    asking = ("--objective", "infonce", "--queries", "title")
    code, _, err = run(
        monkeypatch, capsys, "train", tmp_path / "g", "--out", tmp_path / "m", *flags, *asking
    )
    assert code == 2 and "store them again by revela groups ... --objective infonce" in err
    assert not (tmp_path / "m").exists()
