"""Mined negatives: against a loop over rankings, never what answers the query, the same when a run
is resumed, and others once the retriever has learned.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_train import ctrl_c_after, losses

from conftest import TINY, Embed, MadeUpEncoder, make_documents, make_rows
from revela.encoders.prompts import Prompts
from revela.encoders.torch_model import open_model
from revela.errors import RevelaError
from revela.ranking.bm25 import BM25
from revela.ranking.queries import query_hash
from revela.text.spool import arrow_list
from revela.training import negatives as mining
from revela.training.build_groups import build_groups
from revela.training.checks import CheckPlan
from revela.training.groups.store import GroupFolder
from revela.training.methods.cde import FilteredBatches, FilteredLoss
from revela.training.methods.contrastive import QueryBatches
from revela.training.negatives import Negatives
from revela.training.recipe import Recipe
from revela.training.settings import Groups
from revela.training.step import Progress, sides
from revela.training.train import train
from revela.training.training_set import TrainingSet
from revela.types import Chunk, Document
from tests.collection_folder import write_collection, write_lines

DOCUMENTS = make_documents(24)
MINED = TINY | dict(chunk_words=30, save_every=3, negatives=2, refresh_every=2)


class Hashed(MadeUpEncoder):
    """Unit vectors that depend on the text, and on the seed."""

    def __init__(self, seed=0):
        self.seed, self.read, self.texts = seed, 0, set()

    def encode_passages(self, texts, progress=False):
        self.read += len(texts)
        self.texts |= {*texts}
        rngs = (np.random.default_rng([self.seed, query_hash(text)]) for text in texts)
        vectors = [rng.normal(size=6) for rng in rngs]
        return np.array([v / np.linalg.norm(v) for v in vectors], np.float32).reshape(-1, 6)

    encode_queries = encode_passages


def free_rows():
    """Rows of which two neighbours have the same query, and the last ten none."""
    words = np.random.default_rng(3).integers(0, 30, size=(40, 12))
    texts = [" ".join(f"word{w}" for w in line) for line in words]
    asks = [" ".join(texts[i - i % 2].split()[:4]) if i < 30 else "" for i in range(40)]
    rows = [Chunk(i // 4, text, asks[i]) for i, text in enumerate(texts)]
    return data_of(rows)


def data_of(rows, relevant=()):
    """What Negatives reads of a training set."""
    rows, recipe = arrow_list(Chunk, rows), Recipe.of("contrastive-pairs", negatives=3)
    about = dict(relevant=dict(relevant), corpora=[], prompts=no_prompts)
    return SimpleNamespace(recipe=recipe, rows=rows, **about)


def no_prompts(document):
    return Prompts()


def judged_rows():
    """Ten documents with two queries each, of which each asks for two; ten more without."""
    texts = [row.text for row in free_rows().rows]
    queries = [" ".join(text.split()[:4]) for text in texts]
    rows = [Chunk(i, texts[i], queries[j]) for i in range(10) for j in (i, (i + 1) % 10)]
    relevant = {}
    for row in rows:
        relevant.setdefault(query_hash(row.query), set()).add(row.document)
    rows += [Chunk(i, texts[i]) for i in range(10, 20)]
    return data_of(rows, relevant)


def miner(data, folder, encoder=None, **settings):
    asked = [i for i, row in enumerate(data.rows) if row.query]
    groups = [asked[:8], asked[8:16]]
    data.recipe = data.recipe.replace(**settings)
    return Negatives(data, lambda _: iter(groups), encoder or Hashed(), folder, len(groups))


def batch(negatives, round_=0):
    """The rows of a round as the loop reads them."""
    members = [i for group in negatives.groups(round_) for i in group]
    return [{"row": i, "epoch": round_} for i in members]


@pytest.mark.parametrize("by", ["bm25", "model"])
@pytest.mark.parametrize("make", [free_rows, judged_rows])
def test_negatives_are_the_best_that_do_not_answer(tmp_path, monkeypatch, by, make):
    """Against a loop over all passages: none answers the query, and none has fewer than five
    others, that do not either, before it.
    """
    monkeypatch.setattr(mining, "MINED_FROM", 5)
    data = make()
    rows, encoder = list(data.rows), Hashed()
    negatives = miner(data, tmp_path, encoder)
    for round_ in range(1 if by == "bm25" else 2):
        asked = batch(negatives, round_)
    mined = negatives(asked)
    texts = [row.text for row in rows]
    for place, found in zip(asked, mined, strict=True):
        query = rows[place["row"]].query
        answers = {row.text for row in rows if row.query == query}
        if by == "bm25":
            unique = list(dict.fromkeys(texts))
            order, scores = BM25(unique).top_k([query], len(unique))
            score = {unique[i]: s for i, s in zip(order[0], scores[0], strict=True)}
        else:
            cosines = encoder.encode_passages(texts) @ encoder.encode_queries([query])[0]
            score = dict(zip(texts, cosines, strict=True))
        best = sorted((s for t, s in score.items() if t not in answers), reverse=True)[:5]
        assert len(found) == len({texts[i] for i in found}) == 3
        for i in found:
            assert texts[i] not in answers
            assert score[texts[i]] >= best[-1] - 1e-6 and (by == "model" or score[texts[i]] > 0)


def test_draws_follow_from_seed_round_and_row(tmp_path):
    drawn = {}
    for name, seed, round_ in (("a", 0, 1), ("b", 0, 1), ("seed", 1, 1), ("round", 0, 2)):
        one = miner(free_rows(), tmp_path / name, seed=seed)
        for number in range(round_ + 1):
            rows = batch(one, number)
        drawn[name] = one(rows)
    assert drawn["a"] == drawn["b"]
    assert drawn["a"] != drawn["seed"] and drawn["a"] != drawn["round"]
    with_title = [drawn["a"][i : i + 2] for i in range(0, 16, 2)]
    assert any(first != second for first, second in with_title)  # rows of one query


def test_a_query_that_few_passages_match_has_fewer(tmp_path):
    rows = [Chunk(i, f"text{i}{' both' * (i < 3)}", f"text{i} both" * (i < 2)) for i in range(9)]
    negatives = Negatives(data_of(rows), lambda _: iter([[0, 1, 5]]), Hashed(), tmp_path, 1)
    assert [sorted(found) for found in negatives(batch(negatives))] == [[1, 2], [0, 2], []]


def made(rows, **more):
    """QueryBatches without a retriever: its texts are ids of words."""

    def sides(queries, passages):
        def ids(texts):
            numbers = [[query_hash(w) % 397 + 3 for w in text.split()[:3]] for text in texts]
            return torch.tensor(numbers)

        return {"query_input_ids": ids(queries), "passage_input_ids": ids(passages)}

    groups = Groups(group_size=4)
    given = {"relevant": {}, "mined": None, "prompts": no_prompts, **more}
    return SimpleNamespace(groups=groups, rows=rows, sides=sides, share=slice, **given)


def as_rows(chunks, indices):
    chunks = [chunks[i] for i in indices]
    return [dict(text=c.text, query=c.query, document=c.document) for c in chunks]


@pytest.mark.parametrize("make", [free_rows, judged_rows])
def test_a_query_is_compared_with_its_group_and_what_was_mined_for_it(make):
    """Against the rules, one pair at a time; mined passages are negatives of the whole group."""
    data = make()
    chunks = list(data.rows)
    indices = [0, 2, 4, 19, 6, 3, 10, 25]
    mined = [[8, 12], [8, 28], [0], [13], [12, 1], [5], [27], [26]]
    parts = made(chunks, relevant=data.relevant, mined=lambda rows: mined)
    found = QueryBatches(parts)(as_rows(chunks, indices))
    passages = [(g // 4, chunks[i]) for g, i in enumerate(indices)]
    for group in (0, 1):
        known = [chunk.text for g, chunk in passages if g == group]
        for i in [i for some in mined[4 * group : 4 * group + 4] for i in some]:
            if chunks[i].text not in known:
                known.append(chunks[i].text)
                passages.append((group, chunks[i]))
    assert len(found["passage_input_ids"]) == len(passages) > 8
    having = [place for place, i in enumerate(indices) if chunks[i].query]
    assert found["query_target"].tolist() == having
    for line, own in zip(found["query_allowed"], having, strict=True):
        query = chunks[indices[own]].query
        answers = {row.text for row in chunks if row.query == query} if data.relevant else set()
        for j, (group, chunk) in enumerate(passages):
            wrong = group != own // 4 or chunk.query == query or chunk.text in answers
            assert line[j] == (j == own or not wrong)


def test_a_mined_false_negative_is_left_out():
    """The surrogate finds a mined passage as near as the query's own: the loss is that of a softmax
    without it.
    """
    chunks = [Chunk(i, f"a{i} b{i} c{i}", f"q{i} r{i} s{i}") for i in range(8)]
    near = {chunk.text: np.eye(9, dtype=np.float32)[i] for i, chunk in enumerate(chunks)}
    near |= {chunk.query: near[chunk.text] for chunk in chunks}
    near[chunks[6].text] = near[chunks[1].text]

    def encode(texts):
        return np.array([near[text] for text in texts])

    parts = made(chunks, mined=lambda rows: [[6], [6, 7], [], []])
    surrogate = SimpleNamespace(encode_passages=encode, encode_queries=encode)
    batch = FilteredBatches(parts, surrogate)(as_rows(chunks, [0, 1, 2, 3]))
    assert batch["passage_surrogate"].shape == (6, 9)
    assert batch["query_allowed"].all()  # what the surrogate says is the loss's to read
    query, passage = sides(batch)
    with torch.no_grad():
        model = Embed()
        loss = FilteredLoss(model, tau=0.1)([{**query}, {**passage}])
        ids = [{"input_ids": side["input_ids"]} for side in (query, passage)]
        vectors = [model(i) for i in ids]
    scores = vectors[0] @ vectors[1].T / 0.1
    scores[1, 4] = -torch.inf
    assert float(loss) == pytest.approx(-float(scores.log_softmax(1).diagonal().mean()), abs=1e-5)


@pytest.fixture
def recipe(tiny_lm_folder):
    asked = {"method": "dream-infonce", **MINED, "queries": "telling-sentence"}
    return Recipe.of(**asked, model=str(tiny_lm_folder), lm=str(tiny_lm_folder))


@pytest.fixture
def rounds(monkeypatch):
    """What every mining gave, by round."""
    mine, found = Negatives._mine, []

    def watched(self, round_):
        found.append((round_, mine(self, round_)))
        return found[-1][1]

    monkeypatch.setattr(Negatives, "_mine", watched)
    return found


def test_a_resumed_run_reads_the_same_negatives(recipe, tmp_path, rounds):
    recipe = recipe.replace(restart_optimizer=True, keep_checkpoints=0)
    train(recipe, DOCUMENTS, tmp_path / "whole")
    assert [round_ for round_, _ in rounds] == [0, 1, 2]
    whole = list(rounds)
    rounds.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "advance", ctrl_c_after(3))
        train(recipe, DOCUMENTS, tmp_path / "broken")
    assert [round_ for round_, _ in rounds] == [0, 1]
    rounds.clear()
    train(recipe, DOCUMENTS, tmp_path / "broken", resume=True)
    assert [round_ for round_, _ in rounds] == [2]  # the rest of round 1 was kept
    assert np.array_equal(rounds[0][1], whole[2][1])
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert not (tmp_path / "whole" / "checkpoints").exists()


def test_the_optimiser_starts_afresh_with_each_mining(recipe, tmp_path, rounds):
    """Every two epochs; until the first step after that as without, at a constant rate."""
    changes = dict(refresh_epochs=2, max_epochs=4, max_steps=0, groups_per_step=2)
    recipe, found = recipe.replace(schedule="constant", warmup_steps=0, **changes), []
    for restarts in (False, True):
        out = tmp_path / str(restarts)
        train(recipe.replace(restart_optimizer=restarts), DOCUMENTS, out)
        found.append(losses(out))
    per_mining = round(2 * json.loads((out / "run.json").read_text())["about"]["groups"] / 2)
    assert [round_ for round_, _ in rounds] == [0, 1] * 2
    plain, afresh = (list(steps.values()) for steps in found)
    assert len(plain) == 2 * per_mining
    assert plain[: per_mining + 1] == afresh[: per_mining + 1]
    assert plain[per_mining + 1] != afresh[per_mining + 1]


def test_a_refresh_sees_what_was_learned(recipe, tmp_path, rounds, monkeypatch):
    """All that rank best are drawn: the sets change with the weights, and with nothing else."""
    monkeypatch.setattr(mining, "MINED_FROM", 2)
    recipe = recipe.replace(max_steps=3)
    mined = {}
    for rate in (1e-30, 3e-2):
        rounds.clear()
        train(recipe.replace(learning_rate=rate), DOCUMENTS, tmp_path / str(rate))
        (_, first), (_, second) = rounds
        both = {}
        for name, drawn in (("first", first), ("second", second)):
            both[name] = {row: frozenset(some) for row, *some in drawn.tolist()}
        mined[rate] = both
    assert mined[1e-30]["first"] == mined[3e-2]["first"]
    assert mined[1e-30]["second"] != mined[3e-2]["second"]
    assert mined[1e-30]["second"].keys() == mined[3e-2]["second"].keys()


def judged_folder(folder, pairs):
    queries = {q: f"what is said of {q} here" for q, _, _ in pairs}
    write_collection(folder, [], queries, {(q, d): score for q, d, score in pairs})
    (folder / "qrels" / "test.tsv").rename(folder / "qrels" / "train.tsv")
    return folder


PAIRS = [(f"q{i}", f"d{i % 12}", 1) for i in range(16)] + [("q0", "d5", 2), ("q1", "d9", 0)]


def test_training_on_judged_pairs(recipe, tmp_path, rounds):
    folder = judged_folder(tmp_path / "judged", PAIRS)
    recipe = recipe.replace(pairs=str(folder), group_size=6, lm_tokens=40)
    data = TrainingSet(recipe, DOCUMENTS)
    chunks = list(data.rows)
    assert len(chunks) == 17 + 12 and len(data.grouped_rows) == 17
    assert all(chunk.text == DOCUMENTS[chunk.document].full_text for chunk in chunks)
    assert [chunk.document for chunk in chunks[:17]] == sorted(c.document for c in chunks[:17])
    assert {c.document for c in chunks[17:]} == set(range(12, 24))
    assert not any(c.query for c in chunks[17:])
    assert data.relevant[query_hash("what is said of q0 here")] == {0, 5}
    assert data.relevant[query_hash("what is said of q1 here")] == {1}
    unlike = data.replace(recipe.replace(groups="document-random"))  # needs no model
    for group in unlike.corpus_groups(None)(0):
        owners = [chunks[i].document for i in group]
        assert len(set(owners)) == 6 and max(group) < 17

    def check(encoder):
        assert encoder.retriever.limit == 40
        return {"task": 0.0}

    train(recipe, DOCUMENTS, tmp_path / "out", plan=CheckPlan(check))
    assert len(losses(tmp_path / "out")) == 6
    mined = [(row, i) for _, drawn in rounds for row, *some in drawn.tolist() for i in some]
    assert any(chunks[i].document >= 12 for _, i in mined if i >= 0)
    for row, i in mined:
        relevant = data.relevant[query_hash(chunks[row].query)]
        assert i < 0 or chunks[i].document not in relevant
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trained on judged queries by revela" in card and f"judged, of {folder.name}" in card
    assert open_model(tmp_path / "out").max_seq_length == 64
    without = TrainingSet(recipe.replace(negatives=0), DOCUMENTS)
    assert len(without.rows) == 17
    assert without.fingerprint != TrainingSet(recipe.replace(pairs=""), DOCUMENTS).fingerprint


def test_folders_of_pairs_share_no_group_and_have_their_prompts(recipe, tmp_path):
    """Both corpora have the ids d0 to d11, and the second folder has prompts."""
    folders = [judged_folder(tmp_path / name, PAIRS) for name in "ab"]
    files = [write_lines(f / "corpus.jsonl", make_rows(12, seed=i)) for i, f in enumerate(folders)]
    (folders[1] / "prompts.json").write_text('{"query": "ask: ", "passage": "say: "}')
    settings = dict(held_out=0.0, group_size=4, groups="document-random")
    recipe = recipe.replace(pairs=[*map(str, folders)], **settings)
    data = TrainingSet.read(recipe, files)
    ids = [document.id for document in data.documents]
    assert ids == [f"{i}/d{n}" for i in (0, 1) for n in range(12)] and data.corpora == [12]
    rows = list(data.rows)
    assert data.relevant[query_hash("what is said of q0 here")] == {0, 5, 12, 17}
    one_folder = TrainingSet.read(recipe.replace(pairs=str(folders[0])), files[:1])
    assert rows[: len(rows) // 2] == list(one_folder.rows)
    groups = list(data.corpus_groups(None)(0))
    corpora = [{rows[i].document // 12 for i in group} for group in groups]
    assert sorted(corpora, key=str) == [{0}] * 4 + [{1}] * 4 and corpora != sorted(corpora, key=str)

    encoder, data.recipe = Hashed(), recipe.replace(negatives=3)
    negatives = Negatives(data, lambda _: iter(groups), encoder, tmp_path / "mined", len(groups))
    batch(negatives)
    asked = batch(negatives, 1)
    for row, drawn in zip(asked, negatives(asked), strict=True):
        assert {rows[i].document // 12 for i in drawn} == {rows[row["row"]].document // 12}
    texts = {f"{'say: ' * (i > 11)}{d.full_text}" for i, d in enumerate(data.documents)}
    assert texts < encoder.texts and any(text[:5] == "ask: " for text in encoder.texts)
    found = []
    parts = made(rows, prompts=data.prompts)
    parts.sides = lambda *sides: found.append(sides) or {}
    QueryBatches(parts)(as_rows(rows, [0, len(rows) - 1]))
    expected = [rows[0].query, f"ask: {rows[-1].query}"], [rows[0].text, f"say: {rows[-1].text}"]
    assert found == [expected]

    with pytest.raises(RevelaError, match="--pairs gives 2 folders for 1 corpora: give one"):
        TrainingSet.read(recipe, files[:1])
    (folders[1] / "prompts.json").write_text('{"query": 3}')
    with pytest.raises(RevelaError, match=r'prompts.json is not {"query": "...", "passage": "'):
        train(recipe, DOCUMENTS, tmp_path / "out")


@pytest.mark.parametrize("known", [True, False])
def test_the_first_negatives_are_those_of_a_run(recipe, tmp_path, rounds, known):
    """All that it ranks, is trained on and does not answer; q1 and q13 ask for one document."""
    folder, run = judged_folder(tmp_path / "judged", PAIRS), tmp_path / "run.trec"
    ranked = {f"q{i}": [f"d{i}", f"d{i + 3}", "gone", f"d{i + 7}"] for i in range(16)}
    ranked["q3"] = ranked["q3"] if known else ["gone"]
    lines = (f"{q} Q0 {d} {k} {9 - k} x\n" for q, ds in ranked.items() for k, d in enumerate(ds))
    run.write_text("".join(lines))
    settings = dict(pairs=str(folder), negatives_from=str(run), negatives=3, max_steps=1)
    recipe = recipe.replace(**settings)
    if not known:
        with pytest.raises(RevelaError, match=r"trained on for the query q3 of .*: rank"):
            train(recipe, DOCUMENTS, tmp_path / "out")
        return
    train(recipe, DOCUMENTS, tmp_path / "out")
    data = TrainingSet(recipe, DOCUMENTS)
    for row, *drawn in rounds[0][1].tolist():
        query = data.rows[row].query
        n = int(query.split()[4][1:])
        expected = {n, n + 3, n + 7} - data.relevant[query_hash(query)]
        assert {data.rows[i].document for i in drawn if i >= 0} == expected


WORDS = [f"{row['text']} {row['title']}" for row in make_rows(6, seed=5)]  # of documents below
COPIES = {  # id -> text; j0 to j8 are judged relevant, each to a query of its own
    "u0": WORDS[0], "j0": WORDS[0],  # equal to an earlier one
    "u1": WORDS[1] + " and so on", "j1": WORDS[1],  # like an earlier one
    "j2": "Yes, always so.",  # short
    "u2": "Never say so in the morning", "j3": "Never say so in the morning",  # few words
    "j4": WORDS[2], "j5": WORDS[2],  # equal, both judged
    "j6": WORDS[3], "j7": WORDS[3] + " and so on",  # alike, both judged
    "j8": "",  # no text
    "u3": WORDS[4], "u4": WORDS[4] + " and so on",  # unjudged copies are dropped as ever
}  # fmt: skip
ALIKE = [{"u0", "j0"}, {"u1", "j1"}, {"u2", "j3"}, {"j4", "j5"}, {"j6", "j7"}]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("near", [0.8, 0.0])
def test_judged_documents_are_kept_and_copies_no_negatives(recipe, tmp_path, caplog, near, order):
    caplog.set_level("INFO", "revela")
    rows = [{"_id": name, "text": text} for name, text in list(COPIES.items())[::order]]
    folder = judged_folder(tmp_path / "judged", [(f"q{i}", f"j{i}", 1) for i in range(9)])
    file = write_lines(folder / "corpus.jsonl", [*rows, *make_rows(12)])
    recipe = recipe.replace(pairs=str(folder), held_out=0.0, negatives=4, near_duplicates=near)
    data = TrainingSet.read(recipe, [file])
    ids, rows = [document.id for document in data.documents], list(data.rows)
    asks = {ids[row.document]: row.query for row in rows if row.query}
    assert asks == {f"j{i}": f"what is said of q{i} here" for i in range(8)}
    assert len(ids) == len(set(ids)) and "j8" not in ids
    assert ("u1" in ids, {"u3", "u4"} <= set(ids)) == (not near, not near)
    assert any("8 pairs of" in said and "1 left out, whose" in said for said in caplog.messages)

    copies = {name: alike for alike in ALIKE for name in alike if near or alike != {"u1", "j1"}}
    if not near:  # then only what is equal is a copy
        copies |= {"j6": {"j6"}, "j7": {"j7"}}
    mined, members = set(), [i for i, row in enumerate(rows) if row.query]
    for seed in range(10):
        data.recipe = recipe.replace(negatives=8, seed=seed)
        place = tmp_path / f"{seed}"
        negatives = Negatives(data, lambda _: iter([members]), Hashed(seed), place, 1)
        for found in (negatives(batch(negatives)), negatives(batch(negatives, 1))):
            for row, drawn in zip(members, found, strict=True):
                own = ids[rows[row].document]
                mined |= {(own, ids[rows[i].document]) for i in drawn}
    assert len(mined) > 50
    assert not [(own, other) for own, other in mined if other in copies.get(own, {own})]

    parts = made(rows, relevant=data.relevant, mined=lambda some: [[*range(len(rows))]] * len(some))
    parts.groups = Groups(group_size=len(members))
    found = QueryBatches(parts)(as_rows(rows, members))
    others = [i for i in range(len(rows)) if rows[i].text not in {rows[m].text for m in members}]
    passages = [*members, *others]
    for line, own in zip(found["query_allowed"], members, strict=True):
        for allowed, other in zip(line, passages, strict=True):
            one, two = (ids[rows[i].document] for i in (own, other))
            assert bool(allowed) == (own == other or two not in copies.get(one, {one}))


def test_a_copy_of_an_answer_that_is_held_out_is_no_negative(recipe, tmp_path):
    """q4 asks for j0, which is held out, and for j4; u0 is equal to j0."""
    documents = [Document(name, text) for name, text in COPIES.items() if text]
    folder = judged_folder(tmp_path / "judged", [("q4", "j4", 1), ("q4", "j0", 1)])
    recipe = recipe.replace(pairs=str(folder), negatives=1)
    kept = [document for document in documents if document.id != "j0"]
    held_out = [document for document in documents if document.id == "j0"]
    data = TrainingSet(recipe, kept, held_out)
    (answers,) = data.relevant.values()
    assert {kept[i].id for i in answers} == {"u0", "j4", "j5"}


def test_judged_pairs_on_the_command_line(refused, corpus_file, tmp_path):
    folder = judged_folder(tmp_path / "judged", PAIRS)
    (folder / "qrels" / "train.tsv").rename(folder / "qrels" / "dev.tsv")
    given = corpus_file, "--out", tmp_path / "out", "--method", "contrastive-pairs", "--pairs"
    there = "does not exist: a BEIR-layout folder has its judgements there"
    said = {
        "train": f"revela: {folder / 'qrels/train.tsv'} {there}\n",
        "groups": "stored groups have no judgements: give --pairs and the corpus itself to revela",
    }
    for verb, sentence in said.items():
        assert sentence in refused(verb, *given, folder, "--model", "embedded:none")


NOT_MINED = [
    (dict(pairs="judged", group_size=20), "17 pairs are fewer than a group of 20: lower --gro"),
    (dict(pairs="judged", join_titles=True), "as they are judged: leave out --join-titles"),
    (dict(negatives=99), "--negatives 99 from .* passages: give fewer"),
    (dict(negatives_from="x"), r"needs --negatives, .* \(got 1 run for 0 folders\)"),
    (dict(negatives_from="x", pairs="judged"), "--negatives-from x does not exist: give a"),
]


@pytest.mark.parametrize(("changes", "sentence"), NOT_MINED)
def test_what_cannot_be_mined_or_read(recipe, tmp_path, monkeypatch, changes, sentence):
    monkeypatch.chdir(tmp_path)
    judged_folder(tmp_path / "judged", PAIRS)
    with pytest.raises(RevelaError, match=sentence):
        train(recipe.replace(**changes), DOCUMENTS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stored_groups_have_no_judged_pairs(recipe, corpus_file, tmp_path):
    build_groups(recipe, [corpus_file], tmp_path / "groups", [])
    with pytest.raises(RevelaError, match=r"--pairs needs documents, and .* holds groups: give"):
        TrainingSet(recipe.replace(pairs="judged"), GroupFolder(tmp_path / "groups"))
