"""Adapt an existing embedder to a corpus without labels, and see whether it helped.

    python examples/adapt_an_embedder.py docs/ my-retriever

A frozen language model gives the training signal. It also writes questions about held-out chunks;
with title and neighbour queries these make the label-free check, which compares the embedder before
and after. What is saved is the embedder as it was, unless the check prefers a later state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from revela import Retriever


def main(
    corpus: str | Path,
    out: str | Path,
    model: str | Path = "embedded:minilm-l6",
    lm: str | Path = "embedded:smollm2-135m",
    **settings: Any,
) -> tuple[dict[str, float], dict[str, float], bool]:
    """Adapt ``model`` to ``corpus`` and save it to ``out``.

    Args:
        corpus: folder or file of text.
        out: folder for the retriever; must not exist.
        model: the embedder: a Sentence-Transformers folder, a hub id or embedded:NAME.
        lm: language model that gives the signal and writes the questions.
        settings: settings of ``revela train``, e.g. ``max_minutes``.

    Returns:
        nDCG@10 by task before and after training, and whether a trained state was saved.
    """
    chosen = {"model": str(model), "lm": str(lm), "max_minutes": 6, "check_questions": 100}
    Retriever.train(corpus, out, preset="gated", **{**chosen, **settings})

    rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row["check"] for row in rows if "check" in row]
    return first, last, rows[-1]["kept"] > 0


if __name__ == "__main__":
    before, after, changed = main(*sys.argv[1:3])
    for task in before:
        print(f"{task}: nDCG@10 {before[task]:.3f} -> {after[task]:.3f}")
    print("saved the adapted embedder" if changed else "saved the embedder as it was: no gain")
