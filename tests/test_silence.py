"""Bars where one has to wait, and only there; what libraries say, where nothing else says it."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest

from revela import silence
from revela.errors import RevelaError


def slowly(seconds: float) -> None:
    for _ in silence.waiting("near-duplicates", "document", range(3)):
        time.sleep(seconds)


def test_what_takes_long_shows_how_much_is_left_and_what_is_short_shows_nothing(
    monkeypatch, capsys
):
    slowly(0.01)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(silence, "SHOWN_AFTER", 0.1)
    slowly(0.15)
    shown = capsys.readouterr().err
    assert "near-duplicates:" in shown and "/3 [" in shown and "document/s" in shown
    assert shown.endswith("\r")  # gone when it is done
    monkeypatch.setenv("RANK", "1")
    slowly(0.15)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("wrong", [False, True])
def test_what_native_code_says_is_held_and_dropped_where_an_exception_says_it(capfd, wrong):
    with suppress(RevelaError), silence.hold_stderr():
        os.write(2, b"said\n")
        assert not capfd.readouterr().err
        if wrong:
            raise RevelaError("it is damaged")
    assert capfd.readouterr().err == ("" if wrong else "said\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
