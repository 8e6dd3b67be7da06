"""The command line: one function a verb, the only file that knows the CLI library. Errors are one sentence, exit code 2."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

from revela.config import PRESETS, Precision, Recipe
from revela.errors import RevelaError
from revela.files import whole
from revela.terminal import print_group, print_hits, print_scores, print_table, snippet

app = App(
    name="revela",
    help="Raw text in, a dense retriever out: trained without labels, measured beside BM25, ready to search.",
    version_flags=["--version"],
)
Flat = Parameter(name="*")
Preset = Literal["gated", "paper", "dream", "attention", "replug", "infonce", "crop"]
DEFAULTS = Recipe()
Corpus = Annotated[list[Path], Parameter(negative=())]
Several = Parameter(negative=(), consume_multiple=True)
RecipeFile = Annotated[Path | None, Parameter(name="--recipe")]


@app.command
def train(
    corpus: Corpus,
    *,
    out: Path,
    preset: Preset = "gated",
    recipe_file: RecipeFile = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Train a retriever on raw text.

    Parameters
    ----------
    corpus:
        Folders, files (text, HTML, source code, JSONL, Parquet, CSV, PDF, StackExchange's Posts.xml; .gz of each), hub:owner/name.
        Or one folder of groups, made by revela groups.
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

    documents, check = _divided(corpus, recipe)
    bm25 = check.bm25()
    outcome = run(
        recipe,
        documents,
        out,
        check=check if check.tasks else None,
        bm25=bm25,
        corpus=", ".join(map(str, corpus)),
        command="revela " + shlex.join(sys.argv[1:]),
        resume=resume,
        queries_file=_queries_file(corpus, recipe),
    )
    if check.tasks:
        systems = {"BM25": bm25, "untrained": outcome.untrained, "before training": outcome.before, "trained": outcome.after}
        print_scores("label-free check, nDCG@10", bm25, systems)
    more = ", go on with --resume" if outcome.interrupted else ""
    print(f"{outcome.steps:,} updates in {outcome.minutes:.1f} minutes; saved to {out}{more}")


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
def index(
    corpus: Corpus,
    *,
    model: str,
    out: Path,
    chunk_words: int = 120,
    text_field: str = DEFAULTS.text_field,
    title_field: str = DEFAULTS.title_field,
    join_titles: bool = DEFAULTS.join_titles,
    max_bad_share: float = DEFAULTS.max_bad_share,
    precision: Precision = "auto",
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
    from revela.data.text import read_corpus
    from revela.models.retriever import load_encoder
    from revela.models.weights import fingerprint, resolve
    from revela.search.store import Index, passages_of

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
    passages, folder = passages_of(documents, chunk_words), resolve(model)
    encoder = load_encoder(folder, precision)
    Index.build(passages, encoder, str(folder.resolve()), fingerprint(folder), progress=True).save(out)
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
        from revela.models.retriever import load_encoder
        from revela.models.weights import fingerprint, resolve

        folder = resolve(model or opened.model)
        if fingerprint(folder) != opened.fingerprint:
            raise RevelaError(f"{folder} is not the model that made {index_folder}: give that one as --model, or index again")
        encoder = load_encoder(folder, "auto")
    hits = opened.search(query, encoder, top, mode)
    if as_json:
        print(json.dumps([{"id": h.id, "score": h.score, "title": h.title, "text": h.text} for h in hits], ensure_ascii=False, indent=1))
    else:
        print_hits(hits)


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
    from revela.train.rows import training_chunks, training_rows

    quieten()
    documents, _ = _divided(corpus, recipe)
    recipe = dataclasses.replace(recipe, objective="infonce")
    rows = training_rows(recipe, documents, training_chunks(recipe, documents), _queries_file(corpus, recipe), print)
    asked = [row for row in rows if row.query]
    for row in asked[:: max(1, len(asked) // max(1, show))][:show]:
        print(f"\n{row.query}\n   {snippet(row.text)}")


@app.command
def groups(
    corpus: Corpus,
    *,
    out: Path | None = None,
    show: int = 0,
    shares: Annotated[list[float], Several] = [],  # noqa: B006
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Build the groups of chunks that training compares with one another, look at them, and keep them for train.

    Parameters
    ----------
    corpus:
        As for train; or JSONL of groups, a line being a list of texts or {"src": ..., "text": [...]}; or a folder of groups, to look at.
    out:
        Folder for the groups.
    show:
        Print so many groups.
    shares:
        What share of the groups each corpus has, as weights; none: all groups of all.
    """
    from revela.data.shards import GroupFolder, is_group_folder
    from revela.train.grouping import build_groups

    if len(corpus) == 1 and is_group_folder(corpus[0]):
        folder = GroupFolder(corpus[0])
    elif out is None:
        raise RevelaError("groups need a folder to be kept in: give --out")
    else:
        folder = build_groups(recipe, corpus, out, shares, _queries_file(corpus, recipe), print)
    print(f"{len(folder):,} groups of {folder.size} in {folder.folder}")
    for group in islice(folder.order(recipe.seed)(0), show):
        members = folder.members(group)
        print_group(f"group {group[0] // folder.size + 1:,}", members, [member.name for member in members])


@app.command
def compare(
    corpus: Corpus,
    *,
    on: Annotated[list[Path], Several],
    out: Path,
    presets: Annotated[list[Preset], Several] = ["gated", "crop"],  # noqa: B006
    seeds: Annotated[list[int], Several] = [0],  # noqa: B006
    points: int = 4,
    recipe_file: RecipeFile = None,
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
    recipe_file:
        A TOML file of settings; flags win over it, and it wins over every preset.
    """
    from revela.compare import compare as run

    documents, check = _divided(corpus, recipe)
    curves, lexical = run(
        {preset: _over(preset, recipe_file) for preset in presets},
        documents,
        on,
        out,
        seeds=seeds,
        points=points,
        check=check if check.tasks else None,
        bm25=check.bm25(),
        corpus=", ".join(map(str, corpus)),
        command="revela " + shlex.join(sys.argv[1:]),
        queries_file=_queries_file(corpus, recipe),
    )
    start = next(iter(curves.values()))[0]["judged"]
    ends = {label: curve[-1]["judged"] for label, curve in curves.items()}
    print_scores("nDCG@10 at the end", lexical, {"BM25": lexical, "start": start, **ends})


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
    from revela.models.quiet import quieten
    from revela.train.heads import rank_heads, save_heads

    quieten()
    documents, _ = _read(corpus, recipe)
    folder, ranking = rank_heads(recipe, documents, _queries_file(corpus, recipe), print)
    rows = [[rank, layer, head, f"{score:.5f}"] for rank, (layer, head, score) in enumerate(ranking[:top], 1)]
    print_table(f"heads of {recipe.lm}", ["rank", "layer", "head", "score"], rows)
    if out is not None:
        save_heads(out, recipe.lm, folder, ranking)


def _queries_file(corpus: Sequence[Path], recipe: Recipe) -> Path:
    name = str(corpus[0])
    if name.startswith("hub:"):
        name = name.removeprefix("hub:").replace("/", "-").replace(":", "-")
    first = Path(name).resolve()
    return Path(recipe.queries_file or first.with_name(f"{first.name}.queries.jsonl"))


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


def _divided(corpus: Sequence[Path], recipe: Recipe) -> tuple[Any, Any]:
    """Documents to train on, and the label-free check by those that are held out; says what was read."""
    from revela.data.shards import GroupFolder, is_group_folder
    from revela.evaluate.heldout import check_by, hold_out

    if len(corpus) == 1 and is_group_folder(corpus[0]):
        folder = GroupFolder(corpus[0])
        return folder, check_by(folder.held_out, recipe)
    documents, report = _read(corpus, recipe)
    rest, check = hold_out(documents, recipe)
    for line in report.lines():
        print(line)
    print(f"held out {len(documents) - len(rest):,} documents for the label-free check ({check.describe() or 'too few for a task'})")
    return rest, check


def _sources(verb: str, preset: str, recipe_file: Path | None) -> list[Dict]:
    """Where a setting comes from when no flag gives it: the recipe file, then the preset."""
    sources = [Dict({verb: PRESETS.get(preset, {})})]
    if recipe_file is not None:
        if not recipe_file.is_file():
            raise RevelaError(f"{recipe_file} does not exist: give a TOML file of settings as --recipe")
        try:
            settings = tomllib.loads(recipe_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RevelaError(f"{recipe_file} is not TOML ({error}): mend it, or give another --recipe") from error
        sources.insert(0, Dict({verb: settings}, source=str(recipe_file)))
    return sources


def _over(preset: str, recipe_file: Path | None) -> Recipe:
    """The recipe that this command line makes of a preset: read once more, as the recipe alone does not tell which flags were given."""
    app.config = _sources("compare", preset, recipe_file)
    _, given, _ = app.parse_args(sys.argv[1:], exit_on_error=False)
    recipe: Recipe = given.arguments["recipe"]
    return recipe


def main() -> None:
    arguments = sys.argv[1:]
    named = {"--preset": "", "--objective": "", "--recipe": ""}  # these decide what the others' defaults are
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag in named:
            named[flag] = value or following
    try:
        if arguments[:1] in (["train"], ["heads"], ["compare"], ["groups"]):
            file = Path(named["--recipe"]) if named["--recipe"] else None
            app.config = _sources(arguments[0], named["--preset"] or named["--objective"], file)
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
