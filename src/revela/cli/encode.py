"""``revela encode``: the vectors of an index or a corpus, for another vector store."""

from __future__ import annotations

from typing import Annotated

from revela.cli.flags import PROMPTS, Corpus, Flat, Out, PromptFlags, Several, names_of
from revela.cli.printing import print_report
from revela.errors import RevelaError
from revela.searching.manifest import Indexing, new_info
from revela.terminal import counted
from revela.text.load import READING, Reading, read_corpus
from revela.types import Precision

CHUNK_WORDS = Indexing.chunk_words


def encode(
    corpus: Corpus,
    *,
    out: Out,
    model: str | None = None,
    chunk_words: int = CHUNK_WORDS,
    dimensions: int = 0,
    metadata: Annotated[list[str] | None, Several] = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    reading: Annotated[Reading, Flat] = READING,
    precision: Precision = "auto",
) -> None:
    """Write the chunks of an index, or of a corpus without an index, and their vectors to a file.

    Parameters
    ----------
    corpus:
        As for train; or a folder made by revela index, whose vectors are written as they are.
    out:
        NAME.parquet, with the columns id, chunk, title, text, line, page, date, type, language,
        those of metadata, and vector.
    model:
        The retriever for a corpus: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
    chunk_words:
        Maximum words per chunk.
    dimensions:
        Keep this many dimensions of each vector, of those the model was trained for. 0: all.
    metadata:
        Fields or columns to write with each document.
    precision:
        Numeric precision. auto: the fastest of int8, bf16 and fp32 on this CPU or GPU.
    """
    from revela.encoders.load import load_encoder, resolve
    from revela.encoders.model_files import check_dimensions
    from revela.searching import export as vectors
    from revela.searching.index import Index
    from revela.searching.ingest import check_repeated
    from revela.searching.rows import metadata_columns
    from revela.searching.state import is_index

    vectors.check_out(out)
    if is_index(corpus[0]):
        chosen = model, dimensions, metadata, any(prompts.given), chunk_words != CHUNK_WORDS
        if len(corpus) > 1 or any(chosen) or reading != READING or precision != "auto":
            raise RevelaError("an index is written as it is: give one index and --out alone")
        index = Index.open(corpus[0])
        count, info = vectors.export(out, index), index.info
    else:
        if model is None:
            raise RevelaError("give the --model that makes the vectors, or an index")
        folder, fields = resolve(model), names_of(metadata)
        check_dimensions(folder, dimensions)
        encoder = load_encoder(folder, precision, prompts=prompts.given)
        settings = Indexing(chunk_words=chunk_words, dimensions=dimensions)
        documents, report = read_corpus(
            corpus, reading, distinct=False, min_words=1, metadata=fields, for_search=True
        )
        print_report(report)
        check_repeated(document.id for document in documents)
        columns = metadata_columns(documents, fields)
        info = new_info(folder, encoder, settings, columns, prompts.given)
        count = vectors.encode(out, documents, info, encoder)
    print(f"{counted(count, 'vector')} of {info.width} numbers in {out}")
