"""The ONNX form says what torch says, for every family and pooling; what cannot be exported leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import re

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from small import build

from conftest import make_rows, tiny_config

pytest.importorskip("onnxruntime")

from revela.cli.export import export
from revela.encoders import graph_export
from revela.encoders.graph_export import export_onnx
from revela.encoders.graphs import CONFIG, EXPORT, TOKENIZER
from revela.errors import RevelaError

TEXTS = [row["text"] for row in make_rows(30)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, saved_retriever):
    """The ONNX form of the saved retriever, by the command."""
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        export(str(saved_retriever), out=folder)
    assert re.search(r"model\.onnx: .* differs from torch's vectors by \de-0[678]", said.getvalue())
    return folder


MISTAKES = [
    ("{model} --out {model}", "exists: choose another --out"),
    ("{lm} --out {new}", "is not a Sentence-Transformers folder: it has no modules.json"),
    ("{new} --out {new}", "is neither a folder nor a hub id"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES)
def test_a_mistake_is_told(refused, tmp_path, saved_retriever, tiny_lm_folder, arguments, sentence):
    places = {"model": saved_retriever, "lm": tiny_lm_folder, "new": tmp_path / "new"}
    assert sentence in refused("export", *arguments.format(**places).split())
    assert not (tmp_path / "new").exists()


def test_a_folder_needs_nothing_of_ours(exported):
    import onnxruntime
    import tokenizers

    assert {file.name for file in exported.iterdir()} == {EXPORT, TOKENIZER, CONFIG}
    config = json.loads((exported / CONFIG).read_text())
    assert config["prompts"] == {"query": "query: ", "passage": "passage: "}
    assert config["dimension"] == 64
    session = onnxruntime.InferenceSession(exported / EXPORT)
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [o.name for o in session.get_outputs()] == ["sentence_embedding"]
    tokenizer = tokenizers.Tokenizer.from_file(str(exported / TOKENIZER))
    batch = tokenizer.encode_batch(["query: one", "query: " + "two " * 300])
    assert [len(e.ids) for e in batch] == [config["max_tokens"]] * 2
    assert sum(batch[0].attention_mask) < 20
    ids, mask = (np.array([getattr(e, what) for e in batch]) for what in ("ids", "attention_mask"))
    (vectors,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt_neox"])
def test_families(kind, tmp_path, tiny_tokenizer):
    import transformers

    torch.manual_seed(0)
    transformers.AutoModel.from_config(tiny_config(kind)).save_pretrained(tmp_path / "lm")
    tiny_tokenizer.save_pretrained(tmp_path / "lm")
    pooling = {"qwen3": "eos", "gemma3": "mean", "gpt_neox": "weighted-mean"}[kind]
    model = build(tmp_path / "lm", pooling, max_tokens=100)  # longer than gemma's window of 64
    assert export_onnx(model, tmp_path / "out") < 1e-5
    assert (tmp_path / "out" / EXPORT).is_file()


def test_refusals_leave_nothing(tmp_path, tiny_lm_folder, monkeypatch):
    model, out = build(tiny_lm_folder), tmp_path / "out"
    static = SentenceTransformer(modules=[StaticEmbedding(model.tokenizer, embedding_dim=8)])
    with pytest.raises(RevelaError, match="StaticEmbedding cannot be exported"):
        export_onnx(static, out)

    def fail(*args, **kwargs):
        raise RuntimeError("no such operator")

    with monkeypatch.context() as broken:
        broken.setattr(type(model[0].model), "forward", fail)
        message = r"LlamaModel cannot be exported to ONNX .*no such operator"
        with pytest.raises(RevelaError, match=message):
            export_onnx(model, out)
    (tmp_path / "there").mkdir()
    with pytest.raises(RevelaError, match="exists: choose another --out"):
        export_onnx(model, tmp_path / "there")
    monkeypatch.setattr(graph_export, "_write_graph", lambda *_: None)
    monkeypatch.setattr(graph_export, "open_export", lambda *_: None)
    monkeypatch.setattr(graph_export, "difference", lambda *_: 2e-4)
    with pytest.raises(RevelaError, match=r"differ by 2\.0e-04"):
        export_onnx(model, out)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
