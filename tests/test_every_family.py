"""Every family of transformers as a retriever and as an LM: the same numbers as by stock code.

By default a few run; ``pytest -m slow tests/test_every_family.py`` runs the others.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AttentionInterface, AttentionMaskInterface

import families
import naive
import revela.training.train as training
from conftest import TINY, logged, make_documents, tiny_retriever
from revela.encoders.torch_model import positions_of
from revela.errors import RevelaError
from revela.training.check_settings import check_recipe
from revela.training.lm.document_attention import DocumentWeights, InBatchAttention
from revela.training.lm.language_model import LanguageModel
from revela.training.lm.prompts import QUESTION, read_candidates
from revela.training.methods.dream import AttentionMass
from revela.training.models import load_tokenizer
from revela.training.recipe import Recipe
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever

DOCUMENTS = make_documents(24)
UPPER = ["SEVEN GREY HERONS STAND IN THE OCEAN01 LAKE", "VIOLIN15 ENGINE10.", DOCUMENTS[3].text]
TEXTS = [*UPPER, *map(str.lower, UPPER)]
LENGTHS = [5, 3, 4]


def by_role(model, texts=TEXTS):
    return np.stack([model.encode_query(texts), model.encode_document(texts)])


def assert_same_when_saved(vectors, folder):
    """In stock sentence-transformers, in both roles; in upper case as in lower case."""
    stock = by_role(SentenceTransformer(str(folder), device="cpu"))
    np.testing.assert_allclose(stock, vectors, atol=1e-5)
    np.testing.assert_allclose(stock[:, :3], stock[:, 3:], atol=1e-5)


@pytest.mark.parametrize("kind", families.cases(families.RETRIEVERS, families.OFTEN))
def test_as_a_retriever(kind, tmp_path, monkeypatch):
    """Fitted, trained for three steps and saved, with EOS or the mean."""
    folder, vectors = families.folder_of(kind, tmp_path / "model"), []
    limits = dict(max_steps=3, learning_rate=1e-2, warmup_steps=1)
    changes = TINY | limits | dict(crop_window=40, lower_case="yes")
    recipe = Recipe.of("contrastive-crop", model=str(folder), **changes)
    if kind in families.NO_LORA:
        with pytest.raises(RevelaError, match="no linear layers for LoRA: give --lora-rank 0"):
            check_recipe(recipe, tmp_path / "out", resume=False)
        recipe = recipe.replace(lora_rank=0)
    save = training.save_outcome

    def saving(data, encoder, *rest, **named):
        vectors.append([encoder.encode_queries(TEXTS), encoder.encode_passages(TEXTS)])
        save(data, encoder, *rest, **named)

    monkeypatch.setattr(training, "save_outcome", saving)
    training.train(recipe, DOCUMENTS, tmp_path / "out")
    assert_same_when_saved(vectors[0], tmp_path / "out")
    assert np.linalg.norm(vectors[0][0][0] - vectors[0][0][1]) > 0.01
    norms = [line["grad_norm"] for line in logged(tmp_path / "out")]
    assert len(norms) == 3 and min(norms) > 1e-6, norms

    if load_tokenizer(folder).eos_token is None:
        with pytest.raises(RevelaError, match=r"no EOS token .* --pooling mean"):
            tiny_retriever(folder, pooling="eos")
        return
    model = tiny_retriever(folder, pooling="eos", lower_case="yes")
    assert {model.tokenizer(text)["input_ids"][-1] for text in TEXTS} == {
        model.tokenizer.eos_token_id
    }
    save_retriever(model, tmp_path / "eos", "")
    assert_same_when_saved(by_role(model), tmp_path / "eos")


@pytest.mark.parametrize("kind", families.cases(families.RETRIEVERS, families.OFTEN))
def test_a_text_beyond_the_positions(kind, tmp_path):
    """Is read as far as there are positions, whatever limit is asked for."""
    folder = families.folder_of(kind, tmp_path / "model")
    model = tiny_retriever(folder, max_tokens=100_000)
    positions, text = positions_of(model[0].model), "ocean engine " * 400
    encoder = RetrieverEncoder(model, bf16=False)
    encoder.retriever.lower_limit(99_999)
    tokens = encoder.retriever.tokenize([text], "query")["input_ids"].shape[1]
    assert tokens == positions or (positions is None and tokens >= 800)
    np.testing.assert_allclose(
        encoder.encode_queries([text]), model.encode_query([text]), atol=1e-5
    )


@pytest.mark.parametrize("kind", families.cases(families.LMS, families.OFTEN))
def test_as_a_language_model(kind):
    """Logits, prefix, gates and the attention of heads, against stock eager attention."""
    plain, ours, gated = (families.causal_lm(kind) for _ in range(3))
    plain.set_attn_implementation("eager")
    lm = LanguageModel(ours)
    ids = torch.randint(3, families.VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in LENGTHS])
    texts = [row[:n][None] for row, n in zip(ids, LENGTHS, strict=True)]
    packed, layers = lm.pack(ids, mask), range(lm.n_layers)
    with torch.no_grad():
        want = torch.cat([plain(input_ids=text).logits[0] for text in texts])
        close = dict(atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lm.logits(packed), want, **close)

        # What continues another text.
        before = torch.arange(3, 10)[None]
        joined = [plain(input_ids=torch.cat([before, text], dim=1)).logits[0, 7:] for text in texts]
        memory = lm.prefill(lm.pack(before, torch.ones_like(before)), layers)
        torch.testing.assert_close(lm.logits(packed, prefix=memory), torch.cat(joined), **close)

        # Gates on some heads of the upper half.
        weights = torch.tensor([[0, 0.7, 0.3], [0.4, 0, 0.6], [0.1, 0.9, 0]])
        gates = torch.zeros(lm.n_layers, lm.n_heads)
        gates[-2, 1], gates[-1, :] = 0.3, 0.5
        heads = {lm.n_layers - 2: [1], lm.n_layers - 1: list(range(lm.n_heads))}
        mix = InBatchAttention(weights, packed.lengths, gates, heads, v_norm=False)
        got = lm.logits(packed, lm.prefill(packed, list(heads)), mix)
        torch.testing.assert_close(got, naive_logits(gated, ids, mask, weights, gates), **close)
        assert (got - want).abs().max() > 1e-4

        # What the rows of a question attend to, by head.
        asked = texts[0]
        ones = torch.ones_like(before)
        prompt = {"input_ids": before, "attention_mask": ones, "document": ones - 1}
        tail = {"input_ids": asked, "attention_mask": torch.ones_like(asked)}
        tail["role"] = torch.full_like(asked, QUESTION)
        questions = read_candidates(lm, prompt, tail)
        mass = AttentionMass(questions)
        lm.run_attention(questions.tails, mass, prefix=questions.memory)
        whole = plain(input_ids=torch.cat([before, asked], dim=1), output_attentions=True)
        for layer in layers:
            eager_HP = whole.attentions[layer][0, :, 7:, :7].mean(dim=1)
            torch.testing.assert_close(mass.by_layer[layer][:, 0], eager_HP, **close)


def naive_logits(model, ids, mask, weights, gates):
    """The gated form by its definition: the model runs twice, one document at a time."""
    lengths, memory, first = mask.sum(dim=1).tolist(), {}, True

    def attention(module, query, key, value, attention_mask, scaling=None, **_):
        layer = module.layer_idx
        own = naive.own_attention(query[0], key[0], value[0], lengths, scaling)
        if first:
            memory[layer] = key[0], value[0]
        else:
            documents = DocumentWeights(weights, lengths)
            inputs = query[0], *memory[layer], documents, scaling, None
            g = gates[layer][:, None, None]
            own = (1 - g) * own + g * naive.reference_attention(*inputs)
        return own.transpose(0, 1)[None].contiguous(), None

    AttentionInterface.register("naive", attention)
    AttentionMaskInterface.register("naive", lambda *_, **__: None)
    model.set_attn_implementation("naive")
    packed, positions = ids[mask.bool()][None], torch.cat([torch.arange(n) for n in lengths])[None]
    given = dict(input_ids=packed, position_ids=positions, use_cache=False)
    model(**given)
    first = False
    return model(**given).logits[0]


@pytest.mark.parametrize("kind", families.cases(families.NO_LM, families.OFTEN))
def test_another_family_is_no_language_model(kind, tmp_path):
    """It is refused by one sentence, before a corpus or weights are read."""
    config, out = families.config_of(kind), tmp_path / "out"
    config.save_pretrained(tmp_path / "lm")
    families.folder_of("llama", tmp_path / "model")
    recipe = Recipe.of(model=str(tmp_path / "model"), lm=str(tmp_path / "lm"))
    with pytest.raises(RevelaError, match=families.NO_LM[kind]):
        check_recipe(recipe, out, resume=False)


@pytest.mark.parametrize("kind", families.cases([*families.NO_RETRIEVER], families.OFTEN))
def test_another_family_is_no_retriever(kind, tmp_path):
    folder = families.folder_of(kind, tmp_path / "model")
    recipe = Recipe.of("contrastive-crop", model=str(folder), layers=2)
    with pytest.raises(RevelaError, match=families.NO_RETRIEVER[kind]):
        check_recipe(recipe, tmp_path / "out", resume=False)
