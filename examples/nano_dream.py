"""DREAM (Tang & Yang, 2026; arXiv 2606.24667) in one file, with torch and transformers only: a
retriever learns to search a folder of text, without labels, from how well an LM answers questions.

    python examples/nano_dream.py [FOLDER]       # of text; without it, this project's docs

A frozen LM reads candidates, a question, and the chunk that answers it. In the heads that look from
questions to answers, the retriever says how much attention each candidate gets. Attention to the
answer makes it easier to predict, so the loss teaches the retriever what answers a question:

    score = attention of the question's tokens to candidate i, less that of "N/A"
            the heads in which it ranks the answer best are selected     (eqs. 4-5)     find_heads
    w     = softmax over i of cos(question, candidate i) / tau                   Retriever.weights
    A~    = w_i (A within candidate i, normalised to sum to 1) on its tokens, 0 elsewhere   inject
    A'    = (1 - g) A + g A~    in the question's rows of the selected heads, in place of A inject
    loss  = mean of -log p(a token of the answer | the tokens before it) (eq. 10)      answer_loss

tau and g are trained, too. Smaller than in the paper (theirs in brackets): 8 candidates (16), of
which 4 are asked for, by questions of the same LM (one, by Qwen3-14B): about half of them fit their
chunk; six layers and their mean (all, the last token's state), all weights at one rate (LoRA of
rank 32), SmolLM2-135M for both parts (Llama-3.1-8B-Instruct answers), 8 groups (48,000), of which
4 select the heads (5,000). That is too few for a gain: MRR goes from 0.111 to 0.116 on the docs, in
100 s on two cores, and falls to 0.044 at three times the rate.

Shapes: B candidates, Q questions, P tokens of the candidates, L of a question and its answer, M = P
+ L, T tokens that are predicted, N texts, H heads, K selected ones of a layer, W width of a vector.
"""

from __future__ import annotations

import argparse
import random
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANDIDATES, ASKED, WORDS, MAX_TOKENS = 8, 4, 48, 96  # words and tokens of a chunk, at most
LAYERS, LEARNING_RATE = 6, 3e-5  # of the retriever, the lower part of a transformer
HEADS, PROBED, TESTED = 16, 4, 10  # heads that are selected; groups that select them, that test
TAU, GATE = 0.2, 0.5  # at the start; the paper's are not known
QUERY, PASSAGE = "query: ", "passage: "  # what the retriever reads before a text
ASK, LEAD = "Which passage answers this question? ", "\nThis one:\n"
WRITE = """Text: Honey bees dance to tell the others where flowers are, and how far away.
Question: How do honey bees tell others where flowers are?
Text: The air is thinner on high mountains. Water boils at less heat there, and rice takes longer.
Question: Why does it take longer to cook rice on a mountain?
Text: `backup --to DIR` copies the database. It runs each night; `--keep 7` deletes older copies.
Question: How many copies of the database are kept?
Text: {}
Question:"""


class Group(NamedTuple):
    texts: list[str]  # candidates
    questions: list[str]
    answers: list[int]  # the candidate that answers each question


def read_chunks(folder: Path) -> list[str]:
    """Chunks of whole sentences where they end in time; tables and code are left out."""
    chunks = []
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt")):
        prose = re.sub(r"(?ms)^```.*?^```|^\|.*?$", "", file.read_text("utf-8", "replace"))
        words = prose.split()
        while window := words[:WORDS]:
            ends = [i for i, word in enumerate(window, 1) if word[-1] in ".!?:" and 2 * i > WORDS]
            size = ends[-1] if ends else WORDS
            chunks.append(" ".join(window[:size]))
            words = words[size:]
    return chunks


def make_groups(lm, tokenizer, runs: list[list[str]]) -> list[Group]:
    """Let the LM write questions about some of each run of neighbouring chunks."""
    answers = [random.sample(range(CANDIDATES), ASKED) for _ in runs]
    texts = [run[i] for run, places in zip(runs, answers, strict=True) for i in places]
    questions = []
    for i in range(0, len(texts), 32):
        prompts = [WRITE.format(text) for text in texts[i : i + 32]]
        given = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        written = lm.generate(**given.to(DEVICE), max_new_tokens=20, do_sample=False)
        said = tokenizer.batch_decode(written[:, given["input_ids"].shape[1] :], True)
        questions += [question.strip().split("\n")[0] for question in said]
    asked = [questions[i : i + ASKED] for i in range(0, len(questions), ASKED)]
    return [Group(*group) for group in zip(runs, asked, answers, strict=True)]


class Retriever(nn.Module):
    """Texts -> unit vectors: the mean over tokens of the states of a transformer's lower layers."""

    def __init__(self, name: str, tokenizer) -> None:
        super().__init__()
        options = dict(num_hidden_layers=LAYERS, dtype=torch.float32)
        self.model, self.tokenizer = AutoModel.from_pretrained(name, **options), tokenizer
        self.log_tau = nn.Parameter(torch.tensor(TAU).log())
        self.gate_logit = nn.Parameter(torch.tensor(GATE).logit())

    def forward(self, prompt: str, texts: list[str]):
        options = dict(padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        tokens = self.tokenizer([prompt + text for text in texts], **options).to(DEVICE)
        states_NLW = self.model(**tokens).last_hidden_state
        is_token_NL1 = tokens["attention_mask"][:, :, None]
        return F.normalize((states_NLW * is_token_NL1).sum(1) / is_token_NL1.sum(1), dim=1)

    def weights(self, group: Group):
        """w (Q, B)."""
        cosines_QB = self(QUERY, group.questions) @ self(PASSAGE, group.texts).T
        return (cosines_QB / self.log_tau.exp()).softmax(dim=1)


class Prompt(NamedTuple):
    ids_P: torch.Tensor  # of all candidates, which every question continues
    is_of_BP: torch.Tensor  # 1 on the tokens of each candidate
    ids_QL: torch.Tensor  # a question and its answer, padded on the right
    role_QL: torch.Tensor  # 1 on the question, 2 on the answer


def make_prompt(tokenizer, texts: list[str], questions: list[str], answers: list[str]) -> Prompt:
    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = [i for i in tokenizer("a")["input_ids"][:1] if i == tokenizer.bos_token_id]
    ids += tokens("Here are some passages.\n\n")
    owner = [-1] * len(ids)
    for i, text in enumerate(texts):
        part, between = tokens(f"[{i + 1}] ") + tokens(text)[:MAX_TOKENS], tokens("\n\n")
        ids, owner = ids + part + between, owner + [i] * len(part) + [-1] * len(between)
    asked = [tokens(ASK) + tokens(question) + tokens(LEAD) for question in questions]
    rows = [torch.tensor(q + tokens(a)[:MAX_TOKENS]) for q, a in zip(asked, answers, strict=True)]
    roles = [1 + (torch.arange(len(r)) >= len(q)).int() for q, r in zip(asked, rows, strict=True)]
    is_of_BP = (torch.tensor(owner) == torch.arange(len(texts))[:, None]).float()
    ids_QL, role_QL = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (rows, roles))
    return Prompt(*(x.to(DEVICE) for x in (torch.tensor(ids), is_of_BP, ids_QL, role_QL)))


def attention(layer, query, key, value, _mask, scaling, memory, change=None, **_):
    """Causal attention that fills the memory, or continues it with changed probabilities."""
    if change is None:
        memory[layer.layer_idx] = key, value
    else:
        kept = (x.expand(len(key), -1, -1, -1) for x in memory[layer.layer_idx])
        key, value = (torch.cat(pair, dim=2) for pair in zip(kept, (key, value), strict=True))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    n_rows, n_keys = query.shape[2], key.shape[2]
    future_LM = torch.ones(n_rows, n_keys, device=key.device).bool().triu(1 + n_keys - n_rows)
    A_QHLM = (query @ key.mT * scaling).masked_fill(future_LM, -torch.inf).softmax(dim=-1)
    A_QHLM = A_QHLM if change is None else change(layer.layer_idx, A_QHLM)
    return (A_QHLM @ value).transpose(1, 2), None


transformers.AttentionInterface.register("steered", attention)


def read(lm, prompt: Prompt, change):
    """The last states (Q, L, W) of questions and answers. Nothing before them depends on w."""
    lm.set_attn_implementation("steered")
    lm.base_model(prompt.ids_P[None], memory=(memory := {}), use_cache=False)
    places_1L = torch.arange(prompt.ids_QL.shape[1], device=DEVICE)[None] + len(prompt.ids_P)
    given = dict(position_ids=places_1L, memory=memory, change=change, use_cache=False)
    return lm.base_model(prompt.ids_QL, **given).last_hidden_state


def find_heads(lm, tokenizer, groups: list[Group]) -> list[tuple[int, int]]:
    """The heads (layer, head) in whose ranking the answers have the best nDCG (eqs. 4-5)."""
    gain_LH = 0
    for texts, questions, answers in groups:
        asked, mass = [*questions, "N/A"], {}
        prompt = make_prompt(tokenizer, texts, asked, [""] * len(asked))

        def record(layer: int, A_QHLM, prompt=prompt, mass=mass):
            is_row_Q1L1 = (prompt.role_QL == 1)[:, None, :, None]
            mass_QHLB = A_QHLM[..., : len(prompt.ids_P)] @ prompt.is_of_BP.T
            mass[layer] = (mass_QHLB * is_row_Q1L1).sum(dim=2) / is_row_Q1L1.sum(dim=2)
            return A_QHLM

        read(lm, prompt, record)
        mass_LQHB = torch.stack([mass[layer] for layer in sorted(mass)])
        score_LQHB = mass_LQHB[:, :-1] - mass_LQHB[:, -1:]
        own = [score_LQHB[:, i, :, answer] for i, answer in enumerate(answers)]
        rank_LQH = (score_LQHB > torch.stack(own, dim=1)[..., None]).sum(dim=3)
        gain_LH += (1 / (rank_LQH + 2.0).log2()).sum(dim=1)
    best = gain_LH.flatten().topk(HEADS).indices.tolist()
    return [divmod(i, gain_LH.shape[1]) for i in best]


def inject(layer: int, A_QHLM, prompt: Prompt, weights_QB, gate, heads: list[tuple[int, int]]):
    """A' in the selected heads of a layer."""
    places_K = torch.tensor([h for at, h in heads if at == layer], dtype=int, device=gate.device)
    A_QKLM, n_prompt = A_QHLM[:, places_K], len(prompt.ids_P)
    mass_QKLB = A_QKLM[..., :n_prompt] @ prompt.is_of_BP.T
    factor_QKLP = (weights_QB[:, None, None] / mass_QKLB.clamp(min=1e-12)) @ prompt.is_of_BP
    tilde_QKLM = A_QKLM * F.pad(factor_QKLP, (0, A_QKLM.shape[3] - n_prompt))
    is_row_Q1L1 = (prompt.role_QL == 1)[:, None, :, None]
    changed_QKLM = torch.where(is_row_Q1L1, (1 - gate) * A_QKLM + gate * tilde_QKLM, A_QKLM)
    return A_QHLM.index_copy(1, places_K, changed_QKLM)


def answer_loss(lm, retriever: Retriever, group: Group, heads: list[tuple[int, int]]):
    """The mean over questions of the mean over their answer's tokens (eq. 10)."""
    prompt = make_prompt(retriever.tokenizer, *group[:2], [group.texts[i] for i in group.answers])
    weights_QB, gate = retriever.weights(group), retriever.gate_logit.sigmoid()
    change = partial(inject, prompt=prompt, weights_QB=weights_QB, gate=gate, heads=heads)
    states_QLW, is_next_QL = read(lm, prompt, change), prompt.role_QL[:, 1:] == 2
    logits_TV = lm.get_output_embeddings()(states_QLW[:, :-1][is_next_QL])
    losses_T = F.cross_entropy(logits_TV, prompt.ids_QL[:, 1:][is_next_QL], reduction="none")
    by_question = losses_T.split(is_next_QL.sum(dim=1).tolist())
    return torch.stack([losses.mean() for losses in by_question]).mean()


def train(retriever: Retriever, lm, groups: list[Group], heads: list[tuple[int, int]]) -> None:
    optimizer = torch.optim.AdamW(retriever.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step, group in enumerate(groups):
        loss = answer_loss(lm, retriever, group, heads)
        loss.backward()
        nn.utils.clip_grad_norm_(retriever.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:2}  loss {loss:.3f}", flush=True)


def encode(retriever: Retriever, prompt: str, texts: list[str]):
    """(N, W) vectors, a few texts at a time."""
    return torch.cat([retriever(prompt, texts[i : i + 32]) for i in range(0, len(texts), 32)])


def mean_reciprocal_rank(scores_QN, answer_Q) -> float:
    own_Q1 = scores_QN.gather(1, answer_Q[:, None])
    return float((1 / (1 + (scores_QN > own_Q1).sum(dim=1))).mean())


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument("folder", type=Path, nargs="?", default=docs, help="of .md and .txt files")
    parser.add_argument("--query", default="how do I keep an index up to date?")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M", help="hub id or folder")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    random.seed(0)
    chunks, count = read_chunks(args.folder), args.steps + TESTED
    runs = [chunks[i : i + CANDIDATES] for i in range(0, len(chunks) - CANDIDATES + 1, CANDIDATES)]
    if len(runs) < count:
        parser.error(f"{args.folder} has fewer than {count * CANDIDATES} chunks in .md and .txt")
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    retriever = Retriever(args.model, tokenizer).to(DEVICE)
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(DEVICE)
    lm.requires_grad_(False)
    groups = make_groups(lm, tokenizer, random.sample(runs, count))
    trained, tests = groups[:-TESTED], groups[-TESTED:]
    heads = find_heads(lm, tokenizer, trained[:PROBED])
    print("heads:", " ".join(f"{layer}-{head}" for layer, head in heads), flush=True)
    asked = [args.query, *(question for group in tests for question in group.questions)]
    places = [chunks.index(group.texts[i]) for group in tests for i in group.answers]
    answer_Q = torch.tensor(places, device=DEVICE)

    def search():
        """The scores of all chunks for the query that is asked (N,), and for the tests (Q, N)."""
        scores_MN = encode(retriever, QUERY, asked) @ encode(retriever, PASSAGE, chunks).T
        return scores_MN[0], scores_MN[1:]

    before = mean_reciprocal_rank(search()[1], answer_Q)
    with torch.enable_grad():
        train(retriever, lm, trained, heads)
    scores_N, scores_QN = search()
    after = mean_reciprocal_rank(scores_QN, answer_Q)
    print(f"MRR of {len(places)} questions, {len(chunks)} chunks: {before:.3f} -> {after:.3f}")
    for i in scores_N.argsort(descending=True)[:3].tolist():
        print(f"{scores_N[i]:.3f}  {chunks[i][:78]}")


if __name__ == "__main__":
    main()
