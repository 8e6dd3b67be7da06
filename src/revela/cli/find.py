"""Verbs that use a retriever: index, search."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from revela.cli.flags import Several
from revela.cli.main import DEFAULTS, INDEXING, Flat, app
from revela.cli.printing import print_hits
from revela.errors import RevelaError
from revela.settings import Indexing, Precision, Retriever

if TYPE_CHECKING:
    from revela.index.rerank import Reranking


@app.command
def index(
    corpus: Annotated[list[Path] | None, Parameter(negative=())] = None,
    *,
    out: Path,
    model: str | None = None,
    append: Annotated[bool, Parameter(negative=())] = False,
    delete: Annotated[list[str] | None, Several] = None,
    metadata: Annotated[list[str] | None, Several] = None,
    settings: Annotated[Indexing, Flat] = INDEXING,
    text_field: str = DEFAULTS.text_field,
    title_field: str = DEFAULTS.title_field,
    join_titles: bool = DEFAULTS.join_titles,
    max_bad_share: float = DEFAULTS.max_bad_share,
    precision: Precision = "auto",
) -> None:
    """Index a corpus for search; add to an index, or remove documents from it. A run that was
    killed goes on when it is started again.

    Parameters
    ----------
    corpus:
        As for train.
    out:
        Folder of the index.
    model:
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6. Where
            documents are added it is the index's own.
    append:
        Add to the index; documents whose id is there already are replaced.
    delete:
        Ids of documents to remove.
    metadata:
        Fields or columns to keep with each document, which revela search --where filters by.
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
    if delete:
        _delete(out, delete, corpus)
        return
    if not corpus:
        raise RevelaError("give a corpus to index, or ids of documents to --delete")
    from revela.corpus.read import read_corpus
    from revela.index import encode_corpus as indexing
    from revela.index.manifest import begun_in
    from revela.index.store import Index
    from revela.retriever.encode import load_encoder
    from revela.weights import fingerprint, refuse_untrained_dimensions, resolve

    opened = Index.load(out) if append else None
    if opened is None:
        begun_in(out)  # refuses a folder that is taken, before much is read
        if model is None:
            raise RevelaError("give the retriever that makes the vectors as --model")
    elif settings not in (INDEXING, opened.info.settings) or (
        metadata and set(metadata) != set(opened.info.columns)
    ):
        raise RevelaError(
            f"{out} was made with other settings or metadata: leave those flags away, or make a new index"
        )
    documents, report = read_corpus(
        corpus,
        text_field=text_field,
        title_field=title_field,
        max_bad_share=max_bad_share,
        distinct=False,
        min_words=1,
        join_titles=join_titles,
        metadata=list(opened.info.columns) if opened else metadata or (),
    )
    for line in report.lines():
        print(line)
    folder = resolve(model or opened.model if opened else str(model))
    made_by = fingerprint(folder)
    refuse_untrained_dimensions(folder, settings.dimensions)
    if opened:
        opened.check_model(made_by, str(folder))
        added = indexing.extend(opened, documents, load_encoder(folder, precision), progress=True)
    else:
        opened, added = indexing.build(
            out,
            documents,
            load_encoder(folder, precision),
            model=str(folder.resolve()),
            fingerprint=made_by,
            settings=settings,
            metadata=metadata or (),
            progress=True,
        )
    print(
        f"{added.new:,} documents are new, {added.replaced:,} replaced, {added.unchanged:,} unchanged; {out} holds {len(opened):,} passages"
    )


def _delete(out: Path, ids: list[str], corpus: list[Path] | None) -> None:
    if corpus:
        raise RevelaError("--delete takes ids and no corpus: first delete, then add with --append")
    from revela.index.manifest import writing
    from revela.index.store import Index

    opened = Index.load(out)
    with writing(out):
        gone = opened.delete(list(dict.fromkeys(ids)))
        opened.finish()
    print(f"deleted {len(set(ids)):,} documents, {gone:,} passages; {out} holds {len(opened):,}")


@app.command
def search(
    index_folder: Annotated[Path, Parameter(name="index")],
    query: str,
    *,
    mode: Literal["hybrid", "dense", "lexical"] = "hybrid",
    fusion: Literal["score", "rank"] = "score",
    rerank: Literal["tokens", "heads"] | None = None,
    lm: str = Retriever.offline_model,
    top: int = 5,
    where: str | None = None,
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
    fusion:
        How both are joined: by score, or by rank (reciprocal rank fusion).
    rerank:
        Order the first 50 again by the vectors of single tokens (tokens): in milliseconds if the
        index was made with --keep-tokens. Or the first 20 by where the heads of a language model
        look when it reads them with the query (heads): in seconds.
    lm:
        Language model of --rerank heads: a hub id, a local folder or embedded:smollm2-135m.
    top:
        How many documents; each is shown by its best passage.
    where:
        Filter in SQL over the index's metadata, id and title: "year > 2020 and lang = 'en'".
    model:
        The retriever, if it has moved since the index was made.
    as_json:
        Print JSON.
    """
    if top < 1:
        raise RevelaError(f"--top {top} is no number of results: give 1 or more")
    from revela.index.store import Index

    opened = Index.load(index_folder)
    encoder = None
    if mode != "lexical":
        from revela.retriever.encode import load_encoder
        from revela.weights import fingerprint, resolve

        folder = resolve(model or opened.model)
        opened.check_model(fingerprint(folder), str(folder))
        encoder = load_encoder(folder, "auto")
    how: Reranking | None
    if rerank == "heads":
        from revela.index.listwise import load_query_heads

        how = load_query_heads(lm, opened.sample)
    else:
        how = rerank
    hits = opened.search(query, encoder, top, mode, where, fusion, how)
    if as_json:
        print(json.dumps([asdict(hit) for hit in hits], ensure_ascii=False, indent=1))
    else:
        print_hits(hits, query)
