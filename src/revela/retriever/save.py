"""Save a retriever as a stock Sentence-Transformers folder, LoRA merged, with its card."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sentence_transformers import SentenceTransformer

from revela.files import disk_errors, flush, make_readable
from revela.retriever.context import FOLDER as CONTEXT
from revela.retriever.context import SavedContext, write_rows
from revela.retriever.lora import merged, needs_merging
from revela.retriever.saved_config import add_to_config


def save_retriever(
    model: SentenceTransformer,
    folder: Path,
    card: str,
    matryoshka: Sequence[int] = (),
    context: SavedContext | None = None,
    words_to_vectors: float = 1.0,
) -> None:
    """Write the retriever into ``folder``, beside other files; modules.json, which makes it
    loadable, is moved there last.

    Args:
        card: text of README.md.
        matryoshka: widths that its vectors were trained to be truncated to.
        context: of a retriever with slots, which are saved with its rows.
        words_to_vectors: see ``words_to_vectors_of``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (
        disk_errors(folder),
        tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as hidden,
    ):
        temporary = Path(hidden)
        # In training the tokenizer truncates below the saved model's limit.
        if (tokenizer := getattr(model.tokenizer, "backend_tokenizer", None)) is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
        # Where merging or filling in rows would change the model, a copy on the CPU is saved.
        changed = context is not None or needs_merging(model) or model.device.type != "cpu"
        final = merged(model) if changed else model
        if context is not None:
            write_rows(final, context.rows_JD)
            context.save(temporary / CONTEXT)
        final.save_pretrained(hidden, create_model_card=False)
        # A path in the card may have bytes that are no UTF-8.
        (temporary / "README.md").write_text(card, encoding="utf-8", errors="replace")
        if matryoshka:
            matryoshka = [*matryoshka, int(model.get_embedding_dimension() or 0)]
        add_to_config(temporary, matryoshka, words_to_vectors)
        make_readable(temporary)
        flush(temporary)
        _move(temporary, folder)


def _move(temporary: Path, folder: Path) -> None:
    """Move a folder's entries into another, in place of those of the same name."""
    (folder / "modules.json").unlink(missing_ok=True)
    for part in sorted(temporary.iterdir(), key=lambda part: part.name == "modules.json"):
        target = folder / part.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(part, target)
