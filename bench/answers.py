"""What do InfoNCE, DREAM and REPLUG tell a fitted retriever, pair by pair, and at which temperatures and gates?

    python bench/answers.py --text TEXT/wikipedia_small.jsonl.gz

Groups of 16 chunks, four each of four documents that the fitted retriever finds alike. A question is a chunk's most telling sentence,
taken out of it; what is left is its answer. REPLUG has no questions: a chunk's first half asks, the chunk itself is left out, and only
its siblings count. The signal on a pair is minus the derivative of the loss by the pair's cosine, at the fitted retriever's cosines.
Said of it:

- answer: how often the answer is told to rise more than another chunk (mean over questions);
- siblings: how often another chunk of the answer's document is told to rise more than a stranger;
- pairs told: of a row's chunks, how many share its signal (the inverse of the sum of squared shares).

Intervals (95 %) are Student's t over groups.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from revela.config import PRESETS, Recipe
from revela.data.queries import with_telling_sentences
from revela.data.store import stored
from revela.models.quiet import quieten
from revela.models.retriever import autocast
from revela.objectives.dream import Dream
from revela.objectives.questions import of_group
from revela.objectives.replug import likelihoods, ranking_divergence
from revela.train.collate import PromptMaker, first_half
from revela.train.heads import query_heads
from revela.types import Chunk
from signals import DOCUMENTS, OWNER, PIECES, SOME, Signal, like_documents, some_pieces, told

TAUS, GATES = (0.05, 0.2, 1.0), (0.2, 0.5, 0.9)
REPLUG = (0.001, 0.001), (0.1, 0.05), (0.1, 1.0)  # temperatures of the likelihoods and of the cosines
TINY = 1e-30
FEW = 8  # words of an answer

Loss = Callable[[Tensor], Tensor]
"""Of the cosines of questions and chunks."""


class Answers:
    """The losses of one group's questions, for a recipe of DREAM."""

    def __init__(self, signal: Signal, asking: list[Chunk]) -> None:
        self.signal, self.recipe = signal, Recipe(**PRESETS["dream"])
        self.make = PromptMaker(signal.tokenizer, self.recipe)
        ranking = query_heads(self.recipe, signal.lm, signal.tokenizer, signal.folder, stored(Chunk, asking), print)
        heads = [(layer, head) for layer, head, _ in ranking[: self.recipe.query_heads]]
        self.dream = Dream(torch.nn.Identity(), signal.lm, heads, tau=1.0, gate=0.5, group_size=len(OWNER))

    def of_dream(self, passages: list[str], questions: list[tuple[str, int]], tau: float, gate: float, words: int | None = None) -> Loss:
        """Its loss; on the first ``words`` of an answer."""
        prompt, _ = self.make.with_answers(passages, questions)
        _, tail = self.make.with_answers([" ".join(passage.split()[:words]) for passage in passages], questions)
        texts = of_group(prompt, tail, 0)

        def loss(cosine_QB: Tensor) -> Tensor:
            with autocast(self.signal.device, self.signal.bf16):
                return self.dream.answer_loss((cosine_QB / tau).softmax(dim=1), torch.tensor(gate).logit(), *texts)

        return loss

    def likelihoods(self, passages: list[str]) -> Tensor:
        """REPLUG's log P(D_i | D_j), (B, B)."""
        side = self.signal.tokenizer(
            passages, truncation=True, max_length=self.recipe.lm_tokens, padding=True, padding_side="right", return_tensors="pt"
        )
        with autocast(self.signal.device, self.signal.bf16):
            return likelihoods(self.signal.lm, side["input_ids"], side["attention_mask"], by_token=True)


def told_of(signal_QB: np.ndarray, asked: Sequence[int]) -> dict[str, float]:
    """What a signal tells of the answers and of their siblings, by the names at the head of this file."""
    rows = []
    for signal_B, i in zip(signal_QB.astype(float), asked, strict=True):
        others, siblings = np.arange(len(OWNER)) != i, np.isin(OWNER, OWNER[i])
        shares = np.abs(signal_B) / max(np.abs(signal_B).sum(), TINY)
        rows.append(
            {
                "answer": above(signal_B[[i]], signal_B[others]),
                "siblings": above(signal_B[others & siblings], signal_B[~siblings]),
                "pairs told": 1 / max((shares**2).sum(), TINY) if shares.any() else 0.0,
            }
        )
    return {what: float(np.mean([row[what] for row in rows])) for what in rows[0]}


def above(some: np.ndarray, others: np.ndarray) -> float:
    """How often one of some is above one of the others; equal ones count half."""
    return float(((some[:, None] > others) + 0.5 * (some[:, None] == others)).mean())


def measure(signal: Signal, groups: int, rng: random.Random) -> Iterator[dict[tuple[str, str], float]]:
    """Of each group, (loss, what): what every loss tells."""
    pieces = some_pieces(signal, max(SOME, DOCUMENTS * groups), rng)
    whole = [Chunk(i, text) for i, texts in enumerate(pieces) for text in texts]
    asking = list(with_telling_sentences(whole))
    answers, encoder = Answers(signal, asking), signal.encoder
    default = answers.recipe
    for documents in like_documents(signal, pieces, groups, rng):
        places = [PIECES * document + k for document in documents for k in range(PIECES)]
        passages = [asking[place].text for place in places]
        questions = [(asking[place].query, i) for i, place in enumerate(places) if asking[place].query]
        asked = [i for _, i in questions]
        cosine_QB = torch.tensor(encoder.encode_queries([query for query, _ in questions]) @ encoder.encode_passages(passages).T)
        found = {"the fitted retriever's cosines": told_of(cosine_QB.numpy(), asked)}

        def note(name: str, loss: Loss, cosine: Tensor, asked: Sequence[int], found: dict[str, dict[str, float]] = found) -> None:
            leaf = cosine.clone().requires_grad_()
            found[name] = told_of(-torch.autograd.grad(loss(leaf), leaf)[0].numpy(), asked)

        for tau in TAUS:
            note(f"InfoNCE, tau {tau}", partial(info_nce_of_cosines, target_Q=torch.tensor(asked), tau=tau), cosine_QB, asked)
        for tau, gate in product(TAUS, GATES):
            note(f"DREAM, tau {tau}, gate {gate}", answers.of_dream(passages, questions, tau, gate), cosine_QB, asked)
        few = answers.of_dream(passages, questions, default.tau, default.gate, FEW)
        note(f"DREAM, tau {default.tau}, gate {default.gate}, the answers' first {FEW} words", few, cosine_QB, asked)

        chunks = [whole[place].text for place in places]
        halves = [first_half(text, signal.tokenizer, default.lm_tokens) for text in chunks]
        cosine_BB = torch.tensor(encoder.encode_queries(halves) @ encoder.encode_passages(chunks).T)
        likelihoods_BB = answers.likelihoods(chunks)
        for tau_lm, tau in REPLUG:
            loss = partial(divergence_of_cosines, likelihoods_BB / tau_lm, tau)
            note(f"REPLUG, tau_lm {tau_lm}, tau {tau}", loss, cosine_BB, range(len(chunks)))
        yield {(name, what): value for name, told in found.items() for what, value in told.items()}


def info_nce_of_cosines(cosine_QB: Tensor, target_Q: Tensor, tau: float) -> Tensor:
    return F.cross_entropy(cosine_QB / tau, target_Q)


def divergence_of_cosines(teacher_BB: Tensor, tau: float, cosine_BB: Tensor) -> Tensor:
    return ranking_divergence(teacher_BB, cosine_BB / tau)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="documents")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    quieten()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    found = list(measure(Signal(Recipe(), arguments.text), arguments.groups, random.Random(0)))
    columns = list(dict.fromkeys(what for _, what in found[0]))
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name in dict.fromkeys(name for name, _ in found[0]):
        cells = (told([row[name, what] for row in found]) for what in columns)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
