"""Seconds and memory of a training step, at the size of larger models; on a GPU where there is one.

    python -m research.benchmarks.steps                       # all of it
    python -m research.benchmarks.steps --models 135M --methods revela-gated --groups 1 --repeats 3

Models have random weights in the shapes of SmolLM2-135M, Qwen2.5-0.5B and Llama-3.2-1B, as
retriever and as language model (LM); "0.5B/135M" is a retriever of one and an LM of the other size.
Tokens are random, the same number in every chunk. A step is forward and backward, without
tokenization and the optimizer. Its forms are timed in turn:

- ours; "ours, varlen" is the same with document attention by flash attention, on a GPU;
- bound: the same models without in-batch attention, the lower bound of the time.

Rows have groups and tokens per second (each token of a chunk counted once), the ratio to the bound,
the rate of the bound's arithmetic, the loss from the same weights and random numbers, and on a GPU
the peak memory beside the models. Then the loss of the LM's head alone, in blocks
(training/lm/cross_entropy.py) and with all logits at once.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from research.benchmarks.options import parser_of, write_out
from revela.encoders.torch_model import POOLING_MODES, has_fast_bf16
from revela.quiet_libraries import silence_libraries
from revela.training.lm import cross_entropy
from revela.training.lm.language_model import LanguageModel
from revela.training.methods.revela import RevelaLoss, gates_on_heads
from revela.training.recipe import Recipe
from revela.training.retriever.build import add_lora
from revela.training.retriever.module import RetrieverModule

OURS, VARLEN, BOUND = FORMS = ["ours", "ours, varlen", "bound"]
KERNELS: dict[str, Any] = {OURS: "torch", VARLEN: "varlen"}
BLOCKS = [23, 25, 27, 29]  # powers of two: logits a block

Row = dict[str, Any]
Features = tuple[dict[str, Tensor], ...]
Step = Callable[[Features], Tensor]


def configurations() -> dict[str, Any]:
    """Shapes by name."""
    from transformers import LlamaConfig, Qwen2Config

    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "num_key_value_heads"]

    def sizes(*numbers: int) -> dict[str, Any]:
        shared = dict(max_position_embeddings=8192, tie_word_embeddings=True)
        return dict(zip(names, numbers, strict=True)) | shared

    return {
        "135M": LlamaConfig(**sizes(49152, 576, 1536, 30, 9, 3)),
        "0.5B": Qwen2Config(**sizes(151936, 896, 4864, 24, 14, 2)),
        "1B": LlamaConfig(**sizes(128256, 2048, 8192, 16, 32, 8)),
    }


class Reader(Transformer):  # type: ignore[misc]
    """A transformers model as the first module of a Sentence-Transformers model; it reads ids."""

    tokenizer = None

    def __init__(self, model: Any) -> None:
        nn.Module.__init__(self)
        self.model = model

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        read = {name: features[name] for name in ("input_ids", "attention_mask")}
        return {**features, "token_embeddings": self.model(**read).last_hidden_state}


@dataclass
class Models:
    """The models of a method, and the forms of its step."""

    recipe: Recipe
    retriever: RetrieverModule
    lm: LanguageModel
    device: torch.device
    group_size: int = 0  # chunks; 0: a batch is one group

    def __post_init__(self) -> None:
        loss, lm = self.recipe.method, self.lm
        first = int(loss.gate_first_layer * lm.n_layers)
        # As many heads as the method gates, spread over the layers that it may gate.
        heads = {
            (first + i % (lm.n_layers - first), 7 * i % lm.n_heads) for i in range(loss.gate_heads)
        }
        sums = loss.mix == "sum"
        self.gates_LH = None if sums else gates_on_heads(lm, loss.gate, sorted(heads))

    @property
    def inner(self) -> Any:
        """The causal LM without LoRA's wrapper."""
        wraps = hasattr(self.lm.model, "get_base_model")
        return self.lm.model.get_base_model() if wraps else self.lm.model

    def loss(self, form: str = OURS) -> RevelaLoss:
        o = self.recipe.method
        kernel = KERNELS.get(form, "torch")
        given = dict(tau=o.tau, gates_LH=self.gates_LH, group_size=self.group_size, kernel=kernel)
        return RevelaLoss(self.retriever, self.lm, **given).to(self.device)

    def drop_gradients(self) -> None:
        for p in [*self.retriever.parameters(), *self.lm.parameters()]:
            p.grad = None

    def step(self, form: str) -> Step:
        self.inner.set_attn_implementation("revela")
        loss = self.loss(form)
        if form != BOUND:
            return loss

        def without_documents(features: Features) -> Tensor:
            query, passage, chunk = features
            sides = [self.retriever(side) for side in (query, passage)]
            return self._bound(chunk, loss.layers) + sum(vectors.sum() for vectors in sides)

        return without_documents

    def _bound(self, chunk: dict[str, Tensor], layers: Sequence[int]) -> Tensor:
        """Both passes of the LM, as deep as the method needs them."""
        packed_chunks = self.lm.pack(chunk["input_ids"], chunk["attention_mask"])
        memory = self.lm.prefill(packed_chunks, layers)
        if self.lm.trainable:  # stream e's backward, without the attention that leads to it
            loss = self.lm.loss(packed_chunks, memory, lambda _layer, own, *_: own)
            return loss + sum(0 * (memory.keys[i].sum() + memory.values[i].sum()) for i in layers)
        memory.below = memory.below.detach().requires_grad_()
        loss = self.lm.loss(packed_chunks, memory, lambda _layer, own, *_: own)
        torch.autograd.grad(loss, [memory.below])
        return loss.detach()


def build(
    config: Any, method: str, device: torch.device, *, reader: Any = None, full: bool = False
) -> Models:
    """A method's models with random weights of this shape, in the precision of training.

    Args:
        config: shape of the LM.
        reader: shape of the retriever; None: that of the LM.
        full: train all weights in place of LoRA.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    recipe = Recipe.of(method)
    r, lm_lora = recipe.retriever, recipe.method.lm_lora
    bf16 = has_fast_bf16(device)
    config, lower = copy.deepcopy(config), copy.deepcopy(reader or config)
    lower.num_hidden_layers = min(r.layers or lower.num_hidden_layers, lower.num_hidden_layers)
    if getattr(lower, "layer_types", None):
        lower.layer_types = lower.layer_types[: lower.num_hidden_layers]
    with device:  # where the weights are made
        body = AutoModel.from_config(lower, dtype=torch.float32)
        half = torch.bfloat16 if bf16 and not lm_lora else torch.float32
        lm = AutoModelForCausalLM.from_config(config, dtype=half)
    pooling = modules.Pooling(
        lower.hidden_size, pooling_mode=POOLING_MODES.get(r.pooling, "lasttoken")
    )
    parts = [Reader(body), pooling, modules.Normalize()]
    model = SentenceTransformer(modules=parts, device=str(device))
    add_lora(model, 0 if full else r.lora_rank, r.lora_alpha, r.lora_dropout)
    retriever = RetrieverModule(model, bf16).train()
    lm.requires_grad_(full and lm_lora).eval()
    if lm_lora and not full:
        from peft import LoraConfig, get_peft_model

        sizes = dict(r=r.lora_rank, lora_alpha=r.lora_alpha, lora_dropout=r.lora_dropout)
        lm = get_peft_model(lm, LoraConfig(**sizes, target_modules="all-linear")).train()
    language_model = LanguageModel(lm, bf16=bf16 and lm_lora).to(device)
    size = recipe.groups.group_size
    return Models(recipe, retriever, language_model, device, size)


def batch(models: Models, groups: int, tokens: int) -> Features:
    """Groups of random chunks: query and passage sides for the retriever, chunks for the LM."""
    generator = torch.Generator().manual_seed(0)
    size = groups * models.group_size, tokens
    ids_BL = torch.randint(models.inner.config.vocab_size, size, generator=generator)
    ids_BL = ids_BL.to(models.device)
    sides = ids_BL[:, : tokens // 2].clone(), ids_BL, ids_BL
    return tuple({"input_ids": t, "attention_mask": torch.ones_like(t)} for t in sides)


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


def weighed(run: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    """Seconds, and on a GPU the peak GB allocated."""
    if device.type != "cuda":
        return timed(run, device), None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds = timed(run, device)
    return seconds, (torch.cuda.max_memory_allocated(device) - before) / 2**30


def in_turn(
    runs: Mapping[str, Callable[[], float]], repeats: int, failures: dict[str, str] | None = None
) -> dict[str, list[float]]:
    """Seconds of the runs, which take turns; the first turn warms up. With ``failures`` a run that
    raises is dropped, and the reason added to them.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
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


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median over the turns of the ratio of two runs."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def rows_of(
    what: str, runs: Mapping[str, Callable[[], tuple[float, float | None]]], repeats: int
) -> Iterator[tuple[Row, dict[str, list[float]]]]:
    """A row per form, and the seconds of all; a form that fails has a note in place of numbers."""
    peaks: dict[str, float | None] = {}
    failures: dict[str, str] = {}

    def run(form: str) -> float:
        seconds, peaks[form] = runs[form]()
        return seconds

    times = in_turn({form: partial(run, form) for form in runs}, repeats, failures)
    for form in runs:
        row: Row = {"what": what, "form": form}
        if form in times:
            row |= {"seconds": statistics.median(times[form]), "peak_gb": peaks[form]}
        else:
            row["note"] = failures[form]
        yield row, times


class Flops(TorchDispatchMode):
    """Counts floating-point operations; torch's FlopCounterMode refuses torch.autograd.grad."""

    total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function._overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.total += attention_flops(*args[1 if "backward" in name else 0 :][:3], name)
        elif count := flop_registry.get(function._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def attention_flops(query: Tensor, key: Tensor, value: Tensor, name: str) -> int:
    """Of fused attention; torch's count refuses heads that share keys. The backward pass has five
    products for the two of the forward pass.
    """
    rows, widths = query.numel() // query.shape[-1], query.shape[-1] + value.shape[-1]
    products = 2 * rows * key.shape[-2] * widths
    return products * 5 // 2 if "backward" in name else products


def flops_of_a_group(models: Models, tokens: int) -> int:
    """Floating-point operations of the bound's forward and backward pass over one group."""
    with Flops() as counter:
        models.step(BOUND)(batch(models, 1, tokens)).backward()
    models.drop_gradients()
    return counter.total


def step_rows(
    what: str,
    models: Models,
    features: Features,
    repeats: int,
    forms: Sequence[str] = FORMS,
    flops: int = 0,
) -> Iterator[Row]:
    """One model, method and batch size, in all forms; ``flops`` of a group."""
    losses: dict[str, Tensor] = {}
    device = models.device
    groups = len(features[2]["input_ids"]) // models.group_size

    def run(form: str) -> tuple[float, float | None]:
        torch.manual_seed(0)  # the same dropout for every form
        step = models.step(form)

        def forward_and_backward() -> None:
            loss = step(features)
            loss.backward()
            losses[form] = loss.detach()

        try:
            return weighed(forward_and_backward, device)
        finally:
            models.drop_gradients()

    for row, times in rows_of(what, {form: partial(run, form) for form in forms}, repeats):
        if "seconds" in row:
            row["tokens_per_second"] = features[2]["input_ids"].numel() / row["seconds"]
            row["groups_per_second"] = groups / row["seconds"]
            row["flops_per_second"] = groups * flops / row["seconds"]
            if BOUND in times:
                row["to_bound"] = ratio(times[row["form"]], times[BOUND])
            if row["form"] != BOUND:
                row["loss"] = float(losses[row["form"]])
        yield row


def loss_rows(
    name: str, config: Any, n_rows: int, repeats: int, device: torch.device
) -> Iterator[Row]:
    """Forward and backward of the LM's frozen head and its cross-entropy."""
    like: dict[str, Any] = dict(device=device)
    like["dtype"] = torch.bfloat16 if has_fast_bf16(device) else torch.float32
    hidden_RD = torch.randn(n_rows, config.hidden_size, **like, requires_grad=True)
    weight_VD = torch.randn(config.vocab_size, config.hidden_size, **like)
    targets_R = torch.randint(config.vocab_size, (n_rows,), device=device)

    def in_blocks(logits: int) -> Tensor:
        limits = dict.fromkeys(("LOGITS_PER_BLOCK", "LOGITS_PER_BLOCK_OF_A_GPU"), logits)
        with mock.patch.multiple(cross_entropy, **limits):
            return cross_entropy.linear_cross_entropy(hidden_RD, weight_VD, targets_R).mean()

    def at_once() -> Tensor:
        return F.cross_entropy((hidden_RD @ weight_VD.T).float(), targets_R)

    losses: dict[str, Callable[[], Tensor]] = {
        f"blocks of 2^{power} logits": partial(in_blocks, 2**power) for power in BLOCKS
    }
    losses["all logits at once"] = at_once

    def run(form: str) -> tuple[float, float | None]:
        return weighed(lambda: torch.autograd.grad(losses[form](), hidden_RD), device)

    runs = {form: partial(run, form) for form in losses}
    for row, _ in rows_of(f"loss, {name}, {n_rows} tokens", runs, repeats):
        yield row


def measured(a: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Every row, as it is measured."""
    configs = configurations()
    for name in a.models:
        reader, _, lm = name.rpartition("/")
        for method in a.methods:
            models = build(configs[lm], method, device, reader=configs.get(reader), full=a.full)
            flops = flops_of_a_group(models, a.tokens)
            for groups in sorted(a.groups):
                features = batch(models, groups, a.tokens)
                size = f"{groups} x {models.group_size} x {a.tokens} tokens"
                what = f"step, {method}, {name}, {size}"
                yield from step_rows(what, models, features, a.repeats, a.forms, flops)
            del models
            gc.collect()
        n_rows = max(a.groups) * Recipe.of().groups.group_size * (a.tokens - 1)
        yield from loss_rows(lm, configs[lm], n_rows, a.repeats, device)


def print_row(row: Row) -> None:
    numbers = ", ".join(f"{k} {v:.3g}" for k, v in row.items() if isinstance(v, float))
    print(f"{row['what']:<48} {row['form']:<38} {numbers}{row.get('note', '')}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--models", nargs="*", default=["135M", "0.5B", "1B"])
    add("--methods", nargs="*", default=["revela-gated", "revela-paper"])
    add("--groups", type=int, nargs="*", default=[1, 4, 16], help="groups a device batch")
    add("--tokens", type=int, default=160, help="of a chunk")
    add("--repeats", type=int, default=5)
    add("--forms", nargs="*", default=FORMS)
    add("--full", action="store_true", help="train all weights in place of LoRA")
    arguments = parser.parse_args()
    silence_libraries()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = list[Row]()
    for row in measured(arguments, device):
        print_row(row)
        rows.append(row)
        write_out("steps.json", rows)


if __name__ == "__main__":
    main()
