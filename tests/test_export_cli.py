"""revela export: one command, a line that says how well it agrees; mistakes are one sentence and
exit code 2.
"""

from __future__ import annotations

import pytest


def test_export_says_how_well_it_agrees(doing, tmp_path, saved_retriever):
    pytest.importorskip("onnxscript")
    out = tmp_path / "onnx"
    code, said, _ = doing("export", saved_retriever, "--out", out, "--int8")
    assert code == 0 and "model.onnx" in said and "least cosine 0.9" in said
    names = {file.name for file in out.iterdir()}
    assert names == {"model.onnx", "tokenizer.json", "retriever.json"}


@pytest.mark.parametrize(
    ("model", "out", "sentence"),
    [
        ("model", "model", "exists: choose another --out"),
        ("lm", "new", "is not a Sentence-Transformers folder: it has no modules.json"),
        ("new", "new", "is neither a folder nor a hub id"),
    ],
)
def test_mistakes(doing, tmp_path, saved_retriever, tiny_lm_folder, model, out, sentence):
    places = {"model": saved_retriever, "lm": tiny_lm_folder, "new": tmp_path / "new"}
    code, _, err = doing("export", places[model], "--out", places[out])
    assert code == 2 and sentence in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()
