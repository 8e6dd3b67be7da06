"""Train a retriever on a folder of text without labels, index the folder with it, and search.

    python examples/train_on_a_folder.py docs/ my-retriever "how are invoices archived"

The retriever starts from the lower layers of SmolLM2-135M, fitted to the text. Training takes five
minutes here; `revela train docs/ --out my-retriever --max-minutes 5` does the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from revela import Hit, Retriever
from revela.corpus.read import read_corpus

SMOLLM2 = "embedded:smollm2-135m"


def main(
    corpus: str | Path,
    out: str | Path,
    question: str,
    model: str | Path = SMOLLM2,
    lm: str | Path = SMOLLM2,
    **settings: Any,
) -> list[Hit]:
    """Train on ``corpus``, save to ``out``, index to ``out``-index; the five best hits.

    Args:
        corpus: folder or file of text.
        out: folder for the retriever; must not exist.
        question: what to search for.
        model: decoder that the retriever starts from: a folder, a hub id or embedded:NAME.
        lm: language model that gives the training signal.
        settings: settings of ``revela train``, e.g. ``max_minutes``.
    """
    chosen = {"model": str(model), "lm": str(lm), "max_minutes": 5, **settings}
    retriever = Retriever.train(corpus, out, preset="gated", **chosen)
    documents, _ = read_corpus([corpus])
    index = retriever.index(documents, f"{out}-index", keep_tokens=True)
    return index.search(question, k=5, rerank="tokens")


if __name__ == "__main__":
    for hit in main(*sys.argv[1:4]):
        print(f"{hit.score:.3f}  {hit.id}  {hit.text[:100]!r}")
