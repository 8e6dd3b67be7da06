"""The command line: one function a verb, the only file that knows the CLI library. Errors are one sentence, exit code 2."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict, Toml

from revela.config import PRESETS, Recipe
from revela.errors import RevelaError

app = App(
    name="revela",
    help="Raw text in, a dense retriever out: trained without labels, measured beside BM25, ready to search.",
    version_flags=["--version"],
)
Flat = Parameter(name="*")
Preset = Literal["gated", "paper", "dream", "replug", "infonce", "crop"]
DEFAULTS = Recipe()
Corpus = Annotated[list[Path], Parameter(negative=())]


@app.command
def train(
    corpus: Corpus,
    *,
    out: Path,
    preset: Preset = "gated",
    recipe_file: Annotated[Path | None, Parameter(name="--recipe")] = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Train a retriever on raw text.

    Parameters
    ----------
    corpus:
        Folders, files (text, HTML, source code, JSONL, Parquet, CSV, PDF, StackExchange's Posts.xml; .gz of each), hub:owner/name.
    out:
        Folder for the retriever: a Sentence-Transformers model with metrics.jsonl and training.png.
    preset:
        The settings to start from: gated (ours), paper (Revela's), or those of another objective; --objective implies its own.
    recipe_file:
        A TOML file of settings; flags win over it, and it wins over the preset.
    resume:
        Continue the run in --out from its last checkpoint.
    """
    from revela.train.run import train as run

    documents, report = _read(corpus, recipe)
    rest, check = _held_out(documents, recipe)
    bm25 = check.bm25()
    for line in report.lines():
        print(line)
    print(f"held out {len(documents) - len(rest):,} documents for the label-free check ({check.describe() or 'too few for a task'})")
    outcome = run(
        recipe,
        rest,
        out,
        check=check if check.tasks else None,
        bm25=bm25,
        corpus=", ".join(map(str, corpus)),
        command="revela " + shlex.join(sys.argv[1:]),
        resume=resume,
        queries_file=_queries_file(corpus, recipe),
    )
    systems = {"BM25": bm25, "untrained": outcome.untrained, "before training": outcome.before, "trained": outcome.after}
    if check.tasks:
        tasks = [t.name for t in check.tasks]
        _print_table(
            "label-free check, nDCG@10", ["system", *tasks], [[s, *(_number(row.get(t)) for t in tasks)] for s, row in systems.items()]
        )
    print(
        f"{outcome.steps:,} updates in {outcome.minutes:.1f} minutes; saved to {out}"
        + (", go on with --resume" if outcome.interrupted else "")
    )


@app.command(name="eval")
def evaluate(
    model: list[str],
    *,
    on: Annotated[list[Path], Parameter(negative=(), consume_multiple=True)],
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    max_tokens: int | None = None,
    precision: Literal["auto", "fp32", "bf16"] = "auto",
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
    from revela.search.metrics import METRICS

    short = [Path(name).name if "/" in name else name for name in model]
    encoders = {
        (brief if short.count(brief) == 1 else name): _encoder(name, precision, max_tokens)
        for brief, name in zip(short, model, strict=True)
    }
    results = evaluate_folders(on, encoders, print, progress=True)
    rows = [[name, system, *(_number(v) for v in values)] for name, system, values in table(results)]
    _print_table("", ["collection", "system", *METRICS], rows)
    if json_file is not None:
        _write(json_file, json.dumps(results, indent=1) + "\n")


@app.command
def index(
    corpus: Corpus,
    *,
    model: str,
    out: Path,
    chunk_words: int = 120,
    text_field: str = "text",
    title_field: str = "title",
    join_titles: bool = False,
    max_bad_share: float = 0.01,
    precision: Literal["auto", "fp32", "bf16"] = "auto",
) -> None:
    """Index a corpus for search.

    Parameters
    ----------
    corpus:
        As for train.
    model:
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
    out:
        Folder for the index.
    chunk_words:
        Most words in a passage.
    text_field:
        Field or column that holds the text.
    title_field:
        Field or column that holds the title.
    join_titles:
        Join neighbouring rows of one title: a file of passages becomes articles again.
    max_bad_share:
        Share of unreadable rows and files past which indexing stops.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    if out.exists():
        raise RevelaError(f"{out} exists: choose another --out")
    from revela.data.chunk import chunk_all
    from revela.data.text import read_corpus
    from revela.models.weights import fingerprint, resolve
    from revela.search.store import Index
    from revela.types import Hit

    documents, report = read_corpus(
        corpus,
        text_field=text_field,
        title_field=title_field,
        max_bad_share=max_bad_share,
        distinct=False,
        min_words=1,
        join_titles=join_titles,
    )
    for line in report.lines():
        print(line)
    passages = [Hit(documents[c.document].id, 0.0, documents[c.document].title, c.text) for c in chunk_all(documents, chunk_words)]
    folder = resolve(model)
    Index.build(passages, _encoder(model, precision, None), str(folder.resolve()), fingerprint(folder), progress=True).save(out)
    print(f"indexed {len(passages):,} passages into {out}")


@app.command
def search(
    index_folder: Annotated[Path, Parameter(name="index")],
    query: str,
    *,
    mode: Literal["hybrid", "dense", "lexical"] = "hybrid",
    top: int = 5,
    model: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Search an index.

    Parameters
    ----------
    index_folder:
        Made by revela index.
    query:
        What to look for.
    mode:
        By meaning (dense), by words (lexical) or both.
    top:
        How many passages.
    model:
        The retriever, if it has moved since the index was made.
    as_json:
        Print JSON.
    """
    from revela.search.store import Index

    opened = Index.load(index_folder)
    encoder = None
    if mode != "lexical":
        from revela.models.weights import fingerprint, resolve

        folder = resolve(model or opened.model)
        if fingerprint(folder) != opened.fingerprint:
            raise RevelaError(f"{folder} is not the model that made {index_folder}: give that one as --model, or index again")
        encoder = _encoder(str(folder), "auto", None)
    hits = opened.search(query, encoder, top, mode)
    if as_json:
        print(json.dumps([{"id": h.id, "score": h.score, "title": h.title, "text": h.text} for h in hits], ensure_ascii=False, indent=1))
        return
    for rank, hit in enumerate(hits, 1):
        snippet = " ".join(hit.text.split())
        print(f"{rank}. {hit.title or hit.id}  [{hit.score:.4f}]\n   {snippet[:240]}{'...' if len(snippet) > 240 else ''}")
    if not hits:
        print("nothing found")


@app.command
def queries(
    corpus: Corpus,
    *,
    show: int = 5,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Have a language model write queries for a corpus, as the objectives dream and infonce need them.

    They are kept beside the corpus; a stopped run goes on where it was, and train uses what is there.

    Parameters
    ----------
    corpus:
        As for train.
    show:
        Print this many of them.
    """
    import dataclasses

    from revela.models.quiet import quieten
    from revela.train.objectives import training_chunks, training_rows

    quieten()
    documents, report = _read(corpus, recipe)
    for line in report.lines():
        print(line)
    rest, _ = _held_out(documents, recipe)
    recipe = dataclasses.replace(recipe, objective="infonce")
    rows = training_rows(recipe, rest, training_chunks(recipe, rest), _queries_file(corpus, recipe), print)
    asked = [row for row in rows if row.query]
    for row in asked[:: max(1, len(asked) // max(1, show))][:show]:
        print(f"\n{row.query}\n   {' '.join(row.text.split())[:240]}")


@app.command
def compare(
    corpus: Corpus,
    *,
    on: Annotated[list[Path], Parameter(negative=(), consume_multiple=True)],
    out: Path,
    presets: Annotated[list[Preset], Parameter(negative=(), consume_multiple=True)] = ["gated", "crop"],  # noqa: B006
    seeds: Annotated[list[int], Parameter(negative=(), consume_multiple=True)] = [0],  # noqa: B006
    points: int = 4,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Train several objectives from the same start for the same time, and plot nDCG@10 against it.

    Bounded by --max-minutes or, with --max-minutes 0, by --max-tokens-read. Settings given here hold for every run. What is done
    already is kept: run it again to add presets or seeds.

    Parameters
    ----------
    corpus:
        As for train.
    on:
        Folders with judged queries, as for eval.
    out:
        Folder for the runs, compare.json and compare.png.
    presets:
        What to compare.
    seeds:
        Each preset is run with each of these.
    points:
        A run is scored at its start and after each of so many equal parts.
    """
    from revela.compare import compare as run

    documents, report = _read(corpus, recipe)
    rest, check = _held_out(documents, recipe)
    for line in report.lines():
        print(line)
    out.mkdir(parents=True, exist_ok=True)
    curves, lexical = run(
        rest,
        on,
        out,
        runs=[(preset, seed) for seed in seeds for preset in presets],
        settings=_changes(recipe),
        points=points,
        check=check if check.tasks else None,
        bm25=check.bm25(),
        corpus=", ".join(map(str, corpus)),
        command="revela " + shlex.join(sys.argv[1:]),
        queries_file=_queries_file(corpus, recipe),
    )
    start = next(iter(curves.values()))[0]["judged"]
    table = {"BM25": lexical, "start": start, **{label: curve[-1]["judged"] for label, curve in curves.items()}}
    _print_table(
        "nDCG@10 at the end", ["system", *lexical], [[label, *(_number(row.get(n)) for n in lexical)] for label, row in table.items()]
    )


@app.command
def heads(
    corpus: Corpus,
    *,
    top: int = 32,
    out: Path | None = None,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Show which heads of a language model look to a related document, or with --objective dream from a question to its answer.

    Found without labels; cached per model.

    Parameters
    ----------
    corpus:
        Text to probe with, as for train.
    top:
        How many heads to list.
    out:
        Write the whole ranking here, for train --heads.
    """
    import torch

    from revela.models.quiet import quieten
    from revela.models.retriever import has_fast_bf16
    from revela.train.objectives import rank_heads, save_heads

    quieten()
    documents, _ = _read(corpus, recipe)
    bf16 = recipe.precision == "bf16" or (recipe.precision == "auto" and has_fast_bf16(torch.device("cpu")))
    folder, ranking = rank_heads(recipe, documents, bf16, _queries_file(corpus, recipe), print)
    _print_table(
        f"heads of {recipe.lm}",
        ["rank", "layer", "head", "score"],
        [[str(i), str(a), str(b), f"{s:.5f}"] for i, (a, b, s) in enumerate(ranking[:top], 1)],
    )
    if out is not None:
        save_heads(out, recipe.lm, folder, ranking)


def _queries_file(corpus: Sequence[Path], recipe: Recipe) -> Path:
    name = str(corpus[0]) if corpus else "corpus"
    first = Path(name.removeprefix("hub:").translate({ord(c): "-" for c in "/:"}) if name.startswith("hub:") else name).resolve()
    return Path(recipe.queries_file) if recipe.queries_file else first.with_name(f"{first.name}.queries.jsonl")


def _changes(recipe: Recipe) -> dict[str, Any]:
    """What a person has set."""
    import dataclasses

    return {f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe) if getattr(recipe, f.name) != getattr(DEFAULTS, f.name)}


def _read(corpus: Sequence[Path], recipe: Recipe) -> tuple[Any, Any]:
    from revela.data.text import read_corpus

    return read_corpus(
        corpus,
        text_field=recipe.text_field,
        title_field=recipe.title_field,
        max_bad_share=recipe.max_bad_share,
        near=recipe.near_duplicates,
        join_titles=recipe.join_titles,
    )


def _held_out(documents: Any, recipe: Recipe) -> tuple[Any, Any]:
    from revela.data.heldout import split_held_out, tasks
    from revela.evaluate.heldout import HeldOutCheck

    rest, held = split_held_out(documents, recipe.held_out, recipe.held_out_at_most)
    return rest, HeldOutCheck(tasks(held, recipe.chunk_words, recipe.check_queries, recipe.check_passages, recipe.seed))


def _encoder(name: str, precision: str, max_tokens: int | None) -> Any:
    from revela.models.quiet import quieten
    from revela.models.retriever import RetrieverEncoder, has_fast_bf16, load_retriever
    from revela.models.weights import resolve

    quieten()
    model = load_retriever(resolve(name))
    bf16 = precision == "bf16" or (precision == "auto" and has_fast_bf16(model.device))
    return RetrieverEncoder(model, bf16, max_tokens)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for name, *cells in zip(header, *rows, strict=True):
        numeric = all(cell.replace(".", "", 1).isdigit() for cell in cells if cell)
        table.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


def _configured(arguments: Sequence[str]) -> list[Any]:
    """Where a setting comes from when no flag gives it: the recipe file, then the preset."""
    named = {"--preset": "", "--objective": "", "--recipe": ""}
    for i, word in enumerate(arguments):
        flag, _, value = word.partition("=")
        if flag in named:
            named[flag] = value or (arguments[i + 1] if i + 1 < len(arguments) else "")
    sources: list[Any] = []
    if named["--recipe"]:
        if not Path(named["--recipe"]).is_file():
            raise RevelaError(f"{named['--recipe']} does not exist: give a TOML file of settings as --recipe")
        sources.append(Toml(named["--recipe"], must_exist=True, use_commands_as_keys=False))
    if settings := PRESETS.get(named["--preset"] or named["--objective"]):
        sources.append(Dict(settings, use_commands_as_keys=False))
    return sources


def main() -> None:
    arguments = sys.argv[1:]
    try:
        if arguments[:1] in (["train"], ["heads"]):
            app.config = _configured(arguments)
        app(arguments, exit_on_error=False)
    except CycloptsError:  # it has printed what was wrong
        raise SystemExit(2) from None
    except RevelaError as error:
        print(f"revela: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
