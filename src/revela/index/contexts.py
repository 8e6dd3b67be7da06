"""The context that a retriever with slots reads in use (CDE; retriever/context.py).

An index owns its context: drawn once from the documents that are indexed, kept as
``context.safetensors`` beside index.json, and read before every document and query of the index,
those that come later included. For vectors of two contexts cannot be compared.

Shapes: J slots, D width of the retriever's embedding table, N <= J texts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.index.manifest import CONTEXT
from revela.types import Document, Encoder, Vectors

if TYPE_CHECKING:
    from revela.retriever.encode import RetrieverEncoder

CHOSEN = ("kind", "seed", "texts")  # of Context.about: what a resumed run must give again
PERMUTATIONS, SIGNIFICANT, GROWN = 999, 0.01, 4


@dataclass(frozen=True)
class Context:
    """What fills a retriever's slots.

    Args:
        kind: "corpus": texts drawn from the corpus; "saved": what the retriever was saved with;
            "none": no documents; "texts": a user's own.
        texts: of the corpus or the user; None: not drawn yet.
        seed: of the draw.
    """

    kind: str
    texts: tuple[str, ...] | None = None
    seed: int = 0

    @classmethod
    def of(cls, choice: Context | str | Sequence[str], seed: int = 0) -> Context:
        """From "corpus", "saved", "none", a file with a text per line, or texts; a retriever reads
        as many of the texts as it has slots.

        Raises:
            RevelaError: the file cannot be read, or there is no text.
        """
        if isinstance(choice, Context):
            return choice
        if choice in ("corpus", "saved", "none"):
            return cls(str(choice), seed=seed)
        if isinstance(choice, str):
            try:
                texts: Sequence[str] = Path(choice).read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError) as error:
                raise RevelaError(
                    f"--context {choice} cannot be read ({type(error).__name__}): give corpus, "
                    "saved, none or a file with a text per line"
                ) from error
        else:
            texts = choice
        if not (kept := tuple(text for text in texts if text.strip())):
            raise RevelaError(
                f"the context {choice} has no text: give a file with a text per line, or corpus"
            )
        return cls("texts", kept)

    def drawn(self, draw: Callable[[], Sequence[str]]) -> Context:
        """With texts, if they are to be drawn from the corpus and have not been."""
        needed = self.kind == "corpus" and self.texts is None
        return replace(self, texts=tuple(draw())) if needed else self

    def rows(self, encoder: Encoder) -> Vectors:
        """The context itself, (J, D).

        Raises:
            RevelaError: the encoder has no slots or no first stage, or no texts are drawn.
        """
        reader = with_slots(encoder)
        if self.kind == "saved":
            return reader.saved_context().numpy()
        if self.kind == "corpus" and self.texts is None:
            raise RevelaError("a context of the corpus is made of texts: give a sample of them")
        return reader.context_of(self.texts or ()).detach().float().cpu().numpy()

    def into(self, encoder: Encoder, documents: Sequence[str]) -> Encoder:
        """An encoder that reads this, drawn from a corpus's texts if it is to be; one without slots
        stays as it is.
        """
        if not slots_of(encoder) or self.kind == "saved":
            return encoder
        reader = with_slots(encoder)
        known = self.drawn(lambda: sample_texts(documents, reader.slots, self.seed))
        return reader.with_context_of(known.texts or ())

    def describe(self) -> str:
        """What is read, for people."""
        return {
            "corpus": f"documents of the corpus, drawn with seed {self.seed}",
            "saved": "those that it was saved with",
            "none": "no documents",
        }.get(self.kind, "texts of a file")

    def about(self, slots: int) -> dict[str, Any]:
        """What index.json says of it, before its rows are known."""
        own = "\n".join(self.texts or ()) if self.kind == "texts" else ""
        count = min(slots, len(self.texts or ()))
        texts = _digest(own.encode()) if own else ""
        return {"kind": self.kind, "seed": self.seed, "texts": texts, "documents": count}

    def is_of(self, about: Mapping[str, Any] | None) -> bool:
        """Whether an index whose manifest says this of its context has this one."""
        own = self.about(0)
        return about is not None and all(own[name] == about[name] for name in CHOSEN)


Choice = Context | str | Sequence[str]
"""As ``Context.of`` takes it."""


def sample_texts(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """So many of the texts that have words, or all of them."""
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    return list(islice((texts[i] for i in order if texts[i].strip()), count))


def slots_of(encoder: Encoder) -> int:
    """How many documents an encoder reads as its context; 0 if it reads none."""
    slots: int = getattr(encoder, "slots", 0)
    return slots


def with_slots(encoder: Encoder) -> RetrieverEncoder:
    """The encoder, if it reads a context.

    Raises:
        RevelaError: it reads none.
    """
    if not slots_of(encoder):
        name = getattr(encoder, "name", "the model")
        raise RevelaError(
            f"{name} has no first stage: train it with --context N, or omit --context"
        )
    return cast("RetrieverEncoder", encoder)


def refuse_without_slots(encoders: Sequence[Encoder]) -> None:
    """Refuse a context that is given to models of which none reads one."""
    if encoders and not any(map(slots_of, encoders)):
        with_slots(encoders[0])


def chosen_for(
    encoder: Encoder, choice: Choice | None, documents: Sequence[Document], words: int
) -> Context | None:
    """The context of a corpus for an encoder; None if it reads none.

    Args:
        encoder: with or without slots.
        choice: None: drawn from the corpus, if the encoder reads a context.
        documents: of the corpus.
        words: most words of what is drawn of one.

    Raises:
        RevelaError: a context is chosen and the encoder reads none.
    """
    slots = slots_of(encoder)
    if choice is None and not slots:
        return None
    with_slots(encoder)
    from revela.retriever.context import draw_documents

    chosen = Context.of("corpus" if choice is None else choice)
    return chosen.drawn(lambda: draw_documents(documents, slots, 0, words))


def conditioned(encoder: Encoder, rows_JD: Vectors) -> RetrieverEncoder:
    """The encoder with this context; others of the same model are not disturbed.

    Raises:
        RevelaError: the encoder has no slots.
    """
    import torch

    reader = with_slots(encoder)
    return reader.with_context(torch.from_numpy(rows_JD).to(reader.model.device))


def write_rows(folder: Path, rows_JD: Vectors) -> str:
    """Keep a context in the folder of its index; returns its digest."""
    from safetensors.numpy import save_file

    with atomic_write(folder / CONTEXT) as temporary:
        save_file({"rows_JD": np.ascontiguousarray(rows_JD)}, temporary)
    return _digest(rows_JD.tobytes())


def read_rows(folder: Path, digest: str) -> Vectors:
    """The context of an index.

    Raises:
        RevelaError: it is not there, or is another.
    """
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


def drift(
    encoder: RetrieverEncoder,
    rows_JD: Vectors,
    about: Mapping[str, Any],
    texts: Sequence[str],
    passages: int,
) -> str:
    """A line for the log if an index has become another corpus than its context was drawn from;
    "" if it has not.

    Args:
        encoder: of the index.
        rows_JD: its context.
        about: ``Info.context``.
        texts: drawn from what the index holds now.
        passages: that it holds now.
    """
    assert encoder.first_stage is not None
    anchors_JD = encoder.first_stage.anchors_JD.detach().float().cpu().numpy()
    now_JD = Context("corpus", tuple(texts)).rows(encoder) - anchors_JD
    then_ND = (rows_JD - anchors_JD)[: about["documents"]]
    changed = p_of_drift(then_ND, now_JD[: len(texts)]) < SIGNIFICANT
    if not changed and passages < GROWN * about["passages"]:
        return ""
    return (
        f"the corpus has changed since its context was drawn ({about['passages']:,} -> "
        f"{passages:,} passages): make a new index to draw a new one"
    )


def p_of_drift(then_ND: Vectors, now_MD: Vectors, seed: int = 0) -> float:
    """p value of z = |m - m'| / (s sqrt(1/N + 1/M)), the distance of two samples' means in units of
    the spread s of both, by permutations; 1 if one is empty.
    """
    both, size = np.concatenate([then_ND, now_MD]).astype(np.float64), len(then_ND)
    if not 0 < size < len(both):
        return 1.0
    weight = np.full(len(both), -1 / len(now_MD))
    weight[:size] = 1 / size
    rng = np.random.default_rng(seed)
    weights = np.stack([weight, *(rng.permutation(weight) for _ in range(PERMUTATIONS))])
    # s is the same in every permutation, so |m - m'| has the same ranks as z.
    distances = np.linalg.norm(weights @ (both - both.mean(axis=0)), axis=1)
    return float((distances >= distances[0] * (1 - 1e-9)).mean())
