"""Bars where one has to wait, and only there."""

from __future__ import annotations

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
