"""Fixtures: an index of tiny models behind a real server on a free port, in a thread.

They are not in a conftest.py, which would hide tests/conftest.py.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import make_rows, tiny_retriever
from revela.encoders.torch_encoder import TorchEncoder
from revela.searching.index import Index
from revela.searching.manifest import Indexing, Info
from revela.searching.rows import metadata_columns
from revela.searching.server import Access, Limits
from revela.searching.server.app import Service
from revela.searching.server.lifecycle import listen, server_of
from revela.types import Document


@dataclass
class Running:
    url: str
    service: Service
    server: object
    thread: threading.Thread


@contextmanager
def running(service: Service) -> Iterator[Running]:
    listening = listen("127.0.0.1", 0)
    server = server_of(service.app(), service.limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    port = listening.getsockname()[1]
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{port}", service, server, thread)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def encoder(tiny_lm_folder) -> TorchEncoder:
    return TorchEncoder(tiny_retriever(tiny_lm_folder, max_tokens=512), bf16=False)


def build(
    folder: Path,
    documents: list[Document],
    encoder,
    metadata=(),
    model="/somewhere/secret/model",
    fingerprint="0123",
    keep_tokens=True,
) -> Index:
    width = encoder.encode_passages(["."]).shape[1]
    columns = metadata_columns(documents, metadata)
    info = Info(model, fingerprint, width, Indexing(keep_tokens=keep_tokens), columns)
    index = Index.begin(folder, info, encoder)
    index.add(documents)
    return index


def documents(count: int, sentences: int) -> list[Document]:
    rows = make_rows(count, sentences=sentences)
    return [
        Document(row["_id"], row["text"], row["title"], metadata={"year": 2000 + i, "lang": "en"})
        for i, row in enumerate(rows)
    ]


@pytest.fixture(scope="session")
def index(encoder, tmp_path_factory) -> Index:
    folder = tmp_path_factory.mktemp("served") / "secret"
    return build(folder, documents(40, 2), encoder, ("year", "lang"))


@pytest.fixture(scope="session")
def make_service(encoder, index):
    def make(encoder=encoder, token=None, local_only=False, dimensions=(), **limits):
        changed = dataclasses.replace(Limits(), **limits)
        access = Access(token, local_only)
        return Service(index, "tiny", encoder, changed, access, dimensions=dimensions)

    return make


@pytest.fixture(scope="session")
def server(make_service) -> Iterator[Running]:
    with running(make_service()) as up:
        yield up


class Slow:
    """An encoder that records its batches since it was stopped; while it is not open, they wait."""

    def __init__(self, encoder: TorchEncoder) -> None:
        self.open, self.begun = threading.Event(), threading.Event()
        self.open.set()
        self.model, self.encoder, self.lacks_tokens = encoder.model, encoder, ""
        self.limit, self.count_tokens = encoder.limit, encoder.count_tokens
        self.batches: list[tuple[str, list[str]]] = []

    def _encode(self, role, texts):
        self.batches.append((role, list(texts)))
        self.begun.set()
        assert self.open.wait(120)
        encode = {
            "query": self.encoder.encode_queries,
            "passage": self.encoder.encode_passages,
            "query with tokens": self.encoder.query_tokens,
        }
        return encode[role](texts)

    def encode_queries(self, texts, progress=False):
        return self._encode("query", texts)

    def encode_passages(self, texts, progress=False):
        return self._encode("passage", texts)

    def query_tokens(self, queries):
        return self._encode("query with tokens", queries)

    def stop(self) -> None:
        self.open.clear()
        self.begun.clear()
        self.batches.clear()


@pytest.fixture
def slow(encoder) -> Slow:
    return Slow(encoder)
