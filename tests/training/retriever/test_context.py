"""Slots and the first stage: equation 5 by hand, what a saved folder gives in stock
sentence-transformers, order, null contexts, and who is refused.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from small import build

from conftest import live, make_rows
from revela.encoders.torch_model import slot_ids
from revela.errors import RevelaError
from revela.training.retriever.context import (
    SavedContext,
    add_context,
    draw_documents,
    load_context_encoder,
    write_context,
)
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever
from revela.training.settings import Context
from revela.types import Document

TEXTS = [row["text"] for row in make_rows(9, sentences=2)]
SLOTS = 5


@pytest.fixture(params=["bert", "llama"])
def plain(request, tiny_bert_folder, tiny_lm_folder):
    """A retriever without slots, in eval mode."""
    bert = request.param == "bert"
    return (SentenceTransformer(str(tiny_bert_folder)) if bert else build(tiny_lm_folder)).eval()


def contextual(plain, **changes):
    """A copy with slots, and a first stage whose head and null row are not 0."""
    model = copy.deepcopy(plain)
    first = add_context(Context(**{"context": SLOTS} | changes), model, TEXTS[0], 0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for tensor in (first.model[4].linear.weight, first.null_D):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model, first.eval()


def reading(model, rows_JD):
    """An encoder with these rows in its slots."""
    return RetrieverEncoder(model, False, lambda _: rows_JD).in_context([])


def by_hand(model, role, text, rows_JD):
    """Equation 5 for one text: the rows stand where the slots are, and do not count in the mean."""
    read = model.tokenizer(model.prompts[role] + text, return_tensors="pt")
    ids_T = read["input_ids"][0, : model.max_seq_length]
    transformer, ids = model[0].model, slot_ids(model)
    inputs_TD = transformer.get_input_embeddings().weight[ids_T].clone()
    places = [ids_T.tolist().index(i) for i in ids]
    for place, row_D in zip(places, rows_JD, strict=True):
        inputs_TD[place] = row_D
    states_TD = transformer(inputs_embeds=inputs_TD[None]).last_hidden_state[0]
    kept = [t for t in range(len(ids_T)) if t not in places]
    return torch.nn.functional.normalize(states_TD[kept].mean(dim=0), dim=0)


def test_a_vector_is_equation_5(plain):
    model, first = contextual(plain)
    rows_JD = first.of_texts(TEXTS[4:])
    encoder = reading(model, rows_JD)
    encoders = {"query": encoder.encode_queries, "document": encoder.encode_passages}
    for role, encode in encoders.items():
        found = torch.from_numpy(encode(TEXTS[:4]))
        expected = torch.stack([by_hand(model, role, text, rows_JD) for text in TEXTS[:4]])
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("layers", "tokens", "per_document"), [(1, 64, 1), (2, 20, 2)])
def test_a_context_is_its_anchors_and_what_is_read(plain, tmp_path, layers, tokens, per_document):
    """c_j = a_j + Dense(GELU(Dense(LayerNorm(mean of M1's states)))), run by run of each text."""
    sizes = dict(context_tokens=tokens, context_vectors_per_document=per_document)
    _, first = contextual(plain, context=4, context_layers=layers, **sizes)
    assert first.model[0].model.config.num_hidden_layers == layers
    SavedContext(first, first.null_JD, {}).save(tmp_path / "context")
    reader = first.model
    rows_JD, found = first.of_texts(TEXTS), []
    for text in TEXTS[: 4 // per_document]:
        cut = dict(truncation=True, max_length=tokens, return_tensors="pt")
        read = reader.tokenizer(reader.prompts["document"] + text, **cut)
        states_TD = reader[0].model(input_ids=read["input_ids"]).last_hidden_state[0]
        bounds = [len(states_TD) * run // per_document for run in range(per_document + 1)]
        for start, end in pairwise(bounds):
            x = reader[2].norm(states_TD[start:end].mean(dim=0))
            found.append(reader[4].linear(torch.nn.functional.gelu(reader[3].linear(x))))
    expected_JD = (first.anchors_JD + torch.stack(found)).detach()
    torch.testing.assert_close(rows_JD, expected_JD, atol=1e-6, rtol=0)
    torch.testing.assert_close(load_context_encoder(tmp_path).of_texts(TEXTS), rows_JD)
    few = first.of_texts(TEXTS[:1])
    torch.testing.assert_close(few[per_document:], first.null_JD[per_document:].detach())
    torch.testing.assert_close(first.of_texts([]), first.null_JD.detach())
    short = {"token_embeddings": torch.ones(1, 3, 2), "attention_mask": torch.tensor([[1, 0, 0]])}
    runs_VT = first._runs(short)["attention_mask"]
    assert runs_VT.tolist() == [[1, 0, 0]] * per_document


def test_slots_that_are_masked_change_nothing(plain):
    """The text keeps its positions: learned ones because the slots have none, RoPE's because they
    are relative (words of a prompt stand before the slots, and would move away from the text)."""
    plain = copy.deepcopy(plain)
    plain.prompts = dict.fromkeys(plain.prompts, "")
    model, _ = contextual(plain)
    text = TEXTS[0]
    before = plain.preprocess([text], prompt=plain.prompts.get("query") or None)
    after = model.preprocess([text], prompt=model.prompts["query"])
    is_slot = after["input_ids"] >= slot_ids(model).start
    assert int(is_slot.sum()) == SLOTS
    assert after["input_ids"][~is_slot].tolist() == before["input_ids"][0].tolist()
    states = model[0].model(after["input_ids"], attention_mask=(~is_slot).long()).last_hidden_state
    expected = plain[0].model(before["input_ids"]).last_hidden_state
    torch.testing.assert_close(states[~is_slot], expected[0], atol=1e-5, rtol=0)


def test_the_order_of_documents(plain):
    """Of no effect on a BERT, whose slots have no positions. On a decoder it has one, as documents
    are a prefix: that is meant so."""
    model, first = contextual(plain)
    rows_JD = first.of_texts(TEXTS) * 3
    one = reading(model, rows_JD).encode_passages(TEXTS)
    other = reading(model, rows_JD.flip(0)).encode_passages(TEXTS)
    difference = np.abs(one - other).max()
    assert difference < 1e-6 if len(first.anchors_AD) == 1 else difference > 1e-5


def test_a_saved_folder_is_the_same_in_stock_sentence_transformers(plain, tmp_path):
    """And so is what research/contexts.md says of another corpus."""
    model, first = contextual(plain)
    rows_JD, folder = first.of_texts(TEXTS[4:]), tmp_path / "saved"
    save_retriever(model, folder, "", context=SavedContext(first, rows_JD, {"drawn from": "us"}))
    encoder = RetrieverEncoder(model, False, first.of_texts)
    own, other = encoder.in_context(TEXTS[4:]), encoder.in_context(TEXTS)
    stock, reader = (SentenceTransformer(str(path)) for path in (folder, folder / "context"))
    close = dict(atol=2e-7)
    passages = stock.encode_document(TEXTS)
    np.testing.assert_allclose(passages, own.encode_passages(TEXTS), **close)
    np.testing.assert_allclose(stock.encode_query(TEXTS), own.encode_queries(TEXTS), **close)
    vectors = reader.encode_document(TEXTS[:SLOTS], convert_to_tensor=True).cpu()
    rows = load_file(folder / "context" / "rows.safetensors")["anchors_JD"] + vectors
    ids = stock.tokenizer.convert_tokens_to_ids([f"<|context-{j}|>" for j in range(SLOTS)])
    with torch.no_grad():
        stock[0].model.get_input_embeddings().weight[ids] = rows
    found = stock.encode_document(TEXTS)
    np.testing.assert_allclose(found, other.encode_passages(TEXTS), **close)
    assert np.abs(found - passages).max() > 1e-4
    again = live(folder).in_context(TEXTS)
    np.testing.assert_array_equal(again.encode_passages(TEXTS), other.encode_passages(TEXTS))
    (folder / "context" / "rows.safetensors").write_bytes(b"")
    with pytest.raises(RevelaError, match="context is damaged"):
        load_context_encoder(folder)


def test_an_encoder_with_another_context_leaves_the_first_alone(plain):
    model, first = contextual(plain)
    encoder = RetrieverEncoder(model, False, first.of_texts)
    before = encoder.encode_passages(TEXTS)
    other = encoder.in_context(TEXTS)
    assert np.abs(other.encode_passages(TEXTS) - before).max() > 1e-4
    np.testing.assert_array_equal(encoder.encode_passages(TEXTS), before)


def test_the_longest_text_is_as_long_as_without_slots(plain):
    model, _ = contextual(plain)
    assert model.max_seq_length == plain.max_seq_length + SLOTS
    long = " ".join(TEXTS) * 4
    words = plain.preprocess([long], prompt=plain.prompts.get("document") or None)["input_ids"]
    ids = model.preprocess([long], prompt=model.prompts["document"])["input_ids"]
    assert ids.shape[1] == words.shape[1] + SLOTS
    assert ids[ids < slot_ids(model).start].tolist() == words[0].tolist()


def test_anchors(plain):
    """A decoder's begin as a text's own tokens, a BERT's as its mask token, or near it if nothing
    else tells its slots apart."""
    model, first = contextual(plain, context_from="constant")
    _, learned = contextual(plain)
    torch.testing.assert_close(first.of_texts(TEXTS), first.anchors_JD.detach())
    table = plain[0].model.get_input_embeddings().weight.detach()
    if hasattr(plain[0].model, "embeddings"):
        torch.testing.assert_close(learned.anchors_AD.detach(), table[1:2])  # of the mask token
        rms = (first.anchors_AD - table[1]).square().mean().sqrt() / table.square().mean().sqrt()
        assert 0.08 < rms < 0.12 and torch.linalg.matrix_rank(first.anchors_JD) == SLOTS
    else:
        ids = plain.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"][:SLOTS]
        torch.testing.assert_close(first.anchors_JD.detach(), table[ids])
        torch.testing.assert_close(learned.anchors_JD.detach(), table[ids])
    write_context(model, first.of_texts([]))


def test_who_is_refused(plain, tiny_lm_folder):
    with pytest.raises(RevelaError, match="of which --max-tokens 2040 leaves 8"):
        add_context(Context(9), build(tiny_lm_folder, max_tokens=2040), "a", 0)
    table = modules.StaticEmbedding(plain.tokenizer, embedding_dim=8)
    static = SentenceTransformer(modules=[table])
    with pytest.raises(RevelaError, match="needs a transformer"):
        add_context(Context(2), static, "a", 0)


def test_documents_are_drawn_one_of_each_while_there_are_enough():
    documents = [Document(str(i), f"First {i}. Second {i}. Third {i}.") for i in range(6)]
    drawn = draw_documents(documents, 4, 1, 2)
    assert len({text.split()[1] for text in drawn}) == 4
    assert drawn == draw_documents(documents, 4, 1, 2) != draw_documents(documents, 4, 2, 2)
    assert len(draw_documents(documents, 99, 0, 2)) == 18
    assert draw_documents([], 3, 0, 2) == []
