"""``revela search``: search an index from the shell."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from revela.cli.flags import PROMPTS, Flat, PromptFlags, Switch
from revela.cli.printing import print_json, print_results
from revela.errors import RevelaError
from revela.ranking.fusion import Fusion
from revela.ranking.steps import Mode, Rerank, check_query
from revela.searching.filters import Narrow, both, phrases, where_sql
from revela.terminal import counted
from revela.types import ANSWERS

if TYPE_CHECKING:
    from revela.searching.index import Index
    from revela.searching.results import SearchResults
    from revela.searching.word_search import Words

NARROW = Narrow()


def search(
    given: Annotated[list[str], Parameter(name="folders-and-query", negative=())],
    *,
    queries: Path | None = None,
    run: Path | None = None,
    mode: Mode = "hybrid",
    fusion: Fusion = "score",
    weight: float | None = None,
    rerank: Rerank | None = None,
    top: Annotated[int, Parameter(alias="-k")] = 5,
    where: str | None = None,
    narrow: Annotated[Narrow, Flat] = NARROW,
    model: str | None = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    min_score: float | None = None,
    explain: Switch = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Search folders, files or indexes: revela search FOLDER... QUERY. The index of a folder is
    cached, and updated when files change. A result must contain the phrases in double quotes.
    The exit code is 1 if nothing is found.

    Parameters
    ----------
    given:
        Folders of files, files, or folders made by revela index; the last argument is the query.
    queries:
        Search for each query in this file instead, and print one line per query: the object of
        --json with its _id. The file has one query per line: JSON with _id and text in a .jsonl
        file, otherwise text only.
    run:
        Write the results of --queries to this file, in TREC's format.
    mode:
        By vectors (dense), by words (lexical) or by both.
    fusion:
        How hybrid search combines both rankings: by score, or by rank (reciprocal rank fusion).
    weight:
        Share of the vectors in the fusion by score, from 0 (words alone) to 1 (vectors alone).
        Default: measured on the text, without labels.
    rerank:
        Re-rank the first 50 results by the vectors of single tokens (late-interaction), or not
        (none). Default: late-interaction for a folder of files, none for an index. It takes
        milliseconds in an index made with --keep-tokens.
    top:
        Number of documents; each is printed with its best passage, followed by the names of
        documents with the same passage.
    where:
        Filter in SQL over id, title, date, type, language and the index's metadata:
        "year > 2020 and lang = 'en'".
    model:
        For a folder: the model that encodes it; by default embedded:minilm-l6 for English text, and
        embedded:e5-small for other languages and mixtures. For an index: the new folder of its
        model, if the model has moved.
    min_score:
        Leave out results with a lower score. revela index prints a threshold: of the first hits for
        queries without an answer, 97 % have a lower score.
    explain:
        Show how much words, vectors and tokens contribute to each score.
    as_json:
        Print JSON: the same object that the HTTP service returns, with the confidence of each
        result, and whether the first result answers the query (docs/search.md).
    """
    folders, query = _split(given, top, queries, run)
    from revela.searching.folder_index import open_any
    from revela.searching.snippets import SPARE
    from revela.text.judgements import read_queries

    asked = read_queries(queries) if queries else {"": query}
    is_json = as_json or queries is not None
    is_filtered = bool(where_sql(narrow.and_also(), {}) or where)  # refuses a date that is none
    needs_index = is_json or is_filtered or mode == "dense" or min_score is not None
    can_answer_early = len(folders) == 1 and not needs_index
    first_answer = partial(_print_first_answer, query, top) if can_answer_early else None
    indices = [
        open_any(
            folder,
            model,
            progress=True,
            prompts=prompts.given,
            on_partial_index=first_answer,
            weight=weight,
        )
        for folder in folders
    ]
    found = _found(
        _filtered(indices, narrow, where or ""),
        asked,
        _models(indices) if is_json else "",
        k=top if is_json else SPARE * top,  # printed are those that differ
        mode=mode,
        fusion=fusion,
        rerank=rerank,
        min_score=min_score,
        explain=explain,
    )
    if run:
        is_found = _write(run, found, asked, Path(folders[0]).name)
    else:
        is_found = False
        for name, answer in found:
            is_found |= bool(answer.data)
            if is_json:
                about = {"_id": name} if queries else {}
                print_json(about | asdict(answer), indent=None if queries else 1)
            else:
                if answer.note:
                    print(answer.note)
                if answer.data:
                    print(f"{ANSWERS[answer.answer]}:")
                print_results(answer.data, top, is_filtered)
    if not is_found:
        raise SystemExit(1)


def _filtered(indices: Sequence[Index], narrow: Narrow, where: str) -> list[tuple[Index, str]]:
    """Indexes and their filters. A folder to filter by that is in the sources of some indexes is
    searched in these alone, by its path in them; any other is a path as results show it.
    """
    path = Path(narrow.folder).resolve()
    roots = [
        [root for root in map(Path, index.sources) if path.is_relative_to(root.resolve())]
        for index in indices
    ]
    is_path = bool(narrow.folder) and path.exists() and any(roots)
    filtered: list[tuple[Index, str]] = []
    for index, own in zip(indices, roots, strict=True):
        if own or not is_path:
            folder = path.relative_to(own[0].resolve()).as_posix() if is_path else narrow.folder
            within = replace(narrow, folder=folder).and_also()
            filtered.append((index, both(where_sql(within, {}), where)))
    return filtered


def _split(
    given: Sequence[str], top: int, queries: Path | None, run: Path | None
) -> tuple[Sequence[str], str]:
    """The folders and the query of a command line; "" with --queries."""
    if top < 1:
        raise RevelaError(f"--top must be 1 or more (got {top})")
    folders, query = (given, "") if queries else (given[:-1], given[-1].strip())
    if not folders or (run and not queries):
        raise RevelaError(
            "give a folder and a query, or a folder and --queries FILE; --run needs --queries"
        )
    if missing := [folder for folder in folders[1:] if not Path(folder).exists()]:
        raise RevelaError(f"{missing[0]} does not exist: put a query of several words in quotes")
    if not queries:  # before an index is made
        check_query(query)
    phrases(query)
    return folders, query


def _write(
    run: Path, found: Iterable[tuple[str, SearchResults]], asked: Mapping[str, str], name: str
) -> bool:
    """Write what queries find to a run file; returns whether anything was found."""
    from revela.evaluation.runs import check_ids, write_run

    check_ids(asked)
    ranked = {query: {r.id: r.score for r in answer.data} for query, answer in found}
    write_run(run, ranked, name)
    print(f"{counted(len(asked), 'query', 'queries')}; saved to {run}")
    return any(ranked.values())


def _found(
    filtered: Sequence[tuple[Index, str]], asked: Mapping[str, str], model: str, **options: Any
) -> Iterator[tuple[str, SearchResults]]:
    """The answer to each query by its name, from indexes with their filters."""
    from revela.searching.results import SearchResults, ranked, results_of

    searches = zip(
        *(i.search_many(asked.values(), where=where, **options) for i, where in filtered),
        strict=True,
    )
    indices = [index for index, _ in filtered]
    for name, query in asked.items():
        start = time.perf_counter()
        several = list(zip(indices, next(searches), strict=True))
        if any(hits and not hits.notice for _, hits in several):
            # Where one index has the phrase in quotes, those that do not have no result.
            several = [(index, hits) for index, hits in several if not hits.notice]
        best = max((hits for _, hits in several), key=lambda hits: hits[0].score if hits else -inf)
        results = ranked(*(results_of(index, query, hits) for index, hits in several))
        yield (
            name,
            SearchResults(
                query=query,
                model=model,
                mode=options["mode"],
                milliseconds=round(1000 * (time.perf_counter() - start), 1),
                answer=best.answer,
                data=results[: options["k"]],
                note=best.notice or None,
            ),
        )


def _models(indices: Sequence[Index]) -> str:
    from revela.encoders.model_files import name_of

    return " + ".join(dict.fromkeys(name_of(Path(index.info.model)) for index in indices))


def _print_first_answer(query: str, top: int, found: Words | Index) -> None:
    """Print a first answer before many documents are encoded."""
    from revela.searching.results import ranked, results_of
    from revela.searching.snippets import SPARE

    print(f"{found.notice} The full answer follows.\n")
    print_results(ranked(results_of(found, query, found.search(query, SPARE * top))), top)
    print(flush=True)
