"""Save a retriever as a stock Sentence-Transformers folder, LoRA merged, with its card.

What is saved is opened again, and must give the vectors of the model in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from revela.encoders.model_files import CONTEXT, add_to_config
from revela.encoders.torch_model import compares_by_dot, keep_tokenizer, open_model
from revela.errors import RevelaError
from revela.files import disk_errors, flush, make_readable
from revela.training.retriever.build import merged_copy, needs_merging
from revela.training.retriever.context import SavedContext, write_context
from revela.training.retriever.module import RetrieverEncoder

DIFFERENCE = 0.01  # maximum change of a vector, as a share of its length
SAMPLE = ("Seven Grey Herons stand in the shallow Lake.", "seven grey herons", "SEVEN GREY HERONS")


def save_retriever(
    model: SentenceTransformer,
    folder: Path,
    card: str,
    context: SavedContext | None = None,
    words_to_vectors: float = 1.0,
) -> None:
    """Write the retriever into ``folder``, next to other files; modules.json, which makes it
    loadable, is moved there last.

    Args:
        card: text of README.md.
        context: of a retriever with slots, which are saved with its rows.
        words_to_vectors: see ``words_to_vectors_of``.

    Raises:
        RevelaError: what was written gives other vectors than the model; nothing is saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder), tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as hidden:
        temporary = Path(hidden)
        # In training the tokenizer truncates below the saved model's limit.
        if (tokenizer := getattr(model.tokenizer, "backend_tokenizer", None)) is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
        # Where merging or filling in rows would change the model, a copy on the CPU is saved.
        changed = context is not None or needs_merging(model) or model.device.type != "cpu"
        final = merged_copy(model) if changed else model
        has_length_one = not compares_by_dot(final) and not isinstance(final[-1], modules.Normalize)
        if has_length_one:  # in training
            final.add_module(str(len(final)), modules.Normalize())
        if context is not None:
            write_context(final, context.rows_JD)
            context.save(temporary / CONTEXT)
        final.save_pretrained(hidden, create_model_card=False)
        for place in (temporary, temporary / CONTEXT):
            keep_tokenizer(place, model.tokenizer)
        # A path in the card may have bytes that are not UTF-8.
        (temporary / "README.md").write_text(card, encoding="utf-8", errors="replace")
        add_to_config(temporary, words_to_vectors)
        if isinstance(final[0], modules.Transformer):  # tables read tokenizer.json as it is
            _check_saved(final, temporary)
        make_readable(temporary)
        flush(temporary)
        _move(temporary, folder)


def _check_saved(model: SentenceTransformer, saved: Path) -> None:
    """Raise RevelaError if the files give other vectors of a few texts than the model."""
    models = model, open_model(saved, device="cpu")
    encoders = [RetrieverEncoder(each, bf16=False) for each in models]
    for encode in (RetrieverEncoder.encode_queries, RetrieverEncoder.encode_passages):
        vectors_ND, saved_ND = (encode(encoder, SAMPLE) for encoder in encoders)
        change_N = np.linalg.norm(vectors_ND - saved_ND, axis=1)
        difference = float((change_N / np.linalg.norm(vectors_ND, axis=1)).max())
        if difference > DIFFERENCE:
            raise RevelaError(
                "the retriever is not saved, as its files would give other vectors than it has now "
                f"(they differ by {difference:.2f}): give another --model, or --lower-case no"
            )


def _move(temporary: Path, folder: Path) -> None:
    """Move a folder's entries into another, in place of those of the same name."""
    (folder / "modules.json").unlink(missing_ok=True)
    for part in sorted(temporary.iterdir(), key=lambda part: part.name == "modules.json"):
        target = folder / part.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(part, target)
