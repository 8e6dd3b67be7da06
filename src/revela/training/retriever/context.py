"""A context: documents of a corpus that a retriever reads, each as one vector, before every text,
so that a text's vector depends on what is special in that corpus (CDE; Morris & Rush, ICLR 2025).

    phi(d; D) = M2(c_1, ..., c_J, E(d_1), ..., E(d_T))    eq. 5; eq. 6 for queries
    c_j       = a_j + head(M1(y_j))                       y_j: documents of the corpus, or
                                                          equal runs of a document's tokens

The second stage M2 is the retriever. It reads c_j through a *slot*: an added token
``<|context-j|>`` whose row in M2's own embedding table is c_j. The prompts of both roles hold all
slots, and the pooling leaves slots out, so the saved retriever is a stock Sentence-Transformers
folder.

The first stage M1 is a copy of the lowest layer or more, with a mean over tokens and a small head,
saved as a stock folder ``context/`` in the retriever's. It differs from the paper by learned
*anchors* a_j and a head that gives 0 at first, because document vectors in its slots ruin an
untrained decoder; and the residual MLP after M2 is left out.

Shapes: J slots, N documents of V vectors each, T tokens, D width of the embedding table.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn

from revela.encoders.base import SLOT, Features
from revela.encoders.model_files import CONTEXT
from revela.encoders.prompts import Prompts
from revela.encoders.torch_model import open_model, slot_ids
from revela.errors import RevelaError, first_line
from revela.text.chunk import chunk
from revela.training.retriever.build import add_lora, keep_lower_layers, merged_copy, set_parts
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import Context
from revela.types import Document

ROWS, ABOUT = "rows.safetensors", "context.json"
NOISE = 0.1  # of the embedding table's root mean square


class ContextEncoder(nn.Module):
    """The first stage: makes the rows of a retriever's slots from documents.

    ``model`` gives head(M1(y)), run by ``stage``; ``anchors_AD`` has a row for each slot or one for
    all. A slot without a document has ``null_D`` in place of its vector. A ``constant`` context
    consists of the anchors, and reads no documents. A document fills ``per_document`` slots.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        anchors_AD: Tensor,
        slots: int,
        constant: bool = False,
        per_document: int = 1,
    ) -> None:
        super().__init__()
        self.stage, self.slots, self.constant = RetrieverModule(model), slots, constant
        self.per_document, self.documents = per_document, slots // per_document
        self.stage.packs = False  # ``_runs`` reads padded states
        self.anchors_AD = nn.Parameter(anchors_AD.clone())
        self.null_D = nn.Parameter(torch.zeros_like(anchors_AD[0]))

    @property
    def model(self) -> SentenceTransformer:
        """The model that ``stage`` runs."""
        return self.stage.model

    @property
    def anchors_JD(self) -> Tensor:
        """The anchor of each slot."""
        return self.anchors_AD.expand(self.slots, -1)

    @property
    def null_JD(self) -> Tensor:
        """The context of no documents."""
        return self.anchors_JD + self.null_D

    def of_vectors(self, vectors_ND: Tensor) -> Tensor:
        """The context (J, D) of at most J vectors by ``model``; the other slots are null."""
        rest = self.null_D.expand(self.slots - len(vectors_ND), -1)
        return self.anchors_JD + torch.cat([vectors_ND.to(rest.dtype), rest])

    @torch.no_grad()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """The context (J, D) of the first J / V texts; the slots of fewer texts are null."""
        if self.constant:
            return self.anchors_JD.detach()
        vectors_ND = self.anchors_AD.new_zeros(0, self.anchors_AD.shape[1])
        if batch := texts[: self.documents]:
            with self.stage.evaluating():
                vectors_ND = self.vectors(self.stage.tokenize(batch, "passage"))
        return self.of_vectors(vectors_ND.float())

    def vectors(self, documents: Features, bf16: bool = False) -> Tensor:
        """head(M1(y)) of tokenized documents, (N * V, D); with ``bf16`` as in training."""
        self.stage.bf16 = bf16
        return self.stage.pool(self._runs(self.stage.states(documents)))

    def _runs(self, features: Features) -> Features:
        """The states of each document, V times, each time with the mask of another of V equal runs
        of its tokens; a run has a token even where there are fewer than V.
        """
        if (count := self.per_document) == 1:
            return features
        mask_NT, run_V = features["attention_mask"], torch.arange(count + 1)
        place_NT, length_N1 = mask_NT.cumsum(dim=1) - 1, mask_NT.sum(dim=1, keepdim=True)
        bounds_NV = length_N1 * run_V.to(length_N1) // count
        first_NV1 = bounds_NV[:, :-1, None]
        end_NV1 = torch.maximum(bounds_NV[:, 1:, None], first_NV1 + 1)
        place_N1T = place_NT.masked_fill(mask_NT == 0, -1)[:, None]
        runs_NVT = (place_N1T >= first_NV1) & (place_N1T < end_NV1)
        return {
            "token_embeddings": features["token_embeddings"].repeat_interleave(count, dim=0),
            "attention_mask": runs_NVT.flatten(0, 1).long(),
        }


def add_context(
    settings: Context, model: SentenceTransformer, example: str, seed: int
) -> ContextEncoder:
    """Add slots to a retriever, in place, and build its first stage. A decoder's anchors start as
    the first tokens of ``example``.
    """
    _check_slots(model, settings.context)
    constant = settings.context_from == "constant"
    table_VD = model[0].model.get_input_embeddings().weight.detach().float().cpu()
    if position_table(model[0].model) is None:
        ids = model.tokenizer(example, add_special_tokens=False)["input_ids"]
        anchors_AD = table_VD[(ids * settings.context)[: settings.context]]
    else:
        mask = model.tokenizer.mask_token_id
        anchors_AD = _anchors_of_mask(table_VD, mask, settings.context, seed if constant else None)
    reader = _documents_reader(model, settings.context_layers, settings.context_tokens)
    per_document = settings.context_vectors_per_document
    first = ContextEncoder(reader, anchors_AD, settings.context, constant, per_document)
    first.to(model.device)
    add_slots(model, settings.context)
    write_context(model, first.null_JD)
    return first


def _anchors_of_mask(table_VD: Tensor, mask: int | None, slots: int, seed: int | None) -> Tensor:
    """The embedding of the mask token, one row for all slots, as they have no positions.

    MiniLM retrieves as well with 16 mask tokens before a text as without (research/notebook.md).
    With a ``seed``, for a constant context, each slot has a row near it, as equal rows would stay
    equal.
    """
    anchor_1D = torch.zeros_like(table_VD[:1]) if mask is None else table_VD[mask][None]
    if seed is None:
        return anchor_1D
    noise_JD = torch.randn(slots, len(anchor_1D[0]), generator=torch.Generator().manual_seed(seed))
    return anchor_1D + NOISE * table_VD.square().mean().sqrt() * noise_JD


def _documents_reader(model: SentenceTransformer, layers: int, tokens: int) -> SentenceTransformer:
    """head(M1(y)): a copy of a retriever's lower layers, a mean, and a head that gives 0."""
    transformer = copy.deepcopy(model[0])
    if layers:
        keep_lower_layers(transformer.model, layers)
    width = transformer.get_embedding_dimension()
    table = transformer.model.get_input_embeddings()
    last = modules.Dense(width, table.embedding_dim, activation_function=nn.Identity())
    nn.init.zeros_(last.linear.weight)
    nn.init.zeros_(last.linear.bias)
    parts = [
        transformer,
        modules.Pooling(width, pooling_mode="mean"),
        modules.LayerNorm(width),
        modules.Dense(width, width, activation_function=nn.GELU()),
        last,
    ]
    prompts = {"query": "", "document": Prompts.named(model.prompts).passage}
    reader = SentenceTransformer(modules=parts, prompts=prompts, device=str(model.device))
    reader.max_seq_length = tokens
    return reader


def continue_context(settings: Context, model: SentenceTransformer, folder: Path) -> ContextEncoder:
    """The first stage of a retriever in ``folder`` that already has slots, to continue training."""
    first, own = load_context_encoder(folder), len(slot_ids(model))
    per_document = settings.context_vectors_per_document
    if first is None or (first.slots, first.per_document) != (settings.context, per_document):
        raise RevelaError(
            f"{folder} has {own} slots, which --context {settings.context} with {per_document} "
            "vectors per document does not fit: give the settings of its training, or another model"
        )
    if first.constant != (settings.context_from == "constant"):
        kind = "constant" if first.constant else "batch or corpus"
        raise RevelaError(f"{folder} was trained with --context-from {kind}: give the same")
    first.model.max_seq_length = settings.context_tokens
    if SLOT.format(0) not in (model.prompts["query"] or ""):  # --query-prompt, --passage-prompt
        _slots_in_prompts(model, own)
    return first


def train_context_encoder(
    first: ContextEncoder, model: SentenceTransformer, rank: int, alpha: int, dropout: float
) -> None:
    """Freeze the first stage except head, anchors, null row and LoRA, in place; with rank 0 nothing
    is frozen. In the second stage, ``model``, slots get no position by training either.
    """
    first.requires_grad_(True)
    add_lora(first.model, rank, alpha, dropout)
    for part in list(first.model)[2:]:
        part.requires_grad_(True)
    table = position_table(model[0].model)
    if table is not None and not rank:
        of_text_P1 = torch.ones_like(table.weight[:, :1])
        of_text_P1[_first_position(table) :][: first.slots] = 0
        table.weight.register_hook(of_text_P1.mul)  # type: ignore[no-untyped-call]


def _check_slots(model: SentenceTransformer, count: int) -> None:
    if not isinstance(model[0], modules.Transformer):
        raise RevelaError(
            f"--context {count} needs a transformer: leave it out, or give another --model"
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

    In a model with learned positions (BERT) slots have no position, as in the paper, and the text
    keeps its own. Other models read them as a prefix after the prompt's words, as a decoder turns
    its first tokens into attention sinks.
    """
    from tokenizers import AddedToken

    transformer, tokenizer = model[0].model, model.tokenizer
    positions = position_table(transformer)
    names = [AddedToken(SLOT.format(j), special=True, normalized=False) for j in range(count)]
    tokenizer.add_tokens(names, special_tokens=False)
    if len(tokenizer) > transformer.get_input_embeddings().num_embeddings:
        transformer.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    table, ids = transformer.get_input_embeddings(), slot_ids(model)
    table.weight.data[ids.start : ids.stop] = 0
    if positions is not None:
        _insert_positions(transformer, positions, count)
    _slots_in_prompts(model, count)
    model.max_seq_length = (model.max_seq_length or 512) + count
    _leave_slots_out(model)


def _slots_in_prompts(model: SentenceTransformer, count: int) -> None:
    slots = "".join(SLOT.format(j) for j in range(count))
    for role in sorted({"query", "document", "passage"} | set(model.prompts)):
        prompt = model.prompts.get(role) or ""
        words = "" if position_table(model[0].model) is not None else prompt.rstrip()
        model.prompts[role] = f"{words}{slots}{prompt[len(words) :]}"


def position_table(transformer: Any) -> nn.Embedding | None:
    """The table of learned positions; None if positions are computed in attention."""
    table = getattr(getattr(transformer, "embeddings", None), "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def _first_position(table: nn.Embedding) -> int:
    """Position of the first slot, after that of the first token."""
    return 1 if table.padding_idx is None else table.padding_idx + 2


def _insert_positions(transformer: Any, table: nn.Embedding, count: int) -> None:
    """Insert rows of 0 after the first position, so that the text keeps its positions."""
    first, old = _first_position(table), table.weight.data
    rows = torch.cat([old[:first], old.new_zeros(count, old.shape[1]), old[first:]])
    embeddings = transformer.embeddings
    longer = nn.Embedding(len(rows), rows.shape[1], table.padding_idx, _weight=rows)
    embeddings.position_embeddings = longer
    transformer.config.max_position_embeddings = len(rows)
    for name, fill in (("position_ids", torch.arange), ("token_type_ids", torch.zeros)):
        if isinstance(getattr(embeddings, name, None), Tensor):
            values = fill(len(rows), dtype=torch.long, device=rows.device)[None]
            embeddings.register_buffer(name, values, persistent=False)


def _leave_slots_out(model: SentenceTransformer) -> None:
    """Give slots weight 0 in the mean over tokens, and rows of 0 in the lexical half."""
    vocabulary = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    slots = {SLOT.format(j): 0.0 for j in range(len(slot_ids(model)))}
    parts, weights = list[nn.Module](), dict[str, float]()
    for part in model:
        if isinstance(part, modules.WordWeights):
            weights = part.word_weights
        elif isinstance(part, modules.WordEmbeddings):
            old = part.emb_layer.weight
            new = old.new_zeros(len(vocabulary) - len(old), old.shape[1])
            parts.append(modules.WordEmbeddings(model.tokenizer, torch.cat([old, new]).detach()))
        else:
            parts.append(part)
    weights = {word: weights.get(word, 1.0) for word in vocabulary} | slots
    set_parts(model, [parts[0], modules.WordWeights(vocabulary, weights), *parts[1:]])


def draw_documents(
    documents: Sequence[Document], count: int, seed: int, max_words: int
) -> list[str]:
    """Draw ``count`` chunks for a context, uniformly, with one of each document before a second."""
    rng = random.Random(seed)
    order = rng.sample(range(len(documents)), min(count, len(documents)))
    pieces = []
    for i in order:
        texts = [c.text for c in chunk(documents[i], 0, max_words)]
        pieces.append(rng.sample(texts, len(texts)))
    rounds = itertools.zip_longest(*pieces)
    drawn = (text for texts in rounds for text in texts if text is not None)
    return list(itertools.islice(drawn, count))


def write_context(model: SentenceTransformer, rows_JD: Tensor) -> None:
    """Write a context into a model's embedding table."""
    table, ids = model[0].model.get_input_embeddings().weight, slot_ids(model)
    with torch.no_grad():
        table[ids.start : ids.stop] = rows_JD.to(table)


@dataclass(frozen=True)
class SavedContext:
    """A retriever's first stage, a context by it, and the documents it was drawn from."""

    context_encoder: ContextEncoder
    rows_JD: Tensor
    about: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the first stage, a stock folder, with the rows and context.json."""
        first = self.context_encoder
        merged_copy(first.model).save_pretrained(str(folder), create_model_card=False)
        tensors = {"rows_JD": self.rows_JD, "anchors_JD": first.anchors_JD, "null_D": first.null_D}
        plain = {k: v.detach().float().cpu().clone().contiguous() for k, v in tensors.items()}
        save_file(plain, folder / ROWS)
        settings = {"format": 1, "slots": first.slots, "constant": first.constant}
        settings |= {"anchors": len(first.anchors_AD), "vectors per document": first.per_document}
        (folder / ABOUT).write_text(json.dumps({**settings, **self.about}, indent=1))


def load_context_encoder(folder: Path) -> ContextEncoder | None:
    """The first stage of a saved retriever; None if it has none."""
    folder = folder / CONTEXT
    if not (folder / ABOUT).is_file():
        return None
    first = open_model(folder)
    try:
        about, tensors = json.loads((folder / ABOUT).read_text()), load_file(folder / ROWS)
        sizes = int(about["slots"]), about["constant"], int(about.get("vectors per document", 1))
        anchors_AD = tensors["anchors_JD"][: about.get("anchors")]
        stage = ContextEncoder(first, anchors_AD, *sizes)
        stage.null_D.data.copy_(tensors["null_D"])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        raise RevelaError(f"{folder} is damaged ({reason}): train the retriever again") from error
    return stage.to(first.device).requires_grad_(False).eval()
