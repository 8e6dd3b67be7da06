"""The quality tables of docs/results.md: retrievers after minutes on a laptop, and baselines.

    python -m research.benchmarks.quality --data COLLECTIONS --minutes 20 --other-minutes 10
    python -m research.benchmarks.quality --data COLLECTIONS --what methods --minutes 8
    python -m research.benchmarks.quality --data COLLECTIONS --what groups

Per collection, trained on its own raw text: BM25, the backbone untrained with several poolings,
with the label-free fit (token weights and whitening), revela-gated, MiniLM, and every hybrid;
on SciFact also a second seed and revela-paper for the same time. ``--what methods``: every
method from the same start for the same minutes of one core, on SciFact and cosqa, its last
state, beside that start. ``--what groups``: revela-gated's first updates with groups by
document, at random and by clusters, on conala too, from an uninformed start (the EOS
vector), so that the difference is the groups'. Each row is kept in research/results/quality.csv and
made only once; delete a row to make it again.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from research.benchmarks.options import (
    RESEARCH,
    corpus_of,
    parser_of,
    print_cells,
    print_header,
)
from revela.evaluation.metrics import METRICS

OUT = RESEARCH / "out" / "quality"  # models while they are scored, written queries, heads
RESULTS = RESEARCH / "results" / "quality.csv"
KINDS = "alone", "fused", "BM25"
COLUMNS = ["collection", "system", "steps", "minutes", "peak_gb"]
COLUMNS += [f"{kind} {metric}" for kind in KINDS for metric in METRICS]
COLLECTIONS = ["scifact", "cosqa", "cranfield", "med", "npl_vaswani"]
MAX_TOKENS = "256"  # what MiniLM reads; the same for all
SMOL, MINILM = "embedded:smollm2-135m", "embedded:minilm-l6"
BOTH = ["--model", SMOL, "--lm", SMOL]
PLAIN = {"query_prompt": "", "passage_prompt": ""}  # without a fit, prompts only do harm
UNTRAINED = {
    "mean, 6 layers, fitted": dict(fit=True),
    "mean, 8 layers": dict(layers=8, pooling="mean", **PLAIN),
    "mean, 6 layers": dict(layers=6, pooling="mean", **PLAIN),
    "weighted mean, 6 layers": dict(layers=6, pooling="weighted-mean", **PLAIN),
    "EOS, 6 layers": dict(layers=6, pooling="eos", **PLAIN),
}

VARIANTS = {  # of the presets, for --what methods
    "dream, rate 3e-4": "--method dream --learning-rate 3e-4",
    "dream, tau .05": "--method dream --tau 0.05",
    "gains, by document": "--method gains --groups document",
    "contrastive-pairs, clusters": "--method contrastive-pairs --groups cluster",
}
ASKED = ("dream, rate 3e-4", "dream, tau .05")


def save_untrained(
    settings: dict[str, Any], corpus: Path, out: Path, lm: str = SMOL, steps: int | None = 0
) -> None:
    """Save the backbone with a pooling, and with the label-free fit to the corpus if ``fit``, whose
    half for words is trained for so many steps (as by ``revela fit --steps``).
    """
    from revela.encoders.load import resolve
    from revela.encoders.torch_model import has_fast_bf16
    from revela.quiet_libraries import silence_libraries
    from revela.text.load import read_corpus
    from revela.training.recipe import Recipe
    from revela.training.retriever.build import untrained_retriever
    from revela.training.retriever.fit import WORDS_TO_VECTORS
    from revela.training.retriever.module import RetrieverEncoder
    from revela.training.retriever.save import save_retriever
    from revela.training.training_set import TrainingSet
    from revela.training.word_table import fit_encoder

    silence_libraries()
    fit = settings.get("fit", False)
    recipe = Recipe.of(**{k: v for k, v in settings.items() if k != "fit"})
    documents, _ = read_corpus([corpus])
    model = untrained_retriever(recipe.retriever, resolve(lm), documents)
    if fit:
        encoder = RetrieverEncoder(model, has_fast_bf16(model.device))
        encoder.retriever.max_tokens = recipe.lm.lm_tokens
        fit_encoder(encoder, TrainingSet(recipe, documents), steps)
    save_retriever(model, out, "untrained", words_to_vectors=WORDS_TO_VECTORS if fit else 1.0)


def kept_rows() -> dict[tuple[str, str], dict[str, str]]:
    """The rows that were made, by collection and system."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        return {(row["collection"], row["system"]): row for row in csv.DictReader(file)}


def make_row(
    name: str,
    folder: Path,
    model: str | None = None,
    train: list[str] | None = None,
    untrained: dict[str, Any] | None = None,
) -> None:
    """Keep the scores of one system on one collection, alone and fused with BM25."""
    print(f"== {folder.name}: {name}", flush=True)
    row: dict[str, Any] = {"collection": folder.name, "system": name}
    with tempfile.TemporaryDirectory(dir=OUT) as scratch:
        target = model or f"{scratch}/model"
        if train is not None:
            row |= trained_in(folder, target, train)
        if untrained is not None:
            save_untrained(untrained, corpus_of(folder), Path(target))
        judged = ["--on", str(folder), "--max-tokens", MAX_TOKENS]
        command = ["revela", "eval", target, *judged, "--json", f"{scratch}/scores.json"]
        subprocess.run(command, check=True)
        scores = json.loads(Path(scratch, "scores.json").read_text())[folder.name]
    alone = next(s for s in scores if s != "BM25" and "+ BM25" not in s)
    for kind, system in zip(KINDS, (alone, f"{alone} + BM25 (RRF)", "BM25"), strict=True):
        row |= {f"{kind} {metric}": round(scores[system]["means"][metric], 5) for metric in METRICS}
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def trained_in(folder: Path, target: str, flags: list[str]) -> dict[str, Any]:
    """Train on a collection into ``target``: updates, minutes, memory."""
    if "--heads" in flags:
        find_heads(folder)
    peak = run_and_weigh(["revela", "train", str(corpus_of(folder)), "--out", target, *flags])
    last = json.loads(Path(target, "metrics.jsonl").read_text().splitlines()[-1])
    return {"steps": last["step"], "minutes": last["minutes"], "peak_gb": round(peak, 3)}


def run_and_weigh(command: list[str]) -> float:
    """Run a command to its end; its peak memory in GB."""
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss / 2**20


def plan(minutes: float, other_minutes: float) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(collection, system, how to make it), the most important first."""
    budget = {name: minutes if name == "scifact" else other_minutes for name in COLLECTIONS}

    def trained(name: str, seed: int, *flags: str) -> list[str]:
        return [*BOTH, *f"--max-minutes {budget[name]:g} --seed {seed}".split(), *flags]

    fitted, *others = UNTRAINED
    for name in COLLECTIONS:
        yield name, f"revela-gated, {budget[name]:g} min, seed 0", {"train": trained(name, 0)}
        yield name, f"untrained, {fitted}", {"untrained": UNTRAINED[fitted]}
        yield name, "MiniLM-L6 (supervised)", {"model": MINILM}
    yield "scifact", f"revela-gated, {minutes:g} min, seed 1", {"train": trained("scifact", 1)}
    # One group an update and 8 layers: with 32 groups and all layers the time would end after a
    # handful of updates.
    paper = [
        "--method",
        "revela-paper",
        "--groups-per-step",
        "1",
        "--warmup-steps",
        "10",
        "--layers",
        "8",
    ]
    yield "scifact", f"revela-paper, {minutes:g} min", {"train": trained("scifact", 0, *paper)}
    for label in others:
        yield "scifact", f"untrained, {label}", {"untrained": UNTRAINED[label]}
    for name in COLLECTIONS[1:]:
        yield name, f"untrained, {others[0]}", {"untrained": UNTRAINED[others[0]]}


def plan_methods(minutes: float, seeds: Sequence[int]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The same for every method: one core, seed after seed, the most instructive first."""
    names = ["contrastive-pairs", "gains", "dream-infonce", "contrastive-crop"]
    names += ["dream", "replug", "revela-gated"]
    for seed, name in product(seeds, ("cosqa", "scifact")):
        common = [*BOTH, *f"--threads 1 --seed {seed} --keep last".split()]
        asked = ["--max-queries", "1000", "--queries-file", str(OUT / "written" / f"{name}.jsonl")]
        still = ["--max-minutes", "0", "--max-steps", "1", "--learning-rate", "1e-12"]
        for words in (48, 80):
            flags = [*common, *still, "--chunk-words", str(words)]
            yield name, f"start, chunks of {words} words, seed {seed}", {"train": flags}
        variants = {method: ["--method", method] for method in names}
        for method in ("dream-infonce", "dream"):
            variants[method] += asked
        variants["revela-gated, query-focused heads"] = [
            "--heads",
            str(OUT / "heads" / f"{name}.json"),
        ]
        variants |= {title: more.split() for title, more in VARIANTS.items()}
        for title in ASKED:
            variants[title] += asked
        for title, more in variants.items():
            flags = [*common, *more, "--max-minutes", f"{minutes:g}"]
            if "contrastive-crop" in more:  # which reads no LM
                at = flags.index("--lm")
                del flags[at : at + 2]
            yield name, f"{title}, {minutes:g} min of one core, seed {seed}", {"train": flags}


def find_heads(folder: Path) -> None:
    """Rank the LM's query-focused heads, for gates."""
    out = OUT / "heads" / f"{folder.name}.json"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        flags = ["--method", "dream", "--queries", "telling-sentence", "--chunk-words", "80"]
        flags += ["--lm", SMOL, "--threads", "1", "--out", str(out)]
        subprocess.run(["revela", "heads", str(corpus_of(folder)), *flags], check=True)


def plan_groups(steps: int, seeds: Sequence[int]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The same updates on groups of four kinds; the rate is what a start without a fit needs."""
    blank = "--pooling eos --token-weighting 0 --whitening 0 --lexical 0 --learning-rate 5e-4"
    limits = f"--threads 1 --keep last --max-minutes 0 --max-steps {steps}"
    kinds = ("random", "document", "cluster")
    for seed, name, groups in product(seeds, ("cosqa", "conala", "scifact"), kinds):
        chosen = f"--seed {seed} --groups {groups}"
        flags = [*BOTH, *f"{limits} {blank} {chosen}".split()]
        yield name, f"groups {groups}, {steps} updates, seed {seed}", {"train": flags}


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of BEIR-layout collections")
    add("--minutes", type=float, default=20, help="training on SciFact")
    add("--other-minutes", type=float, default=10, help="training on the other collections")
    add("--what", choices=["systems", "methods", "groups"], default="systems")
    add("--seeds", type=int, nargs="*", default=[0], help="of methods and groups")
    add("--steps", type=int, default=60, help="updates, of groups")
    add("--only", nargs="*", help="collections to run")
    add("--rows", default="", help="regular expression: only rows of such a name")
    add("--show", action="store_true", help="make nothing, print existing rows")
    arguments = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (OUT / "written").mkdir(parents=True, exist_ok=True)
    planned = {
        "systems": plan(arguments.minutes, arguments.other_minutes),
        "methods": plan_methods(arguments.minutes, arguments.seeds),
        "groups": plan_groups(arguments.steps, arguments.seeds),
    }[arguments.what]
    selected = list[tuple[str, str]]()
    for name, label, how in planned:
        if (arguments.only and name not in arguments.only) or not re.search(arguments.rows, label):
            continue
        if (name, label) not in kept_rows() and not arguments.show:
            make_row(label, arguments.data / name, **how)
        selected.append((name, label))
    scores = [*(f"alone {metric}" for metric in METRICS), "fused ndcg@10", "BM25 ndcg@10"]
    print_header(["system", *scores, "updates", "peak GB"])
    rows, collections = kept_rows(), list(dict.fromkeys(name for name, _ in selected))
    for name, label in sorted(selected, key=lambda key: collections.index(key[0])):
        if row := rows.get((name, label)):
            numbers = (float(row[column]) for column in scores)
            print_cells(name, [label, *numbers, row["steps"], row["peak_gb"]])


if __name__ == "__main__":
    main()
