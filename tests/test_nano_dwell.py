"""examples/nano_dwell.py against the package: spans, crops, losses and gradients, the probe."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from conftest import make_rows, tiny_retriever, write_texts
from revela.training.lm.encoder_decoder import ROPE_THETA, load_encoder_decoder
from revela.training.methods.contrastive import ContrastiveLoss, crop
from revela.training.methods.dwell import SpanLoss, corrupt
from revela.training.probes.moved_passage import insert_at, places, scores_by_place
from revela.training.retriever.module import RetrieverModule
from tests.nano_example import assert_same_gradients, example, gradients


@pytest.fixture(scope="module")
def nano():
    with example("nano_dwell") as module:
        module.WIDTH, module.HEADS, module.VOCABULARY = 32, 2, 400
        yield module


def untrained(nano):
    """An encoder-decoder, its tokenizer, and texts of different lengths."""
    texts = [row["text"] for row in make_rows(30)]
    tokenizer = nano.train_tokenizer(texts)
    torch.manual_seed(0)
    ids = [tokenizer(text)["input_ids"][: 40 + 9 * i] for i, text in enumerate(texts[:8])]
    return nano.EncoderDecoder(tokenizer), tokenizer, ids


def padded(texts, value):
    """Tokens without END, with END and padding."""
    return pad_sequence([torch.tensor([*ids, 0]) for ids in texts], True, value)


def side(texts):
    """What the package's losses read."""
    return {"input_ids": (ids_BL := padded(texts, 1)), "attention_mask": (ids_BL != 1).long()}


def package_model(lm, tokenizer, folder):
    """The same weights as a retriever, and its encoder under the decoder of the package."""
    lm.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = tiny_retriever(folder, layers=0, query_prompt="", passage_prompt="").requires_grad_()
    whole = load_encoder_decoder(folder, bf16=False)
    whole.share(model[0].model.encoder, tokenizer)
    return RetrieverModule(model), whole


@pytest.mark.parametrize("length", [2, 3, 7, 60, 128, 300])
def test_spans_and_crops_are_the_packages(nano, length):
    ids, sentinels = list(range(length)), list(range(1000, 1100))
    for seed in range(20):
        random.seed(seed)
        found = nano.corrupt(ids, sentinels)
        share, span = nano.HIDDEN_SHARE, nano.MEAN_SPAN
        assert found == corrupt(ids, share, span, sentinels, random.Random(seed))
        random.seed(seed)
        shares, rng = (nano.SHORTEST_CROP, nano.LONGEST_CROP), random.Random(seed)
        expected = crop(" ".join(map(str, ids)), *shares, 0.0, rng)
        assert nano.crop(ids) == [int(word) for word in expected.split()]


@pytest.mark.parametrize("stage", ["spans", "crops"])
def test_losses_and_gradients_are_the_packages(nano, tmp_path, stage):
    lm, tokenizer, texts = untrained(nano)
    rope = lm.model.config.encoder.rope_parameters
    assert (lm.end, lm.padding, rope["rope_theta"]) == (0, 1, ROPE_THETA)
    random.seed(3)
    loss = (nano.span_loss if stage == "spans" else nano.crop_loss)(lm, texts)
    loss.backward()

    retriever, whole = package_model(lm, tokenizer, tmp_path)
    if stage == "spans":
        how = nano.HIDDEN_SHARE, nano.MEAN_SPAN, whole.sentinels, random.Random(3)
        inputs, targets = zip(*(corrupt(ids, *how) for ids in texts), strict=True)
        weight_B = torch.full((len(texts),), 1 / sum(len(target) + 1 for target in targets))
        target = {"ids": padded(targets, -100), "weight": weight_B}
        expected = SpanLoss(retriever, whole)([side(inputs), target])
    else:
        random.seed(3)
        first, second = ([nano.crop(ids) for ids in texts] for _ in range(2))
        query = {**side(first), "target": torch.arange(len(texts))}
        expected = ContrastiveLoss(retriever, tau=nano.TAU)([query, side(second)])
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    own = gradients(lm.model)
    assert max(gradient.abs().max() for gradient in own.values()) > 1e-3
    assert any("decoder" in name for name in own) == (stage == "spans")
    assert_same_gradients(lm.model, whole.model)


def test_answers_are_moved_and_ranked_as_by_the_package(nano):
    documents = [list(range(100 * i, 100 * i + 100)) for i in range(6)]
    probe = nano.make_probe(documents, [])
    for i, ids in enumerate(documents):
        first, last = probe.versions[0][i], probe.versions[-1][i]
        passage, rest = first[: nano.PASSAGE], first[nano.PASSAGE :]
        assert last == rest + passage and sorted(first) == ids
        assert set(probe.queries[i]) < {*passage}
        text = " ".join(map(str, rest))
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        moved = insert_at(text, " ".join(map(str, passage)), places(spans))
        assert [[*map(int, m.split())] for m in moved] == [v[i] for v in probe.versions]

    vectors = np.random.default_rng(0).standard_normal((6 + 60 + 9, 5)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    parts = vectors[:6], vectors[6:66].reshape(10, 6, 5), vectors[66:]
    found = nano.scores_by_place(*map(torch.from_numpy, parts))
    cosines, ranks = scores_by_place(*parts, np.arange(6))
    np.testing.assert_allclose(found[0], cosines, atol=1e-6)
    assert found[1].tolist() == ranks.tolist() and ranks.max() > 8
    assert nano.reciprocal(torch.tensor([4, 101])).tolist() == [0.25, 0.0]


@pytest.mark.parametrize(("decay", "sign"), [(0.99, 1), (1 / 0.99, -1)])
def test_the_probe_sees_a_known_bias(nano, capsys, decay, sign):
    """Of bags of words whose weights fall, or rise, from the first token on."""

    class Biased:
        def encode(self, texts):
            weights = [[decay**i for i, _ in enumerate(ids)] for ids in texts]
            bags = torch.zeros(len(texts), 900)
            for bag, ids, weight in zip(bags, texts, weights, strict=True):
                bag.index_add_(0, torch.tensor(ids), torch.tensor(weight))
            return torch.nn.functional.normalize(bags, dim=1)

    rng = random.Random(0)
    texts = [rng.choices(range(900), k=nano.WINDOW) for _ in range(40)]
    assert nano.measure(Biased(), nano.make_probe(texts[:20], texts[20:]), "biased") == 1.0
    drops = re.findall(r"([+-]\d\.\d+) ± (\d\.\d+)$", capsys.readouterr().out, re.M)
    assert len(drops) == 3
    for drop, error in drops[1:]:
        assert sign * float(drop) > 4 * float(error) > 0


def test_scores_move_with_the_encoder_alone(nano):
    """Frozen weights leave them as they are; so does a decoder that is trained over them."""
    lm, rng = untrained(nano)[0], random.Random(0)
    texts = [rng.choices(range(200, 400), k=nano.WINDOW) for _ in range(24)]
    probe = nano.make_probe(texts[:12], texts[12:])

    def trained(loss, learning_rate):
        nano.train(lm, texts, nano.Stage("", loss, 3, 4, learning_rate))
        return nano.measure(lm, probe, "")

    before = nano.measure(lm, probe, "")
    assert trained(nano.span_loss, 0.0) == trained(nano.crop_loss, 0.0) == before
    decoder = lm.model.get_decoder()
    start = [p.clone() for p in decoder.parameters()]
    lm.model.get_encoder().requires_grad_(False)
    assert trained(nano.span_loss, 1e-2) == before
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(start, decoder.parameters(), strict=True))
    lm.model.get_encoder().requires_grad_(True)
    assert trained(nano.crop_loss, 1e-2) != before


def test_a_folder_is_trained_on_in_two_stages(nano, tmp_path, capsys):
    folder = write_texts(tmp_path / "text", make_rows(12, sentences=60))
    (folder / "c.csv").write_text("not read")
    nano.main([str(folder), "--span-steps", "3", "--crop-steps", "3"])
    printed = capsys.readouterr().out
    losses = re.findall(r"^(spans|crops) +\d  loss (\d+\.\d+)", printed, re.M)
    assert [name for name, _ in losses] == ["spans"] * 3 + ["crops"] * 3
    assert len(set(losses)) == 6
    scores = re.findall(r"^(?:new|after spans|after crops): MRR@100 ([01]\.\d{3})$", printed, re.M)
    assert printed.rstrip().endswith("MRR@100: " + " -> ".join(scores)) and len(scores) == 3
    rows = re.findall(r"^(MRR|cosine).+((?: [01]\.\d{3}){10})  [+-]\d\.\d+ ± \d", printed, re.M)
    assert len(rows) == 9
