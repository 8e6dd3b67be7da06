"""The context that a retriever with slots reads (CDE; retriever/context.py).

An index owns its context: drawn once from its documents, saved as ``context.safetensors`` in its
folder, and read before every document and query. Vectors from different contexts are not
comparable.

Shapes: J slots, D width of the retriever's embedding table.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from revela.corpus.chunk import chunk
from revela.errors import RevelaError
from revela.files import atomic_write
from revela.index.manifest import CONTEXT, CONTEXT_CHOICES
from revela.types import Document, Encoder, Vectors, items_of

if TYPE_CHECKING:
    from revela.retriever.encode import RetrieverEncoder


@dataclass(frozen=True)
class Context:
    """The documents for a contextual retriever's slots.

    ``kind`` is "corpus" (texts drawn from the corpus), "saved" (what the retriever was saved with),
    "none" (no documents) or "texts" (a user's own).
    """

    kind: str
    texts: tuple[str, ...] | None = None  # None: not drawn yet
    seed: int = 0  # of the draw

    @classmethod
    def of(cls, choice: Context | str | Sequence[str], seed: int = 0) -> Context:
        """From "corpus", "saved", "none", a file with a text per line, or texts."""
        if isinstance(choice, Context):
            return choice
        if isinstance(choice, str) and choice in ("corpus", "saved", "none"):
            return cls(choice, seed=seed)
        lines = _lines_of(choice) if isinstance(choice, str) else items_of(choice, "context")
        if not (texts := tuple(text for text in lines if text.strip())):
            raise RevelaError(
                f"the context {choice} has no text: give a file with a text per line, or corpus"
            )
        return cls("texts", texts)

    def drawn(self, draw: Callable[[], Sequence[str]]) -> Context:
        """With texts from ``draw``, if it is of the corpus and has none yet."""
        is_needed = self.kind == "corpus" and self.texts is None
        return replace(self, texts=tuple(draw())) if is_needed else self

    def rows(self, encoder: Encoder) -> Vectors:
        """The context vectors of a contextual encoder, (J, D). The texts must be drawn."""
        reader = contextual(encoder)
        if self.kind == "saved":
            return reader.saved_context().numpy()
        if self.kind == "corpus" and self.texts is None:
            raise RevelaError("a context of the corpus is made of texts: give a sample of them")
        return reader.context_of(self.texts or ()).detach().float().cpu().numpy()

    def into(self, encoder: Encoder, documents: Sequence[str]) -> Encoder:
        """The encoder with this context, drawn from the documents if necessary; the encoder itself
        if it has no slots.
        """
        if not slots_of(encoder) or self.kind == "saved":
            return encoder
        reader = contextual(encoder)
        context = self.drawn(lambda: sample_texts(documents, reader.slots, self.seed))
        return reader.with_context_of(context.texts or ())

    def describe(self) -> str:
        """The source of the documents in the slots, for messages."""
        return {
            "corpus": f"documents of the corpus, drawn with seed {self.seed}",
            "saved": "those that it was saved with",
            "none": "no documents",
        }.get(self.kind, "texts of a file")

    def about(self, slots: int) -> dict[str, Any]:
        """Its entry in ``Info``, without the digest of its rows."""
        own = "\n".join(self.texts or ()) if self.kind == "texts" else ""
        count = min(slots, len(self.texts or ()))
        texts = _digest(own.encode()) if own else ""
        return {"kind": self.kind, "seed": self.seed, "texts": texts, "documents": count}

    def is_of(self, about: Mapping[str, Any] | None) -> bool:
        """Whether it is the context of an index, by ``Info.context``."""
        own = self.about(0)
        return about is not None and all(own[name] == about[name] for name in CONTEXT_CHOICES)


Choice = Context | str | Sequence[str]
"""As ``Context.of`` takes it."""


def _lines_of(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RevelaError(
            f"--context {file} cannot be read ({type(error).__name__}): give corpus, saved, none "
            "or a file with a text per line"
        ) from error


def sample_texts(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """A sample of the texts that are not blank."""
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    return list(itertools.islice((texts[i] for i in order if texts[i].strip()), count))


def slots_of(encoder: Encoder) -> int:
    """The number of documents in an encoder's context; 0 if it reads none."""
    return int(getattr(encoder, "slots", 0))


def contextual(encoder: Encoder) -> RetrieverEncoder:
    """The encoder as one that reads a context; RevelaError if it does not."""
    if not slots_of(encoder):
        name = getattr(encoder, "name", "the model")
        raise RevelaError(
            f"{name} has no first stage: train it with --context N, or omit --context"
        )
    return cast("RetrieverEncoder", encoder)


def check_without_slots(encoders: Sequence[Encoder]) -> None:
    """Refuse a context if none of the models reads one."""
    if encoders and not any(map(slots_of, encoders)):
        contextual(encoders[0])


def chosen_for(
    encoder: Encoder, choice: Choice | None, documents: Sequence[Document], words: int
) -> Context | None:
    """The context for an encoder, by default drawn from the documents and truncated to ``words``;
    None if the encoder reads none and no choice is given.
    """
    if choice is None and not slots_of(encoder):
        return None
    slots = contextual(encoder).slots
    chosen = Context.of("corpus" if choice is None else choice)
    return chosen.drawn(lambda: draw_documents(documents, slots, chosen.seed, words))


def draw_documents(
    documents: Sequence[Document], count: int, seed: int = 0, words: int = 0
) -> list[str]:
    """``count`` texts for a context, drawn uniformly, with one of each document before a second.

    They are chunks of ``words`` words; 0: whole documents.
    """
    rng = random.Random(seed)
    order = rng.sample(range(len(documents)), min(count, len(documents)))
    pieces = []
    for i in order:
        document = documents[i]
        texts = [c.text for c in chunk(document, 0, words)] if words else [document.full_text]
        pieces.append(rng.sample(texts, len(texts)))
    rounds = itertools.zip_longest(*pieces)
    drawn = (text for texts in rounds for text in texts if text is not None)
    return list(itertools.islice(drawn, count))


def conditioned(encoder: Encoder, rows_JD: Vectors) -> RetrieverEncoder:
    """The encoder with this context; the encoder itself keeps its own."""
    import torch

    reader = contextual(encoder)
    return reader.with_context(torch.from_numpy(rows_JD).to(reader.model.device))


def save_context(folder: Path, rows_JD: Vectors) -> str:
    """Save a context in the folder of its index; returns its digest."""
    from safetensors.numpy import save_file

    with atomic_write(folder / CONTEXT) as temporary:
        save_file({"rows_JD": np.ascontiguousarray(rows_JD)}, temporary)
    return _digest(rows_JD.tobytes())


def load_context(folder: Path, digest: str) -> Vectors:
    """Read the context of an index and check its digest."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        rows_JD: Vectors = load_file(folder / CONTEXT)["rows_JD"]
        if _digest(rows_JD.tobytes()) == digest:
            return rows_JD
        reason = "not the one that it was made with"
    except (OSError, KeyError, SafetensorError) as error:
        reason = type(error).__name__
    raise RevelaError(f"{folder} is damaged ({CONTEXT}: {reason}): make it again with revela index")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
