"""The section of docs/results.md about a GPU, from what the stages of research.gpu.run have left.

python -m research.gpu.table research/results/gpu
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from research.benchmarks.options import parser_of

Row = dict[str, Any]
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, FLOP/s, by the datasheets
HEADING = "## What does a GPU give?"
NONE = "No figure of revela comes from a GPU yet: research/gpu measures one in fifteen minutes."


def section(records: dict[str, Row]) -> str:
    """Markdown; ``records`` by stage."""
    if not records:
        return f"{HEADING}\n\n{NONE}\n"
    first = next(iter(records.values()))
    devices = sorted({record["device"] for record in records.values()})
    parts = [HEADING, "    python -m research.gpu.run --minutes 8 --out research/results/gpu"]
    unfinished = [stage for stage, record in records.items() if not record["finished"]]
    about = f"{' and '.join(devices)}, torch {first['torch']}, bf16 unless a row says otherwise."
    if unfinished:
        about += f" Stopped by their time limits before their last rows: {', '.join(unfinished)}."
    parts.append(about)
    tables = {
        "smoke": smoke_table,
        "attention": attention_table,
        "step": step_table,
        "encode": encode_table,
        "rows": rows_table,
    }
    for stage, make in tables.items():
        if stage in records:
            parts += [text for text in make(records[stage]) if text]
    return "\n\n".join(parts) + "\n"


def smoke_table(record: Row) -> Iterator[str]:
    rows = [row for row in record["rows"] if "note" not in row]
    names = "; ".join(row["what"].removeprefix("a step of ") for row in rows)
    yield f"**One step of each preset** on a tiny model ran without an error: {names}."
    yield failures(record["rows"])


def attention_table(record: Row) -> Iterator[str]:
    yield (
        "**Document attention**, forward and backward, milliseconds (relative error by norm, of "
        "outputs and gradients, against the reference in fp32)."
    )
    forms = list(dict.fromkeys(row["form"] for row in record["rows"]))
    cells: dict[str, dict[str, str]] = {}
    for row in record["rows"]:
        if "note" not in row:
            text = f"{1000 * row['seconds']:.1f} ({row['error']:.0e})"
            cells.setdefault(row["what"].removeprefix("attention, "), {})[row["form"]] = text
    yield table(
        ["", *forms], ([what, *(of.get(f, "") for f in forms)] for what, of in cells.items())
    )
    yield failures(record["rows"])


def step_table(record: Row) -> Iterator[str]:
    yield (
        '**A training step**, forward and backward; "of peak" counts the operations that the bound '
        "(the same models without in-batch attention) needs, per second of the measured step, as a "
        "share of the card's 989 TFLOP/s in bf16."
        if peak_of(record) == PEAK["H200"]
        else "**A training step**, forward and backward."
    )
    lines = []
    for row in record["rows"]:
        if "groups_per_second" not in row:
            continue
        share = row["flops_per_second"] / peak if (peak := peak_of(record)) else None
        lines.append(
            [
                row["what"].removeprefix("step, "),
                row["form"],
                f"{row['groups_per_second']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                "" if share is None else f"{share:.1%}",
                f"{row['to_bound']:.2f}" if "to_bound" in row else "",
                f"{row['peak_gb']:.1f}" if row.get("peak_gb") else "",
            ]
        )
    columns = ["", "form", "groups/s", "tokens/s", "of peak", "to the bound", "GB"]
    yield table(columns, lines)
    trained = [row for row in record["rows"] if row["what"].startswith("training")]
    if trained := [row for row in trained if "note" not in row]:
        yield "Whole training runs, one group a pass:"
        cells = ((r["what"][10:], f"{r['tokens_per_second']:,.0f}") for r in trained)
        yield table(["", "tokens/s"], cells)
    for row in record["rows"]:
        if "kernels" in row:
            what = row["what"].removeprefix("profile of step, ")
            yield (
                f"- {what}, {row['form']}: a profiled step takes {row['seconds']:.2f} s; no kernel "
                f"runs in {100 * row['idle']:.0f} % of it."
            )
    yield failures(record["rows"])


def peak_of(record: Row) -> float | None:
    return next((peak for name, peak in PEAK.items() if name in record["device"]), None)


def encode_table(record: Row) -> Iterator[str]:
    rows = [row for row in record["rows"] if "note" not in row]
    yield "**Encoding** passages of 120 words."
    cells = ((r["what"].removeprefix("encode, "), f"{r['passages_per_second']:,.0f}") for r in rows)
    yield table(["", "passages/s"], cells)
    yield failures(record["rows"])


def rows_table(record: Row) -> Iterator[str]:
    ended = [row["what"] for row in record["rows"] if "note" not in row]
    yield f"**Rows of research.benchmarks.from_raw** that ended in time: {'; '.join(ended)}."
    yield failures(record["rows"])


def failures(rows: Sequence[Row]) -> str:
    """A sentence about rows that have a note in place of numbers."""
    notes = [f"{row['what']} ({row['note'].partition('. ')[0]})" for row in rows if "note" in row]
    return f"Not measured: {'; '.join(notes)}." if notes else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(folder: Path) -> dict[str, Row]:
    """The records of a folder by stage, in the order of the stages."""
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    order = ["smoke", "attention", "step", "encode", "rows"]
    return {stage: found[stage] for stage in order if stage in found}


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    print(section(read(parser.parse_args(given).folder)))


if __name__ == "__main__":
    main()
