"""A context: documents of a corpus that a retriever reads, each as one vector, before every text,
so that a text's vector says what is special in that corpus (CDE; Morris & Rush, ICLR 2025).

    phi(d; D) = M2(c_1, ..., c_J, E(d_1), ..., E(d_T))    eq. 5; eq. 6 for queries
    c_j       = a_j + head(M1(y_j))                       y_j: documents of the corpus

The second stage M2 is the retriever. It reads c_j through a *slot*: an added token
``<|context-j|>`` whose row in M2's own embedding table is c_j (slots.py).

The first stage M1 is a copy of the lower layers, with a mean over tokens and a small head, in the
folder ``context/`` of the retriever, a stock one as well. What differs from the paper: a_j, learned
*anchors*, and a head that gives 0 at first, because a decoder whose slots hold vectors of documents
before it is trained loses most of what it can do; no residual MLP after M2.

Shapes: J slots, D width of the embedding table.
"""

from __future__ import annotations

import copy
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

from revela.corpus.chunk import chunk
from revela.errors import RevelaError, first_line
from revela.retriever.build import keep_lower_layers, load_retriever
from revela.retriever.lora import add_lora, merged
from revela.retriever.slots import (
    add_slots,
    position_table,
    refuse_slots,
    slot_ids,
    write_rows,
)
from revela.settings import Recipe
from revela.types import Document

FOLDER, ROWS, ABOUT = "context", "rows.safetensors", "context.json"
SMALL = 0.1  # of the embedding table's root mean square


class FirstStage(nn.Module):
    """What fills the slots of a retriever.

    Args:
        model: head(M1(y)) as ``sentence_embedding``.
        anchors_AD: a row per slot, or one that all share.
        slots: J.
        constant: the context is the anchors, whatever the documents.

    Attributes:
        null_D: added to the anchor of a slot without a document, in place of its vector.
    """

    def __init__(
        self, model: SentenceTransformer, anchors_AD: Tensor, slots: int, constant: bool = False
    ) -> None:
        super().__init__()
        self.model, self.slots, self.constant = model, slots, constant
        self.anchors_AD = nn.Parameter(anchors_AD.clone())
        self.null_D = nn.Parameter(torch.zeros_like(anchors_AD[0]))

    @property
    def anchors_JD(self) -> Tensor:
        """The anchor of each slot."""
        return self.anchors_AD.expand(self.slots, -1)

    @property
    def null_JD(self) -> Tensor:
        """The context of no documents."""
        return self.anchors_JD + self.null_D

    def of_vectors(self, vectors_ND: Tensor) -> Tensor:
        """The context (J, D) of documents' vectors by ``model``, N <= J; other slots are null."""
        rest = self.null_D.expand(self.slots - len(vectors_ND), -1)
        return self.anchors_JD + torch.cat([vectors_ND.to(rest.dtype), rest])

    @torch.no_grad()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """The context (J, D) of the first J of these texts; of fewer, the other slots are null."""
        if self.constant:
            return self.anchors_JD.detach()
        training = self.model.training
        self.model.eval()
        some = [text if text.strip() else "." for text in texts[: self.slots]]
        found = self.anchors_JD.new_zeros(0, self.anchors_AD.shape[1])
        if some:
            features = self.preprocess(some)
            found = self.model({k: v.to(self.model.device) for k, v in features.items()})[
                "sentence_embedding"
            ]
        self.model.train(training)
        return self.of_vectors(found.float())

    def preprocess(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Texts as ``model`` reads them, with the prompt of passages."""
        features = self.model.preprocess(list(texts), prompt=self.model.prompts["document"] or None)
        return {k: v for k, v in features.items() if isinstance(v, Tensor)}


@dataclass(frozen=True)
class SavedContext:
    """What is saved beside a retriever with slots: its first stage, and a context by it.

    Args:
        first_stage: of the retriever.
        rows_JD: the context that the retriever is saved with.
        about: what it was drawn from, for context.json.
    """

    first_stage: FirstStage
    rows_JD: Tensor
    about: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the first stage, a stock folder, with the rows and context.json."""
        first = self.first_stage
        merged(first.model).save_pretrained(str(folder), create_model_card=False)
        tensors = {"rows_JD": self.rows_JD, "anchors_JD": first.anchors_JD, "null_D": first.null_D}
        plain = {k: v.detach().float().cpu().clone().contiguous() for k, v in tensors.items()}
        save_file(plain, folder / ROWS)
        known = {"format": 1, "slots": first.slots, "constant": first.constant}
        (folder / ABOUT).write_text(json.dumps({**known, **self.about}, indent=1))


def add_context(recipe: Recipe, model: SentenceTransformer, example: str) -> FirstStage | None:
    """Give a retriever the slots that the recipe asks for, in place, and build its first stage;
    None without ``--context``. The slots hold the anchors.

    Args:
        recipe: its section ``context``.
        model: the retriever, not fitted or trained yet.
        example: a text of the corpus; the anchors of a decoder start as the embeddings of its
            first tokens. Slots without positions have one anchor, which starts as the embedding
            of the mask token; a constant context has one each, which start near that.

    Raises:
        RevelaError: the model has a context already, or cannot have one.
    """
    settings = recipe.context
    if slot_ids(model):
        raise RevelaError(
            f"{recipe.retriever.model} reads a context already: train the model that it was made of"
        )
    if not settings.slots:
        return None
    refuse_slots(model, settings.slots)
    constant = settings.context_from == "constant"
    table_VD = model[0].model.get_input_embeddings().weight.detach().float().cpu()
    if position_table(model[0].model) is None:
        ids = model.tokenizer(example, add_special_tokens=False)["input_ids"]
        anchors_AD = table_VD[(ids * settings.slots)[: settings.slots]]
    else:
        # MiniLM finds as much with 16 mask tokens before a text as without (research/notebook.md).
        mask = model.tokenizer.mask_token_id
        anchors_AD = torch.zeros_like(table_VD[:1]) if mask is None else table_VD[mask][None]
        if constant:  # rows that begin equal would stay equal
            generator = torch.Generator().manual_seed(recipe.training.seed)
            noise_JD = torch.randn(settings.slots, table_VD.shape[1], generator=generator)
            anchors_AD = anchors_AD + SMALL * table_VD.square().mean().sqrt() * noise_JD
    reader = _documents_reader(model, settings.context_layers, settings.context_tokens)
    first = FirstStage(reader, anchors_AD, settings.slots, constant).to(model.device)
    add_slots(model, settings.slots)
    write_rows(model, first.null_JD)
    return first


def _documents_reader(model: SentenceTransformer, layers: int, tokens: int) -> SentenceTransformer:
    """head(M1(y)): a copy of a retriever's lower layers, a mean, and a head that gives 0."""
    transformer = copy.deepcopy(model[0])
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
    passages = model.prompts.get("document") or model.prompts.get("passage") or ""
    prompts = {"query": "", "document": passages}
    reader = SentenceTransformer(modules=parts, prompts=prompts, device=str(model.device))
    reader.max_seq_length = tokens
    return reader


def train_first_stage(first: FirstStage, rank: int, alpha: int, dropout: float) -> None:
    """Freeze all but LoRA of its transformer, its head, anchors and null row, in place."""
    layers = int(first.model[0].model.config.num_hidden_layers)
    if layers:
        add_lora(first.model, rank, alpha, dropout)
    else:
        first.model.requires_grad_(False)
    for part in list(first.model)[2:]:
        part.requires_grad_(True)


def load_first_stage(folder: Path) -> FirstStage | None:
    """The first stage of a saved retriever; None if it has none.

    Raises:
        RevelaError: it cannot be opened.
    """
    own = folder / FOLDER
    if not (own / ABOUT).is_file():
        return None
    first = load_retriever(own)
    try:
        about, tensors = json.loads((own / ABOUT).read_text()), load_file(own / ROWS)
        stage = FirstStage(first, tensors["anchors_JD"], int(about["slots"]), about["constant"])
        stage.null_D.data.copy_(tensors["null_D"])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        raise RevelaError(f"{own} is damaged ({reason}): train the retriever again") from error
    return stage.to(first.device).requires_grad_(False).eval()


def draw_documents(
    documents: Sequence[Document], count: int, seed: int = 0, words: int = 0
) -> list[str]:
    """Texts for a context, drawn uniformly from documents: one of each while there are enough.

    Args:
        documents: of a corpus.
        count: as many as there are slots; fewer are returned only if there are no more.
        seed: of the draw.
        words: most words of a text: a random chunk of its document; 0: the whole document.
    """
    rng = random.Random(seed)
    order = rng.sample(range(len(documents)), min(count, len(documents)))
    pieces = []
    for i in order:
        document = documents[i]
        found = [c.text for c in chunk(document, 0, words)] if words else [document.full_text]
        pieces.append(rng.sample(found, len(found)))
    # The first of each document, then the second of each, and so on.
    longest = max(map(len, pieces), default=0)
    texts = [own[depth] for depth in range(longest) for own in pieces if depth < len(own)]
    return texts[:count]
