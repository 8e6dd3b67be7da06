"""Cost of training, encoding and chunking, each beside a baseline: `make bench`.

    python -m research.benchmarks.speed --data COLLECTIONS/scifact
    # against the size of a group, and against the LM's depth
    python -m research.benchmarks.speed --what steps --forms ours bound --chunks 8 16 32 64 128
    python -m research.benchmarks.speed --what steps --forms ours bound naive --lm-layers 6 12 30

A training step in the forms of forms.py, on the CPU: medians of times and ratios; peak memory of
each form in a process of its own. A form that does not fit into free memory is left out, and so are
naive forms above --naive-up-to chunks. Encoding: revela's encoder beside SentenceTransformer.encode
on texts of mixed lengths. Reading: what a device that computes by itself waits for the tokenizer.
Chunking: MB/s, by one and more processes. On a GPU, where there is one:
the step at the size of larger models (gpu.py).

Without --data the text is the Python source installed on this machine. Results go to
research/out/bench.json and research/out/bench.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from research.benchmarks import gpu
from research.benchmarks.demo import sources
from research.benchmarks.forms import (
    BOUND,
    LEAN,
    NAIVE,
    OURS,
    PLAIN,
    Features,
    Models,
    in_turn,
    one_step,
    timed,
)
from research.benchmarks.rows import Row, plot, print_row, ratio
from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.corpus.chunk import chunk_all, sentences
from revela.corpus.read import read_corpus
from revela.device import autocast, has_fast_bf16
from revela.lm.language_model import load_language_model, load_tokenizer
from revela.objectives.base import ChunkBatches, Parts
from revela.retriever.build import build_retriever
from revela.retriever.encode import RetrieverEncoder
from revela.retriever.lora import add_lora
from revela.settings import Recipe, presets
from revela.silence import silence_libraries
from revela.training.loop import BatchReader, Rows, make_optimizer, take_step
from revela.training.metrics import Budget
from revela.types import Chunk, Document
from revela.weights import resolve

OUT = Path(__file__).parents[1] / "out"
SMOL = "embedded:smollm2-135m"
CPU = torch.device("cpu")
FORMS = [OURS, BOUND, PLAIN, NAIVE, LEAN]
READY = "one batch, ready"


def group(texts: Sequence[str], tokenizer: Any, chunks: int, tokens: int) -> Features:
    """A group of chunks of this many tokens: two sides for the retriever, one for the LM."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= chunks * tokens:
            break
    if len(ids) < chunks * tokens:
        raise SystemExit(
            f"{chunks} chunks of {tokens} tokens are more than the text has: give a larger --data"
        )
    ids_BL = torch.tensor(ids[: chunks * tokens]).view(chunks, tokens)
    return tuple(
        {"input_ids": t, "attention_mask": torch.ones_like(t)}
        for t in (ids_BL[:, : tokens // 2], ids_BL, ids_BL)
    )


def smollm(preset: str, layers: int, lm_layers: int) -> tuple[Models, Any]:
    """SmolLM2-135M as this preset's models, on the CPU, and the LM's tokenizer."""
    r = Recipe.of(**{**presets()[preset], "layers": layers})
    folder = resolve(SMOL)
    bf16 = has_fast_bf16(CPU)
    retriever = build_retriever(
        folder,
        layers=r.retriever.layers,
        pooling=r.retriever.pooling,
        max_tokens=512,
        lower_case=False,
        query_prompt="",
        passage_prompt="",
    ).to(CPU)
    add_lora(retriever, r.retriever.lora_rank, r.retriever.lora_alpha, 0.0)
    lora = (
        dict(rank=r.retriever.lora_rank, alpha=r.retriever.lora_alpha, dropout=0.0)
        if r.objective.lm_lora
        else None
    )
    if lm_layers:
        folder = shallow(folder, lm_layers)
    return Models(
        r, retriever, load_language_model(folder, bf16=bf16, lora=lora), CPU, bf16
    ), load_tokenizer(folder)


def shallow(folder: Path, layers: int) -> Path:
    """A folder with the lower layers of this LM."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.config.layer_types = None
    out = OUT / f"smollm2-{layers}-layers"
    model.save_pretrained(out)
    load_tokenizer(folder).save_pretrained(out)
    return out


def peak(
    preset: str, form: str, chunks: int, lm_layers: int, arguments: argparse.Namespace
) -> float | None:
    """GB that a step takes beside the models, in a process of its own; None if out of memory."""
    command = [
        sys.executable,
        "-m",
        "research.benchmarks.speed",
        "--child",
        form,
        "--preset",
        preset,
        "--chunks",
        str(chunks),
        "--lm-layers",
        str(lm_layers),
    ]
    command += ["--tokens", str(arguments.tokens), "--layers", str(arguments.layers)]
    run = subprocess.run(
        command + (["--data", str(arguments.data)] if arguments.data else []),
        capture_output=True,
        text=True,
    )
    if run.returncode == 0:
        return float(run.stdout.splitlines()[-1])
    if run.returncode == -signal.SIGKILL or "memory" in run.stderr or "bad_alloc" in run.stderr:
        return None
    raise SystemExit(f"a step of form {form} failed:\n{run.stderr[-2000:]}")


def child(arguments: argparse.Namespace) -> None:
    limit_memory(status("/proc/meminfo", "MemAvailable"))
    texts = [d.full_text for d in corpus(arguments.data)[:2000]]
    models, tokenizer = smollm(arguments.preset[0], arguments.layers, arguments.lm_layers[0])
    form = arguments.child
    one_step(models, form, group(texts, tokenizer, 2, 16))  # what libraries allocate once
    gc.collect()
    before = status("/proc/self/status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    one_step(models, form, group(texts, tokenizer, arguments.chunks[0], arguments.tokens))
    print(status("/proc/self/status", "VmHWM") - before)


def limit_memory(gigabytes: float) -> None:
    """Limit the memory of this process, so that the kernel does not kill another one."""
    limit = int((status("/proc/self/status", "VmData") + gigabytes) * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def status(file: str, key: str) -> float:
    """GB of an entry of a file in /proc."""
    line = next(s for s in Path(file).read_text().splitlines() if s.startswith(key))
    return int(line.split()[1]) / 2**20


def steps(arguments: argparse.Namespace, texts: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for preset in arguments.preset:
        for lm_layers in arguments.lm_layers:
            models, tokenizer = smollm(preset, arguments.layers, lm_layers)
            too_big: dict[str, str] = {}  # forms, and why: with more chunks they would be so again
            for chunks, features in [
                (n, group(texts, tokenizer, n, arguments.tokens)) for n in sorted(arguments.chunks)
            ]:
                forms = [f for f in arguments.forms if f != LEAN or models.gates_LH is not None]
                if chunks > arguments.naive_up_to:
                    why = "its memory grows with the square of the chunks (--naive-up-to)"
                    too_big |= dict.fromkeys((NAIVE, LEAN), f"left out: {why}")
                peaks: dict[str, float | None] = {}
                for form in (f for f in forms if f not in too_big and not arguments.no_memory):
                    peaks[form] = peak(preset, form, chunks, lm_layers, arguments)
                    if peaks[form] is None:
                        too_big[form] = "more memory than this machine has free"
                runs = {f: partial(seconds, models, f, features) for f in forms if f not in too_big}
                times = in_turn(runs, arguments.repeats, arguments.limit)
                for form in forms:
                    size = f"{chunks} x {arguments.tokens} tokens"
                    what = f"step, {preset}, {models.lm.n_layers} layers, {size}"
                    row: Row = {
                        "what": what,
                        "form": form,
                        "preset": preset,
                        "lm_layers": models.lm.n_layers,
                        "chunks": chunks,
                    }
                    if form in times:
                        row["seconds"], row["turns"] = (
                            statistics.median(times[form]),
                            len(times[form]),
                        )
                        if OURS in times:
                            row["to_ours"] = ratio(times[form], times[OURS])
                        row["peak_gb"] = peaks.get(form)
                    else:
                        row["note"] = too_big[form]
                    rows.append(row)
                    print_row(row)
    return rows


def seconds(models: Models, form: str, features: Features) -> float:
    return one_step(models, form, features)[0]


def encoding(arguments: argparse.Namespace, texts: Sequence[str]) -> list[Row]:
    """Texts of 5 to 250 words (log-uniform): revela, SentenceTransformer.encode, fp32 and bf16."""
    rng = random.Random(0)
    cut = [
        " ".join(text.split()[: int(5 * 50 ** rng.random())]) for text in texts[: arguments.encode]
    ]
    model = build_retriever(
        resolve(SMOL),
        layers=arguments.layers,
        pooling="mean",
        max_tokens=512,
        lower_case=False,
        query_prompt="",
        passage_prompt="",
    ).to(CPU)
    bf16 = has_fast_bf16(CPU)

    def stock(half: bool) -> np.ndarray:
        with autocast(CPU, half):
            return model.encode(cut, batch_size=32, normalize_embeddings=True)

    forms: dict[str, Callable[[], np.ndarray]] = {
        "ours": lambda: RetrieverEncoder(model, bf16).encode_passages(cut),
        "sentence-transformers, bf16 autocast": lambda: stock(bf16),
        "sentence-transformers": lambda: stock(False),
    }
    vectors = {}

    def run(form: str) -> None:
        vectors[form] = forms[form]()

    times = in_turn(
        {form: partial(timed, partial(run, form), CPU) for form in forms}, arguments.repeats
    )
    rows = []
    for form in forms:
        cosines = (vectors[form] * vectors["sentence-transformers"]).sum(1)
        rows.append(
            {
                "what": f"encoding {len(cut)} texts of 5 to 250 words",
                "form": form,
                "seconds": statistics.median(times[form]),
                "to_ours": ratio(times[form], times["ours"]),
                "cosine_distance": float(1 - cosines.min()),
            }
        )
        print_row(rows[-1])
    return rows


class Sleeping(torch.nn.Module):
    """In place of an objective on a GPU: it takes so many seconds, and no core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, torch.nn.Parameter(torch.zeros(()))

    def forward(self, _features: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.weight * 1


def reading(arguments: argparse.Namespace, texts: Sequence[str]) -> list[Row]:
    """Steps of 20 ms on a device that is no CPU, for a group of 16 chunks of 156 tokens: how long
    it waits for batches, as a share of the step, beside batches that are there.
    """
    folder, rows, times = resolve(SMOL), list[Row](), dict[str, float]()
    step = 0.02
    recipe = Recipe.of(**presets()["gated"], max_minutes=0.0, max_steps=arguments.reading + 2)
    model = build_retriever(
        folder,
        layers=1,
        pooling="mean",
        max_tokens=512,
        lower_case=False,
        query_prompt=recipe.retriever.query_prompt,
        passage_prompt=recipe.retriever.passage_prompt,
    )
    chunks = arrow_list(Chunk, (Chunk(i, text) for i, text in enumerate(pieces(texts, 130))))
    size = recipe.groups.group_size
    groups = [list(range(i, i + size)) for i in range(0, len(chunks) - size + 1, size)]
    made: dict[str, torch.Tensor] = {}
    for form in (READY, "without reading ahead", "ours"):
        budget, ends = Budget(recipe.training.max_steps), list[float]()
        parts = Parts(recipe, model, [], chunks, CPU, False, count=budget.count)
        collate = ChunkBatches(parts, load_tokenizer(folder), "first-half")

        def read(
            batch: Rows, collate: ChunkBatches = collate, ready: bool = form == READY
        ) -> dict[str, torch.Tensor]:
            if not (ready and made):
                some = [{"text": chunks[row].text, "document": row} for _, row in batch]
                made.update(collate(some))
            return dict(made)

        objective, ahead = Sleeping(step), form == "ours"
        optimizer = make_optimizer(objective, 0.0)
        with BatchReader(recipe, lambda _: iter(groups), read, budget, ahead=ahead) as reader:
            for _ in range(recipe.training.max_steps):
                take_step(objective, optimizer, reader.next_step()[0], 0.0, 0)
                ends.append(time.perf_counter())
        took = np.diff(ends)[1:]
        times[form] = float(np.median(took))
        row: Row = {"what": f"{len(took)} steps of 20 ms, 16 x 156 tokens", "form": form}
        rows.append(row | {"seconds": times[form], "waits": (times[form] - times[READY]) / step})
        print_row(rows[-1])
    return rows


def pieces(texts: Sequence[str], words: int) -> Iterator[str]:
    """Pieces of so many words."""
    for text in texts:
        some = text.split()
        for start in range(0, len(some) - words + 1, words):
            yield " ".join(some[start : start + words])


def chunking(arguments: argparse.Namespace, documents: ArrowList[Document]) -> list[Row]:
    """MB/s of splitting sentences, and of cutting a stored corpus into chunks of 120 words."""
    megabytes = sum(len(d.text.encode()) for d in documents) / 1e6
    forms: dict[str, Callable[[], int]] = {
        "sentences, 1 process": lambda: sum(len(sentences(d.text)) for d in documents)
    }
    for workers in sorted({1, os.cpu_count() or 1}):
        forms[f"chunks, {workers} process{'es' * (workers > 1)}"] = lambda w=workers: sum(
            1 for _ in chunk_all(documents, 120, w)
        )
    rows = []
    for form, run in forms.items():
        times = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        rows.append(
            {
                "what": f"cutting {megabytes:.0f} MB of text",
                "form": form,
                "mb_per_second": megabytes / statistics.median(times),
            }
        )
        print_row(rows[-1])
    return rows


def corpus(data: Path | None) -> ArrowList[Document]:
    if data is None:
        files = (file for _, _, file in sources())
        texts = ((str(f), f.read_text(encoding="utf-8", errors="replace")) for f in files)
        return arrow_list(
            Document,
            (
                Document(name, text, kind="code")
                for name, text in texts
                if 200 < len(text) < 200_000
            ),
        )
    return read_corpus(
        [
            next(p for p in (data / "corpus.jsonl.gz", data / "corpus.jsonl") if p.is_file())
            if data.is_dir()
            else data
        ]
    )[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a folder with corpus.jsonl, or one file of text")
    parser.add_argument(
        "--what",
        nargs="*",
        default=[
            "steps",
            "encoding",
            "reading",
            "chunking",
            *(["gpu"] if torch.cuda.is_available() else []),
        ],
    )
    parser.add_argument("--preset", nargs="*", default=["gated", "paper"])
    parser.add_argument("--chunks", type=int, nargs="*", default=[16])
    parser.add_argument(
        "--lm-layers", type=int, nargs="*", default=[0], help="depths of the LM; 0: all of it"
    )
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--layers", type=int, default=6, help="of the retriever")
    parser.add_argument("--encode", type=int, default=400, help="texts")
    parser.add_argument("--reading", type=int, default=200, help="steps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--limit",
        type=float,
        default=600,
        help="seconds after which a step of one size is not repeated again",
    )
    parser.add_argument("--forms", nargs="*", default=FORMS)
    parser.add_argument(
        "--naive-up-to",
        type=int,
        default=16,
        help="chunks; memory of the naive forms grows with their square",
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", default="bench", help="name of the files in research/out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    gpu.add_arguments(parser)
    arguments = parser.parse_args()
    silence_libraries()
    OUT.mkdir(exist_ok=True)
    if arguments.child:
        return child(arguments)
    device = gpu.the_gpu() if "gpu" in arguments.what else CPU
    rows: list[Row] = []
    if {"steps", "encoding", "reading", "chunking"} & set(arguments.what):
        documents = corpus(arguments.data)
        texts = [d.full_text for d in documents[:4000]]
    if "steps" in arguments.what:
        rows += steps(arguments, texts)
        plot(rows, OUT / f"{arguments.out}.png")
    if "encoding" in arguments.what:
        rows += encoding(arguments, texts)
    if "reading" in arguments.what:
        rows += reading(arguments, texts)
    if "chunking" in arguments.what:
        rows += chunking(arguments, documents)
    (OUT / f"{arguments.out}.json").write_text(json.dumps(rows, indent=1))
    if "gpu" in arguments.what:
        gpu.run(arguments, device, rows, OUT / f"{arguments.out}.json")


if __name__ == "__main__":
    main()
