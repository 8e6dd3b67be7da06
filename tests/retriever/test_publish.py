"""What ``revela push`` sends: the HTTP of the library is faked, so that a commit is seen whole."""

from __future__ import annotations

import base64
import importlib
import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from sentence_transformers import SentenceTransformer

from revela import Retriever, RevelaError
from revela.cli import app
from revela.model_files import commits
from revela.retriever.card import Card, without_folders
from revela.retriever.publish import published, push

# The client that the library uses: httpx, or httpx2 from version 2 on.
httpx = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.split(".")[0])
HOME = str(Path.home())
PRIVATE = ["/home/bob", "bob", "/mnt/secret", HOME + "/", "invoices of Bob", "checkpoints"]


@pytest.fixture
def trained(saved_retriever, tmp_path):
    """A folder as a run leaves it, on the machine of a user whose paths are long."""
    folder = tmp_path / "my-retriever"
    shutil.copytree(saved_retriever, folder)
    corpus = "/home/bob/my docs/invoices, /mnt/secret/wiki"
    command = f"revela train '/home/bob/my docs/invoices' --out {HOME}/runs/my-retriever"
    settings = {"model": "/mnt/secret/models/smollm2", "lm": "owner/name", "queries_file": ""}
    scores = {"BM25": {"title": 0.9}, "after": {"title": 0.81234, "title + BM25": 0.95}}
    made = dict(command=command, settings=settings, scores=scores, minutes=1.0, steps=3, slots=2)
    card = Card("my-retriever", "{model} learned.", corpus, 3, **made)
    (folder / "README.md").write_text(card.text())
    (folder / "run.json").write_text(json.dumps({"about": {"corpus": corpus, "command": command}}))
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "training.png").write_bytes(b"png")
    (folder / "docs.queries.jsonl").write_text('{"text": "invoices of Bob"}\n')
    for inside in ("checkpoints/step-3", "tracker"):
        (folder / inside).mkdir(parents=True)
        (folder / inside / "model.safetensors").write_bytes(b"state")
        (folder / inside / "config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    path = {"_name_or_path": "/home/bob/models/tiny"}
    (folder / "config.json").write_text(json.dumps({**config, **path}))
    return folder


class Hub:
    """What the hub is asked, and the files of a commit.

    Its answers are {METHOD path, or all: status, or an exception}.
    """

    def __init__(self, monkeypatch, answers=None, files=()):
        self.answers, self.files, self.asked = answers or {}, list(files), []
        self.sent: dict[str, bytes] = {}
        self.deleted: list[str] = []
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        transport = httpx.MockTransport(self.answer)
        huggingface_hub.set_client_factory(lambda: httpx.Client(transport=transport))

    def answer(self, request):
        path, content = request.url.path, request.read()
        if path != "/api/agent-harnesses":  # the hub's library asks it once in some environments
            self.asked.append((request.method, path, content, request.headers))
        status = self.answers.get(f"{request.method} {path}", self.answers.get("all", 200))
        if isinstance(status, Exception):
            raise status
        url, body = "https://huggingface.co/owner/name", {}
        if "/repos/create" in path:
            body = {"url": url}
        elif "/tree/" in path:
            body = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files]
        elif "/preupload/" in path:
            files = [{**file, "uploadMode": "regular"} for file in json.loads(content)["files"]]
            body = {"files": [{**file, "shouldIgnore": False} for file in files]}
        elif "/commit/" in path:
            for row in map(json.loads, content.splitlines()):
                if row["key"] == "file":
                    self.sent[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
                elif row["key"] == "deletedFile":
                    self.deleted.append(row["value"]["path"])
            body = {"commitUrl": f"{url}/commit/{'0' * 40}", "commitOid": "0" * 40}
        elif path.startswith("/api/models/"):
            files = [{"rfilename": name} for name in self.files]
            body = {"id": "owner/name", "siblings": files, "sha": "0" * 40}
        return httpx.Response(status, json=body, request=request)


@pytest.fixture(autouse=True)
def own_client():
    with patch.dict(commits):
        yield
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


def test_exactly_what_loads_it_and_its_card_are_sent(trained, monkeypatch, capsys):
    hub = Hub(monkeypatch)
    app(["push", str(trained), "owner/name"], exit_on_error=False, result_action="return_value")
    assert capsys.readouterr().out == "https://huggingface.co/owner/name\n" and not hub.deleted
    _, path, body, headers = hub.asked[0]
    assert path == "/api/repos/create"
    assert json.loads(body)["visibility"] == "private"
    assert headers["authorization"] == "Bearer hf_secret"
    modules = {Path(name).parts[0] for name in hub.sent if "/" in name}
    listed = [part["path"] for part in json.loads(hub.sent["modules.json"])]
    assert modules == {path for path in listed if any((trained / path).glob("*"))} - {""}
    assert {name for name in hub.sent if "/" not in name} == {
        *("README.md", "modules.json", "config.json", "config_sentence_transformers.json"),
        *("model.safetensors", "sentence_bert_config.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    for name, content in hub.sent.items():
        if name not in ("README.md", "config.json"):
            assert content == (trained / name).read_bytes()
        text = content.decode(errors="replace")
        assert not [word for word in PRIVATE if word in text], name


def test_the_card_has_the_name_of_the_hub_and_no_paths(trained, monkeypatch):
    hub = Hub(monkeypatch)
    push(trained, "owner/name", public=True)
    assert json.loads(hub.asked[0][2])["visibility"] == "public"
    text = hub.sent["README.md"].decode()
    card = ModelCard(text)
    assert card.data.library_name == "sentence-transformers" and "revela" in card.data.tags
    assert "# owner/name\n" in text and 'SentenceTransformer("owner/name")' in text
    assert "| after | 0.812 | 0.950 |" in text and "2 documents of a corpus" in text
    assert "revela train invoices --out my-retriever" in text and "\nsmollm2 learned." in text
    assert "model = 'smollm2'\nlm = 'owner/name'" in text
    assert "Trained on invoices, wiki (3 documents), 3 steps in 60.0 seconds:" in text


def test_what_was_sent_loads(trained, monkeypatch, tmp_path):
    hub, folder = Hub(monkeypatch), tmp_path / "again"
    push(trained, "owner/name")
    for name, content in hub.sent.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    expected = Retriever(trained, precision="fp32").encode_passages(["ocean garden"])
    assert (Retriever(folder, precision="fp32").encode_passages(["ocean garden"]) == expected).all()
    stock = SentenceTransformer(str(folder)).encode_document(["ocean garden"])
    assert abs(stock - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"all": 401}, "the token is not valid: run hf auth login"),
        ({"all": 403}, "the token may not write to owner"),
        ({"all": 500}, "the hub answers 500: try again later"),
        ({"all": httpx.ConnectError("no route")}, "the hub cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(trained, monkeypatch, answers, message):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub = Hub(monkeypatch, answers)
    with pytest.raises(RevelaError, match=f"owner/name is not pushed, {message}"):
        push(trained, "owner/name")
    assert not hub.sent


def test_a_model_that_exists_is_replaced_only_on_request_and_an_empty_one_filled(
    trained, monkeypatch
):
    conflict = {"POST /api/repos/create": 409}
    files = [".gitattributes", "modules.json", "old.bin"]
    hub = Hub(monkeypatch, conflict, files)
    with pytest.raises(RevelaError, match="owner/name exists on the hub: say --update"):
        push(trained, "owner/name")
    assert not hub.sent
    push(trained, "owner/name", update=True)
    assert hub.sent and "old.bin" in hub.deleted and ".gitattributes" not in hub.deleted
    hub = Hub(monkeypatch, conflict, [".gitattributes"])  # as a push that failed leaves it
    push(trained, "owner/name")
    assert "modules.json" in hub.sent


def test_what_is_wrong_here_is_told_before_the_hub_is_asked(trained, monkeypatch, tmp_path):
    hub = Hub(monkeypatch)
    for name, message in [
        ("name", "name has no owner: give owner/name"),
        ("owner/na me", "owner/na me cannot be a name on the hub"),
        ("a/b/c", "a/b/c cannot be a name on the hub"),
    ]:
        with pytest.raises(RevelaError, match=message):
            push(trained, name)
    with pytest.raises(RevelaError, match=r"is no retriever's folder: it has no modules\.json"):
        push(tmp_path, "owner/name")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.utils._auth, "_get_token_from_google_colab", lambda: None)
    with pytest.raises(RevelaError, match="the hub wants a token: run hf auth login"):
        push(trained, "owner/name")
    assert not hub.asked


def test_offline_is_one_sentence(trained, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(RevelaError, match=r"cannot be reached: .* without HF_HUB_OFFLINE"):
        push(trained, "owner/name")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/a/b c/d.txt, /a/b/", "d.txt, b"),
        ("--out=/tmp/x", "--out=x"),
        ("../../bob/y", "y"),
        (f"{HOME}/runs/a", "a"),
        (__file__, "test_publish.py"),
        ("https://host/a/b", None),
        ("hub:owner/name, owner/name@v1", None),
        ("and/or 1/2", None),
        ("a long text " * 99, None),
    ],
)
def test_paths_are_shortened(text, left):
    assert without_folders(text) == (text if left is None else left)


def test_the_first_stage_of_a_contextual_retriever_is_published(trained):
    context = trained / "context"
    shutil.copytree(trained, context, ignore=shutil.ignore_patterns("context", "checkpoints"))
    (context / "rows.safetensors").write_bytes(b"rows")
    (context / "context.json").write_text('{"drawn from": "16 chunks of /home/bob/x"}')
    names = {str(file) for file in published(trained)}
    assert {"context/rows.safetensors", "context/context.json", "context/modules.json"} <= names
    assert not [name for name in names if re.search("run.json|metrics|checkpoints|png", name)]
