"""Sentence Transformers' trainer with groups as batches, checkpoints of what training changes, and saves that cannot be half done.

A checkpoint holds every trainable tensor of retriever and objective (LoRA of both models, gates, temperature) as
safetensors, the clock, and the trainer's own optimiser, scheduler and RNG files. It is written under a temporary name and
renamed when whole; the one before it is deleted only then.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from transformers import PreTrainedTokenizerBase

from revela.errors import RevelaError
from revela.models.retriever import passage_prompt_of, query_prompt_of, trainable_parameters, trainable_state
from revela.train.watch import Clock

TRAINABLE, CLOCK = "trainable.safetensors", "clock.json"
MARGIN = 0.005  # nDCG@10: what checks of equally good states differ by (docs/log.md)


class GroupSampler(BatchSampler):
    """Endless groups, epoch after epoch; the same order for the same seed, so that skipping n batches resumes exactly.

    Args:
        groups: epoch -> that epoch's groups of row indices.
        total: groups in all, for whoever asks how long this is.
        together: groups a batch, one after another.
    """

    def __init__(self, groups: Callable[[int], Iterator[list[int]]], total: int, together: int = 1) -> None:
        self.groups, self.total, self.together = groups, total, together

    def __iter__(self) -> Iterator[list[int]]:
        endless = (group for epoch in count() for group in self.groups(epoch))
        for _ in range(len(self)):
            yield [row for group in islice(endless, self.together) for row in group]

    def __len__(self) -> int:
        return self.total // self.together


class GroupCollator:
    """A group's chunks as the retriever reads them twice (query, passage) and as the LM reads them; right-padded.

    The retriever's query is the first half of the chunk's tokens (Revela, section 4; "first-half") or the whole chunk.
    ``count`` is told the LM's tokens of every group.
    """

    valid_label_columns: Sequence[str] = ()  # the trainer asks

    def __init__(
        self,
        model: SentenceTransformer,
        lm_tokenizer: PreTrainedTokenizerBase,
        lm_tokens: int,
        query_side: str,
        count: Callable[[int], None],
    ) -> None:
        self.model, self.lm_tokenizer, self.lm_tokens = model, lm_tokenizer, lm_tokens
        self.query_side, self.count = query_side, count

    def __call__(self, rows: Sequence[dict[str, str]]) -> dict[str, Tensor]:
        texts = [row["text"] for row in rows]
        queries = texts if self.query_side == "whole" else [first_half(t, self.model.tokenizer, self.lm_tokens) for t in texts]
        batch: dict[str, Tensor] = {}
        for name, side, prompt in (("query", queries, query_prompt_of(self.model)), ("passage", texts, passage_prompt_of(self.model))):
            features = self.model.preprocess(list(side), prompt=prompt or None)
            batch.update({f"{name}_{k}": v for k, v in features.items() if isinstance(v, Tensor)})
        chunk = self.lm_tokenizer(
            texts, truncation=True, max_length=self.lm_tokens, padding=True, padding_side="right", return_tensors="pt"
        )
        batch.update({f"chunk_{k}": chunk[k] for k in ("input_ids", "attention_mask")})
        self.count(int(chunk["attention_mask"].sum()))
        return batch


def first_half(text: str, tokenizer: Any, max_tokens: int) -> str:
    """The text up to the middle of its tokens, after truncation to ``max_tokens``."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=True, max_length=max_tokens)
    offsets = spans["offset_mapping"]
    return text[: offsets[len(offsets) // 2 - 1][1]] if len(offsets) > 1 else text


class GroupTrainer(SentenceTransformerTrainer):
    """The trainer; see the module docstring."""

    def __init__(self, *, clock: Clock, checkpoints: Path, sampler: GroupSampler, **kwargs: Any) -> None:
        self.clock, self.checkpoints, self._sampler, self._staging = clock, checkpoints, sampler, ""
        super().__init__(**kwargs)

    def get_batch_sampler(self, dataset: Dataset, *_args: Any, **_kwargs: Any) -> BatchSampler:
        return self._sampler

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """The card is written once, by revela.models.export."""

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._staging = tempfile.mkdtemp(prefix=".saving-", dir=self.checkpoints)
        try:
            super()._save_checkpoint(model, trial)
            name = f"checkpoint-{self.state.global_step}"
            shutil.rmtree(self.checkpoints / name, ignore_errors=True)
            (Path(self._staging) / name).rename(self.checkpoints / name)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = ""
        for old in saved_checkpoints(self.checkpoints)[:-1]:
            shutil.rmtree(old)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trainable_state(self.loss), folder / TRAINABLE)
        (folder / CLOCK).write_text(json.dumps({"seconds": self.clock.seconds}))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        load_trainable(self.loss, folder / TRAINABLE)
        self.clock.seconds = json.loads((folder / CLOCK).read_text())["seconds"]


class Best:
    """The state that the label-free check likes best (by the mean of its tasks), so that a run ends no worse than it began.

    A later state has to win by more than ``MARGIN``: the best of many checks that differ by chance alone is the luckiest, not the best.

    Each state that beats all before it stays in ``folder`` until the run ends: a run that is killed may resume from before the last.

    Args:
        module: whose trainable tensors are kept.
        folder: where.
        scored: (step, scores by task) of the checks of a run that is resumed.
    """

    def __init__(self, module: nn.Module, folder: Path, scored: Iterable[tuple[int, dict[str, float]]] = ()) -> None:
        self.module, self.folder = module, folder
        self.step, self.scores = -1, dict[str, float]()
        for step, scores in scored:
            if self._beats(scores):
                self.step, self.scores = step, scores

    def offer(self, step: int, scores: dict[str, float]) -> None:
        """Keep the module's state if these scores are the best so far."""
        if not self._beats(scores):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".best-{step}"
        save_file(trainable_state(self.module), temporary)
        temporary.rename(self._file(step))
        self.step, self.scores = step, scores

    def restore(self) -> None:
        """Put the best state back into the module."""
        load_trainable(self.module, self._file(self.step))

    def _beats(self, scores: dict[str, float]) -> bool:
        return self.step < 0 or fmean(scores.values()) > fmean(self.scores.values()) + MARGIN

    def _file(self, step: int) -> Path:
        return self.folder / f"best-{step}.safetensors"


def load_trainable(module: nn.Module, file: Path) -> None:
    """Copy the tensors of ``trainable_state`` back into the module."""
    saved = load_file(file)
    parameters = trainable_parameters(module)
    if saved.keys() != parameters.keys():
        raise RevelaError(f"{file.parent} was saved by another recipe: resume with the settings that the run began with")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def saved_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
