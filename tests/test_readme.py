"""The README is right: its make targets exist, its commands parse, its Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from revela.cli import app
from revela.cli.main import add_settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(command):
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("revela ")])
def test_commands_parse(command):
    tokens = shlex.split(command)[1:]
    add_settings(tokens)
    function, bound, _ = app.parse_args(tokens, exit_on_error=False)
    assert (
        function.__name__
        in {"train", "evaluate", "probe", "index", "search", "serve", "compare", "report", "push"}
        and bound.arguments
    )


def test_python_runs(tmp_path, monkeypatch, capsys, saved_retriever):
    (tmp_path / "my-retriever").symlink_to(saved_retriever)
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, found)
    assert found["scores"].shape == (1, 2)
    assert len(capsys.readouterr().out.splitlines()) == 2 and (tmp_path / "my-notes").is_dir()


def test_it_has_at_most_90_lines():
    assert len(README.splitlines()) <= 90


def test_both_kinds_of_command_were_found():
    assert sum(c.startswith("make ") for c in COMMANDS) == 2
    verbs = {"train", "eval", "probe", "index", "search", "serve", "compare", "report", "push"}
    assert {c.split()[1] for c in COMMANDS if c.startswith("revela ")} == verbs
