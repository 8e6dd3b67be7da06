"""Atomic writes, locks of folders, and the cache folder.

Files and folders are written under a temporary name, flushed to the disk and renamed, so that even
after a power cut there is either the old one or the new one.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from revela.errors import RevelaError

log = logging.getLogger(__name__)
LOCK = ".lock"
# Errors of a full disk; and these with the errors of a path that cannot be written to.
ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FULL_OR_CLOSED = ROOM | {
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
}
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in the errors of Rust libraries


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a RevelaError that names ``path``."""
    try:
        yield
    except RevelaError:
        raise
    except Exception as error:
        if sentence := disk_error(error, path):
            raise RevelaError(sentence) from error
        raise


def disk_error(error: Exception, path: Path | str = "") -> str:
    """A sentence for an error of a full or read-only disk; "" for any other error.

    Args:
        error: an OSError, or a Rust library's error with an error number.
        path: what is written; "": the file that the error names, if any.
    """
    found = OS_ERROR.search(str(error))
    number = getattr(error, "errno", None) or (int(found[1]) if found else 0)
    # With a path: another process has made a folder there, or nothing can be made there.
    if number not in FULL_OR_CLOSED and not (path and number in (errno.ENOTEMPTY, errno.ENOENT)):
        return ""
    named = getattr(error, "filename", None)
    if not path or (named and not Path(str(named)).is_relative_to(Path(path).parent)):
        path = str(named or "a file")
    why = os.strerror(number).lower()
    if number in ROOM:
        return f"{path} cannot be written ({why}): make room there, or give another place"
    return f"{path} cannot be used ({why}): give this user access, or give another place"


@contextmanager
def writing(folder: Path, wait: bool = False) -> Iterator[None]:
    """Create a folder if necessary, and hold its lock. If another process holds the lock, wait for
    it if ``wait``, else raise RevelaError.
    """
    from filelock import FileLock, Timeout

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        if not wait:
            raise RevelaError(f"another process is writing to {folder}: try again later") from error
        log.info(f"another process is writing to {folder}: waiting until it is done")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_free(out: Path, leftovers: tuple[str, ...] = (), otherwise: str = "") -> None:
    """Raise RevelaError if ``out`` exists, unless it is a folder with only what a process leaves
    that is killed at its start: names that begin with ``leftovers``.
    """
    if out.exists() and not (
        leftovers
        and out.is_dir()
        and all(entry.name.startswith(leftovers) for entry in out.iterdir())
    ):
        raise RevelaError(f"{out} exists: choose another --out{otherwise}")


def check_free_for_run(out: Path) -> None:
    """``check_free`` for a training run, which could be resumed."""
    leftovers = hidden_prefix("run.json"), hidden_prefix("replaced"), LOCK
    check_free(out, leftovers, ", continue that run with --resume, or replace it with --overwrite")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path that replaces ``path`` at the end; on an error ``path`` is unchanged.

    The temporary path has the same name, in a hidden folder beside ``path``; missing parent folders
    are created. A link's target is replaced, a file keeps its mode, and a pipe or device is written
    to directly.

    Args:
        path: a file, which may exist, or a folder, which must be missing or empty.

    Raises:
        RevelaError: the disk is full, or the folder cannot be written to.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "runs", "scores.json")) as temporary:
    ...         _ = temporary.write_text("{}")
    ...     Path(folder, "runs", "scores.json").read_text()
    '{}'
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    if path.is_symlink():
        path = path.resolve()
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = hidden_prefix(path.name)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as hidden:
            temporary = Path(hidden) / path.name
            yield temporary
            if path.is_file():
                temporary.chmod(path.stat().st_mode)
            else:
                make_readable(Path(hidden))
            flush(temporary)
            temporary.replace(path)
            _flush_one(path.parent)


def hidden_prefix(name: str) -> str:
    """Prefix of the hidden folder for ``name``, cut to 50 characters."""
    return f".{name[:50]}-"


def remove_whole(folder: Path) -> None:
    """Remove a folder atomically: rename it first."""
    removed = folder.with_name(f"{hidden_prefix(folder.name)}removed")
    shutil.rmtree(removed, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder.rename(removed), ignore_errors=True)


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    """Remove what ``atomic_write`` and ``remove_whole`` left when a process was killed."""
    for name in names:
        for hidden in folder.glob(f"{glob.escape(hidden_prefix(name))}*"):
            shutil.rmtree(hidden, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file, or a folder with its contents, to the disk."""
    for inside in path.rglob("*"):
        _flush_one(inside)
    _flush_one(path)


def _flush_one(path: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_readable(folder: Path) -> None:
    """Give a folder's contents the modes of new files: safetensors lets only the owner read."""
    new = folder / ".new"
    new.mkdir()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.rmdir()
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def cache_folder() -> Path:
    """The folder for files made from models and texts: $REVELA_CACHE, or ~/.cache/revela."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REVELA_CACHE") or Path(home) / "revela")


def bytes_of(folder: Path) -> int:
    """The size of a folder on disk."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def cached_digest(files: Mapping[str, Path], digest: Any) -> str:
    """Hash each name and its file's contents with ``digest``, a hash object; in hex.

    The result is cached in ``cache_folder()`` by the files' paths, sizes and times.
    """
    states = [digest.name]
    for name, file in files.items():
        found = file.stat()
        times = f"{found.st_mtime_ns}\0{found.st_ctime_ns}"
        states.append(f"{name}\0{file.absolute()}\0{found.st_size}\0{times}")
    state = hashlib.blake2b("\n".join(states).encode(errors="surrogateescape"), digest_size=16)
    cached = cache_folder() / "fingerprints" / state.hexdigest()
    if cached.is_file():
        return cached.read_text(encoding="utf-8")
    for name, file in files.items():
        digest.update(name.encode())
        with file.open("rb") as handle:
            hashlib.file_digest(handle, lambda: digest)  # updates it
    with suppress(RevelaError, OSError), atomic_write(cached) as temporary:
        temporary.write_text(digest.hexdigest(), encoding="utf-8")
    return str(digest.hexdigest())
