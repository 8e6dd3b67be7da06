"""Which kind of groups a recipe gets."""

from __future__ import annotations

import numpy as np
import pytest

from revela.corpus.arrow_list import arrow_list
from revela.groups.order import order_of_groups
from revela.settings import Recipe
from revela.types import Chunk


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
