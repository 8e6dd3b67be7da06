"""LoRA on a retriever: add it, turn it off for a while, merge it into the weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn


def add_lora(model: SentenceTransformer, rank: int, alpha: int, dropout: float) -> None:
    """Freeze the model and add LoRA to the linear layers of the transformer's blocks, in place.

    W becomes W + (alpha / rank) B A (Hu et al., ICLR 2022), where A has ``rank`` rows; B starts at
    0, so the model's vectors do not change yet. With a rank of 0 there is no LoRA, and all weights
    of the transformer are trained.
    """
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    transformer = model[0].model
    if not rank:
        transformer.requires_grad_(True)
        return
    linear = [name for name, part in transformer.named_modules() if isinstance(part, nn.Linear)]
    targets = [name for name in linear if "layer" in name]
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets)
    inject_adapter_in_model(config, transformer)


@contextlib.contextmanager
def without_lora(model: SentenceTransformer) -> Iterator[None]:
    """While open, the model computes as it did before ``add_lora`` with a rank above 0."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(model: SentenceTransformer) -> SentenceTransformer:
    """A frozen copy on the CPU with LoRA merged into the weights, of stock modules only."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = copy.deepcopy(model).cpu()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                child.merge()
                setattr(parent, name, child.get_base_layer())
    if hasattr(model[0].model, "peft_config"):
        del model[0].model.peft_config
    for module in model:
        if isinstance(module, modules.WordWeights):  # its weights are stored in its configuration
            weights = module.emb_layer.weight[:, 0].tolist()
            module.word_weights = dict(zip(module.vocab, weights, strict=True))
    return model.requires_grad_(False).eval()
