"""Find the models that a recipe names, and open those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela.encoders.base import TextEncoder
from revela.encoders.embedded import SMOLLM2, log_once
from revela.encoders.load import load_encoder, resolve
from revela.encoders.model_files import Unreachable, opening, refuse_missing
from revela.training.settings import LM, Retriever, TorchPrecision

if TYPE_CHECKING:
    import torch


def find_weights(name: str, offline_model: str) -> Path:
    """The folder that ``find_model`` finds."""
    return find_model(name, offline_model)[1]


def find_model(name: str, offline_model: str) -> tuple[str, Path]:
    """A model's name and folder (``resolve``). Without a network ``offline_model``, if given,
    replaces a recipe's default model.

    Raises:
        RevelaError: as ``resolve`` does.
    """
    try:
        return name, resolve(name)
    except Unreachable as error:
        if name not in (Retriever.model, LM.lm):
            raise
        if not offline_model:
            raise Unreachable(
                f"{name} is not cached, the hub cannot be reached, and these settings take no "
                f"other model in its place: connect, or give --model and --lm {SMOLLM2}"
            ) from error
        log_once(f"{name} is not cached and the hub cannot be reached: using {offline_model}")
        return offline_model, resolve(offline_model)


def open_causal_lm(folder: Path, dtype: torch.dtype) -> Any:
    """A causal LM from a local folder, frozen."""
    from transformers import AutoModelForCausalLM

    return opened_model(AutoModelForCausalLM, folder, dtype=dtype).requires_grad_(False).eval()


def load_tokenizer(folder: Path) -> Any:
    """An LM's tokenizer; without a padding token of its own it pads with EOS, or any token."""
    from transformers import AutoTokenizer

    tokenizer = opened(AutoTokenizer, folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def opened_model(auto: Any, folder: Path, kind: str = "a causal LM", **settings: Any) -> Any:
    """``opened``, for a class of models; refuses a folder that lacks weights."""
    model, report = opened(auto, folder, kind, output_loading_info=True, **settings)
    refuse_missing(folder, report["missing_keys"])
    return model


def opened(auto: Any, folder: Path, kind: str = "a causal LM", **settings: Any) -> Any:
    """Load a class of transformers from a folder."""
    with opening(folder, kind):
        return auto.from_pretrained(folder, local_files_only=True, **settings)


def load_surrogate(name: str, precision: TorchPrecision, max_tokens: int) -> TextEncoder:
    """The encoder that ``--surrogate`` or ``--filter`` names."""
    return load_encoder(find_weights(name, ""), precision, max_tokens)
