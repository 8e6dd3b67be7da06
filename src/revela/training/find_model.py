"""Find the models that a recipe names, with a model that needs no network in place of a default."""

from __future__ import annotations

from pathlib import Path

from revela.encoders.embedded import SMOLLM2, log_once
from revela.encoders.model_files import Unreachable, resolve
from revela.training.settings import LM, Retriever


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
                f"{name} is not in the hub cache, the hub cannot be reached, and these settings "
                "take no other model in its place: connect, or name one by --model and --lm "
                f"({SMOLLM2})"
            ) from error
        log_once(f"{name} is not cached and the hub cannot be reached: using {offline_model}")
        return offline_model, resolve(offline_model)
