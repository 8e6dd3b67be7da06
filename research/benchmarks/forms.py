"""Forms of a training step that the benchmarks time, over the same models and on any device.

- ours; "ours, triton" is the same with document attention as a Triton kernel;
- naive (naive_step.py): two full passes, all pairs at once in every layer and head, all logits,
  padded batches;
- naive, open layers: the same, but in-batch attention only in layers where a gate is open;
- bound: forward and backward of the same models without in-batch attention: the retriever on the
  same tokens, the LM as often and as deep as the preset needs, on packed rows and with the
  blockwise loss;
- plain: the same with stock padded modules and all logits.

Forms are timed in turn in one process, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.benchmarks.naive_step import NaiveStep
from revela.device import autocast
from revela.lm.language_model import LanguageModel
from revela.objectives.revela import RevelaLoss, gates_on_heads
from revela.packing import packed
from revela.settings import Recipe

OURS, TRITON, BOUND, PLAIN, NAIVE, LEAN = (
    "ours",
    "ours, triton",
    "bound",
    "plain",
    "naive",
    "naive, open layers",
)

Features = tuple[dict[str, Tensor], ...]
Step = Callable[[Features], Tensor]


@dataclass
class Models:
    """The models of a preset, and the forms of its step.

    Args:
        recipe: the preset.
        retriever: modules like a SentenceTransformer's, the first of which holds a transformers
            model.
        lm: the language model.
        device: where both are.
        bf16: run under bf16 autocast.
        group_size: chunks a group; 0: a batch is one group.
        sim_dtype: precision of Sim, None for the embeddings' own.
    """

    recipe: Recipe
    retriever: nn.Sequential
    lm: LanguageModel
    device: torch.device
    bf16: bool
    group_size: int = 0
    sim_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        r, lm = self.recipe, self.lm
        first = int(r.objective.gate_first_layer * lm.n_layers)
        # Which heads does not matter here: as many as the preset gates, spread over the layers that
        # it may gate.
        heads = {
            (first + i % (lm.n_layers - first), 7 * i % lm.n_heads)
            for i in range(r.objective.gate_heads)
        }
        self.gates_LH = (
            None
            if r.objective.mix == "sum"
            else gates_on_heads(lm, r.objective.gate, sorted(heads))
        )

    @property
    def inner(self) -> Any:
        """The causal LM itself, whatever wraps it."""
        return (
            self.lm.model.get_base_model()
            if hasattr(self.lm.model, "get_base_model")
            else self.lm.model
        )

    def objective(self, form: str = OURS) -> RevelaLoss:
        r = self.recipe
        return RevelaLoss(
            self.retriever,
            self.lm,
            tau=r.objective.tau,
            gates_LH=self.gates_LH,
            v_norm=r.objective.v_norm,
            epsilon=r.objective.epsilon,
            standardise=r.objective.standardise,
            sim_dtype=self.sim_dtype,
            group_size=self.group_size,
            kernel="triton" if form == TRITON else "torch",
        ).to(self.device)

    def step(self, form: str) -> Step:
        r = self.recipe
        self.inner.set_attn_implementation("sdpa" if form == PLAIN else "revela")
        if form in (NAIVE, LEAN):
            return NaiveStep(
                self.retriever,
                self.lm.model,
                self.gates_LH,
                r.objective.tau,
                r.objective.standardise,
                everywhere=form == NAIVE,
            )
        objective = self.objective(form)
        if form in (OURS, TRITON):
            return objective
        passes = self._packed_passes if form == BOUND else self._stock_passes

        def both(features: Features) -> Tensor:
            query, passage, chunk = features
            vectors = [
                self.retriever(dict(f))["sentence_embedding"].float() for f in (query, passage)
            ]
            return passes(chunk, objective.layers) + sum(v.sum() for v in vectors)

        return both

    def _packed_passes(self, chunk: dict[str, Tensor], layers: Sequence[int]) -> Tensor:
        packed_chunks = self.lm.pack(chunk["input_ids"], chunk["attention_mask"])
        memory = self.lm.read(packed_chunks, layers)
        if self.lm.trainable:  # stream e's backward, without the attention that leads to it
            loss = self.lm.loss(packed_chunks, memory, lambda _layer, own, *_: own)
            return loss + sum(0 * (memory.keys[i].sum() + memory.values[i].sum()) for i in layers)
        memory.below = memory.below.detach().requires_grad_()
        loss = self.lm.loss(packed_chunks, memory, lambda _layer, own, *_: own)
        torch.autograd.grad(loss, [memory.below])
        return loss.detach()

    def _stock_passes(self, chunk: dict[str, Tensor], layers: Sequence[int]) -> Tensor:
        ids, body, head = chunk["input_ids"], self.inner.model, self.inner.lm_head

        def loss_of(hidden: Tensor) -> Tensor:
            return F.cross_entropy(head(hidden)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

        if self.lm.trainable:
            read, predicted = (
                body(input_ids=ids, use_cache=False).last_hidden_state for _ in range(2)
            )
            return loss_of(predicted) + 0 * read.sum()
        hidden = body.embed_tokens(ids)
        rotary = body.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
        with torch.no_grad():
            for i, block in enumerate(body.layers[: max(layers) + 1]):
                if i == min(layers):
                    below = hidden
                hidden = block(hidden, position_embeddings=rotary, attention_mask=None)
        hidden = leaf = below.detach().requires_grad_()
        for block in body.layers[min(layers) :]:
            hidden = block(hidden, position_embeddings=rotary, attention_mask=None)
        loss = loss_of(body.norm(hidden))
        torch.autograd.grad(loss, [leaf])
        return loss.detach()


def one_step(models: Models, form: str, features: Features) -> tuple[float, Tensor]:
    """Seconds of one forward and backward, and the loss."""
    step = models.step(form)
    losses = []

    def forward_and_backward() -> None:
        with packed(models.retriever[0].model) if form in (OURS, TRITON, BOUND) else nullcontext():
            with autocast(models.device, models.bf16):
                loss = step(features)
            loss.backward()
        losses.append(loss.detach())

    try:
        return timed(forward_and_backward, models.device), losses[0]
    finally:
        for p in [*models.retriever.parameters(), *models.lm.parameters()]:
            p.grad = None


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds; a GPU's by its own clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1000


def in_turn(
    runs: Mapping[str, Callable[[], float]],
    repeats: int,
    limit: float = float("inf"),
    failures: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each run, turn about; the first turn warms up.

    Args:
        runs: each gives its seconds.
        repeats: turns that count.
        limit: seconds after which no further turn begins, once one has counted.
        failures: if given, a run that raises is left out from then on, and this says why.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begun = time.monotonic()
    for turn in range(repeats + 1):
        if turn > 1 and time.monotonic() - begun > limit:
            break
        for name in list(times):
            try:
                seconds = runs[name]()
            except Exception as error:
                if failures is None:
                    raise
                failures[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                del times[name]
                gc.collect()  # what the error's frames held
                continue
            if turn:
                times[name].append(seconds)
    return times
