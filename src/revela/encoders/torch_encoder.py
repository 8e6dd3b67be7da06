"""Encode by sentence-transformers what neither a graph nor a table of words can read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela.encoders import torch_model
from revela.encoders.base import Encoded, Role, TextEncoder, Tokens
from revela.encoders.model_files import words_to_vectors_of
from revela.encoders.prompts import OWN, Given, Prompts
from revela.types import Precision

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

CHARACTERS = 3  # of a token, roughly; it only sizes batches


class TorchEncoder(TextEncoder):
    """Runs a Sentence-Transformers model; threads take turns.

    Args:
        model: its transformers run in bf16 from now on if ``bf16``, the modules after them in fp32.
        max_tokens: truncate texts here instead of at the model's own limit; slots do not count.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        bf16: bool = False,
        max_tokens: int | None = None,
        name: str = "the model",
    ) -> None:
        bf16 = bf16 and bool(torch_model.transformers_of(model))
        self.model, self.precision, self.name = model.eval(), "bf16" if bf16 else "fp32", name
        self.prompts = Prompts(*(torch_model.prompt_of(model, r) for r in torch_model.ROLES))
        torch_model.keep_states(model)
        if max_tokens is not None:
            torch_model.truncate_at(model, max_tokens, name)
        if bf16:
            torch_model.run_in_bf16(model)
        for transformer in torch_model.transformers_of(model):
            # With padding before a text, its learned positions would depend on the other texts.
            transformer.tokenizer.padding_side = "right"
        self.limit = torch_model.own_limit(model)
        self._lock = threading.Lock()  # tokenizers are not thread-safe

    @classmethod
    def load(
        cls, folder: Path, precision: Precision, max_tokens: int | None = None, prompts: Given = OWN
    ) -> TorchEncoder:
        """Open a Sentence-Transformers folder, on a GPU if there is one."""
        model = torch_model.open_model(folder, prompts=prompts)
        bf16 = torch_model.uses_bf16(precision, model.device)
        encoder = cls(model, bf16, max_tokens, str(folder))
        encoder.words_to_vectors = words_to_vectors_of(folder)
        return encoder

    @property
    def tokenizer(self) -> Any:
        tokenizer = torch_model.parts_of(self.model)[0].tokenizer
        return getattr(tokenizer, "backend_tokenizer", tokenizer)

    @property
    def dimension(self) -> int:
        return self.model.get_embedding_dimension() or 0

    def as_text(self, texts: Sequence[str]) -> Sequence[str]:
        return torch_model.read_as_text(self.model, texts)

    def batches(self, texts: Sequence[str], role: Role, with_tokens: bool) -> Iterator[Encoded]:
        """Encode texts of similar length together, longest first."""
        if with_tokens:
            torch_model.check_gives_tokens(self.model)
        read = self.as_text([text if text.strip() else "." for text in texts])
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        most = torch_model.tokens_per_batch(self.model.device)
        order = sorted(range(len(read)), key=lambda i: -len(read[i]))
        while order:
            longest = 1 + len(read[order[0]]) // CHARACTERS
            size = max(1, most // min(longest, self.limit or longest))
            rows, order = order[:size], order[size:]
            batch, tokens = [read[i] for i in rows], list[Tokens]()
            with self._lock:
                found = encode(batch, output_value=None, batch_size=size, show_progress_bar=False)
                if with_tokens:
                    tokens = [self._tokens(*pair, role) for pair in zip(batch, found, strict=True)]
            yield Encoded(rows, torch_model.unit_vectors(found), tokens)

    def _tokens(self, text: str, features: Any, role: Role) -> Tokens:
        """A text's tokens, without padding, special tokens and the tokens of the prompt."""
        tokenizer = self.model.tokenizer
        special, begin = {*tokenizer.all_special_ids}, self.prompt_length(role)
        ids, mask = features["input_ids"].tolist(), features["attention_mask"].tolist()
        kept = [i for i, token in enumerate(ids) if mask[i] and token not in special][begin:]
        states_LW = torch_model.token_vectors(self.model, features[torch_model.KEPT])
        read = tokenizer(getattr(self.prompts, role) + text, return_offsets_mapping=True)
        places = zip(read["input_ids"], read["offset_mapping"], strict=True)
        spans = [place for token, place in places if token not in special][begin:]
        return states_LW[kept], spans[: len(kept)]
