"""The ONNX form says what torch says, for every family and pooling; what cannot be exported leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from small import build

from conftest import make_rows, tiny_config

pytest.importorskip("onnxruntime")

from revela import Document, Index
from revela.cli.export import export
from revela.errors import RevelaError
from revela.model_files import fingerprint
from revela.retriever import onnx_export as onnx_form
from revela.retriever.load import load_encoder
from revela.retriever.onnx_encoder import OnnxForQueries, cached_copy, copy_folder
from revela.retriever.onnx_export import (
    CONFIG,
    MODEL,
    TOKENIZER,
    OnnxEncoder,
    cache_copy,
    export_onnx,
)
from revela.settings import Indexing

TEXTS = [row["text"] for row in make_rows(30)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, saved_retriever):
    """The ONNX form of the saved retriever, by the command."""
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        export(str(saved_retriever), out=folder)
    assert re.search(r"model\.onnx: .* differs from torch's vectors by \de-0[678]", said.getvalue())
    return folder


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("{model} --out {model}", "exists: choose another --out"),
        ("{lm} --out {new}", "is not a Sentence-Transformers folder: it has no modules.json"),
        ("{new} --out {new}", "is neither a folder nor a hub id"),
    ],
)
def test_mistakes_are_one_sentence(
    refused, tmp_path, saved_retriever, tiny_lm_folder, arguments, sentence
):
    places = {"model": saved_retriever, "lm": tiny_lm_folder, "new": tmp_path / "new"}
    assert sentence in refused("export", *arguments.format(**places).split())
    assert not (tmp_path / "new").exists()


def test_vectors_are_those_of_the_saved_folder(exported, saved_retriever):
    texts = [*TEXTS[:7], "Ocean", "ÖFFENTLICH", "", TEXTS[0] * 9]
    ours, torchs = OnnxEncoder(exported), load_encoder(saved_retriever, "fp32")
    queries, passages = ours.encode_queries(texts), ours.encode_passages(texts)
    np.testing.assert_allclose(queries, torchs.encode_queries(texts), atol=1e-5)
    np.testing.assert_allclose(passages, torchs.encode_passages(texts), atol=1e-5)
    alone = np.vstack([ours.encode_passages([t]) for t in texts])
    np.testing.assert_allclose(passages, alone, atol=1e-5)
    assert np.abs(queries - passages).max() > 0.01  # the prompts are put before


def test_a_folder_needs_nothing_of_ours(exported):
    import onnxruntime
    import tokenizers

    assert {file.name for file in exported.iterdir()} == {MODEL, TOKENIZER, CONFIG}
    config = json.loads((exported / CONFIG).read_text())
    assert config["prompts"] == {"query": "query: ", "passage": "passage: "}
    assert config["dimension"] == 64
    session = onnxruntime.InferenceSession(exported / MODEL)
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
    assert (tmp_path / "out" / MODEL).is_file()


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
    monkeypatch.setattr(onnx_form, "_write_graph", lambda *_: None)
    monkeypatch.setattr(onnx_form, "_difference", lambda *_: 2e-4)
    with pytest.raises(RevelaError, match=r"differ by 2\.0e-04"):
        export_onnx(model, out)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@pytest.fixture(scope="module")
def cache(saved_retriever, tmp_path_factory):
    """A cache with the ONNX copy of the saved retriever."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVELA_CACHE", str(folder))
        assert cached_copy(saved_retriever) is None
        cache_copy(load_encoder(saved_retriever, "fp32"), fingerprint(saved_retriever))
    return folder


@pytest.fixture
def kept(cache, saved_retriever, monkeypatch):
    """The encoder of that copy."""
    monkeypatch.setenv("REVELA_CACHE", str(cache))
    return cached_copy(saved_retriever)


def test_a_copy_gives_vectors_and_tokens_as_torch_does(kept, saved_retriever):
    torchs, texts = load_encoder(saved_retriever, "fp32"), [*TEXTS[:3], "</s> Ocean", "x " * 99, ""]
    np.testing.assert_allclose(kept.encode_queries(texts), torchs.encode_queries(texts), atol=1e-5)
    for ours, wanted in zip(*(e.query_tokens(texts[:-1]) for e in (kept, torchs)), strict=True):
        np.testing.assert_allclose(ours.vector, wanted.vector, atol=1e-5)
        np.testing.assert_allclose(ours.tokens, wanted.tokens, atol=1e-5)
        assert ours.spans == wanted.spans
    ours, wanted = (encoder.encode_with_tokens(texts)[1] for encoder in (kept, torchs))
    for ours_TW, wanted_TW in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(ours_TW, wanted_TW, atol=1e-5)
    assert kept.counter.count_passages(texts) == torchs.counter.count_passages(texts)
    assert kept.fitted([""] * 6, texts) == torchs.fitted([""] * 6, texts)


def test_a_search_reads_the_copy_that_is_kept(kept, saved_retriever, tmp_path):
    folder, torchs = tmp_path / "index", load_encoder(saved_retriever, "fp32")
    settings = Indexing(keep_tokens=True)
    made = Index.create(folder, saved_retriever, settings=settings, encoder=torchs)
    made.add(Document(str(i), text) for i, text in enumerate(TEXTS))
    opened = Index.open(folder)
    for mode, rerank in (("dense", None), ("hybrid", None), ("hybrid", "tokens")):
        found, wanted = (i.search(TEXTS[0], 5, mode, rerank=rerank) for i in (opened, made))
        assert [hit.id for hit in found] == [hit.id for hit in wanted]
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in wanted], 1e-5)
    assert opened._encoder is None


WITHOUT_TORCH = """
import asyncio, sys
from types import SimpleNamespace
from revela.cli.serve import serve
from revela.index.index import Index
from revela.server import lifecycle
from revela.server.app import Service

def server_of(service, limits):
    def run(sockets):
        (found,), (count,) = asyncio.run(service.encode(["ocean"], "query", False, "query", True))
        assert count == int(sys.argv[1]) and found.spans == [(0, 5)]
        service.batcher.close()
    return SimpleNamespace(run=run)

lifecycle.server_of = server_of
Service.app = lambda service: service
for folder in sys.argv[2:]:
    assert Index.open(folder).search("ocean", 3, rerank="tokens")
    serve(folder, port=0)
    assert "torch" not in sys.modules
"""


def test_searches_and_services_need_no_torch(kept, saved_retriever, tmp_path):
    folders = [tmp_path / "with tokens", tmp_path / "without"]
    for folder in folders:
        settings = Indexing(keep_tokens=folder.name == "with tokens")
        made = Index.create(folder, saved_retriever, settings=settings, encoder=kept)
        made.add(Document(str(i), text) for i, text in enumerate(TEXTS))
    (count,) = kept.counter.count_queries(["ocean"])
    command = [sys.executable, "-c", WITHOUT_TORCH, str(count), *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_service_reads_queries_by_the_copy_and_passages_by_torch(kept, saved_retriever):
    loaded = []

    def load():
        loaded.append(load_encoder(saved_retriever, "bf16"))
        return loaded[-1]

    encoder = OnnxForQueries(kept, load)
    np.testing.assert_array_equal(encoder.encode_queries(["a"]), kept.encode_queries(["a"]))
    assert encoder.query_tokens(["a"])[0].spans and not loaded
    passages = encoder.encode_passages(TEXTS[:3])
    np.testing.assert_array_equal(passages, loaded[0].encode_passages(TEXTS[:3]))


def test_a_copy_that_fails_is_only_logged(saved_retriever, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(onnx_form, "_write_graph", lambda *_: None)
    monkeypatch.setattr(onnx_form, "_difference", lambda *_: 2e-4)
    with caplog.at_level("INFO", "revela"):
        cache_copy(load_encoder(saved_retriever, "fp32"), "0123456789abcdef")
    assert "revela search will load torch" in caplog.text
    assert not copy_folder("0123456789abcdef").exists()
