"""Verbs that tell how good a retriever is: eval, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.cli.app import Several, app
from revela.config import Precision
from revela.files import whole
from revela.terminal import print_table


@app.command(name="eval")
def evaluate(
    model: list[str],
    *,
    on: Annotated[list[Path], Several],
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    max_tokens: int | None = None,
    precision: Precision = "auto",
) -> None:
    """Score models on BEIR-layout folders, beside BM25 and the fusion of both.

    Parameters
    ----------
    model:
        Sentence-Transformers folders, hub ids or embedded:minilm-l6.
    on:
        Folders with corpus.jsonl, queries.jsonl and qrels/test.tsv (the first two may be .gz).
    json_file:
        Write all scores here too.
    max_tokens:
        Read no more of a text than this.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    from revela.evaluate.folder import evaluate_folders, table
    from revela.models.retriever import load_encoder
    from revela.models.weights import resolve
    from revela.search.metrics import METRICS

    short = [Path(name).name if "/" in name else name for name in model]
    encoders = {
        (brief if short.count(brief) == 1 else name): load_encoder(resolve(name), precision, max_tokens)
        for brief, name in zip(short, model, strict=True)
    }
    results = evaluate_folders(on, encoders, print, progress=True)
    print_table("", ["collection", "system", *METRICS], [[name, system, *values] for name, system, values in table(results)])
    if json_file is not None:
        with whole(json_file) as temporary:
            temporary.write_text(json.dumps(results, indent=1) + "\n")


@app.command
def report(runs: Annotated[list[Path], Parameter(negative=())], *, out: Path = Path("report.html")) -> None:
    """Put runs side by side on one HTML page: curves, scores, probes, recipes, and how to repeat them.

    The page stands alone, without a network or scripts, and can be printed.

    Parameters
    ----------
    runs:
        Folders of revela train or compare, with scores.json or probe.json if these are there; or such files themselves.
    out:
        The page.
    """
    from revela.evaluate.report import report as write

    found = write(runs, out)
    print(f"saved to {out} (runs: {len(found.runs)}, files of scores: {len(found.scores)}, probes: {len(found.probes)})")
