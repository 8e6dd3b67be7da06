"""Which kind of groups a recipe gets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from revela.errors import RevelaError
from revela.text.spool import arrow_list
from revela.training.generated_queries import sample_chunks
from revela.training.groups import order
from revela.training.groups.order import similar_order
from revela.training.groups.store import GroupedCorpus, save_groups
from revela.training.groups.strategies import groups_along
from revela.training.recipe import Recipe
from revela.training.settings import Groups
from revela.training.training_set import TrainingSet
from revela.types import Chunk, Document


@pytest.mark.parametrize("queries", ["title", "telling-sentence"])
def test_groups_of_similar_chunks_have_a_query_once(queries):
    """Chunks of a document have one title, and would be negatives of it."""
    titled = queries == "title"
    rows = arrow_list(
        Chunk, (Chunk(i // 5, f"text {i}", f"title {i // 5 if titled else i}") for i in range(100))
    )
    order_R = np.random.default_rng(0).permutation(100)
    groups = groups_along(order_R, rows, 10, 0, "queries")
    for epoch in range(2):
        made = list(groups(epoch))
        assert len(made) == 10
        assert sorted(i for group in made for i in group) == list(range(100))
        assert all(len({rows[i].query for i in group}) == 10 for group in made)


@pytest.mark.parametrize("cluster_size", [0, 16])
def test_groups_are_cut_from_clusters_of_another_size(cluster_size):
    """Of four kinds, each of four near places: groups of a place, or of any places of a kind."""
    place = np.random.default_rng(0).permutation(np.repeat(np.arange(16), 4))
    centres = np.random.default_rng(1).normal(size=(4, 8))[np.arange(16) // 4] * 9
    vectors = centres[place] + np.random.default_rng(2).normal(size=(16, 8))[place]
    rows = arrow_list(Chunk, (Chunk(i, f"text {i}") for i in range(64)))
    settings = Groups(group_size=4, cluster_size=cluster_size, kmeans_steps=50, kmeans_starts=9)
    encoders = (None, lambda texts: vectors.astype(np.float32))
    groups = place[similar_order(rows, encoders, settings, 0, "chunks")].reshape(16, 4)
    places, kinds = ([len(set(g)) for g in some.tolist()] for some in (groups, groups // 4))
    assert np.mean(kinds) < 1.3
    assert (np.mean(places) > 2) == (cluster_size == 16)


def test_a_process_encodes_its_share_by_the_surrogate(monkeypatch):
    read = list[str]()

    def encode(texts):
        read.extend(texts)
        return np.ones((len(texts), 2), np.float32)

    surrogate = SimpleNamespace(encode_queries=encode, encode_passages=encode)
    monkeypatch.setattr(order, "load_surrogate", lambda *_: surrogate)
    monkeypatch.setattr(order, "world_size", lambda: 2)
    monkeypatch.setattr(order, "my_share", lambda length: slice(0, length // 2))
    monkeypatch.setattr(order, "gathered", lambda share: [share, share])
    for encode_side in order.encoders_by(Groups(surrogate="s"), "fp32", None, 0.0):
        read.clear()
        assert encode_side([f"text {i}" for i in range(10)]).shape == (10, 2)
        assert {*read} == {f"text {i}" for i in range(5)}


def test_documents_are_drawn_until_there_are_enough_chunks_to_ask():
    owners = [0] * 3 + [1] * 4 + [2] * 3 + [3] * 9
    chunks = arrow_list(Chunk, (Chunk(owner, f"chunk {i}") for i, owner in enumerate(owners)))
    for most in (0, 1, 7, 12):
        asked = list(sample_chunks(chunks, most))
        drawn = {chunk.document for chunk in asked}
        assert asked == [chunk for chunk in chunks if chunk.document in drawn]
        assert len(drawn) == 4 if most == 0 else len(drawn) == 1 or len(asked) <= most


def stored(out, queries, settings=None):
    rows = arrow_list(Chunk, (Chunk(i, f"chunk {i}", query) for i, query in enumerate(queries)))
    documents = arrow_list(Document, (Document(str(i), "text") for i in range(len(rows))))
    groups = np.arange(len(rows)).reshape(-1, 4).tolist()
    corpus = GroupedCorpus(documents, [], rows, groups)
    return save_groups(out, corpus, 4, settings or {"documents": len(rows)})


@pytest.mark.parametrize("method", ["revela-gated", "dream-infonce"])
def test_stored_groups_are_counted(tmp_path, method):
    rng = np.random.default_rng(0)
    folder = stored(tmp_path / "groups", ["why?" if one else "" for one in rng.random(400) < 0.2])
    recipe = Recipe.of(method, group_size=4)
    groups, number = TrainingSet(recipe, folder).groups(None, tmp_path)
    asks = recipe.method.reads == "queries"
    for epoch in range(2):
        stored_order = folder.order(0)(epoch)
        kept = [g for g in stored_order if not asks or any(folder.rows[i].query for i in g)]
        assert list(groups(epoch)) == kept and len(kept) == number
    assert (number == 100) == (not asks)


@pytest.mark.parametrize(
    ("preset", "kind"),
    [("dream-paper", "split"), ("revela", "interleaved"), ("cde-revela", "cluster")],
)
def test_stored_groups_serve_a_recipe_of_their_own_kind_alone(tmp_path, preset, kind):
    recipe = Recipe.of(preset, groups=kind, group_size=4)
    served = {kind, "ready"} if kind == "cluster" else {kind}
    for stored_as in served | {"cluster", "document"}:
        made = {"documents": 40, "groups": [stored_as]}
        folder = stored(tmp_path / stored_as, ["why?"] * 40, made)
        if stored_as in served:
            assert TrainingSet(recipe, folder).groups(None, tmp_path)[1] == 10
        else:
            with pytest.raises(RevelaError, match=f"make others by revela groups --groups {kind}"):
                TrainingSet(recipe, folder)
