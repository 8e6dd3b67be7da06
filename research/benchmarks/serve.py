r"""Cost of the service beside the model: clients at saturation against direct encoding.

    taskset -c 1 python -m research.benchmarks.serve --data COLLECTIONS/scifact/corpus.jsonl.gz \
        --threads 1 --seconds 60

Direct encoding gives the encoder all texts at once, before and after. The service is a process of
`revela serve`, which shares its cores with the clients. These are raw sockets that send prepared
bodies and read only status and length, so that the server is measured. A refused client (429)
waits as the answer says.

On a machine with other work texts per processor second tell more than wall clocks: of the encoding
process, and of server and clients together. On a quiet machine the two ratios are one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from research.benchmarks.options import parser_of, write_out
from revela.encoders.base import TextEncoder
from revela.encoders.load import load_encoder, resolve
from revela.searching.index import Index
from revela.text.load import read_corpus
from revela.training.distributed import available_cores
from revela.types import Document

NAME = "model"


@dataclass
class Load:
    """Answers that the clients got."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    texts: int = 0


@dataclass
class Measured:
    """A load, with seconds of the wall clock, and of the processor by process."""

    load: Load
    wall: float
    server: float
    clients: float
    texts: float  # that the server's model encoded, also of requests not answered in time
    model: float  # seconds of the server's busiest thread


async def client(
    port: int, bodies: list[bytes], texts: int, first: int, end: float, load: Load
) -> None:
    """Send one request after another on one connection until the time is over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    turn = first
    while time.monotonic() < end:
        body = bodies[turn % len(bodies)]
        turn += 1
        begun = time.monotonic()
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\n")
        writer.write(b"Content-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split()[1])
        await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))
        now = time.monotonic()
        if now > end:  # some of its texts were encoded after the end
            break
        load.statuses[status] += 1
        if status == 200:
            load.seconds.append(now - begun)
            load.texts += texts
        elif status == 429:
            await asyncio.sleep(float(re.search(r"retry-after: (\d+)", head)[1]))
    writer.close()


async def saturate(
    port: int, bodies: list[bytes], texts: int, clients: int, seconds: float
) -> Load:
    load = Load()
    end = time.monotonic() + seconds
    await asyncio.gather(
        *(client(port, bodies, texts, i * 7919, end, load) for i in range(clients))
    )
    return load


def processor_seconds(folder: str) -> float:
    """User and system time of a process or thread so far, by its folder in /proc (Linux)."""
    fields = Path(folder, "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def by_thread(pid: int) -> Counter[str]:
    """The same per thread; the model's is the busiest."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return Counter({str(thread): processor_seconds(str(thread)) for thread in threads})


def encoded(port: int) -> float:
    """Texts that the server's model has encoded so far, answered or not."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = answer.read().decode()
    return float(re.search(r'revela_batch_texts_sum\{role="passage"\} (\S+)', metrics)[1])


def direct(encoder: TextEncoder, texts: list[str], seconds: float) -> tuple[float, float]:
    """Texts per second and per processor second, the encoder given all at once, repeatedly."""
    encoder.encode_passages(texts[:64])
    done, wall, processor = 0, time.monotonic(), time.process_time()
    while time.monotonic() - wall < seconds:
        encoder.encode_passages(texts)
        done += len(texts)
    return done / (time.monotonic() - wall), done / (time.process_time() - processor)


def options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a corpus, as for revela train")
    add("--model", default="embedded:minilm-l6")
    add("--clients", type=int, default=32)
    add("--texts", type=int, default=8, help="texts per request")
    add("--words", type=int, default=100, help="most words of a text")
    add("--seconds", type=float, default=60)
    add("--threads", type=int, default=available_cores())
    flags = "of revela serve, without their dashes: batch-tokens=8192"
    add("--flags", nargs="*", default=[], help=flags)
    return parser.parse_args()


def index_of(texts: Sequence[str], folder: Path, encoder: TextEncoder, index: Path) -> None:
    """A small index, for `revela serve` to open."""
    few = [Document(str(i), text) for i, text in enumerate(texts[:8])]
    Index.create(index, folder, encoder=encoder).add(few)


def measured(index: Path, bodies: list[bytes], a: argparse.Namespace) -> Measured:
    """Serve the index in a process of its own, and put it under load."""
    command = [sys.executable, "-m", "revela", "serve", str(index), "--port", "0", "--name", NAME]
    command += [f"--{f}" for f in a.flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(re.search(r":(\d+)/", server.stdout.readline())[1])
        used = partial(processor_seconds, f"/proc/{server.pid}")
        try:
            asyncio.run(saturate(port, bodies, a.texts, 4, 2))  # warm
            texts, models = encoded(port), by_thread(server.pid)
            begun, theirs, ours = time.monotonic(), used(), time.process_time()
            load = asyncio.run(saturate(port, bodies, a.texts, a.clients, a.seconds))
            return Measured(
                load,
                wall=time.monotonic() - begun,
                server=used() - theirs,
                clients=time.process_time() - ours,
                texts=encoded(port) - texts,
                model=max((by_thread(server.pid) - models).values()),
            )
        finally:
            server.terminate()


def main() -> None:
    a = options()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    torch.set_num_threads(a.threads)
    documents, _ = read_corpus([a.data], distinct=False, min_words=5, max_bad_share=0)
    texts = [" ".join(document.full_text.split()[: a.words]) for document in documents[:512]]
    folder = resolve(a.model)
    encoder = load_encoder(folder, "auto")
    groups = [texts[i : i + a.texts] for i in range(0, len(texts) - a.texts + 1, a.texts)]
    request = {"model": NAME, "encoding_format": "base64", "truncate": True}
    bodies = [json.dumps({**request, "input": g}).encode() for g in groups]
    with tempfile.TemporaryDirectory() as temporary:
        index = Path(temporary) / "index"
        index_of(texts, folder, encoder, index)
        before = direct(encoder, texts, a.seconds / 3)
        found = measured(index, bodies, a)
        after = direct(encoder, texts, a.seconds / 3)
    by_wall, by_processor = ((x + y) / 2 for x, y in zip(before, after, strict=True))
    cuts = statistics.quantiles(found.load.seconds, n=100)
    both = found.server + found.clients
    row = {
        "clients": a.clients,
        "texts per request": a.texts,
        "answers": dict(found.load.statuses),
        "texts/s": round(found.load.texts / a.seconds, 1),
        "direct texts/s": round(by_wall, 1),
        "ratio": round(found.load.texts / a.seconds / by_wall, 3),
        "texts per processor second": round(found.texts / both, 1),
        "direct texts per processor second": round(by_processor, 1),
        "ratio by processor": round(found.texts / both / by_processor, 3),
        "model's share of the processor": round(found.model / both, 3),
        "clients' share of the processor": round(found.clients / both, 4),
        "share of the wall clock that server and clients had": round(both / found.wall, 3),
        "p50 s": round(cuts[49], 3),
        "p99 s": round(cuts[98], 3),
    }
    print(json.dumps(row, indent=1))
    write_out("serve.json", row)


if __name__ == "__main__":
    main()
