"""The JSON files of ``train``, ``compare`` and ``probe --json``: a dataclass for each, and a reader
of runs and comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from revela.errors import RevelaError

RUN, LINES, COMPARISON = "run.json", "metrics.jsonl", "compare.json"
NOISE = 0.005  # nDCG@10; label-free checks of equally good states differ by this
T = TypeVar("T")


@dataclass(frozen=True)
class Interval:
    """A value, and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Profile:
    """Mean scores at ten places of a text.

    Attributes:
        tenths: the places, in tenths of the text.
        places: the mean score at each place.
        slope: least-squares change of the score per tenth; negative favours the beginning.
        drop: score at the first place minus the score at the last.
        first_wins: share of rows that score higher at the first place than at the last (a tie
            counts half).
        rows: number of queries, or of documents if these are scored.
        documents: number of documents.
    """

    tenths: list[float]
    places: list[Interval]
    slope: Interval
    drop: Interval
    first_wins: Interval
    rows: int = 0
    documents: int = 0


@dataclass(frozen=True)
class Geometry:
    """Measures of probes/geometry.py, on ``pairs`` pairs of vectors of width ``width``."""

    alignment: float
    uniformity: float
    anisotropy: float
    effective_rank: float
    pairs: int
    width: int


@dataclass(frozen=True)
class ProbeResult:
    """probe.json.

    Attributes:
        profiles: test -> profile.
        tokens: tokens per text.
        geometry: of a retriever.
        context: number of documents in a contextual retriever's context.
    """

    profiles: dict[str, Profile]
    model: str = ""
    corpus: list[str] = field(default_factory=list)
    tokens: int = 0
    geometry: Geometry | None = None
    context: int = 0


@dataclass(frozen=True)
class CurvePoint:
    """One point of training; ``judged``: collection -> nDCG@10 of judged queries."""

    minutes: float
    tokens_read: int
    judged: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """compare.json: collection -> nDCG@10 of BM25; run ("PRESET, seed N") -> curve."""

    bm25: dict[str, float]
    curves: dict[str, list[CurvePoint]]

    def __post_init__(self) -> None:
        for label, curve in self.curves.items():
            if any(not self.bm25.keys() <= point.judged.keys() for point in curve):
                raise ValueError(f"{label} has a point without a score on every collection")


@dataclass(frozen=True)
class About:
    """The entry "about" of run.json."""

    corpus: str = ""
    command: str = ""
    documents: int | None = None
    chunks: int | None = None
    groups: int | None = None
    bm25: dict[str, float] = field(default_factory=dict)
    untrained: dict[str, float] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    finished: bool = True


class RunFile(BaseModel, extra="allow"):
    """run.json; its other fields are the settings."""

    about: About = About()


@dataclass(frozen=True)
class MetricsRow:
    """A line of metrics.jsonl: the loss or a check at a step; the last line has the saved step."""

    step: int
    minutes: float
    loss: float | None = None
    tokens_read: int | None = None
    check: dict[str, float] | None = None
    kept: int | None = None


@dataclass(frozen=True)
class Run:
    """A training run. Runs of one ``kind`` (the name without the seed) share a colour."""

    settings: dict[str, Any]
    about: About
    metrics: list[MetricsRow]
    finished: bool
    kind: str

    def checks(self) -> list[tuple[MetricsRow, dict[str, float]]]:
        """(row, scores by task) of each label-free check."""
        return [(row, row.check) for row in self.metrics if row.check is not None]

    def losses(self) -> list[tuple[float, float]]:
        """(minutes of training, loss) of each logged step."""
        return [(row.minutes, row.loss) for row in self.metrics if row.loss is not None]

    def saved(self) -> dict[str, float]:
        """Label-free scores of the saved state; of the last check while the run is not finished."""
        checks = self.checks()
        kept = [check for row, check in checks if row.step == self.metrics[-1].kept]
        return (kept or [check for _, check in checks] or [{}])[-1]

    def in_words(self) -> str:
        """The outcome of the run, in a sentence."""
        if not self.finished or not self.metrics or self.metrics[-1].kept is None:
            return "the run is not finished"
        start = next((check for row, check in self.checks() if row.step == 0), {})
        return outcome_in_words(start, self.saved(), self.metrics[-1].kept)


def outcome_in_words(start: Mapping[str, float], saved: Mapping[str, float], kept: int) -> str:
    """A sentence on whether training helped, by the label-free scores.

    Args:
        start: scores by task before the first step.
        saved: scores by task of the saved state.
        kept: the saved step.

    >>> outcome_in_words({"title": 0.5}, {"title": 0.5}, 0)
    'training did not help by the label-free check: the start was saved'
    """
    if not start or start.keys() != saved.keys():
        return "there was no label-free check at start and end: the last state was saved unchecked"
    if kept == 0:
        return "training did not help by the label-free check: the start was saved"
    first, last = fmean(start.values()), fmean(saved.values())
    change = f"nDCG@10 {first:.3f} at the start, {last:.3f} after {kept:,} steps, which was saved"
    if last > first + NOISE:
        return f"training helped by the label-free check: {change}"
    if last < first - NOISE:
        return f"training made it worse by the label-free check: {change}"
    return f"training changed no more than chance does by the label-free check: {change}"


@dataclass
class Results:
    """All results of a report: name -> result, in the order given."""

    runs: dict[str, Run] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def add_run(self, folder: Path, name: str, kind: str) -> None:
        """Read a run."""
        run, path = _read(RunFile, folder / RUN), folder / LINES
        lines = path.read_bytes().splitlines() if path.is_file() else []
        metrics = [
            _parse(MetricsRow, line, f"{path}:{number}") for number, line in enumerate(lines, 1)
        ]
        finished = (folder / "modules.json").is_file() and run.about.finished
        self.runs[name] = Run(run.model_extra or {}, run.about, metrics, finished, kind)

    def add_comparison(self, folder: Path, prefix: str) -> None:
        """Read a comparison and its runs; the prefix is put before their names."""
        comparison = _read(Comparison, folder / COMPARISON)
        self.comparisons[prefix or folder.resolve().name] = comparison
        prefix = f"{prefix}: " if prefix else ""
        for label in comparison.curves:
            kind, _, seed = label.rpartition(", seed ")
            run = folder / Path(f"{kind}-{seed}").name  # an untrusted label must stay inside
            if (run / RUN).is_file():
                self.add_run(run, prefix + label, prefix + kind)


def read_results(paths: Sequence[Path]) -> Results:
    """Read folders of runs and comparisons."""
    results = Results()
    for name, path in _named(paths).items():
        if (path / COMPARISON).is_file():
            results.add_comparison(path, name if len(paths) > 1 else "")
        elif (path / RUN).is_file():
            results.add_run(path, name, name)
        else:
            raise RevelaError(
                f"{path} {'is no run' if path.exists() else 'does not exist'}: give folders of "
                "revela train or compare"
            )
    return results


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Name -> path. The name is the last part, or the whole path if several share the last part."""
    resolved = [path.resolve() for path in paths]
    if twice := next((path for path in resolved if resolved.count(path) > 1), None):
        raise RevelaError(f"{twice} is named twice: name it once")
    last = [path.name for path in resolved]
    names = [name if last.count(name) == 1 else str(p) for name, p in zip(last, paths, strict=True)]
    return dict(zip(names, paths, strict=True))


def _read(kind: type[T], path: Path) -> T:
    return _parse(kind, path.read_bytes(), str(path))


def _parse(kind: type[T], content: bytes, source: str) -> T:
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise RevelaError(
            f"{source} is damaged ({reason}): make it again, or leave it out"
        ) from error
