"""``revela encode``: the vectors of a corpus, for another vector store."""

from __future__ import annotations

from typing import Annotated

from revela.cli.flags import PROMPTS, Corpus, Flat, Out, PromptFlags
from revela.cli.printing import print_report
from revela.searching.manifest import Indexing, new_info
from revela.text.load import READING, Reading
from revela.types import Precision

CHUNK_WORDS = Indexing.chunk_words


def encode(
    corpus: Corpus,
    *,
    out: Out,
    model: str,
    chunk_words: int = CHUNK_WORDS,
    dimensions: int = 0,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    reading: Annotated[Reading, Flat] = READING,
    precision: Precision = "auto",
) -> None:
    """Write the chunks of a corpus and their vectors to a file, without an index.

    Parameters
    ----------
    corpus:
        As for train.
    out:
        NAME.parquet, with the columns id, chunk, title, text and vector.
    model:
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
    chunk_words:
        Maximum words per chunk.
    dimensions:
        Keep this many dimensions of each vector, of those the model was trained for. 0: all.
    precision:
        Arithmetic; auto is int8, bf16 or fp32, whichever this processor or GPU is fast in.
    """
    from revela.encoders.load import load_encoder, resolve
    from revela.encoders.model_files import check_dimensions
    from revela.searching import export as vectors
    from revela.searching.ingest import check_repeated
    from revela.text.load import read_corpus

    vectors.check_out(out)
    folder = resolve(model)
    check_dimensions(folder, dimensions)
    encoder = load_encoder(folder, precision, prompts=prompts.given)
    settings = Indexing(chunk_words=chunk_words, dimensions=dimensions)
    info = new_info(folder, encoder, settings, {}, prompts.given)

    documents, report = read_corpus(corpus, reading, distinct=False, min_words=1)
    print_report(report)
    check_repeated(document.id for document in documents)
    count = vectors.encode(out, documents, info, encoder)
    print(f"{count:,} vectors of {info.width} numbers in {out}")
