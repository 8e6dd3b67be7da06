"""What does a near-duplicate inside a group do to Revela's signal?

    python bench/duplicates.py --text TEXT/wikipedia_small.jsonl.gz

Groups of 16 chunks, four each of four documents, as they are, and with one chunk of another document replaced by a near-copy of a
chunk: the same words but for one in twenty. The signal on a pair is minus the derivative of the LM's loss by the pair's score, before
the soft-max that makes Sim of it: what the retriever is told about them. Taken at two places: where all scores are equal, and where
the fitted retriever has them. Told are, of the row of the chunk that has a copy, the part of its signal that is on the copy, and how
well the rest still tells siblings from strangers (AUC), with and without the copy; intervals (95 %) are Student's t over groups.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from revela.config import Recipe
from revela.data.chunk import chunk
from revela.data.text import read_corpus
from revela.models.language_model import load_language_model, load_tokenizer
from revela.models.quiet import quieten
from revela.models.retriever import RetrieverEncoder, autocast, compute_device, uses_bf16
from revela.models.weights import resolve
from revela.objectives.revela import Revela, gates_on_heads
from revela.train.collate import first_half
from revela.train.heads import sibling_heads
from revela.train.rows import training_chunks
from revela.train.run import fit_to_chunks, untrained_retriever

DOCUMENTS, PIECES = 4, 4  # of a group
OWNER = np.repeat(np.arange(DOCUMENTS), PIECES)
COPIED, REPLACED = 0, DOCUMENTS * PIECES - 1  # the copy of the first chunk takes the last one's place
CHANGED = 0.05  # of a copy's words


def near_copy(text: str, rng: random.Random) -> str:
    """The same words, but some are other words of the text."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), max(1, int(CHANGED * len(words)))):
        words[place] = rng.choice(words)
    return " ".join(words)


def auc(signal_B: np.ndarray, keep_B: np.ndarray) -> float:
    """Chance that a sibling of the copied chunk has more signal than a stranger, among those that are kept."""
    sibling_B = np.isin(OWNER, OWNER[COPIED])
    siblings, strangers = signal_B[keep_B & sibling_B], signal_B[keep_B & ~sibling_B]
    return float((siblings[:, None] > strangers).mean())


def told(values: Sequence[float]) -> str:
    margin = student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.3f} ± {margin:.3f}"


class Signal:
    """What an LM with gates says about each pair of a group."""

    def __init__(self, recipe: Recipe, corpus: Path) -> None:
        documents, _ = read_corpus([corpus])
        self.recipe, self.device, folder = recipe, compute_device(), resolve("embedded:smollm2-135m")
        self.bf16 = uses_bf16(recipe.precision, self.device)
        self.lm, self.tokenizer = load_language_model(folder, bf16=self.bf16).to(self.device), load_tokenizer(folder)
        ranking = sibling_heads(recipe, self.lm, self.tokenizer, folder, documents, print)
        first = int(recipe.gate_first_layer * self.lm.n_layers)
        heads = [(layer, head) for layer, head, _ in ranking if layer >= first][: recipe.gate_heads]
        model = untrained_retriever(recipe, folder, documents, print)
        fit_to_chunks(recipe, model, training_chunks(recipe, documents), self.bf16, print)
        self.encoder, gates_LH = RetrieverEncoder(model, self.bf16), gates_on_heads(self.lm, recipe.gate, heads)
        self.objective = Revela(model, self.lm, tau=recipe.tau, gates_LH=gates_LH, v_norm=False)
        self.documents = documents

    def scores(self, texts: Sequence[str]) -> Tensor:
        """Standardised cosines (B, B) of the fitted retriever, first halves as queries."""
        halves = [first_half(text, self.tokenizer, self.recipe.lm_tokens) for text in texts]
        cosine_BB = torch.tensor(self.encoder.encode_queries(halves) @ self.encoder.encode_passages(texts).T)
        others_BB = cosine_BB.masked_fill(torch.eye(len(texts), dtype=torch.bool), torch.nan)
        mean_B1 = others_BB.nanmean(dim=1, keepdim=True)
        return (cosine_BB - mean_B1) / (others_BB - mean_B1).square().nanmean(dim=1, keepdim=True).sqrt()

    def __call__(self, texts: Sequence[str], scores_BB: Tensor) -> np.ndarray:
        """(B, B): minus d loss / d score."""
        side = self.tokenizer(
            list(texts), truncation=True, max_length=self.recipe.lm_tokens, padding=True, padding_side="right", return_tensors="pt"
        ).to(self.device)
        scores_BB = scores_BB.to(self.device).clone().requires_grad_()
        diagonal_BB = torch.eye(len(texts), dtype=torch.bool, device=self.device)
        with autocast(self.device, self.bf16):
            weights_BB = scores_BB.masked_fill(diagonal_BB, -torch.inf).softmax(dim=1)
            packed = self.lm.pack(side["input_ids"], side["attention_mask"])
            self.objective.lm_loss(packed, weights_BB, self.objective.gates_LH).backward()
        assert scores_BB.grad is not None
        return -scores_BB.grad.cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--text", type=Path, required=True, help="documents")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    quieten()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rng = random.Random(0)
    recipe = Recipe()
    signal = Signal(recipe, arguments.text)
    cut = ([c.text for c in chunk(document, 0, recipe.chunk_words)] for document in signal.documents)
    pieces = rng.sample([texts[:PIECES] for texts in cut if len(texts) >= PIECES], DOCUMENTS * arguments.groups)
    found: dict[str, list[float]] = {}
    everyone = np.arange(len(OWNER)) != COPIED
    for start in range(0, len(pieces), DOCUMENTS):
        plain = [text for texts in pieces[start : start + DOCUMENTS] for text in texts]
        copied = [*plain[:REPLACED], near_copy(plain[COPIED], rng)]
        kept = everyone & (np.arange(len(OWNER)) != REPLACED)
        for place in ("equal scores", "fitted scores"):
            rows = {}
            for kind, texts in (("plain", plain), ("copied", copied)):
                scores_BB = torch.zeros(len(texts), len(texts)) if place == "equal scores" else signal.scores(texts)
                rows[kind] = signal(texts, scores_BB)
                row_B = rows[kind][COPIED]
                found.setdefault(f"{place}, {kind}: AUC of siblings, the replaced chunk left out", []).append(auc(row_B, kept))
                share = np.abs(row_B[REPLACED]) / np.abs(row_B).sum()
                found.setdefault(f"{place}, {kind}: part of the row's signal on the replaced chunk", []).append(float(share))
            away = np.abs(rows["copied"][COPIED][kept]).sum() / np.abs(rows["plain"][COPIED][kept]).sum()
            found.setdefault(f"{place}: signal on the others, with the copy over without", []).append(away)
            unmoved = [np.corrcoef(rows["copied"][row][:REPLACED], rows["plain"][row][:REPLACED])[0, 1] for row in range(1, REPLACED)]
            found.setdefault(f"{place}: correlation of the other rows with themselves, without and with", []).append(
                float(np.mean(unmoved))
            )
        print(f"{start // DOCUMENTS + 1} groups", flush=True)
    for name, values in sorted(found.items()):
        print(f"{name}: {told(values)}")


if __name__ == "__main__":
    main()
