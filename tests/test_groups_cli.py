"""``revela groups`` as a user meets it, and training on what it stored."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_rows, tiny_retriever, write_texts
from revela.encoders.load import load_encoder
from revela.training.groups.store import GroupFolder
from test_cli import TINY_FLAGS
from tests.collection_folder import write_lines

CUT = ("--chunk-words", "12", "--threads", "1", "--held-out", "0.2")
BUILD = (*CUT, "--group-size", "8")


@pytest.mark.parametrize("kind", ["random", "cluster"])
def test_groups_are_made_shown_and_used(succeeds, refused, corpus_file, models, tmp_path, kind):
    out = tmp_path / "groups"
    flags = (*BUILD, models, "--groups", kind)
    said = succeeds("groups", corpus_file, "--out", out, "--show", 2, *flags)
    folder = GroupFolder(out)
    assert len(folder.held_out) == 16 and len(folder.documents) == 64
    assert f"{len(folder)} groups of 8 in {out}" in said and "About the" in said
    assert said.count("8 chunks of ") == 2
    groups = (folder.members(group) for group in folder.order(0)(0))
    owners = [len({member.document for member in members}) for members in groups]
    assert (sum(owners) / len(owners) > 5) == (kind == "random")
    assert "exists: choose another --out" in refused("groups", corpus_file, "--out", out, *flags)
    again = succeeds("groups", out, "--show", 2)
    assert again[again.index("\ngroup") :] == said[said.index("\ngroup") :]
    train = (f"--out {tmp_path / 'model'} --group-size 8", *TINY_FLAGS[1:], models)
    said = succeeds("train", out, TINY_FLAGS[0].replace("20", "12"), *train)
    counts = f"{len(folder.rows)} chunks, {len(folder)} groups of 8 per epoch"
    assert f"64 documents, {counts}" in said
    assert "held out 16 documents for the label-free check (sibling" in said


def test_what_stored_groups_are_not(succeeds, refused, corpus_file, models, tmp_path, monkeypatch):
    folder = tmp_path / "groups"
    succeeds("groups", corpus_file, "--out", folder, *BUILD, models)
    monkeypatch.setattr("revela.training.on_files.TrainingSet.read", None)
    for flags, message in {
        "--chunk-words 20": "--chunk-words has no effect on .* stored with --chunk-words 12: leave",
        "--group-size 9": "has groups of 8: give --group-size 8",
        "--groups interleaved": "holds groups of another kind",
        "--method dream --queries title --group-size 8": "groups without queries: store them again",
        "--method dream-infonce --queries title --group-size 8": "--method contrastive-pairs",
        f"--method contrastive-pairs --pairs {folder}": "is not a BEIR-layout folder",
        "--group-size 8 --lm-tokens 4096": "read up to 4,096 tokens, more than the 2,048 of",
        "--group-size 8 --gate-heads 500": "--gate-heads 500: .* has 16 heads: give 16 or fewer",
        "--group-size 8 --layers 99": "--layers 99: .* has 4 layers: give 4 or fewer",
    }.items():
        err = refused("train", folder, f"--out {tmp_path / 'out'}", models, flags)
        assert re.search(message, err) and not (tmp_path / "out").exists(), err
    for verb, message in {
        "train": "train on it alone",
        "groups": "give the text that they",
    }.items():
        err = refused(verb, folder, corpus_file, f"--out {tmp_path / 'out'}", models)
        assert f"{folder} holds groups" in err and message in err


def test_who_holds_nothing_out_is_told_of_no_check(succeeds, corpus_file, models, tmp_path):
    flags = ("--out", tmp_path / "model", models, *TINY_FLAGS[:-1], 0)
    said = succeeds("train", corpus_file, *flags)
    assert "no documents held out, so no label-free check" in said


def test_clusters_as_a_surrogate_finds(succeeds, corpus_file, models, tiny_lm_folder, tmp_path):
    """And how hard they are."""
    surrogate, found = tmp_path / "surrogate", {}
    tiny_retriever(tiny_lm_folder, layers=1, query_prompt="").save(str(surrogate))
    flags = (*BUILD, models, "--surrogate", surrogate)
    encoder = load_encoder(surrogate, "fp32")
    for kind, method, asked in (
        ("cluster", "revela", ()), ("random", "revela", ()),
        ("cluster", "dream", ("--queries", "title")),
    ):  # fmt: skip
        out = tmp_path / f"{kind}-{method}"
        given = (corpus_file, "--out", out, "--method", method, "--groups", kind, *asked)
        said, folder, scores = succeeds("groups", *given, *flags), GroupFolder(out), []
        assert len(folder) > 10
        for group in folder.order(0)(0):
            texts = [member.text for member in folder.members(group)]
            queries = [m.query or m.text for m in folder.members(group)] if asked else None
            passage_ND = encoder.encode_passages(texts)
            query_ND = encoder.encode_queries(queries) if queries else passage_ND
            scores.append((query_ND @ passage_ND.T)[~np.eye(8, dtype=bool)].mean())
        found[out.name] = np.mean(scores)
        assert f"within a group, by {surrogate}: {found[out.name]:.3f}\n" in said
    assert found["cluster-revela"] > found["random-revela"]


def test_several_corpora_in_given_shares(succeeds, refused, models, tmp_path):
    for name, count in (("few", 12), ("many", 60)):
        rows = [{**row, "title": name} for row in make_rows(count, seed=count)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    sources = (tmp_path / "few.jsonl", tmp_path / "many.jsonl")
    flags = (*BUILD, models)
    succeeds("groups", *sources, "--out", tmp_path / "g", "--weights", 1, 2, *flags)
    folder = GroupFolder(tmp_path / "g")
    kinds = [{member.name for member in folder.members(group)} for group in folder.order(0)(0)]
    assert all(len(kind) == 1 for kind in kinds)
    assert abs(kinds.count({"many"}) - 2 * kinds.count({"few"})) <= 2
    err = refused("groups", *sources, "--out", tmp_path / "h", "--weights", 1, *flags)
    assert "give --weights a number above 0 for each of the 2 corpora" in err


def test_ready_groups_are_stored_before_training(succeeds, refused, models, tmp_path):
    texts = [[f"{r['text']} {j}" for j in range(8 + i % 2)] for i, r in enumerate(make_rows(30))]
    rows = [{"src": f"posts {i}", "text": some} for i, some in enumerate(texts)]
    source, table = tmp_path / "ready", pa.Table.from_pylist(rows)
    source.mkdir()
    pq.write_table(table.slice(0, 20), source / "0.parquet")
    pq.write_table(table.slice(20).select(["text"]), source / "1.parquet")
    given = ("--out", tmp_path / "model", models)
    assert f"{source} holds groups: give the folder" in refused("train", source, *given)
    succeeds("groups", source, "--out", tmp_path / "g", *BUILD)
    folder = GroupFolder(tmp_path / "g")
    assert len(folder) == 24 and len(folder.held_out) == 6
    found = {frozenset(m.text for m in folder.members(group)) for group in folder.order(0)(0)}
    assert found < {frozenset(some[:8]) for some in texts}
    larger = ("--out", tmp_path / "h", *CUT, "--group-size", 9)
    err = refused("groups", source, *larger)
    assert ":1 has 8 texts, fewer than a group of 9: lower --group-size" in err


@pytest.mark.parametrize(
    ("count", "message"), [(1, "give no group of 8"), (0, "no document found")]
)
def test_what_gives_no_groups_is_one_sentence(refused, models, tmp_path, count, message):
    corpus = write_texts(tmp_path / "corpus", make_rows(count, sentences=3))
    flags = ("--groups", "cluster", *BUILD, models)
    assert message in refused("groups", corpus, "--out", tmp_path / "g", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_one_document_is_enough_if_it_is_long(succeeds, models, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(make_rows(1, sentences=60)[0]))
    given = (tmp_path / "a.jsonl", "--out", tmp_path / "g", *BUILD, models)
    succeeds("groups", *given)
    assert len(GroupFolder(tmp_path / "g")) >= 2


def test_groups_need_a_folder(refused, corpus_file):
    assert "give --out" in refused("groups", corpus_file)


def test_dream_trains_on_stored_questions(succeeds, refused, corpus_file, models, tmp_path):
    asking = ("--method", "dream", "--queries", "title", "--lm-tokens", 32)
    flags = (*BUILD, models, *asking)
    succeeds("groups", corpus_file, "--out", tmp_path / "g", *flags)
    rest = "--layers 2 --lora-rank 4 --precision fp32 --max-steps 1 --max-minutes 0"
    said = succeeds("train", tmp_path / "g", "--out", tmp_path / "model", *flags, rest)
    assert "heads that look from questions" in said
    assert "holds groups" in refused("queries", tmp_path / "g", *flags)
