"""What is stored on disk reads as the list it was made from, and costs no memory that grows with
it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from revela.corpus import arrow_list as store
from revela.corpus.arrow_list import arrow_list
from revela.types import Chunk, Document

CHUNKS = [Chunk(i // 3, f"text {i} " * (i % 7)) for i in range(50)]


@pytest.mark.parametrize("limit", [1, 200, 2**22])
def test_reads_as_the_list_it_was_made_from(limit, monkeypatch):
    monkeypatch.setattr(store, "BATCH", limit)
    kept = arrow_list(Chunk, iter(CHUNKS))
    assert list(kept) == CHUNKS and len(kept) == 50
    assert (
        kept[0] == CHUNKS[0]
        and kept[-1] == CHUNKS[-1]
        and kept[17] == CHUNKS[17]
        and kept[10:20:3] == CHUNKS[10:20:3]
    )
    assert (
        kept.value(17, "text") == CHUNKS[17].text
        and kept.chosen([3, 40]).value(-1, "document") == 13
    )
    with pytest.raises(IndexError):
        kept[50]
    np.testing.assert_array_equal(kept.column("document"), [c.document for c in CHUNKS])
    for rows in ([0, 2, 3, 17, 40, 49], [], [49], [2, 2, 3]):
        assert list(kept.chosen(rows)) == [CHUNKS[i] for i in rows]
    some = kept.chosen([3, 40, 4]).chosen([1, 2])
    assert (
        list(some) == [CHUNKS[40], CHUNKS[4]]
        and some[0] == CHUNKS[40]
        and some.column("document").tolist() == [13, 1]
    )


def test_metadata_may_differ_from_one_to_the_next(monkeypatch):
    monkeypatch.setattr(store, "BATCH", 1)
    documents = [
        Document(f"d{i}", "text", metadata=m)
        for i, m in enumerate([{}, {"year": 1}, {"year": "x", "b": True}, {"share": 0.5}])
    ]
    kept = arrow_list(Document, documents)
    assert (
        list(kept) == documents
        and kept[2] == documents[2]
        and list(kept.chosen([3, 1])) == [documents[3], documents[1]]
    )


def test_nothing_is_a_sequence_too():
    kept = arrow_list(Document, [])
    assert len(kept) == 0 and list(kept) == [] and not kept


def test_the_file_goes_with_the_last_view():
    kept = arrow_list(Chunk, CHUNKS)
    view, path = kept.chosen([1]), kept.paths[0]
    del kept
    assert path.exists() and view[0] == CHUNKS[1]
    del view
    assert not path.exists()


MEMORY = """
import sys
from revela.corpus.chunk import chunk_all
from revela.corpus.arrow_list import arrow_list
from revela.types import Chunk, Document
text = "A sentence of seven words stands here. " * 2000
count = int(sys.argv[1])
documents = arrow_list(Document, (Document(str(i), f"{i} {text}") for i in range(count)))
chunks = arrow_list(Chunk, chunk_all(documents, 48))
assert len(documents) == count and len(chunks) > 100 * count
assert sum(chunks.column("document") == 3) > 100
assert len(chunks.take(chunks.column("document")[:5], ["text"])) == 5
status = open("/proc/self/status").read().split()
print(int(status[status.index("VmHWM:") + 1]) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_corpus():
    """80 MB of text against 8 MB: what is resident stays the same, pages of the mapped files
    included.
    """
    runs = [
        subprocess.run(
            [sys.executable, "-c", MEMORY, n], capture_output=True, text=True, check=True
        )
        for n in ("100", "1000")
    ]
    small, large = (int(run.stdout) for run in runs)
    assert large < small + 40, f"{small} MB -> {large} MB"
