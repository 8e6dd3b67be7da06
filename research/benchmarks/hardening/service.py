"""`revela serve` at saturation, by honest clients beside those that vanish, dawdle or send garbage.

Honest clients embed and search, and come back when the queue is full (429). No answer to anybody
may be a 5xx but 503, which says that too many connections are open; the memory of the process after
the first minute may grow by 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from research.benchmarks.hardening.fuzz import sound_inputs
from research.benchmarks.hardening.inputs import damaged, where
from research.benchmarks.hardening.made import environment, report, sentences

LOST = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError)


@dataclass
class Seen:
    """What clients were answered."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def body(rng: random.Random) -> tuple[str, bytes]:
    """A path and what an honest client sends to it."""
    texts = [sentences(rng, 6) for _ in range(rng.choice([1, 8, 32]))]
    if rng.random() < 0.5:
        return "/v1/embeddings", json.dumps({"model": "tiny", "input": texts}).encode()
    mode = rng.choice(["dense", "lexical", "hybrid"])
    asked = {"query": texts[0][:60], "mode": mode, "where": rng.choice([None, {"year": 2001}])}
    return "/v1/search", json.dumps(asked).encode()


def request(path: str, data: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def answer(reader: asyncio.StreamReader) -> tuple[int, float]:
    """Status, and the seconds after which to come back."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = re.search(r"content-length: (\d+)", head)
    said = await reader.readexactly(int(length[1])) if length else b""
    status, again = int(head.split()[1]), re.search(r"retry-after: (\d+)", head)
    if status >= 500 and status != 503:
        raise AssertionError(said[:300])
    return status, float(again[1]) if again else 0.0


async def honest(port: int, rng: random.Random, end: float, seen: Seen) -> None:
    while time.monotonic() < end:
        with suppress(*LOST):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while time.monotonic() < end:
                path, data = body(rng)
                begun = time.monotonic()
                writer.write(request(path, data))
                try:
                    status, again = await answer(reader)
                except AssertionError as error:
                    seen.faults.append(f"{path} {data[:200]!r}: {error}")
                    status, again = 500, 0.0
                seen.statuses[f"honest {status}"] += 1
                if status == 200:
                    seen.seconds.append(time.monotonic() - begun)
                await asyncio.sleep(again)
            writer.close()


async def harmful(port: int, rng: random.Random, end: float, seen: Seen) -> None:
    """Vanishes, dawdles, or sends garbage, one after another."""
    while time.monotonic() < end:
        with suppress(*LOST):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            path, data = body(rng)
            whole, kind = request(path, data), rng.choice(["vanish", "dawdle", "garbage", "filter"])
            if kind == "vanish":
                writer.write(whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else whole)
                await asyncio.sleep(rng.random() * 0.1)
                writer.transport.abort()
            elif kind == "dawdle":  # sends a few bytes, or reads nothing of many answers
                at = rng.choice([10, len(whole)])
                writer.write(whole[:at] * (1 if at == 10 else 5))
                await asyncio.sleep(rng.random() * 8)
                writer.transport.abort()
            else:
                if kind == "filter":
                    data = json.dumps({"query": "ocean1", "where": where(rng)}).encode()
                    whole = request("/v1/search", data)
                elif rng.random() < 0.5:
                    whole = request(path, damaged(rng, data))
                else:
                    whole = damaged(rng, whole)
                writer.write(whole)
                try:
                    status, _ = await asyncio.wait_for(answer(reader), 15)
                    seen.statuses[f"{kind} {status}"] += 1
                except AssertionError as error:
                    seen.faults.append(f"{whole[:300]!r}: {error}")
                    seen.statuses[f"{kind} 500"] += 1
                writer.close()
            seen.statuses[kind] += 1


def memory(pid: int) -> int:
    """MB of a process that are its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"(?:RssAnon):\s+(\d+)", status)[0]) // 1024


async def load(port: int, pid: int, a: argparse.Namespace, seen: Seen) -> list[int]:
    """Put the server under load; its memory every five seconds."""
    end, used = time.monotonic() + 60 * a.minutes, []
    clients = [honest(port, random.Random(f"{a.seed}/{i}"), end, seen) for i in range(a.honest)]
    clients += [harmful(port, random.Random(f"{a.seed}/-{i}"), end, seen) for i in range(a.harmful)]
    running = asyncio.gather(*clients)
    while time.monotonic() < end:
        await asyncio.sleep(5)
        used.append(memory(pid))
    await asyncio.wait_for(running, 60)
    return used


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--honest", type=int, default=16)
    parser.add_argument("--harmful", type=int, default=16)


def run(a: argparse.Namespace) -> int:
    """Serve; how many answers were faults, and one more if memory grew."""
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="hardening-") as home:
        place = Path(home)
        sound = sound_inputs(place)
        command = [sys.executable, "-m", "revela", "serve", str(sound.index), "--port", "0"]
        with subprocess.Popen(
            [*command, "--name", "tiny"],
            env=environment(place / "cache"),
            stdout=subprocess.PIPE,
            stderr=(place / "log").open("w"),
            text=True,
        ) as server:
            assert server.stdout is not None
            port = int(re.search(r":(\d+)/", server.stdout.readline())[1])  # type: ignore[index]
            used = asyncio.run(load(port, server.pid, a, seen))
            alive = server.poll() is None
            server.terminate()
        log = (place / "log").read_text()
    after_a_minute = used[min(12, len(used) - 1)]
    late = statistics.median(used[-6:])
    cuts = statistics.quantiles(seen.seconds, n=100)
    grew = round(100 * (late / after_a_minute - 1), 1)
    tracebacks = log.count("Traceback (most recent")
    print(*seen.faults[:5], log[-2000:], sep="\n")
    report(
        "service",
        seed=a.seed,
        minutes=a.minutes,
        answers=seen.statuses,
        faults=len(seen.faults),
        tracebacks=tracebacks,
        memory_mb=[used[0], after_a_minute, late, max(used)],
        grew_percent=grew,
        p50_s=round(cuts[49], 3),
        p99_s=round(cuts[98], 3),
        cores=os.cpu_count(),
    )
    return len(seen.faults) + tracebacks + (not alive) + (grew >= 5)
