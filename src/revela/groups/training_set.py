"""What groups are made of: documents -> chunks -> rows, with queries or joined for crops."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from revela.corpus import queries
from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.corpus.chunk import chunk_all
from revela.errors import RevelaError
from revela.groups.folder import GroupFolder
from revela.objectives.crops import windows
from revela.settings import Recipe
from revela.types import Chunk, Document
from revela.weights import find_weights, fingerprint

log = logging.getLogger(__name__)

ASKING = ("dream", "infonce", "attention")  # objectives that need queries
WRITING_BATCH = 32


def training_chunks(
    recipe: Recipe, documents: Iterable[Document] | GroupFolder
) -> ArrowList[Chunk]:
    """Chunks with a document's title as its first line: the LM predicts it too, and it says what
    the rest is about.
    """
    if isinstance(documents, GroupFolder):
        raise RevelaError(
            f"{documents.folder} holds groups, cut and asked for already: give the text itself"
        )
    titled = (
        dataclasses.replace(d, text=f"{d.title}\n\n{d.text}") if d.title else d for d in documents
    )
    return arrow_list(
        Chunk, chunk_all(titled, recipe.chunk_words, recipe.threads or os.cpu_count() or 1)
    )


def training_rows(
    recipe: Recipe,
    documents: Sequence[Document],
    chunks: ArrowList[Chunk],
    queries_file: Path | None,
) -> ArrowList[Chunk]:
    """What groups are made of: the chunks; with queries, if the objective asks for them; for crops,
    longer runs of a document.
    """
    if recipe.objective == "crop":
        return arrow_list(Chunk, windows(chunks, recipe.crop_window))
    if recipe.objective not in ASKING:
        return chunks
    if recipe.queries == "title":
        return arrow_list(Chunk, queries.with_titles(chunks, documents))
    if recipe.queries == "first-sentence":
        return arrow_list(Chunk, queries.with_first_sentences(chunks))
    if recipe.queries == "telling-sentence":
        return arrow_list(Chunk, queries.with_telling_sentences(chunks))
    if recipe.queries == "authors-words":
        return arrow_list(Chunk, queries.with_authors_words(chunks, documents))
    if queries_file is None:
        raise RevelaError("written queries need a file to be kept in: give --queries-file")
    return written_queries(recipe, chunks, queries_file)


def written_queries(recipe: Recipe, chunks: ArrowList[Chunk], path: Path) -> ArrowList[Chunk]:
    """The chunks of as many documents as ``max_queries`` allows, with queries by a language model;
    kept in ``path``.
    """
    owners = chunks.column("document")
    chosen = queries.documents_with_chunks(
        owners.tolist(), recipe.max_queries, seed=0
    )  # whatever the run's seed: written once
    mine = chunks.chosen(i for i, owner in enumerate(owners) if int(owner) in chosen)
    answers = written_answers(recipe, [c.text for c in mine], path)
    return arrow_list(
        Chunk, (dataclasses.replace(c, query=a.query) for c, a in zip(mine, answers, strict=True))
    )


def written_answers(
    recipe: Recipe, texts: Sequence[str], path: Path, of: str = "chunks"
) -> list[queries.Answer]:
    """What a language model answers when it is asked for a query to each text.

    Args:
        recipe: which language model, and how it is asked; it is in memory only while it writes.
        texts: as they are to be found.
        path: of the ``QueryFile``; what is there is not written again.
        of: what the texts are, for that line.

    Raises:
        RevelaError: the language model or the file cannot be used.
    """
    from revela.lm.generate import writer

    name = recipe.query_lm or recipe.lm
    folder = find_weights(name, recipe.offline_model)
    file = queries.QueryFile(path, f"{fingerprint(folder)}, {recipe.query_prompting}")
    if missing := len({t for t in texts if file.get(t) is None}):
        torch.set_num_threads(recipe.threads or os.cpu_count() or 1)
        log.info(f"{name} writes {missing:,} queries into {path}")
        write = writer(
            folder, queries.PROMPTINGS[recipe.query_prompting], recipe.lm_tokens, recipe.precision
        )
        with tqdm(total=missing, unit="query") as bar:
            queries.write_queries(texts, file, write, WRITING_BATCH, bar.update)
        del write
        gc.collect()  # a model of transformers refers to itself
    answers = queries.without_repeats([file.get(t) or queries.Answer() for t in texts])
    rejected = Counter(a.rejected for a in answers if a.rejected)
    why = ", ".join(f"{n:,} {reason}" for reason, n in rejected.most_common())
    log.info(
        f"queries for {len(texts) - rejected.total():,} of {len(texts):,} {of}"
        + (f"; rejected: {why}" if why else "")
    )
    return answers
