"""Where each stage of Dwell in the Beginning dwells (Coelho et al., ACL 2024): span corruption,
then random crops, then pairs with mined negatives; and what causes it.

    python -m research.benchmarks.dwell --data DATA --threads 2
    python -m research.benchmarks.dwell --data DATA --show

Stages are trained one after another, each by ``revela train`` with a recipe of
research/recipes/dwell/. DATA has text/ (two thirds of openstax, debian_docs, devdocs_python
and ms_cpp_docs are trained on; exact match is probed on the last third of openstax) and
collections/squad_dev: half of its judged articles give the pairs, the others are probed. A pair's
document is an article of which other answers are taken out, cut to 2,048 tokens, with the answer at
its beginning or at a uniform place.

Two arms look for causes: crops of documents whose sentences are shuffled, and pairs whose answers
all stand first, beside those at uniform places.

Models are kept in research/out/dwell, probes in research/results/dwell; existing ones are not made
again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from pathlib import Path
from statistics import mean
from typing import Any

from research.benchmarks.position import cell, profile_of, slug
from revela.corpus.chunk import sentences
from revela.corpus.read import read_corpus
from revela.evaluation.probes.moved_passage import Answer, Answered, load_answers, move_all
from revela.files import atomic_write
from revela.retriever.tokens import TokenWindow

OUT = Path(__file__).parents[1] / "out" / "dwell"
RESULTS = Path(__file__).parents[1] / "results" / "dwell"
RECIPES = Path(__file__).parents[1] / "recipes" / "dwell"
TEXTS = ("openstax", "debian_docs_0", "devdocs_python", "ms_cpp_docs")
LEAST_WORDS, MOST = 1000, 1000  # of a document that is trained on; of each text
PROBED = ["the last third of openstax"]
TOKENS = 2048
ANSWERS = 150  # that pairs are made of; with more, too little is left of their articles
SMOL = "embedded:smollm2-135m"
POOLINGS = {"SmolLM2 mean": "mean", "SmolLM2 EOS": "eos"}
EXACT, MOVED = "exact match, both orders", "moved passage, MRR@100"
FIGURES = {  # what each plot of a family shows
    "stages": ("", ", crops", ", crops, 1 episode", ", crops, 4 episodes"),
    "causes": (
        *(", crops", ", crops of shuffled"),
        *(", crops, 4 episodes", ", crops, 4 episodes, answers first"),
    ),
}

ONCE = ("--max-steps", "10")
UNCHANGED = ("--max-steps", "1", "--learning-rate", "0")
LONG = (
    *("--train-tokens", "2048", "--group-size", "2"),
    *("--max-steps", "250", "--warmup-steps", "20"),
)


@dataclass(frozen=True)
class Stage:
    """A model: what it is trained from, on what, by which recipe, with which flags."""

    start: str
    text: str
    recipe: str
    flags: tuple[str, ...] = ()


def later(name: str, start: str, crops: tuple[str, ...] = ()) -> dict[str, Stage]:
    """The stages after span corruption, or after what a language model's training gave."""
    pairs = "uniform/corpus.jsonl"
    return {
        f"{name}, crops": Stage(start, "train.jsonl", "crops", crops),
        f"{name}, crops of shuffled": Stage(start, "shuffled.jsonl", "crops", crops),
        f"{name}, crops, 1 episode": Stage(f"{name}, crops", pairs, "episodes", ONCE),
        f"{name}, crops, 4 episodes": Stage(f"{name}, crops", pairs, "episodes"),
        f"{name}, crops, 4 episodes, answers first": Stage(
            f"{name}, crops", "first/corpus.jsonl", "episodes"
        ),
    }


def strong(family: str) -> dict[str, Stage]:
    """The stages of SmolLM2 by one pooling, whose first is its own pre-training."""
    few = ("--max-steps", "24")
    stages = {family: Stage(SMOL, "train.jsonl", "crops", UNCHANGED), **later(family, SMOL, few)}
    flags = ("--pooling", POOLINGS[family], "--lora-rank", "64", "--retriever-batch", "16")
    return {name: replace(stage, flags=(*stage.flags, *flags)) for name, stage in stages.items()}


SPANS = {
    "new": Stage("new:small", "train.jsonl", "spans", ("--max-steps", "1")),
    "new, 1 episode": Stage("new", "uniform/corpus.jsonl", "episodes", ONCE),
    "spans of 512": Stage("new:small", "train.jsonl", "spans"),
    "spans": Stage("spans of 512", "train.jsonl", "spans", LONG),
    "spans, 1 episode": Stage("spans", "uniform/corpus.jsonl", "episodes", ONCE),
    **later("spans", "spans"),
}
STAGES = {**SPANS, **strong("SmolLM2 mean"), **strong("SmolLM2 EOS")}


def made(name: str, arguments: argparse.Namespace) -> str:
    """The folder of a model, trained if it is missing; other names stand for themselves."""
    if name not in STAGES:
        return name
    stage, out = STAGES[name], OUT / slug(name)
    if not (out / "modules.json").is_file():
        start = made(stage.start, arguments)
        text = OUT / "data" / stage.text
        command = ["revela", "train", str(text), "--out", str(out), "--model", start]
        command += ["--recipe", str(RECIPES / f"{stage.recipe}.toml"), *stage.flags]
        command += ["--threads", str(arguments.threads), *(["--resume"] if out.exists() else [])]
        if stage.recipe == "episodes":
            command += ["--pairs", str(text.parent)]
        print(f"== {name}: {' '.join(command)}", flush=True)
        subprocess.run(command, check=True)
    return str(out)


# Data


def write_data(data: Path) -> None:
    """Texts to train on and to probe, and pairs, from seed 0."""
    folder = OUT / "data"
    if (folder / "probe.jsonl").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: long_documents(data / "text" / f"{name}.jsonl.gz") for name in TEXTS}
    openstax = texts["openstax"]
    kept, probed = openstax[: 2 * len(openstax) // 3], openstax[2 * len(openstax) // 3 :]
    train = list(chain(kept, *(texts[name] for name in TEXTS[1:])))
    rng = random.Random(0)
    write_rows(folder / "train.jsonl", ({"text": text} for text in train))
    write_rows(folder / "shuffled.jsonl", ({"text": shuffled(text, rng)} for text in train))
    write_pairs(data / "collections" / "squad_dev", folder)
    write_rows(folder / "probe.jsonl", ({"text": text} for text in probed))


def long_documents(path: Path) -> list[str]:
    """The first documents of a text that fill most of the window."""
    documents, _ = read_corpus([path], near=0.8)
    long = (d.full_text for d in documents if len(d.full_text.split()) >= LEAST_WORDS)
    return list(islice(long, MOST))


def shuffled(text: str, rng: random.Random) -> str:
    """Its sentences in another order."""
    found = sentences(text)
    return " ".join(sentence.strip() for sentence in rng.sample(found, len(found)))


def write_pairs(squad: Path, folder: Path) -> None:
    """Pairs of half of the articles, with answers first and at uniform places; the other articles,
    to probe.
    """
    answered = load_answers(squad, join_titles=True)
    judged = sorted({answer.document for answer in answered.answers})
    half = judged[len(judged) // 2]
    mine = [answer for answer in answered.answers if answer.document < half]
    moved = move_all(
        Answered(answered.name, answered.documents, mine), words_window(), ANSWERS, seed=0
    )
    rng = random.Random(1)
    for name in ("first", "uniform"):
        places = [0 if name == "first" else rng.randrange(len(m.texts)) for m in moved]
        out = folder / name
        (out / "qrels").mkdir(parents=True, exist_ok=True)
        chosen = [m.texts[place] for m, place in zip(moved, places, strict=True)]
        write_rows(
            out / "corpus.jsonl", ({"_id": f"d{i}", "text": t} for i, t in enumerate(chosen))
        )
        asked = [(i, query) for i, m in enumerate(moved) for query in m.answer.queries]
        write_rows(
            out / "queries.jsonl",
            ({"_id": f"q{n}", "text": query} for n, (_, query) in enumerate(asked)),
        )
        lines = [f"q{n}\td{i}\t1\n" for n, (i, _) in enumerate(asked)]
        (out / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    write_answers(answered, half, folder / "dev")


def write_answers(answered: Answered, start: int, out: Path) -> None:
    """The articles from ``start`` on, in BEIR layout with the answers.jsonl of ``revela probe``."""
    (out / "qrels").mkdir(parents=True, exist_ok=True)
    rows: list[tuple[Answer, str]] = [
        (answer, query)
        for answer in answered.answers
        if answer.document >= start
        for query in answer.queries
    ]
    articles = enumerate(answered.documents[start:], start)
    write_rows(out / "corpus.jsonl", ({"_id": f"d{i}", "text": text} for i, text in articles))
    write_rows(
        out / "queries.jsonl", ({"_id": f"q{n}", "text": q} for n, (_, q) in enumerate(rows))
    )
    write_rows(
        out / "answers.jsonl",
        (
            {"query-id": f"q{n}", "corpus-id": f"d{answer.document}", "text": answer.text}
            for n, (answer, _) in enumerate(rows)
        ),
    )
    lines = [f"q{n}\td{answer.document}\t1\n" for n, (answer, _) in enumerate(rows)]
    (out / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


def words_window() -> TokenWindow:
    """The window that pairs are cut to, in tokens of MiniLM, of which other models have no more."""
    from transformers import AutoTokenizer

    from revela.weights import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:minilm-l6"))
    return TokenWindow(tokenizer, TOKENS * 3 // 4)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with atomic_write(path) as temporary, temporary.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# Probes


def probed(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The probes of a model at 2,048 tokens, from its row or run now."""
    path = RESULTS / f"{slug(name)}.json"
    if not path.exists():
        RESULTS.mkdir(parents=True, exist_ok=True)
        model, data = made(name, arguments), OUT / "data"
        command = ["revela", "probe", model, str(data / "probe.jsonl"), "--move", str(data / "dev")]
        command += ["--max-tokens", str(TOKENS), "--documents", str(arguments.documents)]
        print(f"== probing {name}", flush=True)
        probe = OUT / f"{slug(name)}-probe.json"
        subprocess.run([*command, "--json", str(probe)], check=True)
        row = {**json.loads(probe.read_text()), "model": name, "corpus": PROBED}
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(row, indent=1))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Per model: slope and drop of exact match in both orders, MRR@100 and its drop, and the
    accuracy of spans by place, the best and the worst of ten places.
    """
    print("| model | exact match: slope a tenth | first - last | MRR@100 | first - last | spans |")
    print("|---|---|---|---|---|---|")
    for name, found in rows.items():
        profiles = found["profiles"]
        one, other = profiles[EXACT], profiles[MOVED]
        rank = mean(place["value"] for place in other["places"])
        cells = [cell(one["slope"], 5), cell(one["drop"], 4), f"{rank:.3f}", cell(other["drop"], 3)]
        right = [place["value"] for place in profiles.get("spans by place", {}).get("places", ())]
        cells.append(f"{min(right):.3f} to {max(right):.3f}" if right else "-")
        print(f"| {name} | {' | '.join(cells)} |")


def figures(rows: dict[str, dict[str, Any]]) -> Iterator[Path]:
    """Plots of each family of models: exact match and the moved passage by place."""
    from revela.evaluation.plots import profile_plots, save_png

    for family, (kind, models) in product(("spans", *POOLINGS), FIGURES.items()):
        drawn = {
            name: {test: profile_of(rows[name]["profiles"][test]) for test in (EXACT, MOVED)}
            for name in (f"{family}{rest}" for rest in models)
            if name in rows
        }
        if len(drawn) > 1:
            path = OUT / f"{slug(family)}_{kind}.png"
            save_png(profile_plots(drawn), path, f"{TOKENS:,} tokens")
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with text/ and collections/")
    add("--only", nargs="*", default=list(SPANS), help=f"models: {', '.join(STAGES)}")
    add("--documents", type=int, default=60, help="documents, and answers that are moved")
    add("--threads", type=int, default=1)
    add("--make", action="store_true", help="train the models, probe none")
    add("--show", action="store_true", help="make nothing, show existing rows")
    arguments = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names = arguments.only
    if arguments.show:
        names = [name for name in STAGES if (RESULTS / f"{slug(name)}.json").exists()]
    else:
        write_data(arguments.data)
    if arguments.make:
        for name in names:
            made(name, arguments)
        return
    rows = {name: probed(name, arguments) for name in names}
    print_table(rows)
    for path in figures(rows):
        print(path)


if __name__ == "__main__":
    main()
