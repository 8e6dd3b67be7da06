"""Verbs that use a retriever: eval, index, search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from revela.cli.app import DEFAULTS, Corpus, Several, app
from revela.config import Precision
from revela.errors import RevelaError
from revela.files import whole
from revela.terminal import print_hits, print_table


@app.command(name="eval")
def evaluate(
    model: list[str],
    *,
    on: Annotated[list[Path], Several],
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    max_tokens: int | None = None,
    precision: Precision = "auto",
) -> None:
    """Score models on BEIR-layout folders, beside BM25 and the fusion of both.

    Parameters
    ----------
    model:
        Sentence-Transformers folders, hub ids or embedded:minilm-l6.
    on:
        Folders with corpus.jsonl, queries.jsonl and qrels/test.tsv (the first two may be .gz).
    json_file:
        Write all scores here too.
    max_tokens:
        Read no more of a text than this.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    from revela.evaluate.folder import evaluate_folders, table
    from revela.models.retriever import load_encoder
    from revela.models.weights import resolve
    from revela.search.metrics import METRICS

    short = [Path(name).name if "/" in name else name for name in model]
    encoders = {
        (brief if short.count(brief) == 1 else name): load_encoder(resolve(name), precision, max_tokens)
        for brief, name in zip(short, model, strict=True)
    }
    results = evaluate_folders(on, encoders, print, progress=True)
    print_table("", ["collection", "system", *METRICS], [[name, system, *values] for name, system, values in table(results)])
    if json_file is not None:
        with whole(json_file) as temporary:
            temporary.write_text(json.dumps(results, indent=1) + "\n")


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
