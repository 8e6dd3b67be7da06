"""Texts -> unit vectors, by a Sentence-Transformers model.

Batches hold texts of like length and a number of tokens, not of texts; padding is not computed.

Shapes: N texts, B texts of a batch, T tokens of a text, D numbers of a text's vector, W of a
token's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor
from tqdm import tqdm

from revela.device import autocast, on_cpu, sent, uses_bf16
from revela.encoder.prompts import OWN, Given
from revela.encoder.saved_config import words_to_vectors_of
from revela.encoder.static_encoder import check_tokens
from revela.encoder.token_counter import TokenCounter
from revela.errors import QueryError, RevelaError
from revela.packing import packed
from revela.retriever.build import load_retriever
from revela.retriever.context import (
    ContextEncoder,
    filled,
    load_context_encoder,
    read_as_text,
    slot_ids,
)
from revela.retriever.routes import Task, routed
from revela.retriever.static_trainable import TrainableTable
from revela.retriever.tokens import TokenWindow
from revela.settings import Precision
from revela.silence import SHOWN_AFTER, silence_libraries
from revela.types import QueryTokens, Vectors, check_vectors_finite

# A GPU would wait for the launch of each layer's kernels; more would not fit where attention falls
# back to explicit scores.
TOKENS_PER_BATCH, TOKENS_ON_A_GPU = 8192, 32768
READ_AHEAD = 4096  # texts that are tokenized, and sorted by length, at once


def query_prompt_of(model: SentenceTransformer) -> str:
    """The prompt of a model's queries; "" if it has none."""
    return model.prompts.get("query") or ""


def passage_prompt_of(model: SentenceTransformer) -> str:
    """The prompt of a model's passages, under either of the two names in use; "" if it has none."""
    return model.prompts.get("document") or model.prompts.get("passage") or ""


def token_limit(model: SentenceTransformer) -> int | None:
    """The maximum number of tokens that a model reads of a text; None: all."""
    if isinstance(model[0], modules.StaticEmbedding):  # whose max_seq_length is infinity
        return (model.tokenizer.truncation or {}).get("max_length")
    limit: int | None = model.max_seq_length
    return limit


def _truncate(model: SentenceTransformer, limit: int | None) -> None:
    """Set a model's ``token_limit``."""
    if not isinstance(model[0], modules.StaticEmbedding):
        model.max_seq_length = limit
    elif limit is None:
        model.tokenizer.no_truncation()
    else:
        model.tokenizer.enable_truncation(limit)


class RetrieverEncoder:
    """The ``TokenEncoder`` of a Sentence-Transformers model: prompts by role, finite unit vectors.

    Threads may share it; they encode one after another.

    Args:
        bf16: run the transformer, if there is one, under bf16 autocast.
        max_tokens: truncate texts here instead of at the model's own limit; slots do not count.
        name: of the model, for messages.
        context_encoder: makes contexts for a model with slots.

    Attributes:
        model: reads passages.
        query_model: reads queries; the same, but of a model with routes (routes.py). Tokens are
            counted as ``model`` reads them.
        slots: documents that the model reads as its context; 0: none.
        words_to_vectors: see ``words_to_vectors_of``.
    """

    words_to_vectors = 1.0

    def __init__(
        self,
        model: SentenceTransformer,
        bf16: bool,
        max_tokens: int | None = None,
        name: str = "the model",
        context_encoder: ContextEncoder | None = None,
    ) -> None:
        self.model, self.query_model = routed(model, "document"), routed(model, "query")
        both = self.model, self.query_model
        self.bf16 = bf16 and any(isinstance(each[0], modules.Transformer) for each in both)
        self.max_tokens, self.name = max_tokens, name
        self.context_encoder, self.slots = context_encoder, len(slot_ids(self.model))
        self._rows: Callable[[], Tensor] | None = None
        self._lock = threading.Lock()  # encoding changes the model while it lasts

    @classmethod
    def load(
        cls,
        folder: Path,
        precision: Precision,
        max_tokens: int | None = None,
        prompts: Given = OWN,
    ) -> RetrieverEncoder:
        """Open a saved retriever, or any Sentence-Transformers folder (``load_encoder``)."""
        silence_libraries()
        model = load_retriever(folder, prompts=prompts)
        bf16 = uses_bf16(precision, model.device)
        encoder = cls(model, bf16, max_tokens, str(folder), load_context_encoder(folder))
        encoder.words_to_vectors = words_to_vectors_of(folder)
        return encoder

    @property
    def precision(self) -> str:
        """ "bf16" or "fp32"."""
        return "bf16" if self.bf16 else "fp32"

    def with_context(self, rows: Tensor | Callable[[], Tensor]) -> RetrieverEncoder:
        """The same encoder with another context (J, D) in its slots, or a function that gives it
        whenever texts are encoded. Both encoders may be used by turns.
        """
        other = copy.copy(self)  # shares the model and its lock
        other._rows = rows if callable(rows) else lambda: rows
        return other

    def with_context_of(self, texts: Sequence[str]) -> RetrieverEncoder:
        """The same encoder with the context of these texts, if it has slots."""
        return self.with_context(self.context_of(texts)) if self.slots else self

    def context_of(self, texts: Sequence[str]) -> Tensor:
        """The context (J, D) of the first J texts."""
        if self.context_encoder is None:
            raise RevelaError(
                f"{self.name} has slots for a context, but no first stage (context/): copy the "
                "whole folder of the retriever"
            )
        return self.context_encoder.of_texts(texts)

    def saved_context(self) -> Tensor:
        """The context (J, D) in the model's own table."""
        ids, table = slot_ids(self.model), self.model[0].model.get_input_embeddings().weight
        rows_JD: Tensor = table[ids.start : ids.stop].detach().float().cpu().clone()
        return rows_JD

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32. Raises RevelaError for infinity and NaN."""
        return self._encode(texts, "query", progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """``encode_queries``, but as passages."""
        return self._encode(texts, "document", progress)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """``encode_passages``, and each passage's unit token vectors, (T, W) float32.

        They are the states of the transformer's last layer, without prompts and special tokens, put
        through the linear layer after the pooling where the model has one.
        """
        tokens: list[Vectors] = [np.empty(0, np.float32)] * len(texts)
        return self._encode(texts, "document", progress, tokens), tokens

    def query_tokens(self, queries: Sequence[str]) -> list[QueryTokens]:
        """``encode_queries``, and the queries' token vectors as above, from the same pass."""
        tokens: list[Vectors] = [np.empty(0, np.float32)] * len(queries)
        tokenizer, prompt = self.model.tokenizer, query_prompt_of(self.model)
        vectors_ND = self._encode(queries, "query", False, tokens)
        read = tokenizer([prompt + query for query in queries], return_offsets_mapping=True)
        special, begin = set(tokenizer.all_special_ids), _prompt_length(self.model, prompt)
        encoded = []
        for i, (vector_D, tokens_TW) in enumerate(zip(vectors_ND, tokens, strict=True)):
            places = zip(read["input_ids"][i], read["offset_mapping"][i], strict=True)
            spans = [
                (max(0, start - len(prompt)), end - len(prompt))
                for token, (start, end) in places
                if token not in special
            ]
            encoded.append(QueryTokens(vector_D, tokens_TW, spans[begin:][: len(tokens_TW)]))
        return encoded

    def fitted(self, heads: Sequence[str], texts: Sequence[str], part: int = 1) -> list[list[str]]:
        """``LimitedEncoder.fitted``."""
        return self.counter.fitted(heads, texts, self._limit(self.counter.limit), part)

    @functools.cached_property
    def counter(self) -> TokenCounter:
        """Counts tokens as the model reads them, without ``max_tokens``."""
        return counter_of(self.model)

    @torch.inference_mode()
    def _encode(
        self, texts: Sequence[str], task: Task, progress: bool, tokens: list[Vectors] | None = None
    ) -> Vectors:
        """The texts' vectors (N, D); writes token vectors into ``tokens``."""
        model = self.query_model if task == "query" else self.model
        prompt = query_prompt_of(model) if task == "query" else passage_prompt_of(model)
        is_transformer = isinstance(model[0], modules.Transformer)
        if tokens is not None:
            self._check_tokens()
        with (
            self._lock,
            self._settings(model),
            without_padding(model),
            transformer_in_bf16(model, self.bf16 and is_transformer),
            filled(model, self._rows()) if self._rows else contextlib.nullcontext(),
        ):
            if is_transformer:
                vectors_ND = _in_batches(model, texts, prompt, progress, tokens, self.slots)
            else:
                progress = progress and not isinstance(model[0], TrainableTable)
                how: dict[str, Any] = dict(show_progress_bar=progress, normalize_embeddings=True)
                vectors = model.encode(list(texts), prompt=prompt, **how)
                vectors_ND = np.asarray(vectors, dtype=np.float32)
        check_vectors_finite(vectors_ND, self.name)
        return vectors_ND

    def _check_tokens(self) -> None:
        """Refuse token vectors if there are none, or those of queries are of another model."""
        if self.query_model is not self.model:
            raise QueryError(
                "this model reads queries and passages by different modules, whose token vectors "
                "cannot be compared: search without --rerank and --keep-tokens"
            )
        if not isinstance(self.model[0], modules.Transformer):
            check_tokens()

    @contextlib.contextmanager
    def _settings(self, model: SentenceTransformer) -> Iterator[None]:
        """While open, the model truncates texts at ``max_tokens`` and has no dropout."""
        training, limit = model.training, token_limit(model)
        if self.max_tokens is not None:
            _truncate(model, self._limit(limit))
        model.eval()
        try:
            yield
        finally:
            if self.max_tokens is not None:
                _truncate(model, limit)
            model.train(training)

    def _limit(self, own: int | None) -> int | None:
        """The maximum number of tokens that is read of a text, given the model's own; None: all."""
        if self.max_tokens is None:
            return own
        limit = self.max_tokens + self.slots
        return min(limit, own or limit)


def _in_batches(
    model: SentenceTransformer,
    texts: Sequence[str],
    prompt: str,
    progress: bool,
    tokens: list[Vectors] | None,
    slots: int,
) -> Vectors:
    """The vectors (N, D) of a transformer; see ``RetrieverEncoder._encode``."""
    transformer, *rest = model
    width = model.get_embedding_dimension()  # maybe of the first numbers only
    vectors_ND = np.empty((len(texts), width), dtype=np.float32)
    read = read_as_text(texts) if slots else texts
    how: dict[str, Any] = dict(total=len(texts), unit="text", disable=not progress)
    with tqdm(**how, delay=SHOWN_AFTER, leave=False) as bar:
        for indices, features in token_batches(model, read, prompt):
            features = transformer(features)
            if tokens is not None:
                token_vectors = _token_vectors(model, features, prompt)
                for i, vectors_TW in zip(indices, token_vectors, strict=True):
                    tokens[i] = vectors_TW
            for module in rest:
                features = module(features)
            vectors_ND[indices] = unit_vectors(features, width).cpu()
            bar.update(len(indices))
    return vectors_ND


def unit_vectors(features: dict[str, Any], width: int | None) -> Tensor:
    """What a model makes of texts, cut to ``width`` numbers and of length one, (B, D) in fp32."""
    return F.normalize(features["sentence_embedding"][:, :width].float(), dim=1)


def _token_vectors(
    model: SentenceTransformer, features: dict[str, Any], prompt: str
) -> list[Vectors]:
    """The token vectors of a batch after the transformer; see ``encode_with_tokens``."""
    ids_BT, vectors_BTW = on_cpu(features["input_ids"]), features["token_embeddings"]
    special = torch.tensor(model.tokenizer.all_special_ids)
    kept_BT = on_cpu(features["attention_mask"]).bool() & ~torch.isin(ids_BT, special)
    kept_BT &= kept_BT.cumsum(dim=1) > _prompt_length(model, prompt)
    places = sent(kept_BT.flatten().nonzero().squeeze(1), vectors_BTW.device)
    unit = unit_token_vectors(model, vectors_BTW.flatten(0, 1)[places]).cpu()
    return [rows_TW.numpy() for rows_TW in torch.split(unit, kept_BT.sum(dim=1).tolist())]


def unit_token_vectors(model: SentenceTransformer, vectors: Tensor) -> Tensor:
    """A transformer's token states (..., W) as late interaction reads them, in fp32."""
    after_pooling = dropwhile(lambda part: not isinstance(part, modules.Pooling), model)
    linear = next((part.linear for part in after_pooling if isinstance(part, modules.Dense)), None)
    if linear is not None and linear.in_features == vectors.shape[-1]:
        vectors = linear(vectors)
    return F.normalize(vectors.float(), dim=-1)


def _prompt_length(model: SentenceTransformer, prompt: str) -> int:
    """A prompt's tokens; the space at its end belongs to the text."""
    if not prompt:
        return 0
    return len(model.tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"])


def token_batches(
    model: SentenceTransformer, texts: Sequence[str], prompt: str
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """(indices of texts, features on the model's device) of texts of like length, longest first."""
    max_tokens = TOKENS_PER_BATCH if model.device.type == "cpu" else TOKENS_ON_A_GPU
    by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(by_length), READ_AHEAD):
        window = by_length[start : start + READ_AHEAD]
        # An empty text has no token to pool.
        read = [texts[i] if texts[i].strip() else "." for i in window]
        features = model.preprocess(read, prompt=prompt or None)
        mask_NL = features["attention_mask"]
        tokens = mask_NL.sum(dim=1)
        order = tokens.argsort(descending=True, stable=True).tolist()
        padded_right = bool(mask_NL[:, 0].all())
        while order:
            longest = int(tokens[order[0]])
            size = max(1, max_tokens // longest)
            rows, order = order[:size], order[size:]
            columns = slice(0, longest) if padded_right else slice(mask_NL.shape[1] - longest, None)
            batch = dict(features)
            for name, value in features.items():
                if isinstance(value, Tensor):
                    ours = value[rows][:, columns] if value.shape == mask_NL.shape else value
                    batch[name] = sent(ours, model.device)
            yield [window[i] for i in rows], batch


def token_window(model: SentenceTransformer, name: str, max_tokens: int) -> TokenWindow:
    """The window of a retriever: ``max_tokens``, or the model's own limit if that is lower."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        raise RevelaError(
            f"{name} has no fast tokenizer of transformers, so tokens have no character offsets: "
            "probe another model"
        )
    limit = max_tokens + len(slot_ids(model))  # slots do not count as text
    limit = min(limit, model.max_seq_length or limit)
    prompts = (query_prompt_of(model), passage_prompt_of(model))
    return TokenWindow(tokenizer, limit - max(len(tokenizer(p)["input_ids"]) for p in prompts))


def counter_of(model: SentenceTransformer) -> TokenCounter:
    """Counts tokens as a model reads them."""
    tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    prompts = query_prompt_of(model), passage_prompt_of(model)
    as_text = read_as_text if slot_ids(model) else list
    return TokenCounter(tokenizer, *prompts, token_limit(model), as_text=as_text)


@contextlib.contextmanager
def transformer_in_bf16(model: SentenceTransformer, bf16: bool) -> Iterator[None]:
    """While open, the model's transformer runs under bf16 autocast, if ``bf16``, and gives fp32.

    The modules after it stay in fp32: they cost little, and bf16 would lose much.
    """
    if not bf16:
        yield
        return
    opened: list[torch.autocast] = []

    def begin(_module: Any, inputs: tuple[dict[str, Any]]) -> None:
        opened.append(autocast(inputs[0]["input_ids"].device, True))
        opened[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(_module: Any, _inputs: Any, features: dict[str, Any] | None) -> dict[str, Any]:
        opened.pop().__exit__(None, None, None)
        return {
            name: value.float() if getattr(value, "dtype", None) == torch.bfloat16 else value
            for name, value in (features or {}).items()
        }

    with (
        model[0].register_forward_pre_hook(begin),
        model[0].register_forward_hook(end, prepend=True, always_call=True),
    ):
        yield


def without_padding(model: SentenceTransformer) -> contextlib.AbstractContextManager[None]:
    """While open, the model's transformer computes nothing on padding, if it can."""
    if isinstance(model[0], modules.Transformer):
        return packed(model[0].model)
    return contextlib.nullcontext()
