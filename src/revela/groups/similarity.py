"""Vectors of chunks -> an order in which similar chunks are neighbours: contextual batching (CDE;
Morris & Rush, ICLR 2025, section 4.1).

k-means with a given cluster size, a greedy travelling salesman over the centroids, and the clusters
written down in its order. Cutting that into groups splits a large cluster, and merges a small one
with the next. Both go level by level, ``BRANCH`` clusters at a time: a flat k-means costs
N * N / size products, and the travelling salesman as many; this costs N * BRANCH per level.

Shapes: N chunks, K centroids, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.silence import progress_bar
from revela.types import Vectors

BRANCH = 256  # clusters a level
ITERATIONS = 10
SAMPLE = BRANCH * 256  # vectors that k-means looks at, and that are read at a time
ROWS, CENTROIDS = 4096, 1024  # of the matrix of distances that k-means holds at a time


def order_by_similarity(
    vectors_ND: Vectors,
    swapped_ND: Vectors | None,
    size: int,
    seed: int | Sequence[int],
    members: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """All N indices in an order in which neighbours are similar; the same for the same vectors and
    seed.

    Args:
        swapped_ND: for pairs, from ``paired``: second vectors of the same chunks, which k-means
            sees and does not place.
        size: most members of a cluster. Inside one the order is random.
        members: some of the indices, to order only these.
    """
    rng = np.random.default_rng(seed)
    order: list[NDArray[np.int64]] = []

    def visit(members: NDArray[np.int64], near_D: Vectors | None) -> Vectors:
        """Write down these members, beginning near a point; returns where it ended."""
        k = min(BRANCH, -(-len(members) // size))
        labels = np.zeros(len(members), dtype=np.int64)
        if k > 1:
            labels = _labels(vectors_ND, swapped_ND, members, k, rng)
        kinds = np.unique(labels)
        if len(kinds) == 1:  # small enough, or all alike
            order.append(rng.permutation(members))
            shown.update(len(members))
            return np.asarray(vectors_ND[members].mean(axis=0))
        parts = [members[labels == kind] for kind in kinds]
        centroids_KD = np.stack([vectors_ND[part].mean(axis=0) for part in parts])
        if near_D is None:
            start = int(rng.integers(len(parts)))
        else:
            start = int(((centroids_KD - near_D) ** 2).sum(axis=1).argmin())
        for i in greedy_path(centroids_KD, start):
            near_D = visit(parts[i], near_D)
        assert near_D is not None
        return near_D

    members = np.arange(len(vectors_ND)) if members is None else members
    with progress_bar("clustering", "chunk", total=len(members)) as shown:
        if len(members):
            visit(members, None)
    return np.concatenate(order) if order else np.empty(0, dtype=np.int64)


def greedy_path(points_KD: Vectors, start: int) -> list[int]:
    """Every point once: from ``start``, always on to the nearest one that is left (the first of
    equals).
    """
    squares_K = (points_KD.astype(np.float64) ** 2).sum(axis=1)
    left = np.ones(len(points_KD), dtype=bool)
    order = [start]
    while len(order) < len(points_KD):
        left[order[-1]] = False
        distances_K = squares_K - 2 * points_KD @ points_KD[order[-1]].astype(np.float64)
        order.append(int(np.where(left, distances_K, np.inf).argmin()))
    return order


def paired(queries_ND: Vectors, passages_ND: Vectors) -> tuple[Vectors, Vectors]:
    """[q; d] and [d; q] of unit length, (N, 2D) each, for ``order_by_similarity``: a pair whose
    query is near to another's passage is clustered with it (CDE, section 4.1).
    """
    both = (
        np.concatenate([queries_ND, passages_ND], axis=1),
        np.concatenate([passages_ND, queries_ND], axis=1),
    )
    first, second = (v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in both)
    return first.astype(np.float32), second.astype(np.float32)


def _labels(
    vectors_ND: Vectors,
    swapped_ND: Vectors | None,
    members: NDArray[np.int64],
    k: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """The cluster of each member, 0 to k - 1, some of them empty: k-means on a sample, so that the
    vectors may lie on disk.
    """
    sample = members
    if len(members) > SAMPLE:
        sample = np.sort(rng.choice(members, SAMPLE, replace=False))
    seen_ND = vectors_ND[sample]
    if swapped_ND is not None:
        seen_ND = np.concatenate([seen_ND, swapped_ND[sample]])
    means = _k_means(seen_ND, k, rng)
    return np.concatenate(
        [means.predict(vectors_ND[members[i : i + SAMPLE]]) for i in range(0, len(members), SAMPLE)]
    )


def _k_means(seen_ND: Vectors, k: int, rng: np.random.Generator) -> Any:
    from fastkmeans import FastKMeans

    means = FastKMeans(
        seen_ND.shape[1],
        k,
        niter=ITERATIONS,
        seed=int(rng.integers(2**31)),
        chunk_size_data=ROWS,
        chunk_size_centroids=CENTROIDS,
    )
    with _random_state_kept():
        means.train(seen_ND)
    return means


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """fastkmeans seeds the random numbers of torch and numpy that everyone shares; a training run
    goes on with its own.
    """
    import torch

    state = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        np.random.set_state(state)
