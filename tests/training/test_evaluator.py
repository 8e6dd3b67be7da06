"""The label-free check as an evaluator: alone, and inside sentence-transformers' own trainer."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from conftest import make_rows
from revela import Document, LabelFreeEvaluator, RevelaError
from revela.evaluation.label_free import HeldOutCheck, tasks
from revela.training.retriever.module import RetrieverEncoder

ROWS = make_rows(40)
DOCUMENTS = [Document(row["_id"], row["text"], row["title"]) for row in ROWS]


def test_scores_are_those_of_the_check(saved_retriever):
    model = SentenceTransformer(str(saved_retriever))
    evaluator = LabelFreeEvaluator(DOCUMENTS, chunk_words=20)
    scores = evaluator(model)
    check = HeldOutCheck(tasks(DOCUMENTS, 20, 150, 600, 0))
    expected = check(RetrieverEncoder(model, bf16=False))
    assert scores["title_ndcg@10"] == expected["title"]
    assert scores["title_with_bm25_ndcg@10"] == expected["title + BM25"]
    assert scores["mean_ndcg@10"] == pytest.approx(sum(expected.values()) / 4)
    assert evaluator.bm25 == check.bm25() and set(evaluator.bm25) == {"title", "sibling"}
    assert len(scores) == 5 and evaluator.greater_is_better


def test_it_gives_the_same_every_time_and_leaves_the_model_as_it_was(saved_retriever):
    model = SentenceTransformer(str(saved_retriever)).train()
    texts = [row["text"] for row in ROWS]
    state = torch.get_rng_state()
    first, second = (LabelFreeEvaluator(texts, chunk_words=20)(model) for _ in range(2))
    names = {"mean_ndcg@10", "sibling_ndcg@10", "sibling_with_bm25_ndcg@10"}
    assert first == second and set(first) == names
    assert model.training and torch.equal(torch.get_rng_state(), state)


def test_it_is_a_callback_of_a_stock_trainer(tiny_bert_folder, tmp_path):
    model = SentenceTransformer(str(tiny_bert_folder))
    texts = [row["text"].split(". ") for row in ROWS]
    pairs = Dataset.from_list([{"anchor": text[0], "positive": text[1]} for text in texts])
    evaluator = LabelFreeEvaluator(DOCUMENTS, "held_out", chunk_words=20)
    arguments = Arguments(
        str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_held_out_mean_ndcg@10",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=pairs, loss=loss, evaluator=evaluator
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "eval_held_out_mean_ndcg@10" in row]
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert trainer.state.best_metric == max(row["eval_held_out_mean_ndcg@10"] for row in logged)
    assert evaluator.primary_metric == "held_out_mean_ndcg@10"
    model.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "held_out_mean_ndcg@10" in card.replace("\\", "") and "Label Free" in card


def test_texts_without_a_task_are_one_sentence():
    with pytest.raises(RevelaError, match=r"2 texts make no task .* give 5 at least that are"):
        LabelFreeEvaluator(["a short text", "another"])
