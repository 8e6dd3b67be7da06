"""Static retrievers, read without torch, against stock sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from small import tokenizer_of
from tokenizers import Tokenizer, normalizers, processors

from revela.encoders.load import load_encoder
from revela.encoders.static_encoder import READ_AHEAD, StaticEncoder
from revela.encoders.torch_encoder import TorchEncoder
from revela.errors import RevelaError
from revela.searching.index import Index
from revela.searching.manifest import Indexing
from revela.training.retriever.save import save_retriever
from revela.types import Document

WORDS = ["[UNK]", "[CLS]", "query", "passage", *(f"word{i}" for i in range(30))]
PROMPTS = {"query": "query: ", "passage": "passage: "}
TEXTS = ["word1 word2 word2", "", "   ", "nothing known", "Word3 nothing WORD4", "word5 " * 200]


def tokenizer(limit=None) -> Tokenizer:
    """With a special token, which a static retriever does not read."""
    made = tokenizer_of(WORDS, limit)
    made.normalizer = normalizers.Lowercase()
    made.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    return made


def save(folder, parts=(), dtype=torch.float32, **settings):
    """A static retriever as sentence-transformers saves it; its folder."""
    rows = torch.randn(len(WORDS), 16, generator=torch.Generator().manual_seed(0))
    table = modules.StaticEmbedding(settings.pop("tokenizer", tokenizer()), rows.to(dtype))
    model = SentenceTransformer(modules=[table, *parts], device="cpu", **settings)
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


def agree(folder, prompts):
    """Whether our vectors are those of sentence-transformers, for few texts and for many."""
    encoder = load_encoder(folder, "auto")
    assert isinstance(encoder, StaticEncoder)
    stock = SentenceTransformer(str(folder), device="cpu").float()
    ways = {"query": encoder.encode_queries, "passage": encoder.encode_passages}
    for texts in (TEXTS, TEXTS * (READ_AHEAD // len(TEXTS) + 2)):
        for role, encode in ways.items():
            prompt = prompts.get(role, "")
            expected = stock.encode(texts, prompt=prompt, normalize_embeddings=True)
            np.testing.assert_allclose(encode(texts), expected, atol=1e-5)
    assert encoder.encode_queries([]).shape == (0, expected.shape[1])


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(parts=[modules.Normalize()], dtype=torch.float16),
        dict(prompts=PROMPTS, dtype=torch.bfloat16),
        dict(truncate_dim=8),
        dict(tokenizer=tokenizer(3)),
    ],
    ids=lambda how: "-".join(how) or "plain",
)
def test_vectors_are_those_of_sentence_transformers(tmp_path, how):
    agree(save(tmp_path / "model", **how), how.get("prompts", {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("mapping", [torch.int16, torch.int64])
def test_so_are_those_of_a_folder_of_model2vec(tmp_path, dtype, mapping):
    """With a row for two tokens, and a weight for each token."""
    file = save(tmp_path / "model") / "model.safetensors"
    rows = torch.from_numpy(load_file(file)["embedding.weight"])
    arrays = {
        "embeddings": (100 * rows[: len(rows) // 2]).to(dtype),
        "mapping": (torch.arange(len(rows)) // 2).to(mapping),
        "weights": torch.linspace(0.1, 1, len(rows), dtype=torch.float64),
    }
    safetensors.torch.save_file(arrays, file)
    agree(file.parent, {})


def test_tokens_are_counted_as_they_are_read(tmp_path):
    encoder = load_encoder(save(tmp_path / "model", prompts=PROMPTS), "auto")
    assert encoder.count_tokens(TEXTS[:5], "query") == [5, 2, 2, 4, 5] and encoder.limit is None


def test_texts_are_truncated_where_asked_and_chunks_cut_there(tmp_path):
    folder = save(tmp_path / "model")
    whole, short = load_encoder(folder, "auto"), load_encoder(folder, "auto", 2)
    np.testing.assert_array_equal(
        short.encode_passages(["word1 word2 word3"]), whole.encode_passages(["word1 word2"])
    )
    assert whole.cut_to_fit([""], ["word1 word2 word3"]) == [["word1 word2 word3"]]
    assert short.cut_to_fit([""], ["word1 word2 word3"]) == [["word1 word2 ", "word3"]]


DAMAGED = [
    ("model.safetensors", b"no weights"),
    ("model.safetensors", b""),
    ("tokenizer.json", b'{"a": "\xff\xfe"}'),
    ("config_sentence_transformers.json", b"[]"),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_damaged_folder_is_one_sentence(tmp_path, name, content):
    folder = save(tmp_path / "model")
    (folder / name).write_bytes(content)
    with pytest.raises(RevelaError, match="cannot be opened as a Sentence-Transformers model"):
        load_encoder(folder, "auto")


def test_weights_that_do_not_fit_are_named(tmp_path):
    folder = save(tmp_path / "model")
    rows = load_file(folder / "model.safetensors")["embedding.weight"]
    save_file({"embedding.weight": rows[:-1]}, folder / "model.safetensors")
    with pytest.raises(RevelaError, match=r"tokenizer\.json has more tokens than"):
        load_encoder(folder, "auto")
    save_file({"embedding.weight": rows.astype(np.int8)}, folder / "model.safetensors")
    with pytest.raises(RevelaError, match="is I8, not fp16"):
        load_encoder(folder, "auto")


def test_there_are_no_token_vectors(tmp_path):
    folder = save(tmp_path / "model")
    index = Index.create(tmp_path / "index", folder)
    index.add([Document("a", "word1 word2")])
    kept = Index.create(tmp_path / "kept", folder, settings=Indexing(keep_tokens=True))
    said = "^model has no transformer, and so no token vectors: search without --rerank and --k"
    for refused in (
        lambda: index.search("word1", rerank="late-interaction"),
        lambda: kept.add([Document("a", "word1 word2")]),
        lambda: TorchEncoder.load(folder, "fp32").encode_with_tokens(["word1"]),
    ):
        with pytest.raises(RevelaError, match=said):
            refused()


def test_what_was_measured_before_training_is_saved_with_it(tmp_path):
    rows = torch.randn(len(WORDS), 16)
    model = SentenceTransformer(modules=[modules.StaticEmbedding(tokenizer(), rows)], device="cpu")
    save_retriever(model, tmp_path / "trained", "a card", words_to_vectors=2.5)
    assert load_encoder(tmp_path / "trained", "auto").words_to_vectors == 2.5
    index = Index.create(tmp_path / "index", tmp_path / "trained", {}, Indexing())
    index.add([Document(str(i), f"word{i} word{i + 1}. word{i + 2}") for i in range(9)])
    assert Index.open(tmp_path / "index").info.calibration.least == 2.5
    assert load_encoder(save(tmp_path / "other"), "auto").words_to_vectors == 1
