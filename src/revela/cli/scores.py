"""What ``revela eval`` does and prints, on folders and on benchmarks. What it returns goes into
--json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela.cli.printing import print_table, snippet
from revela.settings import Precision

if TYPE_CHECKING:
    from revela.evaluation.quoted import Quote
    from revela.evaluation.significance import Gain
    from revela.index.rerank import Rerank, Reranking


def on_folders(
    models: Sequence[str],
    folders: Sequence[Path],
    show: int,
    rerank: Rerank | None,
    lm: str,
    max_tokens: int | None,
    precision: Precision,
) -> dict[str, Any]:
    """Score models, BM25 and their fusions on BEIR-layout folders: {collection: {system: scores}}."""
    from revela.evaluation.beir import load_collection, outcomes, sample
    from revela.evaluation.metrics import METRICS
    from revela.evaluation.quoted import quotes_for_task, task_of
    from revela.evaluation.significance import as_json, greatest_gains, standings
    from revela.retriever.encode import load_encoder
    from revela.weights import resolve

    encoders = {
        label: load_encoder(resolve(name), precision, max_tokens)
        for label, name in zip(labels(models), models, strict=True)
    }
    # All are read before the first is scored, so that a bad one costs nothing.
    collections = dict(
        zip(labels([str(folder) for folder in folders]), map(load_collection, folders), strict=True)
    )
    how: Reranking | None
    if rerank == "heads":
        from revela.index.listwise import load_query_heads

        how = load_query_heads(lm, lambda: sample(next(iter(collections.values()))))
    else:
        how = rerank
    first, *others = encoders
    references = ["BM25", first] if others else ["BM25"]
    results: dict[str, Any] = {}
    quotes: list[tuple[str, Quote]] = []
    for label, collection in collections.items():
        print(
            f"{label}: {len(collection.documents):,} documents, {len(collection.queries):,} queries"
        )
        found = outcomes(collection, encoders, rerank=how, progress=True)
        table = standings(found, references)
        results[label] = as_json(found, table)
        rows: list[list[object]] = []
        for row in table:
            means, p = (
                [row.means[m] for m in METRICS],
                [_p(row.p.get(reference)) for reference in references],
            )
            rows.append([row.system, means[0], row.margin, *means[1:], *p])
        print_table(
            label,
            ["system", METRICS[0], "±", *METRICS[1:], *(f"p, {name}" for name in references)],
            rows,
        )
        quotes += [(label, quote) for quote in quotes_for_task(task_of(collection) or "")]
        if show:
            rival = others[0] if others else "BM25"
            for a, b in ((first, rival), (rival, first)):
                print_gains(
                    f"{label}: where {a} beats {b} most",
                    a,
                    b,
                    greatest_gains(collection, found[a], found[b], show),
                )
    print(
        "±: half the 95 % interval of nDCG@10 (Student's t over queries); p: of its nDCG@10, two-sided, by random signs"
    )
    print_quotes("collection", quotes)
    return results


def on_benchmarks(
    models: Sequence[str],
    names: Sequence[str],
    out: Path,
    max_tokens: int | None,
    precision: Precision,
) -> dict[str, Any]:
    """Score models through mteb, with what others published beside them: {"TASK (mteb)": {system:
    scores}}.
    """
    from revela.evaluation.benchmarks import METRICS, contender, find_tasks, run_tasks
    from revela.evaluation.quoted import quotes_for_benchmark, quotes_for_task
    from revela.retriever.encode import load_encoder
    from revela.weights import resolve

    tasks = find_tasks(names)
    contenders = {}
    for label, name in zip(labels(models), models, strict=True):
        folder = resolve(name)
        contenders[label] = contender(name, folder, load_encoder(folder, precision, max_tokens))
    scores = run_tasks([task for found in tasks.values() for task in found], contenders, out)
    _, *others = METRICS  # the main score of retrieval is nDCG@10
    rows: list[list[object]] = []
    for task, systems in scores.items():
        for label, score in systems.items():
            rows.append(
                [task, label, score.main, *(score.metrics.get(metric) for metric in others)]
            )
    for name, found in tasks.items():
        for label in contenders if len(found) > 1 else ():
            main = [scores[task.metadata.name][label].main for task in found]
            rows.append(
                [
                    f"{name}, mean of {len(main)}",
                    label,
                    sum(main) / len(main),
                    *[None] * len(others),
                ]
            )
    print_table("", ["task", "system", "main score", *others], rows)
    for label, model in contenders.items():
        print(
            f"{label}: "
            + ", ".join(f"{name} {value!r}" for name, value in model.settings().items())
        )
    quotes = [(task, quote) for task in scores for quote in quotes_for_task(task)]
    print_quotes(
        "task", quotes + [(name, quote) for name in tasks for quote in quotes_for_benchmark(name)]
    )
    print(f"mteb's own files: {out / 'results'}")
    return {
        f"{task} (mteb)": {
            label: {**score.metrics, "main": score.main, "settings": score.settings}
            for label, score in systems.items()
        }
        for task, systems in scores.items()
    }


def labels(names: Sequence[str]) -> list[str]:
    """The last part of each path or hub id, where that tells them apart."""
    short = [Path(name).name for name in names]
    return [
        brief if short.count(brief) == 1 else name for brief, name in zip(short, names, strict=True)
    ]


def print_quotes(what: str, quotes: Sequence[tuple[str, Quote]]) -> None:
    """What others published, and where: never to be taken for our own measurements."""
    if not quotes:
        return
    sources = list(dict.fromkeys(quote.source for _, quote in quotes))
    rows = [
        [
            label,
            quote.system,
            quote.score,
            f"quoted [{sources.index(quote.source) + 1}]"
            + (f", mean of {quote.over}" if quote.over else ""),
        ]
        for label, quote in quotes
    ]
    print_table("Published by others, not measured here", [what, "system", "ndcg@10", ""], rows)
    for number, source in enumerate(sources, 1):
        print(f"[{number}] {source}")


def print_gains(title: str, better: str, worse: str, gains: Sequence[Gain]) -> None:
    """Each query with both scores and the document that each system puts first."""
    print(f"\n{title}" + ("" if gains else ": nowhere"))
    for number, gain in enumerate(gains, 1):
        print(f"{number}. {snippet(gain.query)}")
        for system, score, (text, relevant) in zip(
            (better, worse), gain.scores, gain.first, strict=True
        ):
            print(
                f"   {system} {score:.3f}, first {'(relevant)' if relevant else '(not relevant)'}: {snippet(text)}"
            )


def _p(p: float | None) -> str | None:
    return None if p is None else "<.001" if p < 0.001 else f"{p:.3f}"
