"""What is written is whole, or what was there before; nothing else is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from revela.errors import RevelaError
from revela.files import atomic_write, disk_error, remove_unfinished


def test_a_file_takes_the_place_of_the_old_one_or_leaves_it(tmp_path):
    path = tmp_path / "new" / "scores.json"
    for text in ("first", "second"):
        with atomic_write(path) as temporary:
            temporary.write_text(text)
            assert temporary.name == path.name and not (path.exists() and path.read_text() == text)
        assert path.read_text() == text
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), atomic_write(path) as temporary:
            temporary.write_text("half of the n")
            raise error
    assert path.read_text() == "second" and list(path.parent.iterdir()) == [path]


def test_a_folder_appears_with_all_that_is_in_it(tmp_path):
    path = tmp_path / "index"
    with pytest.raises(ValueError), atomic_write(path) as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("x")
        raise ValueError
    assert not list(tmp_path.iterdir())
    with atomic_write(path) as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("x")
        assert not path.exists()
    said = r"index cannot be used \(directory not empty\)"
    with pytest.raises(RevelaError, match=said), atomic_write(path) as temporary:
        temporary.mkdir()  # one in the way is kept
    assert {*tmp_path.rglob("*")} == {path, path / "part"}


def test_links_modes_and_long_names_stay(tmp_path):
    target, link = tmp_path / "runs" / "scores.json", tmp_path / "latest.json"
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with atomic_write(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    long = tmp_path / ("é" * 120 + ".json")  # a name may have 255 bytes
    with atomic_write(long) as temporary:
        temporary.write_text("x")
    assert long.read_text() == "x"


@pytest.mark.skipif(os.name != "posix", reason="other systems have no umask")
@pytest.mark.parametrize(("umask", "file", "folder"), [(0o22, 0o644, 0o755), (0o77, 0o600, 0o700)])
def test_new_files_are_as_readable_as_the_umask_says(tmp_path, umask, file, folder):
    """Whatever the library that writes them thinks, as safetensors does."""
    paths = [tmp_path / "counts", tmp_path / "model" / "weights", tmp_path / "model"]
    before = os.umask(umask)
    try:
        with atomic_write(paths[0]) as temporary:
            temporary.touch(0o600)
        with atomic_write(paths[2]) as temporary:
            temporary.mkdir()
            (temporary / "weights").touch(0o600)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in paths] == [file, file, folder]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(pipe) as temporary:
        temporary.write_text("scores")
    assert os.read(reader, 100) == b"scores" and pipe.is_fifo()
    os.close(reader)


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be flushed elsewhere")
def test_all_is_on_the_disk_before_the_old_is_gone(tmp_path, monkeypatch):
    events, replace = [], Path.replace
    monkeypatch.setattr(os, "fsync", lambda opened: events.append(os.fstat(opened).st_ino))
    monkeypatch.setattr(Path, "replace", lambda *to: events.append("replace") or replace(*to))
    with atomic_write(tmp_path / "index") as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("x")
        inside = {(temporary / "part").stat().st_ino, temporary.stat().st_ino}
    before, after = events[: events.index("replace")], events[events.index("replace") + 1 :]
    assert set(before) == inside and after == [tmp_path.stat().st_ino]


FULL = OSError(errno.ENOSPC, "No space left on device")


DISK_ERRORS = [
    (FULL, r"scores\.json cannot be written \(no space left on device\): make room there"),
    (ValueError("I/O error: No space left on device (os error 28)"), "make room there"),
    (OSError(errno.EROFS, "x"), r"\(read-only file system\): give this user access"),
    (PermissionError(errno.EACCES, "x", "/else/where"), r"/else/where cannot be used"),
    (FileNotFoundError(errno.ENOENT, "x"), r"scores\.json cannot be used \(no such file"),
]


@pytest.mark.parametrize(("error", "message"), DISK_ERRORS)
def test_a_full_or_closed_disk_is_one_sentence(tmp_path, error, message):
    path = tmp_path / "scores.json"
    path.write_text("old")
    with pytest.raises(RevelaError, match=message), atomic_write(path):
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_other_errors_are_not_about_the_disk():
    others = ValueError("no"), OSError(errno.EIO, "x"), FileNotFoundError(errno.ENOENT, "x")
    assert not any(map(disk_error, others))


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    for name in (".run.json-abc", ".run.jsonl", ".git", "run.json-x"):
        (tmp_path / name).mkdir()
    remove_unfinished(tmp_path, ["run.json"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".git", ".run.jsonl", "run.json-x"]
