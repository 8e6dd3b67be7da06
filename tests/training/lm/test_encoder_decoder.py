"""New encoder-decoders: the same for the same seed, rotary, and one encoder in two libraries."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import make_rows, tiny_retriever
from revela.encoders.load import resolve
from revela.errors import RevelaError
from revela.training.lm.encoder_decoder import (
    SENTINELS,
    is_encoder_decoder,
    load_encoder_decoder,
    new_encoder_decoder,
)
from revela.training.packing import packed
from revela.training.probes.decoder import DecoderPooling
from revela.training.probes.exact_match import exact_match

TEXTS = [row["text"] for row in make_rows(80)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("new") / "tiny"
    new_encoder_decoder("new:tiny", TEXTS, made, seed=0)
    return made


def retriever(folder):
    return tiny_retriever(folder, layers=6, query_prompt="", passage_prompt="").eval()


def test_the_same_seed_gives_the_same_model(folder, tmp_path):
    torch.manual_seed(9)
    before = torch.get_rng_state()
    for seed in (0, 1):
        new_encoder_decoder("new:tiny", TEXTS, tmp_path / str(seed), seed)
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = (
        load_file(f / "model.safetensors") for f in (folder, tmp_path / "0", tmp_path / "1")
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    files = [f / "tokenizer.json" for f in (folder, tmp_path / "0", tmp_path / "1")]
    assert len({file.read_text() for file in files}) == 1


def test_its_form_is_that_of_the_paper(folder):
    config = json.loads((folder / "config.json").read_text())
    for side in (config["encoder"], config["decoder"]):
        assert side["rope_parameters"]["rope_theta"] == 8000.0 and side["hidden_size"] == 64
        assert set(side["layer_types"]) == {"full_attention"}
        assert side["attn_logit_softcapping"] is side["final_logit_softcapping"] is None
    lm = load_encoder_decoder(folder, bf16=False)
    assert sum(p.numel() for p in lm.parameters()) == 263_552
    assert len(lm.tokenizer) == 512 and len(lm.sentinels) == SENTINELS == 128
    assert lm.start == 0 != lm.tokenizer.pad_token_id  # the decoder masks padding
    named = lm.tokenizer.convert_ids_to_tokens(lm.sentinels)
    assert named == [f"<extra_id_{i}>" for i in range(128)]
    ids = lm.tokenizer("Bees dance, naïvely.")["input_ids"]
    assert ids[-1] == lm.tokenizer.eos_token_id
    assert lm.with_special_tokens(ids[:-1]) == ids
    assert lm.tokenizer.decode(ids[:-1]) == "Bees dance, naïvely."


def test_the_retriever_s_encoder_is_the_one_under_the_decoder(folder, tmp_path):
    """Stock Sentence Transformers takes it out, saves it, and loads it again."""
    from sentence_transformers import SentenceTransformer

    lm, model = load_encoder_decoder(folder, bf16=False), retriever(folder)
    assert len(model[0].model.encoder.layers) == 2  # --layers is for decoders
    features = model.preprocess(["ocean1 ocean2 violin3.", "Castle1."])
    mask = features["attention_mask"]
    with torch.no_grad():
        stock = lm.model.get_encoder()(input_ids=features["input_ids"], attention_mask=mask)
        taken = model[0](dict(features))["token_embeddings"]
        with packed(model[0].model):
            unpadded = model[0](dict(features))["token_embeddings"]
    kept = mask.bool()
    torch.testing.assert_close(taken[kept], stock.last_hidden_state[kept], rtol=0, atol=1e-6)
    torch.testing.assert_close(unpadded[kept], stock.last_hidden_state[kept], rtol=0, atol=2e-6)
    assert "_packs" in model[0].model.__dict__ and model[0].model._packs
    model.save_pretrained(str(tmp_path / "st"))
    again = SentenceTransformer(str(tmp_path / "st"), local_files_only=True)
    texts = ["ocean1 ocean2", "Violin1."]
    assert abs(again.encode(texts) - model.encode(texts)).max() == 0.0


def test_greedy_choice_is_that_of_transformers(folder):
    lm = load_encoder_decoder(folder, bf16=False)
    torch.manual_seed(0)
    for p in lm.parameters():
        p.data.add_(torch.randn_like(p) * 0.05)
    ids = torch.randint(3, 380, (3, 20))
    begin = lm.sentinels[:1]
    stock = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        decoder_input_ids=torch.tensor([[lm.start, *begin]] * 3),
        do_sample=False,
        min_new_tokens=3,
        max_new_tokens=3,
        suppress_tokens=[lm.tokenizer.eos_token_id],
    )
    assert lm.predict(ids, begin, 3).tolist() == stock[:, 2:].tolist()


def test_the_decoder_s_vectors_do_not_depend_on_padding_or_order(folder):
    encoder = DecoderPooling(load_encoder_decoder(folder, bf16=False), max_tokens=64)
    texts = [*TEXTS[:9], "Ocean1."]
    vectors = encoder.encode_passages(texts)
    assert abs((vectors**2).sum(axis=1) - 1).max() < 1e-5
    alone = encoder.encode_queries(texts[-1:])
    assert abs(alone[0] - vectors[-1]).max() < 1e-5
    assert abs(vectors @ vectors.T - 1).max() > 1e-3
    assert len(exact_match(TEXTS[:3], encoder)) == 2


def test_what_is_no_encoder_decoder_is_one_sentence(tiny_lm_folder, saved_retriever, tmp_path):
    assert not is_encoder_decoder(tiny_lm_folder) and not is_encoder_decoder(tmp_path)
    for folder in (tiny_lm_folder, saved_retriever):
        with pytest.raises(RevelaError, match="has no decoder: give --model new:small"):
            load_encoder_decoder(folder, bf16=False)


def test_an_encoder_decoder_without_a_layer_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "lm")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "decoder.layers.1." not in name}
    save_file(kept, tmp_path / "lm" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RevelaError, match=r"lacks weights of its model \(.*decoder\.layers\.1"):
        load_encoder_decoder(tmp_path / "lm", bf16=False)


def test_another_family_is_read_but_not_trained(tmp_path, tiny_tokenizer):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=400, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    lm = load_encoder_decoder(tmp_path, bf16=False)
    assert lm.predict(torch.randint(3, 380, (2, 9)), [5], 3).shape == (2, 3)
    with pytest.raises(RevelaError, match="is not a T5Gemma: give one"):
        lm.share(torch.nn.Identity(), tiny_tokenizer)


def test_too_little_text_for_the_tokenizer(tmp_path):
    with pytest.raises(RevelaError, match=r"different tokens of the 384 that --model new:tiny"):
        new_encoder_decoder("new:tiny", ["a few words"], tmp_path / "m", 0)
    with pytest.raises(RevelaError, match="give more text, or --model new:tiny"):
        new_encoder_decoder("new:small", TEXTS, tmp_path / "m", 0)
    with pytest.raises(RevelaError, match="--model new:big: give new:tiny, new:small, new:base"):
        new_encoder_decoder("new:big", TEXTS, tmp_path / "m", 0)
    assert not list(tmp_path.iterdir())


def test_a_new_model_is_made_by_train_only():
    with pytest.raises(RevelaError, match="new:small is made by revela train --method"):
        resolve("new:small")
