"""Where in a text a model looks: tests that need no label (Coelho et al., "Dwell in the Beginning",
ACL 2024).

- Exact match: a document is cut in ten equal parts, and each part, as a query, is compared with the
  whole. A model that reads evenly gives all ten the same cosine, if all ten say as much about the
  whole. They do not (a text tends to begin with what it is about), so the same documents are read
  again with their parts in reverse order: the mean of both readings by place holds what is said
  fixed.
- Loss: a language model's next-token loss in ten windows of a text.

The paper takes documents of any length up to the model's; here all are as long as what the model
reads, so that what it never saw is not taken for what it forgot.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from tqdm import tqdm

from revela.errors import RevelaError
from revela.evaluation.probe.profile import PLACES, Profile, Scores, profile
from revela.lm.language_model import LanguageModel
from revela.retriever.tokens import Ruler
from revela.types import Document, Encoder

log = logging.getLogger(__name__)

SPARE = 8  # tokens left free, as a text with its parts in another order may have a few more
LEAST_WORDS = 2  # in a part
ENOUGH = 30  # documents, for a mean by place and its interval
TOKENIZED = 64  # documents at a time
LM_BATCH = 8  # texts that an LM reads at a time
SEGMENT_TENTHS = [place + 0.5 for place in range(PLACES)]
_WORDS = re.compile(r"\S+\s*")


def long_texts(documents: Sequence[Document], ruler: Ruler, count: int, seed: int) -> list[str]:
    """A sample of documents with as many tokens as the model reads, cut there, between words.

    Args:
        documents: their titles are left out.
        ruler: the model's.
        count: how many to find; fewer will do, from ``ENOUGH`` on.
        seed: of the sample.

    Raises:
        RevelaError: the model reads too little to be cut in ten, or too few documents are so long.
    """
    tokens = ruler.room - SPARE
    if tokens < PLACES * LEAST_WORDS:
        raise RevelaError(
            f"{ruler.room} tokens are too few to be cut in {PLACES} parts: raise --max-tokens"
        )
    found: list[str] = []
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    for start in range(0, len(order), TOKENIZED):
        texts = [documents[i].text for i in order[start : start + TOKENIZED]]
        # A token has a character at least, so that shorter texts need not be tokenized.
        texts = [text for text in texts if len(text) >= tokens]
        for text, spans in zip(texts, ruler.spans(texts), strict=True):
            if len(spans) >= tokens:
                cut = between_words(text, spans[tokens - 1][1])
                if len(cut.split()) >= PLACES * LEAST_WORDS:
                    found.append(cut)
        if len(found) >= count:
            return found[:count]
    few = f"only {len(found):,} of {len(documents):,} documents are long enough for {PLACES} parts of {tokens} tokens in all"
    if len(found) < ENOUGH:
        raise RevelaError(
            f"{few}, and {min(count, ENOUGH)} are needed: lower --max-tokens or --documents"
        )
    log.info(f"{few}: all of them are taken, in place of {count:,}")
    return found


def between_words(text: str, end: int) -> str:
    """The text up to ``end``, less the word that this would cut in two, unless there is no other."""
    if end < len(text) and not text[end].isspace():
        return re.sub(r"(?<=\s)\S+$", "", text[:end])
    return text[:end]


def segments(text: str) -> list[str]:
    """Ten runs of words, as equal in number as can be; joined, they are the text."""
    words = _WORDS.findall(text)
    bounds = [round(place * len(words) / PLACES) for place in range(PLACES + 1)]
    return ["".join(words[a:b]) for a, b in pairwise(bounds)]


def exact_match(
    texts: Sequence[str], encoder: Encoder, seed: int = 0, progress: bool = False
) -> dict[str, Profile]:
    """Cosine of each text, as a passage, with each of its ten parts as a query: as it stands, and
    with what is said held fixed.

    Args:
        texts: of ``PLACES`` words or more, no longer than the encoder reads.
        encoder: of unit vectors.
        seed: of the intervals.
        progress: show bars.
    """
    parts = [segments(text) for text in texts]
    turned = [" ".join(part.strip() for part in reversed(some)) for some in parts]
    passages = encoder.encode_passages([*texts, *turned], progress=progress).reshape(
        2, len(texts), -1
    )
    queries = encoder.encode_queries(
        [part for some in parts for part in some], progress=progress
    ).reshape(len(texts), PLACES, -1)
    forward_NP, turned_NP = (
        np.einsum("nd,npd->np", side, queries).astype(np.float64) for side in passages
    )
    return {
        "exact match": profile(forward_NP, SEGMENT_TENTHS, seed=seed),
        "exact match, both orders": profile(
            both_orders(forward_NP, turned_NP), SEGMENT_TENTHS, seed=seed
        ),
    }


def both_orders(forward_NP: Scores, turned_NP: Scores) -> Scores:
    """Mean score by place; ``turned_NP`` has, at [n, p], part p of a text whose parts stood in
    reverse order, so at place P - 1 - p.

    Whatever a part adds to its score by what it says, it adds at two places that mirror each other:
        slope and drop are free of it.
    """
    mean_NP: Scores = (forward_NP + turned_NP[:, ::-1]) / 2
    return mean_NP


@torch.inference_mode()
def loss_by_place(
    texts: Sequence[str], lm: LanguageModel, ruler: Ruler, seed: int = 0, progress: bool = False
) -> dict[str, Profile]:
    """Next-token loss (nats) in ten windows of the same number of tokens; it falls as long as what
    was read before still helps.

    Args:
        texts: of at least ``ruler.room - SPARE`` tokens, or a few fewer.
        lm: the language model.
        ruler: its tokenizer.
        seed: of the intervals.
        progress: show a bar.

    Raises:
        RevelaError: a loss is not finite.
    """
    ids = ruler.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    length = min(map(len, ids))
    ids_NL = torch.tensor([some[:length] for some in ids])
    rows = []
    for start in tqdm(range(0, len(ids_NL), LM_BATCH), unit="batch", disable=not progress):
        packed = lm.pack(batch := ids_NL[start : start + LM_BATCH], torch.ones_like(batch))
        losses_R = lm.token_losses(packed, packed.layout.has_next_T.nonzero().squeeze(1))
        rows.append(losses_R.float().cpu().view(len(batch), length - 1).numpy())
    losses_NL = np.concatenate(rows).astype(np.float64)
    if not np.isfinite(losses_NL).all():
        raise RevelaError(f"{lm.name} gives losses that are not finite: its weights are broken")
    windows_NP = np.column_stack(
        [window.mean(axis=1) for window in np.array_split(losses_NL, PLACES, axis=1)]
    )
    return {"next-token loss": profile(windows_NP, SEGMENT_TENTHS, seed=seed)}
