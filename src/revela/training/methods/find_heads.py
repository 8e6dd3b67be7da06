"""Find the heads of an LM that an objective uses, by two label-free scores of what they attend to;
the ranking is cached per LM and text. Revela gates heads that look to a related document; DREAM
injects into heads that look from a question to its answer.

**Related documents** (Revela's gates):

    score = d loss(others) / d g - d loss(siblings) / d g                                  (ours)

g is the gate of a head in in-batch attention, 0.1 in every head. loss(siblings) weights the other
chunks of a chunk's document equally, loss(others) the chunks of other documents. A high score means
that more of the head lowers the next-token loss on siblings and raises it on others.

**Answers** (query-focused heads: QRHead, Zhang et al., 2025, as DREAM uses it):

    score(q, d) = mean over q's rows of sum_{m in d} A_m  -  the same for the question "N/A"

A is the attention of a head. The LM reads B candidates d and then Q questions q, each of which
continues the candidates' text. A head's score is the nDCG@10 of the candidate that answers q, mean
over questions.

Shapes: B chunks of a group, L layers, H heads per layer; Q questions, S tokens of the candidates
among the P of their text, R question rows, N tokens of all tails, K heads of all layers, G
key-value heads, D head width.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from revela.encoders.model_files import fingerprint
from revela.encoders.torch_model import uses_bf16
from revela.errors import RevelaError
from revela.files import atomic_write, cache_folder
from revela.terminal import progress_bar
from revela.text.spool import ArrowList
from revela.text.words import joined, words
from revela.training.device import compute_device, sent
from revela.training.distributed import from_rank_zero, is_rank_zero
from revela.training.generated_queries import GeneratedQueries
from revela.training.groups.dataset import TrainingSet
from revela.training.groups.strategies import (
    QUERIES_PER_DOCUMENT,
    Groups,
    document_groups,
    spread_groups,
    with_queries,
)
from revela.training.lm.document_attention import InBatchAttention
from revela.training.lm.language_model import LanguageModel, load_language_model
from revela.training.lm.prompts import PromptMaker, Questions, read_candidates
from revela.training.methods.base import tokenize
from revela.training.models import find_weights, load_tokenizer
from revela.training.settings import Dream, Objective, Recipe
from revela.types import Chunk, Document

log = logging.getLogger(__name__)

BASE_GATE = 0.1
DEPTH = 10  # of nDCG
# Kinds of ranking, and what its best heads do.
KINDS = {
    "siblings": "look to a related document",
    "questions": "look from a question to its answer",
}
OBJECTIVE = {"siblings": "revela", "questions": "dream"}  # for which ``revela heads`` finds them
Head = tuple[int, int, float]
"""(layer, head, score)"""

PROBE_GROUPS = 5
PROBE_PIECES = 4  # documents per group, and pieces per document
MIN_WORDS, MAX_WORDS = 6, 48  # of a piece
PROBE_QUESTIONS = 64  # for query-focused heads


def kind_of(objective: Objective) -> str:
    """The kind of heads (``KINDS``) that an objective uses."""
    return "questions" if isinstance(objective, Dream) else "siblings"


def rank_heads(
    recipe: Recipe, documents: Sequence[Document], queries_file: Path | None
) -> tuple[Path, list[Head]]:
    """The LM's folder, and the ranking of its heads for the recipe's objective."""
    folder = find_weights(recipe.lm.lm, recipe.retriever.offline_model)
    device = compute_device()
    bf16 = uses_bf16(recipe.training.precision, device)
    lm = load_language_model(folder, bf16=bf16, name=recipe.lm.lm).to(device)
    tokenizer = load_tokenizer(folder)
    lm_tokens, seed = recipe.lm.lm_tokens, recipe.training.seed
    if kind_of(recipe.objective) == "siblings":
        return folder, sibling_heads(lm, tokenizer, folder, documents, lm_tokens, seed)
    data = TrainingSet(recipe, documents, queries_file=queries_file)
    prompts = PromptMaker(tokenizer, lm_tokens, recipe.groups.group_size)
    rows, written, source = data.rows, data.generated_queries, recipe.queries.queries
    return folder, query_heads(lm, prompts, folder, rows, written, seed, source)


def sibling_heads(
    lm: LanguageModel,
    tokenizer: Any,
    folder: Path,
    documents: Sequence[Document],
    lm_tokens: int,
    seed: int,
) -> list[Head]:
    """Rank heads by how they look to a related document, by Revela's label-free probe.

    Empty if no document is long enough. Pieces of documents are truncated to ``lm_tokens``.
    """
    probed = list(_probe_groups(documents, seed))

    def probe() -> list[Head]:
        groups = []
        for texts, owners in probed:
            tokens = tokenize(tokenizer, texts, lm_tokens)
            packed = lm.pack(tokens["input_ids"], tokens["attention_mask"])
            groups.append((packed, torch.tensor(owners)))
        shown = progress_bar("probing heads", "group", groups)
        return ranked_heads(probe_heads(lm, shown)) if groups else []

    return cached_ranking("siblings", lm, folder, [lm_tokens, probed], probe)


def query_heads(
    lm: LanguageModel,
    prompts: PromptMaker,
    folder: Path,
    rows: ArrowList[Chunk],
    written: GeneratedQueries | None,
    seed: int,
    source: str,
) -> list[Head]:
    """Rank heads by how they look from a question to its answer, in nDCG@10.

    ``written`` has the queries of ``rows`` if they are written during training; ``source`` is
    ``--queries``.
    """
    spread = source in QUERIES_PER_DOCUMENT
    groups = list(_groups_with_questions(rows, written, prompts.group_size, seed, spread))

    def probe() -> list[Head]:
        shown = progress_bar("probing heads", "group", groups)
        return ranked_heads(score_query_heads(lm, map(prompts.head_example, shown)))

    probed = [[(member.text, member.query) for member in group] for group in groups]
    return cached_ranking("questions", lm, folder, [prompts.lm_tokens, probed], probe)


def _probe_groups(
    documents: Sequence[Document], seed: int
) -> Iterator[tuple[list[str], list[int]]]:
    """(pieces, document of each) of groups of four documents cut in four.

    Every piece has siblings and others. No group if all documents are too short.
    """
    pieces: list[list[str]] = []
    for i in random.Random(seed).sample(range(len(documents)), len(documents)):
        all_words = words(documents[i].text)
        size = min(MAX_WORDS, len(all_words) // PROBE_PIECES)
        if size >= MIN_WORDS:
            starts = range(0, PROBE_PIECES * size, size)
            pieces.append([joined(all_words[start : start + size]) for start in starts])
        if len(pieces) == PROBE_GROUPS * PROBE_PIECES:
            break
    for start in range(0, len(pieces), PROBE_PIECES):
        members = pieces[start : start + PROBE_PIECES]
        if len(members) > 1:
            yield (
                [t for texts in members for t in texts],
                [i for i, texts in enumerate(members) for _ in texts],
            )


def _groups_with_questions(
    rows: ArrowList[Chunk], written: GeneratedQueries | None, size: int, seed: int, spread: bool
) -> Iterator[list[Chunk]]:
    """The chunks of each group, until they have enough questions."""
    # Stored groups are in another order.
    rows = rows.select(np.argsort(rows.column("document"), kind="stable"))
    strategy = spread_groups if spread else document_groups
    groups: Groups = partial(strategy, rows.column("document"), size, seed)
    row: Callable[[int], Chunk] = rows.__getitem__
    if written is None:
        groups = with_queries(rows, groups, "queries")
    else:  # a copy: training must not depend on the questions asked here
        probed = GeneratedQueries(written.lm, rows)
        groups, row = probed.groups(groups), probed.row
    n_questions = 0
    for group in groups(0):
        members = [row(i) for i in group]
        yield members
        n_questions += sum(bool(member.query) for member in members)
        if n_questions >= PROBE_QUESTIONS:
            return


def save_heads(path: Path, kind: str, name: str, folder: Path, ranking: Sequence[Head]) -> None:
    """Write a ranking of this kind with the name and fingerprint of the LM in ``folder``."""
    about = {"lm": name, "fingerprint": fingerprint(folder), "kind": kind}
    saved = {**about, "ranking": ranking}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(saved))


def heads_from_file(path: Path, kind: str, folder: Path) -> list[Head]:
    """Read a ranking of this kind that ``save_heads`` wrote for the LM in ``folder``.

    Raises:
        RevelaError: the file is not a ranking, is of another kind or another LM, or is empty.
    """
    make = f"revela heads --objective {OBJECTIVE[kind]} --out"
    try:
        saved = json.loads(path.read_text())
        ranking = [(int(layer), int(head), float(score)) for layer, head, score in saved["ranking"]]
        owner, name, found = (str(saved[key]) for key in ("fingerprint", "lm", "kind"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RevelaError(
            f"{path} is not a ranking of heads: make one with {make} {path}"
        ) from error
    if owner != fingerprint(folder):
        raise RevelaError(
            f"{path} ranks the heads of {name}, not of this run's --lm: make another with {make}"
        )
    if found != kind:
        raise RevelaError(
            f"{path} ranks heads by how they {KINDS.get(found, found)}, and this objective needs "
            f"those that {KINDS[kind]}: make another with {make}"
        )
    if not ranking:
        raise RevelaError(f"{path} names no head: make another with {make}")
    return ranking


def cached_ranking(
    kind: str, lm: LanguageModel, folder: Path, probed: Any, probe: Callable[[], list[Head]]
) -> list[Head]:
    """The cached ranking of an LM's heads, or else ``probe``'s, best first; the same in all ranks.

    An empty ranking is not cached.

    Args:
        kind: one of ``KINDS``.
        folder: holds the LM.
        probed: all that the probe reads, as JSON; the cached ranking is for this only.
    """
    read = hashlib.blake2b(json.dumps(probed).encode(errors="surrogatepass"), digest_size=8)
    name = f"{fingerprint(folder)}-{kind}-{read.hexdigest()}.json"
    path = cache_folder() / "heads" / name
    cached = from_rank_zero(lambda: heads_from_file(path, kind, folder) if path.is_file() else None)
    if cached is not None:
        return cached
    log.info(
        f"probing the {lm.n_layers * lm.n_heads} heads of {lm.name} for those that "
        f"{KINDS[kind]}, once for this language model and text"
    )
    own = probe()  # in all ranks: they may share the LM
    ranking = from_rank_zero(lambda: own)
    if ranking and is_rank_zero():
        save_heads(path, kind, lm.name, folder, ranking)
    return ranking


def ranked_heads(scores_LH: Tensor) -> list[Head]:
    """The heads by score, best first."""
    n_heads = scores_LH.shape[1]
    order = scores_LH.flatten().argsort(descending=True)
    return [(int(i) // n_heads, int(i) % n_heads, float(scores_LH.flatten()[i])) for i in order]


def probe_heads(lm: LanguageModel, groups: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Score every head as a head of in-batch attention, (L, H).

    ``groups`` are (packed chunks, document of each chunk (B,)) pairs. A chunk attends to nothing
    where it has no sibling, or where its group has no other document.
    """
    shape = lm.n_layers, lm.n_heads
    scores_LH, count = torch.zeros(shape), 0
    for packed, document_B in groups:
        document_B = document_B.to(packed.ids_1T.device)
        same_BB = document_B[:, None] == document_B[None, :]
        other_BB = ~same_BB
        same_BB.fill_diagonal_(False)
        memory = lm.prefill(packed, range(lm.n_layers))
        for sign, pairs_BB in ((-1.0, same_BB), (1.0, other_BB)):
            weights_BB = pairs_BB.float() / pairs_BB.sum(dim=1, keepdim=True).clamp(min=1)
            gates_LH = torch.full(shape, BASE_GATE, device=document_B.device, requires_grad=True)
            mix = InBatchAttention(weights_BB, packed.lengths, gates_LH, v_norm=False)
            loss = lm.loss(packed, memory, mix)
            scores_LH += sign * torch.autograd.grad(loss, gates_LH)[0].cpu()
        count += 1
    return scores_LH / max(1, count)


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

    def __call__(
        self,
        layer: int,
        own_HND: Tensor,
        query_HND: Tensor,
        key_GND: Tensor,
        value_GND: Tensor,
        scale: float | None,
    ) -> Tensor:
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
        prompt, tail: one group of ``PromptMaker.with_null_question``, whose last question is "N/A".
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
