"""Tokenizers without EOS or padding; positions of a model are not exceeded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as t
from small import build, tokenizer_of

from revela.encoders.torch_model import positions_of
from revela.errors import RevelaError
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(60))]
TEXTS = ["w1 w2 w3", "w4 w5", " ".join(["w7"] * 100)]
GPT = dict(vocab_size=63, n_embd=16, n_layer=2, n_head=2, n_positions=64)


def folder_of(model, folder, **special):
    """A language model's folder, whose tokenizer has no token for padding."""
    model.save_pretrained(folder)
    names = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>") | special
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(WORDS), **names).save_pretrained(folder)
    return folder


def vectors(model):
    return RetrieverEncoder(model, bf16=False).encode_passages(TEXTS)


@pytest.mark.parametrize("pooling", ["mean", "eos"])
def test_a_tokenizer_without_eos(pooling, tmp_path):
    folder = folder_of(
        t.GPT2Model(t.GPT2Config(**GPT)), tmp_path, unk_token=None, bos_token=None, eos_token=None
    )
    if pooling == "eos":
        with pytest.raises(RevelaError, match=r"no EOS token .*: give --pooling mean"):
            build(folder, pooling)
        return
    model = build(folder)
    single = np.concatenate([RetrieverEncoder(model, False).encode_passages([x]) for x in TEXTS])
    np.testing.assert_allclose(vectors(model), single, atol=1e-5)
    save_retriever(model, tmp_path / "retriever", "")


SMALL = dict(vocab_size=63, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
FEED = dict(**SMALL, intermediate_size=16, max_position_embeddings=40)
POSITIONS = [
    (lambda: t.BertModel(t.BertConfig(**FEED)), 40),
    (lambda: t.RobertaModel(t.RobertaConfig(**FEED)), 38),
    (lambda: t.MPNetModel(t.MPNetConfig(**FEED)), 38),
    (lambda: t.OPTModel(t.OPTConfig(**SMALL, max_position_embeddings=40)), 40),
    (lambda: t.LlamaModel(t.LlamaConfig(**FEED)), None),
    (lambda: t.GPT2Model(t.GPT2Config(**GPT)), 64),
]


@pytest.mark.parametrize(("make", "positions"), POSITIONS)
def test_positions(make, positions):
    model = make().eval()
    assert positions_of(model) == positions
    if positions is not None:
        model(torch.full((1, positions), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, positions + 1), 5))
