"""Verbs that tell how good a retriever is: eval, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from revela.cli.flags import Several
from revela.cli.main import app
from revela.errors import RevelaError
from revela.files import atomic_write
from revela.settings import Precision, Retriever


@app.command(name="eval")
def evaluate(
    model: list[str],
    *,
    on: Annotated[list[Path], Several] = [],  # noqa: B006
    benchmark: Annotated[list[str], Several] = [],  # noqa: B006
    out: Path = Path("mteb-results"),
    show: int = 0,
    rerank: Literal["tokens", "heads"] | None = None,
    lm: str = Retriever.offline_model,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    max_tokens: int | None = None,
    precision: Precision = "auto",
) -> None:
    """Score models: on your own folders beside BM25 and the fusion of both, or on public benchmarks
    beside what others published.

    Parameters
    ----------
    model:
        Sentence-Transformers folders, hub ids or embedded:minilm-l6.
    on:
        Folders with corpus.jsonl, queries.jsonl and qrels/test.tsv (the first two may be .gz).
    benchmark:
        BEIR, NanoBEIR, CoIR, BRIGHT, "RTEB(eng, beta)" or another benchmark of mteb, its tasks by
        name, or folders as for --on.
    out:
        Where results of --benchmark are kept, in mteb's layout; what is finished there is not run
        again.
    show:
        Print as many queries on which the first model beats the second (BM25 if it is alone) most,
        and as many the other way round.
    rerank:
        With --on: order what the fusion with BM25 found again, by the vectors of single tokens
        (tokens) or by the heads of a language model (heads, which takes seconds a query), as search
        --rerank does.
    lm:
        Language model of --rerank heads, as for search.
    json_file:
        Write all scores here too, those of each query included.
    max_tokens:
        Read no more of a text than this.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    from revela.cli import scores

    if not on and not benchmark:
        raise RevelaError(
            "nothing to score on: give folders with --on, or --benchmark with names such as NanoBEIR or SciFact"
        )
    results: dict[str, Any] = {}
    if on:
        results |= scores.on_folders(model, on, show, rerank, lm, max_tokens, precision)
    if benchmark:
        results |= scores.on_benchmarks(model, benchmark, out, max_tokens, precision)
    if json_file is not None:
        with atomic_write(json_file) as temporary:
            temporary.write_text(json.dumps(results, indent=1) + "\n")


@app.command
def report(
    runs: Annotated[list[Path], Parameter(negative=())], *, out: Path = Path("report.html")
) -> None:
    """Put runs side by side on one HTML page: curves, scores, probes, recipes, and how to repeat
    them.

    The page stands alone, without a network or scripts, and can be printed.

    Parameters
    ----------
    runs:
        Folders of revela train or compare, with scores.json or probe.json if these are there; or
        such files themselves.
    out:
        The page.
    """
    from revela.evaluation.report.html_page import report as write

    found = write(runs, out)
    print(
        f"saved to {out} (runs: {len(found.runs)}, files of scores: {len(found.scores)}, probes: {len(found.probes)})"
    )
