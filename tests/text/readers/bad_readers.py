"""Readers of test_guarded.py, in a module that imports little: the process that runs them has 1 GB
of address space, in which torch with CUDA has no place.
"""

from __future__ import annotations

from revela.text.readers import guarded
from revela.text.readers.common import DamagedFile, UnsupportedFile
from revela.types import Document

SENTENCE = "A sentence that has more than five words."


def read_and_abort(path, name, fields, report):
    import os

    if path.name == "a.docx":
        os.abort()
    print("a library prints this")
    yield Document(name, SENTENCE, "A title")


def read_for_ever(path, name, fields, report):
    if path.name == "a.docx":
        while True:
            pass
    yield Document(name, SENTENCE)


def read_into_memory(path, name, fields, report):
    if path.name == "a.docx":
        bytearray(2 * guarded.MEMORY)
    yield Document(name, SENTENCE)


def read_with_remarks(path, name, fields, report):
    report.note("a remark", name)
    report.skip("a damaged page", f"{name}, page 2", bad=True)
    if path.name == "a.docx":
        raise UnsupportedFile("no text in it")
    if path.name == "b.docx":
        raise DamagedFile("over a limit: split it")
    if path.name == "c.docx":
        raise PermissionError(13, "Permission denied")
    raise KeyError("word/document.xml")
