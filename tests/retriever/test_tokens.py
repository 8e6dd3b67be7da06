"""A ruler leaves room for prompts and special tokens, and never promises more than the model reads."""

from __future__ import annotations

import pytest
from sentence_transformers import SentenceTransformer
from small import build

from revela.errors import RevelaError
from revela.retriever.tokens import ruler_of

TEXT = "ocean1 engine2 garden3 planet4 market5 violin0 enzyme1 castle2 " * 8


@pytest.mark.parametrize("pooling", ["mean", "eos"])
def test_a_text_of_that_room_is_read_whole(tiny_lm_folder, pooling):
    model = build(tiny_lm_folder, pooling)
    model.max_seq_length = 40
    ruler = ruler_of(model, "m", 512)
    spans = ruler.spans([TEXT])[0]

    def last_read(count):
        text = TEXT[: spans[count - 1][1]]
        ids = model.preprocess([text], prompt=model.prompts["query"])["input_ids"][0].tolist()
        return (
            ids[-2 if pooling == "eos" else -1]
            == model.tokenizer(text, add_special_tokens=False)["input_ids"][-1]
            and len(ids) <= 40
        )

    assert last_read(ruler.room) and ruler.room > 20
    assert ruler_of(model, "m", 30).room == ruler.room - 10


def test_a_model_without_offsets_is_refused():
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models

    static = SentenceTransformer(
        modules=[
            StaticEmbedding(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), embedding_dim=4)
        ]
    )
    with pytest.raises(RevelaError, match="static has no fast tokenizer"):
        ruler_of(static, "static", 64)
