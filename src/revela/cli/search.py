"""``revela search``: search an index from the shell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from revela.cli.flags import PROMPTS, Flat, PromptFlags
from revela.cli.printing import print_answer, print_hits, print_json
from revela.errors import RevelaError
from revela.ranking.steps import Rerank

if TYPE_CHECKING:
    from revela.searching.index import Index
    from revela.searching.word_search import Words
    from revela.types import Hits


def search(
    index_folder: Annotated[Path, Parameter(name="index")],
    query: str | None = None,
    *,
    queries: Path | None = None,
    run: Path | None = None,
    mode: Literal["hybrid", "dense", "lexical"] = "hybrid",
    fusion: Literal["score", "rank"] = "score",
    weight: float | None = None,
    rerank: Rerank | None = None,
    top: Annotated[int, Parameter(alias="-k")] = 5,
    where: str | None = None,
    model: str | None = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    min_score: float | None = None,
    explain: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Search a folder, a file or an index. The index of a folder is kept in the cache and follows
    it.

    Parameters
    ----------
    index_folder:
        A folder of files, a file, or a folder made by revela index.
    query:
        What to look for.
    queries:
        Search for each query of this file instead, and print a line of JSON for each. A query a
        line: in a .jsonl file JSON with _id and text, else text alone.
    run:
        Write what --queries find to this file, in TREC's format.
    mode:
        By vectors (dense), by words (lexical) or by both.
    fusion:
        Join both by score, or by rank (reciprocal rank fusion).
    weight:
        Share of the vectors in the fusion by score, from 0 (words alone) to 1 (vectors alone).
        Default: measured on the text, without labels.
    rerank:
        Order the first 50 results again by the vectors of single tokens (late-interaction), or not
        (none). Default: late-interaction for a folder of files, none for an index. It takes
        milliseconds in an index made with --keep-tokens.
    top:
        Number of documents; each is printed with its best passage, and those with the same passage
        are named beside it.
    where:
        Filter in SQL over the index's metadata, id and title: "year > 2020 and lang = 'en'".
    model:
        Of a folder: the model that makes its vectors; by default embedded:minilm-l6 for English
        text, and embedded:e5-small for other languages and mixtures. Of an index: where its model
        is, if that has moved.
    min_score:
        Leave out results that score less. revela index prints the score below which 97 of 100 wrong
        first hits lie.
    explain:
        Show what words, vectors and tokens gave each result.
    as_json:
        Print JSON, with the confidence of each result, and in each whether the first answers the
        query (docs/search.md).
    """
    if top < 1:
        raise RevelaError(f"--top must be 1 or more (got {top})")
    if (query is None) == (queries is None) or (run and not queries):
        raise RevelaError("give a query, or a file of queries with --queries, which --run is for")
    from revela.searching.folder_index import open_any
    from revela.searching.snippets import SPARE
    from revela.text.judgements import read_queries

    asked = read_queries(queries) if queries else {"": (query or "").strip()}
    on_partial_index = None
    if query is not None and not (as_json or where or mode == "dense" or min_score is not None):
        on_partial_index = partial(_print_first_answer, query, top)
    opened = open_any(
        index_folder,
        model,
        progress=True,
        prompts=(prompts.query_prompt, prompts.passage_prompt),
        on_partial_index=on_partial_index,
        weight=weight,
    )
    found = opened.search_many(
        asked.values(),
        k=top if queries or as_json else SPARE * top,  # printed are those that differ
        mode=mode,
        where=where,
        fusion=fusion,
        rerank=rerank,
        min_score=min_score,
        explain=explain,
    )
    if query is None:
        _tell(zip(asked, found, strict=True), asked, run, index_folder.name)
        return
    (hits,) = found
    if as_json:
        print_json([{**asdict(hit), "answer": hits.answer} for hit in hits])
    else:
        print_answer(hits)
        print_hits(hits, opened.snippets(query, hits), top)


def _print_first_answer(query: str, top: int, found: Words | Index) -> None:
    """Print a first answer before many documents are encoded."""
    from revela.searching.snippets import SPARE

    hits = found.search(query.strip(), SPARE * top)
    print(f"{found.notice} The full answer follows.\n")
    print_hits(hits, found.snippets(query, hits), top)
    print(flush=True)


def _tell(
    found: Iterable[tuple[str, Hits]], asked: Mapping[str, str], run: Path | None, name: str
) -> None:
    """Print what queries have found, or write it to a run file."""
    if run is None:
        for query, hits in found:
            about = {"_id": query, "text": asked[query], "answer": hits.answer}
            print_json({**about, "hits": [asdict(hit) for hit in hits]}, indent=None)
        return
    from revela.evaluation.runs import check_ids, write_run

    check_ids(asked)
    write_run(run, {query: {hit.id: hit.score for hit in hits} for query, hits in found}, name)
    print(f"{len(asked):,} queries; saved to {run}")
