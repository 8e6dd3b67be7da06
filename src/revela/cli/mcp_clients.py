"""Configuration files of clients of the Model Context Protocol, and the entry of a server in them.

Files and forms are those of the clients' documentation in 2026.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from revela.errors import RevelaError
from revela.files import atomic_write

ClientName = Literal[
    "claude-code", "claude-desktop", "codex", "cursor", "gemini", "vscode", "windsurf", "zed"
]


class Client(NamedTuple):
    """A client: its file, the table of it that holds servers, and what an entry says beside command
    and arguments. A file that is relative is one of the project in the current folder.
    """

    file: str
    table: str = "mcpServers"
    more: dict[str, str] = {}  # noqa: RUF012  (never changed)


CLIENTS: dict[ClientName, Client] = {
    "claude-code": Client(".mcp.json"),
    "claude-desktop": Client("{settings}/Claude/claude_desktop_config.json"),
    "codex": Client("{codex}/config.toml", "mcp_servers"),
    "cursor": Client("~/.cursor/mcp.json"),
    "gemini": Client("~/.gemini/settings.json"),
    "vscode": Client(".vscode/mcp.json", "servers", {"type": "stdio"}),
    "windsurf": Client("~/.codeium/windsurf/mcp_config.json"),
    "zed": Client("{config}/settings.json", "context_servers", {"source": "custom"}),
}


class Entry(NamedTuple):
    """The entry of a server in a client's file."""

    file: Path
    table: str
    name: str
    server: dict[str, Any]

    @classmethod
    def of(cls, client: ClientName, path: Path, arguments: Sequence[str]) -> Entry:
        """The entry that serves an index or a folder; ``arguments`` follow its path."""
        path = path.resolve()
        script = Path(sys.executable).with_name("revela")
        command = [str(script)] if script.is_file() else [sys.executable, "-m", "revela"]
        file, table, more = CLIENTS[client]
        server: dict[str, Any] = dict(more, command=command[0])
        server["args"] = [*command[1:], "mcp", str(path), *arguments]
        name = re.sub(r"\W+", "-", path.stem.lower()).strip("-") or "documents"
        return cls(_place(file), table, name, server)

    def text(self) -> str:
        """The entry alone, as its file would hold it."""
        if self.file.suffix == ".toml":
            return self._toml()
        return json.dumps({self.table: {self.name: self.server}}, indent=2, ensure_ascii=False)

    def _toml(self) -> str:
        key = self.name if self.name.isascii() else json.dumps(self.name, ensure_ascii=False)
        values = (f"{key} = {_toml_value(value)}\n" for key, value in self.server.items())
        return f"[{self.table}.{key}]\n{''.join(values)}"

    def write(self) -> bool:
        """Add the entry to its file, which keeps all else; False if it was there.

        Raises:
            RevelaError: the file is no valid JSON or TOML, or has another entry of that name.
        """
        text = self._read()
        parse = tomllib.loads if self.file.suffix == ".toml" else json.loads
        try:
            held = parse(text) if text.strip() else {}
        except ValueError as error:
            kind = self.file.suffix[1:].upper()
            raise self._refusal(f"is no valid {kind} ({error})") from error
        servers = held.get(self.table, {}) if isinstance(held, dict) else None
        if not isinstance(servers, dict):
            raise self._refusal(f"has no table {self.table} that can be added to")
        if servers.get(self.name) == self.server:
            return False
        if self.name in servers:
            raise self._refusal(f"has another entry {self.name}")
        whole = {**held, self.table: {**servers, self.name: self.server}}
        if self.file.suffix == ".toml":
            text = f"{text.rstrip()}\n\n{self._toml()}".lstrip()
            if not _is_toml_of(text, whole):
                raise self._refusal(f"holds {self.table} in a form that cannot be added to")
        else:
            text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        with atomic_write(self.file) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return True

    def _read(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        except (OSError, ValueError) as error:
            raise self._refusal(f"cannot be read ({type(error).__name__})") from error

    def _refusal(self, why: str) -> RevelaError:
        return RevelaError(
            f"{self.file} {why}, so it stays as it is: change it by hand; without --write, "
            "--install prints what to add"
        )


def _place(file: str) -> Path:
    """Where a client's file is, on this system."""
    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    settings, zed = config, config / "zed"
    if sys.platform == "darwin":
        settings, zed = home / "Library" / "Application Support", home / ".config" / "zed"
    elif sys.platform == "win32":
        settings = Path(os.environ.get("APPDATA") or home / "AppData" / "Roaming")
        zed = settings / "Zed"
    codex = os.environ.get("CODEX_HOME") or home / ".codex"
    named = file.format(settings=settings, config=zed, codex=codex)
    return Path(named).expanduser().absolute()


def _toml_value(value: str | list[str]) -> str:
    """Strings of JSON are strings of TOML, but for the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_toml_of(text: str, value: dict[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == value
    except tomllib.TOMLDecodeError:
        return False
