"""What lies in the folders that ``train`` and ``compare`` leave, and in the files that ``eval`` and
``probe`` write, for a report.

A run folder holds run.json and metrics.jsonl, and may hold scores.json and probe.json; a folder of
``compare`` holds compare.json and its runs. Nothing but a run's own files is needed; what else is
there is taken along.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revela.errors import RevelaError
from revela.evaluation.metrics import METRICS

RUN, LINES, COMPARISON, SCORES, PROBE = (
    "run.json",
    "metrics.jsonl",
    "compare.json",
    "scores.json",
    "probe.json",
)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: of its folder.
        kind: what it is a run of: in a comparison, runs that differ in the seed only are of one
            kind.
        settings: the recipe.
        about: what run.json says beside the settings; empty for a run of an older version.
        metrics: rows of metrics.jsonl, in order.
        finished: whether its model is saved.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    about: dict[str, Any]
    metrics: list[dict[str, Any]]
    finished: bool

    def checks(self) -> list[dict[str, Any]]:
        """The rows with a label-free check."""
        return [row for row in self.metrics if "check" in row]

    def losses(self) -> list[dict[str, Any]]:
        """The rows with a loss."""
        return [row for row in self.metrics if "loss" in row]

    def end(self) -> dict[str, Any]:
        """The last row: step and minutes, and in a run that came to its end the step that was kept."""
        return self.metrics[-1] if self.metrics else {}

    def saved(self) -> dict[str, float]:
        """The label-free scores of the state that is saved, or of the last one while the run goes
        on.
        """
        rows = self.checks()
        kept = [row for row in rows if row["step"] == self.end().get("kept")]
        return dict((kept or rows)[-1]["check"]) if rows else {}


@dataclass(frozen=True)
class Comparison:
    """compare.json: nDCG@10 of judged queries by collection, BM25's and along each run."""

    name: str
    bm25: dict[str, float]
    curves: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Probe:
    """probe.json: scores by place in a text, with intervals, by test; and of a retriever how its
    vectors lie.
    """

    name: str
    profiles: dict[str, dict[str, Any]]
    geometry: dict[str, float]


@dataclass
class Found:
    """All that was found, in the order in which it was named."""

    runs: list[Run] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)


def find(paths: Sequence[Path]) -> Found:
    """Read what lies at each path: a run's folder, a comparison's, or a JSON file of scores or of a
    probe.

    Raises:
        RevelaError: a path is none of these, or a file in it is damaged.
    """
    found = Found()
    names = _names(paths)
    for path, name in zip(paths, names, strict=True):
        if path.is_dir() and (path / COMPARISON).is_file():
            _take_comparison(path, name if len(paths) > 1 else "", found)
        elif path.is_dir() and (path / RUN).is_file():
            _take_run(path, name, name, found)
        elif path.is_dir() and any((path / file).is_file() for file in (SCORES, PROBE)):
            _take_measures(path, name, found)
        elif path.is_file() and path.suffix == ".json":
            _take_file(path, name, found)
        else:
            what = (
                "holds no run"
                if path.is_dir()
                else "is no run"
                if path.exists()
                else "does not exist"
            )
            raise RevelaError(
                f"{path} {what}: give folders of revela train or compare, or JSON files of revela eval or probe"
            )
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or so many parts that no two are alike; without .json where that
    leaves them so.
    """
    absolute = [path.resolve() for path in paths]
    if twice := next((path for path in paths if absolute.count(path.resolve()) > 1), None):
        raise RevelaError(f"{twice} is named twice: name it once")
    bare = [path.with_suffix("") if path.suffix == ".json" else path for path in absolute]
    absolute = bare if len(set(bare)) == len(bare) else absolute
    depth = 1
    while len({path.parts[-depth:] for path in absolute}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in absolute]


def _take_run(folder: Path, name: str, kind: str, found: Found) -> None:
    settings = _object(folder / RUN)
    about = settings.pop("about", {})
    try:
        for part in ("bm25", "untrained"):
            _ = sum(map(float, about.get(part, {}).values()))
        for part in ("hardware", "versions"):
            about.get(part, {}).items()
    except (TypeError, AttributeError, ValueError) as error:
        raise RevelaError(
            f"{folder / RUN} is damaged ({type(error).__name__}: {error}): leave it away, or train it again"
        ) from error
    found.runs.append(
        Run(
            name,
            kind,
            settings,
            about,
            _metrics(folder / LINES),
            (folder / "modules.json").is_file(),
        )
    )
    _take_measures(folder, name, found)


def _take_measures(folder: Path, name: str, found: Found) -> None:
    if (folder / SCORES).is_file():
        found.scores[name] = _scores(folder / SCORES, _object(folder / SCORES))
    if (folder / PROBE).is_file():
        found.probes.append(_probe(name, folder / PROBE, _object(folder / PROBE)))


def _take_comparison(folder: Path, prefix: str, found: Found) -> None:
    path = folder / COMPARISON
    content = _object(path)
    try:
        bm25 = {str(name): float(value) for name, value in content["bm25"].items()}
        for curve in content["curves"].values():
            for row in curve:
                _ = row["minutes"] + row["tokens_read"] + sum(row["judged"][name] for name in bm25)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RevelaError(
            f"{path} is damaged ({type(error).__name__}: {error}): run revela compare again, it keeps what is done"
        ) from error
    found.comparisons.append(Comparison(prefix or folder.name, bm25, content["curves"]))
    for label in content["curves"]:
        kind, _, seed = label.rpartition(", seed ")
        run = folder / f"{kind}-{seed}"
        if (run / RUN).is_file():
            _take_run(
                run,
                f"{prefix}: {label}" if prefix else label,
                f"{prefix}: {kind}" if prefix else kind,
                found,
            )


def _take_file(path: Path, name: str, found: Found) -> None:
    content = _object(path)
    if "profiles" in content:
        found.probes.append(_probe(name, path, content))
    else:
        found.scores[name] = _scores(path, content)


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RevelaError(
            f"{path} cannot be read ({type(error).__name__}: {error}): make it again, or leave it away"
        ) from error
    if not isinstance(content, dict):
        raise RevelaError(f"{path} holds no JSON object: make it again, or leave it away")
    return content


def _metrics(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            _ = (
                row["step"]
                + row["minutes"]
                + row.get("loss", 0)
                + row.get("tokens_read", 0)
                + sum(row.get("check", {}).values())
            )
            rows.append(row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RevelaError(
            f"{path}:{len(rows) + 1} is no line of a run ({type(error).__name__}: {error}): delete it"
        ) from error
    except OSError as error:
        raise RevelaError(
            f"{path} cannot be read ({error.strerror}): the run is not whole, leave it away or train it again"
        ) from error
    return rows


def _scores(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """{collection: {system: {metric: value}}}; a system may have an ``interval``, ``p`` by system
    and ``queries`` by id.
    """
    known = False
    try:
        collections = [systems for systems in content.values() if isinstance(systems, dict)]
        for values in (
            values
            for systems in collections
            for values in systems.values()
            if isinstance(values, dict)
        ):
            known |= any(
                float(values[metric]) is not None
                for metric in (*METRICS, "main")
                if metric in values
            )
            low, high = values.get("interval") or (0.0, 0.0)
            _ = float(high - low) + sum(map(float, (values.get("p") or {}).values()))
            _ = sum(float(query["ndcg@10"]) for query in (values.get("queries") or {}).values())
        if not known:
            raise ValueError("no metric that is known")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RevelaError(
            f"{path} holds no scores ({type(error).__name__}: {error}): give what revela eval --json wrote"
        ) from error
    return content


def _probe(name: str, path: Path, content: dict[str, Any]) -> Probe:
    try:
        for profile in content["profiles"].values():
            values = [*profile["places"], profile["slope"], profile["drop"], profile["first_wins"]]
            _ = sum(
                float(value[end]) for value in values for end in ("value", "low", "high")
            ) + sum(profile["tenths"])
            if len(profile["tenths"]) != len(profile["places"]):
                raise ValueError("places are missing")
        geometry = {str(k): float(v) for k, v in (content.get("geometry") or {}).items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RevelaError(
            f"{path} holds no probe ({type(error).__name__}: {error}): give what revela probe --json wrote"
        ) from error
    return Probe(name, content["profiles"], geometry)
