"""Add LoRA to a retriever, or merge it or a trainable table."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

from revela.encoders.torch_model import merge_adapters
from revela.errors import RevelaError
from revela.training.packing import can_pack
from revela.training.retriever.static_trainable import TrainableTable


def add_lora(model: SentenceTransformer, rank: int, alpha: int, dropout: float) -> None:
    """Freeze the model and add LoRA to the linear modules of the transformer's layers, in place.

    W becomes W + (alpha / rank) B A (Hu et al., ICLR 2022). A has ``rank`` rows. B starts at 0, so
    the model's vectors do not change yet. With rank 0 all weights of the transformer are trained.
    """
    model.requires_grad_(False)
    if rank:
        inject_lora(model[0].model, rank, alpha, dropout)
    else:
        model[0].model.requires_grad_(True)


def inject_lora(transformer: nn.Module, rank: int, alpha: int, dropout: float) -> None:
    """Put LoRA into the linear modules of a transformer's layers, in place.

    Raises:
        RevelaError: there are none that it can change.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D  # a linear module, with the weight transposed

    parts = dict(transformer.named_modules())
    lists = tuple(f"{name}." for name, part in parts.items() if isinstance(part, nn.ModuleList))
    inside = {name: part for name, part in parts.items() if name.startswith(lists)}
    linear = {n: part for n, part in inside.items() if isinstance(part, nn.Linear | Conv1D)}
    # A router of experts may be a linear module that gives more than a tensor (Llama 4).
    targets = [name for name, part in linear.items() if "Router" not in type(part).__name__]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in inside.values()),
    )
    try:
        inject_adapter_in_model(config, transformer)
    except ValueError as error:
        raise RevelaError(
            f"{type(transformer).__name__} has no linear modules in its layers that LoRA can "
            "change: train all weights by --lora-rank 0, or give another --model"
        ) from error


def needs_merging(model: SentenceTransformer) -> bool:
    """Whether ``merged`` would merge something."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer | TrainableTable) for module in model.modules())


@contextlib.contextmanager
def frozen_in_bf16(model: SentenceTransformer, bf16: bool) -> Iterator[None]:
    """While open, the transformer's frozen linear layers hold bf16 weights, if ``bf16``.

    Autocast would cast them in every forward pass. The fp32 weights wait on the CPU.
    """
    if bf16:
        can_pack(model[0].model)  # which is tried in fp32
    linear = [m for m in model[0].modules() if isinstance(m, nn.Linear)] if bf16 else []
    frozen = [p for m in linear for p in m.parameters(recurse=False) if not p.requires_grad]
    kept = [p.data.cpu() for p in frozen]
    for p in frozen:
        p.data = p.data.to(torch.bfloat16)
    try:
        yield
    finally:
        for p, whole in zip(frozen, kept, strict=True):
            p.data = whole.to(p.device)


def merged(model: SentenceTransformer) -> SentenceTransformer:
    """A frozen copy on the CPU, of stock modules only, with LoRA or the trained table merged."""
    # Copies tensors of a GPU to the CPU at once, without a second copy on the GPU.
    copies: dict[int, object] = {
        id(tensor): nn.Parameter(tensor.detach().to("cpu", copy=True), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("cpu", copy=True)
        for tensor in (*model.parameters(), *model.buffers())
    }
    model = copy.deepcopy(model, copies)
    if isinstance(model[0], TrainableTable):
        model[0] = model[0].stock()
    merge_adapters(model)
    for module in model:
        if isinstance(module, modules.WordWeights):  # its weights are stored in its configuration
            weights = module.emb_layer.weight[:, 0].tolist()
            module.word_weights = dict(zip(module.vocab, weights, strict=True))
    return model.requires_grad_(False).eval()
