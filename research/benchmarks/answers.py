r"""The signal of InfoNCE, DREAM, REPLUG and attention distillation on a fitted retriever, per pair.

    python -m research.benchmarks.answers --text TEXT/wikipedia_small.jsonl.gz
    python -m research.benchmarks.answers --text scifact/corpus.jsonl.gz --queries lm \
        --queries-file FILE --rows "cosines|InfoNCE|tau 0.2, gate 0.5"

Groups of 16 chunks, four each of four documents that the fitted retriever finds alike. A question
is the most telling sentence of a chunk, taken out of it, or was written by a language model; the
chunk is its answer. REPLUG has no questions: the first half of a chunk asks, the chunk itself is
left out, and only its siblings count. The signal on a pair is minus the derivative of the loss by
the pair's cosine, at the fitted retriever's cosines; for attention distillation, its target.

- answer: how often the signal raises the answer more than another chunk (AUC, mean over questions);
- siblings: how often it raises another chunk of the answer's document more than other chunks;
- pairs: how many chunks of a row share its signal (inverse of the sum of squared shares).

Intervals (95 %) are Student's t over groups.
"""

from __future__ import annotations

import argparse
import functools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from research.benchmarks.signals import (
    OWNER,
    PIECES,
    Signal,
    above,
    interval,
    like_documents,
    some_pieces,
)
from revela.corpus.arrow_list import ArrowList
from revela.device import autocast
from revela.groups.training_set import TrainingSet
from revela.lm.prompts import PromptMaker, of_group
from revela.objectives.attention_distillation import attended, standard
from revela.objectives.dream import DreamLoss
from revela.objectives.find_heads import query_heads
from revela.objectives.replug import likelihoods, ranking_divergence
from revela.settings import Recipe, presets
from revela.silence import silence_libraries
from revela.types import Chunk

TAUS, GATES, HEADS = (0.05, 0.2, 1.0), (0.2, 0.5, 0.9), (4, 48)
# Temperatures of the likelihoods and of the cosines.
REPLUG = ((0.001, 0.001), (0.1, 0.05), (0.1, 1.0))
FEW = 8  # words of an answer
Measures = dict[str, dict[str, float]]


class Teachers:
    """The signal of each objective on the pairs of one group, for a recipe of DREAM."""

    def __init__(self, signal: Signal, recipe: Recipe, rows: ArrowList[Chunk]) -> None:
        self.signal, self.recipe, self.make = signal, recipe, PromptMaker(signal.tokenizer, recipe)
        self.heads = [
            (a, b)
            for a, b, _ in query_heads(recipe, signal.lm, signal.tokenizer, signal.folder, rows)
        ]

    def dream(
        self,
        passages: list[str],
        questions: list[tuple[str, int]],
        tau: float,
        gate: float,
        heads: int,
        words: int | None,
        cosine_QB: Tensor,
    ) -> Tensor:
        """DREAM's signal; of the loss on the first ``words`` of an answer."""
        prompt, _ = self.make.with_answers(passages, questions)
        _, tail = self.make.with_answers(
            [" ".join(passage.split()[:words]) for passage in passages], questions
        )
        texts = of_group(prompt, tail, 0)
        objective = DreamLoss(
            torch.nn.Identity(),
            self.signal.lm,
            self.heads[:heads],
            tau=tau,
            gate=gate,
            group_size=len(OWNER),
        )
        with autocast(self.signal.device, self.signal.bf16):
            return minus_gradient(
                lambda c_QB: objective.answer_loss(
                    (c_QB / tau).softmax(dim=1), objective.gate_logit, *texts
                ),
                cosine_QB,
            )

    def attention(
        self,
        passages: list[str],
        questions: list[tuple[str, int]],
        heads: int,
        cosine_QB: Tensor | None = None,
    ) -> Tensor:
        """The heads' scores; with cosines, both together as in its target."""
        texts = of_group(*self.make.with_null_question(passages, questions), 0)
        with autocast(self.signal.device, self.signal.bf16):
            said_QB = attended(self.signal.lm, *texts, self.heads[:heads])
        return said_QB if cosine_QB is None else standard(said_QB) + standard(cosine_QB)

    def likelihoods(self, passages: Sequence[str]) -> Tensor:
        """REPLUG's log P(D_i | D_j), (B, B)."""
        with autocast(self.signal.device, self.signal.bf16):
            return likelihoods(
                self.signal.lm, *self.signal.tokens(passages), by_token=True
            ).double()

    def __call__(
        self, members: Sequence[Chunk], whole: Sequence[str]
    ) -> dict[str, Callable[[], dict[str, float]]]:
        """Name -> measures of one group; ``whole`` are the chunks with the sentences that
        were taken out of them.
        """
        recipe = self.recipe
        passages = [member.text for member in members]
        questions = [(member.query, i) for i, member in enumerate(members) if member.query]
        asked = [i for _, i in questions]
        cosine_QB = self.signal.cosines([query for query, _ in questions], passages)
        target_Q = torch.tensor(asked)
        signals: dict[str, Callable[[], Tensor]] = {
            "the fitted retriever's cosines": lambda: cosine_QB
        }
        for tau in TAUS[:2]:
            loss = partial(lambda c_QB, tau: F.cross_entropy(c_QB / tau, target_Q), tau=tau)
            signals[f"InfoNCE, tau {tau}"] = partial(minus_gradient, loss, cosine_QB)
        for heads in (4, recipe.objective.query_heads):
            signals[f"attention, {heads} heads"] = partial(
                self.attention, passages, questions, heads
            )
            signals[f"attention, {heads} heads and the retriever"] = partial(
                self.attention, passages, questions, heads, cosine_QB
            )
        dream = partial(self.dream, passages, questions)
        for tau, gate in product(TAUS, GATES):
            signals[f"DREAM, tau {tau}, gate {gate}"] = partial(
                dream, tau, gate, recipe.objective.query_heads, None, cosine_QB
            )
        usual = f"DREAM, tau {recipe.objective.tau}, gate {recipe.objective.gate}"
        for heads in HEADS:
            signals[f"{usual}, {heads} heads"] = partial(
                dream, recipe.objective.tau, recipe.objective.gate, heads, None, cosine_QB
            )
        signals[f"{usual}, the answers' first {FEW} words"] = partial(
            dream,
            recipe.objective.tau,
            recipe.objective.gate,
            recipe.objective.query_heads,
            FEW,
            cosine_QB,
        )
        found: dict[str, Callable[[], dict[str, float]]] = {}
        found |= {
            name: partial(lambda get: measures_of(get(), asked), signal)
            for name, signal in signals.items()
        }

        cosine_BB = self.signal.cosines(self.signal.halves(whole), whole).double()
        likelihoods_BB = functools.cache(lambda: self.likelihoods(whole))

        def of_replug(tau_lm: float, tau: float) -> dict[str, float]:
            signal_BB = minus_gradient(
                lambda c_BB: ranking_divergence(likelihoods_BB() / tau_lm, c_BB / tau), cosine_BB
            )
            return {
                what: value
                for what, value in measures_of(signal_BB, range(len(whole))).items()
                if what != "answer"
            }

        for tau_lm, tau in REPLUG:
            found[f"REPLUG, tau_lm {tau_lm}, tau {tau}"] = partial(of_replug, tau_lm, tau)
        return found


def minus_gradient(loss: Callable[[Tensor], Tensor], cosine: Tensor) -> Tensor:
    leaf = cosine.clone().requires_grad_()
    return -torch.autograd.grad(loss(leaf), leaf)[0]


def measures_of(signal_QB: Tensor, asked: Sequence[int]) -> dict[str, float]:
    """Quality of a signal on answers and siblings, by the names in the module docstring."""
    rows = []
    for signal_B, i in zip(signal_QB.double().numpy(), asked, strict=True):
        others, siblings = np.arange(len(OWNER)) != i, np.isin(OWNER, OWNER[i])
        size = np.abs(signal_B).sum()
        rows.append(
            {
                "answer": above(signal_B[[i]], signal_B[others]),
                "siblings": above(signal_B[others & siblings], signal_B[~siblings]),
                "pairs": 1 / ((signal_B / size) ** 2).sum() if size else 0.0,
            }
        )
    return {what: float(np.mean([row[what] for row in rows])) for what in rows[0]}


def measure(
    recipe: Recipe, text: Path, queries_file: Path | None, groups: int, rows: str
) -> Iterator[Measures]:
    """Per group, the measures of the losses whose names match ``rows``."""
    signal = Signal(recipe, text)
    # Held out as in training, so that its written questions fit.
    read = TrainingSet.read(recipe.but(queries_file=str(queries_file or "")), [text])
    chunks, asking = read.chunks, read.rows
    teachers, rng = Teachers(signal, recipe, asking), random.Random(0)
    whole: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        whole[chunk.document].append(chunk)
    asked: dict[int, list[Chunk]] = defaultdict(list)
    for row in asking:
        asked[row.document].append(row)
    pieces = some_pieces(asked.values(), groups, rng)
    texts = [[chunk.text for chunk in whole[some[0].document][:PIECES]] for some in pieces]
    for like in like_documents(signal, texts, groups, rng):
        losses = teachers(
            [row for i in like for row in pieces[i]], [text for i in like for text in texts[i]]
        )
        yield {name: tell() for name, tell in losses.items() if re.search(rows, name)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="documents")
    parser.add_argument("--queries", default="telling-sentence", help="as of revela train")
    parser.add_argument("--queries-file", type=Path, help="questions that a language model wrote")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--rows", default="", help="regular expression: only rows of such a name")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    silence_libraries()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    lm: dict[str, Any] = {"model": "embedded:smollm2-135m", "lm": "embedded:smollm2-135m"}
    recipe = Recipe.of(
        **presets()["dream"],
        **lm,
        queries=arguments.queries,
        max_queries=1000,
        threads=arguments.threads,
    )
    found = list(
        measure(recipe, arguments.text, arguments.queries_file, arguments.groups, arguments.rows)
    )
    columns = list(dict.fromkeys(what for values in found[0].values() for what in values))
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, first in found[0].items():
        cells = (
            interval([row[name][what] for row in found]) if what in first else ""
            for what in columns
        )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
