"""A token window excludes prompts and special tokens, and is never larger than what the model
reads.
"""

from __future__ import annotations

import pytest
from sentence_transformers import SentenceTransformer
from small import build

from revela.errors import RevelaError
from revela.retriever.tokens import token_window

TEXT = "ocean1 engine2 garden3 planet4 market5 violin0 enzyme1 castle2 " * 8


@pytest.mark.parametrize("pooling", ["mean", "eos"])
def test_a_text_that_fills_the_window_is_read_to_its_end(tiny_lm_folder, pooling):
    model = build(tiny_lm_folder, pooling)
    model.max_seq_length = 40
    window = token_window(model, "m", 512)
    spans = window.spans([TEXT])[0]

    def last_read(count):
        text = TEXT[: spans[count - 1][1]]
        ids = model.preprocess([text], prompt=model.prompts["query"])["input_ids"][0].tolist()
        return (
            ids[-2 if pooling == "eos" else -1]
            == model.tokenizer(text, add_special_tokens=False)["input_ids"][-1]
            and len(ids) <= 40
        )

    assert last_read(window.size) and window.size > 20
    assert token_window(model, "m", 30).size == window.size - 10


def test_a_model_without_offsets_is_refused():
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models

    static = SentenceTransformer(
        modules=[
            StaticEmbedding(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), embedding_dim=4)
        ]
    )
    with pytest.raises(RevelaError, match="static has no fast tokenizer"):
        token_window(static, "static", 64)
