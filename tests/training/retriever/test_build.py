"""The saved folder is stock Sentence Transformers and gives the vectors that training saw; the
corpus fit does what it says.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer import modules
from small import build, fit

from revela.encoders.load import load_encoder
from revela.encoders.torch_encoder import TorchEncoder
from revela.encoders.torch_model import open_model
from revela.errors import RevelaError
from revela.evaluation.collection import Collection
from revela.evaluation.evaluate import outcomes
from revela.searching.index import Index
from revela.training.checkpoint import trainable_state
from revela.training.methods.contrastive import ContrastiveLoss
from revela.training.retriever.build import add_lora, frozen_in_bf16, merged_copy
from revela.training.retriever.module import RetrieverEncoder, RetrieverModule
from revela.training.retriever.save import save_retriever

TEXTS = [
    "ocean1 ocean2 ocean3.",
    "A second, longer text about engine4 and garden5, with engine4 again.",
    "x",
    "planet0 " * 40,
]
STOCK = """
import json, sys
from sentence_transformers import SentenceTransformer
assert not any(m.startswith("revela") for m in sys.modules)
texts, found = json.loads(sys.argv[1]), []
for folder in sys.argv[2:]:
    model = SentenceTransformer(folder, device="cpu")
    found.append([model.encode_query(texts).tolist(), model.encode_document(texts).tolist()])
print(json.dumps(found))
"""


def test_saved_folders_give_the_same_in_stock_sentence_transformers(tiny_lm_folder, tmp_path):
    encoders = {}
    for pooling in ("mean", "eos", "weighted-mean", "last"):
        model = build(tiny_lm_folder, pooling)
        if pooling == "mean":
            fit(model, TEXTS, token_weighting=1e-3, whitening=0.25, lexical=1.0)
        add_lora(model, 4, 8, 0.0)
        randomise_lora(model)
        save_retriever(model, tmp_path / pooling, "card")
        encoders[str(tmp_path / pooling)] = RetrieverEncoder(model, bf16=False)
    command = [sys.executable, "-c", STOCK, json.dumps(TEXTS), *encoders]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for (queries, passages), encoder in zip(found, encoders.values(), strict=True):
        np.testing.assert_allclose(queries, encoder.encode_queries(TEXTS), atol=1e-5)
        np.testing.assert_allclose(passages, encoder.encode_passages(TEXTS), atol=1e-5)
        assert not np.allclose(queries, passages, atol=1e-3)  # the prompts differ
    assert not [*tmp_path.rglob("*.bin"), *tmp_path.rglob("*.pt")]


def test_the_last_token_and_dot_products(tiny_lm_folder, tiny_bert_folder, tmp_path, caplog):
    """No EOS and no normalisation: in training, in stock modules, in evaluations. An index compares
    by cosines.
    """
    model, out = build(tiny_lm_folder, "last", similarity="dot"), tmp_path / "dot"
    retriever, every = RetrieverModule(model), torch.arange(len(TEXTS))
    read = [retriever.tokenize(TEXTS, role) for role in ("query", "passage")]
    ends = read[0]["attention_mask"].sum(dim=1) - 1
    assert model.tokenizer.eos_token_id not in read[0]["input_ids"][every, ends].tolist()
    states = retriever.states(read[0])["token_embeddings"][every, ends]
    query, passage = (retriever(features).detach() for features in read)
    torch.testing.assert_close(query, states)
    loss = ContrastiveLoss(retriever, tau=2.0)([{**read[0], "target": every}, read[1]])
    by_hand = torch.nn.functional.cross_entropy(query @ passage.T / 2, every)
    torch.testing.assert_close(loss, by_hand)
    fit(model, TEXTS, whitening=0.25)
    save_retriever(model, out, "card")
    about = json.loads((out / "config_sentence_transformers.json").read_text())
    assert about["similarity_fn_name"] == "dot"
    assert not any(isinstance(part, modules.Normalize) for part in open_model(out))
    encoder = load_encoder(out, "fp32", as_compared=True)
    stock = open_model(out).encode_query(TEXTS)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), stock, atol=1e-5)
    assert np.linalg.norm(stock, axis=1).max() > 1.1
    collection = Collection("some", ["a", "b"], TEXTS[:2], ["q"], ["ocean1"], {"q": {"a": 1}})
    assert [*outcomes(collection, {"m": encoder})] == ["BM25", "m", "m + BM25 (RRF)"]
    found = load_encoder(out, "fp32").encode_queries(TEXTS)
    np.testing.assert_allclose(found, stock / np.linalg.norm(stock, axis=1)[:, None], atol=1e-5)
    Index.create(tmp_path / "index", out)
    assert "trained for dot products; the index compares by cosines" in caplog.text
    assert len(build(tiny_bert_folder, similarity="dot")) == len(build(tiny_bert_folder)) - 1


def randomise_lora(model):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def test_lora_changes_the_vectors_and_alone_is_trained(tiny_lm_folder):
    encoder = RetrieverEncoder(build(tiny_lm_folder), False)
    before = encoder.encode_queries(TEXTS)
    add_lora(encoder.model, 4, 8, 0.0)
    trained = trainable_state(encoder.model)
    assert trained and all("lora_" in name for name in trained)
    np.testing.assert_allclose(before, encoder.encode_queries(TEXTS), atol=1e-6)
    randomise_lora(encoder.model)
    assert not np.allclose(before, encoder.encode_queries(TEXTS), atol=1e-2)


def test_a_chat_template_is_not_applied(tiny_lm_folder, tmp_path):
    folder = shutil.copytree(tiny_lm_folder, tmp_path / "instruct")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<s>garden5 engine4 {{ m['content'] }}</s>{% endfor %}"
    )
    model = build(folder)
    save_retriever(model, tmp_path / "out", "card")
    ids = [model.tokenizer("ocean1")["input_ids"]]
    for read in (model, open_model(tmp_path / "out")):
        assert read.preprocess(["ocean1"])["input_ids"].tolist() == ids


def test_eos_survives_truncation(tiny_lm_folder):
    model = build(tiny_lm_folder, "eos", max_tokens=8)
    ids = model.tokenizer("planet0 " * 40, truncation=True, max_length=8)["input_ids"]
    assert len(ids) == 8 and ids[-1] == model.tokenizer.eos_token_id


def test_layers_are_cut_and_all_kept_at_zero(tiny_lm_folder):
    assert len(build(tiny_lm_folder, layers=1)[0].model.layers) == 1
    assert len(build(tiny_lm_folder, layers=0)[0].model.layers) == 4


def test_the_saved_tokenizer_cuts_nothing_by_itself(tiny_lm_folder, tmp_path):
    """Other software reads tokenizer.json alone; training reads shorter texts than the saved model
    may.
    """
    model = build(tiny_lm_folder)
    model.max_seq_length = 8
    model.encode(["ocean " * 30, "ocean"])
    save_retriever(model, tmp_path / "out", "card")
    saved = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert saved["truncation"] is None and saved["padding"] is None


@pytest.mark.parametrize("make", [lambda p: p, lambda p: p / "missing"])
def test_not_a_model_is_one_sentence(tmp_path, make):
    with pytest.raises(RevelaError, match=r"modules\.json"):
        open_model(make(tmp_path))


def test_encoding_by_token_budget_gives_the_vectors_of_sentence_transformers(tiny_lm_folder):
    """Mixed lengths, an empty text, batches cut by tokens, windows shorter than the texts: same
    vectors, same order.
    """
    model = build(tiny_lm_folder)
    fit(model, TEXTS, token_weighting=1e-3, whitening=0.25, lexical=1.0)
    texts = [
        " ".join(["ocean1", "engine4", "planet0"][: 1 + i % 3] * (i % 5 + 1)) + str(i)
        for i in range(23)
    ] + [""]
    shapes = []
    transformer = model[0]
    transformer.register_forward_pre_hook(lambda _, x: shapes.append(x[0]["input_ids"].shape))
    encoder = RetrieverEncoder(model, bf16=False)
    encoder.batch_tokens, encoder.read_ahead = 40, 7
    got = encoder.encode_passages(texts)
    assert max(rows * columns for rows, columns in shapes) <= 40 and len(shapes) > 4
    want = model.encode([t or "." for t in texts], prompt=model.prompts["document"])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_merged_copy_leaves_the_model_as_it_is(tiny_lm_folder):
    model = build(tiny_lm_folder)
    fit(model, TEXTS, token_weighting=1e-3, whitening=0.25, lexical=1.0)
    add_lora(model, 4, 8, 0.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    final = merged_copy(model)
    assert {tensor.device.type for tensor in final.state_dict().values()} == {"cpu"}
    for parameter in final.parameters():
        parameter.zero_()
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_frozen_weights_are_half_as_large_while_it_is_open(tiny_lm_folder):
    """And give what autocast makes of them, to the bit."""
    model = build(tiny_lm_folder)
    add_lora(model, 4, 8, 0.0)
    linear = model[0].model.layers[0].mlp.up_proj.base_layer
    whole = linear.weight.clone()
    retriever = RetrieverModule(model, bf16=True)
    features = retriever.tokenize(TEXTS, "passage")
    cast = retriever(features)
    with frozen_in_bf16(model, True):
        assert linear.weight.dtype == torch.bfloat16
        half = {p.dtype for name, p in model.named_parameters() if "lora" in name}
        found = retriever(features)
    assert torch.equal(found, cast) and half == {torch.float32} == {found.dtype}
    assert torch.equal(linear.weight, whole)
    with frozen_in_bf16(model, False):
        assert linear.weight.dtype == torch.float32


def test_frozen_weights_are_read_without_padding(tiny_lm_folder):
    """Though it is first read when they are bf16 already."""
    model, seen = build(tiny_lm_folder), []
    add_lora(model, 4, 8, 0.0)
    retriever = RetrieverModule(model, bf16=True)
    up = model[0].model.layers[0].mlp.up_proj
    with frozen_in_bf16(model, True):
        up.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:-1].numel()))
        features = retriever.tokenize(TEXTS, "passage")
        retriever(features)
    tokens = int(features["attention_mask"].sum())
    assert seen == [tokens] and tokens < features["input_ids"].numel()


def test_a_model_stored_in_bf16_is_trained_in_fp32(tiny_lm_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = AutoModelForCausalLM.from_pretrained(tiny_lm_folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny_lm_folder).save_pretrained(tmp_path / "half")
    build(tmp_path / "half").bfloat16().save_pretrained(str(tmp_path / "whole"))
    for folder in ("half", "whole"):
        model = build(tmp_path / folder)
        add_lora(model, 4, 8, 0.0)
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def unit_states(model, text, prompt="", linear=None):
    """The transformer's states of a text, of length one."""
    states_TW = model[0](model.preprocess([text], prompt=prompt))["token_embeddings"][0].float()
    states_TW = states_TW if linear is None else linear(states_TW)
    return torch.nn.functional.normalize(states_TW, dim=1).detach().numpy()


def test_token_vectors_leave_out_prompts_and_special_tokens_beside_the_same_vectors(tiny_lm_folder):
    model = build(tiny_lm_folder, pooling="eos")
    encoder = TorchEncoder(model, bf16=False)
    texts = ["ocean1 ocean2", "the garden and the planet", "x"]
    vectors, tokens = encoder.encode_with_tokens(texts)
    np.testing.assert_array_equal(vectors, encoder.encode_passages(texts))
    for text, tokens_TW in zip(texts, tokens, strict=True):
        count = len(model.tokenizer(" " + text, add_special_tokens=False)["input_ids"])
        whole_TW = unit_states(model, text, "passage: ")
        np.testing.assert_allclose(tokens_TW, whole_TW[-1 - count : -1], atol=1e-5)
    query = "garden1 planet"
    ((vector_D, query_TW, spans), _) = encoder.query_tokens([query, texts[0]])
    np.testing.assert_allclose(vector_D, encoder.encode_queries([query])[0], atol=1e-6)
    assert len(query_TW) == len(spans)
    assert "".join(query[a:b] for a, b in spans).replace(" ", "") == "garden1planet"


def test_token_vectors_go_through_the_linear_layer_that_follows_the_pooling(tiny_lm_folder):
    plain, fitted = (build(tiny_lm_folder, query_prompt="", passage_prompt="") for _ in range(2))
    fit(fitted, TEXTS * 5, token_weighting=3e-3, whitening=0.4, lexical=1.0)
    tokens_TW = TorchEncoder(fitted, bf16=False).encode_with_tokens(TEXTS[:1])[1][0]
    linear = next(module for module in fitted if isinstance(module, modules.Dense)).linear
    expected = unit_states(plain, TEXTS[0], linear=linear)
    np.testing.assert_allclose(tokens_TW, expected, atol=1e-5)


def test_vectors_that_are_not_finite_are_refused_wherever_they_are_made(tiny_lm_folder):
    model = build(tiny_lm_folder)
    encoder = TorchEncoder(model, bf16=False, name="my-model")
    token = model.tokenizer.encode(" ocean1", add_special_tokens=False)[-1]
    next(model.parameters()).data[token] = np.inf
    encoder.encode_passages(["garden5"])
    said = "my-model gives vectors that are not finite for 1 of 3 texts: its weights are broken"
    methods = (encoder.encode_queries, encoder.encode_passages, encoder.encode_with_tokens)
    for encode_texts in methods:
        with pytest.raises(RevelaError, match=said):
            encode_texts(["garden5", "a ocean1", "planet0"])


def test_a_card_may_name_a_path_that_is_not_utf8(tiny_lm_folder, tmp_path):
    """It is written when training is over."""
    save_retriever(build(tiny_lm_folder, "mean"), tmp_path, "revela train caf\udce9/ --out 模型")
    assert (tmp_path / "README.md").read_text("utf-8") == "revela train caf?/ --out 模型"
