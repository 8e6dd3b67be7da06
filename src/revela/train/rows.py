"""What groups are made of, and in what order: documents -> chunks -> rows, with queries or joined for crops, -> groups of an epoch."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from revela.config import Recipe
from revela.data import queries
from revela.data.chunk import chunk_all
from revela.data.cluster import paired, tour
from revela.data.crops import windows
from revela.data.groups import Groups, document_groups, random_groups, spread_groups, tour_groups, with_queries
from revela.data.shards import GroupFolder
from revela.data.store import Stored, Texts, stored, vectors_on_disk
from revela.errors import RevelaError
from revela.files import whole
from revela.models.corpus_fit import lexical_vectors
from revela.models.retriever import load_encoder
from revela.models.weights import find_weights, fingerprint
from revela.types import Chunk, Document, Encoder, Say, Vectors

ASKING = ("dream", "infonce", "attention")  # objectives that need queries
SHARED = ("title", "authors-words")  # queries that all chunks of a document may have: two of them must not meet in a group
WRITING_BATCH = 32
ENCODING_BATCH = 2**14  # texts of a corpus that are encoded between two writes to disk
POOL = 8  # chunks that iterative groups are chosen from, for each that a round needs
NEIGHBOUR_CHARACTERS = 2000  # of a document, that say what it is about

Model = Callable[[], SentenceTransformer]


def training_chunks(recipe: Recipe, documents: Iterable[Document] | GroupFolder) -> Stored[Chunk]:
    """Chunks with a document's title as its first line: the LM predicts it too, and it says what the rest is about."""
    if isinstance(documents, GroupFolder):
        raise RevelaError(f"{documents.folder} holds groups, cut and asked for already: give the text itself")
    titled = (dataclasses.replace(d, text=f"{d.title}\n\n{d.text}") if d.title else d for d in documents)
    return stored(Chunk, chunk_all(titled, recipe.chunk_words, recipe.threads or os.cpu_count() or 1))


def training_rows(
    recipe: Recipe, documents: Sequence[Document], chunks: Stored[Chunk], queries_file: Path | None, say: Say
) -> Stored[Chunk]:
    """What groups are made of: the chunks; with queries, if the objective asks for them; for crops, longer runs of a document."""
    if recipe.objective == "crop":
        return stored(Chunk, windows(chunks, recipe.crop_window))
    if recipe.objective not in ASKING:
        return chunks
    if recipe.queries == "title":
        return stored(Chunk, queries.with_titles(chunks, documents))
    if recipe.queries == "first-sentence":
        return stored(Chunk, queries.with_first_sentences(chunks))
    if recipe.queries == "telling-sentence":
        return stored(Chunk, queries.with_telling_sentences(chunks))
    if recipe.queries == "authors-words":
        return stored(Chunk, queries.with_authors_words(chunks, documents))
    if queries_file is None:
        raise RevelaError("written queries need a file to be kept in: give --queries-file")
    return written_queries(recipe, chunks, queries_file, say)


def written_queries(recipe: Recipe, chunks: Stored[Chunk], path: Path, say: Say) -> Stored[Chunk]:
    """The chunks of as many documents as ``max_queries`` allows, with queries by a language model; kept in ``path``."""
    from revela.models.writer import writer

    owners = chunks.column("document")
    chosen = queries.documents_with_chunks(owners.tolist(), recipe.max_queries, seed=0)  # whatever the run's seed: written once
    mine = chunks.chosen(i for i, owner in enumerate(owners) if int(owner) in chosen)
    name = recipe.query_lm or recipe.lm
    folder = find_weights(name, recipe.offline_model, say)
    file = queries.QueryFile(path, f"{fingerprint(folder)}, {recipe.query_prompting}")
    texts = [c.text for c in mine]
    if missing := len({t for t in texts if file.get(t) is None}):
        say(f"{name} writes {missing:,} queries into {path}")
        write = writer(folder, queries.PROMPTINGS[recipe.query_prompting], recipe.lm_tokens)
        with tqdm(total=missing, unit="query") as bar:
            queries.write_queries(texts, file, write, WRITING_BATCH, bar.update)
    answers = queries.without_repeats([file.get(t) or queries.Answer() for t in texts])
    rejected = Counter(a.rejected for a in answers if a.rejected)
    why = ", ".join(f"{n:,} {reason}" for reason, n in rejected.most_common())
    say(f"queries for {len(texts) - rejected.total():,} of {len(texts):,} chunks" + (f"; rejected: {why}" if why else ""))
    return stored(Chunk, (dataclasses.replace(c, query=a.query) for c, a in zip(mine, answers, strict=True)))


def order_of_groups(
    recipe: Recipe, rows: Stored[Chunk], vectors_ND: Vectors | None = None, tour_N: NDArray[np.int64] | None = None
) -> Groups:
    """epoch -> the groups of that epoch, as the objective needs them.

    Args:
        recipe: says which kind of groups.
        rows: what they are made of.
        vectors_ND: a vector a document, for similar short documents to meet; None: any meet.
        tour_N: the rows with like beside like, for groups of similar chunks; None: as they stand in the corpus.
    """
    groups: Groups
    if recipe.groups == "random":
        groups = functools.partial(random_groups, len(rows), recipe.group_size, recipe.seed)
    elif recipe.groups in ("cluster", "iterative"):
        groups = functools.partial(tour_groups, [np.arange(len(rows)) if tour_N is None else tour_N], recipe.group_size, recipe.seed)
    else:
        shared = recipe.objective in ASKING and recipe.queries in SHARED
        build = spread_groups if recipe.objective == "crop" or shared else document_groups
        groups = functools.partial(build, rows.column("document"), recipe.group_size, recipe.seed, vectors_ND=vectors_ND)
    return _asking(recipe, rows, groups)


def similar_groups(recipe: Recipe, documents: Sequence[Document], rows: Stored[Chunk], model: Model, say: Say) -> Groups:
    """``order_of_groups``, with what the recipe asks for in order to tell what is similar.

    Args:
        recipe, documents, rows: as above.
        model: the untrained retriever; asked for only if its words are needed.
        say: prints a line.
    """
    if recipe.groups == "cluster":
        return order_of_groups(recipe, rows, tour_N=chunk_tour(recipe, rows, model, say))
    if recipe.groups == "document" and recipe.neighbours == "similar":
        beginnings = Texts(documents, lambda document: document.full_text[:NEIGHBOUR_CHARACTERS])
        return order_of_groups(recipe, rows, lexical_vectors(model(), beginnings, recipe.token_weighting))
    return order_of_groups(recipe, rows)


def stored_order(recipe: Recipe, folder: GroupFolder) -> Groups:
    """epoch -> the groups of a folder, in the order of this recipe's seed."""
    if folder.size != recipe.group_size:
        raise RevelaError(f"{folder.folder} holds groups of {folder.size}: give --group-size {folder.size}")
    return _asking(recipe, folder.rows, folder.order(recipe.seed, recipe.groups_per_batch))


def chunk_tour(recipe: Recipe, rows: Stored[Chunk], model: Model, say: Say) -> NDArray[np.int64]:
    """The rows in an order in which like stands beside like; pairs of query and chunk by both."""
    began = time.monotonic()
    if recipe.surrogate:
        encoder: Encoder = load_encoder(find_weights(recipe.surrogate, "", say), recipe.precision, recipe.surrogate_tokens)
    else:
        encoder = _Words(model(), recipe.token_weighting)
    vectors = _vectors(recipe, rows, encoder, progress=True)
    embedded = time.monotonic()
    tour_N = tour(*vectors, recipe.cluster_size or recipe.group_size, recipe.seed)
    say(f"{len(rows):,} chunks embedded in {embedded - began:.0f} s and clustered in {time.monotonic() - embedded:.0f} s")
    return tour_N


class IterativeGroups:
    """Groups of what the retriever in training finds similar, built anew every so many updates from a random part of the corpus.

    Called with the number of a round, gives its groups. They are kept, so that a run that is resumed goes through the same ones.

    Args:
        recipe: says how often, and how large groups are.
        rows: what they are made of.
        encoder: the retriever as it is when a round begins.
        folder: where rounds are kept, until the run ends.
    """

    def __init__(self, recipe: Recipe, rows: Stored[Chunk], encoder: Encoder, folder: Path) -> None:
        self.recipe, self.rows, self.encoder, self.folder = recipe, rows, encoder, folder

    def __call__(self, round_: int) -> Iterator[list[int]]:
        file = self.folder / f"groups-{round_}.npy"
        if not file.is_file():
            groups = np.array(self._build(round_), dtype=np.int64)
            with whole(file) as temporary:
                np.save(temporary, groups)
        yield from np.load(file).tolist()

    def _build(self, round_: int) -> list[list[int]]:
        recipe = self.recipe
        size, wanted = recipe.group_size, recipe.regroup_every * recipe.groups_per_step
        rng = np.random.default_rng([recipe.seed, round_])
        some = np.sort(rng.choice(len(self.rows), min(len(self.rows), POOL * wanted * size), replace=False))
        rows = self.rows.chosen(some)
        order = tour(*_vectors(recipe, rows, self.encoder), recipe.cluster_size or size, int(rng.integers(2**31)))
        groups = _asking(recipe, rows, functools.partial(tour_groups, [order], size, recipe.seed))(round_)
        return [some[group].tolist() for group in islice(groups, wanted)]


class _Words:
    """The ``Encoder`` that reads words only, without running a model."""

    def __init__(self, model: SentenceTransformer, token_weighting: float) -> None:
        self.model, self.token_weighting = model, token_weighting

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        return lexical_vectors(self.model, texts, self.token_weighting)

    encode_queries = encode_passages


def _vectors(recipe: Recipe, rows: Stored[Chunk], encoder: Encoder, progress: bool = False) -> tuple[Vectors, Vectors | None]:
    """What ``tour`` reads: vectors of the chunks; for an objective that asks, of the pairs of query and chunk."""
    passages_ND = _encoded(encoder, encoder.encode_passages, Texts(rows, lambda row: row.text), progress)
    if recipe.objective not in ASKING:
        return passages_ND, None
    asked = Texts(rows, lambda row: row.query or row.text)
    return paired(_encoded(encoder, encoder.encode_queries, asked, progress), passages_ND)


def _encoded(encoder: Encoder, encode: Callable[[Sequence[str]], Vectors], texts: Texts, progress: bool) -> Vectors:
    """Vectors of many texts, a part at a time."""
    if isinstance(encoder, _Words):  # it weighs a word by all texts, and reads a part at a time itself
        return encode(texts)
    first = encode(texts[:1])
    vectors_ND = vectors_on_disk(len(texts), first.shape[1])
    with tqdm(total=len(texts), unit="text", disable=not progress) as bar:
        for start in range(0, len(texts), ENCODING_BATCH):
            some = texts[start : start + ENCODING_BATCH]
            vectors_ND[start : start + len(some)] = encode(some)
            bar.update(len(some))
    return vectors_ND


def _asking(recipe: Recipe, rows: Stored[Any], groups: Groups) -> Groups:
    if recipe.objective not in ASKING:
        return groups
    has_query = rows.column("query") != ""
    return lambda epoch: with_queries(groups(epoch), has_query)
