"""Slots: added tokens of a retriever whose embeddings are documents of a context (context.py).

The prompts of both roles hold all slots, and slots do not count in the pooling, so a retriever with
rows in them is a stock Sentence-Transformers folder.

Shapes: J slots, D width of the embedding table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.retriever.build import set_parts

SLOT = "<|context-{}|>"
STEM = SLOT.partition("{}")[0]


def slot_ids(model: SentenceTransformer) -> range:
    """The ids of a model's slots, in order; empty if it has none."""
    tokenizer = model.tokenizer
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    count = 0
    while SLOT.format(count) in added:
        count += 1
    first = added[SLOT.format(0)] if count else 0
    return range(first, first + count)


def refuse_slots(model: SentenceTransformer, count: int) -> None:
    """Refuse a model that cannot read so many slots."""
    if not isinstance(model[0], modules.Transformer):
        raise RevelaError(
            f"--context {count} needs a transformer, and this model reads each token by itself: "
            "leave it out, or give another --model"
        )
    transformer, tokens = model[0].model, model.max_seq_length or 0
    limit = getattr(transformer.config, "max_position_embeddings", None)
    if position_table(transformer) is None and limit and count + tokens > limit:
        raise RevelaError(
            f"--context {count}: the model reads {limit:,} tokens, of which --max-tokens {tokens} "
            f"leaves {max(0, limit - tokens)}: lower one of them"
        )


def add_slots(model: SentenceTransformer, count: int) -> None:
    """Add slots to a model's vocabulary and prompts, in place; their rows are 0.

    Slots of a model with learned positions (BERT) get none, as in the paper: their order is of no
    effect, and the text keeps the positions it was trained with. Other models read them as a prefix
    after the prompt's words, for a decoder turns its first tokens into attention sinks.
    """
    from tokenizers import AddedToken

    transformer, tokenizer = model[0].model, model.tokenizer
    slots = "".join(SLOT.format(j) for j in range(count))
    positions = position_table(transformer)
    names = [AddedToken(SLOT.format(j), special=True, normalized=False) for j in range(count)]
    tokenizer.add_tokens(names, special_tokens=False)
    table = transformer.get_input_embeddings()
    if len(tokenizer) > table.num_embeddings:
        transformer.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        ids = slot_ids(model)
        transformer.get_input_embeddings().weight[ids.start : ids.stop] = 0
    if positions is not None:
        _insert_positions(transformer, positions, count)
    roles = {"query", "document", "passage"} | set(model.prompts)
    for role in sorted(roles):
        prompt = model.prompts.get(role) or ""
        words = "" if positions is not None else prompt.rstrip()
        model.prompts[role] = f"{words}{slots}{prompt[len(words) :]}"
    model.max_seq_length = (model.max_seq_length or 512) + count
    _leave_slots_out(model)


def position_table(transformer: Any) -> nn.Embedding | None:
    """The table of learned positions; None if positions are computed in attention."""
    table = getattr(getattr(transformer, "embeddings", None), "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def _insert_positions(transformer: Any, table: nn.Embedding, count: int) -> None:
    """Rows of 0 after the first position, so that what follows the slots keeps its positions."""
    first = 1 if table.padding_idx is None else table.padding_idx + 2
    old = table.weight.data
    rows = torch.cat([old[:first], old.new_zeros(count, old.shape[1]), old[first:]])
    longer = nn.Embedding(len(rows), rows.shape[1], table.padding_idx, _weight=rows)
    embeddings = transformer.embeddings
    embeddings.position_embeddings = longer
    transformer.config.max_position_embeddings = len(rows)
    for name, fill in (("position_ids", torch.arange), ("token_type_ids", torch.zeros)):
        if isinstance(getattr(embeddings, name, None), Tensor):
            values = fill(len(rows), dtype=torch.long, device=rows.device)[None]
            embeddings.register_buffer(name, values, persistent=False)


def _leave_slots_out(model: SentenceTransformer) -> None:
    """Give slots no weight in a mean over tokens, and rows of 0 in a lexical half (fit.py).

    fit.py gives them none either, in the retrievers that it fits later.
    """
    vocabulary = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    slots = {SLOT.format(j): 0.0 for j in range(len(slot_ids(model)))}
    parts: list[nn.Module] = []
    weights: dict[str, float] = {}
    for part in model:
        if isinstance(part, modules.WordWeights):
            weights = part.word_weights
        elif isinstance(part, modules.WordEmbeddings):
            old = part.emb_layer.weight
            new = old.new_zeros(len(vocabulary) - len(old), old.shape[1])
            parts.append(modules.WordEmbeddings(model.tokenizer, torch.cat([old, new]).detach()))
        else:
            parts.append(part)
    weighed = {word: weights.get(word, 1.0) for word in vocabulary} | slots
    set_parts(model, [parts[0], modules.WordWeights(vocabulary, weighed), *parts[1:]])


def write_rows(model: SentenceTransformer, rows_JD: Tensor) -> None:
    """Put a context into a model's slots for good.

    Raises:
        RevelaError: it has another shape than the slots, or is not finite.
    """
    table, ids = model[0].model.get_input_embeddings().weight, slot_ids(model)
    if rows_JD.shape != (len(ids), table.shape[1]) or not rows_JD.isfinite().all():
        raise RevelaError(
            f"a context of shape {tuple(rows_JD.shape)} does not fit {len(ids)} slots of "
            f"{table.shape[1]} numbers, or is not finite: draw it again with this model"
        )
    with torch.no_grad():
        table[ids.start : ids.stop] = rows_JD.to(table)


@contextmanager
def filled(
    model: SentenceTransformer,
    rows_JD: Tensor,
    null_JD: Tensor | None = None,
    dropout: float = 0.0,
) -> Iterator[None]:
    """While open, a model's slots hold these rows, which may need a gradient.

    Args:
        model: with J slots.
        rows_JD: the context.
        null_JD: what a slot holds instead with probability ``dropout``, drawn per text and slot.
        dropout: see there.
    """
    ids, table = slot_ids(model), model[0].model.get_input_embeddings()

    def fill(_module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        place = inputs[0] - ids.start
        is_slot = (place >= 0) & (place < len(ids))
        place = place.clamp(0, len(ids) - 1)
        rows = rows_JD[place]
        if null_JD is not None and dropout:
            is_null = torch.rand(place.shape, device=place.device) < dropout
            rows = torch.where(is_null[..., None], null_JD[place], rows)
        rows = (rows * getattr(table, "embed_scale", 1.0)).to(out.dtype)
        return torch.where(is_slot[..., None], rows, out)

    handle = table.register_forward_hook(fill)
    try:
        yield
    finally:
        handle.remove()


def read_as_text(texts: Sequence[str]) -> list[str]:
    """The texts, with whatever looks like a slot in them taken apart."""
    return [text.replace(STEM, STEM[:2] + " " + STEM[2:]) for text in texts]
