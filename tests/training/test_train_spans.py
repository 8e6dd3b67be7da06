"""An encoder-decoder from nothing, by spans; then crops from its encoder: what each stage leaves
for the next, and what is refused.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_train import assert_resume_equals_unbroken, losses

from revela.encoders.load import load_encoder
from revela.encoders.torch_model import open_model
from revela.errors import RevelaError
from revela.text.load import read_corpus
from revela.training.lm.encoder_decoder import FOLDER, load_encoder_decoder
from revela.training.recipe import Recipe
from revela.training.train import train

TINY = dict(
    model="new:tiny", lm_tokens=48, max_tokens=64, group_size=8, groups_per_step=1, max_minutes=0,
    max_steps=6, log_every=1, save_every=3, warmup_steps=2, precision="fp32", threads=1,
)  # fmt: skip
SPANS = Recipe.of("dwell-spans", **TINY)


@pytest.fixture(scope="module")
def run_of_spans(corpus_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("stages") / "spans"
    train(SPANS, read_corpus([corpus_file])[0], out)
    return out


def test_every_stage_by_the_command_line(succeeds, monkeypatch, corpus_file, tmp_path):
    """Spans -> crops of its encoder -> an index and a search."""
    monkeypatch.chdir(tmp_path)
    tiny = ("--max-steps", 4, "--group-size", 8, "--precision", "fp32", "--threads", 1)
    new = ("--model", "new:tiny", "--lm-tokens", 48, "--groups-per-step", 1)
    start = ("--model", "one", "--lora-rank", 0, "--lm-tokens", 64, "--crop-window", 60)
    for command in (
        ("train", corpus_file, "--method", "dwell-spans", *new, "--out", "one", *tiny),
        ("train", corpus_file, "--method", "contrastive-crop", *start, "--out", "two", *tiny),
        ("index", corpus_file, "--model", "two", "--out", "found"),
        ("search", "found", "ocean01 ocean02"),
    ):
        succeeds(*command)
    assert not (tmp_path / "two" / FOLDER).exists()
    first, second = (open_model(tmp_path / name) for name in ("one", "two"))
    assert [type(part).__name__ for part in second] == ["Transformer", "Pooling", "Normalize"]
    assert second[1].pooling_mode == "mean" and second.max_seq_length == 2048
    assert set(second.prompts.values()) == {""}
    both = zip(first[0].parameters(), second[0].parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in both)  # all weights are trained


def test_the_retriever_is_the_encoder_of_what_is_saved_beside_it(run_of_spans):
    model, lm = open_model(run_of_spans), load_encoder_decoder(run_of_spans, bf16=False)
    ours, theirs = model[0].model.encoder.state_dict(), lm.model.get_encoder().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    features = model.preprocess(["ocean1 ocean2."])
    with torch.no_grad():
        mean_D = lm._encode(features["input_ids"], features["attention_mask"])[0].mean(dim=0)
    vector_D = torch.nn.functional.normalize(mean_D, dim=0).numpy()
    np.testing.assert_allclose(model.encode(["ocean1 ocean2."])[0], vector_D, atol=1e-6)
    assert sorted(p.name for p in (run_of_spans / FOLDER).iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    card = (run_of_spans / "README.md").read_text()
    assert "new:tiny, the encoder of an encoder-decoder, learned to write the hidden spans" in card


def test_resume_equals_unbroken(documents, tmp_path):
    assert_resume_equals_unbroken(SPANS, documents, tmp_path, files=2)
    assert (tmp_path / "broken" / FOLDER / "model.safetensors").is_file()


def test_training_goes_on_from_a_run(run_of_spans, documents, tmp_path):
    """The loss goes on where it was, and both sides are trained."""
    more = SPANS.replace(model=str(run_of_spans), max_steps=2)
    train(more, documents, tmp_path / "more")
    fresh, first = losses(run_of_spans)[1], losses(tmp_path / "more")[1]
    assert first < fresh - 0.1
    before, after = (load_encoder_decoder(f, False) for f in (run_of_spans, tmp_path / "more"))
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)
    whole = SPANS.replace(model=str(run_of_spans / FOLDER), max_steps=2)
    train(whole, documents, tmp_path / "whole")
    assert losses(tmp_path / "whole") == losses(tmp_path / "more")


def test_crops_start_from_it_by_lora_too(run_of_spans, documents, tmp_path):
    changes = dict(model=str(run_of_spans), lora_rank=4, lm_tokens=64, crop_window=40, max_steps=3)
    recipe = Recipe.of("contrastive-crop", **TINY | changes, check_every=0)
    train(recipe, documents, tmp_path / "out")
    start, found = (load_file(f / "model.safetensors") for f in (run_of_spans, tmp_path / "out"))
    moved = {name for name in start if not torch.equal(start[name], found[name])}
    assert start.keys() == found.keys() and moved
    assert all("proj" in name for name in moved)
    assert load_encoder(tmp_path / "out", "fp32").encode_passages(["ocean1"]).shape == (1, 64)
    with pytest.raises(RevelaError, match="has no decoder: give --model"):
        load_encoder_decoder(tmp_path / "out", bf16=False)


REFUSED = [
    ({"method": "contrastive-crop", "model": "new:tiny"}, "LoRA trains a part of it: give"),
    ({"method": "revela", "lm_lora": True, "lora_rank": 0}, "give --lora-rank 1 or more"),
    (
        {"method": "contrastive-crop", "model": "new:tiny", "lora_rank": 0, "context": 2},
        "--context needs an encoder or a decoder: --model new:tiny is both",
    ),
    (
        {"method": "cde", "context": 3, "context_vectors_per_document": 2},
        "--context 3 cannot be divided by --context-vectors-per-document 2",
    ),
    ({"method": "dwell-spans", "model": "new:tiny", "group_size": 900}, "give no group of"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals_leave_nothing_behind(tiny_lm_folder, documents, tmp_path, changes, message):
    recipe = Recipe.of(**{"model": str(tiny_lm_folder), **changes})
    with pytest.raises(RevelaError, match=message):
        train(recipe, documents, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_it_is_exported(succeeds, run_of_spans, tmp_path):
    flags = ("--out", tmp_path / "graph")
    out = succeeds("export", run_of_spans, *flags)
    assert "from torch's vectors" in out


def test_the_probe_of_a_run_and_its_encoder_decoder(succeeds, run_of_spans, corpus_file, tmp_path):
    flags = ("--max-tokens", 64, "--documents", 6, "--precision", "fp32")
    found = {}
    for name, model in (("run", run_of_spans), ("whole", run_of_spans / FOLDER)):
        given = (*flags, "--json", tmp_path / f"{name}.json")
        out = succeeds("probe", model, corpus_file, *given)
        assert "spans by place" in out
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())["profiles"]
    by_decoder = [f"exact match{both}, by the decoder" for both in ("", ", both orders")]
    assert list(found["whole"]) == ["spans by place", *by_decoder]
    exact = ["exact match", "exact match, both orders"]
    assert list(found["run"]) == [*exact, "spans by place", *by_decoder]
    assert found["whole"] == {name: found["run"][name] for name in found["whole"]}
    profile = found["run"]["spans by place"]
    assert profile["rows"] == 6 and all(0 <= p["value"] <= 1 for p in profile["places"])


def test_a_model_that_knows_the_text_finds_the_spans_at_every_place(documents):
    """A stand-in that answers right in the last five stretches only."""
    from types import SimpleNamespace

    from revela.training.probes.decoder import PLACES, spans_by_place

    texts = [" ".join(str(1000 + i) for i in range(40)) for _ in range(4)]

    def tokenizer(given, add_special_tokens=False):
        return {"input_ids": [[int(word) for word in text.split()] for text in given]}

    def predict(batch, begin, count):
        rows = [row.tolist().index(7) for row in batch]
        assert begin == [7] and batch.shape[1] == 40 - 3 + 1 + 1
        right = [[1000 + at + k for k in range(count)] for at in rows]
        return torch.tensor([r if at >= 20 else [0] * 3 for r, at in zip(right, rows, strict=True)])

    lm = SimpleNamespace(sentinels=[7, 8], tokenizer=tokenizer, predict=predict, name="m")
    lm.with_special_tokens = lambda ids: [*ids, 1]
    found = spans_by_place(texts, lm)["spans by place"]
    assert [p.value for p in found.places] == [0.0] * 5 + [1.0] * 5 and len(found.places) == PLACES
    assert found.slope.low > 0.1 and found.drop.value == -1.0
    with pytest.raises(RevelaError, match="29 tokens are too few for 10 spans: raise --max-tok"):
        spans_by_place([texts[0][: 29 * 5 - 1]], lm)
    with pytest.raises(RevelaError, match="m has no sentinel token"):
        lm.sentinels = []
        spans_by_place(texts, lm)
