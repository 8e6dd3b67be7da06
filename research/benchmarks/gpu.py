"""Tokens per second, model FLOP utilisation and memory of a training step on a GPU.

    python -m research.benchmarks.gpu    # all of it; some minutes on a large GPU
    python -m research.benchmarks.gpu --gpu-models 135M --gpu-presets gated --gpu-groups 16

Models have random weights in the shapes of SmolLM2-135M, Qwen2.5-0.5B and Llama-3.2-1B, as
retriever and as LM; tokens are random, the same number in every chunk. Each preset runs with
several groups per device batch. Forms (forms.py) in turn: ours with document attention in torch,
ours with the Triton kernel, and the bound without it, whose time the others' is divided by. A step
is forward and backward, without tokenization and the optimizer.

- tokens_per_second: tokens of the chunks, each counted once.
- mfu: FLOP that the step needs without document attention (flops.py), over time and the device's
  peak; mfu_with_documents counts it too, and documents_share is its share of all.
- peak_gb: what a step allocates beside the models (model_gb).
- loss: from the same weights and random numbers, so a form that computes something else shows.

Then the loss of the LM's head alone, in blocks of different sizes (lm/cross_entropy.py) and with
all logits at once. `make bench` runs this where there is a GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.benchmarks.flops import (
    Shape,
    document_flops,
    lm_flops,
    peak_flops,
    product_flops,
    retriever_flops,
)
from research.benchmarks.forms import (
    BOUND,
    OURS,
    TRITON,
    Features,
    Models,
    in_turn,
    one_step,
    timed,
)
from research.benchmarks.rows import Row, print_row, ratio
from revela.device import autocast, has_fast_bf16
from revela.lm.cross_entropy import linear_cross_entropy
from revela.lm.language_model import LanguageModel
from revela.objectives.gradcache import embed
from revela.packing import packed
from revela.retriever.build import POOLING_MODES
from revela.retriever.lora import add_lora
from revela.settings import Recipe, presets
from revela.silence import silence_libraries

FORMS = [OURS, TRITON, BOUND]
BLOCKS = [23, 25, 27, 29]  # powers of two: logits a block
OUT = Path(__file__).parents[1] / "out"


def configurations() -> dict[str, Any]:
    """Shapes by name."""
    from transformers import LlamaConfig, Qwen2Config

    def sizes(
        vocabulary: int, width: int, mlp: int, layers: int, heads: int, key_heads: int
    ) -> dict[str, Any]:
        return dict(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )

    return {
        "135M": LlamaConfig(**sizes(49152, 576, 1536, 30, 9, 3)),
        "0.5B": Qwen2Config(**sizes(151936, 896, 4864, 24, 14, 2)),
        "1B": LlamaConfig(**sizes(128256, 2048, 8192, 16, 32, 8)),
    }


class Reader(nn.Module):
    """A transformers model as the first module of a Sentence-Transformers model, without a
    tokenizer.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        output = self.model(
            input_ids=features["input_ids"], attention_mask=features["attention_mask"]
        )
        return {**features, "token_embeddings": output.last_hidden_state}


def build(config: Any, preset: str, device: torch.device) -> Models:
    """A preset's models with random weights of this shape, in the precision that training gives
    them.
    """
    from sentence_transformers.sentence_transformer import modules
    from transformers import AutoModel, AutoModelForCausalLM

    r = Recipe.of(**presets()[preset])
    bf16 = has_fast_bf16(device)
    config, lower = copy.deepcopy(config), copy.deepcopy(config)
    lower.num_hidden_layers = min(
        r.retriever.layers or config.num_hidden_layers, config.num_hidden_layers
    )
    if getattr(lower, "layer_types", None):
        lower.layer_types = lower.layer_types[: lower.num_hidden_layers]
    with device:  # where the weights are made
        body = AutoModel.from_config(lower, dtype=torch.float32)
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if bf16 and not r.objective.lm_lora else torch.float32
        )
    pooling = modules.Pooling(config.hidden_size, pooling_mode=POOLING_MODES[r.retriever.pooling])
    retriever = nn.Sequential(Reader(body), pooling, modules.Normalize())
    add_lora(retriever, r.retriever.lora_rank, r.retriever.lora_alpha, r.retriever.lora_dropout)
    lm.requires_grad_(False).eval()
    if r.objective.lm_lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=r.retriever.lora_rank,
            lora_alpha=r.retriever.lora_alpha,
            lora_dropout=r.retriever.lora_dropout,
            target_modules="all-linear",
        )
        lm = get_peft_model(lm, lora).train()
    sim_dtype = torch.bfloat16 if r.objective.sim_dtype == "bf16" else None
    return Models(
        r,
        retriever.train(),
        LanguageModel(lm, bf16=bf16 and r.objective.lm_lora).to(device),
        device,
        bf16,
        r.groups.group_size,
        sim_dtype,
    )


def batch(models: Models, groups: int, tokens: int) -> Features:
    """Groups of random chunks, as the retriever reads them twice and as the LM does."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = models.inner.config.vocab_size
    ids_BL = torch.randint(
        vocabulary, (groups * models.group_size, tokens), generator=generator
    ).to(models.device)
    return tuple(
        {"input_ids": t, "attention_mask": torch.ones_like(t)}
        for t in (ids_BL[:, : tokens // 2].clone(), ids_BL, ids_BL)
    )


@torch.no_grad()
def heavy_pairs(models: Models, features: Features) -> int:
    """Pairs of chunks whose weight is large enough to be computed."""
    with packed(models.retriever[0].model), autocast(models.device, models.bf16):
        query_BD, passage_BD = (embed(models.retriever, side, 0) for side in features[:2])
    return int(
        (models.objective().weights(query_BD, passage_BD) > models.recipe.objective.epsilon).sum()
    )


def needed(models: Models, features: Features) -> tuple[float, float]:
    """FLOP of a step: without document attention, and of document attention."""
    r, config = models.recipe, models.inner.config
    query, passage, chunk = (
        [side["input_ids"].shape[1]] * len(side["input_ids"]) for side in features
    )
    lm = Shape.of(config, rank=r.retriever.lora_rank if r.objective.lm_lora else 0)
    if models.gates_LH is None:
        heads = dict.fromkeys(range(lm.layers), lm.heads)
    else:
        heads = {i: n for i, n in enumerate(models.gates_LH.count_nonzero(dim=1).tolist()) if n}
    plain = retriever_flops(
        Shape.of(config, r.retriever.layers, r.retriever.lora_rank), [*query, *passage]
    )
    plain += lm_flops(lm, chunk, sorted(heads), r.objective.lm_lora)
    return plain, document_flops(
        lm, heads, heavy_pairs(models, features) * chunk[0] ** 2, r.objective.lm_lora
    )


class Meter:
    """Runs steps of a form and keeps their loss and memory beside their time."""

    def __init__(self, models: Models, features: Features) -> None:
        self.models, self.features = models, features
        self.peak_gb: dict[str, float] = {}
        self.loss: dict[str, float] = {}

    def step(self, form: str) -> float:
        device = self.models.device
        torch.manual_seed(0)  # the same dropout for every form
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        seconds, loss = one_step(self.models, form, self.features)
        self.loss[form] = float(loss)
        if device.type == "cuda":
            self.peak_gb[form] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        return seconds


def step_rows(
    name: str,
    preset: str,
    models: Models,
    groups: int,
    tokens: int,
    repeats: int,
    forms: Sequence[str],
    peak: float,
) -> Iterator[Row]:
    """One model, preset and batch size, in all forms."""
    features = batch(models, groups, tokens)
    what = f"GPU step, {preset}, {name}, {groups} x {models.group_size} x {tokens} tokens"
    meter = Meter(models, features)
    failures: dict[str, str] = {}
    times = in_turn({form: partial(meter.step, form) for form in forms}, repeats, failures=failures)
    plain, documents = needed(models, features) if times else (0.0, 0.0)
    for form in forms:
        row: Row = {"what": what, "form": form, "model": name, "preset": preset, "groups": groups}
        if form not in times:
            yield row | {"note": failures[form]}
            continue
        seconds = statistics.median(times[form])
        row |= {
            "seconds": seconds,
            "tokens_per_second": features[2]["input_ids"].numel() / seconds,
            "mfu": plain / seconds / peak,
        }
        if BOUND in times:
            row["to_bound"] = ratio(times[form], times[BOUND])
        if form in (OURS, TRITON):
            row["mfu_with_documents"] = (plain + documents) / seconds / peak
            row["documents_share"] = documents / (plain + documents)
            row["loss"] = meter.loss[form]
        if form in meter.peak_gb:
            row["peak_gb"] = meter.peak_gb[form]
            row["model_gb"] = (
                sum(
                    p.numel() * p.element_size()
                    for m in (models.retriever, models.lm)
                    for p in m.parameters()
                )
                / 2**30
            )
        yield row


def loss_rows(
    name: str, config: Any, n_rows: int, repeats: int, device: torch.device, peak: float
) -> Iterator[Row]:
    """Forward and backward of the LM's frozen head and its cross-entropy."""
    dtype = torch.bfloat16 if has_fast_bf16(device) else torch.float32
    hidden_RD = torch.randn(
        n_rows, config.hidden_size, device=device, dtype=dtype, requires_grad=True
    )
    weight_VD = torch.randn(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
    targets_R = torch.randint(config.vocab_size, (n_rows,), device=device)
    peaks: dict[str, float] = {}

    def in_blocks(logits: int) -> Tensor:
        return linear_cross_entropy(hidden_RD, weight_VD, targets_R, None, logits).mean()

    def at_once() -> Tensor:
        return F.cross_entropy((hidden_RD @ weight_VD.T).float(), targets_R)

    forms: dict[str, Callable[[], Tensor]] = {
        f"blocks of 2^{power} logits": partial(in_blocks, 2**power) for power in BLOCKS
    }
    forms["all logits at once"] = at_once

    def run(form: str) -> float:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        seconds = timed(lambda: torch.autograd.grad(forms[form](), hidden_RD), device)
        if device.type == "cuda":
            peaks[form] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        return seconds

    failures: dict[str, str] = {}
    times = in_turn({form: partial(run, form) for form in forms}, repeats, failures=failures)
    for form in forms:
        row: Row = {"what": f"GPU loss, {name}, {n_rows} tokens", "form": form, "model": name}
        if form not in times:
            yield row | {"note": failures[form]}
            continue
        seconds = statistics.median(times[form])
        row |= {"seconds": seconds, "mfu": 2 * 2.0 * weight_VD.numel() * n_rows / seconds / peak}
        yield row | ({"peak_gb": peaks[form]} if form in peaks else {})


def rows(
    arguments: argparse.Namespace, configs: dict[str, Any], device: torch.device
) -> Iterator[Row]:
    """Every row, as it is measured; nothing new begins after --gpu-minutes."""
    begun = time.monotonic()
    peak, source = peak_flops(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    yield {"what": f"peak of {name}, by {source}", "form": "bf16", "tflops": peak / 1e12}
    if device.type == "cuda":
        yield {
            "what": f"a large product on {name}",
            "form": "bf16",
            "tflops": product_flops(device) / 1e12,
        }
    for model in arguments.gpu_models:
        for preset in arguments.gpu_presets:
            models = None
            for groups in sorted(arguments.gpu_groups):
                if time.monotonic() - begun > 60 * arguments.gpu_minutes:
                    what = f"GPU step, {preset}, {model}, {groups} groups"
                    limit = f"{arguments.gpu_minutes:g} minutes were over (--gpu-minutes)"
                    yield {"what": what, "form": "all", "note": f"left out: {limit}"}
                    continue
                models = models or build(configs[model], preset, device)
                yield from step_rows(
                    model,
                    preset,
                    models,
                    groups,
                    arguments.gpu_tokens,
                    arguments.gpu_repeats,
                    arguments.gpu_forms,
                    peak,
                )
            del models
            free(device)
        if time.monotonic() - begun <= 60 * arguments.gpu_minutes:
            n_rows = (
                max(arguments.gpu_groups)
                * Recipe.of().groups.group_size
                * (arguments.gpu_tokens - 1)
            )
            yield from loss_rows(model, configs[model], n_rows, arguments.gpu_repeats, device, peak)
            free(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def the_gpu() -> torch.device:
    """The GPU to measure."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA GPU is at hand: run this where there is one, or leave gpu out of --what"
        )
    return torch.device("cuda", torch.cuda.current_device())


def run(arguments: argparse.Namespace, device: torch.device, before: list[Row], path: Path) -> None:
    """Measure, print, and append each row to the file."""
    for row in rows(arguments, configurations(), device):
        print_row(row)
        before.append(row)
        path.write_text(json.dumps(before, indent=1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a GPU")
    group.add_argument("--gpu-models", nargs="*", default=["135M", "0.5B", "1B"])
    group.add_argument("--gpu-presets", nargs="*", default=["gated", "paper"])
    group.add_argument(
        "--gpu-groups", type=int, nargs="*", default=[1, 4, 16], help="groups a device batch"
    )
    group.add_argument(
        "--gpu-minutes", type=float, default=8, help="after which no other size begins"
    )
    group.add_argument("--gpu-tokens", type=int, default=160, help="of a chunk")
    group.add_argument("--gpu-repeats", type=int, default=5)
    group.add_argument("--gpu-forms", nargs="*", default=FORMS)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--out", default="gpu", help="name of the file in research/out")
    arguments = parser.parse_args()
    silence_libraries()
    OUT.mkdir(exist_ok=True)
    run(arguments, the_gpu(), [], OUT / f"{arguments.out}.json")


if __name__ == "__main__":
    main()
