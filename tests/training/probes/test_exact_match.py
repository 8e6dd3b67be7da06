"""Exact match: encoders of a known bias get its sign, and texts fill the window."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import MadeUpEncoder
from revela.errors import RevelaError
from revela.text.words import split_evenly
from revela.training.probes.exact_match import exact_match
from revela.training.probes.places import SPARE, TokenWindow, between_words, long_texts
from revela.types import Document

SHORT = Document("short", "ocean1 " * 3)
LONG_ENOUGH = "documents are long enough for 10 parts of 52 tokens in all"


class Words(MadeUpEncoder):
    """A bag of words, weighted by place in the text from 1 (first) to 1 + tilt (last)."""

    def __init__(self, tilt):
        self.tilt = tilt

    def encode_queries(self, texts, progress=False):
        return self._bags(texts, 0)

    def encode_passages(self, texts, progress=False):
        return self._bags(texts, self.tilt)

    def _bags(self, texts, tilt):
        out = np.zeros((len(texts), 4096), dtype=np.float32)
        for row, text in zip(out, texts, strict=True):
            words = text.split()
            for i, word in enumerate(words):
                row[int(word.strip(".")[1:])] += 1 + tilt * i / max(1, len(words) - 1)
        return out / np.linalg.norm(out, axis=1, keepdims=True).clip(1e-12)


def texts(count=8, words=60):
    rng = np.random.default_rng(0)
    return [" ".join(f"w{n}" for n in rng.permutation(4096)[:words]) for _ in range(count)]


@pytest.mark.parametrize(("tilt", "sign"), [(-0.9, -1), (0.0, 0), (5.0, 1)])
def test_a_known_bias_is_found(tilt, sign):
    found = exact_match(texts(), Words(tilt))
    for test in found.values():
        low, high = (-1e-6, 1e-6) if sign == 0 else (test.slope.low, test.slope.high)
        assert np.sign(test.slope.value) == sign or low < test.slope.value < high
        assert np.sign(round(test.drop.value, 5)) == -sign and (sign == 0 or low * high > 0)


def test_exact_match_is_a_loop_over_documents_and_parts():
    encoder = Words(3.0)
    some = texts(3, 44)
    found = exact_match(some, encoder)
    forward, mean = np.zeros((3, 10)), np.zeros((3, 10))
    for n, text in enumerate(some):
        parts = split_evenly(text, 10)
        back = " ".join(reversed([p.strip() for p in parts]))
        for p, part in enumerate(parts):
            (query,) = encoder.encode_queries([part])
            forward[n, p] = encoder.encode_passages([text])[0] @ query
            mean[n, p] += forward[n, p] / 2
            # In the reversed text this part stands at the mirrored place.
            mean[n, 9 - p] += encoder.encode_passages([back])[0] @ query / 2
    for test, expected in (("exact match", forward), ("exact match, both orders", mean)):
        values = [p.value for p in found[test].places]
        np.testing.assert_allclose(values, expected.mean(axis=0), atol=1e-6)


def test_documents_are_cut_between_words_to_what_the_model_reads(tiny_tokenizer):
    window = TokenWindow(tiny_tokenizer, 60)
    words = [f"ocean{i % 6}" for i in range(200)]
    documents = [Document(str(i), " ".join(words[i:]), title="a title") for i in range(30)]
    documents.append(SHORT)
    found, again, other = (long_texts(documents, window, 10, seed) for seed in (0, 0, 1))
    assert len(found) == 10 and found == again != other
    for text in found:
        assert any(d.text.startswith(text) for d in documents)
        assert 60 - SPARE - 6 < len(tiny_tokenizer(text)["input_ids"]) <= 60 - SPARE
        assert set(text.split()) <= set(words)  # no word is cut
    cuts = {("ab cd", 4): "ab ", ("ab cd", 2): "ab", ("abcd", 2): "ab"}
    assert {given: between_words(*given) for given in cuts} == cuts


def test_text_without_spaces_is_cut_as_others_are():
    text = "".join(chr(0x4E00 + n) for n in range(200))
    assert between_words("a word, then " + text, 100) == "a word, then " + text[:86]
    assert [len(part) for part in split_evenly(text, 10)] == [20] * 10
    words = "  ".join(f"w{i}" for i in range(47)) + "\n"
    parts = split_evenly(words, 10)
    assert "".join(parts) == words and {len(part.split()) for part in parts} == {4, 5}


TOO_LITTLE = [
    (20, 2, "20 tokens are too few to be cut in 10 parts: raise --max-tokens"),
    (60, 50, f"only 29 of 30 {LONG_ENOUGH}, and 30 are needed: lower --max-tokens or"),
    (5000, 2, "only 0 of 30 documents are long enough"),
]


@pytest.mark.parametrize(("size", "count", "message"), TOO_LITTLE)
def test_too_little_text_is_one_sentence(tiny_tokenizer, size, count, message):
    documents = [*(Document(str(i), "ocean1 ocean2 " * 50) for i in range(29)), SHORT]
    with pytest.raises(RevelaError, match=message):
        long_texts(documents, TokenWindow(tiny_tokenizer, size), count, 0)


def test_all_are_taken_where_there_are_fewer_than_asked_for(tiny_tokenizer, caplog):
    caplog.set_level("INFO", "revela")
    documents = [*(Document(str(i), "ocean1 ocean2 " * 50) for i in range(31)), SHORT]
    assert len(long_texts(documents, TokenWindow(tiny_tokenizer, 60), 200, 0)) == 31
    (message,) = caplog.messages
    assert message == f"only 31 of 32 {LONG_ENOUGH}: all of them are taken, in place of 200"
