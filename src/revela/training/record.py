"""The record of a run: run.json and metrics.jsonl.

Every file is written from the dataclasses that read it. A field without a value (None) is left out.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from revela import __version__
from revela.errors import RevelaError
from revela.files import atomic_write, disk_errors
from revela.terminal import counted

if TYPE_CHECKING:
    from accelerate import Accelerator

RUN_FILE, METRICS = "run.json", "metrics.jsonl"
TRACKER_FOLDER = "tracker"
START_SCORES = "start-scores.json"
"Scores of the start on judged queries: collection -> `start` -> scores, per query too."
NOISE = 0.005  # nDCG@10; label-free checks of equally good states differ by this
LIBRARIES = (
    *("torch", "transformers", "sentence-transformers"),
    *("peft", "accelerate", "datasets", "numpy"),
)
T = TypeVar("T")

Scores = dict[str, float]
"""Task -> nDCG@10; or other numbers by name."""


@dataclass(frozen=True)
class About:
    """The entry "about" of run.json: what a run read, and where it ran.

    Attributes:
        sources: absolute paths and hub names of the corpus; empty if it was read from no file.
        method_file: FILE.py:Class of a method of one's own.
        documents, chunks, rows, groups: how many there are; ``groups`` of the first epoch.
        bm25, untrained: label-free scores.
        models: flag -> "name" and "digest" of each model that the run reads.
        revisions: commits of hub models, which a resumed run reads again.
        finished: whether the retriever is saved. (Older runs do not have the entry.)
        heads: (layer, head) pairs of the LM that the run uses.
        groups_per_batch: groups that a forward pass reads.
    """

    corpus: str = ""
    sources: list[str] = field(default_factory=list)
    method_file: str = ""
    command: str = ""
    bm25: Scores = field(default_factory=dict)
    untrained: Scores = field(default_factory=dict)
    finished: bool = True
    documents: int | None = None
    chunks: int | None = None
    rows: int | None = None
    groups: int | None = None
    corpus_digest: str | None = None
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    heads: list[tuple[int, int]] | None = None
    groups_per_batch: int | None = None


@dataclass(frozen=True)
class Provenance:
    """Names of the corpus and the command, for run.json and the model card."""

    corpus: str = "a corpus"
    command: str = ""
    sources: list[str] = field(default_factory=list)


UNKNOWN = Provenance()


@dataclass(frozen=True)
class RunFile:
    """run.json: all settings of a run, and "about"."""

    settings: dict[str, Any]
    about: About

    @classmethod
    def read(cls, folder: Path) -> RunFile:
        """Read a run's file.

        Raises:
            OSError: there is none.
            RevelaError: it is damaged.
        """
        path = folder / RUN_FILE
        settings = parse(TypeAdapter(dict[str, Any]), path.read_bytes(), str(path))
        about = {"about": settings.pop("about", {})}
        return cls(settings, parse(TypeAdapter(dict[str, About]), about, str(path))["about"])

    def write(self, folder: Path) -> None:
        """Write the file; a reader sees the former one or this one."""
        content = {**self.settings, "about": known(self.about)}
        with atomic_write(folder / RUN_FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=1))


@dataclass(frozen=True)
class MetricsRow:
    """A line of metrics.jsonl: the loss or a check at a step; the last line has the saved step.

    Attributes:
        minutes: training time.
        loss: nats, mean since the last line with one.
        tokens_per_second: tokens that the retriever read per second since then.
        method: numbers of the method's own, of the last batch in the first process
            (``RetrieverLoss.logged``).
        kept: the step of the saved state.
        check: label-free scores.
        judged: scores on judged queries, of compared runs.
    """

    step: int
    minutes: float = 0.0
    loss: float | None = None
    tokens_per_second: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    method: Scores | None = None
    kept: int | None = None
    tokens_read: int | None = None
    check: Scores | None = None
    judged: Scores | None = None


ROW = TypeAdapter(MetricsRow)


class Metrics:
    """Writes metrics.jsonl: one row per line, in order of step.

    Args:
        path: the file.
        keep_until: the checkpoint's step in a resumed run; later lines and an incomplete last line
            are dropped. None: keep the file as it is.
        tracker: every line is also sent to it.

    Raises:
        RevelaError: a line cannot be read.
    """

    def __init__(
        self, path: Path, keep_until: int | None = None, tracker: Accelerator | None = None
    ) -> None:
        self.path, self.tracker = path, tracker
        self.rows: list[MetricsRow] = []
        if keep_until is not None and path.is_file():
            self.rows = [row for row in self.written() if row.step <= keep_until]
            with atomic_write(path) as temporary:
                temporary.write_text("".join(map(_line, self.rows)))

    def written(self) -> Iterator[MetricsRow]:
        """The lines of the file, if there is one, without an incomplete last one."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() else ()
        for number, line in enumerate(lines, 1):
            yield parse(ROW, line, f"{self.path}:{number}")

    def write(self, row: MetricsRow) -> None:
        """Append a line."""
        self.rows.append(row)
        with disk_errors(self.path), self.path.open("a") as handle:
            handle.write(_line(row))
        if self.tracker is not None:
            self.tracker.log(dict(_named_numbers(row)), row.step)

    def close(self) -> None:
        """Finish the tracker."""
        for tracker in self.tracker.trackers if self.tracker else ():
            tracker.finish()

    def checks(self) -> list[tuple[int, Scores]]:
        """(step, scores by task) of every check."""
        return [(row.step, row.check) for row in self.rows if row.check is not None]


def start_tracker(track: str, settings: Mapping[str, Any], out: Path) -> Accelerator:
    """Start the tracker of this name through accelerate, with the settings of the run."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from revela.training.device import compute_device

    folders = ProjectConfiguration(project_dir=str(out), logging_dir=str(out / TRACKER_FOLDER))
    on_cpu = compute_device().type == "cpu"
    tracker = Accelerator(cpu=on_cpu, log_with=track, project_config=folders)
    plain = (str, int, float, bool)
    config = {k: v if isinstance(v, plain) else str(v) for k, v in settings.items()}
    names = {"wandb": {"name": out.name}, "trackio": {"name": out.name}}
    tracker.init_trackers("revela", config, names)
    return tracker


def known(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that have a value."""
    return {name: entry for name, entry in asdict(value).items() if entry is not None}


def _line(row: MetricsRow) -> str:
    return json.dumps(known(row)) + "\n"


def _named_numbers(row: MetricsRow) -> Iterator[tuple[str, float]]:
    """Numbers by a tracker's names: "loss", "check/TASK"."""
    for name, value in known(row).items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inside}", number) for inside, number in value.items())
        elif name != "step":
            yield name, value


def parse(kind: TypeAdapter[T], content: bytes | Mapping[str, Any], source: str) -> T:
    """A value of this kind from JSON, or from what was read from it.

    Raises:
        RevelaError: it is something else; names the ``source``.
    """
    try:
        if isinstance(content, bytes):
            return kind.validate_json(content)
        return kind.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        why = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise RevelaError(f"{source} is damaged ({why}): make it again, or leave it out") from error


def versions() -> dict[str, str]:
    """The versions of Python, revela and the libraries that train."""
    found = {"python": platform.python_version(), "revela": __version__}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):  # datasets is only needed to read from the hub
            found[name] = version(name)
    return found


def hardware() -> dict[str, Any]:
    """The machine, and how much of it this process uses."""
    import torch

    from revela.training.distributed import available_cores, world_size

    table = Path("/proc/cpuinfo")
    lines = table.read_text(errors="replace").splitlines() if table.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(names, platform.processor() or "unknown")
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": f"{cpu}, {counted(available_cores(), 'core')}",
        "threads": torch.get_num_threads(),
        "processes": world_size(),
    }
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        found["gpu"] = ", ".join(torch.cuda.get_device_name(i) for i in gpus)
    return found
