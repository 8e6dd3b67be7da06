"""The position-bias tables of docs/results.md: before and after training without labels.

    taskset -c 1 python -m research.benchmarks.position --data DATA

DATA has text/openstax.jsonl.gz, collections/scifact (its corpus is trained on) and
collections/squad_dev (its answers are moved). Models are kept in research/out/position, numbers in
research/results/position; existing ones are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from research.benchmarks.quality import MINILM, PLAIN, SMOL, save_untrained

OUT = Path(__file__).parents[1] / "out" / "position"
RESULTS = Path(__file__).parents[1] / "results" / "position"
TRAIN = [
    "--model",
    SMOL,
    "--lm",
    SMOL,
    "--max-steps",
    "60",
    "--max-minutes",
    "0",
    "--keep",
    "last",
    "--threads",
    "1",
]
TRAIN += ["--check-queries", "60", "--check-passages", "200", "--check-every", "1000"]
UNFITTED = [
    "--token-weighting",
    "0",
    "--whitening",
    "0",
    "--lexical",
    "0",
    "--learning-rate",
    "3e-4",
]
EOS = [*UNFITTED, "--pooling", "eos"]
MODELS: dict[str, dict[str, Any]] = {  # what is made of SmolLM2's 6 lower layers, and how
    "untrained, mean": dict(untrained=dict(layers=6, pooling="mean", **PLAIN)),
    "untrained, EOS": dict(untrained=dict(layers=6, pooling="eos")),
    "fitted, mean": dict(untrained=dict(fit=True)),
    "EOS, gated, first half": dict(train=[*EOS, "--query-side", "first-half"]),
    "EOS, gated, random span": dict(train=[*EOS, "--query-side", "random-span"]),
    "MiniLM-L6 (supervised)": dict(model=MINILM),
}
LM = "SmolLM2-135M, language model"


def slug(name: str) -> str:
    return name.replace(" ", "_").replace(",", "").replace("(", "").replace(")", "")


def made(name: str, data: Path) -> str:
    """The model of this name; made if missing."""
    how, out = MODELS[name], OUT / slug(name)
    if "model" in how:
        return str(how["model"])
    corpus = data / "collections" / "scifact" / "corpus.jsonl.gz"
    if not (out / "modules.json").is_file():
        print(f"== making {name}", flush=True)
        if "untrained" in how:
            save_untrained(how["untrained"], corpus, out)
        else:
            subprocess.run(
                ["revela", "train", str(corpus), "--out", str(out), *TRAIN, *how["train"]],
                check=True,
            )
    return str(out)


def probed(name: str, tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The probe of a model, from its row or run now."""
    path = RESULTS / f"{slug(name)}-{tokens}.json"
    if not path.exists():
        text, squad = (
            arguments.data / "text" / "openstax.jsonl.gz",
            arguments.data / "collections" / "squad_dev",
        )
        model = SMOL if name == LM else made(name, arguments.data)
        flags = [] if name == LM or tokens < 256 else ["--move", str(squad), "--join-titles"]
        flags += ["--max-tokens", str(tokens), "--documents", str(arguments.documents)]
        flags += ["--json", str(path)]
        print(f"== probing {name}", flush=True)
        subprocess.run(["revela", "probe", model, str(text), *flags], check=True)
    return json.loads(path.read_text())


def cell(interval: dict[str, float], digits: int) -> str:
    value, low, high = (f"{interval[k]:.{digits}f}" for k in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def profile_of(found: dict[str, Any]) -> Any:
    """A row's profile as the package's dataclass."""
    from revela.evaluation.results import Interval, Profile

    single = {k: Interval(**found[k]) for k in ("slope", "drop", "first_wins")}
    return Profile(
        **{**found, **single, "places": [Interval(**place) for place in found["places"]]}
    )


def print_tables(rows: dict[str, Any], tokens: int) -> None:
    """A table per test, and one of the geometry of the vectors."""
    for test in dict.fromkeys(test for found in rows.values() for test in found["profiles"]):
        print(f"\n{test}, {tokens} tokens\n")
        print("| model | first | last | slope per tenth | first - last | first > last |")
        print("|---|---|---|---|---|---|")
        for name, found in rows.items():
            if p := found["profiles"].get(test):
                ends = [f"{p['places'][i]['value']:.3f}" for i in (0, -1)]
                digits = {"slope": 4, "drop": 3, "first_wins": 2}
                cells = [name, *ends, *(cell(p[k], n) for k, n in digits.items())]
                print(f"| {' | '.join(cells)} |")
    print(
        "\n| model | alignment | uniformity | anisotropy | effective rank |\n|---|---|---|---|---|"
    )
    for name, found in rows.items():
        if g := found["geometry"]:
            numbers = [f"{g[k]:.3f}" for k in ("alignment", "uniformity", "anisotropy")]
            rank = f"{g['effective_rank']:.1f} of {min(g['pairs'], g['width'])}"
            print(f"| {' | '.join([name, *numbers, rank])} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with text/ and collections/")
    lengths = "lengths to probe; answers are moved from 256 on"
    add("--tokens", type=int, nargs="*", default=[256], help=lengths)
    add("--documents", type=int, default=60, help="documents, answers and pairs")
    add("--only", nargs="*", default=[*MODELS, LM], help="models")
    add("--make", action="store_true", help="make the models, probe none")
    add("--show", action="store_true", help="make nothing, show existing rows")
    arguments = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if arguments.make:
        for name in arguments.only:
            made(name, arguments.data)
        return
    from revela.evaluation.plots import profile_plots, save_png

    for tokens in arguments.tokens:
        names = arguments.only
        if arguments.show:
            names = [n for n in names if (RESULTS / f"{slug(n)}-{tokens}.json").exists()]
        rows = {name: probed(name, tokens, arguments) for name in names}
        print_tables(rows, tokens)
        drawn = {
            n: {t: profile_of(p) for t, p in found["profiles"].items()}
            for n, found in rows.items()
            if n != LM
        }
        save_png(profile_plots(drawn), OUT / f"position-{tokens}.png", f"{tokens} tokens")


if __name__ == "__main__":
    main()
