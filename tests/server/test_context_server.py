"""A server of an index with a context: vectors of this context, under a name of their own."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from served import documents, running

from conftest import SLOTS
from revela import Retriever
from revela.server import Limits
from revela.server.app import Service
from revela.server.encoding import ServedModel

TEXTS = ["ocean1 ocean2", "engine3"]


@pytest.fixture(scope="module")
def index(contextual, tmp_path_factory):
    retriever = Retriever(contextual, precision="fp32")
    return retriever.index(documents(20, 2), tmp_path_factory.mktemp("contextual") / "index")


def test_vectors_and_names_are_those_of_the_context(index):
    encoder, digest = index.encoder, index.info.context["digest"]
    counter = encoder.counter
    service = Service(index, ServedModel("tiny", encoder, counter), Limits())
    with running(service) as up:
        named = [row["id"] for row in httpx.get(f"{up.url}/v1/models").json()["data"]]
        name = f"tiny@{digest[:8]}"
        assert named == [name, f"{name}:query", f"{name}:passage"]
        body = {"model": name, "input": TEXTS}
        answer = httpx.post(f"{up.url}/v1/embeddings", json=body).json()
        assert answer["model"] == name
        assert answer["usage"]["prompt_tokens"] == sum(counter.count_passages(TEXTS)) > 2 * SLOTS
        vectors = np.array([row["embedding"] for row in answer["data"]])
        np.testing.assert_allclose(vectors, encoder.encode_passages(TEXTS), atol=1e-6)
        saved = np.abs(vectors - index._encoder.encode_passages(TEXTS)).max()
        assert saved > 1e-3  # not the context that the retriever was saved with
        found = httpx.post(f"{up.url}/v1/search", json={"query": "ocean1"}).json()
        wanted = index.search("ocean1")
        assert [row["id"] for row in found["data"]] == [hit.id for hit in wanted]
        assert found["model"] == name
