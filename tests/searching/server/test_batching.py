"""Micro-batches against unbatched encoding: what is joined, who takes turns, and what a full queue,
a cancelled call and an error do.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from served import encoder, slow

from conftest import make_rows
from revela.errors import RevelaError
from revela.searching.server.batching import Batcher
from revela.searching.server.errors import APIError


def tokens_of(texts):
    return [len(text.split()) for text in texts]


@pytest.fixture
def batcher(slow):
    batcher = Batcher(slow, batch_tokens=40, max_tokens=1000)
    yield batcher
    slow.open.set()
    batcher.close()


async def busy(slow, batcher):
    """The call of a batch that the model is at until ``slow.open`` is set."""
    slow.stop()
    first = asyncio.create_task(batcher.encode(["first"], [1], "passage"))
    while not slow.begun.is_set():
        await asyncio.sleep(0.001)
    return first


def behind_a_batch(slow, batcher, *calls):
    """The results of calls (texts, tokens, role) begun while the model is busy with another."""

    async def run():
        first = await busy(slow, batcher)
        tasks = [asyncio.create_task(batcher.encode(*call)) for call in calls]
        await asyncio.sleep(0.01)
        slow.open.set()
        await first
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_joined_requests_get_the_vectors_that_they_would_get_alone(slow, encoder, batcher):
    rng = random.Random(0)
    rows = [row["text"].split() for row in make_rows(60, sentences=3)]
    calls = []
    for _ in range(30):
        some = [rng.choice(rows)[: rng.randint(1, 25)] for _ in range(rng.randint(1, 6))]
        texts = [" ".join(words) for words in some]
        calls.append((texts, tokens_of(texts), rng.choice(["query", "passage"])))
    encode = {"query": encoder.encode_queries, "passage": encoder.encode_passages}
    for (texts, _, role), got in zip(calls, behind_a_batch(slow, batcher, *calls), strict=True):
        want = np.concatenate([encode[role]([text]) for text in texts])
        np.testing.assert_allclose(got, want, atol=2e-6)
    count = sum(len(texts) for texts, *_ in calls)
    assert len(slow.batches) < 1 + count / 2
    assert all(sum(tokens_of(texts)) <= 40 for _, texts in slow.batches)
    assert sum(len(texts) for _, texts in slow.batches) == 1 + count
    assert batcher.waiting_tokens == {"query": 0, "passage": 0}


def test_a_query_waits_for_one_batch_and_a_small_request_for_a_share_of_a_large_one(slow, batcher):
    large, small = (["p"] * 20, [20] * 20, "passage"), (["s"], [20], "passage")
    found = behind_a_batch(slow, batcher, large, small, (["q"], [5], "query"))
    assert [len(vectors) for vectors in found] == [20, 1, 1]
    batches = [(role, "".join(texts)) for role, texts in slow.batches[1:]]
    assert batches[0] == ("query", "q")
    assert [batch for _, batch in batches[1:7]] == ["pp", "pp", "pp", "pp", "sp", "pp"]


def test_texts_of_like_length_go_together(slow, batcher, encoder):
    texts = [" ".join(["word"] * count) for count in (20, 2, 19, 1, 18, 3, 17, 4)]
    calls = [([text], tokens_of([text]), "passage") for text in texts]
    got = np.concatenate(behind_a_batch(slow, batcher, *calls))
    np.testing.assert_allclose(got, encoder.encode_passages(texts), atol=2e-6)
    assert [tokens_of(batch) for _, batch in slow.batches[1:]] == [[1, 2, 3, 4, 17], [18, 19], [20]]


def test_a_text_longer_than_a_batch_is_a_batch(slow, batcher):
    (found,) = behind_a_batch(slow, batcher, (["a", "b", "c"], [30, 90, 10], "passage"))
    assert len(found) == 3 and [texts for _, texts in slow.batches[1:]] == [["c", "a"], ["b"]]


def test_a_full_queue_refuses_and_says_when_to_come_back(slow, batcher):
    calls = (["x"], [600], "passage"), (["y"], [500], "passage"), (["z"], [500], "query")
    first, second, other_role = behind_a_batch(slow, batcher, *calls)
    assert len(first) == len(other_role) == 1
    assert isinstance(second, APIError) and int(second.headers["retry-after"]) >= 1
    batcher._tokens_done, batcher._seconds_busy = 100, 2.0
    assert batcher._seconds_until(170) == 4


def test_a_cancelled_call_is_not_encoded(slow, batcher):
    async def run():
        first = await busy(slow, batcher)
        cancelled = asyncio.create_task(batcher.encode(["cancelled"], [900], "passage"))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.sleep(0.01)
        # There is room for it already.
        later = asyncio.create_task(batcher.encode(["later"], [900], "passage"))
        slow.open.set()
        await first
        return await later

    assert len(asyncio.run(run())) == 1
    assert [texts for _, texts in slow.batches] == [["first"], ["later"]]


def test_an_error_fails_its_own_batch_and_no_other(slow, batcher, monkeypatch):
    encode = slow._encode

    def broken(role, texts):
        if "broken" in texts:
            raise MemoryError("no room")
        if "nan" in texts:
            raise RevelaError("vectors are not finite")  # as the encoder says it
        return encode(role, texts)

    monkeypatch.setattr(slow, "_encode", broken)
    calls = [([word] * 2, [30, 30], "passage") for word in ("broken", "nan", "fine")]
    failed, nan, fine = behind_a_batch(slow, batcher, *calls)
    assert isinstance(failed, MemoryError) and isinstance(nan, RevelaError) and len(fine) == 2
    assert batcher.waiting_tokens["passage"] == 0


def test_an_encoder_that_gives_a_vector_too_few_fails_that_batch_only(slow, batcher, monkeypatch):
    encode = slow._encode
    monkeypatch.setattr(slow, "_encode", lambda role, texts: encode(role, texts)[1:])

    async def call():
        return await asyncio.wait_for(batcher.encode(["a", "b"], [1, 1], "passage"), 30)

    with pytest.raises(ValueError):
        asyncio.run(call())
    monkeypatch.undo()
    assert len(asyncio.run(call())) == 2


def test_closing_finishes_what_was_taken(slow):
    batcher = Batcher(slow, batch_tokens=10, max_tokens=100)

    async def run():
        texts = [([f"text {i}"], [10], "passage") for i in range(4)]
        tasks = [await busy(slow, batcher)]
        tasks += [asyncio.create_task(batcher.encode(*text)) for text in texts]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        await asyncio.sleep(0.05)
        slow.open.set()
        await closing
        with pytest.raises(APIError):
            await batcher.encode(["late"], [1], "passage")
        return await asyncio.gather(*tasks)

    assert [len(vectors) for vectors in asyncio.run(run())] == [1] * 5
