"""Build or open the retriever: a Sentence-Transformers model, or a decoder's lower layers, pooled.

It consists of stock modules only, so a saved one loads in stock sentence-transformers: the
tokenizer itself appends the EOS that ``eos`` pooling reads, and prompts are stored with the model.
Then fit.py fits the pooling to a corpus, lora.py adds what is trained, encode.py runs the model,
and save.py writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

from revela.errors import RevelaError, first_line
from revela.model_files import SAVE_AGAIN, check_retriever
from revela.retriever.routes import has_routes
from revela.retriever.static_trainable import make_trainable
from revela.settings import Recipe
from revela.silence import loading_bar
from revela.types import Document

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

POOLING_MODES = {"eos": "lasttoken", "mean": "mean", "weighted-mean": "weightedmean"}


def load_retriever(folder: Path | str, device: str | None = None) -> SentenceTransformer:
    """Open a saved retriever, or any Sentence-Transformers folder, in fp32, whatever its weights
    are stored in; on a GPU if there is one and no ``device`` is named.
    """
    check_retriever(Path(folder))
    try:
        with loading_bar(Path(folder)):
            model = SentenceTransformer(str(folder), device=device, local_files_only=True)
            return model.float()
    except Exception as error:  # tokenizers raise no other for a damaged file
        reason = first_line(error)
        if "pytorch_model.bin" in reason:  # neither is there: the hub's is not downloaded
            reason = f"a module has no weights in safetensors, and {SAVE_AGAIN}"
        raise RevelaError(
            f"{folder} cannot be opened as a Sentence-Transformers model: {reason}"
        ) from error


def build_retriever(
    folder: Path,
    *,
    layers: int,
    pooling: str,
    max_tokens: int,
    lower_case: bool,
    query_prompt: str,
    passage_prompt: str,
) -> SentenceTransformer:
    """Build an untrained retriever in fp32, as bf16 would round small updates of LoRA away.

    A Sentence-Transformers folder is taken as it is; the other arguments are for decoders.

    Args:
        layers: how many of the decoder's lower layers to keep; 0: all. Its final norm stays.
        pooling: a key of ``POOLING_MODES``.
        max_tokens: where texts are truncated, prompt and special tokens included.
    """
    if (folder / "modules.json").is_file():
        model = load_retriever(folder)
        if has_routes(model):
            raise RevelaError(
                f"{folder} reads queries and passages by different modules (Router), and training "
                "takes a model with one: give another --model"
            )
        if isinstance(model[0], modules.Transformer):
            add_missing_rows(model[0])
        return model
    try:
        # A named modality, so that an instruct model's chat template is not applied: text is
        # embedded as it is, not as a user's turn.
        with loading_bar(folder):
            transformer = modules.Transformer(
                str(folder),
                model_kwargs={"dtype": torch.float32},
                max_seq_length=max_tokens,
                do_lower_case=lower_case,
                modality_config={
                    "text": {"method": "forward", "method_output_name": "last_hidden_state"}
                },
                module_output_name="token_embeddings",
            )
    except Exception as error:
        raise RevelaError(f"{folder} cannot be opened as a model: {first_line(error)}") from error
    if layers and not hasattr(transformer.model.config, "decoder"):  # T5Gemma has two depths
        keep_lower_layers(transformer.model, layers)
    tokenizer = transformer.tokenizer
    tokenizer.padding_side = "right"
    tokenizer.chat_template = None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if pooling == "eos":
        _append_eos(tokenizer)
    add_missing_rows(transformer)
    width = transformer.get_embedding_dimension()
    parts = [
        transformer,
        modules.Pooling(width, pooling_mode=POOLING_MODES[pooling]),
        modules.Normalize(),
    ]
    prompts = {"query": query_prompt, "document": passage_prompt, "passage": passage_prompt}
    return SentenceTransformer(modules=parts, prompts=prompts, similarity_fn_name="cosine")


def add_missing_rows(transformer: modules.Transformer) -> None:
    """Give each token a row of the embedding table, in place; a new row is 0.

    Some models (Gemma 3) have a token for images that their text never has, and no row for it.
    """
    model, tokenizer = transformer.model, transformer.tokenizer
    rows = model.get_input_embeddings().num_embeddings
    if rows >= len(tokenizer):
        return
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.get_input_embeddings().weight.data[rows:] = 0


def set_parts(model: SentenceTransformer, parts: Sequence[nn.Module]) -> None:
    """Replace a model's modules, in place, on its device."""
    device = model.device  # an empty model has none
    model._modules.clear()
    for i, part in enumerate(parts):
        model.add_module(str(i), part.to(device))


def keep_lower_layers(model: PreTrainedModel, layers: int) -> None:
    """Cut a transformer to its lower layers, in place; its final norm stays."""
    depth = int(model.config.num_hidden_layers)
    if layers >= depth:
        return
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                setattr(module, name, child[:layers])
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]


def _append_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make the tokenizer end every text with EOS, after truncation."""
    from tokenizers.processors import TemplateProcessing

    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    before = special[: special.index(plain[0])]
    if special[-1] == tokenizer.eos_token_id and len(special) > len(before) + len(plain):
        return
    front = tokenizer.convert_ids_to_tokens(before)
    tokens = [*front, tokenizer.eos_token]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*front, "$A", tokenizer.eos_token],
        special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in dict.fromkeys(tokens)],
    )


def untrained_retriever(
    recipe: Recipe, folder: Path, documents: Sequence[Document]
) -> SentenceTransformer:
    """The retriever before anything is fitted or trained."""
    settings = recipe.retriever
    lower_case = settings.lower_case == "yes"
    if settings.lower_case == "auto" and has_no_case(documents):
        lower_case = True
        logging.getLogger(__name__).info(
            "the corpus has one case only: queries and passages are folded to lower case"
        )
    model = build_retriever(
        folder,
        layers=settings.layers,
        pooling=settings.pooling,
        max_tokens=settings.max_tokens,
        lower_case=lower_case,
        query_prompt=settings.query_prompt,
        passage_prompt=settings.passage_prompt,
    )
    if not isinstance(model[0], modules.Transformer):
        make_trainable(model)
    return model


def has_no_case(documents: Sequence[Document], share: float = 0.005) -> bool:
    """Whether a corpus has one case only, so that queries have to be folded to it."""
    sample = "".join(d.full_text[:2000] for d in documents[:: max(1, len(documents) // 500)])
    letters = sum(c.isalpha() for c in sample)
    capitals = sum(c.isupper() for c in sample)
    return letters > 0 and min(capitals, letters - capitals) < share * letters
