"""``revela mcp --install``: the entry of a client, and the file that keeps it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from revela.cli.mcp import mcp
from revela.cli.mcp_clients import CLIENTS
from revela.errors import RevelaError

FILES = {
    "claude-code": ("project/.mcp.json", "mcpServers"),
    "claude-desktop": ("home/.config/Claude/claude_desktop_config.json", "mcpServers"),
    "codex": ("home/.codex/config.toml", "mcp_servers"),
    "cursor": ("home/.cursor/mcp.json", "mcpServers"),
    "gemini": ("home/.gemini/settings.json", "mcpServers"),
    "vscode": ("project/.vscode/mcp.json", "servers"),
    "windsurf": ("home/.codeium/windsurf/mcp_config.json", "mcpServers"),
    "zed": ("home/.config/zed/settings.json", "context_servers"),
}
JSON = '{"theme": "dark", "%s": {"other": {"command": "npx", "args": []}}, "last": "é"}'
TOML = '# mine\nmodel = "o5"\n\n[mcp_servers.other]\ncommand = "npx"  # keep\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("home", "project", "My Notes"):
        (tmp_path / name).mkdir()
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def parsed(file: Path):
    parse = tomllib.loads if file.suffix == ".toml" else json.loads
    return parse(file.read_text(encoding="utf-8"))


def test_every_client_has_a_file():
    assert set(FILES) == set(CLIENTS)


@pytest.mark.parametrize("client", FILES)
def test_an_entry_is_printed_and_written_beside_what_is_there(place, capsys, client):
    file, table = place / FILES[client][0], FILES[client][1]
    notes = Path("../My Notes")
    mcp(notes, install=client, name='the "notes"\\')
    printed = capsys.readouterr()
    assert str(file) in printed.err and not file.exists()
    parse = tomllib.loads if client == "codex" else json.loads
    entry = parse(printed.out)[table]["my-notes"]
    assert Path(entry["command"]).is_absolute()
    assert entry["args"][-3:] == ["mcp", str(place / "My Notes"), '--name=the "notes"\\']

    file.parent.mkdir(parents=True, exist_ok=True)
    before = TOML if client == "codex" else JSON % table
    file.write_text(before, encoding="utf-8")
    file.chmod(0o600)
    mcp(notes, install=client, write=True, name='the "notes"\\')
    held = parsed(file)
    assert held[table].pop("my-notes") == entry
    assert held == parse(before)
    assert client != "codex" or file.read_text().startswith(TOML)
    assert file.stat().st_mode & 0o777 == 0o600 and [*file.parent.iterdir()] == [file]
    written = file.read_bytes()
    mcp(notes, install=client, write=True, name='the "notes"\\')
    assert file.read_bytes() == written and "is already in" in capsys.readouterr().out


@pytest.mark.parametrize("client", ["cursor", "codex"])
@pytest.mark.parametrize("before", [None, "", "\n"])
def test_a_file_that_is_empty_or_missing_is_made(place, client, before):
    file = place / FILES[client][0]
    if before is not None:
        file.parent.mkdir()
        file.write_text(before)
    mcp(place / "My Notes", install=client, write=True)
    assert list(parsed(file)[FILES[client][1]]) == ["my-notes"]


REFUSED = {
    "a comment": ("zed", "// mine\n{}", "is no valid JSON"),
    "a list": ("cursor", "[]", "has no table mcpServers"),
    "a text": ("cursor", '{"mcpServers": "none"}', "has no table mcpServers"),
    "another": ("cursor", '{"mcpServers": {"my-notes": {}}}', "has another entry my-notes"),
    "bytes": ("cursor", b"\xff\xfe{", "cannot be read"),
    "TOML": ("codex", "model = ", "is no valid TOML"),
    "inline": ("codex", 'mcp_servers = {a = {command = "b"}}', "in a form that cannot be added to"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_added_to_stays_as_it_is(place, case):
    client, before, message = REFUSED[case]
    before = before if isinstance(before, bytes) else before.encode()
    file = place / FILES[client][0]
    file.parent.mkdir(parents=True)
    file.write_bytes(before)
    with pytest.raises(RevelaError) as refused:
        mcp(place / "My Notes", install=client, write=True)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(write=True), "--write is for --install"),
        (dict(install="cursor", http=8000), "leave out --http"),
    ],
)
def test_what_is_no_entry_is_refused(place, given, message):
    with pytest.raises(RevelaError, match=message):
        mcp(place / "My Notes", **given)
    with pytest.raises(RevelaError, match="does not exist"):
        mcp(place / "none", install="cursor")
