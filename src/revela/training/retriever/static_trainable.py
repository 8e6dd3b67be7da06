"""A static retriever during training: each row of its table, next to a copy that is trained.

    v(text) = sum over its tokens t of w_t * [r_t, R_t],    w_t = |row_t| exp(c_t)

r is the initial row, of length one, and stays. R starts as r and is trained; c starts at 0 and is
trained. Without r, rows of rare words no longer tell the words apart, and small corpora lose by
training (research/notebook.md).

Tokens with equal rows are one word: they share R and c, as the forms of a stem do in a table by
static_from_words.py. A stock ``StaticEmbedding`` of twice the width is saved.

Shapes: N texts, L tokens of the longest, T of all, V tokens, S different rows, D numbers of a
row, W of both halves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from revela.encoders.static_encoder import token_ids
from revela.errors import RevelaError

ROWS, WEIGHTS = 10.0, 50.0
"""Learning-rate multipliers of R and c over a transformer's weights. At 1e-4, rows of length one
learn at 1e-3; at three times that they overfit (research/notebook.md)."""


class LexicalAndDense(nn.Module):
    """The rows of a table r, their trained copies R, and their weights w (>= 0)."""

    fixed_SD: Tensor
    initial_weight_S: Tensor

    def __init__(self, rows_SD: Tensor, weight_S: Tensor) -> None:
        super().__init__()
        self.register_buffer("fixed_SD", rows_SD)
        self.register_buffer("initial_weight_S", weight_S)
        self.rows_SD = nn.Parameter(rows_SD.clone())
        self.change_S = nn.Parameter(torch.zeros_like(weight_S))

    def learning_rate_multipliers(self) -> dict[nn.Parameter, float]:
        """Learning-rate multipliers over a transformer's weights."""
        return {self.rows_SD: ROWS, self.change_S: WEIGHTS}

    def weight_S(self) -> Tensor:
        """The weights as they are now."""
        return self.initial_weight_S * self.change_S.exp()

    def rows_SW(self) -> Tensor:
        """The rows as they are now, both halves side by side."""
        return torch.cat([self.fixed_SD, self.rows_SD.detach()], dim=1)

    def forward(self, rows_T: Tensor, starts_N: Tensor) -> Tensor:
        """The weighted sum of each text's rows, (N, 2 D), which lie one after another from its
        place in ``starts_N`` on.
        """
        weight_T = self.weight_S()[rows_T]
        sums = [
            F.embedding_bag(rows_T, half_SD, starts_N, mode="sum", per_sample_weights=weight_T)
            for half_SD in (self.fixed_SD, self.rows_SD)
        ]
        return torch.cat(sums, dim=1)


class TrainableTable(modules.InputModule):
    """A ``StaticEmbedding`` in training; truncates no text.

    Keeps the first ``width`` numbers of each row.
    """

    max_seq_length = math.inf
    row_V: Tensor

    def __init__(self, static: modules.StaticEmbedding, width: int | None = None) -> None:
        super().__init__()
        rows_VD = static.embedding.weight.detach().float()[:, :width]
        rows_SD, row_V = rows_VD.unique(dim=0, return_inverse=True)
        # The mean weight is 1, so that fp16 holds the saved rows.
        weight_S = rows_SD.norm(dim=1)
        self.halves = LexicalAndDense(F.normalize(rows_SD, dim=1), weight_S / weight_S.mean())
        self.register_buffer("row_V", row_V)
        self._own = static.tokenizer
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=static.tokenizer)

    def preprocess(
        self, inputs: list[str], prompt: str | None = None, **_kwargs: Any
    ) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask``, padded on the right, (N, L)."""
        rows = token_ids(self._own, inputs, prompt or "")
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        masks = [torch.ones_like(ids_L) for ids_L in ids]
        return {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(masks, True)}

    def forward(self, features: dict[str, Any], **_kwargs: Any) -> dict[str, Any]:
        """Add each text's ``sentence_embedding``, which is not normalised."""
        mask_NL = features["attention_mask"].bool()
        ends_N = mask_NL.sum(dim=1).cumsum(dim=0)
        rows_T = self.row_V[features["input_ids"][mask_NL]]
        vectors = self.halves(rows_T, F.pad(ends_N[:-1], (1, 0)))
        return {**features, "sentence_embedding": vectors}

    def table_VD(self) -> Tensor:
        """The weighted rows of all tokens before training."""
        rows_SD = self.halves.initial_weight_S[:, None] * self.halves.fixed_SD
        return rows_SD[self.row_V]

    def stock(self) -> modules.StaticEmbedding:
        """The table as it is now, in fp16, both halves of a row side by side."""
        rows_SW = (self.halves.weight_S().detach()[:, None] * self.halves.rows_SW()).half()
        return modules.StaticEmbedding(self._own, embedding_weights=rows_SW[self.row_V].cpu())

    def get_embedding_dimension(self) -> int:
        """2 D."""
        return 2 * self.halves.rows_SD.shape[1]

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save ``stock``."""
        self.stock().save(output_path, *args, **kwargs)


def make_trainable(model: SentenceTransformer) -> None:
    """Put a ``TrainableTable`` into a static retriever, in place."""
    first, *rest = model
    fits = all(isinstance(part, modules.Normalize) for part in rest)
    if not isinstance(first, modules.StaticEmbedding) or not fits:
        found = ", ".join(type(part).__name__ for part in model)
        raise RevelaError(
            f"this model cannot be trained ({found}): give one that begins with a transformer, or "
            "StaticEmbedding with nothing but Normalize after it, as --model"
        )
    model[0] = TrainableTable(first, model.truncate_dim)
    model.truncate_dim = None
