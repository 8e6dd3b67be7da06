"""What is stored on disk reads as the list it was made from, and takes no memory that grows with
it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from revela.text import spool
from revela.text.spool import arrow_list
from revela.types import Chunk, Document

CHUNKS = [Chunk(i // 3, f"text {i} " * (i % 7)) for i in range(50)]


@pytest.mark.parametrize("limit", [1, 200, 2**22])
def test_reads_as_the_list_it_was_made_from(limit, monkeypatch):
    monkeypatch.setattr(spool, "BATCH", limit)
    kept = arrow_list(Chunk, iter(CHUNKS))
    assert list(kept) == CHUNKS and len(kept) == 50
    assert [kept[i] for i in (0, 17, -1)] == [CHUNKS[i] for i in (0, 17, -1)]
    assert kept[10:20:3] == CHUNKS[10:20:3] and kept.value(17, "text") == CHUNKS[17].text
    with pytest.raises(IndexError):
        kept[50]
    owners = [c.document for c in CHUNKS]
    np.testing.assert_array_equal(kept.column("document"), owners)
    for rows in ([0, 2, 3, 17, 40, 49], [], [49], [2, 2, 3], [40, 3]):
        view = kept.select(rows)
        assert list(view) == [CHUNKS[i] for i in rows]
        assert view.column("document").tolist() == [owners[i] for i in rows]
        assert kept.take(np.array(rows, np.int64), ["text"])["text"].to_pylist() == [
            CHUNKS[i].text for i in rows
        ]
    some = kept.select([3, 40, 4]).select([1, 2])
    assert list(some) == [CHUNKS[40], CHUNKS[4]] and some.value(-1, "document") == 1
    assert some.take(np.array([1, 0]), ["document"])["document"].to_pylist() == [1, 13]


def test_metadata_may_differ_from_one_to_the_next(monkeypatch):
    monkeypatch.setattr(spool, "BATCH", 1)
    several = [{}, {"year": 1}, {"year": "x", "b": True}, {"share": 0.5}]
    documents = [Document(f"d{i}", "text", metadata=m) for i, m in enumerate(several)]
    kept = arrow_list(Document, documents)
    assert list(kept) == documents and kept[2] == documents[2]


def test_nothing_is_a_sequence_too():
    kept = arrow_list(Document, [])
    assert len(kept) == 0 and list(kept) == [] and not kept


def test_the_file_goes_with_the_last_view(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = arrow_list(Chunk, CHUNKS)
    view = kept.select([1])
    del kept
    assert list(tmp_path.iterdir()) and view[0] == CHUNKS[1]
    del view
    assert not list(tmp_path.iterdir())


MEMORY = """
from revela.text.chunk import chunk_all
from revela.text.spool import arrow_list
from revela.types import Chunk, Document
def memory():
    status = open("/proc/self/status").read().split()
    return int(status[status.index("RssAnon:") + 1]) // 1024
text = "A sentence of seven words stands here. " * 2000
def peak(count):
    documents = arrow_list(Document, (Document(str(i), f"{i} {text}") for i in range(count)))
    chunks = arrow_list(Chunk, chunk_all(documents, 48))
    assert len(documents) == count and len(chunks) > 100 * count
    assert sum(chunks.column("document") == 3) > 100
    assert len(chunks.take(chunks.column("document")[:5], ["text"])) == 5
    return memory()
print(peak(30), peak(400))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_corpus():
    """32 MB of text against 2 MB, each of them twice; pages of the mapped files are not counted."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    small, large = map(int, run.stdout.split())
    # The allocator keeps some 20 MB of what it had for batches; one of the copies would be 32.
    assert large < small + 28, f"{small} MB -> {large} MB"
