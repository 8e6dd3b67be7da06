"""The label-free fit: what it weighs, what it whitens, and what the lexical half holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from small import build, fit

import revela
from conftest import make_rows
from revela.training.retriever import fit as corpus_fit
from revela.training.retriever.module import RetrieverEncoder


def some_texts(n=400):
    rng = np.random.default_rng(0)
    words = [f"{topic}{i}" for topic in ("ocean", "engine", "garden") for i in range(9)]
    return [" ".join(rng.choice(words, 6)) for _ in range(n)]


def without_its_last(model, count=1):
    """Without the normalisation, and without the rotation before it if two are taken."""
    for _ in range(count):
        del model._modules[str(len(model) - 1)]


def raw_passages(model, texts):
    """Vectors as the last module gives them, of any length."""
    return model.encode(texts, prompt=model.prompts["document"])


def test_whitening_at_half_power_whitens_the_tokens(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder)
    fit(model, texts, whitening=0.5)
    features = model[0](model.preprocess(texts, prompt="passage: "))
    kept = features["attention_mask"].bool()
    kept[:, : len(model.tokenizer("passage:", add_special_tokens=False)["input_ids"])] = False
    whitened = features["token_embeddings"][kept] @ model[2].linear.weight.T
    eigenvalues = np.linalg.eigvalsh(np.cov(whitened.detach().numpy().T))
    assert eigenvalues[-1] / np.median(eigenvalues) < 1.5
    without_its_last(model)
    vectors = raw_passages(model, texts)
    assert abs(vectors.mean(0)).max() < 1e-3
    between = (vectors @ vectors.T)[~np.eye(len(texts), dtype=bool)]
    assert between.std() == pytest.approx(1.0, rel=0.02)  # what dot products of two texts spread by


def test_the_lexical_half_is_the_weighted_mean_of_whitened_unit_embeddings(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder)
    table = model[0].model.get_input_embeddings().weight.detach()
    unit = torch.nn.functional.normalize(table, dim=1).double()
    fit(model, texts, token_weighting=1e-2, whitening=0.5, lexical=4.0)
    rows = model.tokenizer(texts, add_special_tokens=False)["input_ids"]
    occurrences = [i for row in rows for i in row]
    values, vectors = torch.linalg.eigh(torch.cov(unit[occurrences].T, correction=0))
    values = values.clamp(min=0) + corpus_fit.RIDGE * values.clamp(min=0).mean()
    expected = torch.zeros(unit.shape[1]).double()
    for i in model.tokenizer("ocean1 garden5", add_special_tokens=False)["input_ids"]:
        vector = (unit[i] - unit[occurrences].mean(0)) @ vectors @ torch.diag(values**-0.5)
        weight = 1e-2 / (1e-2 + occurrences.count(i) / len(occurrences))
        expected += weight * vector / vector.norm() @ vectors.T
    without_its_last(model, 2)
    features = model(model.preprocess(["ocean1 garden5"]))
    both = features["sentence_embedding"][0].detach().double()
    lexical = both[len(both) // 2 :]
    np.testing.assert_allclose(lexical / lexical.norm(), expected / expected.norm(), atol=1e-4)
    assert model.get_embedding_dimension() == len(both) == 2 * unit.shape[1]


def test_the_lexical_weight_is_a_ratio_of_what_the_halves_add_to_dot_products(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder, passage_prompt="")
    fit(model, texts, token_weighting=1e-2, whitening=0.5, lexical=4.0)
    without_its_last(model, 2)
    vectors = raw_passages(model, texts)
    half, different = vectors.shape[1] // 2, ~np.eye(len(texts), dtype=bool)
    parts = vectors[:, :half], vectors[:, half:]
    contextual, lexical = ((part @ part.T)[different].std() for part in parts)
    assert lexical / contextual == pytest.approx(4.0, rel=0.05)


def test_rare_tokens_weigh_more(tiny_lm_folder):
    model = build(tiny_lm_folder)
    fit(model, ["ocean1 ocean1 ocean1 ocean1 garden5"], token_weighting=1e-2)
    weights = model[1].emb_layer.weight[:, 0]
    read = model.tokenizer([" ocean1", " garden5", "query:"], add_special_tokens=False)
    frequent, rare, prompt = read["input_ids"]
    assert weights[frequent].mean() < weights[rare].mean() <= 1.0 and not weights[prompt].any()


def test_punctuation_weighs_nothing(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder, passage_prompt="")
    fit(model, texts, token_weighting=1e-2)
    weights = model[1].emb_layer.weight[:, 0]
    marks = model.tokenizer(" (=) , é", add_special_tokens=False)["input_ids"]
    by_text = {model.tokenizer.decode([i]).strip(): weights[i].item() for i in marks}
    assert {mark: by_text[mark] for mark in "(=),"} == dict.fromkeys("(=),", 0.0)
    parts_of_a_letter = model.tokenizer("é", add_special_tokens=False)["input_ids"]
    assert all(weights[i] > 0 for i in parts_of_a_letter)


@pytest.mark.parametrize("lexical", [0.0, 1.0])
def test_the_rotation_changes_no_cosine_and_puts_first_what_says_most(tiny_lm_folder, lexical):
    texts, model = some_texts(), build(tiny_lm_folder, passage_prompt="")
    fit(model, texts, token_weighting=1e-2, whitening=0.4, lexical=lexical)
    rotated = RetrieverEncoder(model, False).encode_passages(texts)
    rotation = model[len(model) - 2].linear.weight
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(len(rotation)), atol=1e-6, rtol=0)
    without_its_last(model, 2)
    plain = RetrieverEncoder(model, False).encode_passages(texts)
    np.testing.assert_allclose(rotated @ rotated.T, plain @ plain.T, atol=1e-6)
    energy = (rotated**2).mean(0)
    assert (np.diff(energy) < 1e-6).all()
    values = np.linalg.eigvalsh(plain.T @ plain / len(plain))
    np.testing.assert_allclose(energy, values[::-1], atol=1e-5)


TEXTS = [row["text"] for row in make_rows(60)]


def embedder(folder, pooling, *more):
    """The tiny BERT with another pooling, and modules after it."""
    transformer = SentenceTransformer(str(folder))[0]
    return SentenceTransformer(modules=[transformer, modules.Pooling(32, pooling), *more])


@pytest.mark.parametrize("pooling", ["mean", "weightedmean", "cls", "lasttoken"])
def test_any_embedder_is_fitted_and_saved_as_a_stock_folder(tiny_bert_folder, tmp_path, pooling):
    model = embedder(tiny_bert_folder, pooling)
    before = model.encode(TEXTS)
    assert revela.fit(model, TEXTS) is model
    vectors = model.encode(TEXTS, convert_to_numpy=True)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors.shape == (60, 64) != before.shape and np.isfinite(vectors).all()
    cosines = (vectors @ vectors.T)[~np.eye(60, dtype=bool)]
    assert abs(cosines.mean()) < 0.1  # a random BERT gives all texts much the same vector
    model.save_pretrained(str(tmp_path / "saved"))
    stock = SentenceTransformer(str(tmp_path / "saved"))
    np.testing.assert_allclose(stock.encode(TEXTS), vectors, atol=1e-5)
    kinds = {type(part).__module__.split(".")[0] for part in stock}
    assert kinds == {"sentence_transformers"} and stock.similarity_fn_name == "cosine"


def test_a_fit_without_labels_finds_more(tiny_lm_folder):
    evaluator = revela.LabelFreeEvaluator(TEXTS, chunk_words=20)
    model = build(tiny_lm_folder)
    before = evaluator(model)["sibling_ndcg@10"]
    after = evaluator(revela.fit(model, TEXTS))["sibling_ndcg@10"]
    assert after > before + 0.1


def test_a_name_is_a_language_models_lower_layers(tiny_lm_folder):
    model = revela.fit(str(tiny_lm_folder), TEXTS, lexical=0.0)
    assert model.prompts["query"] == "query: " and model.get_embedding_dimension() == 32
    kinds = [type(part).__name__ for part in model]
    assert kinds == ["Transformer", "WordWeights", "Pooling", "Dense", "Dense", "Normalize"]
    assert "WordWeights(394 tokens)" in repr(model)


def test_two_fits_of_a_seed_are_one(tiny_bert_folder, monkeypatch):
    monkeypatch.setattr(corpus_fit, "FITTING_SAMPLE", 20)
    one, two, other = (
        revela.fit(SentenceTransformer(str(tiny_bert_folder)), TEXTS, seed=seed).encode(TEXTS[:3])
        for seed in (0, 0, 1)
    )
    assert np.array_equal(one, two) and not np.allclose(one, other, atol=1e-3)


def test_special_tokens_weigh_nothing(tiny_bert_folder):
    model = revela.fit(SentenceTransformer(str(tiny_bert_folder)), TEXTS)
    weights = model[1].emb_layer.weight[:, 0]
    assert all(weights[i] == 0 for i in model.tokenizer.all_special_ids)
    assert not model[3].emb_layer.weight[model.tokenizer.all_special_ids].any()
    assert weights[model.tokenizer("ocean")["input_ids"][1]] > 0


def test_a_model_in_half_precision_becomes_fp32(tiny_bert_folder):
    model = SentenceTransformer(str(tiny_bert_folder)).bfloat16()
    assert np.isfinite(revela.fit(model, TEXTS).encode(TEXTS[:2])).all()
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}


def test_what_cannot_be_fitted_is_told_in_one_sentence(tiny_bert_folder):
    fitted = revela.fit(SentenceTransformer(str(tiny_bert_folder)), TEXTS)
    dense = embedder(tiny_bert_folder, "mean", modules.Dense(32, 16), modules.Normalize())
    table = modules.StaticEmbedding(fitted.tokenizer, embedding_dim=8)
    static = SentenceTransformer(modules=[table])
    cases = [
        (fitted, "WordEmbeddings, .* that is not fitted yet"),
        (dense, "Transformer, Pooling, Dense, Normalize"),
        (static, r"\(StaticEmbedding\): give one of Transformer, Pooling by one of mean"),
        (embedder(tiny_bert_folder, "max"), "pooling by max"),
        (embedder(tiny_bert_folder, ("cls", "mean")), "pooling by"),
    ]
    for model, message in cases:
        with pytest.raises(revela.RevelaError, match=message):
            revela.fit(model, TEXTS)
    plain = SentenceTransformer(str(tiny_bert_folder))
    for texts in ([], ["one text"], ["", " ", "...", "one text"]):
        with pytest.raises(revela.RevelaError, match="have words: give at least two"):
            revela.fit(plain, texts)
    assert len(plain) == 3  # as it was
