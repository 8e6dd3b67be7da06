"""Sentence-Transformers folders of every kind: vectors of length one, and those of the stock
library, whatever modules, widths, routes and precisions a folder has.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from small import build

from conftest import make_rows
from revela import Document, Index, Retriever, RevelaError
from revela.encoders import torch_model
from revela.encoders.load import load_encoder
from revela.encoders.model_files import modules_of, resolve
from revela.encoders.torch_model import open_model
from revela.training import settings
from revela.training.retriever.build import build_retriever

TEXTS = [" ".join(row["text"].split()[:4]) for row in make_rows(12)]  # a chunk each
UNNORMALISED = ["no normalisation", "truncated", "dense"]


def make(kind: str, lm: Path, folder: Path) -> Path:
    """A folder of this kind, whose vectors are of any length as they come."""
    transformer, pooling, _ = build(lm)
    prompts = {"query": "query: ", "document": "passage: "}
    if kind == "router":
        other, mean, _ = build(lm, layers=1)
        routes = [other, mean], [transformer, pooling]
        parts = [modules.Router.for_query_document(*routes)]
    elif kind == "routed layers":
        routes = [modules.Dense(32, 16)], [modules.Dense(32, 16)]
        parts = [transformer, pooling, modules.Router.for_query_document(*routes)]
    elif kind == "table and transformer":
        table = modules.StaticEmbedding(transformer.tokenizer, embedding_dim=32)
        parts = [modules.Router.for_query_document([table], [transformer, pooling])]
    else:
        parts = [transformer, pooling, *([modules.Dense(32, 16)] if kind == "dense" else [])]
    width = 8 if kind == "truncated" else None
    model = SentenceTransformer(modules=parts, prompts=prompts, truncate_dim=width)
    with torch.no_grad():
        for parameter in model[0].parameters():  # vectors far from length one
            parameter.mul_(1.5)
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="module", params=[*UNNORMALISED, "router", "routed layers"])
def folder(request, tiny_lm_folder, tmp_path_factory):
    return make(request.param, tiny_lm_folder, tmp_path_factory.mktemp("embedder") / "model")


def stock_vectors(folder: Path) -> dict[str, np.ndarray]:
    model = SentenceTransformer(str(folder), device="cpu").float()
    how = dict(normalize_embeddings=True)
    return {
        "encode_queries": model.encode_query(TEXTS, **how),
        "encode_passages": model.encode_document(TEXTS, **how),
    }


def same(ours, stock, most=1e-5):
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(ours, stock, atol=most)


def test_vectors_are_those_of_the_stock_library_with_length_one(folder):
    encoder = load_encoder(folder, "fp32")
    stock = stock_vectors(folder)
    for name, expected in stock.items():
        same(getattr(encoder, name)(TEXTS), expected)
    assert np.abs(stock["encode_queries"] - stock["encode_passages"]).max() > 0.01


def test_a_table_for_queries_and_a_transformer_for_passages(tiny_lm_folder, tmp_path):
    folder = make("table and transformer", tiny_lm_folder, tmp_path / "model")
    for precision in ("fp32", "bf16"):
        encoder = load_encoder(folder, precision)
        for name, expected in stock_vectors(folder).items():
            same(getattr(encoder, name)(TEXTS), expected, 1e-5 if precision == "fp32" else 0.05)
    assert len(load_encoder(folder, "fp32", max_tokens=8).encode_queries(TEXTS)) == len(TEXTS)


def test_an_index_stores_and_finds_what_the_stock_library_ranks(folder, tmp_path):
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    index = Index.create(tmp_path / "index", folder)
    index.add(documents)
    stock = stock_vectors(folder)
    cosines = stock["encode_queries"] @ stock["encode_passages"].T
    for text, row in zip(TEXTS, cosines, strict=True):
        (hit,) = index.search(text, k=1, mode="dense")
        assert hit.score == pytest.approx(row.max(), abs=0.02)  # maybe in bf16
        assert row[int(hit.id)] > row.max() - 0.02


@pytest.mark.parametrize("kind", ["truncated", "dense"])
def test_an_export_gives_the_same_vectors(kind, tiny_lm_folder, tmp_path):
    pytest.importorskip("onnxruntime")
    from revela.encoders.graph_export import export_onnx
    from revela.encoders.graphs import open_export

    folder = make(kind, tiny_lm_folder, tmp_path / "model")
    export_onnx(open_model(folder), tmp_path / "onnx", tokens=True)
    encoder = open_export(tmp_path / "onnx")
    for name, expected in stock_vectors(folder).items():
        same(getattr(encoder, name)(TEXTS), expected)
    tokens_TW = encoder.encode_with_tokens(TEXTS[:1])[1][0]
    np.testing.assert_allclose(np.linalg.norm(tokens_TW, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["router", "routed layers"])
def test_where_routes_cannot_be_followed_is_one_sentence(kind, tiny_lm_folder, tmp_path):
    pytest.importorskip("onnxruntime")
    from revela.encoders.graph_export import export_onnx

    folder = make(kind, tiny_lm_folder, tmp_path / "model")
    with pytest.raises(RevelaError, match=r"different modules \(Router\) cannot be exported"):
        export_onnx(open_model(folder), tmp_path / "onnx")
    encoder = load_encoder(folder, "fp32")
    for ask in (encoder.encode_with_tokens, encoder.query_tokens):
        with pytest.raises(RevelaError, match="token vectors cannot be compared: search without"):
            ask(TEXTS)
    with pytest.raises(RevelaError, match=r"different modules \(Router\), and training takes"):
        build_retriever(folder, settings.Retriever())


def test_a_role_without_a_route_is_one_sentence(tiny_lm_folder, tmp_path):
    transformer, pooling, _ = build(tiny_lm_folder)
    router = modules.Router({"document": [transformer, pooling]})
    SentenceTransformer(modules=[router]).save_pretrained(str(tmp_path))
    with pytest.raises(RevelaError, match=r"has no route for a query .*: give another model"):
        load_encoder(tmp_path, "fp32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_any_precision_are_read_as_fp32(dtype, tiny_lm_folder, tmp_path, monkeypatch):
    folder = make("routed layers", tiny_lm_folder, tmp_path / "model")
    SentenceTransformer(str(folder)).to(dtype).save_pretrained(str(folder))
    monkeypatch.setattr(torch_model, "has_fast_bf16", lambda device: True)
    expected = stock_vectors(folder)
    for precision, most in (("fp32", 1e-5), ("auto", 0.05)):
        encoder = load_encoder(folder, precision)
        assert {p.dtype for p in encoder.model.parameters()} == {torch.float32}
        for name, stock in expected.items():
            same(getattr(encoder, name)(TEXTS), stock, most)


def pickled(place: Path) -> None:
    """Put a module's weights into pytorch_model.bin instead."""
    from safetensors.torch import load_file

    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("kind", "place"),
    [("dense", ""), ("dense", "2_Dense"), ("router", "query_0_Transformer")],
)
def test_weights_outside_of_safetensors_are_one_sentence(kind, place, tiny_lm_folder, tmp_path):
    folder = make(kind, tiny_lm_folder, tmp_path / "model")
    pickled(folder / place)
    found = rf"{folder / place} has its weights in pytorch_model.bin alone: only safetensors"
    for read in (Retriever, open_model, lambda f: resolve(str(f))):
        with pytest.raises(RevelaError, match=found):
            read(folder)
    (folder / place / "pytorch_model.bin").unlink()  # as the hub's is not downloaded
    with pytest.raises(RevelaError, match="no weights in safetensors, and only safetensors are"):
        open_model(folder)


def test_a_state_of_a_trainer_is_no_weight(tiny_lm_folder, tmp_path):
    folder = make("dense", tiny_lm_folder, tmp_path / "model")
    (folder / "training_args.bin").write_bytes(b"settings")
    assert resolve(str(folder)) == folder


def test_modules_of_routes_and_of_older_folders(tiny_lm_folder, tmp_path):
    folder = make("router", tiny_lm_folder, tmp_path / "model")
    kinds = [kind for kind, _ in modules_of(folder)]
    assert kinds == ["Router", "Transformer", "Pooling", "Transformer", "Pooling"]
    (folder / "router_config.json").rename(folder / "config.json")
    assert [kind for kind, _ in modules_of(folder)] == kinds
    (folder / "modules.json").write_text(json.dumps({"a": 1}))
    assert modules_of(folder) == []
