"""DREAM (Tang & Yang, 2026; arXiv 2606.24667): a retriever's scores steer an LM's attention where
the LM looks for an answer.

    w   = softmax_i( cos(q, d_i) / tau )
    A~  = w_i (A within D_i, divided by its sum) on the tokens of D_i, else 0
    A'  = (1 - g) A + g A~
    L   = mean over questions of the mean over tokens of the answer of
          -log p(token | those before it)                        (eq. 10)

- q, d_i: the retriever's vectors of the question and of candidate chunk D_i.
- A: the LM's attention in the rows of the question (with the words around it, lm/prompts.py) and in
  the query-focused heads, those that look from a question to its answer. A' replaces it.
- g, tau: the gate and the temperature, both trained.

A frozen LM reads the candidates, then a question, then the chunk that answers it. A retriever that
gives the answer more weight lowers the loss. A~ times the values is document attention. The
candidates are read once, without a graph, and all questions continue that reading. This is exact,
because nothing before a question depends on w.

The query-focused heads (after QRHead, Zhang et al., 2025, without its filter of outlying tokens):

    score(q, d) = mean over q's rows of sum_{m in d} A_m         (eqs. 4, 5)
                  - the same for the question "N/A"

The LM reads B candidates d and then Q questions q, each of which continues the candidates' text. A
head's score is the nDCG@10 of the candidate that answers q, mean over questions.

Differs from the paper, and the setting of the preset dream-paper that makes it equal:
- Six lower layers with a fit and mean pooling: --layers 0, --pooling last, --token-weighting 0,
  --whitening 0, --lexical 0, --lower-case no; no prompts: --query-prompt '' --passage-prompt ''.
- LoRA of rank 64: --lora-rank 32, --lora-alpha 64. One group a step: --groups-per-step 32.
- SmolLM2-135M judges and writes the questions: --lm meta-llama/Llama-3.1-8B-Instruct, --query-lm
  Qwen/Qwen3-14B.
- A group is runs of chunks of one or more documents, and every chunk with a question is asked for
  in turn, as all questions share one reading: --groups split, --targets 1.
- About 4,000 chunks are asked about, and read again and again for 20 minutes: --max-queries 48000
  --max-epochs 1 --max-steps 1500 --max-minutes 0.
- 64 questions find the heads: --heads published (table 3) if the judge is that of the paper,
  otherwise --probe-questions 5000.
- The best state by a label-free check is kept: --keep last.

Differs still, in dream-paper too:
- The paper's instruction for the questions (appendix A) is not in our sources: --question-prompt
  instruction is ours; the default is three examples. A target whose question is rejected
  (generated_queries.py) is not replaced: its document is left out, and in place of those left out
  the last steps read the first documents again.
- A document is cut at ends of sentences near 16 equal parts, and one with less than five words a
  chunk is left out; the paper does not say how. Chunks are truncated to --lm-tokens 156.
- The start of tau and g, and the learning rate (0.2, 0.5 and 1e-4), are ours, as the paper's are
  not known: --tau, --gate, --learning-rate. So is the rate of tau and g: that of the retriever, at
  which tau goes from 0.2 to 0.186 at most in 1,500 steps; --scalar-rate-factor gives another.
- Weights w of at most 1e-4 are skipped. One g for all heads.
- 5 % of the documents are held out, near-duplicates dropped: --held-out 0, --near-duplicates 0.

Ablations: --heads random, --heads random-middle (of the middle third of the layers; figure 2 does
not say which), --query-heads (figure 3), --lm-lora (figure 5: the judge is trained, too),
--group-size (figure 6). With --lm-lora the reading of the candidates has a graph.

Read next: lm/document_attention.py (A~ V), lm/prompts.py (what the LM reads), lm/language_model.py,
generated_queries.py (the questions), groups/strategies.py, base.py, heads.py; docs/papers.md has
every equation and setting in the order of the paper. The control is InfoNCE on the same queries:
contrastive.py, preset dream-infonce.

Cost: one reading of all candidates, and one forward and backward pass over questions and answers.
Memory: the graph of the questions and answers of one group; the candidates are a key-value cache.
When to use it: with written queries, and an LM that answers by its query-focused heads.
Measured: eight minutes of one core from a fitted start take SciFact from 0.583 to 0.589 and leave
CosQA at 0.364; its control dream-infonce gives 0.559 and 0.380.

Shapes: Q questions, B candidates of a group, S tokens of the candidates' texts among the P of their
text, T tokens of the questions and answers, R of them question rows; N candidates of a batch (in
heads' scores: tokens of all tails), K of H heads, G key-value heads, D width of a head or a vector.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.terminal import progress_bar
from revela.text.spool import ArrowList
from revela.training.device import Tensors, on_cpu, sent
from revela.training.generated_queries import GeneratedQueries
from revela.training.groups.strategies import (
    QUERIES_PER_DOCUMENT,
    Groups,
    document_groups,
    spread_groups,
    with_queries,
)
from revela.training.lm.document_attention import (
    EPSILON,
    DocumentWeights,
    Kernel,
    by_layer,
    document_attention,
    select_heads,
)
from revela.training.lm.language_model import Attended, LanguageModel
from revela.training.lm.prompts import (
    ANSWER,
    QUESTION_TOKENS,
    PromptMaker,
    Questions,
    of_group,
    read_candidates,
)
from revela.training.methods.base import (
    BuildContext,
    Collate,
    DocumentAttention,
    Heads,
    RetrieverLoss,
    Row,
    detached_backward,
    load_lm,
)
from revela.training.methods.heads import Head, cached_ranking, heads_from_file, ranked_heads
from revela.training.settings import (
    NO_FIT,
    Context,
    PositiveFloat,
    Preset,
    Rare,
    Retriever,
    checked,
)
from revela.types import Chunk

log = logging.getLogger(__name__)

DEPTH = 10  # of a head's nDCG
JUDGE = "Llama-3.1-8B-Instruct"
# The (layer, head) pairs of table 3, of JUDGE, which has 32 layers of 32 heads.
PUBLISHED_HEADS = [(13, 18), (14, 22), (14, 13), (14, 31), (14, 20), (13, 1), (13, 13), (17, 24)]
PUBLISHED_HEADS += [(16, 19), (17, 26), (16, 1), (16, 8), (20, 1), (24, 27), (16, 25), (13, 21)]

KINDS_OF_HEADS = "", "published", "random", "random-middle"
PRESETS: dict[str, Preset] = {
    # The start that all methods have here, so that only the method differs.
    "dream": {"method": "dream"},
    # As published; the header says what is not known.
    "dream-paper": {"method": "dream", "query_heads": 16, "tau": 0.2, "gate": 0.5}
    | {"heads": "published", "probe_questions": 5000, "lm": f"meta-llama/{JUDGE}"}
    | {"groups": "split", "targets": 1, "max_queries": 48_000}
    | {"query_lm": "Qwen/Qwen3-14B", "question_prompt": "instruction"}
    | {"offline_model": "", "layers": 0, "pooling": "last", "lower_case": "no"}
    | {"query_prompt": "", "passage_prompt": "", "lora_rank": 32, "lora_alpha": 64}
    | NO_FIT
    | {"groups_per_step": 32, "max_steps": 1500, "max_epochs": 1}
    | {"max_minutes": 0.0, "keep": "last"},
    # The control: InfoNCE on the same queries, against the other chunks of the group.
    "dream-infonce": {"method": "contrastive-pairs"},
}


@checked
class Dream(DocumentAttention):
    """Learn from an LM's loss on answers, with scores injected into query-focused heads."""

    name = "dream"
    reads = "queries"
    kind_of_heads = "questions"
    learned_from = "{model} learned to score texts as {lm} needs them to answer questions."

    tau: PositiveFloat = 0.2
    "Initial temperature of the cosines; it is trained."
    gate: float = Field(default=0.5, gt=0, lt=1)
    "Initial gate g: share of the retriever in the attention of the heads; it is trained."
    query_heads: PositiveInt = 16
    "Use this many heads: the best that look from a question to its answer."
    heads: Rare[str] = ""
    """JSON file of the heads to use, from revela heads --out with this --method; published: the
    paper's 16, for at most so many --query-heads and the judge Llama-3.1-8B-Instruct, or else those
    that are found; random, or random-middle (of the middle third of the layers): drawn by the seed,
    as controls. Empty: find them."""
    probe_questions: Rare[PositiveInt] = 64
    "Find the heads by this many questions."
    scalar_rate_factor: Rare[PositiveFloat] = 1.0
    "Learning rate of tau and the gate, as a multiple of --learning-rate."
    lm_lora: Rare[bool] = False
    "Train the LM too, by LoRA of the retriever's rank; otherwise it is frozen."

    def refuse(self, retriever: Retriever, context: Context) -> None:
        if self.heads not in KINDS_OF_HEADS and not Path(self.heads).is_file():
            raise RevelaError(
                f"--heads {self.heads} does not exist: give a file of revela heads, or one of "
                f"{', '.join(KINDS_OF_HEADS[1:])}"
            )

    def lm_length(self, size: int, tokens: int) -> int:
        return (size + 1) * (tokens + 8) + QUESTION_TOKENS

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        lm, tokenizer, folder = load_lm(parts, self.lm_lora)
        size, tokens = parts.groups.group_size, parts.lm.lm_tokens
        prompts, training = PromptMaker(tokenizer, tokens, size), parts.training
        rows, written, source = parts.rows, parts.written, parts.queries.queries

        def choose_heads() -> Heads:
            kind, number, seed = self.heads, self.query_heads, training.seed
            if kind in ("random", "random-middle"):
                return random_heads(lm, number, seed, kind == "random-middle")
            if kind == "published" and is_judge(lm) and number <= len(PUBLISHED_HEADS):
                return PUBLISHED_HEADS[:number]
            if kind == "published":
                log.info(f"the published heads are {len(PUBLISHED_HEADS)} of {JUDGE}: searching")
            if kind in ("", "published"):
                ranking = query_heads(
                    lm, prompts, folder, rows, written, source, seed, self.probe_questions
                )
            else:
                ranking = heads_from_file(Path(kind), "questions", folder)
            return [(layer, head) for layer, head, _ in ranking[:number]]

        heads = parts.heads(choose_heads)
        names = " ".join(f"{layer}-{head}" for layer, head in heads)
        do = "are random" if self.heads.startswith("random") else "look from questions to answers"
        log.info(f"{len(heads)} heads that {do}: {names}")
        loss = DreamLoss(
            parts.model,
            lm,
            heads,
            tau=self.tau,
            gate=self.gate,
            scalar_times=self.scalar_rate_factor,
            kernel=self.kernel,
            **parts.batching,
        )
        return loss, PromptBatches(parts, prompts)


def is_judge(lm: LanguageModel) -> bool:
    """Whether this is the paper's judge, by its name and size."""
    name = lm.name.partition("@")[0].rpartition("/")[2]
    return name == JUDGE and (lm.n_layers, lm.n_heads) == (32, 32)


def random_heads(lm: LanguageModel, number: int, seed: int, middle: bool) -> Heads:
    """Random (layer, head) pairs, of all layers or the ``middle`` third."""
    cut = lm.n_layers // 3 if middle else 0
    pairs = list(product(range(cut, lm.n_layers - cut), range(lm.n_heads)))
    return random.Random(seed).sample(pairs, min(number, len(pairs)))


@dataclass(frozen=True)
class PromptBatches:
    """Collates queries and candidates for the retriever, and prompts for the LM."""

    parts: BuildContext
    prompts: PromptMaker

    def __call__(self, rows: Sequence[Row]) -> Tensors:
        questions = [(row["query"], i) for i, row in enumerate(rows) if row["query"]]
        texts = [row["text"] for row in rows]
        prompt, tail = self.prompts.with_answers(texts, questions)
        return {
            **self.parts.sides([query for query, _ in questions], texts),
            **{f"prompt_{k}": v for k, v in prompt.items()},
            **{f"tail_{k}": v for k, v in tail.items()},
        }


class Injection:
    """The ``Mix`` (lm/language_model.py) of DREAM: A' in the question rows of the selected heads.

    Args:
        weights_QB: w.
        questions: the tails, and the key-value cache of the candidates.
        heads: (layer, head) pairs.
        gate: g.
        kernel: see document_attention.
    """

    def __init__(
        self, weights_QB: Tensor, questions: Questions, heads: Heads, gate: Tensor, kernel: Kernel
    ) -> None:
        lengths, counts = questions.lengths, questions.counts
        self.documents = DocumentWeights(weights_QB, lengths, counts, EPSILON)
        self.questions, self.gate, self.kernel = questions, gate, kernel
        self.heads = by_layer(sorted(heads))

    def __call__(self, layer: int, own_HTD: Tensor, inputs: Attended) -> Tensor:
        if layer not in self.heads:
            return own_HTD
        rows_R, memory = self.questions.rows_R, self.questions.memory
        heads_K = sent(torch.tensor(self.heads[layer]), own_HTD.device)
        read = (side[layer][:, self.questions.places_S] for side in (memory.keys, memory.values))
        qkv = select_heads(heads_K, inputs.query_HTD[:, rows_R], *read)
        cross_KRD = document_attention(*qkv, self.documents, scale=inputs.scale, kernel=self.kernel)
        cells = heads_K[:, None], rows_R[None]
        own_KRD = own_HTD[cells]
        mixed_KRD = own_KRD + self.gate.to(own_HTD.dtype) * (cross_KRD.to(own_HTD.dtype) - own_KRD)
        return own_HTD.index_put(cells, mixed_KRD)


class DreamLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the language model.
        heads: (layer, head) pairs to inject into.
        tau: initial temperature; its logarithm is trained, so it stays positive.
        gate: initial g; its logit is trained, so it stays in (0, 1).
        scalar_times: factor of the learning rate of tau and g.
        kernel: see document_attention.
        batching: see RetrieverLoss.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        heads: Sequence[tuple[int, int]],
        *,
        tau: float,
        gate: float,
        scalar_times: float = 1.0,
        kernel: Kernel = "auto",
        **batching: int,
    ) -> None:
        super().__init__(model, tau=tau, **batching)
        self.lm, self.heads, self.kernel = lm, list(heads), kernel
        self.scalar_times = scalar_times
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)))
        self.gate_logit = nn.Parameter(torch.tensor(math.log(gate / (1 - gate))))

    def learning_rate_multipliers(self) -> dict[nn.Parameter, float]:
        """Factors of the learning rate."""
        return dict.fromkeys((self.log_tau, self.gate_logit), self.scalar_times)

    def forward(self, features: Sequence[Tensors]) -> Tensor:
        """Loss in nats per token of an answer: the mean over groups of L.

        Args:
            features: questions and candidates for the retriever; prompt and tail for the LM, which
                are each group's candidates, and the questions and answers that follow (see
                training/lm/prompts.py). Groups without a question are skipped.
        """
        question, passage, prompt, tail = features
        self.logged = {"tau": self.log_tau.detach().exp, "gate": self.gate_logit.detach().sigmoid}
        question_QD, passage_ND = self.embed(question), self.embed(passage)
        passages = self.groups(passage_ND)
        counts = on_cpu(tail["group"]).bincount(minlength=len(passages)).tolist()
        pairs = zip(torch.split(question_QD, counts), passages, strict=True)
        losses = []
        for i, (own_QD, passage_BD) in enumerate(pairs):
            if not len(own_QD):
                continue
            weights_QB = (own_QD @ passage_BD.T / self.log_tau.exp()).softmax(dim=-1)
            loss_of = partial(self.answer_loss, *of_group(prompt, tail, i))
            if not self.lm.trainable:
                loss_of = partial(detached_backward, loss_of)
            losses.append(loss_of(weights_QB, self.gate_logit))
        return torch.stack(losses).mean()

    def answer_loss(
        self,
        prompt: dict[str, Tensor],
        tail: dict[str, Tensor],
        weights_QB: Tensor,
        gate_logit: Tensor,
    ) -> Tensor:
        """L of one group in nats, with the weights w and the logit of g."""
        questions = read_candidates(self.lm, prompt, tail)
        inject = Injection(weights_QB, questions, self.heads, gate_logit.sigmoid(), self.kernel)
        rows_R = on_cpu(questions.tails.layout.with_next_R)
        before_answer_R = sent(rows_R[questions.role_T[rows_R + 1] == ANSWER], weights_QB.device)
        losses_R = self.lm.token_losses(
            questions.tails, before_answer_R, mix=inject, prefix=questions.memory
        )
        counts = (on_cpu(tail["role"]) == ANSWER).sum(dim=1).tolist()
        return torch.stack([losses.mean() for losses in torch.split(losses_R, counts)]).mean()


def query_heads(
    lm: LanguageModel,
    prompts: PromptMaker,
    folder: Path,
    rows: ArrowList[Chunk],
    written: GeneratedQueries | None,
    source: str,
    seed: int,
    probe_questions: int,
) -> list[Head]:
    """Rank heads by how they look from a question to its answer, in nDCG@10.

    ``written`` has the queries of ``rows`` if they are written during training; ``source`` is
    ``--queries``.
    """
    # Stored groups are in another order.
    rows = rows.select(np.argsort(rows.column("document"), kind="stable"))
    strategy = spread_groups if source in QUERIES_PER_DOCUMENT else document_groups
    order: Groups = partial(strategy, rows.column("document"), prompts.group_size, seed)
    row: Callable[[int], Chunk] = rows.__getitem__
    if written is None:
        order = with_queries(rows, order, "queries")
    else:  # a copy: training must not depend on the questions asked here
        written = GeneratedQueries(written.lm, rows, written.is_target_R)
        order, row = written.groups(order), written.row
    groups, n_questions = list[list[Chunk]](), 0
    for group in order(0):
        groups.append([row(i) for i in group])
        n_questions += sum(bool(member.query) for member in groups[-1])
        if n_questions >= probe_questions:
            break

    def probe() -> list[Head]:
        shown = progress_bar("probing heads", "group", groups)
        return ranked_heads(score_query_heads(lm, map(prompts.head_example, shown)))

    probed = [[(member.text, member.query) for member in group] for group in groups]
    ranking = cached_ranking("questions", lm, folder, [prompts.lm_tokens, probed], probe)
    if is_judge(lm):
        best = {(layer, head) for layer, head, _ in ranking[: len(PUBLISHED_HEADS)]}
        found = len(best.intersection(PUBLISHED_HEADS))
        log.info(f"{found} of the {len(PUBLISHED_HEADS)} published heads are among as many best")
    return ranking


class AttentionMass:
    """A ``Mix`` that only records how much questions attend to the candidates' text.

    ``by_layer[layer]`` is the attention of each head, mean over the rows of each question, (H, Q,
    P).
    """

    def __init__(self, questions: Questions) -> None:
        self.questions = questions
        tail_N = torch.repeat_interleave(torch.tensor(questions.tails.lengths))
        self.tail_N = sent(tail_N, questions.rows_R.device)
        self.by_layer: dict[int, Tensor] = {}

    def __call__(self, layer: int, own_HND: Tensor, inputs: Attended) -> Tensor:
        query_HND, key_GND, _, scale = inputs
        rows_R, prefix_GPD = self.questions.rows_R, self.questions.memory.keys[layer]
        shared = len(query_HND) // len(key_GND)
        query_HRD = query_HND.index_select(1, rows_R).float()
        query_HRD = query_HRD * (query_HND.shape[-1] ** -0.5 if scale is None else scale)
        prefix_HPD, key_HND = (
            t.repeat_interleave(shared, dim=0).float() for t in (prefix_GPD, key_GND)
        )
        places_N = torch.arange(len(self.tail_N), device=query_HND.device)
        is_other_RN = self.tail_N[rows_R][:, None] != self.tail_N
        masked_RN = is_other_RN | (places_N > rows_R[:, None])
        prefix_HRP = query_HRD @ prefix_HPD.transpose(1, 2)
        own_HRN = (query_HRD @ key_HND.transpose(1, 2)).masked_fill(masked_RN, -torch.inf)
        sums = (scores.logsumexp(dim=2, keepdim=True) for scores in (prefix_HRP, own_HRN))
        mass_HRP = (prefix_HRP - torch.logaddexp(*sums)).exp()
        by_question = torch.split(mass_HRP, self.questions.counts, dim=1)
        means = [mass_HNP.mean(dim=1) for mass_HNP in by_question]
        self.by_layer[layer] = torch.stack(means, dim=1)
        return own_HND


@torch.no_grad()
def candidate_scores(
    lm: LanguageModel, prompt: dict[str, Tensor], tail: dict[str, Tensor]
) -> Tensor:
    """score(q, d) of each candidate for each question but the last by each of the K = L H heads,
    (K, Q - 1, B).

    Args:
        prompt, tail: one group of ``PromptMaker.head_example``, whose last question is "N/A".
    """
    questions = read_candidates(lm, prompt, tail)
    mass = AttentionMass(questions)
    lm.run_attention(questions.tails, mass, prefix=questions.memory)
    mass_KQP = torch.cat([mass.by_layer[layer] for layer in range(lm.n_layers)])
    mass_KQP = mass_KQP[:, :-1] - mass_KQP[:, -1:]
    by_candidate = torch.split(mass_KQP[..., questions.places_S], questions.lengths, dim=-1)
    return torch.stack([mass_KQM.sum(dim=-1) for mass_KQM in by_candidate], dim=-1)


@torch.no_grad()
def score_query_heads(
    lm: LanguageModel, examples: Iterable[tuple[dict[str, Tensor], dict[str, Tensor], Tensor]]
) -> Tensor:
    """nDCG@10 of each head's ranking of the candidates, mean over all questions, (L, H).

    ``examples`` are (prompt, tail, answer) triples of ``PromptMaker.head_example``: prompt and tail
    as for ``candidate_scores``, and the candidate that answers each question but the last.
    """
    gains_K, count = torch.zeros(lm.n_layers * lm.n_heads), 0
    for prompt, tail, answer_Q in examples:
        scores_KQB = candidate_scores(lm, prompt, tail)
        answer_KQ1 = answer_Q[None, :, None].to(scores_KQB.device).expand(len(gains_K), -1, 1)
        rank_KQ = (scores_KQB > scores_KQB.gather(2, answer_KQ1)).sum(dim=2)
        gains_K += torch.where(rank_KQ < DEPTH, 1 / (rank_KQ + 2.0).log2(), 0.0).sum(dim=1).cpu()
        count += len(answer_Q)
    return (gains_K / max(1, count)).view(lm.n_layers, lm.n_heads)
