"""What a person reads in the terminal."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys

import pytest

import revela
import revela.__main__ as entry
from revela.cli import printing
from revela.cli.main import main, print_log, printable
from revela.searching.results import results_of
from revela.searching.snippets import CHARACTERS
from revela.searching.word_search import Words
from revela.text.readers.common import ReadReport
from revela.types import ANSWERS, Chunk, Document, Hit, Hits

LONG = "filler words here " * 40 + "the camshaft turns " + "and then more " * 40


def print_found(hits, query, top=10):
    """Print hits as if they were all that an index has."""
    texts = [hit.text.encode("utf-8", "replace").decode() for hit in hits] or ["?"]
    index = Words([Document(str(i), text) for i, text in enumerate(texts)], 120)
    printing.print_results(results_of(index, query, Hits(hits)), top)


def test_hits_are_shown_from_the_sentence_of_the_words_looked_for_on(capsys, monkeypatch):
    hits = [Hit("a", 0.5, "A title", "short text"), Hit("b", 0.25, "", LONG)]
    print_found(hits, "why does the camshaft (turn")
    first, text, second, found = capsys.readouterr().out.splitlines()
    assert (first, text, second) == ("1. A title (a)  [0.5000]", "   short text", "2. b  [0.2500]")
    assert found.startswith("   … ") and found.endswith(" …")
    assert 0 < found.index("the camshaft") < CHARACTERS // 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_found(hits[1:], "Camshaft")
    assert "\033[1mcamshaft\033[0m" in capsys.readouterr().out
    print_found([], "?")
    assert capsys.readouterr().out == "nothing found\n"


def test_it_is_said_whether_the_first_hit_answers():
    said = list[str]()
    for confidence in (0.9, 0.3, 0.01, None):
        first = Hit("a", 0.5, "", "text", confidence=confidence)
        said.append(ANSWERS[Hits([first, Hit("b", 0.1, "", "")]).answer])
    unknown = ["probably no answer in these documents", "confidence unknown"]
    assert said == ["sure", "perhaps", *unknown]


def test_the_place_of_a_hit_is_named(capsys):
    code = "def f():\n    close(file)\n"
    print_found([Hit("a.py", 0.5, "", code, line=11)], "close a file by path")
    assert capsys.readouterr().out.startswith("1. a.py:12  [0.5000]")
    print_found([Hit("a.pdf", 0.5, "On bees", "Wax.\n\n\fThey dance.", page=3)], "dance")
    assert capsys.readouterr().out.startswith("1. On bees (a.pdf, page 4)  [0.5000]")


def test_equal_texts_are_shown_once_and_leave_no_hole_in_the_numbers(capsys):
    hits = [Hit("a", 0.5, "", "One  text."), Hit("c", 0.4, "", "One text.")]
    hits += [Hit("b", 0.3, "B", "Two."), Hit("d", 0.2, "", "Three.")]
    print_found(hits, "text", top=2)
    assert capsys.readouterr().out.splitlines() == [
        "1. a  [0.5000]",
        "   One text.",
        "   the same text: c",
        "2. B (b)  [0.3000]",
        "   Two.",
    ]


def test_a_group_is_shown_document_by_document_with_each_title_once(capsys):
    members = [Chunk(7, "On bees\n\nBees dance.")]
    members += [Chunk(7, "They find flowers.", "What do bees find?")]
    members += [Chunk(3, "d3 begins"), Chunk(9, "Wax\n\n")]
    printing.print_group("group 1", members, ["On bees", "On bees", "d3", "Wax"])
    assert capsys.readouterr().out.splitlines() == [
        "",
        "group 1: 4 chunks of 3 documents",
        "  d3",
        "    - d3 begins",
        "  On bees",
        "    - Bees dance.",
        "    - They find flowers.",
        "      asked for by: What do bees find?",
        "  Wax",
        "    - (nothing but the title)",
    ]


ORDER = "\u2028\u2029\u202a\u202e\u2066\u2069\u206f\u061c\u200e\u200f"
ESCAPES = f"\033]52;c;cm0gLXJm\a\033[2J\x9b31m\x7f\ud800{ORDER}"


def test_what_a_stranger_wrote_does_not_control_the_terminal(capsys, monkeypatch):
    forged = f"title\n2. another hit  [0.9999]\r{ESCAPES}"
    report = ReadReport()
    report.skip("broken JSON", f"{forged}.jsonl:1", bad=True)
    printing.print_report(report)
    code = f"def f():\n    return 1{ESCAPES}\n"
    print_found([Hit("a", 0.5, forged, f"text {ESCAPES}"), Hit(forged, 0.25, "", code)], "text")
    printing.print_group("group 1", [Chunk(0, ESCAPES, forged)], [forged])
    printing.print_table(forged, ["name", forged], [[forged, 0.5]])
    print_log("stdout")
    # pytest would send what it captures of the log to another process, as UTF-8.
    monkeypatch.setattr(logging.getLogger("revela"), "propagate", False)
    logging.getLogger("revela").info(f"{forged} was read")
    shown = capsys.readouterr().out
    unsafe = rf"[\x00-\x09\x0b-\x1f\x7f-\x9f{ORDER}]"
    assert not re.search(rf"{unsafe}|\ud800", shown) and "\ufffd" in shown
    assert not any(line.startswith("2. another") for line in shown.splitlines())
    printing.print_json([forged.replace("\ud800", ""), "é"])
    written = capsys.readouterr().out
    assert not re.search(unsafe, written) and "é" in written
    assert json.loads(written)[0] == forged.replace("\ud800", "")
    monkeypatch.setattr(sys, "argv", ["revela", "search", "no\033[2Jindex", "a"])
    with pytest.raises(SystemExit):
        main()
    assert "no\ufffd[2Jindex is not an index" in capsys.readouterr().err


def test_marks_of_right_to_left_text_leave_no_holes():
    assert printable("\u200fשלום\u200f, \u202egnp.exe") == "שלום, \ufffdgnp.exe"
    family = "\U0001f468\u200d\U0001f469 می\u200cخواهم"  # joiners
    assert printable(family) == family


def test_names_with_brackets_are_no_markup(capsys):
    printing.print_scores("runs[/a]", ["scifact[dev]", "[/b]"], {"[/x]": {"scifact[dev]": 0.5}})
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("runs[/a]", "scifact[dev]", "[/b]", "[/x]"))


@pytest.mark.skipif(not hasattr(signal, "SIGTERM") or os.name != "posix", reason="needs SIGTERM")
def test_sigterm_removes_temporary_folders(tmp_path):
    """The verb is one that waits; nothing of the corpus stays in TMPDIR."""
    program = (
        "import sys, time\n"
        "from revela.cli.main import app, main\n"
        "from revela.text.spool import arrow_list\n"
        "from revela.types import Document\n"
        "def wait(*_, **__):\n"
        "    documents = arrow_list(Document, [Document('a', 'text')])\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "app.default(wait)\n"
        "sys.argv[1:] = []\n"
        "main()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n" and list(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143 and not list(tmp_path.iterdir())
    finally:
        process.kill()


@pytest.mark.skipif(os.name != "posix", reason="needs SIGPIPE's error")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_nobody_reads_ends_it_in_silence(unbuffered, tmp_path, static_folder):
    (tmp_path / "a.txt").write_text("A zebra.")
    process = subprocess.Popen(
        [sys.executable, "-m", "revela", "search", tmp_path, "zebra", "--model", static_folder],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(60) == 141 and "Error" not in said and "Exception" not in said


def test_ctrl_c_is_silent_while_the_command_line_is_imported(monkeypatch):
    class Interrupted:
        @staticmethod
        def find_spec(name, *_):
            if name == "revela.cli":
                raise KeyboardInterrupt

    monkeypatch.delattr(revela, "cli")
    monkeypatch.delitem(sys.modules, "revela.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 130
