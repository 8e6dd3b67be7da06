"""Measure revela on a GPU in a few minutes, stage by stage; what is done is not repeated.

    python -m research.gpu.run --minutes 8 --out results
    python -m research.gpu.run --minutes 1 --out results --tiny        # the stages themselves

Unpacks what has arrived of build/gpu (pack.py) and runs the stages whose parts are there, each in a
process of its own with a time limit. A stage that fails or is stopped does not stop the others.
Each leaves STAGE.json in --out; the last line of the output says what is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from research.gpu.parts import BUILD, ROOT, ROWS, TEXTS, WEIGHTS, environment, unpack

LIMITS = {"smoke": 90.0, "attention": 60.0, "step": 150.0, "encode": 30.0, "rows": 600.0}
NEEDS = {"rows": (*WEIGHTS, TEXTS)}
START = 20.0  # seconds that a process takes to import and to stop
STAGES = "research.gpu.stages"
HOME = Path(tempfile.gettempdir()) / "revela-gpu"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="for all stages together")
    add("--out", type=Path, required=True, help="folder for the JSON of each stage")
    add("--only", nargs="*", choices=LIMITS, default=[], help="run these, again if need be")
    add("--build", type=Path, default=BUILD, help="folder of the parts")
    add("--home", type=Path, default=HOME, help="folder that outlives a call")
    add("--tiny", action="store_true", help="tiny models, on a CPU too")
    a = parser.parse_args(given)
    ends = time.monotonic() + 60 * a.minutes
    results = a.home / ("tiny" if a.tiny else "results")
    results.mkdir(parents=True, exist_ok=True)
    for problem in unpack(a.build, a.home):
        print(problem, flush=True)
    missing = {}
    for stage, limit in LIMITS.items():
        if (a.only and stage not in a.only) or (not a.only and is_finished(results, stage)):
            continue
        needs = () if a.tiny else NEEDS.get(stage, ())
        lacks = [part for part in needs if not (a.home / part).is_dir()]
        left = min(limit, ends - time.monotonic())
        if lacks:
            missing[stage] = f"needs {', '.join(lacks)}"
        elif left < START:
            missing[stage] = "no time left"
        elif reason := run_stage(stage, left, results, a):
            missing[stage] = reason
    a.out.mkdir(parents=True, exist_ok=True)
    for file in [*results.glob("*.json"), *(a.home / ROWS).glob("*.*")]:
        shutil.copy(file, a.out / file.name)
    for stage in LIMITS:
        if not is_finished(results, stage):
            missing.setdefault(stage, "not run")
        elif failed := count_failed(results, stage):
            missing.setdefault(stage, f"{failed} rows failed")
    print("missing: " + ("; ".join(f"{k} ({v})" for k, v in missing.items()) or "nothing"))


def is_finished(results: Path, stage: str) -> bool:
    file = results / f"{stage}.json"
    return file.is_file() and bool(json.loads(file.read_text())["finished"])


def count_failed(results: Path, stage: str) -> int:
    """Rows that have a note in place of numbers."""
    rows = json.loads((results / f"{stage}.json").read_text())["rows"]
    return sum("note" in row for row in rows)


def run_stage(stage: str, seconds: float, results: Path, a: argparse.Namespace) -> str:
    """Run a stage; returns why it is incomplete, or nothing."""
    print(f"== {stage}, at most {seconds:.0f} s", flush=True)
    words = [stage, "--out", str(results / f"{stage}.json"), "--home", str(a.home)]
    words += ["--seconds", str(seconds - START), *(["--tiny"] if a.tiny else [])]
    command = [sys.executable, "-W", "ignore", "-m", STAGES, *words]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(a.home), timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    return "" if done.returncode == 0 else f"ended with {done.returncode}"


if __name__ == "__main__":
    main()
