"""Build or open the retriever, a Sentence-Transformers model or a decoder's lower layers, pooled.
LoRA is added to it here, and merged.

It consists of stock modules only, so a saved one loads in stock sentence-transformers: the
tokenizer itself appends the EOS that ``eos`` pooling reads, and prompts are stored with the model.
Then fit.py fits the pooling to a corpus, module.py runs the model, and save.py writes it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

from revela.encoders.model_files import opening
from revela.encoders.prompts import DECODER, Known, prompts_set
from revela.encoders.torch_model import add_missing_rows, check_weights, open_model, pooled
from revela.errors import RevelaError
from revela.training.packing import can_pack
from revela.training.retriever.static_trainable import TrainableTable, make_trainable
from revela.training.settings import Retriever
from revela.types import Document

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RARE_CASE = 0.005  # share of letters, below which a corpus does not have a case


def build_retriever(folder: Path, settings: Retriever) -> SentenceTransformer:
    """Build an untrained retriever in fp32, as bf16 would round small updates of LoRA away.

    A Sentence-Transformers folder keeps its modules, with the prompts and the similarity of the
    settings; for dot products it is not normalised. Any other model keeps its lower layers and the
    final norm, and reads lower case if ``lower_case`` is "yes".
    """
    given = settings.query_prompt, settings.passage_prompt
    if (folder / "modules.json").is_file():
        model = open_model(folder, prompts=prompts_set(*given))
        if isinstance(model[0], modules.Transformer):
            add_missing_rows(model[0])
        model.similarity_fn_name = settings.similarity
        if settings.similarity == "dot":
            set_parts(model, [part for part in model if not isinstance(part, modules.Normalize)])
        return model
    prompts = DECODER.replaced(prompts_set(*given))
    how = Known(prompts, settings.pooling, settings.max_tokens, settings.similarity)
    model = pooled(folder, how, torch.float32, settings.lower_case == "yes")
    has_two_depths = hasattr(model[0].model.config, "decoder")  # T5Gemma
    if settings.layers and not has_two_depths:
        keep_lower_layers(model[0].model, settings.layers)
    return model


def check_model(folder: Path, layers: int, lora_rank: int) -> None:
    """Refuse a model that cannot become a retriever and be trained, without reading its weights;
    numbers as in the settings.

    Raises:
        RevelaError: transformers does not know it, it reads other things than one text, or it has
            no lower layers or nothing that LoRA can change.
    """
    from sentence_transformers.base.modules import transformer as stock
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    check_weights(folder)
    with opening(folder, "a model"):
        if (folder / "modules.json").is_file():
            without_weights = {"device_map": "meta"}  # of transformers; other modules are small
            SentenceTransformer(str(folder), local_files_only=True, model_kwargs=without_weights)
            return
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            transformer = AutoModel.from_config(config)
    encoders = [kind for kind, *_ in stock._ENCODER_ONLY_MODELS]  # the library has no public list
    reasons = {
        "reads images too, and a retriever is made of text alone": hasattr(config, "vision_config"),
        "has a decoder that cannot be left out": config.is_encoder_decoder
        and not isinstance(config, tuple(encoders))
        and not config.model_type.startswith("t5gemma"),
        "reads padding like text, so a vector would depend on its batch": (
            "attention_mask" not in tokenizer.model_input_names
        ),
        "has no plain table of tokens": not isinstance(
            transformer.get_input_embeddings(), nn.Embedding
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise RevelaError(f"{folder} ({config.model_type}) {reason}: give another --model")
    if layers and not config.is_encoder_decoder:
        depth = config.get_text_config().num_hidden_layers
        if layers > depth and layers != Retriever().layers:
            raise RevelaError(
                f"--layers {layers}: {folder} has {depth} layers: give {depth} or fewer"
            )
        keep_lower_layers(transformer, layers)
        with torch.device("meta"):
            rebuilt = AutoModel.from_config(transformer.config)
        kept = _factors(transformer)
        if any(kept.get(name, value) != value for name, value in _factors(rebuilt).items()):
            raise RevelaError(
                f"{folder} ({config.model_type}) scales each layer by how many there are, so its "
                "lower ones cannot be saved alone: give --layers 0, or another --model"
            )
    if lora_rank:
        inject_lora(transformer, lora_rank, lora_rank, 0.0)


def _factors(model: PreTrainedModel) -> dict[tuple[str, str], float]:
    """Constants that the configuration gives to a model's modules, by module and name."""
    return {
        (part, name): value
        for part, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    }


def set_parts(model: SentenceTransformer, parts: Sequence[nn.Module]) -> None:
    """Replace a model's modules, in place, on its device."""
    device = model.device  # an empty model has none
    model._modules.clear()
    for i, part in enumerate(parts):
        model.add_module(str(i), part.to(device))


def keep_lower_layers(model: PreTrainedModel, layers: int) -> None:
    """Cut a transformer to its lower layers, in place; its final norm stays."""
    config = model.config.get_text_config()
    depth = int(config.num_hidden_layers)
    if layers >= depth:
        return
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                setattr(module, name, child[:layers])
    try:
        config.num_hidden_layers = layers
    except NotImplementedError as error:  # Funnel
        raise RevelaError(
            f"{type(model).__name__} cannot be cut to its lower layers: give --layers 0"
        ) from error
    for name, value in list(vars(config).items()):  # layer_types, Longformer's attention_window
        if isinstance(value, list) and len(value) == depth and not name.endswith("_id"):
            setattr(config, name, value[:layers])
    if hasattr(config, "attention_types"):  # GPT-Neo
        config.attention_types = [[config.attention_layers, 1]]


def untrained_retriever(
    settings: Retriever, folder: Path, documents: Sequence[Document]
) -> SentenceTransformer:
    """The retriever before anything is fitted or trained."""
    if settings.lower_case == "auto" and has_no_case(documents):
        settings = replace(settings, lower_case="yes")
        logging.getLogger(__name__).info(
            "the corpus has one case only: queries and passages are folded to lower case"
        )
    model = build_retriever(folder, settings)
    if not isinstance(model[0], modules.Transformer):
        make_trainable(model)
    return model


def has_no_case(documents: Sequence[Document]) -> bool:
    """Whether a corpus has one case only, so that queries have to be folded to it."""
    sample = "".join(d.full_text[:2000] for d in documents[:: max(1, len(documents) // 500)])
    letters = sum(c.isalpha() for c in sample)
    capitals = sum(c.isupper() for c in sample)
    return letters > 0 and min(capitals, letters - capitals) < RARE_CASE * letters


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
            f"{type(transformer).__name__} has no linear layers for LoRA: give --lora-rank 0"
        ) from error


def needs_merging(model: SentenceTransformer) -> bool:
    """Whether ``merged_copy`` would merge something."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer | TrainableTable) for module in model.modules())


@contextlib.contextmanager
def frozen_in_bf16(model: SentenceTransformer, bf16: bool) -> Iterator[None]:
    """While open, the transformer's frozen linear layers hold bf16 weights, if ``bf16``.

    Autocast would cast them in every forward pass. The fp32 weights are kept on the CPU.
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


def merged_copy(model: SentenceTransformer) -> SentenceTransformer:
    """A frozen copy on the CPU, of stock modules only, with LoRA or the trained table merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

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
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                child.merge()
                setattr(parent, name, child.get_base_layer())
    for module in model:
        if isinstance(module, modules.WordWeights):  # its weights are stored in its configuration
            weights = module.emb_layer.weight[:, 0].tolist()
            module.word_weights = dict(zip(module.vocab, weights, strict=True))
    return model.requires_grad_(False).eval()
