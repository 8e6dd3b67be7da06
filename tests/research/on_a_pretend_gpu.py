"""Run steps, probes and the fit on the CPU and on a pretended GPU; print the results as JSON.

    python -m tests.research.on_a_pretend_gpu FOLDER-OF-A-TINY-LM

The device is pretended from the import of ``pretend_gpu`` on.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from research.benchmarks import steps
from revela import packing as packed_attention
from revela.device import sent
from revela.lm.heads import probe_heads, score_query_heads
from revela.lm.language_model import LanguageModel
from revela.objectives.distillation import InitialRetriever
from revela.objectives.dream import DreamLoss
from revela.objectives.gains import GainsLoss
from revela.objectives.replug import ReplugLoss
from revela.objectives.revela import gates_in_upper_layers
from revela.packing import packed
from revela.retriever import module
from revela.retriever.fit import fit_to_corpus
from revela.retriever.module import RetrieverModule
from revela.settings import Fit
from tests.conftest import Embed, tiny_config, tiny_retriever
from tests.research.pretend_gpu import DEVICE, waits

CPU = torch.device("cpu")
OBJECTIVES = "gains", "replug", "dream"


def numbers(tensor: Tensor) -> list[Any]:
    return getattr(tensor, "on_host", tensor).flatten().tolist()


def step(preset: str, groups: int, device: torch.device, bf16: bool = False) -> dict[str, Any]:
    """Loss and gradients of a step whose chunks differ in length, and the host's waits."""
    torch.manual_seed(0)
    steps.has_fast_bf16 = lambda _device: bf16
    models = steps.build(tiny_config("llama"), preset, CPU)
    for name, p in models.retriever.named_parameters():
        if "lora_B" in name:  # zero at first, and then LoRA's other factor gets no gradient
            p.data.normal_(std=0.1)
    models.group_size = 4
    features = steps.batch(models, groups, 6)
    for side in features:
        side["attention_mask"][::4, 2:] = 0
    models.device = device
    models.retriever.to(device).eval()
    models.lm.to(device).eval()
    features = [{name: sent(t, device) for name, t in side.items()} for side in features]
    objective = models.step(steps.OURS)
    with packed(models.retriever.model[0].model):  # which tries once whether it may
        waits.clear()
    loss = objective(features)
    loss.backward()
    counted = dict(waits)
    gradients = [numbers(p.grad) for p in models.retriever.parameters() if p.requires_grad]
    return {"loss": float(loss), "gradients": gradients, "waits": counted}


def objective(name: str, device: torch.device) -> dict[str, Any]:
    """Loss, gradient of the retriever and waits of a step of an objective that is not ``step``'s:
    two groups of three candidates, of which the first has two questions and the second one.
    """
    torch.manual_seed(0)
    lm = LanguageModel(LlamaForCausalLM(tiny_config("llama")).eval().requires_grad_(False))
    document = [-1, 0, 0, 0, -1, 1, 1, -1, 2, 2, 2, 2, -1]
    question, passage, chunk, prompt, tail = (
        {"input_ids": (ids := torch.randint(3, 400, size)), "attention_mask": torch.ones_like(ids)}
        for size in ((3, 4), (6, 4), (6, 7), (2, len(document)), (5, 6))
    )
    chunk["attention_mask"][1, 3:] = chunk["attention_mask"][4, 5:] = 0
    prompt["document"] = torch.tensor([document] * 2)
    tail["role"] = torch.tensor([[0, 1, 1, 1, 1, 1]] * 5)
    tail["group"] = torch.tensor([0, 0, 0, 1, 1])
    start, shared = InitialRetriever(cache=True), dict(tau=0.2, group_size=3)
    gated = dict(gates_LH=gates_in_upper_layers(lm, 0.5, 2))
    heads = [(2, 3), (0, 1), (2, 0)]
    if name == "gains":
        more: Any = dict(initial=start)
        # Standard scores of two candidates say only which is greater, if equal by rounding.
        more["group_size"] = 6
        loss_of: Any = GainsLoss(Embed(), lm, **gated, **{**shared, **more})
    elif name == "replug":
        loss_of = ReplugLoss(Embed(), lm, tau_lm=0.2, **shared)
    else:
        tail = {part: values[[0, 1, 3]] for part, values in tail.items()}  # without "N/A"
        tail["role"][:, 4:] = 2
        loss_of = DreamLoss(Embed(), lm, heads, gate=0.5, **shared)
    sides = [passage, passage, chunk]
    if name == "dream":
        sides = [question, passage, prompt, tail]
    loss_of.to(device)
    lm.to(device)
    features = [{part: sent(t, device) for part, t in side.items()} for side in sides]
    waits.clear()
    loss = loss_of(features)
    loss.backward()
    counted = dict(waits)
    gradient = numbers(loss_of.model.table.weight.grad)
    return {"loss": float(loss), "gradients": [gradient], "waits": counted}


def probes(device: torch.device) -> list[Any]:
    """Scores of both searches for heads; what they read comes from the CPU."""
    torch.manual_seed(0)
    lm = LanguageModel(LlamaForCausalLM(tiny_config("llama")).eval().requires_grad_(False))
    generator = torch.Generator().manual_seed(0)
    chunk, text, tail = (
        torch.randint(3, 400, size, generator=generator) for size in ((4, 6), (1, 8), (3, 5))
    )
    document, role = torch.tensor([[0, 0, 1, 1, 2, 2, -1, -1]]), torch.tensor([[1, 1, 2, 2, 0]] * 3)
    prompt = {"input_ids": text, "attention_mask": torch.ones_like(text), "document": document}
    questions = {"input_ids": tail, "attention_mask": torch.ones_like(tail), "role": role}
    lm.to(device)
    siblings = probe_heads(
        lm, [(lm.pack(chunk, torch.ones_like(chunk)), torch.tensor([0, 0, 1, 1]))]
    )
    return [
        numbers(siblings),
        numbers(score_query_heads(lm, [(prompt, questions, torch.tensor([0, 2]))])),
    ]


def fit(folder: Path, device: torch.device) -> dict[str, Any]:
    """The retriever's devices after the fit, cosines of its vectors (equal up to rotation), and how
    often the fit waits, of batches of a few texts.
    """
    model = tiny_retriever(folder, max_tokens=32).eval()
    texts = [f"ocean{i % 3} engine{i % 5} garden{i % 7}" for i in range(40)]
    with torch.no_grad():
        model.to(device)
        retriever, module.TOKENS_ON_A_GPU = RetrieverModule(model), 100
        waits.clear()
        fit_to_corpus(retriever, texts, Fit(token_weighting=1e-2, whitening=0.4, lexical=1.0))
        counted = dict(waits)
        vectors_ND = retriever(retriever.tokenize(texts[:5], "document"))
        cosines = numbers(vectors_ND @ vectors_ND.T)
    return {
        "devices": sorted({p.device.type for p in model.parameters()}),
        "cosines": cosines,
        "waits": counted,
    }


def main() -> None:
    packed_attention.EXPLICIT_SCORES = 0  # as on a GPU, the fused form
    presets = "gated", "paper"
    found = {}
    for device in (CPU, DEVICE):
        of = found[device.type] = {name: objective(name, device) for name in OBJECTIVES}
        for preset, groups in product(presets, (1, 3)):
            of[f"{preset}, {groups} groups"] = step(preset, groups, device)
        for preset in presets:
            of[f"{preset}, bf16"] = step(preset, 2, device, bf16=True)
        of["probes"] = probes(device)
        of["fit"] = fit(Path(sys.argv[1]), device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
