"""revela export: one command, a line that says how well it agrees; mistakes are one sentence and
exit code 2.
"""

from __future__ import annotations

import pytest

from test_cli import run


def test_export_says_how_well_it_agrees(monkeypatch, capsys, tmp_path, saved_retriever):
    pytest.importorskip("onnxscript")
    given = ("export", saved_retriever, "--out", tmp_path / "onnx")
    code, out, _ = run(monkeypatch, capsys, *given)
    assert code == 0 and "model.onnx" in out and "differs from torch's vectors by" in out
    written = {file.name for file in (tmp_path / "onnx").iterdir()}
    assert written == {"model.onnx", "tokenizer.json", "retriever.json"}


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("{model} --out {model}", "exists: choose another --out"),
        ("{lm} --out {new}", "is not a Sentence-Transformers folder: it has no modules.json"),
        ("{new} --out {new}", "is neither a folder nor a hub id"),
    ],
)
def test_mistakes(
    monkeypatch, capsys, tmp_path, saved_retriever, tiny_lm_folder, arguments, sentence
):
    places = {"model": saved_retriever, "lm": tiny_lm_folder, "new": tmp_path / "new"}
    code, _, err = run(monkeypatch, capsys, "export", *arguments.format(**places).split())
    assert code == 2 and sentence in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()
