"""Tables of words: which words there are, what their rows begin as, and the stock model."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import AutoModel

from conftest import make_rows
from revela.encoders.load import load_encoder
from revela.errors import RevelaError
from revela.text.analyzer import Analyzer
from revela.training.retriever.fit import RIDGE
from revela.training.retriever.static_from_words import build_word_table

TEXTS = [row["text"] for row in make_rows(40, sentences=3)] + [
    "Walking dogs walk; the walker's dog walks, 北京市 walked.",
    "The dog and THE DOGS of foo_bar",
]
NO_STEMS = Analyzer("none")


@pytest.fixture(scope="module")
def table(tiny_lm_folder):
    return build_word_table(tiny_lm_folder, TEXTS, Analyzer("en"))


def split(table, text):
    return table.tokenizer.encode(text, add_special_tokens=False).tokens


def row_of(table, word):
    (stem,) = next(table.stems([word]))
    return table.rows_SD[stem], float(table.weight_S[stem])


def test_words_of_the_corpus_are_tokens_and_others_fall_to_pieces(table):
    assert split(table, "Walked DOGS, walker's 42nd!")[:2] == ["walked", "dogs"]
    assert split(table, "walkeddogs") == ["walked", "dogs"]
    assert list(next(table.stems(["\N{SNOWMAN} ☂"]))) == []
    assert len(next(table.stems(["dogs zzz\N{SNOWMAN}"]))) >= 1


def test_forms_of_a_stem_share_a_row_and_stop_words_have_their_own(table):
    stems = {word: next(table.stems([word])).tolist() for word in ("walk", "walked", "walks")}
    assert len({tuple(found) for found in stems.values()}) == 1
    assert row_of(table, "dog")[1] == row_of(table, "dogs")[1] != row_of(table, "walk")[1]
    assert row_of(table, "the")[1] < row_of(table, "walk")[1]
    assert not torch.equal(row_of(table, "the")[0], row_of(table, "and")[0])


def test_weights_are_the_square_root_of_idf(tiny_lm_folder):
    texts = ["one two three four five", "one two three", "one two six", "one seven six"]
    table = build_word_table(tiny_lm_folder, texts, NO_STEMS)
    passages = {"one": 4, "two": 3, "three": 2, "four": 1, "seven": 1}
    idf = {w: np.log1p((4 - n + 0.5) / (n + 0.5)) for w, n in passages.items()}
    ratio = [row_of(table, w)[1] ** 2 / idf[w] for w in passages]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)


def test_rows_begin_as_whitened_means_of_the_lms_pieces(tiny_lm_folder):
    lm = Tokenizer.from_file(str(tiny_lm_folder / "tokenizer.json"))
    embeddings = AutoModel.from_pretrained(tiny_lm_folder).get_input_embeddings().weight.detach()
    texts = [row["text"] for row in make_rows(40, sentences=3)]
    table = build_word_table(tiny_lm_folder, texts, NO_STEMS)
    counts = Counter(re.findall(r"\w+", " ".join(texts).lower()))
    rows = []
    for word in counts:
        ids = lm.encode(f" {word}", add_special_tokens=False).ids
        mean = F.normalize(embeddings[ids].double(), dim=1).mean(dim=0)
        rows.append(F.normalize(mean, dim=0))
    unit, share = torch.stack(rows), torch.tensor(list(counts.values())).double()[:, None]
    share = share / share.sum()
    centred = unit - (share * unit).sum(0)
    values, axes = torch.linalg.eigh(centred.T @ (share * centred))
    values = values.clamp(min=0) + RIDGE * values.clamp(min=0).mean()
    expected = F.normalize(centred @ axes @ torch.diag(values**-0.5) @ axes.T, dim=1)
    found = torch.stack([row_of(table, word)[0] for word in counts])
    assert torch.allclose(found.double(), expected, atol=1e-4)


def test_the_saved_model_is_stock(table, tmp_path):
    table.model().save_pretrained(str(tmp_path / "model"))
    vectors = load_encoder(tmp_path / "model", "auto").encode_passages(TEXTS)
    stock = SentenceTransformer(str(tmp_path / "model"), device="cpu").float()
    np.testing.assert_allclose(vectors, stock.encode(TEXTS, normalize_embeddings=True), atol=1e-5)
    for text, vector in zip(TEXTS, vectors, strict=True):
        stems = torch.from_numpy(next(table.stems([text])))
        mean = (table.rows_SD[stems] * table.weight_S[stems, None]).sum(0)
        np.testing.assert_allclose(vector, F.normalize(mean, dim=0), atol=2e-3)  # fp16


def test_input_embeddings_are_read_from_shards_or_asked_for(tiny_lm_folder, tmp_path):
    whole = build_word_table(tiny_lm_folder, TEXTS, NO_STEMS)
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((tiny_lm_folder / file).read_bytes())
    weights = load_file(tiny_lm_folder / "model.safetensors")
    table = {name: weights.pop(name) for name in list(weights) if "embed" in name}
    save_file(weights, tmp_path / "model-1.safetensors")
    save_file(table, tmp_path / "model-2.safetensors")
    assert torch.equal(build_word_table(tmp_path, TEXTS, NO_STEMS).rows_SD, whole.rows_SD)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(RevelaError, match=r"has no .*embed.* in safetensors"):
        build_word_table(tmp_path, TEXTS, NO_STEMS)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RevelaError, match=r"has no tokenizer\.json"):
        build_word_table(tmp_path, TEXTS, NO_STEMS)


def test_too_little_text_is_refused(tiny_lm_folder):
    with pytest.raises(RevelaError, match="fewer than two words"):
        build_word_table(tiny_lm_folder, ["..."], NO_STEMS)
