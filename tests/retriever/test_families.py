"""Language models of every family become retrievers and take LoRA; positions are not exceeded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as t
from small import build, tokenizer_of

from revela.errors import RevelaError
from revela.retriever.build import load_retriever, positions_of
from revela.retriever.encode import RetrieverEncoder
from revela.retriever.lora import add_lora, merged
from revela.retriever.save import save_retriever

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(60))]
TEXTS = ["w1 w2 w3", "w4 w5", " ".join(["w7"] * 100)]
GPT = dict(vocab_size=63, n_embd=16, n_layer=2, n_head=2, n_positions=64)
FAMILIES = {
    "gpt2": lambda: t.GPT2Model(t.GPT2Config(**GPT)),
    "gptj": lambda: t.GPTJModel(t.GPTJConfig(**GPT, rotary_dim=4)),
    "bigcode": lambda: t.GPTBigCodeModel(t.GPTBigCodeConfig(**GPT)),
    "bloom": lambda: t.BloomModel(
        t.BloomConfig(vocab_size=63, hidden_size=16, n_layer=2, n_head=2)
    ),
    "mpt": lambda: t.MptModel(
        t.MptConfig(vocab_size=63, d_model=16, n_layers=2, n_heads=2, max_seq_len=64)
    ),
    "neo": lambda: t.GPTNeoModel(
        t.GPTNeoConfig(
            vocab_size=63, hidden_size=16, num_layers=2, num_heads=2, window_size=8,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=64,
        )
    ),
    "mamba": lambda: t.MambaModel(
        t.MambaConfig(vocab_size=63, hidden_size=16, num_hidden_layers=2, state_size=4)
    ),
}  # fmt: skip


def folder_of(model, folder, **special):
    """A language model's folder, whose tokenizer has no token for padding."""
    model.save_pretrained(folder)
    names = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>") | special
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(WORDS), **names).save_pretrained(folder)
    return folder


def vectors(model):
    return RetrieverEncoder(model, bf16=False).encode_passages(TEXTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_cut_and_saved_and_takes_lora(family, tmp_path):
    torch.manual_seed(0)
    folder = folder_of(FAMILIES[family](), tmp_path / "lm")
    model = build(folder, layers=1, max_tokens=512)
    save_retriever(model, tmp_path / "retriever", "")
    np.testing.assert_allclose(
        vectors(load_retriever(tmp_path / "retriever")), vectors(model), atol=1e-5
    )
    if family == "mamba":
        with pytest.raises(RevelaError, match=r"MambaModel has no linear modules .* --lora-rank 0"):
            add_lora(model, 4, 4, 0.0)
        return
    untrained = vectors(model)
    add_lora(model, 4, 4, 0.0)
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    trained = vectors(model)
    assert np.abs(trained - untrained).max() > 0.01
    np.testing.assert_allclose(vectors(merged(model)), trained, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "eos"])
def test_a_tokenizer_without_eos(pooling, tmp_path):
    folder = folder_of(FAMILIES["gpt2"](), tmp_path, unk_token=None, bos_token=None, eos_token=None)
    if pooling == "eos":
        with pytest.raises(RevelaError, match=r"no EOS token, .* --pooling mean"):
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
