"""examples/nano_revela.py against the package: losses and gradients, and the folder it saves."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM

from conftest import tiny_config
from research.size import code_lines
from revela.encoders.torch_model import open_model
from revela.training.lm.language_model import LanguageModel
from revela.training.methods.revela import RevelaLoss, split_in_half
from revela.training.retriever.module import RetrieverModule
from tests.nano_example import (
    EXAMPLES,
    TEXTS,
    assert_same_gradients,
    example,
    gradients,
    run_on_a_folder,
    tiny_lm,
)


@pytest.fixture(scope="module")
def nano():
    with example("nano_revela") as module:
        yield module


def nano_loss(nano, retriever, lm, form):
    """Its loss, and Sim."""
    queries = nano.halves(retriever.tokenizer, TEXTS)[0]
    sim_BB = nano.similarity(retriever(nano.QUERY, queries), retriever(nano.PASSAGE, TEXTS), form)
    sim_BB.retain_grad()
    tokens = nano.tokenize(retriever.tokenizer, TEXTS)
    return nano.next_token_loss(lm, tokens, sim_BB, form), sim_BB


def package_loss(nano, model, lm, form):
    """The package's loss, and Sim."""
    gates_LH = None
    if form.gate is not None:
        gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
        gates_LH[int(form.first_layer * lm.n_layers) :] = form.gate
    loss = RevelaLoss(RetrieverModule(model), lm, gates_LH=gates_LH, tau=form.tau)
    queries = split_in_half(TEXTS, model.tokenizer, nano.MAX_TOKENS)
    sides = (queries, nano.QUERY), (TEXTS, nano.PASSAGE)
    vectors = [loss.embed(model.preprocess(texts, prompt=prompt)) for texts, prompt in sides]
    sim_BB = loss.weights(*vectors)
    sim_BB.retain_grad()
    tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert len(set(tokens["attention_mask"].sum(1).tolist())) == len(TEXTS)
    return loss.lm_loss(lm.pack(tokens["input_ids"], tokens["attention_mask"]), sim_BB), sim_BB


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize(
    ("name", "tau"), [("paper", 1e-4), ("paper", 0.1), ("gated", 1.0)], ids=str
)
def test_loss_and_gradients_are_the_packages(nano, tiny_lm_folder, tmp_path, name, tau, kind):
    form = dataclasses.replace(nano.FORMS[name], tau=tau)
    if name == "paper":  # the package has all layers in this form
        form = dataclasses.replace(form, first_layer=0)
    retriever = nano.Retriever(str(tiny_lm_folder))
    lm = tiny_lm(kind, "in_batch").requires_grad_(form.train_lm)
    loss, sim_BB = nano_loss(nano, retriever, lm, form)
    loss.backward()

    nano.save(retriever, tmp_path)
    stock = open_model(tmp_path, device="cpu").requires_grad_()
    ours = LanguageModel(tiny_lm(kind).requires_grad_(form.train_lm))
    expected, expected_BB = package_loss(nano, stock, ours, form)
    expected.backward()

    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(sim_BB, expected_BB, atol=1e-5, rtol=0)
    kept_BB = sim_BB > 0  # the package gives no gradient to weights of 0
    assert kept_BB.sum() > len(TEXTS) or tau == 1e-4
    found_BB, wanted_BB = sim_BB.grad[kept_BB], expected_BB.grad[kept_BB]
    assert wanted_BB.abs().max() > 1e-3
    torch.testing.assert_close(found_BB, wanted_BB, atol=1e-5, rtol=0)
    assert max(gradient.abs().max() for gradient in gradients(stock).values()) > 1e-4 or tau == 1e-4
    assert_same_gradients(retriever.model, stock[0].model)
    assert_same_gradients(lm, ours.model)
    assert bool(gradients(lm)) == form.train_lm


def test_a_folder_is_trained_on_and_searched(nano, tiny_lm_folder, tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(
        nano, "save", lambda *given, save=nano.save: made.append(given) or save(*given)
    )
    models = ["--lm", str(tiny_lm_folder), "--retriever", str(tiny_lm_folder)]
    run_on_a_folder(nano, tmp_path, capsys, *models)
    (retriever, folder), start = made[0], nano.Retriever(str(tiny_lm_folder))
    stock = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert folder == tmp_path / "out" and stock.max_seq_length == nano.MAX_TOKENS
    assert_same_vectors(nano, retriever, stock)
    with torch.no_grad():
        change = retriever(nano.QUERY, TEXTS) - start(nano.QUERY, TEXTS)
    assert change.abs().max() > 1e-4


def test_the_score_of_a_frozen_retriever_stays_while_the_lm_is_trained(nano, tiny_lm_folder):
    retriever = nano.Retriever(str(tiny_lm_folder)).requires_grad_(False)
    lm, chunks = tiny_lm("llama", "in_batch"), [nano.Chunk("a.md", text) for text in TEXTS * 4]
    before, weights = nano.mean_reciprocal_rank(retriever, TEXTS), lm.lm_head.weight.clone()
    nano.train(retriever, lm, retriever.tokenizer, chunks, nano.FORMS["paper"], 2)
    assert nano.mean_reciprocal_rank(retriever, TEXTS) == before
    assert (lm.lm_head.weight - weights).abs().max() > 1e-5


def test_halves_are_the_packages_and_the_score_is_the_mean_reciprocal_rank(nano, tiny_lm_folder):
    tokenizer = nano.load_tokenizer(str(tiny_lm_folder))
    texts = [*TEXTS, "é", "日本語のテキスト", "long text " * 200]
    first, second = nano.halves(tokenizer, texts)
    assert first == split_in_half(texts, tokenizer, nano.MAX_TOKENS)
    assert [a + b for a, b in zip(first, second, strict=True)][:5] == TEXTS
    place = {text: i for i, text in enumerate(first[:3] + second[:3])}
    scores = torch.tensor([[0.5, 0.1, 0.2], [0.9, 0.5, 0.9], [0.6, 0.4, 0.5]])

    def retriever(prompt, texts):  # the inner products are the scores
        vectors = torch.cat([scores, torch.eye(3)])
        return vectors[[place[text] for text in texts]]

    retriever.tokenizer = tokenizer
    found = nano.mean_reciprocal_rank(retriever, TEXTS[:3])
    assert found == pytest.approx((1 + 1 / 3 + 1 / 2) / 3)


@torch.no_grad()
def assert_same_vectors(nano, retriever, stock) -> None:
    texts = [*TEXTS, "ocean", "OCEAN", "long text " * 200]
    for prompt, encode in ((nano.QUERY, stock.encode_query), (nano.PASSAGE, stock.encode_document)):
        vectors = encode(texts, convert_to_tensor=True)
        torch.testing.assert_close(retriever(prompt, texts), vectors, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3", "gpt_neox"])
def test_other_families_are_cut_and_saved(nano, tiny_tokenizer, tmp_path, kind):
    torch.manual_seed(0)
    start, saved = tmp_path / "start", tmp_path / "saved"
    AutoModelForCausalLM.from_config(tiny_config(kind)).save_pretrained(start)
    tiny_tokenizer.save_pretrained(start)
    retriever = nano.Retriever(str(start))
    nano.save(retriever, saved)
    stock = SentenceTransformer(str(saved), device="cpu")
    assert stock[0].model.config.num_hidden_layers == 2
    assert_same_vectors(nano, retriever, stock)


def test_chunks_end_with_sentences_and_batches_are_of_runs(nano, tmp_path):
    sentences = [f"This is sentence {i} of a file, and it has ten words." for i in range(40)]
    text = " ".join(sentences[:20]) + "\r\n\r\n" + "\n".join(sentences[20:])
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.txt").write_text("word " * 100)
    (tmp_path / "c.csv").write_text("not read")
    chunks = nano.read_chunks(tmp_path)
    texts = [chunk.text for chunk in chunks if chunk.file == "a.md"]
    assert " ".join(texts) == " ".join(sentences)
    assert all(text.endswith(".") and len(text.split()) <= nano.WORDS for text in texts)
    assert [len(chunk.text.split()) for chunk in chunks if chunk.file == "b.txt"] == [48, 48, 4]
    many = [nano.Chunk(str(i // 40), str(i)) for i in range(83)]
    half = nano.BATCH // 2
    for batch, _ in zip(nano.batches(many), range(20), strict=False):
        numbers = [int(chunk.text) for chunk in batch]
        for run in (numbers[:half], numbers[half:]):
            assert run == list(range(run[0], run[0] + half))
        assert len(set(numbers)) == nano.BATCH


LEAST = dict(nano_revela=8, nano_replug=4, nano_dream=144, nano_cde=64, nano_dwell=20)


@pytest.mark.parametrize("name", LEAST)
def test_it_is_short_without_imports_of_ours_and_refuses_too_little_text(name, tmp_path, capsys):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert code_lines(text) <= 200 and not re.search(r"^(import|from) revela", text, re.M)
    for _ in range(2):  # an empty folder, and a folder of one short text
        with example(name) as module, pytest.raises(SystemExit) as stop:
            module.main([str(tmp_path)])
        least = rf"has fewer than {LEAST[name]} (chunks|runs of) "
        assert stop.value.code == 2 and re.search(least, capsys.readouterr().err)
        (tmp_path / "a.md").write_text("Only this.")
