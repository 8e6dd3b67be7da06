"""The verb that looks inside a model: probe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from revela.cli.flags import Corpus
from revela.cli.main import DEFAULTS, app
from revela.cli.printing import print_table
from revela.errors import RevelaError
from revela.files import atomic_write
from revela.settings import Precision

if TYPE_CHECKING:
    from revela.evaluation.probe.geometry import Geometry
    from revela.evaluation.probe.profile import Interval, Profile


@app.command
def probe(
    model: str,
    corpus: Corpus,
    *,
    move: Path | None = None,
    pairs: Path | None = None,
    max_tokens: int = 512,
    documents: int = 200,
    positions: Literal["tokens", "characters"] = "tokens",
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    plot: Path | None = None,
    seed: int = 0,
    text_field: str = DEFAULTS.text_field,
    title_field: str = DEFAULTS.title_field,
    join_titles: bool = DEFAULTS.join_titles,
    max_bad_share: float = DEFAULTS.max_bad_share,
    precision: Precision = "auto",
) -> None:
    """Ask where in a text a model looks, and how its vectors lie.

    A retriever is asked whether each tenth of a document finds the whole (no labels needed),
    whether a document still ranks when the passage that answers a query is moved through it (with
    --move), and for alignment, uniformity, anisotropy and effective rank. A language model is asked
    for its next-token loss by place.

    Parameters
    ----------
    model:
        A Sentence-Transformers folder, a hub id or embedded:minilm-l6; or a language model.
    corpus:
        Text, as for train; documents of --max-tokens or more are used.
    move:
        Folder in BEIR layout with answers.jsonl, or with --join-titles one of passages that make
        articles: move the answers about.
    pairs:
        Folder in BEIR layout whose queries and judged passages are the pairs of the geometry;
        without it, halves of chunks are.
    max_tokens:
        Cut texts here, or where the model stops reading if that is earlier.
    documents:
        How many documents to take, and how many answers to move, at most; 30 documents are enough.
    positions:
        What places of a moved answer count: tokens as in the paper, or characters as in its code.
    json_file:
        Write all numbers here too.
    plot:
        Write a plot here (PNG).
    seed:
        Of the samples.
    text_field:
        Field or column that holds the text.
    title_field:
        Field or column that holds the title.
    join_titles:
        Join neighbouring rows of one title: a file of passages becomes articles again.
    max_bad_share:
        Share of unreadable rows and files past which reading stops.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    if documents < 2:
        raise RevelaError(f"--documents {documents} is no sample: give 2 or more")
    from revela.corpus.read import read_corpus
    from revela.evaluation.probe.model import probe_language_model, probe_retriever
    from revela.weights import resolve

    folder = resolve(model)
    is_retriever = (folder / "modules.json").is_file()
    if not is_retriever and (move or pairs):
        raise RevelaError(
            f"{model} is a language model, of which only the loss is probed: leave --move and --pairs away"
        )
    read, report = read_corpus(
        corpus,
        text_field=text_field,
        title_field=title_field,
        max_bad_share=max_bad_share,
        join_titles=join_titles,
    )
    for line in report.lines():
        print(line)
    if is_retriever:
        found = probe_retriever(
            folder,
            model,
            read,
            max_tokens=max_tokens,
            count=documents,
            seed=seed,
            precision=precision,
            move=move,
            join_titles=join_titles,
            unit=positions,
            pairs=pairs,
        )
    else:
        found = probe_language_model(
            folder,
            model,
            read,
            max_tokens=max_tokens,
            count=documents,
            seed=seed,
            precision=precision,
        )
    _print_profiles(found.profiles)
    if found.geometry is not None:
        _print_geometry(found.geometry)
    if json_file is not None:
        with atomic_write(json_file) as temporary:
            temporary.write_text(
                json.dumps(
                    {"model": model, "corpus": [str(c) for c in corpus], **found.as_json()},
                    indent=1,
                )
                + "\n"
            )
    if plot is not None:
        from revela.evaluation.probe.plot import plot_profiles

        plot_profiles({model: found.profiles}, plot, f"{Path(model).name}, {found.tokens} tokens")


def _print_profiles(profiles: Mapping[str, Profile]) -> None:
    """A row a place and a column a test; below, what sums them up."""
    columns = list(profiles.values())
    rows = [
        [str(place + 1), *(_between(p.places[place], 3) for p in columns)]
        for place in range(len(columns[0].places))
    ]
    rows.append(["slope a tenth", *(_between(p.slope, 4) for p in columns)])
    rows.append(["first - last", *(_between(p.drop, 3) for p in columns)])
    rows.append(["first > last", *(_between(p.first_wins, 2) for p in columns)])
    print_table("by place, ± half of the 95 % interval", ["place", *profiles], rows)


def _between(interval: Interval, digits: int) -> str:
    return f"{interval.value:.{digits}f} ±{(interval.high - interval.low) / 2:.{digits}f}"


def _print_geometry(found: Geometry) -> None:
    values = [
        found.alignment,
        found.uniformity,
        found.anisotropy,
        f"{found.effective_rank:.1f} of {min(found.pairs, found.width)}",
    ]
    print_table(
        f"geometry, {found.pairs:,} pairs",
        ["alignment", "uniformity", "anisotropy", "effective rank"],
        [values],
    )
