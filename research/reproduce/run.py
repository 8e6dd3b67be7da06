"""Run the rows of a table: commands of `revela`, and the scores that they leave.

A run's folder is named by its settings and text, so that tables share runs, and a finished one is
never trained again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from research.reproduce.data import Folders, find_folders, folders_in, make_folders
from research.reproduce.small import COLLECTIONS, small_settings
from research.reproduce.tables import MODELS, NDCG, OF_PAIRS, PAIRS, Corpus, Row, Table, merged
from revela.errors import RevelaError
from revela.evaluation.collection import load_collection
from revela.evaluation.metrics import MAIN, per_query
from revela.evaluation.runs import file_name, read_run
from revela.evaluation.significance import margin
from revela.ranking.fusion import reciprocal_rank_fusion
from revela.text.judgements import jsonl_file
from revela.training.commands import (
    MODULES,
    Command,
    eval_commands,
    flags_of,
    is_finished,
    processes_here,
    run_commands,
    train_commands,
)
from revela.training.recipe import Recipe, check_unread
from revela.training.record import parse

Scores = dict[str, dict[str, dict[str, float]]]
"""Part of a data set -> query -> metric -> value."""
Results = dict[str, dict[str, dict[str, Scores]]]
"""Row -> size -> column -> scores; means over seeds."""
FUSED = 200  # documents of each ranking


@dataclass(frozen=True)
class Options:
    """How tables and figures are run.

    Attributes:
        out: folder for groups, runs, scores and tables.
        data: folder of test collections.
        sizes: none: all of a table; with ``small`` its first.
        seeds: each row is trained with each.
        given: settings above those of all rows.
        corpus: text or groups in place of the rows' own.
        pairs: folder of judged pairs in BEIR layout (CDE's second phase, MS MARCO documents).
        only: data sets; none: all of a table.
        rows: labels of rows to run; none: all.
        small: tiny budgets, on the collections that are there.
        processes: that train a run, one a GPU.
        dry_run: print the commands.
    """

    out: Path
    data: Path = Path("BEIR")
    sizes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    given: Mapping[str, Any] = field(default_factory=dict)
    corpus: tuple[str, ...] = ()
    pairs: Path | None = None
    only: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    small: bool = False
    processes: int = field(default_factory=processes_here)
    dry_run: bool = False


def run_table(table: Table, options: Options) -> Results:
    """Run what is not finished, or print the commands; returns the scores of what has run.

    Raises:
        RevelaError: the options lack something, which is said before anything runs, or a command
            fails.
    """
    check(table, options)
    folders = folders_of(table, options)
    commands = [*commands_of(table, options, folders)]  # any that cannot be is said before one runs
    run_commands(commands, dry_run=options.dry_run)
    return {} if options.dry_run else results_of(table, options, folders)


def check(table: Table, options: Options) -> None:
    """Raise RevelaError for options that cannot be, before anything is read or run."""
    wrong = {
        "--sizes": [s for s in options.sizes if s not in table.sizes] if table.sizes else [],
        "--only": [c for c in options.only if c not in table.columns],
        "--rows": [r for r in options.rows if r not in {row.label for row in table.rows}],
    }
    for flag, names in wrong.items():
        if names:
            raise RevelaError(f"{table.name} has no {names[0]!r}: leave it out of {flag}")
    if table.small_only and not (options.small or options.dry_run):
        raise RevelaError(f"{table.name} runs with --small only: {table.small_only}")
    is_trained = bool(table.heads) or any(row.settings for row in table.rows)
    if options.small and not options.corpus and is_trained:
        raise RevelaError("--small trains on a text of yours: give --corpus TEXT")
    trained = list(_runs(table, options))
    for row, _ in trained:
        if _reads_pairs(row, options) and options.pairs is None and not options.dry_run:
            raise RevelaError(
                f"{row.label} is trained on judged pairs: give their folder as --pairs, in BEIR "
                "layout"
            )
    unread = [
        (str(row.settings["method"]), merged(_named(table, row, size, options))[1])
        for row, size in trained
    ]
    given = {*options.given}
    check_unread([(method, names & given) for method, names in unread])
    if options.dry_run:
        return
    from revela.training.check_settings import check_recipe  # imports training: seconds

    for row, size in trained:
        folder = folder_of(table, row, size, options.seeds[0], options)
        if not is_finished(folder):
            check_recipe(_recipe_to_check(table, row, size, options), folder, resume=True)


def _recipe_to_check(table: Table, row: Row, size: str, options: Options) -> Recipe:
    """The recipe of a row; until the stage before has run, with the model of that stage."""
    seed = options.seeds[0]
    recipe = merged(settings_of(table, row, size, seed, options))[0]
    if row.after is None or is_finished(folder_of(table, row.after, size, seed, options)):
        return recipe
    before = _recipe_to_check(table, row.after, size, options)
    return recipe.replace(model=before.retriever.model)


def folders_of(table: Table, options: Options) -> Folders:
    """The collections of the table's columns."""
    columns = [c for c in table.columns if c not in table.tasks]
    columns = [c for c in columns if not options.only or c in options.only]
    own = {c: [options.pairs] for c in columns if c == OF_PAIRS and options.pairs is not None}
    columns = [c for c in columns if c not in own]
    named = {c: [options.data / c] for c in columns} if options.dry_run else {}
    if not options.small:
        find = find_folders if options.dry_run else make_folders
        return {**named, **find(columns, options.data), **own}
    found = {**find_folders(columns, options.data), **own}
    if columns and not found:  # any will do to try the commands
        found = folders_in(options.data) or named
    if columns and not found:
        raise RevelaError(f"no collection in {options.data}: give folders in BEIR layout as --data")
    return dict(list(found.items())[:COLLECTIONS])


def commands_of(table: Table, options: Options, folders: Folders) -> Iterator[Command]:
    """The commands of all rows, each row's before the next one's."""
    if table.heads:
        yield _heads_command(table, options)
    for row, size in selected(table, options):
        trained = _trained(row)
        for seed in options.seeds if trained else options.seeds[:1]:
            if trained:
                yield from _training(table, trained, size, seed, options)
            yield from _scoring(table, row, size, seed, options, folders)


def folder_of(table: Table, row: Row, size: str, seed: int, options: Options) -> Path:
    """The folder of a run: PRESET-SIZE-DIGEST-SEED."""
    settings, corpus = settings_of(table, row, size, seed, options), corpus_of(row, options)
    about = [{**settings, "seed": 0}, corpus.sources, corpus.weights]
    if row.after is not None:
        about.append(str(folder_of(table, row.after, size, seed, options)))
    name = (str(row.settings["method"]), size.lstrip("<="), _digest(about))
    return options.out / "runs" / f"{'-'.join(filter(None, name))}-{seed}"


def _digest(about: Any) -> str:
    """What a folder or file is made of, in eight characters for its name."""
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def settings_of(table: Table, row: Row, size: str, seed: int, options: Options) -> dict[str, Any]:
    """The settings of a run, of those that its method reads."""
    named = _named(table, row, size, options)
    if row.after is not None:
        named["model"] = str(folder_of(table, row.after, size, seed, options))
    unread = merged(named)[1]
    named = {name: value for name, value in named.items() if name not in unread}
    return {**named, "seed": seed}


def _named(table: Table, row: Row, size: str, options: Options) -> dict[str, Any]:
    """The settings of a row before those that its method does not read are left out."""
    own = row.corpus.settings if row.corpus and corpus_of(row, options) is row.corpus else {}
    named = {**row.settings, **own, **row.of_size.get(size, {})}
    if size in MODELS and table.sizes:
        named["model"] = MODELS[size]
    if options.small:
        named |= small_settings(table, row, named, options.processes)
    named |= options.given
    pairs = str(options.pairs or "PAIRS")
    return {
        name: [str(v).replace(PAIRS, pairs) for v in value] if name == "pairs" else value
        for name, value in named.items()
        if not (name == "model" and row.after is not None)
    }


def corpus_of(row: Row, options: Options) -> Corpus:
    """The text of a row, or that which is given in its place."""
    assert row.corpus is not None
    if options.corpus and "pairs" not in row.settings:
        return Corpus("given", options.corpus)
    if not _reads_pairs(row, options):
        return row.corpus
    documents = str(jsonl_file(options.pairs or Path("PAIRS"), "corpus.jsonl"))
    sources = tuple(source.replace(PAIRS, documents) for source in row.corpus.sources)
    return dataclasses.replace(row.corpus, sources=sources)


def _reads_pairs(row: Row, options: Options) -> bool:
    """Whether a row is trained on judged pairs, or on their documents for lack of another text."""
    assert row.corpus is not None
    is_text_given = bool(options.corpus) and "pairs" not in row.settings
    return not is_text_given and PAIRS in row.corpus.sources


def _trained(row: Row) -> Row | None:
    """The row whose run is scored: itself, or the one that is fused."""
    row = row.rrf or row
    return row if row.settings else None


def selected(table: Table, options: Options) -> Iterator[tuple[Row, str]]:
    """The rows that are run, with each size."""
    sizes = options.sizes or (table.sizes[:1] if options.small else table.sizes)
    for row in table.rows:
        if row.why_not or row.model == "BM25" or (options.rows and row.label not in options.rows):
            continue
        if options.small and row.model:
            continue  # published models need the hub
        own = table.sizes_of(row, sizes)
        if options.small and not own:
            own = sizes[:1]
        yield from ((row, size) for size in own)


def _runs(table: Table, options: Options) -> Iterator[tuple[Row, str]]:
    """The rows that are trained, with their earlier stages."""
    for row, size in selected(table, options):
        stage = _trained(row)
        while stage is not None:
            yield stage, size
            stage = stage.after


def _training(table: Table, row: Row, size: str, seed: int, options: Options) -> Iterator[Command]:
    """The commands that train a row, after those of its earlier stages."""
    if row.after is not None:
        yield from _training(table, row.after, size, seed, options)
    settings, corpus = settings_of(table, row, size, seed, options), corpus_of(row, options)
    out, n = folder_of(table, row, size, seed, options), options.processes
    if not corpus.stored:
        yield from train_commands(corpus.sources, settings, out, processes=n)
        return
    digest = _digest([corpus.sources, corpus.weights, corpus.settings])
    groups = options.out / "groups" / f"{corpus.name}-{digest}"
    weights = ["--weights", *map(str, corpus.weights)] if corpus.weights else []
    words = ["groups", *corpus.sources, "--out", str(groups), *weights]
    yield Command([*words, *flags_of(corpus.settings)], groups)
    for command in train_commands([str(groups)], settings, out):  # none stores groups of its own
        yield dataclasses.replace(command, processes=n)


def _scoring(
    table: Table, row: Row, size: str, seed: int, options: Options, folders: Folders
) -> Iterator[Command]:
    """The commands that score a row on each column."""
    model, slots = _model(table, row, size, seed, options)
    for column, parts in folders.items():
        if not _has_column(row, column):
            continue
        for folder in parts:
            flags, out = list[str](), _scores_file(table, row, model, options, column)
            if table.depth:
                run = candidates_of(table, options, column, folder)
                yield run
                flags += ["--candidates", str(run.makes), "--depth", str(table.depth)]
            if row.rrf is not None:
                flags += ["--runs", str(out / "rankings")]
            if slots and row.in_other_context:
                other = _of_another_column(folders, column)
                read, text = f"{model}-in-{other.name}", jsonl_file(other, "corpus.jsonl")
                words = ["fit", "--model", model, "--context", str(text)]
                yield Command([*words, "--out", read], Path(read) / MODULES, Path(model) / MODULES)
                yield from eval_commands(read, [folder], out, flags=flags)
            else:
                yield from eval_commands(model, [folder], out, slots=slots, flags=flags)
    if tasks := [t for t in table.tasks if _has_column(row, t)]:
        chosen = [task for task in tasks if not options.only or task in options.only]
        if chosen and not options.small:
            file = _scores_file(table, row, model, options, "mteb") / "tasks.json"
            words = ["eval", model, "--benchmark", *chosen, "--json", str(file)]
            yield Command([*words, "--out", str(options.out / "mteb-results")], file)


def _of_another_column(folders: Folders, column: str) -> Path:
    """A folder of the column before; of the last one for the first."""
    names = [*folders]
    if len(names) == 1:
        raise RevelaError(f"{column} needs another data set as context: give --only two or more")
    return folders[names[names.index(column) - 1]][-1]


def _model(table: Table, row: Row, size: str, seed: int, options: Options) -> tuple[str, int]:
    """What `revela eval` scores, and the context documents that it reads."""
    if trained := _trained(row):
        settings = settings_of(table, trained, size, seed, options)
        slots = merged(settings)[0].context.context
        return str(folder_of(table, trained, size, seed, options)), slots
    return row.model if isinstance(row.model, str) else row.model[size], 0


def _has_column(row: Row, column: str) -> bool:
    return not row.columns or column in row.columns


def _scores_file(table: Table, row: Row, model: str, options: Options, column: str) -> Path:
    """The folder of the scores of a row's model on a column."""
    name = Path(model).name if _trained(row) else file_name(model.replace("/", "-"))
    name += "-rrf" * (row.rrf is not None) + "-in-other" * row.in_other_context
    name += f"-top{table.depth}" if table.depth else ""
    return options.out / "scores" / name / column.replace(" ", "-")


def candidates_of(table: Table, options: Options, column: str, folder: Path) -> Command:
    """Rank a collection by the retriever that finds the candidates; makes its run."""
    model = "embedded:minilm-l6" if options.small else table.candidates_by
    out = options.out / "candidates" / column
    words = ["eval", model, "--on", str(folder), "--runs", str(out)]
    return Command(words, out / folder.name / f"{file_name(Path(model).name)}.trec")


def _heads_command(table: Table, options: Options) -> Command:
    """Rank the heads of the table's language model."""
    heads = Row("heads", settings=table.heads, corpus=_heads_corpus())
    named = _named(table, heads, "", options)
    unread = merged(named)[1]
    flags = flags_of({n: v for n, v in named.items() if n not in unread})
    sources = corpus_of(heads, options).sources
    out = options.out / f"heads-{_digest([flags, sources])}.json"
    return Command(["heads", *sources, "--out", str(out), *flags], out)


def _heads_corpus() -> Corpus:
    from research.reproduce.papers.revela import WIKIPEDIA_TEXT

    return WIKIPEDIA_TEXT


def found_heads(table: Table, options: Options, count: int) -> list[tuple[int, int]]:
    """The best heads that the probe has found: (layer, head)."""
    ranking = json.loads(_heads_command(table, options).makes.read_text())["ranking"]
    return [(int(layer), int(head)) for layer, head, _ in ranking[:count]]


def results_of(table: Table, options: Options, folders: Folders) -> Results:
    """The scores of all rows that have run; BM25's are in the files of each."""
    from revela.training.compare import scores_of  # imports training: seconds

    results: Results = {row.label: {} for row in table.rows}
    lexical = dict[str, Scores]()
    for row, size in selected(table, options):
        seeds = options.seeds if _trained(row) else options.seeds[:1]
        models = [_model(table, row, size, seed, options)[0] for seed in seeds]
        columns = results[row.label].setdefault(size, {})
        for column, parts in folders.items():
            if not _has_column(row, column):
                continue
            runs = [_scores_file(table, row, model, options, column) for model in models]
            files = [{p.name: run / f"{p.name}.json" for p in parts} for run in runs]
            read = [{name: scores_of(file) for name, file in of.items()} for of in files]
            lexical.setdefault(column, {name: s["BM25"].queries for name, s in read[0].items()})
            if row.rrf is not None:
                columns[column] = _mean([_fused(run, parts) for run in runs])
            else:
                columns[column] = _mean(
                    [{name: queries_of(s) for name, s in one.items()} for one in read]
                )
        for column, scores in _task_scores(table, row, models[0], options).items():
            columns[column] = scores
    for row in table.rows:
        if row.model == "BM25" and lexical:
            results[row.label][(row.sizes or ("",))[0]] = lexical
    return {label: sizes for label, sizes in results.items() if sizes}


def queries_of(systems: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The queries of the first system that is not BM25."""
    return dict(next(scores.queries for name, scores in systems.items() if name != "BM25"))


def _fused(run: Path, parts: Sequence[Path]) -> Scores:
    """Reciprocal rank fusion of a model's and BM25's best documents."""
    scores: Scores = {}
    for folder in parts:
        files = sorted((run / "rankings" / folder.name).glob("*.trec"))
        names = [f for f in files if "-BM25" not in f.stem and not f.stem.startswith("BM25-")]
        rankings = [read_run(file) for file in names]
        qrels = load_collection(folder).qrels
        fused = {
            query: reciprocal_rank_fusion([list(r.get(query, {}))[:FUSED] for r in rankings])
            for query in qrels
        }
        scores[folder.name] = per_query(qrels, fused)
    return scores


def _task_scores(table: Table, row: Row, model: str, options: Options) -> dict[str, Scores]:
    """mteb's main score of each task, as the one query of a data set."""
    file = _scores_file(table, row, model, options, "mteb") / "tasks.json"
    if not table.tasks or not file.is_file():
        return {}
    from revela.training.compare import FILE

    tasks = parse(FILE, file.read_bytes(), str(file))
    return {
        task: {task: {MAIN: {NDCG: next(iter(systems.values())).means[MAIN]}}}
        for task, systems in tasks.items()
    }


def _mean(runs: Sequence[Scores]) -> Scores:
    """The mean over runs of each query's values."""
    return {
        part: {
            query: {metric: fmean(run[part][query][metric] for run in runs) for metric in values}
            for query, values in queries.items()
        }
        for part, queries in runs[0].items()
    }


def mean_of(scores: Scores, metric: str = NDCG) -> float:
    """The mean over queries, and over the parts of a data set."""
    return fmean(fmean(q[metric] for q in queries.values()) for queries in scores.values())


def margin_of(scores: Scores, metric: str = NDCG) -> float | None:
    """Half the 95 % interval of ``mean_of``; None for a single query."""
    margins = [
        margin(np.array([q[metric] for q in queries.values()])) for queries in scores.values()
    ]
    known = [m for m in margins if m is not None]
    return None if len(known) < len(margins) else float(np.hypot.reduce(known)) / len(known)
