"""``revela eval``: score models on local folders and on public benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from revela.cli.flags import PROMPTS, Flat, Out, PromptFlags, Several
from revela.cli.printing import print_report, print_table
from revela.encoders.prompts import AUTO, GivenPrompts
from revela.errors import RevelaError, extra
from revela.evaluation.metrics import MAIN, METRICS
from revela.evaluation.results import SystemScores, write_json
from revela.evaluation.significance import MEASURE
from revela.ranking.steps import Rerank
from revela.terminal import counted
from revela.types import Precision

if TYPE_CHECKING:
    from revela.evaluation.evaluate import Evaluation


CHANCE = 0.05  # differences with this p value or more may be chance


@dataclass(frozen=True)
class CandidateFlags:
    """Which documents are ranked."""

    candidates: tuple[Path, ...] = ()
    """With --on: a TREC run for each of its folders. Models and BM25 rank only the documents that
    it has for a query."""
    depth: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None
    "With --candidates: take this number of each query's best documents. [default: 1024]"


CANDIDATES = CandidateFlags()


def eval(
    model: Annotated[list[str], Several],
    *,
    on: Annotated[list[Path], Several] = [],  # noqa: B006
    benchmark: Annotated[list[str], Several] = [],  # noqa: B006
    text: Annotated[list[Path], Several] = [],  # noqa: B006
    out: Out = Path("mteb-results"),
    language: str = "auto",
    weight: float | None = None,
    rerank: Rerank | None = None,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    runs: Path | None = None,
    among: Annotated[CandidateFlags, Flat] = CANDIDATES,
    max_tokens: int | None = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    precision: Precision = "auto",
) -> None:
    """Score models, BM25 and their fusion: on judged queries (--on, --benchmark), or
    on your own text without labels (--text).

    Parameters
    ----------
    model:
        Sentence-Transformers folders, hub ids or embedded:minilm-l6; with --text also language
        models, which are fitted to it; with --on also indexes, which are searched as they are, and
        run files in TREC's format.
    on:
        Folders with corpus.jsonl, queries.jsonl and qrels/test.tsv (the first two may be .gz).
    benchmark:
        BEIR, NanoBEIR, CoIR, BRIGHT, "RTEB(eng, beta)" or another benchmark of mteb, or names of
        its tasks.
    text:
        Files or folders of your own text, as for index. Queries are halves of passages, titles, and
        docstrings of code, which should find what they belong to among held-out documents.
    out:
        Folder for results of --benchmark, in mteb's layout; finished tasks in it are not run again.
    language:
        With --on and --text: language whose words BM25 stems, as for index; auto detects it.
    weight:
        With --on: share of the vectors in the fusion with BM25, as for search.
    rerank:
        With --on: re-rank the fusion with BM25 by token vectors, as search --rerank does.
    json_file:
        Write all scores, including those of each query, to this file.
    runs:
        With --on: write every system's ranking to a file in this folder, COLLECTION/SYSTEM.trec.
    max_tokens:
        With --on and --benchmark: truncate texts to this number of tokens instead of the model's
        own limit, at most to its number of positions.
    precision:
        Numeric precision. auto: the fastest of int8, bf16 and fp32 on this CPU or GPU.
    """
    if not on and not benchmark and not text:
        raise RevelaError(
            "nothing to score on: give --text (your own), --on (judged folders) or --benchmark"
        )
    if text and max_tokens is not None:
        raise RevelaError("--max-tokens has no effect on --text: leave it out, or give --on")
    if not on and (among.candidates or rerank or runs or weight is not None):
        raise RevelaError("--candidates, --rerank, --runs and --weight need --on: give it too")
    if among.depth is not None and not among.candidates:
        raise RevelaError("--depth has no effect without --candidates: leave it out, or give them")
    scores: dict[str, dict[str, SystemScores]] = {}
    if text:
        scores |= _rank_on_text(model, text, language, precision, prompts.given)
    if on:
        from revela.api import evaluations
        from revela.evaluation.evaluate import EvalOptions

        others = prompts.given, among.candidates, among.depth or EvalOptions.depth
        options = EvalOptions(rerank, max_tokens, precision, True, language, weight, runs, *others)
        scores |= _print_evaluations(evaluations(model, on, options))
    if benchmark:
        scores |= _run_benchmarks(model, benchmark, out, max_tokens, precision, prompts.given)
    if json_file is not None:
        write_json(scores, json_file)
        print(f"saved to {json_file}")


def _print_evaluations(evaluations: Iterator[Evaluation]) -> dict[str, dict[str, SystemScores]]:
    """Print each evaluation when it is finished; returns the scores by collection and system."""
    results = {}
    main, *others = METRICS
    for evaluation in evaluations:
        collection = evaluation.collection
        print(_verdict(evaluation.name, evaluation.scores))
        sizes = counted(len(collection.documents), "document")
        sizes += f", {counted(len(collection.queries), 'query', 'queries')}"
        print(f"{evaluation.name}: {sizes}, language {collection.bm25.terms.language}")
        results[evaluation.name] = evaluation.scores
        rows: list[list[object]] = []
        for system, s in evaluation.scores.items():
            p = [_p(s.p.get(reference)) for reference in evaluation.references]
            rows.append([system, s.means[main], s.margin, *(s.means[m] for m in others), *p])
        tested = [f"p, {name}" for name in evaluation.references]
        print_table(evaluation.name, ["system", main, "±", *others, *tested], rows)
    print(
        "±: half the 95 % interval of nDCG@10 (Student's t over queries); p: two-sided "
        "randomisation test of nDCG@10"
    )
    return results


def _verdict(name: str, scores: Mapping[str, SystemScores]) -> str:
    """The result of an evaluation in one sentence."""
    best = max(scores, key=lambda system: scores[system].means[MEASURE])
    value, words = (scores[system].means[MEASURE] for system in (best, "BM25"))
    first = f"best on {name}: {best}, nDCG@10 {value:.3f}"
    if best == "BM25":
        return f"{first}: no system is better than BM25 alone"
    p = scores[best].p["BM25"]
    chance = "" if p < CHANCE else ", which may be chance"
    return f"{first} (BM25 {words:.3f}; p {_p(p)}{chance})"


def _advice(scores: Mapping[str, SystemScores], near: Sequence[str]) -> str:
    """The ranking of models on a text in one sentence."""
    best = next(iter(scores))
    if "BM25" in (best, *near):
        return "in short: no model finds measurably more on this text than words alone (BM25)"
    if near:
        others = ", ".join(near)
        return f"in short: {best} is best, and {others} may be as good: choose the cheapest"
    return f"in short: {best} is best on this text"


def _rank_on_text(
    models: Sequence[str],
    text: Sequence[Path],
    language: str,
    precision: Precision,
    prompts: GivenPrompts,
) -> dict[str, dict[str, SystemScores]]:
    """Rank models on a text without labels and print them; returns the scores by system."""
    from revela.text.analyzer import check_language
    from revela.text.load import read_corpus
    from revela.training.rank_models import BM25, Sections, rank_models
    from revela.training.settings import Corpus, Retriever, Training

    check_language(language)
    documents, report = read_corpus(list(text), distinct=False, min_words=1, rename_repeated=True)
    print_report(report)
    query, passage = (AUTO if prompt is None else prompt for prompt in prompts)
    if precision == "int8":
        raise RevelaError("--text takes --precision auto, fp32 or bf16 (got int8)")
    recipe = Sections(
        Corpus(language=language),
        Retriever(query_prompt=query, passage_prompt=passage),
        Training(precision=precision),
    )
    scores = rank_models(documents, models, recipe)
    best, *others = scores
    tasks = [name for name in scores[best].means if name != MEASURE]
    tasks = tasks if len(tasks) > 1 else []
    rows: list[list[object]] = []
    for system, s in scores.items():
        by_task = (s.means[task] for task in tasks)
        rows.append([system, s.means[MEASURE], s.margin, *by_task, _p(s.p.get(best))])
    print_table("without labels", ["system", MEASURE, "±", *tasks, "p, first"], rows)
    near = [name for name in others if scores[name].p[best] >= CHANCE]
    if any(system not in (BM25, *models) for system in scores if BM25 not in system):
        print("to fit a language model: revela fit TEXT --model LM --out RETRIEVER")
    print(_advice(scores, near))
    return {"without labels": scores}


def _run_benchmarks(
    models: Sequence[str],
    names: Sequence[str],
    out: Path,
    max_tokens: int | None,
    precision: Precision,
    prompts: GivenPrompts,
) -> dict[str, dict[str, SystemScores]]:
    """Run benchmarks and print them; returns the scores by "TASK (mteb)" and system."""
    with extra("benchmarks", "--benchmark"):
        from revela.evaluation.mteb import evaluate_benchmarks

    tasks, scores = evaluate_benchmarks(models, names, out, max_tokens, precision, prompts)
    _, *others = METRICS  # the main score of retrieval is nDCG@10
    rows: list[list[object]] = []
    settings = {}
    for task, systems in scores.items():
        for label, score in systems.items():
            rows.append([task, label, *(score.means.get(m) for m in (MAIN, *others))])
            settings[label] = score.settings
    for name, own in tasks.items():
        for label in settings if len(own) > 1 else ():
            mean = fmean(scores[task][label].means[MAIN] for task in own)
            rows.append([f"{name}, mean of {len(own)}", label, mean, *[None] * len(others)])
    print_table("", ["task", "system", "main score", *others], rows)
    for label, used in settings.items():
        print(f"{label}: " + ", ".join(f"{name} {value!r}" for name, value in used.items()))
    print(f"mteb's results: {out / 'results'}")
    return {f"{task} (mteb)": systems for task, systems in scores.items()}


def _p(p: float | None) -> str | None:
    return None if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
