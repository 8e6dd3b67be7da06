"""Every folder that sentence-transformers opens gives its ``encode_query`` and ``encode_document``,
of length one, on every way; or one sentence refuses it.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from folders import DAMAGED, KINDS, WIDTH, edit, pooled, saved, transformer, words
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from conftest import build_context
from revela import Document, Index, Retriever, RevelaError
from revela.encoders.load import load_encoder, resolve
from revela.encoders.model_files import modules_of
from revela.encoders.prompts import BGE, BGE_ZH, prompts_of
from revela.encoders.torch_model import open_model, positions_of
from revela.text.words import has_words
from revela.training.recipe import Recipe
from revela.training.retriever.build import untrained_retriever
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import Retriever as RetrieverSettings
from tests.collection_folder import write_collection

TEXTS = [
    "ocean00 ocean01 castle2 the Sea", "Garden0 is CAPITALS, and Ünïcödé 漢字 и русский.", ".",
    "one line\r\nanother line\n", "x", "the enzyme03 " * 40, "ocean garden0 " * 9,
    " ".join(f"{word} {i}" for i in range(30) for word in ("Sea", "the", "garden1")),
]  # fmt: skip
NOT_TRAINED = r"cannot be trained \(StaticEmbedding, Dense\): give one that begins with"


def assert_refused_by_all(folder, message):
    opened = [lambda folder: load_encoder(folder, "fp32"), Retriever, open_model]
    for read in [*opened, lambda folder: untrained_retriever(RetrieverSettings(), folder, [])]:
        with pytest.raises(RevelaError, match=message) as caught:
            read(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_refused_before_text_is_read(name, tiny_tokenizer, refused, tmp_path):
    make, message = DAMAGED[name]
    make(tmp_path / "model", tiny_tokenizer)
    assert_refused_by_all(tmp_path / "model", message)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the ocean00 is wide")
    named = f"--model={tmp_path / 'model'}", f"--out={tmp_path / 'out'}"
    assert re.search(message, refused("index", tmp_path / "texts", *named))
    assert re.search(message, refused("train", tmp_path / "texts", *named, "--lora-rank 2"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kind") / "model"
    KINDS[kind](folder, tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return stock(folder)


def stock(folder, prompts=None):
    """Unit vectors of queries and of passages by the stock library."""
    model = SentenceTransformer(str(folder), device="cpu").float()
    first = model[0]
    if isinstance(first, modules.Transformer):
        if first.tokenizer.pad_token is None:
            first.tokenizer.pad_token = first.tokenizer.eos_token or "!"
        positions = positions_of(first.model)
        first.max_seq_length = min(first.max_seq_length, positions or 10**9)
    named = model.prompts
    if prompts is None and not named.get("document") and {"passage", "corpus"} & {*named}:
        prompts = named["query"], named.get("passage") or named["corpus"]
    # One text at a time: with padding on the left, GPT-2's positions depend on the batch.
    how = dict(normalize_embeddings=True, batch_size=1)
    if prompts is None:
        return model.encode_query(TEXTS, **how), model.encode_document(TEXTS, **how)
    return tuple(model.encode(TEXTS, prompt=prompt, **how) for prompt in prompts)


def assert_same(ours, theirs, length=1e-5):
    for vectors, others in zip(ours, theirs, strict=True):
        vectors = np.asarray(vectors, np.float32)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=length)
        assert (vectors * others).sum(axis=1).min() > 0.9999


def of_encoder(encoder):
    return encoder.encode_queries(TEXTS), encoder.encode_passages(TEXTS)


def test_what_cannot_be_read_is_one_sentence(tiny_tokenizer, tmp_path):
    words(tmp_path / "model", tiny_tokenizer)
    said = "begins with a WordEmbeddings; only .*: give another"
    assert_refused_by_all(tmp_path / "model", said)


def test_encoder(folder, expected):
    assert_same(of_encoder(load_encoder(resolve(str(folder)), "fp32")), expected)


INDEXED = (
    *("bert", "truncated", "layout of 2, lower case", "left padding"),
    *("truncated on the left", "no limit, roberta", "table, truncated"),
)


@pytest.mark.parametrize("kind", INDEXED, indirect=True, scope="module")
def test_index_and_search(folder, expected, tmp_path):
    retriever = Retriever(folder, precision="fp32")
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    index = retriever.index(documents, tmp_path / "i")
    rows = index.table.lance.to_arrow().to_pylist()
    cut = {row["id"] for row in rows if row["chunk"]}
    kept = {int(row["id"]): row["vector"] for row in rows if row["id"] not in cut}
    queries, passages = expected
    without_words = [vector for i, vector in kept.items() if not has_words(TEXTS[i])]
    assert without_words and not np.any(without_words)  # such passages are no candidates
    places = sorted(i for i in kept if has_words(TEXTS[i]))
    assert len(places) >= 3 or not cut
    assert_same([[kept[i] for i in places]], [passages[places]], 1e-3)
    hits = index.search(TEXTS[0], k=9, mode="dense")
    scores = queries[:1] @ passages[places].T
    found = {int(hit.id): hit.score for hit in hits}
    assert [found[i] for i in places] == pytest.approx(scores[0], abs=2e-3)


def test_training(folder, kind, expected):
    if kind == "table, Dense":
        with pytest.raises(RevelaError, match=NOT_TRAINED):
            trained(folder)
        return
    ours = trained(folder)
    if kind.startswith("table"):  # each row is there twice, the second one is trained
        ours = [np.split(vectors, 2, axis=1)[0] * 2**0.5 for vectors in ours]
    assert_same(ours, expected)


def trained(folder):
    """The vectors that training begins with."""
    recipe = Recipe()
    model = untrained_retriever(recipe.retriever, resolve(str(folder)), []).cpu().eval()
    retriever = RetrieverModule(model)
    batch = build_context(recipe, retriever, [], [], bf16=False).sides(TEXTS, TEXTS)
    made = []
    with torch.no_grad(), retriever.evaluating():
        for side in ("query_", "passage_"):
            features = {k.removeprefix(side): v for k, v in batch.items() if k.startswith(side)}
            made.append(retriever(features).numpy())
    return made


@pytest.mark.parametrize("name", ["LayerNorm", "left padding", "truncated"])
def test_export(name, tiny_tokenizer, tmp_path):
    pytest.importorskip("onnxruntime")
    from revela.encoders.graph_export import export_onnx
    from revela.encoders.graphs import open_export

    KINDS[name](tmp_path / "model", tiny_tokenizer)
    export_onnx(open_model(tmp_path / "model"), tmp_path / "onnx", tokens=True)
    encoder = open_export(tmp_path / "onnx")
    assert_same(of_encoder(encoder), stock(tmp_path / "model"))
    tokens_TW = encoder.encode_with_tokens(TEXTS[:1])[1][0]
    np.testing.assert_allclose(np.linalg.norm(tokens_TW, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("name", ["table, truncated", "capitals by tokenizer_config", "fp16"])
def test_service_and_evaluation(name, tiny_tokenizer, tmp_path):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from revela import evaluate
    from revela.searching.server import Limits
    from revela.searching.server.app import Service

    folder = tmp_path / "model"
    KINDS[name](folder, tiny_tokenizer)
    queries, passages = stock(folder)
    retriever = Retriever(folder, precision="fp32")
    index = retriever.index(TEXTS[:1], tmp_path / "index")
    limit = retriever.encoder.limit or 10**9  # longer texts are refused
    counts = retriever.encoder.count_tokens(TEXTS, "passage")
    short = [i for i, count in enumerate(counts) if count <= limit]
    assert len(short) > 3
    with TestClient(Service(index, "m", retriever.encoder, Limits()).app()) as client:
        for role, expected in (("m:query", queries), ("m:passage", passages)):
            asked = dict(model=role, input=[TEXTS[i] for i in short])
            answer = client.post("/v1/embeddings", json=asked).json()
            found = [row["embedding"] for row in answer["data"]]
            assert_same([found], [expected[short]])
    judged = tmp_path / "judged"
    texts = {str(i): text for i, text in enumerate(TEXTS)}
    rows = [{"_id": name, "text": text} for name, text in texts.items()]
    write_collection(judged, rows, texts, {(name, name): 1 for name in texts})
    evaluate([folder], [judged], precision="fp32", runs=tmp_path / "runs")
    scores = queries @ passages.T
    (run,) = (tmp_path / "runs" / "judged").glob("*model.trec")
    for line in run.read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        if any(TEXTS[int(i)] != TEXTS[int(i)].strip() for i in (query, document)):
            continue  # a collection is read without white space around its texts
        assert float(score) == pytest.approx(scores[int(query), int(document)], abs=1e-4)


GIVEN = ("Find: ", "Text: ")


@pytest.mark.parametrize("make", [pooled, KINDS["table"]])
def test_prompts_that_are_given(make, tiny_tokenizer, tmp_path):
    folder = tmp_path / "model"
    make(folder, tiny_tokenizer)
    given, named = stock(folder, GIVEN), stock(folder)
    assert_same(of_encoder(load_encoder(folder, "fp32", prompts=GIVEN)), given)
    half = load_encoder(folder, "fp32", prompts=("Find: ", None))
    assert_same(of_encoder(half), (given[0], named[1]))
    model = open_model(folder, prompts=GIVEN)  # as a run saves it
    assert model.prompts == {"query": "Find: ", "document": "Text: ", "passage": "Text: "}
    model.save_pretrained(str(tmp_path / "saved"))
    assert_same(of_encoder(load_encoder(tmp_path / "saved", "fp32")), given)
    assert_same(stock(tmp_path / "saved"), given)
    if make is pooled:
        settings = RetrieverSettings(query_prompt=GIVEN[0])
        assert untrained_retriever(settings, folder, []).prompts["query"] == "Find: "
        assert untrained_retriever(settings, folder, []).prompts["passage"] == "passage: "


def test_an_index_keeps_its_prompts(tiny_tokenizer, tmp_path):
    folder, texts = tmp_path / "model", [Document(str(i), TEXTS[i]) for i in (0, 2, 3, 4)]
    pooled(folder, tiny_tokenizer)
    made = Retriever(folder, "fp32", prompts=GIVEN).index(texts, tmp_path / "index")
    queries, passages = stock(folder, GIVEN)
    opened = Index.open(tmp_path / "index", precision="fp32")
    assert opened.prompts == made.info.prompts == GIVEN
    hits = {hit.id: hit.score for hit in opened.search(TEXTS[0], mode="dense")}
    row = {i: queries[0] @ passages[int(i)] for i in hits}
    assert hits == pytest.approx(row, abs=2e-3)
    Index.open(tmp_path / "index", prompts=GIVEN)
    Index.open(tmp_path / "index", prompts=(None, "Text: "))
    with pytest.raises(RevelaError, match="made with the prompts 'Find: ' and 'Text: ': leave"):
        Index.open(tmp_path / "index", prompts=("query: ", None))
    with pytest.raises(RevelaError, match="was made with the prompts"):
        Retriever(folder, "fp32").open(tmp_path / "index")


@pytest.mark.parametrize(
    "place", ["multilingual-e5-small", "models--intfloat--multilingual-e5-small/snapshots/0123"]
)
def test_known_models_that_name_no_prompts(place, tiny_tokenizer, tmp_path):
    folder = tmp_path / place
    folder.parent.mkdir(parents=True, exist_ok=True)
    pooled(folder, tiny_tokenizer, prompts=None)
    named = "query: ", "passage: "
    assert prompts_of(folder) == named
    assert prompts_of(folder, ("", "")) == ("", "")
    assert_same(of_encoder(load_encoder(folder, "fp32")), stock(folder, named))
    assert Retriever(folder, "fp32").index(["one", "two"], tmp_path / "index").prompts == named
    own = {"prompts": {"query": "q: "}}
    edit(folder / "config_sentence_transformers.json", lambda config: {**config, **own})
    assert prompts_of(folder) == ("q: ", "")


KNOWN = [
    ("e5-small e5-base e5-large e5-small-v2 e5-base-v2 e5-large-v2 USER-base", "query: "),
    ("multilingual-e5-small multilingual-e5-base multilingual-e5-large", "query: "),
    ("bge-small-en bge-base-en bge-large-en", BGE.query),
    ("bge-small-en-v1.5 bge-base-en-v1.5 bge-large-en-v1.5", BGE.query),
    ("bge-small-zh bge-base-zh bge-large-zh", BGE_ZH.query),
    ("bge-small-zh-v1.5 bge-base-zh-v1.5 bge-large-zh-v1.5", BGE_ZH.query),
    ("nomic-embed-text-v1 nomic-embed-text-v1.5 modernbert-embed-base", "search_query: "),
    ("ru-en-RoSBERTa", "search_query: "),
    ("ruri-base ruri-large", "クエリ: "),
    ("bge-m3 multilingual-e5-large-instruct my-e5-small nomic-embed-text-v2-moe", ""),
]


@pytest.mark.parametrize(("names", "query"), KNOWN)
def test_names_of_known_models(names, query, tmp_path):
    for name in names.split():
        assert prompts_of(tmp_path / name).query == query, name


def test_verbs_take_prompts(succeeds, refused, tiny_tokenizer, tmp_path):
    folder, out, texts = tmp_path / "model", tmp_path / "index", tmp_path / "texts"
    pooled(folder, tiny_tokenizer, prompts=None)
    texts.mkdir()
    (texts / "a.txt").write_text("the ocean00 is wide")
    (texts / "b.txt").write_text("the castle2 is old")
    made = ["index", texts, f"--model={folder}", f"--out={out}", "--precision=fp32"]
    pair = ["--query-prompt=Find:", "--passage-prompt=Text:"]
    said = succeeds(*made, *pair)
    assert "prompts: 'Find:' before queries, 'Text:' before passages\n" in said
    kept = Index.open(out).prompts
    assert kept == ("Find:", "Text:")
    assert "was made with the prompts 'Find:' and 'Text:'" in refused(
        "index", texts, f"--out={out}", "--append", "--query-prompt=other"
    )
    assert "a.txt" in succeeds("search", out, "ocean00", *pair)
    assert "was made with the prompts" in refused("search", out, "ocean00", "--query-prompt=other")
    plain = f"--out={tmp_path / 'plain'}"
    assert "before queries" not in succeeds(*made[:3], plain, "--precision=fp32")
    for prompts in (pair, []):  # of a folder of text, whose index is in the cache
        assert "a.txt" in succeeds("search", texts, "ocean00", f"--model={folder}", *prompts)
    succeeds("encode", texts, f"--model={folder}", f"--out={tmp_path / 'a.parquet'}", *pair)
    stored = pq.read_table(tmp_path / "a.parquet").to_pylist()
    encoder = load_encoder(folder, "fp32", prompts=("Find:", "Text:"))
    expected = encoder.encode_passages([row["text"] for row in stored])
    np.testing.assert_allclose([row["vector"] for row in stored], expected, atol=0.05)  # bf16


def test_a_limit_beyond_the_positions_is_lowered(tiny_tokenizer, tmp_path):
    KINDS["limit of 512, roberta"](tmp_path / "model", tiny_tokenizer)
    assert open_model(tmp_path / "model").max_seq_length == 63  # its padding has row 0


@pytest.mark.parametrize("behind", [True, False])
def test_modules_by_role_are_refused(behind, tiny_tokenizer, tmp_path):
    first, mean = transformer(tiny_tokenizer, tmp_path / "raw"), modules.Pooling(WIDTH)
    table = modules.StaticEmbedding(tiny_tokenizer, embedding_dim=WIDTH)
    linear = modules.Dense(WIDTH, WIDTH)
    routes = ([linear], [modules.Normalize()]) if behind else ([table], [first, mean])
    router = modules.Router.for_query_document(*routes)
    saved(tmp_path / "model", [first, mean, router] if behind else [router])
    said = r"by different modules \(Router\): give another model"
    assert_refused_by_all(tmp_path / "model", said)


@pytest.mark.parametrize("place", ["", "2_Dense"])
def test_weights_outside_of_safetensors_are_one_sentence(place, tiny_tokenizer, tmp_path):
    folder = tmp_path / "model"
    KINDS["Dense, Tanh"](folder, tiny_tokenizer)
    (folder / place / "model.safetensors").rename(folder / place / "pytorch_model.bin")
    found = rf"{folder / place} has its weights in pytorch_model.bin only: only safetensors"
    for read in (Retriever, open_model, lambda f: resolve(str(f))):
        with pytest.raises(RevelaError, match=found):
            read(folder)
    (folder / place / "pytorch_model.bin").unlink()  # as the hub's is not downloaded
    with pytest.raises(RevelaError, match="no weights in safetensors, and only safetensors are"):
        open_model(folder)


def test_a_state_of_a_trainer_is_no_weight(tiny_tokenizer, tmp_path):
    pooled(tmp_path / "model", tiny_tokenizer)
    (tmp_path / "model" / "training_args.bin").write_bytes(b"settings")
    assert resolve(str(tmp_path / "model")) == tmp_path / "model"


def test_modules_of_a_damaged_folder(tiny_tokenizer, tmp_path):
    folder = tmp_path / "model"
    pooled(folder, tiny_tokenizer)
    assert [kind for kind, _ in modules_of(folder)] == ["Transformer", "Pooling"]
    (folder / "modules.json").write_text('{"a": 1}')
    assert modules_of(folder) == []
