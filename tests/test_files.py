"""What is written is whole, or what was there before; nothing else is left behind."""

from __future__ import annotations

import pytest

from revela.files import atomic_write


def test_a_file_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "new" / "scores.json"
    for text in ("first", "second"):
        with atomic_write(path) as temporary:
            temporary.write_text(text)
            assert temporary.name == path.name and not (path.exists() and path.read_text() == text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "scores.json"
    path.write_text("old")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), atomic_write(path) as temporary:
            temporary.write_text("half of the n")
            raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


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
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == [
        "index",
        "index/part",
    ]


def test_a_folder_in_the_way_is_kept(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "precious").write_text("x")
    with pytest.raises(OSError), atomic_write(tmp_path / "index") as temporary:
        temporary.mkdir()
    assert (tmp_path / "index" / "precious").read_text() == "x" and len(
        list(tmp_path.iterdir())
    ) == 1
