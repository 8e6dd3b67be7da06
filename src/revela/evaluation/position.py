"""Position bias without labels: does a model read the beginning of a text more than its end (Coelho
et al., "Dwell in the Beginning", ACL 2024)?

- Exact match: a document is cut into ten equal parts, and each part, as a query, is compared with
  the document. An unbiased model gives all parts the same cosine if all say as much about the
  document. They do not (the beginning tends to state the topic), so each document is also encoded
  with its parts in reverse order: averaged by place over both orders, content is held fixed.
- Loss: a language model's next-token loss over ten equal stretches of a text.
- Spans by place: how often an encoder-decoder writes a span of three tokens that is hidden in one
  of ten equal stretches, and nothing else is (the paper's figure 4).

The paper takes documents of any length up to the model's limit; here all are as long as the window,
so that truncation is not mistaken for bias.

A profile is the score at each place, with 95 % intervals of slope and drop: the percentiles of
means over resamples of the documents. Documents and not rows are resampled, as rows about one
document are alike. The interval of a place is that of the scores minus their row's mean, as rows
differ in level at all places alike.

Shapes: N rows (documents or queries), P places, O documents (owners of rows), R resamples.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from revela.corpus.words import count_words, in_parts, words
from revela.errors import RevelaError, extra
from revela.evaluation.results import Interval, Profile
from revela.files import atomic_write
from revela.types import Document, Encoder

if TYPE_CHECKING:
    from revela.lm.encoder_decoder import EncoderDecoder
    from revela.lm.language_model import LanguageModel
    from revela.retriever.tokens import TokenWindow

log = logging.getLogger(__name__)

PLACES = 10
RESAMPLES = 2000
TAILS = (2.5, 97.5)  # percentiles
SPARE = 8  # tokens left free, as reordered parts may take a few more
LEAST_WORDS = 2  # per part
ENOUGH = 30  # documents for a mean by place and its interval
TOKENIZED = 64  # documents per call of the tokenizer
LM_BATCH = 8  # texts per batch of a language model
SPAN = 3  # tokens of a hidden span
SEGMENT_TENTHS = [place + 0.5 for place in range(PLACES)]
COLUMNS, WIDTH, HEIGHT = 2, 4.6, 3.2  # plots per row, inches of a plot
UNITS = {  # else cosine
    "next-token loss": "nats per token",
    "moved passage, MRR@100": "MRR@100",
    "spans by place": "accuracy",
}

Scores = NDArray[np.float64]


def profile(
    scores_NP: Scores, tenths: Sequence[float], owners: Sequence[int] | None = None, seed: int = 0
) -> Profile:
    """Summarise a score at each place.

    Args:
        scores_NP: a row per text or query.
        tenths: the places, in tenths of the text.
        owners: (N,) the document that each row is about; None: each row its own.
        seed: of the resamples.
    """
    scores_NP = np.asarray(scores_NP, dtype=np.float64)
    drop_N, mean = scores_NP[:, 0] - scores_NP[:, -1], float(scores_NP.mean())
    within_NP = scores_NP - scores_NP.mean(axis=1, keepdims=True)
    columns_NX = np.column_stack(
        [within_NP, scores_NP @ slope_weights(tenths), drop_N, (np.sign(drop_N) + 1) / 2]
    )
    *differences, slope, drop, first_wins = intervals(columns_NX, owners, seed)
    places = [Interval(mean + d.value, mean + d.low, mean + d.high) for d in differences]
    documents = len(scores_NP) if owners is None else len(set(owners))
    return Profile(list(tenths), places, slope, drop, first_wins, len(scores_NP), documents)


def slope_weights(tenths: Sequence[float]) -> Scores:
    """(P,) weights whose inner product with scores at these places is their least-squares slope."""
    centred_P = np.asarray(tenths, dtype=np.float64) - np.mean(tenths)
    weights_P: Scores = centred_P / (centred_P**2).sum()
    return weights_P


def intervals(columns_NX: Scores, owners: Sequence[int] | None, seed: int) -> list[Interval]:
    """The mean of each column with its percentile bootstrap interval over documents."""
    columns_NX = np.asarray(columns_NX, dtype=np.float64)
    owned = np.arange(len(columns_NX)) if owners is None else np.asarray(owners)
    _, owner_N = np.unique(owned, return_inverse=True)
    count = int(owner_N.max()) + 1
    sizes_O = np.bincount(owner_N, minlength=count)
    sums_OX = np.zeros((count, columns_NX.shape[1]))
    np.add.at(sums_OX, owner_N, columns_NX)
    rng = np.random.default_rng(seed)
    drawn_RO = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    means_RX = (drawn_RO @ sums_OX) / (drawn_RO @ sizes_O)[:, None]
    low_X, high_X = np.percentile(means_RX, TAILS, axis=0)
    means_X = columns_NX.mean(axis=0)
    return [Interval(*map(float, values)) for values in zip(means_X, low_X, high_X, strict=True)]


def long_texts(
    documents: Sequence[Document], window: TokenWindow, count: int, seed: int
) -> list[str]:
    """A sample of documents that fill the window, cut to it between words.

    Args:
        documents: their titles are not used.
        window: of the model.
        count: number of texts; ``ENOUGH`` are accepted if there are no more.
        seed: of the sample.

    Raises:
        RevelaError: the window is too small for ten parts, or too few documents are long enough.
    """
    tokens = window.size - SPARE
    if tokens < PLACES * LEAST_WORDS:
        raise RevelaError(
            f"{window.size} tokens are too few to be cut in {PLACES} parts: raise --max-tokens"
        )
    found: list[str] = []
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    for start in range(0, len(order), TOKENIZED):
        texts = [documents[i].text for i in order[start : start + TOKENIZED]]
        # A token has at least one character, so shorter texts need not be tokenized.
        texts = [text for text in texts if len(text) >= tokens]
        for text, spans in zip(texts, window.spans(texts), strict=True):
            if len(spans) >= tokens:
                cut = between_words(text, spans[tokens - 1][1])
                if count_words(cut) >= PLACES * LEAST_WORDS:
                    found.append(cut)
        if len(found) >= count:
            return found[:count]
    few = (
        f"only {len(found):,} of {len(documents):,} documents are long enough for {PLACES} parts "
        f"of {tokens} tokens in all"
    )
    if len(found) < ENOUGH:
        raise RevelaError(
            f"{few}, and {min(count, ENOUGH)} are needed: lower --max-tokens or --documents"
        )
    log.info(f"{few}: all of them are taken, in place of {count:,}")
    return found


def between_words(text: str, end: int) -> str:
    """The text up to ``end``, without a last word that ``end`` would cut, unless it is the only
    one.
    """
    if end < len(text) and not text[end].isspace():
        last = words(text[: end + 1])[-1]
        return text[: end + 1 - len(last)] or text[:end]
    return text[:end]


def segments(text: str) -> list[str]:
    """Ten runs of words, as equal in number as possible; joined, they are the text."""
    return in_parts(text, PLACES)


def exact_match(
    texts: Sequence[str], encoder: Encoder, seed: int = 0, progress: bool = False
) -> dict[str, Profile]:
    """Cosine of each text, as a passage, with each of its ten parts as a query: in the order of the
    text, and averaged over both orders.

    Args:
        texts: of ``PLACES`` words or more, no longer than the encoder reads.
        encoder: of unit vectors.
        seed: of the intervals.
        progress: show bars.
    """
    parts = [segments(text) for text in texts]
    turned = [
        (" " if some[0][-1].isspace() else "").join(part.strip() for part in reversed(some))
        for some in parts
    ]
    passages = encoder.encode_passages([*texts, *turned], progress=progress)
    queries = encoder.encode_queries([part for some in parts for part in some], progress=progress)
    queries_NPD = queries.reshape(len(texts), PLACES, -1)
    forward_NP, turned_NP = (
        np.einsum("nd,npd->np", passages_ND, queries_NPD).astype(np.float64)
        for passages_ND in passages.reshape(2, len(texts), -1)
    )
    both_NP = both_orders(forward_NP, turned_NP)
    return {
        "exact match": profile(forward_NP, SEGMENT_TENTHS, seed=seed),
        "exact match, both orders": profile(both_NP, SEGMENT_TENTHS, seed=seed),
    }


def both_orders(forward_NP: Scores, turned_NP: Scores) -> Scores:
    """Mean score by place over both orders, (N, P).

    ``turned_NP[n, p]`` is the score of part p in the reversed text, so at place P - 1 - p. What a
    part scores by its content is added at two mirrored places: slope and drop are free of it.
    """
    mean_NP: Scores = (forward_NP + turned_NP[:, ::-1]) / 2
    return mean_NP


def loss_by_place(
    texts: Sequence[str],
    lm: LanguageModel,
    window: TokenWindow,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Profile]:
    """Next-token loss (nats) over ten stretches of as many tokens; it falls for as long as more
    context helps.

    Args:
        texts: of ``window.size - SPARE`` tokens or a few fewer.
        lm: the language model.
        window: its tokenizer.
        seed: of the intervals.
        progress: show a bar.

    Raises:
        RevelaError: a loss is not finite.
    """
    import torch

    ids = window.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    length = min(map(len, ids))
    ids_NL = torch.tensor([some[:length] for some in ids])
    rows = []
    with torch.inference_mode():
        for start in tqdm(range(0, len(ids_NL), LM_BATCH), unit="batch", disable=not progress):
            packed = lm.pack(batch := ids_NL[start : start + LM_BATCH], torch.ones_like(batch))
            losses_R = lm.token_losses(packed, packed.layout.with_next_R)
            rows.append(losses_R.float().cpu().view(len(batch), length - 1).numpy())
    losses_NL = np.concatenate(rows).astype(np.float64)
    if not np.isfinite(losses_NL).all():
        raise RevelaError(f"{lm.name} gives losses that are not finite: its weights are broken")
    stretches = np.array_split(losses_NL, PLACES, axis=1)
    means_NP = np.column_stack([stretch.mean(axis=1) for stretch in stretches])
    return {"next-token loss": profile(means_NP, SEGMENT_TENTHS, seed=seed)}


def spans_by_place(
    texts: Sequence[str],
    lm: EncoderDecoder,
    window: TokenWindow,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Profile]:
    """How often a span of ``SPAN`` tokens is written as it was, hidden at a random place of each of
    ten stretches in turn; the decoder begins with the span's sentinel, and chooses greedily.

    Args:
        texts: of ``window.size - SPARE`` tokens or a few fewer.
        lm: the encoder-decoder.
        window: its tokenizer.
        seed: of the places and the intervals.
        progress: show a bar.

    Raises:
        RevelaError: the texts are too short for ten such spans, or the tokenizer has no sentinel.
    """
    import torch

    ids = window.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    length = min(map(len, ids))
    if length < PLACES * SPAN:
        raise RevelaError(f"{length} tokens are too few for {PLACES} spans: raise --max-tokens")
    if not lm.sentinels:
        raise RevelaError(
            f"the tokenizer of {lm.name} has no sentinel (<extra_id_0>), by which a span is asked "
            "for: probe another model"
        )
    bounds, draw = (
        [round(place * length / PLACES) for place in range(PLACES + 1)],
        random.Random(seed),
    )
    asked = []
    for some in ids:
        for first, past in pairwise(bounds):
            start = draw.randint(first, past - SPAN)
            end = start + SPAN
            read = lm.around([*some[:start], lm.sentinels[0], *some[end:length]])
            asked.append((read, some[start:end]))
    written = []
    for start in tqdm(range(0, len(asked), LM_BATCH), unit="batch", disable=not progress):
        batch = torch.tensor([read for read, _ in asked[start : start + LM_BATCH]])
        written += lm.predict(batch, lm.sentinels[:1], SPAN).tolist()
    right_N = [found == span for found, (_, span) in zip(written, asked, strict=True)]
    right_NP = np.array(right_N, dtype=np.float64).reshape(len(texts), PLACES)
    return {"spans by place": profile(right_NP, SEGMENT_TENTHS, seed=seed)}


def plot_profiles(models: Mapping[str, Mapping[str, Profile]], path: Path, title: str = "") -> None:
    """Plot profiles as a PNG: a plot per test, a line per model with its 95 % intervals.

    Scores of several models differ in scale, so each line is then drawn minus its own mean.

    Args:
        models: profiles by test, by model.
        path: the PNG.
        title: above all plots.
    """
    with extra("report", "a plot"):
        from matplotlib.figure import Figure

    tests = list(dict.fromkeys(test for profiles in models.values() for test in profiles))
    columns, several = min(COLUMNS, len(tests)), len(models) > 1
    rows, legend = -(-len(tests) // columns), 0.25 * -(-len(models) // columns) if several else 0.0
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows + legend), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for test, axis in zip(tests, axes, strict=False):
        for i, (name, profiles) in enumerate(models.items()):
            if test in profiles:
                _draw(axis, profiles[test], name, f"C{i}", several)
        unit = UNITS.get(test, "cosine")
        unit += ", minus its mean" if several else ""
        axis.set(title=test, xlabel="place, tenths of the text", ylabel=unit, xlim=(-0.3, 10.3))
        axis.set_xticks(range(0, 11, 2))
        axis.grid(alpha=0.3)
    for axis in axes[len(tests) :]:
        axis.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=10, color="0.3")
    if several:
        lines = {line.get_label(): line for axis in axes for line in axis.get_lines()}
        place: Any = {"loc": "outside lower center", "ncols": columns}
        figure.legend(lines.values(), lines, frameon=False, fontsize=9, **place)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130)


def _draw(axis: Any, profile: Profile, name: str, colour: str, centred: bool) -> None:
    middle = fmean(place.value for place in profile.places) if centred else 0.0
    value = [place.value - middle for place in profile.places]
    low = [place.low - middle for place in profile.places]
    high = [place.high - middle for place in profile.places]
    axis.plot(profile.tenths, value, marker="o", markersize=4, color=colour, label=name)
    axis.fill_between(profile.tenths, low, high, color=colour, alpha=0.2, linewidth=0)
