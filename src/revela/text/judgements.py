"""Read judged queries in BEIR layout, to evaluate on and to train on.

A folder has queries.jsonl (or .gz) and qrels/SPLIT.tsv, which has a header and the columns
query-id, corpus-id and score, or TREC's four columns. Scores are integers; above 0 is relevant.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from revela.errors import RevelaError
from revela.terminal import counted
from revela.text.readers.common import numbered_lines
from revela.text.spool import ArrowList, arrow_list
from revela.types import Chunk, Document

log = logging.getLogger(__name__)

Qrels = dict[str, dict[str, int]]
"""Query id -> document id -> score."""


def read_judgements(folder: Path, split: str) -> tuple[dict[str, str], Qrels]:
    """Query id -> text, for queries with a relevant document; and all scores."""
    rows = read_rows(folder, "queries.jsonl")
    queries = {name: str(row["text"]) for name, row in rows.items()}
    path = folder / "qrels" / f"{split}.tsv"
    qrels = _read_qrels(path)
    if not qrels:
        raise RevelaError(f"{folder}: qrels/{split}.tsv is empty")
    check_unknown(path, "query-id", qrels, queries)
    judged = [q for q in qrels if any(score > 0 for score in qrels[q].values())]
    if not judged:
        raise RevelaError(
            f"{folder}: no query has a relevant document in qrels/{split}.tsv: give relevant "
            "documents scores above 0"
        )
    if blank := [q for q in judged if not queries[q].strip()]:
        raise RevelaError(
            f"{folder}: queries.jsonl has no text for {len(blank):,} of the judged queries (first: "
            f"{blank[0]}): write them, or drop them from the qrels"
        )
    return {q: queries[q] for q in judged}, qrels


def check_unknown(path: Path, kind: str, ids: Iterable[str], existing: Mapping[str, Any]) -> None:
    """Raise RevelaError if qrels have unknown ids; ``kind`` is corpus-id or query-id."""
    if unknown := sorted(set(ids) - existing.keys()):
        where = "corpus.jsonl" if kind == "corpus-id" else "queries.jsonl"
        raise RevelaError(
            f"{path} has {counted(len(unknown), kind)} that {where} lacks (first: {unknown[0]}): "
            "correct one of the two files"
        )


def jsonl_file(folder: Path, name: str) -> Path:
    """A folder's JSONL file, or its .gz if only that exists."""
    path, compressed = folder / name, folder / f"{name}.gz"
    return compressed if compressed.is_file() and not path.is_file() else path


def read_rows(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """_id -> row, with _id and text, of a folder's JSONL file or its .gz; equal rows once."""
    path = jsonl_file(folder, name)
    if not path.is_file():
        raise RevelaError(f"{folder} is not a BEIR-layout folder: it has no {name} (nor {name}.gz)")
    return _rows_of(path)


def read_queries(path: Path) -> dict[str, str]:
    """Read a file with one query per line: query id -> text.

    A line of a .jsonl file is JSON with _id and text; a line of any other file is text, and its
    number is the id.
    """
    expected = "give a file with one query per line"
    if not path.is_file():
        raise RevelaError(f"{path} does not exist: {expected}")
    if ".jsonl" in path.suffixes:
        queries = {name: str(row["text"]) for name, row in _rows_of(path).items()}
    else:
        queries = {str(n): line.strip() for n, line in numbered_lines(path) if line.strip()}
    if not queries:
        raise RevelaError(f"{path} is empty: {expected}")
    if blank := [name for name, text in queries.items() if not text.strip()]:
        raise RevelaError(f"{path}: the query {blank[0]} is empty: write it, or drop it")
    return queries


def _rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """_id -> row, of a JSONL file; equal rows once."""
    rows = dict[str, dict[str, Any]]()
    for number, line in numbered_lines(path):
        if line.strip():
            try:
                row = json.loads(line)
                # Raises if a field is missing, or has surrogates.
                f"{row['_id']}{row['text']}{row.get('title')}".encode()
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RevelaError(
                    f"{path}: line {number} cannot be read ({type(error).__name__}: {error})"
                ) from error
            # A null is an empty text, not the word "None".
            row = {name: "" if value is None else value for name, value in row.items()}
            if rows.setdefault(str(row["_id"]), row) != row:
                raise RevelaError(f'{path} has two texts for _id "{row["_id"]}": give each its own')
    return rows


def _read_qrels(path: Path) -> Qrels:
    if not path.is_file():
        raise RevelaError(f"{path} does not exist: a BEIR-layout folder has its judgements there")
    qrels: Qrels = {}
    for number, line in numbered_lines(path):
        line = line.strip("\r\n")
        fields = line.split("\t")
        # Ids may have other spaces, such as U+2028 or a no-break space.
        fields = fields if len(fields) in (3, 4) else re.findall(r"[^ \t]+", line)
        if not line.strip() or (number == 1 and line.split()[-1:] == ["score"]):
            continue
        if len(fields) == 4:
            del fields[1]
        try:
            query, document, given = fields
            score = float(given)
        except ValueError:
            raise RevelaError(
                f"{path}:{number}: expected query-id, corpus-id and score, separated by tabs, or "
                "the four columns of TREC"
            ) from None
        if not score.is_integer():
            raise RevelaError(
                f"{path}:{number}: the score {given} is not an integer: multiply all scores so "
                "that they are integers"
            )
        if (before := qrels.setdefault(query, {}).setdefault(document, int(score))) != score:
            raise RevelaError(
                f"{path}:{number} gives {document} the score {given} for {query}, and an earlier "
                f"line the score {before}: keep one of the two"
            )
    return qrels


def queries_by_id(folders: Sequence[Path]) -> dict[str, dict[str, None]]:
    """``domain_id`` of each document that is relevant in qrels/train.tsv of a folder -> its
    queries, each text once.
    """
    queries_of: dict[str, dict[str, None]] = {}
    for i, folder in enumerate(folders):
        texts, qrels = read_judgements(folder, "train")
        for query, text in texts.items():
            for document, score in qrels[query].items():
                if score > 0:
                    queries_of.setdefault(domain_id(document, i, folders), {})[text] = None
    return queries_of


def domain_id(name: str, i: int, folders: Sequence[Path]) -> str:
    """The id of a document of the i-th of several folders, which may share ids."""
    return f"{i}/{name}" if len(folders) > 1 else name


def in_domains(parts: Iterable[Sequence[Document]]) -> ArrowList[Document]:
    """The documents of several corpora, renamed by ``domain_id``."""
    documents = ((i, document) for i, part in enumerate(parts) for document in part)
    return arrow_list(Document, (replace(d, id=f"{i}/{d.id}") for i, d in documents))


def pair_rows(
    documents: Sequence[Document], folders: Sequence[Path], others: bool
) -> ArrowList[Chunk]:
    """Rows of whole documents (title and text): one for each query that a document answers.

    With ``others``, documents that answer no query follow. Ids are those of ``domain_id``.
    """
    queries_of = queries_by_id(folders)
    missing = dict(queries_of)

    def rows() -> Iterator[Chunk]:
        for number, document in enumerate(documents):
            missing.pop(document.id, None)
            for query in queries_of.get(document.id, ()):
                yield Chunk(number, document.full_text, query)
        for number, document in enumerate(documents if others else ()):
            if document.id not in queries_of:
                yield Chunk(number, document.full_text)

    pairs = arrow_list(Chunk, rows())
    for i, folder in enumerate(folders):
        start = domain_id("", i, folders)
        sizes = {name: len(q) for name, q in queries_of.items() if name.startswith(start)}
        left_out = sum(size for name, size in sizes.items() if name in missing)
        used = sum(sizes.values()) - left_out
        if not used:
            first = next(iter(sizes)).removeprefix(start)
            raise RevelaError(
                f"{folder}: no relevant document of qrels/train.tsv is trained on (first: "
                f"{first}): give the corpus that it names, with its ids as _id"
            )
        note = f"; {left_out:,} left out, whose documents were not read, or are held out"
        log.info(f"{used:,} pairs of {folder}{note if left_out else ''}")
    return pairs
