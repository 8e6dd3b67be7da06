"""What training, encoding and chunking cost, each beside what it should be measured against: `make bench`.

    python bench/speed.py --data COLLECTIONS/scifact

A training step, in four forms that alternate in one process (medians of times and ratios; peak memory of each in its own process):
- ours;
- naive (bench/naive_step.py): two whole passes, all pairs at once in every layer and head, all logits, padded batches;
- naive, open layers: the same, but in-batch attention only in layers where a gate is open;
- bound: the same models' forward and backward with no in-batch attention: the retriever on the same tokens, the LM as often and
  as deep as the preset needs, on our packed rows and with our blockwise loss;
- plain: the same with stock padded modules and all logits.

Encoding: our encoder beside SentenceTransformer.encode on texts of mixed lengths. Chunking: MB/s, by one and more processes.
Without --data the text is the Python source installed on this machine. Everything goes to bench/out/bench.json and bench/out/bench.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo import sources
from naive_step import NaiveStep
from revela.config import PRESETS, Recipe
from revela.data.chunk import chunk_all, sentences
from revela.data.store import Stored, stored
from revela.data.text import read_corpus
from revela.models import retriever as retrievers
from revela.models.language_model import LanguageModel, load_language_model, load_tokenizer
from revela.models.quiet import quieten
from revela.models.weights import resolve
from revela.objectives.revela import Revela, gates_on_heads
from revela.types import Document

OUT = Path(__file__).parent / "out"
SMOL = "embedded:smollm2-135m"
CPU = torch.device("cpu")
NAIVE, LEAN = "naive", "naive, open layers"
FORMS = ["ours", "bound", "plain", NAIVE, LEAN]

Features = tuple[dict[str, Tensor], ...]
Step = Callable[[Features], Tensor]


def group(texts: Sequence[str], tokenizer: Any, chunks: int, tokens: int) -> Features:
    """A group of chunks of just so many tokens, as the retriever reads them twice and as the LM does."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= chunks * tokens:
            break
    ids_BL = torch.tensor(ids[: chunks * tokens]).view(chunks, tokens)
    return tuple({"input_ids": t, "attention_mask": torch.ones_like(t)} for t in (ids_BL[:, : tokens // 2], ids_BL, ids_BL))


class Models:
    """The models of a preset, fresh, and the forms of its step."""

    def __init__(self, preset: str, layers: int, lm_layers: int) -> None:
        self.recipe = r = Recipe(**{**PRESETS[preset], "layers": layers})
        folder = resolve(SMOL)
        self.bf16 = retrievers.has_fast_bf16(CPU)
        self.retriever = retrievers.build_retriever(
            folder, layers=r.layers, pooling=r.pooling, max_tokens=512, lower_case=False, query_prompt="", passage_prompt=""
        )
        retrievers.add_lora(self.retriever, r.lora_rank, r.lora_alpha, 0.0)
        lora = dict(rank=r.lora_rank, alpha=r.lora_alpha, dropout=0.0) if r.lm_lora else None
        if lm_layers:
            folder = self._shallow(folder, lm_layers)
        self.lm: LanguageModel = load_language_model(folder, bf16=self.bf16, lora=lora)
        self.tokenizer = load_tokenizer(folder)
        first = int(r.gate_first_layer * self.lm.n_layers)
        # Which heads does not matter here: as many as the preset gates, spread over the layers that it may gate.
        heads = {(first + i % (self.lm.n_layers - first), 7 * i % self.lm.n_heads) for i in range(r.gate_heads)}
        self.gates_LH = None if r.mix == "sum" else gates_on_heads(self.lm, r.gate, sorted(heads))

    def _shallow(self, folder: Path, layers: int) -> Path:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.config.layer_types = None
        out = OUT / f"smollm2-{layers}-layers"
        model.save_pretrained(out)
        load_tokenizer(folder).save_pretrained(out)
        return out

    @property
    def inner(self) -> Any:
        """The causal LM itself, whatever wraps it."""
        return self.lm.model.get_base_model() if hasattr(self.lm.model, "get_base_model") else self.lm.model

    def step(self, form: str) -> Step:
        r = self.recipe
        self.inner.set_attn_implementation("sdpa" if form == "plain" else "revela")
        if form in (NAIVE, LEAN):
            return NaiveStep(self.retriever, self.lm.model, self.gates_LH, r.tau, r.standardise, everywhere=form == NAIVE)
        objective = Revela(
            self.retriever, self.lm, tau=r.tau, gates_LH=self.gates_LH, v_norm=r.v_norm, epsilon=r.epsilon, standardise=r.standardise
        )
        if form == "ours":
            return objective
        passes = self._packed_passes if form == "bound" else self._stock_passes

        def both(features: Features) -> Tensor:
            query, passage, chunk = features
            vectors = [self.retriever(dict(f))["sentence_embedding"].float() for f in (query, passage)]
            return passes(chunk, objective.layers) + sum(v.sum() for v in vectors)

        return both

    def _packed_passes(self, chunk: dict[str, Tensor], layers: Sequence[int]) -> Tensor:
        packed = self.lm.pack(chunk["input_ids"], chunk["attention_mask"])
        memory = self.lm.read(packed, layers)
        if self.lm.trainable:  # stream e's backward, without the attention that leads to it
            loss = self.lm.loss(packed, memory, lambda _layer, own, *_: own)
            return loss + sum(0 * (memory.keys[i].sum() + memory.values[i].sum()) for i in layers)
        memory.below = memory.below.detach().requires_grad_()
        loss = self.lm.loss(packed, memory, lambda _layer, own, *_: own)
        torch.autograd.grad(loss, [memory.below])
        return loss.detach()

    def _stock_passes(self, chunk: dict[str, Tensor], layers: Sequence[int]) -> Tensor:
        ids, body, head = chunk["input_ids"], self.inner.model, self.inner.lm_head

        def loss_of(hidden: Tensor) -> Tensor:
            return F.cross_entropy(head(hidden)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

        if self.lm.trainable:
            read, predicted = (body(input_ids=ids, use_cache=False).last_hidden_state for _ in range(2))
            return loss_of(predicted) + 0 * read.sum()
        hidden = body.embed_tokens(ids)
        rotary = body.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
        with torch.no_grad():
            for i, block in enumerate(body.layers[: max(layers) + 1]):
                if i == min(layers):
                    below = hidden
                hidden = block(hidden, position_embeddings=rotary, attention_mask=None)
        hidden = leaf = below.detach().requires_grad_()
        for block in body.layers[min(layers) :]:
            hidden = block(hidden, position_embeddings=rotary, attention_mask=None)
        loss = loss_of(body.norm(hidden))
        torch.autograd.grad(loss, [leaf])
        return loss.detach()


def one_step(models: Models, form: str, features: Features) -> float:
    """Seconds of one forward and backward."""
    step = models.step(form)
    start = time.perf_counter()
    with retrievers.without_padding(models.retriever) if form in ("ours", "bound") else nullcontext():
        with retrievers.autocast(CPU, models.bf16):
            loss = step(features)
        loss.backward()
    seconds = time.perf_counter() - start
    for p in [*models.retriever.parameters(), *models.lm.parameters()]:
        p.grad = None
    return seconds


def peak(preset: str, form: str, chunks: int, lm_layers: int, arguments: argparse.Namespace) -> float | None:
    """GB that a step takes beside the models, in a process of its own; None if it does not come back (too little memory)."""
    command = [sys.executable, __file__, "--child", form, "--preset", preset, "--chunks", str(chunks), "--lm-layers", str(lm_layers)]
    command += ["--tokens", str(arguments.tokens), "--layers", str(arguments.layers)]
    run = subprocess.run(command + (["--data", str(arguments.data)] if arguments.data else []), capture_output=True, text=True)
    return float(run.stdout.splitlines()[-1]) if run.returncode == 0 else None


def child(arguments: argparse.Namespace) -> None:
    texts = [d.full_text for d in corpus(arguments.data)[:2000]]
    models = Models(arguments.preset[0], arguments.layers, arguments.lm_layers[0])
    one_step(models, arguments.child, group(texts, models.tokenizer, 2, 16))  # what libraries allocate once
    gc.collect()
    before = memory_of_this_process("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    one_step(models, arguments.child, group(texts, models.tokenizer, arguments.chunks[0], arguments.tokens))
    print(memory_of_this_process("VmHWM") - before)


def memory_of_this_process(key: str) -> float:
    """GB, of Linux's /proc/self/status."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key))
    return int(line.split()[1]) / 2**20


def steps(arguments: argparse.Namespace, texts: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for preset in arguments.preset:
        for lm_layers in arguments.lm_layers:
            models = Models(preset, arguments.layers, lm_layers)
            for chunks in arguments.chunks:
                features = group(texts, models.tokenizer, chunks, arguments.tokens)
                forms = [f for f in arguments.forms if f not in (NAIVE, LEAN) or chunks <= arguments.naive_up_to]
                forms = [f for f in forms if f != LEAN or models.gates_LH is not None]
                peaks = {f: None if arguments.no_memory else peak(preset, f, chunks, lm_layers, arguments) for f in forms}
                fit = [f for f in forms if arguments.no_memory or peaks[f] is not None]
                times: dict[str, list[float]] = {form: [] for form in fit}
                for turn in range(arguments.repeats + 1):
                    for form in fit:
                        seconds = one_step(models, form, features)
                        if turn:  # the first warms up
                            times[form].append(seconds)
                for form in forms:
                    what = f"step, {preset}, {models.lm.n_layers} layers, {chunks} x {arguments.tokens} tokens"
                    row = {"what": what, "form": form, "preset": preset, "lm_layers": models.lm.n_layers, "chunks": chunks}
                    if form in fit:
                        row["seconds"] = statistics.median(times[form])
                        row["to_ours"] = statistics.median(a / b for a, b in zip(times[form], times["ours"], strict=True))
                        row["peak_gb"] = peaks[form]
                    else:
                        row["note"] = "more memory than this machine has"
                    rows.append(row)
                    print_row(row)
    return rows


def encoding(arguments: argparse.Namespace, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Texts of 5 to 250 words (log-uniform), by our encoder and by SentenceTransformer.encode in fp32 and in bf16."""
    rng = random.Random(0)
    cut = [" ".join(text.split()[: int(5 * 50 ** rng.random())]) for text in texts[: arguments.encode]]
    model = retrievers.build_retriever(
        resolve(SMOL), layers=arguments.layers, pooling="mean", max_tokens=512, lower_case=False, query_prompt="", passage_prompt=""
    )
    bf16 = retrievers.has_fast_bf16(CPU)

    def stock(half: bool) -> np.ndarray:
        with retrievers.autocast(CPU, half):
            return model.encode(cut, batch_size=32, normalize_embeddings=True)

    forms: dict[str, Callable[[], np.ndarray]] = {
        "ours": lambda: retrievers.RetrieverEncoder(model, bf16).encode_passages(cut),
        "sentence-transformers, bf16 autocast": lambda: stock(bf16),
        "sentence-transformers": lambda: stock(False),
    }
    times: dict[str, list[float]] = {form: [] for form in forms}
    vectors = {}
    for turn in range(arguments.repeats + 1):
        for form, encode in forms.items():
            start = time.perf_counter()
            vectors[form] = encode()
            if turn:
                times[form].append(time.perf_counter() - start)
    rows = []
    for form in forms:
        rows.append({
            "what": f"encoding {len(cut)} texts of 5 to 250 words", "form": form, "seconds": statistics.median(times[form]),
            "to_ours": statistics.median(a / b for a, b in zip(times[form], times["ours"], strict=True)),
            "cosine_distance": float(1 - (vectors[form] * vectors["sentence-transformers"]).sum(1).min()),
        })  # fmt: skip
        print_row(rows[-1])
    return rows


def chunking(arguments: argparse.Namespace, documents: Stored[Document]) -> list[dict[str, Any]]:
    """MB/s of splitting sentences, and of cutting a stored corpus into chunks of 120 words."""
    megabytes = sum(len(d.text.encode()) for d in documents) / 1e6
    forms: dict[str, Callable[[], int]] = {"sentences, 1 process": lambda: sum(len(sentences(d.text)) for d in documents)}
    for workers in sorted({1, os.cpu_count() or 1}):
        forms[f"chunks, {workers} process{'es' * (workers > 1)}"] = lambda w=workers: sum(1 for _ in chunk_all(documents, 120, w))
    rows = []
    for form, run in forms.items():
        times = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        rows.append({"what": f"cutting {megabytes:.0f} MB of text", "form": form, "mb_per_second": megabytes / statistics.median(times)})
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    numbers = (f"{k} {v:.3g}" for k, v in row.items() if isinstance(v, float))
    print(f"{row['what']:<48} {row['form']:<38} {', '.join(numbers)}{row.get('note', '')}", flush=True)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time and memory of a step against the chunks of a group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    series = sorted({(r["preset"], r["lm_layers"], r["form"]) for r in rows if "chunks" in r})
    for axis, key, label in ((axes[0], "seconds", "seconds a step"), (axes[1], "peak_gb", "peak memory of a step, GB")):
        if all(r.get(key) is None for r in rows):
            continue
        for preset, lm_layers, form in series:
            of_series = (r for r in rows if (r.get("preset"), r.get("lm_layers"), r["form"]) == (preset, lm_layers, form))
            mine = [r for r in of_series if r.get(key) is not None]
            axis.plot([r["chunks"] for r in mine], [r[key] for r in mine], marker="o", label=f"{preset}, {lm_layers} layers, {form}")
        axis.set(xscale="log", yscale="log", xlabel="chunks a group", ylabel=label)
        axis.set_xticks(sorted({r["chunks"] for r in rows if "chunks" in r}))
        axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def corpus(data: Path | None) -> Stored[Document]:
    if data is None:
        files = (file for _, _, file in sources())
        texts = ((str(f), f.read_text(encoding="utf-8", errors="replace")) for f in files)
        return stored(Document, (Document(name, text, kind="code") for name, text in texts if 200 < len(text) < 200_000))
    return read_corpus([next(p for p in (data / "corpus.jsonl.gz", data / "corpus.jsonl") if p.is_file()) if data.is_dir() else data])[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a folder with corpus.jsonl, or one file of text")
    parser.add_argument("--what", nargs="*", default=["steps", "encoding", "chunking"])
    parser.add_argument("--preset", nargs="*", default=["gated", "paper"])
    parser.add_argument("--chunks", type=int, nargs="*", default=[16])
    parser.add_argument("--lm-layers", type=int, nargs="*", default=[0], help="depths of the LM; 0: all of it")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--layers", type=int, default=6, help="of the retriever")
    parser.add_argument("--encode", type=int, default=400, help="texts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forms", nargs="*", default=FORMS)
    parser.add_argument("--naive-up-to", type=int, default=16, help="chunks: the naive form's memory grows with their square")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", default="bench", help="name of the files in bench/out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quieten()
    OUT.mkdir(exist_ok=True)
    if arguments.child:
        return child(arguments)
    documents = corpus(arguments.data)
    texts = [d.full_text for d in documents[:4000]]
    rows: list[dict[str, Any]] = []
    if "steps" in arguments.what:
        rows += steps(arguments, texts)
        plot(rows, OUT / f"{arguments.out}.png")
    if "encoding" in arguments.what:
        rows += encoding(arguments, texts)
    if "chunking" in arguments.what:
        rows += chunking(arguments, documents)
    (OUT / f"{arguments.out}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
