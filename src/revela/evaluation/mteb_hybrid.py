"""Search a task of mteb by BM25 and any encoder of mteb, fused by the rule of fusion.py.

Shapes: Q queries, N documents, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from mteb._create_dataloaders import create_dataloader
from mteb.models.models_protocols import EncoderProtocol
from mteb.types import PromptType
from torch.utils.data import DataLoader

from revela import __version__
from revela.errors import RevelaError
from revela.evaluation.collection import Collection
from revela.evaluation.evaluate import snapshot_of
from revela.evaluation.mteb import MtebEncoder
from revela.index.exact import rankings_of, top_k
from revela.index.fusion import DEPTH
from revela.index.search import MemorySnapshot, Scores, fuse
from revela.types import Encoder, Vectors, check_vectors_finite


class MtebHybrid:
    """BM25 and an encoder's cosines, fused as in ``revela eval``, in mteb's search protocol.

    It ranks the first 200 documents by words and by vectors, or all candidates that the task names.
    The vectors of a corpus are held in memory.

    Args:
        encoder: a dense encoder in mteb's protocol, from ``mteb.get_model`` or
            ``MtebEncoder.load``.
        language: language of the documents, as for ``BM25``.
    """

    _encoder: Encoder
    _ids: list[str]
    _snapshot: MemorySnapshot

    def __init__(self, encoder: Any, language: str = "auto") -> None:
        is_encoder = isinstance(encoder, EncoderProtocol)
        if not is_encoder or "sparse" in encoder.mteb_model_meta.model_type:
            raise RevelaError(
                f"{type(encoder).__name__} is not a dense encoder of mteb: give one of "
                "mteb.get_model or MtebEncoder.load"
            )
        self.encoder, self.language = encoder, language
        meta = encoder.mteb_model_meta
        own = {
            "loader": None,
            "loader_kwargs": {},
            "name": f"revela/hybrid-bm25-{str(meta.name).rpartition('/')[2]}",
            "revision": f"{__version__}-{meta.revision}",
            "adapted_from": meta.name,
            "model_type": ["hybrid"],
            "modalities": ["text"],
        }
        self.mteb_model_meta = meta.model_copy(update=own)

    def index(
        self,
        corpus: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        encode_kwargs: Mapping[str, Any],
        **_: Any,
    ) -> None:
        """Encode a corpus, count its words, and calibrate the fusion of both."""
        documents = _texts(corpus, task_metadata, PromptType.document)
        titles = corpus["title"] if "title" in corpus.column_names else [""] * len(documents)
        titles = [title.strip() for title in titles]
        self._ids = list(corpus["id"])
        if isinstance(self.encoder, MtebEncoder):
            self._encoder = self.encoder.context.into(self.encoder.encoder, documents)
        else:
            part = {"task_metadata": task_metadata, "hf_split": hf_split, "hf_subset": hf_subset}
            self._encoder = _TaskEncoder(self.encoder, part, encode_kwargs)
        collection = Collection(
            task_metadata.name, self._ids, documents, [], [], {}, self.language, titles=titles
        )
        self._snapshot = snapshot_of(collection, self._encoder)

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """The first ``top_k`` documents of each query and their scores, best first; only among
        ``top_ranked`` if given.
        """
        names, texts = list(queries["id"]), _texts(queries, task_metadata, PromptType.query)
        vectors_QD = self._encoder.encode_queries(texts)
        if top_ranked is None:
            sides = self._sides(texts, vectors_QD, DEPTH)
        else:
            among = [frozenset(top_ranked.get(name, ())) for name in names]
            sides = map(self._sides_among, among, texts, vectors_QD)
        run = {}
        for name, text, vector, (near, match) in zip(names, texts, vectors_QD, sides, strict=True):
            scores = fuse(self._snapshot, text, vector, near, match) if near else {}
            run[name] = {self._ids[row]: score for row, score in islice(scores.items(), top_k)}
        return run

    def _sides(
        self, texts: Sequence[str], vectors_QD: Vectors, depth: int
    ) -> Iterable[tuple[Scores, Scores]]:
        """The first documents of each query by vectors, and by BM25 (with a shared word)."""
        dense = rankings_of(*top_k(vectors_QD, self._snapshot.vectors_ND, depth))
        lexical = rankings_of(*self._snapshot.bm25.top_k(texts, depth))
        for near, match in zip(dense, lexical, strict=True):
            yield near, {row: score for row, score in match.items() if score > 0}

    def _sides_among(
        self, ids: frozenset[str], text: str, vector_D: Vectors
    ) -> tuple[Scores, Scores]:
        """Both rankings of one query, of these documents only, at any depth."""
        ((near, match),) = self._sides([text], vector_D[None], len(self._ids))
        near, match = (
            {row: score for row, score in side.items() if self._ids[row] in ids}
            for side in (near, match)
        )
        return near, match


@dataclass(frozen=True)
class _TaskEncoder:
    """An encoder of mteb as an ``Encoder``: with its prompts for the task, and unit vectors.

    Attributes:
        part: metadata, split and subset of a task.
        options: mteb's ``encode_kwargs``.
    """

    encoder: Any
    part: Mapping[str, Any]
    options: Mapping[str, Any]

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        return self._encode(texts, PromptType.query)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        return self._encode(texts, PromptType.document)

    def _encode(self, texts: Sequence[str], prompt_type: Any) -> Vectors:
        rows: Any = Dataset.from_dict({"text": list(texts)})
        inputs = DataLoader(rows, self.options.get("batch_size", 32))
        found = self.encoder.encode(inputs, prompt_type=prompt_type, **self.part, **self.options)
        vectors_ND: Vectors = F.normalize(torch.as_tensor(found).float().cpu(), dim=1).numpy()
        check_vectors_finite(vectors_ND, str(self.encoder.mteb_model_meta.name))
        return vectors_ND


def _texts(rows: Any, task_metadata: Any, prompt_type: Any) -> list[str]:
    """Documents with their titles before them, or queries with their instructions after them, as
    all of mteb's encoders read them.
    """
    loader = create_dataloader(rows, task_metadata=task_metadata, prompt_type=prompt_type)
    return list(loader.dataset["text"])
