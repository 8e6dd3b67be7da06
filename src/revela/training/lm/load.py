"""Open a causal LM of transformers and its tokenizer from a local folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from revela.encoders.model_files import refuse_missing
from revela.errors import RevelaError, first_line
from revela.terminal import loading_bar
from revela.training.lm.language_model import LanguageModel


def load_language_model(
    folder: Path, *, bf16: bool, lora: Mapping[str, Any] | None = None, name: str = ""
) -> LanguageModel:
    """Load a causal LM for the two streams, frozen or with LoRA.

    Args:
        bf16: bf16 weights (frozen), or fp32 weights under bf16 autocast (LoRA); else fp32.
        lora: rank, alpha and dropout of LoRA on every linear layer of the blocks; None: frozen.
        name: its name in messages.
    """
    model = open_causal_lm(folder, torch.bfloat16 if bf16 and lora is None else torch.float32)
    if lora is None:
        return LanguageModel(model, name or str(folder))
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return LanguageModel(get_peft_model(model, config), name or str(folder), bf16=bf16)


def check_language_model(folder: Path, name: str) -> None:
    """Refuse a model that cannot be the LM of a run, without reading its weights.

    Raises:
        RevelaError: as ``LanguageModel`` does, transformers has no such causal LM, or its files
            lack weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = opened(AutoConfig, folder)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of a family's own code
        reason = first_line(error)
        raise RevelaError(f"{folder} cannot be opened as a causal LM: {reason}") from error
    with suppress(NotImplementedError):  # what depends on values, such as routing to experts
        LanguageModel(model.eval(), name)
    opened_model(AutoModelForCausalLM, folder, device_map="meta")


def open_causal_lm(folder: Path, dtype: torch.dtype) -> Any:
    """A causal LM from a local folder, frozen."""
    from transformers import AutoModelForCausalLM

    return opened_model(AutoModelForCausalLM, folder, dtype=dtype).requires_grad_(False).eval()


def load_tokenizer(folder: Path) -> Any:
    """An LM's tokenizer; one without a padding token pads with EOS, or any token."""
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
    try:
        with loading_bar(folder):
            return auto.from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # tokenizers raise no other for a damaged file
        reason = first_line(error)
        raise RevelaError(f"{folder} cannot be opened as {kind}: {reason}") from error
