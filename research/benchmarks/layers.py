"""Which layers, pooling and halves make the best retriever of a raw language model, without labels.

    python -m research.benchmarks.layers --data COLLECTIONS LANGUAGES --model embedded:smollm2-135m

From each collection some judged queries, the documents that answer them and others. The model reads
each text once, with all its layers, and what every depth gives is kept in ``--cache``; the fit
(retriever/fit.py) and all its variants are then a matter of seconds. nDCG@10 of the vectors alone,
and fused with BM25 by score as fitted retrievers are (W / V = 3).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from research.benchmarks.hybrid import folder_of, names_in
from revela.evaluation.beir import Collection, load_collection
from revela.evaluation.metrics import mean_scores
from revela.index.exact import top_k
from revela.index.fusion import DEPTH as FUSED
from revela.index.language import Analyzer
from revela.index.search import MemorySnapshot, fuse
from revela.retriever.fit import (
    WORDS_TO_VECTORS,
    _inverse_power,
    _Moments,
    _to_unit_spread,
    _token_counts,
    _token_weights,
    token_ids,
    whitening_of,
)
from revela.retriever.word_table import (
    WordTable,
    _input_embeddings,
    _lm_tokenizer,
    frequencies,
    word_table,
)
from revela.settings import Fit, Retriever
from revela.training.train_table import piece_table, texts_of, train_table
from revela.types import Document, evenly
from revela.weights import resolve

DOCUMENTS, QUERIES, TOKENS, BATCH = 400, 120, 128, 2048
RATIOS = 1.0, 2.0, WORDS_TO_VECTORS
TABLE_TEXTS = 1500  # that a table learns from
PROMPTS = {"queries": Retriever.query_prompt, "documents": Retriever.passage_prompt}


Row = dict[str, list[float]]
"""nDCG@10 by form: dense, and fused by each of ``RATIOS``."""
Read = dict[str, Tensor]
"""Of a sampled collection, as a model reads it. {queries, documents}.{sif, mean, last}.DEPTH:
(N, D) vectors by pooling; token.DEPTH, (D, D), the covariance of the documents' tokens; and
{queries, documents}.{lexical, pieces begun, pieces, words begun, words}, vectors of tables."""


def part_of(collection: Collection) -> Collection:
    """Some queries, evenly spaced, their documents, and others, evenly spaced."""
    ids = [collection.query_ids[i] for i in evenly(len(collection.query_ids), QUERIES)]
    text_of = dict(zip(collection.query_ids, collection.queries, strict=True))
    qrels = {name: collection.qrels[name] for name in ids}
    wanted = {d for grades in qrels.values() for d, grade in grades.items() if grade > 0}
    others = [d for d in collection.document_ids if d not in wanted]
    room = max(0, DOCUMENTS - len(wanted))
    wanted |= {others[i] for i in evenly(len(others), room)} if room else set()
    kept = [i for i, d in enumerate(collection.document_ids) if d in wanted]
    return replace(
        collection,
        document_ids=[collection.document_ids[i] for i in kept],
        documents=[collection.documents[i] for i in kept],
        query_ids=ids,
        queries=[text_of[name] for name in ids],
        qrels=qrels,
    )


class Reader:
    """A language model with all layers, of which each text is read once."""

    def __init__(self, folder: Path, depths: Sequence[int], echo: bool) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        all_layers = self.model.config.num_hidden_layers
        self.depths = [d for d in depths if d < all_layers] + [all_layers]
        self.echo = echo
        self.embeddings_VD = self.model.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def __call__(self, collection: Collection) -> Read:
        counts_V = _token_counts(self.tokenizer, collection.documents)
        weight_V = _token_weights(self.tokenizer, counts_V, Fit.token_weighting)
        whitened = whitening_of(self.embeddings_VD, counts_V)
        moments = [_Moments(self.embeddings_VD.shape[1]) for _ in self.depths]
        given = weight_V, whitened
        read = self._side("documents", collection.documents, *given, moments)
        read |= self._side("queries", collection.queries, *given, None)
        pairs = zip(self.depths, moments, strict=True)
        return read | {f"token.{depth}": moment.covariance() for depth, moment in pairs}

    def _side(
        self,
        name: str,
        texts: Sequence[str],
        weight_V: Tensor,
        whitened: Callable[[Tensor], Tensor],
        moments: list[_Moments] | None,
    ) -> Read:
        (before,) = token_ids(self.tokenizer, [PROMPTS[name].rstrip()])
        if (bos := self.tokenizer.bos_token_id) is not None:
            before = [bos, *before]
        rows = [ids[:TOKENS] for ids in token_ids(self.tokenizer, [f" {text}" for text in texts])]
        width, n = self.embeddings_VD.shape[1], len(self.depths)
        sif, mean, last = ([torch.zeros(len(texts), width) for _ in range(n)] for _ in range(3))
        lexical = torch.zeros(len(texts), width)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        while order:
            longest = (2 if self.echo else 1) * len(rows[order[-1]]) + len(before) + 1
            part = [order.pop() for _ in range(min(len(order), max(1, BATCH // longest)))]
            some = [rows[i] or [self.tokenizer.eos_token_id] for i in part]
            read = [[*before, *(ids if self.echo else []), *ids] for ids in some]
            length = max(map(len, read)) + 1
            ids_NL, kept_NL = torch.zeros(len(part), length).long(), torch.zeros(len(part), length)
            for i, (row, own) in enumerate(zip(read, some, strict=True)):
                ids_NL[i, : len(row) + 1] = torch.tensor([*row, self.tokenizer.eos_token_id])
                kept_NL[i, len(row) - len(own) : len(row)] = 1
            ends_N = torch.tensor([len(row) for row in read])
            mask_NL = (torch.arange(length) <= ends_N[:, None]).long()
            with torch.autocast("cpu", torch.bfloat16):
                found = self.model(
                    input_ids=ids_NL, attention_mask=mask_NL, output_hidden_states=True
                ).hidden_states
            weight_NL = kept_NL * weight_V[ids_NL.clamp(max=len(weight_V) - 1)]
            for k, depth in enumerate(self.depths):
                state = found[depth].float()
                if depth < len(found) - 1:
                    state = self.model.norm(state).float()
                for kept, weights_NL in ((sif[k], weight_NL), (mean[k], kept_NL)):
                    sums_ND = torch.einsum("nl,nld->nd", weights_NL, state)
                    kept[part] = sums_ND / weights_NL.sum(1, keepdim=True).clamp(min=1e-9)
                last[k][part] = state[torch.arange(len(part)), ends_N]
                if moments is not None:
                    moments[k].add(state[kept_NL.bool()])
            for i, own in zip(part, some, strict=True):
                own_T = torch.tensor(own)
                lexical[i] = (weight_V[own_T, None] * whitened(self.embeddings_VD[own_T])).sum(0)
                lexical[i] /= weight_V[own_T].sum().clamp(min=1e-9)
        pooled = {"sif": sif, "mean": mean, "last": last}
        return {f"{name}.lexical": lexical} | {
            f"{name}.{kind}.{depth}": vectors_ND
            for kind, kept in pooled.items()
            for depth, vectors_ND in zip(self.depths, kept, strict=True)
        }


def of_tables(lm: Path, whole: Collection, part: Collection) -> Read:
    """Tables of words and of the LM's pieces, as they begin and trained on the collection."""
    some = evenly(len(whole.documents), TABLE_TEXTS)
    texts = texts_of([Document(str(i), whole.documents[i]) for i in some])
    words = word_table(lm, texts, Analyzer(whole.bm25.terms.language))
    found = {}
    for name, table in (("words", words), ("pieces", pieces_table(lm, texts))):
        for label, state in ((f"{name} begun", table), (name, train_table(table, texts))):
            for side, of_side in (("queries", part.queries), ("documents", part.documents)):
                stems = list(state.stems(of_side))
                starts_N = torch.from_numpy(np.cumsum([0, *map(len, stems[:-1])]))
                flat_T, weight_S1 = torch.from_numpy(np.concatenate(stems)), state.weight_S[:, None]
                sums_ND, weights_N1 = (
                    F.embedding_bag(flat_T, table, starts_N, mode="sum")
                    for table in (weight_S1 * state.rows_SD, weight_S1)
                )
                found[f"{side}.{label}"] = sums_ND / weights_N1.clamp(min=1e-9)
    return found


def pieces_table(lm: Path, texts: Sequence[str]) -> WordTable:
    """A table of the LM's own tokens: whitened input embeddings, weighed by sqrt(idf)."""
    tokenizer, embeddings_VD = _lm_tokenizer(lm), _input_embeddings(lm)
    word_V = [any(map(str.isalnum, tokenizer.decode([i]))) for i in range(len(embeddings_VD))]
    rows_VD = embeddings_VD.float() * torch.tensor(word_V)[:, None]
    table, seen_S = piece_table(tokenizer, rows_VD, texts)
    count_S, _ = frequencies(table, texts)
    rows_SD = rows_VD[seen_S]
    return replace(table, rows_SD=whitening_of(rows_SD, torch.from_numpy(count_S))(rows_SD).float())


def contextual(read: Read, depth: int, pooling: str, power: float) -> tuple[Tensor, Tensor]:
    """Vectors of queries and documents, centred, whitened, of unit spread."""
    queries, documents = (read[f"{s}.{pooling}.{depth}"].double() for s in ("queries", "documents"))
    covariance = read[f"token.{depth}"] if pooling != "last" else torch.cov(documents.T)
    whiten_DD, mean_D = _inverse_power(covariance, power), documents.mean(0)
    return of_unit_spread(*((side - mean_D) @ whiten_DD for side in (queries, documents)))


def top_removed(read: Read, depth: int, components: int) -> tuple[Tensor, Tensor]:
    """SIF means without their first components (Mu & Viswanath, 2018)."""
    queries, documents = (read[f"{s}.sif.{depth}"].double() for s in ("queries", "documents"))
    mean_D = documents.mean(0)
    first = torch.linalg.svd(documents - mean_D, full_matrices=False)[2][:components]
    sides = (side - mean_D for side in (queries, documents))
    return of_unit_spread(*(side - side @ first.T @ first for side in sides))


def lexical(read: Read, name: str = "lexical") -> tuple[Tensor, Tensor]:
    return of_unit_spread(*(read[f"{side}.{name}"].double() for side in ("queries", "documents")))


def of_unit_spread(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    scale = _to_unit_spread(documents)
    return (scale * queries).float(), (scale * documents).float()


def joined(*halves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    queries, documents = (torch.cat(side, dim=1) for side in zip(*halves, strict=True))
    return queries, documents


def scores(collection: Collection, pair: tuple[Tensor, Tensor]) -> list[float]:
    """nDCG@10, dense and fused with BM25 by each of ``RATIOS``."""
    queries, documents = (F.normalize(side, dim=1).numpy() for side in pair)
    ids = collection.document_ids
    dense, cosines = top_k(queries, documents, min(FUSED, len(documents)))
    runs: list[dict[str, dict[str, float]]] = [{} for _ in (0, *RATIOS)]
    for i, name in enumerate(collection.query_ids):
        words = dict(islice(collection.lexical[i].items(), FUSED))
        near = dict(zip(dense[i].tolist(), cosines[i].tolist(), strict=True))
        runs[0][name] = {ids[d]: score for d, score in near.items()}
        for run, ratio in zip(runs[1:], RATIOS, strict=True):
            snapshot = MemorySnapshot(collection.bm25, collection.documents, documents, ratio**2)
            ranking = fuse(snapshot, collection.queries[i], queries[i], near, words)
            run[name] = {ids[d]: score for d, score in ranking.items()}
    return [mean_scores(collection.qrels, run)["ndcg@10"] for run in runs]


def variants(read: Read) -> dict[str, tuple[Tensor, Tensor]]:
    """All forms of the fit, by name."""
    depths = sorted(int(name.rpartition(".")[2]) for name in read if name.startswith("token."))
    tables = {
        name.partition(".")[2]: lexical(read, name.partition(".")[2])
        for name in read
        if name.startswith("queries.") and name.count(".") == 1
    }
    words = tables["lexical"]
    found = dict(tables)
    for depth in depths:
        plain = contextual(read, depth, "sif", Fit.whitening)
        found[f"layers {depth}"] = joined(plain, words)
        found[f"layers {depth}, without words"] = plain
        for label, pooling in (("equal weights", "mean"), ("last token", "last")):
            form = joined(contextual(read, depth, pooling, Fit.whitening), words)
            found[f"layers {depth}, {label}"] = form
        for power in (0.0, 0.25, 0.5):
            form = joined(contextual(read, depth, "sif", power), words)
            found[f"layers {depth}, whitening {power}"] = form
        found[f"layers {depth}, 3 components removed"] = joined(top_removed(read, depth, 3), words)
        for name, table in tables.items():
            if name != "lexical":
                found[f"layers {depth} + {name}"] = joined(plain, table)
    for several in ((2, 6), (4, 9), (6, 12), (2, 6, 12), (4, 9, 15), (6, 12, 18)):
        if set(several) <= set(depths):
            scale = len(several) ** -0.5
            parts = [contextual(read, depth, "sif", Fit.whitening) for depth in several]
            halves = [(scale * q, scale * d) for q, d in parts]
            found[f"layers {' and '.join(map(str, several))}"] = joined(*halves, words)
    return found


def row_of(read: Read, collection: Collection) -> Row:
    """What each form gives on a collection."""
    found = {
        query: {collection.document_ids[d]: score for d, score in ranking.items()}
        for query, ranking in zip(collection.query_ids, collection.lexical, strict=True)
    }
    bm25 = mean_scores(collection.qrels, found)["ndcg@10"]
    forms = {form: scores(collection, pair) for form, pair in variants(read).items()}
    return {"BM25": [bm25] * (1 + len(RATIOS)), **forms}


def print_means(rows: dict[str, Row]) -> None:
    """The mean of each form, and its worst against BM25 as fitted retrievers are fused."""
    titles = ["dense", *(f"fused, W / V {ratio:g}" for ratio in RATIOS)]
    print(f"| | {' | '.join(titles)} | least over BM25 |\n" + "|---" * (2 + len(titles)) + "|")
    for form in next(iter(rows.values())):
        means = np.mean([row[form] for row in rows.values()], axis=0)
        least = min(row[form][-1] - row["BM25"][-1] for row in rows.values())
        print(f"| {form} | " + " | ".join(f"{mean:.4f}" for mean in means) + f" | {least:+.3f} |")


def print_left_out(rows: dict[str, Row], column: int, label: str) -> None:
    """What the best form of the others gives on each collection."""
    left, chosen = list[float](), list[str]()
    for name, row in rows.items():
        others = [other for key, other in rows.items() if key != name]
        forms = [form for form in row if form != "BM25"]
        chosen.append(max(forms, key=lambda f: fmean(other[f][column] for other in others)))
        left.append(row[chosen[-1]][column])
    counts = ", ".join(f"{form}: {chosen.count(form)}" for form in dict.fromkeys(chosen))
    print(f"{label}, chosen without each collection: {fmean(left):.4f} ({counts})")


def millions(model: Path, depths: Sequence[int]) -> list[float]:
    """Parameters of the input embeddings and so many layers, in millions."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel

    with init_empty_weights():
        whole = AutoModel.from_config(AutoConfig.from_pretrained(model))
    embeddings = whole.get_input_embeddings().weight.numel()
    layers = [sum(p.numel() for p in layer.parameters()) for layer in whole.layers]
    return [(embeddings + sum(layers[:depth])) / 1e6 for depth in depths]


def plot(rows: dict[str, Row], model: Path, file: Path) -> None:
    """Mean nDCG@10 by depth and parameters: with and without the trained half for words."""
    import matplotlib.pyplot as plt

    names = [form.split() for form in next(iter(rows.values()))]
    depths = sorted(int(name[1]) for name in names if name[0] == "layers" and len(name) == 2)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True)
    kinds = {
        "layers alone": ", without words",
        "with untrained words": "",
        "with trained words": " + pieces",
    }
    for axis, column, title in zip(axes, (0, -1), ("vectors", "fused with BM25"), strict=True):
        for label, ending in kinds.items():
            forms = [f"layers {depth}{ending}" for depth in depths]
            means = [fmean(row[form][column] for row in rows.values()) for form in forms]
            axis.plot(depths, means, marker="o", label=label)
        for label, form, style in (("BM25", "BM25", "--"), ("table of words", "words", ":")):
            mean = fmean(row[form][column] for row in rows.values())
            axis.axhline(mean, color="black", linestyle=style, label=label)
        sizes = [f"{size:.0f}" for size in millions(model, depths)]
        labels = [f"{depth}\n{size}" for depth, size in zip(depths, sizes, strict=True)]
        axis.set(title=f"{title}, nDCG@10", xlabel="layers; millions of parameters")
        axis.set_xticks(depths, labels, fontsize="small")
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders of BEIR-layout collections")
    add("--model", default="embedded:smollm2-135m", help="language model")
    add("--only", nargs="*", default=[], help="collections; all by default")
    add("--echo", action="store_true", help="the model reads each text twice")
    add("--depths", type=int, nargs="+", default=[0, 2, 4, 6, 9, 12, 15, 18, 24])
    add("--cache", type=Path, default=Path(__file__).parents[1] / "out" / "layers")
    add("--plot", type=Path, help="PNG to write")
    arguments = parser.parse_args()
    model, reader = resolve(arguments.model), None
    folder = arguments.cache / f"{model.name}{'-echo' * arguments.echo}"
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}
    for name in names_in(arguments.data, arguments.only):
        kept, row_file = folder / f"{name}.safetensors", folder / f"{name}.json"
        if not row_file.is_file():
            whole = load_collection(folder_of(name, arguments.data))
            part = part_of(whole)
            if not kept.is_file():
                reader = reader or Reader(model, arguments.depths, arguments.echo)
                read = reader(part) | of_tables(model, whole, part)
                save_file({k: v.contiguous().clone() for k, v in read.items()}, kept)
            row_file.write_text(json.dumps(row_of(load_file(kept), part)))
        rows[name] = json.loads(row_file.read_text())
        print(name, f"{rows[name]['BM25'][0]:.3f}", flush=True)
    print_means(rows)
    print_left_out(rows, 0, "dense")
    print_left_out(rows, -1, "fused")
    if arguments.plot:
        plot(rows, model, arguments.plot)


if __name__ == "__main__":
    main()
