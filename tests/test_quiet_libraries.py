"""Bars where one has to wait, and only there; libraries that start no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from revela import terminal


def slowly(seconds: float) -> None:
    for _ in terminal.progress_bar("near-duplicates", "document", range(3)):
        time.sleep(seconds)


def test_what_takes_long_shows_how_much_is_left_and_else_nothing(monkeypatch, capsys):
    slowly(0.01)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "SHOWN_AFTER", 0.1)
    slowly(0.15)
    shown = capsys.readouterr().err
    assert "near-duplicates:" in shown and "/3 [" in shown and "document/s" in shown
    assert shown.endswith("\r")  # gone when it is done
    monkeypatch.setenv("RANK", "1")
    slowly(0.15)
    assert capsys.readouterr().err == ""


def test_bm25_does_not_start_jax(tmp_path):
    """bm25s starts it where it is installed, and JAX reserves three quarters of a GPU."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('jax was started')")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(*_): ...")
    code = """
from revela.ranking.bm25 import BM25
print(BM25(["the cat sat", "a dog ran"], "en").top_k(["dogs"], k=1)[0].tolist())
import jax
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [sys.executable, "-c", code]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["[[1]]", "jax was started"]


def test_openvino_reports_nothing(tmp_path):
    """It makes an id for Google Analytics in the home of its user, and sends it at each start."""
    code = "from revela.encoders.cpu import openvino_core; openvino_core()"
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    home = {"HOME": str(tmp_path), "USERPROFILE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env | home, check=True)
    assert not (tmp_path / "intel").exists()
