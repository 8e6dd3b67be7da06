"""The ONNX form says what torch says, for every family and pooling; what cannot be exported leaves
nothing behind.
"""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from small import build

from conftest import make_rows, tiny_config

pytest.importorskip("onnxruntime")

from revela.errors import RevelaError
from revela.retriever import onnx as onnx_form
from revela.retriever.build import load_retriever
from revela.retriever.load import load_encoder
from revela.retriever.onnx import CONFIG, MODEL, TOKENIZER, OnnxEncoder, export_onnx

TEXTS = [row["text"] for row in make_rows(30)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, saved_retriever):
    """A folder with both ONNX forms of the saved retriever, and the check of each."""
    home = tmp_path_factory.mktemp("exported")
    checks = [
        export_onnx(load_retriever(saved_retriever), home / name, int8=name == "int8")
        for name in ("onnx", "int8")
    ]
    return home, *checks


def test_vectors_are_those_of_the_saved_folder(exported, saved_retriever):
    home, check, _ = exported
    texts = [*TEXTS[:7], "Ocean", "ÖFFENTLICH", "", TEXTS[0] * 9]
    ours, torchs = OnnxEncoder(home / "onnx"), load_encoder(saved_retriever, "fp32")
    np.testing.assert_allclose(ours.encode_queries(texts), torchs.encode_queries(texts), atol=1e-5)
    np.testing.assert_allclose(
        ours.encode_passages(texts), torchs.encode_passages(texts), atol=1e-5
    )
    np.testing.assert_allclose(
        ours.encode_passages(texts),
        np.vstack([ours.encode_passages([t]) for t in texts]),
        atol=1e-5,
    )
    assert check.difference < 1e-5 and check.cosine > 0.9999
    assert (
        np.abs(ours.encode_queries(texts) - ours.encode_passages(texts)).max() > 0.01
    )  # the prompts are put before


def test_a_folder_needs_nothing_of_ours(exported):
    onnxruntime, tokenizers = pytest.importorskip("onnxruntime"), pytest.importorskip("tokenizers")
    folder = exported[0] / "onnx"
    assert {file.name for file in folder.iterdir()} == {MODEL, TOKENIZER, CONFIG}
    config = json.loads((folder / CONFIG).read_text())
    assert (
        config["prompts"] == {"query": "query: ", "passage": "passage: "}
        and config["dimension"] == 64
    )
    session = onnxruntime.InferenceSession(folder / MODEL)
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [o.name for o in session.get_outputs()] == ["sentence_embedding"]
    batch = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER)).encode_batch(
        ["query: one", "query: " + "two " * 300]
    )
    assert [len(e.ids) for e in batch] == [config["max_tokens"]] * 2 and sum(
        batch[0].attention_mask
    ) < 20
    ids, mask = (np.array([getattr(e, what) for e in batch]) for what in ("ids", "attention_mask"))
    (vectors,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_eight_bits_are_smaller_and_nearly_the_same(exported):
    home, _, check = exported
    sizes = [(home / kind / MODEL).stat().st_size for kind in ("onnx", "int8")]
    assert sizes[1] < 0.8 * sizes[0]
    cosines = (
        OnnxEncoder(home / "onnx").encode_passages(TEXTS)
        * OnnxEncoder(home / "int8").encode_passages(TEXTS)
    ).sum(axis=1)
    assert 0.95 < cosines.min() < 0.99999 and 0.95 < check.cosine < 0.99999
    assert sorted(file.name for file in (home / "int8").iterdir()) == sorted(
        [MODEL, TOKENIZER, CONFIG]
    )


def test_what_eight_bits_would_spoil_stays_whole(exported):
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(exported[0] / "int8" / MODEL).graph
    eight_bit = [
        w
        for w in graph.initializer
        if w.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) and len(w.dims) == 2
    ]
    whole = [
        tuple(w.dims)
        for w in graph.initializer
        if w.data_type == onnx.TensorProto.FLOAT and len(w.dims) == 2
    ]
    assert (32, 32) in whole and whole.count(
        (48, 32)
    ) == 2  # whitening, and the way out of each feed-forward block
    assert (
        len(eight_bit) == 3 + 2 * 6
    )  # tables and weights of tokens; q, k, v, o, gate, up of two layers


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt_neox"])
def test_families(kind, tmp_path, tiny_tokenizer):
    import transformers

    torch.manual_seed(0)
    transformers.AutoModel.from_config(tiny_config(kind)).save_pretrained(tmp_path / "lm")
    tiny_tokenizer.save_pretrained(tmp_path / "lm")
    pooling = {"qwen3": "eos", "gemma3": "mean", "gpt_neox": "weighted-mean"}[kind]
    check = export_onnx(
        build(tmp_path / "lm", pooling, max_tokens=100), tmp_path / "out"
    )  # longer than gemma's window of 64
    assert check.difference < 1e-5 and (tmp_path / "out" / MODEL).is_file()


def test_refusals_leave_nothing(tmp_path, tiny_lm_folder, monkeypatch):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    model, out = build(tiny_lm_folder), tmp_path / "out"
    with pytest.raises(RevelaError, match="StaticEmbedding cannot be exported"):
        export_onnx(
            SentenceTransformer(modules=[StaticEmbedding(model.tokenizer, embedding_dim=8)]), out
        )
    monkeypatch.setattr(
        type(model[0].model),
        "forward",
        lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no such operator")),
    )
    with pytest.raises(
        RevelaError, match=r"LlamaModel cannot be exported to ONNX .*no such operator"
    ):
        export_onnx(model, out)
    monkeypatch.undo()
    (tmp_path / "there").mkdir()
    with pytest.raises(RevelaError, match="exists: choose another --out"):
        export_onnx(model, tmp_path / "there")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else True
    )
    with pytest.raises(RevelaError, match=r"needs onnxscript: run pip install 'revela\[onnx\]'"):
        export_onnx(model, out)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_vectors_that_differ_are_refused(tmp_path, tiny_lm_folder, monkeypatch):
    model = build(tiny_lm_folder)
    monkeypatch.setattr(onnx_form, "_write_graph", lambda model, file: None)
    monkeypatch.setattr(onnx_form, "_quantise", lambda file, width: None)
    monkeypatch.setattr(onnx_form, "_check", lambda model, folder: onnx_form.Check(2e-4, 0.99))
    with pytest.raises(RevelaError, match=r"differ by 2\.0e-04"):
        export_onnx(model, tmp_path / "out")
    monkeypatch.setattr(onnx_form, "_check", lambda model, folder: onnx_form.Check(0.0, 0.9))
    with pytest.raises(RevelaError, match="8 bits are too few"):
        export_onnx(model, tmp_path / "out", int8=True)
    assert not list(tmp_path.iterdir())
