"""Encode with a static retriever, without torch: a text's vector is the mean of its tokens' rows.

Reads a Sentence-Transformers folder of ``StaticEmbedding``, with or without ``Normalize``, such as
those of model2vec. A search takes a second from a cold start, and encoding takes little longer than
tokenizing. static_from_words.py makes such retrievers; static_trainable.py trains them.

Shapes: N texts, T tokens of a text, V tokens of the vocabulary, D width of a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import (
    Encoded,
    Features,
    TextEncoder,
    check_max_tokens,
    no_transformer,
    truncate,
)
from revela.encoders.model_files import CONFIG, Weights, opening, table_folder
from revela.encoders.prompts import OWN, GivenPrompts, Prompts, prompts_of
from revela.types import Role, fp32, unit

READ_AHEAD = 1024  # texts that are tokenized at once
WEIGHTS = "model.safetensors"


class StaticEncoder(TextEncoder):
    """The encoder of a static retriever; it has no token vectors.

    Args:
        table_VD: rows of floats, or of the bits of bf16.
        tokenizer: a tokenizer of the ``tokenizers`` library.
        max_tokens: truncate texts to this length instead of the tokenizer's own limit.
    """

    tokenizer: Any = None
    blank = None
    special_tokens = False

    def __init__(
        self,
        table_VD: NDArray[Any],
        tokenizer: Any,
        prompts: tuple[str, str] = ("", ""),
        max_tokens: int | None = None,
        name: str = "the model",
    ) -> None:
        self._table_VD, self.tokenizer = table_VD, tokenizer
        self.prompts, self.name, self.lacks_tokens = Prompts(*prompts), name, no_transformer(name)
        tokenizer.no_padding()
        self.limit = (tokenizer.truncation or {}).get("max_length")
        if max_tokens is not None:
            check_max_tokens(max_tokens, self.limit, name)
            self.limit = max_tokens
            truncate(tokenizer, max_tokens)

    @classmethod
    def load(
        cls, folder: Path, max_tokens: int | None = None, prompts: GivenPrompts = OWN
    ) -> StaticEncoder:
        """Open a static retriever's folder; raises RevelaError if it is damaged."""
        from tokenizers import Tokenizer

        inside, settings = table_folder(folder), folder / CONFIG
        assert inside is not None
        with opening(folder):
            about = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
            tokenizer = Tokenizer.from_file(str(inside / "tokenizer.json"))
            table_VD = _table(inside)[:, : about.get("truncate_dim")]
            if tokenizer.get_vocab_size() > len(table_VD):
                raise ValueError(f"tokenizer.json has more tokens than {WEIGHTS} has rows")
            return cls(table_VD, tokenizer, prompts_of(folder, prompts), max_tokens, str(folder))

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        """Sum the rows of each text's tokens; the vector of a text without tokens is 0."""
        ids = list(token_ids(self.tokenizer, features["texts"]))
        # Each row is converted to fp32 only once.
        used, places = np.unique(np.concatenate([[], *ids]).astype(np.int64), return_inverse=True)
        rows_UD = fp32(self._table_VD.take(used, axis=0))
        ends = np.cumsum([len(own) for own in ids])[:-1]
        sums_BD = np.zeros((len(ids), self._table_VD.shape[1]), np.float32)
        for i, own in enumerate(np.split(places, ends)):
            if len(own):  # a sum in place of the mean, as vectors are normalised afterwards
                np.add.reduce(rows_UD.take(own, axis=0), out=sums_BD[i])
        return Encoded(unit(sums_BD))


def token_ids(tokenizer: Any, texts: Sequence[str], prompt: str = "") -> Iterator[list[int]]:
    """The token ids of each text, without special tokens."""
    for start in range(0, len(texts), READ_AHEAD):
        part = [prompt + text for text in texts[start : start + READ_AHEAD]]
        for read in tokenizer.encode_batch_fast(part, add_special_tokens=False):
            yield read.ids


def _table(folder: Path) -> NDArray[Any]:
    """The rows (V, D) of the tokens, memory-mapped; model2vec's weights and mapping are applied."""
    weights = Weights(folder)
    if "embedding.weight" in weights:
        return weights.stored("embedding.weight")
    table_VD = weights.stored("embeddings", integers=True)
    if "mapping" in weights:
        table_VD = table_VD[weights.stored("mapping", integers=True)]
    if "weights" in weights:
        table_VD = fp32(table_VD) * weights.fp32("weights")[:, None]
    return table_VD
