"""Find a model by name, as a folder that transformers or sentence-transformers opens.

A PEFT adapter is merged into its base once, in the cache, so that the rest of the package sees an
ordinary model: a Sentence-Transformers model if its base is one, else a language model. A retriever
that was published without modules (``prompts.KNOWN``) is saved with them there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path

from revela.encoders import torch_model
from revela.encoders.model_files import (
    ADAPTER,
    COPY_AGAIN,
    SAVE_AGAIN,
    TOKENIZER,
    find_folder,
    fingerprint,
    loaded_files,
    modules_of,
    name_of,
)
from revela.encoders.prompts import Known, known_of
from revela.errors import RevelaError, extra
from revela.files import atomic_write, cache_folder, remove_unfinished, writing

BASE = "base_model_name_or_path"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")


def resolve(name: str, above: tuple[Path, ...] = ()) -> Path:
    """Find a model's folder; download, convert or merge the model if necessary.

    Args:
        name: a folder, a hub id (owner/name, name@revision) or a name of ``EMBEDDED``.
        above: the adapters that this model is the base of.

    Raises:
        Unreachable: the hub cannot be reached, and the model is not cached.
        RevelaError: it is no model, is not installed, cannot be downloaded, or is an adapter that
            cannot be merged.
    """
    base = folder = find_folder(name)
    known = known_of(folder)
    if (folder / "modules.json").is_file():
        return folder
    if (folder / ADAPTER).is_file() and not any(folder.glob("model*.safetensors")):
        base = _base_of(name, folder, above)
    elif not known.pooling:
        return folder
    state = f"{fingerprint(folder)} {fingerprint(base)} {known}"
    digest = hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
    # Named as in the hub's cache, so that ``name_of`` finds the name.
    made = cache_folder() / "merged" / f"models--{name_of(folder).replace('/', '--')}" / digest
    if not made.is_dir():
        with writing(made.parent, wait=True), extra("train", f"converting {name}"):
            remove_unfinished(made.parent, [digest])
            if not made.is_dir():  # else another process has written it
                logging.getLogger(__name__).info(f"converting {name}, once")
                with atomic_write(made) as temporary:
                    _write(folder, base, known, temporary)
    return made


def _base_of(name: str, adapter: Path, above: tuple[Path, ...]) -> Path:
    """The folder of an adapter's base; a relative path may begin at the adapter's folder.

    Raises:
        RevelaError: the adapter is damaged or of another kind than LoRA, or the base is missing.
    """
    try:
        about = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))
        kind, base = about["peft_type"], str(about[BASE])
    except (OSError, ValueError, KeyError, TypeError):
        raise RevelaError(f"{adapter / ADAPTER} is damaged: {COPY_AGAIN}") from None
    if kind != "LORA":
        raise RevelaError(
            f"{name} is an adapter of kind {kind}: give one of LoRA, or a whole model"
        )
    if not (adapter / "adapter_model.safetensors").is_file():
        raise RevelaError(f"{name} has no adapter_model.safetensors: {SAVE_AGAIN}")
    if adapter in above:
        raise RevelaError(f"{name} is its own base")
    try:
        is_beside = not Path(base).exists() and (adapter / base).is_dir()
        return resolve(str(adapter / base) if is_beside else base, (*above, adapter))
    except RevelaError as error:
        raise RevelaError(f"the base of {name} ({BASE} in {ADAPTER}): {error}") from error


def _write(folder: Path, base: Path, known: Known, target: Path) -> None:
    """Write an adapter with its base, or a model that is known, to ``target``."""
    source = base
    if folder != base:
        inside = (place for kind, place in modules_of(base) if kind == "Transformer")
        place = next((p for p in inside if p.resolve().is_relative_to(base.resolve())), base)
        source = target / "merged" if known.pooling and place == base else target
        for file in map(base.joinpath, loaded_files(base)):
            if file.parent != place or not file.name.endswith(WEIGHTS):
                (source / file.relative_to(base)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, source / file.relative_to(base))
        for file in [file for pattern in TOKENIZER for file in folder.glob(pattern)]:
            shutil.copyfile(file, source / file.name)
        torch_model.merge_lora(folder, place, source / place.relative_to(base))
    if source != target:
        model = torch_model.pooled(source, known, "auto")
        model.save_pretrained(str(target), create_model_card=False)
        torch_model.keep_tokenizer(target, model.tokenizer)
        shutil.rmtree(target / "merged", ignore_errors=True)
