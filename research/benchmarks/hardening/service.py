"""Serve a folder whose files change, with ``--sync``, to clients that search it and encode texts:
answers by status, their times, and how the server's memory grows.

Memory is the resident set, after each tenth of the time.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles

import httpx

from research.benchmarks.hardening.made import environment, fault, report, revela, sentences

FILES = 400
REQUESTS = [
    ("/v1/search", {"query": "QUERY", "k": 10}),
    ("/v1/search", {"query": "QUERY", "mode": "lexical", "explain": True}),
    ("/v1/search", {"query": "QUERY", "mode": "dense"}),
    ("/v1/embeddings", {"model": "served", "input": ["QUERY", "QUERY"]}),
    ("/v1/rerank", {"query": "QUERY", "documents": ["QUERY", "an engine", "a garden"]}),
]


class Load:
    """What clients see until ``end``."""

    def __init__(self, url: str, end: float) -> None:
        self.url, self.end = url, end
        self.statuses, self.seconds = Counter[str](), list[float]()

    def client(self, seed: int) -> None:
        """Send one request after another."""
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while time.monotonic() < self.end:
                path, body = rng.choice(REQUESTS)
                query = sentences(rng, 1)
                filled = {
                    name: [query if text == "QUERY" else text for text in value]
                    if isinstance(value, list)
                    else query
                    if value == "QUERY"
                    else value
                    for name, value in body.items()
                }
                begun = time.monotonic()
                try:
                    status = str(client.post(path, json=filled).status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                self.statuses[status] += 1
                self.seconds.append(time.monotonic() - begun)


def write(folder: Path, name: str, rng: random.Random) -> None:
    (folder / name).write_text(sentences(rng, rng.randint(3, 60)))


def change(folder: Path, end: float, every: float) -> None:
    """Add, change and delete files."""
    rng, number = random.Random(0), FILES
    while time.monotonic() + every < end:
        time.sleep(every)
        for _ in range(rng.randint(1, 5)):
            files = sorted(path.name for path in folder.iterdir())
            write(folder, f"{number}.txt", rng)
            write(folder, rng.choice(files), rng)
            (folder / rng.choice(files)).unlink()
            number += 1


def resident(pid: int) -> float:
    """The memory of a process in MB (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1000  # type: ignore[index]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sync", type=float, default=2, help="seconds between syncs, and changes")
    parser.add_argument("--model", default="embedded:minilm-l6")


def run(a: argparse.Namespace) -> int:
    """Serve and ask; the number of answers of the server's fault."""
    with tempfile.TemporaryDirectory(prefix="hardening-") as home:
        docs, index, log = (Path(home) / name for name in ("docs", "index", "log"))
        docs.mkdir()
        rng = random.Random(a.seed)
        for number in range(FILES):
            write(docs, f"{number}.txt", rng)
        made = revela("index", docs, "--out", index, "--model", a.model, cache=Path(home) / "cache")
        assert not fault(made.returncode, made.stderr), made.stderr
        command = [sys.executable, "-m", "revela", "serve", str(index), "--port", "0"]
        command += ["--name", "served", "--sync", str(a.sync)]
        with log.open("w") as file:
            server = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment(Path(home) / "cache")
            )
        try:
            while not (found := re.search(r"at (http://\S+/)", log.read_text())):
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
            end = time.monotonic() + 60 * a.minutes
            load = Load(found[1], end)
            threads = [threading.Thread(target=load.client, args=(i,)) for i in range(a.clients)]
            threads.append(threading.Thread(target=change, args=(docs, end, a.sync)))
            for thread in threads:
                thread.start()
            memory = list[float]()
            for _ in range(10):
                time.sleep(6 * a.minutes)
                memory.append(round(resident(server.pid)))
            for thread in threads:
                thread.join()
        finally:
            server.terminate()
            server.wait()
        said = log.read_text()
        # The last line of a traceback names the error.
        failed = re.findall(r"^Traceback.*\n(?: .*\n)*(.*)|(.*not in step with.*)", said, re.M)
        lines = Counter(error or warning for error, warning in failed)
        syncs = said.count("is in step again")
    cuts = quantiles(load.seconds, n=100)
    wrong = sum(n for status, n in load.statuses.items() if status not in ("200", "429"))
    report(
        "service",
        minutes=a.minutes,
        clients=a.clients,
        answers=load.statuses,
        p50_ms=round(1000 * cuts[49]),
        p99_ms=round(1000 * cuts[98]),
        syncs=syncs,
        failed=lines,
        memory_mb=memory,
        grown=round(memory[-1] / memory[0] - 1, 3),
        load=round(os.getloadavg()[1], 1),
    )
    return wrong
