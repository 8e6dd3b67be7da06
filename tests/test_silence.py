"""Bars where one has to wait, and only there; what libraries say, where nothing else says it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from revela import silence
from revela.errors import RevelaError
from revela.lm.language_model import load_language_model


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


def test_a_large_model_shows_how_much_of_it_is_read(tiny_lm_folder, monkeypatch, capsys):
    silence.silence_libraries()
    load_language_model(tiny_lm_folder, bf16=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(silence, "LARGE_MODEL", 1)
    load_language_model(tiny_lm_folder, bf16=False)
    assert "Loading weights: 100%" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    load_language_model(tiny_lm_folder, bf16=False)
    assert capsys.readouterr().err == ""


def test_what_native_code_says_is_lost_while_stderr_is_silent_and_not_after(capfd):
    def silent(_: object) -> None:
        with silence.silence_stderr():
            os.write(2, b"lost")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(silent, range(50)))
    with suppress(RevelaError), silence.silence_stderr():
        raise RevelaError("it is damaged")
    os.write(2, b"said")
    assert capfd.readouterr().err == "said"


def test_stderr_may_be_closed():
    code = "import os, revela.silence as s; os.close(2)\nwith s.silence_stderr(): print('done')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"done\n"
