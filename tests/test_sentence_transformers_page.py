"""The snippets of docs/sentence-transformers.md run, in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "sentence-transformers.md").read_text()


def test_its_python_runs(tmp_path, monkeypatch, saved_retriever, tiny_lm_folder):
    pytest.importorskip("mteb")
    (tmp_path / "my-retriever").symlink_to(saved_retriever)
    (tmp_path / "my-language-model").symlink_to(tiny_lm_folder)
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    for block in blocks:
        exec(block, found)
    assert len(blocks) == 3 and (tmp_path / "my-fitted-retriever" / "modules.json").is_file()
    (file,) = re.findall(r"my-run/\S+\.csv", PAGE)
    assert len((tmp_path / file).read_text().splitlines()) == 4
    assert found["model"].settings["query_prompt"] == "query: "


def test_its_commands_parse():
    from revela.cli import app

    commands = re.findall(r"^revela (.*?)(?: +#.*)?$", PAGE, re.M)
    functions = [
        app.parse_args(shlex.split(command), exit_on_error=False)[0] for command in commands
    ]
    assert [function.__name__ for function in functions] == ["push", "index"]
