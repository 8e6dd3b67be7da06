"""The saved folder is stock Sentence Transformers and gives the vectors that training saw; the corpus fit does what it says."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from revela.errors import RevelaError
from revela.models import retriever as r
from revela.models.export import save_retriever

TEXTS = ["ocean1 ocean2 ocean3.", "A second, longer text about engine4 and garden5, with engine4 again.", "x", "planet0 " * 40]
STOCK = """
import json, sys
from sentence_transformers import SentenceTransformer
assert not any(m.startswith("revela") for m in sys.modules)
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.loads(sys.argv[2])
print(json.dumps([model.encode_query(texts).tolist(), model.encode_document(texts).tolist()]))
"""


def build(folder, pooling="mean", **changes):
    settings = dict(layers=2, pooling=pooling, max_tokens=32, lower_case=False, query_prompt="query: ", passage_prompt="passage: ")
    return r.build_retriever(folder, **(settings | changes))


def fit(model, texts, **changes):
    r.fit_to_corpus(model, texts, **(dict(token_weighting=0.0, whitening=0.0, lexical=0.0, bf16=False) | changes))


@pytest.mark.parametrize("pooling", ["mean", "eos", "weighted-mean"])
def test_saved_folder_gives_the_same_vectors_in_stock_sentence_transformers(tiny_lm_folder, tmp_path, pooling):
    model = build(tiny_lm_folder, pooling)
    encoder = r.RetrieverEncoder(model, bf16=False)
    if pooling == "mean":
        fit(model, TEXTS, token_weighting=1e-3, whitening=0.25, lexical=1.0)
    r.add_lora(model, 4, 8, 0.0)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_retriever(model, tmp_path / "out", "card")
    result = subprocess.run(
        [sys.executable, "-c", STOCK, str(tmp_path / "out"), json.dumps(TEXTS)], capture_output=True, text=True, check=True
    )
    queries, passages = json.loads(result.stdout)
    np.testing.assert_allclose(queries, encoder.encode_queries(TEXTS), atol=1e-5)
    np.testing.assert_allclose(passages, encoder.encode_passages(TEXTS), atol=1e-5)
    assert not np.allclose(queries, passages, atol=1e-3)  # the prompts differ
    assert not list((tmp_path / "out").rglob("*.bin")) and not list((tmp_path / "out").rglob("*.pt"))


def test_lora_changes_the_vectors_and_alone_is_trained(tiny_lm_folder):
    model = build(tiny_lm_folder)
    before = r.RetrieverEncoder(model, False).encode_queries(TEXTS)
    r.add_lora(model, 4, 8, 0.0)
    trained = r.trainable_state(model)
    assert trained and all("lora_" in name for name in trained)
    np.testing.assert_allclose(before, r.RetrieverEncoder(model, False).encode_queries(TEXTS), atol=1e-6)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert not np.allclose(before, r.RetrieverEncoder(model, False).encode_queries(TEXTS), atol=1e-2)


def test_a_chat_template_is_not_applied(tiny_lm_folder, tmp_path):
    import shutil

    folder = shutil.copytree(tiny_lm_folder, tmp_path / "instruct")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<s>garden5 engine4 {{ m['content'] }}</s>{% endfor %}")
    model = build(folder)
    assert model.preprocess(["ocean1"])["input_ids"].tolist() == [model.tokenizer("ocean1")["input_ids"]]
    save_retriever(model, tmp_path / "out", "card")
    again = r.load_retriever(tmp_path / "out")
    assert again.preprocess(["ocean1"])["input_ids"].tolist() == [model.tokenizer("ocean1")["input_ids"]]


def test_eos_survives_truncation(tiny_lm_folder):
    model = build(tiny_lm_folder, "eos", max_tokens=8)
    ids = model.tokenizer("planet0 " * 40, truncation=True, max_length=8)["input_ids"]
    assert len(ids) == 8 and ids[-1] == model.tokenizer.eos_token_id


def test_layers_are_cut_and_all_kept_at_zero(tiny_lm_folder):
    assert len(build(tiny_lm_folder, layers=1)[0].model.layers) == 1
    assert len(build(tiny_lm_folder, layers=0)[0].model.layers) == 4


def test_case_is_folded_by_the_tokenizer_itself(tiny_lm_folder, tmp_path):
    model = build(tiny_lm_folder, lower_case=True)
    save_retriever(model, tmp_path / "out", "card")
    again = r.RetrieverEncoder(r.load_retriever(tmp_path / "out"), False)
    np.testing.assert_allclose(again.encode_queries(["OCEAN1 Ocean"]), again.encode_queries(["ocean1 ocean"]), atol=1e-6)


def some_texts(n=400):
    rng = np.random.default_rng(0)
    words = [f"{topic}{i}" for topic in ("ocean", "engine", "garden") for i in range(9)]
    return [" ".join(rng.choice(words, 6)) for _ in range(n)]


def test_whitening_at_half_power_whitens_the_tokens(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder)
    fit(model, texts, whitening=0.5)
    features = model[0](model.preprocess(texts, prompt="passage: "))
    kept = features["attention_mask"].bool()
    kept[:, : len(model.tokenizer("passage:", add_special_tokens=False)["input_ids"])] = False
    whitened = features["token_embeddings"][kept] @ model[2].linear.weight.T
    eigenvalues = np.linalg.eigvalsh(np.cov(whitened.detach().numpy().T))
    assert eigenvalues[-1] / np.median(eigenvalues) < 1.5
    del model._modules["3"]  # the normalisation
    vectors = r.RetrieverEncoder(model, False).encode_passages(texts)
    assert abs(vectors.mean(0)).max() < 1e-3
    assert np.linalg.norm(vectors, axis=1).mean() == pytest.approx(1.0, abs=1e-3)


def test_the_lexical_half_is_the_weighted_mean_of_whitened_unit_embeddings(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder)
    tokenizer = model.tokenizer
    embeddings = torch.nn.functional.normalize(model[0].model.get_input_embeddings().weight.detach(), dim=1).double()
    fit(model, texts, token_weighting=1e-2, whitening=0.5, lexical=4.0)
    occurrences = [i for row in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in row]
    values, vectors = torch.linalg.eigh(torch.cov(embeddings[occurrences].T, correction=0))
    values = values.clamp(min=0) + r.RIDGE * values.clamp(min=0).mean()
    mean = embeddings[occurrences].mean(0)
    ids = tokenizer("ocean1 garden5", add_special_tokens=False)["input_ids"]
    expected = torch.zeros(embeddings.shape[1]).double()
    for i in ids:
        vector = (embeddings[i] - mean) @ vectors @ torch.diag(values**-0.5)
        expected += 1e-2 / (1e-2 + occurrences.count(i) / len(occurrences)) * vector / vector.norm() @ vectors.T
    features = model(model.preprocess(["ocean1 garden5"]))
    both = features["sentence_embedding"][0].detach().double()
    lexical = both[len(both) // 2 :]
    np.testing.assert_allclose(lexical / lexical.norm(), expected / expected.norm(), atol=1e-4)
    assert model.get_embedding_dimension() == len(both) == 2 * embeddings.shape[1]


def test_the_lexical_weight_is_a_ratio_of_squared_norms(tiny_lm_folder):
    texts, model = some_texts(), build(tiny_lm_folder, passage_prompt="")
    fit(model, texts, token_weighting=1e-2, whitening=0.5, lexical=4.0)
    del model._modules[str(len(model) - 1)]  # the normalisation
    vectors = r.RetrieverEncoder(model, False).encode_passages(texts)
    half = vectors.shape[1] // 2
    ratio = np.linalg.norm(vectors[:, half:], axis=1).mean() / np.linalg.norm(vectors[:, :half], axis=1).mean()
    assert ratio == pytest.approx(2.0, rel=0.05)


def test_lexical_vectors_know_which_texts_share_words(tiny_lm_folder):
    texts = ["ocean1 ocean2 engine3", "engine3 ocean2", "garden5 garden6", "garden6 garden5 garden7", ""]
    cosines = (v := r.lexical_vectors(build(tiny_lm_folder), texts, 1e-2)) @ v.T
    assert cosines[0, 1] > cosines[0, 2] and cosines[2, 3] > cosines[1, 3]
    assert not v[4].any() and np.isfinite(v).all()


def test_rare_tokens_weigh_more(tiny_lm_folder):
    model = build(tiny_lm_folder)
    fit(model, ["ocean1 ocean1 ocean1 ocean1 garden5"], token_weighting=1e-2)
    weights = model[1].emb_layer.weight[:, 0]
    frequent, rare = (model.tokenizer(t, add_special_tokens=False)["input_ids"] for t in (" ocean1", " garden5"))
    assert weights[frequent].mean() < weights[rare].mean() <= 1.0
    assert all(weights[i] == 0 for i in model.tokenizer("query:", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("make", [lambda p: p, lambda p: p / "missing"])
def test_not_a_model_is_one_sentence(tmp_path, make):
    with pytest.raises(RevelaError, match=r"modules\.json"):
        r.load_retriever(make(tmp_path))
