"""Links, unreadable folders, pipes and names: what can be read is read, the rest is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import SENTENCE
from revela.text.load import read_corpus

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs links, pipes and users of POSIX")


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{SENTENCE} {name}.")


def ids(folder):
    documents, report = read_corpus([folder], distinct=False, min_words=1)
    return [document.id for document in documents], report


@POSIX
@pytest.mark.parametrize("target", [".versions/3", "venv/docs", "build/a/b", "ignored/3"])
def test_a_link_to_a_folder_that_is_not_read_otherwise_is_read(tmp_path, target):
    write(tmp_path, "b.txt", f"{target}/a.txt", f"{target}/sub/c.txt", f"{target}/.d.txt")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("/ignored/\n")
    (tmp_path / "current").symlink_to(target)
    found, report = ids(tmp_path)
    assert found == ["b.txt", "current/a.txt", "current/sub/c.txt"]
    assert "100.0 %" in report.lines()[0]


@POSIX
def test_every_folder_is_read_once_whatever_links_lead_to_it(tmp_path):
    write(tmp_path, "a/10.txt", "a/1.txt", "a/.1.txt", "a-b.txt")
    write(tmp_path, ".h/2.txt", ".h/deep/3.txt", ".other/4.txt")
    (tmp_path / ".h/up").symlink_to("..")  # round and round
    (tmp_path / ".h/on").symlink_to("../.other")  # from link to link
    (tmp_path / "a/back").symlink_to("../a")
    (tmp_path / "first").symlink_to(".h/deep")
    (tmp_path / "second").symlink_to(".h")
    (tmp_path / "third").symlink_to("second")
    found, report = ids(tmp_path)
    by_links = ["first/3.txt", "second/2.txt", "second/on/4.txt"]
    assert found == ["a/1.txt", "a/10.txt", "a-b.txt", *by_links] and not report.unread


@POSIX
def test_a_link_that_is_left_out_by_its_name_is_named(tmp_path):
    write(tmp_path, ".h/2.txt", "a.txt")
    (tmp_path / "build").symlink_to(".h")
    (tmp_path / "out").symlink_to(tmp_path.parent)
    found, report = ids(tmp_path)
    assert found == ["a.txt"]
    assert {*report.unread} == {
        ("made by programs: to read it, name it on the command line", "build/"),
        ("link to a folder: give that one too", "out/"),
    }


@pytest.fixture
def shared():
    """A folder that another user can enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            Path(parent, name).chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def as_a_user():
    """For root all folders are open: act as nobody, who may not be able to import modules."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "a.txt", "b.csv", "c.jsonl", "sub/d.txt")
        (Path(folder) / "sub/.gitignore").write_text("e.txt")
        ids(Path(folder))
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@POSIX
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o600, 0o100])
def test_a_folder_that_a_user_may_not_read_is_named_and_the_rest_is_read(shared, mode):
    """Without the right to list it, or to reach the files in it, or both."""
    write(shared, "a.txt", "closed/b.txt", "closed/sub/c.txt", "z/d.txt")
    (shared / "closed/e.jsonl").write_text(json.dumps({"text": SENTENCE}))
    (shared / "closed/link.txt").symlink_to("b.txt")
    (shared / "to-closed").symlink_to("closed/sub")
    (shared / "closed").chmod(mode)
    with as_a_user():
        found, report = ids(shared)
    assert [name for name in found if "closed" not in name] == ["a.txt", "z/d.txt"]
    assert report.bad and "closed" in str(report.examples["unreadable, permission denied"])


@POSIX
def test_files_that_a_user_may_not_read_are_named(shared):
    write(shared, "a.txt", "b.txt", "c.csv", "d.jsonl")
    for name in ("b.txt", "c.csv", "d.jsonl"):
        (shared / name).chmod(0)
    with as_a_user():
        found, report = ids(shared)
    assert found == ["a.txt"]
    assert report.examples == {"unreadable, permission denied": ["b.txt", "c.csv", "d.jsonl"]}
    assert report.bytes_unread


@POSIX
def test_a_path_that_is_too_long_is_named_and_the_rest_is_read(tmp_path):
    write(tmp_path, "a.txt")
    here = os.open(tmp_path, os.O_RDONLY)
    name = "d" * 250
    for _ in range(20):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        file = os.open("b.txt", os.O_CREAT | os.O_WRONLY, dir_fd=below)
        os.write(file, SENTENCE.encode())
        os.close(file)
        os.close(here)
        here = below
    os.close(here)
    found, report = ids(tmp_path)
    assert found[0] == "a.txt" and len(found) > 10
    (places,) = (p for reason, p in report.examples.items() if "too long" in reason)
    assert len(places[0]) < 500 and report.bad


@POSIX
def test_pipes_are_not_waited_for(tmp_path):
    write(tmp_path, "a.txt", "sub/b.txt")
    (tmp_path / ".git/info").mkdir(parents=True)
    for name in (".gitignore", ".git/info/exclude", "sub/.gitignore", "c.txt", "d.pdf", "e.doc"):
        os.mkfifo(tmp_path / name)

    def too_late(*_):
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(30)
    try:
        found, report = ids(tmp_path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert found == ["a.txt", "sub/b.txt"]
    assert report.lines()[1:] == ["not read: 1 .txt, 1 .pdf, 1 .doc (not a file)"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_shown_alike_get_numbers(tmp_path):
    for name in (b"caf\xe9.txt", rb"caf\xe9.txt", rb"caf\xe9.txt (2)"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(f"{SENTENCE} {name!r}")
    found, _ = ids(tmp_path)
    assert sorted(found) == [rf"caf\xe9.txt{end}" for end in ("", " (2)", " (3)")]


@POSIX
def test_a_file_that_is_named_like_a_row_of_another_gets_a_number(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"{SENTENCE} One."}))
    (tmp_path / "a.mbox").write_text("From a\nSubject: x\n\nIt has a zebra.\n")
    write(tmp_path, "a.jsonl:1", "a.mbox:1", "other:1")
    found, _ = ids(tmp_path)
    assert found == ["a.jsonl:1", "a.jsonl:1 (2)", "a.mbox:1", "a.mbox:1 (2)", "other:1"]


@POSIX
@pytest.mark.parametrize("sources", [["."], ["rows.jsonl", "README.md"]])
def test_a_row_with_the_id_of_a_file_is_named_by_its_place(tmp_path, monkeypatch, sources):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "README.md", "b.csv:2")
    (tmp_path / "b.csv").write_text(f"id,text\nb.csv:2,{SENTENCE}\n")
    names = ["README.md", "rows.jsonl:4", "b.csv:2", "rows.jsonl:4", "own"]
    rows = [json.dumps({"_id": name, "text": f"{SENTENCE} {n}."}) for n, name in enumerate(names)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    how = dict(distinct=False, min_words=1, rename_repeated=True)
    documents, report = read_corpus(sources, **how)
    found = [document.id for document in documents]
    assert len({*found}) == len(found) and {"README.md", "rows.jsonl:4", "own"} <= {*found}
    assert sum(document.text.endswith("README.md.") for document in documents) == 1
    renamed = [name for name in found if name.startswith("rows.")]
    assert renamed == [f"rows.jsonl:{n}" for n in ((1, 2, 3, 4) if sources == ["."] else (1, 2, 4))]
    assert report.noted["rows with the id of another row or file: their place is their id"]
