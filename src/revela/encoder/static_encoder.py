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
from tqdm import tqdm

from revela.encoder.prompts import OWN, Given, prompts_of
from revela.encoder.saved_config import words_to_vectors_of
from revela.encoder.token_counter import TokenCounter, check_max_tokens, truncate
from revela.encoder.weights import Weights, fp32
from revela.errors import QueryError, RevelaError, first_line
from revela.model_files import modules_of
from revela.silence import SHOWN_AFTER
from revela.types import Vectors, check_vectors_finite, sequence_of

READ_AHEAD = 1024  # texts that are tokenized at once
WEIGHTS = "model.safetensors"


def is_static(folder: Path) -> bool:
    """Whether a folder holds a static retriever with its table in safetensors."""
    return _table_folder(folder) is not None


def gives_tokens(folder: Path) -> bool:
    """Whether a retriever has token vectors for comparing queries and passages."""
    kinds = [kind for kind, _ in modules_of(folder)]
    return kinds[:1] == ["Transformer"] and not {"Router", "Asym"} & {*kinds}


def _table_folder(folder: Path) -> Path | None:
    """The folder of a static retriever's table and tokenizer; None for other models."""
    modules = modules_of(folder)
    if [kind for kind, _ in modules] not in (["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
        return None
    inside = modules[0][1]
    return inside if (inside / WEIGHTS).is_file() else None


class StaticEncoder:
    """The encoder of a static retriever; it refuses to give token vectors. Threads may share it.

    Args:
        table_VD: floats, or the bits of bf16.
        tokenizer: a tokenizer of the ``tokenizers`` library.
        max_tokens: truncate texts to this length instead of the tokenizer's own limit.
    """

    slots, precision = 0, "fp32"

    def __init__(
        self,
        table_VD: NDArray[Any],
        tokenizer: Any,
        query_prompt: str = "",
        passage_prompt: str = "",
        max_tokens: int | None = None,
        name: str = "the model",
        words_to_vectors: float = 1.0,
    ) -> None:
        self.name, self._table_VD, self._tokenizer = name, table_VD, tokenizer
        self.words_to_vectors = words_to_vectors
        self.query_prompt, self.passage_prompt = query_prompt, passage_prompt
        tokenizer.no_padding()
        self._limit: int | None = (tokenizer.truncation or {}).get("max_length")
        if max_tokens is not None:
            check_max_tokens(max_tokens, self._limit, name)
            self._limit = max_tokens
            truncate(tokenizer, max_tokens)

    @classmethod
    def load(
        cls, folder: Path, max_tokens: int | None = None, prompts: Given = OWN
    ) -> StaticEncoder:
        """Open a static retriever's folder; raises RevelaError if it is damaged."""
        from tokenizers import Tokenizer

        inside, settings = _table_folder(folder), folder / "config_sentence_transformers.json"
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
                *prompts_of(folder, prompts),
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

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """Encode queries, (N, D) float32; 0 for a text without tokens. Raises RevelaError for
        infinity and NaN.
        """
        return self._encode(texts, self.query_prompt, progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """``encode_queries``, but for passages."""
        return self._encode(texts, self.passage_prompt, progress)

    def encode_with_tokens(self, texts: Sequence[str], progress: bool = False) -> NoReturn:
        """Raise QueryError: a token's row has no more information than its word."""
        check_tokens()

    def query_tokens(self, queries: Sequence[str]) -> NoReturn:
        """Raise QueryError."""
        check_tokens()

    def fitted(self, heads: Sequence[str], texts: Sequence[str], part: int = 1) -> list[list[str]]:
        """``LimitedEncoder.fitted``."""
        return self.counter.fitted(heads, texts, self._limit, part)

    @functools.cached_property
    def counter(self) -> TokenCounter:
        """Counts tokens as this encoder reads them."""
        prompts = self.query_prompt, self.passage_prompt
        return TokenCounter(self._tokenizer, *prompts, self._limit, special_tokens=False)

    def _encode(self, texts: Sequence[str], prompt: str, progress: bool) -> Vectors:
        table_VD, texts = self._table_VD, sequence_of(texts)
        if len(texts) >= READ_AHEAD:  # convert rows once, not at every use
            table_VD = fp32(table_VD)
        vectors_ND = np.zeros((len(texts), table_VD.shape[1]), np.float32)
        how: dict[str, Any] = dict(total=len(texts), unit="text", disable=not progress)
        with tqdm(**how, delay=SHOWN_AFTER, leave=False) as bar:
            for i, ids in enumerate(token_ids(self._tokenizer, texts, prompt)):
                if ids:  # the sum, as vectors are normalised anyway
                    np.add.reduce(fp32(table_VD.take(ids, axis=0)), out=vectors_ND[i])
                bar.update()
        check_vectors_finite(vectors_ND, self.name)
        norms_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
        vectors_ND /= np.maximum(norms_N1, 1e-12)  # as torch does
        return vectors_ND


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
