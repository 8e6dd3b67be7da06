"""Contexts as a user meets them: revela index, eval and probe with --context."""

from __future__ import annotations

import json

import pytest

from conftest import SLOTS, TOPICS, make_rows
from revela.index.state import read_info
from tests.collection_folder import write_collection, write_lines


def test_index_and_append_by_command(contextual, saved_retriever, tmp_path, succeeds, refused):
    write_lines(tmp_path / "corpus.jsonl", make_rows(12))
    corpus, out, own = tmp_path / "corpus.jsonl", tmp_path / "index", tmp_path / "own.txt"
    own.write_text("\n".join(TOPICS))

    index = ("index", corpus, "--precision", "fp32")
    succeeds(*index, "--model", contextual, "--out", out)
    assert read_info(out).context["kind"] == "corpus"
    for same in ((), ("--context", "corpus")):
        succeeds(*index, "--append", "--out", out, *same)
    error = refused(*index, "--append", "--out", out, "--context", "none")
    assert "was made with other settings, metadata or context" in error
    for choice, kind in (("saved", "saved"), ("none", "none"), (own, "texts")):
        succeeds(*index, "--model", contextual, "--out", tmp_path / kind, "--context", choice)
        assert read_info(tmp_path / kind).context["kind"] == kind
    assert len({read_info(tmp_path / n).context["digest"] for n in ("index", "none", "texts")}) == 3
    plain = ("--model", saved_retriever, "--out", tmp_path / "plain")
    error = refused(*index, *plain, "--context", "corpus")
    assert "has no first stage: train it with --context N" in error
    succeeds(*index, *plain)
    own.write_text("\n \n")
    with_context = (*index, "--model", contextual, "--out", tmp_path / "x", "--context")
    assert "has no text" in refused(*with_context, own)
    error = refused(*with_context, "corpsu")
    assert "--context corpsu cannot be read (FileNotFoundError)" in error


def test_eval_by_command(contextual, saved_retriever, tmp_path, succeeds, refused):
    rows, asked = make_rows(20, sentences=1), {"q": "ocean03 ocean04"}
    one = write_collection(tmp_path / "one", rows, asked, {("q", "d0"): 1})
    flags = ("--on", one, "--precision", "fp32")
    out = succeeds("eval", contextual, saved_retriever, *flags)
    drawn = f"model reads a context of {SLOTS} slots, documents of the corpus, drawn with"
    assert f"{drawn} seed 0\n" in out and out.count("reads a context") == 1
    assert f"{drawn} seed 3\n" in succeeds("eval", contextual, *flags, "--context-seed", 3)
    out = succeeds("eval", contextual, *flags, "--context", "saved")
    assert "slots, those that it was saved with\n" in out
    error = refused("eval", saved_retriever, *flags, "--context", "corpus")
    assert "has no first stage: train it with --context N" in error


@pytest.mark.parametrize("kind", ["saved_retriever", "contextual"])
def test_probe_says_how_many_documents_are_read(kind, request, tmp_path, succeeds):
    rows = make_rows(8, sentences=20)
    write_lines(tmp_path / "corpus.jsonl", rows)
    model, json_file = request.getfixturevalue(kind), tmp_path / "probe.json"
    limits = ("--max-tokens", 64, "--documents", 4, "--precision", "fp32", "--json", json_file)
    succeeds("probe", model, tmp_path / "corpus.jsonl", *limits)
    found = json.loads(json_file.read_text())
    assert found["context"] == (SLOTS if kind == "contextual" else 0)
    assert found["tokens"] == 48  # slots are not part of the 64
