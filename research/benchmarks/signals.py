"""How well Revela's training signal separates chunks of one document from others, per pair.

    python -m research.benchmarks.signals --text TEXT/wikipedia_small.jsonl.gz --what siblings
    python -m research.benchmarks.signals --text TEXT/wikipedia_small.jsonl.gz --what duplicates

Groups of 16 chunks, four each of four documents. The signal on a pair is minus the derivative of
the LM's loss by the pair's score, before the softmax that makes Sim of it. It is taken where all
scores are equal, and where the fitted retriever has them. Its quality is how well it separates
siblings, chunks of one document, from other chunks (AUC, mean over rows).

``siblings``: documents that the fitted retriever finds alike; the retriever's own cosines beside
both signals. ``duplicates``: random documents, and one chunk of another document replaced by a
near-copy of a chunk (one word in twenty changed); for the row of the chunk that has a copy, the
part of the signal on the copy, and the quality of the rest, with and without the copy.

Intervals (95 %) are Student's t over groups.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from revela.corpus.chunk import chunk
from revela.corpus.read import read_corpus
from revela.device import autocast, compute_device, uses_bf16
from revela.groups.training_set import training_chunks
from revela.lm.language_model import load_language_model, load_tokenizer
from revela.objectives.find_heads import sibling_heads
from revela.objectives.revela import RevelaLoss, gates_on_heads, others
from revela.retriever.build import untrained_retriever
from revela.retriever.encode import RetrieverEncoder
from revela.retriever.fit import fit_to_corpus
from revela.retriever.tokens import halves
from revela.settings import Recipe
from revela.silence import silence_libraries
from revela.weights import resolve

DOCUMENTS, PIECES = 4, 4  # of a group
OWNER = np.repeat(np.arange(DOCUMENTS), PIECES)
COPIED, REPLACED = 0, DOCUMENTS * PIECES - 1  # a copy of the first chunk replaces the last
CHANGED = 0.05  # of a copy's words
SOME = 600  # documents to choose similar ones from


def near_copy(text: str, rng: random.Random) -> str:
    """The same words, some replaced by other words of the text."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), max(1, int(CHANGED * len(words)))):
        words[place] = rng.choice(words)
    return " ".join(words)


def auc(signal_B: np.ndarray, keep_B: np.ndarray, row: int) -> float:
    """AUC of siblings against other chunks in the row of a chunk, among those kept."""
    sibling_B = np.isin(OWNER, OWNER[row])
    siblings, others = signal_B[keep_B & sibling_B], signal_B[keep_B & ~sibling_B]
    return above(siblings, others)


def above(some: np.ndarray, others: np.ndarray) -> float:
    """How often a value of the first is above one of the second (AUC); ties count half."""
    return float(((some[:, None] > others) + 0.5 * (some[:, None] == others)).mean())


def mean_auc(signal_BB: np.ndarray) -> float:
    rows = range(len(signal_BB))
    return float(
        np.mean([auc(signal_BB[row], np.arange(len(signal_BB)) != row, row) for row in rows])
    )


def interval(values: Sequence[float]) -> str:
    margin = student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.3f} ± {margin:.3f}"


class Signal:
    """The signal of an LM with gates on each pair of a group."""

    def __init__(self, recipe: Recipe, corpus: Path) -> None:
        documents, _ = read_corpus([corpus])
        self.recipe, self.device, folder = (
            recipe,
            compute_device(),
            resolve("embedded:smollm2-135m"),
        )
        self.bf16 = uses_bf16(recipe.training.precision, self.device)
        self.lm, self.tokenizer = (
            load_language_model(folder, bf16=self.bf16).to(self.device),
            load_tokenizer(folder),
        )
        ranking = sibling_heads(recipe, self.lm, self.tokenizer, folder, documents)
        first = int(recipe.objective.gate_first_layer * self.lm.n_layers)
        heads = [(layer, head) for layer, head, _ in ranking if layer >= first][
            : recipe.objective.gate_heads
        ]
        model = untrained_retriever(recipe, folder, documents)
        texts = [chunk.text for chunk in training_chunks(recipe, documents)]
        seed = recipe.training.seed
        fit_to_corpus(model, texts, recipe.fit, seed=seed, bf16=self.bf16)
        self.encoder, gates_LH = (
            RetrieverEncoder(model, self.bf16),
            gates_on_heads(self.lm, recipe.objective.gate, heads),
        )
        self.objective = RevelaLoss(
            model, self.lm, tau=recipe.objective.tau, gates_LH=gates_LH, v_norm=False
        )
        self.documents, self.folder = documents, folder

    def equal(self, texts: Sequence[str]) -> Tensor:
        """Zeros (B, B)."""
        return torch.zeros(len(texts), len(texts))

    def fitted(self, texts: Sequence[str]) -> Tensor:
        """Cosines (B, B), over the standard deviation of their row, of the fitted retriever, first
        halves as queries.
        """
        cosine_BB = self.cosines(self.halves(texts), texts)
        return cosine_BB / others(cosine_BB).std(dim=1, correction=0, keepdim=True)

    def halves(self, texts: Sequence[str]) -> list[str]:
        return halves(texts, self.tokenizer, self.recipe.lm.lm_tokens)

    def cosines(self, queries: Sequence[str], passages: Sequence[str]) -> Tensor:
        """(Q, B), by the fitted retriever."""
        return torch.tensor(
            self.encoder.encode_queries(queries) @ self.encoder.encode_passages(passages).T
        )

    def tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids and mask, (B, L), as the LM reads them."""
        side = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.recipe.lm.lm_tokens,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        ).to(self.device)
        return side["input_ids"], side["attention_mask"]

    def __call__(self, texts: Sequence[str], scores_BB: Tensor) -> np.ndarray:
        """(B, B)."""
        with autocast(self.device, self.bf16):
            packed = self.lm.pack(*self.tokens(texts))
            signal_BB: np.ndarray = (
                self.objective.signal(packed, [scores_BB.to(self.device)]).cpu().numpy()
            )
        return signal_BB


Piece = TypeVar("Piece")


def some_pieces(
    cut: Iterable[Sequence[Piece]], groups: int, rng: random.Random
) -> list[Sequence[Piece]]:
    """The first chunks of as many documents as the groups need, of those long enough."""
    long_enough = [pieces[:PIECES] for pieces in cut if len(pieces) >= PIECES]
    return rng.sample(long_enough, min(len(long_enough), max(SOME, DOCUMENTS * groups)))


def duplicates(
    signal: Signal, pieces: Sequence[Sequence[str]], groups: int, rng: random.Random
) -> Iterator[dict[str, float]]:
    """Per group, the effect of a near-copy."""
    kept = np.isin(np.arange(len(OWNER)), (COPIED, REPLACED), invert=True)
    for start in range(0, DOCUMENTS * groups, DOCUMENTS):
        plain = [text for texts in pieces[start : start + DOCUMENTS] for text in texts]
        copied = [*plain[:REPLACED], near_copy(plain[COPIED], rng)]
        found = {}
        for place, scores in (("equal scores", signal.equal), ("fitted scores", signal.fitted)):
            rows = {
                kind: signal(texts, scores(texts))
                for kind, texts in (("plain", plain), ("copied", copied))
            }
            for kind, row_BB in rows.items():
                row_B = row_BB[COPIED]
                found[f"{place}, {kind}: AUC of siblings, the replaced chunk left out"] = auc(
                    row_B, kept, COPIED
                )
                share = np.abs(row_B[REPLACED]) / np.abs(row_B).sum()
                found[f"{place}, {kind}: part of the row's signal on the replaced chunk"] = float(
                    share
                )
            with_, without = rows["copied"], rows["plain"]
            size = np.abs(with_[COPIED][kept]).sum() / np.abs(without[COPIED][kept]).sum()
            found[f"{place}: signal on the others, with the copy over without"] = float(size)
            unmoved = [
                np.corrcoef(with_[row][:REPLACED], without[row][:REPLACED])[0, 1]
                for row in range(1, REPLACED)
            ]
            found[f"{place}: correlation of the other rows with themselves, without and with"] = (
                float(np.mean(unmoved))
            )
        yield found


def like_documents(
    signal: Signal, pieces: Sequence[Sequence[str]], groups: int, rng: random.Random
) -> Iterator[list[int]]:
    """Documents of each group: a random one and those the fitted retriever finds most similar."""
    vectors = signal.encoder.encode_passages([" ".join(texts) for texts in pieces])
    for _ in range(groups):
        first = rng.randrange(len(pieces))
        yield np.argsort(-(vectors @ vectors[first]))[:DOCUMENTS].tolist()  # the first is itself


def siblings(
    signal: Signal, pieces: Sequence[Sequence[str]], groups: int, rng: random.Random
) -> Iterator[dict[str, float]]:
    """Per group, how well the retriever and its teachers separate siblings from other chunks."""
    for documents in like_documents(signal, pieces, groups, rng):
        texts = [text for i in documents for text in pieces[i]]
        fitted = signal.fitted(texts)
        equal_BB, fitted_BB = signal(texts, signal.equal(texts)), signal(texts, fitted)
        yield {
            "fitted retriever: cosines": mean_auc(fitted.numpy()),
            "LM: signal at fitted scores (what gated training uses)": mean_auc(fitted_BB),
            "LM: signal at equal scores": mean_auc(equal_BB),
            "LM: signal at equal scores, both ways": mean_auc(equal_BB + equal_BB.T),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="documents")
    parser.add_argument("--what", choices=["siblings", "duplicates"], default="siblings")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    silence_libraries()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rng = random.Random(0)
    recipe = Recipe.of()
    signal = Signal(recipe, arguments.text)
    measure = siblings if arguments.what == "siblings" else duplicates
    cut = (
        [c.text for c in chunk(document, 0, recipe.corpus.chunk_words)]
        for document in signal.documents
    )
    pieces = some_pieces(cut, arguments.groups, rng)
    found = list(measure(signal, pieces, arguments.groups, rng))
    for name in sorted(found[0]):
        print(f"{name}: {interval([row[name] for row in found])}")


if __name__ == "__main__":
    main()
