"""Which kind of groups a recipe gets."""

from __future__ import annotations

import functools
import tracemalloc
from itertools import islice

import numpy as np
import pytest

from revela.corpus.arrow_list import arrow_list
from revela.groups import training_set
from revela.groups.folder import GroupFolder, save_groups
from revela.groups.order import order_of_groups, stored_order
from revela.groups.training_set import TrainingSet
from revela.settings import Recipe
from revela.types import Chunk, Document


@pytest.mark.parametrize("queries", ["title", "telling-sentence"])
def test_groups_of_similar_chunks_have_a_query_once(queries):
    """Chunks of a document have one title, and would be negatives of it."""
    titled = queries == "title"
    rows = arrow_list(
        Chunk, (Chunk(i // 5, f"text {i}", f"title {i // 5 if titled else i}") for i in range(100))
    )
    recipe = Recipe.of("infonce", queries=queries, groups="cluster", group_size=10)
    order = np.random.default_rng(0).permutation(100)
    groups = order_of_groups(recipe, rows, order_N=order)
    for epoch in range(2):
        made = list(groups(epoch))
        assert len(made) == 10
        assert sorted(i for group in made for i in group) == list(range(100))
        assert all(len({rows[i].query for i in group}) == 10 for group in made)


def stored(out, queries):
    rows = arrow_list(Chunk, (Chunk(i, f"chunk {i}", query) for i, query in enumerate(queries)))
    documents = arrow_list(Document, (Document(str(i), "text") for i in range(len(rows))))
    groups = np.arange(len(rows)).reshape(-1, 4).tolist()
    rest = dict(size=4, sample=[0], held_out=[], settings={"documents": len(rows)})
    save_groups(out, rows, groups, documents, **rest)
    return GroupFolder(out)


@pytest.mark.parametrize("preset", ["gated", "infonce"])
def test_stored_groups_are_counted_without_an_epoch_of_them(tmp_path, monkeypatch, preset):
    rng = np.random.default_rng(0)
    folder = stored(tmp_path / "groups", ["why?" if one else "" for one in rng.random(400) < 0.2])
    recipe = Recipe.of(preset, group_size=4)
    epochs = [list(stored_order(recipe, folder)(epoch)) for epoch in range(2)]
    built = []

    def noting(*given):
        order = stored_order(*given)
        return lambda epoch: (built.append(group) or group for group in order(epoch))

    monkeypatch.setattr(training_set, "stored_order", noting)
    data = TrainingSet(recipe, folder)
    groups = data.groups(None, None, tmp_path)
    assert not built and data.groups_per_epoch == len(epochs[0])
    assert (len(epochs[0]) == 100) == (preset == "gated")
    assert list(islice(groups(0), 3)) == epochs[0][:3] and len(built) == 3
    assert [list(groups(epoch)) for epoch in range(2)] == epochs


def test_the_first_epoch_takes_eight_bytes_a_chunk():
    build = functools.partial(random_order, 10**5)
    tracemalloc.start()
    groups, number = training_set._with_first_epoch(build, 16)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert number == 10**5 // 16 and kept < 10 * 10**5
    for epoch in range(2):
        assert list(groups(epoch)) == list(groups(epoch)) == list(build(epoch))


def random_order(chunks, epoch):
    order = np.random.default_rng(epoch).permutation(chunks)
    return (order[i : i + 16].tolist() for i in range(0, chunks, 16))
