"""``revela probe``: position bias and geometry of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from revela.cli.flags import Corpus, Flat, Several
from revela.cli.printing import print_report, print_table
from revela.errors import RevelaError, extra
from revela.text.load import READING, Reading, read_corpus
from revela.training.settings import TorchPrecision

if TYPE_CHECKING:
    from revela.training.probes.geometry import Geometry
    from revela.training.probes.places import Interval, Profile


def probe(
    model: str,
    corpus: Corpus,
    *,
    move: Path | None = None,
    pairs: Annotated[list[Path], Several] = [],  # noqa: B006
    max_tokens: int = 512,
    documents: int = 200,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    seed: int = 0,
    reading: Annotated[Reading, Flat] = READING,
    precision: TorchPrecision = "auto",
) -> None:
    """Measure the position bias of a model, and the geometry of its vectors.

    For a retriever: how well each tenth of a document finds the document (no labels needed); with
    --move, how a document ranks while the passage that answers a query is moved through it; and
    alignment, uniformity, anisotropy and effective rank. For an encoder-decoder, and for a
    retriever saved with one by revela train --method dwell-spans: accuracy of hidden spans by
    place.

    Parameters
    ----------
    model:
        A Sentence-Transformers folder, a hub id or embedded:minilm-l6; or an encoder-decoder.
    corpus:
        Text, as for train; documents of at least --max-tokens are used.
    move:
        Move the answers of this folder in BEIR layout: neighbouring passages of one title make a
        document, and the judged ones are the answers; or, with passages.jsonl, rows are documents,
        and answers the passages (text) that it has for queries (_id).
    pairs:
        Folders in BEIR layout whose queries and judged passages are the pairs of the geometry;
        without any, they are halves of chunks.
    max_tokens:
        Truncate texts to this length, or to the model's own limit if that is lower.
    documents:
        Maximum number of documents, and of answers to move; 30 documents are enough.
    json_file:
        Write all numbers to this file.
    seed:
        Seed of the samples.
    precision:
        Numeric precision. auto: bf16 where the hardware supports it.
    """
    if documents < 2:
        raise RevelaError(f"--documents must be at least 2 (got {documents})")
    with extra("train", "revela probe"):
        from revela.training.lm.encoder_decoder import is_encoder_decoder
        from revela.training.probes.run import ProbeOptions, probe_encoder_decoder, probe_retriever
    from revela.encoders.load import resolve

    folder = resolve(model)
    is_retriever = (folder / "modules.json").is_file()
    if not is_retriever and not is_encoder_decoder(folder):
        raise RevelaError(f"{model} has no vectors to probe: make a retriever of it (revela train)")
    if not is_retriever and (move or pairs):
        raise RevelaError(
            f"{model} is an encoder-decoder, not a retriever: omit --move and --pairs"
        )
    read, report = read_corpus(corpus, reading)
    print_report(report)
    run = probe_retriever if is_retriever else probe_encoder_decoder
    options = ProbeOptions(max_tokens, documents, seed, precision, move, pairs)
    result = replace(run(folder, model, read, options), corpus=[str(c) for c in corpus])
    _print_profiles(result.profiles)
    if result.geometry is not None:
        _print_geometry(result.geometry)
    if json_file is not None:
        from revela.evaluation.results import write_json

        write_json(result, json_file)
        print(f"saved to {json_file}")


def _print_profiles(profiles: Mapping[str, Profile]) -> None:
    """A table of tests by place, slope, drop and share."""
    columns = list(profiles.values())
    rows: list[list[object]] = [
        [str(place + 1), *(_between(p.places[place], 3) for p in columns)]
        for place in range(len(columns[0].places))
    ]
    if any(p.unmoved is not None for p in columns):
        rows.append(["unmoved", *(p.unmoved for p in columns)])
    rows.append(["slope per tenth", *(_between(p.slope, 4) for p in columns)])
    rows.append(["first - last", *(_between(p.drop, 3) for p in columns)])
    rows.append(["first > last", *(_between(p.first_wins, 2) for p in columns)])
    print_table("by place, ± half of the 95 % interval", ["place", *profiles], rows)


def _between(interval: Interval, digits: int) -> str:
    half = (interval.high - interval.low) / 2
    return f"{interval.value:.{digits}f}" + ("" if isnan(half) else f" ±{half:.{digits}f}")


def _print_geometry(it: Geometry) -> None:
    rank = f"{it.effective_rank:.1f} of {min(it.pairs, it.width)}"
    print_table(
        f"geometry, {it.pairs:,} pairs",
        ["alignment", "uniformity", "with queries", "anisotropy", "effective rank"],
        [[it.alignment, it.uniformity, it.uniformity_of_both, it.anisotropy, rank]],
    )
