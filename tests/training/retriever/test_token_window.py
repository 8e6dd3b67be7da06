"""A token window excludes prompts and special tokens, and is never larger than what the model
reads.
"""

from __future__ import annotations

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from small import build
from tokenizers import Tokenizer, models

from revela.encoders.torch_encoder import TorchEncoder
from revela.errors import RevelaError
from revela.training.probes.places import token_window
from revela.training.retriever.module import RetrieverModule

TEXT = "ocean1 engine2 garden3 planet4 market5 violin0 enzyme1 castle2 " * 8


@pytest.mark.parametrize("pooling", ["mean", "eos"])
def test_a_text_that_fills_the_window_is_read_to_its_end(tiny_lm_folder, pooling):
    model = build(tiny_lm_folder, pooling)
    model.max_seq_length = 40
    retriever = RetrieverModule(model)
    retriever.lower_limit(512)
    window = token_window(retriever, "m")
    spans = window.spans([TEXT])[0]

    text = TEXT[: spans[window.size - 1][1]]
    ids = model.preprocess([text], prompt=model.prompts["query"])["input_ids"][0].tolist()
    last = model.tokenizer(text, add_special_tokens=False)["input_ids"][-1]
    assert ids[-2 if pooling == "eos" else -1] == last and 20 < window.size < len(ids) <= 40
    retriever.lower_limit(30)
    assert token_window(retriever, "m").size == window.size - 10


def test_a_model_without_offsets_is_refused():
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    static = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=4)])
    with pytest.raises(RevelaError, match="static has no fast tokenizer"):
        token_window(RetrieverModule(static), "static")


LONG = [TEXT * 3, "ocean1", "", "QUJD" * 60, "蜜蜂通过舞蹈告诉同伴花的位置。" * 9]
LONG += ["ผึ้งเต้นรำเพื่อบอกเพื่อนว่าดอกไม้อยู่ที่ไหน " * 4]


@pytest.mark.parametrize("head", ["", "About the ocean "])
def test_a_passage_is_cut_until_all_of_it_is_read(tiny_lm_folder, head):
    model = build(tiny_lm_folder, "mean")
    model.max_seq_length = 40
    encoder = TorchEncoder(model, bf16=False)
    pieces = encoder.cut_to_fit([head] * len(LONG), LONG)
    assert ["".join(some) for some in pieces] == LONG
    assert pieces[1] == ["ocean1"] and pieces[2] == [""] and all(map(len, pieces))
    prompt = model.prompts["document"]
    for some in pieces:
        sizes = [len(model.tokenizer(prompt + head + piece)["input_ids"]) for piece in some]
        assert max(sizes) <= 40
        # One more token behind each is still read, or it is full: nothing was cut for no reason.
        assert len(some) == 1 or sum(sizes) > 40 + (len(some) - 1) * 5
    assert all(piece[-1] == " " for piece in pieces[0])  # no word is cut
    assert max(map(len, pieces[0])) < 2 * min(map(len, pieces[0]))
    halves = encoder.cut_to_fit([""], [TEXT], 2)[0]
    assert max(len(model.tokenizer(prompt + half)["input_ids"]) for half in halves) < 25
    fewer = TorchEncoder(model, bf16=False, max_tokens=25).cut_to_fit([""], [TEXT])[0]
    assert len(fewer) > len(encoder.cut_to_fit([""], [TEXT])[0])
