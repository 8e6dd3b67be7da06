"""Train what tests/records.json records by ``training.train`` on a pretended GPU, with a stop and a
resume between; index, search and evaluate there and on the CPU. Prints losses and the host's waits
of each step as JSON.

    PYTHONPATH=src:tests python -m tests.research.train_on_a_pretend_gpu TINY-LM OUT RUN ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sentence_transformers.base import model as sentence_transformers

from conftest import logged
from revela import Retriever
from revela.evaluation.collection import Collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.label_free import HeldOutCheck, tasks
from revela.training import packing, rank_heads
from revela.training import train as run
from revela.training.checks import CheckPlan
from revela.training.lm.encoder_decoder import EncoderDecoder
from revela.training.methods.revela import Revela
from revela.training.recipe import Recipe
from revela.training.step import BatchReader, Progress
from tests import test_records
from tests.research.pretend_gpu import DEVICE, waits
from tests.test_records import DOCUMENTS, MORE

CPU = torch.device("cpu")
STOPS = [2, 3]  # steps, of eight
HALF = "revela-gated in bf16"
RUNS = {**test_records.RUNS, HALF: test_records.RUNS["revela-gated"] | dict(precision="bf16")}
CHECK = HeldOutCheck(tasks(MORE[24:32], 12, 8, 24, 0))


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """While open, revela and sentence-transformers find this device."""
    save = EncoderDecoder.save  # by transformers, which asks for addresses in memory
    with (
        mock.patch.object(EncoderDecoder, "save", lambda self, folder: save(self.cpu(), folder)),
        mock.patch.object(run, "compute_device", lambda: device),
        mock.patch.object(rank_heads, "compute_device", lambda: device),
        mock.patch.object(sentence_transformers, "get_device_name", lambda: device.type),
    ):
        yield


@contextmanager
def watched(counted: list[dict[str, int]]) -> Iterator[None]:
    """While open, Ctrl-C is pressed after some steps, and each step's waits are listed."""
    next_step, advance, log = BatchReader.next_step, Progress.advance, Progress.log

    def starting(self: BatchReader) -> Any:
        waits.clear()
        return next_step(self)

    def advancing(self: Progress) -> None:
        if len(counted) + 1 in STOPS:
            signal.raise_signal(signal.SIGINT)
        advance(self)

    def logging(self: Progress, *numbers: Any) -> None:
        counted.append(dict(waits))
        log(self, *numbers)

    with (
        mock.patch.object(BatchReader, "next_step", starting),
        mock.patch.object(Progress, "advance", advancing),
        mock.patch.object(Progress, "log", logging),
    ):
        yield


def trained(name: str, lm: Path, out: Path) -> dict[str, Any]:
    """Losses and gradients of a run, and the waits of each of its steps."""
    models = dict.fromkeys(("model", "lm"), str(lm))
    recipe = Recipe.of(**models | RUNS[name] | dict(keep="best"))
    check = None if name == "dwell-spans" else CHECK
    documents = MORE if name == "dwell-spans" else DOCUMENTS
    counted: list[dict[str, int]] = []
    os.environ["REVELA_CACHE"] = str(out.parent / "cache")  # the LM's heads are found here
    first = 0.3 if "gate_heads" in RUNS[name] else Revela.gate_first_layer  # as for the records
    with watched(counted), mock.patch.object(Revela, "gate_first_layer", first):
        for resume in (False, True):
            run.train(recipe, documents, out / "run", plan=CheckPlan(check), resume=resume)
    steps = logged(out / "run")
    found = {what: [row[what] for row in steps] for what in ("loss", "grad_norm")}
    return {**found, "waits": counted}


def used(folder: Path, out: Path) -> dict[str, Any]:
    """What a saved retriever finds in an index and in a collection; where its weights are."""
    retriever = Retriever(folder, "fp32")
    searcher = retriever.index(DOCUMENTS, out / "index", chunk_words=12, keep_tokens=True)
    ways: list[dict[str, Any]] = [{}, dict(mode="dense"), dict(rerank="late-interaction")]
    hits = [hit for way in ways for hit in searcher.search("ocean01 ocean02", 4, **way)]
    ids, texts = zip(*((d.id, d.text) for d in DOCUMENTS), strict=True)
    queries = [" ".join(text.split()[:3]) for text in texts[:6]]
    qrels = {name: {name: 1} for name in ids[:6]}
    collection = Collection("made up", list(ids), list(texts), list(ids[:6]), queries, qrels)
    found = outcomes(collection, {"tiny": retriever.encoder}, rerank="late-interaction")
    return {
        "devices": sorted({p.device.type for p in retriever.encoder.model.parameters()}),
        "hits": [[hit.id, hit.score] for hit in hits],
        "scores": {
            system: [scores["ndcg@10"] for scores in queries.values()]
            for system, queries in found.items()
        },
    }


def main() -> None:
    lm, out, *names = sys.argv[1:]
    packing.EXPLICIT_SCORES = 0  # as on a GPU, the fused form
    found: dict[str, Any] = {}
    with computing_on(DEVICE):
        for name in names:
            try:
                found[name] = trained(name, Path(lm), Path(out, name))
            except Exception:
                found[name] = {"error": traceback.format_exc()}
    folder = Path(out, "revela-gated", "run")
    if (folder / "modules.json").is_file():
        for device in (CPU, DEVICE):
            with computing_on(device):
                found[device.type] = used(folder, Path(out, device.type))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
