"""A retriever with slots in use: whatever is beside a text, and however texts are put side by side,
it reads its context and the text.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import SLOTS, live, make_rows
from revela.encoders.base import without_slots
from revela.encoders.graph_export import export_onnx
from revela.encoders.graphs import open_export
from revela.encoders.torch_model import open_model
from revela.training.probes.places import token_window
from revela.training.retriever.module import RetrieverModule

TEXTS = ["ocean1", *(row["text"] for row in make_rows(6, sentences=3)), "", "engine2 " * 200]


@pytest.fixture(scope="module")
def encoder(contextual):
    return live(contextual)


@pytest.fixture(scope="module")
def other(encoder):
    """The same with another context."""
    return encoder.in_context(TEXTS[1:4])


@pytest.mark.parametrize("role", ["queries", "passages"])
def test_packed_is_padded_is_one_at_a_time(encoder, other, role):
    packed = getattr(other, f"encode_{role}")(TEXTS)
    alone = np.concatenate([getattr(other, f"encode_{role}")([text]) for text in TEXTS])
    np.testing.assert_allclose(packed, alone, atol=1e-6)
    model, read = encoder.model, [text or "." for text in TEXTS]
    rows, retriever = encoder.read_context(TEXTS[1:4]), RetrieverModule(model)
    retriever.context, retriever.packs = (rows, rows), False
    prompt = model.prompts[{"queries": "query", "passages": "document"}[role]]
    with torch.no_grad():
        padded = retriever(model.preprocess(read, prompt=prompt)).numpy()
    np.testing.assert_allclose(packed, padded, atol=1e-6)
    assert np.abs(packed - getattr(encoder, f"encode_{role}")(TEXTS)).max() > 1e-3


def test_text_that_looks_like_a_slot_is_text(encoder):
    ids, seen = encoder.retriever.slots, []
    table = encoder.model[0].model.get_input_embeddings()
    handle = table.register_forward_hook(lambda _module, inputs, _out: seen.append(inputs[0]))
    text = "ocean1 <|context-3|> engine2 <|context-0|><|context-7|>"
    try:
        vector = encoder.encode_passages([text])
    finally:
        handle.remove()
    assert int(sum(torch.isin(x, torch.tensor(ids)).sum() for x in seen)) == SLOTS == len(ids)
    raw = encoder.model.encode([text], prompt=encoder.model.prompts["document"])
    assert np.abs(vector - raw).max() > 1e-4  # sentence-transformers itself reads slots there
    (count,) = encoder.count_tokens([text], "passage")
    assert count == max(x.numel() for x in seen)


def test_slots_count_as_tokens_of_the_prompt(encoder, saved_retriever):
    model, text = encoder.model, "ocean1 engine2"
    bare = model.tokenizer(text, add_special_tokens=False).input_ids
    for role in ("query", "passage"):
        prompt = model.prompts[role]
        (count,) = encoder.count_tokens([text], role)
        assert count == len(model.tokenizer(prompt + text).input_ids) > SLOTS + len(bare)
    assert encoder.limit == model.max_seq_length == 100 + SLOTS
    # Texts of 40 tokens besides: with slots as without.
    retrievers = RetrieverModule(open_model(saved_retriever)), RetrieverModule(model)
    for retriever in retrievers:
        retriever.lower_limit(40)
    sizes = [token_window(retriever, "m").size for retriever in retrievers]
    assert sizes[0] == pytest.approx(sizes[1], abs=1)


def test_onnx_says_what_torch_says(contextual, encoder, tmp_path):
    pytest.importorskip("onnxruntime")
    assert export_onnx(open_model(contextual), tmp_path / "onnx") < 1e-5
    exported, texts = open_export(tmp_path / "onnx"), [*TEXTS, "a <|context-3|> b"]
    for encode in ("encode_queries", "encode_passages"):
        found = getattr(exported, encode)(without_slots(texts))  # as the caller has to
        expected = getattr(encoder, encode)(texts)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@settings(max_examples=15)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=6), st.lists(st.text(max_size=30)))
def test_any_texts_in_any_context(encoder, texts, context):
    reader = encoder.in_context(context)
    vectors = reader.encode_passages(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[-1:], reader.encode_passages(texts[-1:]), atol=1e-5)
