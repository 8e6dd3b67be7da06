"""Run the readers of HTML, PDF and Office files in a separate process, with limits on memory,
processor time and text: such a file may crash a native library, or unpack to far more text than its
size, and must not end the program that reads a folder.

The process reads requests, one line of JSON each, and answers each with a line: documents, report
and error.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock
from typing import Any

from revela.errors import first_line
from revela.text.readers import common
from revela.text.readers.common import DamagedFile, ReadReport, UnsupportedFile
from revela.text.readers.rows import Fields
from revela.types import Document

Reader = Callable[[Path, str, Fields, ReadReport], Iterator[Document]]
MEMORY = 2**30  # bytes that the process may allocate
SECONDS, SECONDS_PER_MB = 10.0, 60.0  # processor time for a file, and for each MB of its size
# Maximum characters of text per byte of a file, which may be compressed; and how many are read of a
# longer text, as from cells that are repeated thousands of times.
PACKED, GROWN = 20, 2**16
TOO_SLOW = "takes too much processor time to read: split it"
TOO_LARGE = f"needs over {MEMORY >> 30} GB of memory to read, or crashes its reader: split it"
_ERRORS: dict[str, Any] = {e.__name__: e for e in (UnsupportedFile, DamagedFile, OSError)}


def guard(reader: Reader) -> Reader:
    """``reader`` run in the guarded process. It must be a function of a module, make prose without
    metadata, ignore ``fields``, and raise UnsupportedFile with only a reason.
    """

    @functools.wraps(reader)
    def read(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
        documents, counts, error = PROCESS.ask(reader, path, name)
        report.add(ReadReport(**counts))
        for values in documents:
            yield Document(*values)
        if error:
            raise _ERRORS.get(error[0], ValueError)(*error[1])

    return read


class GuardedProcess:
    """The process that runs readers. If a file ends it, the next file starts another."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Popen[str] | None = None

    def ask(self, reader: Reader, path: Path, name: str) -> Any:
        """The answer for a file, for one thread at a time; DamagedFile if it exceeds a limit."""
        seconds = SECONDS + SECONDS_PER_MB * max(0, common.size_and_time(path)[0]) / 2**20
        request = (reader.__module__, reader.__name__, os.fspath(path.absolute()), name, seconds)
        with self._lock:
            if not self._process or self._process.poll() is not None:
                self._process = self._start()
            process, answer = self._process, ""
            assert process.stdin and process.stdout
            try:
                print(json.dumps(request), file=process.stdin, flush=True)
                answer = process.stdout.readline()
            finally:
                if not answer:  # also after Ctrl-C: a late answer would count for the next file
                    process.kill()
                    process.wait()
        if not answer:
            is_slow = process.returncode == -getattr(signal, "SIGPROF", 0)
            raise DamagedFile(TOO_SLOW if is_slow else TOO_LARGE)
        return json.loads(answer)

    @staticmethod
    def _start() -> Popen[str]:
        # Threads of libraries use address space, which counts as memory.
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        env = os.environ | threads | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        return Popen(command, env=env, encoding="ascii", stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


PROCESS = GuardedProcess()


def main() -> None:
    """Answer requests until there are no more."""
    with suppress(ImportError, OSError, ValueError):  # systems without it
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    for line in sys.stdin:
        module, function, path, name, seconds = json.loads(line)
        reader: Reader = getattr(importlib.import_module(module), function)
        with suppress(AttributeError):  # SIGPROF ends this process; waiting does not count
            signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _read(reader, Path(path), name)
        print(json.dumps(answer, default=list), file=answers, flush=True)


def _read(reader: Reader, path: Path, name: str) -> Any:
    """The documents of a file, the counts of the report, and kind and arguments of the error."""
    documents, report, error = list[Any](), ReadReport(), list[Any]()
    try:
        for document in reader(path, name, Fields("", ""), report):
            text = common.squeeze(document.text)
            if len(text) > max(GROWN, PACKED * path.stat().st_size):
                text = text[:GROWN]
                report.note(f"read in part: over {PACKED} characters per byte of the file", name)
            documents.append((document.id, text, document.title))
    except MemoryError:
        raise
    except Exception as caught:  # libraries raise many kinds for broken files
        kind = next((name for name, known in _ERRORS.items() if isinstance(caught, known)), "")
        error = [kind, caught.args if kind else [first_line(caught)]]
    counts = ("skipped", "noted", "examples", "bad_reasons")
    return documents, {name: getattr(report, name) for name in counts}, error
