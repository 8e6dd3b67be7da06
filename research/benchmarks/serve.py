"""What the service costs beside the model: clients at saturation against direct encoding, on the
same cores.

    taskset -c 1 python -m research.benchmarks.serve --data COLLECTIONS/scifact/corpus.jsonl.gz --threads 1
    --seconds 60

Direct encoding is the encoder's own, of all texts at once, before and after. The service is `revela
serve` as a process of its own; the clients share its cores. They are raw sockets that send ready
bodies and read no more than status and length, so that what is measured is the server. A refused
client (429) comes back when the answer says so.

On a machine that does other work wall clocks tell little, so texts are also counted a processor
second: of the encoding process, and of server and clients together. Where nothing else runs, the
two ratios are one.
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
from dataclasses import dataclass, field
from pathlib import Path

import torch

from revela.corpus.arrow_list import arrow_list
from revela.corpus.read import read_corpus
from revela.index.encode_corpus import build
from revela.retriever.encode import load_encoder
from revela.settings import Indexing
from revela.types import Document, Encoder
from revela.weights import fingerprint, resolve

OUT = Path(__file__).parents[1] / "out"
NAME = "model"


@dataclass
class Load:
    """What the clients met."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    texts: int = 0


async def client(
    port: int, bodies: list[bytes], texts: int, first: int, end: float, load: Load
) -> None:
    """Ask until the time is over, one request after another on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    turn = first
    while time.monotonic() < end:
        body = bodies[turn % len(bodies)]
        turn += 1
        begun = time.monotonic()
        writer.write(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split()[1])
        await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))
        now = time.monotonic()
        if now > end:
            # an answer after the end would count for texts that were encoded within and without
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
    """User and system time so far of a process or a thread, by its folder in /proc (Linux)."""
    fields = Path(folder, "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def by_thread(pid: int) -> Counter[str]:
    """The same of each thread; the model's is the busiest, and with --threads 1 the only one that
    computes.
    """
    return Counter(
        {
            str(thread): processor_seconds(str(thread))
            for thread in Path(f"/proc/{pid}/task").iterdir()
        }
    )


def encoded(port: int) -> float:
    """Texts that the server's model has encoded so far, also those of requests that are not yet
    answered.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return float(
            re.search(r'revela_batch_texts_sum\{role="passage"\} (\S+)', answer.read().decode())[1]
        )


def direct(encoder: Encoder, texts: list[str], seconds: float) -> tuple[float, float]:
    """Texts a second and a processor second when the encoder is given all of them at once, again
    and again.
    """
    encoder.encode_passages(texts[:64])
    done, wall, processor = 0, time.monotonic(), time.process_time()
    while time.monotonic() - wall < seconds:
        encoder.encode_passages(texts)
        done += len(texts)
    return done / (time.monotonic() - wall), done / (time.process_time() - processor)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a corpus, as for revela train")
    parser.add_argument("--model", default="embedded:minilm-l6")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--texts", type=int, default=8, help="texts a request")
    parser.add_argument("--words", type=int, default=100, help="most words of a text")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--flags",
        nargs="*",
        default=[],
        help="of revela serve, without their dashes: batch-tokens=8192",
    )
    a = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    torch.set_num_threads(a.threads)
    documents, _ = read_corpus(
        [a.data],
        text_field="text",
        title_field="title",
        max_bad_share=0,
        distinct=False,
        min_words=5,
    )
    texts = [" ".join(document.full_text.split()[: a.words]) for document in documents[:512]]
    folder = resolve(a.model)
    encoder = load_encoder(folder, "auto")
    groups = [texts[i : i + a.texts] for i in range(0, len(texts) - a.texts + 1, a.texts)]
    bodies = [
        json.dumps(
            {"model": NAME, "input": g, "encoding_format": "base64", "truncate": True}
        ).encode()
        for g in groups
    ]
    with tempfile.TemporaryDirectory() as temporary:
        index = Path(temporary) / "index"
        few = arrow_list(Document, [Document(str(i), text) for i, text in enumerate(texts[:8])])
        build(
            index,
            few,
            encoder,
            model=str(folder),
            fingerprint=fingerprint(folder),
            settings=Indexing(),
        )
        before = direct(encoder, texts, a.seconds / 3)
        command = [
            sys.executable,
            "-m",
            "revela",
            "serve",
            str(index),
            "--port",
            "0",
            "--name",
            NAME,
            *(f"--{f}" for f in a.flags),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(re.search(r":(\d+)/", server.stdout.readline())[1])
            try:
                asyncio.run(saturate(port, bodies, a.texts, 4, 2))
                before_load, models = encoded(port), by_thread(server.pid)
                begun, theirs, ours = (
                    time.monotonic(),
                    processor_seconds(f"/proc/{server.pid}"),
                    time.process_time(),
                )
                load = asyncio.run(saturate(port, bodies, a.texts, a.clients, a.seconds))
                wall, theirs, ours = (
                    time.monotonic() - begun,
                    processor_seconds(f"/proc/{server.pid}") - theirs,
                    time.process_time() - ours,
                )
                texts_encoded, models = (
                    encoded(port) - before_load,
                    max((by_thread(server.pid) - models).values()),
                )
            finally:
                server.terminate()
        after = direct(encoder, texts, a.seconds / 3)
    by_wall, by_processor = ((x + y) / 2 for x, y in zip(before, after, strict=True))
    cuts = statistics.quantiles(load.seconds, n=100)
    row = {
        "clients": a.clients,
        "texts a request": a.texts,
        "answers": dict(load.statuses),
        "texts/s": round(load.texts / a.seconds, 1),
        "direct texts/s": round(by_wall, 1),
        "ratio": round(load.texts / a.seconds / by_wall, 3),
        "texts encoded a processor second": round(texts_encoded / (theirs + ours), 1),
        "direct texts a processor second": round(by_processor, 1),
        "ratio by processor": round(texts_encoded / (theirs + ours) / by_processor, 3),
        "model's share of the processor": round(models / (theirs + ours), 3),
        "clients' share of the processor": round(ours / (theirs + ours), 4),
        "share of the wall clock that server and clients had": round((theirs + ours) / wall, 3),
        "p50 s": round(cuts[49], 3),
        "p99 s": round(cuts[98], 3),
    }
    print(json.dumps(row, indent=1))
    OUT.mkdir(exist_ok=True)
    (OUT / "serve.json").write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
