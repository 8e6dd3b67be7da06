"""Order vectors of chunks so that similar chunks are neighbours: contextual batching (CDE; Morris &
Rush, ICLR 2025, section 4.1).

k-means with a given cluster size, then a greedy travelling salesman over the centroids, or a random
order of the clusters. Cutting the order into groups splits large clusters, and merges small ones
with the next. Both steps go level by level, ``BRANCH`` clusters at a time, which costs N * BRANCH
products per level. Flat k-means costs N * N / size, and so does a flat travelling salesman.

Shapes: N chunks, K centroids, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from revela.terminal import progress_bar
from revela.training.groups.strategies import Indices
from revela.training.settings import Groups
from revela.types import Vectors, unit

BRANCH = 256  # clusters per level
SAMPLE = BRANCH * 256  # vectors that k-means is trained on, and vectors read at a time
ROWS, CENTROIDS = 4096, 1024  # size of a block of k-means' distance matrix


def order_by_similarity(
    vectors_ND: Vectors, swapped_ND: Vectors | None, settings: Groups, seed: int
) -> Indices:
    """Order indices so that neighbours are similar; deterministic for the same vectors and seed.

    Args:
        swapped_ND: for pairs, the second vectors of ``concatenate_sides``: k-means is trained on
            them, too, but does not order them.
        settings: k-means, the average size of its clusters, whose members are in random order, and
            the order of the clusters.
    """
    rng, size = np.random.default_rng(seed), settings.cluster_size or settings.group_size
    order: list[Indices] = []

    def visit(members: Indices, near_D: Vectors | None) -> Vectors:
        """Append members to the order, starting near a point; returns the last centroid."""
        k = min(BRANCH, -(-len(members) // size))
        labels = np.zeros(len(members), dtype=np.int64)
        if k > 1:
            labels = _labels(vectors_ND, swapped_ND, members, k, rng, settings)
        clusters = np.unique(labels)
        if len(clusters) == 1:  # small enough, or all alike
            order.append(rng.permutation(members))
            bar.update(len(members))
            return np.asarray(vectors_ND[members].mean(axis=0))
        parts = [members[labels == cluster] for cluster in clusters]
        centroids_KD = np.stack([vectors_ND[part].mean(axis=0) for part in parts])
        if near_D is None:
            start = int(rng.integers(len(parts)))
        else:
            start = int(((centroids_KD - near_D) ** 2).sum(axis=1).argmin())
        for i in greedy_path(centroids_KD, start):
            near_D = visit(parts[i], near_D)
        assert near_D is not None
        return near_D

    with progress_bar("clustering", "chunk", total=len(vectors_ND)) as bar:
        if len(vectors_ND):
            visit(np.arange(len(vectors_ND)), None)
    if settings.packing == "random":
        order = [order[i] for i in rng.permutation(len(order))]
    return np.concatenate(order) if order else np.empty(0, dtype=np.int64)


def greedy_path(points_KD: Vectors, start: int) -> list[int]:
    """Visit every point once, from ``start`` always to the nearest unvisited one (of equals, the
    first).
    """
    squares_K = (points_KD.astype(np.float64) ** 2).sum(axis=1)
    unvisited = np.ones(len(points_KD), dtype=bool)
    order = [start]
    while len(order) < len(points_KD):
        unvisited[order[-1]] = False
        distances_K = squares_K - 2 * points_KD @ points_KD[order[-1]].astype(np.float64)
        order.append(int(np.where(unvisited, distances_K, np.inf).argmin()))
    return order


def concatenate_sides(queries_ND: Vectors, passages_ND: Vectors) -> tuple[Vectors, Vectors]:
    """[q; d] and [d; q] of unit length, (N, 2D) each, for ``order_by_similarity``.

    With both, two pairs are also clustered if the query of one is near the passage of the other
    (CDE, section 4.1).
    """
    pairs_ND = unit(np.concatenate([queries_ND, passages_ND], axis=1))
    return pairs_ND, unit(np.concatenate([passages_ND, queries_ND], axis=1))


def _labels(
    vectors_ND: Vectors,
    swapped_ND: Vectors | None,
    members: Indices,
    k: int,
    rng: np.random.Generator,
    settings: Groups,
) -> Indices:
    """The cluster of each member, 0 to k - 1, by the best k-means trained on a sample.

    Clusters may be empty. The vectors may be on disk.
    """
    from fastkmeans import FastKMeans

    sample = members
    if len(members) > SAMPLE:
        sample = np.sort(rng.choice(members, SAMPLE, replace=False))
    sample_ND = vectors_ND[sample]
    if swapped_ND is not None:
        sample_ND = np.concatenate([sample_ND, swapped_ND[sample]])

    def trained() -> FastKMeans:
        blocks = {"chunk_size_data": ROWS, "chunk_size_centroids": CENTROIDS}
        seed, width = int(rng.integers(2**31)), sample_ND.shape[1]
        # Not on a GPU: fastkmeans 0.5.0's Triton kernel returned labels >= k on an H200.
        means = FastKMeans(width, k, gpu=False, niter=settings.kmeans_steps, seed=seed, **blocks)
        with _global_random_state():
            means.train(sample_ND)
        return means

    def squared_distances(means: FastKMeans) -> float:
        blocks = (sample_ND[i : i + ROWS] for i in range(0, len(sample_ND), ROWS))
        return sum(
            float(((block - means.centroids[means.predict(block)]) ** 2).sum()) for block in blocks
        )

    trials = (trained() for _ in range(settings.kmeans_starts))
    means = next(trials) if settings.kmeans_starts == 1 else min(trials, key=squared_distances)
    return np.concatenate(
        [means.predict(vectors_ND[members[i : i + SAMPLE]]) for i in range(0, len(members), SAMPLE)]
    )


@contextmanager
def _global_random_state() -> Iterator[None]:
    """Restore the global random states of torch and numpy, which fastkmeans seeds."""
    state = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        np.random.set_state(state)
