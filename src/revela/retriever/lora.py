from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

if TYPE_CHECKING:
    pass


def add_lora(model: SentenceTransformer, rank: int, alpha: int, dropout: float) -> None:
    """Freeze the model and put LoRA on the linear layers inside the transformer's blocks, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    transformer = model[0].model
    targets = [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and "layer" in name
    ]
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets),
        transformer,
    )


@contextlib.contextmanager
def without_lora(model: SentenceTransformer) -> Iterator[None]:
    """Inside, the model is what it was before ``add_lora``."""
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
    """A copy with LoRA merged into the weights, made of stock modules only."""
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
            module.word_weights = dict(
                zip(module.vocab, module.emb_layer.weight[:, 0].tolist(), strict=True)
            )
    return model.requires_grad_(False).eval()
