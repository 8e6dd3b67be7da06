"""``revela encode``: the vectors of a corpus, for a store of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from revela import on_ray
from revela.cli.flags import ENGINE, Corpus, Engine, Flat, Out, reader_of_parts
from revela.cli.main import app
from revela.cli.printing import print_report
from revela.corpus.reading import READING, Reading
from revela.settings import Indexing, Precision

if TYPE_CHECKING:
    from revela.index.manifest import Info
    from revela.types import Document, TokenEncoder, Vectors

    ContextOf = Callable[[Sequence[Document]], Vectors | None]
    "Draws what the retriever reads before every text from documents, (J, D)."

CHUNK_WORDS = Indexing.chunk_words


@app.command
def encode(
    corpus: Corpus,
    *,
    out: Out,
    model: str,
    chunk_words: int = CHUNK_WORDS,
    dimensions: int = 0,
    context: str | None = None,
    reading: Annotated[Reading, Flat] = READING,
    precision: Precision = "auto",
    engine: Annotated[Engine, Flat] = ENGINE,
) -> None:
    """Write the chunks of a corpus and their vectors to a file, without an index.

    Parameters
    ----------
    corpus:
        As for train.
    out:
        NAME.parquet, with the columns id, chunk, title, text and vector (a folder of files with
        --engine ray).
    model:
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
    chunk_words:
        Maximum words per chunk.
    dimensions:
        Keep this many dimensions of each vector, of those the model was trained for. 0: all.
    context:
        What a retriever trained with --context reads before every text, as for index.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    from revela.index.contexts import chosen_for
    from revela.index.encode_corpus import describe
    from revela.index.vectors import check_out
    from revela.retriever.load import load_encoder
    from revela.weights import refuse_untrained_dimensions, resolve

    check_out(out)
    folder = resolve(model)
    refuse_untrained_dimensions(folder, dimensions)
    encoder = load_encoder(folder, precision)
    settings = Indexing(chunk_words=chunk_words, dimensions=dimensions)
    info = replace(describe(folder, encoder, settings, {}), language=None)  # no terms for BM25

    def context_of(documents: Sequence[Document]) -> Vectors | None:
        known = chosen_for(encoder, context, documents, chunk_words)
        return None if known is None else known.rows(encoder)

    if engine.engine == "ray":
        with on_ray.connected(engine.cluster):
            count = _by_ray(out, corpus, reading, info, context_of, engine, precision)
    else:
        count = _here(out, corpus, reading, info, context_of, encoder)
    print(f"{count:,} vectors of {info.width} numbers in {out}")


def _here(
    out: Path,
    corpus: list[Path],
    reading: Reading,
    info: Info,
    context_of: ContextOf,
    encoder: TokenEncoder,
) -> int:
    """How many vectors are written."""
    from revela.corpus.read import read_corpus
    from revela.index.contexts import conditioned
    from revela.index.encode_corpus import refuse_repeated
    from revela.index.vectors import encode

    documents, report = read_corpus(corpus, reading, distinct=False, min_words=1)
    print_report(report)
    refuse_repeated(document.id for document in documents)
    rows = context_of(documents)
    reads = encoder if rows is None else conditioned(encoder, rows)
    return encode(out, documents, info, reads, len(documents))


def _by_ray(
    out: Path,
    corpus: list[Path],
    reading: Reading,
    info: Info,
    context_of: ContextOf,
    engine: Engine,
    precision: Precision,
) -> int:
    """``_here``, by a cluster."""
    from revela.index.build_on_ray import SurveyedCorpus
    from revela.index.vectors import encode_on_ray

    documents = SurveyedCorpus(corpus, reader_of_parts(reading, ()), reading.max_bad_share)
    print_report(documents.report)
    rows = context_of(documents)
    return encode_on_ray(out, documents, info, rows, engine.cluster, precision)
