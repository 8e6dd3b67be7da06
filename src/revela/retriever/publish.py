"""Publish a retriever on the Hugging Face hub: the files that load it, and its card."""

from __future__ import annotations

import json
from pathlib import Path

from revela.errors import RevelaError
from revela.model_files import CONTEXT, check_safetensors, modules_of
from revela.retriever.card import renamed

# What a Sentence-Transformers folder has at its top, beside the folders of its modules. Nothing
# else is published: no checkpoints, no metrics, no run.json, which names the corpus.
TOP = (
    *("README.md", "modules.json", "config_sentence_transformers.json"),
    *("sentence_bert_config.json", "config.json", "generation_config.json", "router_config.json"),
    *("model*.safetensors", "model.safetensors.index.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("special_tokens_map.json", "added_tokens.json", "sentencepiece.bpe.model"),
    *("vocab.txt", "vocab.json", "merges.txt"),
)
MODULE = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def push(folder: Path, name: str, *, public: bool = False, update: bool = False) -> str:
    """Upload a Sentence-Transformers folder as ``name`` (owner/name), private unless ``public``;
    returns its address. ``update`` replaces the model that the hub has by this name.

    Raises:
        RevelaError: the folder is no retriever, or has weights outside of safetensors; the name is
            invalid or exists; there is no token, or it lacks the right; the hub cannot be reached.
    """
    if not modules_of(folder):
        raise RevelaError(
            f"{folder} is no retriever's folder: it has no modules.json that names modules"
        )
    check_safetensors(folder)
    _check_name(name)
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]

    if get_token() is None:
        raise RevelaError("the hub wants a token: run hf auth login, or set HF_TOKEN")
    try:
        _commit(folder, name, public, update)
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = {
            401: "the token is not valid: run hf auth login",
            403: f"the token may not write to {name.split('/')[0]}: give another owner or token",
        }.get(status, f"the hub answers {status}: try again later")
        raise RevelaError(f"{name} is not pushed, {reason}") from error
    except (OfflineModeIsEnabled, ClientError, ConnectionError) as error:
        raise RevelaError(
            f"{name} is not pushed, the hub cannot be reached: try again with a network, and "
            "without HF_HUB_OFFLINE"
        ) from error
    return f"https://huggingface.co/{name}"


def _check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RevelaError(f"{name} cannot be a name on the hub: give owner/name") from error
    if name.count("/") != 1:
        raise RevelaError(f"{name} has no owner: give owner/name")


def _commit(folder: Path, name: str, public: bool, update: bool) -> None:
    """Make the repository if need be, and replace what it has by one commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    api.create_repo(name, private=not public, exist_ok=True)
    old = {*api.list_repo_files(name)} - {".gitattributes"}
    if old and not update:
        raise RevelaError(f"{name} exists on the hub: say --update, or give another name")
    files = {file.as_posix(): folder / file for file in published(folder)}
    added: dict[str, Path | bytes] = dict(files)
    if card := files.get("README.md"):
        added["README.md"] = renamed(card.read_text(encoding="utf-8"), name).encode()
    if config := files.get("config.json"):
        known = json.loads(config.read_text(encoding="utf-8"))
        if known.pop("_name_or_path", None):  # a path, by earlier versions of transformers
            added["config.json"] = json.dumps(known, indent=2).encode()
    api.create_commit(
        name,
        [
            *(CommitOperationDelete(file) for file in sorted(old - added.keys())),
            *(CommitOperationAdd(file, content) for file, content in added.items()),
        ],
        commit_message="Upload a retriever by revela",
    )


def published(folder: Path) -> list[Path]:
    """The files of a retriever's folder that are published, relative to it, sorted."""
    inside = {place.relative_to(folder) for _, place in modules_of(folder)} - {Path()}
    patterns = [*TOP, *(f"{path}/**/{kind}" for path in inside for kind in MODULE)]
    found = {file for pattern in patterns for file in folder.glob(pattern)}
    files = {file.relative_to(folder) for file in found if file.is_file()}
    if (folder / CONTEXT / "modules.json").is_file():
        files |= {CONTEXT / file for file in published(folder / CONTEXT)}
        files |= {Path(CONTEXT, "rows.safetensors"), Path(CONTEXT, "context.json")}
    return sorted(files)
