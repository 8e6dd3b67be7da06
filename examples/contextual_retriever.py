"""Train a retriever that reads a context, and give it the context of one corpus or another.

    python examples/contextual_retriever.py docs/ code/ my-retriever "how are invoices archived"

Trained on two corpora, so that it can learn what a context says. The same query then has two
vectors, one beside the documents of each corpus; an index keeps the context that it was made with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from revela import Retriever
from revela.corpus.read import read_corpus
from revela.retriever.context import draw_documents
from revela.types import Vectors


def main(
    corpora: list[str | Path],
    out: str | Path,
    query: str,
    model: str | Path = "embedded:minilm-l6",
    **settings: Any,
) -> list[Vectors]:
    """Train on all corpora and save the retriever to ``out``.

    Args:
        corpora: folders or files of text.
        out: folder for the retriever; must not exist.
        query: to encode.
        model: what the retriever starts from.
        settings: settings of ``revela train``, e.g. ``max_minutes``.

    Returns:
        The query's vector in the context of each corpus.
    """
    chosen = {"model": str(model), "max_minutes": 6, **settings}
    retriever = Retriever.train(corpora, out, preset="cde", **chosen)
    vectors = []
    for corpus in corpora:
        documents, _ = read_corpus([corpus])
        texts = draw_documents(documents, retriever.encoder.slots, words=48)
        vectors.append(retriever.encoder.with_context_of(texts).encode_queries([query])[0])
    return vectors


if __name__ == "__main__":
    *sources, folder, question = sys.argv[1:]
    first, *others = main(list(sources), folder, question)
    for name, other in zip(sources[1:], others, strict=True):
        print(f"the query in {sources[0]} and in {name}: cosine {float(first @ other):.4f}")
