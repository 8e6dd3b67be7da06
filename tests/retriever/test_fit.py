"""The label-free fit: what it weighs, what it whitens, and what the lexical half holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import build, fit

from revela.retriever import fit as corpus_fit
from revela.retriever.encode import RetrieverEncoder


def some_texts(n=400):
    rng = np.random.default_rng(0)
    words = [f"{topic}{i}" for topic in ("ocean", "engine", "garden") for i in range(9)]
    return [" ".join(rng.choice(words, 6)) for _ in range(n)]


def without_its_last(model, count=1):
    """Without the normalisation, and without the rotation before it if two are taken."""
    for _ in range(count):
        del model._modules[str(len(model) - 1)]


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
    vectors = RetrieverEncoder(model, False).encode_passages(texts)
    assert abs(vectors.mean(0)).max() < 1e-3
    between = (vectors @ vectors.T)[~np.eye(len(texts), dtype=bool)]
    assert between.std() == pytest.approx(1.0, rel=0.02)  # what dot products of two texts spread by


def test_the_lexical_half_is_the_weighted_mean_of_whitened_unit_embeddings(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder)
    tokenizer = model.tokenizer
    embeddings = torch.nn.functional.normalize(
        model[0].model.get_input_embeddings().weight.detach(), dim=1
    ).double()
    fit(model, texts, token_weighting=1e-2, whitening=0.5, lexical=4.0)
    occurrences = [
        i for row in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in row
    ]
    values, vectors = torch.linalg.eigh(torch.cov(embeddings[occurrences].T, correction=0))
    values = values.clamp(min=0) + corpus_fit.RIDGE * values.clamp(min=0).mean()
    mean = embeddings[occurrences].mean(0)
    ids = tokenizer("ocean1 garden5", add_special_tokens=False)["input_ids"]
    expected = torch.zeros(embeddings.shape[1]).double()
    for i in ids:
        vector = (embeddings[i] - mean) @ vectors @ torch.diag(values**-0.5)
        expected += (
            1e-2
            / (1e-2 + occurrences.count(i) / len(occurrences))
            * vector
            / vector.norm()
            @ vectors.T
        )
    without_its_last(model, 2)
    features = model(model.preprocess(["ocean1 garden5"]))
    both = features["sentence_embedding"][0].detach().double()
    lexical = both[len(both) // 2 :]
    np.testing.assert_allclose(lexical / lexical.norm(), expected / expected.norm(), atol=1e-4)
    assert model.get_embedding_dimension() == len(both) == 2 * embeddings.shape[1]


def test_the_lexical_weight_is_a_ratio_of_what_the_halves_add_to_dot_products(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder, passage_prompt="")
    fit(model, texts, token_weighting=1e-2, whitening=0.5, lexical=4.0)
    without_its_last(model, 2)
    vectors = RetrieverEncoder(model, False).encode_passages(texts)
    half, different = vectors.shape[1] // 2, ~np.eye(len(texts), dtype=bool)
    contextual, lexical = (
        (part @ part.T)[different].std() for part in (vectors[:, :half], vectors[:, half:])
    )
    assert lexical / contextual == pytest.approx(4.0, rel=0.05)


def test_lexical_vectors_know_which_texts_share_words(tiny_lm_folder):
    texts = [
        "ocean1 ocean2 engine3",
        "engine3 ocean2",
        "garden5 garden6",
        "garden6 garden5 garden7",
        "",
    ]
    cosines = (v := corpus_fit.lexical_vectors(build(tiny_lm_folder), texts, 1e-2)) @ v.T
    assert cosines[0, 1] > cosines[0, 2] and cosines[2, 3] > cosines[1, 3]
    assert not v[4].any() and np.isfinite(v).all()


def test_rare_tokens_weigh_more(tiny_lm_folder):
    model = build(tiny_lm_folder)
    fit(model, ["ocean1 ocean1 ocean1 ocean1 garden5"], token_weighting=1e-2)
    weights = model[1].emb_layer.weight[:, 0]
    frequent, rare = (
        model.tokenizer(t, add_special_tokens=False)["input_ids"] for t in (" ocean1", " garden5")
    )
    assert weights[frequent].mean() < weights[rare].mean() <= 1.0
    assert all(
        weights[i] == 0 for i in model.tokenizer("query:", add_special_tokens=False)["input_ids"]
    )


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
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(rotated @ rotated.T, plain @ plain.T, atol=1e-6)
    energy = (rotated**2).mean(0)
    assert (np.diff(energy) < 1e-6).all()
    np.testing.assert_allclose(
        energy, np.linalg.eigvalsh(plain.T @ plain / len(plain))[::-1], atol=1e-5
    )
