"""Which documents are held out of training."""

from __future__ import annotations

import hashlib

from revela.corpus.arrow_list import ArrowList
from revela.types import Document


def split_held_out(
    documents: ArrowList[Document], share: float, at_most: int
) -> tuple[ArrowList[Document], list[Document]]:
    """Training documents and held-out documents, chosen by a hash of title and text.

    The choice does not depend on the order of the documents, the run or the seed.

    Args:
        documents: all documents.
        share: fraction to hold out, 0 to 0.5.
        at_most: maximum number of held-out documents.
    """
    digests = [hashlib.blake2b(d.full_text.encode(), digest_size=8).digest() for d in documents]
    ranked = sorted(range(len(digests)), key=digests.__getitem__)
    held = sorted(ranked[: min(at_most, int(share * len(digests)))])
    rest = sorted(ranked[len(held) :])
    return documents.chosen(rest), list(documents.chosen(held))
