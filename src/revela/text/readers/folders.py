"""Walk the files of a folder. Left out are files that git ignores, files that programs install,
build or lock, and files without text.
"""

from __future__ import annotations

import mimetypes
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from stat import S_ISREG
from typing import Any

from revela.text.endings import suffix
from revela.text.readers.common import ReadReport, display_path, open_binary, unreadable_because
from revela.text.readers.encodings import HEAD, is_binary

INSTALLED = frozenset({"node_modules", "bower_components", "venv", "build", "dist", "__pycache__"})
_GENERATED = {
    "minified": re.compile(r"[.-]min\.\w+$|\.(js|css)\.map$"),
    "lock file": re.compile(
        r"\.lock$|^(package-lock\.json|npm-shrinkwrap\.json|pnpm-lock\.yaml|go\.sum)$"
    ),
    "of a dataset": re.compile(r"^(dataset_info|dataset_dict|state)\.json$"),
    "lock of an open document": re.compile(r"^(~\$|\.~lock\.)"),
}
# Ending of an unsupported format -> what to do about it.
_ADVICE = {
    **dict.fromkeys((".doc", ".wpd", ".pages"), "save it as .docx"),
    **dict.fromkeys((".xls", ".xlsb", ".numbers"), "save it as .xlsx"),
    **dict.fromkeys((".ppt", ".pps", ".key"), "save it as .pptx"),
    ".msg": "save it as .eml",
    **dict.fromkeys((".mobi", ".azw", ".azw3", ".chm"), "convert it to .epub"),
    **dict.fromkeys((".ps", ".eps", ".djvu", ".dvi", ".xps"), "convert it to .pdf"),
}
_ARCHIVES = frozenset(".7z .bz2 .deb .jar .rar .rpm .tar .tgz .whl .xz .zip".split())  # noqa: SIM905
_TYPES = mimetypes.MimeTypes(()).types_map[1]  # Python's own, the same on all machines
Rules = list[tuple[str, Any]]  # a folder, and the patterns of its .gitignore
_OF_NO_TEXT = ("image/", "audio/", "video/", "font/")


def walk_files(folder: Path, report: ReadReport) -> Iterator[Path]:
    """Files below a folder, sorted by path, without hidden files and links that lead outside. Each
    folder is read once; one that is hidden or left out is read by a link to it.

    It leaves out, and counts, what git ignores if the folder is in a git work tree, and folders and
    files that programs make (``INSTALLED``, ``_GENERATED``).
    """
    root = folder.resolve()
    if root.parent.name == "snapshots":  # the hub's cache, with links to ../../blobs
        root = root.parent.parent
    for path in sorted(_walk(folder, root, report)):
        if _is_so(path.is_symlink) and not _is_inside(path, root):
            is_there = _is_so(path.exists)
            why = "link to a file outside of the folder" if is_there else "broken link"
            report.skip(why, display_path(path))
        else:
            yield path


def _walk(folder: Path, root: Path, report: ReadReport) -> Iterator[Path]:
    """``walk_files``, unsorted, and with links to files outside."""
    git, tops = GitIgnore(folder), [folder]
    seen = set[str]()  # real paths of folders

    def skip_folder(error: OSError) -> None:
        name = display_path(Path(error.filename))
        report.unlisted.append(name)
        report.skip(unreadable_because(error), name, bad=True)

    def is_read(path: Path, is_folder: bool) -> bool:
        why, is_link = _made_by_programs(path, is_folder), is_folder and _is_so(path.is_symlink)
        if is_link and not _is_inside(path, root):
            why = "link to a folder: give that one too"
        elif not why and git.ignores(path, is_folder and not is_link):
            why = "ignored by git"
        if why:
            report.leave_unread(path, why, f"{path.name}/" if is_folder else "")
        elif is_link:
            tops.append(path)  # its target may be hidden, or left out
        return not (why or is_link)

    for top in tops:
        for parent, folders, names in os.walk(top, onerror=skip_folder):
            here = Path(parent)
            if (real := os.path.realpath(here)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = [n for n in sorted(folders) if n[0] != "." and is_read(here / n, True)]
            yield from (here / n for n in names if n[0] != "." and is_read(here / n, False))


def _is_so(question: Callable[[], bool]) -> bool:
    """The answer of the file system; False if it raises an error, which reading will report."""
    with suppress(OSError):
        return question()
    return False


def _is_inside(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(root)


def _made_by_programs(path: Path, is_folder: bool) -> str:
    """The reason to leave out a file or folder; "" if there is none."""
    if is_folder:
        is_installed = path.name in INSTALLED or _is_so((path / "pyvenv.cfg").is_file)
        is_installed |= _is_so(lambda: any(path.glob("*.lance")))  # an index
        return "made by programs: to read it, name it on the command line" if is_installed else ""
    return next((why for why, pattern in _GENERATED.items() if pattern.search(path.name)), "")


def holds_text(path: Path, report: ReadReport, has_reader: bool) -> bool:
    """Whether a file has a reader or looks like text; if not, count it in the report."""
    ending = suffix(path)
    try:
        is_file = S_ISREG(path.stat().st_mode)
    except OSError:
        return True  # reading it will report the error
    if not is_file:
        report.leave_unread(path, "not a file")
    elif has_reader:
        return True
    elif ending in _ADVICE:
        report.leave_unread(path, _ADVICE[ending])
        report.count_bytes(path, read=False)
    elif ending in _ARCHIVES:
        report.leave_unread(path, "archive: unpack it")
    elif _TYPES.get(ending, "").startswith(_OF_NO_TEXT) and ending != ".ts":
        report.leave_unread(path, "no text")
    else:
        try:
            with open_binary(path) as handle:
                head = handle.read(HEAD)
        except (OSError, EOFError, zlib.error):
            return True  # reading it will report the error
        if not is_binary(head):
            return True
        report.leave_unread(path, "binary")
    return False


class GitIgnore:
    """What git ignores below a folder, by the .gitignore files of its work tree and
    .git/info/exclude. The folder itself is not ignored, and outside of a work tree nothing is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._top = folder, folder.resolve()
        self._rules = dict[Path, Rules | None]()
        above = self._top.parent
        tree = takewhile(lambda path: not _is_work_tree(path), (self._top, *self._top.parents))
        if any(_match(self._rules_in(above), path, True) for path in tree):
            self._rules[above] = []

    def _rules_in(self, folder: Path) -> Rules | None:
        """The rules for files in a folder, its own last; None outside of a work tree."""
        if folder not in self._rules:
            rules: Rules | None = [] if _is_work_tree(folder) else None
            if rules is None and folder != folder.parent:
                rules = self._rules_in(folder.parent)
            self._rules[folder] = None if rules is None else [*rules, *_rules_of(folder)]
        return self._rules[folder]

    def ignores(self, path: Path, is_folder: bool) -> bool:
        """Whether git ignores a file or folder."""
        place = self._top / path.relative_to(self._folder)
        return _match(self._rules_in(place.parent), place, is_folder)


def _is_work_tree(folder: Path) -> bool:
    return _is_so((folder / ".git").exists)


def _rules_of(folder: Path) -> Rules:
    import pathspec

    lines = list[str]()
    for name in (".git/info/exclude", ".gitignore"):
        if _is_so((path := folder / name).is_file):  # reading a pipe would wait for ever
            with suppress(OSError):
                lines += path.read_text("utf-8", "replace").splitlines()
    return [(str(folder), pathspec.GitIgnoreSpec.from_lines(lines))] if lines else []


def _match(rules: Rules | None, path: Path, is_folder: bool) -> bool:
    """Whether a path is ignored, by the last rule that matches it or a folder around it."""
    for folder, spec in reversed(rules or []):
        name = str(path)[len(folder) :].lstrip(os.sep).replace(os.sep, "/")
        found = spec.check_file(f"{name}/" if is_folder else name).include
        if found is not None:
            return bool(found)
    return False
