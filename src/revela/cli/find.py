"""Verbs that use a retriever: index, search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from revela.cli.app import DEFAULTS, Corpus, app
from revela.config import Precision
from revela.errors import RevelaError
from revela.terminal import print_hits


@app.command
def index(
    corpus: Corpus,
    *,
    model: str,
    out: Path,
    chunk_words: int = 120,
    text_field: str = DEFAULTS.text_field,
    title_field: str = DEFAULTS.title_field,
    join_titles: bool = DEFAULTS.join_titles,
    max_bad_share: float = DEFAULTS.max_bad_share,
    precision: Precision = "auto",
) -> None:
    """Index a corpus for search.

    Parameters
    ----------
    corpus:
        As for train.
    model:
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
    out:
        Folder for the index.
    chunk_words:
        Most words in a passage.
    text_field:
        Field or column that holds the text.
    title_field:
        Field or column that holds the title.
    join_titles:
        Join neighbouring rows of one title: a file of passages becomes articles again.
    max_bad_share:
        Share of unreadable rows and files past which indexing stops.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    if out.exists():
        raise RevelaError(f"{out} exists: choose another --out")
    from revela.data.text import read_corpus
    from revela.models.retriever import load_encoder
    from revela.models.weights import fingerprint, resolve
    from revela.search.store import Index, passages_of

    documents, report = read_corpus(
        corpus,
        text_field=text_field,
        title_field=title_field,
        max_bad_share=max_bad_share,
        distinct=False,
        min_words=1,
        join_titles=join_titles,
    )
    for line in report.lines():
        print(line)
    passages, folder = passages_of(documents, chunk_words), resolve(model)
    encoder = load_encoder(folder, precision)
    Index.build(passages, encoder, str(folder.resolve()), fingerprint(folder), progress=True).save(out)
    print(f"indexed {len(passages):,} passages into {out}")


@app.command
def search(
    index_folder: Annotated[Path, Parameter(name="index")],
    query: str,
    *,
    mode: Literal["hybrid", "dense", "lexical"] = "hybrid",
    top: int = 5,
    model: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Search an index.

    Parameters
    ----------
    index_folder:
        Made by revela index.
    query:
        What to look for.
    mode:
        By meaning (dense), by words (lexical) or both.
    top:
        How many passages.
    model:
        The retriever, if it has moved since the index was made.
    as_json:
        Print JSON.
    """
    from revela.search.store import Index

    opened = Index.load(index_folder)
    encoder = None
    if mode != "lexical":
        from revela.models.retriever import load_encoder
        from revela.models.weights import fingerprint, resolve

        folder = resolve(model or opened.model)
        if fingerprint(folder) != opened.fingerprint:
            raise RevelaError(f"{folder} is not the model that made {index_folder}: give that one as --model, or index again")
        encoder = load_encoder(folder, "auto")
    hits = opened.search(query, encoder, top, mode)
    if as_json:
        print(json.dumps([{"id": h.id, "score": h.score, "title": h.title, "text": h.text} for h in hits], ensure_ascii=False, indent=1))
    else:
        print_hits(hits)
