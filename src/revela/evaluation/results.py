"""The JSON files of ``train``, ``compare``, ``eval`` and ``probe``: a dataclass per file, and the
reader that collects them for a report.

A run folder holds run.json and metrics.jsonl, and may hold scores.json (``eval --json``) and
probe.json (``probe --json``). A folder of ``compare`` holds compare.json and its runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from revela.errors import RevelaError
from revela.evaluation.metrics import MAIN, METRICS

RUN, LINES, COMPARISON = "run.json", "metrics.jsonl", "compare.json"
SCORES, PROBE = "scores.json", "probe.json"
T = TypeVar("T")


class JsonFile:
    """Base of a dataclass that is written as a JSON object and read back with its types checked.

    Unknown fields are ignored when reading, so that files of other versions still open.
    """

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists, numbers and strings, for ``json.dumps``."""
        content: dict[str, Any] = dataclasses.asdict(cast(Any, self))
        return content

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Read what ``to_json`` gives.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: a field is missing or has another type.
        """
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(content)


@dataclass(frozen=True)
class Interval:
    """A value, and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Profile:
    """A score at ten places of a text.

    Attributes:
        tenths: the places, in tenths of the text.
        places: mean score at each place, with the interval of its difference from the row's mean.
        slope: least-squares change of the score per tenth of the text; negative if the model
            favours the beginning.
        drop: score at the first place minus the score at the last.
        first_wins: share of rows whose first place scores higher than their last (a tie counts
            half); comparable between models whose scores differ in scale.
        rows: number of scores behind each mean.
        documents: number of documents they are about.
    """

    tenths: list[float]
    places: list[Interval]
    slope: Interval
    drop: Interval
    first_wins: Interval
    rows: int = 0
    documents: int = 0

    def __post_init__(self) -> None:
        if len(self.tenths) != len(self.places):
            raise ValueError(f"{len(self.tenths)} tenths, but {len(self.places)} places")


@dataclass(frozen=True)
class Geometry:
    """How vectors lie on the sphere, measured on ``pairs`` queries and passages of ``width``
    numbers (evaluation/geometry.py).
    """

    alignment: float
    uniformity: float
    anisotropy: float
    effective_rank: float
    pairs: int
    width: int


@dataclass(frozen=True)
class ProbeResult(JsonFile):
    """probe.json: profiles by test over texts of ``tokens`` tokens and, of a retriever, its
    geometry, and how many documents it reads as its context: those that it was saved with.
    """

    model: str = ""
    corpus: list[str] = field(default_factory=list)
    tokens: int = 0
    profiles: dict[str, Profile] = field(kw_only=True)
    geometry: Geometry | None = None
    context: int = 0


@dataclass(frozen=True)
class SystemScores(JsonFile):
    """Scores of one system on one collection.

    Attributes:
        means: metrics averaged over the queries, 0 to 1; ``main`` is the main score of a task of
            mteb.
        margin: half the 95 % interval of nDCG@10; None for a single query.
        p: p value of nDCG@10 against other systems, by their names.
        queries: metrics of each query, by its id.
        texts: texts of queries, by id, where a file has them.
        settings: what the scores of a benchmark depend on beside the weights.
    """

    means: dict[str, float]
    margin: float | None = None
    p: dict[str, float] = field(default_factory=dict)
    queries: dict[str, dict[str, float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The means, ``interval``, ``p`` and ``queries``; or the means and ``settings``."""
        if not self.queries:
            return {**self.means, "settings": self.settings}
        middle, half = self.means["ndcg@10"], self.margin
        return {
            **self.means,
            "interval": None if half is None else [middle - half, middle + half],
            "p": self.p,
            "queries": {
                query: {metric: round(value, 5) for metric, value in metrics.items()}
                | ({"text": self.texts[query]} if query in self.texts else {})
                for query, metrics in self.queries.items()
            },
        }

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Read what ``to_json`` gives; errors as ``JsonFile.from_json``."""
        queries = content.get("queries") or {}
        low, high = content.get("interval") or (None, None)
        if missing := next((q for q, metrics in queries.items() if "ndcg@10" not in metrics), None):
            raise ValueError(f"query {missing} has no ndcg@10")
        return super().from_json(
            {
                "means": {m: content[m] for m in (*METRICS, MAIN) if m in content},
                "margin": None if low is None else (high - low) / 2,
                "p": content.get("p") or {},
                "queries": {
                    query: {name: value for name, value in metrics.items() if name != "text"}
                    for query, metrics in queries.items()
                },
                "texts": {q: str(row["text"]) for q, row in queries.items() if "text" in row},
                "settings": content.get("settings") or {},
            }
        )


@dataclass(frozen=True)
class Scores(JsonFile):
    """scores.json: what ``eval --json`` writes, {collection: {system: scores}}."""

    collections: dict[str, dict[str, SystemScores]]

    def to_json(self) -> dict[str, Any]:
        """{collection: {system: SystemScores.to_json()}}."""
        return {
            collection: {system: scores.to_json() for system, scores in systems.items()}
            for collection, systems in self.collections.items()
        }

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Read what ``to_json`` gives; entries without a known metric are ignored.

        Raises:
            ValueError: no entry has a known metric, or as ``JsonFile.from_json``.
        """
        collections = {
            collection: {
                system: SystemScores.from_json(values)
                for system, values in systems.items()
                if isinstance(values, dict) and any(m in values for m in (*METRICS, MAIN))
            }
            for collection, systems in content.items()
            if isinstance(systems, dict)
        }
        if not any(collections.values()):
            raise ValueError(f"no metric of {', '.join((*METRICS, MAIN))}")
        return cls({name: systems for name, systems in collections.items() if systems})


@dataclass(frozen=True)
class CurvePoint:
    """nDCG@10 of judged queries by collection, after so many minutes and tokens of training."""

    minutes: float
    tokens_read: int
    judged: dict[str, float]


@dataclass(frozen=True)
class Comparison(JsonFile):
    """compare.json: nDCG@10 by collection of BM25, and along each run ("PRESET, seed N")."""

    bm25: dict[str, float]
    curves: dict[str, list[CurvePoint]]

    def __post_init__(self) -> None:
        for label, curve in self.curves.items():
            if any(not self.bm25.keys() <= point.judged.keys() for point in curve):
                raise ValueError(f"{label} has a point without a score on every collection")


@dataclass(frozen=True)
class About:
    """What run.json says of a run beside its settings; an older run says less."""

    corpus: str = ""
    command: str = ""
    documents: int | None = None
    chunks: int | None = None
    groups: int | None = None
    bm25: dict[str, float] = field(default_factory=dict)
    untrained: dict[str, float] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsRow(JsonFile):
    """A line of metrics.jsonl: at a step, the loss or the scores of a check; in the last line of a
    finished run, the step whose state was kept.
    """

    step: int
    minutes: float
    loss: float | None = None
    tokens_read: int | None = None
    check: dict[str, float] | None = None
    kept: int | None = None


@dataclass(frozen=True)
class Run(JsonFile):
    """One training run, from its run.json and metrics.jsonl.

    Attributes:
        settings: the recipe.
        about: corpus, command, sizes, versions and hardware.
        metrics: rows of metrics.jsonl, in order of step.
        finished: whether its model is saved.
        kind: the run's name without its seed; runs of one kind share a colour.
    """

    settings: dict[str, Any]
    about: About = field(default_factory=About)
    metrics: list[MetricsRow] = field(default_factory=list)
    finished: bool = False
    kind: str = ""

    def checks(self) -> list[tuple[MetricsRow, dict[str, float]]]:
        """The rows with a label-free check, each with its scores by task."""
        return [(row, row.check) for row in self.metrics if row.check is not None]

    def losses(self) -> list[tuple[MetricsRow, float]]:
        """The rows with a loss, each with it."""
        return [(row, row.loss) for row in self.metrics if row.loss is not None]

    def saved(self) -> dict[str, float]:
        """Label-free scores of the state that was saved, or of the last one in a running run."""
        checks = self.checks()
        kept = [check for row, check in checks if row.step == self.metrics[-1].kept]
        return (kept or [check for _, check in checks] or [{}])[-1]


@dataclass
class Results:
    """All results that a report is about, by name, in the order in which they were given."""

    runs: dict[str, Run] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    scores: dict[str, Scores] = field(default_factory=dict)
    probes: dict[str, ProbeResult] = field(default_factory=dict)


def read_results(paths: Sequence[Path]) -> Results:
    """Read each path: the folder of a run or of a comparison, or a JSON file of scores or a probe.

    Raises:
        RevelaError: a path is none of these, is given twice, or holds a damaged file.
    """
    results = Results()
    for name, path in _named(paths).items():
        if (path / COMPARISON).is_file():
            _read_comparison(path, name if len(paths) > 1 else "", results)
        elif (path / RUN).is_file():
            _read_run(path, name, name, results)
        elif any((path / file).is_file() for file in (SCORES, PROBE)):
            _read_measures(path, name, results)
        elif path.is_file() and path.suffix == ".json":
            content = _load(path)
            _read_measure(path, name, content, results, is_probe="profiles" in content)
        else:
            state = "holds no run" if path.is_dir() else "is no run"
            raise RevelaError(
                f"{path} {state if path.exists() else 'does not exist'}: give folders of revela "
                "train or compare, or JSON files of revela eval or probe"
            )
    return results


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Paths by their last part, or by as many parts as make them differ; without .json if they
    still differ then.
    """
    absolute = [path.resolve() for path in paths]
    if twice := next((path for path in paths if absolute.count(path.resolve()) > 1), None):
        raise RevelaError(f"{twice} is named twice: name it once")
    bare = [path.with_suffix("") if path.suffix == ".json" else path for path in absolute]
    absolute = bare if len(set(bare)) == len(bare) else absolute
    depth = 1
    while len({path.parts[-depth:] for path in absolute}) < len(paths):
        depth += 1
    names = ["/".join(path.parts[-depth:]) for path in absolute]
    return dict(zip(names, paths, strict=True))


def _read_run(folder: Path, name: str, kind: str, results: Results) -> None:
    settings = _load(folder / RUN)
    about = settings.pop("about", {})
    content = {"settings": settings, "about": about, "kind": kind}
    run = _checked(
        folder / RUN, "is damaged", "leave it out, or train it again", Run.from_json, content
    )
    finished = (folder / "modules.json").is_file()
    metrics = _read_metrics(folder / LINES)
    results.runs[name] = dataclasses.replace(run, metrics=metrics, finished=finished)
    _read_measures(folder, name, results)


def _read_metrics(path: Path) -> list[MetricsRow]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RevelaError(
            f"{path} cannot be read ({error.strerror}): leave the run out, or train it again"
        ) from error
    wrong = "is no line of a run"

    def row(line: str) -> MetricsRow:
        return MetricsRow.from_json(json.loads(line))

    return [
        _checked(f"{path}:{number}", wrong, "delete it", row, line)
        for number, line in enumerate(lines, 1)
    ]


def _read_comparison(folder: Path, prefix: str, results: Results) -> None:
    path, remedy = folder / COMPARISON, "run revela compare again, which keeps finished runs"
    comparison = _checked(path, "is damaged", remedy, Comparison.from_json, _load(path))
    results.comparisons[prefix or folder.resolve().name] = comparison
    before = f"{prefix}: " if prefix else ""
    for label in comparison.curves:
        kind, _, seed = label.rpartition(", seed ")
        run = folder / Path(f"{kind}-{seed}").name  # a label may be a stranger's: not outside
        if (run / RUN).is_file():
            _read_run(run, before + label, before + kind, results)


def _read_measures(folder: Path, name: str, results: Results) -> None:
    for file in (SCORES, PROBE):
        if (path := folder / file).is_file():
            _read_measure(path, name, _load(path), results, is_probe=file == PROBE)


def _read_measure(
    path: Path, name: str, content: Mapping[str, Any], results: Results, is_probe: bool
) -> None:
    if is_probe:
        remedy = "give a file of revela probe --json"
        results.probes[name] = _checked(
            path, "holds no probe", remedy, ProbeResult.from_json, content
        )
    else:
        remedy = "give a file of revela eval --json"
        results.scores[name] = _checked(path, "holds no scores", remedy, Scores.from_json, content)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RevelaError(
            f"{path} cannot be read ({type(error).__name__}: {error}): make it again, or leave it "
            "out"
        ) from error
    if not isinstance(content, dict):
        raise RevelaError(f"{path} holds no JSON object: make it again, or leave it out")
    # JSON can escape half a surrogate pair, which pydantic refuses as text and no page can show.
    whole: dict[str, Any] = json.loads(
        json.dumps(content, ensure_ascii=False).encode("utf-8", errors="replace")
    )
    return whole


def _checked(
    where: Path | str, wrong: str, remedy: str, read: Callable[[Any], T], content: Any
) -> T:
    """``read(content)``, with any error as one sentence: what is wrong where, and the remedy."""
    from pydantic import ValidationError

    try:
        return read(content)
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join(
            part for part in (".".join(map(str, first["loc"])), first["msg"]) if part
        )
        raise RevelaError(f"{where} {wrong} ({reason}): {remedy}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RevelaError(f"{where} {wrong} ({reason}): {remedy}") from error
