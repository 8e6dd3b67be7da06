"""revela probe as a user meets it: table, JSON and plot; and what cannot be probed, in one sentence
with exit code 2.
"""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import make_rows
from revela.retriever.build import build_retriever
from revela.retriever.save import save_retriever
from test_cli import run

FLAGS = ("--max-tokens", 64, "--documents", 6, "--precision", "fp32")


@pytest.fixture(scope="module")
def retriever(tiny_lm_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe") / "model"
    prompts = dict(query_prompt="query: ", passage_prompt="passage: ")
    model = build_retriever(
        tiny_lm_folder, layers=2, pooling="mean", max_tokens=96, lower_case=False, **prompts
    )
    save_retriever(model, folder, "card")
    return folder


@pytest.fixture(scope="module")
def squad_like(tmp_path_factory):
    """Two articles of six paragraphs each, two of them asked for; and an article that nobody asks
    for.
    """
    folder = tmp_path_factory.mktemp("squad") / "squad"
    (folder / "qrels").mkdir(parents=True)
    rows = [
        {
            "_id": f"{title}{i}",
            "title": title,
            "text": " ".join(f"{title}{i}{n % 4}" for n in range(4 if i % 3 == 1 else 30)),
        }
        for title in ("ocean", "engine", "garden")
        for i in range(6)
    ]
    judged = ["ocean1", "ocean4", "engine1", "engine4"]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text(
        "".join(
            json.dumps({"_id": f"q{n}", "text": f"{d}1 {d}2"}) + "\n" for n, d in enumerate(judged)
        )
    )
    (folder / "qrels" / "test.tsv").write_text(
        "".join(f"q{n}\t{d}\t1\n" for n, d in enumerate(judged))
    )
    return folder


def test_a_retriever_is_probed(monkeypatch, capsys, retriever, corpus_file, squad_like, tmp_path):
    out_file, plot = tmp_path / "probe.json", tmp_path / "probe.png"
    flags = (
        "--move",
        squad_like,
        "--pairs",
        squad_like,
        "--join-titles",
        "--json",
        out_file,
        "--plot",
        plot,
    )
    code, out, err = run(monkeypatch, capsys, "probe", retriever, corpus_file, *FLAGS, *flags)
    assert code == 0, err
    assert (
        "exact match: 6 documents of " in out
        and "4 queries, 4 answers at ten places each, 1 other documents" in out
    )
    assert "slope per tenth" in out and "effective rank" in out
    found = json.loads(out_file.read_text())
    assert list(found["profiles"]) == [
        "exact match",
        "exact match, both orders",
        "moved passage, MRR@100",
        "moved passage, cosine",
    ]
    for profile in found["profiles"].values():
        assert len(profile["places"]) == 10 and all(
            p["low"] <= p["value"] + 1e-9 and p["value"] <= p["high"] + 1e-9
            for p in profile["places"]
        )
        assert profile["drop"]["value"] == pytest.approx(
            profile["places"][0]["value"] - profile["places"][-1]["value"]
        )
    assert (
        found["profiles"]["moved passage, cosine"]["documents"] == 2
        and found["geometry"]["pairs"] == 4
    )
    assert plot.read_bytes().startswith(b"\x89PNG") and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["probe.json", "probe.png"]
    again = tmp_path / "again.json"
    assert (
        run(
            monkeypatch,
            capsys,
            "probe",
            retriever,
            corpus_file,
            *FLAGS,
            *flags[:5],
            "--json",
            again,
        )[0]
        == 0
    )
    assert (
        json.loads(again.read_text())["profiles"] == found["profiles"]
    )  # the same sample, the same resamples


def test_a_language_model_is_probed(monkeypatch, capsys, tiny_lm_folder, corpus_file, tmp_path):
    code, _, err = run(
        monkeypatch,
        capsys,
        "probe",
        tiny_lm_folder,
        corpus_file,
        *FLAGS,
        "--json",
        tmp_path / "p.json",
    )
    assert code == 0, err
    found = json.loads((tmp_path / "p.json").read_text())
    assert (
        list(found["profiles"]) == ["next-token loss"]
        and found["geometry"] is None
        and found["tokens"] == 56
    )
    assert all(
        3 < place["value"] < 9 for place in found["profiles"]["next-token loss"]["places"]
    )  # of a random model about log 394


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--documents", 1), "--documents 1 is no sample"),
        (("--max-tokens", 20), "too few to be cut in 10 parts: raise --max-tokens"),
        (("--move", "squad"), "squad has no answers.jsonl"),
        (("--move", "."), "is not a BEIR-layout folder"),
    ],
)
def test_what_cannot_be_probed_is_one_sentence(
    monkeypatch, capsys, retriever, corpus_file, squad_like, tmp_path, flags, message
):
    monkeypatch.chdir(squad_like.parent)
    outputs = ("--json", tmp_path / "p.json", "--plot", tmp_path / "p.png")
    settings = dict(zip(FLAGS[::2], FLAGS[1::2], strict=True)) | dict([flags])
    code, _, err = run(
        monkeypatch, capsys, "probe", retriever, corpus_file, *chain(*settings.items()), *outputs
    )
    assert (
        code == 2
        and message in err
        and err.startswith("revela: ")
        and len(err.strip().splitlines()) == 1
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("count", "code"), [(35, 0), (29, 2)])
def test_fewer_documents_than_asked_for_will_do_from_thirty_on(
    monkeypatch, capsys, tiny_lm_folder, tmp_path, count, code
):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(count)))
    flags = ("--max-tokens", 64, "--precision", "fp32")  # --documents stands at 200
    found, out, err = run(
        monkeypatch, capsys, "probe", tiny_lm_folder, tmp_path / "few.jsonl", *flags
    )
    assert (
        found == code
        and f"only {count} of {count} documents are long enough for 10 parts" in out + err
    )
    assert (
        "all of them are taken" in out,
        "and 30 are needed: lower --max-tokens or --documents" in err,
    ) == (code == 0, code == 2)


def test_a_language_model_has_no_answers_to_move(
    monkeypatch, capsys, tiny_lm_folder, corpus_file, squad_like
):
    code, _, err = run(
        monkeypatch, capsys, "probe", tiny_lm_folder, corpus_file, "--move", squad_like
    )
    assert (
        code == 2
        and "is a language model, of which no retrieval is probed: omit --move and --pairs" in err
    )


def test_a_broken_model_is_one_sentence(monkeypatch, capsys, retriever, corpus_file, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(retriever, broken)
    file = next(broken.rglob("*.safetensors"))
    weights = load_file(file)
    save_file(
        {name: torch.full_like(w, float("nan")) for name, w in weights.items()},
        file,
        {"format": "pt"},
    )
    code, _, err = run(
        monkeypatch, capsys, "probe", broken, corpus_file, *FLAGS, "--json", tmp_path / "p.json"
    )
    assert (
        code == 2
        and "gives vectors that are not finite for 12 of 12 texts: its weights are broken" in err
    )
    assert not (tmp_path / "p.json").exists()
