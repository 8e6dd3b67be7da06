"""Publish a retriever on the Hugging Face hub: the files that load it, and its card."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from revela.errors import RevelaError
from revela.retriever.context import FOLDER as CONTEXT

# What a Sentence-Transformers folder has at its top, beside the folders of its modules. Whatever
# else lies there is left: checkpoints, metrics, run.json, which names the corpus, and the like.
TOP = (
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *(
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        "model.safetensors.index.json",
    ),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model"),
)
MODULE = ("*.json", "*.safetensors", "*.txt", "*.model")
# Files in which a path may stand. The others hold vocabularies, in which "/usr/lib" is a word.
WITH_PATHS = ("README.md", "config.json", "tokenizer_config.json", "context.json")
PART = r"[^\s'\"`,;()<>|\\/]+"
PATHS = (
    re.compile(r"(?<=')(?:~|\.{1,2})?/[^'\n]+(?=')"),  # quoted: with spaces
    re.compile(rf"(?<![\w/.:~-])(?:~|\.{{1,2}})?/(?:{PART}/+)+(?:{PART})?"),
    re.compile(rf"(?<!\w)[A-Za-z]:\\+(?:{PART}\\+)*(?:{PART})?"),
)


def push(folder: Path, name: str, *, public: bool = False, update: bool = False) -> str:
    """Upload a retriever as ``name`` (owner/name), private unless ``public``; returns its address.

    Of paths in its card and configuration only the last part is kept.

    Args:
        folder: made by ``revela train``, or any Sentence-Transformers folder.
        name: on the hub.
        public: for everyone to see, if the hub does not have it yet.
        update: replace the model that the hub has by this name.

    Raises:
        RevelaError: the folder is no retriever, the name cannot be one, or exists; there is no
            token, or it may not do this; the hub cannot be reached.
    """
    if not (folder / "modules.json").is_file():
        raise RevelaError(f"{folder} is no retriever's folder: it has no modules.json")
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RevelaError(f"{name} cannot be a name on the hub: give owner/name") from error
    if name.count("/") != 1:
        raise RevelaError(f"{name} has no owner: give owner/name")
    if get_token() is None:
        raise RevelaError("the hub wants a token: run hf auth login, or set HF_TOKEN")
    api = HfApi()
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        if not update and {*api.list_repo_files(name)} - {".gitattributes"}:
            raise RevelaError(f"{name} exists on the hub: say --update, or give another name")
        with _staged(folder, name) as staged:
            api.upload_folder(
                repo_id=name,
                folder_path=staged,
                commit_message="Upload a retriever by revela",
                delete_patterns="*" if update else None,
            )
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


@contextmanager
def _staged(folder: Path, name: str) -> Iterator[Path]:
    """A folder of what is published: links to files, and files without paths in their place."""
    known = _corpora(folder)
    with tempfile.TemporaryDirectory(prefix="revela-push-") as made:
        for file in published(folder):
            target = Path(made, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            is_inner = file.parent.name not in ("", CONTEXT)
            if file.name in WITH_PATHS and not (is_inner and file.name == "config.json"):
                text = without_paths((folder / file).read_text(encoding="utf-8"), known)
                is_card = file == Path("README.md")
                target.write_text(_renamed(text, name) if is_card else text, encoding="utf-8")
            else:
                target.symlink_to((folder / file).resolve())
        yield Path(made)


def published(folder: Path) -> list[Path]:
    """The files of a retriever's folder that are published, relative to it, sorted."""
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    inside = {Path(module["path"]) for module in modules if module["path"]}
    patterns = [*TOP, "README.md", *(f"{path}/**/{kind}" for path in inside for kind in MODULE)]
    found = {file for pattern in patterns for file in folder.glob(pattern)}
    files = {file.relative_to(folder) for file in found if file.is_file()}
    if (folder / CONTEXT / "modules.json").is_file():
        files |= {CONTEXT / file for file in published(folder / CONTEXT)}
        files |= {Path(CONTEXT, "rows.safetensors"), Path(CONTEXT, "context.json")}
    return sorted(files)


def without_paths(text: str, known: list[str]) -> str:
    """A text in which each path, of ``known`` or absolute, is only its last part."""
    for path in sorted(known, key=len, reverse=True):
        text = text.replace(path, PurePath(path).name)
    text = re.sub(rf"{re.escape(str(Path.home()))}(?=/)", "~", text)
    for pattern in PATHS:
        text = pattern.sub(lambda m: PurePath(m[0].replace("\\", "/")).name, text)
    return text


def _corpora(folder: Path) -> list[str]:
    """The paths that a run has read, which stand in its card as they are."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        corpora = record["about"]["corpus"].split(", ")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []
    return [path for path in corpora if "/" in path and not path.startswith("hub:")]


def _renamed(card: str, name: str) -> str:
    """A card by ``save.model_card`` under the name on the hub; others stay as they are."""
    title = re.search(r"^# (.+)$", card, re.M)
    if title is None or "revela" not in card:
        return card
    old, new = title[1], name.split("/")[1]
    download = (
        f'from huggingface_hub import snapshot_download\n\nfolder = snapshot_download("{name}")'
    )
    card = card.replace(f'folder = "{old}"', download).replace(f'"{old}"', f'"{name}"')
    card = card.replace(f"model-index:\n- name: {old}\n", f"model-index:\n- name: {new}\n")
    return card.replace(title[0], f"# {name}", 1)
