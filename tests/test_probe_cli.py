"""revela probe as a user meets it: table and JSON; and what cannot be probed, in one sentence
with exit code 2.
"""

from __future__ import annotations

import json
import shutil
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import tiny_retriever
from revela.training.retriever.save import save_retriever
from tests.collection_folder import write_collection

FLAGS = ("--max-tokens", 64, "--documents", 6, "--precision", "fp32")


@pytest.fixture(scope="module")
def retriever(tiny_lm_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe") / "model"
    save_retriever(tiny_retriever(tiny_lm_folder, max_tokens=96), folder, "card")
    return folder


@pytest.fixture(scope="module")
def squad_like(tmp_path_factory):
    """Two articles of six paragraphs each, two of them asked for; and an article that nobody asks
    for.
    """
    rows = []
    for title in ("ocean", "engine", "garden"):
        for i in range(6):
            text = " ".join(f"{title}{i}{n % 4}" for n in range(4 if i % 3 == 1 else 30))
            rows.append({"_id": f"{title}{i}", "title": title, "text": text})
    judged = {f"q{n}": d for n, d in enumerate(("ocean1", "ocean4", "engine1", "engine4"))}
    queries = {query: f"{d}1 {d}2" for query, d in judged.items()}
    folder = tmp_path_factory.mktemp("squad") / "squad"
    return write_collection(folder, rows, queries, dict.fromkeys(judged.items(), 1))


def test_a_retriever_is_probed(succeeds, retriever, corpus_file, squad_like, tmp_path):
    out_file = tmp_path / "probe.json"
    flags = (*FLAGS, "--move", squad_like, "--pairs", squad_like, squad_like)
    out = succeeds("probe", retriever, corpus_file, *flags, "--json", out_file)
    assert "exact match: 6 documents of " in out
    assert "4 queries, 4 answers at ten places each, 1 other documents" in out
    assert "half of the answers begin before character 511" in out and "unmoved" in out
    assert "slope per tenth" in out and "effective rank" in out
    found = json.loads(out_file.read_text())
    profiles = found["profiles"]
    exact, moved = ("exact match", "exact match, both orders"), "moved passage, cosine"
    assert list(profiles) == [*exact, "moved passage, MRR@100", moved]
    for profile in profiles.values():
        places = profile["places"]
        assert len(places) == 10
        assert all(p["low"] - 1e-9 <= p["value"] <= p["high"] + 1e-9 for p in places)
        drop = places[0]["value"] - places[-1]["value"]
        assert profile["drop"]["value"] == pytest.approx(drop)
    assert profiles[moved]["documents"] == 2 and found["geometry"]["pairs"] == 8
    succeeds("probe", retriever, corpus_file, *flags, "--json", tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["profiles"] == profiles  # the same sample, the same resamples


REFUSED = [
    (("--documents", 1), "--documents must be at least 2 (got 1)"),
    (("--move", "."), "is not a BEIR-layout folder"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_refusals(
    monkeypatch, refused, retriever, corpus_file, squad_like, tmp_path, flags, message
):
    monkeypatch.chdir(squad_like.parent)
    outputs = ("--json", tmp_path / "p.json")
    settings = dict(zip(FLAGS[::2], FLAGS[1::2], strict=True)) | dict([flags])
    arguments = (corpus_file, *chain(*settings.items()), *outputs)
    assert message in refused("probe", retriever, *arguments) and not list(tmp_path.iterdir())


def test_a_language_model_is_refused(refused, tiny_lm_folder, corpus_file):
    err = refused("probe", tiny_lm_folder, corpus_file)
    assert "has no vectors to probe: make a retriever of it (revela train)" in err


def test_a_broken_model_is_one_sentence(refused, retriever, corpus_file, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(retriever, broken)
    file = next(broken.rglob("*.safetensors"))
    weights = {name: torch.full_like(w, float("nan")) for name, w in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    err = refused("probe", broken, corpus_file, *FLAGS, "--json", tmp_path / "p.json")
    assert "gives vectors that are not finite for 12 of 12 texts: its weights are broken" in err
    assert not (tmp_path / "p.json").exists()
