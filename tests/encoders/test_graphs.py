"""Graphs made of a BERT's weights, and their int8 copies, give the vectors that torch gives."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from folders import KINDS, edit
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from conftest import make_rows
from revela import Document, Index
from revela.encoders import cpu, graphs, load
from revela.encoders.after_transformer import VECTOR
from revela.encoders.embedded import E5, MINILM, is_installed
from revela.encoders.graph_encoder import GraphEncoder
from revela.encoders.int8 import _range, quantised
from revela.encoders.load import keep_graph, load_encoder, resolve
from revela.encoders.model_files import fingerprint
from revela.encoders.torch_encoder import TorchEncoder
from revela.errors import RevelaError
from revela.searching.manifest import Indexing

TEXTS = [*(row["text"] for row in make_rows(6)), "Ocean", "ÖFFENTLICH", "x " * 99, "", "a\r\nb"]
SMALL = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, pad_token_id=1
)
FAMILIES = {
    "bert": (transformers.BertConfig, dict(max_position_embeddings=40, hidden_act="gelu_new")),
    "roberta": (transformers.RobertaConfig, dict(max_position_embeddings=42, type_vocab_size=1)),
}


def make(folder, tokenizer, family="bert", after=()):
    """Save a tiny embedder of random weights."""
    torch.manual_seed(0)
    config, own = FAMILIES[family]
    lm = transformers.AutoModel.from_config(config(vocab_size=len(tokenizer), **SMALL, **own))
    for weight in lm.parameters():  # as large as trained ones, so that activations differ
        torch.nn.init.normal_(weight, std=0.3)
    lm.save_pretrained(folder / "lm")
    tokenizer.save_pretrained(folder / "lm")
    transformer = modules.Transformer(str(folder / "lm"), max_seq_length=32)
    parts = [transformer, modules.Pooling(32, "mean"), *after]
    SentenceTransformer(modules=parts).save_pretrained(str(folder / "model"))
    return folder / "model"


def assert_same_tokens(encoders, texts):
    for ours, wanted in zip(*(encoder.query_tokens(texts) for encoder in encoders), strict=True):
        np.testing.assert_allclose(ours.vector, wanted.vector, atol=1e-5)
        np.testing.assert_allclose(ours.tokens, wanted.tokens, atol=1e-5)
        assert ours.spans == wanted.spans


def same_as_stock(folder, encoder):
    stock = SentenceTransformer(str(folder))
    read = [text if text.strip() else "." for text in TEXTS]
    how = dict(normalize_embeddings=True, show_progress_bar=False)
    expected = stock.encode_document(read, **how), stock.encode_query(read, **how)
    found = encoder.encode_passages(TEXTS), encoder.encode_queries(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    return stock


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_and_tokens_are_those_of_torch(family, tiny_tokenizer, tmp_path):
    folder = make(tmp_path, tiny_tokenizer, family)
    encoder = load_encoder(folder, "fp32")
    assert isinstance(encoder, GraphEncoder)
    stock = same_as_stock(folder, encoder)
    assert_same_tokens((encoder, TorchEncoder(stock, bf16=False)), TEXTS[:-2])


def test_what_a_graph_cannot_hold_is_read_by_torch(tiny_tokenizer, tmp_path):
    parts = {
        "residual": modules.Dense(32, 32, use_residual=True),
        "softplus": modules.Dense(32, 8, activation_function=torch.nn.Softplus()),
    }
    for name, part in parts.items():
        folder = make(tmp_path / name, tiny_tokenizer, after=[part])
        encoder = load_encoder(folder, "fp32")
        assert isinstance(encoder, TorchEncoder)
        same_as_stock(folder, encoder)
        with pytest.raises(RevelaError, match="cannot be read in int8"):
            load_encoder(folder, "int8")


@pytest.mark.parametrize("name", [MINILM, E5])
def test_embedded_models(name):
    if not is_installed(name):
        pytest.skip(f"{name} is not installed (make test does)")
    folder = resolve(name)
    whole, copy = (load_encoder(folder, precision) for precision in ("fp32", "int8"))
    torchs = TorchEncoder(SentenceTransformer(str(folder)).float(), bf16=False)
    texts = [text for pair in graphs.SAMPLE for text in pair] + ["long " * 600, ""]
    expected = torchs.encode_passages(texts)
    np.testing.assert_allclose(whole.encode_passages(texts), expected, atol=1e-5)
    np.testing.assert_allclose(whole.encode_queries(texts), torchs.encode_queries(texts), atol=1e-5)
    cosines = (copy.encode_passages(texts[:-2]) * expected[:-2]).sum(axis=1)
    assert copy.precision == "int8" and cosines.mean() > 0.99 and cosines.min() > 0.97
    assert whole.count_tokens(texts, "passage") == torchs.count_tokens(texts, "passage")


def test_products_in_int8_are_as_a_loop_computes_them():
    import openvino as ov
    from openvino import opset13 as op

    rng = np.random.default_rng(0)
    weights_NC = rng.normal(size=(64, 64)).astype(np.float32)
    states_BLC = rng.normal(size=(2, 9, 64)).astype(np.float32)
    states_BLC[..., 3] *= 30  # one channel is far larger, as in trained models
    inputs = op.parameter([-1, -1, 64], ov.Type.f32, name="states")
    inputs.output(0).set_names({"states"})
    product = op.matmul(inputs, op.constant(weights_NC), False, True)
    product.output(0).set_names({VECTOR})
    copy = quantised(ov.Model([product], [inputs], "m"), [{"states": states_BLC}])
    how = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = cpu.openvino_core().compile_model(copy, "CPU", how)
    (found,) = compiled({"states": states_BLC}).values()

    flat = states_BLC.reshape(-1, 64)
    scale_C = np.abs(flat).max(axis=0) ** 0.6 / np.abs(weights_NC).max(axis=0) ** 0.4
    scaled, weights = flat / scale_C, weights_NC * scale_C
    low, high = _range(scaled.min(), scaled.max())
    step = (high - low) / 255
    states = np.clip(np.round((scaled - low) / step), 0, 255) * step + low
    steps_N1 = np.abs(weights).max(axis=1, keepdims=True) / 127
    expected = states @ (np.round(weights / steps_N1) * steps_N1).T
    np.testing.assert_allclose(found.reshape(-1, 64), expected, atol=1e-3 * np.abs(expected).max())
    exact = flat @ weights_NC.T
    assert 0 < np.abs(expected - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize(("low", "high"), [(-3.0, 2.0), (-0.17, 9.0), (0.0, 1.0), (0.5, 1.0)])
def test_zero_is_a_level_of_every_range(low, high):
    bottom, top = _range(low, high)
    step = (top - bottom) / 255
    assert bottom <= low + step and top >= high - step
    assert bottom / step == pytest.approx(round(bottom / step), abs=1e-6)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path))
    return tmp_path


def test_a_copy_that_is_not_as_good_is_not_used(tiny_tokenizer, empty_cache, monkeypatch, caplog):
    folder = make(empty_cache, tiny_tokenizer)
    monkeypatch.setattr(graphs, "LEAST_COSINE", 1.1)
    caplog.set_level("INFO", "revela")
    encoder = graphs.open_graph(folder, "int8")
    assert encoder is not None and encoder.precision == "bf16"
    assert "is not used in int8: its vectors have a cosine of" in caplog.text
    monkeypatch.setattr(graphs, "LEAST_COSINE", 0)
    again = graphs.open_graph(folder, "int8")  # what was found is kept
    assert again is not None and again.precision == "bf16"


def test_a_copy_is_made_once(tiny_tokenizer, empty_cache, monkeypatch):
    folder = make(empty_cache, tiny_tokenizer)
    first = load_encoder(folder, "int8").encode_passages(TEXTS)
    monkeypatch.setattr(graphs, "quantised", None)
    np.testing.assert_array_equal(load_encoder(folder, "int8").encode_passages(TEXTS), first)


def test_precision_by_what_the_processor_has(monkeypatch):
    monkeypatch.delenv(cpu.LIMIT, raising=False)
    for flags, limit, expected in (
        ({"avx2"}, "", "fp32"),
        ({"avx2", "avx_vnni"}, "", "int8"),
        ({"avx512_vnni", "avx512_bf16"}, "", "int8"),
        ({"avx512_vnni", "avx512_bf16"}, "AVX2_VNNI", "int8"),
        ({"avx512_vnni", "avx512_bf16"}, "avx2", "fp32"),
        ({"avx512_bf16"}, "", "bf16"),
        ({"asimd", "i8mm"}, "", "int8"),
        (set(), "", "fp32"),
    ):
        monkeypatch.setattr(cpu, "flags", lambda flags=flags: frozenset(flags))
        monkeypatch.setenv(cpu.LIMIT, limit)
        assert cpu.fastest(int8=True) == expected, (flags, limit)
        assert cpu.fastest(int8=False) != "int8"


CTRL_C_AFTER_ENCODING = """
import signal, sys
from pathlib import Path
from revela.encoders.graphs import open_graph

encoders = [open_graph(Path(sys.argv[1]), precision) for precision in ("fp32", "int8")]
for encoder in encoders:
    encoder.encode_passages(["ocean"])
del encoder
while encoders:
    del encoders[0]
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_after_several_encoders(tiny_tokenizer, tmp_path):
    """Each of OpenVINO's cores has a stack for signals, which the next one must not bring back."""
    command = [sys.executable, "-c", CTRL_C_AFTER_ENCODING, make(tmp_path, tiny_tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


# Models that are no BERT are exported once, by torch


@pytest.fixture(scope="module")
def cache(saved_retriever, tmp_path_factory):
    """A cache with the export of the saved retriever."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVELA_CACHE", str(folder))
        assert graphs.open_graph(saved_retriever) is None
        keep_graph(saved_retriever)
    return folder


@pytest.fixture
def kept(cache, saved_retriever, monkeypatch):
    """The encoder of that export."""
    monkeypatch.setenv("REVELA_CACHE", str(cache))
    return load_encoder(saved_retriever, "fp32")


@pytest.fixture(scope="module")
def torchs(saved_retriever):
    return TorchEncoder.load(saved_retriever, "fp32")


def test_an_export_gives_vectors_and_tokens_as_torch_does(kept, saved_retriever, torchs):
    assert isinstance(kept, GraphEncoder)
    assert load_encoder(saved_retriever, "auto").precision != "int8"  # a decoder
    texts = [*TEXTS[:3], "</s> Ocean", "x " * 99, ""]
    np.testing.assert_allclose(kept.encode_queries(texts), torchs.encode_queries(texts), atol=1e-5)
    assert_same_tokens((kept, torchs), texts[:-1])
    ours, wanted = (encoder.encode_with_tokens(texts)[1] for encoder in (kept, torchs))
    for ours_TW, wanted_TW in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(ours_TW, wanted_TW, atol=1e-5)
    assert kept.count_tokens(texts, "passage") == torchs.count_tokens(texts, "passage")
    assert kept.cut_to_fit([""] * 6, texts) == torchs.cut_to_fit([""] * 6, texts)


def test_an_index_says_in_which_precision_its_vectors_are(tiny_tokenizer, tmp_path):
    folder = make(tmp_path, tiny_tokenizer)
    for precision in ("int8", "fp32"):
        encoder = load_encoder(folder, precision)
        made = Index.create(tmp_path / precision, folder, encoder=encoder)
        made.add(Document(str(i), text) for i, text in enumerate(TEXTS))
        opened = Index.open(tmp_path / precision)
        assert opened.info.precision == opened.encoder.precision == precision
        again, before = (e.encode_queries(TEXTS) for e in (opened.encoder, encoder))
        np.testing.assert_array_equal(again, before)


def test_an_int8_index_whose_export_is_gone(kept, saved_retriever, tmp_path, monkeypatch, exports):
    folder, encoder = tmp_path / "index", load_encoder(saved_retriever, "int8")
    Index.create(folder, saved_retriever, encoder=encoder).add([Document("a", TEXTS[0])])
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "another cache"))
    opened = Index.open(folder).encoder
    assert isinstance(opened, GraphEncoder) and opened.precision == encoder.precision == "int8"
    again, before = opened.encode_queries(TEXTS), encoder.encode_queries(TEXTS)
    np.testing.assert_allclose(again, before, atol=1e-3)


WITHOUT_TORCH = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
from revela.cli.serve import serve
from revela.searching.index import Index
from revela.searching.server import lifecycle
from revela.searching.server.app import Service

def server_of(service, limits):
    def run(sockets):
        encoding = service.encoding
        count = asyncio.run(encoding.tokens(["ocean"], "query", False, "query"))
        (found,) = asyncio.run(encoding.batcher.encode(["ocean"], count, "query", True))
        assert count == [int(sys.argv[1])] and found.spans == [(0, 5)]
        asyncio.run(encoding.batcher.encode(["ocean"], [3], "passage", True))
        encoding.batcher.close()
    return SimpleNamespace(run=run)

lifecycle.server_of = server_of
Service.app = lambda service: service
for folder in sys.argv[2:]:
    assert Index.open(folder).search("ocean", 3, rerank="late-interaction")
    serve(Path(folder), port=0)
    assert "torch" not in sys.modules
"""


def test_searches_and_services_need_no_torch(kept, saved_retriever, tmp_path):
    folders = [tmp_path / "with tokens", tmp_path / "without"]
    for folder in folders:
        settings = Indexing(keep_tokens=folder.name == "with tokens")
        made = Index.create(folder, saved_retriever, settings=settings, encoder=kept)
        made.add(Document(str(i), text) for i, text in enumerate(TEXTS[:6]))
    (count,) = kept.count_tokens(["ocean"], "query")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(count), *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_export_that_fails_is_only_logged(saved_retriever, empty_cache, monkeypatch, caplog):
    from revela.encoders import graph_export

    monkeypatch.setattr(graph_export, "_write_graph", lambda *_: None)
    monkeypatch.setattr(graph_export, "open_export", lambda *_: None)
    monkeypatch.setattr(graph_export, "difference", lambda *_: 2e-4)
    with caplog.at_level("INFO", "revela"):
        keep_graph(saved_retriever)
    assert "is run by torch (this model cannot be exported: its vectors differ" in caplog.text
    assert not graphs.export_folder(fingerprint(saved_retriever)).exists()


TEXT = ["The NATO summit in Paris", "ÜBERMÄSSIG müde Ärzte", *TEXTS[:4]]


def of_stock(folder):
    stock = SentenceTransformer(str(folder), device="cpu")
    return stock.encode_document(TEXT, normalize_embeddings=True)


OF_CONFIG = ("capitals by tokenizer_config", "accents by tokenizer_config")


@pytest.mark.parametrize("name", [*OF_CONFIG, "truncated on the left", "prefix space, roberta"])
def test_a_graph_is_compared_with_torch_once(name, tiny_tokenizer, empty_cache, monkeypatch):
    folder, agrees = empty_cache / "model", name != "prefix space, roberta"
    KINDS[name](folder, tiny_tokenizer)
    expected = of_stock(folder)
    first = load_encoder(folder, "fp32")
    np.testing.assert_allclose(first.encode_passages(TEXT), expected, atol=1e-5)
    assert isinstance(first, GraphEncoder) == agrees
    kept = [json.loads(file.read_text()) for file in (empty_cache / "compared").glob("*")]
    assert kept == [agrees]
    monkeypatch.setattr(load, "_agrees_with_torch", None)  # what was found is kept
    again = load_encoder(folder, "fp32")
    np.testing.assert_array_equal(again.encode_passages(TEXT), first.encode_passages(TEXT))


def test_without_torch_a_graph_has_the_stock_tokenizer(tiny_tokenizer, tmp_path, monkeypatch):
    for name in OF_CONFIG:
        KINDS[name](tmp_path / name / "model", tiny_tokenizer)
        expected = of_stock(tmp_path / name / "model")
        with monkeypatch.context() as patch:
            patch.setattr(load, "has_torch", lambda: False)
            found = load_encoder(tmp_path / name / "model", "fp32").encode_passages(TEXT)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["capitals, distilbert", "truncated on the left, distilbert"])
def test_an_export_keeps_its_own_tokenizer(name, tiny_tokenizer, empty_cache, monkeypatch, exports):
    folder, long = empty_cache / "model", " ".join(map(str, range(99)))
    KINDS[name](folder, tiny_tokenizer)
    monkeypatch.setattr(sys.modules[__name__], "TEXT", [*TEXT, long])
    expected = of_stock(folder)
    load.keep_graph(folder)
    encoder = load_encoder(folder, "fp32")
    assert isinstance(encoder, GraphEncoder)
    np.testing.assert_allclose(encoder.encode_passages(TEXT), expected, atol=1e-5)


def test_an_embedded_model_is_not_compared(empty_cache, monkeypatch):
    monkeypatch.setattr(load, "_agrees_with_torch", None)
    for name in (MINILM, E5):
        if is_installed(name):
            assert isinstance(load_encoder(resolve(name), "fp32"), GraphEncoder)
    assert not (empty_cache / "compared").exists()


def test_tokens_are_read_under_the_lock(saved_retriever, monkeypatch):
    """Each call of a tokenizer of transformers changes its truncation."""
    encoder = TorchEncoder.load(saved_retriever, "fp32")
    tokenizer, calls = encoder.model.tokenizer, []
    plain = type(tokenizer).__call__

    def locked(self, *given, **how):
        calls.append(encoder._lock.locked())
        return plain(self, *given, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", locked)
    encoder.query_tokens(TEXTS[:3])
    assert calls and all(calls)


@pytest.mark.parametrize("limit", [8, 200])
@pytest.mark.parametrize("name", ["llama", "table, truncated", "distilbert"])
def test_a_limit_may_be_another_than_the_models_own(name, limit, tiny_tokenizer, empty_cache):
    folder, text = empty_cache / "model", " ".join(f"ocean {i}" for i in range(60))
    KINDS[name](folder, tiny_tokenizer)
    if name == "llama":
        edit(folder / "config.json", lambda config: config | {"max_position_embeddings": 256})
    for load_with in (load_encoder, TorchEncoder.load):
        if limit == 200 and name == "distilbert":
            with pytest.raises(RevelaError, match=r"--max-tokens 200: .* at most 64"):
                load_with(folder, "fp32", limit)
            continue
        encoder, stock = load_with(folder, "fp32", limit), SentenceTransformer(str(folder))
        if name.startswith("table"):
            stock[0].tokenizer.enable_truncation(limit)
        else:
            stock.max_seq_length = limit
        expected = stock.encode_document([text], normalize_embeddings=True)
        np.testing.assert_allclose(encoder.encode_passages([text]), expected, atol=1e-5)
        cut = encoder.cut_to_fit([""], [text])[0]
        assert len(encoder.encode_passages(cut)) == len(cut) > (limit == 8)
    for wrong in (0, -1):
        with pytest.raises(RevelaError, match=rf"--max-tokens {wrong}: give at least 1"):
            load_encoder(folder, "fp32", wrong)
