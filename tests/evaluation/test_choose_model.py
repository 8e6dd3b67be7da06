"""The choice of a model without labels: a planted better candidate is taken, a useless one is not,
and nothing is judged on what it was fitted to.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers

from conftest import make_rows
from revela import RevelaError, choose_model
from revela.evaluation import choose_model as choosing
from revela.evaluation.choose_model import Candidate, candidates_of, chosen_by
from revela.model_files import weights_of
from revela.types import Document

TOPICS, SHARED = 150, 4


def word(topic: int, number: int) -> str:
    return f"{named(topic)}w{named(number)}z"


def named(number: int) -> str:
    return "".join("bcdfghjkmn"[int(digit)] for digit in f"{number:03}")


def topical() -> list[Document]:
    """A document for each topic, in which hardly a word comes twice."""
    rng = random.Random(1)
    made = []
    for topic in range(TOPICS):
        words = [word(topic, i) for i in range(36)]
        rng.shuffle(words)
        shared = [word(topic, i) for i in range(SHARED)]
        sentences = [[*words[i : i + 6], *rng.sample(shared, 2)] for i in range(0, 36, 6)]
        text = " ".join(f"{' '.join(some).capitalize()}." for some in sentences)
        made.append(Document(str(topic), text))
    return made


def static_retriever(folder, knows: bool):
    """An embedder with a row for each word, which is its topic's or any."""
    words = [word(topic, i) for topic in range(TOPICS) for i in range(36)]
    tokenizer = Tokenizer(models.WordLevel({"?": 0} | {w: i for i, w in enumerate(words, 1)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rng = np.random.default_rng(0)
    rows_TD = rng.standard_normal((TOPICS, 32))
    any_VD = rng.standard_normal((len(words), 32))
    rows_VD = np.repeat(rows_TD, 36, axis=0) if knows else any_VD
    weights = torch.from_numpy(np.concatenate([np.zeros((1, 32)), rows_VD])).float()
    static = modules.StaticEmbedding(tokenizer, embedding_weights=weights)
    SentenceTransformer(modules=[static]).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    monkeypatch.setattr(choosing, "is_installed", lambda name: False)


def test_a_planted_better_candidate_is_chosen(tmp_path, tiny_lm_folder):
    blind = static_retriever(tmp_path / "blind", knows=False)
    better = static_retriever(tmp_path / "better", knows=True)
    names = [blind, str(tiny_lm_folder), better]
    choice = choose_model(topical(), names, kinds=("table", "embedder"))
    assert choice.candidate == Candidate(better, "embedder")
    assert list(choice.scores) == ["BM25", blind, f"table of words of {tiny_lm_folder}", better]
    fused = {name: tasks["sentence + BM25"] for name, tasks in list(choice.scores.items())[1:]}
    assert fused[better] > max(fused[blind], choice.scores["BM25"]["sentence"]) + 0.1
    bm25 = choice.scores["BM25"]["sentence"]
    assert choice.why == (
        f"{better} is taken: it has {fused[better]:.3f} with BM25, which alone has {bm25:.3f}"
    )


def test_useless_candidates_leave_it_to_the_words(tmp_path):
    names = [static_retriever(tmp_path / name, knows=False) for name in ("one", "two")]
    choice = choose_model(topical(), names)
    assert choice.why.startswith("no model adds to BM25 on this text (")
    assert "searches go by words" in choice.why and choice.candidate.model in names


def test_within_noise_the_one_that_costs_least_is_taken():
    def asked(score: float) -> dict[str, np.ndarray]:
        return {"sentence": np.array([0.0]), "sentence + BM25": np.array([score])}

    weights = {"table": 0, "small": 10, "large": 20}
    for scores, chosen, why in (
        ((0.5, 0.6, 0.604), "small", "is within noise of the best, large (0.604 with BM25, which"),
        ((0.5, 0.6, 0.61), "large", "large is taken: it has 0.610 with BM25, which alone has 0.4"),
        ((0.602, 0.6, 0.604), "table", "and costs less"),
        ((0.402, 0.404, 0.1), "table", "no model adds to BM25 on this text (the best has 0.404 w"),
    ):
        queries = {"BM25": {"sentence": np.array([0.4])}}
        queries |= {name: asked(score) for name, score in zip(weights, scores, strict=True)}
        assert chosen_by(queries, weights)[0] == chosen and why in chosen_by(queries, weights)[1]


def test_candidates_are_judged_on_documents_that_they_were_not_made_of(
    tmp_path, tiny_lm_folder, monkeypatch
):
    seen, documents = [], topical()

    class Judged(choosing.HeldOutCheck):
        def __init__(self, tasks, language):
            super().__init__(tasks, language)
            seen.append(tasks)

    def made(candidate, data):
        seen.append(data)
        return original(candidate, data)

    original = choosing.encoder_of
    monkeypatch.setattr(choosing, "HeldOutCheck", Judged)
    monkeypatch.setattr(choosing, "encoder_of", made)
    choose_model(documents, [str(tiny_lm_folder)])
    (sentence,), *fitted = seen
    assert sentence.name == "sentence" and len(fitted) == 2
    learned = {document.id for data in fitted for document in data.documents}
    assert len(learned) == round(0.7 * TOPICS)
    for query, (place,) in zip(sentence.queries, sentence.relevant, strict=True):
        (topic,) = {word.lower().split("w")[0] for word in query.split()}
        passage = sentence.passages[place].lower()
        assert f"{topic}w" in passage and query.lower() not in passage
        assert topic not in {named(int(name)) for name in learned}
    assert len(sentence.passages) == TOPICS


def test_too_little_text_is_said(tiny_lm_folder, tiny_bert_folder, monkeypatch):
    rows = [Document(row["_id"], row["text"]) for row in make_rows(20)]
    lm, bert = str(tiny_lm_folder), str(tiny_bert_folder)
    suited = {"": lm, "the text is English": bert}
    for why, name in suited.items():
        monkeypatch.setattr(choosing, "suited_model", lambda texts, m=name, w=why: (m, w))
        choice = choose_model(rows, [lm, bert])
        assert choice.candidate == Candidate(name, "table" if name == lm else "embedder")
        assert not choice.queries and choice.why.endswith(f" is taken, as {why}")
        assert choice.why.startswith("the text gives 6 queries, too few to compare models by: ")
    monkeypatch.setattr(choosing, "suited_model", lambda texts: ("another", "it is Russian"))
    assert choose_model(rows, [lm, bert]).candidate == Candidate(lm, "table")
    assert choose_model([], [lm, bert]).candidate.kind == "table"
    only = choose_model(rows, [bert])
    assert only.candidate.model == bert and only.why == f"{bert} is the only candidate"


def test_an_embedder_costs_what_its_layers_weigh(tiny_bert_folder, tmp_path):
    layers = SentenceTransformer(str(tiny_bert_folder)).state_dict()
    own = sum(weight.numel() for name, weight in layers.items() if "embeddings" not in name)
    assert weights_of(tiny_bert_folder) == own > 0
    assert weights_of(Path(static_retriever(tmp_path / "table", knows=True))) == 0


def test_what_can_be_chosen(tiny_lm_folder, tiny_bert_folder):
    lm, bert = str(tiny_lm_folder), str(tiny_bert_folder)
    assert candidates_of([lm, bert, lm]) == [
        Candidate(lm, "table"),
        Candidate(lm, "fit"),
        Candidate(bert, "embedder"),
    ]
    with pytest.raises(RevelaError, match=f"^{bert} is an embedder, which needs no fit: leave it"):
        candidates_of([bert], ("table", "fit"))
    with pytest.raises(RevelaError, match="name some as --model auto:NAME,NAME, or run pip"):
        candidates_of([])
