"""Encode with a static retriever, without torch: a text's vector is the mean of its tokens' rows.

Reads a Sentence-Transformers folder of ``StaticEmbedding``, with or without ``Normalize``, as
model2vec also writes. A search takes a second from a cold start, and encoding takes little longer
than tokenizing. static_from_words.py makes such retrievers; static_trainable.py trains them.

Shapes: N texts, T tokens of a text, V tokens of the vocabulary, D width of a row.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import Encoded, Role, TextEncoder, check_max_tokens, truncate
from revela.encoders.model_files import (
    Weights,
    modules_of,
    table_folder,
    words_to_vectors_of,
)
from revela.encoders.prompts import OWN, Given, Prompts, prompts_of
from revela.encoders.token_counter import TokenCounter
from revela.errors import QueryError, RevelaError, first_line
from revela.types import fp32

READ_AHEAD = 1024  # texts that are tokenized at once
WEIGHTS = "model.safetensors"


def gives_tokens(folder: Path) -> bool:
    """Whether a retriever has token vectors for comparing queries and passages."""
    kinds = [kind for kind, _ in modules_of(folder)]
    return kinds[:1] == ["Transformer"] and not {"Router", "Asym"} & {*kinds}


class StaticEncoder(TextEncoder):
    """The encoder of a static retriever; it has no token vectors.

    Args:
        table_VD: floats, or the bits of bf16.
        tokenizer: a tokenizer of the ``tokenizers`` library.
        max_tokens: truncate texts to this length instead of the tokenizer's own limit.
    """

    tokenizer: Any = None
    dimension = 0

    def __init__(
        self,
        table_VD: NDArray[Any],
        tokenizer: Any,
        prompts: tuple[str, str] = ("", ""),
        max_tokens: int | None = None,
        name: str = "the model",
        words_to_vectors: float = 1.0,
    ) -> None:
        self._table_VD, self.tokenizer, self.dimension = table_VD, tokenizer, table_VD.shape[1]
        self.prompts, self.name, self.words_to_vectors = Prompts(*prompts), name, words_to_vectors
        tokenizer.no_padding()
        self.limit = (tokenizer.truncation or {}).get("max_length")
        if max_tokens is not None:
            check_max_tokens(max_tokens, self.limit, name)
            self.limit = max_tokens
            truncate(tokenizer, max_tokens)

    @classmethod
    def load(
        cls, folder: Path, max_tokens: int | None = None, prompts: Given = OWN
    ) -> StaticEncoder:
        """Open a static retriever's folder; raises RevelaError if it is damaged."""
        from tokenizers import Tokenizer

        inside, settings = table_folder(folder), folder / "config_sentence_transformers.json"
        assert inside is not None
        try:
            about = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
            width = about.get("truncate_dim")
            tokenizer = Tokenizer.from_file(str(inside / "tokenizer.json"))
            table_VD = _table(inside)[:, :width]
            if tokenizer.get_vocab_size() > len(table_VD):
                raise ValueError(f"tokenizer.json has more tokens than {WEIGHTS} has rows")
            return cls(
                table_VD,
                tokenizer,
                prompts_of(folder, prompts),
                max_tokens,
                str(folder),
                words_to_vectors_of(folder),
            )
        except RevelaError:
            raise
        except Exception as error:  # tokenizers raise no other for a damaged file
            raise RevelaError(
                f"{folder} cannot be opened as a Sentence-Transformers model: {first_line(error)}"
            ) from error

    @functools.cached_property
    def counter(self) -> TokenCounter:
        """Counts tokens as this encoder reads them."""
        return TokenCounter(self.tokenizer, *self.prompts, self.limit, special_tokens=False)

    def batches(self, texts: Sequence[str], role: Role, with_tokens: bool) -> Iterator[Encoded]:
        """Add up the rows of each text's tokens; 0 for a text without tokens."""
        if with_tokens:
            check_tokens()
        table_VD, prompt = self._table_VD, getattr(self.prompts, role)
        if len(texts) >= READ_AHEAD:  # convert rows once, not at every use
            table_VD = fp32(table_VD)
        for start in range(0, len(texts), READ_AHEAD):
            rows = range(start, min(start + READ_AHEAD, len(texts)))
            vectors_BD = np.zeros((len(rows), self.dimension), np.float32)
            for i, ids in enumerate(token_ids(self.tokenizer, [texts[j] for j in rows], prompt)):
                if ids:  # the sum, as vectors are normalised anyway
                    np.add.reduce(fp32(table_VD.take(ids, axis=0)), out=vectors_BD[i])
            norms_B1 = np.linalg.norm(vectors_BD, axis=1, keepdims=True)
            yield Encoded(rows, vectors_BD / np.maximum(norms_B1, 1e-12))  # as torch does


def token_ids(tokenizer: Any, texts: Sequence[str], prompt: str = "") -> Iterator[list[int]]:
    """The token ids of each text, without special tokens."""
    for start in range(0, len(texts), READ_AHEAD):
        part = [prompt + text for text in texts[start : start + READ_AHEAD]]
        for read in tokenizer.encode_batch_fast(part, add_special_tokens=False):
            yield read.ids


def check_tokens() -> NoReturn:
    """Raise QueryError, as there are no token vectors."""
    raise QueryError(
        "this model has no transformer, and so no token vectors: "
        "search without --rerank and --keep-tokens"
    )


def _table(folder: Path) -> NDArray[Any]:
    """The tokens' rows (V, D), memory-mapped, with model2vec's weights and mapping applied."""
    weights = Weights(folder)
    if "embedding.weight" in weights:
        return weights.stored("embedding.weight")
    table_VD = weights.stored("embeddings", integers=True)
    if "mapping" in weights:
        table_VD = table_VD[weights.stored("mapping", integers=True)]
    if "weights" in weights:
        table_VD = fp32(table_VD) * weights.fp32("weights")[:, None]
    return table_VD
