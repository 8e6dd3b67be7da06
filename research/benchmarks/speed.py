"""Speed of encoding, of making batches, and of chunking, each beside a baseline: `make bench`.

    python -m research.benchmarks.speed --data COLLECTIONS/scifact

Encoding: revela's encoder beside SentenceTransformer.encode, on texts of mixed lengths. Reading:
what a device that computes by itself waits for the tokenizer. Chunking: MB/s, by one and more
processes. Without --data the text is the Python source installed on this machine. The step itself:
steps.py.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from research.benchmarks.demo import sources
from research.benchmarks.options import corpus_of, parser_of, write_out
from research.benchmarks.steps import Row, in_turn, print_row, ratio, timed
from revela.encoders.load import resolve
from revela.encoders.torch_model import has_fast_bf16
from revela.quiet_libraries import silence_libraries
from revela.text.chunk import chunk_all
from revela.text.load import read_corpus
from revela.text.sentences import sentences
from revela.text.spool import ArrowList, arrow_list
from revela.training.device import autocast
from revela.training.distributed import available_cores
from revela.training.methods.base import BuildContext
from revela.training.methods.revela import ChunkBatches
from revela.training.models import load_tokenizer
from revela.training.recipe import Recipe
from revela.training.retriever.build import build_retriever
from revela.training.retriever.module import RetrieverEncoder, RetrieverModule
from revela.training.settings import Retriever
from revela.training.step import BatchReader, Budget, Rows, make_optimizer, take_step
from revela.types import Chunk, Document

SMOL = "embedded:smollm2-135m"
CPU = torch.device("cpu")
READY = "one batch, ready"


def retriever(layers: int, **prompts: str) -> Any:
    """The lower layers of SmolLM2-135M with mean pooling, on the CPU."""
    given = dict(query_prompt="", passage_prompt="") | prompts
    settings = dict(pooling="mean", max_tokens=512, lower_case="no", layers=layers)
    return build_retriever(resolve(SMOL), Retriever(**settings, **given)).to(CPU)


def encoding(arguments: argparse.Namespace, texts: Sequence[str]) -> list[Row]:
    """Texts of 5 to 250 words (log-uniform): revela, SentenceTransformer.encode, fp32 and bf16."""
    rng = random.Random(0)
    cut = [
        " ".join(text.split()[: int(5 * 50 ** rng.random())]) for text in texts[: arguments.encode]
    ]
    model = retriever(arguments.layers)
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
    rows = list[Row]()
    what = f"encoding {len(cut)} texts of 5 to 250 words"
    for form, seconds in times.items():
        cosines = (vectors[form] * vectors["sentence-transformers"]).sum(1)
        row: Row = {"what": what, "form": form, "seconds": statistics.median(seconds)}
        row |= {"to_ours": ratio(seconds, times["ours"])}
        rows.append(row | {"cosine_distance": float(1 - cosines.min())})
        print_row(rows[-1])
    return rows


class Sleeping(torch.nn.Module):
    """Stands for a loss on a GPU: takes time, but no core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, torch.nn.Parameter(torch.zeros(()))

    def forward(self, _features: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.weight * 1


def reading(arguments: argparse.Namespace, texts: Sequence[str]) -> list[Row]:
    """Steps of 20 ms beside the CPU, for groups of 16 chunks of 156 tokens: the time spent waiting
    for batches, as a share of the step.
    """
    folder, rows, times = resolve(SMOL), list[Row](), dict[str, float]()
    step = 0.02
    recipe = Recipe.of("revela-gated", max_minutes=0.0, max_steps=arguments.reading + 2)
    r = recipe.retriever
    prompts = dict(query_prompt=r.query_prompt, passage_prompt=r.passage_prompt)
    model = RetrieverModule(retriever(1, **prompts))
    chunks = arrow_list(Chunk, (Chunk(i, text) for i, text in enumerate(pieces(texts, 130))))
    size = recipe.groups.group_size
    groups = [list(range(i, i + size)) for i in range(0, len(chunks) - size + 1, size)]
    made: dict[str, torch.Tensor] = {}
    for form in (READY, "without reading ahead", "ours"):
        budget, ends = Budget(recipe.training.max_steps), list[float]()
        parts = BuildContext(
            recipe.groups,
            recipe.queries,
            recipe.retriever,
            recipe.context,
            recipe.lm,
            recipe.training,
            *(model, [], chunks, False),
            count=budget.count,
        )
        collate = ChunkBatches(parts, load_tokenizer(folder), "first-half")

        def read(
            batch: Rows, collate: ChunkBatches = collate, ready: bool = form == READY
        ) -> dict[str, torch.Tensor]:
            if not (ready and made):
                some = [{"text": chunks[row].text, "document": row} for _, row in batch]
                made.update(collate(some))
            return dict(made)

        loss, ahead = Sleeping(step), form == "ours"
        optimizer = make_optimizer(loss, recipe.optimizer)
        one = dict(groups_per_step=1, groups_per_batch=1, is_shared=False)
        some = BatchReader(lambda _: iter(groups), read, budget, ahead=ahead, **one)
        with some as reader:
            for _ in range(recipe.training.max_steps):
                take_step(loss, optimizer, reader.next_step()[0], 0.0, 0)
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
    for workers in sorted({1, available_cores()}):
        forms[f"chunks, {workers} process{'es' * (workers > 1)}"] = lambda w=workers: sum(
            1 for _ in chunk_all(documents, 120, w)
        )
    rows = list[Row]()
    for form, run in forms.items():
        seconds = statistics.median(timed(run, CPU) for _ in range(arguments.repeats))
        row: Row = {"what": f"cutting {megabytes:.0f} MB of text", "form": form}
        rows.append(row | {"mb_per_second": megabytes / seconds})
        print_row(rows[-1])
    return rows


def corpus(data: Path | None) -> ArrowList[Document]:
    if data is None:
        files = (file for _, _, file in sources())
        texts = ((str(f), f.read_text(encoding="utf-8", errors="replace")) for f in files)
        long = (Document(f, t, kind="code") for f, t in texts if 200 < len(t) < 200_000)
        return arrow_list(Document, long)
    return read_corpus([corpus_of(data) if data.is_dir() else data])[0]


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    measures = {"encoding": encoding, "reading": reading, "chunking": chunking}
    add("--data", type=Path, help="a folder with corpus.jsonl, or one file of text")
    add("--what", nargs="*", default=list(measures), choices=measures)
    add("--layers", type=int, default=6, help="of the retriever")
    add("--encode", type=int, default=400, help="texts")
    add("--reading", type=int, default=200, help="steps")
    add("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    silence_libraries()
    documents = corpus(arguments.data)
    texts = [d.full_text for d in documents[:4000]]
    rows = list[Row]()
    for what in arguments.what:
        rows += measures[what](arguments, documents if what == "chunking" else texts)
    write_out("bench.json", rows)


if __name__ == "__main__":
    main()
