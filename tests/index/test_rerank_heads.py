"""The heads of an LM as a re-ranker: against whole attention matrices; in an index; which heads,
and that they are found once.
"""

from __future__ import annotations

import json
import shutil
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch
from letters import build, documents
from transformers import LlamaForCausalLM

from conftest import make_rows
from revela.embedded import cache_folder
from revela.errors import RevelaError
from revela.index.rerankers import HEADS_DEPTH, heads
from revela.index.rerankers.heads import HEADS, load_query_heads
from revela.index.rerankers.listwise import HEADS_WEIGHT, rerank_listwise
from revela.lm.heads import heads_from_file, save_heads
from revela.lm.prompts import ASK, INTRODUCTION, LEAD
from revela.model_files import fingerprint

PASSAGES = [row["text"] for row in make_rows(HEADS_DEPTH + 4)]


class Vowels:
    """A re-ranker that counts a letter; ``read`` are the passages that it was given."""

    def __init__(self) -> None:
        self.read: list[list[str]] = []

    def score(self, query, passages):
        self.read.append(list(passages))
        return np.array([float(text.count("a")) for text in passages])


def naive_scores(folder, tokenizer, query, passages, heads):
    """Whole matrices of one text at a time: the query's mass on each passage less that of "N/A",
    mean over rows and over heads.
    """
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before, owner = ids(INTRODUCTION), [-1] * len(ids(INTRODUCTION))
    for i, passage in enumerate(passages):
        own = ids(f"[{i + 1}] ") + ids(passage.strip())
        before, owner = before + own + ids("\n\n"), owner + [i] * len(own) + [-1] * len(ids("\n\n"))
    masses = []
    for question in (query, "N/A"):
        asked = ids(ASK) + ids(question) + ids(LEAD)
        with torch.no_grad():
            matrices = model(torch.tensor([before + asked]), output_attentions=True).attentions
        rows = range(len(before), len(before) + len(asked))
        places = [[m for m, o in enumerate(owner) if o == i] for i in range(len(passages))]

        def mass_on(place, a, b, rows=rows, matrices=matrices):
            return fmean(sum(float(matrices[a][0, b, r, m]) for m in place) for r in rows)

        masses.append([[mass_on(place, a, b) for a, b in heads] for place in places])
    return [
        fmean(x - y for x, y in zip(asked, nothing, strict=True))
        for asked, nothing in zip(*masses, strict=True)
    ]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_scores_equal_those_of_whole_attention_matrices(cache, tiny_lm_folder, tiny_tokenizer):
    heads = ((2, 3), (0, 1), (3, 0), (1, 1), (1, 2), (2, 0), (0, 3), (3, 2), (0, 0))
    ranking = [(*head, 0.9 - 0.1 * place) for place, head in enumerate(heads)]
    path = cache_folder() / "heads" / f"{fingerprint(tiny_lm_folder)}-questions.json"
    path.parent.mkdir(parents=True)
    save_heads(path, "tiny", tiny_lm_folder, ranking)
    reranker = load_query_heads(
        str(tiny_lm_folder), lambda: pytest.fail("the ranking is there: no text is asked for")
    )
    assert reranker.heads == [(layer, head) for layer, head, _ in ranking[:HEADS]] and HEADS == 8
    passages = [PASSAGES[0][:40], PASSAGES[1][:70], PASSAGES[2][:25]]
    wanted = naive_scores(
        tiny_lm_folder, tiny_tokenizer, "ocean01 and more", passages, reranker.heads
    )
    found = reranker.score("ocean01 and more", passages)
    assert found.shape == (3,) and min(map(abs, wanted)) > 1e-6
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_heads_are_found_by_questions_from_the_text_once(
    cache, tiny_lm_folder, monkeypatch, capsys, caplog
):
    seen, score = [], heads.score_query_heads
    monkeypatch.setattr(
        heads,
        "score_query_heads",
        lambda lm, examples: score(lm, seen.extend(examples) or seen),
    )
    caplog.set_level("INFO", "revela")
    reranker = load_query_heads(str(tiny_lm_folder), lambda: PASSAGES)
    (file,) = (cache / "heads").iterdir()
    ranking = heads_from_file(file, tiny_lm_folder)
    assert len(ranking) == 16
    assert reranker.heads == [(layer, head) for layer, head, _ in ranking[:HEADS]]
    assert [answers.tolist() for *_, answers in seen] == [[*range(HEADS_DEPTH)], [*range(4)]]
    prompt, tail, _ = seen[0]
    decode = reranker.make.tokenizer.decode
    read = decode(prompt["input_ids"][0][prompt["attention_mask"][0].bool()])
    masks = zip(tail["input_ids"], tail["attention_mask"], strict=True)
    asked = [decode(ids[mask.bool()]).removeprefix(ASK).removesuffix(LEAD) for ids, mask in masks]
    assert asked[-1] == "N/A" and len(asked) == HEADS_DEPTH + 1
    for question, passage in zip(asked[:-1], PASSAGES, strict=False):
        assert question in passage and question not in read
    assert capsys.readouterr().out == "" and "probing the 16 heads of" in caplog.text
    assert load_query_heads(str(tiny_lm_folder), lambda: []).heads == reranker.heads
    assert len(seen) == 2


def test_too_little_text_to_find_heads_by_is_one_sentence_and_nothing_is_kept(
    cache, tiny_lm_folder
):
    with pytest.raises(RevelaError, match="19 passages of several sentences are too few"):
        load_query_heads(
            str(tiny_lm_folder), lambda: [*PASSAGES[: HEADS_DEPTH - 1], "One sentence."]
        )
    assert not list(cache.rglob("*.json"))


def test_a_long_prompt_fits_into_the_context(cache, tiny_lm_folder, tiny_tokenizer):
    reranker = load_query_heads(str(tiny_lm_folder), lambda: PASSAGES)
    passages, query = [f"passage {i} " + "xyz " * 999 for i in range(HEADS_DEPTH)], "why " * 999
    prompt, tail = reranker.make.with_null_question(passages, [(query, 0)])
    tokens = prompt["input_ids"].shape[1] + tail["input_ids"].shape[1]
    assert 1800 < tokens <= 2048 and np.isfinite(reranker.score(query, passages)).all()


def test_an_lm_with_too_short_a_context_is_one_sentence(tiny_lm_folder, tmp_path):
    folder = shutil.copytree(tiny_lm_folder, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    with pytest.raises(
        RevelaError,
        match="short reads 512 tokens, too few for 20 passages of 32: give an LM that reads 1,024",
    ):
        load_query_heads(str(folder), lambda: PASSAGES)


def test_the_order_is_that_of_standard_scores_and_the_scores_stay():
    rng = np.random.default_rng(0)
    scores = {f"d{i}": float(score) for i, score in enumerate(np.sort(rng.random(30))[::-1])}
    passages = ["a" * int(n) for n in rng.integers(0, 9, HEADS_DEPTH)]
    fused, said = list(scores.values())[:HEADS_DEPTH], [float(len(text)) for text in passages]

    def z(values, i):
        return (values[i] - fmean(values)) / pstdev(values)

    for weight in (HEADS_WEIGHT, 2.0):
        wanted = sorted(range(HEADS_DEPTH), key=lambda i, w=weight: -(z(fused, i) + w * z(said, i)))
        found = rerank_listwise("q", scores, passages, Vowels(), weight)
        assert list(found) == [*(f"d{i}" for i in wanted), *list(scores)[HEADS_DEPTH:]] and list(
            found
        ) != list(scores)
        assert list(found.values()) == list(scores.values())
    assert (
        rerank_listwise("q", scores, passages, Vowels(), 0) == scores
        and rerank_listwise("q", {}, [], Vowels()) == {}
    )
    alike = dict.fromkeys(scores, 0.5)
    assert list(rerank_listwise("q", alike, ["", "a"], Vowels()))[:3] == ["d1", "d0", "d2"]


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
@pytest.mark.parametrize("fusion", ["score", "rank"])
def test_an_index_has_its_first_documents_read_whatever_found_them(tmp_path, mode, fusion):
    index = build(tmp_path / "index", documents(40))
    for query, where in (("abba abab", None), (documents(40)[3].text.split(".")[0], "id != 'd3'")):
        plain = index.search(query, 40, mode, where, fusion)
        passages = [
            f"{hit.title} {hit.text}" if hit.title else hit.text for hit in plain[:HEADS_DEPTH]
        ]
        wanted = rerank_listwise(query, {hit.id: hit.score for hit in plain}, passages, Vowels())
        reranker = Vowels()
        found = index.search(query, 5, mode, where, fusion, reranker)
        assert reranker.read == ([passages] if passages else [])
        assert [(hit.id, hit.score) for hit in found] == list(wanted.items())[:5]
        texts = {hit.id: hit.text for hit in plain}
        assert all(hit.text == texts[hit.id] for hit in found)
