"""Find a model; open a saved retriever for encoding: as a table of words or a graph, else by torch.

A PEFT adapter is merged into its base once, in the cache, so that the rest of the package sees an
ordinary model. A retriever that was published without modules (``prompts.KNOWN``) is saved with
modules in the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from revela.encoders import model_files
from revela.encoders.base import TextEncoder
from revela.encoders.cpu import has_gpu, has_torch
from revela.encoders.embedded import E5, MINILM
from revela.encoders.graph_encoder import GraphEncoder
from revela.encoders.graphs import VERSION, export_folder, open_graph
from revela.encoders.model_files import ADAPTER, COPY_AGAIN, fingerprint, hub_name, modules_of
from revela.encoders.prompts import OWN, GivenPrompts, Known, known_of
from revela.encoders.static_encoder import StaticEncoder
from revela.errors import RevelaError, extra, first_line
from revela.files import atomic_write, cache_folder, remove_unfinished, writing
from revela.types import Precision

log = logging.getLogger(__name__)
MAX_DIFFERENCE = 3e-4  # between a graph's vectors and torch's, in any component
BASE = "base_model_name_or_path"


def resolve(name: str) -> Path:
    """Find a model's folder; download, convert or merge the model if necessary.

    Args:
        name: a folder, a hub id (owner/name, name@revision) or a name of ``EMBEDDED``.

    Raises:
        Unreachable: the hub cannot be reached, and the model is not cached.
        RevelaError: it is not a model, is not installed, cannot be downloaded, or is an adapter
            that cannot be merged.
    """
    folder = model_files.find_folder(name)
    is_adapter = (folder / ADAPTER).is_file() and not any(folder.glob("model*.safetensors"))
    has_modules = (folder / "modules.json").is_file()
    if not is_adapter and (has_modules or not known_of(folder).pooling):
        return folder
    base, known = _base_of(name, folder) if is_adapter else folder, known_of(folder)
    state = f"{fingerprint(folder)} {fingerprint(base)} {known}"
    digest = hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
    # Named as in the hub's cache, so that ``name_of`` finds the name.
    made = cache_folder() / "merged" / f"models--{hub_name(folder).replace('/', '--')}" / digest
    if not made.is_dir():
        with writing(made.parent, wait=True), extra("train", f"converting {name}"):
            remove_unfinished(made.parent, [digest])
            if not made.is_dir():  # else another process has written it
                log.info(f"converting {name}, once")
                with atomic_write(made) as temporary:
                    _write(folder, base, known, temporary)
    return made


def _base_of(name: str, adapter: Path) -> Path:
    """The folder of an adapter's base; a relative path may start at the adapter's folder.

    Raises:
        RevelaError: the adapter is damaged or of another kind than LoRA, or the base is missing.
    """
    try:
        about = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))
        kind, base = about["peft_type"], str(about[BASE])
    except (OSError, ValueError, KeyError, TypeError):
        raise RevelaError(f"{adapter / ADAPTER} is damaged: {COPY_AGAIN}") from None
    if kind != "LORA" or not (adapter / "adapter_model.safetensors").is_file():
        raise RevelaError(
            f"{name} is an adapter of kind {kind}: give one of LoRA, in adapter_model.safetensors"
        )
    try:
        is_beside = not Path(base).exists() and (adapter / base).is_dir()
        where = adapter / base if is_beside else Path(base)
        if where.resolve() == adapter.resolve():
            raise RevelaError("it is its own base")
        return resolve(str(where) if is_beside else base)
    except RevelaError as error:
        raise RevelaError(f"the base of {name} ({BASE} in {ADAPTER}): {error}") from error


def _write(folder: Path, base: Path, known: Known, target: Path) -> None:
    """Write an adapter merged into its base, or a known model with modules, to ``target``."""
    from revela.encoders import torch_model

    source = base
    if folder != base:
        inside = (place for kind, place in modules_of(base) if kind == "Transformer")
        place = next((p for p in inside if p.resolve().is_relative_to(base.resolve())), base)
        has_modules = any((one / "modules.json").is_file() for one in (base, folder))
        source = target / "merged" if known.pooling and not has_modules else target
        weights = {*place.glob("*.safetensors*"), *place.glob("*.bin"), *folder.glob("adapter_*")}
        for root in (base, folder):
            for file in model_files.loaded_files(root):
                if root / file not in weights:
                    (source / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(root / file, source / file)
        torch_model.merge_lora(folder, place, source / place.relative_to(base))
    if source != target:
        model = torch_model.pooled(source, known, "auto")
        model.save_pretrained(str(target), create_model_card=False)
        torch_model.keep_tokenizer(target, model.tokenizer)
        shutil.rmtree(target / "merged", ignore_errors=True)


def load_encoder(
    folder: Path,
    precision: Precision = "auto",
    max_tokens: int | None = None,
    prompts: GivenPrompts = OWN,
    as_compared: bool = False,
) -> TextEncoder:
    """Open a saved retriever, or any Sentence-Transformers folder, for encoding.

    Args:
        folder: the retriever's folder.
        precision: arithmetic; "auto" is the fastest on this hardware: bf16 by torch, if there is a
            GPU and torch is installed.
        max_tokens: truncate texts here instead of at the model's own limit.
        prompts: replace the model's own.
        as_compared: do not normalise the vectors of a model for dot products. Otherwise all vectors
            have length one.

    Raises:
        RevelaError: the folder is not a retriever or is damaged, or torch is not installed and
            nothing else can read it.
    """
    model_files.check_retriever(folder)
    by_dot = as_compared and model_files.saved_for_dot(folder)
    encoder = _open(folder, precision, max_tokens, prompts, by_dot)
    encoder.words_to_vectors = model_files.words_to_vectors_of(folder)
    return encoder


def _open(
    folder: Path, precision: Precision, max_tokens: int | None, prompts: GivenPrompts, by_dot: bool
) -> TextEncoder:
    """Open a folder as a table if possible, else as a graph, else by torch."""
    if model_files.table_folder(folder) and not by_dot:
        return StaticEncoder.load(folder, max_tokens, prompts)
    if not by_dot and (precision == "int8" or not has_gpu()):
        how = precision, max_tokens, prompts
        encoder = _open_graph(folder, *how)
        if encoder is None and precision == "int8":  # an index in int8 whose export was deleted
            keep_graph(folder, even_with_gpu=True)
            encoder = _open_graph(folder, *how)
        if encoder is not None:
            return encoder
        if precision == "int8":
            raise RevelaError(
                f"{folder} cannot be read in int8: give --precision fp32 or install the extra train"
            )
    with extra("train", f"{folder}, a model that only torch reads,"):
        from revela.encoders.torch_encoder import TorchEncoder

        return TorchEncoder.load(folder, precision, max_tokens, prompts, by_dot)


def _open_graph(
    folder: Path, precision: Precision, max_tokens: int | None = None, prompts: GivenPrompts = OWN
) -> GraphEncoder | None:
    """``open_graph``; None also for a graph whose vectors differ from torch's.

    They are compared once, and the cache keeps the result. Embedded models are known to agree, and
    exports were compared when they were made. Without torch, a graph is not compared.
    """
    digest, agrees = fingerprint(folder), True
    kept = cache_folder() / "compared" / f"{digest}-{VERSION}.json"
    if not (export_folder(digest).exists() or model_files.embedded_name(folder)):
        if kept.is_file():
            agrees = json.loads(kept.read_text(encoding="utf-8"))
        elif has_torch() and find_spec("sentence_transformers"):
            if (graph := open_graph(folder, "fp32")) is None:
                return None
            agrees = _agrees_with_torch(folder, graph)
            with suppress(RevelaError, OSError), atomic_write(kept) as temporary:
                temporary.write_text(json.dumps(agrees), encoding="utf-8")
    return open_graph(folder, precision, max_tokens, prompts) if agrees else None


def _agrees_with_torch(folder: Path, graph: GraphEncoder) -> bool:
    """Whether a folder's graph and sentence-transformers give the same vectors."""
    from revela.encoders.graph_export import difference
    from revela.encoders.torch_model import open_model

    agrees = difference(graph, open_model(folder, device="cpu")) < MAX_DIFFERENCE
    if not agrees:
        log.info(f"{folder} is run by torch, as the vectors of its graph differ from torch's")
    return agrees


def keep_graph(folder: Path, even_with_gpu: bool = False) -> None:
    """Export a retriever that only torch reads, once, so that later runs do not need torch. If it
    cannot be exported, torch continues to read it, and this is logged. Does nothing if there is a
    GPU, unless ``even_with_gpu``.
    """
    if has_gpu() and not even_with_gpu:
        return
    if model_files.table_folder(folder) or export_folder(fingerprint(folder)).exists():
        return
    if f"embedded:{model_files.embedded_name(folder)}" in (MINILM, E5):  # graphs already
        return
    if not has_torch() or _open_graph(folder, "fp32") is not None:
        return
    try:
        from revela.encoders.graph_export import export_to_cache

        export_to_cache(folder)
    except Exception as error:  # any error of the exporter
        log.info(f"{folder} is run by torch ({first_line(error)})")
