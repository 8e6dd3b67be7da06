"""Encode by onnxruntime, without torch: what onnx_export.py exports, or keeps in the cache.

Shapes: N texts, B texts of a batch, L tokens, D width of the vectors; T tokens of a text without
prompt and special ones, W numbers of a token's vector.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from revela.embedded import cache_folder
from revela.encoder.saved_config import words_to_vectors_of
from revela.encoder.token_counter import Spans, TokenCounter
from revela.errors import RevelaError, extra, first_line
from revela.model_files import fingerprint
from revela.types import QueryTokens, TokenEncoder, Vectors, check_vectors_finite

MODEL, TOKENIZER, CONFIG = "model.onnx", "tokenizer.json", "retriever.json"
INPUTS = ("input_ids", "attention_mask")
OUTPUT, TOKENS = "sentence_embedding", "token_embeddings"
VERSION = 2  # of the copies: since 2 with token vectors
BATCH = 32  # texts


def copy_folder(digest: str) -> Path:
    """The cache folder for the copy of a retriever with this fingerprint."""
    return cache_folder() / "onnx" / f"{digest}-{VERSION}"


def cached_copy(model: Path) -> OnnxEncoder | None:
    """The encoder of a retriever's copy, if there is one and onnxruntime is installed.

    Raises:
        RevelaError: the copy is damaged.
    """
    folder = copy_folder(fingerprint(model))
    if not folder.is_dir() or importlib.util.find_spec("onnxruntime") is None:
        return None
    try:
        encoder = OnnxEncoder(folder)
    except Exception as error:  # onnxruntime and tokenizers raise no other
        raise RevelaError(
            f"{folder} cannot be read ({first_line(error)}): remove it, and torch is used instead"
        ) from error
    encoder.name, encoder.words_to_vectors = str(model), words_to_vectors_of(model)
    return encoder


class OnnxEncoder:
    """The ``Encoder`` of an exported folder; a ``TokenEncoder`` of a copy in the cache.

    Threads may share it. ``threads`` of 0 are all cores.
    """

    name, words_to_vectors, slots = "the model", 1.0, 0

    def __init__(self, folder: Path, threads: int = 0) -> None:
        with extra("onnx", "an ONNX model"):
            import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        # Threads that do not spin while they wait halve the CPU time of a query.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            str(folder / MODEL), options, providers=["CPUExecutionProvider"]
        )
        self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self.config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        self.prompts: dict[str, str] = self.config["prompts"]

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of length one."""
        return self._encode(texts, self.prompts["query"], progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of length one."""
        return self._encode(texts, self.prompts["passage"], progress)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """``encode_passages``, and each passage's token vectors (T, W)."""
        tokens: list[Tokens] = [(np.empty(0, np.float32), [])] * len(texts)
        vectors_ND = self._encode(texts, self.prompts["passage"], progress, tokens)
        return vectors_ND, [vectors_TW for vectors_TW, _ in tokens]

    def query_tokens(self, queries: Sequence[str]) -> list[QueryTokens]:
        """``encode_queries``, and the queries' token vectors, from the same pass."""
        tokens: list[Tokens] = [(np.empty(0, np.float32), [])] * len(queries)
        prompt = self.prompts["query"]
        vectors_ND = self._encode(queries, prompt, False, tokens)
        encoded = []
        for vector_D, (vectors_TW, spans) in zip(vectors_ND, tokens, strict=True):
            in_query = [(max(0, a - len(prompt)), b - len(prompt)) for a, b in spans]
            encoded.append(QueryTokens(vector_D, vectors_TW, in_query))
        return encoded

    def fitted(self, heads: Sequence[str], texts: Sequence[str], part: int = 1) -> list[list[str]]:
        """``LimitedEncoder.fitted``."""
        return self.counter.fitted(heads, texts, self.counter.limit, part)

    @functools.cached_property
    def counter(self) -> TokenCounter:
        """Counts tokens as this encoder reads them."""
        prompts = self.prompts["query"], self.prompts["passage"]
        return TokenCounter(self.tokenizer, *prompts, self.config["max_tokens"])

    def _encode(
        self, texts: Sequence[str], prompt: str, progress: bool, tokens: list[Tokens] | None = None
    ) -> Vectors:
        """The texts' vectors (N, D); writes token vectors into ``tokens``."""
        vectors_ND = np.empty((len(texts), self.config["dimension"]), dtype=np.float32)
        if "<|" in prompt:  # maybe the slots of a context
            from revela.retriever.context import STEM, read_as_text

            texts = read_as_text(texts) if STEM in prompt else texts
        by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in tqdm(range(0, len(texts), BATCH), unit="batch", disable=not progress):
            rows = by_length[start : start + BATCH]
            # An empty text has no token to pool.
            read = [prompt + (texts[i] if texts[i].strip() else ".") for i in rows]
            encodings = self.tokenizer.encode_batch(read)
            ids_BL = np.array([e.ids for e in encodings], np.int64)
            mask_BL = np.array([e.attention_mask for e in encodings], np.int64)
            inputs = dict(zip(INPUTS, (ids_BL, mask_BL), strict=True))
            if tokens is None:
                (vectors_ND[rows],) = self.session.run([OUTPUT], inputs)
            else:
                vectors_ND[rows], tokens_BLW = self.session.run([OUTPUT, TOKENS], inputs)
                for i, *read_by in zip(rows, encodings, tokens_BLW, strict=True):
                    tokens[i] = self._tokens_of_text(prompt, *read_by)
        check_vectors_finite(vectors_ND, self.name)
        return vectors_ND

    def _tokens_of_text(self, prompt: str, encoding: Any, vectors_LW: Vectors) -> Tokens:
        """A text's tokens, without padding, special tokens and prompt."""
        # The space at the end of a prompt belongs to the text.
        special, begin = self.config["special_tokens"], prompt.rstrip()
        kept_L = np.array(encoding.attention_mask, bool) & ~np.isin(encoding.ids, special)
        kept_T = kept_L.nonzero()[0]
        kept_T = kept_T[len(self.tokenizer.encode(begin, add_special_tokens=False)) :]
        return vectors_LW[kept_T], [encoding.offsets[place] for place in kept_T]


class OnnxForQueries:
    """The encoder of a service: queries by an ONNX copy, passages by the retriever itself.

    One query takes the copy half of torch's time; many passages take torch half of the copy's.
    ``load`` gives the retriever.
    """

    def __init__(self, copy: OnnxEncoder, load: Callable[[], TokenEncoder]) -> None:
        self.encode_queries, self.query_tokens = copy.encode_queries, copy.query_tokens
        self.counter, self._load = copy.counter, load

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of length one."""
        return self._load().encode_passages(texts, progress)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """``encode_passages``, and each passage's token vectors (T, W)."""
        return self._load().encode_with_tokens(texts, progress)


Tokens = tuple[Vectors, Spans]
"""The vectors of a text's tokens (T, W), and where the tokens are in prompt and text."""
