from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor
from tqdm import tqdm

from revela.device import autocast, uses_bf16
from revela.errors import RevelaError
from revela.packing import packed
from revela.retriever.build import load_retriever
from revela.settings import Precision
from revela.silence import silence_libraries
from revela.types import Vectors

if TYPE_CHECKING:
    pass


TOKENS_A_BATCH, READ_AHEAD = 8192, 4096  # of encoding; texts that are tokenized and sorted at once


def query_prompt_of(model: SentenceTransformer) -> str:
    """What this model puts before queries; "" if nothing."""
    return model.prompts.get("query") or ""


def passage_prompt_of(model: SentenceTransformer) -> str:
    """What this model puts before passages, under either of the two names in use; "" if nothing."""
    return model.prompts.get("document") or model.prompts.get("passage") or ""


class RetrieverEncoder:
    """The ``Encoder`` of a Sentence-Transformers model: prompts by role, unit vectors, bf16 where
    the hardware has it.

    Args:
        model: any Sentence-Transformers model.
        bf16: run the transformer under bf16 autocast.
        max_tokens: cut texts here instead of at the model's own limit.
    """

    def __init__(
        self, model: SentenceTransformer, bf16: bool, max_tokens: int | None = None
    ) -> None:
        self.model, self.bf16, self.max_tokens = model, bf16, max_tokens
        self._lock = threading.Lock()  # reading changes the model for as long as it takes

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of these texts as queries."""
        return self._encode(texts, query_prompt_of(self.model), progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of these texts as passages."""
        return self._encode(texts, passage_prompt_of(self.model), progress)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """What ``encode_passages`` gives, and each passage's token vectors, (T, W) float32 of
        length one, from the same reading.

        Token vectors are those of the transformer's last layer, put through the linear layer after
        the pooling where the model has one (the mean of a text's tokens goes through it too).
        Prompts and special tokens are left out.

        Raises:
            RevelaError: the model has no transformer, and so no tokens that know of one another.
        """
        tokens: list[Vectors] = [np.empty(0, np.float32)] * len(texts)
        return self._encode(texts, passage_prompt_of(self.model), progress, tokens), tokens

    def query_tokens(self, query: str) -> tuple[Vectors, list[tuple[int, int]]]:
        """A query's token vectors, as above, and where in the query each token stands, (first, past
        the last) character.
        """
        tokens = [np.empty(0, np.float32)]
        self._encode([query], query_prompt_of(self.model), False, tokens)
        prompt = query_prompt_of(self.model)
        read = self.model.tokenizer(prompt + query, return_offsets_mapping=True)
        special = set(self.model.tokenizer.all_special_ids)
        spans = [
            span
            for i, span in zip(read["input_ids"], read["offset_mapping"], strict=True)
            if i not in special
        ]
        spans = spans[_prompted(self.model, prompt) :][: len(tokens[0])]
        return tokens[0], [
            (max(0, first - len(prompt)), past - len(prompt)) for first, past in spans
        ]

    @torch.inference_mode()
    def _encode(
        self, texts: Sequence[str], prompt: str, progress: bool, tokens: list[Vectors] | None = None
    ) -> Vectors:
        model = self.model
        with self._lock, self._reading(), autocast(model.device, self.bf16), without_padding(model):
            if not isinstance(
                model[0], modules.Transformer
            ):  # static embeddings and the like have their own features
                if tokens is not None:
                    raise RevelaError(
                        "this model has no transformer, and so no token vectors: search without --rerank and --keep-tokens"
                    )
                return np.asarray(
                    model.encode(list(texts), prompt=prompt, show_progress_bar=progress),
                    dtype=np.float32,
                )
            width = model.get_embedding_dimension()
            vectors_ND = np.empty((len(texts), width), dtype=np.float32)
            with tqdm(total=len(texts), unit="text", disable=not progress) as bar:
                for indices, features in token_batches(model, texts, prompt):
                    transformer, *rest = model
                    features = transformer(features)
                    if tokens is not None:
                        for i, vectors_TW in zip(
                            indices, _token_vectors(model, features, prompt), strict=True
                        ):
                            tokens[i] = vectors_TW
                    for module in rest:
                        features = module(features)
                    vectors_ND[indices] = (
                        features["sentence_embedding"][:, :width].float().cpu().numpy()
                    )
                    bar.update(len(indices))
            return vectors_ND

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """While open, texts are cut at ``max_tokens`` and nothing is dropped out."""
        model, training, limit = self.model, self.model.training, self.model.max_seq_length
        if self.max_tokens is not None:
            model.max_seq_length = min(self.max_tokens, limit or self.max_tokens)
        model.eval()
        try:
            yield
        finally:
            if self.max_tokens is not None:  # static embeddings have no such thing to set
                model.max_seq_length = limit
            model.train(training)


def _token_vectors(
    model: SentenceTransformer, features: dict[str, Any], prompt: str
) -> list[Vectors]:
    """The token vectors of each text of a batch that the transformer has read; see
    ``encode_with_tokens``.
    """
    ids_BT, vectors_BTW = features["input_ids"], features["token_embeddings"]
    special = torch.tensor(model.tokenizer.all_special_ids, device=ids_BT.device)
    kept_BT = features["attention_mask"].bool() & ~torch.isin(ids_BT, special)
    kept_BT &= kept_BT.cumsum(dim=1) > _prompted(model, prompt)
    pooling = next(
        (i for i, module in enumerate(model) if isinstance(module, modules.Pooling)), len(model)
    )
    linear = next((m.linear for m in list(model)[pooling:] if isinstance(m, modules.Dense)), None)
    rows = []
    for vectors_TW, kept_T in zip(vectors_BTW, kept_BT, strict=True):
        found_TW = vectors_TW[kept_T]
        if linear is not None and linear.in_features == found_TW.shape[1]:
            found_TW = linear(found_TW)
        rows.append(torch.nn.functional.normalize(found_TW.float(), dim=1).cpu().numpy())
    return rows


def _prompted(model: SentenceTransformer, prompt: str) -> int:
    """How many tokens a prompt is; the space at its end belongs to the text."""
    return (
        len(model.tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"])
        if prompt
        else 0
    )


def load_encoder(
    folder: Path, precision: Precision, max_tokens: int | None = None
) -> RetrieverEncoder:
    """The encoder of a saved retriever, or of any Sentence-Transformers folder."""
    silence_libraries()
    model = load_retriever(folder)
    return RetrieverEncoder(model, uses_bf16(precision, model.device), max_tokens)


def token_batches(
    model: SentenceTransformer, texts: Sequence[str], prompt: str
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Texts of like length together, as many as the token budget holds; (their indices, features),
    longest first.
    """
    by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(by_length), READ_AHEAD):
        window = by_length[start : start + READ_AHEAD]
        # An empty text has no token to pool.
        features = model.preprocess(
            [texts[i] if texts[i].strip() else "." for i in window], prompt=prompt or None
        )
        mask_NL = features["attention_mask"]
        tokens = mask_NL.sum(dim=1)
        order = tokens.argsort(descending=True, stable=True).tolist()
        while order:
            longest = int(tokens[order[0]])
            size = max(1, TOKENS_A_BATCH // longest)
            rows, order = order[:size], order[size:]
            columns = (
                slice(0, longest)
                if bool(mask_NL[:, 0].all())
                else slice(mask_NL.shape[1] - longest, None)
            )
            batch = {
                k: v[rows][:, columns] if isinstance(v, Tensor) and v.shape == mask_NL.shape else v
                for k, v in features.items()
            }
            yield (
                [window[i] for i in rows],
                {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()},
            )


def without_padding(model: SentenceTransformer) -> contextlib.AbstractContextManager[None]:
    """While open, the model's transformer spends nothing on padding, if it can be run so."""
    return (
        packed(model[0].model)
        if isinstance(model[0], modules.Transformer)
        else contextlib.nullcontext()
    )
